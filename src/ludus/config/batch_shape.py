"""How a batch is made up: environments of a worker, steps of a segment, and steps of the whole batch, which fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ludus.config.schema import AlgorithmConfig

ASYNC_STEPS = 32
"""Default steps of a segment for asynchronous sampling: short segments are fresher."""

REPLAYED_STEPS = 4
"""Default steps of a segment for algorithms with a replay buffer."""

_FEWEST = 8
"""Environments of a worker, and steps of a segment, below which they are not chosen for anybody."""


def shape_of_batch(config: AlgorithmConfig) -> tuple[int, int, int]:
    """(environments of a worker, steps of a segment, steps of a batch).

    Where sampling and learning take turns, an update learns from one segment of every environment of every worker. A
    `train_batch_size` that is given and does not come out even is rounded up to whole fragments, as RLlib collects them.
    """
    envs, batch, steps = config.num_envs_per_worker, config.train_batch_size, config.rollout_fragment_length
    if config.replays:  # a batch is drawn from what is stored: it has nothing to do with what a segment brings
        return envs, steps or REPLAYED_STEPS, batch
    workers = 1 if config.num_workers == "auto" else max(1, config.num_workers)
    if config.batch_mode == "complete_episodes":  # a batch is what whole episodes add up to
        return envs, steps or max(1, round(batch / (envs * workers))), batch
    given = "train_batch_size" in config.model_fields_set
    if config.sampling == "async" and config.num_workers:
        if given and "num_envs_per_worker" not in config.model_fields_set and batch % (steps or 1) == 0:
            envs = _most_that_divide(batch // (steps or 1), envs)
        return _without_turns(config, envs, given)
    if not given:
        steps = steps or max(1, round(batch / (envs * workers)))
        return envs, steps, steps * envs * workers
    fitting = _fitting(config, workers)
    return _rounded_up(config, workers) if fitting is None else (*fitting, batch)


def _rounded_up(config: AlgorithmConfig, workers: int) -> tuple[int, int, int]:
    envs, batch, steps = config.num_envs_per_worker, config.train_batch_size, config.rollout_fragment_length
    asked = "num_envs_per_worker" in config.model_fields_set
    if steps is None:
        envs = envs if asked else max(1, min(envs, batch // (workers * _FEWEST)))
        steps = _quotient_up(batch, workers * envs)
        return envs, steps, workers * envs * steps
    rows = _quotient_up(batch, workers * steps)  # fragments of a worker
    envs = envs if asked else _most_that_divide(rows, envs)
    rows = _quotient_up(rows, envs) * envs
    return envs, steps * rows // envs, workers * rows * steps


def _fitting(config: AlgorithmConfig, workers: int) -> tuple[int, int] | None:
    """Environments and steps that make up the batch. Several fragments of one environment are one longer segment."""
    envs, batch, steps = config.num_envs_per_worker, config.train_batch_size, config.rollout_fragment_length
    each, left = divmod(batch, workers)
    if left or (steps and each % steps):
        return None
    if each % (envs * (steps or 1)) == 0:
        return envs, each // envs
    if "num_envs_per_worker" in config.model_fields_set:
        return None
    rows = each // (steps or 1)
    most = _most_that_divide(rows, envs)
    return (most, each // most) if most >= min(_FEWEST, rows) or steps else None


def _without_turns(config: AlgorithmConfig, envs: int, given: bool) -> tuple[int, int, int]:
    """A batch is any number of segments of a worker."""
    batch, steps = config.train_batch_size, config.rollout_fragment_length
    if steps is None:
        steps = _segment_of(batch // envs) if given and batch % envs == 0 else ASYNC_STEPS
    if not given:
        return envs, steps, max(1, round(batch / (envs * steps))) * envs * steps
    if batch % (envs * steps) and "num_envs_per_worker" not in config.model_fields_set:
        if config.rollout_fragment_length is None:
            envs = max(1, min(config.num_envs_per_worker, batch // _FEWEST))
            steps = min(ASYNC_STEPS, _quotient_up(batch, envs))
        else:
            envs = _most_that_divide(_quotient_up(batch, steps), config.num_envs_per_worker)
    return envs, steps, _quotient_up(batch, envs * steps) * envs * steps


def _segment_of(steps: int) -> int:
    """The longest segment up to the usual one of which so many steps of an environment are made up."""
    most = _most_that_divide(steps, ASYNC_STEPS)
    return most if most >= _FEWEST else ASYNC_STEPS if steps >= ASYNC_STEPS else steps


def _most_that_divide(number: int, limit: int) -> int:
    return max(each for each in range(1, min(number, limit) + 1) if number % each == 0)


def _quotient_up(number: int, by: int) -> int:
    return -(-number // by)
