"""A long steady load: what memory, open files and latency do over time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from bench.serving import agents, generator, services
from bench.serving.generator import Load, percentile_ms
from bench.serving.process import serving
from bench.serving.stacks import Stack
from bench.train import Row

SAMPLE_S = 5.0
MATCH = 256


@dataclass
class Watch:
    """Samples the processes of a server until the time is up."""

    tree: Callable[[], list[psutil.Process]]
    seconds: float
    samples: list[Row] = field(default_factory=list)

    def __call__(self) -> None:
        began = time.monotonic()
        while (now := time.monotonic() - began) < self.seconds - 1.0:
            self.samples.append({"at_s": round(now, 1), **_sizes(self.tree())})
            time.sleep(min(SAMPLE_S, max(0.0, self.seconds - 1.0 - now)))


def _sizes(tree: list[psutil.Process]) -> Row:
    total = {"rss_mb": 0.0, "files": 0, "threads": 0, "processes": 0}
    for process in tree:
        try:
            with process.oneshot():
                if process.name() == "load":
                    continue
                total["rss_mb"] += process.memory_info().rss / 1e6
                total["files"] += process.num_fds()
                total["threads"] += process.num_threads()
                total["processes"] += 1
        except psutil.NoSuchProcess:
            continue
    return total


@dataclass(frozen=True)
class Slope:
    """A straight line through means per minute, with its 95 % confidence interval."""

    per_hour: float
    low: float
    high: float
    mean: float

    @classmethod
    def of(cls, minutes: list[float], values: list[float]) -> Slope:
        """Needs four points."""
        x, y = np.array(minutes) / 60, np.array(values)
        n, spread = len(x), ((x - x.mean()) ** 2).sum()
        slope = ((x - x.mean()) * (y - y.mean())).sum() / spread
        rest = y - y.mean() - slope * (x - x.mean())
        half = _student(n - 2) * math.sqrt((rest**2).sum() / (n - 2) / spread)
        return cls(float(slope), float(slope - half), float(slope + half), float(y.mean()))

    def to_json(self) -> Row:
        return {key: round(value, 4) for key, value in vars(self).items()}


def _student(freedom: int) -> float:
    """The 97.5 % quantile, by its expansion around that of the normal distribution (good to 1 % from 3 on)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return z + (z**3 + z) / (4 * freedom) + second + third


@dataclass(frozen=True)
class Plan:
    minutes: float
    rate: float
    connections: int = 64
    sessions: int = 256
    slice_s: float = 60.0
    backend: str = "torch"
    workers: int = 1

    def stack(self, agent: services.Served) -> Stack:
        return services.ludus(agent, self.backend, workers=self.workers, pinned=self.workers == 1)


def measure(plan: Plan, agent: services.Served, binary: Path, busy: Callable[[], float]) -> Row:
    """Raises ServerFailed."""
    traffic = agents.make_traffic("lstm", [agents.make_policy("lstm", 1)], MATCH)
    with serving(plan.stack(agent)) as server:
        load = Load(traffic, plan.connections, 60 * plan.minutes, "soak", plan.sessions, plan.rate, plan.slice_s)
        watch = Watch(server.tree, load.seconds)
        driven = generator.drive(binary, server, load, busy, watch)
    row, window = driven.row, driven.row["window_s"]
    kinds = ("bad_status", "wrong", "transport", "lost", "differs")
    found: Row = {
        "minutes": plan.minutes,
        "ticks": row["ticks"],
        "matches": row["ended"],
        "errors": sum(row[kind] for kind in kinds),
        "example": row["example"],
        "requests_per_s": round(row["requests"] / window, 1),
        "cpu_us_per_request": round(1e6 * row["server_cpu_s"] / max(1, row["requests"]), 2),
        "foreign_cores": round((row["busy_s"] - row["server_cpu_s"] - row["cpu_s"]) / window, 3),
        "p50_ms": [round(percentile_ms(counts, 0.5), 3) for counts in driven.slices],
        "p99_ms": [round(percentile_ms(counts, 0.99), 3) for counts in driven.slices],
        "slice_s": plan.slice_s,
        "samples": watch.samples,
    }
    return found | trends(found)


def trends(row: Row) -> Row:
    """Without the first tenth of the time, in which what is allocated once is allocated."""
    minute = row["slice_s"]
    settled = row["minutes"] * 60 / 10
    groups: dict[int, list[Row]] = {}
    for sample in row["samples"]:
        if sample["at_s"] >= settled:
            groups.setdefault(int(sample["at_s"] // minute), []).append(sample)
    at = [(number + 0.5) * minute / 60 for number in groups]
    found: Row = {}
    for key in ("rss_mb", "files", "threads"):
        if len(groups) >= 4:
            means = [statistics.mean(sample[key] for sample in group) for group in groups.values()]
            found[f"{key}_slope"] = Slope.of(at, means).to_json()
    p99 = row["p99_ms"][math.ceil(settled / minute) :]
    if len(p99) >= 4:
        line = Slope.of([(i + 0.5) * minute / 60 for i in range(len(p99))], p99)
        hours, quarter = len(p99) * minute / 3600, max(1, len(p99) // 4)
        found["p99_slope"] = line.to_json()
        found["p99_drift"] = round(line.per_hour * hours / line.mean, 4)
        found["p99_drift_low"], found["p99_drift_high"] = (round(end * hours / line.mean, 4) for end in (line.low, line.high))
        found["p99_last_to_first_quarter"] = round(statistics.median(p99[-quarter:]) / statistics.median(p99[:quarter]) - 1, 4)
    return found


def report(row: Row) -> str:
    lines = [
        f"{row['minutes']:g} minutes, {row['requests_per_s']:,.0f} requests/s, {row['ticks']:,} ticks of {row['matches']:,} matches, "
        f"every reply compared; errors: {row['errors']}. CPU {row['cpu_us_per_request']} µs/request.",
        "",
        "| | mean | slope per hour [95 % interval] | of the mean, per hour |",
        "|---|---:|---:|---:|",
    ]
    names = {"rss_mb_slope": "RSS, MB", "files_slope": "open files", "threads_slope": "threads", "p99_slope": "p99, ms"}
    for key, title in names.items():
        if key in row:
            line = row[key]
            share = line["per_hour"] / line["mean"] if line["mean"] else 0.0
            lines.append(
                f"| {title} | {line['mean']:.2f} | {line['per_hour']:+.3f} [{line['low']:+.3f}, {line['high']:+.3f}] | {share:+.2%} |"
            )
    if "p99_drift" in row:
        lines += [
            "",
            f"- p99, drift over the whole time: {row['p99_drift']:+.1%} [{row['p99_drift_low']:+.1%}, {row['p99_drift_high']:+.1%}]; "
            f"last quarter against first: {row['p99_last_to_first_quarter']:+.1%} (asked: less than 10 %)",
        ]
    shown = ", ".join(f"{value:.2f}" for value in row["p99_ms"])
    return "\n".join([*lines, f"- p99 by slices of {row['slice_s']:g} s, ms: {shown}"])
