"""A world of symbols in uint8, as MiniGrid shows it: objects up to 8, colours up to 5, in a space that allows 255."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from pettingzoo import ParallelEnv


class SymbolGrid(gym.Env[Any, Any]):
    """Seven by seven cells of three symbols; the action is right that names the colour in the middle."""

    action_space = gym.spaces.Discrete(3)

    def __init__(self, largest: int = 8, size: int = 7, declared: int = 255) -> None:
        self.observation_space = gym.spaces.Box(0, declared, (size, size, 3), np.uint8)
        self._largest, self._t = largest, 0

    def _show(self) -> Any:
        seen = self.np_random.integers(0, 3, self.observation_space.shape).astype(np.uint8)
        seen[0, 0, 0] = self._largest
        self._right = int(seen[3, 3, 1])
        return seen

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        gained = float(int(action) == self._right)
        return self._show(), gained, self._t >= 4, False, {}


class FailingGrid(SymbolGrid):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise RuntimeError("broken")


class Pair(ParallelEnv):  # type: ignore[misc]
    """Two agents that see the same symbols; the one with the higher action gains what the other loses."""

    metadata: ClassVar[dict[str, Any]] = {"name": "pair", "render_modes": []}
    possible_agents: ClassVar[list[str]] = ["red", "blue"]
    render_mode = None

    def __init__(self) -> None:
        self.agents: list[str] = []
        self._left = 0

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Box(0, 255, (3, 3), np.uint8)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(3)

    def _show(self) -> dict[str, Any]:
        return {agent: np.full((3, 3), 6, np.uint8) for agent in self.agents}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self.agents, self._left = list(self.possible_agents), 2
        return self._show(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        self._left -= 1
        gained = float(np.sign(int(actions["red"]) - int(actions["blue"])))
        seen, over = self._show(), self._left == 0
        told: dict[str, Any] = {agent: {} for agent in self.agents}
        ended, cut = dict.fromkeys(self.agents, over), dict.fromkeys(self.agents, False)
        if over:
            self.agents = []
        return seen, {"red": gained, "blue": -gained}, ended, cut, told


def pair() -> Pair:
    return Pair()
