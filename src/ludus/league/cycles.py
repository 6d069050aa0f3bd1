"""Cycles in a payoff matrix: A beats B, B beats C, C beats A. A rating cannot describe them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ludus.league.payoff import Doubles

_Z_95: Final = 1.96


@dataclass(frozen=True)
class Cycle:
    """Three players, each of which beats the next one, and the last one the first."""

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

    Every win rate is more than `margin` above one half. With the numbers of matches `counts`, one half is also below the 95 % interval of
    every win rate (Wilson 1927): among many pairs with few matches, chance alone makes many cycles.
    """
    beats = win_rates > 0.5 + margin
    if counts is not None:
        beats &= _wilson_low(win_rates, counts) > 0.5
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


def _wilson_low(win_rates: Doubles, counts: Doubles) -> Doubles:
    """Lower bounds of the 95 % intervals of all win rates; 0 without matches."""
    n = np.maximum(counts, 1.0)
    z2 = _Z_95**2
    middle = win_rates + z2 / (2 * n)
    spread = _Z_95 * np.sqrt(win_rates * (1 - win_rates) / n + z2 / (4 * n**2))
    return np.where(counts > 0, (middle - spread) / (1 + z2 / n), 0.0)


def cyclic_share(win_rates: Doubles, counts: Doubles | None = None) -> float:
    """How much of the payoffs no rating can explain: 0 for a pure ranking, 1 for rock-paper-scissors.

    Log-odds are split into a gradient (a rating per player) and a cyclic rest (Balduzzi et al. 2019, "Open-ended learning in
    symmetric zero-sum games"); the share is that of the squared norm. With `counts`, only pairs with results take part, and win rates are
    drawn towards one half by one match, so that 1 win of 1 is not infinite odds.
    """
    played = ~np.eye(len(win_rates), dtype=bool)
    rates = np.clip(win_rates, 0.01, 0.99)
    if counts is not None:
        played &= counts > 0
        rates = (win_rates * counts + 0.5) / (counts + 1)
    advantage = np.where(played, np.log(rates / (1 - rates)), 0.0)
    advantage = (advantage - advantage.T) / 2
    laplacian = np.diag(played.sum(axis=1)) - played
    rating = np.linalg.pinv(laplacian.astype(np.float64), hermitian=True) @ advantage.sum(axis=1)
    rest = np.where(played, advantage - (rating[:, None] - rating[None, :]), 0.0)
    whole = float((advantage**2).sum())
    return float((rest**2).sum()) / whole if whole > 1e-12 else 0.0
