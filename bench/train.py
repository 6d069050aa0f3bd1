"""Training speed, side by side: Ludus and its peers take turns in one run, on one machine.

    python -m bench.peers.install            once: a venv for each peer
    python -m bench.train                    everything (about an hour)
    python -m bench.train --parts equal      frames/s at equal settings (CartPole)
    python -m bench.train --parts tuned      seconds to a mean return of 475, each with its own settings
    python -m bench.train --parts pong       frames/s at equal settings (ALE Pong)
    python -m bench.train --parts async-pong async-doom   asynchronous training with two workers (about 15 minutes)

Rounds are interleaved: every contestant runs once before any runs twice. Tables show medians and quartiles, and are kept with
date and commit in `bench/results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.peers.peers import PEERS
from bench.peers.run import THREAD_VARIABLES, run_peer

HERE = Path(__file__).parent
RESULTS = HERE / "results"
Row = dict[str, Any]


def ours(task: str, mode: str, seed: int, *, max_seconds: float, threads: int, timeout_s: float) -> Row:
    options = ["--task", task, "--mode", mode, "--seed", str(seed), "--max-seconds", str(max_seconds)]
    return _script("ludus", ["-m", "bench.ours", *options, *_target(mode)], threads, timeout_s)


def ceiling(task: str, threads: int) -> Row:
    return _script("composed ceiling", ["-m", "bench.ceilings", "--task", task], threads, 300)


def _script(name: str, words: list[str], threads: int, timeout_s: float) -> Row:
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads))
    began = time.monotonic()
    try:
        out = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=HERE.parent
        )
    except subprocess.TimeoutExpired:
        return {"peer": name, "error": f"no end after {timeout_s:.0f} s"}
    if out.returncode:
        return {"peer": name, "error": out.stderr[-500:]}
    return json.loads(out.stdout.splitlines()[-1]) | {"wall_s": round(time.monotonic() - began, 3)}


def _target(mode: str) -> list[str]:
    return ["--target", "475" if mode == "tuned" else "1000000"]


def peer(name: str, task: str, mode: str, seed: int, *, max_seconds: float, threads: int, timeout_s: float) -> Row:
    target = 475.0 if mode == "tuned" else 1e6
    return run_peer(
        name,
        task,
        mode,
        seed,
        max_seconds=max_seconds,
        max_frames=10_000_000,
        target=target,
        threads=threads,
        timeout_s=timeout_s,
    )


def interleaved(contestants: dict[str, Callable[[int], Row]], rounds: int) -> list[Row]:
    rows: list[Row] = []
    for seed in range(1, rounds + 1):
        for name, run in contestants.items():
            row = run(seed) | {"peer": name, "round": seed}
            rows.append(row)
            print(
                json.dumps(
                    {
                        k: row.get(k)
                        for k in ("round", "peer", "fps", "cores", "time_to_target_s", "eval_mean", "error", "skipped")
                    }
                ),
                flush=True,
            )
    return rows


def contestants(task: str, mode: str, names: Iterable[str], max_seconds: float) -> dict[str, Callable[[int], Row]]:
    threads = 2 if task == "pong" else 1
    settings = {"max_seconds": max_seconds, "threads": threads, "timeout_s": max_seconds + 120}
    found: dict[str, Callable[[int], Row]] = {"ludus": lambda seed: ours(task, mode, seed, **settings)}
    for name in names:
        found[name] = lambda seed, name=name: peer(name, task, mode, seed, **settings)  # type: ignore[misc]
    return found


def asynchronous(task: str, max_seconds: float) -> dict[str, Callable[[int], Row]]:
    """Two workers, each step learned from once, one gradient step per 1024; the plain loop has both cores to itself, too."""
    settings = {"max_seconds": max_seconds, "threads": 2, "timeout_s": max_seconds + 150}
    field: dict[str, Callable[[int], Row]] = {"ludus": lambda seed: ours(task, "appo", seed, **settings)}
    rivals = (
        ("cleanrl loop", "cleanrl", "appo"),
        ("sample_factory appo", "sample_factory", "appo"),
        ("rllib appo", "rllib", "appo"),
        ("rllib impala", "rllib", "impala"),
    )
    for name, library, mode in rivals:
        field[name] = lambda seed, library=library, mode=mode: peer(library, task, mode, seed, **settings)  # type: ignore[misc]
    return field


# -- tables -------------------------------------------------------------------------------------------------------------


def spread(values: list[float], digits: int = 0) -> str:
    if not values:
        return "–"
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
    middle = statistics.median(ordered)
    return f"{middle:,.{digits}f} [{low:,.{digits}f}–{high:,.{digits}f}]"


def column(rows: list[Row], name: str, key: str) -> list[float]:
    return [float(r[key]) for r in rows if r["peer"] == name and r.get(key) is not None]


def names_in(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(r["peer"] for r in rows))


def speed_table(rows: list[Row]) -> str:
    lines = ["| | runs | env steps/s | steps per CPU-s | peak memory MB | ludus ÷ this |", "|---|---|---|---|---|---|"]
    mine = statistics.median(column(rows, "ludus", "fps"))
    for name in names_in(rows):
        fps = column(rows, name, "fps")
        if not fps:
            reason = next(
                (r.get("skipped") or r.get("error", "")).strip().splitlines()[-1][:80] for r in rows if r["peer"] == name
            )
            lines.append(f"| {name} | 0 | – | – | – | {reason} |")
            continue
        per_cpu = [r["frames"] / r["cpu_s"] for r in rows if r["peer"] == name and r.get("cpu_s")]
        ratio = mine / statistics.median(fps)
        lines.append(
            f"| {name} | {len(fps)} | {spread(fps)} | {spread(per_cpu)} | {spread(column(rows, name, 'peak_rss_mb'))} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def async_table(rows: list[Row]) -> str:
    """Agent steps are steps that were learned from; each is four frames of the game, for everybody."""
    lines = [
        "| | runs | agent steps/s | game frames/s | cores used | steps per CPU-s | start-up s | peak memory MB | ludus ÷ this |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    mine = statistics.median(column(rows, "ludus", "fps") or [0.0])
    for name in names_in(rows):
        own = [r for r in rows if r["peer"] == name and r.get("fps")]
        if not own:
            reason = next(
                (r.get("error") or "no step was learned from").strip().splitlines()[-1][:80] for r in rows if r["peer"] == name
            )
            lines.append(f"| {name} | 0 | – | – | – | – | – | – | {reason} |")
            continue
        fps = [float(r["fps"]) for r in own]
        cells = [
            spread(fps),
            f"{4 * statistics.median(fps):,.0f}",
            spread(column(own, name, "cores"), 2),
            spread([r["fps"] / r["cores"] for r in own if r.get("cores")]),
            spread(column(own, name, "startup_s"), 1),
            spread(column(own, name, "peak_rss_mb")),
            f"{mine / statistics.median(fps):.2f}",
        ]
        lines.append(f"| {name} | {len(own)} | " + " | ".join(cells) + " |")
    shares = [key for key in next((r for r in rows if r["peer"] == "ludus"), {}) if key.startswith(("sampler/", "learner/"))]
    told = ", ".join(f"{key} {spread(column(rows, 'ludus', key), 2)}" for key in shares)
    return "\n".join(lines) + (f"\n\nludus, by its own counters: {told}" if told else "")


def target_table(rows: list[Row]) -> str:
    head = "| | reached 475 | wall s from process start | CPU s | env steps | evaluation (20 episodes) | start-up s | peak memory MB |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for name in names_in(rows):
        own = [r for r in rows if r["peer"] == name]
        done = [r for r in own if r.get("reached")]
        cells = [
            spread(column(done, name, k), d)
            for k, d in (("time_to_target_s", 1), ("cpu_to_target_s", 1), ("frames_to_target", 0))
        ]
        cells += [
            spread(column(done, name, "eval_mean")),
            spread(column(own, name, "startup_s"), 1),
            spread(column(own, name, "peak_rss_mb")),
        ]
        lines.append(f"| {name} | {len(done)} of {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def provenance() -> Row:
    """What stands at the top of every result."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit, "cpu": _cpu(), "python": platform.python_version()}


def save(part: str, rows: list[Row], table: str) -> None:
    head = {"part": part} | provenance()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"train-{part}.json").write_text(json.dumps(head | {"rows": rows}, indent=1))
    text = f"# {part}\n\n{head['date']}, commit {head['commit']}, {head['cpu']}\n\nmedian [quartiles]\n\n{table}\n"
    (RESULTS / f"train-{part}.md").write_text(text)
    print(f"\n{text}")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return f"{os.cpu_count()} × {model}"


# -- the parts ----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["overhead", "equal", "tuned", "pong", "async-pong", "async-doom"])
    parser.add_argument("--peers", nargs="*", default=[name for name in PEERS if name != "pufferlib"])
    parser.add_argument("--rounds", type=int, default=0, help="0: 5 for speed, 10 seeds for tuned, 3 for pong and async")
    parser.add_argument("--seconds", type=float, default=18.0, help="of each asynchronous run; the first six are warm-up")
    args = parser.parse_args()
    if "overhead" in args.parts:
        row = _script("overhead", ["-m", "bench.overhead"], 1, 300)
        save("overhead", [row], "\n".join(f"- {key}: {value}" for key, value in row.items()))
    if "equal" in args.parts:
        field = contestants("cartpole", "equal", args.peers, 10)
        field["composed ceiling"] = lambda seed: ceiling("cartpole", 1)
        rows = interleaved(field, args.rounds or 5)
        save("equal", rows, speed_table(rows))
    if "tuned" in args.parts:
        rows = interleaved(contestants("cartpole", "tuned", args.peers, 60), args.rounds or 10)
        save("tuned", rows, target_table(rows))
    if "pong" in args.parts:
        capable = [name for name in args.peers if name in ("cleanrl", "sb3", "rllib", "sample_factory")]
        field = contestants("pong", "equal", capable, 30)
        field["composed ceiling"] = lambda seed: ceiling("pong", 2)
        rows = interleaved(field, args.rounds or 3)
        save("pong", rows, speed_table(rows))
    for part in ("async-pong", "async-doom"):
        if part in args.parts:
            rows = interleaved(asynchronous(part.removeprefix("async-"), args.seconds), args.rounds or 3)
            save(part, rows, async_table(rows))


if __name__ == "__main__":
    main()
