"""Compares given settings with those of the run that they are to continue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ludus.config.overrides import remove_spellings
from ludus.config.schema import EMBEDDED
from ludus.config.translation import translate_config, translate_experiment
from ludus.errors import ConfigError
from ludus.experiments.resolve import ClusterOptions, resolve
from ludus.experiments.runs.remote_runs import display_path
from ludus.experiments.runs.run_dir import Run

CHANGEABLE = (
    "stop", "checkpoint_freq", "checkpoint_time_s", "checkpoint_at_end", "keep_checkpoints_num", "max_failures", "memory",
)  # fmt: skip
"""Keys that may change on resume: duration, checkpoints and transport, but not what the run learns."""

_LABELS = ("name", "description", "target")


_DERIVED_KEYS = ("config.min_time_s_per_iteration", "config.self_play.league")
"""Set exactly while `stop.training_iteration` is given, which may change; where this machine mounts the league."""


def resume_changes(directory: Path, data: Mapping[str, Any], cluster: ClusterOptions | None = None) -> dict[str, Any]:
    """The changed keys with their new values. Raises ConfigError if keys differ that may not change."""
    saved = Run.open(directory).config()
    before = resolve(saved, cluster).experiment.model_dump(mode="json")
    now = resolve(_with_workers_of(before, data), cluster).experiment.model_dump(mode="json")
    wrong = [
        f"{path} is {theirs!r} in the run, but {ours!r} in the settings."
        for key in now
        if key not in (*CHANGEABLE, *_LABELS)
        for path, theirs, ours in _differences(key, before.get(key), now[key])
        if path not in _DERIVED_KEYS
    ]
    if wrong:
        hint = (
            f"--resume {display_path(directory)} continues it as it is; without --resume a new run begins, from its weights with --restore."
            if now["memory"] == EMBEDDED
            else "The same settings, with the same -n, continue it; another location (-e, or --store) starts a new run. "
            "Workers can be added at any time: ludus fleet worker --memory URL --store PLACE."
        )
        raise ConfigError("\n".join([f"{display_path(directory)} cannot be continued with other settings:", *wrong]), hint)
    return {key: now[key] for key in CHANGEABLE if now[key] != before[key]}


def _with_workers_of(before: Mapping[str, Any], data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace `num_workers: auto` by the number that was chosen when the run started."""
    given = translate_experiment(data).data
    inner = given.get("config", {})
    if not isinstance(inner, Mapping) or translate_config(inner).data.get("num_workers") != "auto":
        return data
    chosen = dict(inner)
    remove_spellings(chosen, "config", ["num_workers"])
    return {**data, "config": chosen | {"num_workers": before["config"]["num_workers"]}}


def _differences(path: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*before, *now]):
            yield from _differences(f"{path}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield path, before, now
