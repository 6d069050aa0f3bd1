"""Regenerate the tables of docs/arena.md from the code. Run it after a change to the Arena's numbers; a test compares page and code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ludus.games.arena.engine import layout, rules
from ludus.games.arena.engine.heroes import EFFECTS, HEALS, HEROES, SLOWS, Hero, Skill
from ludus.games.arena.engine.layout import (
    ALIVE,
    ARMOUR,
    ATTACK,
    CAMP,
    GOLD,
    HP,
    KIND,
    LEVEL,
    MAX_HP,
    PERIOD,
    RADIUS,
    RANGE,
    SEEN,
    SPEED,
    XP,
    X,
    Y,
)
from ludus.games.arena.engine.observations import ENTITY_FEATURES, SCALAR_FEATURES
from ludus.games.arena.engine.settings import PARTS, WEIGHTS
from ludus.games.arena.engine.vector import Arena

PAGE = Path(__file__).parents[1] / "docs" / "arena.md"
_BLOCK = re.compile(r"(<!-- (?P<name>[a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SECOND = layout.TICKS_PER_SECOND


def filled(page: str) -> str:
    """Return the text of docs/arena.md with its tables regenerated."""
    return _BLOCK.sub(lambda found: f"{found[1]}{chr(10).join(_TABLES[found['name']]())}\n{found[3]}", page)


def _metres(length: int) -> str:
    return f"{length / 1000:g} m"


def _seconds(ticks: int) -> str:
    return f"{ticks / _SECOND:g} s"


def _heroes() -> Iterator[str]:
    yield "| id | hero | archetype | health | mana | attack | armour | range | speed | attack interval | regeneration | bonus per item |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for hero in HEROES:
        yield f"| {' | '.join(_hero(hero))} |"


def _hero(hero: Hero) -> list[str]:
    health, attack, armour = hero.items
    return [
        str(hero.id),
        hero.name,
        hero.archetype,
        f"{hero.hp} + {hero.hp_growth}",
        f"{hero.mana} + {hero.mana_growth}",
        f"{hero.attack} + {hero.attack_growth}",
        f"{hero.armour} + {hero.armour_growth}",
        _metres(hero.range),
        f"{hero.speed / 1000:g} m/s",
        f"{hero.period:g} s",
        f"{hero.regen}/s",
        f"{health} health, {attack} attack, {armour} armour",
    ]


def _skills() -> Iterator[str]:
    yield "| hero | skill | target | range | wind-up | cooldown | mana | damage | effect |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for hero in HEROES:
        for number, skill in enumerate(hero.skills, 1):
            yield f"| {hero.name} | {number} {skill.name} | {' | '.join(_skill(number, skill))} |"


def _skill(number: int, skill: Skill) -> list[str]:
    whom = "an allied hero" if skill.ally else "a unit"
    aimed = (whom, f"line, {_metres(2 * skill.size)} wide", f"radius {_metres(skill.size)} around {whom}")[number - 1]
    damage = f"{skill.damage} + {skill.growth} per level" + (f" + {skill.ratio} % of attack" if skill.ratio else "")
    effect = EFFECTS[skill.effect]
    if skill.effect == SLOWS:
        effect += f" by {skill.amount} %"
    if skill.seconds:
        effect += f" for {skill.seconds:g} s"
    if skill.effect == HEALS:
        effect = "heals this amount instead"
    return [
        aimed,
        _metres(skill.range),
        f"{skill.windup:g} s",
        f"{skill.cooldown:g} s",
        str(skill.mana),
        damage,
        effect,
    ]


def _units() -> Iterator[str]:
    """Table of units in a match with the first siege creep. Rewards are measured by killing one unit of each kind."""
    arena = Arena()
    arena.reset([0])
    yield "| unit | health | attack | attack interval | range | armour | radius | speed | gold | experience |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for which, name in enumerate(("outer tower", "inner tower", "base")):
        yield _unit(name, arena.units[0], layout.structure_slot(1, 1, which))
    for number, kinds in ((0, (layout.MELEE, layout.RANGED)), (_first_ram(), (layout.SIEGE,))):
        units = _wave(number)
        for kind in kinds:
            yield _unit(layout.KINDS[kind], units, _creep(units, kind))
    yield f"| hero | see below | | | | | {_metres(450)} | | {_hero_worth()} |"


def _wave(number: int) -> np.typing.NDArray[np.int32]:
    """Units of a match right after wave `number` spawned."""
    arena = Arena()
    arena.reset([0])
    arena.match[0, layout.TICK], arena.match[0, layout.WAVES] = rules.FIRST_WAVE - 1, number
    arena.advance(np.zeros((1, 2, 4), np.int32), 1)
    units: np.typing.NDArray[np.int32] = arena.units[0]
    return units


def _creep(units: np.typing.NDArray[np.int32], kind: int) -> int:
    """Slot of a creep of this kind in camp 1, or -1."""
    fitting = (units[ALIVE] == 1) & (units[KIND] == kind) & (units[CAMP] == 1)
    return int(np.argmax(fitting)) if fitting.any() else -1


def _first_ram() -> int:
    return next(number for number in range(100) if _creep(_wave(number), layout.SIEGE) >= 0)


def _rams_every() -> int:
    return next(n for n in range(1, 100) if _creep(_wave(_first_ram() + n), layout.SIEGE) >= 0)


def _growth() -> float:
    """Health growth over 100 waves, in percent of the first wave."""
    first, later = (_wave(number) for number in (0, 100))
    health = [int(units[MAX_HP, _creep(units, layout.MELEE)]) for units in (first, later)]
    return health[1] / health[0] * 100 - 100


def _dead_for(level: int) -> int:
    arena = Arena()
    arena.reset([0])
    arena.units[0, HP, 1], arena.units[0, LEVEL, 1] = 0, level
    arena.advance(np.zeros((1, 2, 4), np.int32), 1)
    return int(arena.units[0, layout.RESPAWN, 1]) + 1


def _mended(health: int) -> int:
    arena = Arena()
    arena.reset([0])
    arena.units[0, MAX_HP, 0], arena.units[0, HP, 0] = health, 1
    orders = np.zeros((1, 2, 4), np.int32)
    orders[0, 0, 0] = layout.MEND
    arena.advance(orders, 1)
    return int(arena.units[0, HP, 0]) - 1


def _income() -> int:
    arena = Arena()
    arena.reset([0])
    arena.match[0, layout.TICK] = 60 * _SECOND
    arena.advance(np.zeros((1, 2, 4), np.int32), _SECOND)
    return int(arena.units[0, layout.EARNED, 0])


def _unit(name: str, units: np.typing.NDArray[np.int32], slot: int) -> str:
    gold, experience = _worth(units[:, slot].copy(), slot)
    speed = f"{units[SPEED, slot] * _SECOND / 1000:g} m/s" if units[SPEED, slot] else "–"
    cells = [
        name, str(units[MAX_HP, slot]), str(units[ATTACK, slot]), _seconds(int(units[PERIOD, slot])), _metres(int(units[RANGE, slot])),
        str(units[ARMOUR, slot]), _metres(int(units[RADIUS, slot])), speed, str(gold), str(experience),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _hero_worth() -> str:
    (gold, experience), (more_gold, more_experience) = (_hero_worth_at(level) for level in (1, 2))
    per_gold, per_experience = more_gold - gold, more_experience - experience
    return f"{gold - per_gold} + {per_gold} per level | {experience - per_experience} + {per_experience} per level"


def _hero_worth_at(level: int) -> tuple[int, int]:
    arena = Arena()
    arena.reset([0])
    victim = arena.units[0][:, 1].copy()
    victim[LEVEL] = level
    return _worth(victim, 1)


def _worth(victim: np.typing.NDArray[np.int32], slot: int) -> tuple[int, int]:
    """Gold and experience of a hero that kills the victim alone."""
    arena = Arena(lenient=True)
    arena.reset([0])
    units = arena.units[0]
    for before in range(layout.structure_slot(1, 1, 0), slot):
        if units[KIND, slot] in (layout.TOWER, layout.BASE):
            units[ALIVE, before] = 0
    units[:, slot] = victim
    units[HP, slot], units[ATTACK, slot], units[SEEN, slot] = 1, 0, 1
    units[X, slot], units[Y, slot] = layout.LENGTH // 2, layout.LANE_Y
    units[X, 0], units[Y, 0] = layout.LENGTH // 2 - 2_000, layout.LANE_Y
    units[RANGE, 0], units[LEVEL, 0] = 5_000, rules.MAX_LEVEL  # at the maximum level, experience is not spent on a level
    orders = np.zeros((1, 2, 4), np.int32)
    orders[0, 0] = layout.STRIKE, 0, 0, 0
    arena.advance(orders, 1)
    if units[ALIVE, slot]:
        raise RuntimeError(f"Slot {slot} is still alive.")
    return int(units[GOLD, 0]), int(units[XP, 0])


def _numbers() -> Iterator[str]:
    yield "| rule | value |"
    yield "|---|---|"
    yield f"| field size | {_metres(layout.LENGTH)} by {_metres(layout.WIDTH)} |"
    x = ", ".join(_metres(at) for at in (layout.OUTER_X, layout.INNER_X, layout.BASE_X))
    yield f"| position of outer tower, inner tower, base | {x} from the camp's own end, on the centre line |"
    bushes = ", ".join(f"({x / 1000:g}, {y / 1000:g})" for x, y in layout.BUSHES)
    yield f"| bushes, radius {_metres(layout.BUSH_RADIUS)}, at | {bushes} |"
    yield f"| ticks per second | {_SECOND} |"
    yield f"| first wave; interval between waves | {_seconds(rules.FIRST_WAVE)}; {_seconds(rules.WAVE_EVERY)} |"
    yield f"| waves with a siege creep | wave {_first_ram() + 1}, then every {_rams_every()} waves |"
    yield f"| strength added per wave | {_growth() / 100:.0f} % of the first wave |"
    yield f"| passive income of a hero, after the start | {_income()} gold per second |"
    once, twice = _mended(10_000), _mended(20_000)
    yield f"| `heal` restores | {2 * once - twice} + {(twice - once) / 100:g} % of maximum health |"
    yield f"| `heal` cooldown | {_seconds(rules.MEND_COOLDOWN)} |"
    one, two = _dead_for(1), _dead_for(2)
    yield f"| respawn time of a hero | {_seconds(2 * one - two)} + {_seconds(two - one)} per level |"
    yield f"| fountain radius around the base | {_metres(rules.FOUNTAIN)} |"
    yield f"| the fountain heals after, without damage from a hero | {_seconds(rules.FOUNTAIN_AFTER)} |"
    yield f"| maximum level; maximum number of items | {rules.MAX_LEVEL}; {rules.MAX_ITEMS} |"
    yield f"| experience from level n to n + 1 | {rules.experience_needed(0)} + {rules.experience_needed(1) - rules.experience_needed(0)} n |"
    yield f"| price of item n | {rules.item_price(0)} + {rules.item_price(1) - rules.item_price(0)} (n − 1) gold |"
    yield f"| radius in which heroes share experience | {_metres(rules.EXPERIENCE)} |"
    sights = ", ".join(_metres(far) for far in (rules.SIGHT, rules.TOWER_SIGHT, rules.CREEP_SIGHT))
    yield f"| sight range of heroes, buildings, creeps | {sights} |"
    yield f"| sight range towards units in a bush | {_metres(rules.BUSH_SIGHT)} |"
    yield f"| maximum distance of an attack target | {_metres(rules.CHASE)} |"
    yield f"| duration of a recall | {_seconds(rules.RECALL_TICKS)} |"
    yield f"| time window of an assist | {_seconds(rules.HURT_MEMORY)} |"
    yield f"| time for which towers target a hero that attacked a hero | {_seconds(rules.AGGRO_TICKS)} |"
    yield f"| hero damage to a building without own creeps within {_metres(rules.GUARD)} | {rules.UNGUARDED} % |"


def _entities() -> Iterator[str]:
    yield ", ".join(f"{i} `{name}`" for i, name in enumerate(ENTITY_FEATURES)) + "."


def _scalars() -> Iterator[str]:
    yield ", ".join(f"{i} `{name}`" for i, name in enumerate(SCALAR_FEATURES)) + "."


def _rewards() -> Iterator[str]:
    yield "| part | weight |"
    yield "|---|---|"
    for part in PARTS:
        yield f"| `{part}` | {WEIGHTS[part]:g} |"


_TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "heroes": _heroes,
    "skills": _skills,
    "units": _units,
    "numbers": _numbers,
    "entities": _entities,
    "scalars": _scalars,
    "rewards": _rewards,
}

if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
