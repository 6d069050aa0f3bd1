"""Label above or below a hero on the field: name, level, health and mana."""

from __future__ import annotations

from typing import NamedTuple

from ludus.games.arena.engine.heroes import HEROES
from ludus.games.arena.render.canvas import Canvas, mix
from ludus.games.arena.render.hud import MANA, Box, paint_badge, paint_bar
from ludus.games.arena.render.sprites import CAMPS, INK, PALE


class Label(NamedTuple):
    """Content of a label, used as cache key. The last three are bar lengths in oversampled pixels."""

    hero: int
    camp: int
    level: int
    most_hp: int
    hp: int
    shield: int
    mana: int


def share_px(share: float, pixels: float) -> int:
    """Return the filled length of a bar in pixels."""
    return round(max(0.0, min(1.0, share)) * pixels)


def paint_label(canvas: Canvas, box: Box, label: Label) -> None:
    camp, hero = label.camp, HEROES[label.hero]
    middle = box.left + box.width / 2
    name, bars = (box.top + 5, box.top + 10) if camp == 0 else (box.top + 16, box.top)
    canvas.text((middle + 3, name), hero.name, 9.5, PALE[camp], "middle", halo=1.1)
    canvas.box(box.left + 5, bars, box.width - 5, 10.5, INK, None, 1.5)
    hp = Box(box.left + 6, bars + 1, box.width - 7, 5.6)
    pixels = hp.width * canvas.k
    paint_bar(canvas, hp, label.hp / pixels, CAMPS[camp], label.shield / pixels, (52, 56, 60))
    for part in range(250, label.most_hp, 250):
        canvas.box(hp.left + hp.width * part / label.most_hp - 0.3, hp.top, 0.6, hp.height * 0.6, mix(INK, CAMPS[camp], 0.25))
    paint_bar(canvas, Box(hp.left, hp.bottom + 0.8, hp.width, 2.4), label.mana / pixels, MANA, 0.0, (44, 44, 54))
    paint_badge(canvas, box.left + 2, bars + 5, 6.6, label.level, camp)
