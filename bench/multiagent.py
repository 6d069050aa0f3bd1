"""Training speed with several agents, side by side: Ludus, RLlib and a plain PettingZoo loop take turns in one run, on one machine.

    python -m bench.peers.install rllib cleanrl        once: their virtual environments
    python -m bench.multiagent                         everything (about 25 minutes)
    python -m bench.multiagent --envs simple_spread --peers ludus-2 rllib-2 --repeats 1

All train PPO with one policy for all agents, with the settings of `bench/peers/matches.py`. A step is a decision of one agent that was
sampled and learned from. Rounds are interleaved: every contestant runs once before any runs twice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from bench.peers import matches
from bench.peers.report import AGENTS_MODE, AGENTS_WARMUP_S
from bench.peers.run import THREAD_VARIABLES, run_peer
from bench.train import HERE, RESULTS, Row, provenance

ENDLESS = 10**9
START_S = 150.0  # for processes and imports, on a busy machine
QUIET_CORES = 0.2  # of other programs; above it, speeds of different runs cannot be compared
FASTER_THAN_RLLIB = 3.0
FASTER_THAN_ONE_WORKER = 1.8
FASTER_THAN_LOOP = 1.0


@dataclass(frozen=True)
class Contestant:
    label: str
    workers: int
    peer: str = ""
    """One of bench.peers; empty: Ludus."""
    sampling: str = "sync"
    vector: bool = False
    """The environment steps all matches with one call."""


VECTOR_ENVS = {"connect_four": "bench.vector_connect_four:FlatConnectFour"}
"""Environments that exist in this form."""

CONTESTANTS = {
    "ludus-0": Contestant("ludus, in process", 0),
    "ludus-1": Contestant("ludus, 1 worker", 1),
    "ludus-2": Contestant("ludus, 2 workers", 2),
    "ludus-2-pipelined": Contestant("ludus, 2 workers, pipelined", 2, sampling="pipelined"),
    "vector-0": Contestant("ludus, in process, vectorised matches", 0, vector=True),
    "vector-2-pipelined": Contestant("ludus, 2 workers, pipelined, vectorised matches", 2, sampling="pipelined", vector=True),
    "rllib-1": Contestant("RLlib, 1 env runner", 1, "rllib"),
    "rllib-2": Contestant("RLlib, 2 env runners", 2, "rllib"),
    "loop": Contestant("plain PettingZoo loop", 0, "cleanrl"),
}
RATIOS = (
    ("ludus-2", "rllib-2", FASTER_THAN_RLLIB),
    ("ludus-2-pipelined", "rllib-2", FASTER_THAN_RLLIB),
    ("ludus-2", "ludus-1", FASTER_THAN_ONE_WORKER),
    ("ludus-2-pipelined", "ludus-1", FASTER_THAN_ONE_WORKER),
    ("ludus-0", "loop", FASTER_THAN_LOOP),
    ("vector-0", "ludus-0", None),
    ("vector-2-pipelined", "ludus-2-pipelined", None),
)
"""Contestant ÷ contestant, and the ratio that is asked for."""


# -- runs -----------------------------------------------------------------------------------------------------------------


def measure(name: str, env: str, seed: int, seconds: float) -> Row:
    """One run, and how many cores other programs used in the meantime."""
    contestant = CONTESTANTS[name]
    busy_s, began = _machine_busy_s(), time.monotonic()
    row = _run_ludus(contestant, env, seed, seconds) if not contestant.peer else _run_peer(contestant, env, seed, seconds)
    wall_s = time.monotonic() - began
    if row.get("fps") and not row.get("cores"):  # then `fps` would include the warm-up
        row = {key: value for key, value in row.items() if key != "fps"} | {"error": "too few iterations after the warm-up"}
    others = (_machine_busy_s() - busy_s - row.get("cpu_s", 0.0)) / wall_s
    kept = ("fps", "cores", "cpu_s", "frames", "train_s", "startup_s", "peak_rss_mb", "error")
    return {
        "env": env,
        "contestant": name,
        "round": seed,
        **{key: row[key] for key in kept if key in row},
        "wall_s": round(wall_s, 1),
        "other_cores": round(max(0.0, others), 2),
    }


def _run_peer(contestant: Contestant, env: str, seed: int, seconds: float) -> Row:
    return run_peer(
        contestant.peer,
        env,
        AGENTS_MODE,
        seed,
        max_seconds=seconds,
        max_frames=ENDLESS,
        target=ENDLESS,
        threads=_threads(env),
        timeout_s=seconds + START_S,
        workers=contestant.workers,
    )


def _run_ludus(contestant: Contestant, env: str, seed: int, seconds: float) -> Row:
    options = {
        "--task": env,
        "--mode": AGENTS_MODE,
        "--seed": seed,
        "--workers": contestant.workers,
        "--threads": _threads(env),
        "--max-seconds": seconds,
        "--max-frames": ENDLESS,
        "--target": ENDLESS,
    }
    words = [str(word) for option in options.items() for word in option]
    config: dict[str, Any] = {"sampling": contestant.sampling}
    changes = {}
    if contestant.vector:
        config["wrappers"], changes["LUDUS_BENCH_ENV"] = [], VECTOR_ENVS[env]
    changes["LUDUS_BENCH_CONFIG"] = json.dumps(config)
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(_threads(env))) | changes
    command = [sys.executable, "-m", "bench.ours", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + START_S, env=environment, cwd=HERE.parent, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {seconds + START_S:.0f} s"}
    if done.returncode:
        return {"error": done.stderr[-500:]}
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def _threads(env: str) -> int:
    """Threads of PyTorch where the gradients are computed."""
    return 2 if matches.TASKS[env].images else 1


def _machine_busy_s() -> float:
    """CPU seconds of all programs since the machine was started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


# -- the page -------------------------------------------------------------------------------------------------------------


def speeds(rows: Sequence[Row], env: str, name: str) -> list[float]:
    return [row["fps"] for row in rows if (row["env"], row["contestant"]) == (env, name) and row.get("fps")]


def page(found: Mapping[str, Any]) -> str:
    rows: list[Row] = found["rows"]
    others = [row["other_cores"] for row in rows]
    lines = [
        "# Training with several agents",
        "",
        "`python -m bench.multiagent`",
        "",
        f"{found['date']}, commit {found['commit']}, {found['cpu']}, load before {found['load']}. Other programs used "
        f"{statistics.median(others):.2f} cores during a run (median; {min(others):.2f}–{max(others):.2f}).",
        "",
        "Agent steps per second of sampling and learning with PPO: median (lowest–highest). One policy for all agents, equal settings for all "
        f"(`bench/peers/matches.py`). Runs of {found['seconds']:.0f} s, the first {AGENTS_WARMUP_S:.0f} are warm-up. Cores: of the whole process tree.",
    ]
    for env in dict.fromkeys(row["env"] for row in rows):
        lines += ["", f"## {env}", "", _describe(matches.TASKS[env]), "", *_table(rows, env), "", *_ratios(rows, env)]
    return "\n".join(lines) + "\n"


def _describe(task: matches.MatchTask) -> str:
    network = (
        "a small CNN on 84×84 pictures of one channel"
        if task.images
        else f"separate {matches.HIDDEN}×{matches.HIDDEN} tanh networks"
    )
    return (
        f"{task.agents} agents, {task.copies} copies, batches of {task.batch:,} agent steps, {task.epochs} epochs of minibatches of "
        f"{task.minibatch}, {network}, {_threads(task.name)} PyTorch thread{'s' if _threads(task.name) > 1 else ''}."
    )


def _table(rows: Sequence[Row], env: str) -> list[str]:
    lines = [
        "| | runs | agent steps/s | cores | agent steps per CPU-s | memory MB | cores of other programs |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, contestant in CONTESTANTS.items():
        own = [row for row in rows if (row["env"], row["contestant"]) == (env, name)]
        good = [row for row in own if row.get("fps")]
        if good:
            per_cpu = [row["fps"] / row["cores"] for row in good if row.get("cores")]
            cells = [
                _spread([row["fps"] for row in good]),
                f"{statistics.median(row['cores'] for row in good):.2f}",
                f"{statistics.median(per_cpu):,.0f}" if per_cpu else "–",
                f"{statistics.median(row['peak_rss_mb'] for row in good):,.0f}",
                f"{min(row['other_cores'] for row in good):.2f}–{max(row['other_cores'] for row in good):.2f}",
            ]
            lines.append(f"| {contestant.label} | {len(good)} | {' | '.join(cells)} |")
        elif own:
            reason = own[0].get("error", "no step").strip().splitlines()[-1][:80]
            lines.append(f"| {contestant.label} | 0 | {reason} | – | – | – | – |")
    return lines


def _ratios(rows: Sequence[Row], env: str) -> list[str]:
    """Ratios of medians, and of the rounds that differ most."""
    lines = []
    for one, other, asked in RATIOS:
        by_round = [
            {row["round"]: row["fps"] for row in rows if (row["env"], row["contestant"]) == (env, name) and row.get("fps")}
            for name in (one, other)
        ]
        rounds = by_round[0].keys() & by_round[1].keys()
        if not rounds:
            continue
        ratios = [by_round[0][number] / by_round[1][number] for number in rounds]
        ratio = statistics.median(speeds(rows, env, one)) / statistics.median(speeds(rows, env, other))
        others = max(row["other_cores"] for row in rows if row["env"] == env and row["contestant"] in (one, other))
        verdict = (
            f"not judged, other programs used up to {others:.2f} cores"
            if others > QUIET_CORES
            else "✓"
            if ratio >= (asked or 0)
            else "✗"
        )
        goal = "" if asked is None else f"; asked: ≥ {asked}: {verdict}"
        names = f"{CONTESTANTS[one].label} ÷ {CONTESTANTS[other].label}"
        lines.append(f"- {names}: {ratio:.2f} (by rounds {min(ratios):.2f}–{max(ratios):.2f}){goal}")
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="*", choices=list(matches.TASKS), default=list(matches.TASKS))
    parser.add_argument("--peers", nargs="*", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=14.0, help=f"of each run; the first {AGENTS_WARMUP_S:.0f} are warm-up")
    parser.add_argument("--name", default="multiagent", help="of the files in bench/results")
    args = parser.parse_args()
    # As the `ludus` command does, for all: threads that spin while they wait starve each other on a machine with other load.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    found: Row = provenance() | {"load": round(os.getloadavg()[0], 1), "seconds": args.seconds}
    found["settings"] = {env: asdict(matches.TASKS[env]) for env in args.envs}
    rows: list[Row] = []
    for seed in range(1, args.repeats + 1):
        for env in args.envs:
            for name in args.peers:
                if CONTESTANTS[name].vector and env not in VECTOR_ENVS:
                    continue
                rows.append(measure(name, env, seed, args.seconds))
                print(json.dumps(rows[-1]), flush=True)
        save(args.name, found | {"rows": rows})  # after each round: a run that is stopped leaves the complete ones
    print(f"\n{page(found | {'rows': rows})}")


def save(name: str, found: Row) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1))
    (RESULTS / f"{name}.md").write_text(page(found))


if __name__ == "__main__":
    main()
