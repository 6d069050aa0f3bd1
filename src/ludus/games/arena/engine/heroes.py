"""The heroes, one per archetype, and the integer table of them that the kernels read.

Lengths are millimetres. Times are seconds here and ticks in the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ludus.errors import ConfigError
from ludus.games.arena.engine.layout import TICKS_PER_SECOND

ARCHETYPES: Final = ("fighter", "tank", "mage", "marksman", "assassin", "support")

NO_EFFECT, STUNS, SLOWS, HEALS, SHIELDS, DASHES = range(6)
EFFECTS: Final = ("", "stuns", "slows", "heals", "shields", "dashes")

# Columns of the table: the hero, then three skills.
(
    H_ID,
    H_ARCHETYPE,
    H_HP,
    H_HP_GROWTH,
    H_MANA,
    H_MANA_GROWTH,
    H_ATTACK,
    H_ATTACK_GROWTH,
    H_ARMOUR,
    H_ARMOUR_GROWTH,
    H_RANGE,
    H_SPEED,
    H_PERIOD,
    H_REGEN,
    H_ITEM_HP,
    H_ITEM_ATTACK,
    H_ITEM_ARMOUR,
) = range(17)
SKILLS_AT: Final = 17
(
    S_RANGE,
    S_SIZE,
    S_WINDUP,
    S_COOLDOWN,
    S_MANA,
    S_DAMAGE,
    S_GROWTH,
    S_RATIO,
    S_EFFECT,
    S_AMOUNT,
    S_TICKS,
    S_ALLY,
) = range(12)
SKILL_COLUMNS: Final = 12


@dataclass(frozen=True)
class Skill:
    """`range`: from edge to edge. `size`: half width of a line, or radius of an area. `ratio`: percent of the attack.

    `ally`: the skill targets allies, and `damage` is the amount healed.
    """

    name: str
    range: int
    cooldown: float
    mana: int
    damage: int
    growth: int
    size: int = 0
    windup: float = 0.2
    ratio: int = 0
    effect: int = NO_EFFECT
    amount: int = 0
    seconds: float = 0.0
    ally: bool = False

    def row(self) -> list[int]:
        ticks = [round(t * TICKS_PER_SECOND) for t in (self.windup, self.cooldown, self.seconds)]
        return [
            self.range,
            self.size,
            max(1, ticks[0]),
            ticks[1],
            self.mana,
            self.damage,
            self.growth,
            self.ratio,
            self.effect,
            self.amount,
            ticks[2],
            int(self.ally),
        ]


@dataclass(frozen=True)
class Hero:
    """`speed`: mm/s. `regen`: health per second. Growth is per level."""

    id: int
    name: str
    archetype: str
    hp: int
    hp_growth: int
    mana: int
    attack: int
    attack_growth: int
    armour: int
    armour_growth: int
    range: int
    speed: int
    period: float
    regen: int
    items: tuple[int, int, int]
    """Health, attack and armour per item."""
    skills: tuple[Skill, Skill, Skill]
    """Targets of the three: a unit, a line, an area."""
    mana_growth: int = 30

    def row(self) -> list[int]:
        return [
            self.id,
            ARCHETYPES.index(self.archetype),
            self.hp,
            self.hp_growth,
            self.mana,
            self.mana_growth,
            self.attack,
            self.attack_growth,
            self.armour,
            self.armour_growth,
            self.range,
            round(self.speed / TICKS_PER_SECOND),
            round(self.period * TICKS_PER_SECOND),
            self.regen,
            *self.items,
            *(value for skill in self.skills for value in skill.row()),
        ]


HEROES: Final = (
    Hero(
        107, "Lancer", "fighter", 840, 84, 380, 64, 7, 30, 2, 1_400, 3_600, 1.0, 6, (90, 12, 4),
        (
            Skill("Cleave", 2_200, 6, 40, 85, 20, ratio=50, effect=SLOWS, amount=30, seconds=1.5),
            Skill("Charge", 5_000, 9, 45, 75, 17, size=900, ratio=30, effect=DASHES),
            Skill("Earthbreaker", 3_000, 32, 90, 170, 38, size=3_300, windup=0.4, ratio=50, effect=STUNS, seconds=0.8),
        ),
    ),
    Hero(
        117, "Bulwark", "tank", 920, 90, 360, 56, 5, 38, 3, 1_400, 3_450, 1.1, 6, (140, 7, 6),
        (
            Skill("Shield Bash", 2_000, 9, 45, 75, 15, ratio=30, effect=STUNS, seconds=1.0),
            Skill("Fissure", 6_000, 8, 45, 85, 16, size=1_100, effect=SLOWS, amount=40, seconds=2.0),
            Skill("Bastion", 2_500, 36, 90, 150, 30, size=4_200, windup=0.4, effect=STUNS, seconds=1.1),
        ),
    ),
    Hero(
        190, "Ember", "mage", 600, 57, 520, 46, 5, 22, 1, 5_500, 3_400, 1.2, 4, (60, 15, 3),
        (
            Skill("Firebolt", 6_500, 6, 45, 95, 21, ratio=40),
            Skill("Flame Lance", 8_500, 8, 60, 115, 25, size=900, windup=0.4, ratio=50, effect=SLOWS, amount=30, seconds=1.0),
            Skill("Meteor", 7_500, 36, 110, 210, 44, size=3_200, windup=0.6, ratio=80, effect=STUNS, seconds=0.8),
        ),
    ),
    Hero(
        173, "Falcon", "marksman", 660, 66, 380, 65, 9, 22, 1, 6_500, 3_400, 0.8, 4, (55, 15, 2),
        (
            Skill("Piercing Shot", 7_500, 7, 40, 45, 12, ratio=110),
            Skill("Tumble", 4_200, 9, 40, 35, 8, size=700, windup=0.1, ratio=30, effect=DASHES),
            Skill("Rain of Arrows", 8_500, 34, 90, 150, 30, size=3_000, windup=0.5, ratio=70, effect=SLOWS, amount=40, seconds=2.0),
        ),
    ),
    Hero(
        111, "Shade", "assassin", 700, 70, 400, 60, 8, 27, 2, 1_400, 3_750, 0.9, 5, (70, 15, 3),
        (
            Skill("Shadowstep", 5_500, 9, 45, 90, 20, ratio=60, windup=0.1, effect=DASHES),
            Skill("Fan of Blades", 6_000, 6, 40, 85, 18, size=900, ratio=40),
            Skill("Eclipse", 3_500, 32, 90, 200, 44, size=2_800, windup=0.3, ratio=80),
        ),
    ),
    Hero(
        141, "Grace", "support", 690, 70, 520, 52, 6, 28, 2, 5_000, 3_450, 1.1, 5, (85, 10, 4),
        (
            Skill("Mending Light", 6_500, 9, 60, 75, 15, ratio=20, effect=HEALS, ally=True),
            Skill("Binding Ray", 7_000, 8, 50, 100, 20, size=900, windup=0.3, ratio=40, effect=STUNS, seconds=0.7),
            Skill("Sanctuary", 6_500, 36, 100, 170, 36, size=4_000, windup=0.3, effect=HEALS, ally=True),
        ),
    ),
)  # fmt: skip

IDS: Final = tuple(hero.id for hero in HEROES)
TABLE: npt.NDArray[np.int32] = np.array([hero.row() for hero in HEROES], np.int32)
TABLE.setflags(write=False)


def row_of(hero: int | str) -> int:
    """Return the table row of a hero given by id, name or archetype. Raises ConfigError."""
    key = str(hero).lower()
    for row, known in enumerate(HEROES):
        if key in (str(known.id), known.name.lower(), known.archetype):
            return row
    names = ", ".join(f"{known.id} {known.name} ({known.archetype})" for known in HEROES)
    raise ConfigError(f"There is no hero {hero!r}.", f"There are {names}.")
