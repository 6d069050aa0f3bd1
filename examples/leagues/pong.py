"""Two-player Pong of the Atari 2600 with positions instead of images, and a script that follows the ball.

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

NOTHING, UP, DOWN = range(3)
"""Actions."""
OWN_Y, OTHER_Y, BALL_AHEAD, BALL_Y, BALL_BELOW = range(5)
"""Numbers of an observation: paddles, ball (ahead: to the right), and how far the ball is below the own paddle, on a larger scale."""

_BUTTONS = (0, 2, 3)
_FIRE = 1
_MEMORY = [49, 54, 50, 51]
"""Addresses of the ball's x and y, and of the left and right paddle's y. A ball that is not in play has y = 0."""
_MIDDLE_X, _MIDDLE_Y, _FIELD = 128.0, 120.0, 80.0
_BALL_OFFSET = 6.0
"""y of the ball minus y of a paddle in memory when their centres are at the same height."""
_HALF_PADDLE = 8.0


class PongObjects(BaseParallelWrapper):  # type: ignore[misc] # PettingZoo has no types
    """Pong with three actions. Serves are automatic, and the time without a ball is left out.

    `points`: the match ends when a player has scored that many.
    """

    def __init__(self, env: Any, points: int = 21) -> None:
        super().__init__(env)
        self._points, self._scores = points, dict.fromkeys(env.possible_agents, 0)
        self._observation_space = gym.spaces.Box(-2.0, 2.0, (5,), np.float32)
        self._action_space = gym.spaces.Discrete(3)

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return self._observation_space

    def action_space(self, agent: str) -> gym.Space[Any]:
        return self._action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Vector], dict[str, Any]]:
        self._scores = dict.fromkeys(self._scores, 0)
        memories, infos = self.env.reset()  # Pong is not random, and with a seed the ROM is loaded again, which takes 90 ms
        return self._observe(self._serve(memories)), infos

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        buttons = {agent: _BUTTONS[int(action)] for agent, action in actions.items()}
        memories, rewards, terminations, truncations, infos = self.env.step(buttons)
        for agent, reward in rewards.items():
            self._scores[agent] += max(0, int(reward))
        if max(self._scores.values()) >= self._points:
            terminations = dict.fromkeys(terminations, True)
            self.env.unwrapped.agents = []
        return self._observe(self._serve(memories)), rewards, terminations, truncations, infos

    def _serve(self, memories: dict[str, Any]) -> dict[str, Any]:
        """Press fire until the ball is in play."""
        while self.env.agents and not _ball_in_play(memories):
            memories = self.env.step(dict.fromkeys(self.env.agents, _FIRE))[0]
        return memories

    def _observe(self, memories: dict[str, Any]) -> dict[str, Vector]:
        return {agent: observe(memory, right=agent == "first_0") for agent, memory in memories.items()}


def _ball_in_play(memories: dict[str, Any]) -> bool:
    return all(memory[_MEMORY[1]] for memory in memories.values())


def observe(memory: npt.NDArray[np.uint8], *, right: bool) -> Vector:
    """What the player on the right or the left side sees."""
    x, y, left, right_y = memory[_MEMORY].tolist()
    own, other = (right_y, left) if right else (left, right_y)
    ahead, height = (x - _MIDDLE_X if right else _MIDDLE_X - x), y - _BALL_OFFSET
    below = min(max((height - own) / (2 * _HALF_PADDLE), -2.0), 2.0)
    positions = (own - _MIDDLE_Y, other - _MIDDLE_Y, ahead, height - _MIDDLE_Y)
    return np.array([*(position / _FIELD for position in positions), below], np.float32)


def follow_ball(observation: Vector, action_mask: Any) -> int:
    """Move the paddle to the height of the ball."""
    below = float(observation[BALL_BELOW - 5])  # the newest of stacked observations
    if abs(below) < 0.5:
        return NOTHING
    return DOWN if below > 0 else UP
