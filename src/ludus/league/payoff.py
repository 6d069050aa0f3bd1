"""Results between pairs of players. Tables are immutable: an update returns a new one, which shares all unchanged rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

UNSEEN: Final = 0.5
"""Win rate of a pair without results."""


class PairRecord(NamedTuple):
    """Results of one player against another, from the first one's view. A named tuple: a league has a million of them."""

    wins: int = 0
    draws: int = 0
    losses: int = 0
    weight: float = 0.0
    """Number of results, older ones discounted."""
    win_rate: float = UNSEEN
    """Share of wins, draws as half, older ones discounted; 0.5 without results."""
    gain: float = 0.0
    """Sum of the gains of all results. A gain is half of the difference between the mean returns of the two sides."""

    @property
    def games(self) -> int:
        return self.wins + self.draws + self.losses

    def add(self, wins: int, draws: int, losses: int, decay: float, gain: float = 0.0) -> PairRecord:
        """Count further results. Several at once are discounted as if wins, draws and losses were spread evenly."""
        games = wins + draws + losses
        kept = self.weight * decay**games
        fresh = float(games) if decay == 1.0 else (1 - decay**games) / (1 - decay)
        rate = (self.win_rate * kept + fresh * (wins + 0.5 * draws) / games) / (kept + fresh)
        return PairRecord(self.wins + wins, self.draws + draws, self.losses + losses, kept + fresh, rate, self.gain + gain)

    def mirrored(self) -> PairRecord:
        """The same results from the other player's view."""
        return PairRecord(self.losses, self.draws, self.wins, self.weight, 1 - self.win_rate, -self.gain)


NO_RESULTS: Final = PairRecord()


@dataclass(frozen=True)
class PayoffTable:
    rows: Mapping[str, Mapping[str, PairRecord]] = field(default_factory=dict)
    """Player → opponent → record. A pair is counted under the name that sorts first, and mirrored under the other one."""

    def record(self, player: str, opponent: str) -> PairRecord:
        return self.rows.get(player, {}).get(opponent, NO_RESULTS)

    def win_rate(self, player: str, opponent: str) -> float:
        return self.record(player, opponent).win_rate

    def win_rates(self, player: str, opponents: Sequence[str]) -> Doubles:
        row = self.rows.get(player, {})
        return np.array([row.get(opponent, NO_RESULTS).win_rate for opponent in opponents], np.float64)

    def add(
        self, player: str, opponent: str, wins: int, draws: int, losses: int, decay: float = 1.0, gain: float | None = None
    ) -> PayoffTable:
        """Count matches. Those of a player against itself are ignored. `gain` None: 1 per won match, -1 per lost one."""
        if player == opponent or wins + draws + losses == 0:
            return self
        gained = float(wins - losses) if gain is None else gain
        if player > opponent:
            player, opponent, wins, losses, gained = opponent, player, losses, wins, -gained
        rows = dict(self.rows)
        record = self.record(player, opponent).add(wins, draws, losses, decay, gained)
        rows[player] = {**rows.get(player, {}), opponent: record}
        rows[opponent] = {**rows.get(opponent, {}), player: record.mirrored()}
        return PayoffTable(rows)

    @classmethod
    def from_half(cls, half: Mapping[str, Mapping[str, Sequence[Any]]]) -> PayoffTable:
        """The inverse of `half`."""
        rows: dict[str, dict[str, PairRecord]] = {own: {} for own in half}
        for own, row in half.items():
            for other, values in row.items():
                record = PairRecord._make(values)
                rows[own][other] = record
                rows.setdefault(other, {})[own] = record.mirrored()
        return cls(rows)

    def half(self) -> dict[str, dict[str, PairRecord]]:
        """Every pair once, under the player whose name sorts first; half of what a snapshot would store otherwise."""
        return {own: {other: record for other, record in row.items() if own < other} for own, row in self.rows.items()}

    def without(self, player: str) -> PayoffTable:
        """Forget the results of a player, as after a reset of its weights."""
        rows = {own: row for own, row in self.rows.items() if own != player}
        for opponent in self.rows.get(player, {}):
            rows[opponent] = {other: record for other, record in rows.get(opponent, {}).items() if other != player}
        return PayoffTable(rows)

    def matrix(self, players: Sequence[str]) -> Doubles:
        """[players, players] win rates; 0.5 on the diagonal and where there are no results."""
        rates = np.stack([self.win_rates(player, players) for player in players]) if players else np.zeros((0, 0))
        np.fill_diagonal(rates, UNSEEN)
        return rates

    def mean_gains(self, players: Sequence[str]) -> Doubles:
        """[players, players] mean gain per match; 0 on the diagonal and where there are no results."""
        records = [[self.record(own, other) for other in players] for own in players]
        return np.array([[one.gain / one.games if one.games else 0.0 for one in row] for row in records], np.float64)

    def counts(self, players: Sequence[str]) -> npt.NDArray[np.int64]:
        """[players, players] number of matches."""
        return np.array([[self.record(own, other).games for other in players] for own in players], np.int64)
