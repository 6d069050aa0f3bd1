"""What a MatchRunner needs of environments, whether they are single copies or one that steps many matches."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch

from ludus.core.tree import Tree
from ludus.core.types import Bools, Ints
from ludus.envs.matches.rows import RowStep
from ludus.envs.pettingzoo import AgentSpaces

_OF_ACTIONS = 1  # the random stream of a match for actions, apart from that of its resets


class MatchStreams:
    """Random streams of one copy. They depend on `seed` and the number of the copy alone."""

    def __init__(self, seed: int, number: int) -> None:
        self._resets = np.random.default_rng([seed, number])
        own_seeds = np.random.SeedSequence([seed, number, _OF_ACTIONS])
        self.random = np.random.default_rng(own_seeds)
        """Of random actions."""
        self.generator = torch.Generator().manual_seed(int(own_seeds.generate_state(1, np.uint64)[0] >> 1))
        """Of the actions of policies, if every copy has its own."""

    def next_seed(self) -> int:
        """The seed of the next reset."""
        return int(self._resets.integers(1 << 31))


class MatchSource(Protocol):
    """Steps the matches of a MatchRunner. Rows are numbered as in `ludus.envs.matches.rows`."""

    @property
    def over(self) -> Bools:
        """[N] matches that are over, or have not begun."""
        ...

    @property
    def late_rewards(self) -> int:
        """Number of rewards for agents that had left or not yet arrived."""
        ...

    def begin(self, numbers: Sequence[int]) -> RowStep:
        """Start the next matches of these copies, up to their first turn. Raises EnvironmentFault."""
        ...

    def acting_rows(self, playing: Bools | None) -> Ints:
        """Rows that act now, of all matches or of those that are `playing`."""
        ...

    def observation(self, rows: Ints) -> Tree:
        """[K, …] of rows that act now; they must have the same spaces."""
        ...

    def final_observation(self, rows: Ints) -> Tree:
        """[K, …] of departures of the last step that have one."""
        ...

    def mask(self, rows: Ints) -> Bools | None:
        """[K, M] allowed options of rows that act now; None: all."""
        ...

    def set_actions(self, rows: Ints, actions: Tree) -> None:
        """Choose the actions [K, …] of rows for the next step."""
        ...

    def step(self, playing: Bools | None) -> RowStep:
        """Take the actions of all rows that act. Raises EnvironmentFault."""
        ...

    def abandon(self, numbers: Sequence[int]) -> None:
        """End these matches where they are."""
        ...


class MatchCopies(abc.ABC):
    """Copies of one environment with several agents, closed together. Implements MatchSpaces."""

    forgiving: bool
    """Recreate an environment that fails."""
    restarts: int
    beat: Callable[[], None]
    """Called before every call of an environment, including its constructor. It may raise Interrupted."""

    @property
    @abc.abstractmethod
    def name(self) -> str: ...

    @property
    @abc.abstractmethod
    def agents(self) -> Mapping[str, AgentSpaces]: ...

    @property
    @abc.abstractmethod
    def state_space(self) -> gym.Space[Any] | None: ...

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def open_source(self, streams: Sequence[MatchStreams], *, central: bool) -> MatchSource:
        """`streams`: of all copies. `central`: observations contain the input of a centralised critic."""

    def take_statistics(self) -> dict[str, float]:
        """Numbers that the games have reported since the last call, by name; the mean over copies."""
        return {}

    @abc.abstractmethod
    def close(self) -> None: ...
