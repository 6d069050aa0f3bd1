"""Who plays the agents of a match, and the result of a match."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ludus.models.inference.batched_policy import State
from ludus.sampling.opponents import ZERO_SUM, is_zero_sum


@dataclass(frozen=True)
class Seating:
    """Who plays the agents of one match. Fixed for the whole match."""

    models: Mapping[str, str | None]
    """Agent → model; None: random actions."""
    recorded: frozenset[str] | None = None
    """Agents whose steps are recorded; None: all whose model is."""
    opponent: str = ""
    """Name of the opponent, for results."""
    on_finished: Callable[[FinishedMatch], None] | None = None
    """Called with the match when it is over; not if it fails or is cut."""
    on_episode_end: Mapping[str, Callable[[State], None]] = field(default_factory=dict)
    """Agent → called with its last recurrent state when its episode is over in any way."""
    side: frozenset[str] | None = None
    """Agents whose score is the result of the match; None: the recorded ones."""


SeatAgents = Callable[[int], Seating]
"""Number of a copy → who plays its next match. Called between two matches of that copy."""


@dataclass(frozen=True)
class FinishedMatch:
    """Returns and length of a match that has ended."""

    returns: Mapping[str, float]
    """By agent."""
    steps: int
    seating: Seating | None = None

    @property
    def total(self) -> float:
        return sum(self.returns.values())

    @property
    def score(self) -> float:
        """Score of the own side: 1 if its best return is above those of all others, 0 if below, 0.5 if equal."""
        own_side = self._own_side
        own = max(gained for agent, gained in self.returns.items() if agent in own_side)
        other = max(gained for agent, gained in self.returns.items() if agent not in own_side)
        return 0.5 + 0.5 * ((own > other) - (own < other))

    @property
    def gain(self) -> float:
        """Half of the difference between the total returns of the own side and the other one; its return in a zero-sum game."""
        own_side = self._own_side
        return 0.5 * sum(gained if agent in own_side else -gained for agent, gained in self.returns.items())

    @property
    def _own_side(self) -> frozenset[str]:
        assert self.seating is not None
        return self.seating.side or self.seating.recorded or frozenset()

    def result(self, name: str) -> float | None:
        """`win/<opponent>` or `draw/<opponent>`: whether that is how the match ended; None for another opponent and for other names.

        ZERO_SUM: whether the returns add up to 0; None if all are 0.
        """
        if name == ZERO_SUM:
            return None if not any(self.returns.values()) else float(is_zero_sum(self.returns))
        kind, _, opponent = name.partition("/")
        if not opponent or self.seating is None or self.seating.opponent != opponent:
            return None
        return float(self.score == {"win": 1.0, "draw": 0.5}[kind])
