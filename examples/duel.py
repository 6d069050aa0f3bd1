"""Custom environment with entities, an action mask and a hybrid action, trained from the command line.

    ludus train -f examples/duel.yaml
    ludus train examples.duel:make --set model.use_lstm=true --stop time_s=60

The agent faces up to four enemies. It chooses a target among those that are present, and a force. The reward is highest when the force
equals the strength of the enemy. The maximum return of an episode is 1.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

ENEMIES = 4


class Duel(gym.Env[Any, Any]):
    observation_space = gym.spaces.Dict(
        {
            "enemies": gym.spaces.Box(0, 1, (ENEMIES, 2), np.float32),  # strength, worth
            "enemies_mask": gym.spaces.MultiBinary(ENEMIES),
            "action_mask": gym.spaces.MultiBinary(ENEMIES),
        }
    )
    action_space = gym.spaces.Dict({"force": gym.spaces.Box(0, 1, (1,), np.float32), "target": gym.spaces.Discrete(ENEMIES)})

    def __init__(self, rounds: int = 8) -> None:
        self._rounds, self._left = rounds, rounds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = self._rounds
        return self._meet(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        strength, worth = self._enemies[action["target"]]
        fit = max(0.0, 1.0 - 2.0 * abs(float(action["force"][0]) - strength))
        reward = fit * worth / (self._rounds * self._enemies[self._present][:, 1].max())
        self._left -= 1
        return self._meet(), float(reward), self._left == 0, False, {}

    def _meet(self) -> Any:
        self._present = np.zeros(ENEMIES, bool)
        self._present[self.np_random.permutation(ENEMIES)[: self.np_random.integers(1, ENEMIES + 1)]] = True
        self._enemies = self.np_random.uniform(0.1, 1.0, (ENEMIES, 2))
        shown = np.where(self._present[:, None], self._enemies, 0.0).astype(np.float32)
        present = self._present.astype(np.int8)
        return {"enemies": shown, "enemies_mask": present, "action_mask": present.copy()}


def make(rounds: int = 8) -> gym.Env[Any, Any]:
    return Duel(rounds)
