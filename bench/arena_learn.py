"""Learning results on the Arena: train the presets for a fixed time, then play against the bots.

    python -m bench.arena_learn --mode 1v1 --seeds 1 2 3          (half an hour a seed, and some minutes of battles)
    python -m bench.arena_learn --mode 3v3 --seeds 1 2 3          (an hour and a half a seed)
    python -m bench.arena_learn --mode 1v1 --runs RUN [RUN …]     only the battles, of existing runs

A battle is 200 full matches with sides swapped, once with the most probable actions and once with sampled ones, as in training. A
match at the time limit is a draw. The exported policy (onnxruntime) plays the same matches against `medium`. The curve shows the
training matches, in which actions are sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ludus
from bench.train import RESULTS, Row, provenance
from ludus.experiments.export_run import export_checkpoint

PRESETS = {"1v1": "Arena_1v1_PPO", "3v3": "Arena_3v3_PPO"}
MINUTES = {"1v1": 30, "3v3": 90}
GOALS = {("1v1", "medium"): 0.90, ("1v1", "hard"): 0.60, ("3v3", "medium"): 0.75}
OPPONENTS = ("easy", "medium", "hard")
HOW = ("most probable", "drawn", "most probable, ONNX")
JUDGED = "medium"
"""Opponent of the exported policy."""
GAMES = 200
POINTS = 16
"""Points of a curve."""


def train(mode: str, seed: int, minutes: float, directory: Path) -> Path:
    """Train one seed; return its run directory."""
    ludus_command = Path(sys.executable).with_name("ludus")
    words = [
        "train",
        "-p",
        PRESETS[mode],
        "--seed",
        str(seed),
        "--set",
        f"stop.time_s={60 * minutes:g}",
        "--local-dir",
        str(directory),
    ]
    subprocess.run([ludus_command, *words], check=True)
    return max((directory / PRESETS[mode]).iterdir(), key=lambda run: run.stat().st_mtime)


def curve(run: Path) -> list[dict[str, float]]:
    """Return some reports: time, timesteps and win rates of the last matches."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    reports = [row for row in rows if "match/win/medium" in row]
    chosen = [reports[round(i * (len(reports) - 1) / (POINTS - 1))] for i in range(POINTS)] if len(reports) >= POINTS else reports
    names = ("time_s", "timesteps", "fps", *(f"match/win/{who}" for who in OPPONENTS))
    return [{name: round(row[name], 3) for name in names if name in row} for row in chosen]


def evaluate(mode: str, run: Path, games: int) -> Row:
    def against(player: Path, who: str, *, drawn: bool = False) -> Row:
        found = ludus.battle(player, f"rule:{who}", games, mode=mode, seed=1, deterministic=not drawn)
        low, high = found.interval
        print(f"{player.name} against {who}: {found.won} won, {found.lost} lost, {found.drawn} drawn", flush=True)
        return {"won": found.won, "lost": found.lost, "drawn": found.drawn, "low": low, "high": high}

    battles: dict[str, Any] = {HOW[0]: {who: against(run, who) for who in OPPONENTS}}
    battles[HOW[1]] = {who: against(run, who, drawn=True) for who in OPPONENTS}
    with tempfile.TemporaryDirectory() as directory:
        exported = export_checkpoint(run, out=Path(directory) / "policy.onnx")
        assert exported.file is not None, exported.report.reasons
        battles[HOW[2]] = {JUDGED: against(exported.file, JUDGED)}
    config = (run / "config.yaml").read_text()
    seed = next((line.split(":")[1].strip() for line in config.splitlines() if line.strip().startswith("seed:")), "?")
    return {"mode": mode, "seed": seed, "games": games, "battles": battles, "curve": curve(run), "config": config}


def _cell(mode: str, who: str, found: Row, games: int) -> str:
    goal = GOALS.get((mode, who))
    mark = "" if goal is None else " ✓" if found["won"] / games >= goal else " ✗"
    return f"{100 * found['won'] / games:.1f} [{100 * found['low']:.1f}–{100 * found['high']:.1f}]{mark}"


def page(mode: str, rows: list[Row], head: Row) -> str:
    games = rows[0]["games"]
    lines = ["| seed | minutes | timesteps | steps/s | actions | " + " | ".join(f"{who}, % [95 %]" for who in OPPONENTS) + " |"]
    lines.append("|---:|---:|---:|---:|---|" + "---:|" * len(OPPONENTS))
    for row in rows:
        last = row["curve"][-1]
        for how, found in row["battles"].items():
            cells = [_cell(mode, who, found[who], games) if who in found else "" for who in OPPONENTS]
            began = f"| {row['seed']} | {last['time_s'] / 60:.1f} | {last['timesteps']:,.0f} | {last['fps']:,.0f}"
            lines.append(f"{began} | {how} | {' | '.join(cells)} |")
    asked = ", ".join(f"{who} ≥ {100 * goal:.0f} %" for (kind, who), goal in GOALS.items() if kind == mode)
    curves = []
    for row in rows:
        curves += [
            f"\nSeed {row['seed']}, matches of training (100 of each kind before that moment):\n",
            "| s | timesteps | easy | medium | hard |",
        ]
        curves += ["|---:|---:|---:|---:|---:|"]
        for point in row["curve"]:
            found = [point.get(f"match/win/{who}") for who in OPPONENTS]
            shares = ("–" if share is None else f"{100 * share:.0f} %" for share in found)
            curves.append(f"| {point['time_s']:.0f} | {point['timesteps']:,.0f} | {' | '.join(shares)} |")
    return (
        f"# Learning the Arena, {mode}\n\n{head['date']}, commit {head['commit']}, {head['cpu']}\n\n"
        f"`ludus train -p {PRESETS[mode]}`, two cores, time of the start not counted; then {games} matches against each script, sides swapped, the usual "
        f"line-ups. Asked: {asked}. Load of the machine before the battles: {head['load']}.\n\n"
        + "\n".join(lines + curves)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=PRESETS, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--games", type=int, default=GAMES)
    parser.add_argument("--runs", type=Path, nargs="*")
    parser.add_argument("--directory", type=Path, default=Path("runs"))
    asked = parser.parse_args()
    minutes = asked.minutes or MINUTES[asked.mode]
    runs = asked.runs or [train(asked.mode, seed, minutes, asked.directory) for seed in asked.seeds]
    head = provenance() | {"load": round(os.getloadavg()[0], 1)}
    rows = [evaluate(asked.mode, run, asked.games) for run in runs]
    name = f"arena-learn-{asked.mode}"
    (RESULTS / f"{name}.json").write_text(json.dumps(head | {"rows": rows}, indent=1))
    text = page(asked.mode, rows, head)
    (RESULTS / f"{name}.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
