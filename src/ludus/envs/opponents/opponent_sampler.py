"""Which of several players is met next, and with which line-up: as likely as asked, or such that matches are about even. Pure.

Nothing is learned from a match that is lost whatever one does, nor from one that is won whatever one does. `even` therefore weighs the
shares by √(p·(1 − p)), how much results scatter, where p is how many of the last matches against a player were won: the weak come
first, the strong later, and nobody quite disappears. (Prioritised fictitious self-play, Vinyals et al. 2019, has p·(1 − p), which leaves
the strong alone for longer: at p = 0.05 they have a fifth of the weight of an even player, here 0.44.)

Where line-ups are drawn as well, all of that is counted for each of them. They themselves are not a matter of taste, like the strength of an
opponent: each is to be played well. So they are weighed by 1 − p, over all players: heroes who always win make way for those who do not yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from ludus.core.types import Ints
from ludus.errors import ConfigError

Doubles = npt.NDArray[np.float64]
FIXED, EVEN = "fixed", "even"
MATCHMAKING: Final = (FIXED, EVEN)
_LEAST: Final = 0.1
"""Of the weight that an even player has: for whom one never wins against, or always."""
_WINDOW: Final = 60
"""Matches, about, over which p is taken: it follows somebody who learns."""


class Rivals:
    """Names with their shares, and how matches against them went."""

    def __init__(self, shares: Mapping[str, float], matchmaking: str = FIXED, lineups: int = 1) -> None:
        """`lineups`: how many are drawn from, each as likely as the others if nothing speaks against it. Raises ConfigError."""
        if matchmaking not in MATCHMAKING:
            raise ConfigError(f"matchmaking is {matchmaking!r}.", f"One of {', '.join(MATCHMAKING)}.")
        self.names = tuple(shares)
        total = sum(shares.values())
        self._shares: Doubles = np.array([share / total for share in shares.values()], np.float64)
        self.won: Doubles = np.full((lineups, len(self.names)), 0.5)
        """How many of the last matches with each line-up against each of them, about."""
        self.matches: Ints = np.zeros(self.won.shape, np.int64)
        self._even = matchmaking == EVEN

    @property
    def likely(self) -> Doubles:
        """[line-ups, names]"""
        if not self._even:
            return np.asarray(np.broadcast_to(self._shares, self.won.shape) / len(self.won), np.float64)
        met = self._shares * np.maximum(_LEAST, 2 * np.sqrt(self.won * (1 - self.won)))
        lost = np.maximum(_LEAST, 1 - (self.won * self._shares).sum(axis=1, keepdims=True))
        return np.asarray(met / met.sum(axis=1, keepdims=True) * lost / lost.sum(), np.float64)

    def record(self, name: str, won: bool, lineup: int = 0) -> None:
        """A match against that one is over; one that nobody won was not won."""
        i = lineup, self.names.index(name)
        self.matches[i] += 1
        self.won[i] += (won - self.won[i]) / min(int(self.matches[i]) + 1, _WINDOW)

    def draw_lineup(self, random: np.random.Generator) -> int:
        """Which of them plays; where all are equal they are drawn as if nobody counted."""
        lineups = len(self.won)
        return int(random.choice(lineups, p=self.likely.sum(axis=1)) if self._even and lineups > 1 else random.integers(lineups))

    def draw(self, random: np.random.Generator, lineup: int = 0) -> str:
        """Who is met with this line-up; a single one takes no chance."""
        if len(self.names) == 1:
            return self.names[0]
        likely = self.likely[lineup]
        return self.names[int(random.choice(len(self.names), p=likely / likely.sum()))]


def happens(share: float, random: np.random.Generator) -> bool:
    """Whether something that happens so often happens now; certainty takes no chance."""
    return share == 1.0 if share in (0.0, 1.0) else bool(random.random() < share)
