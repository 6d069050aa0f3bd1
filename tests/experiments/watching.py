"""PPO that keeps what it was given to learn from."""

from __future__ import annotations

from copy import deepcopy
from typing import ClassVar

from ludus.algorithms.ppo import PPO
from ludus.core.types import Segments


class Watching(PPO):
    seen: ClassVar[list[Segments]] = []

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        self.seen.append(deepcopy(segments))
        return super().learn(segments, timestep)
