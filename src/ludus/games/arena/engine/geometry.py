"""Integer geometry and pseudo-random noise for kernels; exact, so results are the same on every machine."""

from __future__ import annotations

import math

import numpy as np

from ludus.core.types import Ints32
from ludus.games.arena.engine.jit import inner
from ludus.games.arena.engine.layout import BUSH_RADIUS, BUSHES, DIRECTIONS, LENGTH, RADIUS, WIDTH, X, Y

ONE = 1024
"""Length of a direction vector."""
_TURN = [2 * math.pi * d / DIRECTIONS for d in range(DIRECTIONS)]
DX = np.array([round(ONE * math.cos(turn)) for turn in _TURN], np.int32)
DY = np.array([round(ONE * math.sin(turn)) for turn in _TURN], np.int32)
_BUSHES = np.array(BUSHES, np.int32)


@inner
def integer_root(square: int) -> int:
    """Integer square root, rounded down; corrects the floating-point estimate."""
    found = int(math.sqrt(square))
    while found * found > square:
        found -= 1
    while (found + 1) * (found + 1) <= square:
        found += 1
    return found


@inner
def divide_towards_zero(numerator: int, denominator: int) -> int:
    """Divide and round towards zero: the camps see lengths with opposite signs and must get the same result."""
    return numerator // denominator if numerator >= 0 else -(-numerator // denominator)


@inner
def distance(units: Ints32, i: int, j: int) -> int:
    """Distance between the centres of two units."""
    dx, dy = int(units[X, i]) - int(units[X, j]), int(units[Y, i]) - int(units[Y, j])
    return integer_root(dx * dx + dy * dy)


@inner
def edge_distance(units: Ints32, i: int, j: int) -> int:
    """Distance between the edges of two units; 0 if they touch."""
    return max(0, distance(units, i, j) - int(units[RADIUS, i]) - int(units[RADIUS, j]))


@inner
def within(units: Ints32, i: int, j: int, reach: int) -> bool:
    """Whether `edge_distance` is at most `reach`, without a square root."""
    dx, dy = int(units[X, i]) - int(units[X, j]), int(units[Y, i]) - int(units[Y, j])
    most = reach + int(units[RADIUS, i]) + int(units[RADIUS, j])
    return dx * dx + dy * dy <= most * most


@inner
def clamp(value: int, low: int, high: int) -> int:
    return low if value < low else high if value > high else value


@inner
def clamp_x(x: int) -> int:
    return clamp(x, 500, LENGTH - 500)


@inner
def clamp_y(y: int) -> int:
    return clamp(y, 500, WIDTH - 500)


@inner
def bush_at(x: int, y: int) -> int:
    """Index of the bush that contains a point, or -1."""
    for b in range(_BUSHES.shape[0]):
        dx, dy = x - int(_BUSHES[b, 0]), y - int(_BUSHES[b, 1])
        if dx * dx + dy * dy <= BUSH_RADIUS * BUSH_RADIUS:
            return b
    return -1


@inner
def noise(seed: int, tick: int, salt: int) -> int:
    """32 pseudo-random bits that depend only on the arguments (finaliser of MurmurHash3)."""
    h = (seed * 0x9E3779B1 + tick * 0x85EBCA6B + salt * 0xC2B2AE35) & 0xFFFFFFFF
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & 0xFFFFFFFF
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)
