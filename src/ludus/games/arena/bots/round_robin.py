"""Round-robin of the bots with random line-ups, each played from both sides."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ludus.core.plugins import did_you_mean
from ludus.core.statistics import wilson_interval
from ludus.errors import ConfigError
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.engine.heroes import IDS
from ludus.games.arena.engine.layout import TICKS_PER_SECOND
from ludus.games.arena.engine.settings import ArenaSettings
from ludus.games.arena.engine.vector import Arena

Pair = tuple[str, str]
PAIRS: Final[tuple[Pair, ...]] = (
    ("hard", "medium"),
    ("medium", "easy"),
    ("random", "medium"),
    ("nearest", "medium"),
    ("hard", "hard"),
    ("medium", "medium"),
)
_AT_ONCE: Final = 64
_SURE: Final = 1.96


@dataclass(frozen=True)
class BotMatch:
    """A match to play: bots and heroes of both camps."""

    bots: Pair
    lineup: tuple[tuple[int, ...], tuple[int, ...]]
    seed: int


@dataclass(frozen=True)
class PairResult:
    """Results of the first bot against the second. A match that reaches the time limit is a draw."""

    pair: Pair
    size: int
    games: int
    won: int
    lost: int
    seconds: tuple[float, ...]

    @property
    def drawn(self) -> int:
        return self.games - self.won - self.lost

    @property
    def rate(self) -> float:
        """Share of won games; a draw is not won."""
        return self.won / self.games

    @property
    def bounds(self) -> tuple[float, float]:
        """95 % interval of the rate."""
        return wilson_interval(self.won, self.games, _SURE)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def row(self) -> dict[str, Any]:
        low, high = self.bounds
        lengths = sorted(self.seconds)
        return {
            "first": self.pair[0],
            "second": self.pair[1],
            "mode": f"{self.size}v{self.size}",
            "games": self.games,
            "won": self.won,
            "lost": self.lost,
            "drawn": self.drawn,
            "rate": round(self.rate, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "seconds": [round(lengths[len(lengths) * k // 4]) for k in (1, 2, 3)],
        }


def play_pairs(
    games: int, size: int, seed: int, pairs: Sequence[Pair] = PAIRS, settings: ArenaSettings | None = None
) -> list[PairResult]:
    """Play `games` of every pair: half with random line-ups, the other half with the same ones and the bots swapped.

    Raises ConfigError for an unknown bot.
    """
    results = []
    for turn, pair in enumerate(pairs):
        rng = np.random.default_rng([seed, size, turn])
        matches = []
        for _ in range((games + 1) // 2):
            lineup = draw_lineup(rng, size)
            matches += [BotMatch(who, lineup, int(rng.integers(1 << 31))) for who in (pair, (pair[1], pair[0]))]
        matches = matches[:games]
        winners, seconds = play(matches, size, settings)
        won = sum(winner == number % 2 for number, winner in enumerate(winners))
        lost = sum(winner == 1 - number % 2 for number, winner in enumerate(winners))
        results.append(PairResult(pair, size, len(matches), won, lost, tuple(seconds)))
    return results


def draw_lineup(rng: np.random.Generator, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw the heroes of both camps; without duplicates in a camp as long as there are enough heroes."""
    camps = [tuple(IDS[k] for k in rng.choice(len(IDS), size, replace=size > len(IDS))) for _ in range(2)]
    return camps[0], camps[1]


def play(matches: Sequence[BotMatch], size: int, settings: ArenaSettings | None = None) -> tuple[list[int], list[float]]:
    """Play the matches; return winners (camps, or -1) and lengths in seconds of game time."""
    winners, seconds = [], []
    for begun in range(0, len(matches), _AT_ONCE):
        part = matches[begun : begun + _AT_ONCE]
        arena = Arena(size, len(part), settings)
        arena.reset([match.seed for match in part], lineups=[match.lineup for match in part])
        who = np.array([[bot_index(match.bots[camp]) for camp in (0, 1) for _ in range(size)] for match in part], np.int8)
        while not arena.over.all():
            arena.step(arena.bot_actions(who))
        winners += arena.winner.tolist()
        seconds += (arena.tick / TICKS_PER_SECOND).tolist()
    return winners, seconds


def bot_index(bot: str) -> int:
    """Return the index in BOTS. Raises ConfigError."""
    if bot not in BOTS:
        raise ConfigError(f"There is no scripted bot {bot!r}.", did_you_mean(bot, BOTS))
    return BOTS.index(bot)
