"""Seats in matches of the Arena: whoever learns sits in some of them, scripts in the others. What all environments share.

A *row* is one seat of one match. Rows of a match that is over stand still until the match begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.utils.seeding import np_random

from ludus.core.schedule import Scheduled
from ludus.core.types import Bools, Floats, Ints, Ints32
from ludus.envs.opponents.lineups import Lineups
from ludus.envs.opponents.opponent_mix import RULE, SELF, parse_opponent_mix
from ludus.envs.opponents.opponent_sampler import FIXED, OpponentSampler, bernoulli
from ludus.errors import ConfigError
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.engine import heroes
from ludus.games.arena.engine.central_observation import central_observation
from ludus.games.arena.engine.jit import kernel
from ludus.games.arena.engine.layout import (
    AIMED,
    ALIVE,
    ASSISTS,
    BUTTONS,
    CORE,
    DEATHS,
    DIRECTIONS,
    EARNED,
    HEADS,
    ILLEGAL,
    KILLS,
    LAST_HITS,
    LEVEL,
    LIMIT,
    SEEN,
    structure_slot,
    units_of,
)
from ludus.games.arena.engine.mid_game_starts import MidGameStarts
from ludus.games.arena.engine.observations import (
    BEYOND_ONE,
    ENTITY_FEATURES,
    FEATURES,
    SCALAR_FEATURES,
    SCALARS,
    write_entity,
    write_masks,
    write_scalars,
)
from ludus.games.arena.engine.rules import observed_slot
from ludus.games.arena.engine.settings import SECONDS, ArenaSettings, Rewards, rows_of, size_of
from ludus.games.arena.engine.vector import MASK_BEFORE_TARGETS, Arena

CAMPS: Final = ("blue", "red")
"""Names of camp 0 and camp 1."""
RANDOM: Final = "random"
HOME, LANE = "home", "lane"
"""Where heroes are when a match begins."""
STAND_IN: Final = "medium"
"""Plays the other seat of the last row when rows play against each other and their number is odd."""
STATISTICS: Final[Mapping[str, int]] = {
    "kills": KILLS,
    "deaths": DEATHS,
    "assists": ASSISTS,
    "last_hits": LAST_HITS,
    "gold": EARNED,
    "level": LEVEL,
    "illegal": ILLEGAL,
}

Observation = dict[str, Any]
"""Arrays; `action_mask` is a tuple of them, one for each head, as `action_space.sample(mask)` wants it."""


# -- spaces -----------------------------------------------------------------------------------------------------------


def options_of(size: int) -> tuple[int, ...]:
    """Of each head of an action."""
    return len(BUTTONS), DIRECTIONS, DIRECTIONS, units_of(size)


def observation_space(size: int, *, whole: bool = False) -> gym.spaces.Dict:
    """Of one hero; `whole`: with what a centralised value sees beside it."""
    slots = units_of(size)
    seen: dict[str, gym.Space[Any]] = {
        "entities": _box(_bounds(ENTITY_FEATURES, slots)),
        "scalars": _box(_bounds(SCALAR_FEATURES)),
        "target_mask": gym.spaces.MultiBinary((len(AIMED), slots)),
    }
    choices = gym.spaces.Tuple([gym.spaces.MultiBinary(options) for options in options_of(size)])
    if whole:
        return gym.spaces.Dict({"observation": gym.spaces.Dict(seen), "state": state_space(size), "action_mask": choices})
    return gym.spaces.Dict(seen | {"action_mask": choices})


def action_space(size: int) -> gym.spaces.MultiDiscrete:
    return gym.spaces.MultiDiscrete(np.array(options_of(size)))


def state_space(size: int) -> gym.spaces.Box:
    """Of the whole of a match, with nothing hidden."""
    entities, scalars = _bounds(ENTITY_FEATURES, units_of(size)), _bounds(SCALAR_FEATURES, 2 * size)
    return _box(np.concatenate([entities.reshape(2, -1), scalars.reshape(2, -1)], axis=1))


def _bounds(features: Sequence[str], *lead: int) -> Floats:
    """[2, *lead, features]: as narrow as they are, so that whatever is drawn from the space could be seen."""
    pairs = np.array([BEYOND_ONE.get(name, (0.0, 1.0)) for name in features], np.float32).T
    return np.broadcast_to(pairs.reshape(2, *[1] * len(lead), len(features)), (2, *lead, len(features))).copy()


def _box(bounds: Floats) -> gym.spaces.Box:
    return gym.spaces.Box(bounds[0], bounds[1], dtype=np.float32)


def row_of(observation: Any, row: int) -> Any:
    if isinstance(observation, dict):
        return {name: row_of(part, row) for name, part in observation.items()}
    return tuple(row_of(part, row) for part in observation) if isinstance(observation, tuple) else observation[row]


# -- what can be chosen -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArenaOptions:
    """Keywords of the environments.

    `opponent`: a script, several of which one is drawn for every match, or (where it can be) `self`; in a vector also shares of
    them, as {self: 0.5, past: 0.2, medium: 0.3}, where `past` is somebody from outside who is not learned from. `side`: camp 0 or 1, or
    `random`: drawn for every match. `lineup`: heroes of the own side, then of the other one; several such, of which one is drawn for
    every match, or as `Lineups` says; None: the usual ones. `start`: where heroes are when a match begins, `home`, `lane`: in front of
    their outer tower, where there is something to learn from; or shares of both, {lane: 0.9, home: 0.1}. `weights`, `sparse`, `team_spirit`, `zero_sum`: see `Rewards`.
    """

    mode: str | int = 1
    opponent: str | Sequence[str] | Mapping[str, float] = "easy"
    side: int | str = RANDOM
    lineup: str | Sequence[Any] | Mapping[str, Any] | None = None
    seconds: int = SECONDS
    every: int = 3
    weights: Mapping[str, Scheduled] = field(default_factory=dict)
    sparse: bool = False
    team_spirit: Scheduled = 0.0
    zero_sum: bool = True
    start: str | Mapping[str, float] = HOME
    states: str | None = None
    """A directory of saved states, as a gamecore server keeps them: matches begin at one of them, drawn for each."""
    matchmaking: str = FIXED
    """How scripts are drawn: `fixed`, by their shares; or `even`, weighed so that about as many matches are won as lost."""
    repeat: float = 0.0
    """How many matches begin where an earlier one of this environment once was, or at one of `states`."""
    whole: bool = False
    """Show the whole of the match besides, for a centralised value: observations are {observation, state}."""
    max_episode_steps: int | None = None

    @property
    def size(self) -> int:
        return size_of(self.mode)

    @property
    def against_self(self) -> bool:
        return self.opponent == SELF

    @property
    def shares(self) -> dict[str, float]:
        """Of the kinds of opponents. Raises ConfigError."""
        return parse_opponent_mix(self.opponent, BOTS)

    def settings(self) -> ArenaSettings:
        rewards = Rewards(self.weights, self.sparse, self.team_spirit, self.zero_sum)
        return ArenaSettings(seconds=self.seconds, every=self.every, rewards=rewards)

    def limit(self) -> int:
        """In ticks."""
        limit = self.settings().limit
        if self.max_episode_steps is None:
            return limit
        if not self.max_episode_steps >= 1:
            raise ConfigError(f"max_episode_steps is {self.max_episode_steps!r}.", "At least 1.")
        return min(limit, self.max_episode_steps * self.every)

    def from_lane(self) -> float:
        """How many matches begin there. Raises ConfigError."""
        shares = self.start if isinstance(self.start, Mapping) else {str(self.start): 1.0}
        numbers = all(isinstance(share, int | float) and 0 <= share < math.inf for share in shares.values())
        if not (numbers and shares.keys() <= {HOME, LANE} and sum(shares.values()) > 0):
            raise ConfigError(f"start is {self.start!r}.", f"{HOME}, {LANE}, or shares of both: {{{LANE}: 0.9, {HOME}: 0.1}}.")
        return shares.get(LANE, 0.0) / sum(shares.values())

    def mid_game_starts(self) -> MidGameStarts | None:
        """Raises ConfigError."""
        if not 0 <= self.repeat <= 1:
            raise ConfigError(f"repeat is {self.repeat!r}.", "From 0, never, to 1, always.")
        if self.states is not None and not self.repeat:
            raise ConfigError(
                "There are states, and repeat is 0: no match would begin at them.", "Set repeat, for example to 0.5."
            )
        directory = None if self.states is None else Path(self.states)
        return MidGameStarts(self.size, self.repeat, directory, self.limit()) if self.repeat else None

    def opponents(self) -> OpponentSampler:
        """The scripts, where a script plays. Raises ConfigError."""
        drawn = {kind.removeprefix(RULE): share for kind, share in self.shares.items() if kind.startswith(RULE)}
        return OpponentSampler(drawn or {STAND_IN: 1.0}, self.matchmaking, self.lineups().choices)

    def camp(self) -> int | None:
        """The own one; None: drawn for every match."""
        if self.side == RANDOM:
            return None
        names = {"0": 0, "1": 1, CAMPS[0]: 0, CAMPS[1]: 1}
        if str(self.side) not in names:
            raise ConfigError(f"side is {self.side!r}.", f"0 or {CAMPS[0]}, 1 or {CAMPS[1]}, or {RANDOM}.")
        return names[str(self.side)]

    def lineups(self) -> Lineups:
        """Own side first. Raises ConfigError."""
        usual = [heroes.IDS[row] for row in rows_of(None, self.size)]
        given = [usual[: self.size], usual[self.size :]] if self.lineup is None else self.lineup
        found = Lineups(given, self.size, heroes.IDS)
        for hero in found.named:
            heroes.row_of(hero)
        return found


# -- the seats --------------------------------------------------------------------------------------------------------


class Seats:
    """Matches in each of which the heroes `seated` are played from outside and all others by scripts.

    `seated` are places among the heroes of a match, own side first. An own side that is drawn anew for every match takes them along.
    """

    def __init__(self, options: ArenaOptions, seated: Sequence[Sequence[int]], opposed: Sequence[Sequence[int]] = ()) -> None:
        """`seated`: for each match, in the order of the rows. `opposed`: the same for further rows, which come after all those."""
        matches = len(seated)
        self.size, self._limit, self._from_lane = options.size, options.limit(), options.from_lane()
        self.arena = Arena(self.size, matches, options.settings(), lenient=True)
        places = [(m, hero) for side in (seated, opposed) for m, row in enumerate(side) for hero in row]
        self._rewards = options.settings().rewards
        self.match_of: Ints = np.array([m for m, _ in places], np.int64)
        """Of each row."""
        self.hero_of: Ints = np.array([hero for _, hero in places], np.int64)
        """Of each row: its place among the heroes of the match."""
        self._seat_of = self.hero_of.copy()  # own side first
        self._rows = [np.flatnonzero(self.match_of == m) for m in range(matches)]
        self._camp, self._lineups, self._whole = options.camp(), options.lineups(), options.whole
        self.opponents = options.opponents()
        self._lineup_of: Ints = np.zeros(matches, np.int64)
        self.bot_of: Ints = np.zeros(matches, np.int64)
        """Of each match: who plays those that nobody else does, by its place in SCRIPTS."""
        self._bot_of_hero: npt.NDArray[np.int8] = np.full((matches, self.arena.heroes), -1, np.int8)
        self._has_bots = bool(len(self.match_of) < matches * self.arena.heroes)
        self._nothing: Ints32 = np.zeros((matches, self.arena.heroes, len(HEADS)), np.int32)
        self._heads = np.cumsum(options_of(self.size))[:-1].tolist()
        self._bases = [structure_slot(self.size, camp, CORE) for camp in (0, 1)]
        self._random: list[np.random.Generator] = [np_random(None)[0] for _ in range(matches)]
        self._was_over: Bools = np.ones(matches, np.bool_)
        self._mid_game_starts = options.mid_game_starts()
        self._begun: Bools = np.zeros(matches, np.bool_)
        self._lane: Bools = np.zeros(matches, np.bool_)

    @property
    def rows(self) -> int:
        return len(self.match_of)

    def set_timesteps(self, timesteps: int) -> None:
        if self._rewards.scheduled:
            self.arena.rewards = self._rewards.at(timesteps)

    def seed(self, seeds: Sequence[int | None]) -> None:
        """One for each match: all chance of its future comes from it. None: it goes on as it was."""
        for m, seed in enumerate(seeds):
            if seed is not None:
                self._random[m] = np_random(seed)[0]
                if m == 0:
                    self._lineups.begin(seed)

    def begin(self, which: Ints | None = None) -> None:
        """These matches begin anew, or all."""
        chosen = np.arange(self.arena.matches) if which is None else which
        for m in chosen[self._begun[chosen] & self._was_over[chosen]].tolist():
            self._record_result(m)
        seeds = [self._draw_match(int(m)) for m in chosen]
        self.arena.reset(seeds, chosen.tolist())
        self.arena.match[chosen, LIMIT] = np.minimum(self.arena.match[chosen, LIMIT], self._limit)
        if self._lane[chosen].any():
            self.arena.move_to_lane(chosen[self._lane[chosen]].tolist())
        self._was_over[chosen] = False
        self._begun[chosen] = True
        if self._mid_game_starts is not None:
            for m in chosen.tolist():
                self._mid_game_starts.begin(self.arena, m, self._random[m])

    def _record_result(self, m: int) -> None:
        """How a match went that is over, if a script played in it."""
        rows = self._rows[m]
        if 0 < len(rows) < self.arena.heroes:
            camp = int(self.hero_of[rows[0]]) // self.size
            won = int(self.arena.winner[m]) == camp
            self.opponents.record(BOTS[int(self.bot_of[m])], won, int(self._lineup_of[m]))

    def _draw_match(self, m: int) -> int:
        """Sides, heroes and opponents of the next match; and its seed."""
        random, size, number = self._random[m], self.size, self.arena.heroes
        camp = int(random.integers(2)) if self._camp is None else self._camp
        self._lineup_of[m], lineup = self._lineups.next(random, self.opponents.draw_lineup)
        rows, turn = self._rows[m], camp * size
        self.arena.lineup[m] = np.roll(rows_of(lineup, size), turn)
        self.hero_of[rows] = (self._seat_of[rows] + turn) % number
        self.bot_of[m] = BOTS.index(self.opponents.draw(random, int(self._lineup_of[m])))
        self._bot_of_hero[m] = self.bot_of[m]
        self._bot_of_hero[m, self.hero_of[rows]] = -1
        seed = int(random.integers(1 << 31))
        self._lane[m] = bernoulli(self._from_lane, random)
        return seed

    def step(self, actions: npt.NDArray[np.integer]) -> tuple[Floats, Bools, Bools]:
        """One decision of all rows, [rows, 4]: rewards, and which rows were terminated or truncated by it."""
        orders = self.arena.bot_actions(self._bot_of_hero) if self._has_bots else self._nothing
        orders[self.match_of, self.hero_of] = actions
        self.arena.step(orders)
        if self._mid_game_starts is not None:
            self._mid_game_starts.record(self.arena, self._random[0])
        over = self.arena.over
        ended = over & ~self._was_over
        self._was_over = over
        reward = self.arena.reward[self.match_of, self.hero_of]
        if not ended.any():
            nobody = np.zeros(self.rows, np.bool_)
            return reward, nobody, nobody.copy()
        fallen = (self.arena.units[:, ALIVE][:, self._bases] == 0).any(axis=1)
        return reward, (ended & fallen)[self.match_of], (ended & ~fallen)[self.match_of]

    def over(self) -> Ints:
        """Matches that are over: they stand still until they begin anew."""
        return np.flatnonzero(self._was_over)

    def observe(self) -> Observation:
        """What all rows see, in arrays of its own: [rows, …]."""
        rows, slots = self.rows, self.arena.slots
        entities = np.empty((rows, slots, FEATURES), np.float32)
        scalars = np.empty((rows, SCALARS), np.float32)
        mask = np.empty((rows, MASK_BEFORE_TARGETS + slots), np.bool_)
        targets = np.empty((rows, len(AIMED), slots), np.bool_)
        _write_observations(
            self.arena.units, self.arena.match, heroes.TABLE, self.match_of, self.hero_of, entities, scalars, mask, targets
        )  # fmt: skip
        seen: Observation = {"entities": entities, "scalars": scalars, "target_mask": targets.view(np.int8)}
        choices = tuple(np.split(mask.view(np.int8), self._heads, axis=1))
        if self._whole:
            return {"observation": seen, "state": self.central_observation(), "action_mask": choices}
        return seen | {"action_mask": choices}

    def central_observation(self) -> Floats:
        """[rows, S] what each row's hero would see if nothing were hidden, then the scalars of all heroes, its own first."""
        return central_observation(self.arena, self.match_of, self.hero_of)

    def state(self, m: int = 0) -> Floats:
        """The whole of a match as the first row's hero would see it if nothing were hidden, then the scalars of all heroes."""
        number, slots = self.arena.heroes, self.arena.slots
        units = self.arena.units[m : m + 1].copy()
        units[:, SEEN] = 1
        first = int(self.hero_of[self._rows[m][0]])
        heroes_of = (np.arange(number) + first // self.size * self.size) % number
        entities = np.empty((number, slots, FEATURES), np.float32)
        scalars = np.empty((number, SCALARS), np.float32)
        mask = np.empty((number, MASK_BEFORE_TARGETS + slots), np.bool_)
        targets = np.empty((number, len(AIMED), slots), np.bool_)
        _write_observations(
            units, self.arena.match[m : m + 1], heroes.TABLE, np.zeros(number, np.int64), heroes_of, entities, scalars, mask, targets
        )  # fmt: skip
        return np.concatenate([entities[0].reshape(-1), scalars.reshape(-1)])

    def result(self) -> dict[str, npt.NDArray[Any]]:
        """Of all rows, as it stands: who has won (1: this row's side, -1: the other, 0: nobody), and statistics of its hero."""
        units, m, h = self.arena.units, self.match_of, self.hero_of
        winner = self.arena.winner[m]
        camp = h // self.size
        won = np.where(winner < 0, 0, np.where(winner == camp, 1, -1))
        counted = {name: units[m, row, h] for name, row in STATISTICS.items()}
        return {"won": won, "camp": camp, "ticks": self.arena.tick[m].copy(), **counted}


@kernel
def _write_observations(
    units: Ints32,
    match: Ints32,
    table: Ints32,
    matches: Ints,
    heroes_of: Ints,
    entities: Floats,
    scalars: Floats,
    mask: Bools,
    target_mask: Bools,
) -> None:
    for k in range(matches.shape[0]):
        m, h = int(matches[k]), int(heroes_of[k])
        for row in range(entities.shape[1]):
            write_entity(units[m], match[m], table, h, observed_slot(match[m], h, row), entities[k, row])
        write_scalars(units[m], match[m], table, h, scalars[k])
        write_masks(units[m], match[m], table, h, mask[k], target_mask[k])
