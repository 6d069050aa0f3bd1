"""Values of a battle's outcome: results of matches, win counts with Wilson intervals, statistics of heroes; and their JSON form."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from ludus.core.statistics import wilson_interval
from ludus.envs.video_writer import FrameProgress
from ludus.errors import LudusError

Who = Literal["a", "b"]
SIDES: Final = ("blue", "red")
"""Names of camp 0 and camp 1."""
STATISTICS: Final = ("kills", "deaths", "assists", "gold", "level", "last_hits", "damage")
_Z_95: Final = 1.96
WHO: Final[tuple[Who, Who]] = ("a", "b")
MAX_REASON_CHARS: Final = 300


def contestant_in_camp(camp: int, a_camp: int) -> Who:
    return WHO[int(camp != a_camp)]


def failure_text(error: LudusError | OSError) -> str:
    """The first line of an error's message, for `MatchResult.failed`."""
    message = error.message if isinstance(error, LudusError) else str(error)
    return message.splitlines()[0][:MAX_REASON_CHARS] if message else type(error).__name__


class MatchRecording(Protocol):
    """The recording of one match, before it is written to the directory of the battle."""

    def write(self, path: Path) -> Path | None:
        """Write the recording to `path` with a suffix added; returns the file, or None if there is nothing to write."""
        ...

    def write_video(self, path: Path, speed: float | None, progress: FrameProgress | None = None) -> Path:
        """Write a video to `path` with a suffix added. `speed` None: the game's default. Raises LudusError if it cannot be made."""
        ...

    def discard(self) -> None:
        """Delete the temporary files of the recording."""
        ...


@dataclass(frozen=True)
class HeroStats:
    """Statistics of one hero, or of one agent of an environment, in one match."""

    who: Who
    name: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class MatchResult:
    """One match. `failed`: the reason why it has no result; such a match does not count."""

    number: int
    a_camp: int
    seed: int
    winner: Who | None = None
    reason: str = ""
    failed: str = ""
    ticks: int | None = None
    seconds: float | None = None
    """Game time if the length of a tick is known, else wall-clock time. None for environments: their ticks are steps."""
    heroes: tuple[HeroStats, ...] = ()
    lopsided: float = 0.0
    """0 is an even match. At most 2 in the Arena; in an environment the difference between the mean returns of the camps."""
    gain: float | None = None
    """Half of the difference between the mean returns of the agents of A and B; None: the game reports only who has won."""
    recording: str | None = None
    video: str | None = None

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "game": self.number,
            "seed": self.seed,
            "side_of_a": SIDES[self.a_camp],
            "winner": self.winner,
            "reason": self.reason,
            "ticks": self.ticks,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "lopsided": round(self.lopsided, 4),
            "heroes": [{"who": hero.who, "hero": hero.name, **hero.numbers} for hero in self.heroes],
        }
        extra = {"failed": self.failed, "recording": self.recording, "video": self.video}
        return fields | {name: value for name, value in extra.items() if value}


@dataclass(frozen=True)
class WinLossCount:
    """Wins, losses and draws of contestant A in matches that have a result."""

    won: int
    lost: int
    drawn: int

    @property
    def games(self) -> int:
        return self.won + self.lost + self.drawn

    @property
    def rate(self) -> float | None:
        """Share of wins; a draw is not a win."""
        return self.won / self.games if self.games else None

    @property
    def bounds(self) -> tuple[float, float]:
        """95 % Wilson interval of the rate."""
        return wilson_interval(self.won, self.games, _Z_95)

    def to_json(self) -> dict[str, Any]:
        low, high = self.bounds
        rate = None if self.rate is None else round(self.rate, 4)
        counts = {"games": self.games, "won": self.won, "lost": self.lost, "drawn": self.drawn}
        return counts | {"win_rate": rate, "low": round(low, 4), "high": round(high, 4)}


@dataclass(frozen=True)
class BattleResult:
    """The outcome of a battle. Numbers are those of contestant A unless stated otherwise. `a`, `b`: the contestants as JSON."""

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    terms: Mapping[str, Any]
    """Settings of the battle, the game and where it ran."""
    games: tuple[MatchResult, ...]
    notes: tuple[str, ...] = ()
    """Caveats about the numbers."""
    elapsed_s: float = field(default=0.0, compare=False)

    @property
    def total(self) -> WinLossCount:
        return count_wins(self.games)

    @property
    def won(self) -> int:
        return self.total.won

    @property
    def lost(self) -> int:
        return self.total.lost

    @property
    def drawn(self) -> int:
        return self.total.drawn

    @property
    def failed(self) -> tuple[MatchResult, ...]:
        return tuple(game for game in self.games if game.failed)

    @property
    def win_rate(self) -> float | None:
        return self.total.rate

    @property
    def interval(self) -> tuple[float, float]:
        return self.total.bounds

    @property
    def gain(self) -> float | None:
        """Sum of the gains of A; None if the game reports only who has won."""
        gains = [game.gain for game in self.games if not game.failed]
        known = [gain for gain in gains if gain is not None]
        return sum(known) if len(known) == len(gains) else None

    @property
    def sides(self) -> dict[str, WinLossCount]:
        """Counts by the side that A played."""
        return {side: count_wins(game for game in self.games if game.a_camp == camp) for camp, side in enumerate(SIDES)}

    @property
    def clocked(self) -> bool:
        """Whether lengths are seconds; for environments they are steps."""
        return "camps" not in self.terms

    @property
    def lengths(self) -> dict[str, float]:
        """Quantiles of the lengths of the matches that have a result."""
        clocked, completed = self.clocked, [game for game in self.games if not game.failed]
        lengths = [game.seconds if clocked else game.ticks for game in completed]
        known = sorted(float(length) for length in lengths if length is not None)
        if not known:
            return {}
        quarters = {f"p{25 * k}": known[len(known) * k // 4] for k in (1, 2, 3)}
        return {"shortest": known[0], **quarters, "longest": known[-1], "mean": statistics.fmean(known)}

    @property
    def heroes(self) -> dict[Who, dict[str, dict[str, float]]]:
        """Per contestant and hero: the number of its matches and the means of its statistics."""
        return {"a": _means(self.games, "a"), "b": _means(self.games, "b")}

    def to_json(self) -> dict[str, Any]:
        return {
            "a": dict(self.a),
            "b": dict(self.b),
            **self.total.to_json(),
            "failed": len(self.failed),
            "sides": {side: share.to_json() for side, share in self.sides.items()},
            "seconds" if self.clocked else "steps": {name: round(value, 3) for name, value in self.lengths.items()},
            "heroes": self.heroes,
            "terms": dict(self.terms),
            "notes": list(self.notes),
            "elapsed_s": round(self.elapsed_s, 3),
            "matches": [game.to_json() for game in self.games],
        }


def count_wins(games: Iterable[MatchResult]) -> WinLossCount:
    winners = [game.winner for game in games if not game.failed]
    won, lost = winners.count("a"), winners.count("b")
    return WinLossCount(won, lost, len(winners) - won - lost)


def _means(games: Sequence[MatchResult], who: Who) -> dict[str, dict[str, float]]:
    by_hero: dict[str, list[Mapping[str, float]]] = {}
    for hero in (hero for game in games if not game.failed for hero in game.heroes if hero.who == who):
        by_hero.setdefault(hero.name, []).append(hero.numbers)
    means = {}
    for name, rows in sorted(by_hero.items()):
        keys = dict.fromkeys(key for row in rows for key in row)
        means[name] = {"games": len(rows)} | {
            key: round(statistics.fmean(row[key] for row in rows if key in row), 3) for key in keys
        }
    return means


def lopsidedness(buildings: Sequence[float], gold: Sequence[float]) -> float:
    """How one-sided a match was: the camps' difference in remaining building health (a share each) plus that in gold, as a share of
    all gold earned."""
    earned = gold[0] + gold[1]
    return abs(buildings[0] - buildings[1] + ((gold[0] - gold[1]) / earned if earned else 0.0))


def lopsidedness_key(game: MatchResult) -> tuple[float, bool, float, int]:
    """Sort key, larger is more lopsided; ties are broken in favour of decided and of shorter matches."""
    length = game.seconds if game.seconds is not None else game.ticks or 0
    return game.lopsided, game.winner is not None, -length, -game.number


def most_lopsided(games: Iterable[MatchResult], number: int) -> list[MatchResult]:
    """The most lopsided matches that have a result, in descending order."""
    return sorted((game for game in games if not game.failed), key=lopsidedness_key, reverse=True)[:number]
