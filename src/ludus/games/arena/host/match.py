"""One match as it is ordered and as it went: who plays which camp, what each hero is owed, what went wrong. No I/O, no clock."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, get_args

import numpy as np
import numpy.typing as npt

from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError
from ludus.games.arena.engine.heroes import HEROES
from ludus.games.arena.engine.layout import (
    ALIVE,
    ASSISTS,
    DAMAGE,
    DAMAGE_BUILDINGS,
    DEATHS,
    EARNED,
    HERO_ROW,
    HP,
    KILLS,
    LAST_HITS,
    LEVEL,
    MAX_HP,
    OUTER,
    STRUCTURES,
    TAKEN,
    TICKS_PER_SECOND,
    hero_slot,
    structure_slot,
)
from ludus.games.arena.engine.settings import PARTS, Lineup, Rewards, rows_of, size_of
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


# -- as it is ordered -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BotCamp:
    """A camp that is played by a script of ours."""

    script: str


@dataclass(frozen=True)
class ActorCamp:
    """A camp that is played by an actor, which has `timeout_s` for each of its answers."""

    url: str
    timeout_s: float = 30.0
    token: str | None = field(default=None, repr=False)


CampPlayer = BotCamp | ActorCamp


@dataclass(frozen=True)
class HostOptions:
    """What a caller may choose besides the match itself; `gamecore/server/games.yaml` declares the same."""

    rule: str = "medium"
    """Plays camps without an actor, and steps in for one that is gone."""
    pace: float = 0.0
    """Ticks a second; 0: as fast as it goes."""
    on_illegal: OnIllegal = "nothing"
    """Instead of an action that is not allowed, or is none: do nothing, what the rule would do, or lose the match."""
    on_lost: OnLost = "rule"
    """When an actor is gone: the rule plays on, or the match ends."""
    patience_s: float = 10.0
    """An actor that has not answered for so long, and for its time-out, is gone."""
    format: Format = "msgpack"
    sessions: Sessions = "camp"
    """One for a camp, whose heroes are its seats; one for every hero; or one for the match, where one actor plays both camps."""
    record: bool = False
    lenient: bool = False
    """An order that is aimed at somebody it cannot be aimed at goes to the nearest one it can, and is not refused: for actors that
    choose button and target apart."""
    sparse: bool = False
    team_spirit: float = 0.0
    zero_sum: bool = True
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of the rewards that actors are told: `settings.Rewards`. Each weight is an option of its own, `weight_gold` and so on."""
    every: int = 3
    """Ticks from decision to decision."""
    lockstep: bool = False
    """All heroes are asked at every decision, the dead too, and all are shown the end: for actors whose seats go in step."""
    whole: bool = False
    """Observations are {observation, state}: the second is what a centralised value sees."""
    start: Start = "home"
    """Where heroes are when a match begins: at home, or in front of their outer tower."""
    together: int = 0
    """Actors hand over further matches in their replies, of which so many at most are played side by side. 0: there are none."""

    @property
    def rewards(self) -> Rewards:
        return Rewards(self.weights, self.sparse, self.team_spirit, self.zero_sum)


@dataclass(frozen=True)
class MatchPlan:
    runtime_id: str
    size: int
    lineup: Lineup | None
    """Heroes of either camp; None: the usual ones."""
    camps: tuple[CampPlayer, CampPlayer]
    seed: int = 0
    max_ticks: int | None = None
    start_from: Path | None = None
    eval_mode: bool = False
    options: HostOptions = HostOptions()

    @property
    def mode(self) -> str:
        return f"{self.size}v{self.size}"


def read_plan(config: Any, tokens: Sequence[str | None], scripts: Sequence[str]) -> MatchPlan:
    """From the JSON that a gamecore server writes. Raises ConfigError, which names the key and its value."""
    if not isinstance(config, Mapping):
        _reject("The config", config, "It is a JSON object.")
    for key in config:
        if key not in _KEYS:
            raise ConfigError(f"The key {key!r} of the config is unknown.", did_you_mean(str(key), _KEYS))
    options = read_options(config.get("options") or {}, scripts)
    size, lineup = read_teams(config.get("mode"), config.get("heroes"))
    start_from = config.get("start_from")
    if start_from is not None and not isinstance(start_from, str):
        _reject("start_from", start_from, "It is the path of a saved state, or null.")
    max_ticks = config.get("max_frames")
    return MatchPlan(
        runtime_id=_short_name("runtime_id", config.get("runtime_id", "arena")),
        size=size,
        lineup=lineup,
        camps=_camps(config.get("camps"), tokens, options.rule),
        seed=_whole("seed", config.get("seed", 0), 0, (1 << 63) - 1),
        max_ticks=None if max_ticks is None else _whole("max_frames", max_ticks, 1, (1 << 31) - 1),
        start_from=None if start_from is None else Path(start_from),
        eval_mode=_flag("eval_mode", config.get("eval_mode", False)),
        options=options,
    )


def read_handed_match(given: Any, first: MatchPlan, actor: ActorCamp, scripts: Sequence[str]) -> MatchPlan:
    """A match that an actor hands over, and that no other actor plays. It may have a rule, a start and weights of its own; all other options are
    those of the `first` one. Raises ConfigError."""
    if not isinstance(given, Mapping):
        _reject("A further match", given, "It is an object.")
    for key in given:
        if key not in _FURTHER:
            raise ConfigError(f"The key {key!r} of a further match is unknown.", did_you_mean(str(key), _FURTHER))
    camps = given.get("camps")
    if not isinstance(camps, Sequence) or len(camps) != CAMPS or not all(camp is True or camp is None for camp in camps):
        _reject("camps", camps, "It is a list of two: true, the actor plays it, or null, the rule does.")
    usual, own = first.options, replace(read_options(given.get("options") or {}, scripts), together=first.options.together)
    shared = replace(usual, rule=own.rule, start=own.start, team_spirit=own.team_spirit, weights=own.weights)
    for name, value in vars(shared).items():
        if getattr(own, name) != value:
            raise ConfigError(f"{name} of a further match is {getattr(own, name)!r}.", f"In this process it is {value!r}.")
    size, lineup = read_teams(first.mode, given.get("heroes"))
    players = [actor if camp else BotCamp(own.rule) for camp in camps]
    return MatchPlan(
        runtime_id=_short_name("runtime_id", given.get("runtime_id")),
        size=size,
        lineup=lineup,
        camps=(players[0], players[1]),
        seed=_whole("seed", given.get("seed"), 0, (1 << 63) - 1),
        max_ticks=first.max_ticks,
        eval_mode=first.eval_mode,
        options=own,
    )


def read_teams(mode: Any, heroes: Any) -> tuple[int, Lineup | None]:
    """Heroes a side, and who they are: either may be left to us. Raises ConfigError."""
    lineup = _lineup(heroes) if heroes else None
    size = size_of(mode) if mode is not None else 1 if lineup is None else size_of(max(len(camp) for camp in lineup))
    rows_of(lineup, size)
    return size, lineup


def _lineup(heroes: Any) -> Lineup:
    if not isinstance(heroes, Sequence) or len(heroes) != CAMPS or not all(isinstance(camp, Sequence) for camp in heroes):
        _reject("heroes", heroes, "It is a list for each of the two camps: [[{hero_id: 190}, …], […]].")
    ids: list[list[Any]] = [[hero.get("hero_id") if isinstance(hero, Mapping) else hero for hero in camp] for camp in heroes]
    for camp, row in enumerate(ids):
        for i, hero in enumerate(row):
            if isinstance(hero, bool) or not isinstance(hero, (int, str)):
                _reject(f"heroes[{camp}][{i}].hero_id", hero, "It is the id of a hero, or its name.")
    return tuple(ids[0]), tuple(ids[1])


def _camps(given: Any, tokens: Sequence[str | None], rule: str) -> tuple[CampPlayer, CampPlayer]:
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


def read_options(given: Any, scripts: Sequence[str]) -> HostOptions:
    """Raises ConfigError."""
    if not isinstance(given, Mapping):
        _reject("options", given, "It is an object.")
    known = (HostOptions.__dataclass_fields__.keys() - {"weights"}) | {f"{_WEIGHT}{part}" for part in PARTS}
    for key in given:
        if key not in known:
            raise ConfigError(f"The option {key!r} is unknown.", did_you_mean(str(key), known))
    default = HostOptions()
    weights = {part: given[f"{_WEIGHT}{part}"] for part in PARTS if f"{_WEIGHT}{part}" in given}
    made = HostOptions(
        rule=_one_of("rule", given.get("rule", default.rule), scripts),
        pace=_number("pace", given.get("pace", default.pace), 0.0, MAX_PACE),
        on_illegal=_one_of("on_illegal", given.get("on_illegal", default.on_illegal), get_args(OnIllegal)),
        on_lost=_one_of("on_lost", given.get("on_lost", default.on_lost), get_args(OnLost)),
        patience_s=_number("patience_s", given.get("patience_s", default.patience_s), 0.0, MAX_TIMEOUT_S),
        format=_one_of("format", given.get("format", default.format), get_args(Format)),
        sessions=_one_of("sessions", given.get("sessions", default.sessions), get_args(Sessions)),
        record=_flag("record", given.get("record", default.record)),
        lenient=_flag("lenient", given.get("lenient", default.lenient)),
        sparse=_flag("sparse", given.get("sparse", default.sparse)),
        team_spirit=_number("team_spirit", given.get("team_spirit", default.team_spirit), 0.0, 1.0),
        zero_sum=_flag("zero_sum", given.get("zero_sum", default.zero_sum)),
        weights={part: _number(f"{_WEIGHT}{part}", weight, -MAX_WEIGHT, MAX_WEIGHT) for part, weight in weights.items()},
        every=_whole("every", given.get("every", default.every), 1, TICKS_PER_SECOND),
        lockstep=_flag("lockstep", given.get("lockstep", default.lockstep)),
        whole=_flag("whole", given.get("whole", default.whole)),
        start=_one_of("start", given.get("start", default.start), get_args(Start)),
        together=_whole("together", given.get("together", default.together), 0, MAX_TOGETHER),
    )
    if made.together and made.record:
        raise ConfigError(f"record is true and together is {made.together}.", "A process records one match: together: 0.")
    if made.format == "raw" and "sessions" not in given:  # a session of raw arrays has one seat
        return HostOptions(**{**vars(made), "sessions": "hero"})
    if made.format == "raw" and made.sessions != "hero":
        raise ConfigError(
            "format is 'raw' and sessions is 'camp'.", "Raw arrays are for one seat: sessions: hero, or format: msgpack."
        )
    return made


def _one_of(name: str, given: Any, known: Sequence[str]) -> Any:
    if not isinstance(given, str) or given not in known:
        _reject(name, given, f"It is one of {', '.join(known)}.")
    return given


def _short_name(name: str, given: Any) -> str:
    if not isinstance(given, str) or _NAME.fullmatch(given) is None:  # files are called by it
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


# -- as it goes -------------------------------------------------------------------------------------------------------


@dataclass
class ReplyCounts:
    """Of what an actor was asked for one hero."""

    asked: int = 0
    illegal: int = 0
    """Actions that were not allowed."""
    garbled: int = 0
    """Replies that were no action."""
    late: int = 0
    """Decisions without an answer."""


class HostedMatch:
    """One match while it is played: heroes by their place in [H], those of camp 0 first."""

    def __init__(self, plan: MatchPlan, scripts: Sequence[str]) -> None:
        self.plan = plan
        self._scripts = scripts
        self.rule = scripts.index(plan.options.rule)
        """Stands in where there is nothing else to play."""
        self.heroes = CAMPS * plan.size
        self.script = np.full(self.heroes, -1, np.int8)
        """Which script plays each hero; -1: an actor does."""
        self.acted = [False] * self.heroes
        """In this session: only then is there something to reward."""
        self.owed = np.zeros(self.heroes)
        """Rewards since the last step that was told."""
        self.counts = [ReplyCounts() for _ in range(self.heroes)]
        self.refusals: dict[int, str] = {}
        """By hero: what its actor is yet to be told of its last action."""
        self.lost: dict[int, str] = {}
        """By camp: why its actor plays no more."""
        self.reason = ""
        """Why it is over; empty: it is not."""
        self.winner: int | None = None
        self.completed = False
        """It came to an end of its own: by the rules, or by forfeit."""
        self.decided = False
        """Nothing more could have come of it. Otherwise it was cut: by time, or from outside."""
        for camp, player in enumerate(plan.camps):
            if isinstance(player, BotCamp):
                self._assign_bot(camp, player.script)

    @property
    def names(self) -> list[str]:
        """Who plays the camps."""
        return [player.script if isinstance(player, BotCamp) else player.url for player in self.plan.camps]

    def camp_of(self, hero: int) -> int:
        return hero // self.plan.size

    def seat_of(self, hero: int) -> str:
        """As its camp calls it."""
        return f"hero_{hero % self.plan.size}"

    def heroes_of(self, camp: int) -> list[int]:
        return [hero_slot(self.plan.size, camp, i) for i in range(self.plan.size)]

    def reward(self, rewards: npt.NDArray[np.float32]) -> None:
        """Of the decision that was just played. A hero that lies dead is owed until it is asked again."""
        self.owed += rewards

    def take_reward(self, hero: int) -> float:
        """What this hero is owed, and is told now."""
        owed, self.owed[hero] = float(self.owed[hero]), 0.0
        return owed if self.acted[hero] else 0.0

    def reset_session(self, heroes: Sequence[int]) -> None:
        """Their session is another one now: nothing that came before belongs to it."""
        for hero in heroes:
            self.acted[hero], self.owed[hero] = False, 0.0
            self.refusals.pop(hero, None)

    def refuse(self, hero: int, why: str, *, garbled: bool) -> None:
        """What an actor said for this hero is no action, or not an allowed one."""
        self.counts[hero].garbled += garbled
        self.counts[hero].illegal += not garbled
        self.refusals[hero] = why
        if self.plan.options.on_illegal == "forfeit":
            camp = self.camp_of(hero)
            self.end(f"camp {camp} forfeits: {self.seat_of(hero)} {why}", winner=1 - camp, completed=True, decided=True)

    def lose(self, camp: int, why: str) -> None:
        """The actor of this camp is gone."""
        self.lost.setdefault(camp, why)
        if self.plan.options.on_lost == "end":
            self.end(f"the actor of camp {camp} is gone: {why}")
        else:
            self._assign_bot(camp, self.plan.options.rule)

    def end_by_rules(self, winner: int, tick: int, limit: int) -> None:
        """It is over by the rules. `winner`: the camp, or -1."""
        if winner >= 0:
            self.end(f"the base of camp {1 - winner} has fallen", winner=winner, completed=True, decided=True)
        elif tick < limit:
            self.end("both bases have fallen", completed=True, decided=True)
        else:
            self.end("time is up", completed=True)

    def end(self, reason: str, *, winner: int | None = None, completed: bool = False, decided: bool = False) -> None:
        """The first reason counts."""
        if not self.reason:
            self.reason, self.winner, self.completed, self.decided = reason, winner, completed, decided

    def _assign_bot(self, camp: int, script: str) -> None:
        self.script[self.heroes_of(camp)] = self._scripts.index(script)


# -- as it went -------------------------------------------------------------------------------------------------------


def match_result(match: HostedMatch, units: npt.NDArray[np.int32], tick: int, seconds: float, digest: str) -> dict[str, Any]:
    """The result of a match whose units [FIELDS, U] stand like this; ready for JSON."""
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
        "heroes": [_hero(match, hero, units) for hero in range(match.heroes)],
        "buildings": [_buildings(size, camp, units) for camp in range(CAMPS)],
        "illegal": sum(count.illegal for count in match.counts),
        "garbled": sum(count.garbled for count in match.counts),
        "late": sum(count.late for count in match.counts),
        "hash": digest,
    }


_STATISTICS: Final = {
    "level": LEVEL,
    "kills": KILLS,
    "deaths": DEATHS,
    "assists": ASSISTS,
    "last_hits": LAST_HITS,
    "gold": EARNED,
    "damage": DAMAGE,
    "damage_buildings": DAMAGE_BUILDINGS,
    "taken": TAKEN,
}


def _hero(match: HostedMatch, hero: int, units: npt.NDArray[np.int32]) -> dict[str, Any]:
    known = HEROES[int(units[HERO_ROW, hero])]
    shown: dict[str, Any] = {"camp": match.camp_of(hero), "hero_id": known.id, "name": known.name}
    return shown | {name: int(units[row, hero]) for name, row in _STATISTICS.items()} | vars(match.counts[hero])


def _buildings(size: int, camp: int, units: npt.NDArray[np.int32]) -> dict[str, float]:
    """Of each, the share of its health that is left."""
    slots = [structure_slot(size, camp, which) for which in range(OUTER, STRUCTURES)]
    return {
        name: round(float(units[HP, slot] * units[ALIVE, slot] / max(1, int(units[MAX_HP, slot]))), 3)
        for name, slot in zip(_NAMES, slots, strict=True)
    }
