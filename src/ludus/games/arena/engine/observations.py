"""Kernels that write observations and action masks of a hero, from the point of view of its camp."""

from __future__ import annotations

from typing import Final

from ludus.core.types import Bools, Floats, Ints32
from ludus.games.arena.engine import layout
from ludus.games.arena.engine.geometry import bush_at, distance, within
from ludus.games.arena.engine.heroes import ARCHETYPES, H_ARCHETYPE, S_COOLDOWN, S_MANA, SKILL_COLUMNS, SKILLS_AT
from ludus.games.arena.engine.jit import inner
from ludus.games.arena.engine.rules import (
    FIRST_WAVE,
    MAX_ITEMS,
    MAX_LEVEL,
    MEND_COOLDOWN,
    RECALL_TICKS,
    SECOND,
    WAVE_EVERY,
    at_fountain,
    can_attack,
    can_target,
    experience_needed,
    is_allowed,
    is_free,
    is_vulnerable,
    item_price,
    slot_of_row,
)

ENTITY_FEATURES: Final = (
    "present",
    "self",
    "ally",
    "enemy",
    *(f"is {kind}" for kind in layout.KINDS),
    "dx",
    "dy",
    "distance",
    "x",
    "y",
    "health share",
    "health",
    "mana share",
    "level",
    "attack",
    "range",
    "speed",
    "in my range",
    "may be attacked",
    "stunned",
    "slowed",
    "casting",
    "ready to strike",
    "seen by its enemy",
    "attacks me",
    *(f"is {archetype}" for archetype in ARCHETYPES),
    "items",
    "shield",
    "back in",
)
FEATURES: Final = len(ENTITY_FEATURES)

SCALAR_FEATURES: Final = (
    "time",
    "next wave",
    "health share",
    "mana share",
    "level",
    "experience",
    "gold",
    "items",
    "cooldown 1",
    "cooldown 2",
    "cooldown 3",
    "cooldown heal",
    "may use skill 1",
    "may use skill 2",
    "may use skill 3",
    *(f"is {archetype}" for archetype in ARCHETYPES),
    "own kills",
    "own deaths",
    "kills of the camp",
    "kills of the enemy",
    "own outer tower",
    "own inner tower",
    "own base",
    "enemy's outer tower",
    "enemy's inner tower",
    "enemy's base",
    "at the fountain",
    "in a bush",
    "seen by the enemy",
    "recalling",
    "back in",
    "free to act",
    "allies alive",
    "enemies alive",
    "x",
    "y",
)
SCALARS: Final = len(SCALAR_FEATURES)
BEYOND_ONE: Final = {
    "dx": (-5.0, 5.0),
    "dy": (-2.0, 2.0),
    "distance": (0.0, 6.0),
    "health": (0.0, 3.0),
    "attack": (0.0, 3.0),
    "shield": (0.0, 3.0),
    "back in": (0.0, 2.0),
    "experience": (0.0, 3.0),
    "gold": (0.0, 3.0),
    "own kills": (0.0, 10.0),
    "own deaths": (0.0, 12.0),
    "kills of the camp": (0.0, 36.0),
    "kills of the enemy": (0.0, 36.0),
    "allies alive": (0.0, 1.001),
    "enemies alive": (0.0, 1.001),
}
"""Bounds of the features outside 0 to 1, in matches of the default length."""

_F_KIND = 4
_F_SPACE = _F_KIND + len(layout.KINDS)
_F_ARCHETYPE = _F_SPACE + 20
_SCALE = 20_000.0
_TIME = 30.0 * SECOND


@inner
def write_entity(units: Ints32, match: Ints32, table: Ints32, h: int, i: int, out: Floats) -> None:
    """Write the features of unit i for hero h; zeros for dead and invisible units."""
    out[:] = 0
    ally = units[layout.CAMP, i] == units[layout.CAMP, h]
    if units[layout.KIND, i] == layout.HERO and i < 2 * int(match[layout.SIZE]):
        out[_F_ARCHETYPE + int(table[units[layout.HERO_ROW, i], H_ARCHETYPE])] = 1.0
        out[_F_ARCHETYPE + 8] = units[layout.RESPAWN, i] / _TIME
    if units[layout.ALIVE, i] == 0 or (not ally and units[layout.SEEN, i] == 0):
        return
    sign = 1 if units[layout.CAMP, h] == 0 else -1
    x, y = int(units[layout.X, i]), int(units[layout.Y, i])
    out[0] = 1.0
    out[1] = 1.0 if i == h else 0.0
    out[2] = 1.0 if ally and i != h else 0.0
    out[3] = 0.0 if ally else 1.0
    out[_F_KIND + int(units[layout.KIND, i])] = 1.0
    at = _F_SPACE
    out[at] = sign * (x - int(units[layout.X, h])) / _SCALE
    out[at + 1] = sign * (y - int(units[layout.Y, h])) / _SCALE
    out[at + 2] = distance(units, h, i) / _SCALE
    out[at + 3] = (x if sign == 1 else layout.LENGTH - x) / layout.LENGTH
    out[at + 4] = (y if sign == 1 else layout.WIDTH - y) / layout.WIDTH
    out[at + 5] = units[layout.HP, i] / max(1, int(units[layout.MAX_HP, i]))
    out[at + 6] = units[layout.HP, i] / 2000.0
    out[at + 7] = units[layout.MANA, i] / max(1, int(units[layout.MAX_MANA, i]))
    out[at + 8] = units[layout.LEVEL, i] / MAX_LEVEL
    out[at + 9] = units[layout.ATTACK, i] / 200.0
    out[at + 10] = units[layout.RANGE, i] / 10_000.0
    out[at + 11] = units[layout.SPEED, i] / 300.0
    out[at + 12] = 1.0 if not ally and within(units, h, i, int(units[layout.RANGE, h])) else 0.0
    out[at + 13] = 1.0 if is_vulnerable(units, match, i) else 0.0
    out[at + 14] = min(1.0, units[layout.STUN, i] / SECOND)
    out[at + 15] = min(1.0, units[layout.SLOW, i] / (2.0 * SECOND))
    out[at + 16] = 1.0 if units[layout.CAST, i] != 0 else 0.0
    out[at + 17] = 1.0 if units[layout.READY, i] == 0 else 0.0
    out[at + 18] = 1.0 if units[layout.SEEN, i] == 1 else 0.0
    out[at + 19] = 1.0 if units[layout.TARGET, i] == h else 0.0
    out[_F_ARCHETYPE + 6] = units[layout.ITEMS, i] / MAX_ITEMS
    out[_F_ARCHETYPE + 7] = units[layout.SHIELD, i] / 500.0


@inner
def write_scalars(units: Ints32, match: Ints32, table: Ints32, h: int, out: Floats) -> None:
    """Write the scalar features of hero h."""
    size, camp, row = int(match[layout.SIZE]), int(units[layout.CAMP, h]), int(units[layout.HERO_ROW, h])
    out[:] = 0
    out[0] = match[layout.TICK] / match[layout.LIMIT]
    out[1] = ((FIRST_WAVE - int(match[layout.TICK])) % WAVE_EVERY) / WAVE_EVERY
    out[2] = units[layout.HP, h] / units[layout.MAX_HP, h]
    out[3] = units[layout.MANA, h] / units[layout.MAX_MANA, h]
    out[4] = units[layout.LEVEL, h] / MAX_LEVEL
    out[5] = min(
        3.0, units[layout.XP, h] / experience_needed(int(units[layout.LEVEL, h]))
    )  # grows without bound at the maximum level
    out[6] = min(3.0, units[layout.GOLD, h] / item_price(int(units[layout.ITEMS, h])))
    out[7] = units[layout.ITEMS, h] / MAX_ITEMS
    for s in range(3):
        at = SKILLS_AT + s * SKILL_COLUMNS
        out[8 + s] = units[layout.COOLDOWN_1 + s, h] / max(1, int(table[row, at + S_COOLDOWN]))
        out[12 + s] = 1.0 if units[layout.COOLDOWN_1 + s, h] == 0 and units[layout.MANA, h] >= table[row, at + S_MANA] else 0.0
    out[11] = units[layout.COOLDOWN_HEAL, h] / MEND_COOLDOWN
    out[15 + int(table[row, H_ARCHETYPE])] = 1.0
    out[21] = units[layout.KILLS, h] / 10.0
    out[22] = units[layout.DEATHS, h] / 10.0
    for i in range(2 * size):
        own = units[layout.CAMP, i] == camp
        out[23 if own else 24] += units[layout.KILLS, i] / 10.0
        out[37 if own else 38] += units[layout.ALIVE, i] / size
    for which in range(layout.STRUCTURES):
        s = 2 * size + camp * layout.STRUCTURES + which
        out[25 + which] = units[layout.HP, s] / units[layout.MAX_HP, s]
        s = 2 * size + (1 - camp) * layout.STRUCTURES + which
        out[28 + which] = units[layout.HP, s] / units[layout.MAX_HP, s]
    x, y = int(units[layout.X, h]), int(units[layout.Y, h])
    out[31] = 1.0 if at_fountain(units, h) else 0.0
    out[32] = 1.0 if bush_at(x, y) >= 0 else 0.0
    out[33] = 1.0 if units[layout.SEEN, h] == 1 else 0.0
    out[34] = 1.0 - units[layout.CAST_LEFT, h] / RECALL_TICKS if units[layout.CAST, h] == layout.RECALLING else 0.0
    out[35] = units[layout.RESPAWN, h] / _TIME
    out[36] = 1.0 if is_free(units, h) else 0.0
    out[39] = (x if camp == 0 else layout.LENGTH - x) / layout.LENGTH
    out[40] = (y if camp == 0 else layout.WIDTH - y) / layout.WIDTH


@inner
def write_masks(units: Ints32, match: Ints32, table: Ints32, h: int, mask: Bools, target_mask: Bools) -> None:
    """Write `mask`, the options of all heads concatenated, and `target_mask[3, U]`, the targets of attack, skill 1 and skill 3.

    Every head has at least one option: an unused head has its first.
    """
    rows = target_mask.shape[1]
    mask[:] = False
    target_mask[:] = False
    move, skill, target = layout.RECALL + 1, layout.RECALL + 1 + layout.DIRECTIONS, layout.RECALL + 1 + 2 * layout.DIRECTIONS
    mask[0] = mask[move] = mask[skill] = True
    found_any = False
    if is_free(units, h):
        casts_1 = is_allowed(units, match, table, h, layout.SKILL_1)
        casts_3 = is_allowed(units, match, table, h, layout.SKILL_3)
        for row in range(rows):
            j = slot_of_row(match, h, row)
            if units[layout.ALIVE, j] == 0:
                continue
            if can_attack(units, match, h, j):
                target_mask[0, row] = mask[layout.STRIKE] = mask[target + row] = found_any = True
            if casts_1 and can_target(units, match, table, h, 1, j):
                target_mask[1, row] = mask[layout.SKILL_1] = mask[target + row] = found_any = True
            if casts_3 and can_target(units, match, table, h, 3, j):
                target_mask[2, row] = mask[layout.SKILL_3] = mask[target + row] = found_any = True
        mask[layout.MOVE] = True
        for d in range(layout.DIRECTIONS):
            mask[move + d] = True
        if is_allowed(units, match, table, h, layout.SKILL_2):
            mask[layout.SKILL_2] = True
            for d in range(layout.DIRECTIONS):
                mask[skill + d] = True
        mask[layout.MEND] = is_allowed(units, match, table, h, layout.MEND)
        mask[layout.RECALL] = is_allowed(units, match, table, h, layout.RECALL)
    if not found_any:
        mask[target] = True
