"""Builds the experiment of `ludus.train` from a preset or file and the keyword arguments. Does not validate it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludus.config.aliases import rllib_keys
from ludus.config.aliases.sb3_cleanrl import TOTALS
from ludus.config.schema import ExperimentConfig
from ludus.envs.registry import EnvLike, env_name
from ludus.errors import UsageError
from ludus.experiments.source.experiment_source import experiments_from, read_source


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
    beside = {key: value for key, value in settings.items() if _is_experiment_key(key)}
    config = {key: value for key, value in settings.items() if key not in beside}
    ends = {**(stop or {}), **{key: beside.pop(key) for key in TOTALS if key in beside}}
    named = None if env is None else env_name(env)
    source = read_source(None if file is None else Path(file), preset, None if preset is None else named)
    if (
        source is None
        and named is None
        and not any(rllib_keys.canonical_name(rllib_keys.EXPERIMENT, key) == "env" for key in beside)
    ):
        raise UsageError("Which environment?", 'ludus.train("CartPole-v1"), or a preset=… or file=… that names one.')
    found = experiments_from(source, experiment, name, {"env": named, "run": run, **beside}, ends, {}, config, [])
    if len(found) > 1:
        raise UsageError(f"{source} holds {len(found)} experiments: {', '.join(found)}.", "Say which: experiment=…")
    if source is not None:
        from ludus.models.custom.loader import add_search_directory

        add_search_directory(source.parent)
    ((called, data),) = found.items()
    return {"name": called, **data}


def _is_experiment_key(key: str) -> bool:
    top = rllib_keys.EXPERIMENT
    return rllib_keys.canonical_name(top, key) in ExperimentConfig.model_fields or key in rllib_keys.TRANSLATED[top]
