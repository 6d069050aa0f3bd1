"""Features that bots decide on: distances, dangers, strengths. Kernels without side effects.

They use only what the camp of hero `h` sees: not enemies that are not SEEN, nor the gold and cooldowns of enemies.
"""

from __future__ import annotations

from ludus.core.types import Ints32
from ludus.games.arena.engine import heroes
from ludus.games.arena.engine.geometry import DX, DY, ONE, distance, divide_towards_zero, edge_distance, integer_root, within
from ludus.games.arena.engine.jit import inner
from ludus.games.arena.engine.layout import (
    ALIVE,
    ARMOUR,
    ATTACK,
    CAMP,
    CAST,
    CAST_LEFT,
    CAST_X,
    CAST_Y,
    COOLDOWN_1,
    CORE,
    CREEPS,
    DIRECTIONS,
    HERO_ROW,
    HP,
    LANE_Y,
    MANA,
    MAX_HP,
    PERIOD,
    RADIUS,
    RANGE,
    SEEN,
    SHIELD,
    SIZE,
    STRUCTURES,
    STUN,
    TARGET,
    X,
    Y,
)
from ludus.games.arena.engine.rules import SECOND, camp_x, can_cast, is_building, skill_power, speed_of

FIGHT = 5 * SECOND
"""Assumed duration of a fight in ticks."""
NEAR = 11_000
"""Distance within which heroes take part in a fight."""
NO_UNIT = -1


# -- positions --------------------------------------------------------------------------------------------------------


@inner
def is_visible_enemy(units: Ints32, h: int, j: int) -> bool:
    """Whether unit j is alive, an enemy of h and visible."""
    return bool(units[ALIVE, j] == 1 and units[CAMP, j] != units[CAMP, h] and units[SEEN, j] == 1)


@inner
def first_enemy(match: Ints32, h: int) -> int:
    """First slot of the enemy heroes."""
    size = int(match[SIZE])
    return size if h < size else 0


@inner
def first_ally(match: Ints32, h: int) -> int:
    size = int(match[SIZE])
    return 0 if h < size else size


@inner
def creeps_of(match: Ints32, camp: int) -> int:
    return 2 * (int(match[SIZE]) + STRUCTURES) + camp * CREEPS


@inner
def buildings_of(match: Ints32, camp: int) -> int:
    return 2 * int(match[SIZE]) + camp * STRUCTURES


@inner
def lane_x(units: Ints32, h: int, i: int) -> int:
    """Position of unit i along the lane, from the base of h's camp."""
    return camp_x(int(units[CAMP, h]), int(units[X, i]))


@inner
def health_percent(units: Ints32, i: int) -> int:
    """Health share of a unit in percent."""
    return 100 * int(units[HP, i]) // max(1, int(units[MAX_HP, i]))


@inner
def next_building(units: Ints32, match: Ints32, camp: int) -> int:
    """Return the building of a camp that can be attacked."""
    first = buildings_of(match, camp)
    for s in range(first, first + CORE):
        if units[ALIVE, s] == 1:
            return s
    return first + CORE


@inner
def front_creep(units: Ints32, match: Ints32, h: int, camp: int) -> int:
    """Return the foremost creep of `camp` that h's camp sees, or NO_UNIT."""
    first = creeps_of(match, camp)
    own = camp == units[CAMP, h]
    best, best_far = NO_UNIT, -1
    for c in range(first, first + CREEPS):
        if units[ALIVE, c] == 0 or (not own and units[SEEN, c] == 0):
            continue
        far = camp_x(camp, int(units[X, c]))
        if far > best_far:
            best, best_far = c, far
    return best


@inner
def nearest_hero(units: Ints32, match: Ints32, h: int, reach: int) -> int:
    """Return the nearest visible enemy hero within reach, or NO_UNIT."""
    first = first_enemy(match, h)
    best, best_far = NO_UNIT, reach
    for j in range(first, first + int(match[SIZE])):
        if is_visible_enemy(units, h, j):
            far = edge_distance(units, h, j)
            if far <= best_far:
                best, best_far = j, far
    return best


@inner
def count_creeps(units: Ints32, match: Ints32, camp: int, i: int, reach: int) -> int:
    """Count the creeps of a camp within reach of unit i that i's camp sees."""
    first = creeps_of(match, camp)
    own = camp == units[CAMP, i]
    found = 0
    for c in range(first, first + CREEPS):
        found += int(units[ALIVE, c] == 1 and (own or units[SEEN, c] == 1) and within(units, c, i, reach))
    return found


# -- towers -----------------------------------------------------------------------------------------------------------


@inner
def tower_over(units: Ints32, match: Ints32, h: int, x: int, y: int, spare: int) -> int:
    """Return an enemy building that can shoot hero h within `spare` of a point, or NO_UNIT."""
    first = buildings_of(match, 1 - int(units[CAMP, h]))
    for s in range(first, first + STRUCTURES):
        if units[ALIVE, s] == 0:
            continue
        dx, dy = x - int(units[X, s]), y - int(units[Y, s])
        most = int(units[RANGE, s]) + int(units[RADIUS, s]) + int(units[RADIUS, h]) + spare
        if dx * dx + dy * dy <= most * most:
            return s
    return NO_UNIT


@inner
def blows_on_creeps(units: Ints32, match: Ints32, h: int, tower: int) -> int:
    """Number of shots the tower needs for h's creeps before it targets heroes."""
    first = creeps_of(match, int(units[CAMP, h]))
    blows = 0
    for c in range(first, first + CREEPS):
        if units[ALIVE, c] == 1 and within(units, c, tower, int(units[RANGE, tower])):
            blows += 1 + int(units[HP, c]) // max(1, int(units[ATTACK, tower]))
    return blows


@inner
def is_covered(units: Ints32, match: Ints32, i: int) -> bool:
    """Whether a hero is in range of its own buildings."""
    first = buildings_of(match, int(units[CAMP, i]))
    for s in range(first, first + STRUCTURES):
        if units[ALIVE, s] == 1 and within(units, i, s, int(units[RANGE, s])):
            return True
    return False


# -- strength ---------------------------------------------------------------------------------------------------------


@inner
def after_armour(units: Ints32, j: int, amount: int) -> int:
    return amount * 100 // (100 + int(units[ARMOUR, j]))


@inner
def toughness(units: Ints32, i: int) -> int:
    """Damage before armour that kills a unit."""
    return (int(units[HP, i]) + int(units[SHIELD, i])) * (100 + int(units[ARMOUR, i])) // 100


@inner
def damage_in_fight(units: Ints32, table: Ints32, h: int, i: int) -> int:
    """Damage of hero i in a fight, before armour. Cooldowns of enemies are unknown: counts two thirds of their skills."""
    row = units[HERO_ROW, i]
    total = int(units[ATTACK, i]) * FIGHT // max(1, int(units[PERIOD, i]))
    for skill in range(3):
        at = heroes.SKILLS_AT + skill * heroes.SKILL_COLUMNS
        if units[MANA, i] < table[row, at + heroes.S_MANA]:
            continue
        worth = skill_power(units, table, i, at)
        if units[CAMP, i] != units[CAMP, h]:
            total += worth * 2 // 3
        elif units[COOLDOWN_1 + skill, i] <= FIGHT // 3:
            total += worth
    return total


@inner
def fight_odds(units: Ints32, match: Ints32, table: Ints32, h: int) -> int:
    """Odds of the fight around hero h: 100 is even, more is better; 1,000 without an enemy. Ratio of damage times toughness of the
    sides (Lanchester), with creeps and towers."""
    size = int(match[SIZE])
    offence_0 = offence_1 = tough_0 = tough_1 = 0
    shots_0 = False
    tower = tower_over(units, match, h, int(units[X, h]), int(units[Y, h]), 500)
    shots_1 = tower >= 0 and (units[TARGET, tower] == h or blows_on_creeps(units, match, h, tower) < 2)
    for i in range(2 * size):
        own = units[CAMP, i] == units[CAMP, h]
        if units[ALIVE, i] == 0 or (not own and units[SEEN, i] == 0) or not within(units, h, i, NEAR):
            continue
        if own:
            offence_0 += damage_in_fight(units, table, h, i)
            tough_0 += toughness(units, i)
        else:
            offence_1 += damage_in_fight(units, table, h, i)
            tough_1 += toughness(units, i)
            shots_0 = shots_0 or tower_over(units, match, i, int(units[X, i]), int(units[Y, i]), 0) >= 0
    if tough_1 == 0:
        return 1_000
    camp = int(units[CAMP, h])
    offence_0 += 50 * count_creeps(units, match, camp, h, 6_000) + (400 if shots_0 else 0)
    offence_1 += 50 * count_creeps(units, match, 1 - camp, h, 6_000) + (400 if shots_1 else 0)
    return min(1_000, 100 * (offence_0 * tough_0) // max(1, offence_1 * tough_1))


@inner
def burst(units: Ints32, match: Ints32, table: Ints32, h: int, j: int) -> int:
    """Damage of hero h to unit j in the next 1.5 seconds, within reach."""
    row = units[HERO_ROW, h]
    total = 0
    if within(units, h, j, int(units[RANGE, h]) + 1_500):
        total += int(units[ATTACK, h]) * (1 + (SECOND + SECOND // 2) // max(1, int(units[PERIOD, h])))
    mana = int(units[MANA, h])
    for skill in range(3):
        at = heroes.SKILLS_AT + skill * heroes.SKILL_COLUMNS
        cost = int(table[row, at + heroes.S_MANA])
        if units[COOLDOWN_1 + skill, h] > 0 or mana < cost or table[row, at + heroes.S_EFFECT] == heroes.HEALS:
            continue
        if within(units, h, j, int(table[row, at + heroes.S_RANGE])):
            total += skill_power(units, table, h, at)
            mana -= cost
    return after_armour(units, j, total)


@inner
def is_ready(units: Ints32, table: Ints32, h: int, skill: int) -> bool:
    """Whether hero h can cast this skill and it does damage."""
    at = heroes.SKILLS_AT + (skill - 1) * heroes.SKILL_COLUMNS
    return can_cast(units, table, h, skill) and table[units[HERO_ROW, h], at + heroes.S_ALLY] == 0


# -- aiming -----------------------------------------------------------------------------------------------------------


@inner
def heading(units: Ints32, h: int, dx: int, dy: int) -> int:
    """Return the direction (as h's camp counts them) nearest to a vector."""
    sign = 1 if units[CAMP, h] == 0 else -1
    best, best_along = 0, -(1 << 60)
    for d in range(DX.shape[0]):
        along = sign * (dx * int(DX[d]) + dy * int(DY[d]))
        if along > best_along:
            best, best_along = d, along
    return best


@inner
def predict_position(units: Ints32, match: Ints32, j: int, ticks: int) -> tuple[int, int]:
    """Predict the position of unit j: attacking, casting and stunned units stay, chasing ones go on, weak heroes run home."""
    x, y = int(units[X, j]), int(units[Y, j])
    goal = int(units[TARGET, j])
    if units[STUN, j] >= ticks or units[CAST, j] != 0:
        return x, y
    if goal >= 0:
        if within(units, j, goal, int(units[RANGE, j])):
            return x, y
        to_x, to_y = int(units[X, goal]), int(units[Y, goal])
    elif j < 2 * int(match[SIZE]) and health_percent(units, j) < 35:
        to_x, to_y = camp_x(int(units[CAMP, j]), 0), LANE_Y
    else:
        return x, y
    dx, dy = to_x - x, to_y - y
    far = max(1, integer_root(dx * dx + dy * dy))
    go = min(far, speed_of(units, j) * ticks)
    return x + divide_towards_zero(dx * go, far), y + divide_towards_zero(dy * go, far)


@inner
def is_caught(units: Ints32, table: Ints32, h: int, d: int, j: int, x: int, y: int) -> bool:
    """Whether skill 2 of h in direction d hits unit j at a point."""
    row, at = units[HERO_ROW, h], heroes.SKILLS_AT + heroes.SKILL_COLUMNS
    sign = 1 if units[CAMP, h] == 0 else -1
    ux, uy = sign * int(DX[d]), sign * int(DY[d])
    dx, dy = x - int(units[X, h]), y - int(units[Y, h])
    along, across = divide_towards_zero(dx * ux + dy * uy, ONE), divide_towards_zero(dx * uy - dy * ux, ONE)
    radius = int(units[RADIUS, j])
    return (
        0 <= along <= int(table[row, at + heroes.S_RANGE]) + radius
        and abs(across) <= int(table[row, at + heroes.S_SIZE]) + radius
    )


@inner
def best_line(units: Ints32, match: Ints32, table: Ints32, h: int, focus: int, lead: bool) -> tuple[int, int]:
    """Return the most valuable direction of skill 2 and its value: 100 per hero, 150 for `focus`, 10 per creep."""
    ticks = int(table[units[HERO_ROW, h], heroes.SKILLS_AT + heroes.SKILL_COLUMNS + heroes.S_WINDUP]) if lead else 0
    reach = int(table[units[HERO_ROW, h], heroes.SKILLS_AT + heroes.SKILL_COLUMNS + heroes.S_RANGE]) + 2_000
    best, best_worth = 0, 0
    for d in range(DX.shape[0]):
        worth = 0
        for j in range(units.shape[1]):
            if not is_visible_enemy(units, h, j) or is_building(units, j) or not within(units, h, j, reach):
                continue
            x, y = predict_position(units, match, j, ticks)
            if is_caught(units, table, h, d, j, x, y):
                worth += (150 if j == focus else 100) if j < 2 * int(match[SIZE]) else 10
        if worth > best_worth:
            best, best_worth = d, worth
    return best, best_worth


@inner
def area_worth(units: Ints32, match: Ints32, table: Ints32, h: int, j: int) -> int:
    """Value of h's skill 3 around unit j: 100 per hero, 10 per creep."""
    most = int(table[units[HERO_ROW, h], heroes.SKILLS_AT + 2 * heroes.SKILL_COLUMNS + heroes.S_SIZE])
    worth = 0
    for k in range(units.shape[1]):
        if is_visible_enemy(units, h, k) and not is_building(units, k) and distance(units, j, k) <= most + int(units[RADIUS, k]):
            worth += 100 if k < 2 * int(match[SIZE]) else 10
    return worth


# -- evasion ----------------------------------------------------------------------------------------------------------


@inner
def is_threatened(units: Ints32, table: Ints32, h: int, by: int, x: int, y: int) -> bool:
    """Whether the skill that enemy hero `by` winds up would hit hero h at a point."""
    row, skill = units[HERO_ROW, by], int(units[CAST, by])
    at = heroes.SKILLS_AT + (skill - 1) * heroes.SKILL_COLUMNS
    if table[row, at + heroes.S_ALLY] == 1:
        return False
    most = int(table[row, at + heroes.S_SIZE]) + int(units[RADIUS, h])
    if skill == 3:
        dx, dy = x - int(units[CAST_X, by]), y - int(units[CAST_Y, by])
        return dx * dx + dy * dy <= most * most
    dx, dy = x - int(units[X, by]), y - int(units[Y, by])
    ux, uy = int(units[CAST_X, by]), int(units[CAST_Y, by])
    along, across = divide_towards_zero(dx * ux + dy * uy, ONE), divide_towards_zero(dx * uy - dy * ux, ONE)
    radius = int(units[RADIUS, h])
    return -radius <= along <= int(table[row, at + heroes.S_RANGE]) + radius and abs(across) <= most


@inner
def escape_direction(units: Ints32, match: Ints32, table: Ints32, h: int) -> int:
    """Return the direction out of all enemy skills in wind-up around hero h; -1 if there is none or no danger."""
    first = first_enemy(match, h)
    x, y = int(units[X, h]), int(units[Y, h])
    in_danger = False
    for j in range(first, first + int(match[SIZE])):
        if is_visible_enemy(units, h, j) and 2 <= units[CAST, j] <= 3 and is_threatened(units, table, h, j, x, y):
            in_danger = True
    if not in_danger:
        return -1
    sign, speed = (1 if units[CAMP, h] == 0 else -1), speed_of(units, h)
    # Prefers the direction nearest to the own base.
    for k in range(DIRECTIONS):
        d = (DIRECTIONS // 2 + (k + 1) // 2 * (1 if k % 2 == 0 else -1)) % DIRECTIONS
        safe = True
        for j in range(first, first + int(match[SIZE])):
            if is_visible_enemy(units, h, j) and 2 <= units[CAST, j] <= 3:
                go = sign * speed * max(0, int(units[CAST_LEFT, j]) - 1)
                to_x, to_y = x + divide_towards_zero(go * int(DX[d]), ONE), y + divide_towards_zero(go * int(DY[d]), ONE)
                safe = safe and not is_threatened(units, table, h, j, to_x, to_y)
        if safe:
            return d
    return -1
