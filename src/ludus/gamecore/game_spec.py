"""Game specification: spaces, seats, opponents and options of a game on a gamecore server. No I/O.

The specification of the Arena follows from its mode and environment keywords; any other game declares it in env_config.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import gymnasium as gym
import numpy as np

from ludus.core import spaces
from ludus.core.plugins import did_you_mean
from ludus.envs.opponents.lineups import Lineups
from ludus.envs.opponents.opponent_mix import PAST, RULE, SELF, parse_opponent_mix
from ludus.envs.opponents.opponent_sampler import FIXED, OpponentSampler, bernoulli
from ludus.errors import ConfigError, Refused
from ludus.protocol import spec
from ludus.protocol.codec import ONLY_SEAT

ARENA: Final = "arena"
CAMPS: Final = 2
MAX_MATCHES_PER_PROCESS: Final = 256
ANY_RULE: Final = "rule"
"""Opponent name: the default rule of a declared game for camps without an actor."""
_ARENA_MATCHES: Final = 16
"""Arena matches per process: halves the cost of a match; more matches per process gain little (measured)."""
_SIDES: Final[Mapping[str, int | None]] = {"random": None, "0": 0, "1": 1, "blue": 0, "red": 1}


@dataclass(frozen=True)
class MatchDraw:
    """The random choices of one match."""

    camp: int
    """The camp of the learning side."""
    heroes: tuple[tuple[Any, ...], tuple[Any, ...]] | None
    """Heroes of camp 0 and of camp 1."""
    rule: str
    """Plays the camps without an actor; empty: the game's default."""
    seed: int
    repeats: bool = False
    """Whether it starts from a saved state of an earlier match."""
    lane: bool = False
    """Whether it starts in the lane."""
    lineup: int = 0
    """Index of the lineup."""


@dataclass
class GameSpec:
    """A game as seen by the rows of a vector environment."""

    game: str
    mode: str | None
    observation_space: gym.Space[Any]
    """Space of the environment; for some games it includes the action mask."""
    action_space: gym.Space[Any]
    masked: bool
    seats: tuple[str, ...]
    """Seats of one camp."""
    joint_seats: tuple[str, ...] = field(kw_only=True, default=())
    """Seats of both camps, camp 0 first, in a session that plays both; empty: the game has no such sessions."""
    opponent_shares: Mapping[str, float]
    """Share of matches per kind of opponent; all rules of the game are one kind."""
    opponent_sampler: OpponentSampler
    """Chooses the rule where the opponent is a rule of the game."""
    lineups: Lineups
    opponents: tuple[str, ...] = ()
    """Names of opponents for win and loss metrics."""
    repeat: float = 0.0
    """Share of matches that start from a saved state of the server."""
    lane: float = 0.0
    """Share of Arena matches that start in the lane."""
    side: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    scheduled_options: Callable[[int], Mapping[str, Any]] = field(default=lambda timesteps: {})
    """Further options, as a function of the training timesteps."""
    matches_per_process: int = 0
    """Default number of matches that a game process plays concurrently; 0: one process per match."""
    max_frames: int | None = None
    expected_start: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the `start` of a session must contain."""
    mask_splits: tuple[int, ...] = ()
    """Offsets at which the mask inside an observation is split."""
    scripts: tuple[str, ...] | None = None
    """Names of the players of the game itself; "" is the default one. None: not known."""
    statistics: tuple[str, ...] = ()
    """Statistics per hero in the result of a match."""
    ticks_per_second: float = 0.0

    @property
    def wire_space(self) -> gym.Space[Any]:
        """The observation space on the wire, without the mask, which is a separate key."""
        return spaces.split_mask(self.observation_space)[0]

    @property
    def mask_inside(self) -> bool:
        return spaces.split_mask(self.observation_space)[1] is not None

    def draw(self, random: np.random.Generator) -> MatchDraw:
        """Draw the next match, in the same order as the Arena's environments: equal seeds give equal matches."""
        camp = int(random.integers(CAMPS)) if self.side is None else self.side
        number, lineup = self.lineups.next(random, self.opponent_sampler.draw_lineup)
        heroes = None if lineup is None else lineup if camp == 0 else (lineup[1], lineup[0])
        rule = self.opponent_sampler.draw(random, number)
        seed = int(random.integers(1 << 31))
        lane = bernoulli(self.lane, random)
        return MatchDraw(camp, heroes, rule, seed, bool(self.repeat) and random.random() < self.repeat, lane, number)

    def check(self, about: Mapping[str, Any]) -> None:
        """Check that a session belongs to the specified game and version. Raises Refused (422)."""
        version = about.get("protocol", spec.VERSION)
        if version != spec.VERSION:
            message = f"The game uses version {reprlib.repr(version)} of the protocol; this is {spec.VERSION}."
            raise Refused(422, "protocol", message, "Run the same version on both sides.")
        for key, value in self.expected_start.items():
            if about.get(key) != value:
                message = f"{key} of this game is {reprlib.repr(about.get(key))}, expected {reprlib.repr(value)}."
                raise Refused(422, "game", message, "Run the same version of the game on both sides.")


def resolve_game(game: str, mode: Any, options: Mapping[str, Any], keywords: Mapping[str, Any]) -> GameSpec:
    """Build the specification from env_config. Raises ConfigError."""
    if game == ARENA and "observation_space" not in keywords:
        return _arena_spec(mode, options, keywords)
    return _custom_spec(game, mode, options, dict(keywords))


# -- the Arena ------------------------------------------------------------------------------------------------------------


def _arena_spec(mode: Any, options: Mapping[str, Any], keywords: Mapping[str, Any]) -> GameSpec:
    """`keywords`: of the Arena's environments."""
    from ludus.games.arena.bots.bots import BOTS
    from ludus.games.arena.engine import layout
    from ludus.games.arena.env import seats
    from ludus.games.arena.host.match_host import HERO_TABLE

    rest = {"opponent": SELF, **keywords}
    unknown = set(rest) - set(seats.ArenaOptions.__dataclass_fields__)
    if unknown:
        name = min(unknown)
        raise ConfigError(f"env_config has {name!r}.", did_you_mean(name, [*seats.ArenaOptions.__dataclass_fields__, *KEYS]))
    arena = seats.ArenaOptions(mode=mode or "1v1", **rest)
    if arena.states is not None:
        raise ConfigError(f"states is {arena.states!r}.", "Remove it: a gamecore server uses its own saved states with `repeat`.")
    size, settings = arena.size, arena.settings()

    def reward_options(timesteps: int) -> dict[str, Any]:
        rewards = settings.rewards.at(timesteps)
        return {"team_spirit": rewards.team_spirit} | {f"weight_{part}": weight for part, weight in rewards.weights.items()}

    game_options = {
        "every": arena.every,
        "sparse": arena.sparse,
        "zero_sum": arena.zero_sum,
        **({"whole": True} if arena.whole else {}),
        "lenient": True,
        **options,
        # Rows step in lock step; a game without its actor must end.
        "lockstep": True,
        "format": "msgpack",
        "sessions": "match",
        "on_lost": "end",
    }
    expected_start = {
        "game": ARENA,
        "rules": layout.RULES,
        "hero_table": HERO_TABLE,
        "mode": f"{size}v{size}",
        "ticks_per_decision": settings.every,
    }
    return GameSpec(
        game=ARENA,
        mode=f"{size}v{size}",
        observation_space=seats.observation_space(size, whole=arena.whole),
        action_space=seats.action_space(size),
        masked=True,
        seats=tuple(f"hero_{i}" for i in range(size)),
        joint_seats=tuple(f"{camp}_{i}" for camp in layout.CAMP_NAMES for i in range(size)),
        opponent_shares=_shares_by_kind(arena.shares),
        opponent_sampler=arena.opponents(),
        lineups=arena.lineups(),
        side=arena.camp(),
        opponents=tuple(kind.removeprefix(RULE) for kind in arena.shares if kind != SELF),
        repeat=arena.repeat,
        lane=arena.from_lane(),
        options=game_options,
        scheduled_options=reward_options,
        matches_per_process=0 if game_options.get("record") else _ARENA_MATCHES,
        max_frames=arena.limit(),
        expected_start=expected_start,
        mask_splits=tuple(np.cumsum(layout.options_of(size))[:-1].tolist()),
        scripts=("", *BOTS),
        statistics=seats.STATISTICS,
        ticks_per_second=layout.TICKS_PER_SECOND,
    )


def _shares_by_kind(opponent_shares: Mapping[str, float]) -> dict[str, float]:
    """Add up the shares of all rules of the game: which rule plays is drawn for every match."""
    scripted = sum(share for kind, share in opponent_shares.items() if kind.startswith(RULE))
    return {SELF: opponent_shares.get(SELF, 0.0), PAST: opponent_shares.get(PAST, 0.0), RULE: scripted}


# -- any other game -------------------------------------------------------------------------------------------------------

KEYS: Final = (
    *("observation_space", "action_space", "seats", "masked"),
    *("opponent", "side", "matchmaking", "lineup", "heroes", "max_frames", "expects"),
)


def _custom_spec(game: str, mode: Any, options: Mapping[str, Any], given: dict[str, Any]) -> GameSpec:
    for name in given:
        if name not in KEYS:
            raise ConfigError(f"env_config has {name!r}.", did_you_mean(name, KEYS))
    observation, action = (_space(given.get(key), key, game) for key in KEYS[:2])
    seats = given.get("seats", [ONLY_SEAT])
    if not isinstance(seats, Sequence) or isinstance(seats, str) or not seats or not all(isinstance(s, str) for s in seats):
        raise ConfigError(f"seats is {seats!r}.", "List the seat names of one camp, for example [tank, mage].")
    side = str(given.get("side", "random"))
    if side not in _SIDES:
        raise ConfigError(f"side is {side!r}.", f"One of {', '.join(_SIDES)}.")
    opponent = given.get("opponent", SELF)
    # The rules of a declared game are not known: accept every name after `rule:`.
    named = list(opponent) if isinstance(opponent, (Mapping, list, tuple)) else [opponent]
    accepted = [name.removeprefix(RULE) for name in named if isinstance(name, str) and name.startswith(RULE)]
    shares = parse_opponent_mix(opponent, [ANY_RULE, *accepted])
    rules = {kind.removeprefix(RULE): share for kind, share in shares.items() if kind.startswith(RULE)} or {ANY_RULE: 1.0}
    lineups = Lineups(given.get("lineup"), len(seats), given.get("heroes", ()))
    return GameSpec(
        game=game,
        mode=None if mode is None else str(mode),
        observation_space=observation,
        action_space=action,
        masked=bool(given.get("masked", spaces.split_mask(observation)[1] is not None)),
        seats=tuple(seats),
        opponent_shares=_shares_by_kind(shares),
        opponent_sampler=OpponentSampler(
            {"" if name == ANY_RULE else name: share for name, share in rules.items()},
            given.get("matchmaking", FIXED),
            lineups.choices,
        ),
        lineups=lineups,
        opponents=tuple(kind.removeprefix(RULE) for kind in shares if kind != SELF),
        side=_SIDES[side],
        options=dict(options),
        max_frames=given.get("max_frames"),
        expected_start=dict(given.get("expects", {})),
    )


def _space(given: Any, key: str, game: str) -> gym.Space[Any]:
    if isinstance(given, gym.Space):
        return given
    if not isinstance(given, Mapping):
        hint = f"Declare it: {key}: {{type: Box, shape: [3], low: -1, high: 1}}."
        raise ConfigError(f"The {key} of {game!r} is not declared.", hint)
    return spaces.from_json(given)
