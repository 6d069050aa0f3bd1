"""Heads-up display: the score above the field, a panel for every hero below, and the labels of heroes on the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from ludus.core.types import Ints32
from ludus.games.arena.engine import layout
from ludus.games.arena.engine.heroes import H_PERIOD, HEROES, S_COOLDOWN, S_MANA, SKILL_COLUMNS, SKILLS_AT, TABLE
from ludus.games.arena.engine.rules import MAX_ITEMS, MAX_LEVEL, MEND_COOLDOWN, experience_needed
from ludus.games.arena.render.canvas import Canvas, Colour, mix
from ludus.games.arena.render.sprites import BRIGHT, CAMPS, INK, PALE, coin, star

BACK: Final = (17, 24, 29)
PANEL: Final = (26, 35, 42)
PANEL_EDGE: Final = (47, 60, 70)
DEEP: Final = (10, 15, 19)
QUIET: Final[Colour] = (138, 153, 165)
GOLD: Final[Colour] = (247, 202, 92)
MANA: Final[Colour] = (176, 148, 255)
GAP: Final = 6.0
_experience_needed: Callable[[int], int] = getattr(
    experience_needed, "py_func", experience_needed
)  # uncompiled: compilation takes longer than a frame
_WIDE, _FULL = 400.0, 150.0


@dataclass(frozen=True)
class Box:
    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def overlaps(self, other: Box) -> bool:
        return self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom


def format_clock(ticks: int) -> str:
    seconds = max(0, ticks) // layout.TICKS_PER_SECOND
    return f"{seconds // 60}:{seconds % 60:02d}"


def paint_bar(canvas: Canvas, box: Box, share: float, colour: Colour, extra: float = 0.0, back: Colour = DEEP) -> None:
    """Paint a bar; `extra`: share of a pale part after the filled one (a shield)."""
    canvas.box(box.left, box.top, box.width, box.height, back)
    filled = box.width * max(0.0, min(1.0, share))
    canvas.box(box.left, box.top, filled, box.height, colour)
    if extra > 0:
        canvas.box(box.left + filled, box.top, min(box.width * extra, box.width - filled + 0.01), box.height, (236, 240, 244))
    canvas.box(box.left, box.top, filled, max(1.0, box.height * 0.3), mix(colour, (255, 255, 255), 0.22))


# -- the score ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scoreboard:
    """Content of the score, used as cache key."""

    ticks: int
    limit: int
    wave: int
    kills: tuple[int, int]
    gold: tuple[int, int]
    standing: tuple[tuple[bool, ...], tuple[bool, ...]]
    """By camp: which of its buildings are standing."""
    camp: int | None
    """Point of view, which hides the gold of the other camp; None: a spectator."""


def summarise(units: Ints32, match: Ints32, camp: int | None = None) -> Scoreboard:
    size = int(match[layout.SIZE])
    heroes = (slice(0, size), slice(size, 2 * size))
    standing = units[layout.ALIVE]
    second = int(match[layout.TICK]) // layout.TICKS_PER_SECOND * layout.TICKS_PER_SECOND
    kills, gold = ([int(units[field, side].sum()) for side in heroes] for field in (layout.KILLS, layout.EARNED))
    if camp is not None:
        gold[1 - camp] = 0
    first = layout.structure_slot(size, 0, 0)
    buildings = tuple(map(bool, standing[first : first + 2 * layout.STRUCTURES]))
    return Scoreboard(
        ticks=second,
        limit=int(match[layout.LIMIT]),
        wave=int(match[layout.WAVES]),
        kills=(kills[0], kills[1]),
        gold=(gold[0], gold[1]),
        standing=(buildings[: layout.STRUCTURES], buildings[layout.STRUCTURES :]),
        camp=camp,
    )


def paint_score(canvas: Canvas, box: Box, summary: Scoreboard, names: tuple[str, str], small: bool = False) -> None:
    looks, gold = summary.camp, summary.gold
    middle = box.left + box.width / 2
    y = box.top + box.height * 0.5
    big = box.height * 0.42
    canvas.box(middle - big * 2.2, box.top, big * 4.4, box.height, PANEL)
    canvas.text((middle, y if small else y - 5), format_clock(summary.ticks), big * 0.98, BRIGHT, "middle")
    if not small:
        canvas.text((middle, y + 18), f"of {format_clock(summary.limit)} · wave {summary.wave}", 9.5, QUIET, "middle", bold=False)
    for camp, way in ((0, -1), (1, 1)):
        at = middle + way * big * 3.1
        canvas.text((at, y), str(summary.kills[camp]), big * 1.1, CAMPS[camp], "middle")
        at += way * big * 1.5
        _towers(canvas, at, y, way, summary.standing[camp], camp, box.height * 0.13)
        if looks in (None, camp):
            at += way * box.height * 1.1
            canvas.circle((at, y), box.height * 0.085, GOLD, (140, 100, 30), 1.2)
            canvas.text(
                (at + way * box.height * 0.16, y), f"{gold[camp]:,}", box.height * 0.22, GOLD, "left" if way > 0 else "right"
            )
        edge = box.left + 16 if camp == 0 else box.right - 16
        taken = big * 4.6 + box.height * 1.26 + canvas.text_width(f"{gold[camp]:,}", box.height * 0.22) + 14
        name = shorten(canvas, names[camp], box.height * 0.27, box.width / 2 - 16 - taken)
        canvas.text((edge, y), name, box.height * 0.27, PALE[camp], "left" if camp == 0 else "right")
    top = box.bottom - 3
    if looks is not None:
        canvas.box(box.left, top, box.width, 3, CAMPS[looks])
        return
    blue = box.width * (gold[0] + 500) / (sum(gold) + 1_000)  # a bar divided in proportion to the gold
    canvas.box(box.left, top, blue, 3, mix(CAMPS[0], INK, 0.15))
    canvas.box(box.left + blue, top, box.width - blue, 3, mix(CAMPS[1], INK, 0.15))
    canvas.box(box.left + blue - 1, top, 2, 3, BRIGHT)


def _towers(canvas: Canvas, at: float, y: float, way: int, standing: tuple[bool, ...], camp: int, radius: float) -> None:
    """Paint the buildings of a camp, from the outer tower outwards."""
    for which, alive in enumerate(standing):
        x = at + way * which * radius * 2.5
        r = radius * (1.25 if which == layout.CORE else 1.0)
        gem = [(x, y - r), (x + r * 0.75, y), (x, y + r), (x - r * 0.75, y)]
        canvas.polygon(gem, CAMPS[camp] if alive else (44, 52, 58), PALE[camp] if alive else (70, 80, 88), 1)


def shorten(canvas: Canvas, text: str, size: float, room: float) -> str:
    """Return the text, or its start and end with an ellipsis if it is wider than `room`."""
    if canvas.text_width(text, size) <= room:
        return text
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if canvas.text_width(_cut(text, middle), size) <= room else (low, middle)
    return _cut(text, low)


def _cut(text: str, length: int) -> str:
    """Return `length` characters: two thirds from the start, which names the camp, one third from the end."""
    end = length // 3
    return f"{text[: length - end]}…{text[len(text) - end :]}"


# -- heroes -------------------------------------------------------------------------------------------------------------


ALL, OUTSIDE, NOTHING = range(3)
"""Visible information about a hero: all; what an enemy in sight shows; only the score."""


_UNSEEN: Final = (layout.X, layout.Y, layout.READY)
"""Fields that no panel shows and that change in every frame."""


def panel_key(unit: Ints32) -> list[int]:
    """Return the fields that a panel shows, as cache key."""
    key: list[int] = unit.tolist()
    for field in _UNSEEN:
        key[field] = 0
    return key


def paint_panel_frames(canvas: Canvas, boxes: list[Box]) -> None:
    """Paint the constant part of the panels."""
    for slot, box in enumerate(boxes):
        canvas.box(box.left, box.top, box.width, box.height, PANEL, PANEL_EDGE, 5)
        canvas.box(box.left + 6, box.top, box.width - 12, 3, CAMPS[2 * slot // len(boxes)])


def panel_boxes(box: Box, size: int) -> list[Box]:
    """Return the boxes of the panels of all heroes, `GAP` apart."""
    half = box.width / 2
    width = (half - GAP * 1.5) / size - GAP / size * (size - 1)
    lefts = [box.left + camp * (half - GAP * 0.5) + GAP + i * (width + GAP) for camp in (0, 1) for i in range(size)]
    return [Box(left, box.top + GAP, width, box.height - 2 * GAP) for left in lefts]


def paint_panel(canvas: Canvas, box: Box, unit: Ints32, known: int) -> None:
    """Paint the panel of a hero; `known`: ALL, OUTSIDE or NOTHING."""
    dead = not unit[layout.ALIVE]
    if dead:
        canvas.box(box.left + 6, box.top, box.width - 12, 3, (84, 90, 96))
    if box.width < _FULL:
        _compact(canvas, box, unit, dead, known)
    else:
        side = min(box.width, 300.0) if box.width >= _WIDE else box.width
        _head(canvas, Box(box.left, box.top, side, box.height), unit, dead, known)
        if known != NOTHING:
            _condition(canvas, Box(box.left, box.top, side, box.height), unit, dead, known)
        if box.width >= _WIDE and known == ALL:
            _numbers(canvas, Box(box.left + side, box.top, box.width - side, box.height), unit)


def _token(canvas: Canvas, x: float, y: float, radius: float, unit: Ints32, dead: bool, known: int) -> None:
    camp, hero = int(unit[layout.CAMP]), HEROES[int(unit[layout.HERO_ROW])]
    dim = dead or known == NOTHING
    paint = partial(coin, archetype=hero.archetype, camp=camp, radius=radius, dim=dim)
    canvas.sprite(("coin", hero.archetype, camp, dim), (x, y), radius * 1.5, paint)
    if dead:
        canvas.text((x, y), str(_seconds(int(unit[layout.RESPAWN]))), radius * 0.95, BRIGHT, "middle", halo=1.5)
    elif known != NOTHING:
        paint_badge(canvas, x + radius * 0.8, y + radius * 0.72, radius * 0.46, int(unit[layout.LEVEL]), camp)


def paint_badge(canvas: Canvas, x: float, y: float, radius: float, level: int, camp: int) -> None:
    canvas.circle((x, y), radius, INK, PALE[camp], max(0.8, radius * 0.14))
    canvas.text((x, y), str(level), radius * (1.15 if level < 10 else 0.95), BRIGHT, "middle")


def _head(canvas: Canvas, box: Box, unit: Ints32, dead: bool, known: int) -> None:
    hero = HEROES[int(unit[layout.HERO_ROW])]
    _token(canvas, box.left + 30, box.top + 32, 20, unit, dead, known)
    left, right = box.left + 60, box.right - 10
    canvas.text((left, box.top + 20), hero.name, 14, BRIGHT if not dead and known != NOTHING else QUIET)
    canvas.text((left, box.top + 37), hero.archetype, 10.5, QUIET, bold=False)
    kda = "/".join(str(int(unit[field])) for field in (layout.KILLS, layout.DEATHS, layout.ASSISTS))
    canvas.text((right, box.top + 20), kda, 12.5, BRIGHT, "right")
    if known == ALL:
        canvas.text((right, box.top + 37), f"{int(unit[layout.LAST_HITS])} cs", 10.5, QUIET, "right", bold=False)
    if dead:
        doing, colour = f"back in {_seconds(int(unit[layout.RESPAWN]))} s", GOLD
    elif known == NOTHING:
        doing, colour = "not in sight", QUIET
    else:
        doing, colour = _doing(unit), PALE[int(unit[layout.CAMP])]
    canvas.text((box.left + 10, box.bottom - 24), doing, 10.5, colour)


def _doing(unit: Ints32) -> str:
    """Describe the current activity of a hero; empty if there is none."""
    cast, left_s = int(unit[layout.CAST]), int(unit[layout.CAST_LEFT]) / layout.TICKS_PER_SECOND
    if unit[layout.STUN] > 0:
        return f"stunned for {int(unit[layout.STUN]) / layout.TICKS_PER_SECOND:.1f} s"
    if cast == layout.RECALLING:
        return f"recall in {left_s:.1f} s"
    if cast:
        return HEROES[int(unit[layout.HERO_ROW])].skills[cast - 1].name
    if unit[layout.SLOW] > 0:
        return f"slowed by {int(unit[layout.SLOW_BY])} %"
    return "attacks" if unit[layout.TARGET] >= 0 else ""


def _condition(canvas: Canvas, box: Box, unit: Ints32, dead: bool, known: int) -> None:
    camp = int(unit[layout.CAMP])
    inner = box.left + 10
    width = box.width - 20
    hp, most = int(unit[layout.HP]), max(1, int(unit[layout.MAX_HP]))
    mana, most_mana = int(unit[layout.MANA]), max(1, int(unit[layout.MAX_MANA]))
    paint_bar(
        canvas, Box(inner, box.top + 60, width, 15), hp / most, mix(CAMPS[camp], INK, 0.12), int(unit[layout.SHIELD]) / most
    )
    canvas.text((inner + width / 2, box.top + 67.5), f"{hp:,} / {most:,}", 10, BRIGHT, "middle", halo=0.8)
    paint_bar(canvas, Box(inner, box.top + 77, width, 9), mana / most_mana, mix(MANA, INK, 0.1))
    canvas.text((inner + width / 2, box.top + 81.5), f"{mana} / {most_mana}", 7.5, BRIGHT, "middle", halo=0.8)
    if known == ALL:
        _skills(canvas, inner, box.top + 93, 28, unit, dead)
        coins = inner + 4 * 33
        canvas.circle((coins + 7, box.top + 100), 4.6, GOLD, (140, 100, 30), 1.1)
        canvas.text((coins + 15, box.top + 100), f"{int(unit[layout.GOLD]):,}", 10.5, GOLD)
        level = int(unit[layout.LEVEL])
        progress = 1.0 if level >= MAX_LEVEL else int(unit[layout.XP]) / _experience_needed(level)
        paint_bar(canvas, Box(inner, box.bottom - 13, width, 4), progress, (146, 196, 120))
        _items(canvas, inner + 4 * 33, box.top + 111, box.right - 10, unit)
    else:
        _items(canvas, inner, box.top + 96, inner + 80, unit)


@dataclass(frozen=True)
class _SkillButton:
    """Appearance of a skill button, used as cache key; number 3 is the heal that every hero has."""

    number: int
    camp: int
    waits_s: int
    cover: int
    """Height of the cooldown overlay in oversampled pixels."""
    short: bool
    """Whether mana is too low."""
    dead: bool
    casting: bool


def _skills(canvas: Canvas, left: float, top: float, side: float, unit: Ints32, dead: bool) -> None:
    camp, row = int(unit[layout.CAMP]), int(unit[layout.HERO_ROW])
    for k in range(4):
        waits = int(unit[layout.COOLDOWN_1 + k])
        whole = MEND_COOLDOWN if k == 3 else int(TABLE[row, SKILLS_AT + k * SKILL_COLUMNS + S_COOLDOWN])
        short = k < 3 and int(unit[layout.MANA]) < int(TABLE[row, SKILLS_AT + k * SKILL_COLUMNS + S_MANA])
        cover = round(side * min(1.0, waits / max(1, whole)) * canvas.k)
        casting = k < 3 and int(unit[layout.CAST]) == k + 1
        skill = _SkillButton(k, camp, _seconds(waits), cover, short, dead, casting)
        x = left + k * (side + 5)
        canvas.region((skill,), (x, top), (side, side), partial(_skill, canvas, x, top, side, skill))


def _skill(canvas: Canvas, x: float, top: float, side: float, skill: _SkillButton) -> None:
    mends, camp = skill.number == 3, skill.camp
    ready = not (skill.waits_s or skill.short or skill.dead)
    face = (38, 74, 60) if mends and ready else mix(CAMPS[camp], INK, 0.68) if ready else DEEP
    canvas.box(x, top, side, side, face, None, 4)
    middle = (x + side / 2, top + side / 2)
    if skill.waits_s:
        high = skill.cover / canvas.k
        canvas.box(x, top + side - high, side, high, (58, 70, 80), None, min(4.0, high / 2))
        canvas.text(middle, str(skill.waits_s), side * 0.44, BRIGHT, "middle", halo=0.8)
    else:
        colour = MANA if skill.short else (150, 230, 180) if mends else PALE[camp]
        canvas.text(middle, "123+"[skill.number], side * 0.5, colour if not skill.dead else QUIET, "middle")
    edge = ((120, 210, 160) if mends else CAMPS[camp]) if ready else PANEL_EDGE
    canvas.box(x, top, side, side, None, BRIGHT if skill.casting else edge, 4, 1.4)


def _items(canvas: Canvas, left: float, top: float, right: float, unit: Ints32) -> None:
    pip = min(9.0, (right - left) / MAX_ITEMS - 2)
    items = min(MAX_ITEMS, int(unit[layout.ITEMS]))

    def paint() -> None:
        for i in range(MAX_ITEMS):
            has = i < items
            x = left + 2 + i * (pip + 2)
            canvas.box(x, top, pip, pip, GOLD if has else DEEP, (140, 100, 30) if has else PANEL_EDGE, 1.5, 1)

    if pip > 0:
        canvas.region(("items", items), (left, top), (2 + MAX_ITEMS * (pip + 2), pip), paint)


def _numbers(canvas: Canvas, box: Box, unit: Ints32) -> None:
    rate = layout.TICKS_PER_SECOND / max(1, int(TABLE[int(unit[layout.HERO_ROW]), H_PERIOD]))
    numbers = {
        "attack": f"{int(unit[layout.ATTACK])}",
        "blows / s": f"{rate:.1f}",
        "armour": f"{int(unit[layout.ARMOUR])}",
        "speed m / s": f"{int(unit[layout.SPEED]) * layout.TICKS_PER_SECOND / 1000:.1f}",
        "earned": f"{int(unit[layout.EARNED]):,}",
        "to heroes": f"{int(unit[layout.DAMAGE]):,}",
        "to buildings": f"{int(unit[layout.DAMAGE_BUILDINGS]):,}",
        "taken": f"{int(unit[layout.TAKEN]):,}",
        "healed": f"{int(unit[layout.HEALED]):,}",
        "illegal": f"{int(unit[layout.ILLEGAL]):,}",
    }
    width = (box.width - 16) / 2
    canvas.box(box.left + 2, box.top + 14, 1, box.height - 28, PANEL_EDGE)
    for i, (name, value) in enumerate(numbers.items()):
        left, y = box.left + 14 + i // 5 * width, box.top + 22 + i % 5 * (box.height - 34) / 4.4
        canvas.text((left, y), name, 10.5, QUIET, bold=False)
        canvas.text((left + width - 20, y), value, 11.5, BRIGHT, "right")


def _compact(canvas: Canvas, box: Box, unit: Ints32, dead: bool, known: int) -> None:
    camp, hero = int(unit[layout.CAMP]), HEROES[int(unit[layout.HERO_ROW])]
    radius = min(20.0, box.width * 0.26)
    middle = box.left + box.width / 2
    _token(canvas, middle, box.top + 12 + radius, radius, unit, dead, known)
    y = box.top + 24 + 2 * radius
    canvas.text((middle, y), hero.name, min(12.0, box.width * 0.17), BRIGHT if not dead else QUIET, "middle")
    kda = "/".join(str(int(unit[field])) for field in (layout.KILLS, layout.DEATHS, layout.ASSISTS))
    canvas.text((middle, y + 15), kda, min(11.0, box.width * 0.15), QUIET, "middle")
    if known == NOTHING:
        return
    width = box.width - 12
    paint_bar(canvas, Box(box.left + 6, y + 26, width, 9), int(unit[layout.HP]) / max(1, int(unit[layout.MAX_HP])), CAMPS[camp])
    paint_bar(canvas, Box(box.left + 6, y + 36, width, 5), int(unit[layout.MANA]) / max(1, int(unit[layout.MAX_MANA])), MANA)
    if known != ALL:
        return
    for k in range(4):
        ready = not unit[layout.COOLDOWN_1 + k] and not dead
        canvas.circle(
            (middle + (k - 1.5) * box.width * 0.2, y + 53), min(5.0, box.width * 0.07), PALE[camp] if ready else DEEP, PANEL_EDGE
        )
    canvas.text((middle, y + 68), f"{int(unit[layout.EARNED]):,}", min(10.0, box.width * 0.15), GOLD, "middle")


def _seconds(ticks: int) -> int:
    return -(-ticks // layout.TICKS_PER_SECOND)


def paint_banner(canvas: Canvas, box: Box, match: Ints32, names: tuple[str, str]) -> None:
    """Paint the result across the field."""
    winner = int(match[layout.WINNER])
    colour = BRIGHT if winner < 0 else CAMPS[winner]
    room = box.width * 0.6
    text = "Time limit: draw" if winner < 0 else f"{shorten(canvas, names[winner], box.height * 0.07, room)} has won"
    y, high = box.top + box.height * 0.2, box.height * 0.17  # above the lane, so that the destroyed base is visible
    canvas.box(box.left, y - high / 2, box.width, high, (10, 15, 19, 205))
    for edge in (y - high / 2, y + high / 2 - 2):
        canvas.box(box.left, edge, box.width, 2, colour)
    size = high * 0.42
    canvas.text((box.left + box.width / 2, y), text, size, colour, "middle")
    reach = canvas.text_width(text, size) / 2 + high * 0.5
    for way in (-1, 1):
        middle = box.left + box.width / 2 + way * reach
        canvas.polygon([(middle + x, y + dy) for x, dy in star(5, high * 0.2, high * 0.085)], colour)


# -- labels above or below the heroes on the field ------------------------------------------------------------------------


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
