"""The results of a sweep: a row per trial, the best setting as an experiment, and a plot.

Settings are ranked by the mean over their seeds.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.config import search_space
from ludus.config.schema import TuneConfig
from ludus.config.search_space import SearchedKey, TrialValues
from ludus.core.metrics import read_jsonl
from ludus.errors import LudusError, NotFound
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.run_dir import CONFIG, Run
from ludus.io.yaml_documents import dump_yaml
from ludus.storage.local import LocalStore

log = logging.getLogger(__name__)

RESULTS, TABLE, BEST, PICTURE = "results.json", "results.csv", "best.yaml", "sweep.png"
_MAX_CURVES = 40
"""Maximum curves in the plot; the best trials are drawn."""


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep. `results`: one dictionary per trial, the best setting first, and its best seed first."""

    name: str
    directory: Path
    metric: str
    mode: str
    results: list[dict[str, Any]]
    searched: list[SearchedKey] = field(repr=False)
    data: dict[str, Any] = field(repr=False)
    startup_s: float = 0.0
    """Start-up time of Ray, not part of `wall_s`."""
    wall_s: float = 0.0

    @property
    def interrupted(self) -> bool:
        """Whether some trials have not ended; `ludus tune --resume` continues them."""
        return any(row["status"] not in ("finished", "stopped", "failed") for row in self.results)

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [row for row in self.results if row["status"] == "failed"]

    @property
    def best(self) -> dict[str, Any] | None:
        """The row of the best seed of the best setting; None if no trial has a value."""
        first = self.results[0] if self.results else None
        return first if first is not None and first["value_mean"] is not None else None

    @property
    def settings(self) -> list[dict[str, Any]]:
        """All settings without the seed, the best first, with the mean, number and names of their trials."""
        found: dict[int, dict[str, Any]] = {}
        for row in self.results:
            own = {name: value for name, value in row["settings"].items() if name != display_key(search_space.SEED)}
            about = {"settings": own, "value_mean": row["value_mean"], "value_n": row["value_n"], "trials": []}
            found.setdefault(row["setting"], about)["trials"].append(row["trial"])
        return list(found.values())

    @property
    def best_run(self) -> Path:
        """Raises NotFound if no trial has a value."""
        return Path(self._best()["run_dir"])

    @property
    def best_config(self) -> dict[str, Any]:
        """The best setting with the first (not the best) of its seeds, in the form that `ludus.train` and `ludus train -f` accept.

        Raises NotFound.
        """
        best = self._best()
        alike = [row for row in self.results if row["setting"] == best["setting"] and _counts(row)]
        first = min(alike, key=lambda row: str(row["trial"]))  # their names begin with their numbers
        values = {tuple(path): value for path, value in first["values"]}
        return {**search_space.apply_values(self.data, values), "name": f"{self.name}-best"}

    def to_pandas(self) -> Any:
        """A pandas DataFrame with one row per trial and one column per setting. Needs pandas."""
        import pandas  # type: ignore[import-untyped,unused-ignore]

        return pandas.DataFrame([_flatten_row(row) for row in self.results])

    def _best(self) -> dict[str, Any]:
        if self.best is None:
            known = sorted({name for row in self.results for name in _metric_names(Path(row["run_dir"]))})
            raise NotFound(
                f"No trial of {self.directory} has a value of {self.metric!r}.",
                f"Known are: {', '.join(known)}." if known else "None of them has reported anything.",
            )
        return self.best

    def write(self, startup_s: float, wall_s: float) -> SweepResult:
        """The same, with its files in the directory of the sweep."""
        timed = dataclasses.replace(self, startup_s=startup_s, wall_s=wall_s)
        store = LocalStore(self.directory)
        about = {"name": self.name, "metric": self.metric, "mode": self.mode, "startup_s": startup_s, "wall_s": wall_s}
        found = {**about, "settings": self.settings, "trials": self.results}
        store.put(RESULTS, json.dumps(found, indent=1, default=str).encode())
        store.put(TABLE, _as_csv([_flatten_row(row) for row in self.results]).encode())
        if timed.best is not None:
            best = timed.best_config
            inner = {key: value for key, value in best.items() if key != "name"}
            store.put(
                BEST,
                (
                    _best_header(timed.best, self.metric) + dump_yaml(json.loads(json.dumps({best["name"]: inner}, default=str)))
                ).encode(),
            )
        try:
            draw(timed, self.directory / PICTURE)
        except LudusError as error:
            log.info("no plot: %s", error)
        return timed


def read_results(
    name: str, directory: Path, data: dict[str, Any], tune: TuneConfig, trials: Sequence[TrialValues], ended: Mapping[str, str]
) -> SweepResult:
    """Read the results from the directories of the trials."""
    rows = [_row(directory / trial.name, trial, tune.metric, ended.get(trial.name)) for trial in trials]
    # With population based training, trials with equal final values had different histories.
    rows = rank_trials(rows, tune.mode, apart=tune.scheduler == "pbt")
    return SweepResult(name, directory, tune.metric, tune.mode, rows, search_space.find_searches(data), data)


def rank_trials(rows: Sequence[Mapping[str, Any]], mode: str, apart: bool = False) -> list[dict[str, Any]]:
    """Sort rows: settings by their mean over trials, trials of a setting by value, failed trials last.

    Adds the number of the setting (`setting`), its mean (`value_mean`) and the number of trials in it (`value_n`): those that have a
    value and did not fail. `apart`: every trial is its own setting.
    """
    sign = 1.0 if mode == "max" else -1.0
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        values = [entry for entry in row["values"] if tuple(entry[0]) != search_space.SEED]
        alike.setdefault(str(row["trial"]) if apart else json.dumps(values, default=str), []).append(row)
    out: list[dict[str, Any]] = []
    for number, members in enumerate(alike.values()):
        counted = [float(row["value"]) for row in members if _counts(row)]
        mean = math.fsum(counted) / len(counted) if counted else None
        out += [{**row, "value_mean": mean, "value_n": len(counted), "setting": number} for row in members]

    def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
        lonely = row["value_mean"] is None
        own = (row["value"] is None, -sign * (row["value"] or 0.0))
        failed = row["status"] == "failed"
        # A trial without a value stays with its setting; a failed one comes after all others.
        return (failed, lonely, -sign * (row["value_mean"] or 0.0), row["setting"], *own)

    return sorted(out, key=place)


def _counts(row: Mapping[str, Any]) -> bool:
    return row["value"] is not None and row["status"] != "failed"


def _best_header(best: Mapping[str, Any], metric: str) -> str:
    """The comment at the head of best.yaml: the value that the setting reached."""
    if best["value_n"] == 1:
        return f"# {best['trial']}: {metric} {best['value']:.6g} after {best['timesteps']:,} steps\n"
    return f"# {metric} {best['value_mean']:.6g}, the mean of {best['value_n']} seeds; the best of them is {best['trial']}\n"


def _row(directory: Path, trial: TrialValues, metric: str, ended: str | None) -> dict[str, Any]:
    run = Run(directory)
    meta = run.meta()
    rows = read_jsonl(run.metrics_path)
    changed = meta.get("trial")
    values = trial.values if not isinstance(changed, list) else {tuple(map(str, path)): value for path, value in changed}
    last = rows[-1] if rows else {}
    status = ended or ("waiting" if not (directory / CONFIG).exists() else _open_status(str(meta.get("status", "running"))))
    row: dict[str, Any] = {
        "trial": trial.name,
        "status": status,
        "settings": {display_key(path): value for path, value in values.items()},
        "value": _last(rows, metric),
        "episode_return_mean": _last(rows, "episode_return_mean"),
        "timesteps": int(last.get("timesteps") or 0),
        "iterations": int(last.get("iterations") or 0),
        "time_s": float(last.get("time_s") or 0.0),
        "run_dir": str(directory),
        "checkpoint": _checkpoint(directory),
        "error": meta.get("error") if status == "failed" else None,
        "exploited": len(meta.get("exploited", [])),
        "values": [[list(path), value] for path, value in values.items()],
    }
    return row


def _open_status(status: str) -> str:
    """The status of a trial that has not ended, whatever the status of its run."""
    return "interrupted" if status in ("finished", "running", "interrupted", "failed") else status


def _last(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return next((float(row[name]) for row in reversed(rows) if isinstance(row.get(name), (int, float))), None)


def _metric_names(directory: Path) -> set[str]:
    return {name for row in read_jsonl(Run(directory).metrics_path)[-1:] for name in row}


def _checkpoint(directory: Path) -> str | None:
    names = checkpoint.names(LocalStore(directory)) if (directory / checkpoint.FOLDER).is_dir() else []
    return str(directory / checkpoint.FOLDER / names[-1]) if names else None


def display_key(path: Sequence[str]) -> str:
    """A key relative to `config:`."""
    return ".".join(path[1:] if path[0] == "config" else path)


def _flatten_row(row: Mapping[str, Any]) -> dict[str, Any]:
    fixed = {key: value for key, value in row.items() if key not in ("settings", "values", "setting")}
    first = {"trial": fixed.pop("trial"), "status": fixed.pop("status")}
    return first | {key: value for key, value in row["settings"].items() if key not in fixed} | fixed


def _as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read_curve(run: Path, metric: str, over: str) -> list[tuple[float, float]]:
    """(x, y) points of one metric of a run; empty if it has none."""
    rows = read_jsonl(run / "metrics.jsonl")
    return [
        (float(row[over]), float(row[metric]))
        for row in rows
        if isinstance(row.get(metric), (int, float)) and isinstance(row.get(over), (int, float))
    ]


# -- plot -----------------------------------------------------------------------------------------------------------------


def draw(result: SweepResult, out: Path) -> Path:
    """Plot the curves of the trials and, if one number was searched, the value over it. Raises NotFound if no trial has a curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    drawn = [(row, found) for row in result.results if (found := read_curve(Path(row["run_dir"]), result.metric, "timesteps"))]
    if not drawn:
        raise NotFound(f"No trial of {result.directory} has values of {result.metric!r}.")
    key = _single_numeric_key(result)
    figure = Figure(figsize=(13 if key else 8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2 if key else 1, squeeze=False)[0]
    for row, curve in drawn[:_MAX_CURVES]:
        axes[0].plot(*zip(*curve, strict=True), linewidth=1.5, label=", ".join(_settings(row)) or row["trial"])
    _style(axes[0], "timesteps", result.metric)
    axes[0].xaxis.set_major_formatter(lambda v, _: f"{v / 1000:g}k" if v >= 1000 else f"{v:g}")
    if len(drawn) > 1:
        axes[0].legend(fontsize=7, loc="best")
    if key is not None:
        name = display_key(key.path)
        rows = [row for row in result.results if row["value"] is not None]
        axes[1].scatter([row["settings"][name] for row in rows], [row["value"] for row in rows], s=24)
        if _spans_magnitudes([row["settings"][name] for row in rows]):
            axes[1].set_xscale("log")
        _style(axes[1], name, result.metric)
    figure.savefig(out)
    return out


def _settings(row: Mapping[str, Any]) -> list[str]:
    return [f"{name} {search_space.format_value(value)}" for name, value in row["settings"].items()]


def _single_numeric_key(result: SweepResult) -> SearchedKey | None:
    keys = [key for key in result.searched if key.path != search_space.SEED]
    if len(keys) != 1:
        return None
    values = [row["settings"].get(display_key(keys[0].path)) for row in result.results]
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return keys[0] if numbers else None


def _spans_magnitudes(values: Sequence[float]) -> bool:
    positive = [value for value in values if value > 0]
    return len(positive) == len(values) and bool(values) and math.log10(max(values) / min(values)) > 1


def _style(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(y.replace("_", " "))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
