"""Opponents in evaluations of multi-agent environments, win shares, and detection of zero-sum games."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ludus.models.policy import Policy

_ZERO_TOLERANCE = 1e-6
"""Tolerance of a sum of returns, per unit of return."""


@dataclass(frozen=True)
class Opponent:
    """Plays all agents of a match but one: with fixed policies, or at random for agents without a policy."""

    name: str
    """Name in metrics: `win/<name>`."""
    policies: Mapping[str, Policy] = field(default_factory=dict)
    """Agent → policy."""


RANDOM = Opponent("random")

MatchOutcome = tuple[str, Mapping[str, float]]
"""The evaluated agent, and the returns of all agents of the match."""


def win_shares(opponent: str, outcomes: Sequence[MatchOutcome]) -> dict[str, tuple[float, float]]:
    """Return `win/`, `draw/` and `loss/<opponent>` → (matches, total). An agent wins if its return is above all others."""
    counts = {"win": 0, "draw": 0, "loss": 0}
    for agent, returns in outcomes:
        best = max((gained for other, gained in returns.items() if other != agent), default=0.0)
        mine = returns[agent]
        counts["win" if mine > best else "loss" if mine < best else "draw"] += 1
    return {f"{result}/{opponent}": (float(count), float(len(outcomes))) for result, count in counts.items()} if outcomes else {}


ZERO_SUM = "zero_sum"
"""Name of the result of a match that tells whether its returns add up to 0."""


def is_zero_sum(returns: Mapping[str, float]) -> bool:
    largest = max((abs(gained) for gained in returns.values()), default=0.0)
    return abs(sum(returns.values())) <= _ZERO_TOLERANCE * max(1.0, largest)


class ZeroSum:
    """True if the matches so far were zero-sum: not all returns were 0, and the returns of all agents always added up to 0."""

    def __init__(self) -> None:
        self._gained = False
        self._balanced = True

    def __bool__(self) -> bool:
        return self._gained and self._balanced

    def add(self, returns: Mapping[str, float]) -> None:
        self._gained |= any(returns.values())
        self._balanced &= is_zero_sum(returns)

    def add_counts(self, balanced: float, matches: float) -> None:
        """Count `matches` with returns other than 0, of which `balanced` added up to 0."""
        self._gained |= matches > 0
        self._balanced &= balanced == matches
