"""Cycles in a payoff matrix: A beats B, B beats C, C beats A. A rating cannot describe them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from ludus.league.payoff import Doubles
from ludus.league.ratings import fit_ratings

_LEAST_SIGNAL: Final = 0.1
"""Smallest deviation of the win rates from one half, relative to their noise, for which a cyclic share is computed."""
_MAX_WEIGHT: Final = 100.0
"""Most matches of one pair that count for the cyclic share, so that a pair with very many matches does not dominate."""


@dataclass(frozen=True)
class Cycle:
    """Three players: the first beats the second, the second beats the third, the third beats the first."""

    players: tuple[str, str, str]
    win_rates: tuple[float, float, float]
    games: tuple[int, int, int] | None = None

    @property
    def strength(self) -> float:
        """The smallest of the three win rates: 0.5 is no cycle, 1 is rock-paper-scissors."""
        return min(self.win_rates)


def find_cycles(
    players: Sequence[str], win_rates: Doubles, counts: Doubles | None = None, *, margin: float = 0.05, limit: int = 20
) -> list[Cycle]:
    """The strongest cycles of three players, strongest first, at most `limit`.

    Every win rate is more than `margin` above one half. With the numbers of matches `counts`, one half is also below the confidence
    interval of every win rate (Wilson 1927). The confidence is at least 95 %, and higher with many players, so that at most
    5 % of leagues with equally strong players have a cycle by chance.
    """
    beats = win_rates > 0.5 + margin
    if counts is not None:
        beats &= _wilson_low(win_rates, counts, _z_for(len(players))) > 0.5
    best: list[tuple[float, int, int, int]] = []  # a heap: the weakest first
    for a in range(len(players)):
        later = np.arange(len(players)) > a  # every cycle is found once, from its first player
        for b in np.flatnonzero(beats[a] & later).tolist():
            for c in np.flatnonzero(beats[b] & beats[:, a] & later).tolist():
                found = (float(min(win_rates[a, b], win_rates[b, c], win_rates[c, a])), -a, -b, -c)
                if len(best) < limit:
                    heapq.heappush(best, found)
                elif found > best[0]:
                    heapq.heapreplace(best, found)
    return [_cycle(players, (-a, -b, -c), win_rates, counts) for _, a, b, c in sorted(best, reverse=True)]


def _cycle(players: Sequence[str], members: tuple[int, int, int], win_rates: Doubles, counts: Doubles | None) -> Cycle:
    a, b, c = members
    games = None if counts is None else (round(counts[a, b]), round(counts[b, c]), round(counts[c, a]))
    rates = (float(win_rates[a, b]), float(win_rates[b, c]), float(win_rates[c, a]))
    return Cycle((players[a], players[b], players[c]), rates, games)


def _z_for(players: int) -> float:
    """Standard deviations beyond which a win rate counts as above one half.

    By chance, all three win rates exceed it with the cube of the probability of one. Every triple has two directions.
    """
    directions = max(players * (players - 1) * (players - 2) // 3, 1)
    return NormalDist().inv_cdf(1 - min(0.025, (0.05 / directions) ** (1 / 3)))


def _wilson_low(win_rates: Doubles, counts: Doubles, z: float) -> Doubles:
    """Lower bounds of the confidence intervals of all win rates; 0 without matches."""
    n = np.maximum(counts, 1.0)
    middle = win_rates + z**2 / (2 * n)
    spread = z * np.sqrt(win_rates * (1 - win_rates) / n + z**2 / (4 * n**2))
    return np.where(counts > 0, (middle - spread) / (1 + z**2 / n), 0.0)


def cyclic_share(win_rates: Doubles, counts: Doubles | None = None) -> float:
    """Return the share of the payoffs that no rating can explain: 0 for a pure ranking, 1 for rock-paper-scissors.

    This is the squared deviation of the win rates from those that fitted ratings predict, divided by the squared deviation from one half.
    With the numbers of matches `counts`, pairs without results are left out, and the sampling variance of the win rates is subtracted.
    Returns 0 if the payoffs are mostly noise.
    """
    n = len(win_rates)
    met = ~np.eye(n, dtype=bool) & (np.ones((n, n), bool) if counts is None else counts > 0)
    if not met.any():
        return 0.0
    weight = np.where(met, 1.0 if counts is None else np.minimum(counts, _MAX_WEIGHT), 0.0)
    names = [str(i) for i in range(n)]
    fitted = fit_ratings(names, weight * win_rates, weight, {}, prior_games=1e-6 if counts is None else 1.0)
    rating = np.array([fitted[name].elo for name in names])
    expected = 1 / (1 + 10 ** ((rating[None, :] - rating[:, None]) / 400))
    noise = np.zeros((n, n)) if counts is None else np.where(met, weight * _variances(win_rates, counts, expected), 0.0)
    fitted_away = min(1.0, 2 * (n - 1) / met.sum())  # share of the noise that the fit of the ratings absorbs
    rest = float((weight * (win_rates - expected) ** 2 - (1 - fitted_away) * noise).sum())
    whole = float((weight * (win_rates - 0.5) ** 2 - noise).sum())
    if whole <= max(1e-9, _LEAST_SIGNAL * float(noise.sum())):
        return 0.0
    return min(max(rest / whole, 0.0), 1.0)


def _variances(win_rates: Doubles, counts: Doubles, expected: Doubles) -> Doubles:
    """Variances of the win rates: unbiased estimates from several matches; for a single match, the variance that the ratings predict."""
    several = win_rates * (1 - win_rates) / np.maximum(counts - 1, 1.0)
    return np.where(counts >= 2, several, expected * (1 - expected))
