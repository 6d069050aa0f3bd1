"""Integer geometry and noise: exact, and therefore the same everywhere."""

from __future__ import annotations

import math

import numpy as np

from ludus.core.types import Ints32
from ludus.games.arena.engine.jit import inner
from ludus.games.arena.engine.layout import ALIVE, BUSH_RADIUS, BUSHES, DIRECTIONS, LENGTH, RADIUS, WIDTH, X, Y

ONE = 1024
"""The length of a direction."""
_TURN = [2 * math.pi * d / DIRECTIONS for d in range(DIRECTIONS)]
DX = np.array([round(ONE * math.cos(turn)) for turn in _TURN], np.int32)
DY = np.array([round(ONE * math.sin(turn)) for turn in _TURN], np.int32)
_BUSHES = np.array(BUSHES, np.int32)


@inner
def root(square: int) -> int:
    """Of a whole number, rounded down; the estimate of the floating-point unit is made exact."""
    found = int(math.sqrt(square))
    while found * found > square:
        found -= 1
    while (found + 1) * (found + 1) <= square:
        found += 1
    return found


@inner
def towards_zero(numerator: int, denominator: int) -> int:
    """Division that is the same for both camps: one of them sees all lengths with the other sign."""
    return numerator // denominator if numerator >= 0 else -(-numerator // denominator)


@inner
def distance(units: Ints32, i: int, j: int) -> int:
    """Between the centres of two units."""
    dx, dy = int(units[X, i]) - int(units[X, j]), int(units[Y, i]) - int(units[Y, j])
    return root(dx * dx + dy * dy)


@inner
def gap(units: Ints32, i: int, j: int) -> int:
    """Between the edges of two units; 0 where they touch."""
    return max(0, distance(units, i, j) - int(units[RADIUS, i]) - int(units[RADIUS, j]))


@inner
def within(units: Ints32, i: int, j: int, reach: int) -> bool:
    """`gap` at most `reach`, without a root."""
    dx, dy = int(units[X, i]) - int(units[X, j]), int(units[Y, i]) - int(units[Y, j])
    most = reach + int(units[RADIUS, i]) + int(units[RADIUS, j])
    return dx * dx + dy * dy <= most * most


@inner
def inside(value: int, low: int, high: int) -> int:
    return low if value < low else high if value > high else value


@inner
def in_field_x(x: int) -> int:
    return inside(x, 500, LENGTH - 500)


@inner
def in_field_y(y: int) -> int:
    return inside(y, 500, WIDTH - 500)


@inner
def bush_at(x: int, y: int) -> int:
    """The bush in which a point lies, or -1."""
    for b in range(_BUSHES.shape[0]):
        dx, dy = x - int(_BUSHES[b, 0]), y - int(_BUSHES[b, 1])
        if dx * dx + dy * dy <= BUSH_RADIUS * BUSH_RADIUS:
            return b
    return -1


@inner
def noise(seed: int, tick: int, salt: int) -> int:
    """32 bits that look random: a function of its arguments and nothing else. (The finaliser of MurmurHash3.)"""
    h = (seed * 0x9E3779B1 + tick * 0x85EBCA6B + salt * 0xC2B2AE35) & 0xFFFFFFFF
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & 0xFFFFFFFF
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


@inner
def is_alive(units: Ints32, i: int) -> bool:
    return bool(units[ALIVE, i] == 1)
