"""Environments for evaluations and rollouts: some draw from everybody's random numbers, some cause trouble."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch


class Walk(gym.Env[Any, Any]):
    """Five numbers that wander; what is done decides where to, and what is gained. Shows a bar in colours, or depth."""

    action_space = gym.spaces.Discrete(3)
    metadata = {"render_modes": ["rgb_array", "depth_array"], "render_fps": 12}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, length: int = 7, seen: int = 5, render_mode: str | None = None, depth: str = "") -> None:
        self.observation_space = gym.spaces.Box(-100, 100, (seen,), np.float32)
        self.length, self.render_mode, self._depth = length, render_mode, depth
        self.t, self._at = 0, np.zeros(seen)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self._at = 0, self.np_random.normal(size=self._at.shape)
        self._ends = self.length + int(self.np_random.integers(0, 4))
        return self._at.astype(np.float32), {"t": 0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self._at = self._at + (int(action) - 1) * 0.5 + self._push()
        gained = float(np.sin(self._at).sum())
        return self._at.astype(np.float32), gained, self.t >= self._ends, False, {"t": self.t}

    def _push(self) -> Any:
        return self.np_random.normal(size=self._at.shape)

    def render(self) -> Any:
        if self.render_mode == "depth_array" or self._depth:
            depth = np.linspace(0.5, 4.0 + self.t, 64 * 80, dtype=np.float32).reshape(64, 80)
            return {"": depth, "one": depth[..., None], "bytes": (depth * 10).astype(np.uint8)}[self._depth]
        picture = np.zeros((64, 80, 3), np.uint8)
        picture[20:40, : 8 * self.t, 1] = 255
        return picture


class Blind(Walk):
    """Renders nothing."""

    metadata = {}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self) -> None:
        super().__init__()


class Shaken(Walk):
    """Its randomness is that of the whole process."""

    def _push(self) -> Any:
        return np.random.normal(size=self._at.shape) + random.random() + float(torch.rand(1))


class Troubled(Walk):
    """Kills its process the first time, hangs the second, and is well afterwards; `notes` is where it remembers."""

    def __init__(self, notes: str) -> None:
        super().__init__()
        self._notes = Path(notes)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        for name, stops_it in (("killed", signal.SIGKILL), ("hung", signal.SIGSTOP)):
            if self.t == 3 and not (self._notes / name).exists():
                (self._notes / name).touch()
                os.kill(os.getpid(), stops_it)
        return super().step(action)


class Crashing(Walk):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.t == 4:
            raise RuntimeError("the game crashed")
        return super().step(action)


class Endless(Walk):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, gained, _, _, info = super().step(action)
        return observation, gained, False, False, info
