"""What it costs that games are processes: the same training with the Arena inside the sampler, and below a gamecore server.

    python -m bench.pipeline                              decisions/s, interleaved (about ten minutes), then the curves
    python -m bench.pipeline --parts speed --rounds 3
    python -m bench.pipeline --parts curve --seeds 1 2 3 --timesteps 400000

Both are the preset of the mode with two workers and a learner; games are processes of their own, which share the matches of a worker
(`together`), and call it over HTTP. Decisions are those of heroes that are learned from. Speeds are taken from the reports after the first
third of the time; curves are returns of training against `easy`, by timesteps, not by time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.train import RESULTS, Row, provenance
from ludus.gamecore.server.http.app import RunningServer
from ludus.gamecore.server.settings import Settings

PRESETS = {"1v1": "Arena_1v1_PPO", "3v3": "Arena_3v3_PPO"}
WAYS = ("in process", "HTTP")
GOAL = 0.40
POINTS = 8
WORKERS = 2


def trained(way: str, mode: str, seed: int, server: str, directory: Path, stop: dict[str, float], opponent: str) -> list[Row]:
    """The reports of one run."""
    words = ["train", "-p", PRESETS[mode], "--seed", str(seed), "--local-dir", str(directory), "--num-workers", str(WORKERS)]
    changes: dict[str, Any] = {
        "stop": stop,
        "config.num_envs_per_worker": 32 if mode == "1v1" else 48,
        "config.evaluation_duration": 0,
        "config.env_config.opponent": opponent,
        "config.env_config.matchmaking": "fixed",
        **({"env": "gamecore", "config.env_config.mode": mode, "config.env_config.server": server} if way == "HTTP" else {}),
    }
    for key, value in changes.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    subprocess.run([Path(sys.executable).with_name("ludus"), *words], check=True, stdout=subprocess.DEVNULL)
    run = max((directory / PRESETS[mode]).iterdir(), key=lambda path: path.stat().st_mtime)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def speed(reports: list[Row], seconds: float) -> float:
    late = [row for row in reports if row.get("time_s", 0.0) >= seconds / 3 and "timesteps" in row]
    return float((late[-1]["timesteps"] - late[0]["timesteps"]) / (late[-1]["time_s"] - late[0]["time_s"]))


def speeds(rounds: int, seconds: float, server: str) -> list[Row]:
    rows: list[Row] = []
    for number in range(1, rounds + 1):
        for mode in PRESETS:
            for way in WAYS:
                with tempfile.TemporaryDirectory() as directory:
                    reports = trained(way, mode, number, server, Path(directory), {"time_s": seconds}, "medium")
                rows.append({"mode": mode, "way": way, "round": number, "decisions_s": round(speed(reports, seconds))})
                print(rows[-1], flush=True)
    return rows


def curves(seeds: list[int], timesteps: int, server: str) -> list[Row]:
    rows: list[Row] = []
    for seed in seeds:
        for way in WAYS:
            with tempfile.TemporaryDirectory() as directory:
                reports = trained(way, "1v1", seed, server, Path(directory), {"timesteps": timesteps}, "easy")
            told = [row for row in reports if "episode_return_mean" in row]
            points = []
            for k in range(1, POINTS + 1):
                at = [row for row in told if row["timesteps"] <= timesteps * k / POINTS]
                points.append(round(at[-1]["episode_return_mean"], 2) if at else None)
            rows.append({"way": way, "seed": seed, "timesteps": timesteps, "returns": points})
            print(rows[-1], flush=True)
    return rows


def when(part: Row) -> str:
    return f"{part['date']}, commit {part['commit']}, {part['cpu']}, load before {part['load']}."


def page(found: Row) -> str:
    lines = ["# Games as processes, against games inside the sampler", "", "`python -m bench.pipeline`"]
    if part := found.get("speed"):
        rows = part["rows"]
        lines += [
            "",
            f"{when(part)} The presets of the Arena against `medium`, {WORKERS} workers and a learner. Medians of {max(row['round'] for row in rows)} rounds, lowest and highest. Asked: ≥ {GOAL:.2f}.",
            "",
            "| | in process, decisions/s | HTTP, decisions/s | HTTP ÷ in process |",
            "|---|---:|---:|---:|",
        ]
        for mode in PRESETS:
            by_way = {way: [row["decisions_s"] for row in rows if (row["mode"], row["way"]) == (mode, way)] for way in WAYS}
            ratios = [there / here for here, there in zip(*by_way.values(), strict=True)]
            middle = statistics.median(ratios)
            shown = [f"{statistics.median(values):,.0f} ({min(values):,}–{max(values):,})" for values in by_way.values()]
            mark = "✓" if middle >= GOAL else "✗"
            lines.append(f"| {mode} | {' | '.join(shown)} | {middle:.2f} ({min(ratios):.2f}–{max(ratios):.2f}) {mark} |")
    if part := found.get("curve"):
        rows = part["rows"]
        steps = rows[0]["timesteps"]
        lines += ["", f"{when(part)} Mean return of the last 100 matches of training against `easy` in 1v1, by timesteps:", ""]
        lines.append("| | seed | " + " | ".join(f"{steps * k // POINTS:,}" for k in range(1, POINTS + 1)) + " |")
        lines.append("|---|---:|" + "---:|" * POINTS)
        for row in rows:
            shown = ["–" if value is None else f"{value:.1f}" for value in row["returns"]]
            lines.append(f"| {row['way']} | {row['seed']} | {' | '.join(shown)} |")
        for way in WAYS:
            by_time = list(zip(*(row["returns"] for row in rows if row["way"] == way), strict=True))
            lines.append(f"| **{way}** | mean ± sd | {' | '.join(map(_spread, by_time))} |")
    return "\n".join(lines) + "\n"


def _spread(values: tuple[float | None, ...]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.1f} ± {statistics.stdev(known):.1f}" if len(known) > 1 else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=("speed", "curve"), default=["speed", "curve"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--timesteps", type=int, default=400_000)
    asked = parser.parse_args()
    now = provenance() | {"load": round(os.getloadavg()[0], 1)}
    file = RESULTS / "pipeline.json"
    found: Row = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as home:
        server = RunningServer(Settings(state_dir=Path(home), port=0))
        server.start()
        try:
            where = f"127.0.0.1:{server.port}"
            if "speed" in asked.parts:
                found["speed"] = {**now, "rows": speeds(asked.rounds, asked.seconds, where)}
            if "curve" in asked.parts:
                found["curve"] = {**now, "rows": curves(asked.seeds, asked.timesteps, where)}
        finally:
            server.close()
    file.write_text(json.dumps(found, indent=1))
    text = page(found)
    (RESULTS / "pipeline.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
