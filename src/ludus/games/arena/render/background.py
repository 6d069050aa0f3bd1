"""Background of the field: grass, lane, river, bushes and the platforms of the bases, painted once per frame size.

Edges are antialiased from distances. The field is symmetric under a rotation by 180 degrees, like the rules.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ludus.core.tree import Array
from ludus.games.arena.engine import layout

MARGIN: Final = 1_600  # visible margin around the field in millimetres

GRASS: Final = (50, 74, 56)
GRASS_LIGHT: Final = (72, 98, 68)
OUTSIDE: Final = (17, 24, 27)
LANE: Final = (146, 130, 102)
LANE_EDGE: Final = (82, 78, 62)
WATER: Final = (44, 92, 104)
WATER_LIGHT: Final = (88, 146, 152)
SHORE: Final = (112, 112, 88)
LEAF: Final = (36, 92, 56)
LEAF_LIGHT: Final = (82, 146, 84)
STONE: Final = (98, 103, 108)
STONE_DARK: Final = (62, 67, 73)

_LANE_HALF = 3_400
_RIVER_HALF = 3_000
_PLATFORM = 5_600


def paint_background(width: int, height: int, camps: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    """Return uint8 [height, width, 3] of the field and its margin."""
    across = layout.LENGTH + 2 * MARGIN
    columns = (np.arange(width, dtype=np.float32) + np.float32(0.5)) / width * across - MARGIN
    rows = (np.arange(height, dtype=np.float32) + np.float32(0.5)) / height * (layout.WIDTH + 2 * MARGIN) - MARGIN
    x, y = columns[None, :], rows[:, None]
    pixel = across / width
    layers = _Layers(np.zeros((3, height, width), np.float32))

    clouds = _noise(height, width, 5_000 / pixel) * 0.6 + _noise(height, width, 1_500 / pixel) * 0.4
    grain = _noise(height, width, 350 / pixel)
    layers.lay(GRASS, np.ones((1, 1), np.float32))
    layers.lay(GRASS_LIGHT, np.clip(clouds * 0.9 + (grain - 0.5) * 0.45, 0, 1) * 0.8)

    c = _near(columns, layout.LENGTH / 2, 3 * _RIVER_HALF)
    _river(layers.part(slice(None), c), x[:, c], y, clouds[:, c])
    r = _near(rows, layout.LANE_Y, 1.5 * _LANE_HALF)
    pebbles = _noise(height, width, 700 / pixel)
    _lane(layers.part(r, slice(None)), x, y[r], clouds[r], grain[r], pebbles[r])
    for bush_x, bush_y in layout.BUSHES:
        r, c = _near(rows, bush_y, 1.4 * layout.BUSH_RADIUS), _near(columns, bush_x, 1.4 * layout.BUSH_RADIUS)
        _bush(layers.part(r, c), x[:, c] - bush_x, y[r] - bush_y, grain[r, c], pixel)
    for camp, colour in enumerate(camps):
        at = layout.BASE_X if camp == 0 else layout.LENGTH - layout.BASE_X
        r, c = _near(rows, layout.LANE_Y, 1.3 * _PLATFORM), _near(columns, at, 1.3 * _PLATFORM)
        _platform(layers.part(r, c), x[:, c] - at, y[r] - layout.LANE_Y, colour, pixel)

    edge = np.maximum(np.maximum(-x, x - layout.LENGTH), np.maximum(-y, y - layout.WIDTH))
    half = np.maximum(np.abs(x / layout.LENGTH - 0.5), np.abs(y / layout.WIDTH - 0.5) * 0.9)
    layers.lay((8, 14, 16), np.clip(half - 0.3, 0, 1) * 0.75)
    layers.lay(OUTSIDE, 1 - _inside(edge, pixel))
    layers.lay((120, 132, 128), _band(edge, 0, 1.1 * pixel, pixel) * 0.55)
    return layers.pixels()


class _Layers:
    """RGB planes that colours are blended into; `part` is a view of a rectangle."""

    def __init__(self, planes: Array) -> None:
        self._planes = planes

    def part(self, rows: slice, columns: slice) -> _Layers:
        return _Layers(self._planes[:, rows, columns])

    def lay(self, colour: tuple[int, ...], opacity: Array) -> None:
        for plane, value in zip(self._planes, colour[:3], strict=True):
            plane += (np.float32(value) - plane) * opacity

    def pixels(self) -> Array:
        return np.ascontiguousarray(np.clip(np.rint(self._planes), 0, 255).astype(np.uint8).transpose(1, 2, 0))


def _near(axis: Array, at: float, reach: float) -> slice:
    """Slice of an axis within `reach` of a position."""
    low, high = np.searchsorted(axis, [at - reach, at + reach])
    return slice(int(low), int(high))


def _inside(distance: Array, soft: float) -> Array:
    """1 where the distance is negative, 0 where it is positive, smooth within `soft`."""
    share = np.clip(0.5 - distance / max(soft, 1.0), 0.0, 1.0)
    return share * share * (3 - 2 * share)


def _band(distance: Array, at: float, half: float, soft: float) -> Array:
    return _inside(np.abs(distance - at) - half, soft)


def _bend(y: Array) -> Array:
    """Course of the river; odd around the centre, so that it is the same for both camps."""
    t = (y - layout.WIDTH / 2) / layout.WIDTH
    bent: Array = np.sin(t * 2 * np.pi) * 1_700 + t * 5_000
    return bent


def _noise(height: int, width: int, size: float) -> Array:
    """Smooth noise from 0 to 1, symmetric under rotation by 180 degrees; `size` of its features in pixels."""
    rows, columns = max(2, round(height / max(size, 1.0)) + 1), max(2, round(width / max(size, 1.0)) + 1)
    grid: Array = np.random.default_rng(rows * 7_919 + columns).random((rows, columns)).astype(np.float32)
    grid = (grid + grid[::-1, ::-1]) / 2
    grid = np.clip((grid - 0.5) * 1.4 + 0.5, 0.0, 1.0)
    down, across = _weights(height, rows), _weights(width, columns)
    turned: Array = _along(_along(grid, down).T, across).T
    return turned


def _weights(pixels: int, cells: int) -> tuple[Array, Array]:
    at = (np.arange(pixels, dtype=np.float32) + 0.5) / pixels * (cells - 1)
    low = np.minimum(at.astype(np.int32), cells - 2)
    share = at - low
    return low, (share * share * (3 - 2 * share)).astype(np.float32)


def _along(grid: Array, weights: tuple[Array, Array]) -> Array:
    low, share = weights
    blended: Array = grid[low] + (grid[low + 1] - grid[low]) * share[:, None]
    return blended


def _river(layers: _Layers, x: Array, y: Array, clouds: Array) -> None:
    river = _from_river(x, y, clouds)
    layers.lay(SHORE, _inside(river - _RIVER_HALF - 650, 500) * 0.6)
    layers.lay(WATER, _inside(river - _RIVER_HALF, 350))
    ripples = np.sin((x - _bend(y)) / 430 + np.sin(y / 1_900) * 1.7 + clouds * 5)
    layers.lay(WATER_LIGHT, _inside(river - _RIVER_HALF + 350, 700) * np.clip(ripples - 0.35, 0, 1) * 0.42)


def _from_river(x: Array, y: Array, clouds: Array) -> Array:
    away: Array = np.abs(x - layout.LENGTH / 2 - _bend(y)) + (clouds - 0.5) * 900
    return away


def _lane(layers: _Layers, x: Array, y: Array, clouds: Array, grain: Array, pebbles: Array) -> None:
    from_ends = np.maximum(layout.BASE_X - x, x - (layout.LENGTH - layout.BASE_X))
    lane = np.maximum(np.abs(y - layout.LANE_Y) + (clouds - 0.5) * 900, from_ends + _LANE_HALF)
    ford = 1 - 0.42 * _inside(_from_river(x, y, clouds) - _RIVER_HALF, 600)  # the river is visible where it crosses the lane
    layers.lay(LANE_EDGE, _inside(lane - _LANE_HALF - 380, 420) * 0.75 * ford)
    layers.lay(LANE, _inside(lane - _LANE_HALF, 420) * (0.78 + 0.22 * grain) * ford)
    stones = _inside(lane - _LANE_HALF + 200, 300) * np.clip(pebbles - 0.66, 0, 1) * 2.2
    layers.lay((172, 158, 128), np.clip(stones, 0, 1) * 0.55)


def _bush(layers: _Layers, x: Array, y: Array, grain: Array, pixel: float) -> None:
    """Paint tufts: a shadow, then leaves, then a highlight on each."""
    radius = layout.BUSH_RADIUS
    layers.lay((14, 26, 18), _inside(np.hypot(x - 150, y - 350) - radius * 1.02, radius * 0.3) * 0.55)
    tufts = [(0.0, 0.0, 0.62)]
    tufts += [(np.cos(a) * 0.66, np.sin(a) * 0.66, 0.4) for a in np.arange(9) * 2 * np.pi / 9 + 0.3]
    tufts += [(np.cos(a) * 0.34, np.sin(a) * 0.34, 0.34) for a in np.arange(5) * 2 * np.pi / 5]
    soft = max(pixel * 1.5, 160)
    for tuft_x, tuft_y, size in tufts:
        distance = np.hypot(x - tuft_x * radius, y - tuft_y * radius) + (grain - 0.5) * 420
        layers.lay((24, 62, 40), _inside(distance - size * radius, soft))
        layers.lay(LEAF, _inside(distance - size * radius + 170, soft * 1.5))
        light = np.hypot(x - (tuft_x - 0.1) * radius, y - (tuft_y - 0.12) * radius)
        layers.lay(LEAF_LIGHT, _inside(light - size * radius * 0.45, size * radius * 0.9) * (0.25 + 0.4 * grain))


def _platform(layers: _Layers, x: Array, y: Array, colour: tuple[int, ...], pixel: float) -> None:
    distance, angle = np.hypot(x, y), np.arctan2(y, x)
    soft = max(pixel * 1.3, 60)
    layers.lay((10, 14, 16), _inside(distance - _PLATFORM - 250, 900) * 0.5)
    layers.lay(STONE_DARK, _inside(distance - _PLATFORM, soft))
    layers.lay(STONE, _inside(distance - _PLATFORM + 320, soft))
    joints = np.minimum(np.abs(((angle / (2 * np.pi) * 16) % 1) - 0.5), 0.5) * 2 * np.pi / 16 * distance
    ring = _inside(distance - _PLATFORM + 320, soft) * (1 - _inside(distance - 3_300, soft))
    layers.lay(STONE_DARK, _inside(joints - 60, soft) * ring * 0.7)
    layers.lay(STONE_DARK, _band(distance, 3_300, 90, soft))
    layers.lay(colour, _band(distance, 4_900, 130, soft) * 0.85)
    layers.lay(colour, _inside(distance - 3_200, 3_000) * 0.28)
