"""Rock, paper, scissors: the smallest game with two sides. Importable as `tests.league.games:make_rps`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from pettingzoo import ParallelEnv

AGENTS = ["left", "right"]


class RockPaperScissors(ParallelEnv):  # type: ignore[misc]
    metadata: ClassVar[dict[str, Any]] = {"name": "rps", "render_modes": []}
    render_mode = None

    def __init__(self, killed_by: str = "", paused_by: str = "") -> None:
        """`killed_by`: while this file exists, a step kills the process. `paused_by`: a step waits as long as this file exists."""
        self.possible_agents, self.agents = list(AGENTS), list[str]()
        self._killed_by, self._paused_by = killed_by, paused_by

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Box(0, 1, (1,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(3)

    def _observe(self) -> dict[str, Any]:
        return {agent: np.ones(1, np.float32) for agent in AGENTS}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(AGENTS)
        return self._observe(), {agent: {} for agent in AGENTS}

    def step(self, actions: dict[str, Any]) -> Any:
        if self._killed_by and Path(self._killed_by).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + 120.0
        while self._paused_by and Path(self._paused_by).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        gain = float(((int(actions["left"]) - int(actions["right"]) + 1) % 3) - 1)
        self.agents = []
        over = dict.fromkeys(AGENTS, True)
        return (
            self._observe(),
            {"left": gain, "right": -gain},
            over,
            dict.fromkeys(AGENTS, False),
            {agent: {} for agent in AGENTS},
        )


def make_rps(killed_by: str = "", paused_by: str = "") -> RockPaperScissors:
    return RockPaperScissors(killed_by, paused_by)


def rock(observation: Any, mask: Any) -> int:
    return 0
