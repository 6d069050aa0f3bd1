"""One side of a game learns against fixed policies: how a best response is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from ludus.config.schema import SelfPlayConfig
from ludus.models.policy import Policy
from ludus.sampling.multi_agent.match_runner import MatchRunner
from ludus.sampling.multi_agent.policy_set import PolicySet
from ludus.sampling.multi_agent.seating import SeatAgents, Seating

FIXED: Final = "fixed"
"""Name of these opponents in `self_play.opponents` and in results."""


class FixedSides:
    """Seats the two sides of a game: one learns, the policies of the fixed player play the other. Implements SeatAgents."""

    def __init__(
        self,
        sides: Sequence[Sequence[str]],
        policy_mapping: Mapping[str, str],
        opponents: Mapping[str, str],
        seed: int,
        *,
        swap_sides: bool = True,
    ) -> None:
        """`policy_mapping`, `opponents`: agent → model of the learning and of the fixed player."""
        self._sides, self._swap_sides = sides, swap_sides
        self._mapping, self._opponents = policy_mapping, opponents
        self._random = np.random.default_rng([seed, 2])  # apart from the environments' and the sampler's

    def __call__(self, copy: int) -> Seating:
        learning = frozenset(self._sides[int(self._random.integers(2)) if self._swap_sides else 0])
        models = {agent: self._mapping[agent] if agent in learning else other for agent, other in self._opponents.items()}
        return Seating(models, learning, FIXED)


def seat_fixed_opponents(
    settings: SelfPlayConfig, policy_mapping: Mapping[str, str], opponents: Mapping[str, Policy], seed: int
) -> Callable[[MatchRunner, PolicySet], SeatAgents]:
    """Return what makes the seating of a sampler. `opponents`: agent → policy."""

    def make(matches: MatchRunner, policies: PolicySet) -> SeatAgents:
        models: dict[int, str] = {}
        for policy in opponents.values():
            if id(policy) not in models:
                models[id(policy)] = f"{FIXED} {len(models)}"
                policies.add_fixed(models[id(policy)], policy)
        seats = {agent: models[id(opponents[agent])] for agent in policy_mapping}
        sides = settings.sides or [[agent] for agent in policy_mapping]
        return FixedSides(sides, policy_mapping, seats, seed, swap_sides=settings.swap_sides)

    return make
