"""The interface between trainer and algorithm: segments in, an updated policy and metrics out.

An algorithm sees no environment, file or process. It owns its optimizer and the state that it keeps between updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from ludus.algorithms.optim.flat_adam import FlatAdam
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
    optimizer: FlatAdam[Policy]
    version: int | None
    """Version of the weights being updated. The trainer sets it before `learn`, which needs it to compute the policy lag."""

    def __init__(self, policy: Policy, config: Any, seed: int) -> None: ...

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        """Update once from a block of segments and return metrics. `timestep` drives the schedules. Raises TrainingDiverged."""
        ...

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return what a resumed run needs in addition to the weights: (arrays, JSON values)."""
        ...

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None: ...


def algorithm_class(name: str) -> type[Algorithm]:
    def is_algorithm(candidate: Any, _: bool) -> bool:
        return isinstance(candidate, type) and hasattr(candidate, "Config") and callable(getattr(candidate, "learn", None))

    algorithm: type[Algorithm] = plugins.resolve("algorithm", name, ALGORITHMS, is_algorithm)
    return algorithm


def config_schemas() -> dict[str, type[AlgorithmConfig]]:
    """Return the schema of `config:` for each built-in algorithm, by name."""
    return {name: algorithm_class(name).Config for name in ALGORITHMS}
