"""Settings of a match: team size, line-up, time limit and rewards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from ludus.core.plugins import did_you_mean
from ludus.core.schedule import Scheduled, value_at
from ludus.core.types import Floats, Ints32
from ludus.errors import ConfigError
from ludus.games.arena.engine import heroes
from ludus.games.arena.engine.layout import TICKS_PER_SECOND

MAX_SIZE: Final = 10
SECONDS: Final = 480
MAX_SECONDS: Final = 7200

WEIGHTS: Final[Mapping[str, float]] = {
    "gold": 0.5,
    "experience": 0.3,
    "health": 1.0,
    "kill": 0.6,
    "death": -0.6,
    "assist": 0.3,
    "last_hit": 0.1,
    "damage": 0.05,
    "healing": 0.05,
    "towers": 3.0,
    "win": 5.0,
}
"""Default weights of the parts of a reward. Gold, experience and damage are in hundreds, `health` is the change of the hero's own health share, `towers` the
health of buildings that the enemy lost minus that of the own camp, in whole buildings, `win` 1 or −1 when a base falls."""
PARTS: Final = tuple(WEIGHTS)


@dataclass(frozen=True)
class Rewards:
    """Reward weights. `weights` override WEIGHTS by name. `sparse`: only `win`, 1 or −1. `team_spirit`: share of the team's mean in a
    hero's reward. `zero_sum`: subtract the mean of the other team. Weights and spirit may be schedules over timesteps."""

    weights: Mapping[str, Scheduled] = field(default_factory=dict)
    sparse: bool = False
    team_spirit: Scheduled = 0.0
    zero_sum: bool = True

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if name not in PARTS:
                raise ConfigError(f"The reward has no part {name!r}.", did_you_mean(name, PARTS))
            if not _within(weight, -1e6, 1e6):
                raise ConfigError(
                    f"The weight of {name} is {weight!r}.",
                    "Give a number up to a million, or points [[timestep, number], …] in rising order.",
                )
        if not _within(self.team_spirit, 0, 1):
            raise ConfigError(
                f"team_spirit is {self.team_spirit!r}.", "Give a number from 0 (own reward) to 1 (mean of the team)."
            )

    @property
    def scheduled(self) -> bool:
        return any(not isinstance(value, int | float) for value in (*self.weights.values(), self.team_spirit))

    def at(self, timestep: int) -> Rewards:
        """Return the rewards after `timestep` timesteps of training."""
        weights = {name: value_at(weight, timestep) for name, weight in self.weights.items()}
        return replace(self, weights=weights, team_spirit=value_at(self.team_spirit, timestep))

    @cached_property
    def vector(self) -> Floats:
        """Weights in the order of PARTS; schedules at their start."""
        if self.sparse:
            return np.array([float(part == "win") for part in PARTS], np.float32)
        return np.array([value_at(self.weights.get(part, WEIGHTS[part]), 0) for part in PARTS], np.float32)

    @cached_property
    def spirit(self) -> float:
        return 0.0 if self.sparse else value_at(self.team_spirit, 0)


def _within(value: Scheduled, low: float, high: float) -> bool:
    if isinstance(value, int | float):
        return low <= value <= high
    points = [tuple(point) for point in value if isinstance(point, Sequence)] if isinstance(value, Sequence) else []
    if not points or len(points) < len(value) or any(len(point) != 2 for point in points):
        return False
    times = [point[0] for point in points]
    return times == sorted(set(times)) and all(isinstance(v, int | float) and low <= v <= high for _, v in points)


@dataclass(frozen=True)
class ArenaSettings:
    """`seconds`: time limit in game time, after which a match is a draw. `every`: ticks per decision."""

    seconds: int = SECONDS
    every: int = 3
    rewards: Rewards = field(default_factory=Rewards)

    def __post_init__(self) -> None:
        if not 1 <= self.seconds <= MAX_SECONDS:
            raise ConfigError(f"The time limit of a match is {self.seconds!r} seconds.", f"From 1 to {MAX_SECONDS}.")
        if not 1 <= self.every <= TICKS_PER_SECOND:
            raise ConfigError(f"A decision every {self.every!r} ticks.", f"From 1 to {TICKS_PER_SECOND}, which is a second.")

    @property
    def limit(self) -> int:
        return self.seconds * TICKS_PER_SECOND


def size_of(mode: str | int) -> int:
    """Return the number of heroes of a camp: 3 for "3v3". Raises ConfigError."""
    found = re.fullmatch(r"([0-9]{1,2})v([0-9]{1,2})", str(mode))
    size = int(found[1]) if found and found[1] == found[2] else mode if isinstance(mode, int) else 0
    if not 1 <= size <= MAX_SIZE:
        raise ConfigError(f"The Arena has no mode {mode!r}.", f"1v1, 2v2 and so on, up to {MAX_SIZE}v{MAX_SIZE}.")
    return size


Lineup = Sequence[Sequence[int | str]]
"""Heroes of both camps, by id, name or archetype."""

USUAL: Final[Mapping[int, Lineup]] = {
    1: ((107,), (107,)),
    3: ((190, 173, 117), (141, 111, 107)),
}


def rows_of(lineup: Lineup | None, size: int) -> Ints32:
    """Return the hero table rows of all heroes of a match; None: the default line-up. Raises ConfigError."""
    if lineup is None:
        lineup = USUAL.get(size) or tuple(tuple(heroes.IDS[(i + camp) % len(heroes.IDS)] for i in range(size)) for camp in (0, 1))
    if len(lineup) != 2 or any(len(camp) != size for camp in lineup):
        raise ConfigError(f"The line-up {lineup!r} does not fit {size}v{size}.", f"Two camps of {size}.")
    return np.array([heroes.row_of(hero) for camp in lineup for hero in camp], np.int32)
