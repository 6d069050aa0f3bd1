"""Settings of a battle and the schedule of its matches: sides, heroes and seeds. Values only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ludus.errors import UsageError

RANDOM: Final = "random"
MAX_GAMES: Final = 1_000_000
MAX_SPEED: Final = 1_000.0
_SEED_LIMIT: Final = 1 << 31

Heroes = tuple[tuple[int | str, ...], tuple[int | str, ...]]
"""Heroes of camp 0 (blue) and of camp 1 (red), by number or name."""
Draw = Callable[[np.random.Generator], Heroes]


@dataclass(frozen=True)
class BattleSettings:
    """What is played.

    `mode`: "1v1", "3v3" …; None: as in training. `lineups`: used in turn; "random"; None: the game's default. `every`: ticks between
    decisions; None: as in A's training. `seconds`: game time after which a match is a draw. `deterministic`: take the most probable
    actions instead of sampling them.
    """

    games: int = 200
    swap_sides: bool = True
    mode: str | None = None
    lineups: tuple[Heroes, ...] | str | None = None
    every: int | None = None
    seconds: int | None = None
    seed: int = 0
    deterministic: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.games <= MAX_GAMES:
            raise UsageError(f"A battle cannot have {self.games} games.", f"Choose from 1 to {MAX_GAMES:,}.")
        if self.seed < 0:
            raise UsageError(f"The seed {self.seed} is negative.", "Choose 0 or more.")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RecordingSettings:
    """What is recorded: into `directory`, all matches or the `most` lopsided ones, and `videos` of that many. None: nothing."""

    directory: Path | None = None
    most: int | None = None
    videos: int = 0
    speed: float | None = None
    """Playback speed of the videos; None: 4 in the Arena, 1 elsewhere."""

    def __post_init__(self) -> None:
        if self.speed is not None and not 0 < self.speed <= MAX_SPEED:
            raise UsageError(
                f"A video cannot play at {self.speed:g} times the speed.", f"Choose more than 0, at most {MAX_SPEED:g}."
            )
        if self.directory is None and (self.videos or self.most is not None):
            raise UsageError("No directory is given for recordings and videos.", "Add --record DIR.")


@dataclass(frozen=True)
class Pairing:
    """One match of the schedule. `a_camp`: the camp that contestant A plays."""

    number: int
    a_camp: int
    seed: int
    heroes: Heroes | None = None


def noise_seed(seed: int, who: int) -> int:
    """Seed of contestant `who` (0 or 1) in the match with this seed; independent of the other contestant and of the match."""
    return int(np.random.SeedSequence((seed, who, 1)).generate_state(1, np.uint64)[0] >> 1)


def schedule(settings: BattleSettings, size: int, draw: Draw | None = None) -> list[Pairing]:
    """The matches of a battle. With swapped sides, two matches in a row have the same heroes, and A plays blue, then red.

    `draw` draws random heroes. Seeds are drawn in the order of `games.arena.bots.round_robin`, which makes equal settings equal matches.
    """
    rng = np.random.default_rng([settings.seed, size, 0])
    given = settings.lineups if isinstance(settings.lineups, tuple) else ()
    each = (0, 1) if settings.swap_sides else (0,)
    pairings: list[Pairing] = []
    while len(pairings) < settings.games:
        turn = len(pairings) // len(each)
        heroes = given[turn % len(given)] if given else draw(rng) if draw is not None else None
        pairings += [Pairing(len(pairings) + i, camp, int(rng.integers(_SEED_LIMIT)), heroes) for i, camp in enumerate(each)]
    return pairings[: settings.games]


def read_lineups(text: str | Sequence[Any] | None) -> tuple[Heroes, ...] | str | None:
    """Parse line-ups: "190,173,117/141,111,107" (blue/red), several separated by semicolons, "random", or lists of these.

    Raises UsageError.
    """
    if text is None or text == RANDOM:
        return text if text is None else RANDOM
    if isinstance(text, str):
        return tuple(_camps([camp.split(",") for camp in one.split("/")], text) for one in text.split(";"))
    lineups = text if text and _is_list(text[0]) and text[0] and _is_list(text[0][0]) else [text]
    return tuple(_camps(lineup, text) for lineup in lineups)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _camps(camps: Any, given: Any) -> Heroes:
    clean: list[list[int | str]] = []
    if _is_list(camps) and all(map(_is_list, camps)):
        texts = [[str(hero).strip() for hero in camp] for camp in camps]
        clean = [[int(text) if text.isdecimal() else text for text in camp] for camp in texts]
    if len(clean) != 2 or not all(clean) or not all(hero != "" for camp in clean for hero in camp):
        raise UsageError(
            f"The line-up {given!r} is not valid.",
            "Write the heroes of blue, a slash, the heroes of red: 190,173,117/141,111,107; or random.",
        )
    return tuple(clean[0]), tuple(clean[1])
