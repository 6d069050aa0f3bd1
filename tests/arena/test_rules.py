"""Rules of the Arena against values computed by hand. Tunable numbers are read from the code."""

from __future__ import annotations

import numpy as np
import pytest

from ludus.games.arena.engine import rules
from ludus.games.arena.engine.heroes import DASHES, HEALS, HEROES, SLOWS, STUNS, Skill
from ludus.games.arena.engine.layout import (
    ALIVE,
    ARMOUR,
    ASSISTS,
    ATTACK,
    BASE,
    BASE_X,
    BUSHES,
    CAST,
    COOLDOWN_1,
    COOLDOWN_HEAL,
    CORE,
    DEATHS,
    EARNED,
    GOLD,
    HP,
    ILLEGAL,
    INNER,
    ITEMS,
    KILLS,
    KIND,
    LANE_Y,
    LAST_HITS,
    LENGTH,
    LEVEL,
    MANA,
    MAX_HP,
    MELEE,
    MEND,
    MOVE,
    NOTHING,
    OUTER,
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
    SEEN,
    SIEGE,
    SKILL_1,
    SKILL_2,
    SKILL_3,
    SLOW,
    SLOW_BY,
    SPEED,
    STRIKE,
    STUN,
    TARGET,
    TICK,
    TICKS_PER_SECOND,
    TOWER,
    WAVES,
    WIDTH,
    WINNER,
    XP,
    X,
    Y,
    structure_slot,
)
from ludus.games.arena.engine.settings import PARTS, ArenaSettings
from tests.arena.scenes import MIDDLE, Scene, creep_slot, duel

WIN = PARTS.index("win")


def is_near(scene: Scene, slot: int, x: int, y: int, by: int) -> bool:
    return bool(np.hypot(scene.get(X, slot) - x, scene.get(Y, slot) - y) <= by)


# -- damage -----------------------------------------------------------------------------------------------------------


def test_armour_reduces_damage_by_100_over_100_plus_armour() -> None:
    scene = duel(attack=100, armour=25, hp=500)
    scene.order(0, STRIKE, at=1)
    scene.play()
    assert scene.get(HP, 1) == 500 - 80  # 100 · 100 / 125
    assert scene.get(HP, 0) == 500


def test_attacks_are_one_period_apart() -> None:
    scene = duel(attack=100, armour=0, hp=500, period=7)
    scene.order(0, STRIKE, at=1)
    left = []
    for _ in range(9):
        scene.play()
        left.append(scene.get(HP, 1))
    assert left == [400] * 7 + [300] * 2


def test_an_attack_does_at_least_one_damage() -> None:
    scene = duel(attack=1, armour=100_000, hp=500)
    scene.order(0, STRIKE, at=1)
    scene.play()
    assert scene.get(HP, 1) == 499


def test_two_heroes_can_kill_each_other_in_one_tick() -> None:
    scene = duel(attack=1_000, armour=0, hp=500)
    scene.order(0, STRIKE, at=1)
    scene.order(1, STRIKE, at=0)
    scene.play()
    assert [scene.get(ALIVE, h) for h in (0, 1)] == [0, 0]
    assert [scene.get(KILLS, h) for h in (0, 1)] == [1, 1]
    assert [scene.get(DEATHS, h) for h in (0, 1)] == [1, 1]


def test_a_target_out_of_range_is_approached_and_not_hit() -> None:
    scene = duel(attack=100, armour=0, hp=500)
    scene.put(1, MIDDLE + 10_000)
    scene.look()
    scene.order(0, STRIKE, at=1)
    scene.play()
    assert scene.get(HP, 1) == 500
    assert scene.get(X, 0) == MIDDLE + scene.get(SPEED, 0)
    for _ in range(60):
        scene.play()
    assert scene.get(HP, 1) < 500
    gap = scene.get(X, 1) - scene.get(X, 0) - scene.get(RADIUS, 0) - scene.get(RADIUS, 1)
    assert 0 < gap <= scene.get(RANGE, 0)


@pytest.mark.parametrize(("kind", "left"), [(MELEE, 940), (RANGED, 940), (SIEGE, 900)])
def test_melee_and_ranged_creeps_do_less_damage_to_heroes(kind: int, left: int) -> None:
    scene = Scene()
    scene.put(0, MIDDLE, hp=1_000, max_hp=1_000, armour=0, seen=1)
    scene.creep(1, 0, MIDDLE + 900, kind=kind, attack=100, range=2_000)
    scene.play()
    assert scene.get(HP, 0) == left


def test_a_ram_does_double_damage_to_buildings() -> None:
    scene = Scene()
    outer = structure_slot(1, 1, OUTER)
    scene.put(outer, LENGTH - OUTER_X, armour=0, attack=0)
    before = scene.get(HP, outer)
    scene.creep(0, 0, LENGTH - OUTER_X - 3_000, kind=SIEGE, attack=100, range=6_000)
    scene.play()
    assert scene.get(HP, outer) == before - 200


@pytest.mark.parametrize("guarded", [False, True])
def test_a_hero_without_creeps_does_less_damage_to_buildings(guarded: bool) -> None:
    scene = Scene()
    outer = structure_slot(1, 1, OUTER)
    at = LENGTH - OUTER_X
    scene.put(outer, at, armour=0, attack=0)
    scene.put(0, at - 2_000, attack=100)
    radius = scene.get(RADIUS, outer) + 350
    scene.creep(0, 0, at - rules.GUARD - radius - (0 if guarded else 1), attack=0, range=1, speed=0)
    before = scene.get(HP, outer)
    scene.order(0, STRIKE, at=outer)
    scene.play()
    assert before - scene.get(HP, outer) == (100 if guarded else rules.UNGUARDED)


# -- buildings --------------------------------------------------------------------------------------------------------


def test_buildings_are_vulnerable_from_the_outer_tower_to_the_base() -> None:
    scene = Scene()
    slots = [structure_slot(1, 1, which) for which in (OUTER, INNER, CORE)]
    scene.put(0, LENGTH - 14_000)  # all three are in attack distance
    for slot in slots:
        scene.put(slot, LENGTH - 14_000 + 3_000, attack=0)
    for fallen in range(3):
        assert [scene.may(0, STRIKE, slot) for slot in slots] == [which == fallen for which in range(3)]
        scene.units[HP, slots[fallen]], scene.units[ALIVE, slots[fallen]] = 0, 0


def test_creeps_do_not_attack_protected_buildings() -> None:
    scene = Scene()
    inner = structure_slot(1, 1, INNER)
    scene.creep(0, 0, scene.get(X, inner) - 2_000, attack=100, range=5_000)
    scene.units[ATTACK, inner] = 0
    before = scene.get(HP, inner)
    scene.play(3)
    assert scene.get(HP, inner) == before
    scene.units[ALIVE, structure_slot(1, 1, OUTER)] = 0
    scene.play(3)
    assert scene.get(HP, inner) < before


def test_a_tower_prefers_creeps_unless_a_hero_attacks_a_hero() -> None:
    scene = Scene()
    tower = structure_slot(1, 1, OUTER)
    at = scene.get(X, tower)
    scene.put(0, at - 4_000)
    scene.put(1, at - 2_500)
    scene.look()
    scene.play()
    assert scene.get(TARGET, tower) == 0  # no other target
    creep = scene.creep(0, 0, at - 6_000, attack=0, speed=0, range=1)
    scene.units[TARGET, tower] = -1
    scene.play()
    assert scene.get(TARGET, tower) == creep
    scene.order(0, STRIKE, at=1)
    scene.play(2)
    assert scene.get(TARGET, tower) == 0


def test_a_tower_keeps_its_target() -> None:
    scene = Scene()
    tower = structure_slot(1, 1, OUTER)
    at = scene.get(X, tower)
    first = scene.creep(0, 0, at - 6_000, attack=0, speed=0, range=1)
    scene.play()
    scene.creep(0, 1, at - 4_000, attack=0, speed=0, range=1)
    scene.play()
    assert scene.get(TARGET, tower) == first


@pytest.mark.parametrize("camp", [0, 1])
def test_the_camp_whose_base_is_destroyed_loses(camp: int) -> None:
    scene = Scene()
    _raze(scene, 1 - camp)
    _besiege(scene, camp)
    scene.play()
    assert scene.arena.over[0]
    assert scene.arena.winner[0] == camp
    assert scene.arena.parts[0, camp, WIN] == 1
    assert scene.arena.parts[0, 1 - camp, WIN] == -1
    assert scene.arena.reward[0, camp] > 0 > scene.arena.reward[0, 1 - camp]


def test_two_bases_destroyed_in_one_tick_are_a_draw() -> None:
    scene = Scene()
    for camp in (0, 1):
        _raze(scene, 1 - camp)
        _besiege(scene, camp)
    scene.play()
    assert [scene.get(ALIVE, structure_slot(1, camp, CORE)) for camp in (0, 1)] == [0, 0]
    assert scene.arena.over[0]
    assert scene.arena.winner[0] == -1
    assert np.all(scene.arena.parts[0, :, WIN] == 0)


def _raze(scene: Scene, camp: int) -> None:
    for which in (OUTER, INNER):
        slot = structure_slot(1, camp, which)
        scene.units[ALIVE, slot] = scene.units[HP, slot] = 0
    scene.units[HP, structure_slot(1, camp, CORE)] = 1


def _besiege(scene: Scene, camp: int) -> None:
    base = structure_slot(1, 1 - camp, CORE)
    scene.put(camp, scene.get(X, base) + (-3_000 if camp == 0 else 3_000), hp=10_000, max_hp=10_000)
    scene.order(camp, STRIKE, at=base)


def test_a_finished_match_does_not_change() -> None:
    scene = Scene()
    _raze(scene, 1)
    _besiege(scene, 0)
    scene.play()
    before = scene.arena.hash(0)
    scene.order(0, MOVE)
    scene.play(5)
    assert scene.arena.hash(0) == before
    assert np.all(scene.arena.reward == 0)


def test_a_match_at_the_time_limit_is_a_draw() -> None:
    scene = Scene(settings=ArenaSettings(seconds=2))
    scene.play(2 * TICKS_PER_SECOND - 1)
    assert not scene.arena.over[0]
    scene.play()
    assert scene.arena.over[0]
    assert scene.match[WINNER] == -1
    assert scene.match[TICK] == 2 * TICKS_PER_SECOND


def test_a_decision_lasts_the_configured_ticks() -> None:
    scene = Scene(settings=ArenaSettings(every=5))
    scene.arena.step(scene.orders)
    assert scene.match[TICK] == 5


# -- waves ------------------------------------------------------------------------------------------------------------


def test_waves_are_equal_for_both_camps_and_some_have_a_ram() -> None:
    scene = Scene()
    seen = []
    for tick in range(1, rules.FIRST_WAVE + 3 * rules.WAVE_EVERY + 1):
        for camp in (0, 1):  # remove earlier waves
            scene.units[ALIVE, creep_slot(1, camp, 0) : creep_slot(1, camp, 0) + 12] = 0
        scene.play()
        kinds = [_kinds(scene, camp) for camp in (0, 1)]
        if kinds != [[], []]:
            assert kinds[0] == kinds[1]
            seen.append((tick, kinds[0]))
    common = [MELEE] * 3 + [RANGED]
    assert [tick for tick, _ in seen] == [rules.FIRST_WAVE + i * rules.WAVE_EVERY for i in range(4)]
    assert seen[0][1] == common
    assert {tuple(kinds) for _, kinds in seen} == {tuple(common), (*common, SIEGE)}
    assert scene.match[WAVES] == 4


def _kinds(scene: Scene, camp: int) -> list[int]:
    slots = range(creep_slot(1, camp, 0), creep_slot(1, camp, 0) + 12)
    return sorted(scene.get(KIND, slot) for slot in slots if scene.get(ALIVE, slot))


def test_later_waves_are_stronger_and_creeps_walk_to_the_enemy() -> None:
    scene = Scene()
    first = creep_slot(1, 0, 0), creep_slot(1, 1, 0)
    scene.play(rules.FIRST_WAVE)
    early, start = scene.get(MAX_HP, first[0]), [scene.get(X, slot) for slot in first]
    scene.play(30)
    assert scene.get(X, first[0]) > start[0]
    assert scene.get(X, first[1]) < start[1]
    scene.units[ALIVE, creep_slot(1, 0, 0) : creep_slot(1, 0, 0) + 12] = 0
    scene.match[TICK] = rules.FIRST_WAVE + rules.WAVE_EVERY - 1
    scene.play()
    assert scene.get(MAX_HP, first[0]) > early


def test_waves_do_not_exceed_the_creep_slots() -> None:
    scene = Scene()
    for i in range(12):
        scene.creep(0, i, BASE_X + 3_000 + 100 * i, hp=i + 1)
    scene.play(rules.FIRST_WAVE)
    assert _kinds(scene, 0) == [MELEE] * 12
    assert _kinds(scene, 1) == [MELEE] * 3 + [RANGED]


# -- gold and experience ----------------------------------------------------------------------------------------------


def _kill_a_creep(*near: int) -> Scene:
    """Hero 1 kills an enemy creep; the allies `near` are in range of the experience, the others just outside."""
    scene = Scene(3)
    creep = scene.creep(1, 0, MIDDLE, hp=1, attack=0, range=1)
    far = rules.EXPERIENCE + scene.get(RADIUS, 0) + 350 + 1
    for h in range(3):
        scene.put(h, MIDDLE - (1_000 if h in near else far))
    scene.look()
    scene.order(1, STRIKE, at=creep)
    scene.play()
    assert scene.get(ALIVE, creep) == 0
    return scene


def test_the_last_hit_gets_gold_and_near_heroes_share_experience() -> None:
    alone = _kill_a_creep(1)
    both = _kill_a_creep(1, 2)
    gold, experience = alone.get(GOLD, 1), alone.get(XP, 1)
    assert gold > 0
    assert experience > 1
    assert [alone.get(GOLD, h) for h in (0, 2, 3, 4, 5)] == [0] * 5
    assert [alone.get(XP, h) for h in (0, 2, 3, 4, 5)] == [0] * 5
    assert [both.get(GOLD, h) for h in range(3)] == [0, gold, 0]
    assert [both.get(XP, h) for h in range(3)] == [0, experience // 2, experience // 2]
    assert [both.get(LAST_HITS, h) for h in range(3)] == [0, 1, 0]


def test_dead_heroes_get_no_experience() -> None:
    scene = Scene(3)
    creep = scene.creep(1, 0, MIDDLE, hp=1, attack=0, range=1)
    for h in (1, 2):
        scene.put(h, MIDDLE - 1_000)
    scene.look()
    scene.units[ALIVE, 2], scene.units[HP, 2], scene.units[RESPAWN, 2] = 0, 0, 100
    scene.order(1, STRIKE, at=creep)
    scene.play()
    assert scene.get(XP, 2) == 0
    assert scene.get(XP, 1) == _kill_a_creep(1).get(XP, 1)


def test_a_kill_pays_more_than_an_assist() -> None:
    scene = Scene(3)
    victim = scene.hero(1)
    scene.put(victim, MIDDLE, hp=2_000, max_hp=2_000, armour=0)
    for h in range(3):
        scene.put(h, MIDDLE - 1_200, attack=10, range=2_000)
    scene.look()
    scene.order(1, STRIKE, at=victim)
    scene.play()
    scene.order(1, NOTHING)
    scene.order(0, STRIKE, at=victim)
    scene.units[HP, victim] = 1
    scene.play()
    assert scene.get(DEATHS, victim) == 1
    assert [scene.get(KILLS, h) for h in range(3)] == [1, 0, 0]
    assert [scene.get(ASSISTS, h) for h in range(3)] == [0, 1, 0]
    assert scene.get(GOLD, 0) > scene.get(GOLD, 1) > scene.get(GOLD, 2) == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_kill_by_a_creep_is_credited_to_the_last_hero_within_ten_seconds(late: bool) -> None:
    scene = Scene()
    scene.put(1, MIDDLE, hp=500, max_hp=500, armour=0)
    scene.put(0, MIDDLE - 1_200)
    scene.look()
    scene.order(0, STRIKE, at=1)
    scene.play()
    scene.order(0, NOTHING)
    scene.put(0, MIDDLE - 12_000)
    scene.match[TICK] = rules.FIRST_WAVE  # the next wave is far away
    scene.play(rules.HURT_MEMORY - (0 if late else 5))
    scene.units[HP, 1] = 1
    scene.creep(0, 0, MIDDLE - 900, attack=100, range=2_000)
    scene.play()
    assert scene.get(DEATHS, 1) == 1
    assert scene.get(KILLS, 0) == (0 if late else 1)


def test_a_destroyed_tower_pays_the_whole_camp() -> None:
    scene = Scene(3)
    tower = structure_slot(3, 1, OUTER)
    scene.put(tower, LENGTH - OUTER_X, hp=1, attack=0)
    scene.put(0, LENGTH - OUTER_X - 2_500)
    scene.look()
    scene.order(0, STRIKE, at=tower)
    scene.play()
    assert scene.get(ALIVE, tower) == 0
    assert scene.get(GOLD, 0) > scene.get(GOLD, 1) == scene.get(GOLD, 2) > 0
    assert [scene.get(GOLD, h) for h in (3, 4, 5)] == [0, 0, 0]


@pytest.mark.parametrize("hero", HEROES, ids=lambda hero: hero.name)
def test_a_level_adds_the_growth_of_the_table_and_keeps_missing_health(hero: object) -> None:
    known = next(h for h in HEROES if h is hero)
    scene = Scene(lineup=((known.id,), (known.id,)))
    scene.put(0, MIDDLE, hp=known.hp - 100, mana=known.mana - 50)
    scene.units[XP, 0] = rules.experience_needed(1) + rules.experience_needed(2) + 5
    scene.play()
    assert scene.get(LEVEL, 0) == 3
    assert scene.get(XP, 0) == 5
    assert scene.get(MAX_HP, 0) == known.hp + 2 * known.hp_growth
    assert scene.get(HP, 0) == known.hp + 2 * known.hp_growth - 100
    assert scene.get(MANA, 0) == known.mana + 2 * known.mana_growth - 50
    assert scene.get(ATTACK, 0) == known.attack + 2 * known.attack_growth
    assert scene.get(ARMOUR, 0) == known.armour + 2 * known.armour_growth


def test_levels_stop_at_the_maximum() -> None:
    scene = Scene()
    scene.units[XP, 0] = 1_000_000
    scene.play()
    assert scene.get(LEVEL, 0) == rules.MAX_LEVEL


def test_gold_buys_items_only_at_the_fountain() -> None:
    known = HEROES[0]
    scene = Scene(lineup=((known.id,), (known.id,)))
    scene.put(0, MIDDLE)
    gold = rules.item_price(0) + rules.item_price(1) + 7
    scene.units[GOLD, 0] = gold
    scene.play()
    assert (scene.get(ITEMS, 0), scene.get(GOLD, 0)) == (0, gold)
    scene.put(0, BASE_X - 3_500)
    scene.play()
    hp, attack, armour = known.items
    assert (scene.get(ITEMS, 0), scene.get(GOLD, 0)) == (2, 7)
    assert scene.get(MAX_HP, 0) == known.hp + 2 * hp
    assert scene.get(ATTACK, 0) == known.attack + 2 * attack
    assert scene.get(ARMOUR, 0) == known.armour + 2 * armour


def test_income_is_the_same_for_all_and_counts_as_earned() -> None:
    scene = Scene()
    scene.match[TICK] = 60 * TICKS_PER_SECOND
    scene.play(5 * TICKS_PER_SECOND)
    assert scene.get(EARNED, 0) == scene.get(EARNED, 1) > 0
    assert scene.get(EARNED, 0) % 5 == 0


# -- death and healing ------------------------------------------------------------------------------------------------


def kill_hero(level: int) -> Scene:
    scene = duel(armour=0, attack=10_000)
    scene.units[LEVEL, 1] = level
    scene.order(0, STRIKE, at=1)
    scene.play()
    scene.order(0, NOTHING)
    assert scene.get(ALIVE, 1) == 0
    return scene


def test_a_dead_hero_respawns_at_home_with_full_health() -> None:
    scene = kill_hero(level=1)
    left = scene.get(RESPAWN, 1)
    assert left > 0
    scene.play(left - 1)
    assert scene.get(ALIVE, 1) == 0
    assert [scene.may(1, what) for what in (NOTHING, MOVE, MEND, RECALL, SKILL_2)] == [True, False, False, False, False]
    scene.play()
    assert scene.get(ALIVE, 1) == 1
    assert scene.get(HP, 1) == scene.get(MAX_HP, 1)
    assert is_near(scene, 1, LENGTH - BASE_X, LANE_Y, rules.FOUNTAIN)


def test_respawn_takes_longer_at_higher_levels() -> None:
    assert kill_hero(level=8).get(RESPAWN, 1) > kill_hero(level=1).get(RESPAWN, 1)


def test_a_recall_teleports_home_after_its_duration() -> None:
    scene = Scene()
    scene.put(0, MIDDLE)
    scene.order(0, RECALL)
    scene.play(rules.RECALL_TICKS)
    assert scene.get(X, 0) == MIDDLE
    assert scene.get(CAST, 0) == RECALLING
    scene.play()
    assert is_near(scene, 0, BASE_X, LANE_Y, rules.FOUNTAIN)
    assert not scene.may(0, RECALL)


@pytest.mark.parametrize("by", ["a move", "damage", "a stun"])
def test_a_recall_is_interrupted(by: str) -> None:
    scene = Scene(lineup=((107,), (117,)))  # the first skill of 117 stuns
    scene.put(0, MIDDLE)
    scene.order(0, RECALL)
    scene.play(10)
    if by == "a move":
        scene.order(0, MOVE, direction=4)
        scene.play()
        scene.order(0, NOTHING)
    elif by == "damage":
        scene.creep(1, 0, MIDDLE + 800, attack=10, range=2_000, hp=1_000)
        scene.order(0, NOTHING)
    else:
        scene.order(0, NOTHING)
        scene.put(1, MIDDLE + 1_500)
        scene.look()
        scene.order(1, SKILL_1, at=0)
        scene.play(12)
    scene.play(3)
    assert scene.get(CAST, 0) == 0
    scene.play(rules.RECALL_TICKS)
    assert is_near(scene, 0, MIDDLE, LANE_Y, 3_000)


def test_the_fountain_heals_faster_than_regeneration() -> None:
    away, home = Scene(), Scene()
    away.put(0, MIDDLE, hp=100)
    home.put(0, BASE_X, hp=100)
    for scene in (away, home):
        scene.play(2 * TICKS_PER_SECOND)
    assert away.get(HP, 0) == 100 + 2 * HEROES[0].regen
    assert home.get(HP, 0) > away.get(HP, 0)
    assert home.get(MANA, 0) == home.get(MANA, 1)


def test_the_heal_button_has_a_cooldown_and_needs_missing_health() -> None:
    scene = Scene()
    scene.put(0, MIDDLE)
    assert not scene.may(0, MEND)
    scene.units[HP, 0] = 100
    assert scene.may(0, MEND)
    scene.order(0, MEND)
    scene.play()
    healed = scene.get(HP, 0)
    assert healed > 100
    assert scene.get(COOLDOWN_HEAL, 0) == rules.MEND_COOLDOWN
    assert not scene.may(0, MEND)
    scene.play(3)
    assert scene.get(HP, 0) == healed


# -- skills -----------------------------------------------------------------------------------------------------------

SKILLS = [(hero, number, skill) for hero in HEROES for number, skill in enumerate(hero.skills, 1)]
FIRST_DIRECTION = 0


@pytest.mark.parametrize(("hero", "number", "skill"), SKILLS, ids=[f"{h.name}-{s.name}" for h, _, s in SKILLS])
def test_a_skill_matches_its_table_entry(hero: object, number: int, skill: Skill) -> None:
    known = next(h for h in HEROES if h is hero)
    scene = Scene(2, lineup=((known.id, 107), (107, 107)))
    ally, foe = 1, 2
    scene.put(0, MIDDLE)
    scene.put(ally, MIDDLE, LANE_Y + 1_000, hp=100)
    distance = min(skill.range, 2_500)
    scene.put(foe, MIDDLE + distance, hp=3_000, max_hp=3_000, armour=0)
    scene.look()
    mana, at, what = scene.get(MANA, 0), scene.get(X, 0), (SKILL_1, SKILL_2, SKILL_3)[number - 1]
    scene.order(0, what, direction=FIRST_DIRECTION, at=ally if skill.ally else foe)
    assert scene.may(0, what)
    scene.play()
    scene.order(0, NOTHING)
    windup, cooldown, lasts = (round(t * TICKS_PER_SECOND) for t in (skill.windup, skill.cooldown, skill.seconds))
    assert mana - scene.get(MANA, 0) == skill.mana
    assert scene.get(COOLDOWN_1 + number - 1, 0) == cooldown
    assert not scene.may(0, what)
    scene.play(max(1, windup) - 1)
    assert scene.get(HP, foe) == 3_000
    assert scene.get(HP, ally) == 100
    scene.play()
    power = skill.damage + known.attack * skill.ratio // 100
    if skill.effect == HEALS:
        assert scene.get(HP, ally) == 100 + power
        assert scene.get(HP, foe) == 3_000
    else:
        assert scene.get(HP, foe) == 3_000 - power
        assert scene.get(HP, ally) == 100
    assert scene.get(STUN, foe) == (lasts if skill.effect == STUNS else 0)
    assert (scene.get(SLOW, foe), scene.get(SLOW_BY, foe)) == ((lasts, skill.amount) if skill.effect == SLOWS else (0, 0))
    assert (scene.get(X, 0) != at) == (skill.effect == DASHES)


def test_skill_damage_grows_with_level_and_is_reduced_by_armour() -> None:
    hero = HEROES[2]
    skill = hero.skills[0]
    scene = Scene(lineup=((hero.id,), (107,)))
    scene.put(0, MIDDLE, level=5, attack=200)
    scene.put(1, MIDDLE + 2_000, hp=3_000, max_hp=3_000, armour=100)
    scene.look()
    scene.order(0, SKILL_1, at=1)
    scene.play(1 + round(skill.windup * TICKS_PER_SECOND))
    assert scene.get(HP, 1) == 3_000 - (skill.damage + 4 * skill.growth + 200 * skill.ratio // 100) // 2


def test_lines_and_areas_miss_units_outside_of_them() -> None:
    mage = Scene(lineup=((190,), (107,)))
    line, area = HEROES[2].skills[1], HEROES[2].skills[2]
    mage.put(0, MIDDLE)
    mage.put(1, MIDDLE + 4_000, LANE_Y + line.size + mage.get(RADIUS, 1) + 1, hp=5_000, max_hp=5_000)
    mage.look()
    mage.order(0, SKILL_2)
    mage.play(20)
    assert mage.get(HP, 1) == 5_000
    mage.units[Y, 1] -= 1
    mage.units[COOLDOWN_1 + 1, 0] = 0
    mage.play(20)
    assert mage.get(HP, 1) < 5_000

    mage = Scene(lineup=((190,), (107,)))
    mage.put(0, MIDDLE)
    mage.put(1, MIDDLE + 4_000, hp=5_000, max_hp=5_000)
    mage.look()
    mage.order(0, SKILL_3, at=1)
    mage.play()
    mage.put(1, MIDDLE + 4_000 + area.size + mage.get(RADIUS, 1) + 1)
    mage.play(20)
    assert mage.get(HP, 1) == 5_000


def test_skills_do_not_affect_buildings() -> None:
    scene = Scene(lineup=((190,), (107,)))
    tower = structure_slot(1, 1, OUTER)
    scene.put(0, LENGTH - OUTER_X - 4_000, hp=9_000, max_hp=9_000)
    scene.look()
    assert not scene.may(0, SKILL_1, tower)
    assert not scene.may(0, SKILL_3, tower)
    scene.order(0, SKILL_2)
    scene.play(15)
    assert scene.get(HP, tower) == scene.get(MAX_HP, tower)


def test_a_skill_needs_mana_and_no_cooldown() -> None:
    scene = duel()
    assert scene.may(0, SKILL_1)
    scene.units[MANA, 0] = HEROES[0].skills[0].mana - 1
    assert not scene.may(0, SKILL_1)
    scene.units[MANA, 0] += 1
    assert scene.may(0, SKILL_1)
    scene.units[COOLDOWN_1, 0] = 1
    assert not scene.may(0, SKILL_1)


def test_a_stunned_hero_can_do_nothing_and_does_not_move() -> None:
    scene = duel()
    scene.units[STUN, 0] = 5
    assert [scene.may(0, what) for what in range(8)] == [True] + [False] * 7
    scene.order(0, MOVE)
    before = scene.get(X, 0)
    scene.play(4)
    assert scene.get(X, 0) == before
    scene.orders[:] = 0
    scene.play()
    assert scene.may(0, MOVE)


def test_a_slowed_hero_walks_slower_by_the_given_percentage() -> None:
    scene = Scene()
    scene.put(0, MIDDLE, speed=200, slow=10, slow_by=30)
    scene.order(0, MOVE)
    scene.play()
    assert scene.get(X, 0) - MIDDLE == 140
    scene.play(20)
    at = scene.get(X, 0)
    scene.play()
    assert scene.get(X, 0) - at == 200


# -- movement ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("direction", "x", "y"), [(0, 1, 0), (4, 0, 1), (8, -1, 0), (12, 0, -1)])
def test_directions_are_relative_to_the_own_camp(direction: int, x: int, y: int) -> None:
    scene = Scene()
    for h in (0, 1):
        scene.put(h, MIDDLE + 10_000 * h, speed=200)
        scene.order(h, MOVE, direction=direction)
    scene.play()
    assert (scene.get(X, 0) - MIDDLE, scene.get(Y, 0) - LANE_Y) == (200 * x, 200 * y)
    assert (scene.get(X, 1) - MIDDLE - 10_000, scene.get(Y, 1) - LANE_Y) == (-200 * x, -200 * y)


def test_units_stay_on_the_field() -> None:
    scene = Scene()
    for h in (0, 1):
        scene.order(h, MOVE, direction=6)
    scene.play(20 * TICKS_PER_SECOND)
    for h in (0, 1):
        assert 0 <= scene.get(X, h) <= LENGTH
        assert 0 <= scene.get(Y, h) <= WIDTH


# -- sight ------------------------------------------------------------------------------------------------------------


def test_units_out_of_sight_are_invisible_and_no_targets() -> None:
    scene = Scene()
    sight = rules.SIGHT + scene.get(RADIUS, 0) + scene.get(RADIUS, 1)
    for far, seen in ((sight, True), (sight + 1, False)):
        scene.put(0, MIDDLE - 7_000)
        scene.put(1, MIDDLE - 7_000 + far)
        scene.look()
        assert bool(scene.get(SEEN, 1)) is seen
        assert bool(scene.get(SEEN, 0)) is seen
        row = scene.row(0, 1)
        assert bool(scene.arena.entities[0, 0, row, 0]) is seen
        assert scene.may(0, STRIKE, 1) is seen


def test_of_an_invisible_hero_only_the_archetype_is_observed() -> None:
    scene = Scene()
    scene.look()
    hidden = scene.arena.entities[0, 0, scene.row(0, 1)].copy()
    scene.put(1, LENGTH - 9_000, LANE_Y + 2_000, hp=17, level=9, items=3)
    scene.look()
    assert np.array_equal(hidden, scene.arena.entities[0, 0, scene.row(0, 1)])
    assert np.count_nonzero(hidden) == 1


@pytest.mark.parametrize("bush", range(len(BUSHES)))
def test_a_bush_hides_units_except_from_near_or_the_same_bush(bush: int) -> None:
    scene = Scene()
    x, y = BUSHES[bush]
    scene.put(1, x, y)
    inwards = 1 if y < LANE_Y else -1
    scene.put(0, x, y + inwards * 8_000)
    scene.look()
    assert scene.get(SEEN, 1) == 0
    assert scene.get(SEEN, 0) == 1  # a bush does not limit sight from inside
    scene.put(0, x, y + inwards * 3_900)  # in the same bush
    scene.look()
    assert scene.get(SEEN, 1) == 1
    edge = y + inwards * 3_500
    scene.put(1, x, edge)
    near = rules.BUSH_SIGHT + scene.get(RADIUS, 0) + scene.get(RADIUS, 1)
    for far, seen in ((near, 1), (near + 1, 0)):
        scene.put(0, x, edge + inwards * far)
        scene.look()
        assert scene.get(SEEN, 1) == seen


def test_creeps_and_towers_give_sight_and_buildings_are_always_visible() -> None:
    scene = Scene()
    scene.put(1, MIDDLE + 2_000)
    creep = scene.creep(0, 0, MIDDLE + 2_000 - rules.CREEP_SIGHT, speed=0, attack=0, range=1)
    scene.look()
    assert scene.get(SEEN, 1) == 1
    scene.units[ALIVE, creep] = 0
    scene.look()
    assert scene.get(SEEN, 1) == 0
    scene.put(1, OUTER_X + rules.TOWER_SIGHT)
    scene.look()
    assert scene.get(SEEN, 1) == 1
    assert all(scene.get(SEEN, structure_slot(1, camp, which)) for camp in (0, 1) for which in range(3))


def test_an_attack_stops_when_the_target_is_out_of_sight() -> None:
    scene = duel(hp=500, attack=100, armour=0)
    scene.order(0, STRIKE, at=1)
    scene.play()
    left = scene.get(HP, 1)
    scene.put(1, MIDDLE + 30_000)
    scene.play()
    scene.put(1, MIDDLE + 1_500)
    scene.units[READY, 0] = 0
    scene.play()  # not visible at the start of this tick
    assert scene.get(HP, 1) == left
    scene.play()
    assert scene.get(HP, 1) < left


def test_an_illegal_order_is_counted_and_does_nothing() -> None:
    scene = duel()
    scene.units[COOLDOWN_1, 0] = 100
    scene.order(0, SKILL_1, at=1)
    before = scene.get(HP, 1), scene.get(X, 0), scene.get(MANA, 0)
    scene.play()
    assert scene.get(ILLEGAL, 0) == 1
    assert (scene.get(HP, 1), scene.get(X, 0), scene.get(MANA, 0)) == before
    assert scene.get(ILLEGAL, 1) == 0


def test_a_new_match_is_symmetric() -> None:
    scene = Scene(3)
    kinds = [scene.get(KIND, structure_slot(3, 0, which)) for which in range(3)]
    assert kinds == [TOWER, TOWER, BASE]
    for which in range(3):
        own, other = structure_slot(3, 0, which), structure_slot(3, 1, which)
        assert scene.get(X, own) + scene.get(X, other) == LENGTH
        assert scene.get(Y, own) + scene.get(Y, other) == WIDTH
        for field in (HP, MAX_HP, ARMOUR, ATTACK, RANGE, PERIOD, RADIUS):
            assert scene.get(field, own) == scene.get(field, other)
    assert scene.match[OVER] == 0
