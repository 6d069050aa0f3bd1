"""Small environments of ours: something to remember, and an action of several parts."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Discrete

Vector = npt.NDArray[np.float32]


def cartpole_without_velocities(render_mode: str | None = None, **keywords: Any) -> gym.Env[Any, Any]:
    """CartPole-v1 that shows where cart and pole are, but not how fast they move: that has to be remembered."""
    return WithoutVelocities(gym.make("CartPole-v1", render_mode=render_mode, **keywords))


class WithoutVelocities(gym.ObservationWrapper[Any, Any, Any]):
    _SHOWN = (0, 2)

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        whole = env.observation_space
        assert isinstance(whole, Box)
        shown = list(self._SHOWN)
        self.observation_space = Box(whole.low[shown], whole.high[shown], dtype=np.float32)

    def observation(self, observation: Any) -> Vector:
        seen: Vector = np.asarray(observation, np.float32)[list(self._SHOWN)]
        return seen


class Golf(gym.Env[Vector, dict[str, Any]]):
    """One hole of golf, in as few strokes as possible: which club, in which direction, and how hard.

    An action is {club: driver, iron or putter; swing: [angle, power]}, the angle to the line to the hole in −1 … 1 (half a
    radian either way), the power in −1 … 1 (from nothing to all that the club gives). The wind, which is the same for a whole
    hole, turns what flies but not what rolls. Clubs that reach farther are less exact. −1 a stroke; after 12 it is over.
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
        return self._seen(), {}

    def step(self, action: dict[str, Any]) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        club = int(action["club"])
        angle, power = (float(part) for part in action["swing"])
        to_hole = -self._ball / max(self._distance, 1e-9)
        turned = 0.5 * angle + (self._wind if self.FLIES[club] else 0.0)
        length = self.REACH[club] * (power + 1) / 2
        cos, sin = math.cos(turned), math.sin(turned)
        line = np.array([cos * to_hole[0] - sin * to_hole[1], sin * to_hole[0] + cos * to_hole[1]])
        self._ball = self._ball + length * line + self.np_random.normal(0, self.SPREAD[club] * length, 2)
        self._strokes += 1
        return self._seen(), -1.0, self._distance < self.HOLE, self._strokes >= self.STROKES, {}

    @property
    def _distance(self) -> float:
        return float(np.hypot(*self._ball))

    def _seen(self) -> Vector:
        """How far the hole is, roughly and closely, and the wind."""
        return np.array([min(self._distance / 50, 4), math.log1p(self._distance) / 2 - 1, self._wind / self.WIND], np.float32)

    def render(self) -> Any:
        """The course from above: 240 metres wide, the hole in the middle."""
        picture = np.full((240, 240, 3), (34, 120, 50), np.uint8)
        rows, columns = np.mgrid[:240, :240]
        for (x, y), radius, colour in (((0, 0), 12, (60, 170, 80)), ((0, 0), 3, (0, 0, 0)), (self._ball, 4, (255, 255, 255))):
            picture[(columns - 120 - x) ** 2 + (rows - 120 - y) ** 2 <= radius**2] = colour
        return picture


def golf(render_mode: str | None = None) -> gym.Env[Any, Any]:
    return Golf(render_mode)
