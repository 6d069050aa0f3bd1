"""Line-ups: which heroes play the next match. Pure.

lineup: [[107], [190]]                    a fixed one; own side first
lineup: [[[107], [190]], [[107], [117]]]  one of these, drawn for every match
lineup: {cycle: [...]}                    these, one after the other
lineup: random                            heroes drawn for every seat, out of all; or {random: [107, 190, 117]}
lineup: roundrobin                        every camp against every camp, in turn; or {roundrobin: [107, 190, 117]}
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError

Hero = int | str
Lineup = tuple[tuple[Hero, ...], tuple[Hero, ...]]
"""Heroes of the own side and of the other side."""

CYCLE, RANDOM, ROUNDROBIN = "cycle", "random", "roundrobin"
KINDS: Final = (CYCLE, RANDOM, ROUNDROBIN)
_MAX_LINEUPS: Final = 1_000_000
_HINT: Final = "Two lists of heroes, own side first; a list of such; random, roundrobin; or {cycle: a list of such}."


class Lineups:
    """A sequence of line-ups for matches with `size` heroes per side."""

    def __init__(self, given: Any, size: int, pool: Sequence[Hero] = ()) -> None:
        """`pool`: all heroes of the game, used where none are named. Raises ConfigError."""
        kind, named = _parse_kind(given)
        self._size, self._draws_from_list = size, kind == ""
        self._heroes: list[Hero] = []
        self._fixed: list[Lineup] = []
        self._turns: list[Lineup] = []
        self._next = 0
        if kind in (RANDOM, ROUNDROBIN):
            if named is not None and (not _is_list(named) or not named):
                raise ConfigError(f"lineup is {given!r}.", "Name several heroes: [107, 190].")
            self._heroes = list(pool) if named is None else [_parse_hero(hero, given) for hero in named]
            if not self._heroes:
                raise ConfigError(
                    f"lineup is {given!r}, but the heroes of the game are not known.", f"Name them: {{{kind}: [107, 190]}}."
                )
        if kind == ROUNDROBIN:
            self._turns = _all_pairings(self._heroes, size)
        elif kind != RANDOM and named is not None:
            self._fixed = _parse_lineups(named, size, given)
            if kind == CYCLE:
                self._turns = self._fixed

    @property
    def possible_heroes(self) -> set[Hero]:
        """All heroes that may play."""
        return set(self._heroes) | {hero for lineup in self._fixed for camp in lineup for hero in camp}

    @property
    def choices(self) -> int:
        """Number of line-ups to draw from; 1 if they are not drawn from a list."""
        return max(1, len(self._fixed)) if self._draws_from_list else 1

    def begin(self, seed: int) -> None:
        """Choose the starting position of a cycle, so that several environments need not start with the same line-up."""
        self._next = int(np.random.SeedSequence(seed).generate_state(1)[0])

    def next(self, random: np.random.Generator, choose: Callable[[np.random.Generator], int]) -> tuple[int, Lineup | None]:
        """Return the next line-up and its number. `choose` draws one of `choices`. None: the game's default line-up."""
        if self._turns:
            self._next += 1
            return 0, self._turns[(self._next - 1) % len(self._turns)]
        if self._heroes:
            drawn = [self._heroes[i] for i in random.integers(len(self._heroes), size=2 * self._size)]
            return 0, (tuple(drawn[: self._size]), tuple(drawn[self._size :]))
        number = choose(random)  # always drawn, so that later draws do not depend on the config
        return number, self._fixed[number] if self._fixed else None


def _parse_kind(given: Any) -> tuple[str, Any]:
    """Return (kind, value); an empty kind means drawn from a list. Raises ConfigError."""
    if isinstance(given, Mapping):
        if len(given) != 1 or (kind := str(next(iter(given)))) not in KINDS:
            raise ConfigError(f"lineup is {given!r}.", f"One of {', '.join(KINDS)}, with a list.")
        return kind, next(iter(given.values()))
    if isinstance(given, str):
        if given not in (RANDOM, ROUNDROBIN):
            hint = "List the line-ups to cycle through: {cycle: [...]}." if given == CYCLE else did_you_mean(given, KINDS)
            raise ConfigError(f"lineup is {given!r}.", hint)
        return given, None
    return "", given


def _parse_lineups(named: Any, size: int, given: Any) -> list[Lineup]:
    """Parse a list of line-ups, or a single one."""
    if not _is_list(named) or not named or not all(_is_list(one) and one for one in named):
        raise ConfigError(f"lineup is {given!r}.", _HINT)
    lineups: list[Lineup] = []
    for one in named if _is_list(named[0][0]) else [named]:
        if not _is_list(one) or len(one) != 2 or not all(_is_list(camp) and len(camp) == size for camp in one):
            raise ConfigError(f"The line-up {one!r} does not fit {size}v{size}.", f"Two camps of {size}.")
        own, other = (tuple(_parse_hero(hero, given) for hero in camp) for camp in one)
        lineups.append((own, other))
    return lineups


def _parse_hero(hero: Any, given: Any) -> Hero:
    if isinstance(hero, bool) or not isinstance(hero, (int, str)):
        raise ConfigError(f"lineup is {given!r}: {hero!r} is not a hero.", "Give the id of a hero, or its name.")
    return hero


def _all_pairings(heroes: Sequence[Hero], size: int) -> list[Lineup]:
    """Return every camp of distinct heroes against every camp."""
    camps = list(itertools.combinations(dict.fromkeys(heroes), size))
    if not camps:
        raise ConfigError(f"{len(heroes)} heroes are too few for camps of {size}.", "A camp has different heroes.")
    if len(camps) ** 2 > _MAX_LINEUPS:
        raise ConfigError(f"{len(heroes)} heroes make {len(camps) ** 2:,} line-ups.", "Name fewer, or use random.")
    return list(itertools.product(camps, camps))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
