"""Two-player Pong of the Atari 2600 as positions instead of pictures, and a script that follows the ball.

    ludus league run -f examples/leagues/pong.yaml

`PongObjects` reads the positions of ball and paddles from the memory of the console (`env_config: {obs_type: ram}`). Both players see the
field from the right side, so that one policy can play both.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from pettingzoo.utils import BaseParallelWrapper

Vector = npt.NDArray[np.float32]

NOTHING, FIRE, UP, DOWN = 0, 1, 2, 3
"""Actions. 4 and 5 are up and down with fire."""
BALL_X, LEFT_Y, RIGHT_Y, BALL_Y = 49, 50, 51, 54
"""Addresses in the memory of the console."""
OWN_Y, OTHER_Y, BALL_AHEAD, BALL_HEIGHT, BALL_IN_PLAY = range(5)
"""Numbers of an observation."""
_MIDDLE_X, _MIDDLE_Y, _SCALE = 128.0, 120.0, 80.0
_BALL_Y_OFFSET = 6.0
"""Of the ball's centre against a paddle's centre, when both have the same number in memory."""


class PongObjects(BaseParallelWrapper):  # type: ignore[misc] # PettingZoo has no types
    """Observations: own and other's paddle, ball (how far to the right, how far down), whether the ball is in play; all in −2 … 2.

    `points`: the match ends when a player has scored that many.
    """

    def __init__(self, env: Any, points: int = 21) -> None:
        super().__init__(env)
        self._points, self._scores = points, dict.fromkeys(env.possible_agents, 0)
        self._space = gym.spaces.Box(-2.0, 2.0, (5,), np.float32)

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return self._space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Vector], dict[str, Any]]:
        self._scores = dict.fromkeys(self._scores, 0)
        memories, infos = self.env.reset()  # Pong has no randomness, and with a seed the ROM is loaded again, which takes 90 ms
        return self._observations(memories), infos

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        memories, rewards, terminations, truncations, infos = self.env.step(actions)
        for agent, reward in rewards.items():
            self._scores[agent] += max(0, int(reward))
        if max(self._scores.values()) >= self._points:
            terminations = dict.fromkeys(terminations, True)
            self.env.unwrapped.agents = []
        return self._observations(memories), rewards, terminations, truncations, infos

    def _observations(self, memories: dict[str, Any]) -> dict[str, Vector]:
        return {agent: observe(memory, right=agent == "first_0") for agent, memory in memories.items()}


def observe(memory: npt.NDArray[np.uint8], *, right: bool) -> Vector:
    """What the player on the right or the left side sees."""
    x, y, left_y, right_y = (float(memory[address]) for address in (BALL_X, BALL_Y, LEFT_Y, RIGHT_Y))
    own, other = (right_y, left_y) if right else (left_y, right_y)
    ahead = x - _MIDDLE_X if right else _MIDDLE_X - x
    in_play = y > 0
    seen = [own - _MIDDLE_Y, other - _MIDDLE_Y, ahead * in_play, (y - _BALL_Y_OFFSET - _MIDDLE_Y) * in_play, _SCALE * in_play]
    return np.array(seen, np.float32) / _SCALE


def follow_ball(observation: Vector, action_mask: Any) -> int:
    """Move the paddle to the height of the ball, and serve."""
    newest = observation[-5:]  # of stacked observations
    if not newest[BALL_IN_PLAY]:
        return FIRE
    distance = float(newest[BALL_HEIGHT] - newest[OWN_Y])
    if abs(distance) * _SCALE < 8:  # half of a paddle
        return NOTHING
    return DOWN if distance > 0 else UP
