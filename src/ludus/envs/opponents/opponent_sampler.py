"""Sampling of the next opponent and line-up: by fixed shares, or such that matches are about even. Pure.

Little is learned from matches that are always won or always lost. `even` therefore weights the shares by √(p·(1 − p)), the standard
deviation of a result, where p is the recent win rate against an opponent. (Prioritised fictitious self-play, Vinyals et al. 2019, uses
p·(1 − p), which drops strong opponents more: at p = 0.05 they get a fifth of the weight of an even one, here 0.44.)

With several line-ups all of this is counted per line-up. Line-ups themselves are weighted by 1 − p over all opponents, because each
of them has to be played well: those that are always won are played less often.
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
_MIN_WEIGHT: Final = 0.1
"""Minimum weight, relative to an even opponent, at a win rate of 0 or 1."""
_WINDOW: Final = 60
"""Approximate number of matches over which the win rate is averaged."""


class OpponentSampler:
    """Opponents with their shares and recent win rates."""

    def __init__(self, shares: Mapping[str, float], matchmaking: str = FIXED, lineups: int = 1) -> None:
        """`lineups`: number of line-ups to draw from, equally likely unless `even`. Raises ConfigError."""
        if matchmaking not in MATCHMAKING:
            raise ConfigError(f"matchmaking is {matchmaking!r}.", f"One of {', '.join(MATCHMAKING)}.")
        self.names = tuple(shares)
        total = sum(shares.values())
        self._shares: Doubles = np.array([share / total for share in shares.values()], np.float64)
        self.win_rate: Doubles = np.full((lineups, len(self.names)), 0.5)
        """[line-ups, names] recent win rate."""
        self.matches: Ints = np.zeros(self.win_rate.shape, np.int64)
        self._even = matchmaking == EVEN

    @property
    def probabilities(self) -> Doubles:
        """[line-ups, names] probability of each pairing."""
        if not self._even:
            return np.asarray(np.broadcast_to(self._shares, self.win_rate.shape) / len(self.win_rate), np.float64)
        opponent_weight = self._shares * np.maximum(_MIN_WEIGHT, 2 * np.sqrt(self.win_rate * (1 - self.win_rate)))
        lineup_weight = np.maximum(_MIN_WEIGHT, 1 - (self.win_rate * self._shares).sum(axis=1, keepdims=True))
        return np.asarray(
            opponent_weight / opponent_weight.sum(axis=1, keepdims=True) * lineup_weight / lineup_weight.sum(), np.float64
        )

    def record(self, name: str, won: bool, lineup: int = 0) -> None:
        """Record the result of a match; a draw counts as not won."""
        i = lineup, self.names.index(name)
        self.matches[i] += 1
        self.win_rate[i] += (won - self.win_rate[i]) / min(int(self.matches[i]) + 1, _WINDOW)

    def draw_lineup(self, random: np.random.Generator) -> int:
        """Draw the index of the next line-up."""
        lineups = len(self.win_rate)
        return int(
            random.choice(lineups, p=self.probabilities.sum(axis=1)) if self._even and lineups > 1 else random.integers(lineups)
        )

    def draw(self, random: np.random.Generator, lineup: int = 0) -> str:
        """Draw the next opponent for this line-up; with a single opponent no random number is used."""
        if len(self.names) == 1:
            return self.names[0]
        probabilities = self.probabilities[lineup]
        return self.names[int(random.choice(len(self.names), p=probabilities / probabilities.sum()))]


def bernoulli(share: float, random: np.random.Generator) -> bool:
    """Return True with probability `share`; no random number is used for 0 and 1."""
    return share == 1.0 if share in (0.0, 1.0) else bool(random.random() < share)
