"""What is played in a battle: how many matches, from which sides, with which heroes and seeds. Values only."""

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
_SEEDS: Final = 1 << 31

Heroes = tuple[tuple[int | str, ...], tuple[int | str, ...]]
"""Of camp 0 and of camp 1."""
Draw = Callable[[np.random.Generator], Heroes]


@dataclass(frozen=True)
class Terms:
    """`mode`: "1v1", "3v3" …; None: what the contestants were trained for. `lineups`: heroes of blue and of red, one after the other in
    turn; "random"; None: the usual ones. `every`: ticks from decision to decision; None: as A was trained. `seconds`: of the game, after
    which nobody has won. `deterministic`: the most probable actions, else they are drawn."""

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
            raise UsageError(f"A battle of {self.games} games.", f"From 1 to {MAX_GAMES:,}.")
        if self.seed < 0:
            raise UsageError(f"The seed is {self.seed}.", "It is 0 or more.")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Keeping:
    """What is kept of the matches: in `directory` the recordings of all, or of the `most` lopsided ones, and films of so many."""

    directory: Path | None = None
    most: int | None = None
    films: int = 0
    speed: float | None = None
    """Of the films; None: 4 in the Arena, 1 elsewhere."""

    def __post_init__(self) -> None:
        if self.speed is not None and not 0 < self.speed <= MAX_SPEED:
            raise UsageError(f"A film at {self.speed:g} times the speed.", f"More than 0, and at most {MAX_SPEED:g}.")
        if self.directory is None and (self.films or self.most is not None):
            raise UsageError("There is no directory for recordings and films.", "Say where they go: --record DIR.")

    @property
    def recorded(self) -> bool:
        return self.directory is not None


@dataclass(frozen=True)
class Pairing:
    """One match to be played."""

    number: int
    a_camp: int
    seed: int
    heroes: Heroes | None = None


def noise_seed(seed: int, who: int) -> int:
    """Of the player `who` (0 or 1) in the match with this seed: contestants draw apart, and apart from the match."""
    return int(np.random.SeedSequence((seed, who, 1)).generate_state(1, np.uint64)[0] >> 1)


def schedule(terms: Terms, size: int, draw: Draw | None = None) -> list[Pairing]:
    """Heroes belong to the camps: where sides are swapped, each two matches have the same heroes and A plays blue's, then red's.

    `draw`: for random heroes. The numbers are drawn as `games.arena.ladder` draws them: what is the same there is the same match here.
    """
    rng = np.random.default_rng([terms.seed, size, 0])
    given = terms.lineups if isinstance(terms.lineups, tuple) else ()
    each = (0, 1) if terms.swap_sides else (0,)
    found: list[Pairing] = []
    while len(found) < terms.games:
        turn = len(found) // len(each)
        heroes = given[turn % len(given)] if given else draw(rng) if draw is not None else None
        found += [Pairing(len(found) + i, camp, int(rng.integers(_SEEDS)), heroes) for i, camp in enumerate(each)]
    return found[: terms.games]


def read_lineups(text: str | Sequence[Any] | None) -> tuple[Heroes, ...] | str | None:
    """ "190,173,117/141,111,107": blue and red; several, with a semicolon between; "random". Or lists of such. Raises UsageError."""
    if text is None or text == RANDOM:
        return text if text is None else RANDOM
    if isinstance(text, str):
        return tuple(_camps([camp.split(",") for camp in one.split("/")], text) for one in text.split(";"))
    several = text if text and _listed(text[0]) and text[0] and _listed(text[0][0]) else [text]
    return tuple(_camps(one, text) for one in several)


def _listed(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _camps(camps: Any, shown: Any) -> Heroes:
    clean = [[_hero(hero) for hero in camp] for camp in camps] if _listed(camps) and all(map(_listed, camps)) else []
    if len(clean) != 2 or not all(clean) or not all(hero != "" for camp in clean for hero in camp):
        raise UsageError(
            f"The line-up is {shown!r}.", "Heroes of blue, a slash, heroes of red: 190,173,117/141,111,107; or random."
        )
    return tuple(clean[0]), tuple(clean[1])


def _hero(hero: Any) -> int | str:
    text = str(hero).strip()
    return int(text) if text.isdecimal() else text
