"""Steps per second of a Unity player: Ludus and mlagents-envs take turns in one run, on one machine, with the same player.

    python -m bench.peers.install mlagents_envs        once: its virtual environment
    python -m bench.unity                              everything (about 4 minutes)
    python -m bench.unity --scenes soccer --rounds 2 --seconds 3

The player is the stand-in of the tests (`tests/unity_player`): a small scene whose simulation costs little, so that the time is that of
the trainer's side and of the connection. Its own gRPC client is used with both. A step is one exchange of messages with the player;
all observations, rewards and masks are read, and all agents act.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.peers.peers import GAME_CLIENTS
from bench.peers.run import THREAD_VARIABLES
from bench.train import HERE, RESULTS, Row, provenance
from tests.unity_player.executable import write_player


class Contest(NamedTuple):
    scene: str
    areas: int
    description: str
    recorded: bool = False
    """The player sends messages that it made before."""
    one_core: bool = False
    """The trainer's side and the player share a core, so that neither waits until the other core has woken up."""


_TEAMS = "2 teams × 2 agents, 16 numbers, two branches of 3 actions"
SCENES = {
    "soccer": Contest("soccer", 1, f"{_TEAMS}, simulated"),
    "soccer-one-core": Contest("soccer", 1, f"{_TEAMS}, simulated; trainer's side and player on one core", one_core=True),
    "soccer-recorded": Contest(
        "soccer", 1, f"{_TEAMS}; the player repeats recorded messages, which takes it hardly any time", True
    ),
    "ball": Contest("ball", 12, "12 areas with an agent each, 8 numbers, 2 continuous actions, simulated"),
    "pictures": Contest("pictures", 1, "1 agent, pictures of 3 × 8 × 12 (PNG), 1 × 8 × 12 (raw) and 4 × 8 × 12 (two PNG files)"),
}
JUDGED, FASTER = "soccer", 5.0
WARMUP_STEPS = 50
START_S = 60.0
PEER = GAME_CLIENTS["mlagents_envs"]
NAMES = {"ludus": "Ludus", "mlagents_envs": "mlagents-envs 1.1.0"}


# -- runs -----------------------------------------------------------------------------------------------------------------


def measure_ours(player: Path, port: int, seconds: float) -> Row:
    """Steps per second in this process."""
    import numpy as np

    from ludus.envs.pettingzoo import make_match

    match = make_match("unity", {"file_name": str(player), "base_port": port, "no_graphics": True})
    try:
        actions: dict[str, Any] = {}
        for name, spaces in match.agents.items():
            zeros = np.zeros(spaces.action.shape or (), spaces.action.dtype)
            actions[name] = zeros if zeros.shape else int(zeros)
        now = match.reset(0)

        def step() -> int:
            nonlocal now
            if now.over:
                now = match.reset(0)  # the player goes on; no message is exchanged
            deciding = len(now.turns)
            now = match.step({turn.agent: actions[turn.agent] for turn in now.turns})
            return deciding

        for _ in range(WARMUP_STEPS):
            step()
        steps = agents = 0
        began, cpu = time.perf_counter(), time.process_time()
        while (taken := time.perf_counter() - began) < seconds:
            agents += step()
            steps += 1
        return {
            "steps_per_s": steps / taken,
            "agent_steps_per_s": agents / taken,
            "cpu_share": (time.process_time() - cpu) / taken,
        }
    finally:
        match.close()


def run(name: str, scene: str, seconds: float, directory: Path) -> Row:
    """One run in a process of its own, and how many cores other programs used in the meantime."""
    contest, port = SCENES[scene], _free_port()
    words = ["--recorded"] if contest.recorded else []
    player = write_player(directory, contest.scene, areas=contest.areas, words=words, name=scene)
    if name == "ludus":
        command = [sys.executable, "-m", "bench.unity", "--measure", player, "--port", port]
    else:
        command = [PEER.python, PEER.script(""), player, "--worker-id", port - 5005]
    command += ["--seconds", seconds]
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, "1")
    busy, before, began = _busy_s(), _children_s(), time.monotonic()
    try:
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            timeout=seconds + START_S,
            env=environment,
            cwd=HERE.parent,
            preexec_fn=_use_one_core if contest.one_core else None,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {seconds + START_S:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr or done.stdout)[-500:]}
    others = (_busy_s() - busy - (_children_s() - before)) / (time.monotonic() - began)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row | {"other_cores": round(max(0.0, others), 2)}


def _use_one_core() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _busy_s() -> float:
    """CPU seconds of all programs since the machine was started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


# -- the page -------------------------------------------------------------------------------------------------------------


def page(found: Row) -> str:
    rows: list[Row] = found["rows"]
    others = [row["other_cores"] for row in rows if "other_cores" in row]
    peer = next((row for row in rows if row["contestant"] == "mlagents_envs" and "grpcio" in row), None)
    lines = [
        "# Steps of Unity players",
        "",
        "`python -m bench.unity`",
        "",
        f"{found['date']}, commit {found['commit']}, {found['cpu']}, load before {found['load']}. Other programs used "
        f"{statistics.median(others):.2f} cores during a run (median; {min(others):.2f}–{max(others):.2f}).",
        "",
        f"Exchanges of messages with a player per second: median (lowest–highest) of {found['rounds']} interleaved runs of "
        f"{found['seconds']:g} s{_priority(found)}. The player is the stand-in of the tests, with the same gRPC client for both. CPU: of the trainer's side, per step.",
    ]
    if peer is not None:
        lines += [
            "",
            f"mlagents-envs 1.1.0 runs with grpcio {peer['grpcio']} and the {peer['protobuf']} implementation of protobuf 3.20.3.",
        ]
    lines += ["", "| scene | | steps/s | agent steps/s | CPU µs | cores of other programs |", "|---|---|---:|---:|---:|---:|"]
    verdicts = []
    scenes = [scene for scene in SCENES if any(row["scene"] == scene for row in rows)]
    for scene in scenes:
        for name, label in NAMES.items():
            own = [row for row in rows if (row["scene"], row["contestant"]) == (scene, name)]
            good = [row for row in own if "steps_per_s" in row]
            if good:
                cpu = statistics.median(1e6 * row["cpu_share"] / row["steps_per_s"] for row in good)
                cells = [
                    _spread([row["steps_per_s"] for row in good]),
                    f"{statistics.median(row['agent_steps_per_s'] for row in good):,.0f}",
                    f"{cpu:,.0f}",
                    f"{min(row['other_cores'] for row in good):.2f}–{max(row['other_cores'] for row in good):.2f}",
                ]
                lines.append(f"| {scene} | {label} | {' | '.join(cells)} |")
            elif own:
                lines.append(f"| {scene} | {label} | {own[0]['error'].strip().splitlines()[-1][:80]} | | | |")
        verdicts += _ratio(rows, scene)
    lines += [
        "",
        *(f"- {scene}: {SCENES[scene].description}." for scene in scenes),
        "",
        *verdicts,
    ]
    return "\n".join(lines) + "\n"


def _priority(found: Row) -> str:
    nice = found.get("nice", 0)
    return f" with nice {nice}, so that other programs disturb less" if nice else ""


def _ratio(rows: Sequence[Row], scene: str) -> list[str]:
    """Ratio of the medians, and of the rounds that differ most."""
    ours, theirs = (
        {
            row["round"]: row["steps_per_s"]
            for row in rows
            if (row["scene"], row["contestant"]) == (scene, name) and "steps_per_s" in row
        }
        for name in NAMES
    )
    both = ours.keys() & theirs.keys()
    if not both:
        return []
    ratio = statistics.median(ours.values()) / statistics.median(theirs.values())
    by_round = [ours[number] / theirs[number] for number in both]
    goal = f"; asked: ≥ {FASTER:g}: {'✓' if ratio >= FASTER else '✗'}" if scene == JUDGED else ""
    return [f"- {scene}: Ludus ÷ mlagents-envs: {ratio:.1f} (by rounds {min(by_round):.1f}–{max(by_round):.1f}){goal}"]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", nargs="*", choices=SCENES, default=list(SCENES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--add", action="store_true", help="keep the results of the other scenes")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=5005, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure_ours(asked.measure, asked.port, asked.seconds)))
        return
    rows: list[Row] = []
    head = provenance() | {
        "load": round(os.getloadavg()[0], 1),
        "rounds": asked.rounds,
        "seconds": asked.seconds,
        "nice": os.nice(0),
    }
    file = RESULTS / "unity.json"
    if asked.add and file.exists():
        rows = [row for row in json.loads(file.read_text())["rows"] if row["scene"] not in asked.scenes]
    with tempfile.TemporaryDirectory(prefix="unity-") as directory:
        for number in range(1, asked.rounds + 1):
            for scene in asked.scenes:
                for name in NAMES:
                    row = {"scene": scene, "contestant": name, "round": number} | run(name, scene, asked.seconds, Path(directory))
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    found = head | {"rows": rows}
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")
    text = page(found)
    (RESULTS / "unity.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
