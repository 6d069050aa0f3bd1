"""What is known of a game before its first match: its spaces and seats, who plays whom, and what it is to be told. No I/O.

For the Arena all of it follows from its mode and the keywords of its environments; any other game is declared.
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

ARENA: Final = "arena"
ONLY_SEAT: Final = ""
"""The name of the seat of a game that has one a camp: its messages have no seats around them."""
CAMPS: Final = 2
MAX_TOGETHER: Final = 256
ANY_RULE: Final = "rule"
"""As an opponent: whatever plays a camp of a declared game that has no actor."""
_TOGETHER: Final = 16
"""Matches of the Arena in a process: each costs half of what it costs alone, and more in one bring little."""
_SIDES: Final[Mapping[str, int | None]] = {"random": None, "0": 0, "1": 1, "blue": 0, "red": 1}


@dataclass(frozen=True)
class Draw:
    """One match: which side is the own one, who plays, and its chance."""

    camp: int
    heroes: tuple[tuple[Any, ...], tuple[Any, ...]] | None
    """Of camp 0 and of camp 1."""
    rule: str
    """Plays the camps without an actor; empty: whatever the game has."""
    seed: int
    repeats: bool = False
    """It begins where an earlier match once was."""
    lane: bool = False
    """It begins in the lane."""
    lineup: int = 0
    """Which one, of those that are drawn from."""


@dataclass
class Playable:
    """A game as its rows see it."""

    game: str
    mode: str | None
    observation_space: gym.Space[Any]
    """As the environment shows it: for some games with the mask inside."""
    action_space: gym.Space[Any]
    masked: bool
    seats: tuple[str, ...]
    """Of one camp."""
    joint: tuple[str, ...] = field(kw_only=True, default=())
    """Of both camps, that of camp 0 first, in a session that plays both; none: there are no such."""
    shares: Mapping[str, float]
    """Of the kinds of opponents; those that belong to the game count together."""
    rivals: OpponentSampler
    """Who plays where the opponent belongs to the game."""
    lineups: Lineups
    against: tuple[str, ...] = ()
    """Whom matches can be won or lost against."""
    repeat: float = 0.0
    """How many matches begin at a saved state of the server."""
    lane: float = 0.0
    """How many matches begin in the lane: of the Arena."""
    side: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    changing: Callable[[int], Mapping[str, Any]] = field(default=lambda timesteps: {})
    """Further options, which change with the time of training."""
    together: int = 0
    """Matches that a game process plays side by side, unless it is said otherwise; 0: each has one of its own."""
    max_frames: int | None = None
    expects: Mapping[str, Any] = field(default_factory=dict)
    """What the `start` of a session says, if it is the game that we mean."""
    heads: tuple[int, ...] = ()
    """Where the mask inside an observation is cut, if it has parts."""
    statistics: tuple[str, ...] = ()
    """Of a hero, in the result of a match."""
    ticks_a_second: float = 0.0

    @property
    def seen_space(self) -> gym.Space[Any]:
        """What the games send: without the mask, which has a key of its own."""
        return spaces.split_mask(self.observation_space)[0]

    @property
    def mask_inside(self) -> bool:
        return spaces.split_mask(self.observation_space)[1] is not None

    def draw(self, random: np.random.Generator) -> Draw:
        """In the order in which the Arena's own environments draw: the same seed is the same match."""
        camp = int(random.integers(CAMPS)) if self.side is None else self.side
        number, lineup = self.lineups.next(random, self.rivals.draw_lineup)
        heroes = None if lineup is None else lineup if camp == 0 else (lineup[1], lineup[0])
        rule = self.rivals.draw(random, number)
        seed = int(random.integers(1 << 31))
        lane = bernoulli(self.lane, random)
        return Draw(camp, heroes, rule, seed, bool(self.repeat) and random.random() < self.repeat, lane, number)

    def check(self, about: Mapping[str, Any]) -> None:
        """Whether it is the game that we mean. Raises Refused (422)."""
        version = about.get("protocol", spec.VERSION)
        if version != spec.VERSION:
            message = f"The game speaks version {reprlib.repr(version)} of the protocol, this is {spec.VERSION}."
            raise Refused(422, "protocol", message, "Run the same version on both sides.")
        for key, value in self.expects.items():
            if about.get(key) != value:
                message = f"{key} of this game is {reprlib.repr(about.get(key))}, here it is {reprlib.repr(value)}."
                raise Refused(422, "game", message, "Run the same version of the game on both sides.")


def playable(game: str, mode: Any, options: Mapping[str, Any], keywords: Mapping[str, Any]) -> Playable:
    """Raises ConfigError."""
    if game == ARENA and "observation_space" not in keywords:
        return _arena(mode, options, keywords)
    return _declared(game, mode, options, dict(keywords))


# -- the Arena ------------------------------------------------------------------------------------------------------------


def _arena(mode: Any, options: Mapping[str, Any], keywords: Mapping[str, Any]) -> Playable:
    """`keywords`: those of the Arena's environments."""
    from ludus.games.arena.engine.layout import RULES, TICKS_PER_SECOND
    from ludus.games.arena.env import seats
    from ludus.games.arena.host.match_host import HERO_TABLE

    rest = {"opponent": SELF, **keywords}
    unknown = set(rest) - set(seats.Options.__dataclass_fields__)
    if unknown:
        name = min(unknown)
        raise ConfigError(f"env_config has {name!r}.", did_you_mean(name, [*seats.Options.__dataclass_fields__, *KEYS]))
    asked = seats.Options(mode=mode or "1v1", **rest)
    if asked.states is not None:
        raise ConfigError(f"states is {asked.states!r}.", "A gamecore server has states of its own: `repeat` alone is enough.")
    size, settings = asked.size, asked.settings()
    rewards = settings.rewards
    told = {
        "every": asked.every,
        "sparse": asked.sparse,
        "zero_sum": asked.zero_sum,
        **({"whole": True} if asked.whole else {}),
        "lenient": True,
        **options,
        # What rows in lock step need; and a game whose actor is gone is of no use to anybody.
        "lockstep": True,
        "format": "msgpack",
        "sessions": "match",
        "on_lost": "end",
    }
    expects = {
        "game": ARENA,
        "rules": RULES,
        "hero_table": HERO_TABLE,
        "mode": f"{size}v{size}",
        "ticks_per_decision": settings.every,
    }
    return Playable(
        game=ARENA,
        mode=f"{size}v{size}",
        observation_space=seats.observation_space(size, whole=asked.whole),
        action_space=seats.action_space(size),
        masked=True,
        seats=tuple(f"hero_{i}" for i in range(size)),
        joint=tuple(f"{camp}_{i}" for camp in seats.CAMPS for i in range(size)),
        shares=_by_kind(asked.shares),
        rivals=asked.rivals(),
        lineups=asked.lineups(),
        side=asked.camp(),
        against=tuple(kind.removeprefix(RULE) for kind in asked.shares if kind != SELF),
        repeat=asked.repeat,
        lane=asked.from_lane(),
        options=told,
        changing=lambda timesteps: _weighed(rewards.at(timesteps)),
        together=0 if told.get("record") else _TOGETHER,
        max_frames=asked.limit(),
        expects=expects,
        heads=tuple(np.cumsum(seats.options_of(size))[:-1].tolist()),
        statistics=tuple(seats.STATISTICS),
        ticks_a_second=TICKS_PER_SECOND,
    )


def _weighed(rewards: Any) -> dict[str, Any]:
    return {"team_spirit": rewards.team_spirit} | {f"weight_{part}": weight for part, weight in rewards.weights.items()}


def _by_kind(shares: Mapping[str, float]) -> dict[str, float]:
    """Whoever belongs to the game counts together: which of them plays is drawn for every match."""
    scripted = sum(share for kind, share in shares.items() if kind.startswith(RULE))
    return {SELF: shares.get(SELF, 0.0), PAST: shares.get(PAST, 0.0), RULE: scripted}


# -- any other game -------------------------------------------------------------------------------------------------------

KEYS: Final = (
    "observation_space",
    "action_space",
    "seats",
    "masked",
    "opponent",
    "side",
    "matchmaking",
    "lineup",
    "heroes",
    "max_frames",
    "expects",
)


def _declared(game: str, mode: Any, options: Mapping[str, Any], given: dict[str, Any]) -> Playable:
    for name in given:
        if name not in KEYS:
            raise ConfigError(f"env_config has {name!r}.", did_you_mean(name, KEYS))
    observation, action = (_space(given.get(key), key, game) for key in KEYS[:2])
    seats = given.get("seats", [ONLY_SEAT])
    if not isinstance(seats, Sequence) or isinstance(seats, str) or not seats or not all(isinstance(s, str) for s in seats):
        raise ConfigError(f"seats is {seats!r}.", "The names of the seats of a camp: [tank, mage].")
    side = str(given.get("side", "random"))
    if side not in _SIDES:
        raise ConfigError(f"side is {side!r}.", f"One of {', '.join(_SIDES)}.")
    opponent = given.get("opponent", SELF)
    shares = parse_opponent_mix(opponent, [ANY_RULE, *_rules_in(opponent)])
    rules = {kind.removeprefix(RULE): share for kind, share in shares.items() if kind.startswith(RULE)} or {ANY_RULE: 1.0}
    lineups = Lineups(given.get("lineup"), len(seats), given.get("heroes", ()))
    return Playable(
        game=game,
        mode=None if mode is None else str(mode),
        observation_space=observation,
        action_space=action,
        masked=bool(given.get("masked", spaces.split_mask(observation)[1] is not None)),
        seats=tuple(seats),
        shares=_by_kind(shares),
        rivals=OpponentSampler(
            {"" if name == ANY_RULE else name: share for name, share in rules.items()},
            given.get("matchmaking", FIXED),
            lineups.choices,
        ),
        lineups=lineups,
        against=tuple(kind.removeprefix(RULE) for kind in shares if kind != SELF),
        side=_SIDES[side],
        options=dict(options),
        max_frames=given.get("max_frames"),
        expects=dict(given.get("expects", {})),
    )


def _space(given: Any, key: str, game: str) -> gym.Space[Any]:
    if isinstance(given, gym.Space):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"The {key} of {game!r} is not known.", f"Declare it: {key}: {{type: Box, shape: [3], low: -1, high: 1}}."
        )
    return spaces.from_json(given)


def _rules_in(opponent: Any) -> list[str]:
    """Of a game that we know nothing of, every name after `rule:` may be one."""
    names = list(opponent) if isinstance(opponent, (Mapping, list, tuple)) else [opponent]
    return [name.removeprefix(RULE) for name in names if isinstance(name, str) and name.startswith(RULE)]
