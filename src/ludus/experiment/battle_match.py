"""Matches of an environment whose agents stand in two camps (PettingZoo), in this process: many at once, each policy asked for all
its agents together.

A place whose match is over takes the next one. Every match has random numbers of its own. Whose agents earn more has won.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import logging
import math
import re
import resource
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
import torch

from ludus import spaces
from ludus.actor.evaluate import longest_episode
from ludus.actor.multi import Copies, Minds, Step, plain_action, step_of
from ludus.errors import EnvironmentFault, IncompatibleCheckpoint, LudusError, Unreachable, UsageError
from ludus.experiment.battle_result import SIDES, Hero, Played, Who, who_of
from ludus.experiment.battle_terms import Pairing, Terms, noise_seed, schedule
from ludus.experiment.contestants import RULE, Contestant, Script, Served, Trained
from ludus.experiment.steps import Ledger, Part, StepLog
from ludus.experiment.video import check_rgb, frame_rate
from ludus.game.agents import AgentSpaces, Leaving, Match, Moved, at_random, make_match
from ludus.game.bodies import ONLY_SEAT, decode, encode, seats_from
from ludus.game.client import Client
from ludus.game.video import VideoWriter
from ludus.game.wrapping import Named
from ludus.model.acting import Acts, State
from ludus.serve.service import Fixed
from ludus.tree import Array, Tree, leaves, map_tree
from ludus.types import Bools

log = logging.getLogger(__name__)

AT_ONCE: Final = 16
AT_RANDOM: Final = "random"
_REACH_S: Final = 5.0
_ANSWER_S: Final = 30.0
_AWAY_S: Final = 60.0
_PAUSE_S: Final = 0.5
_TRIES: Final = 5
_ROUNDING: Final = 1e-9
"""Of sums that are equal."""
_SHORT: Final = 300
_SEVERAL: Final = 10
"""Matches of which one may say how many are alike."""
_NUMBERED = re.compile(r"[_\- ]*[0-9]+$")

Camps = tuple[tuple[str, ...], tuple[str, ...]]
"""The agents of blue, and of red."""
Tell = Callable[[Played, "MatchRecording | None"], None]


@dataclass(frozen=True)
class World:
    """An environment, as somebody was trained in it."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Named = ()

    def make(self, render_mode: str | None = None) -> Match:
        return make_match(self.name, self.config, render_mode, self.wrappers)

    def check_pictures(self) -> None:
        """Raises UsageError when it has none."""
        match = self.make("rgb_array")
        try:
            match.reset(0)
            check_rgb(match.render(), self.name)
        finally:
            match.close()


def world_of(pair: Sequence[Contestant], name: str | None, options: Mapping[str, Any]) -> tuple[World | None, list[str]]:
    """The environment that is played: the one that is named, else that of whoever was trained with several agents; and what is to be
    said about it. None: neither. `options` go before what the training had."""
    known = [one for one in pair if isinstance(one, Trained) and isinstance(_mapping(one), Mapping)]
    if not known and name is None:
        return None, []
    chosen = name or known[0].env
    first: Trained | None = next((one for one in known if one.env == chosen), known[0] if known else None)
    notes = [f"{one.label} was trained in {one.env}" for one in known if one.env != chosen]
    config, wrappers = _made_with(first)
    for one in known:
        if one is not first and one.env == chosen and _made_with(one) != (config, wrappers):
            notes.append(
                f"{one.label} was trained in {chosen} with other settings than {first.label if first else ''}, which hold here"
            )
    return World(chosen, {**config, **options}, wrappers), notes


def _made_with(one: Trained | None) -> tuple[dict[str, Any], Named]:
    """env_config and wrappers of its training."""
    settings: Mapping[str, Any] = {} if one is None else one.settings
    return dict(settings.get("env_config") or {}), settings.get("wrappers") or ()


def _mapping(one: Trained) -> Any:
    return (one.settings.get("multiagent") or {}).get("policy_mapping")


def camps_of(agents: Sequence[str], said: str | None, env: str) -> Camps:
    """`said`: names or patterns of blue's agents, a slash, those of red's. Else: two agents, or two kinds that are numbered.

    Raises UsageError.
    """
    hint = "Say who plays with whom: --camps 'red_*/blue_*'."
    if said is None:
        kinds: dict[str, list[str]] = {}
        for agent in agents:
            kinds.setdefault(agent if len(agents) == 2 else _NUMBERED.sub("", agent), []).append(agent)
        if len(kinds) != 2:
            raise UsageError(f"The agents of {env} are {', '.join(agents)}: which are the two camps?", hint)
        first, second = kinds.values()
        return tuple(first), tuple(second)
    parts = [[part.strip() for part in camp.split(",")] for camp in said.split("/")]
    if len(parts) != 2:
        raise UsageError(f"The camps are {said!r}.", "Agents of blue, a slash, agents of red: 'red_*/blue_*'.")
    found = [tuple(a for a in agents if any(fnmatch.fnmatchcase(a, part) for part in camp)) for camp in parts]
    for agent in agents:
        number = sum(agent in camp for camp in found)
        if number != 1:
            wrong = "in both camps" if number else "in no camp"
            raise UsageError(f"{agent!r} of {env} is {wrong} of {said!r}; its agents are {', '.join(agents)}.", hint)
    if not all(found):
        raise UsageError(f"A camp of {said!r} is empty.", hint)
    return found[0], found[1]


# -- who plays --------------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """An agent of a contestant that is to act, in one of the matches that are played at once."""

    match: int
    agent: str
    observation: Tree
    mask: Bools | None
    reward: float


@dataclass(frozen=True)
class Lost:
    """Instead of an action: its player has none to give, and why."""

    why: str


class Mind(Protocol):
    """A contestant, in all matches at once."""

    def begin(self, match: int, seed: int) -> None: ...

    def act(self, asked: Sequence[Asked]) -> list[Any]:
        """As the environment takes them, or `Lost`."""
        ...

    def leave(self, match: int, left: Leaving) -> None:
        """The agent acts no more, at least for now: should it come back, it begins anew."""
        ...

    def end(self, match: int) -> None:
        """It is over, or given up; those who left before it was have been told of."""
        ...

    def close(self) -> None: ...


class Chance:
    """Everything that is allowed is equally likely."""

    def __init__(self, agents: Mapping[str, AgentSpaces], places: int) -> None:
        self._agents = agents
        self._random = [np.random.default_rng()] * places

    def begin(self, match: int, seed: int) -> None:
        self._random[match] = np.random.default_rng(seed)

    def act(self, asked: Sequence[Asked]) -> list[Any]:
        return [plain_action(at_random(self._agents[one.agent].action, one.mask, self._random[one.match])) for one in asked]

    def leave(self, match: int, left: Leaving) -> None:
        """It has no memory."""

    def end(self, match: int) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


class Policies:
    """Policies of ours, by agent: a recurrent state for each, and noise for each match."""

    def __init__(self, of: Mapping[str, Acts], places: int, deterministic: bool) -> None:
        self._of = of
        first: dict[int, str] = {}
        self._models = {agent: first.setdefault(id(policy), agent) for agent, policy in of.items()}
        sources = {model: Fixed(of[model], 0) for model in first.values()}
        self._minds = Minds(sources, torch.Generator(), explore=False)  # noise comes from the matches
        self._draws = not deterministic
        self._generators = [torch.Generator() for _ in range(places)]
        self._states: dict[tuple[int, str], State] = {}

    def begin(self, match: int, seed: int) -> None:
        self._generators[match].manual_seed(seed)

    def act(self, asked: Sequence[Asked]) -> list[Any]:
        noise = [self._drawn(one) for one in asked]
        by_model: dict[str, list[int]] = {}
        for row, one in enumerate(asked):
            by_model.setdefault(self._models[one.agent], []).append(row)
        actions: list[Any] = [None] * len(asked)
        with self._minds.acting():
            for rows in by_model.values():
                for row, action in zip(rows, self._decided([asked[r] for r in rows], [noise[r] for r in rows]), strict=True):
                    actions[row] = action
        return actions

    def _decided(self, asked: Sequence[Asked], noise: Sequence[Array | None]) -> list[Any]:
        """Of one model."""
        told = [(one.observation, self._states.get((one.match, one.agent)), one.mask) for one in asked]
        drawn = [part for part in noise if part is not None]
        try:
            made = self._minds.decide(self._models[asked[0].agent], told, np.concatenate(drawn) if drawn else None)
        except EnvironmentFault as fault:  # it answers what is no number: whom?
            if len(asked) == 1:
                return [Lost(_first(fault))]
            return [action for one, own in zip(asked, noise, strict=True) for action in self._decided([one], [own])]
        for one, decision in zip(asked, made, strict=True):
            self._states[one.match, one.agent] = decision.state
        return [plain_action(decision.action) for decision in made]

    def _drawn(self, one: Asked) -> Array | None:
        """From a stream of the match, in the order of its turns: who else plays makes no difference."""
        return self._of[one.agent].draw_noise(1, self._generators[one.match]) if self._draws else None

    def leave(self, match: int, left: Leaving) -> None:
        self._states.pop((match, left.agent), None)

    def end(self, match: int) -> None:
        for key in [key for key in self._states if key[0] == match]:
            del self._states[key]

    def close(self) -> None:
        """Whoever lent the policies has them."""


class Called:
    """Somebody who answers games at an address: a session for each match, or one for each agent where there are no seats."""

    def __init__(self, one: Served, agents: Mapping[str, AgentSpaces]) -> None:
        with contextlib.closing(Client(one.url, one.token, _REACH_S, 0)) as client:
            spec = client.spec()
        self._served, self._url = one, one.url
        self._seated = "seats" in spec
        self._check(spec, agents)
        self._client = Client(one.url, one.token, _ANSWER_S)
        self._fit = {agent: spaces.Fit(known.action, f"the action of {agent}") for agent, known in agents.items()}
        self._names: dict[int, str] = {}
        self._open: dict[tuple[int, str], str] = {}
        self._acted: set[tuple[int, str]] = set()
        self._parting: dict[tuple[int, str], dict[str, Any]] = {}  # what those who have left are yet to be told
        self._gone = ""
        self._waited = False

    def _check(self, spec: Mapping[str, Any], agents: Mapping[str, AgentSpaces]) -> None:
        """As far as it says what it plays."""
        if not self._seated and "observation_space" not in spec:
            return
        seats = seats_from(spec)
        for agent, known in agents.items():
            seat = seats.get(agent if self._seated else ONLY_SEAT)
            if seat is None:
                raise IncompatibleCheckpoint(f"{self._url} has no seat {agent!r}; its seats are {', '.join(seats)}.")
            _check_fits(self._url, seat.observation, seat.action, agent, known)

    def begin(self, match: int, seed: int) -> None:
        self._names[match] = f"battle-{secrets.token_hex(8)}"
        if self._gone and not self._waited:
            self._await()

    def _await(self) -> None:
        """Somebody who is started anew is back within a minute; one who is not, is gone for good."""
        until = time.monotonic() + _AWAY_S
        while self._gone and time.monotonic() < until:
            with (
                contextlib.suppress(LudusError),
                contextlib.closing(Client(self._url, self._served.token, _REACH_S, 0)) as client,
            ):
                client.spec()
                self._gone = ""
                return
            time.sleep(_PAUSE_S)
        self._waited = True

    def act(self, asked: Sequence[Asked]) -> list[Any]:
        groups: dict[tuple[int, str], list[int]] = {}
        for row, one in enumerate(asked):
            groups.setdefault(self._key(one.match, one.agent), []).append(row)
        actions: list[Any] = [None] * len(asked)
        for key, rows in groups.items():
            for row, action in zip(rows, self._answers(key, [asked[row] for row in rows]), strict=True):
                actions[row] = action
        return actions

    def _key(self, match: int, agent: str) -> tuple[int, str]:
        """Of its session."""
        return match, "" if self._seated else agent

    def _answers(self, key: tuple[int, str], asked: Sequence[Asked]) -> list[Any]:
        if self._gone:
            return [Lost(self._gone)] * len(asked)
        try:
            session = self._session(key)
            if parting := self._said(key[0]):
                self._client.tick(session, encode({"seats": parting}, "msgpack"))
            told = {one.agent: _told(one, rewarded=(one.match, one.agent) in self._acted) for one in asked}
            body = {"seats": told} if self._seated else told[asked[0].agent]
            reply = decode(self._client.tick(session, encode(body, "msgpack")))
            given = reply["actions"] if self._seated else {asked[0].agent: reply["action"]}
            self._acted.update((one.match, one.agent) for one in asked)
            return [plain_action(self._fit[one.agent](given[one.agent])) for one in asked]
        except Unreachable as error:
            self._gone, self._waited = _first(error), False
            return [Lost(self._gone)] * len(asked)
        except LudusError as error:
            return [Lost(_first(error))] * len(asked)
        except (ValueError, KeyError, TypeError) as error:
            return [Lost(f"{self._url} answered what is no action: {error}"[:_SHORT])] * len(asked)

    def _said(self, match: int) -> dict[str, Any]:
        """What the seats of a session hear who have left since it last heard of them."""
        return {agent: self._parting.pop((m, agent)) for m, agent in list(self._parting) if m == match}

    def _session(self, key: tuple[int, str]) -> str:
        if key not in self._open:
            match, agent = key
            name = f"{self._names[match]}-{agent}" if agent else self._names[match]
            self._client.start(name, match=self._names[match])
            self._open[key] = name
        return self._open[key]

    def leave(self, match: int, left: Leaving) -> None:
        if (match, left.agent) not in self._acted:
            return
        self._acted.discard((match, left.agent))
        words: dict[str, Any] = {"reward": left.reward, "terminated": True}
        if not left.terminated and left.observation is not None:
            words |= {"terminated": False, "truncated": True, "observation": map_tree(_listed, left.observation)}
        if self._seated:
            self._parting[match, left.agent] = words
        else:
            self._close((match, left.agent), words)

    def end(self, match: int) -> None:
        parting = self._said(match)
        for key in [key for key in self._open if key[0] == match]:
            self._close(key, {"seats": parting} if parting else {})
        self._acted = {key for key in self._acted if key[0] != match}

    def _close(self, key: tuple[int, str], words: Mapping[str, Any]) -> None:
        name = self._open.pop(key, None)
        if name is not None and not self._gone:
            with contextlib.suppress(LudusError):  # a session that is not ended is forgotten there after a while
                self._client.end(name, encode(words, "msgpack") if words else b"")

    def close(self) -> None:
        for key in list(self._open):
            self._close(key, {})
        self._client.close()


def _told(one: Asked, *, rewarded: bool) -> dict[str, Any]:
    """`rewarded`: what came before its first action belongs to none."""
    said: dict[str, Any] = {"observation": map_tree(_listed, one.observation)}
    said |= {"reward": one.reward} if rewarded else {}
    return said if one.mask is None else said | {"action_mask": one.mask.tolist()}


def _listed(part: Any) -> Any:
    return np.asarray(part).tolist()


def _first(error: LudusError) -> str:
    return error.message[:_SHORT]


# -- what is kept -----------------------------------------------------------------------------------------------------


class _Course:
    """What happened in a match, as a number that no other course has."""

    def __init__(self, a_camp: int) -> None:
        self._hash = hashlib.blake2b(str(a_camp).encode(), digest_size=16)

    def follow(self, step: Step) -> None:
        for told in (step.observations, step.actions, step.rewards):
            for agent, value in told.items():
                self._hash.update(agent.encode())
                for _, part in leaves(value):
                    self._hash.update(np.asarray(part).tobytes())

    def digest(self) -> bytes:
        return self._hash.digest()


def _seen(moved: Moved) -> dict[str, Tree]:
    return {turn.agent: turn.observation for turn in moved.turns}


@dataclass(frozen=True)
class MatchRecording:
    """All steps of a match, on disk; and its actions, to play it again for a film."""

    world: World
    steps: Path
    seed: int
    actions: Sequence[Mapping[str, Any]]
    a_camp: int
    course: bytes
    notes: list[str]

    def write(self, path: Path) -> Path:
        path = path.with_suffix(".npz")
        with StepLog(path, save_info=False) as log:
            log.extend(self.steps)
            log.write()
        return path

    def film(self, path: Path, speed: float | None) -> Path:
        """Raises UsageError when the environment has no pictures."""
        path = path.with_suffix(".mp4")
        aside = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
        match = self.world.make("rgb_array")
        try:
            with VideoWriter(aside, frame_rate(match.metadata) * (1.0 if speed is None else speed)) as writer:
                course, moved = _Course(self.a_camp), match.reset(self.seed)
                writer.add(check_rgb(match.render(), self.world.name))
                for number, actions in enumerate(self.actions):
                    if moved.over or {turn.agent for turn in moved.turns} != set(actions):
                        break
                    after = match.step(actions)
                    course.follow(step_of(number, _seen(moved), actions, after))
                    moved = after
                    writer.add(check_rgb(match.render(), self.world.name))
            if course.digest() != self.course:
                self.notes.append(
                    f"{path.name} shows another course than the match: {self.world.name} does not go the same way twice with the same seed"
                )
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
            match.close()
        return path

    def drop(self) -> None:
        shutil.rmtree(self.steps, ignore_errors=True)


# -- the matches ------------------------------------------------------------------------------------------------------


class _Table:
    """A place where one match is played after the other."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pairing: Pairing | None = None
        self.moved = Moved(over=True)
        self.earned: dict[str, float] = {}
        self.decisions: dict[str, int] = {}
        self.actions: list[Mapping[str, Any]] = []
        self.course = _Course(0)
        self.steps = 0
        self.paper = contextlib.ExitStack()
        self.ledger: Ledger | None = None
        self.written: Path | None = None

    def begin(self, pairing: Pairing, agents: Sequence[str], aside: Path | None) -> None:
        self.pairing, self.steps, self.actions = pairing, 0, []
        self.course = _Course(pairing.a_camp)
        self.earned, self.decisions = dict.fromkeys(agents, 0.0), dict.fromkeys(agents, 0)
        if aside is not None:
            self.written = aside / str(pairing.number)
            self.ledger = Ledger(self.paper.enter_context(Part(self.written, save_info=False)), pairing.number, agents)

    def note(self, actions: Mapping[str, Any], moved: Moved) -> None:
        step = step_of(self.steps, _seen(self.moved), actions, moved)
        self.course.follow(step)
        for agent, reward in step.rewards.items():
            self.earned[agent] += reward
        for agent in actions:
            self.decisions[agent] += 1
        if self.ledger is not None:
            self.ledger.note(step)
            self.actions.append(actions)
        self.moved, self.steps = moved, self.steps + 1

    def put_away(self) -> None:
        """What was written of the match is complete."""
        if self.ledger is not None:
            self.ledger.close()
        self.paper.close()
        self.pairing, self.ledger = None, None


class MatchStage:
    """Plays two contestants against each other in an environment; a context manager."""

    def __init__(
        self,
        pair: tuple[Contestant, Contestant],
        world: World,
        terms: Terms,
        *,
        camps: str | None = None,
        aside: Path | None = None,
        at_once: int = AT_ONCE,
    ) -> None:
        """`aside`: where steps of the matches are written; None: nowhere. Raises UsageError, IncompatibleCheckpoint, Unreachable."""
        _refuse(terms)
        self._terms, self._world, self._aside = terms, world, aside
        self._limit = longest_episode(world.name)
        self.notes: list[str] = []
        self._stack = contextlib.ExitStack()
        self._queue = schedule(terms, 0)
        try:
            self._copies = Copies(world.make, 1, forgiving=True)
            self._stack.callback(self._close_copies)
            agents = self._copies[0].agents
            places = _places(min(at_once, terms.games), agents, writes=aside is not None)
            self._copies.extend(world.make() for _ in range(places - 1))
            self.camps = camps_of(list(agents), camps, world.name)
            self._minds: dict[Who, Mind] = {}
            for who, one in zip(("a", "b"), pair, strict=True):
                sides = {pairing.a_camp if who == "a" else 1 - pairing.a_camp for pairing in self._queue}
                own = {agent: agents[agent] for side in sorted(sides) for agent in self.camps[side]}
                mind = _mind(one, own, world, places, terms.deterministic)
                self._stack.callback(mind.close)
                self._minds["a" if who == "a" else "b"] = mind
        except BaseException:
            self._stack.close()
            raise
        self._agents = list(agents)
        self._courses: Counter[bytes] = Counter()
        self._late, self._broken = 0, ""
        self._camp = {agent: camp for camp, members in enumerate(self.camps) for agent in members}
        self._tables = [_Table(number) for number in range(places)]

    def __enter__(self) -> MatchStage:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def about(self) -> dict[str, object]:
        camps = {side: list(members) for side, members in zip(SIDES, self.camps, strict=True)}
        return {"game": self._world.name, "options": dict(self._world.config), "camps": camps, "where": "this process"}

    def play(self, tell: Tell) -> None:
        """All of them; `tell` is told of each as it ends."""
        waiting = iter(self._queue)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # batches are small: threads would only wait for each other
        try:
            for table in self._tables:
                self._begin(table, waiting, tell)
            while live := [table for table in self._tables if table.pairing is not None]:
                actions = self._decided(live)
                for table in live:
                    self._advance(table, actions[table.number], waiting, tell)
        finally:
            torch.set_num_threads(threads)
            for table in self._tables:
                table.paper.close()
        for pairing in waiting:  # nobody is left to play them
            tell(Played(pairing.number, pairing.a_camp, pairing.seed, failed=self._broken), None)
        self._conclude()

    def _conclude(self) -> None:
        """What one should know before believing the numbers."""
        played, different = self._courses.total(), len(self._courses)
        if played >= _SEVERAL and different <= played / 2:
            self.notes.append(
                f"of {played} matches only {different} went different ways, so the interval says too little: where nothing is left to "
                "chance, --explore draws the actions"
            )
        if late := self._late + sum(match.late_rewards for match in self._copies):
            self.notes.append(f"{late} rewards came to agents who had left or had not acted yet; they are counted for nobody")

    def _renewed(self, table: _Table) -> bool:
        """Whether its environment could be made anew."""
        self._late += self._copies[table.number].late_rewards
        for _ in range(_TRIES):
            try:
                self._copies.renew(table.number)
            except EnvironmentFault as fault:
                self._broken = _first(fault)
            else:
                return True
        log.warning("One of the environments cannot be made anew, and plays no further match: %s", self._broken)
        return False

    def _close_copies(self) -> None:
        for match in self._copies:
            with contextlib.suppress(Exception):  # one that is broken may not even close
                match.close()

    def _begin(self, table: _Table, waiting: Iterator[Pairing], tell: Tell) -> None:
        for pairing in waiting:
            table.begin(pairing, self._agents, self._aside)
            try:
                table.moved = self._copies[table.number].reset(pairing.seed)
            except EnvironmentFault as fault:
                self._fail(table, _first(fault), tell)
                if not self._renewed(table):
                    return
                continue
            if not table.moved.over:
                for who, mind in self._minds.items():
                    mind.begin(table.number, noise_seed(pairing.seed, int(who == "b")))
                return
            self._fail(table, f"{self._world.name} is over before anybody has acted", tell)

    def _decided(self, live: Sequence[_Table]) -> dict[int, dict[str, Any]]:
        asked: dict[Who, list[Asked]] = {"a": [], "b": []}
        for table in live:
            for turn in table.moved.turns:
                asked[self._who(table, turn.agent)].append(
                    Asked(table.number, turn.agent, turn.observation, turn.mask, turn.reward)
                )
        actions: dict[int, dict[str, Any]] = {table.number: {} for table in live}
        for who, rows in asked.items():
            for one, action in zip(rows, self._minds[who].act(rows) if rows else (), strict=True):
                actions[one.match][one.agent] = action
        return actions

    def _advance(self, table: _Table, actions: Mapping[str, Any], waiting: Iterator[Pairing], tell: Tell) -> None:
        if lost := next((action for action in actions.values() if isinstance(action, Lost)), None):
            self._fail(table, lost.why, tell)
        else:
            try:
                table.note(actions, self._copies[table.number].step(actions))
            except EnvironmentFault as fault:
                self._fail(table, _first(fault), tell)
                if not self._renewed(table):
                    return
            else:
                for left in table.moved.leaving:
                    self._minds[self._who(table, left.agent)].leave(table.number, left)
                if not table.moved.over and table.steps < self._limit:
                    return
                self._end(table, tell)
        self._begin(table, waiting, tell)

    def _who(self, table: _Table, agent: str) -> Who:
        assert table.pairing is not None
        return who_of(self._camp[agent], table.pairing.a_camp)

    def _over(self, table: _Table) -> Pairing:
        assert table.pairing is not None
        pairing = table.pairing
        table.put_away()
        for mind in self._minds.values():
            mind.end(table.number)
        return pairing

    def _fail(self, table: _Table, why: str, tell: Tell) -> None:
        pairing = self._over(table)
        if table.written is not None:
            shutil.rmtree(table.written, ignore_errors=True)
        tell(Played(pairing.number, pairing.a_camp, pairing.seed, failed=why), None)

    def _end(self, table: _Table, tell: Tell) -> None:
        cut = not table.moved.over
        self._courses[table.course.digest()] += 1
        pairing = self._over(table)
        earned = [float(np.mean([table.earned[agent] for agent in camp])) for camp in self.camps]
        equal = math.isclose(*earned, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
        winner = None if cut or equal else who_of(int(earned[1] > earned[0]), pairing.a_camp)
        heroes = tuple(
            Hero(
                who_of(self._camp[agent], pairing.a_camp),
                agent,
                {"return": table.earned[agent], "decisions": float(table.decisions[agent])},
            )
            for agent in self._agents
        )
        played = Played(
            pairing.number,
            pairing.a_camp,
            pairing.seed,
            winner=winner,
            reason=f"not over after {table.steps} steps" if cut else "earned more" if winner else "earned the same",
            ticks=table.steps,
            heroes=heroes,
            lopsided=0.0 if equal else abs(earned[0] - earned[1]),
        )
        recording = None
        if table.written is not None and table.steps:
            recording = MatchRecording(
                self._world, table.written, pairing.seed, table.actions, pairing.a_camp, table.course.digest(), self.notes
            )
        tell(played, recording)


def _places(wanted: int, agents: Mapping[str, AgentSpaces], *, writes: bool) -> int:
    """Matches at once. Each column of what is written is an open file, and there may be only so many."""
    if not writes:
        return wanted
    seen = sum(1 for known in agents.values() for _ in leaves(spaces.array_spec(known.observation)))
    done = sum(1 for known in agents.values() for _ in leaves(spaces.array_spec(known.action, "action")))
    columns = 2 * seen + done + len(agents) + 8  # what was seen last has its own, and so has its number
    room, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(wanted, room // 2 // columns))


def _refuse(terms: Terms) -> None:
    """What only the Arena has."""
    given = {"--mode": terms.mode, "--lineup": terms.lineups, "--every": terms.every, "--seconds": terms.seconds}
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} is for the Arena.", "Leave it out; options of an environment are -o KEY=VALUE.")


def _mind(one: Contestant, agents: Mapping[str, AgentSpaces], world: World, places: int, deterministic: bool) -> Mind:
    """`agents`: those that it may have to play. Raises UsageError, IncompatibleCheckpoint, Unreachable."""
    if isinstance(one, Script):
        if one.name != AT_RANDOM:
            raise UsageError(f"{world.name} has no player {one.label!r}.", f"In environments there is {RULE}:{AT_RANDOM}.")
        return Chance(agents, places)
    if isinstance(one, Served):
        return Called(one, agents)
    of = {}
    for agent, known in agents.items():
        if agent not in one.seats and one.several:
            raise UsageError(
                f"{one.label} has the models {', '.join(one.several)}, and none that was trained to play {agent!r} of {world.name}.",
                "Say which one plays: --model-a, --model-b.",
            )
        policy = of[agent] = one.seats.get(agent, one.policy)
        _check_fits(one.label, policy.observation_space, policy.action_space, agent, known)
    return Policies(of, places, deterministic)


def _check_fits(who: str, seen: gym.Space[Any], done: gym.Space[Any], agent: str, known: AgentSpaces) -> None:
    """Raises IncompatibleCheckpoint."""
    for what, mine, there in (("sees", seen, known.observation), ("does", done, known.action)):
        if _form(mine, what) != _form(there, what):
            raise IncompatibleCheckpoint(
                f"{who} cannot play {agent!r}: what it {what} is {mine}, and there it is {there}.",
                "If it was trained for one side only: --no-swap-sides.",
            )


def _form(space: gym.Space[Any], what: str) -> Any:
    return spaces.array_spec(space) if what == "sees" else spaces.to_json(space)
