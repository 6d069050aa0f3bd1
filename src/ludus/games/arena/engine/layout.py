"""Where everything stands: fields of the state, slots of the units, heads of the action, features of the observation.

The state of M matches is two int32 arrays and nothing else: `units[M, FIELDS, U]` and `match[M, MATCH_FIELDS]`, so that saving,
hashing and copying a match is a matter of bytes. Lengths are millimetres, times are ticks, and all arithmetic is on integers: the
same on every machine.

Slots of the units, for N heroes a side: heroes of camp 0, heroes of camp 1, then for either camp outer tower, inner tower, base,
then `CREEPS` places for creeps of camp 0, and as many for camp 1.
"""

from __future__ import annotations

from typing import Final

# -- the field --------------------------------------------------------------------------------------------------------

RULES: Final = 1
"""Of the rules; recordings and saved states of other rules are refused."""
TICKS_PER_SECOND: Final = 15
LENGTH: Final = 100_000
WIDTH: Final = 36_000
LANE_Y: Final = WIDTH // 2
BASE_X: Final = 7_000
INNER_X: Final = 21_000
OUTER_X: Final = 36_000
"""Of camp 0; camp 1 has everything turned by 180 degrees: x → LENGTH − x, y → WIDTH − y."""
BUSHES: Final = ((42_000, 7_000), (58_000, 29_000), (42_000, 29_000), (58_000, 7_000))
BUSH_RADIUS: Final = 4_000

# -- kinds ------------------------------------------------------------------------------------------------------------

HERO, TOWER, BASE, MELEE, RANGED, SIEGE = range(6)
KINDS: Final = ("hero", "tower", "base", "melee creep", "ranged creep", "siege creep")

CREEPS: Final = 12
"""Places for creeps of one camp."""
STRUCTURES: Final = 3
OUTER, INNER, CORE = range(3)

# -- fields of a unit -------------------------------------------------------------------------------------------------

(
    ALIVE,  # 1, or 0: the slot is empty, the hero dead, the tower a ruin
    KIND,
    CAMP,
    X,
    Y,
    HP,
    MAX_HP,
    MANA,
    MAX_MANA,
    ATTACK,  # damage of one blow, before armour
    ARMOUR,  # of incoming damage 100 / (100 + armour) remains
    RANGE,  # between the edges of attacker and target
    SPEED,  # per tick
    PERIOD,  # ticks from blow to blow
    READY,  # ticks until the next blow is possible
    TARGET,  # slot that is being attacked, or -1
    STUN,  # ticks left
    SLOW,  # ticks left
    SLOW_BY,  # percent
    SHIELD,
    SHIELD_LEFT,
    SEEN,  # by the other camp: 1 or 0
    RADIUS,
    # heroes only
    HERO_ROW,  # in the table of heroes
    LEVEL,
    XP,
    GOLD,  # not spent yet
    EARNED,  # gold in all
    ITEMS,
    COOLDOWN_1,
    COOLDOWN_2,
    COOLDOWN_3,
    COOLDOWN_HEAL,
    CAST,  # 0, or which skill (1, 2, 3), or RECALLING
    CAST_LEFT,  # ticks until it takes effect
    CAST_TARGET,  # slot, or -1
    CAST_X,  # of an area: where; of a line: its direction, in 1/1024
    CAST_Y,
    RESPAWN,  # ticks until a dead hero is back
    HURT,  # ticks since an enemy hero did damage to it; many if never
    HURT_BY,  # bits of the slots of enemy heroes that did, in the last ten seconds
    AGGRO,  # ticks for which towers and creeps remember that it attacked a hero
    KILLS,
    DEATHS,
    ASSISTS,
    LAST_HITS,
    DAMAGE,  # to heroes, in all
    DAMAGE_BUILDINGS,
    TAKEN,  # from heroes, in all
    HEALED,
    ILLEGAL,  # actions that were not allowed
    BORN,  # tick at which it came to be
) = range(52)
FIELDS: Final = 52
RECALLING: Final = 4

# -- fields of a match ------------------------------------------------------------------------------------------------

(
    TICK,
    OVER,  # 1: a base has fallen, or time is up
    WINNER,  # camp, or -1
    WAVES,  # that have come
    SIZE,  # heroes of a camp
    LIMIT,  # tick at which time is up
    EVERY,  # ticks from decision to decision
    SEED,
) = range(8)
MATCH_FIELDS: Final = 8

# -- actions ----------------------------------------------------------------------------------------------------------

NOTHING, MOVE, STRIKE, SKILL_1, SKILL_2, SKILL_3, MEND, RECALL = range(8)
BUTTONS: Final = ("nothing", "move", "attack", "skill 1", "skill 2", "skill 3", "heal", "recall")
WHAT, MOVE_DIRECTION, SKILL_DIRECTION, TARGET_UNIT = range(4)
HEADS: Final = ("what", "move", "skill", "target")
DIRECTIONS: Final = 16
"""Direction d is d · 22.5 degrees from the way to the enemy's base, as the hero's own camp sees the field."""
USES: Final = (
    (1, 0, 0, 0),  # nothing
    (1, 1, 0, 0),  # move
    (1, 0, 0, 1),  # attack
    (1, 0, 0, 1),  # skill 1: at a unit
    (1, 0, 1, 0),  # skill 2: along a line
    (1, 0, 0, 1),  # skill 3: an area around where a unit stands
    (1, 0, 0, 0),  # heal
    (1, 0, 0, 0),  # recall
)
"""Sub-action mask: which heads matter for which button."""
AIMED: Final = (STRIKE, SKILL_1, SKILL_3)
"""Buttons with a target, in the order of the rows of `target_mask`."""


def heroes_of(size: int) -> int:
    """In a match of `size` against `size`."""
    return 2 * size


def units_of(size: int) -> int:
    """Slots of a match of `size` against `size`; also the rows of an observation, and the options of the target."""
    return 2 * (size + STRUCTURES + CREEPS)


def hero_slot(size: int, camp: int, i: int) -> int:
    return camp * size + i


def structure_slot(size: int, camp: int, which: int) -> int:
    return 2 * size + camp * STRUCTURES + which


def creep_slot(size: int, camp: int, i: int) -> int:
    return 2 * (size + STRUCTURES) + camp * CREEPS + i
