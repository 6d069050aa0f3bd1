"""Who plays against an evaluated agent, who has won, and whether what one agent gains the others lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ludus.models.policy import Policy

_NOTHING = 1e-6
"""Sums of returns below this, for each unit of return, are rounding."""


@dataclass(frozen=True)
class Opponent:
    """Plays all agents of a match but one: fixed policies, or chance where there is no policy for an agent."""

    name: str
    """In metrics: `win/<name>`."""
    policies: Mapping[str, Policy] = field(default_factory=dict)
    """By agent."""


RANDOM = Opponent("random")

Outcome = tuple[str, Mapping[str, float]]
"""The agent that was evaluated, and the returns of all agents of the match."""


def win_shares(opponent: str, outcomes: Sequence[Outcome]) -> dict[str, tuple[float, float]]:
    """`win/`, `draw/` and `loss/<opponent>` → (matches, of how many). An agent wins that has more than each of the others."""
    counts = {"win": 0, "draw": 0, "loss": 0}
    for agent, returns in outcomes:
        best = max((gained for other, gained in returns.items() if other != agent), default=0.0)
        mine = returns[agent]
        counts["win" if mine > best else "loss" if mine < best else "draw"] += 1
    return {f"{result}/{opponent}": (float(count), float(len(outcomes))) for result, count in counts.items()} if outcomes else {}


class ZeroSum:
    """Whether the matches so far were zero-sum: somebody gained something, and the gains of all agents always added up to 0."""

    def __init__(self) -> None:
        self._gained = False
        self._balanced = True

    def __bool__(self) -> bool:
        return self._gained and self._balanced

    def add(self, returns: Mapping[str, float]) -> None:
        largest = max((abs(gained) for gained in returns.values()), default=0.0)
        self._gained |= largest > 0.0
        self._balanced &= abs(sum(returns.values())) <= _NOTHING * max(1.0, largest)
