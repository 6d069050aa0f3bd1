"""Units of iterations: `iterations` counts updates; `training_iteration` counts iterations as RLlib does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludus.config.schema import AlgorithmConfig, StopConfig
from ludus.config.validation import parse_algorithm_config

_RLLIB_ITERATION: Mapping[str, str] = {"DQN": "1,000 steps or more", "APPO": "10 seconds or more", "IMPALA": "10 seconds or more"}
"""From RLlib's default min_sample_timesteps_per_iteration and min_time_s_per_iteration; an iteration of PPO is one batch, as here."""


def resolve_iterations(stop: StopConfig, config: AlgorithmConfig) -> tuple[StopConfig, AlgorithmConfig]:
    """Replace `training_iteration` by `iterations` where both count updates, and set the time between reports."""
    if stop.training_iteration is not None and config.least_iteration == (0, 0.0):
        fewer = min(stop.training_iteration, stop.iterations or stop.training_iteration)
        stop = stop.model_copy(update={"iterations": fewer, "training_iteration": None})
    if stop.training_iteration is None:
        config = config.model_copy(update={"min_time_s_per_iteration": config.report_every_s})
    return stop, config


def iteration_keys(experiment: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Keys that count updates in this experiment but iterations in RLlib."""
    return [
        *(["checkpoint_freq"] if experiment.get("checkpoint_freq") else []),
        *(["evaluation_interval"] if _counts_iterations(config) else []),
    ]


def _counts_iterations(config: Mapping[str, Any]) -> bool:
    by = config.get("evaluation_interval_unit", "iterations")
    return config.get("evaluation_interval") not in (None, 0, "checkpoint") and by == "iterations"


def iteration_notice(run: str, config: AlgorithmConfig, keys: list[str]) -> str | None:
    """A notice for users of RLlib; None if the keys mean the same."""
    if run not in _RLLIB_ITERATION or not keys:
        return None
    count = "counts" if len(keys) == 1 else "count"
    return (
        f"{' and '.join(keys)} {count} updates ({steps_of_update(config):,} steps sampled for each); "
        f"an iteration of RLlib's {run} is {_RLLIB_ITERATION[run]}."
    )


def iteration_notice_of_file(
    run: str, schema: type[AlgorithmConfig], experiment: Mapping[str, Any], config: Mapping[str, Any]
) -> str | None:
    """As `iteration_notice`, for an unresolved experiment. `config`: as written, without search values."""
    keys = iteration_keys(experiment, config)
    if run not in _RLLIB_ITERATION or not keys:
        return None
    return iteration_notice(
        run, parse_algorithm_config(schema, config, collated=True), keys
    )  # whether a batch fits is no matter here


def steps_of_update(config: AlgorithmConfig) -> int:
    """Environment steps that are sampled for one update."""
    if not config.replays:
        return config.train_batch_size
    workers = 0 if config.num_workers == "auto" else config.num_workers
    return config.num_envs_per_worker * config.steps * (1 if config.sampling == "async" else max(1, workers))
