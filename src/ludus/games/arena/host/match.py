"""Plan, progress and result of one hosted match. No I/O, no clock."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, get_args

import numpy as np
import numpy.typing as npt

from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError
from ludus.games.arena.engine import layout
from ludus.games.arena.engine.heroes import HEROES
from ludus.games.arena.engine.settings import PARTS, Lineup, Rewards, rows_of, size_of
from ludus.games.arena.engine.vector import building_health
from ludus.games.arena.host.codec import Format

OnIllegal = Literal["nothing", "rule", "forfeit"]
OnLost = Literal["rule", "end"]
Sessions = Literal["camp", "hero", "match"]
Start = Literal["home", "lane"]
CAMPS: Final = 2
MAX_TIMEOUT_S: Final = 3600.0
MAX_PACE: Final = 100_000.0
MAX_WEIGHT: Final = 1e6
MAX_TOGETHER: Final = 256
_WEIGHT: Final = "weight_"
_NAMES: Final = ("outer tower", "inner tower", "base")
_KEYS = (
    "runtime_id", "game", "mode", "heroes", "camps", "eval_mode", "seed", "max_frames", "start_from", "options",
)  # fmt: skip
_FURTHER = ("runtime_id", "heroes", "camps", "seed", "options")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


# -- plan -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BotCamp:
    """A camp played by a built-in bot."""

    bot: str


@dataclass(frozen=True)
class ActorCamp:
    """A camp played by an actor; `timeout_s` limits each of its replies."""

    url: str
    timeout_s: float = 30.0
    token: str | None = field(default=None, repr=False)


CampPlayer = BotCamp | ActorCamp


@dataclass(frozen=True)
class HostOptions:
    """Options of a game process; `gamecore/server/games.yaml` declares the same ones."""

    rule: str = "medium"
    """Bot for camps without an actor and for lost actors."""
    pace: float = 0.0
    """Ticks per second; 0: unlimited."""
    on_illegal: OnIllegal = "nothing"
    """On an illegal or invalid action: do nothing, play the action of the rule, or forfeit the match."""
    on_lost: OnLost = "rule"
    """When an actor is lost: the rule takes over, or the match ends."""
    patience_s: float = 10.0
    """An actor is lost after this time and its time-out without a reply."""
    format: Format = "msgpack"
    sessions: Sessions = "camp"
    """One session per camp, per hero, or per match if one actor plays both camps."""
    record: bool = False
    lenient: bool = False
    """Redirect an order with an invalid target to the nearest valid one: for actors that choose button and target independently."""
    sparse: bool = False
    team_spirit: float = 0.0
    zero_sum: bool = True
    weights: Mapping[str, float] = field(default_factory=dict)
    """Reward weights (`settings.Rewards`), set by the options `weight_gold` and so on."""
    every: int = 3
    """Ticks per decision."""
    lockstep: bool = False
    """Ask all heroes at every decision, including dead ones, and send all the final observation."""
    whole: bool = False
    """Observations are {observation, state}; `state` is the input of a centralised value function."""
    start: Start = "home"
    """Start position of heroes: at their base, or in front of their outer tower."""
    together: int = 0
    """Maximum number of simultaneous matches that actors add in their replies; 0: none."""

    @property
    def rewards(self) -> Rewards:
        return Rewards(self.weights, self.sparse, self.team_spirit, self.zero_sum)


@dataclass(frozen=True)
class MatchPlan:
    runtime_id: str
    size: int
    lineup: Lineup | None
    """Heroes of both camps; None: the default ones."""
    camps: tuple[CampPlayer, CampPlayer]
    seed: int = 0
    max_ticks: int | None = None
    start_from: Path | None = None
    eval_mode: bool = False
    options: HostOptions = HostOptions()

    @property
    def mode(self) -> str:
        return f"{self.size}v{self.size}"


def read_plan(config: Any, tokens: Sequence[str | None], bots: Sequence[str]) -> MatchPlan:
    """Parse the JSON config of a gamecore server. Raises ConfigError with the key and its value."""
    _check_keys("The config", config, _KEYS, "The key {key!r} of the config is unknown.")
    options = read_options(config.get("options") or {}, bots)
    size, lineup = read_teams(config.get("mode"), config.get("heroes"))
    start_from = config.get("start_from")
    if start_from is not None and not isinstance(start_from, str):
        _reject("start_from", start_from, "It is the path of a saved state, or null.")
    max_ticks = config.get("max_frames")
    return MatchPlan(
        runtime_id=_short_name("runtime_id", config.get("runtime_id", "arena")),
        size=size,
        lineup=lineup,
        camps=_read_camps(config.get("camps"), tokens, options.rule),
        seed=_whole("seed", config.get("seed", 0), 0, (1 << 63) - 1),
        max_ticks=None if max_ticks is None else _whole("max_frames", max_ticks, 1, (1 << 31) - 1),
        start_from=None if start_from is None else Path(start_from),
        eval_mode=_flag("eval_mode", config.get("eval_mode", False)),
        options=options,
    )


def read_further_match(given: Any, first: MatchPlan, actor: ActorCamp, bots: Sequence[str]) -> MatchPlan:
    """Parse a further match from an actor's reply. It may set rule, start, team_spirit and weights; all other options must equal
    those of `first`. Raises ConfigError."""
    _check_keys("A further match", given, _FURTHER, "The key {key!r} of a further match is unknown.")
    camps = given.get("camps")
    if not isinstance(camps, Sequence) or len(camps) != CAMPS or not all(camp is True or camp is None for camp in camps):
        _reject("camps", camps, "It is a list of two: true, the actor plays it, or null, the rule does.")
    usual, own = first.options, replace(read_options(given.get("options") or {}, bots), together=first.options.together)
    shared = replace(usual, rule=own.rule, start=own.start, team_spirit=own.team_spirit, weights=own.weights)
    for name, value in vars(shared).items():
        if getattr(own, name) != value:
            raise ConfigError(f"{name} of a further match is {getattr(own, name)!r}.", f"In this process it is {value!r}.")
    size, lineup = read_teams(first.mode, given.get("heroes"))
    players = [actor if camp else BotCamp(own.rule) for camp in camps]
    return replace(
        first,
        runtime_id=_short_name("runtime_id", given.get("runtime_id")),
        size=size,
        lineup=lineup,
        camps=(players[0], players[1]),
        seed=_whole("seed", given.get("seed"), 0, (1 << 63) - 1),
        start_from=None,
        options=own,
    )


def read_teams(mode: Any, heroes: Any) -> tuple[int, Lineup | None]:
    """Return team size and line-up; both have defaults. Raises ConfigError."""
    lineup = _read_lineup(heroes) if heroes else None
    size = size_of(mode) if mode is not None else 1 if lineup is None else size_of(max(len(camp) for camp in lineup))
    rows_of(lineup, size)
    return size, lineup


def _read_lineup(heroes: Any) -> Lineup:
    if not isinstance(heroes, Sequence) or len(heroes) != CAMPS or not all(isinstance(camp, Sequence) for camp in heroes):
        _reject("heroes", heroes, "It is a list for each of the two camps: [[{hero_id: 190}, …], […]].")
    ids: list[list[Any]] = [[hero.get("hero_id") if isinstance(hero, Mapping) else hero for hero in camp] for camp in heroes]
    for camp, row in enumerate(ids):
        for i, hero in enumerate(row):
            if isinstance(hero, bool) or not isinstance(hero, (int, str)):
                _reject(f"heroes[{camp}][{i}].hero_id", hero, "It is the id of a hero, or its name.")
    return tuple(ids[0]), tuple(ids[1])


def _read_camps(given: Any, tokens: Sequence[str | None], rule: str) -> tuple[CampPlayer, CampPlayer]:
    given = given or []
    if not isinstance(given, Sequence) or len(given) > CAMPS:
        _reject("camps", given, "It is a list of at most two: null, or {url, timeout_s}.")
    players: list[CampPlayer] = [BotCamp(rule), BotCamp(rule)]
    for i, camp in enumerate(given):
        if camp is None:
            continue
        if not isinstance(camp, Mapping) or not isinstance(camp.get("url"), str):
            _reject(f"camps[{i}]", camp, "It is null (the rule plays), or {url: http://HOST:PORT, timeout_s: 30}.")
        timeout_s = _number(f"camps[{i}].timeout_s", camp.get("timeout_s", 30.0), 1e-3, MAX_TIMEOUT_S)
        players[i] = ActorCamp(camp["url"], timeout_s, tokens[i])
    return players[0], players[1]


def read_options(given: Any, bots: Sequence[str]) -> HostOptions:
    """Raises ConfigError."""
    checks: dict[str, Callable[[str, Any], Any]] = {
        "rule": partial(_one_of, known=bots),
        "pace": partial(_number, low=0.0, high=MAX_PACE),
        "on_illegal": partial(_one_of, known=get_args(OnIllegal)),
        "on_lost": partial(_one_of, known=get_args(OnLost)),
        "patience_s": partial(_number, low=0.0, high=MAX_TIMEOUT_S),
        "format": partial(_one_of, known=get_args(Format)),
        "sessions": partial(_one_of, known=get_args(Sessions)),
        "team_spirit": partial(_number, low=0.0, high=1.0),
        "every": partial(_whole, low=1, high=layout.TICKS_PER_SECOND),
        "start": partial(_one_of, known=get_args(Start)),
        "together": partial(_whole, low=0, high=MAX_TOGETHER),
    }
    checks |= dict.fromkeys(("record", "lenient", "sparse", "zero_sum", "lockstep", "whole"), _flag)
    weights = {f"{_WEIGHT}{part}": part for part in PARTS}
    checks |= dict.fromkeys(weights, partial(_number, low=-MAX_WEIGHT, high=MAX_WEIGHT))
    _check_keys("options", given, checks, "The option {key!r} is unknown.")
    values = {key: checks[key](key, value) for key, value in given.items()}
    made = HostOptions(
        **{key: value for key, value in values.items() if key not in weights},
        weights={part: values[key] for key, part in weights.items() if key in values},
    )
    if made.together and made.record:
        raise ConfigError(f"record is true and together is {made.together}.", "A process records one match: together: 0.")
    if made.format == "raw" and "sessions" not in given:  # a session of raw arrays has one seat
        return replace(made, sessions="hero")
    if made.format == "raw" and made.sessions != "hero":
        raise ConfigError(
            "format is 'raw' and sessions is 'camp'.", "Raw arrays are for one seat: sessions: hero, or format: msgpack."
        )
    return made


def _check_keys(name: str, given: Any, known: Collection[str], unknown: str) -> None:
    if not isinstance(given, Mapping):
        _reject(name, given, "It is a JSON object.")
    for key in given:
        if key not in known:
            raise ConfigError(unknown.format(key=key), did_you_mean(str(key), known))


def _one_of(name: str, given: Any, known: Sequence[str]) -> Any:
    if not isinstance(given, str) or given not in known:
        _reject(name, given, f"It is one of {', '.join(known)}.")
    return given


def _short_name(name: str, given: Any) -> str:
    if not isinstance(given, str) or _NAME.fullmatch(given) is None:  # used in file names
        _reject(name, given, "Letters, digits, '-', '_' and '.', at most 128 of them, the first a letter or a digit.")
    return given


def _whole(name: str, given: Any, low: int, high: int) -> int:
    if type(given) is not int or not low <= given <= high:
        _reject(name, given, f"It is a whole number from {low} to {high}.")
    return given


def _number(name: str, given: Any, low: float, high: float) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not low <= given <= high:
        _reject(name, given, f"It is a number from {low:g} to {high:g}.")
    return float(given)


def _flag(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        _reject(name, given, "It is true or false.")
    return given


def _reject(name: str, given: Any, hint: str) -> NoReturn:
    raise ConfigError(f"{name} is {reprlib.repr(given)}.", hint)


# -- progress ---------------------------------------------------------------------------------------------------------


@dataclass
class ReplyCounts:
    """Counters of the requests for one hero."""

    asked: int = 0
    illegal: int = 0
    """Illegal actions."""
    garbled: int = 0
    """Replies without a valid action."""
    late: int = 0
    """Decisions without a reply."""


class HostedMatch:
    """Progress of one match. Heroes are indexed [H], those of camp 0 first."""

    def __init__(self, plan: MatchPlan, bots: Sequence[str]) -> None:
        self.plan = plan
        self._bots = bots
        self.rule = bots.index(plan.options.rule)
        """Index of the bot that stands in for an actor."""
        self.heroes = CAMPS * plan.size
        self.bot_of_hero = np.full(self.heroes, -1, np.int8)
        """By hero: index of its bot; -1: an actor plays it."""
        self.acted = [False] * self.heroes
        """By hero: whether it acted in this session; only then it gets rewards."""
        self.unreported = np.zeros(self.heroes)
        """By hero: reward since its last reported step."""
        self.counts = [ReplyCounts() for _ in range(self.heroes)]
        self.refusals: dict[int, str] = {}
        """By hero: refusal of its last action, not yet sent."""
        self.lost: dict[int, str] = {}
        """By camp: why its actor was lost."""
        self.reason = ""
        """Why the match is over; empty while it runs."""
        self.winner: int | None = None
        self.completed = False
        """Whether it ended by the rules or by forfeit."""
        self.decided = False
        """Whether the end is terminal; otherwise the match was truncated."""
        for camp, player in enumerate(plan.camps):
            if isinstance(player, BotCamp):
                self._assign_bot(camp, player.bot)

    @property
    def names(self) -> list[str]:
        """Names of the players of the camps."""
        return [player.bot if isinstance(player, BotCamp) else player.url for player in self.plan.camps]

    def camp_of(self, hero: int) -> int:
        return hero // self.plan.size

    def seat_of(self, hero: int) -> str:
        """Seat name of a hero in a session of its camp."""
        return f"hero_{hero % self.plan.size}"

    def heroes_of(self, camp: int) -> list[int]:
        return list(range(camp * self.plan.size, (camp + 1) * self.plan.size))

    def reward(self, rewards: npt.NDArray[np.float32]) -> None:
        """Add the rewards of a decision. Those of a dead hero accumulate until its next step."""
        self.unreported += rewards

    def take_reward(self, hero: int) -> float:
        """Return and clear the unreported reward of a hero."""
        reward, self.unreported[hero] = float(self.unreported[hero]), 0.0
        return reward if self.acted[hero] else 0.0

    def reset_session(self, heroes: Sequence[int]) -> None:
        """Clear rewards and refusals of these heroes: a new session has replaced theirs."""
        for hero in heroes:
            self.acted[hero], self.unreported[hero] = False, 0.0
            self.refusals.pop(hero, None)

    def refuse(self, hero: int, why: str, *, garbled: bool) -> None:
        """Record an illegal action or, with `garbled`, an invalid reply."""
        self.counts[hero].garbled += garbled
        self.counts[hero].illegal += not garbled
        self.refusals[hero] = why
        if self.plan.options.on_illegal == "forfeit":
            camp = self.camp_of(hero)
            self.end(f"camp {camp} forfeits: {self.seat_of(hero)} {why}", winner=1 - camp, completed=True, decided=True)

    def lose(self, camp: int, why: str) -> None:
        """Record that the actor of a camp is lost."""
        self.lost.setdefault(camp, why)
        if self.plan.options.on_lost == "end":
            self.end(f"the actor of camp {camp} is gone: {why}")
        else:
            self._assign_bot(camp, self.plan.options.rule)

    def end_by_rules(self, winner: int, tick: int, limit: int) -> None:
        """End the match by the rules. `winner`: the camp, or -1."""
        if winner >= 0:
            self.end(f"the base of camp {1 - winner} has fallen", winner=winner, completed=True, decided=True)
        elif tick < limit:
            self.end("both bases have fallen", completed=True, decided=True)
        else:
            self.end("time is up", completed=True)

    def end(self, reason: str, *, winner: int | None = None, completed: bool = False, decided: bool = False) -> None:
        """End the match; ignored if it is already over."""
        if not self.reason:
            self.reason, self.winner, self.completed, self.decided = reason, winner, completed, decided

    def _assign_bot(self, camp: int, bot: str) -> None:
        self.bot_of_hero[self.heroes_of(camp)] = self._bots.index(bot)


# -- result -----------------------------------------------------------------------------------------------------------


def match_result(match: HostedMatch, units: npt.NDArray[np.int32], tick: int, seconds: float, digest: str) -> dict[str, Any]:
    """Return the result of a match with these units [FIELDS, U], ready for JSON."""
    size = match.plan.size
    return {
        "runtime_id": match.plan.runtime_id,
        "mode": match.plan.mode,
        "seed": match.plan.seed,
        "winner": match.winner,
        "reason": match.reason,
        "completed": match.completed,
        "ticks": tick,
        "seconds": round(seconds, 3),
        "players": match.names,
        "lost": {str(camp): why for camp, why in match.lost.items()},
        "heroes": [_hero_result(match, hero, units) for hero in range(match.heroes)],
        "buildings": [
            {name: round(float(share), 3) for name, share in zip(_NAMES, building_health(units, size, camp), strict=True)}
            for camp in range(CAMPS)
        ],
        "illegal": sum(count.illegal for count in match.counts),
        "garbled": sum(count.garbled for count in match.counts),
        "late": sum(count.late for count in match.counts),
        "hash": digest,
    }


def _hero_result(match: HostedMatch, hero: int, units: npt.NDArray[np.int32]) -> dict[str, Any]:
    known = HEROES[int(units[layout.HERO_ROW, hero])]
    fields: dict[str, Any] = {"camp": match.camp_of(hero), "hero_id": known.id, "name": known.name}
    return fields | {name: int(units[row, hero]) for name, row in layout.STATISTICS.items()} | vars(match.counts[hero])
