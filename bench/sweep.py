"""What a sweep costs: the same trials by `ludus tune`, and by hand with `ludus train`, two at a time and one by one.

Run as `python -m bench.sweep [--trials 8] [--seconds 60] [--concurrency 2]`. All train the same number of steps, which take about
`--seconds` each when they are measured before. The ratio is the sweep's time over (the sum of the times by hand ÷ concurrency);
what Ray needs to start is reported apart. Kept in `bench/results` with date and commit if there were 8 trials of 60 s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.transport import keep

SETTINGS = {"num_envs_per_worker": 16, "train_batch_size": 2048, "minibatch_size": 256, "evaluation_duration": 0}
CALIBRATION_S = 8
LUDUS = [sys.executable, "-m", "ludus.cli.main"]


def by_hand(directory: Path, seed: int, stop: str) -> dict[str, Any]:
    """One training, as one types it; its whole time, from the shell's view."""
    sets = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    words = ["train", "CartPole-v1", "--seed", str(seed), "--stop", stop, "--local-dir", str(directory), "--json", "-q", *sets]
    began = time.perf_counter()
    done = subprocess.run([*LUDUS, *words], capture_output=True, text=True, timeout=3600, check=True)
    return {"seconds": time.perf_counter() - began, **json.loads(done.stdout.splitlines()[-1])}


def side_by_side(directory: Path, seeds: Sequence[int], stop: str, concurrency: int) -> tuple[float, list[dict[str, Any]]]:
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as threads:
        rows = list(threads.map(lambda seed: by_hand(directory, seed, stop), seeds))
    return time.perf_counter() - began, rows


def swept(directory: Path, trials: int, timesteps: int, concurrency: int) -> dict[str, Any]:
    experiment = {"env": "CartPole-v1", "run": "PPO", "stop": {"timesteps": timesteps}, "num_samples": trials, "config": SETTINGS}
    file = directory / "sweep.yaml"
    file.write_text(json.dumps({"sweep": experiment}))  # which is YAML
    words = ["tune", "-f", str(file), "--local-dir", str(directory), "--json", "-q", "--max-concurrent", str(concurrency)]
    began = time.perf_counter()
    done = subprocess.run([*LUDUS, *words], capture_output=True, text=True, timeout=7200, check=True)
    return {"seconds": time.perf_counter() - began, **json.loads(done.stdout.splitlines()[-1])}


def measure(trials: int, seconds: float, concurrency: int, one_by_one: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _, tried = side_by_side(directory / "tried", range(concurrency), f"time_s={min(CALIBRATION_S, seconds)}", concurrency)
        timesteps = int(seconds * sum(row["fps"] for row in tried) / len(tried))
        print(f"{timesteps:,} steps take about {seconds:g} s", flush=True)
        stop = f"timesteps={timesteps}"
        wall_together, together = side_by_side(directory / "together", range(trials), stop, concurrency)
        print(f"by hand, {concurrency} at a time: {wall_together:.1f} s", flush=True)
        sweep = swept(directory, trials, timesteps, concurrency)
        print(f"by a sweep: {sweep['wall_s']:.1f} s, and {sweep['startup_s']:.1f} s for Ray to start", flush=True)
        if one_by_one:
            wall_alone, alone = side_by_side(directory / "alone", range(trials), stop, 1)
            print(f"by hand, one by one: {wall_alone:.1f} s", flush=True)
    finished = [row["status"] for row in sweep["trials"]]
    assert finished == ["finished"] * trials, finished
    row = {
        "trials": trials,
        "concurrency": concurrency,
        "timesteps": timesteps,
        "by_hand_together_s": round(wall_together, 2),
        "shortest_trial_s": round(min(r["seconds"] for r in together), 2),
        "sweep_s": round(sweep["wall_s"], 2),
        "ray_start_s": round(sweep["startup_s"], 2),
        "command_s": round(sweep["seconds"], 2),
        "ratio_to_together": _ratio(sweep, together, concurrency),
    }
    if one_by_one:
        row |= {"by_hand_one_by_one_s": round(wall_alone, 2), "ratio_to_one_by_one": _ratio(sweep, alone, concurrency)}
    return row


def _ratio(sweep: dict[str, Any], by_hand: list[dict[str, Any]], concurrency: int) -> float:
    return round(float(sweep["wall_s"]) / (sum(row["seconds"] for row in by_hand) / concurrency), 3)


def table(row: dict[str, Any]) -> str:
    lines = [
        f"| {row['trials']} trials of {row['timesteps']:,} steps of CartPole-v1, {row['concurrency']} at a time | seconds |",
        "|---|---:|",
        f"| by hand, {row['concurrency']} at a time | {row['by_hand_together_s']} |",
        f"| by hand, one by one | {row.get('by_hand_one_by_one_s', 'not run')} |",
        f"| `ludus tune`, all trials | {row['sweep_s']} |",
        f"| Ray's start, apart | {row['ray_start_s']} |",
        f"| the whole command | {row['command_s']} |",
        "",
        f"Sweep ÷ (sum of the trials by hand ÷ {row['concurrency']}): **{row['ratio_to_together']}** "
        f"(run {row['concurrency']} at a time), **{row.get('ratio_to_one_by_one', 'not measured')}** (run one by one).",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=65.0, help="that a trial takes, about")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--skip-one-by-one", action="store_true", help="half of the time of the whole")
    args = parser.parse_args(argv)
    row = measure(args.trials, args.seconds, args.concurrency, not args.skip_one_by_one)
    print(json.dumps(row, indent=1))
    how = "The same seeds and settings by `ludus tune` and by `ludus train`; a trial's time is that of its process, imports included."
    complete = args.trials >= 8 and row["shortest_trial_s"] >= 60
    keep("sweep", complete, [row], table(row), how)
    return 0


if __name__ == "__main__":
    sys.exit(main())
