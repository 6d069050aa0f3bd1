"""Consistent sizes of a batch: environments per worker, steps per segment, and steps of the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ludus.config.schema import AlgorithmConfig

ASYNC_STEPS = 32
"""Default steps of a segment for asynchronous sampling: short segments are fresher."""

REPLAYED_STEPS = 4
"""Default steps of a segment for algorithms with a replay buffer."""

_MINIMUM = 8
"""Minimum number of environments per worker and steps per segment that is chosen automatically."""


def batch_shape(config: AlgorithmConfig) -> tuple[int, int, int]:
    """Return (environments per worker, steps per segment, steps per batch).

    With synchronous sampling, an update uses one segment of each environment of each worker. A given `train_batch_size`
    that is not a multiple of that is rounded up to whole fragments, as RLlib does.
    """
    envs, batch, steps = config.num_envs_per_worker, config.train_batch_size, config.rollout_fragment_length
    if config.replays:  # batches come from the replay buffer, independent of the segments
        return envs, steps or REPLAYED_STEPS, batch
    workers = 1 if config.num_workers == "auto" else max(1, config.num_workers)
    if config.batch_mode == "complete_episodes":  # a batch is the sum of complete episodes
        return envs, steps or max(1, round(batch / (envs * workers))), batch
    given = "train_batch_size" in config.model_fields_set
    if config.sampling == "async" and config.num_workers:
        if given and "num_envs_per_worker" not in config.model_fields_set and batch % (steps or 1) == 0:
            envs = _largest_divisor(batch // (steps or 1), envs)
        return _async_shape(config, envs, given)
    if not given:
        steps = steps or max(1, round(batch / (envs * workers)))
        return envs, steps, steps * envs * workers
    exact = _exact_shape(config, workers)
    return _rounded_shape(config, workers) if exact is None else (*exact, batch)


def _rounded_shape(config: AlgorithmConfig, workers: int) -> tuple[int, int, int]:
    envs, batch, steps = config.num_envs_per_worker, config.train_batch_size, config.rollout_fragment_length
    given = "num_envs_per_worker" in config.model_fields_set
    if steps is None:
        envs = envs if given else max(1, min(envs, batch // (workers * _MINIMUM)))
        steps = _ceil_div(batch, workers * envs)
        return envs, steps, workers * envs * steps
    rows = _ceil_div(batch, workers * steps)  # fragments of a worker
    envs = envs if given else _largest_divisor(rows, envs)
    rows = _ceil_div(rows, envs) * envs
    return envs, steps * rows // envs, workers * rows * steps


def _exact_shape(config: AlgorithmConfig, workers: int) -> tuple[int, int] | None:
    """Return (environments, steps) whose product is exactly the batch, or None. Fragments of one environment are joined."""
    envs, batch, steps = config.num_envs_per_worker, config.train_batch_size, config.rollout_fragment_length
    each, left = divmod(batch, workers)
    if left or (steps and each % steps):
        return None
    if each % (envs * (steps or 1)) == 0:
        return envs, each // envs
    if "num_envs_per_worker" in config.model_fields_set:
        return None
    rows = each // (steps or 1)
    most = _largest_divisor(rows, envs)
    return (most, each // most) if most >= min(_MINIMUM, rows) or steps else None


def _async_shape(config: AlgorithmConfig, envs: int, given: bool) -> tuple[int, int, int]:
    """Shape for asynchronous sampling, where a batch is any number of segments of a worker."""
    batch, steps = config.train_batch_size, config.rollout_fragment_length
    if steps is None:
        steps = _async_segment(batch // envs) if given and batch % envs == 0 else ASYNC_STEPS
    if not given:
        return envs, steps, max(1, round(batch / (envs * steps))) * envs * steps
    if batch % (envs * steps) and "num_envs_per_worker" not in config.model_fields_set:
        if config.rollout_fragment_length is None:
            envs = max(1, min(config.num_envs_per_worker, batch // _MINIMUM))
            steps = min(ASYNC_STEPS, _ceil_div(batch, envs))
        else:
            envs = _largest_divisor(_ceil_div(batch, steps), config.num_envs_per_worker)
    return envs, steps, _ceil_div(batch, envs * steps) * envs * steps


def _async_segment(steps: int) -> int:
    """Return the longest segment length up to ASYNC_STEPS that divides the steps of one environment."""
    most = _largest_divisor(steps, ASYNC_STEPS)
    return most if most >= _MINIMUM else ASYNC_STEPS if steps >= ASYNC_STEPS else steps


def _largest_divisor(number: int, limit: int) -> int:
    return max(each for each in range(1, min(number, limit) + 1) if number % each == 0)


def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)
