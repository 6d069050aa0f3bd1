"""What a file and its options say, against what the run was begun with that they are to continue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ludus.config.overrides import remove_spellings
from ludus.config.translation import translate_config, translate_experiment
from ludus.errors import ConfigError
from ludus.experiments.resolve import ClusterOptions, resolve
from ludus.experiments.runs.remote_runs import shown
from ludus.experiments.runs.run_dir import Run
from ludus.transport.message_stream import EMBEDDED

CHANGEABLE = (
    "stop", "checkpoint_freq", "checkpoint_time_s", "checkpoint_at_end", "keep_checkpoints_num", "max_failures", "memory",
)  # fmt: skip
"""Keys that say how long a run goes on, what is kept of it and who brings the experience; not what it learns."""

_FOR_PEOPLE = ("name", "description", "target")


_OF_REPORTS = ("config.min_time_s_per_iteration",)
"""Not a number exactly while `stop.training_iteration` is given, which may be changed."""


def changes(directory: Path, data: Mapping[str, Any], cluster: ClusterOptions | None = None) -> dict[str, Any]:
    """The keys in which the run goes on differently, with their new values. Raises ConfigError if others differ."""
    saved = Run.open(directory).config()
    before = resolve(saved, cluster).experiment.model_dump(mode="json")
    now = resolve(_with_workers_of(before, data), cluster).experiment.model_dump(mode="json")
    wrong = [
        f"{path} is {theirs!r} in the run, and is to be {ours!r}."
        for key in now
        if key not in (*CHANGEABLE, *_FOR_PEOPLE)
        for path, theirs, ours in _differing(key, before.get(key), now[key])
        if path not in _OF_REPORTS
    ]
    if wrong:
        hint = (
            f"--resume {shown(directory)} continues it as it is; without --resume a new run begins, from its weights with --restore."
            if now["memory"] == EMBEDDED
            else "The same settings, with the same -n, continue it; another place (-e, or --store) begins a new run. "
            "More workers may come at any time: ludus fleet worker --memory URL --store PLACE."
        )
        raise ConfigError("\n".join([f"{shown(directory)} cannot be continued with other settings:", *wrong]), hint)
    return {key: now[key] for key in CHANGEABLE if now[key] != before[key]}


def _with_workers_of(before: Mapping[str, Any], data: Mapping[str, Any]) -> Mapping[str, Any]:
    """`num_workers: auto` was chosen when the run began."""
    given = translate_experiment(data).data
    inner = given.get("config", {})
    if not isinstance(inner, Mapping) or translate_config(inner).data.get("num_workers") != "auto":
        return data
    chosen = dict(inner)
    remove_spellings(chosen, "config", ["num_workers"])
    return {**data, "config": chosen | {"num_workers": before["config"]["num_workers"]}}


def _differing(path: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*before, *now]):
            yield from _differing(f"{path}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield path, before, now
