"""Learning curves as pictures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ludus.errors import NotFound
from ludus.metrics import read_jsonl

log = logging.getLogger(__name__)

METRIC = "episode_return_mean"


def curve(run: Path, metric: str = METRIC, over: str = "timesteps") -> tuple[list[float], list[float]]:
    """(x, y) of one metric of a run. Raises NotFound when the run has no such number."""
    rows = [r for r in read_jsonl(run / "metrics.jsonl") if r.get(metric) is not None and r.get(over) is not None]
    if not rows:
        raise NotFound(f"{run} has no values of {metric!r}.")
    return [float(r[over]) for r in rows], [float(r[metric]) for r in rows]


def plot(runs: Sequence[Path], out: Path, metric: str = METRIC, over: str = "timesteps") -> Path:
    """Several curves in one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    drawn = 0
    for run in runs:
        try:
            x, y = curve(run, metric, over)
        except NotFound as error:  # one that has only just begun
            log.warning("%s", error)
            continue
        axes.plot(x, y, linewidth=1.8, label=f"{run.parent.name}/{run.name}")
        drawn += 1
    if not drawn:
        raise NotFound(f"None of the {len(runs)} runs has values of {metric!r} over {over!r}.")
    _style(axes, metric, over, many=drawn > 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def _style(axes: Any, metric: str, over: str, many: bool) -> None:
    axes.set_xlabel(over.replace("_", " "))
    axes.set_ylabel(metric.replace("_", " "))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda v, _: f"{v / 1000:g}k" if v >= 1000 else f"{v:g}")
    if many:
        axes.legend(fontsize=7, loc="lower right")
