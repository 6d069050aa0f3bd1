"""Game rules: kernels that play one tick of one match on `units[FIELDS, U]` and `match[MATCH_FIELDS]` (fields: `layout.py`).

All orders of a tick read the same state; their effects are collected in `pending[PENDING, U]` and applied at its end. No camp and no
slot moves first, so a match with swapped camps is the same match rotated.
"""

from __future__ import annotations

from ludus.core.types import Ints32
from ludus.games.arena.engine import heroes
from ludus.games.arena.engine.geometry import (
    DX,
    DY,
    ONE,
    bush_at,
    clamp_x,
    clamp_y,
    distance,
    divide_towards_zero,
    edge_distance,
    integer_root,
    noise,
    within,
)
from ludus.games.arena.engine.jit import inner
from ludus.games.arena.engine.layout import (
    AGGRO,
    ALIVE,
    ARMOUR,
    ASSISTS,
    ATTACK,
    BASE,
    BASE_X,
    BORN,
    CAMP,
    CAST,
    CAST_LEFT,
    CAST_TARGET,
    CAST_X,
    CAST_Y,
    COOLDOWN_1,
    COOLDOWN_HEAL,
    CORE,
    CREEPS,
    DAMAGE,
    DAMAGE_BUILDINGS,
    DEATHS,
    EARNED,
    FIELDS,
    GOLD,
    HEALED,
    HERO,
    HERO_ROW,
    HP,
    HURT,
    HURT_BY,
    INNER_X,
    ITEMS,
    KILLS,
    KIND,
    LANE_Y,
    LAST_HITS,
    LENGTH,
    LEVEL,
    LIMIT,
    MANA,
    MAX_HP,
    MAX_MANA,
    MELEE,
    MEND,
    MOVE,
    MOVE_DIRECTION,
    NOTHING,
    OUTER_X,
    OVER,
    PERIOD,
    RADIUS,
    RANGE,
    RANGED,
    READY,
    RECALL,
    RECALLING,
    RESPAWN,
    SEED,
    SEEN,
    SHIELD,
    SHIELD_LEFT,
    SIEGE,
    SIZE,
    SKILL_1,
    SKILL_2,
    SKILL_3,
    SKILL_DIRECTION,
    SLOW,
    SLOW_BY,
    SPEED,
    STRIKE,
    STRUCTURES,
    STUN,
    TAKEN,
    TARGET,
    TICK,
    TICKS_PER_SECOND,
    TOWER,
    WAVES,
    WHAT,
    WINNER,
    XP,
    X,
    Y,
)

SECOND = TICKS_PER_SECOND
FIRST_WAVE = 3 * SECOND
WAVE_EVERY = 20 * SECOND
MAX_LEVEL = 12
MAX_ITEMS = 6
SIGHT = 14_000
CREEP_SIGHT = 9_000
TOWER_SIGHT = 13_000
BUSH_SIGHT = 3_000
"""Sight range towards units in a bush, except from the same bush."""
CHASE = 15_000
"""Maximum distance of an attack target."""
FOUNTAIN = 6_500
FOUNTAIN_AFTER = 3 * SECOND
"""The fountain heals heroes without hero damage for this time."""
EXPERIENCE = 15_000
"""Radius in which heroes share the experience of a dead enemy."""
CREEP_AGGRO = 5_500
RECALL_TICKS = 4 * SECOND
MEND_COOLDOWN = 60 * SECOND
HURT_MEMORY = 10 * SECOND
AGGRO_TICKS = 3 * SECOND
UNGUARDED = 55
"""Percent of a hero's damage to a building while none of its creeps is near."""
GUARD = 10_000

# Rows of `pending[PENDING, U]`.
P_DAMAGE, P_BEST, P_BY, P_BITS, P_HEAL, P_STUN, P_SLOW, P_SLOW_BY, P_SHIELD, P_SHIELD_TICKS, P_HERO_DAMAGE, P_DIES, P_X, P_Y = (
    range(14)
)
PENDING = 14


# -- start ------------------------------------------------------------------------------------------------------------


@inner
def camp_x(camp: int, x: int) -> int:
    """Convert an x coordinate between the view of `camp` and that of camp 0."""
    return x if camp == 0 else LENGTH - x


@inner
def begin_match(units: Ints32, match: Ints32, table: Ints32, lineup: Ints32) -> None:
    """Reset a match. `match` already holds size, seed, limit and decision length; `lineup[2 · size]` holds hero table rows."""
    size = int(match[SIZE])
    units[:] = 0
    match[TICK] = match[OVER] = match[WAVES] = 0
    match[WINNER] = -1
    for i in range(units.shape[1]):
        units[TARGET, i] = units[CAST_TARGET, i] = -1
        units[HURT, i] = HURT_MEMORY
    for h in range(2 * size):
        units[ALIVE, h] = 1
        units[KIND, h] = HERO
        units[CAMP, h] = h // size
        units[HERO_ROW, h] = lineup[h]
        units[LEVEL, h] = 1
        units[RADIUS, h] = 450
        units[GOLD, h] = 0
        update_stats(units, table, h)
        units[HP, h] = units[MAX_HP, h]
        units[MANA, h] = units[MAX_MANA, h]
        units[X, h], units[Y, h] = spawn_x(match, h), spawn_y(match, h)
    for camp in range(2):
        for which in range(STRUCTURES):
            s = 2 * size + camp * STRUCTURES + which
            units[ALIVE, s] = units[SEEN, s] = 1
            units[CAMP, s] = camp
            units[KIND, s] = BASE if which == CORE else TOWER
            units[X, s] = camp_x(camp, BASE_X if which == CORE else INNER_X if which == 1 else OUTER_X)
            units[Y, s] = LANE_Y
            units[HP, s] = units[MAX_HP, s] = 900 if which == CORE else 900 if which == 1 else 800
            units[RADIUS, s] = 1_800 if which == CORE else 1_000
            units[ARMOUR, s] = 20
            units[ATTACK, s] = 90
            units[RANGE, s] = 7_000
            units[PERIOD, s] = SECOND
    update_visibility(units, match)


@inner
def spawn_x(match: Ints32, h: int) -> int:
    return camp_x(h // int(match[SIZE]), 3_500)


@inner
def spawn_y(match: Ints32, h: int) -> int:
    """Spawn point next to the base, different for each hero, with noise that is equal for both camps."""
    size = int(match[SIZE])
    i = h % size
    spread = (2 * i - (size - 1)) * (4_500 // max(3, size)) + noise(int(match[SEED]), int(match[TICK]), i) % 801 - 400
    return clamp_y(LANE_Y + (spread if h < size else -spread))


@inner
def update_stats(units: Ints32, table: Ints32, h: int) -> None:
    """Set the attributes of a hero from its level and items; missing health and mana stay the same."""
    row, level, items = units[HERO_ROW, h], units[LEVEL, h] - 1, units[ITEMS, h]
    hp = table[row, heroes.H_HP] + level * table[row, heroes.H_HP_GROWTH] + items * table[row, heroes.H_ITEM_HP]
    mana = table[row, heroes.H_MANA] + level * table[row, heroes.H_MANA_GROWTH]
    units[HP, h] += hp - units[MAX_HP, h]
    units[MANA, h] += mana - units[MAX_MANA, h]
    units[MAX_HP, h] = hp
    units[MAX_MANA, h] = mana
    units[ATTACK, h] = (
        table[row, heroes.H_ATTACK] + level * table[row, heroes.H_ATTACK_GROWTH] + items * table[row, heroes.H_ITEM_ATTACK]
    )
    units[ARMOUR, h] = (
        table[row, heroes.H_ARMOUR] + level * table[row, heroes.H_ARMOUR_GROWTH] + items * table[row, heroes.H_ITEM_ARMOUR]
    )
    units[RANGE, h] = table[row, heroes.H_RANGE]
    units[SPEED, h] = table[row, heroes.H_SPEED]
    units[PERIOD, h] = table[row, heroes.H_PERIOD]


# -- legality ---------------------------------------------------------------------------------------------------------


@inner
def is_building(units: Ints32, i: int) -> bool:
    return bool(units[KIND, i] == TOWER or units[KIND, i] == BASE)


@inner
def is_vulnerable(units: Ints32, match: Ints32, i: int) -> bool:
    """Whether a unit can be damaged: buildings only after all buildings in front of them are destroyed."""
    if not is_building(units, i):
        return True
    first = 2 * int(match[SIZE]) + int(units[CAMP, i]) * STRUCTURES
    for s in range(first, i):
        if units[ALIVE, s] == 1:
            return False
    return True


@inner
def can_attack(units: Ints32, match: Ints32, h: int, j: int) -> bool:
    """Whether hero h may attack unit j."""
    return bool(
        units[ALIVE, j] == 1
        and units[CAMP, j] != units[CAMP, h]
        and units[SEEN, j] == 1
        and within(units, h, j, CHASE)
        and is_vulnerable(units, match, j)
    )


@inner
def can_target(units: Ints32, match: Ints32, table: Ints32, h: int, skill: int, j: int) -> bool:
    """Whether unit j is a target of skill 1 or 3 of hero h: in range, visible, no building; allied heroes for an ally skill."""
    at = heroes.SKILLS_AT + (skill - 1) * heroes.SKILL_COLUMNS
    row = units[HERO_ROW, h]
    if units[ALIVE, j] == 0 or is_building(units, j) or not within(units, h, j, int(table[row, at + heroes.S_RANGE])):
        return False
    if table[row, at + heroes.S_ALLY] == 1:
        return bool(units[CAMP, j] == units[CAMP, h] and units[KIND, j] == HERO)
    return bool(units[CAMP, j] != units[CAMP, h] and units[SEEN, j] == 1)


@inner
def is_free(units: Ints32, h: int) -> bool:
    """Whether a hero is alive, not stunned and not casting. (A recall can be cancelled.)"""
    return bool(units[ALIVE, h] == 1 and units[STUN, h] == 0 and (units[CAST, h] == 0 or units[CAST, h] == RECALLING))


@inner
def can_cast(units: Ints32, table: Ints32, h: int, skill: int) -> bool:
    at = heroes.SKILLS_AT + (skill - 1) * heroes.SKILL_COLUMNS
    row = units[HERO_ROW, h]
    return bool(is_free(units, h) and units[COOLDOWN_1 + skill - 1, h] == 0 and units[MANA, h] >= table[row, at + heroes.S_MANA])


@inner
def is_allowed(units: Ints32, match: Ints32, table: Ints32, h: int, what: int) -> bool:
    """Whether a button is allowed, regardless of its target."""
    if what == NOTHING:
        return True
    if not is_free(units, h):
        return False
    if what == MOVE or what == STRIKE:
        return True
    if what == MEND:
        return bool(units[COOLDOWN_HEAL, h] == 0 and units[HP, h] < units[MAX_HP, h])
    if what == RECALL:
        return not at_fountain(units, h)
    return can_cast(units, table, h, what - SKILL_1 + 1)


@inner
def at_fountain(units: Ints32, h: int) -> bool:
    dx = int(units[X, h]) - camp_x(int(units[CAMP, h]), BASE_X)
    dy = int(units[Y, h]) - LANE_Y
    return dx * dx + dy * dy <= FOUNTAIN * FOUNTAIN


@inner
def is_legal(units: Ints32, match: Ints32, table: Ints32, h: int, order: Ints32, target: int) -> bool:
    """Whether a complete order is legal; `target` is its target slot."""
    what = int(order[WHAT])
    if what < 0 or what > RECALL or not is_allowed(units, match, table, h, what):
        return False
    if what == MOVE:
        return bool(0 <= order[MOVE_DIRECTION] < DX.shape[0])
    if what == SKILL_2:
        return bool(0 <= order[SKILL_DIRECTION] < DX.shape[0])
    if what == STRIKE or what == SKILL_1 or what == SKILL_3:
        if target < 0 or target >= units.shape[1]:
            return False
        if what == STRIKE:
            return can_attack(units, match, h, target)
        return can_target(units, match, table, h, what - SKILL_1 + 1, target)
    return True


# -- damage -----------------------------------------------------------------------------------------------------------


@inner
def add_hit(units: Ints32, match: Ints32, pending: Ints32, by: int, victim: int, amount: int) -> None:
    """Add the damage of one hit of unit `by` to `pending`."""
    if units[KIND, by] == HERO:
        if is_building(units, victim) and not is_guarded(units, match, by, victim):
            amount = amount * UNGUARDED // 100
    elif units[KIND, by] == SIEGE and is_building(units, victim):
        amount = amount * 2
    elif (units[KIND, by] == MELEE or units[KIND, by] == RANGED) and units[KIND, victim] == HERO:
        amount = amount * 60 // 100
    amount = max(1, amount * 100 // (100 + int(units[ARMOUR, victim])))
    pending[P_DAMAGE, victim] += amount
    if units[KIND, by] != HERO:
        return
    pending[P_HERO_DAMAGE, victim] += amount
    pending[P_BITS, victim] |= 1 << by
    if amount > pending[P_BEST, victim]:
        pending[P_BEST, victim] = amount
        pending[P_BY, victim] = by
    if units[KIND, victim] == HERO:
        units[DAMAGE, by] += amount
        units[AGGRO, by] = AGGRO_TICKS
    elif is_building(units, victim):
        units[DAMAGE_BUILDINGS, by] += amount


@inner
def is_guarded(units: Ints32, match: Ints32, by: int, building: int) -> bool:
    """Whether creeps of the attacker's camp are near the building."""
    first = 2 * (int(match[SIZE]) + STRUCTURES) + int(units[CAMP, by]) * CREEPS
    for c in range(first, first + CREEPS):
        if units[ALIVE, c] == 1 and within(units, c, building, GUARD):
            return True
    return False


# -- orders of heroes -------------------------------------------------------------------------------------------------


@inner
def speed_of(units: Ints32, i: int) -> int:
    slowed = int(units[SLOW_BY, i]) if units[SLOW, i] > 0 else 0
    return int(units[SPEED, i]) * (100 - slowed) // 100


@inner
def step_towards(units: Ints32, pending: Ints32, i: int, x: int, y: int, stop: int) -> None:
    """Move for one tick towards a point, up to the distance `stop` from it."""
    dx, dy = x - int(units[X, i]), y - int(units[Y, i])
    far = max(1, integer_root(dx * dx + dy * dy))
    go = min(speed_of(units, i), far - stop)
    if go > 0:
        pending[P_X, i] = clamp_x(int(units[X, i]) + divide_towards_zero(dx * go, far))
        pending[P_Y, i] = clamp_y(int(units[Y, i]) + divide_towards_zero(dy * go, far))


@inner
def strike_or_follow(units: Ints32, match: Ints32, pending: Ints32, i: int, j: int) -> None:
    units[TARGET, i] = j
    if within(units, i, j, int(units[RANGE, i])):
        if units[READY, i] == 0:
            units[READY, i] = units[PERIOD, i]
            add_hit(units, match, pending, i, j, int(units[ATTACK, i]))
    elif units[SPEED, i] > 0:
        reach = int(units[RANGE, i]) + int(units[RADIUS, i]) + int(units[RADIUS, j])
        step_towards(units, pending, i, int(units[X, j]), int(units[Y, j]), reach - 50)


@inner
def apply_order(units: Ints32, match: Ints32, table: Ints32, pending: Ints32, h: int, order: Ints32, target: int) -> None:
    """Carry out a hero's order for one tick; an order that has become impossible is ignored."""
    units[TARGET, h] = -1
    if units[ALIVE, h] == 0 or units[STUN, h] > 0:
        return
    what = int(order[WHAT])
    if units[CAST, h] == RECALLING and what != NOTHING and what != RECALL:
        units[CAST, h] = units[CAST_LEFT, h] = 0
    if units[CAST, h] != 0:
        return
    sign = 1 if units[CAMP, h] == 0 else -1
    if what == MOVE:
        d, speed = int(order[MOVE_DIRECTION]), speed_of(units, h)
        pending[P_X, h] = clamp_x(int(units[X, h]) + sign * divide_towards_zero(speed * int(DX[d]), ONE))
        pending[P_Y, h] = clamp_y(int(units[Y, h]) + sign * divide_towards_zero(speed * int(DY[d]), ONE))
    elif what == STRIKE:
        if can_attack(units, match, h, target):
            strike_or_follow(units, match, pending, h, target)
    elif what == MEND:
        if is_allowed(units, match, table, h, MEND):
            units[COOLDOWN_HEAL, h] = MEND_COOLDOWN
            pending[P_HEAL, h] += 60 + int(units[MAX_HP, h]) * 15 // 100
    elif what == RECALL:
        if is_allowed(units, match, table, h, RECALL):
            units[CAST, h] = RECALLING
            units[CAST_LEFT, h] = RECALL_TICKS
    elif SKILL_1 <= what <= SKILL_3:
        begin_skill(units, match, table, h, what - SKILL_1 + 1, int(order[SKILL_DIRECTION]), target)


@inner
def begin_skill(units: Ints32, match: Ints32, table: Ints32, h: int, skill: int, direction: int, target: int) -> None:
    if not can_cast(units, table, h, skill) or (skill != 2 and not can_target(units, match, table, h, skill, target)):
        return
    row, at = units[HERO_ROW, h], heroes.SKILLS_AT + (skill - 1) * heroes.SKILL_COLUMNS
    units[MANA, h] -= table[row, at + heroes.S_MANA]
    units[COOLDOWN_1 + skill - 1, h] = table[row, at + heroes.S_COOLDOWN]
    units[CAST, h] = skill
    units[CAST_LEFT, h] = table[row, at + heroes.S_WINDUP]
    units[CAST_TARGET, h] = -1
    if skill == 2:
        sign = 1 if units[CAMP, h] == 0 else -1
        units[CAST_X, h] = sign * int(DX[direction])
        units[CAST_Y, h] = sign * int(DY[direction])
    else:
        units[CAST_TARGET, h] = target
        units[CAST_X, h] = units[X, target]
        units[CAST_Y, h] = units[Y, target]


# -- skills take effect -----------------------------------------------------------------------------------------------


@inner
def skill_power(units: Ints32, table: Ints32, h: int, at: int) -> int:
    row = units[HERO_ROW, h]
    grown = int(table[row, at + heroes.S_DAMAGE]) + (int(units[LEVEL, h]) - 1) * int(table[row, at + heroes.S_GROWTH])
    return grown + int(units[ATTACK, h]) * int(table[row, at + heroes.S_RATIO]) // 100


@inner
def apply_skill(units: Ints32, match: Ints32, table: Ints32, pending: Ints32, h: int, at: int, j: int) -> None:
    """Add the effect of a skill of hero h on unit j to `pending`."""
    row = units[HERO_ROW, h]
    effect, ticks = int(table[row, at + heroes.S_EFFECT]), int(table[row, at + heroes.S_TICKS])
    amount = skill_power(units, table, h, at)
    if effect == heroes.HEALS:
        healed = min(amount, int(units[MAX_HP, j]) - int(units[HP, j]))
        pending[P_HEAL, j] += amount
        units[HEALED, h] += max(0, healed)
        return
    add_hit(units, match, pending, h, j, amount)
    if effect == heroes.STUNS:
        pending[P_STUN, j] = max(pending[P_STUN, j], ticks)
    elif effect == heroes.SLOWS:
        pending[P_SLOW, j] = max(pending[P_SLOW, j], ticks)
        pending[P_SLOW_BY, j] = max(pending[P_SLOW_BY, j], table[row, at + heroes.S_AMOUNT])
    elif effect == heroes.SHIELDS:
        pending[P_SHIELD, h] = max(pending[P_SHIELD, h], table[row, at + heroes.S_AMOUNT])
        pending[P_SHIELD_TICKS, h] = max(pending[P_SHIELD_TICKS, h], ticks)


@inner
def release_skill(units: Ints32, match: Ints32, table: Ints32, pending: Ints32, h: int) -> None:
    """Apply the skill or recall of a hero whose wind-up has ended."""
    skill = int(units[CAST, h])
    units[CAST, h] = 0
    if skill == RECALLING:
        pending[P_X, h], pending[P_Y, h] = spawn_x(match, h), spawn_y(match, h)
        return
    row, at = units[HERO_ROW, h], heroes.SKILLS_AT + (skill - 1) * heroes.SKILL_COLUMNS
    if skill == 1:
        j = int(units[CAST_TARGET, h])
        # Misses targets that moved away or died.
        if units[ALIVE, j] == 1 and within(units, h, j, int(table[row, at + heroes.S_RANGE]) + 1_500):
            if table[row, at + heroes.S_EFFECT] == heroes.DASHES:
                contact = int(units[RADIUS, h]) + int(units[RADIUS, j])
                far = max(1, distance(units, h, j))
                go = max(0, far - contact)
                pending[P_X, h] = int(units[X, h]) + divide_towards_zero((int(units[X, j]) - int(units[X, h])) * go, far)
                pending[P_Y, h] = int(units[Y, h]) + divide_towards_zero((int(units[Y, j]) - int(units[Y, h])) * go, far)
            apply_skill(units, match, table, pending, h, at, j)
        return
    if skill == 2 and table[row, at + heroes.S_EFFECT] == heroes.DASHES:
        reach = int(table[row, at + heroes.S_RANGE])
        pending[P_X, h] = clamp_x(int(units[X, h]) + divide_towards_zero(reach * int(units[CAST_X, h]), ONE))
        pending[P_Y, h] = clamp_y(int(units[Y, h]) + divide_towards_zero(reach * int(units[CAST_Y, h]), ONE))
    helps = table[row, at + heroes.S_ALLY] == 1
    for j in range(units.shape[1]):
        if units[ALIVE, j] == 0 or is_building(units, j) or (units[CAMP, j] == units[CAMP, h]) != helps:
            continue
        if helps and units[KIND, j] != HERO:
            continue
        caught = on_line(units, table, h, at, j) if skill == 2 else in_area(units, table, h, at, j)
        if caught:
            apply_skill(units, match, table, pending, h, at, j)


@inner
def on_line(units: Ints32, table: Ints32, h: int, at: int, j: int) -> bool:
    row = units[HERO_ROW, h]
    reach, half = int(table[row, at + heroes.S_RANGE]), int(table[row, at + heroes.S_SIZE]) + int(units[RADIUS, j])
    dx, dy = int(units[X, j]) - int(units[X, h]), int(units[Y, j]) - int(units[Y, h])
    ux, uy = int(units[CAST_X, h]), int(units[CAST_Y, h])
    along, across = divide_towards_zero(dx * ux + dy * uy, ONE), divide_towards_zero(dx * uy - dy * ux, ONE)
    return -int(units[RADIUS, j]) <= along <= reach + int(units[RADIUS, j]) and abs(across) <= half


@inner
def in_area(units: Ints32, table: Ints32, h: int, at: int, j: int) -> bool:
    dx, dy = int(units[X, j]) - int(units[CAST_X, h]), int(units[Y, j]) - int(units[CAST_Y, h])
    most = int(table[units[HERO_ROW, h], at + heroes.S_SIZE]) + int(units[RADIUS, j])
    return dx * dx + dy * dy <= most * most


# -- creeps and towers ------------------------------------------------------------------------------------------------


@inner
def can_hit(units: Ints32, match: Ints32, i: int, j: int) -> bool:
    return bool(
        units[ALIVE, j] == 1 and units[CAMP, j] != units[CAMP, i] and units[SEEN, j] == 1 and is_vulnerable(units, match, j)
    )


@inner
def choose_target(units: Ints32, match: Ints32, i: int, reach: int) -> int:
    """Choose the target of a creep or tower: a hero that attacks heroes, else its last target, else the nearest, creeps first."""
    kept = int(units[TARGET, i])
    tower = is_building(units, i)
    best, best_worth = -1, 1 << 40
    for j in range(units.shape[1]):
        if not can_hit(units, match, i, j) or not within(units, i, j, reach):
            continue
        worth = edge_distance(units, i, j)
        if units[KIND, j] == HERO:
            worth += -1_000_000 if units[AGGRO, j] > 0 else (200_000 if tower else 2_000)
        if j == kept:
            worth -= 100_000
        if worth < best_worth:
            best, best_worth = j, worth
    return best


@inner
def move_creep(units: Ints32, match: Ints32, pending: Ints32, c: int) -> None:
    if units[ALIVE, c] == 0 or units[STUN, c] > 0:
        return
    target = choose_target(units, match, c, max(CREEP_AGGRO, int(units[RANGE, c])))
    units[TARGET, c] = target
    if target >= 0:
        strike_or_follow(units, match, pending, c, target)
        return
    enemy = 1 - int(units[CAMP, c])
    size = int(match[SIZE])
    goal = 2 * size + enemy * STRUCTURES + CORE
    for which in range(STRUCTURES):
        s = 2 * size + enemy * STRUCTURES + which
        if units[ALIVE, s] == 1:
            goal = s
            break
    slot = c - 2 * (size + STRUCTURES) - int(units[CAMP, c]) * CREEPS
    spread = (slot % 5 - 2) * 900
    y = LANE_Y + (spread if units[CAMP, c] == 0 else -spread)
    # Along its own track towards the building.
    away = int(units[X, goal]) - int(units[X, c])
    step_towards(units, pending, c, int(units[X, c]) + (6_000 if away > 0 else -6_000), y, 0)


@inner
def shoot_tower(units: Ints32, match: Ints32, pending: Ints32, s: int) -> None:
    if units[ALIVE, s] == 0:
        return
    target = choose_target(units, match, s, int(units[RANGE, s]))
    units[TARGET, s] = target
    if target >= 0:
        strike_or_follow(units, match, pending, s, target)


@inner
def send_wave(units: Ints32, match: Ints32) -> None:
    """Spawn a wave for each camp: three melee creeps, one ranged creep and, every other wave, a ram."""
    size, wave = int(match[SIZE]), int(match[WAVES])
    match[WAVES] = wave + 1
    number = 5 if wave % 2 == 1 else 4
    for camp in range(2):
        first = 2 * (size + STRUCTURES) + camp * CREEPS
        sent = 0
        for c in range(first, first + CREEPS):
            if sent == number:
                break
            if units[ALIVE, c] == 1:
                continue
            kind = SIEGE if sent == 4 else RANGED if sent == 3 else MELEE
            for field in range(FIELDS):
                units[field, c] = 0
            units[ALIVE, c] = 1
            units[KIND, c] = kind
            units[CAMP, c] = camp
            units[X, c] = camp_x(camp, BASE_X + 3_000 - (1_500 if kind != MELEE else 0))
            spread = ((c - first) % 5 - 2) * 900 + noise(int(match[SEED]), int(match[TICK]), c - first) % 401 - 200
            units[Y, c] = LANE_Y + (spread if camp == 0 else -spread)
            strength = 100 + 3 * wave
            hp = 300 if kind == MELEE else 210 if kind == RANGED else 480
            units[HP, c] = units[MAX_HP, c] = hp * strength // 100
            units[ATTACK, c] = (20 if kind == MELEE else 32 if kind == RANGED else 44) * strength // 100
            units[ARMOUR, c] = 30 if kind == SIEGE else 0
            units[RANGE, c] = 700 if kind == MELEE else 5_000 if kind == RANGED else 6_000
            units[SPEED, c] = 190
            units[PERIOD, c] = SECOND
            units[RADIUS, c] = 350 if kind != SIEGE else 500
            units[TARGET, c] = units[CAST_TARGET, c] = -1
            units[HURT, c] = HURT_MEMORY
            units[BORN, c] = match[TICK]
            sent += 1


# -- end of a tick ----------------------------------------------------------------------------------------------------


@inner
def apply_pending(units: Ints32, match: Ints32, table: Ints32, pending: Ints32) -> None:
    """Apply `pending`: moves, effects, damage and deaths; then update the heroes."""
    for i in range(units.shape[1]):
        if units[ALIVE, i] == 0:
            continue
        units[X, i], units[Y, i] = pending[P_X, i], pending[P_Y, i]
        units[STUN, i] = max(units[STUN, i], pending[P_STUN, i])
        if pending[P_STUN, i] > 0:
            units[CAST, i] = units[CAST_LEFT, i] = 0
        if pending[P_SLOW, i] > 0:
            units[SLOW, i] = pending[P_SLOW, i]
            units[SLOW_BY, i] = pending[P_SLOW_BY, i]
        if pending[P_SHIELD, i] > 0:
            units[SHIELD, i] = max(units[SHIELD, i], pending[P_SHIELD, i])
            units[SHIELD_LEFT, i] = pending[P_SHIELD_TICKS, i]
        take_damage(units, pending, i)
        units[HP, i] = min(int(units[MAX_HP, i]), int(units[HP, i]) + int(pending[P_HEAL, i]))
    for i in range(units.shape[1]):
        if units[ALIVE, i] == 1 and units[HP, i] <= 0:
            units[ALIVE, i] = 0
            pending[P_DIES, i] = 1
    for i in range(units.shape[1]):
        if pending[P_DIES, i] == 1:
            die(units, match, pending, i)
    for h in range(2 * int(match[SIZE])):
        update_hero(units, match, table, h)


@inner
def take_damage(units: Ints32, pending: Ints32, i: int) -> None:
    amount = int(pending[P_DAMAGE, i])
    if amount == 0:
        return
    held = min(amount, int(units[SHIELD, i]))
    units[SHIELD, i] -= held
    units[HP, i] -= amount - held
    if pending[P_BITS, i] != 0:
        units[HURT, i] = 0
        units[HURT_BY, i] |= pending[P_BITS, i]
        units[TAKEN, i] += pending[P_HERO_DAMAGE, i]
    if units[CAST, i] == RECALLING:
        units[CAST, i] = units[CAST_LEFT, i] = 0


@inner
def die(units: Ints32, match: Ints32, pending: Ints32, i: int) -> None:
    size, camp, kind = int(match[SIZE]), int(units[CAMP, i]), int(units[KIND, i])
    units[HP, i] = 0
    units[TARGET, i] = -1
    units[STUN, i] = units[SLOW, i] = units[SHIELD, i] = units[CAST, i] = units[CAST_LEFT, i] = 0
    killer = int(pending[P_BY, i]) if pending[P_BEST, i] > 0 else -1
    enemy = (1 - camp) * size
    if kind == BASE:
        # Both bases in one tick: a draw.
        match[WINNER] = -1 if match[OVER] == 1 else 1 - camp
        match[OVER] = 1
    elif kind == TOWER:
        for h in range(enemy, enemy + size):
            add_gold(units, h, 150)
        if killer >= 0:
            add_gold(units, killer, 50)
    elif kind == HERO:
        credit_kill(units, match, i, killer)
    else:
        worth = 26 if kind == MELEE else 30 if kind == RANGED else 45
        if killer >= 0:
            units[LAST_HITS, killer] += 1
            add_gold(units, killer, worth)
    experience = 34 if kind == MELEE else 40 if kind == RANGED else 60 if kind == SIEGE else 150
    if kind == HERO:
        experience = 70 + 25 * int(units[LEVEL, i])
    near = 0
    for h in range(enemy, enemy + size):
        near += int(units[ALIVE, h] == 1 and within(units, h, i, EXPERIENCE))
    for h in range(enemy, enemy + size):
        if units[ALIVE, h] == 1 and within(units, h, i, EXPERIENCE):
            units[XP, h] += experience // near
    if kind == HERO:
        units[RESPAWN, i] = (5 + 3 * int(units[LEVEL, i])) * SECOND


@inner
def credit_kill(units: Ints32, match: Ints32, i: int, killer: int) -> None:
    """Credit a hero's death. Heroes that damaged it within HURT_MEMORY get an assist, or the kill if no hero made the last hit."""
    size, camp = int(match[SIZE]), int(units[CAMP, i])
    first = (1 - camp) * size
    units[DEATHS, i] += 1
    helped = int(units[HURT_BY, i])
    for h in range(first, first + size):
        if killer < 0 and helped & (1 << h):
            killer = h
    for h in range(first, first + size):
        if h == killer:
            units[KILLS, h] += 1
            add_gold(units, h, 180 + 15 * int(units[LEVEL, i]))
        elif helped & (1 << h):
            units[ASSISTS, h] += 1
            add_gold(units, h, 90)
    units[HURT_BY, i] = 0


@inner
def add_gold(units: Ints32, h: int, gold: int) -> None:
    units[GOLD, h] += gold
    units[EARNED, h] += gold


@inner
def experience_needed(level: int) -> int:
    """Experience from `level` to the next."""
    return 60 + 22 * level


@inner
def item_price(items: int) -> int:
    return 300 + 60 * items


@inner
def update_hero(units: Ints32, match: Ints32, table: Ints32, h: int) -> None:
    """Apply level-ups, income, regeneration, respawn and the purchase of items."""
    tick = int(match[TICK])
    while units[LEVEL, h] < MAX_LEVEL and units[XP, h] >= experience_needed(int(units[LEVEL, h])):
        units[XP, h] -= experience_needed(int(units[LEVEL, h]))
        units[LEVEL, h] += 1
        update_stats(units, table, h)
        if units[ALIVE, h] == 0:
            units[HP, h] = 0
    if tick % SECOND == 0 and tick > 10 * SECOND:
        add_gold(units, h, 2)
    if units[ALIVE, h] == 0:
        units[RESPAWN, h] -= 1
        if units[RESPAWN, h] <= 0:
            units[RESPAWN, h] = 0
            units[ALIVE, h] = 1
            units[HP, h] = units[MAX_HP, h]
            units[MANA, h] = units[MAX_MANA, h]
            units[HURT, h] = HURT_MEMORY
            units[X, h], units[Y, h] = spawn_x(match, h), spawn_y(match, h)
        return
    home = at_fountain(units, h)
    if tick % SECOND == 0:
        # Not during a fight: heroes at their fountain could not be killed.
        well = home and units[HURT, h] >= FOUNTAIN_AFTER
        hp = int(table[units[HERO_ROW, h], heroes.H_REGEN]) + (int(units[MAX_HP, h]) * 12 // 100 if well else 0)
        mana = 4 + int(units[MAX_MANA, h]) // 100 + (int(units[MAX_MANA, h]) * 12 // 100 if well else 0)
        units[HP, h] = min(int(units[MAX_HP, h]), int(units[HP, h]) + hp)
        units[MANA, h] = min(int(units[MAX_MANA, h]), int(units[MANA, h]) + mana)
    if home:
        while units[ITEMS, h] < MAX_ITEMS and units[GOLD, h] >= item_price(int(units[ITEMS, h])):
            units[GOLD, h] -= item_price(int(units[ITEMS, h]))
            units[ITEMS, h] += 1
            update_stats(units, table, h)


@inner
def update_visibility(units: Ints32, match: Ints32) -> None:
    """Set SEEN of all units. Buildings are always visible; units in a bush only from near or from the same bush."""
    size = int(match[SIZE])
    for i in range(units.shape[1]):
        if units[ALIVE, i] == 0 or is_building(units, i):
            continue
        bush = bush_at(int(units[X, i]), int(units[Y, i]))
        seen = 0
        for j in range(units.shape[1]):
            if units[ALIVE, j] == 0 or units[CAMP, j] == units[CAMP, i]:
                continue
            sight = SIGHT if j < 2 * size else TOWER_SIGHT if is_building(units, j) else CREEP_SIGHT
            if bush >= 0 and bush_at(int(units[X, j]), int(units[Y, j])) != bush:
                sight = BUSH_SIGHT
            if within(units, i, j, sight):
                seen = 1
                break
        units[SEEN, i] = seen


@inner
def count_down(units: Ints32, match: Ints32) -> None:
    """Advance all timers by one tick."""
    for i in range(units.shape[1]):
        units[READY, i] = max(0, int(units[READY, i]) - 1)
        units[STUN, i] = max(0, int(units[STUN, i]) - 1)
        units[SLOW, i] = max(0, int(units[SLOW, i]) - 1)
        if units[SHIELD_LEFT, i] > 0:
            units[SHIELD_LEFT, i] -= 1
            if units[SHIELD_LEFT, i] == 0:
                units[SHIELD, i] = 0
    for h in range(2 * int(match[SIZE])):
        for field in range(COOLDOWN_1, COOLDOWN_HEAL + 1):
            units[field, h] = max(0, int(units[field, h]) - 1)
        units[AGGRO, h] = max(0, int(units[AGGRO, h]) - 1)
        units[HURT, h] = min(HURT_MEMORY, int(units[HURT, h]) + 1)
        if units[HURT, h] == HURT_MEMORY:
            units[HURT_BY, h] = 0


@inner
def tick(units: Ints32, match: Ints32, table: Ints32, pending: Ints32, orders: Ints32, targets: Ints32) -> None:
    """Play one tick. `orders[2 · size, 4]`; `targets[2 · size]`: slots, or -1."""
    size = int(match[SIZE])
    match[TICK] += 1
    count_down(units, match)
    if match[TICK] >= FIRST_WAVE and (match[TICK] - FIRST_WAVE) % WAVE_EVERY == 0:
        send_wave(units, match)
    for i in range(units.shape[1]):
        for row in range(P_X):
            pending[row, i] = 0
        pending[P_X, i], pending[P_Y, i] = units[X, i], units[Y, i]
    for h in range(2 * size):
        if units[CAST, h] != 0 and units[ALIVE, h] == 1 and units[STUN, h] == 0:
            units[CAST_LEFT, h] -= 1
            if units[CAST_LEFT, h] <= 0:
                release_skill(units, match, table, pending, h)
                continue
        apply_order(units, match, table, pending, h, orders[h], int(targets[h]))
    for s in range(2 * size, 2 * (size + STRUCTURES)):
        shoot_tower(units, match, pending, s)
    for c in range(2 * (size + STRUCTURES), units.shape[1]):
        move_creep(units, match, pending, c)
    apply_pending(units, match, table, pending)
    update_visibility(units, match)
    if match[TICK] >= match[LIMIT]:
        match[OVER] = 1


@inner
def slot_of_row(match: Ints32, h: int, row: int) -> int:
    """Return the slot of row `row` in hero h's observation and target head. Row 0 is the hero itself."""
    size = int(match[SIZE])
    camp = h // size
    i = h - camp * size
    if row < size:  # own camp: the hero first, then the others cyclically
        return camp * size + (i + row) % size
    if row < 2 * size:
        return (1 - camp) * size + row - size
    row -= 2 * size
    if row < 2 * STRUCTURES:
        which = row // STRUCTURES
        return 2 * size + (camp if which == 0 else 1 - camp) * STRUCTURES + row % STRUCTURES
    row -= 2 * STRUCTURES
    which = row // CREEPS
    return 2 * (size + STRUCTURES) + (camp if which == 0 else 1 - camp) * CREEPS + row % CREEPS
