"""Small games with known answers, for the learning tests."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Endless(gym.Env[Any, Any]):
    """Reward 1 for ever, cut off after `limit` steps: the value of every state is 1 / (1 − γ), truncation or not."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, limit: int = 5, terminates: bool = False) -> None:
        self._limit, self._terminates, self._t = limit, terminates, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        over = self._t >= self._limit
        return self._seen(), 1.0, over and self._terminates, over and not self._terminates, {}

    def _seen(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


def endless(limit: int = 5) -> gym.Env[Any, Any]:
    return Endless(limit)


def endless_same_step(num_envs: int, limit: int = 5) -> Any:
    """The same as a vector environment that resets at once."""
    return SyncVectorEnv([lambda: Endless(limit)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


class RememberAndAim(gym.Env[Any, Any]):
    """A cue at the first step, blank ones after it; at the end choose the cued door and aim at its angle.

    Hybrid action: `door` (three, of which one is always forbidden by the mask) and `aim` in [-2, 2]. The best return is 2:
    one for the door, one for an aim exactly on −1 (left) or +1 (right).
    """

    observation_space = gym.spaces.Dict(
        {
            "observation": gym.spaces.Box(-1, 1, (2,), np.float32),
            "action_mask": gym.spaces.MultiBinary(3),
        }
    )
    action_space = gym.spaces.Dict({"aim": gym.spaces.Box(-2, 2, (1,), np.float32), "door": gym.spaces.Discrete(3)})

    def __init__(self, length: int = 4) -> None:
        self._length, self._t, self._cue = length, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t, self._cue = 0, int(self.np_random.integers(2))
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action["door"] != 2, "a masked door was chosen"
        self._t += 1
        over = self._t >= self._length
        reward = 0.0
        if over:
            goal = -1.0 if self._cue == 0 else 1.0
            reward = float(action["door"] == self._cue) + 1.0 - min(1.0, abs(float(action["aim"][0]) - goal))
        return self._seen(), reward, over, False, {}

    def _seen(self) -> Any:
        cue = np.array([2.0 * self._cue - 1.0 if self._t == 0 else 0.0, self._t / self._length], np.float32)
        return {"observation": cue, "action_mask": np.array([1, 1, 0], np.int8)}


def remember_and_aim(length: int = 4) -> gym.Env[Any, Any]:
    return RememberAndAim(length)


class BrightSide(gym.Env[Any, Any]):
    """An 8×8 picture with a bright left or right half; naming the side is worth 1. One step long."""

    observation_space = gym.spaces.Box(0, 255, (8, 8, 1), np.uint8)
    action_space = gym.spaces.Discrete(2, start=5)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right = float(action == 5 + self._side)
        return self._draw(), right, True, False, {}

    def _draw(self) -> Any:
        self._side = int(self.np_random.integers(2))
        picture = self.np_random.integers(0, 80, (8, 8, 1)).astype(np.uint8)
        picture[:, 4 * self._side : 4 * self._side + 4] += 120
        return picture


class Nearest(gym.Env[Any, Any]):
    """Up to five entities, some absent; press the bit of the group that the nearest present one belongs to."""

    observation_space = gym.spaces.Dict(
        {"units": gym.spaces.Box(-1, 1, (5, 3), np.float32), "units_mask": gym.spaces.MultiBinary(5)}
    )
    action_space = gym.spaces.MultiBinary(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        wanted = np.array([self._group == 0, self._group == 1])
        return self._draw(), float(np.array_equal(action, wanted)), True, False, {}

    def _draw(self) -> Any:
        present = np.zeros(5, np.int8)
        present[self.np_random.permutation(5)[: self.np_random.integers(1, 6)]] = 1
        distance, group = self.np_random.random(5), self.np_random.integers(0, 2, 5)
        self._group = int(group[np.argmin(np.where(present > 0, distance, 9.0))])
        units = np.stack([distance, group, 1 - group], axis=1).astype(np.float32)
        return {"units": np.where(present[:, None] > 0, units, 0).astype(np.float32), "units_mask": present}
