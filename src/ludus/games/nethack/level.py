"""What is known of a dungeon level: the map as sets of squares, and what the hero has already tried there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from ludus.games.nethack import squares as sq

_KINDS: Final = np.array([1 << bit for bit in range(10)], np.uint16)
_WALKABLE, _DOOR, _CLOSED, _UNKNOWN, _DOWN, _UP, _MONSTER, _GOLD, _BOULDER, _WALL = map(int, _KINDS)

# Symbols of the map, as NetHack 3.6 numbers them (defsym.h).
_STONE: Final = 0
_WALLS: Final = range(1, 12)
_OPEN_DOORS: Final = (13, 14)
_CLOSED_DOORS: Final = (15, 16)
_FLOORS: Final = (12, *range(19, 32), 33, 35, 36)
_UP_STAIRS, _DOWN_STAIRS = (23, 25), (24, 26)
_HOLES: Final = (54, 55)
"""Holes and trap doors, which lead down."""

_MAX_FAILURES: Final = 6
"""Failed steps onto a square before it counts as blocked."""


class LevelMap:
    """The squares of the level in view, by kind. The hero's own square is walkable and no monster."""

    def __init__(self, glyphs: npt.NDArray[np.int16], hero: int) -> None:
        kinds = _kinds_of_glyphs()[glyphs]
        found = sq.squares_where((kinds & _KINDS[:, None, None]) != 0)
        (walkable, self.doors, self.closed, self.unknown, self.down, self.up, monsters, self.gold, self.boulders, self.walls) = (
            found
        )
        self.monsters = monsters & ~hero
        self.walkable = (walkable | hero) & ~self.monsters


@dataclass
class LevelMemory:
    """What the hero did on a level. Stairs under the hero or an item are remembered."""

    visited: int = 0
    down: int = 0
    up: int = 0
    locked: int = 0
    blocked: int = 0
    searched: Counter[int] = field(default_factory=Counter)
    """Turns of search by square."""
    failures: Counter[int] = field(default_factory=Counter)

    def update(self, seen: LevelMap, hero: int) -> None:
        self.visited |= hero
        self.down |= seen.down
        self.up |= seen.up
        self.locked &= seen.closed

    def count_failure(self, target: int) -> None:
        self.failures[target] += 1
        if self.failures[target] >= _MAX_FAILURES:
            self.blocked |= target


@cache
def _kinds_of_glyphs() -> npt.NDArray[np.uint16]:
    """Kinds of square by glyph."""
    from nle import nethack

    kinds = np.zeros(nethack.MAX_GLYPH + 1, np.uint16)

    def mark(symbols: tuple[int, ...] | range, kind: int) -> None:
        kinds[[nethack.GLYPH_CMAP_OFF + symbol for symbol in symbols]] |= kind

    mark((_STONE,), _UNKNOWN)
    mark(_WALLS, _WALL)
    mark((*_FLOORS, *_OPEN_DOORS, *_CLOSED_DOORS, *_HOLES), _WALKABLE)
    mark((*_OPEN_DOORS, *_CLOSED_DOORS), _DOOR)
    mark(_CLOSED_DOORS, _CLOSED)
    mark((*_DOWN_STAIRS, *_HOLES), _DOWN)
    mark(_UP_STAIRS, _UP)
    kinds[: nethack.GLYPH_PET_OFF] |= _MONSTER
    kinds[nethack.GLYPH_PET_OFF : nethack.GLYPH_INVIS_OFF] |= _WALKABLE
    kinds[nethack.GLYPH_INVIS_OFF] |= _MONSTER
    kinds[nethack.GLYPH_BODY_OFF : nethack.GLYPH_RIDDEN_OFF] |= _WALKABLE
    kinds[nethack.GLYPH_OBJ_OFF : nethack.GLYPH_CMAP_OFF] |= _WALKABLE
    kinds[nethack.GLYPH_WARNING_OFF : nethack.GLYPH_STATUE_OFF] |= _MONSTER
    names = [nethack.objdescr.from_idx(number).oc_name for number in range(nethack.NUM_OBJECTS)]
    boulder = nethack.GLYPH_OBJ_OFF + names.index("boulder")
    kinds[boulder] = _BOULDER
    kinds[nethack.GLYPH_OBJ_OFF + names.index("gold piece")] |= _GOLD
    return kinds
