"""What came of a battle: who won how many of how many, how sure that is, and what the heroes did. Values only, and what is kept of them."""

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
_SURE: Final = 1.96


WHO: Final[tuple[Who, Who]] = ("a", "b")
SHORT: Final = 300
"""Characters of a complaint that are shown."""


def who_of(camp: int, a_camp: int) -> Who:
    return WHO[int(camp != a_camp)]


def why(error: LudusError | OSError) -> str:
    """In one short line, for a match that came to nothing."""
    said = error.message if isinstance(error, LudusError) else str(error)
    return said.splitlines()[0][:SHORT] if said else type(error).__name__


class Recorded(Protocol):
    """What was kept of a match."""

    def write(self, path: Path) -> Path | None:
        """`path` is without an ending; the file that was written. None: there is nothing to write."""
        ...

    def film(self, path: Path, speed: float | None, progress: FrameProgress | None = None) -> Path:
        """The same, as a film. `speed`: None: what is usual for the game. Raises LudusError when there can be none."""
        ...

    def drop(self) -> None:
        """Nobody wants it any more."""
        ...


@dataclass(frozen=True)
class Hero:
    """What one hero did in one match."""

    who: Who
    name: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Played:
    """One match. `failed`: why it came to no result; such a match counts for nobody."""

    number: int
    a_camp: int
    seed: int
    winner: Who | None = None
    reason: str = ""
    failed: str = ""
    ticks: int | None = None
    seconds: float | None = None
    """Of the game, where it tells its ticks and how long one is; else of the clock. An environment has none: its ticks are steps."""
    heroes: tuple[Hero, ...] = ()
    lopsided: float = 0.0
    """0 is an even match. In the Arena up to 2; of an environment, the difference of what both camps have earned."""
    recording: str | None = None
    video: str | None = None

    def to_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
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
        return shown | {name: value for name, value in extra.items() if value}


@dataclass(frozen=True)
class Share:
    """Of some matches that came to a result, from the side of A."""

    won: int
    lost: int
    drawn: int

    @property
    def games(self) -> int:
        return self.won + self.lost + self.drawn

    @property
    def rate(self) -> float | None:
        """A draw is not won."""
        return self.won / self.games if self.games else None

    @property
    def bounds(self) -> tuple[float, float]:
        """Of the rate: Wilson's, 95 %."""
        return wilson_interval(self.won, self.games, _SURE)

    def to_json(self) -> dict[str, Any]:
        low, high = self.bounds
        rate = None if self.rate is None else round(self.rate, 4)
        counts = {"games": self.games, "won": self.won, "lost": self.lost, "drawn": self.drawn}
        return counts | {"win_rate": rate, "low": round(low, 4), "high": round(high, 4)}


@dataclass(frozen=True)
class BattleResult:
    """`a`, `b`: who they were. All numbers are of A unless they say otherwise."""

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    terms: Mapping[str, Any]
    """What was played, and where."""
    games: tuple[Played, ...]
    notes: tuple[str, ...] = ()
    """What one should know before believing the numbers."""
    elapsed_s: float = field(default=0.0, compare=False)

    @property
    def total(self) -> Share:
        return share_of(self.games)

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
    def failed(self) -> tuple[Played, ...]:
        return tuple(game for game in self.games if game.failed)

    @property
    def win_rate(self) -> float | None:
        return self.total.rate

    @property
    def interval(self) -> tuple[float, float]:
        return self.total.bounds

    @property
    def sides(self) -> dict[str, Share]:
        """By where A stood."""
        return {side: share_of(game for game in self.games if game.a_camp == camp) for camp, side in enumerate(SIDES)}

    @property
    def clocked(self) -> bool:
        """Whether lengths are seconds; in environments they are steps."""
        return "camps" not in self.terms

    @property
    def lengths(self) -> dict[str, float]:
        """Of the matches that came to a result."""
        clocked, whole = self.clocked, [game for game in self.games if not game.failed]
        lengths = [game.seconds if clocked else game.ticks for game in whole]
        known = sorted(float(length) for length in lengths if length is not None)
        if not known:
            return {}
        quarters = {f"p{25 * k}": known[len(known) * k // 4] for k in (1, 2, 3)}
        return {"shortest": known[0], **quarters, "longest": known[-1], "mean": statistics.fmean(known)}

    @property
    def heroes(self) -> dict[Who, dict[str, dict[str, float]]]:
        """Of either contestant, each hero: how many matches it was in, and means of what it did."""
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


def share_of(games: Iterable[Played]) -> Share:
    winners = [game.winner for game in games if not game.failed]
    won, lost = winners.count("a"), winners.count("b")
    return Share(won, lost, len(winners) - won - lost)


def _means(games: Sequence[Played], who: Who) -> dict[str, dict[str, float]]:
    found: dict[str, list[Mapping[str, float]]] = {}
    for hero in (hero for game in games if not game.failed for hero in game.heroes if hero.who == who):
        found.setdefault(hero.name, []).append(hero.numbers)
    means = {}
    for name, rows in sorted(found.items()):
        keys = dict.fromkeys(key for row in rows for key in row)
        means[name] = {"games": len(rows)} | {
            key: round(statistics.fmean(row[key] for row in rows if key in row), 3) for key in keys
        }
    return means


def lopsided(buildings: Sequence[float], gold: Sequence[float]) -> float:
    """How one-sided a match was that ended so: the difference of what is left of the buildings, as shares of all, and of the gold
    that both camps have earned, as a share of it."""
    earned = gold[0] + gold[1]
    return abs(buildings[0] - buildings[1] + ((gold[0] - gold[1]) / earned if earned else 0.0))


def one_sided(game: Played) -> tuple[float, bool, float, int]:
    """Larger is more so: by how lopsided it was; among equals those that are decided, and the shorter ones."""
    length = game.seconds if game.seconds is not None else game.ticks or 0
    return game.lopsided, game.winner is not None, -length, -game.number


def most_lopsided(games: Iterable[Played], number: int) -> list[Played]:
    """The most one-sided first."""
    return sorted((game for game in games if not game.failed), key=one_sided, reverse=True)[:number]
