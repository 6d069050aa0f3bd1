"""Environments that stop the run that calls them, at a call that is named, and count what is called after that.

Importable as `tests.experiments.stoppable:make_…`; one process, so that the counts are seen by the test.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv


@dataclass
class Calls:
    """Of all copies of an environment."""

    constructors: int = 0
    resets: int = 0
    steps: int = 0
    finished: int = 0
    """Calls that were not broken off."""


CALLS = Calls()


def signal_at(count: int, at: int | None, blocks_s: float) -> None:
    """Send this process a SIGTERM at call number `at`, then block."""
    if count == at:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + blocks_s
        while time.monotonic() < deadline:
            time.sleep(0.01)


class Stoppable(gym.Env[Any, Any]):
    """Pays 1 a step for `length` steps."""

    def __init__(
        self, step: int | None = None, reset: int | None = None, blocks_s: float = 0.0, step_s: float = 0.0, length: int = 10
    ) -> None:
        self.observation_space, self.action_space = Box(-1.0, 1.0, (2,), np.float32), Discrete(2)
        self._step, self._reset, self._blocks_s, self._step_s, self._length = step, reset, blocks_s, step_s, length
        self._steps = 0
        CALLS.constructors += 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        CALLS.resets, self._steps = CALLS.resets + 1, 0
        signal_at(CALLS.resets, self._reset, self._blocks_s)
        CALLS.finished += 1
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        CALLS.steps, self._steps = CALLS.steps + 1, self._steps + 1
        time.sleep(self._step_s)
        signal_at(CALLS.steps, self._step, self._blocks_s)
        CALLS.finished += 1
        return np.zeros(2, np.float32), 1.0, self._steps >= self._length, False, {}


def make_stoppable(**options: Any) -> Stoppable:
    return Stoppable(**options)


class StoppableMatch(ParallelEnv):  # type: ignore[misc] # PettingZoo has no types
    """Two agents that act at once."""

    metadata: ClassVar[dict[str, Any]] = {"name": "stoppable"}
    render_mode = None

    def __init__(self, step: int | None = None, length: int = 10) -> None:
        self.possible_agents, self.agents = ["a", "b"], list[str]()
        self._step, self._length, self._steps = step, length, 0

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return Box(-1.0, 1.0, (2,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        CALLS.resets, self._steps, self.agents = CALLS.resets + 1, 0, list(self.possible_agents)
        return {agent: np.zeros(2, np.float32) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        CALLS.steps, self._steps = CALLS.steps + 1, self._steps + 1
        signal_at(CALLS.steps, self._step, 0.0)
        seen, over = {agent: np.zeros(2, np.float32) for agent in self.agents}, self._steps >= self._length
        ended, rewards = dict.fromkeys(self.agents, over), dict.fromkeys(self.agents, 1.0)
        infos: dict[str, Any] = {agent: {} for agent in self.agents}
        cut = dict.fromkeys(self.agents, False)
        self.agents = [] if over else self.agents
        return seen, rewards, ended, cut, infos


def make_match(**options: Any) -> StoppableMatch:
    return StoppableMatch(**options)
