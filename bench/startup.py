"""How long until it learns: from the start of the process to the end of the first training step, Ludus and RLlib in turn.

    python -m bench.peers.install rllib      once
    python -m bench.startup                  5 rounds (about 5 minutes)

Ludus is started as `ludus train -f FILE`, RLlib by a script of a few lines (2.60 has no command any more); both with the same
environment, network, batch and number of processes. The first step is over when Ludus has written its first report, and when
`algo.train()` has returned.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from bench.peers.peers import PEERS
from bench.peers.run import THREAD_VARIABLES
from bench.train import RESULTS, Row, provenance, spread

ENVS, BATCH = 8, 256
TIMEOUT_S = 180.0
POLL_S = 0.002
GOAL_S, GOAL_SHARE = 4.0, 1 / 3


def experiment(workers: int) -> str:
    """The file that a user would write."""
    config = {
        "num_workers": workers,
        "num_envs_per_worker": ENVS,
        "train_batch_size": BATCH,
        "minibatch_size": BATCH,
        "num_epochs": 1,
        "lr": 3e-4,
        "model": {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh"},
    }
    return json.dumps({"startup": {"env": "CartPole-v1", "run": "PPO", "stop": {"iterations": 1}, "config": config}})


def ludus(workers: int, directory: Path) -> Row:
    file = directory / "experiment.yaml"
    file.write_text(experiment(workers))
    command = [sys.executable, "-m", "ludus.cli.main", "train", "-f", str(file), "--local-dir", str(directory / "runs")]

    def learned() -> bool:
        return any(path.stat().st_size > 0 for path in directory.glob("runs/*/*/metrics.jsonl"))

    return timed(command, directory, learned)


def rllib(workers: int, directory: Path) -> Row:
    script = Path(__file__).parent / "peers" / "rllib_startup.py"
    command = [str(PEERS["rllib"].python), str(script), str(workers), str(ENVS), str(BATCH)]
    return timed(command, directory, lambda: b"first step" in (directory / "stdout").read_bytes())


def timed(command: Sequence[str], directory: Path, learned: Callable[[], bool]) -> Row:
    """Seconds to the first step, and to the end of the process. Files instead of pipes: nobody waits for a reader.

    Modules are compiled once, beside the directories of the runs, as those of an installed package are.
    """
    compiled = directory.parent / "compiled"
    left_out = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= dict.fromkeys(THREAD_VARIABLES, "1") | {"TMPDIR": str(directory), "PYTHONPYCACHEPREFIX": str(compiled)}
    with (directory / "stdout").open("wb") as out, (directory / "stderr").open("wb") as err:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=directory)
        try:
            while not learned():
                if process.poll() is not None and not learned():
                    return {"error": (directory / "stderr").read_text(errors="replace")[-500:] or "it ended without a step"}
                if time.perf_counter() - began > TIMEOUT_S:
                    return {"error": f"no step after {TIMEOUT_S:.0f} s"}
                time.sleep(POLL_S)
            first_s, cpu_s = time.perf_counter() - began, cpu_of(process.pid)
            process.wait(TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)
    return {"first_step_s": round(first_s, 3), "cpu_s": round(cpu_s, 3), "whole_s": round(time.perf_counter() - began, 3)}


def cpu_of(pid: int) -> float:
    """Seconds of all processes of the tree: what a start costs when others want the machine too."""
    found = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found += times.user + times.system + times.children_user + times.children_system
    return found


FIELD: dict[str, tuple[Callable[[int, Path], Row], int]] = {
    "ludus": (ludus, 0),
    "rllib": (rllib, 0),
    "ludus, 2 workers": (ludus, 2),
    "rllib, 2 env runners": (rllib, 2),
}


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| | runs | s to the first step | ÷ rllib | CPU s until then, all processes | s in all |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    medians = {}
    for name, (_, workers) in FIELD.items():
        keys = ("first_step_s", "cpu_s", "whole_s")
        first, cpu, whole = ([row[key] for row in rows if row["who"] == name and key in row] for key in keys)
        if not first:
            lines.append(f"| {name} | 0 | – | – | – | {next((row['error'] for row in rows if row['who'] == name), '')[-80:]} |")
            continue
        medians[name] = statistics.median(first)
        rival = next((r for r, (start, w) in FIELD.items() if start is rllib and w == workers), "")
        others = [row["first_step_s"] for row in rows if row["who"] == rival and "first_step_s" in row]
        ratio = f"{medians[name] / statistics.median(others):.2f}" if others else "–"
        lines.append(f"| {name} | {len(first)} | {spread(first, 2)} | {ratio} | {spread(cpu, 2)} | {spread(whole, 2)} |")
    if "ludus" in medians and "rllib" in medians:
        share = medians["ludus"] / medians["rllib"]
        met = medians["ludus"] <= GOAL_S and share <= GOAL_SHARE
        lines.append(f"\nGoal: at most {GOAL_S:g} s and {GOAL_SHARE:.2f} of RLlib's: {'reached' if met else 'missed'}.")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(FIELD), help="Names of the field.")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="startup-", ignore_cleanup_errors=True) as place:
        for number in range(args.rounds + 1):  # the first round warms the caches, for everybody, and does not count
            for name in args.only:
                start, workers = FIELD[name]
                directory = Path(place) / f"{number}-{name[:1]}{workers}"
                directory.mkdir()
                row = {"who": name, "round": number} | start(workers, directory)
                print(json.dumps(row), flush=True)
                if number:
                    rows.append(row)
    text = table(rows)
    head = provenance()
    how = (
        f"From the start of the process to the end of the first training step: CartPole-v1, {ENVS} environments per process, one "
        f"update of {BATCH} steps, 2×64 tanh. Median [quartiles] of {args.rounds} interleaved rounds after one that is not counted."
    )
    page = f"# Start-up\n\n{head['date']}, commit {head['commit']}, {head['cpu']}\n\n{how}\n\n{text}\n"
    if args.rounds >= 5 and args.only == list(FIELD):
        (RESULTS / "startup.json").write_text(json.dumps(head | {"rows": rows}, indent=1))
        (RESULTS / "startup.md").write_text(page)
    print(f"\n{page}")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
