"""Spaces, options and matches shared by the Gymnasium and PettingZoo environments.

A *row* is one hero of one match that the learner (or `past`) plays; bots play the others. Rows of a finished match do not change until
it restarts.
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
from ludus.games.arena.engine import heroes, layout
from ludus.games.arena.engine.mid_game_starts import MidGameStarts
from ludus.games.arena.engine.observations import BEYOND_ONE, ENTITY_FEATURES, SCALAR_FEATURES
from ludus.games.arena.engine.settings import SECONDS, ArenaSettings, Rewards, rows_of, size_of
from ludus.games.arena.engine.vector import Arena

RANDOM: Final = "random"
HOME, LANE = "home", "lane"
"""Start positions of heroes."""
STAND_IN: Final = "medium"
"""Bot that completes the last match when rows play each other and their number is odd."""
STATISTICS: Final = ("kills", "deaths", "assists", "last_hits", "gold", "level", "illegal")
"""Names of the statistics of a hero that the environments report."""

Observation = dict[str, Any]
"""Arrays; `action_mask` is a tuple with one for each head, the format of `action_space.sample(mask)`."""


# -- spaces -----------------------------------------------------------------------------------------------------------


def observation_space(size: int, *, whole: bool = False) -> gym.spaces.Dict:
    """Observation space of one hero; `whole`: with the state for a centralised value function."""
    slots = layout.units_of(size)
    observation: dict[str, gym.Space[Any]] = {
        "entities": _box(_bounds(ENTITY_FEATURES, slots)),
        "scalars": _box(_bounds(SCALAR_FEATURES)),
        "target_mask": gym.spaces.MultiBinary((len(layout.AIMED), slots)),
    }
    choices = gym.spaces.Tuple([gym.spaces.MultiBinary(options) for options in layout.options_of(size)])
    if whole:
        return gym.spaces.Dict({"observation": gym.spaces.Dict(observation), "state": state_space(size), "action_mask": choices})
    return gym.spaces.Dict(observation | {"action_mask": choices})


def action_space(size: int) -> gym.spaces.MultiDiscrete:
    return gym.spaces.MultiDiscrete(np.array(layout.options_of(size)))


def state_space(size: int) -> gym.spaces.Box:
    """Space of the state of a match without fog of war."""
    entities, scalars = _bounds(ENTITY_FEATURES, layout.units_of(size)), _bounds(SCALAR_FEATURES, 2 * size)
    return _box(np.concatenate([entities.reshape(2, -1), scalars.reshape(2, -1)], axis=1))


def _bounds(features: Sequence[str], *lead: int) -> Floats:
    """Return [2, *lead, features], as narrow as possible, so that samples of the space are realistic."""
    pairs = np.array([BEYOND_ONE.get(name, (0.0, 1.0)) for name in features], np.float32).T
    return np.broadcast_to(pairs.reshape(2, *[1] * len(lead), len(features)), (2, *lead, len(features))).copy()


def _box(bounds: Floats) -> gym.spaces.Box:
    return gym.spaces.Box(bounds[0], bounds[1], dtype=np.float32)


def row_of(observation: Any, row: int) -> Any:
    if isinstance(observation, dict):
        return {name: row_of(part, row) for name, part in observation.items()}
    return tuple(row_of(part, row) for part in observation) if isinstance(observation, tuple) else observation[row]


# -- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArenaOptions:
    """Keywords of the environments.

    `opponent`: a bot, a list of bots (one is drawn for every match), or `self`; in a vector also shares of them, as
    {self: 0.5, past: 0.2, medium: 0.3}, where `past` is an earlier policy that is not trained. `side`: camp 0 or 1, or `random`: drawn
    for every match. `lineup`: heroes of the own camp, then of the other; a list of line-ups (one is drawn for every match), or as in
    `Lineups`; None: the default ones. `start`: `home`, `lane` (in front of the outer tower), or shares of both, {lane: 0.9, home: 0.1}.
    `weights`, `sparse`, `team_spirit`, `zero_sum`: see `Rewards`.
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
    """Directory of saved states, as a gamecore server writes them; with `repeat`, matches start from a random one."""
    matchmaking: str = FIXED
    """How bots are drawn: `fixed`, by their shares; or `even`, weighted towards equal numbers of wins and losses."""
    repeat: float = 0.0
    """Share of matches that start from a state of an earlier match, or from one of `states`."""
    whole: bool = False
    """Observations are {observation, state}; `state` is the input of a centralised value function."""
    max_episode_steps: int | None = None

    @property
    def size(self) -> int:
        return size_of(self.mode)

    @property
    def against_self(self) -> bool:
        return self.opponent == SELF

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the kinds of opponents. Raises ConfigError."""
        return parse_opponent_mix(self.opponent, BOTS)

    def settings(self) -> ArenaSettings:
        rewards = Rewards(self.weights, self.sparse, self.team_spirit, self.zero_sum)
        return ArenaSettings(seconds=self.seconds, every=self.every, rewards=rewards)

    def limit(self) -> int:
        """Time limit in ticks. Raises ConfigError."""
        limit = self.settings().limit
        if self.max_episode_steps is None:
            return limit
        if not self.max_episode_steps >= 1:
            raise ConfigError(f"max_episode_steps is {self.max_episode_steps!r}.", "At least 1.")
        return min(limit, self.max_episode_steps * self.every)

    def from_lane(self) -> float:
        """Share of matches that start in the lane. Raises ConfigError."""
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
                "`states` is set and repeat is 0: no match would start from them.", "Set repeat, for example to 0.5."
            )
        directory = None if self.states is None else Path(self.states)
        return MidGameStarts(self.size, self.repeat, directory, self.limit()) if self.repeat else None

    def opponents(self) -> OpponentSampler:
        """Return the sampler of bots. Raises ConfigError."""
        drawn = {kind.removeprefix(RULE): share for kind, share in self.shares.items() if kind.startswith(RULE)}
        return OpponentSampler(drawn or {STAND_IN: 1.0}, self.matchmaking, self.lineups().choices)

    def camp(self) -> int | None:
        """Own camp; None: drawn for every match. Raises ConfigError."""
        if self.side == RANDOM:
            return None
        names = {"0": 0, "1": 1, layout.CAMP_NAMES[0]: 0, layout.CAMP_NAMES[1]: 1}
        if str(self.side) not in names:
            raise ConfigError(
                f"side is {self.side!r}.", f"0 or {layout.CAMP_NAMES[0]}, 1 or {layout.CAMP_NAMES[1]}, or {RANDOM}."
            )
        return names[str(self.side)]

    def lineups(self) -> Lineups:
        """Line-ups, own camp first. Raises ConfigError."""
        usual = [heroes.IDS[row] for row in rows_of(None, self.size)]
        given = [usual[: self.size], usual[self.size :]] if self.lineup is None else self.lineup
        found = Lineups(given, self.size, heroes.IDS)
        for hero in found.possible_heroes:
            heroes.row_of(hero)
        return found


# -- matches ----------------------------------------------------------------------------------------------------------


class Seats:
    """Matches in which rows play some heroes and bots play all others."""

    def __init__(
        self, options: ArenaOptions, learner_heroes: Sequence[Sequence[int]], past_heroes: Sequence[Sequence[int]] = ()
    ) -> None:
        """`learner_heroes`: for each match, the heroes of its rows, own camp first. `past_heroes`: the same for the rows after those.
        With a random camp the indices are relative to the drawn camp."""
        matches = len(learner_heroes)
        self.size, self._limit, self._from_lane = options.size, options.limit(), options.from_lane()
        self.arena = Arena(self.size, matches, options.settings(), lenient=True)
        places = [(m, hero) for side in (learner_heroes, past_heroes) for m, row in enumerate(side) for hero in row]
        self._rewards = options.settings().rewards
        self.match_of: Ints = np.array([m for m, _ in places], np.int64)
        """By row: index of its match."""
        self.hero_of: Ints = np.array([hero for _, hero in places], np.int64)
        """By row: index of its hero in the match."""
        self._seat_of = self.hero_of.copy()  # relative to the own camp
        self._rows = [np.flatnonzero(self.match_of == m) for m in range(matches)]
        self._camp, self._lineups, self._whole = options.camp(), options.lineups(), options.whole
        self.opponents = options.opponents()
        self._lineup_of: Ints = np.zeros(matches, np.int64)
        self.bot_of: Ints = np.zeros(matches, np.int64)
        """By match: index in BOTS of the bot that plays the other heroes."""
        self._bot_of_hero: npt.NDArray[np.int8] = np.full((matches, self.arena.heroes), -1, np.int8)
        self._has_bots = bool(len(self.match_of) < matches * self.arena.heroes)
        self._nothing: Ints32 = np.zeros((matches, self.arena.heroes, len(layout.HEADS)), np.int32)
        self._heads = np.cumsum(layout.options_of(self.size))[:-1].tolist()
        self._bases = [layout.structure_slot(self.size, camp, layout.CORE) for camp in (0, 1)]
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
        """Set the random seed of each match; None: keep its generator."""
        for m, seed in enumerate(seeds):
            if seed is not None:
                self._random[m] = np_random(seed)[0]
                if m == 0:
                    self._lineups.begin(seed)

    def begin(self, which: Ints | None = None) -> None:
        """Restart these matches (default: all)."""
        chosen = np.arange(self.arena.matches) if which is None else which
        for m in chosen[self._begun[chosen] & self._was_over[chosen]].tolist():
            self._record_result(m)
        seeds = [self._draw_match(int(m)) for m in chosen]
        self.arena.reset(seeds, chosen.tolist())
        self.arena.match[chosen, layout.LIMIT] = np.minimum(self.arena.match[chosen, layout.LIMIT], self._limit)
        if self._lane[chosen].any():
            self.arena.move_to_lane(chosen[self._lane[chosen]].tolist())
        self._was_over[chosen] = False
        self._begun[chosen] = True
        if self._mid_game_starts is not None:
            for m in chosen.tolist():
                self._mid_game_starts.begin(self.arena, m, self._random[m])

    def _record_result(self, m: int) -> None:
        """Record the result of a finished match if a bot played in it."""
        rows = self._rows[m]
        if 0 < len(rows) < self.arena.heroes:
            camp = int(self.hero_of[rows[0]]) // self.size
            won = int(self.arena.winner[m]) == camp
            self.opponents.record(BOTS[int(self.bot_of[m])], won, int(self._lineup_of[m]))

    def _draw_match(self, m: int) -> int:
        """Draw camp, heroes and opponent of the next match; return its seed."""
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
        """Play one decision of all rows, [rows, 4]; return rewards, terminated and truncated."""
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
            none = np.zeros(self.rows, np.bool_)
            return reward, none, none.copy()
        fallen = (self.arena.units[:, layout.ALIVE][:, self._bases] == 0).any(axis=1)
        return reward, (ended & fallen)[self.match_of], (ended & ~fallen)[self.match_of]

    def bot_actions(self, rows: Ints, bots: Sequence[int]) -> Ints32:
        """Return the actions of bots in these rows now, [len(rows), 4]. `bots`: an index in BOTS by row."""
        places = self.match_of[rows], self.hero_of[rows]
        who: npt.NDArray[np.int8] = np.full((self.arena.matches, self.arena.heroes), -1, np.int8)
        who[places] = bots
        actions: Ints32 = self.arena.bot_actions(who)[places]
        return actions

    def over(self) -> Ints:
        """Indices of finished matches."""
        return np.flatnonzero(self._was_over)

    def observe(self) -> Observation:
        """Return the observations of all rows, [rows, …], in new arrays."""
        entities, scalars, mask, targets = self.arena.observe_rows(self.match_of, self.hero_of)
        observation: Observation = {"entities": entities, "scalars": scalars, "target_mask": targets.view(np.int8)}
        choices = tuple(np.split(mask.view(np.int8), self._heads, axis=1))
        if self._whole:
            state = self.arena.central_observation(self.match_of, self.hero_of)
            return {"observation": observation, "state": state, "action_mask": choices}
        return observation | {"action_mask": choices}

    def state(self, m: int = 0) -> Floats:
        """Return the state of a match without fog of war, as the first hero of the first row's camp sees it."""
        first = self.hero_of[self._rows[m][:1]] // self.size * self.size
        state: Floats = self.arena.central_observation(np.array([m]), first)[0]
        return state

    def result(self) -> dict[str, npt.NDArray[Any]]:
        """Return for all rows the current result (1: won, -1: lost, 0: neither) and the statistics of the hero."""
        units, m, h = self.arena.units, self.match_of, self.hero_of
        winner = self.arena.winner[m]
        camp = h // self.size
        won = np.where(winner < 0, 0, np.where(winner == camp, 1, -1))
        statistics = {name: units[m, layout.STATISTICS[name], h] for name in STATISTICS}
        return {"won": won, "camp": camp, "ticks": self.arena.tick[m].copy(), **statistics}
