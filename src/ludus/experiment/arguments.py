"""From the arguments of `ludus.train` to one experiment, unchecked: those of a preset or file, with what the call sets differently."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludus import spellings
from ludus.config import ExperimentConfig
from ludus.errors import UsageError
from ludus.experiment.source import experiments_from, source_of
from ludus.game.registry import EnvLike, env_name
from ludus.model.custom_class import look_in
from ludus.sb3_cleanrl import TOTALS


def training_data(
    env: EnvLike | None,
    run: str | None,
    stop: Mapping[str, float] | None,
    *,
    preset: str | None,
    file: str | Path | None,
    experiment: str | None,
    name: str | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The experiment. Raises UsageError, ConfigError."""
    if preset is not None and file is not None:
        raise UsageError(f"preset={preset!r} and file={str(file)!r} both name an experiment.", "Keep one.")
    beside = {key: value for key, value in settings.items() if _belongs_beside_config(key)}
    config = {key: value for key, value in settings.items() if key not in beside}
    ends = {**(stop or {}), **{key: beside.pop(key) for key in TOTALS if key in beside}}
    named = None if env is None else env_name(env)
    source = source_of(None if file is None else Path(file), preset, None if preset is None else named)
    if source is None and named is None and not any(spellings.present(spellings.EXPERIMENT, key) == "env" for key in beside):
        raise UsageError("Which environment?", 'ludus.train("CartPole-v1"), or a preset=… or file=… that names one.')
    found = experiments_from(source, experiment, name, {"env": named, "run": run, **beside}, ends, {}, config, [])
    if len(found) > 1:
        raise UsageError(f"{source} holds {len(found)} experiments: {', '.join(found)}.", "Say which: experiment=…")
    if source is not None:
        look_in(source.parent)
    ((called, data),) = found.items()
    return {"name": called, **data}


def _belongs_beside_config(key: str) -> bool:
    top = spellings.EXPERIMENT
    return spellings.present(top, key) in ExperimentConfig.model_fields or key in spellings.TRANSLATED[top]
