"""Scripted bots, the built-in opponents. Kernels.

A bot is a list of rules, the most urgent first. A rule that applies writes its order into `out` and returns True. Bots have no memory:
they use only the state and noise derived from it, so that a loaded match continues identically. They use only what their camp sees
(`bot_features.py`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ludus.core.types import Ints32
from ludus.games.arena.bots.bot_features import (
    NEAR,
    NO_UNIT,
    after_armour,
    area_worth,
    best_line,
    blows_on_creeps,
    burst,
    count_creeps,
    creeps_of,
    escape_direction,
    fight_odds,
    first_ally,
    first_enemy,
    front_creep,
    heading,
    health_percent,
    is_covered,
    is_ready,
    is_visible_enemy,
    lane_x,
    nearest_hero,
    next_building,
    tower_over,
)
from ludus.games.arena.engine import heroes
from ludus.games.arena.engine.geometry import distance, divide_towards_zero, edge_distance, noise, within
from ludus.games.arena.engine.jit import inner, kernel
from ludus.games.arena.engine.layout import (
    ALIVE,
    ATTACK,
    BASE_X,
    CAMP,
    CAST,
    CREEPS,
    DIRECTIONS,
    GOLD,
    HERO_ROW,
    HP,
    HURT,
    ITEMS,
    LANE_Y,
    MANA,
    MAX_MANA,
    MEND,
    MOVE,
    MOVE_DIRECTION,
    NOTHING,
    OVER,
    RADIUS,
    RANGE,
    READY,
    RECALL,
    RECALLING,
    RESPAWN,
    SEED,
    SIZE,
    SKILL_1,
    SKILL_2,
    SKILL_3,
    SKILL_DIRECTION,
    SPEED,
    STRIKE,
    STRUCTURES,
    TARGET,
    TARGET_UNIT,
    TICK,
    WHAT,
    X,
    Y,
)
from ludus.games.arena.engine.rules import (
    CHASE,
    MAX_ITEMS,
    SECOND,
    at_fountain,
    camp_x,
    can_attack,
    can_cast,
    can_target,
    is_allowed,
    is_building,
    is_free,
    item_price,
    slot_of_row,
)

Ints8 = npt.NDArray[np.int8]

BOTS: Final = ("random", "nearest", "easy", "medium", "hard")
RANDOM, NEAREST, EASY, MEDIUM, HARD = range(5)

ALWAYS = 1 << 20
"""More tower shots than creeps can absorb: a tower always targets heroes that attack a hero."""


@kernel
def fill_orders(units: Ints32, match: Ints32, table: Ints32, who: Ints8, orders: Ints32) -> None:
    """Write legal orders into `orders[M, H, 4]` for all heroes with a bot. `who[M, H]`: indices in BOTS, or -1."""
    for m in range(units.shape[0]):
        for h in range(who.shape[1]):
            if who[m, h] >= 0:
                decide(units[m], match[m], table, h, int(who[m, h]), orders[m, h])


@inner
def decide(units: Ints32, match: Ints32, table: Ints32, h: int, bot: int, out: Ints32) -> None:
    set_order(out, NOTHING)
    if match[OVER] == 1 or not is_free(units, h):
        return
    if bot == RANDOM:
        play_random(units, match, table, h, out)
    elif bot == NEAREST:
        play_nearest(units, match, h, out)
    elif bot == EASY:
        play_easy(units, match, table, h, out)
    elif bot == MEDIUM:
        play_medium(units, match, table, h, out)
    elif bot == HARD:
        play_hard(units, match, table, h, out)


# -- orders -----------------------------------------------------------------------------------------------------------


@inner
def set_order(out: Ints32, what: int) -> bool:
    out[WHAT] = what
    out[MOVE_DIRECTION] = out[SKILL_DIRECTION] = out[TARGET_UNIT] = 0
    return True


@inner
def row_of_slot(match: Ints32, h: int, j: int) -> int:
    """Return the row of slot j in hero h's observation; inverse of `slot_of_row`."""
    size = int(match[SIZE])
    camp = h // size
    if j < 2 * size:
        return (j - h) % size if j // size == camp else size + j % size
    j -= 2 * size
    if j < 2 * STRUCTURES:
        return 2 * size + (0 if j // STRUCTURES == camp else STRUCTURES) + j % STRUCTURES
    j -= 2 * STRUCTURES
    return 2 * (size + STRUCTURES) + (0 if j // CREEPS == camp else CREEPS) + j % CREEPS


@inner
def move(out: Ints32, direction: int) -> bool:
    set_order(out, MOVE)
    out[MOVE_DIRECTION] = direction
    return True


@inner
def walk_to(units: Ints32, h: int, out: Ints32, x: int, y: int) -> bool:
    """Walk towards a point; stand still within 500 mm of it, since a decision moves about 700 mm."""
    dx, dy = x - int(units[X, h]), y - int(units[Y, h])
    if dx * dx + dy * dy < 500 * 500:
        return set_order(out, NOTHING)
    return move(out, heading(units, h, dx, dy))


@inner
def walk_home(units: Ints32, h: int, out: Ints32) -> bool:
    return walk_to(units, h, out, camp_x(int(units[CAMP, h]), 3_500), LANE_Y)


@inner
def strike(units: Ints32, match: Ints32, h: int, out: Ints32, j: int) -> bool:
    if j < 0 or not can_attack(units, match, h, j):
        return False
    set_order(out, STRIKE)
    out[TARGET_UNIT] = row_of_slot(match, h, j)
    return True


@inner
def cast_at(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32, skill: int, j: int) -> bool:
    """Skill 1 or 3."""
    if j < 0 or not can_cast(units, table, h, skill) or not can_target(units, match, table, h, skill, j):
        return False
    set_order(out, SKILL_1 + skill - 1)
    out[TARGET_UNIT] = row_of_slot(match, h, j)
    return True


@inner
def cast_along(units: Ints32, table: Ints32, h: int, out: Ints32, direction: int) -> bool:
    """Skill 2."""
    if not can_cast(units, table, h, 2):
        return False
    set_order(out, SKILL_2)
    out[SKILL_DIRECTION] = direction
    return True


@inner
def heal_below(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32, below: int) -> bool:
    return health_percent(units, h) < below and is_allowed(units, match, table, h, MEND) and set_order(out, MEND)


@inner
def recall(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32) -> bool:
    """Recall, or walk where that is as fast."""
    if lane_x(units, h, h) < 20_000:
        return walk_home(units, h, out)
    return is_allowed(units, match, table, h, RECALL) and set_order(out, RECALL)


@inner
def chance(match: Ints32, h: int, salt: int, percent: int) -> bool:
    return draw(match, h, salt, 100) < percent


@inner
def draw(match: Ints32, h: int, salt: int, number: int) -> int:
    """Pseudo-random integer below `number` for this hero, tick and salt."""
    return noise(int(match[SEED]), int(match[TICK]), 1_000 * (h + 1) + salt) % number


# -- random, nearest --------------------------------------------------------------------------------------------------


@inner
def play_random(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32) -> None:
    """Any allowed button, direction and target; nothing if there is no target."""
    what = draw(match, h, 0, RECALL + 1)
    if not is_allowed(units, match, table, h, what):
        return
    if what != STRIKE and what != SKILL_1 and what != SKILL_3:
        set_order(out, what)
        out[MOVE_DIRECTION] = draw(match, h, 1, DIRECTIONS)
        out[SKILL_DIRECTION] = draw(match, h, 2, DIRECTIONS)
        return
    rows = units.shape[1]
    start = draw(match, h, 3, rows)
    for k in range(rows):
        j = slot_of_row(match, h, (start + k) % rows)
        if strike(units, match, h, out, j) if what == STRIKE else cast_at(units, match, table, h, out, what - SKILL_1 + 1, j):
            return


@inner
def nearest_target(units: Ints32, match: Ints32, h: int) -> int:
    best, best_far = NO_UNIT, 1 << 40
    for row in range(units.shape[1]):
        j = slot_of_row(match, h, row)
        if can_attack(units, match, h, j):
            far = edge_distance(units, h, j)
            if far < best_far:
                best, best_far = j, far
    return best


@inner
def play_nearest(units: Ints32, match: Ints32, h: int, out: Ints32) -> None:
    """Attacks the nearest target, else walks to the enemy base."""
    if not strike(units, match, h, out, nearest_target(units, match, h)):
        walk_to(units, h, out, camp_x(1 - int(units[CAMP, h]), BASE_X), LANE_Y)


# -- easy -------------------------------------------------------------------------------------------------------------


@inner
def play_easy(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32) -> None:
    """Walks with its creeps, attacks the nearest target, uses skills at random and retreats when nearly dead."""
    if units[CAST, h] == RECALLING or rest_at_fountain(units, match, h, out, 60):
        return
    foe = nearest_hero(units, match, h, NEAR)
    if health_percent(units, h) < 15:
        if foe >= 0 or not recall(units, match, table, h, out):
            walk_home(units, h, out)
        return
    if heal_below(units, match, table, h, out, 25):
        return
    near = nearest_target(units, match, h)
    if near >= 0 and within(units, h, near, 9_000):
        if chance(match, h, 0, 8) and clumsy_skill(units, match, table, h, out, near):
            return
        # Skips a fifth of its attacks.
        if chance(match, h, 4, 80):
            strike(units, match, h, out, near)
        return
    follow_creeps(units, match, h, out)


@inner
def clumsy_skill(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32, near: int) -> bool:
    skill = 1 + draw(match, h, 1, 3)
    if skill == 2:
        direction = heading(units, h, int(units[X, near]) - int(units[X, h]), int(units[Y, near]) - int(units[Y, h]))
        return not is_building(units, near) and cast_along(units, table, h, out, direction)
    at = heroes.SKILLS_AT + (skill - 1) * heroes.SKILL_COLUMNS
    helps = table[units[HERO_ROW, h], at + heroes.S_ALLY] == 1
    return cast_at(units, match, table, h, out, skill, h if helps else near)


@inner
def follow_creeps(units: Ints32, match: Ints32, h: int, out: Ints32) -> None:
    """Walk behind the first creep; without creeps, to the own tower."""
    camp = int(units[CAMP, h])
    first = front_creep(units, match, h, camp)
    x = lane_x(units, h, next_building(units, match, camp)) + 1_500
    if first >= 0:
        x = max(x, lane_x(units, h, first) - 1_500)
    walk_to(units, h, out, camp_x(camp, x), LANE_Y)


@inner
def rest_at_fountain(units: Ints32, match: Ints32, h: int, out: Ints32, until: int) -> bool:
    """Stay at the fountain until health reaches `until` percent, unless an enemy hero is near."""
    if not at_fountain(units, h) or health_percent(units, h) >= until or nearest_hero(units, match, h, 10_000) >= 0:
        return False
    return set_order(out, NOTHING)


# -- medium -----------------------------------------------------------------------------------------------------------


@inner
def play_medium(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32) -> None:
    """Uses all rules of the lane, without prediction and without weighing fights."""
    foe = nearest_hero(units, match, h, NEAR)
    if rest_at_fountain(units, match, h, out, 90) or keep_recalling(units, h, foe):
        return
    if heal_below(units, match, table, h, out, 45):
        return
    if health_percent(units, h) < 30:
        if foe >= 0 or units[HURT, h] < SECOND or not recall(units, match, table, h, out):
            walk_home(units, h, out)
        return
    if leave_tower(units, match, h, out, 2) or shop(units, match, table, h, out):
        return
    if help_weakest(units, match, table, h, out, 60):
        return
    if foe >= 0 and health_percent(units, h) + 15 >= health_percent(units, foe) and attack_hero(units, match, table, h, out, foe):
        return
    if besiege(units, match, h, out, 4) or farm(units, match, h, out, 9_000):
        return
    hold_lane(units, match, h, out)


@inner
def keep_recalling(units: Ints32, h: int, foe: int) -> bool:
    return bool(units[CAST, h] == RECALLING and (foe < 0 or edge_distance(units, h, foe) > 8_000))


@inner
def leave_tower(units: Ints32, match: Ints32, h: int, out: Ints32, blows: int) -> bool:
    """Leave the range of a tower that targets h, or will after fewer than `blows` shots."""
    tower = tower_over(units, match, h, int(units[X, h]), int(units[Y, h]), 300)
    if tower < 0 or (units[TARGET, tower] != h and blows_on_creeps(units, match, h, tower) >= blows):
        return False
    return walk_home(units, h, out)


@inner
def is_exposed(units: Ints32, match: Ints32, h: int, j: int, blows: int) -> bool:
    """Whether an attack on unit j would put h under a tower that has fewer than `blows` shots for creeps."""
    far = max(1, distance(units, h, j))
    reach = min(far, int(units[RANGE, h]) + int(units[RADIUS, h]) + int(units[RADIUS, j]))
    x = int(units[X, j]) + divide_towards_zero((int(units[X, h]) - int(units[X, j])) * reach, far)
    y = int(units[Y, j]) + divide_towards_zero((int(units[Y, h]) - int(units[Y, j])) * reach, far)
    tower = tower_over(units, match, h, x, y, 200)
    return tower >= 0 and blows_on_creeps(units, match, h, tower) < blows


@inner
def shop(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32) -> bool:
    """Recall when an item is affordable and no enemy is near."""
    items = int(units[ITEMS, h])
    if items >= MAX_ITEMS or units[GOLD, h] < item_price(items) or nearest_hero(units, match, h, CHASE) >= 0:
        return False
    if count_creeps(units, match, 1 - int(units[CAMP, h]), h, 8_000) > 0 or units[HURT, h] < 2 * SECOND:
        return False
    siege, first = next_building(units, match, 1 - int(units[CAMP, h])), front_creep(units, match, h, int(units[CAMP, h]))
    if first >= 0 and within(units, first, siege, 16_000) and within(units, h, first, CHASE):
        return False
    return recall(units, match, table, h, out)


@inner
def help_weakest(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32, below: int) -> bool:
    """Heal the ally with the lowest health share, if it is below `below` percent."""
    row, first = units[HERO_ROW, h], first_ally(match, h)
    for skill in (3, 1):
        at = heroes.SKILLS_AT + (skill - 1) * heroes.SKILL_COLUMNS
        if table[row, at + heroes.S_EFFECT] != heroes.HEALS or not can_cast(units, table, h, skill):
            continue
        weakest, least = NO_UNIT, below - (10 if skill == 3 else 0)
        for i in range(first, first + int(match[SIZE])):
            if can_target(units, match, table, h, skill, i) and health_percent(units, i) < least and not at_fountain(units, i):
                weakest, least = i, health_percent(units, i)
        if weakest >= 0 and cast_at(units, match, table, h, out, skill, weakest):
            return True
    return False


@inner
def attack_hero(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32, foe: int) -> bool:
    """Attack with ready skills, else with normal attacks, if the enemy is in reach and not under its tower."""
    if is_exposed(units, match, h, foe, 1):
        return False
    if is_ready(units, table, h, 1) and cast_at(units, match, table, h, out, 1, foe):
        return True
    reach = int(table[units[HERO_ROW, h], heroes.SKILLS_AT + heroes.SKILL_COLUMNS + heroes.S_RANGE])
    if is_ready(units, table, h, 2) and within(units, h, foe, reach - 1_000):
        direction = heading(units, h, int(units[X, foe]) - int(units[X, h]), int(units[Y, foe]) - int(units[Y, h]))
        return cast_along(units, table, h, out, direction)
    if is_ready(units, table, h, 3) and health_percent(units, foe) < 60 and cast_at(units, match, table, h, out, 3, foe):
        return True
    return within(units, h, foe, int(units[RANGE, h]) + 1_500) and strike(units, match, h, out, foe)


@inner
def besiege(units: Ints32, match: Ints32, h: int, out: Ints32, blows: int) -> bool:
    """Attack the next enemy building while creeps absorb its shots."""
    goal = next_building(units, match, 1 - int(units[CAMP, h]))
    if not within(units, h, goal, CHASE) or blows_on_creeps(units, match, h, goal) < blows or units[TARGET, goal] == h:
        return False
    return strike(units, match, h, out, goal)


@inner
def farm(units: Ints32, match: Ints32, h: int, out: Ints32, reach: int) -> bool:
    """Attack a creep: one that dies from the next attack, else the weakest."""
    first = creeps_of(match, 1 - int(units[CAMP, h]))
    best, best_worth = NO_UNIT, 1 << 40
    for c in range(first, first + CREEPS):
        if not is_visible_enemy(units, h, c) or not within(units, h, c, reach) or is_exposed(units, match, h, c, 2):
            continue
        worth = edge_distance(units, h, c) // 10 + int(units[HP, c])
        if after_armour(units, c, int(units[ATTACK, h])) >= units[HP, c]:
            worth -= 10_000
        if worth < best_worth:
            best, best_worth = c, worth
    return strike(units, match, h, out, best)


@inner
def hold_lane(units: Ints32, match: Ints32, h: int, out: Ints32) -> bool:
    """Stay behind the first creep at attack range and outside tower range; without creeps, at the own tower."""
    camp, size = int(units[CAMP, h]), int(match[SIZE])
    first = front_creep(units, match, h, camp)
    x = lane_x(units, h, next_building(units, match, camp)) + 1_000
    back = 1_000 + int(units[RANGE, h]) // 2
    if first >= 0:
        x = max(x, lane_x(units, h, first) - back)
    goal = next_building(units, match, 1 - camp)
    edge = lane_x(units, h, goal) - int(units[RANGE, goal]) - int(units[RADIUS, goal]) - 1_500
    if blows_on_creeps(units, match, h, goal) < 2:
        x = min(x, edge)
    apart = (2 * (h % size) - (size - 1)) * 1_200
    return walk_to(units, h, out, camp_x(camp, x), LANE_Y + (apart if camp == 0 else -apart))


# -- hard -------------------------------------------------------------------------------------------------------------


@inner
def play_hard(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32) -> None:
    """Weighs fights, predicts positions for skills, and takes undefended buildings."""
    foe = nearest_hero(units, match, h, NEAR)
    if rest_at_fountain(units, match, h, out, 92) or keep_recalling(units, h, foe):
        return
    if dodge(units, match, table, h, out) or help_weakest(units, match, table, h, out, 75):
        return
    odds = fight_odds(units, match, table, h)
    prey = choose_prey(units, match, table, h, odds)
    if prey >= 0 and attack_prey(units, match, table, h, out, prey):
        return
    if heal_below(units, match, table, h, out, 70) or retreat(units, match, table, h, out, foe, odds):
        return
    if raid(units, match, h, out) or leave_tower(units, match, h, out, 2) or finish(units, match, h, out):
        return
    if foe >= 0 and kite(units, match, table, h, out, foe):
        return
    if foe >= 0 and poke(units, match, table, h, out, foe, odds):
        return
    if shop(units, match, table, h, out) or besiege(units, match, h, out, 3):
        return
    if clear_wave(units, match, table, h, out, foe) or farm(units, match, h, out, 9_000):
        return
    hold_lane(units, match, h, out)


@inner
def dodge(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32) -> bool:
    direction = escape_direction(units, match, table, h)
    return direction >= 0 and move(out, direction)


@inner
def choose_prey(units: Ints32, match: Ints32, table: Ints32, h: int, odds: int) -> int:
    """Choose the enemy hero to fight: one that can be killed at once, else, with good odds, the one that loses most; or NO_UNIT."""
    first = first_enemy(match, h)
    best, best_worth = NO_UNIT, 0
    for j in range(first, first + int(match[SIZE])):
        if not is_visible_enemy(units, h, j) or not within(units, h, j, NEAR):
            continue
        hp = int(units[HP, j])
        hurt = team_burst(units, match, table, h, j)
        exposed = is_exposed(units, match, h, j, ALWAYS)
        dies = hurt >= hp
        if exposed and not (dies and health_percent(units, h) > 45 and odds >= 60):
            continue
        # An enemy with a longer range gains from waiting: accept worse odds.
        outranged = units[RANGE, j] > units[RANGE, h] + 1_000
        if not dies and odds < (88 if outranged else 100) - impatience(match):
            continue
        worth = 100 * hurt // max(1, hp) + (1_000 if dies else 0) - edge_distance(units, h, j) // 100 + 200
        if worth > best_worth:
            best, best_worth = j, worth
    return best


@inner
def impatience(match: Ints32) -> int:
    """Percent by which the required odds drop as the match goes on; otherwise two waiting bots draw."""
    return min(35, int(match[TICK]) // (10 * SECOND))


@inner
def team_burst(units: Ints32, match: Ints32, table: Ints32, h: int, j: int) -> int:
    """Burst damage of h and the allies near unit j."""
    first = first_ally(match, h)
    total = 0
    for i in range(first, first + int(match[SIZE])):
        if units[ALIVE, i] == 1 and (i == h or within(units, i, j, 7_000)):
            total += burst(units, match, table, i, j)
    return total


@inner
def attack_prey(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32, prey: int) -> bool:
    """Attack `prey` with all skills."""
    if kite(units, match, table, h, out, prey):
        return True
    if is_ready(units, table, h, 3) and cast_at(units, match, table, h, out, 3, prey):
        return True
    if is_ready(units, table, h, 1) and cast_at(units, match, table, h, out, 1, prey):
        return True
    if aim_line(units, match, table, h, out, prey, 150):
        return True
    return strike(units, match, h, out, prey)


@inner
def aim_line(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32, focus: int, least: int) -> bool:
    """Use skill 2 in its most valuable direction, if that is worth at least `least`."""
    if not is_ready(units, table, h, 2):
        return False
    direction, worth = best_line(units, match, table, h, focus, True)
    return worth >= least and cast_along(units, table, h, out, direction)


@inner
def has_dash(units: Ints32, table: Ints32, h: int) -> bool:
    return bool(table[units[HERO_ROW, h], heroes.SKILLS_AT + heroes.SKILL_COLUMNS + heroes.S_EFFECT] == heroes.DASHES)


@inner
def kite(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32, foe: int) -> bool:
    """As a ranged hero, step back between attacks while a melee hero is near."""
    near = nearest_hero(units, match, h, 3_500)
    if near < 0 or units[RANGE, h] < 3_000 or units[RANGE, near] >= 3_000 or units[READY, h] <= 2:
        return False
    return away_from(units, h, out, near)


@inner
def away_from(units: Ints32, h: int, out: Ints32, j: int) -> bool:
    """Move away from unit j and towards the own base."""
    dx, dy = int(units[X, h]) - int(units[X, j]), int(units[Y, h]) - int(units[Y, j])
    far = max(1, distance(units, h, j))
    home = camp_x(int(units[CAMP, h]), 0) - int(units[X, h])
    dx = divide_towards_zero(dx * 1_000, far) + (700 if home > 0 else -700)
    dy = divide_towards_zero(dy * 1_000, far)
    return move(out, heading(units, h, dx, dy))


@inner
def retreat(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32, foe: int, odds: int) -> bool:
    """Go home at low health; go back to the own towers with bad odds."""
    weak = health_percent(units, h) < (22 if foe >= 0 else 35)
    if not weak and (foe < 0 or odds >= 60 - impatience(match)):
        return False
    if foe < 0:
        safe = units[HURT, h] >= SECOND and count_creeps(units, match, 1 - int(units[CAMP, h]), h, 7_000) == 0
        return (safe and recall(units, match, table, h, out)) or walk_home(units, h, out)
    if not weak and is_covered(units, match, h):
        return False
    home = heading(units, h, camp_x(int(units[CAMP, h]), 0) - int(units[X, h]), 0)
    if edge_distance(units, h, foe) < 5_000 and has_dash(units, table, h) and cast_along(units, table, h, out, home):
        return True
    if edge_distance(units, h, foe) < 9_000 or weak:
        return walk_home(units, h, out)
    return False


@inner
def poke(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32, foe: int, odds: int) -> bool:
    """Use skills at range and attacks in range, without approaching."""
    rich = 100 * int(units[MANA, h]) // max(1, int(units[MAX_MANA, h])) >= 45
    tower = tower_over(units, match, h, int(units[X, h]), int(units[Y, h]), 0)
    if tower >= 0:
        return False
    if rich and is_ready(units, table, h, 1) and cast_at(units, match, table, h, out, 1, foe):
        return True
    if rich and not has_dash(units, table, h) and aim_line(units, match, table, h, out, foe, 100):
        return True
    if odds < 80 and units[RANGE, h] <= units[RANGE, foe]:
        return False
    return within(units, h, foe, int(units[RANGE, h])) and strike(units, match, h, out, foe)


@inner
def raid(units: Ints32, match: Ints32, h: int, out: Ints32) -> bool:
    """Attack the next building without creeps while all enemy heroes are dead and health allows."""
    goal, first = next_building(units, match, 1 - int(units[CAMP, h])), first_enemy(match, h)
    hp = int(units[HP, h]) - 5 * after_armour(units, h, int(units[ATTACK, goal]))
    if health_percent(units, h) < 40 or hp <= 0 or not within(units, h, goal, 25_000):
        return False
    away = max(0, edge_distance(units, h, goal) - int(units[RANGE, h]))
    for j in range(first, first + int(match[SIZE])):
        # Enemies must stay dead until it has arrived and attacked for five seconds.
        if units[ALIVE, j] == 1 or units[RESPAWN, j] < 5 * SECOND + away // max(1, int(units[SPEED, h])):
            return False
    return strike(units, match, h, out, goal) or walk_to(units, h, out, int(units[X, goal]), int(units[Y, goal]))


@inner
def finish(units: Ints32, match: Ints32, h: int, out: Ints32) -> bool:
    """Attack a building that falls within a few attacks."""
    goal = next_building(units, match, 1 - int(units[CAMP, h]))
    blows = 1 + int(units[HP, goal]) * 3 // max(1, int(units[ATTACK, h]))
    if not within(units, h, goal, int(units[RANGE, h]) + 4_000) or blows > 4 + health_percent(units, h) // 20:
        return False
    return strike(units, match, h, out, goal)


@inner
def clear_wave(units: Ints32, match: Ints32, table: Ints32, h: int, out: Ints32, foe: int) -> bool:
    """Use a line on three creeps, or an area on four, with enough mana; less is enough without an enemy hero near."""
    rich = 100 * int(units[MANA, h]) // max(1, int(units[MAX_MANA, h])) >= (60 if foe >= 0 else 35)
    if rich and not has_dash(units, table, h) and aim_line(units, match, table, h, out, NO_UNIT, 30):
        return True
    if not rich or foe >= 0 or not is_ready(units, table, h, 3):
        return False
    first = creeps_of(match, 1 - int(units[CAMP, h]))
    for c in range(first, first + CREEPS):
        if can_target(units, match, table, h, 3, c) and area_worth(units, match, table, h, c) >= 40:
            return cast_at(units, match, table, h, out, 3, c)
    return False
