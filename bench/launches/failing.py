"""An environment that raises after a while."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

AFTER = 500


class Failing(gym.Wrapper[Any, Any, Any, Any]):
    _steps = 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps > AFTER:
            raise RuntimeError("this environment fails")
        return super().step(action)


def make_failing() -> gym.Env[Any, Any]:
    return Failing(gym.make("CartPole-v1"))
