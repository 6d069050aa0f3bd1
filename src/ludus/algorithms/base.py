"""What an algorithm is to the trainer: segments and a model in, a better model and numbers out.

An algorithm knows no environment, no file, no process. It owns its optimizer and whatever it must remember between updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from ludus.algorithms.optim.flat_adam import Optimizer
from ludus.config.schema import AlgorithmConfig
from ludus.core import plugins
from ludus.core.tree import Array
from ludus.core.types import Segments
from ludus.models.policy import Policy

ALGORITHMS: Mapping[str, str] = {
    "PPO": "ludus.algorithms.ppo:PPO",
    "APPO": "ludus.algorithms.appo:APPO",
    "DQN": "ludus.algorithms.dqn:DQN",
    "IMPALA": "ludus.algorithms.impala:IMPALA",
}
"""Name → class; a user's own is given as "module:Class"."""


class Algorithm(Protocol):
    Config: ClassVar[type[AlgorithmConfig]]

    policy: Policy
    optimizer: Optimizer[Policy]
    version: int | None
    """Of the weights that learn now; the trainer sets it before `learn`, which may look how old a batch is."""

    def __init__(self, policy: Policy, config: Any, seed: int) -> None: ...

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        """One update from a block of segments; `timestep` drives the schedules. Raises TrainingDiverged."""
        ...

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Everything besides the weights that a resumed run needs: (arrays, plain values)."""
        ...

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None: ...


def algorithm_class(name: str) -> type[Algorithm]:
    found: type[Algorithm] = plugins.resolve("algorithm", name, ALGORITHMS, _is_algorithm)
    return found


def config_schemas() -> dict[str, type[AlgorithmConfig]]:
    """Name of each built-in algorithm → schema of its `config:`."""
    return {name: algorithm_class(name).Config for name in ALGORITHMS}


def _is_algorithm(found: Any, _: bool) -> bool:
    return isinstance(found, type) and hasattr(found, "Config") and callable(getattr(found, "learn", None))
