"""Small built-in environments: one that needs memory, and one with a composite action."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Discrete

Vector = npt.NDArray[np.float32]


def cartpole_without_velocities(render_mode: str | None = None, **keywords: Any) -> gym.Env[Any, Any]:
    """CartPole-v1 without the velocities, which a policy has to infer from past observations."""
    return PositionsOnly(gym.make("CartPole-v1", render_mode=render_mode, **keywords))


class PositionsOnly(gym.ObservationWrapper[Any, Any, Any]):
    _POSITIONS = (0, 2)

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        whole = env.observation_space
        assert isinstance(whole, Box)
        kept = list(self._POSITIONS)
        self.observation_space = Box(whole.low[kept], whole.high[kept], dtype=np.float32)

    def observation(self, observation: Any) -> Vector:
        positions: Vector = np.asarray(observation, np.float32)[list(self._POSITIONS)]
        return positions


class Golf(gym.Env[Vector, dict[str, Any]]):
    """One hole of golf in as few strokes as possible: choose a club, a direction and a power.

    An action is {club: driver, iron or putter; swing: [angle, power]}: the angle relative to the hole in −1 … 1 (half a radian either
    way), the power in −1 … 1 (from nothing to the reach of the club). The wind, constant for an episode, deflects flying balls but not
    rolling ones. Clubs with a longer reach are less precise. Reward −1 per stroke; truncated after 12 strokes.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 2}  # noqa: RUF012 - Gymnasium declares it so

    REACH = (60.0, 25.0, 6.0)  # metres
    SPREAD = (0.06, 0.03, 0.01)  # of the distance, in both directions
    FLIES = (True, True, False)
    HOLE = 0.5
    WIND = 0.3  # radians at most
    STROKES = 12

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = Box(-4, 4, (3,), np.float32)
        self.action_space = Dict({"club": Discrete(3), "swing": Box(-1, 1, (2,), np.float32)})
        self._ball = np.zeros(2)
        self._wind, self._strokes = 0.0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Vector, dict[str, Any]]:
        super().reset(seed=seed)
        distance, direction = self.np_random.uniform(30, 110), self.np_random.uniform(-math.pi, math.pi)
        self._ball = distance * np.array([math.cos(direction), math.sin(direction)])
        self._wind, self._strokes = self.np_random.uniform(-self.WIND, self.WIND), 0
        return self._observation(), {}

    def step(self, action: dict[str, Any]) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        club = int(action["club"])
        angle, power = (float(part) for part in action["swing"])
        to_hole = -self._ball / max(self._distance, 1e-9)
        direction_change = 0.5 * angle + (self._wind if self.FLIES[club] else 0.0)
        length = self.REACH[club] * (power + 1) / 2
        cos, sin = math.cos(direction_change), math.sin(direction_change)
        line = np.array([cos * to_hole[0] - sin * to_hole[1], sin * to_hole[0] + cos * to_hole[1]])
        self._ball = self._ball + length * line + self.np_random.normal(0, self.SPREAD[club] * length, 2)
        self._strokes += 1
        return self._observation(), -1.0, self._distance < self.HOLE, self._strokes >= self.STROKES, {}

    @property
    def _distance(self) -> float:
        return float(np.hypot(*self._ball))

    def _observation(self) -> Vector:
        """Distance to the hole on a linear and a logarithmic scale, and the wind."""
        return np.array([min(self._distance / 50, 4), math.log1p(self._distance) / 2 - 1, self._wind / self.WIND], np.float32)

    def render(self) -> Any:
        """Top view of the course: 240 metres wide, the hole in the middle."""
        picture = np.full((240, 240, 3), (34, 120, 50), np.uint8)
        rows, columns = np.mgrid[:240, :240]
        for (x, y), radius, colour in (((0, 0), 12, (60, 170, 80)), ((0, 0), 3, (0, 0, 0)), (self._ball, 4, (255, 255, 255))):
            picture[(columns - 120 - x) ** 2 + (rows - 120 - y) ** 2 <= radius**2] = colour
        return picture


def golf(render_mode: str | None = None) -> gym.Env[Any, Any]:
    return Golf(render_mode)
