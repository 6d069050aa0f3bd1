"""Learning in a Unity player: the ball on a platform, through ML-Agents' protocol.

    python -m bench.unity_learn --seeds 1 2 3            about 2 minutes a seed

Trains `examples/unity/ball.yaml` in the stand-in player of the tests, whose scene is like ML-Agents' 3DBall: 16 areas, 0.1 for each of
at most 1000 decisions with the ball on the platform, so that 100 is the most. Then every checkpoint plays episodes with its most
probable actions, in a new player with another seed, until one reaches the target. Time counts from the start of the training.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ludus
from bench.peers.run import THREAD_VARIABLES
from bench.train import RESULTS, Row, provenance
from ludus.envs.pettingzoo import make_match
from tests.unity_player.executable import ROOT, write_player

EXAMPLE = ROOT / "examples" / "unity" / "ball.yaml"
AREAS = 16
MATCHES = 2
"""Evaluated players of a checkpoint; each gives one episode per area."""
TARGET, ASKED_S = 99.5, 300.0
EVALUATION_SEED = 1000
BASE_PORT = 26_000


def train(player: Path, seed: int, directory: Path) -> Path:
    """Train one seed; return its run directory."""
    words = ["train", "-f", EXAMPLE, "--seed", seed, "--local-dir", directory / str(seed), "--quiet"]
    words += ["--set", f"config.env_config.file_name={player}", "--set", f"config.env_config.base_port={BASE_PORT}"]
    words += ["--set", f"config.env_config.seed={seed}"]
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, "1")
    subprocess.run([Path(sys.executable).with_name("ludus"), *map(str, words)], check=True, env=environment)
    (run,) = (directory / str(seed)).glob("*/*")
    return run


def play(checkpoint: Path, player: Path) -> list[float]:
    """Returns of the first episode of every area."""
    agent = ludus.load(checkpoint)
    found: list[float] = []
    for number in range(MATCHES):
        settings = {"file_name": str(player), "base_port": BASE_PORT, "no_graphics": True, "seed": EVALUATION_SEED + number}
        match = make_match("unity", settings)
        try:
            returns = dict.fromkeys(match.agents, 0.0)
            ended: dict[str, float] = {}
            now = match.reset(0)
            while not now.over:
                now = match.step({turn.agent: agent.act(turn.observation)[0] for turn in now.turns})
                for each in (*now.departures, *now.turns):
                    returns[each.agent] += each.reward
                for left in now.departures:
                    ended.setdefault(left.agent, returns[left.agent])
            found += ended.values()
        finally:
            match.close()
    return found


def points(run: Path) -> Iterator[tuple[Path, Row]]:
    """Checkpoints in their order, with the report at that moment."""
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for checkpoint in sorted(path for path in (run / "checkpoints").iterdir() if path.name.isdigit()):
        report = next((each for each in reports if each["iterations"] >= int(checkpoint.name)), None)
        if report is not None:
            yield checkpoint, report


def measure(seed: int, directory: Path) -> Row:
    player = write_player(directory, "ball", areas=AREAS)
    run = train(player, seed, directory)
    curve: list[Row] = []
    for checkpoint, report in points(run):
        returns = play(checkpoint, player)
        point = {name: round(report[name], 1) for name in ("time_s", "timesteps", "agent_steps", "fps") if name in report}
        curve.append(
            point | {"mean": round(statistics.mean(returns), 2), "lowest": round(min(returns), 2), "episodes": len(returns)}
        )
        print(json.dumps({"seed": seed} | curve[-1]), flush=True)
        if curve[-1]["mean"] >= TARGET:
            break
    config = (run / "config.yaml").read_text()
    return {
        "seed": seed,
        "reached_s": curve[-1]["time_s"] if curve[-1]["mean"] >= TARGET else None,
        "curve": curve,
        "config": config,
    }


def page(head: Row, rows: list[Row]) -> str:
    lines = [
        "# Learning in a Unity player",
        "",
        "`python -m bench.unity_learn`",
        "",
        f"{head['date']}, commit {head['commit']}, {head['cpu']}, load before {head['load']}.",
        "",
        f"`examples/unity/ball.yaml`, one process and its player with {AREAS} areas, 1 PyTorch thread. Mean return of {AREAS * MATCHES} episodes with "
        f"the most probable actions; 100 is the most, asked: ≥ {TARGET} within {ASKED_S:.0f} s.",
        "",
        "| seed | reached after s | steps of the player | agent steps | mean return | lowest | |",
        "|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        last = row["curve"][-1]
        reached = "–" if row["reached_s"] is None else f"{row['reached_s']:.0f}"
        mark = "✓" if row["reached_s"] is not None and row["reached_s"] <= ASKED_S else "✗"
        lines.append(
            f"| {row['seed']} | {reached} | {last['timesteps']:,.0f} | {last['timesteps'] * AREAS:,.0f} | {last['mean']:.1f} |"
            f" {last['lowest']:.1f} | {mark} |"
        )
    for row in rows:
        lines += ["", f"Seed {row['seed']}:", "", "| s | steps of the player | mean return | lowest |", "|---:|---:|---:|---:|"]
        lines += [
            f"| {point['time_s']:.0f} | {point['timesteps']:,.0f} | {point['mean']:.1f} | {point['lowest']:.1f} |"
            for point in row["curve"]
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    asked = parser.parse_args()
    head: dict[str, Any] = provenance() | {"load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory(prefix="unity-") as directory:
        rows = [measure(seed, Path(directory)) for seed in asked.seeds]
    (RESULTS / "unity-learn.json").write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    text = page(head, rows)
    (RESULTS / "unity-learn.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
