"""Memory layout of the state and the actions: state fields, unit slots, action heads, and the dimensions of the field.

The state of M matches is two int32 arrays, `units[M, FIELDS, U]` and `match[M, MATCH_FIELDS]`; a match is saved, hashed and copied
as bytes. Lengths are millimetres, times are ticks, and all arithmetic is on integers: the same on every machine.

Unit slots, for N heroes a side: heroes of camp 0, heroes of camp 1, then for each camp outer tower, inner tower, base, then `CREEPS`
slots for creeps of camp 0 and as many for camp 1.
"""

from __future__ import annotations

from typing import Final

# -- the field --------------------------------------------------------------------------------------------------------

CAMP_NAMES: Final = ("blue", "red")
"""Names of camp 0 and camp 1."""
RULES: Final = 1
"""Version of the rules; recordings and saved states of other versions are rejected."""
TICKS_PER_SECOND: Final = 15
LENGTH: Final = 100_000
WIDTH: Final = 36_000
LANE_Y: Final = WIDTH // 2
BASE_X: Final = 7_000
INNER_X: Final = 21_000
OUTER_X: Final = 36_000
"""Positions of camp 0; those of camp 1 are rotated by 180 degrees: x → LENGTH − x, y → WIDTH − y."""
BUSHES: Final = ((42_000, 7_000), (58_000, 29_000), (42_000, 29_000), (58_000, 7_000))
BUSH_RADIUS: Final = 4_000

# -- kinds ------------------------------------------------------------------------------------------------------------

HERO, TOWER, BASE, MELEE, RANGED, SIEGE = range(6)
KINDS: Final = ("hero", "tower", "base", "melee creep", "ranged creep", "siege creep")

CREEPS: Final = 12
"""Slots for creeps of one camp."""
STRUCTURES: Final = 3
OUTER, INNER, CORE = range(3)

# -- fields of a unit -------------------------------------------------------------------------------------------------

(
    ALIVE,  # 1; 0: empty slot, dead hero or destroyed building
    KIND,
    CAMP,
    X,
    Y,
    HP,
    MAX_HP,
    MANA,
    MAX_MANA,
    ATTACK,  # damage of one attack, before armour
    ARMOUR,  # of incoming damage 100 / (100 + armour) remains
    RANGE,  # between the edges of attacker and target
    SPEED,  # per tick
    PERIOD,  # ticks per attack
    READY,  # ticks until the next attack
    TARGET,  # slot under attack, or -1
    STUN,  # ticks left
    SLOW,  # ticks left
    SLOW_BY,  # percent
    SHIELD,
    SHIELD_LEFT,
    SEEN,  # whether the enemy camp sees it: 1 or 0
    RADIUS,
    # heroes only
    HERO_ROW,  # row of the hero table
    LEVEL,
    XP,
    GOLD,  # not yet spent
    EARNED,  # gold in total
    ITEMS,
    COOLDOWN_1,
    COOLDOWN_2,
    COOLDOWN_3,
    COOLDOWN_HEAL,
    CAST,  # 0, or which skill (1, 2, 3), or RECALLING
    CAST_LEFT,  # ticks until it takes effect
    CAST_TARGET,  # slot, or -1
    CAST_X,  # area: position; line: direction in 1/1024
    CAST_Y,
    RESPAWN,  # ticks until a dead hero respawns
    HURT,  # ticks since the last damage by an enemy hero, at most HURT_MEMORY
    HURT_BY,  # bit mask of the enemy heroes that did damage in the last ten seconds
    AGGRO,  # ticks for which towers and creeps prefer it as a target after it attacked a hero
    KILLS,
    DEATHS,
    ASSISTS,
    LAST_HITS,
    DAMAGE,  # to heroes, in total
    DAMAGE_BUILDINGS,
    TAKEN,  # from heroes, in total
    HEALED,
    ILLEGAL,  # number of illegal actions
    BORN,  # tick of its creation
) = range(52)
FIELDS: Final = 52
STATISTICS: Final = {
    "kills": KILLS,
    "deaths": DEATHS,
    "assists": ASSISTS,
    "last_hits": LAST_HITS,
    "gold": EARNED,
    "level": LEVEL,
    "damage": DAMAGE,
    "damage_buildings": DAMAGE_BUILDINGS,
    "taken": TAKEN,
    "illegal": ILLEGAL,
}
"""Fields of a hero in the results of matches, by the names that they have there."""
RECALLING: Final = 4

# -- fields of a match ------------------------------------------------------------------------------------------------

(
    TICK,
    OVER,  # 1: a base fell, or the time limit passed
    WINNER,  # camp, or -1
    WAVES,  # number of waves so far
    SIZE,  # heroes per camp
    LIMIT,  # time limit in ticks
    EVERY,  # ticks per decision
    SEED,
) = range(8)
MATCH_FIELDS: Final = 8

# -- actions ----------------------------------------------------------------------------------------------------------

NOTHING, MOVE, STRIKE, SKILL_1, SKILL_2, SKILL_3, MEND, RECALL = range(8)
BUTTONS: Final = ("nothing", "move", "attack", "skill 1", "skill 2", "skill 3", "heal", "recall")
WHAT, MOVE_DIRECTION, SKILL_DIRECTION, TARGET_UNIT = range(4)
HEADS: Final = ("what", "move", "skill", "target")
DIRECTIONS: Final = 16
"""Direction d is d · 22.5 degrees from the direction of the enemy base, seen from the hero's camp."""
USES: Final = (
    (1, 0, 0, 0),  # nothing
    (1, 1, 0, 0),  # move
    (1, 0, 0, 1),  # attack
    (1, 0, 0, 1),  # skill 1: at a unit
    (1, 0, 1, 0),  # skill 2: along a line
    (1, 0, 0, 1),  # skill 3: an area around a unit
    (1, 0, 0, 0),  # heal
    (1, 0, 0, 0),  # recall
)
"""Sub-action mask: the heads that each button uses."""
AIMED: Final = (STRIKE, SKILL_1, SKILL_3)
"""Buttons with a target, in the order of the rows of `target_mask`."""


def units_of(size: int) -> int:
    """Number of unit slots of a match; also of the rows of an observation and the options of the target head."""
    return 2 * (size + STRUCTURES + CREEPS)


def options_of(size: int) -> tuple[int, ...]:
    """Number of options of each action head."""
    return len(BUTTONS), DIRECTIONS, DIRECTIONS, units_of(size)


def structure_slot(size: int, camp: int, which: int) -> int:
    return 2 * size + camp * STRUCTURES + which
