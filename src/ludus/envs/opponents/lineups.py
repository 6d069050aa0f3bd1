"""Which heroes play the next match: always the same, several in turn, drawn, or everybody against everybody. No I/O.

lineup: [[107], [190]]                    this one; own side first
lineup: [[[107], [190]], [[107], [117]]]  one of these, drawn for every match
lineup: {cycle: [...]}                    these, one after the other
lineup: random                            heroes drawn for every seat, out of all; or {random: [107, 190, 117]}
lineup: roundrobin                        every camp against every camp, one after the other; or {roundrobin: [107, 190, 117]}
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
"""Heroes of the own side, and of the other."""

CYCLE, RANDOM, ROUNDROBIN = "cycle", "random", "roundrobin"
KINDS: Final = (CYCLE, RANDOM, ROUNDROBIN)
_MOST: Final = 1_000_000
_HINT: Final = "Two lists of heroes, own side first; a list of such; random, roundrobin; or {cycle: a list of such}."


class Lineups:
    """Line-ups for matches of `size` heroes a side, one after the other."""

    def __init__(self, given: Any, size: int, pool: Sequence[Hero] = ()) -> None:
        """`pool`: all heroes of the game, for those that are not named. Raises ConfigError."""
        kind, named = _kind_of(given)
        self._size, self._drawn = size, kind == ""
        self._heroes: list[Hero] = []
        self._fixed: list[Lineup] = []
        self._turns: list[Lineup] = []
        self._next = 0
        if kind in (RANDOM, ROUNDROBIN):
            self._heroes = list(pool) if named is None else [_hero(hero, given) for hero in _listed(named, given)]
            if not self._heroes:
                raise ConfigError(f"lineup is {given!r}, and the heroes are not known.", f"Name them: {{{kind}: [107, 190]}}.")
        if kind == ROUNDROBIN:
            self._turns = _everybody(self._heroes, size)
        elif kind != RANDOM and named is not None:
            self._fixed = [_lineup(one, size, given) for one in _several(named, given)]
            if kind == CYCLE:
                self._turns = self._fixed

    @property
    def named(self) -> set[Hero]:
        """Everybody who may play."""
        return set(self._heroes) | {hero for lineup in self._fixed for camp in lineup for hero in camp}

    @property
    def choices(self) -> int:
        """How many line-ups one is drawn from; 1 where they are not drawn from a list."""
        return max(1, len(self._fixed)) if self._drawn else 1

    def begin(self, seed: int) -> None:
        """Where among those that take turns: several who do so need not all begin with the same."""
        self._next = int(np.random.SeedSequence(seed).generate_state(1)[0])

    def next(self, random: np.random.Generator, choose: Callable[[np.random.Generator], int]) -> tuple[int, Lineup | None]:
        """`choose` draws one of `choices`: its number, and the line-up. None: whatever the game plays when it is not told."""
        if self._turns:
            self._next += 1
            return 0, self._turns[(self._next - 1) % len(self._turns)]
        if self._heroes:
            drawn = [self._heroes[i] for i in random.integers(len(self._heroes), size=2 * self._size)]
            return 0, (tuple(drawn[: self._size]), tuple(drawn[self._size :]))
        number = choose(random)  # also without a line-up: what comes after does not depend on it
        return number, self._fixed[number] if self._fixed else None


def _kind_of(given: Any) -> tuple[str, Any]:
    """(how the next is found, among which); an empty kind: drawn from a list. Raises ConfigError."""
    if isinstance(given, Mapping):
        if len(given) != 1 or (kind := str(next(iter(given)))) not in KINDS:
            raise ConfigError(f"lineup is {given!r}.", f"One of {', '.join(KINDS)}, with a list.")
        return kind, next(iter(given.values()))
    if isinstance(given, str):
        if given not in (RANDOM, ROUNDROBIN):
            hint = "It takes turns among those that you list: {cycle: [...]}." if given == CYCLE else did_you_mean(given, KINDS)
            raise ConfigError(f"lineup is {given!r}.", hint)
        return given, None
    return "", given


def _several(named: Any, given: Any) -> Sequence[Any]:
    """Line-ups, also when it is only one."""
    if not _is_list(named) or not named or not all(_is_list(one) and one for one in named):
        raise ConfigError(f"lineup is {given!r}.", _HINT)
    return named if _is_list(named[0][0]) else [named]


def _lineup(one: Any, size: int, given: Any) -> Lineup:
    if not _is_list(one) or len(one) != 2 or not all(_is_list(camp) and len(camp) == size for camp in one):
        raise ConfigError(f"The line-up {one!r} does not fit {size}v{size}.", f"Two camps of {size}.")
    own, other = (tuple(_hero(hero, given) for hero in camp) for camp in one)
    return own, other


def _hero(hero: Any, given: Any) -> Hero:
    if isinstance(hero, bool) or not isinstance(hero, (int, str)):
        raise ConfigError(f"lineup is {given!r}: {hero!r} is no hero.", "The id of a hero, or its name.")
    return hero


def _listed(named: Any, given: Any) -> Sequence[Any]:
    if not _is_list(named) or not named:
        raise ConfigError(f"lineup is {given!r}.", "Name several heroes: [107, 190].")
    return list(named)


def _everybody(heroes: Sequence[Hero], size: int) -> list[Lineup]:
    """Every camp of different heroes against every camp."""
    camps = list(itertools.combinations(dict.fromkeys(heroes), size))
    if not camps:
        raise ConfigError(f"{len(heroes)} heroes are too few for camps of {size}.", "A camp has different heroes.")
    if len(camps) ** 2 > _MOST:
        raise ConfigError(f"{len(heroes)} heroes make {len(camps) ** 2:,} line-ups.", "Name fewer, or take random.")
    return list(itertools.product(camps, camps))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
