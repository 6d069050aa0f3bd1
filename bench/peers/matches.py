"""The environments with several agents that every library gets, and the settings that it trains with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from pettingzoo.utils import BaseParallelWrapper, BaseWrapper

SIDE = 84
"""Height and width of a piston's picture."""
HIDDEN = 64
CONVOLUTIONS = ((16, 8, 4), (32, 4, 2))
"""Channels, kernel, stride: the network of Mnih et al. 2013, with `DENSE` units, shared by policy and value."""
DENSE = 256


@dataclass(frozen=True)
class MatchTask:
    """Settings of one environment. All agents share one policy; all steps are agent steps."""

    name: str
    agents: int
    copies: int
    """Copies of the environment in all, divided among the workers."""
    steps: int
    """Decisions per agent and rollout, on average."""
    minibatch: int
    epochs: int = 4
    images: bool = False
    turns: bool = False
    """Agents act one after the other (AEC)."""
    lr: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    adam_eps: float = 1e-5

    @property
    def batch(self) -> int:
        return self.copies * self.agents * self.steps


TASKS = {
    task.name: task
    for task in (
        MatchTask("simple_spread", agents=3, copies=16, steps=100, minibatch=600),
        MatchTask("pistonball", agents=20, copies=8, steps=8, minibatch=320, images=True),
        MatchTask("connect_four", agents=2, copies=32, steps=64, minibatch=512, turns=True),
    )
}


class SmallPictures(BaseParallelWrapper):
    """Pistonball's pictures of 457×120 in colour as 84×84 of the blue channel, which shows the ball and the pistons."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._space = gym.spaces.Box(0, 255, (SIDE, SIDE, 1), np.uint8)
        height, width = env.observation_space(env.possible_agents[0]).shape[:2]
        rows, columns = (np.linspace(0, size - 1, SIDE).astype(np.intp) for size in (height, width))
        self._pixels = np.ix_(rows, columns, [2])

    def observation_space(self, agent: Any) -> gym.Space:
        return self._space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        observations, infos = self.env.reset(seed=seed, options=options)
        return self._reduce(observations), infos

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, *rest = self.env.step(actions)
        return (self._reduce(observations), *rest)

    def _reduce(self, observations: dict) -> dict:
        return {agent: picture[self._pixels] for agent, picture in observations.items()}


class FlatBoard(BaseWrapper):
    """Boards as vectors, for libraries that would use convolutions otherwise."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._spaces = {agent: self._flatten(env.observation_space(agent)) for agent in env.possible_agents}

    @staticmethod
    def _flatten(space: Any) -> gym.Space:
        board = space["observation"]
        flat = gym.spaces.Box(board.low.reshape(-1), board.high.reshape(-1), dtype=board.dtype)
        return gym.spaces.Dict({"observation": flat, "action_mask": space["action_mask"]})

    def observation_space(self, agent: Any) -> gym.Space:
        return self._spaces[agent]

    def observe(self, agent: Any) -> dict:
        seen = self.env.observe(agent)
        return {"observation": seen["observation"].reshape(-1), "action_mask": seen["action_mask"]}


def simple_spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env()


def pistonball() -> Any:
    from pettingzoo.butterfly import pistonball_v6

    return SmallPictures(pistonball_v6.parallel_env(continuous=False))


def connect_four() -> Any:
    from pettingzoo.classic import connect_four_v3

    return connect_four_v3.env()


MAKERS = {"simple_spread": simple_spread, "pistonball": pistonball, "connect_four": connect_four}
