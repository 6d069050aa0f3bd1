"""Environments with several agents for `ludus check-env`: good ones, and others that differ from them by one fault each."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

from ludus.envs.matches.connect_four import ConnectFourEnv


class Chase:
    """A parallel environment: two agents on a line; the first wants to meet the other."""

    metadata: dict[str, Any] = {"name": "chase", "render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.possible_agents = ["hunter", "prey"]
        self.agents: list[str] = []
        self.random = np.random.default_rng(0)
        self.places, self.steps = np.zeros(2), 0

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return Box(-2, 2, (2,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return Discrete(2)

    def seen(self, agent: str) -> Any:
        own = self.possible_agents.index(agent)
        return np.array([self.places[own], self.places[1 - own]], np.float32)

    def all_seen(self) -> dict[str, Any]:
        return {agent: self.seen(agent) for agent in self.agents}

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.steps = list(self.possible_agents), 0
        self.places = self.random.uniform(-1, 1, 2)
        return self.all_seen(), {agent: {} for agent in self.agents}

    def rewards(self) -> dict[str, Any]:
        met = float(abs(self.places[0] - self.places[1]) < 0.3)
        return {"hunter": met, "prey": -met}

    def step(self, actions: dict[str, Any]) -> Any:
        self.steps += 1
        moves = np.array([0.2 * (int(actions[agent]) - 0.5) for agent in self.possible_agents])
        self.places = np.clip(self.places + moves, -1, 1)
        rewards = self.rewards()
        met, late = abs(self.places[0] - self.places[1]) < 0.3, self.steps >= 50
        made = self.all_seen(), rewards, dict.fromkeys(self.agents, bool(met)), dict.fromkeys(self.agents, late), dict[str, Any]()
        if met or late:
            self.agents = []
        return made

    def render(self) -> Any:
        return np.full((32, 32, 3), int(100 + 50 * self.places[0]), np.uint8)

    def close(self) -> None:
        pass


class RewardNan(Chase):
    def rewards(self) -> dict[str, Any]:
        return {"hunter": float("nan"), "prey": 0.0}


class UnknownAgent(Chase):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        made = super().reset(seed)
        self.agents.append("ghost")
        made[0]["ghost"] = np.zeros(2, np.float32)
        return made


class OutOfBounds(Chase):
    def seen(self, agent: str) -> Any:
        return super().seen(agent) * (9 if agent == "prey" else 1)


class WrongShape(Chase):
    def seen(self, agent: str) -> Any:
        return np.zeros(3, np.float32)


class NotANumber(Chase):
    def seen(self, agent: str) -> Any:
        return super().seen(agent) * (np.nan if self.steps > 3 else 1)


class NoChoice(Chase):
    def observation_space(self, agent: str) -> gym.Space[Any]:
        return Dict({"observation": Box(-2, 2, (2,), np.float32), "action_mask": MultiBinary(2)})

    def seen(self, agent: str) -> Any:
        return {"observation": super().seen(agent), "action_mask": np.array([1, 1] if self.steps < 3 else [0, 0], np.int8)}


class LongMask(NoChoice):
    def seen(self, agent: str) -> Any:
        return {**super().seen(agent), "action_mask": np.ones(3, np.int8)}


class Raises(Chase):
    def step(self, actions: dict[str, Any]) -> Any:
        raise KeyError("prey")


class Unseeded(Chase):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(None)


class Depth(Chase):
    def render(self) -> Any:
        return np.zeros((32, 32), np.float32)


class TimeIsUp(Chase):
    """Terminates after 20 steps."""

    def step(self, actions: dict[str, Any]) -> Any:
        _, rewards, _, _, infos = super().step(actions)
        self.agents = list(self.possible_agents) if self.steps < 20 else []
        over = dict.fromkeys(self.possible_agents, self.steps >= 20)
        return {agent: self.seen(agent) for agent in self.possible_agents}, rewards, over, dict.fromkeys(over, False), infos


class LeakyFour(ConnectFourEnv):
    """A VectorMultiAgentEnv whose observations leave their space."""

    def step(self, actions: Any, playing: Any) -> Any:
        made = super().step(actions, playing)
        made.observation = np.minimum(made.observation * 2, 2)
        return made


def make(kind: str, render_mode: str | None = None) -> Any:
    return globals()[kind](render_mode)
