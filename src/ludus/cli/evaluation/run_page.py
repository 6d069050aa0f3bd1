"""The page of `ludus runs show`: facts, learning curves, checkpoints and changed settings of a run."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ludus.core.formatting import format_duration, format_number, sparkline
from ludus.core.metrics import read_jsonl
from ludus.experiments.control.training_display import evaluated_win_rates, format_with_interval, is_zero_sum, training_win_rates
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.checkpoint import BestRecord
from ludus.experiments.runs.compare import defining_settings
from ludus.experiments.runs.remote_runs import display_path
from ludus.experiments.runs.run_dir import Run, find_runs, is_script
from ludus.experiments.runs.run_names import RUNS, short_name
from ludus.experiments.runs.run_status import read_status
from ludus.experiments.runs.tracking import flatten

_TRAINED, _EVALUATED = "episode_return_mean", "evaluation/return_mean"
_FOLDERS = ("videos", "rollouts", "exports", "plots", "recordings")
_FILES_SHOWN = 3
_LABEL_WIDTH = 13
_CURVE_WIDTH = 60


@dataclass(frozen=True)
class RunFacts:
    """The data of a run's page."""

    place: str
    short: str
    config: Mapping[str, Any]
    meta: Mapping[str, Any]
    state: str
    rows: Sequence[Mapping[str, Any]] = ()
    checkpoints: Sequence[str] = ()
    best: BestRecord | None = None
    changed: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[str] = ()


def collect(directory: Path) -> RunFacts:
    """Read the facts of a run from its directory or store. Raises NotFound, StoreError."""
    run = Run(directory) if is_script(directory) else Run.open(directory)
    config = {} if is_script(directory) else run.config()
    return RunFacts(
        place=display_path(directory),
        short=short_name(directory, [*find_runs(RUNS)]),
        config=config,
        meta=run.meta(),
        state=read_status(directory, fetched=True).sentence,
        rows=read_jsonl(run.metrics_path),
        checkpoints=checkpoint.names(run.store),
        best=checkpoint.read_best(run.store),
        changed=changed_settings(config),
        files=written_files(directory),
    )


_WRITTEN_BY_EVERY_RUN = ("seed", "min_time_s_per_iteration")
"""Keys that a run stores with the value it resolved, whether the user set them or not."""


def changed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `config:` that differ from the algorithm's defaults. Imports no code that the run names."""
    from ludus.algorithms.base import ALGORITHMS, algorithm_class
    from ludus.config.schema import AlgorithmConfig
    from ludus.config.validation import dump_config, parse_algorithm_config

    name = config.get("run", "PPO")
    schema = algorithm_class(name).Config if name in ALGORITHMS else AlgorithmConfig
    defaults = flatten(dump_config(parse_algorithm_config(schema, {})))
    own = flatten(config.get("config") or {})
    derived = {key for key, value in defining_settings({f"config.{k}": v for k, v in own.items()}).items() if value is None}
    return {
        key: value
        for key, value in own.items()
        if key not in _WRITTEN_BY_EVERY_RUN
        and defaults.get(key) != value
        and f"config.{key}" not in derived
        and not (value is None and key not in defaults)
    }


def written_files(directory: Path) -> list[str]:
    """Videos, rollouts, exports … in the run's directory, newest first, by path in the run."""
    found = [path for folder in _FOLDERS for path in (directory / folder).rglob("*") if path.is_file()]
    return [str(path.relative_to(directory)) for path in sorted(found, key=lambda path: -path.stat().st_mtime)]


def page_lines(facts: RunFacts, now: float, width: int = 100) -> Iterator[str]:
    """The lines of the page. `now`: seconds since 1970. Text may be longer than `width`, curves are not."""
    what = f"{facts.config.get('run', '')} on {facts.config.get('env')}" if facts.config else "Trial of a script"
    yield what.strip()
    for label, text in page_rows(facts, now, min(_CURVE_WIDTH, width - _LABEL_WIDTH - 2)):
        first, *rest = text.split("\n")
        yield f"{label:<{_LABEL_WIDTH}}{first}".rstrip()
        yield from (f"{'':<{_LABEL_WIDTH}}{line}" for line in rest)


def page_rows(facts: RunFacts, now: float, curve_width: int) -> Iterator[tuple[str, str]]:
    config, meta = facts.config, facts.meta
    yield (
        "run",
        facts.place
        if facts.place.endswith(facts.short) and facts.short == Path(facts.place).name
        else f"{facts.place}  ({facts.short})",
    )
    if config:
        yield "experiment", f"{config['name']}, seed {(config.get('config') or {}).get('seed', '–')}"
    if config.get("description"):
        yield "", str(config["description"])
    if meta.get("tags"):
        yield "tags", ", ".join(meta["tags"])
    yield "state", facts.state
    yield "time", _start_and_duration(meta, facts.rows, now)
    yield from _numbers(facts.rows, curve_width)
    yield "checkpoints", _checkpoints(facts)
    if config:
        changed = "\n".join(f"{key}: {_plain(value)}" for key, value in facts.changed.items())
        yield "changed", changed or "nothing; every setting is the default"
        stop = {key: value for key, value in (config.get("stop") or {}).items() if value is not None}
        yield "stop", ", ".join(f"{key} = {_plain(value)}" for key, value in stop.items()) or "–"
    if facts.files:
        more = len(facts.files) - _FILES_SHOWN
        yield "files", "\n".join([*facts.files[:_FILES_SHOWN], *([f"… and {more} more"] if more > 0 else [])])
    if meta.get("command"):
        yield "command", shlex.join([Path(str(meta["command"][0])).name, *map(str, meta["command"][1:])])
    if versions := meta.get("versions"):
        kept = (f"{name} {version}" for name, version in versions.items() if name in ("ludus", "torch", "python"))
        yield "made with", ", ".join(kept)


def _start_and_duration(meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], now: float) -> str:
    trained = next((float(row["time_s"]) for row in reversed(rows) if row.get("time_s") is not None), None)
    took = "" if trained is None else f", {format_duration(trained)} of training"
    try:
        started = datetime.fromisoformat(str(meta["started"]))
    except (KeyError, ValueError):
        return f"started at an unknown time{took}"
    ago = format_duration(max(0.0, now - started.timestamp()))
    host = f" on {meta['host']}" if meta.get("host") else ""
    return f"started {started:%Y-%m-%d %H:%M}{host}, {ago} ago{took}"


def _numbers(rows: Sequence[Mapping[str, Any]], curve_width: int) -> Iterator[tuple[str, str]]:
    last = next((row for row in reversed(rows) if row.get("time_s") is not None), rows[-1] if rows else {})
    if not last:
        yield "progress", "no report yet"
        return
    speed = f", {last['fps']:,.0f} steps/s" if last.get("fps") else ""
    yield "progress", f"{last.get('timesteps', 0):,} steps, {last.get('episodes', 0):,} episodes{speed}"
    if rates := _win_rates(rows):
        yield "win rate", rates
    trained = [row for row in rows if row.get(_TRAINED) is not None]
    if not (rates and is_zero_sum(last)):  # the return of all agents together is always 0
        yield "training", _series(trained, _TRAINED, curve_width) if trained else "no episode ended"
    evaluated = [row for row in rows if row.get(_EVALUATED) is not None]
    if evaluated:
        yield "evaluation", _series(evaluated, _EVALUATED, curve_width)


def _win_rates(rows: Sequence[Mapping[str, Any]]) -> str:
    """The newest win rates of evaluation and training, one line each; empty if there are no matches."""
    lines = []
    for where, read in {"evaluation": evaluated_win_rates, "training": training_win_rates}.items():
        found = next((rates for row in reversed(rows) if (rates := read(_plain_numbers(row)))), [])
        lines += [f"{'; '.join(found)} ({where})"] if found else []
    return "\n".join(lines)


def _series(rows: Sequence[Mapping[str, Any]], metric: str, width: int) -> str:
    """`return 220.7 at the end, best 231.5 at 50,000 steps`, and the curve below."""
    best = max(rows, key=lambda row: float(row[metric]))
    plain = _plain_numbers(rows[-1])
    last = format_with_interval(plain[metric], plain, metric.removesuffix("_mean"))
    text = f"return {last} at the end, best {format_number(float(best[metric]))} at {best.get('timesteps', math.nan):,} steps"
    curve = sparkline([float(row[metric]) for row in rows], width)
    return f"{text}\n{curve}" if curve else text


def _plain_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}


def _checkpoints(facts: RunFacts) -> str:
    names = facts.checkpoints
    if not names:
        return "none"
    listed = names[0] if len(names) == 1 else f"{len(names)}, {names[0]} to {names[-1]}"
    if facts.best is None:
        return listed
    by = {"evaluation": "evaluation return", "training": "training return"}.get(facts.best.by, facts.best.by)
    return f"{listed}; best: {facts.best.checkpoint} ({by} {format_number(facts.best.score)})"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
