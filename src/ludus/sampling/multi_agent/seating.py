"""Who plays the agents of a match, and the result of a match."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final, NamedTuple

from ludus.models.inference.batched_policy import State
from ludus.sampling.opponents import ZERO_SUM, is_zero_sum

_TOLERANCE: Final = 1e-9
"""Mean returns that differ by less, absolutely or relatively, are equal: sums of the same rewards differ in their last bits."""


class SideResult(NamedTuple):
    """The result of a match for one of its two sides."""

    score: float
    """1 for a win, 0.5 for a draw, 0 for a loss."""
    gain: float
    """Half of the difference between the mean returns of both sides: positive for a win, 0 for a draw."""


NOT_OVER: Final = SideResult(0.5, 0.0)
"""The result of a match that was stopped at a step limit of Ludus: it has no winner."""


def compare_sides(own: Sequence[float], other: Sequence[float]) -> SideResult:
    """The result of a match from the returns of the agents of both sides: the side with the higher mean return wins."""
    mine, theirs = fmean(own), fmean(other)
    if math.isclose(mine, theirs, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
        return SideResult(0.5, 0.0)
    return SideResult(float(mine > theirs), 0.5 * (mine - theirs))


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
    def side_result(self) -> SideResult:
        """The result for the own side."""
        assert self.seating is not None
        own_side = self.seating.side or self.seating.recorded or frozenset()
        own = [gained for agent, gained in self.returns.items() if agent in own_side]
        return compare_sides(own, [gained for agent, gained in self.returns.items() if agent not in own_side])

    def result(self, name: str) -> float | None:
        """`win/<opponent>` or `draw/<opponent>`: whether that is how the match ended; None for another opponent and for other names.

        ZERO_SUM: whether the returns add up to 0; None if all are 0.
        """
        if name == ZERO_SUM:
            return None if not any(self.returns.values()) else float(is_zero_sum(self.returns))
        kind, _, opponent = name.partition("/")
        if not opponent or self.seating is None or self.seating.opponent != opponent:
            return None
        return float(self.side_result.score == {"win": 1.0, "draw": 0.5}[kind])
