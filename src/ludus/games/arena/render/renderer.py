"""Render a match from above: the field, units, effects, score and panels.

The same state gives the same frame, bit for bit. With `camp` the frame shows only what that camp sees.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from ludus.core.tree import Array
from ludus.core.types import Ints32
from ludus.errors import UsageError
from ludus.games.arena.engine import layout
from ludus.games.arena.engine.checksummed_file import write_file
from ludus.games.arena.engine.heroes import (
    DASHES,
    HEROES,
    S_COOLDOWN,
    S_EFFECT,
    S_RANGE,
    S_SIZE,
    S_WINDUP,
    SKILL_COLUMNS,
    SKILLS_AT,
    TABLE,
)
from ludus.games.arena.engine.layout import ALIVE, CAMP, KIND, RADIUS, X, Y
from ludus.games.arena.engine.rules import CREEP_SIGHT, MEND_COOLDOWN, RECALL_TICKS, SIGHT, TOWER_SIGHT
from ludus.games.arena.render import hud, sprites
from ludus.games.arena.render.background import MARGIN, paint_background
from ludus.games.arena.render.bands import Band, PixelBox
from ludus.games.arena.render.canvas import OVERSAMPLING, Canvas, Colour, ImageCache, Point, SpriteCanvas, mix, with_opacity
from ludus.games.arena.render.hud import Box, Label, paint_bar, paint_label, share_px
from ludus.games.arena.render.sprites import CAMPS, INK, PALE

WIDTH: Final = 1280
SMALL: Final = 640
NAMES: Final = ("Blue", "Red")
MIN_WIDTH, MAX_WIDTH = 160, 7_680

_LABEL = 21.0
_LABEL_MARGIN = 14.0  # long names and the badge extend beyond a label's box
_PUSHES, _FARTHEST = 12, 16.0  # iterations that separate overlapping tokens, and maximum displacement
_BLOW, _FLASH = 4, 6  # visible ticks of an attack and of a skill
_WHITE = (255, 255, 255)
_MENDED = (140, 240, 170)
_SLOWED = (150, 200, 255)


@dataclass(frozen=True)
class FrameLayout:
    """Layout of a frame in resolution-independent units. A small frame has no panels and larger coins."""

    width: float
    score: float
    panels: float

    @property
    def per_mm(self) -> float:
        return self.width / (layout.LENGTH + 2 * MARGIN)

    @property
    def field(self) -> Box:
        return Box(0, self.score, self.width, (layout.WIDTH + 2 * MARGIN) * self.per_mm)

    @property
    def height(self) -> float:
        return self.score + self.field.height + self.panels


FULL: Final = FrameLayout(1280, 62, 172)
PLAIN: Final = FrameLayout(960, 44, 0)
_HERO, _CREEP, _SIEGE, _TOWER, _BASE = 15.0, 6.2, 8.2, 18.0, 28.0  # radii, larger than in the game for visibility


class Renderer:
    """Renders matches of `size` against `size` at one frame size; caches background and sprites."""

    def __init__(
        self,
        size: int,
        width: int = WIDTH,
        *,
        full: bool | None = None,
        camp: int | None = None,
        names: tuple[str, str] = NAMES,
    ) -> None:
        """`full`: with panels; default: from a width of 960 on."""
        if not MIN_WIDTH <= width <= MAX_WIDTH:
            raise UsageError(f"A frame cannot be {width} pixels wide.", f"Give {MIN_WIDTH} to {MAX_WIDTH}.")
        if camp not in (None, 0, 1):
            raise UsageError(f"There is no camp {camp!r}.", "Give 0 or 1, or none for a spectator's view.")
        self.size, self.camp, self.names = size, camp, names
        self.design = FULL if (width >= 960 if full is None else full) else PLAIN
        self.width = width // 2 * 2
        self._scale = self.width / self.design.width
        self.height = round(self.design.height * self._scale) // 2 * 2
        self._cache = ImageCache()
        self._make_bands()

    def paint(self, units: Ints32, match: Ints32) -> Image.Image:
        """Render one match: `units[FIELDS, U]` and `match[MATCH_FIELDS]`."""
        self.update(units, match)
        return Image.fromarray(self.frame)

    def rgb(self, units: Ints32, match: Ints32) -> Array:
        """Return uint8 [height, width, 3]."""
        self.update(units, match)
        return self.frame.copy()

    def update(self, units: Ints32, match: Ints32) -> list[PixelBox]:
        """Update `frame` to this state; return the repainted rectangles."""
        self._check(units, match)
        clipped = units.copy()  # a crafted state could require a sprite that exhausts the memory
        for field, (low, high) in _BOUNDS.items():
            np.clip(units[field], low, high, out=clipped[field])
        units, canvas = clipped, self._field.begin()
        scene = _Scene(canvas, self.design, units, match, self.camp)
        scene.paint()
        if match[layout.OVER]:
            hud.paint_banner(canvas, self.design.field, match, self.names)
        changed = self._field.end()
        summary = hud.summarise(units, match, self.camp)
        if not self._score.is_showing(summary):
            box = Box(0, 0, self.design.width, self.design.score)
            hud.paint_score(self._score.begin(), box, summary, self.names, small=not self.design.panels)
            changed += self._score.end()
        for slot, (band, place) in enumerate(zip(self._panels, self._places, strict=True)):
            known = scene.knowledge_of(slot)
            if not band.is_showing((known, *hud.panel_key(units[:, slot]))):
                hud.paint_panel(band.begin(), place, units[:, slot], known)
                changed += band.end()
        return changed

    def _check(self, units: Ints32, match: Ints32) -> None:
        expected = (layout.FIELDS, layout.units_of(self.size))
        if units.shape != expected or match.shape != (layout.MATCH_FIELDS,):
            raise UsageError(
                f"A state {list(units.shape)}, {list(match.shape)} is not one match of {self.size} against {self.size}.",
                f"Give units {list(expected)} and match [{layout.MATCH_FIELDS}] of one match, as arena.units[m], arena.match[m].",
            )

    def _make_bands(self) -> None:
        """Paint the background and divide the frame into bands that change independently."""
        field, scale = self.design.field, self._scale
        top, bottom = round(field.top * scale), round(field.bottom * scale)
        whole = Image.new("RGB", (self.width, self.height), hud.BACK)
        whole.paste(Image.fromarray(paint_background(self.width, bottom - top, CAMPS)), (0, top))
        background = whole.resize((self.width * OVERSAMPLING, self.height * OVERSAMPLING), Image.Resampling.NEAREST)
        below = Box(0, field.bottom, self.design.width, self.design.panels)
        self._places = hud.panel_boxes(below, self.size) if self.design.panels else []
        hud.paint_panel_frames(Canvas(background, scale), self._places)
        self.frame: Array = np.array(background.reduce(OVERSAMPLING))
        """The last frame, uint8 [height, width, 3]; belongs to the renderer."""

        def band(left: int, upper: int, right: int, lower: int, tiled: bool = False) -> Band:
            return Band(background, (left, upper, right, lower), self.frame, scale, self._cache, tiled=tiled)

        self._score = band(0, 0, self.width, top)
        self._field = band(0, top, self.width, bottom, tiled=True)
        gap = hud.GAP / 2
        sides = [(round((place.left - gap) * scale), round((place.right + gap) * scale)) for place in self._places]
        self._panels = [band(left, bottom, right, self.height) for left, right in sides]


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()


def save_png(image: Image.Image, path: Path) -> Path:
    """Write atomically. Raises StoreError."""
    return write_file(path, png(image))


_BOUNDS: Final = {
    RADIUS: (0, 5_000),
    layout.RANGE: (0, layout.WIDTH),
    layout.MAX_HP: (1, 20_000),
    layout.CAST_X: (-layout.LENGTH, 2 * layout.LENGTH),
    layout.CAST_Y: (-layout.LENGTH, 2 * layout.LENGTH),
    layout.HERO_ROW: (0, len(HEROES) - 1),
    layout.LEVEL: (0, 99),
    layout.CAST: (0, layout.RECALLING),
}
"""Limits of the values that a frame shows."""


# -- the field ----------------------------------------------------------------------------------------------------------


class _Scene:
    """Paints the field at one state. Each method paints one kind of object; their order is the z-order."""

    def __init__(self, canvas: Canvas, design: FrameLayout, units: Ints32, match: Ints32, camp: int | None) -> None:
        self.canvas, self.units, self.camp = canvas, units, camp
        self.size, self.tick = int(match[layout.SIZE]), int(match[layout.TICK])
        self.design, self.mm = design, design.per_mm
        self._places = self._token_positions()

    def paint(self) -> None:
        self._fog()
        self._ranges()
        self._wind_ups()
        self._ruins_and_dead()
        for slot in self._living(layout.TOWER, layout.BASE):
            self._building(slot)
        creeps = list(self._living(layout.MELEE, layout.RANGED, layout.SIEGE))
        for slot in creeps:
            self._creep(slot)
        for slot in creeps:
            if self.units[layout.HP, slot] < self.units[layout.MAX_HP, slot]:
                radius = _SIEGE if self.units[KIND, slot] == layout.SIEGE else _CREEP
                x, y = self._at(slot)
                self._health(slot, x, y - radius - 5.5, 17, 3)
        self._blows()
        self._flashes()
        heroes = sorted(self._living(layout.HERO), key=lambda slot: (int(self.units[Y, slot]), slot))
        for slot in heroes:
            self._hero(slot)
        self._leaves(heroes)
        self._labels(heroes)

    def shows(self, slot: int) -> bool:
        """Whether a unit is visible from the point of view."""
        return self.camp is None or int(self.units[CAMP, slot]) == self.camp or bool(self.units[layout.SEEN, slot])

    def knowledge_of(self, slot: int) -> int:
        """What the panel of a hero may show."""
        if self.camp is None or int(self.units[CAMP, slot]) == self.camp:
            return hud.ALL
        return hud.OUTSIDE if self.units[ALIVE, slot] and self.units[layout.SEEN, slot] else hud.NOTHING

    def _living(self, *kinds: int) -> Iterator[int]:
        for slot in range(self.units.shape[1]):
            if self.units[ALIVE, slot] and int(self.units[KIND, slot]) in kinds and self.shows(slot):
                yield slot

    def _at(self, slot: int) -> Point:
        x, y = self._places[slot]
        return float(x), float(y)

    def _token_positions(self) -> Array:
        """Return the drawing positions of all units; overlapping tokens are moved apart."""
        left, top = self._point(0, 0)
        places: Array = self.units[[X, Y]].T * self.mm + (left, top)
        kinds = self.units[KIND]
        moving = np.fromiter(self._living(layout.HERO, layout.MELEE, layout.RANGED, layout.SIEGE), np.int64)
        at = (
            places[moving] + np.stack([np.cos(moving * 2.4), np.sin(moving * 2.4)], -1) * 0.05
        )  # separates units at the same position
        radius = np.where(kinds[moving] == layout.HERO, _HERO, np.where(kinds[moving] == layout.SIEGE, _SIEGE, _CREEP))
        apart = (radius[:, None] + radius[None, :]) * 0.82
        yields = radius[None, :] ** 2 / (radius[:, None] ** 2 + radius[None, :] ** 2)  # the smaller token moves more
        for _ in range(_PUSHES):
            way = at[:, None] - at[None, :]
            far = np.sqrt((way**2).sum(-1))
            push = np.maximum(0.0, apart - far) * yields / np.maximum(far, 1e-3)
            at = at + (way * push[..., None]).sum(1) * 0.7
        off = at - places[moving]
        long = np.maximum(1e-9, np.sqrt((off**2).sum(-1, keepdims=True)))
        places[moving] += off * np.minimum(1.0, _FARTHEST / long)
        return places

    def _point(self, x: float, y: float) -> Point:
        field = self.design.field
        return field.left + (x + MARGIN) * self.mm, field.top + (y + MARGIN) * self.mm

    def _skill(self, slot: int, skill: int, column: int) -> int:
        return int(TABLE[int(self.units[layout.HERO_ROW, slot]), SKILLS_AT + (skill - 1) * SKILL_COLUMNS + column])

    # -- on the ground --------------------------------------------------------------------------------------------------

    def _fog(self) -> None:
        """Darken what the camp does not see."""
        if self.camp is None:
            return
        field = self.design.field
        coarse = 4.0
        light = Image.new("L", (math.ceil(field.width / coarse), math.ceil(field.height / coarse)))
        draw = ImageDraw.Draw(light)
        for slot in range(self.units.shape[1]):
            if not self.units[ALIVE, slot] or int(self.units[CAMP, slot]) != self.camp:
                continue
            kind = int(self.units[KIND, slot])
            sight = SIGHT if kind == layout.HERO else TOWER_SIGHT if kind in (layout.TOWER, layout.BASE) else CREEP_SIGHT
            x, y = self._at(slot)
            x, y, r = x / coarse, (y - field.top) / coarse, (sight + int(self.units[RADIUS, slot])) * self.mm / coarse
            draw.ellipse((x - r, y - r, x + r, y + r), fill=255)
        light = light.filter(ImageFilter.GaussianBlur(2))
        dark = light.point([round((255 - level) * 0.66) for level in range(256)])
        self.canvas.tint((6, 10, 14), (field.left, field.top), (field.right, field.bottom), dark)

    def _ranges(self) -> None:
        """Paint range and target of shooting towers."""
        for slot in self._living(layout.TOWER, layout.BASE):
            target = int(self.units[layout.TARGET, slot])
            if target < 0 or not self.shows(target):
                continue
            camp = int(self.units[CAMP, slot])
            radius = (int(self.units[layout.RANGE, slot]) + int(self.units[RADIUS, slot])) * self.mm

            def ring(canvas: SpriteCanvas, camp: int = camp, radius: float = radius) -> None:
                canvas.circle((0, 0), radius, with_opacity(CAMPS[camp], 0.07))
                canvas.dashes((0, 0), radius, with_opacity(PALE[camp], 0.6), 1.4, 48)

            self.canvas.sprite(("range", camp), self._at(slot), radius + 2, ring)
            self.canvas.line(self._at(slot), self._at(target), with_opacity(PALE[camp], 0.22), 1.2)

    def _wind_ups(self) -> None:
        for slot in self._living(layout.HERO):
            skill = int(self.units[layout.CAST, slot])
            if skill in (1, 2, 3):
                whole = max(1, self._skill(slot, skill, S_WINDUP))
                self._shape(slot, skill, max(0.0, 1 - int(self.units[layout.CAST_LEFT, slot]) / whole), 1.0)
            elif skill == layout.RECALLING:
                self._recall(slot, 1 - int(self.units[layout.CAST_LEFT, slot]) / RECALL_TICKS)

    def _flashes(self) -> None:
        """Paint the flash of the latest released skill of each hero."""
        for slot in self._living(layout.HERO):
            if self.units[layout.CAST, slot] or self.units[layout.STUN, slot]:
                continue
            since = [
                self._skill(slot, skill, S_COOLDOWN)
                - self._skill(slot, skill, S_WINDUP)
                - int(self.units[layout.COOLDOWN_1 + skill - 1, slot])
                for skill in (1, 2, 3)
            ]
            fresh = [(ticks, skill) for skill, ticks in enumerate(since, 1) if 0 <= ticks < _FLASH]
            if fresh:
                ticks, skill = min(fresh)
                self._shape(slot, skill, 1.0, 1 - ticks / _FLASH, struck=True)

    def _shape(self, slot: int, skill: int, done: float, strength: float, struck: bool = False) -> None:
        """Paint the target shape of a skill (unit, line or area): fills during wind-up, flashes on release."""
        camp = int(self.units[CAMP, slot])
        colour = mix(CAMPS[camp], _WHITE, 0.55) if struck else CAMPS[camp]
        fill, edge = (0.42 * strength, 0.95 * strength) if struck else (0.16, 0.95)
        reach = self._skill(slot, skill, S_RANGE) * self.mm
        half = self._skill(slot, skill, S_SIZE) * self.mm
        if skill == 3:
            at = self._point(int(self.units[layout.CAST_X, slot]), int(self.units[layout.CAST_Y, slot]))
            self.canvas.circle(at, half, with_opacity(colour, fill), with_opacity(PALE[camp], edge), 1.8)
            if not struck:
                self.canvas.circle(at, half * done, with_opacity(colour, 0.26))
                self.canvas.line(self._at(slot), at, with_opacity(PALE[camp], 0.4), 1.2)
        elif skill == 2:
            self._line(slot, reach, half, done, colour, fill, edge, struck)
        else:
            target = int(self.units[layout.CAST_TARGET, slot])
            if 0 <= target < self.units.shape[1] and self.shows(target):
                a, b = self._at(slot), self._at(target)
                if struck:
                    self._bolt(a, b, colour, strength, 3.4)
                    self.canvas.circle(b, 17 + 7 * (1 - strength), None, with_opacity(colour, strength), 2.4)
                else:
                    self.canvas.line(a, b, with_opacity(colour, 0.75), 1.6)
                    self.canvas.dashes(b, 19 - 4 * done, with_opacity(PALE[camp], 0.95), 2, 6, self.tick * 9 % 360)

    def _line(
        self, slot: int, reach: float, half: float, done: float, colour: Colour, fill: float, edge: float, struck: bool
    ) -> None:
        ux, uy = int(self.units[layout.CAST_X, slot]) / 1024, int(self.units[layout.CAST_Y, slot]) / 1024
        x, y = self._at(slot)
        if struck and self._skill(slot, 2, S_EFFECT) == DASHES:  # the hero is at the end of the line
            x, y = x - ux * reach, y - uy * reach

        def strip(length: float) -> list[Point]:
            return [
                (x - uy * half, y + ux * half),
                (x + ux * length - uy * half, y + uy * length + ux * half),
                (x + ux * (length + half * 0.9), y + uy * (length + half * 0.9)),
                (x + ux * length + uy * half, y + uy * length - ux * half),
                (x + uy * half, y - ux * half),
            ]

        self.canvas.polygon(
            strip(reach), with_opacity(colour, fill), with_opacity(PALE[int(self.units[CAMP, slot])], edge * 0.85), 1.5
        )
        if not struck:
            self.canvas.polygon(strip(reach * done), with_opacity(colour, 0.3))

    def _recall(self, slot: int, done: float) -> None:
        camp = int(self.units[CAMP, slot])
        at = self._at(slot)
        self.canvas.sprite(("recall", camp), at, 30, lambda canvas: canvas.glow(30, mix(CAMPS[camp], _WHITE, 0.5), 0.85, 1.2))
        self.canvas.dashes(at, 23, with_opacity(_WHITE, 0.8), 1.8, 10, self.tick * 7 % 360)
        self.canvas.arc(at, 19, -90, -90 + 360 * max(0.0, min(1.0, done)), with_opacity(PALE[camp], 1.0), 3)

    def _ruins_and_dead(self) -> None:
        """Paint ruins of buildings and dead heroes."""
        for camp in (0, 1):
            for which in range(layout.STRUCTURES):
                slot = layout.structure_slot(self.size, camp, which)
                if not self.units[ALIVE, slot]:
                    radius = _BASE if which == layout.CORE else _TOWER
                    self.canvas.sprite(("ruin", radius), self._at(slot), radius * 1.5, partial(sprites.ruin, radius=radius))
        for slot in range(2 * self.size):
            if not self.units[ALIVE, slot]:
                camp, hero = int(self.units[CAMP, slot]), HEROES[int(self.units[layout.HERO_ROW, slot])]
                at = self._at(slot)
                fallen = partial(sprites.coin, archetype=hero.archetype, camp=camp, radius=11, dim=True)
                self.canvas.sprite(("fallen", hero.archetype, camp), at, 18, fallen)
                left = -(-int(self.units[layout.RESPAWN, slot]) // layout.TICKS_PER_SECOND)
                self.canvas.text((at[0], at[1] + 19), f"{left} s", 10.5, PALE[camp], "middle", halo=1.2)

    # -- units ----------------------------------------------------------------------------------------------------------

    def _building(self, slot: int) -> None:
        camp, at = int(self.units[CAMP, slot]), self._at(slot)
        if self.units[KIND, slot] == layout.BASE:
            self.canvas.sprite(("base", camp), at, _BASE * 1.6, partial(sprites.base, camp=camp, radius=_BASE))
            self._health(slot, at[0], at[1] - _BASE - 12, 64, 6)
        else:
            self.canvas.sprite(("tower", camp), at, _TOWER * 1.7, partial(sprites.tower, camp=camp, radius=_TOWER))
            self._health(slot, at[0], at[1] - _TOWER - 11, 46, 5.5)

    def _creep(self, slot: int) -> None:
        camp, kind, at = int(self.units[CAMP, slot]), int(self.units[KIND, slot]), self._at(slot)
        radius = _SIEGE if kind == layout.SIEGE else _CREEP
        self._marks(slot, at, radius)
        self.canvas.sprite(("creep", kind, camp), at, radius * 1.8, partial(sprites.creep, kind=kind, camp=camp, radius=radius))
        self._stars(slot, at, radius)

    def _hero(self, slot: int) -> None:
        camp, at = int(self.units[CAMP, slot]), self._at(slot)
        hero = HEROES[int(self.units[layout.HERO_ROW, slot])]
        self._marks(slot, at, _HERO)
        coin = partial(sprites.coin, archetype=hero.archetype, camp=camp, radius=_HERO)
        self.canvas.sprite(("hero", hero.archetype, camp), at, _HERO * 1.5, coin)
        if self.units[layout.SHIELD, slot] > 0:
            self.canvas.circle(at, _HERO + 4.5, (210, 240, 255, 42), (226, 246, 255, 235), 2)
            self.canvas.arc(at, _HERO + 4.5, 200, 260, (255, 255, 255, 255), 3)
        since = MEND_COOLDOWN - int(self.units[layout.COOLDOWN_HEAL, slot])
        if 0 <= since < 2 * _FLASH:
            for dx, dy in ((-15, 2), (14, -5), (2, -16)):
                x, y = at[0] + dx, at[1] + dy - since * 0.9
                for wide, high in ((7.0, 2.4), (2.4, 7.0)):
                    self.canvas.box(x - wide / 2, y - high / 2, wide, high, with_opacity(_MENDED, 1 - since / (2 * _FLASH)))
        self._stars(slot, at, _HERO)

    def _marks(self, slot: int, at: Point, radius: float) -> None:
        """Paint the slow effect below a unit."""
        if self.units[layout.SLOW, slot] > 0:
            self.canvas.circle(at, radius + 4, with_opacity(_SLOWED, 0.22))
            self.canvas.dashes(at, radius + 4.5, with_opacity(_SLOWED, 0.95), 2, 5, -self.tick * 4 % 360)

    def _stars(self, slot: int, at: Point, radius: float) -> None:
        """Paint stars around a stunned unit."""
        if self.units[layout.STUN, slot] <= 0:
            return
        reach = radius * 1.02
        for i in range(3):
            turn = math.radians(self.tick * 14 + i * 120)
            x, y = at[0] + reach * math.cos(turn), at[1] - radius * 0.45 + reach * 0.42 * math.sin(turn)
            size = max(3.0, radius * 0.4)
            self.canvas.polygon([(x + a, y + b) for a, b in sprites.star(5, size + 1.1, size * 0.55)], (*INK, 255))
            self.canvas.polygon([(x + a, y + b) for a, b in sprites.star(5, size, size * 0.45)], (255, 226, 92, 255))

    def _leaves(self, heroes: list[int]) -> None:
        """Paint leaves over heroes in a bush."""
        for bush_x, bush_y in layout.BUSHES:
            if not any(
                math.hypot(int(self.units[X, slot]) - bush_x, int(self.units[Y, slot]) - bush_y) <= layout.BUSH_RADIUS
                for slot in heroes
            ):
                continue

            def paint(canvas: SpriteCanvas) -> None:
                radius = layout.BUSH_RADIUS * self.mm
                for i in range(40):
                    turn, far = i * 2.399963, math.sqrt((i + 0.5) / 40) * radius * 0.93
                    x, y = far * math.cos(turn), far * math.sin(turn)
                    leaf = [(x + a, y + b) for a, b in _leaf(radius * 0.17, turn * 57.3 + 60)]
                    canvas.polygon(leaf, (70 + i % 3 * 14, 148, 82, 118))

            self.canvas.sprite(("leaves",), self._point(bush_x, bush_y), layout.BUSH_RADIUS * self.mm * 1.1, paint)

    # -- blows ----------------------------------------------------------------------------------------------------------

    def _blows(self) -> None:
        for slot in range(self.units.shape[1]):
            target = int(self.units[layout.TARGET, slot])
            since = int(self.units[layout.PERIOD, slot]) - int(self.units[layout.READY, slot])
            if not self.units[ALIVE, slot] or not 0 <= target < self.units.shape[1] or not 0 <= since < _BLOW:
                continue
            if not self.shows(slot) or not self.shows(target) or not self.units[layout.READY, slot]:
                continue
            self._blow(slot, target, 1 - since / _BLOW)

    def _blow(self, slot: int, target: int, strength: float) -> None:
        a, b, camp, kind = self._at(slot), self._at(target), int(self.units[CAMP, slot]), int(self.units[KIND, slot])
        colour = mix(CAMPS[camp], _WHITE, 0.45)
        if self.units[layout.RANGE, slot] >= 3_000:
            self._bolt(
                a, b, colour, strength, 4.0 if kind in (layout.TOWER, layout.BASE) else 2.4 if kind == layout.HERO else 1.5
            )
            return
        turn = math.degrees(math.atan2(a[1] - b[1], a[0] - b[0]))
        radius = 15.0 if kind == layout.HERO else 8.0
        self.canvas.arc(
            b, radius, turn - 55, turn + 55, with_opacity(_WHITE, 0.95 * strength), 2.6 if kind == layout.HERO else 1.6
        )

    def _bolt(self, a: Point, b: Point, colour: Colour, strength: float, width: float) -> None:
        """Paint a bolt from a to b with a spark at b."""
        self.canvas.line(a, b, with_opacity(colour, 0.28 * strength), width * 2.6)
        self.canvas.line(a, b, with_opacity(colour, 0.75 * strength), width * 1.2)
        self.canvas.line(a, b, with_opacity(_WHITE, 0.95 * strength), width * 0.5)
        self.canvas.circle(b, width * 2.6, with_opacity(colour, 0.5 * strength))
        self.canvas.circle(b, width * 1.3, with_opacity(_WHITE, 0.9 * strength))

    # -- above everything -----------------------------------------------------------------------------------------------

    def _health(self, slot: int, x: float, y: float, width: float, height: float) -> None:
        share = int(self.units[layout.HP, slot]) / max(1, int(self.units[layout.MAX_HP, slot]))
        box = Box(x - width / 2, y - height / 2, width, height)
        self.canvas.box(box.left - 1, box.top - 1, box.width + 2, box.height + 2, INK)
        paint_bar(self.canvas, box, share, CAMPS[int(self.units[CAMP, slot])], 0.0, (48, 52, 56))

    def _labels(self, heroes: list[int]) -> None:
        """Paint the labels of heroes, above those of camp 0 and below those of camp 1, without overlaps."""
        field = self.design.field
        coin = _HERO * 0.8
        taken = [Box(x - coin, y - coin, 2 * coin, 2 * coin) for x, y in map(self._at, heroes)]
        ways = {slot: -1 if int(self.units[CAMP, slot]) == 0 else 1 for slot in heroes}
        for slot in sorted(heroes, key=lambda s: (-ways[s] * self._at(s)[1], s)):  # the outermost of each camp first
            way, (x, y) = ways[slot], self._at(slot)
            edge = y + way * (_HERO + 3)
            box = Box(x - 25, edge - _LABEL if way < 0 else edge, 50, _LABEL)
            for _ in range(60):
                if not any(box.overlaps(other) for other in taken):
                    break
                box = Box(box.left, box.top + way * 4, box.width, box.height)
            box = Box(box.left, min(max(box.top, field.top + 3), field.bottom - _LABEL - 3), box.width, box.height)
            taken.append(box)
            near = box.bottom if way < 0 else box.top
            if abs(near - edge) > 6:
                self.canvas.line((x, near), (x, y + way * _HERO), with_opacity(PALE[int(self.units[CAMP, slot])], 0.5), 1)
            self._label(slot, box)

    def _label(self, slot: int, box: Box) -> None:
        units, most = self.units, max(1, int(self.units[layout.MAX_HP, slot]))
        wide, k = box.width - 7, self.canvas.k
        label = Label(
            int(units[layout.HERO_ROW, slot]),
            int(units[CAMP, slot]),
            int(units[layout.LEVEL, slot]),
            most,
            share_px(int(units[layout.HP, slot]) / most, wide * k),
            share_px(int(units[layout.SHIELD, slot]) / most, wide * k),
            share_px(int(units[layout.MANA, slot]) / max(1, int(units[layout.MAX_MANA, slot])), wide * k),
        )

        def paint(canvas: Canvas, at: Point) -> None:
            paint_label(canvas, Box(*at, box.width, box.height), label)

        self.canvas.label(("label", label), (box.left, box.top), (box.width, box.height), paint, _LABEL_MARGIN)


def _leaf(size: float, degrees: float) -> list[Point]:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    shape = ((-1.0, 0.0), (-0.3, -0.5), (0.4, -0.42), (1.0, 0.0), (0.4, 0.42), (-0.3, 0.5))
    return [((x * c - y * s) * size, (x * s + y * c) * size) for x, y in shape]
