"""Sets of squares of a dungeon level as integers, one bit per square, and shortest paths on them.

A wave of a path search is a few shifts of one integer, some microseconds for the whole level.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ludus.core.types import Bools

ROWS: Final = 21
COLUMNS: Final = 79
_WIDTH: Final = COLUMNS + 1
"""One empty column keeps the edges of a row apart."""
_ALL: Final = sum(((1 << COLUMNS) - 1) << (_WIDTH * row) for row in range(ROWS))

DIRECTIONS: Final = ((0, -1), (1, 0), (0, 1), (-1, 0), (1, -1), (1, 1), (-1, 1), (-1, -1))
"""(dx, dy) of north, east, south, west, north-east, south-east, south-west and north-west."""
STRAIGHT: Final = 4
"""The first directions are the straight ones."""


class PathStep(NamedTuple):
    direction: int
    distance: int


def square(x: int, y: int) -> int:
    return 1 << (y * _WIDTH + x)


def squares_where(marked: Bools) -> list[int]:
    """The sets of marked squares, from [sets, ROWS, COLUMNS]."""
    padded = np.zeros((len(marked), ROWS, _WIDTH), np.bool_)
    padded[..., :COLUMNS] = marked
    packed = np.packbits(padded, axis=-1, bitorder="little").tobytes()
    size = len(packed) // len(marked)
    return [int.from_bytes(packed[start : start + size], "little") for start in range(0, len(packed), size)]


def count(squares: int) -> int:
    return squares.bit_count()


def neighbour(squares: int, direction: int) -> int:
    """The squares moved by one in a direction; those that leave the level are dropped."""
    dx, dy = DIRECTIONS[direction]
    offset = dy * _WIDTH + dx
    return (squares << offset if offset >= 0 else squares >> -offset) & _ALL


def around(squares: int) -> int:
    """The squares and their eight neighbours."""
    rows = squares | squares << 1 | squares >> 1
    return (rows | rows << _WIDTH | rows >> _WIDTH) & _ALL


def reachable_from(squares: int, doors: int) -> int:
    """Squares one step away. Doors cannot be passed diagonally."""
    straight = squares << 1 | squares >> 1 | squares << _WIDTH | squares >> _WIDTH
    free = squares & ~doors
    rows = free << 1 | free >> 1
    return (straight | (rows << _WIDTH | rows >> _WIDTH) & ~doors) & _ALL


def first_step(start: int, targets: int, walkable: int, doors: int) -> PathStep | None:
    """First step of a shortest path from `start` to the nearest target; None if there is no path. Targets need not be walkable."""
    front, reached = targets & ~start, targets
    distance = 1
    while front:
        wave = reachable_from(front, doors)
        if wave & start:
            return PathStep(_direction_to(start, front, doors), distance)
        front = wave & walkable & ~reached
        reached |= front
        distance += 1
    return None


def distances(start: int, groups: tuple[int, ...], walkable: int, doors: int) -> list[int | None]:
    """Number of steps from `start` to the nearest square of each group, 0 if it stands on one."""
    found: list[int | None] = [0 if group & start else None for group in groups]
    front, reached, distance = start, start, 0
    targets = 0
    for group in groups:
        targets |= group
    while front and None in found:
        distance += 1
        wave = reachable_from(front, doors) & ~reached
        touched = wave & targets
        if touched:
            found = [
                distance if before is None and group & touched else before for before, group in zip(found, groups, strict=True)
            ]
        front = wave & walkable
        reached |= wave
    return found


def _direction_to(start: int, squares: int, doors: int) -> int:
    """A direction in which `start` has one of these neighbours, straight ones first."""
    for direction in range(len(DIRECTIONS)):
        if direction >= STRAIGHT and start & doors:
            break
        found = neighbour(start, direction) & squares
        if found and not (direction >= STRAIGHT and found & doors):
            return direction
    raise AssertionError("no neighbour")
