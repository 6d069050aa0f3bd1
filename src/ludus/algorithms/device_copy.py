"""Learning on an accelerator and acting on the CPU, with two copies of one policy."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ludus.algorithms.base import Algorithm
from ludus.config.schema import AlgorithmConfig
from ludus.core.tree import Array
from ludus.core.types import Segments
from ludus.models.policy import Policy


class AcceleratedAlgorithm:
    """An algorithm that learns on an accelerator and presents a CPU copy of its policy, refreshed after every update."""

    Config: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig

    def __init__(self, algorithm: Algorithm, acting: Policy) -> None:
        """`algorithm` learns with a copy of `acting` on another device; `acting` takes over its weights."""
        self.policy, self.optimizer = acting, algorithm.optimizer
        self._algorithm = algorithm
        self._copy(algorithm.policy, acting)

    @property
    def version(self) -> int | None:
        return getattr(self._algorithm, "version", None)

    @version.setter
    def version(self, number: int | None) -> None:
        if hasattr(self._algorithm, "version"):
            self._algorithm.version = number

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        numbers = self._algorithm.learn(segments, timestep)
        self._copy(self._algorithm.policy, self.policy)
        return numbers

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        return self._algorithm.state()

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        """Continue learning from the current weights of the acting policy: load those first."""
        self._copy(self.policy, self._algorithm.policy)
        self._algorithm.load_state(arrays, plain)

    @staticmethod
    @torch.no_grad()
    def _copy(source: Policy, target: Policy) -> None:
        weights = source.state_dict()
        for name, tensor in target.state_dict().items():
            tensor.copy_(weights[name])

    def close(self) -> None:
        close = getattr(self._algorithm, "close", None)
        if close is not None:
            close()
