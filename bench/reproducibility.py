"""Short trainings with fixed seeds, one of every training mode, compared with an earlier recording.

    python -m bench.reproducibility --record            # of this checkout; writes bench/results/reproducibility.json
    python -m bench.reproducibility --compare           # this checkout against the recording; exit code 1 if they differ
    python -m bench.reproducibility --compare --python OTHER/.venv/bin/python --mode ppo --mode dqn

The trainings are started by the command `ludus train` of the interpreter `--python`, so that one script drives any checkout.

A recording runs every mode `--repeats` times. A mode is deterministic if all repeats gave the same learning metrics and the same
weights; a comparison demands these, bit by bit. Of the other modes it demands that they end without an error and report the same
metric names. Equality of bits holds for one kind of processor and one version of PyTorch: a comparison prints what differs there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym

ROOT = Path(__file__).parents[1]
RECORDING = ROOT / "bench" / "results" / "reproducibility.json"
TRAINING_TIMEOUT_S = 180.0
CONNECT_TIMEOUT_S = 60.0
GRACE_S = 30.0
EPISODE_STEPS = 200
SESSIONS = 4
SEGMENT_STEPS = 32
UPDATE_PAUSE_S = 0.025

# Values of these depend on the clock, on memory or on the machine; their names are compared, their values are not.
UNREPEATABLE_METRICS = re.compile(r"(^|/)(time_s|fps|\w+_share|\w+_s|waiting|requests|sessions|workers|nodes|unlearned_steps)$")

Report = dict[str, Any]


@dataclass(frozen=True)
class Mode:
    """One training: the words after `ludus train`, and what it needs next to it."""

    name: str
    arguments: tuple[str, ...]
    games: bool = False  # a client of this process plays CartPole over HTTP
    fleet: bool = False  # a learner and workers connected by Redis; needs redis-server
    gamecore: bool = False  # a gamecore server starts the games


@dataclass(frozen=True)
class Outcome:
    """What one training has left behind."""

    names: list[str]  # of all metrics
    reports: list[Report]  # repeatable metrics, one report per update
    weights: dict[str, str]  # SHA-256 of the tensors in each file of the last checkpoint
    seconds: float = 0.0


@dataclass(frozen=True)
class Recording:
    """The outcome of one mode in the recorded checkout. Reports and weights are of the first repeat, if all were equal."""

    deterministic: bool
    names: list[str]  # reported by every repeat
    sometimes: list[str] = field(default_factory=list)  # reported by some repeats only
    reports: list[Report] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)


class TrainingFailed(Exception):
    """A training that did not end with exit code 0 and a checkpoint."""


def settings(**values: Any) -> tuple[str, ...]:
    return tuple(word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}"))


def modes() -> list[Mode]:
    cartpole = ("CartPole-v1", *settings(evaluation_duration=4))
    ppo = (*cartpole, "--stop", "iterations=8", *settings(num_envs_per_worker=8, train_batch_size=512, minibatch_size=128))
    workers = ("--num-workers", "2")
    external = {
        "observation_space": {"type": "Box", "shape": [4]},
        "action_space": {"type": "Discrete", "n": 2},
    }
    games = (
        "external",
        "--stop",
        "iterations=4",
        *settings(train_batch_size=256, rollout_fragment_length=SEGMENT_STEPS, env_config=external),
    )
    every_update = settings(min_time_s_per_iteration=0)  # DQN reports twice a second otherwise
    dqn_settings = settings(training_intensity=4, learning_starts=500, rollout_fragment_length=16, num_envs_per_worker=8)
    dqn = (*cartpole, "--run", "DQN", "--stop", "timesteps=2500", *dqn_settings, *every_update)
    asynchronous = (*cartpole, *settings(num_envs_per_worker=8, train_batch_size=512, rollout_fragment_length=32))
    arena = settings(num_envs_per_worker=8, train_batch_size=512, evaluation_duration=0)
    return [
        Mode("ppo", ppo),
        Mode("ppo-lstm", ("-p", "cartpole-lstm", "--stop", "iterations=6", *settings(evaluation_duration=4))),
        Mode("ppo-workers", (*ppo, *workers)),
        Mode("ppo-pipelined", (*ppo, *workers, *settings(sampling="pipelined"))),
        Mode("ppo-learners", (*ppo, *workers, "--num-learners", "2")),
        Mode("appo", (*asynchronous, "--run", "APPO", "--stop", "iterations=8")),
        Mode("appo-workers", (*asynchronous, *workers, "--run", "APPO", "--stop", "iterations=12")),
        Mode("impala", (*asynchronous, "--run", "IMPALA", "--stop", "iterations=8")),
        Mode("impala-workers", (*asynchronous, *workers, "--run", "IMPALA", "--stop", "iterations=12")),
        Mode("dqn", dqn),
        Mode("dqn-workers", (*dqn, *workers)),
        Mode("external", games, games=True),
        Mode("external-worker", (*games, "--num-workers", "1"), games=True),
        Mode("agents-in-turn", ("-p", "tictactoe", "--stop", "iterations=4", *settings(evaluation_duration=20))),
        Mode("agents-together", ("-p", "simple-spread", "--stop", "iterations=4", *settings(evaluation_duration=8))),
        Mode(
            "arena", ("-p", "Arena_1v1_PPO", "--num-workers", "0", "--stop", "iterations=4", *arena, *settings(sampling="sync"))
        ),
        Mode("arena-pipelined", ("-p", "Arena_1v1_PPO", "--stop", "iterations=4", *arena)),
        Mode("gamecore", ("-p", "Arena_1v1_PPO", "--stop", "iterations=4", *arena, "--set", "env=gamecore"), gamecore=True),
        Mode("fleet", (*ppo, *workers), fleet=True),
        Mode("fleet-async", (*asynchronous, *workers, "--run", "APPO", "--stop", "iterations=12"), fleet=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    file: dict[str, Any] = {"nargs": "?", "type": Path, "const": RECORDING, "metavar": "FILE"}
    action.add_argument("--record", **file, help="write a recording; with --mode only those entries of FILE are replaced")
    action.add_argument("--compare", **file, help="compare with a recording; exit code 1 if anything differs")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter whose `ludus train` is run")
    parser.add_argument("--mode", action="append", choices=[mode.name for mode in modes()], help="only this mode; repeatable")
    parser.add_argument("--repeats", type=int, default=2, help="trainings of each mode in a recording")
    options = parser.parse_args()
    chosen = [mode for mode in modes() if options.mode is None or mode.name in options.mode]
    if options.record is not None:
        return record_modes(options.record, options.python, chosen, options.repeats)
    return compare_modes(options.compare, options.python, chosen)


def record_modes(file: Path, python: Path, chosen: Sequence[Mode], repeats: int) -> int:
    header = {"date": time.strftime("%Y-%m-%d"), **describe_checkout(python), "repeats": repeats}
    entries = {}
    if len(chosen) < len(modes()) and file.exists():
        recorded = json.loads(file.read_text())
        entries = recorded.pop("modes")
        if recorded != header:
            raise SystemExit(f"{file} was recorded as {recorded}, not as {header}: record all modes, or name another file.")
    for mode in runnable_modes(chosen):
        outcomes = [train(mode, python) for _ in range(repeats)]
        recording = summarize(outcomes)
        reason = "" if recording.deterministic else f"; {first_difference(outcomes)}"
        print(f"{mode.name}: deterministic {recording.deterministic} ({outcomes[0].seconds:.1f} s){reason}", flush=True)
        entries[mode.name] = vars(recording)
    file.write_text(format_recording(header, entries))
    return 0


def compare_modes(file: Path, python: Path, chosen: Sequence[Mode]) -> int:
    recorded = json.loads(file.read_text())
    checkout = describe_checkout(python)
    for key in ("machine", "versions"):
        if recorded[key] != checkout[key]:
            print(f"warning: {key} of the recording: {recorded[key]}; here: {checkout[key]}; bits may differ", flush=True)
    failed = 0
    for mode in runnable_modes(chosen):
        if mode.name not in recorded["modes"]:
            print(f"{mode.name}: not in the recording", flush=True)
            continue
        expected = Recording(**recorded["modes"][mode.name])
        try:
            differences = compare(expected, train(mode, python))
        except TrainingFailed as error:
            differences = [str(error)]
        failed += bool(differences)
        equal = "equal bit by bit" if expected.deterministic else "ran to the end, same metric names"
        print(f"{mode.name}: {'; '.join(differences) or equal}", flush=True)
    print(f"{failed} of {len(chosen)} modes differ from commit {recorded['commit']}" if failed else "no differences")
    return 1 if failed else 0


def runnable_modes(chosen: Sequence[Mode]) -> Iterator[Mode]:
    for mode in chosen:
        if mode.fleet and shutil.which("redis-server") is None:
            print(f"{mode.name}: skipped, redis-server is not installed (scripts/tools.sh redis-server)", flush=True)
        else:
            yield mode


def summarize(outcomes: Sequence[Outcome]) -> Recording:
    """Join the repeats of one mode."""
    first = outcomes[0]
    always = set(first.names).intersection(*(outcome.names for outcome in outcomes))
    ever = set().union(*(outcome.names for outcome in outcomes))
    if first_difference(outcomes):
        return Recording(False, sorted(always), sorted(ever - always))
    return Recording(True, first.names, [], first.reports, first.weights)


def first_difference(outcomes: Sequence[Outcome]) -> str:
    first = outcomes[0]
    expected = Recording(True, first.names, [], first.reports, first.weights)
    return next((differences[0] for outcome in outcomes[1:] if (differences := compare(expected, outcome))), "")


def compare(expected: Recording, outcome: Outcome) -> list[str]:
    """List what differs from the recording: metric names, then the first metric, then the weights. Empty if nothing does."""
    differences = []
    if missing := sorted(set(expected.names) - set(outcome.names)):
        differences.append(f"metrics missing: {', '.join(missing)}")
    if added := sorted(set(outcome.names) - set(expected.names) - set(expected.sometimes)):
        differences.append(f"metrics added: {', '.join(added)}")
    if not expected.deterministic:
        return differences
    if value := first_different_value(expected.reports, outcome.reports):
        differences.append(value)
    for name in sorted(expected.weights.keys() | outcome.weights.keys()):
        if expected.weights.get(name) != outcome.weights.get(name):
            differences.append(f"weights differ: {name}")
            break
    return differences


def first_different_value(expected: Sequence[Report], actual: Sequence[Report]) -> str:
    """Describe the earliest value that differs; empty if none does."""
    for before, now in zip(expected, actual, strict=False):
        for name in before:
            if name in now and before[name] != now[name]:
                return f"{name} at iterations={before['iterations']}: {before[name]}, now {now[name]}"
        if before.keys() != now.keys():
            names = ", ".join(sorted(before.keys() ^ now.keys()))
            return f"not in both at iterations={before['iterations']}: {names}"
    return "" if len(expected) == len(actual) else f"{len(expected)} reports, now {len(actual)}"


def read_reports(lines: Sequence[str]) -> tuple[list[str], list[Report]]:
    """Return the names of all metrics, and the repeatable metrics with the lines of one update merged, as evaluations have their own."""
    names: set[str] = set()
    reports: dict[Any, Report] = {}
    for line in lines:
        metrics = json.loads(line)
        names |= metrics.keys()
        kept = {name: value for name, value in metrics.items() if not UNREPEATABLE_METRICS.search(name)}
        reports.setdefault(metrics["iterations"], {}).update(kept)
    return sorted(names), list(reports.values())


def hash_tensors(data: bytes) -> str:
    """Hash names, types, shapes and values of the tensors of a safetensors file, whatever their order and the file's metadata."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    digest = hashlib.sha256()
    for name, tensor in sorted(header.items()):
        begin, end = tensor["data_offsets"]
        digest.update(json.dumps([name, tensor["dtype"], tensor["shape"]]).encode())
        digest.update(data[8 + size + begin : 8 + size + end])
    return digest.hexdigest()


def train(mode: Mode, python: Path) -> Outcome:
    """Run one training in a directory of its own. Raises TrainingFailed if it does not end well."""
    with tempfile.TemporaryDirectory(prefix="ludus-reproducibility-") as directory, contextlib.ExitStack() as stack:
        place = Path(directory)
        run = place / "runs" / mode.name
        command = [*ludus_command(python), "train", *mode.arguments, "--seed", "7", "--quiet", *settings(torch_threads=1)]
        if mode.fleet:
            (place / "fleet.ini").write_text(f"[ludus]\ndata_store = local\nlocal_path = {place / 'runs'}\n")
            command += ["-dc", "-dcp", str(place / "fleet.ini"), "-e", mode.name]
        else:
            command += ["--project", str(place / "runs"), "--trial", mode.name]
        if mode.games:
            port = free_port()
            command += settings(**{"env_config.port": port})
            stack.enter_context(Player(port))
        environment = make_environment(place)
        if mode.gamecore:
            environment["GAMECORE_SERVER_ADDR"] = stack.enter_context(gamecore_server(python, place, environment))
        began = time.monotonic()
        output = run_command(command, place, environment)
        seconds = time.monotonic() - began
        checkpoints = sorted((run / "checkpoints").glob("[0-9]*"))
        if not checkpoints:
            raise TrainingFailed(f"no checkpoint in {run}: {output[-2000:]}")
        names, reports = read_reports((run / "metrics.jsonl").read_text().splitlines())
        weights = {path.name: hash_tensors(path.read_bytes()) for path in sorted(checkpoints[-1].glob("model*.safetensors"))}
        return Outcome(names, reports, weights, seconds)


def make_environment(directory: Path) -> dict[str, str]:
    # One thread: sums of several threads may differ in their last bits with the load of the machine.
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **single, "LUDUS_STATE_DIR": str(directory / "state")}


def run_command(command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> str:
    """Return the output. Raises TrainingFailed for an exit code other than 0 or after the time limit."""
    with start_process(command, directory, environment) as process:
        try:
            output, _ = process.communicate(timeout=TRAINING_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise TrainingFailed(f"not over after {TRAINING_TIMEOUT_S:g} s") from None
    if process.returncode != 0:
        raise TrainingFailed(f"exit code {process.returncode}: {output[-2000:]}")
    return output


@contextlib.contextmanager
def start_process(command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a command that is ended with its block: by SIGTERM, after a grace period by SIGKILL of its process group."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=directory, env=environment, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def gamecore_server(python: Path, directory: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Run `ludus gamecore serve` on a free port; yields its address."""
    port = free_port()
    command = [*ludus_command(python), "gamecore", "serve", "--port", str(port), "--state-dir", str(directory / "gamecore")]
    with start_process(command, directory, environment):
        if not wait_for_port(port, threading.Event()):
            raise TrainingFailed("the gamecore server did not start")
        yield f"127.0.0.1:{port}"


def ludus_command(python: Path) -> list[str]:
    """The installed command next to the interpreter: module names may differ between checkouts."""
    return [str(python.absolute()), str(python.absolute().with_name("ludus"))]


class Player:
    """Plays CartPole over HTTP in a thread, until the server goes away: sessions take turns on one connection, in a fixed order."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)

    def __enter__(self) -> Player:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(CONNECT_TIMEOUT_S)

    def _play(self) -> None:
        if not wait_for_port(self._port, self._closed):
            return
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=CONNECT_TIMEOUT_S)) as connection:
            matches = [self._play_matches(connection, number) for number in range(SESSIONS)]
            with contextlib.suppress(OSError, http.client.HTTPException):
                while not self._closed.is_set():
                    for match in matches:
                        next(match)

    @staticmethod
    def _play_matches(connection: http.client.HTTPConnection, number: int) -> Iterator[None]:
        env = gym.make("CartPole-v1", max_episode_steps=EPISODE_STEPS)
        seed = number
        while True:
            session = f"match-{seed}"
            observation, _ = env.reset(seed=seed)
            post(connection, session, "start", {})
            reward, over, steps = 0.0, False, 0
            while not over:
                reply = post(connection, session, "tick", {"observation": observation.tolist(), "reward": reward})
                # The end of a segment may begin an update, and a tick that came before the server pauses would get the old weights.
                if steps % SEGMENT_STEPS <= 1:
                    time.sleep(UPDATE_PAUSE_S)
                yield
                steps += 1
                observation, earned, terminated, truncated, _ = env.step(reply["action"])
                reward, over = float(earned), terminated or truncated
            last = {"reward": reward, "observation": observation.tolist(), "terminated": terminated, "truncated": truncated}
            post(connection, session, "end", last)
            time.sleep(UPDATE_PAUSE_S)
            seed += SESSIONS


def post(connection: http.client.HTTPConnection, session: str, kind: str, body: Mapping[str, Any]) -> Any:
    connection.request("POST", "/step", json.dumps(body), {"session": session, "step_kind": kind})
    reply = connection.getresponse()
    data = reply.read()
    if reply.status in (410, 503):
        raise ConnectionError("the training is over")
    if reply.status != 200:
        raise ValueError(f"the training answered {reply.status}: {data!r}")
    return json.loads(data or b"{}")


def wait_for_port(port: int, closed: threading.Event) -> bool:
    """Wait until a server listens there. False if it does not in time, or if the event is set first."""
    end = time.monotonic() + CONNECT_TIMEOUT_S
    while time.monotonic() < end and not closed.wait(0.05):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def describe_checkout(python: Path) -> dict[str, Any]:
    code = (
        "import json, sys, gymnasium, ludus, numpy, torch; v = {m.__name__: m.__version__ for m in (torch, numpy, gymnasium)}; "
        "print(json.dumps([ludus.__file__, {'python': sys.version.split()[0], **v}]))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    package, versions = json.loads(done.stdout.splitlines()[-1])
    git = ["git", "-C", str(Path(package).parent)]
    commit = subprocess.run([*git, "log", "-1", "--format=%h", "--", "."], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True).stdout.strip()
    return {"commit": commit + ("-changed" if changed else ""), "versions": versions, "machine": processor()}


def processor() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()


def format_recording(header: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]) -> str:
    """JSON with one line per report, so that a change of a metric is a change of few lines."""
    parts = []
    for name, entry in entries.items():
        fields = []
        for key, value in entry.items():
            text = "[\n   " + ",\n   ".join(map(json.dumps, value)) + "]" if key == "reports" and value else json.dumps(value)
            fields.append(f"   {json.dumps(key)}: {text}")
        parts.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n  }")
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in header.items()]
    return "{\n" + ",\n".join([*lines, ' "modes": {\n' + ",\n".join(parts) + "\n }"]) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
