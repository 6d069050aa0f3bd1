"""Playing whole episodes with a fixed policy: evaluations that do not disturb training."""

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
"""An episode that is longer is cut there, unless its environment is known to allow more. An Atari game may last 27,000."""

_NOISE_STEPS = 64


@dataclass(frozen=True)
class Score:
    """Whole episodes of one policy."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    complete: bool = True
    """Nobody interrupted it."""
    cut: int = 0
    """Episodes among them that did not end by themselves within the bound."""
    results: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of the numbers that episodes end with: their sum, and how many episodes told them."""
    sides: tuple[float, ...] = ()
    """Where several rows are a side of a match: the mean of each side in each match, which is one chance, not several."""
    videos: tuple[Path, ...] = ()
    """Of its first episodes, if they were recorded."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Bootstrapped 95 % interval of the mean."""
        return confidence_interval(self.sides or self.returns)

    def numbers(self) -> dict[str, float]:
        """Means of the results; of wins and losses with the 95 % interval of their share."""
        return summarize_results(self.results)

    @property
    def low(self) -> float:
        return self.interval[0]

    @property
    def high(self) -> float:
        return self.interval[1]


def shares(episodes: int, rows: int) -> Ints:
    """How many episodes each row plays: equal shares, so that short episodes are not counted more often than long ones."""
    quota = np.full(rows, episodes // rows)
    quota[: episodes % rows] += 1
    return quota


def longest_episode(env: str) -> int:
    """The bound on the steps of one episode."""
    spec = gym.registry.get(env)
    return max(EPISODE_STEPS, (spec.max_episode_steps or 0) if spec is not None else 0)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """The random numbers that everybody in this process shares go on afterwards as if nothing had been drawn inside."""
    kept = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])


@torch.inference_mode()
def play(
    policy: Policy,
    environments: Environments,
    episodes: int | Ints,
    seed: int,
    *,
    deterministic: bool = True,
    by_steps: bool = False,
    max_steps: int = EPISODE_STEPS,
    interrupted: Callable[[], bool] = lambda: False,
    group: int = 1,
    noise_seed: int | None = None,
) -> Score:
    """So many episodes in equal shares, or as many as `episodes` says for each row. Inside `policy.acting()`.

    `group`: so many rows are a side of a match. `noise_seed`: of the actions, where it is not `seed`.
    `by_steps`: these are numbers of steps, and every row plays whole episodes until it has made at least its share.

    Row i starts from `seed + i` and has random numbers of its own: who plays beside it makes no difference. An episode that
    has not ended after `max_steps` is cut there and counts as it is, and its row plays no further one. What is open when
    `interrupted` says so is left out, and so is what an environment did before it failed.
    """
    n = environments.num
    quota = shares(episodes, n) if isinstance(episodes, int) else np.array(episodes)
    noise = None if deterministic else _Noise(policy.distribution, seed if noise_seed is None else noise_seed, n)
    seen, state = environments.reset(seed), policy.initial_state(n)
    first, over = np.ones(n, np.bool_), np.zeros(n, np.bool_)
    running, length = np.zeros(n), np.zeros(n, np.int64)
    ended: list[list[tuple[float, int]]] = [[] for _ in range(n)]
    results = np.zeros((len(environments.results), 2))
    cut = 0
    while quota.any() and not interrupted():
        observation = map_tree(torch.from_numpy, map_tree(_stored, seen.observation))
        mask = None if seen.mask is None else torch.from_numpy(seen.mask | over[:, None])
        drawn = None if noise is None else noise.next()
        action, _, _, state = policy.step(observation, state, torch.from_numpy(first), mask, drawn)
        outcome = environments.step(policy.distribution.to_environment(map_tree(Tensor.numpy, action)))
        running += np.where(over, 0.0, outcome.reward)
        length += ~over
        done = (outcome.terminated | outcome.truncated) & ~over
        if outcome.results is not None:
            results += outcome.results[done & (quota > 0)].sum(axis=0)
        too_long = (length >= max_steps) & ~done & (quota > 0)
        for row in np.flatnonzero((done & (quota > 0)) | too_long):
            ended[row].append((float(running[row]), int(length[row])))
            quota[row] = 0 if too_long[row] else max(0, quota[row] - (length[row] if by_steps else 1))
        cut += int(too_long.sum())
        begun = done if environments.resets_at_once else over
        over = np.zeros(n, np.bool_) if environments.resets_at_once else done
        gone = done if outcome.lost is None else done | outcome.lost  # an episode whose environment failed is not scored
        running[gone], length[gone] = 0.0, 0
        first = begun if outcome.lost is None else begun | outcome.lost
        seen = outcome.seen
    whole = [episode for row in ended for episode in row]
    together = [ended[row : row + group] for row in range(0, n, group)] if group > 1 else []
    sides = [float(np.mean([r for r, _ in match])) for side in together for match in zip(*side, strict=False)]
    told = {name: (float(total), float(count)) for name, (total, count) in zip(environments.results, results, strict=True)}
    return Score(
        tuple(r for r, _ in whole),
        tuple(t for _, t in whole),
        complete=not quota.any(),
        cut=cut,
        results=told,
        sides=tuple(sides),
    )


class _Noise:
    """Noise of n rows, each from a stream of its own, drawn many steps at a time."""

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


def _stored(x: Array) -> Array:
    return x.astype(np.float32) if x.dtype == np.float64 else np.ascontiguousarray(x)
