"""A game small enough to be solved exactly: what DQN should come to is known, state by state."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

from ludus.core.spaces import ACTION_MASK

STATES, ACTIONS, GAMMA = 6, 3, 0.9
_rng = np.random.default_rng(12)
NEXT = _rng.integers(0, STATES, (STATES, ACTIONS))
REWARD = _rng.normal(size=(STATES, ACTIONS)).round(2)
OVER = _rng.random((STATES, ACTIONS)) < 0.15
ALLOWED = _rng.random((STATES, ACTIONS)) < 0.7
ALLOWED[np.arange(STATES), _rng.integers(0, ACTIONS, STATES)] = True


class Mdp(gym.Env[Any, Any]):
    """Deterministic moves between six states; begins anywhere; some moves end it, and it is cut after `length` steps."""

    def __init__(self, length: int = 7, masked: bool = False) -> None:
        self.length, self.masked = length, masked
        self.action_space: gym.Space[Any] = Discrete(ACTIONS)
        self.observation_space: gym.Space[Any] = Discrete(STATES)
        if masked:
            mask = Box(0, 1, (ACTIONS,), np.int8)
            self.observation_space = Dict({"observation": Discrete(STATES), ACTION_MASK: mask})
        self.state = self.steps = 0

    def seen(self) -> Any:
        return {"observation": self.state, ACTION_MASK: ALLOWED[self.state].astype(np.int8)} if self.masked else self.state

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.state, self.steps = int(self.np_random.integers(STATES)), 0
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert not self.masked or ALLOWED[self.state, action]
        reward, over = float(REWARD[self.state, action]), bool(OVER[self.state, action])
        self.state, self.steps = int(NEXT[self.state, action]), self.steps + 1
        return self.seen(), reward, over, not over and self.steps >= self.length, {}


def make_mdp(length: int = 7) -> Mdp:
    return Mdp(length)


def make_masked_mdp() -> Mdp:
    return Mdp(masked=True)


def solved(masked: bool = False) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[S, A] by value iteration: what each action is worth when the best ones follow. A cut is no end."""
    worth = np.zeros((STATES, ACTIONS))
    for _ in range(1000):
        best = np.where(ALLOWED, worth, -np.inf).max(axis=1) if masked else worth.max(axis=1)
        worth = REWARD + GAMMA * np.where(OVER, 0.0, best[NEXT])
    return worth
