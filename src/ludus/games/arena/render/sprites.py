"""Sprites of units: heroes are coins with the glyph of their archetype, towers and bases have a crystal.

The camps differ in colour (blue and red) and in shape (round and angular).
"""

from __future__ import annotations

import math
from typing import Final

from ludus.games.arena.engine import layout
from ludus.games.arena.engine.heroes import ARCHETYPES
from ludus.games.arena.render.canvas import Canvas, Colour, Point, SpriteCanvas, mix, with_opacity

CAMPS: Final[tuple[Colour, Colour]] = ((77, 163, 255), (255, 98, 72))
PALE: Final[tuple[Colour, Colour]] = ((186, 220, 255), (255, 206, 190))
DARK: Final[tuple[Colour, Colour]] = ((22, 58, 104), (110, 34, 18))
INK: Final = (12, 17, 22)
BRIGHT: Final = (244, 247, 250)

_COINS: Final[dict[str, Colour]] = {
    "fighter": (128, 58, 52),
    "tank": (84, 97, 110),
    "mage": (98, 66, 150),
    "marksman": (58, 112, 74),
    "assassin": (48, 46, 66),
    "support": (146, 122, 52),
}


# -- shapes -----------------------------------------------------------------------------------------------------------


def outline(camp: int, radius: float) -> list[Point]:
    """Return the outline of a coin: a circle for camp 0, a hexagon for camp 1."""
    corners, turn, size = (48, 0.0, radius) if camp == 0 else (6, math.pi / 6, radius * 1.1)
    return [
        (size * math.cos(turn + i * 2 * math.pi / corners), size * math.sin(turn + i * 2 * math.pi / corners))
        for i in range(corners)
    ]


def _rotate(points: list[Point], degrees: float) -> list[Point]:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [(x * c - y * s, x * s + y * c) for x, y in points]


def _transform(points: list[Point], size: float, dx: float = 0.0, dy: float = 0.0) -> list[Point]:
    return [(x * size + dx, y * size + dy) for x, y in points]


def star(points: int, outer: float, inner: float, turn: float = -90.0) -> list[Point]:
    angles = [math.radians(turn + i * 180 / points) for i in range(2 * points)]
    return [((inner if i % 2 else outer) * math.cos(a), (inner if i % 2 else outer) * math.sin(a)) for i, a in enumerate(angles)]


# -- glyphs: drawn in a circle of radius 1 ------------------------------------------------------------------------------

_BLADE: list[Point] = [(0, -1.0), (0.13, -0.78), (0.13, 0.3), (-0.13, 0.3), (-0.13, -0.78)]
_GUARD: list[Point] = [(-0.36, 0.3), (0.36, 0.3), (0.36, 0.45), (-0.36, 0.45)]
_GRIP: list[Point] = [(-0.09, 0.45), (0.09, 0.45), (0.09, 0.85), (-0.09, 0.85)]


def _fighter(canvas: Canvas, size: float, colour: Colour) -> None:
    for degrees in (-42, 42):
        for part in (_BLADE, _GUARD, _GRIP):
            canvas.polygon(_transform(_rotate(part, degrees), size), colour)


def _tank(canvas: Canvas, size: float, colour: Colour) -> None:
    shield = [(-0.75, -0.72), (0.0, -0.92), (0.75, -0.72), (0.72, 0.08), (0.46, 0.58), (0.0, 0.95), (-0.46, 0.58), (-0.72, 0.08)]
    canvas.polygon(_transform(shield, size), colour)
    canvas.polygon(
        _transform([(0, -0.66), (0.5, -0.52), (0.48, 0.05), (0.3, 0.42), (0, 0.66)], size), mix(colour, _COINS["tank"], 0.55)
    )


def _mage(canvas: Canvas, size: float, colour: Colour) -> None:
    flame = [(0.05, -1.0), (0.28, -0.55), (0.62, -0.2), (0.7, 0.3), (0.48, 0.72), (0.0, 0.92), (-0.48, 0.72), (-0.7, 0.3), (-0.58, -0.12),
             (-0.36, 0.08), (-0.3, -0.42)]  # fmt: skip
    canvas.polygon(_transform(flame, size), colour)
    heart = [(0.02, -0.12), (0.3, 0.22), (0.26, 0.55), (0.0, 0.74), (-0.26, 0.55), (-0.3, 0.25), (-0.12, 0.2)]
    canvas.polygon(_transform(heart, size), _COINS["mage"])


def _marksman(canvas: Canvas, size: float, colour: Colour) -> None:
    canvas.arc((-0.42 * size, 0), 0.92 * size, -62, 62, colour, 0.17 * size)
    ends = [(-0.42 * size + 0.86 * size * math.cos(math.radians(a)), 0.86 * size * math.sin(math.radians(a))) for a in (-62, 62)]
    canvas.line(ends[0], ends[1], colour, 0.07 * size)
    canvas.line((-0.92 * size, 0), (0.7 * size, 0), colour, 0.13 * size)
    canvas.polygon(_transform([(1.0, 0), (0.55, -0.24), (0.55, 0.24)], size), colour)


def _assassin(canvas: Canvas, size: float, colour: Colour) -> None:
    blade: list[Point] = [(0, -1.0), (0.24, -0.2), (0.2, 0.22), (-0.2, 0.22), (-0.24, -0.2)]
    for part in (blade, _GUARD, _GRIP):
        canvas.polygon(_transform(_rotate(part, 32), size * 1.05), colour)
    top, bottom = _transform(_rotate([(0, -0.8), (0, 0.2)], 32), size * 1.05)
    canvas.line(top, bottom, _COINS["assassin"], 0.08 * size)


def _support(canvas: Canvas, size: float, colour: Colour) -> None:
    a, b = 0.26, 0.82
    cross = [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]
    canvas.polygon(_transform(cross, size), colour)


GLYPHS: Final = dict(zip(ARCHETYPES, (_fighter, _tank, _mage, _marksman, _assassin, _support), strict=True))


# -- units ------------------------------------------------------------------------------------------------------------


def coin(canvas: SpriteCanvas, archetype: str, camp: int, radius: float, dim: bool = False) -> None:
    """Sprite of a hero; `dim`: of a dead one."""

    face, rim, ink = _COINS[archetype], CAMPS[camp], BRIGHT
    if dim:
        face, rim, ink = mix(face, (60, 60, 62), 0.8), mix(rim, (90, 90, 92), 0.6), (150, 152, 156)
    else:
        canvas.shade((0.0, radius * 0.22), radius * 1.3, 0.55)
    canvas.polygon(outline(camp, radius * 1.06), INK)
    canvas.polygon(outline(camp, radius), rim)
    canvas.polygon(outline(camp, radius * 0.8), INK)
    canvas.polygon(outline(camp, radius * 0.74), face)
    canvas.polygon([(x, min(y, -radius * 0.05)) for x, y in outline(camp, radius * 0.74)], with_opacity((255, 255, 255), 0.09))
    GLYPHS[archetype](canvas, radius * 0.58, ink)


def creep(canvas: SpriteCanvas, kind: int, camp: int, radius: float) -> None:
    body, light, dark = CAMPS[camp], PALE[camp], DARK[camp]
    ahead = 1 if camp == 0 else -1
    canvas.shade((0.0, radius * 0.25), radius * 1.35, 0.5)
    if kind == layout.MELEE:  # an arrow
        shape: list[Point] = [(1.1, 0), (0.2, 0.95), (-0.85, 0.7), (-0.85, -0.7), (0.2, -0.95)]
        canvas.polygon(_transform([(x * ahead, y) for x, y in shape], radius * 1.1), INK)
        canvas.polygon(_transform([(x * ahead, y) for x, y in shape], radius * 0.9), body)
        canvas.polygon(_transform([(x * ahead, y) for x, y in shape], radius * 0.42), dark)
    elif kind == layout.RANGED:  # an eye
        canvas.circle((0, 0), radius * 1.04, INK)
        canvas.circle((0, 0), radius * 0.84, dark)
        canvas.circle((0, 0), radius * 0.84, None, body, radius * 0.26)
        canvas.circle((0, 0), radius * 0.34, light)
    else:  # a cart with a barrel
        side = radius * 0.95
        square: list[Point] = [(-side, -side), (side, -side), (side, side), (-side, side)]
        canvas.polygon(_transform(square, 1.1), INK)
        canvas.polygon(_transform(square, 0.95), body)
        canvas.polygon(_transform(square, 0.62), dark)
        canvas.line((0, 0), (ahead * radius * 1.45, 0), INK, radius * 0.66)
        canvas.line((0, 0), (ahead * radius * 1.4, 0), light, radius * 0.38)
        canvas.circle((0, 0), radius * 0.42, light, INK, radius * 0.12)


def tower(canvas: SpriteCanvas, camp: int, radius: float) -> None:
    canvas.shade((0.0, radius * 0.2), radius * 1.6, 0.6)
    canvas.polygon(star(8, radius * 1.14, radius * 1.0, -67.5), INK)
    canvas.polygon(star(8, radius * 1.06, radius * 0.93, -67.5), (122, 128, 134))
    canvas.circle((0, 0), radius * 0.76, (86, 92, 99), INK, radius * 0.06)
    for i in range(4):
        dx, dy = math.cos(i * math.pi / 2 + math.pi / 4), math.sin(i * math.pi / 2 + math.pi / 4)
        canvas.circle((dx * radius * 0.86, dy * radius * 0.86), radius * 0.17, (160, 166, 172), INK, radius * 0.05)
    canvas.glow(radius * 0.95, CAMPS[camp], 0.75, 1.4)
    _crystal(canvas, camp, radius * 0.62)


def base(canvas: SpriteCanvas, camp: int, radius: float) -> None:
    canvas.shade((0.0, radius * 0.15), radius * 1.45, 0.6)
    canvas.polygon(star(6, radius * 1.16, radius * 1.0), INK)
    canvas.polygon(star(6, radius * 1.09, radius * 0.94), (116, 122, 129))
    canvas.circle((0, 0), radius * 0.8, (58, 64, 71), INK, radius * 0.05)
    canvas.circle((0, 0), radius * 0.74, None, CAMPS[camp], radius * 0.06)
    canvas.glow(radius * 0.95, CAMPS[camp], 0.9, 1.3)
    _crystal(canvas, camp, radius * 0.66)


def ruin(canvas: SpriteCanvas, radius: float) -> None:
    canvas.shade((0.0, 0.0), radius * 1.4, 0.55)
    for i, (x, y, size) in enumerate(
        (
            (0.0, 0.1, 0.5),
            (0.55, -0.3, 0.34),
            (-0.5, -0.32, 0.38),
            (-0.45, 0.52, 0.32),
            (0.48, 0.5, 0.36),
            (0.05, -0.66, 0.28),
        )
    ):
        stone = star(3, size * radius, size * radius * 0.8, 20.0 + 41 * i)
        canvas.polygon(_transform(stone, 1.15, x * radius, y * radius), INK)
        canvas.polygon(_transform(stone, 0.95, x * radius, y * radius), (92 - 7 * (i % 3), 95 - 7 * (i % 3), 98 - 7 * (i % 3)))


def _crystal(canvas: Canvas, camp: int, size: float) -> None:
    """Paint a gem lit from the upper left: long for camp 0, square for camp 1."""
    wide, high = (0.66, 1.0) if camp == 0 else (0.86, 0.86)
    top, right, bottom, left = (0.0, -high), (wide, 0.0), (0.0, high), (-wide, 0.0)
    canvas.polygon(_transform([top, right, bottom, left], size * 1.16), INK)
    for corners, colour in (
        ([top, (0.0, 0.0), left], mix(CAMPS[camp], (255, 255, 255), 0.6)),
        ([top, right, (0.0, 0.0)], mix(CAMPS[camp], (255, 255, 255), 0.25)),
        ([left, (0.0, 0.0), bottom], CAMPS[camp]),
        ([right, bottom, (0.0, 0.0)], mix(CAMPS[camp], DARK[camp], 0.45)),
    ):
        canvas.polygon(_transform(corners, size), colour)
