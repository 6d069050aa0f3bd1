"""Training, intervals, learning curves and reports that all flagship benchmarks share.

A benchmark trains its preset (`train_preset`), measures players by score (`score_row`, `compare_scores`) or by matches (`match_row`), draws
the learning curve (`draw_curve`) into docs/flagships/NAME.png and writes bench/results/flagship-NAME.{json,md} (`write_report`).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from bench.train import RESULTS, provenance
from ludus.core.statistics import confidence_interval, difference, wilson_interval

mpl.use("Agg")
import matplotlib.pyplot as plt

PAGES = Path(__file__).parents[2] / "docs" / "flagships"
_NORMAL_95 = 1.96
_SMOOTH = 20
"""A point of the smoothed curve averages this part of all reports: one of twenty."""

Row = dict[str, Any]


@dataclass(frozen=True)
class TrainedRun:
    directory: Path
    wall_s: float
    cpu_s: float
    """Of the command and all its processes."""

    @property
    def note(self) -> str:
        steps = self.reports("timesteps")[-1][1]
        cpu = "" if math.isnan(self.cpu_s) else f", {self.cpu_s:.0f} s of CPU time"
        return f"{steps:,.0f} environment steps in {self.wall_s:.0f} s of wall time{cpu}."

    def reports(self, metric: str) -> list[tuple[float, float, float]]:
        """(seconds, timesteps, value) of all reports with this metric."""
        rows = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        return [(row["time_s"], row["timesteps"], row[metric]) for row in rows if row.get(metric) is not None]


def train_preset(preset: str, directory: Path, *options: str, seed: int = 1, timeout_s: float = 1500) -> TrainedRun:
    """Train a preset, or an experiment file that is named like its experiment, with `ludus train`; return its run."""
    command = [str(Path(sys.executable).with_name("ludus")), "train", "-p", preset, "--seed", str(seed)]
    began, cpu = time.monotonic(), _children_cpu_s()
    subprocess.run([*command, "--local-dir", str(directory), *options], check=True, timeout=timeout_s)
    run = max((directory / Path(preset).stem).iterdir(), key=lambda path: path.stat().st_mtime)
    return TrainedRun(run, time.monotonic() - began, _children_cpu_s() - cpu)


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


# -- measurements ---------------------------------------------------------------------------------------------------------


def score_row(player: str, scores: Sequence[float]) -> Row:
    """Mean score of whole episodes with its bootstrapped 95 % interval."""
    low, high = confidence_interval(scores)
    mean = float(np.mean(scores))
    shown = f"{mean:.4g} [{low:.4g}, {high:.4g}]"
    return {
        "player": player,
        "episodes": len(scores),
        "mean [95 %]": shown,
        "mean": mean,
        "low": low,
        "high": high,
        "scores": list(scores),
    }


def compare_scores(trained: Sequence[float], scripted: Sequence[float]) -> Row:
    """Difference of the mean scores with its bootstrapped 95 % interval; `beaten`: the interval is above 0."""
    found = difference(trained, scripted)
    return {"difference": found.mean, "low": found.low, "high": found.high, "p": found.p_value, "beaten": found.low > 0}


def match_row(player: str, opponent: str, won: int, drawn: int, lost: int) -> Row:
    """Share of won matches with its 95 % Wilson interval; `beaten`: of the decided matches, more than half are won (95 % interval)."""
    matches, decided = won + drawn + lost, won + lost
    low, high = wilson_interval(won, matches, _NORMAL_95)
    beaten = bool(decided) and wilson_interval(won, decided, _NORMAL_95)[0] > 0.5
    shown = f"{100 * won / matches:.1f} [{100 * low:.1f}–{100 * high:.1f}]"
    return {
        "player": player, "opponent": opponent, "matches": matches, "won, % [95 %]": shown, "won": won, "drawn": drawn, "lost": lost,
        "low": low, "high": high, "beaten": beaten,
    }  # fmt: skip


# -- pages ----------------------------------------------------------------------------------------------------------------


def draw_curve(
    name: str, points: Sequence[tuple[float, float, float]], label: str, baselines: Mapping[str, float], title: str
) -> Path:
    """Draw the training curve over minutes, with the baselines as horizontal lines; return docs/flagships/NAME.png.

    `points`: (seconds, timesteps, value).
    """
    seconds, steps, values = (np.array(column, np.float64) for column in zip(*points, strict=True))
    width = max(1, len(values) // _SMOOTH)
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    figure, axes = plt.subplots(figsize=(7.0, 3.6), layout="constrained")
    axes.plot(seconds / 60, values, color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(seconds[width - 1 :] / 60, smooth, color="tab:blue", linewidth=2, label="learner")
    for (player, value), color in zip(baselines.items(), ("tab:orange", "tab:grey", "tab:green", "tab:red"), strict=False):
        axes.axhline(value, color=color, linestyle="--", linewidth=1.2, label=player)
    axes.set(xlabel=f"minutes ({steps[-1]:,.0f} environment steps)", ylabel=label, title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    path = PAGES / f"{name}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def write_report(name: str, title: str, columns: Sequence[str], rows: Sequence[Row], *, note: str, **more: Any) -> None:
    """Write bench/results/flagship-NAME.json with everything, and .md with the table of `columns` and the note."""
    head = provenance() | {"load": round(os.getloadavg()[0], 1)}
    RESULTS.mkdir(exist_ok=True)
    data = head | {"note": note} | more | {"rows": list(rows)}
    (RESULTS / f"flagship-{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    lines = [f"# {title}", "", f"{head['date']}, commit {head['commit']}, {head['cpu']}, load {head['load']} at the end", ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    text = "\n".join([*lines, "", note]) + "\n"
    (RESULTS / f"flagship-{name}.md").write_text(text)
    print(text, flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
