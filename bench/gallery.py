"""The gallery: every preset trained on its budget, stopped half-way, resumed, and held to its target.

    python -m bench.gallery                            the quick ones, one seed (`make gallery`)
    python -m bench.gallery --presets hopper,pong --seeds 3

The return is that of 20 deterministic episodes (or more: --episodes) of the final policy, after no more steps than the budget
allows; no checkpoint is picked. Results go to `bench/results/gallery.{json,md}`; what stood there of other presets is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ludus.experiments.source import preset_index

RESULTS = Path(__file__).parent / "results"
QUICK = (
    "cartpole",
    "cartpole-dqn",
    "cartpole-lstm",
    "acrobot",
    "mountaincar-continuous",
    "masked",
    "hybrid",
    "tictactoe",
    "simple-spread",
)
Row = dict[str, Any]


class Failed(Exception):
    pass


def train(words: list[str], timeout_s: float) -> dict[str, Any]:
    """`ludus train`; its last line is the result."""
    command = [str(Path(sys.executable).with_name("ludus")), "train", *words, "-q", "--json"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"no end after {timeout_s:.0f} s") from error
    if out.returncode:
        raise Failed((out.stderr or out.stdout).strip()[-500:])
    result: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return result


def evaluated(run_dir: Path) -> tuple[float, int]:
    """(mean return, timesteps) of the last evaluation, which is that of the last checkpoint."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "evaluation/return_mean" in line]
    if not found:
        raise Failed("it was never evaluated")
    return float(found[-1]["evaluation/return_mean"]), int(found[-1]["timesteps"])


def trained(name: str, seed: int, folder: Path, episodes: int, timeout_s: float) -> Row:
    """One seed of one preset: half of the budget, then the other half after a resumption."""
    target = preset_index.read_summary(name).target
    began = time.monotonic()
    ((_, data),) = preset_index.experiments(name).items()
    duration = max(episodes, data["config"].get("evaluation_duration", 0))
    words = ["-p", name, "--seed", str(seed), "--local-dir", str(folder), "--set", f"evaluation_duration={duration}"]
    half = train([*words, "--stop", f"timesteps={target.timesteps // 2}"], timeout_s)
    batch = -(-half["timesteps"] // max(1, half["iterations"]))  # a run ends with the batch that reaches its limit
    limit = max(half["timesteps"] + 1, target.timesteps - batch)
    whole = train(["--resume", half["run_dir"], "--stop", f"timesteps={limit}"], timeout_s)
    gained, steps = evaluated(Path(whole["run_dir"]))
    if steps != whole["timesteps"] or not half["timesteps"] < steps <= target.timesteps + batch:
        raise Failed(f"evaluated after {steps} steps, of {whole['timesteps']} made; the budget is {target.timesteps}")
    return {
        "seed": seed,
        "return": round(gained, 2),
        "timesteps": steps,
        "resumed_at": half["timesteps"],
        "wall_s": round(time.monotonic() - began, 1),
        "fps": whole["fps"],
    }


def exhibit(name: str, seeds: list[int], episodes: int, timeout_s: float) -> Row:
    about = preset_index.read_summary(name)
    row: Row = {
        "preset": name,
        "env": about.env,
        "run": about.run,
        "target": about.target.return_mean,
        "budget": about.target.timesteps,
        "episodes": episodes,
        "seeds": [],
    }
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="ludus-gallery-") as folder:
            try:
                row["seeds"].append(trained(name, seed, Path(folder), episodes, timeout_s))
            except Failed as error:
                row["error"] = f"seed {seed}: {error}"
                break
        print(f"  seed {seed}: {row['seeds'][-1]}", flush=True)
    row |= {"date": time.strftime("%Y-%m-%d"), "commit": _commit()}
    returns = [one["return"] for one in row["seeds"]]
    if returns:
        row |= {"mean": round(statistics.fmean(returns), 2), "lowest": min(returns)}
    row["reached"] = "error" not in row and bool(returns) and row["mean"] >= row["target"]
    return row


def _commit() -> str:
    out = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS)
    return out.stdout.strip() or "unknown"


def table(rows: list[Row]) -> str:
    lines = [
        "| preset | algorithm | budget | target | mean | of seeds | wall s | steps/s | reached |",
        "|---|---|--:|--:|--:|---|--:|--:|---|",
    ]
    for row in rows:
        seeds = row["seeds"]
        walls, speeds = ([one[key] for one in seeds] or [0.0] for key in ("wall_s", "fps"))
        lines.append(
            f"| {row['preset']} | {row['run']} | {row['budget']:,} | {row['target']:g} | {row.get('mean', '–')} "
            f"| {', '.join(str(one['return']) for one in seeds) or '–'} | {statistics.median(walls):.0f} | {statistics.median(speeds):,.0f} "
            f"| {'yes' if row['reached'] else 'NO ' + row.get('error', '')} |"
        )
    return "\n".join(lines)


def save(rows: list[Row]) -> None:
    path = RESULTS / "gallery.json"
    kept = {row["preset"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    kept |= {row["preset"]: row for row in rows}
    path.write_text(json.dumps([kept[name] for name in sorted(kept)], indent=1) + "\n")
    head = "# Gallery\n\nEvery run was stopped at half of its budget and resumed. Returns: deterministic episodes of the final policy.\n"
    head += "Date and commit of each are in gallery.json; times are those of a machine that did other work besides.\n\n"
    (RESULTS / "gallery.md").write_text(head + table([kept[name] for name in sorted(kept)]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="quick", help="names with commas between them, quick, or all")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 1 on")
    parser.add_argument("--episodes", type=int, default=20, help="of the evaluation")
    parser.add_argument("--timeout-s", type=float, default=6 * 3600.0, help="of one half")
    parser.add_argument("--save", action="store_true", help="also when only the quick ones are shown")
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    known = preset_index.names()
    quick = [name for name in QUICK if name in known]
    asked = {"quick": quick, "all": known}.get(args.presets, args.presets.split(","))
    for name in asked:
        preset_index.read_summary(name)  # a misspelt one is refused before hours have passed
    began, rows = time.monotonic(), []
    for name in asked:
        print(f"{name} …", flush=True)
        rows.append(exhibit(name, list(range(1, args.seeds + 1)), args.episodes, args.timeout_s))
        if args.presets != "quick" or args.save:
            save(rows)
    print(f"\n{table(rows)}\n\n{time.monotonic() - began:.0f} s")
    return 0 if all(row["reached"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
