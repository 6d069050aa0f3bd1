"""Input of a centralised critic for many matches: CentralState with arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Floats, Ints
from ludus.envs.matches.rows import RowStep
from ludus.envs.matches.vector_multi_agent import VectorMatches
from ludus.envs.pettingzoo import AgentSpaces


class VectorCentralState:
    """The global states of all matches: those of the environment if it has them, otherwise the last observations of all agents."""

    def __init__(self, agents: Mapping[str, AgentSpaces], state_space: gym.Space[Any] | None, matches: int) -> None:
        self._own_state, self._width = state_space is not None, len(agents)
        self._space = next(iter(agents.values())).observation
        self._marks: Floats = np.eye(len(agents), dtype=np.float32)
        size = 0 if self._own_state else gym.spaces.utils.flatdim(self._space)
        self._last: Floats = np.zeros((matches * len(agents), size), np.float32)
        self._seen: Tree = np.zeros((matches, len(agents) * size), np.float32)

    def reset(self, matches: Sequence[int]) -> None:
        first = np.array(matches, np.int64)[:, None] * self._width
        self._last[(first + np.arange(self._width)).reshape(-1)] = 0.0

    def update(self, matches: VectorMatches, step: RowStep) -> None:
        """Take the present observations; departing agents are included, so that their last observation can be valued."""
        if self._own_state:
            self._seen = matches.state()
            return
        rows = np.concatenate([step.turns, step.departures[step.observed]])
        self._last[rows] = flatten_rows(self._space, map_tree(lambda part: part[rows], matches.observation))
        touched = np.unique(rows // self._width)
        self._seen[touched] = self._last.reshape(matches.num, -1)[touched]
        self._last[step.departures] = 0.0

    def combine(self, rows: Ints, observation: Tree) -> Tree:
        seen = map_tree(lambda part: part[rows // self._width], self._seen)
        return {"observation": observation, "state": {"agent": self._marks[rows % self._width], "seen": seen}}


def flatten_rows(space: gym.Space[Any], values: Tree) -> Array:
    """As `gymnasium.spaces.flatten`, for values [N, …]."""
    if isinstance(space, gym.spaces.Dict):
        return np.concatenate([flatten_rows(part, values[key]) for key, part in space.spaces.items()], axis=1)
    if isinstance(space, gym.spaces.Tuple):
        return np.concatenate([flatten_rows(part, value) for part, value in zip(space.spaces, values, strict=True)], axis=1)
    if isinstance(space, gym.spaces.Discrete):
        one_hot: Array = np.eye(int(space.n), dtype=np.float32)[values - space.start]
        return one_hot
    if isinstance(space, gym.spaces.MultiDiscrete):
        options = (values - space.start).reshape(len(values), -1)
        return np.concatenate(
            [np.eye(size, dtype=np.float32)[options[:, i]] for i, size in enumerate(space.nvec.ravel())], axis=1
        )
    return np.asarray(values, np.float32).reshape(len(values), -1)
