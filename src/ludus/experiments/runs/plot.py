"""Plots of learning curves: one line per run, or per group of seeds the runs, their mean and its interval."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ludus.core.metrics import read_jsonl
from ludus.core.statistics import confidence_interval
from ludus.errors import NotFound, UsageError

log = logging.getLogger(__name__)

METRIC = "episode_return_mean"
_POINTS = 200
_RESAMPLES = 2_000

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One metric of one run."""

    run: Path
    x: Array
    y: Array


def read_curve(run: Path, metric: str = METRIC, over: str = "timesteps") -> Curve:
    """Raises NotFound when the run has no such number."""
    rows = [r for r in read_jsonl(run / "metrics.jsonl") if r.get(metric) is not None and r.get(over) is not None]
    if not rows:
        raise NotFound(f"{run} has no values of {metric!r}.")
    x, y = (np.array([float(row[name]) for row in rows]) for name in (over, metric))
    order = np.argsort(x, kind="stable")
    return Curve(run, x[order], y[order])


def read_curves(runs: Sequence[Path], metric: str = METRIC, over: str = "timesteps") -> list[Curve]:
    """The curves of the runs that have the metric. Raises NotFound if none has."""
    found = []
    for run in runs:
        try:
            found.append(read_curve(run, metric, over))
        except NotFound as error:  # it has only just started
            log.warning("%s", error)
    if not found:
        raise NotFound(f"None of the {len(runs)} runs has values of {metric!r} over {over!r}.")
    return found


def smooth(y: Array, weight: float) -> Array:
    """Bias-corrected exponential moving average; weight 0: unchanged, 0.9: about ten points. Raises UsageError."""
    if not 0.0 <= weight < 1.0:
        raise UsageError(f"A smoothing of {weight} is not a number from 0 to less than 1.")
    if weight == 0.0:
        return y
    out, kept, share = np.empty_like(y), 0.0, 0.0
    for i, value in enumerate(y):
        kept, share = weight * kept + (1.0 - weight) * value, weight * share + (1.0 - weight)
        out[i] = kept / share
    return out


def align_curves(group: Sequence[Curve], smoothing: float = 0.0, points: int = _POINTS) -> tuple[Array, Array]:
    """(x [points], y [runs, points]): every curve at the same points, where all of them have values. Empty: nowhere."""
    low, high = max(c.x[0] for c in group), min(c.x[-1] for c in group)
    if low > high:
        return np.empty(0), np.empty((len(group), 0))
    x = np.linspace(low, high, points if low < high else 1)
    return x, np.stack([np.interp(x, c.x, smooth(c.y, smoothing)) for c in group])


def confidence_band(y: Array) -> tuple[Array, Array]:
    """(low, high) of the mean of several runs at every point: 95 %, bootstrapped; for two runs their values."""
    if len(y) < 3:
        return y.min(axis=0), y.max(axis=0)
    sides = np.array([confidence_interval(column, resamples=_RESAMPLES) for column in y.T])
    return sides[:, 0], sides[:, 1]


def plot(
    runs: Sequence[Path], out: Path, metric: str = METRIC, over: str = "timesteps", smoothing: float = 0.0, title: str = ""
) -> Path:
    """Plot several runs into one PNG, each as its own line."""
    alone = {f"{c.run.parent.name}/{c.run.name}": [c] for c in read_curves(runs, metric, over)}
    return draw(alone, out, metric, over, smoothing, title)


def draw(
    groups: Mapping[str, Sequence[Curve]], out: Path, metric: str, over: str, smoothing: float = 0.0, title: str = ""
) -> Path:
    """Plot groups by label: thin lines for runs, a thick one for their mean, a shaded band for its interval."""
    return draw_panels({title: groups}, out, metric, over, smoothing)


def draw_panels(
    panels: Mapping[str, Mapping[str, Sequence[Curve]]], out: Path, metric: str, over: str, smoothing: float = 0.0
) -> Path:
    """Plot one panel of groups per title, one below the other; environments have different scales."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5 * len(panels)), dpi=120, layout="constrained")
    for axes, (title, groups) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        for number, (label, group) in enumerate(groups.items()):
            _draw_group(axes, f"C{number % 10}", label, group, smoothing)
        _style(axes, metric, over, title, many=len(groups) > 1 or any(len(group) > 1 for group in groups.values()))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def _draw_group(axes: Any, colour: str, label: str, group: Sequence[Curve], smoothing: float) -> None:
    if len(group) == 1:
        axes.plot(group[0].x, smooth(group[0].y, smoothing), color=colour, linewidth=1.8, label=label)
        return
    for c in group:
        axes.plot(c.x, smooth(c.y, smoothing), color=colour, linewidth=0.6, alpha=0.45)
    x, y = align_curves(group, smoothing)
    axes.plot(x, y.mean(axis=0), color=colour, linewidth=1.8, label=f"{label} (n={len(group)})")
    if len(x):
        axes.fill_between(x, *confidence_band(y), color=colour, alpha=0.18, linewidth=0)


def _style(axes: Any, metric: str, over: str, title: str, many: bool) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(over.replace("_", " "))
    axes.set_ylabel(metric.replace("_", " "))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda v, _: f"{v / 1000:g}k" if v >= 1000 else f"{v:g}")
    if many:
        axes.legend(fontsize=7, loc="lower right")
