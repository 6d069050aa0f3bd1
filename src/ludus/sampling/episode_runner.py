"""Whole episodes of a fixed policy, for evaluations during training."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from ludus.core.statistics import confidence_interval, summarize_results
from ludus.core.tree import Array, map_tree
from ludus.core.types import Ints
from ludus.envs.vector_env import Environments
from ludus.models.distributions import Distribution
from ludus.models.policy import Policy

EPISODE_STEPS = 30_000
"""Step limit of an episode, unless the environment allows more. An Atari game may last 27,000 steps."""

_NOISE_STEPS = 64


@dataclass(frozen=True)
class Score:
    """Returns and lengths of whole episodes of one policy."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    complete: bool = True
    """Not interrupted."""
    cut: int = 0
    """Number of episodes cut at the step limit."""
    results: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Sum of each episode result, and the number of episodes that reported it."""
    sides: tuple[float, ...] = ()
    """If several rows form a side of a match: the mean return of each side in each match, which is one sample."""
    videos: tuple[Path, ...] = ()
    """Videos of the first episodes, if recorded."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Bootstrapped 95 % confidence interval of the mean."""
        return confidence_interval(self.sides or self.returns)

    def numbers(self) -> dict[str, float]:
        """Means of the results; for wins and losses with the 95 % interval of their share."""
        return summarize_results(self.results)

    @property
    def low(self) -> float:
        return self.interval[0]

    @property
    def high(self) -> float:
        return self.interval[1]


def episode_quota(episodes: int, rows: int) -> Ints:
    """Return the number of episodes per row: equal shares, so that short episodes are not over-represented."""
    quota = np.full(rows, episodes // rows)
    quota[: episodes % rows] += 1
    return quota


def episode_step_limit(env: str) -> int:
    """Return the step limit of one episode."""
    spec = gym.registry.get(env)
    return max(EPISODE_STEPS, (spec.max_episode_steps or 0) if spec is not None else 0)


@contextlib.contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the global random state of Python, NumPy and PyTorch after the block."""
    saved = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(saved[0])
            np.random.set_state(saved[1])


@dataclass(frozen=True)
class EpisodePlan:
    """How many episodes to play, and how long."""

    amount: int | Ints
    """Number of episodes in total, split equally between the rows, or one number per row."""
    by_steps: bool = False
    """`amount` is in steps: every row plays whole episodes until it has made at least its share."""
    max_steps: int = EPISODE_STEPS
    """An episode is cut here and counts as it is; its row plays no further one."""
    group: int = 1
    """Number of neighbouring rows that form one side of a match."""


@torch.inference_mode()
def play(
    policy: Policy,
    environments: Environments,
    plan: EpisodePlan,
    seed: int,
    *,
    deterministic: bool = True,
    interrupted: Callable[[], bool] = lambda: False,
    noise_seed: int | None = None,
) -> Score:
    """Play whole episodes inside `policy.acting()`. `noise_seed`: seed of the actions if it is not `seed`.

    Row i starts from `seed + i` and has its own random numbers, so results do not depend on the other rows. Episodes that are open when
    `interrupted` returns True, or whose environment fails, are not counted.
    """
    n = environments.num
    quota = episode_quota(plan.amount, n) if isinstance(plan.amount, int) else np.array(plan.amount)
    noise = None if deterministic else _Noise(policy.distribution, seed if noise_seed is None else noise_seed, n)
    observations, state = environments.reset(seed), policy.initial_state(n)
    first, over = np.ones(n, np.bool_), np.zeros(n, np.bool_)
    running, length = np.zeros(n), np.zeros(n, np.int64)
    ended: list[list[tuple[float, int]]] = [[] for _ in range(n)]
    results = np.zeros((len(environments.results), 2))
    cut = 0
    while quota.any() and not interrupted():
        observation = map_tree(_to_tensor, observations.observation)
        mask = None if observations.mask is None else torch.from_numpy(observations.mask | over[:, None])
        drawn = None if noise is None else noise.next()
        action, _, _, state = policy.step(observation, state, torch.from_numpy(first), mask, drawn)
        step = environments.step(policy.distribution.to_environment(map_tree(Tensor.numpy, action)))
        running += np.where(over, 0.0, step.reward)
        length += ~over
        done = (step.terminated | step.truncated) & ~over
        if step.results is not None:
            results += step.results[done & (quota > 0)].sum(axis=0)
        too_long = (length >= plan.max_steps) & ~done & (quota > 0)
        for row in np.flatnonzero((done & (quota > 0)) | too_long):
            ended[row].append((float(running[row]), int(length[row])))
            quota[row] = 0 if too_long[row] else max(0, quota[row] - (length[row] if plan.by_steps else 1))
        cut += int(too_long.sum())
        started = done if environments.same_step_autoreset else over
        over = np.zeros(n, np.bool_) if environments.same_step_autoreset else done
        closed = done if step.lost is None else done | step.lost  # an episode whose environment failed is not counted
        running[closed], length[closed] = 0.0, 0
        first = started if step.lost is None else started | step.lost
        observations = step.observations
    whole = [episode for row in ended for episode in row]
    together = [ended[row : row + plan.group] for row in range(0, n, plan.group)] if plan.group > 1 else []
    sides = [float(np.mean([r for r, _ in match])) for side in together for match in zip(*side, strict=False)]
    totals = {name: (float(total), float(count)) for name, (total, count) in zip(environments.results, results, strict=True)}
    return Score(
        tuple(r for r, _ in whole),
        tuple(t for _, t in whole),
        complete=not quota.any(),
        cut=cut,
        results=totals,
        sides=tuple(sides),
    )


class _Noise:
    """Action noise of n rows, each with its own random stream, drawn many steps at a time."""

    def __init__(self, distribution: Distribution, seed: int, rows: int) -> None:
        self._distribution = distribution
        self._generators = [torch.Generator().manual_seed(seed + row) for row in range(rows)]
        self._steps: Iterator[Tensor] = iter(())

    def next(self) -> Tensor:
        try:
            return next(self._steps)
        except StopIteration:
            drawn = torch.stack([self._distribution.noise((_NOISE_STEPS,), g) for g in self._generators], dim=1)
            self._steps = iter(drawn)
            return next(self._steps)


def _to_tensor(x: Array) -> Tensor:
    return torch.from_numpy(x.astype(np.float32) if x.dtype == np.float64 else np.ascontiguousarray(x))
