"""The latest results of a training player, in matches that it has started. They determine its rating: its older weights were weaker."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple


class PairResults(NamedTuple):
    """Results against one opponent that arrived together."""

    opponent: str
    wins: int
    draws: int
    losses: int

    @property
    def games(self) -> int:
        return self.wins + self.draws + self.losses


@dataclass(frozen=True)
class RecentResults:
    """A window over the latest results, oldest first."""

    entries: tuple[PairResults, ...] = ()
    games: int = 0

    def add(self, added: PairResults, window: int) -> RecentResults:
        """Add results, and drop the oldest ones as long as `window` matches remain."""
        games, dropped = self.games + added.games, 0
        while dropped < len(self.entries) and games - self.entries[dropped].games >= window:
            games -= self.entries[dropped].games
            dropped += 1
        return RecentResults((*self.entries[dropped:], added), games)

    def against(self, opponents: Container[str]) -> RecentResults:
        """Only the results against these opponents."""
        entries = tuple(entry for entry in self.entries if entry.opponent in opponents)
        return RecentResults(entries, sum(entry.games for entry in entries))
