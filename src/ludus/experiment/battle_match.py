"""Matches of an environment whose agents stand in two camps (PettingZoo), in this process: many at once, each policy asked for all
its agents together.

A place whose match is over takes the next one. Every match has random numbers of its own. Whose agents earn more has won.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import re
import secrets
import shutil
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
from ludus.actor.multi import Copies, Minds, plain_action, step_of
from ludus.errors import EnvironmentFault, IncompatibleCheckpoint, LudusError, Unreachable, UsageError
from ludus.experiment.battle_result import SIDES, Hero, Played, Who, who_of
from ludus.experiment.battle_terms import Pairing, Terms, noise_seed, schedule
from ludus.experiment.contestants import RULE, Contestant, Script, Served, Trained
from ludus.experiment.steps import Ledger, Part, StepLog
from ludus.experiment.video import check_rgb, frame_rate
from ludus.game.agents import AgentSpaces, Match, Moved, at_random, make_match
from ludus.game.bodies import ONLY_SEAT, decode, encode, seats_from
from ludus.game.client import Client
from ludus.game.video import VideoWriter
from ludus.game.wrapping import Named
from ludus.model.acting import Acts, State
from ludus.serve.service import Fixed
from ludus.tree import Array, Tree, leaves, map_tree
from ludus.types import Bools

AT_ONCE: Final = 16
AT_RANDOM: Final = "random"
_REACH_S: Final = 5.0
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


def world_of(pair: Sequence[Contestant], name: str | None, options: Mapping[str, Any]) -> tuple[World | None, list[str]]:
    """The environment that is played: the one that is named, else that of whoever was trained with several agents; and what is to be
    said about it. None: neither. `options` go before what the training had."""
    known = [one for one in pair if isinstance(one, Trained) and isinstance(_mapping(one), Mapping)]
    if not known and name is None:
        return None, []
    chosen = name or known[0].env
    same = next((one for one in known if one.env == chosen), None)
    settings: Mapping[str, Any] = {} if same is None else same.settings
    config = {**(settings.get("env_config") or {}), **options}
    notes = [f"{one.label} was trained in {one.env}" for one in known if one.env != chosen]
    notes += [
        f"{one.label} was trained in {chosen} with other settings: {one.settings.get('env_config') or {}}"
        for one in known
        if one is not same and one.env == chosen and (one.settings.get("env_config") or {}) != (settings.get("env_config") or {})
    ]
    return World(chosen, config, settings.get("wrappers") or ()), notes


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

    def leave(self, match: int, agent: str) -> None:
        """The agent acts no more, at least for now: should it come back, it begins anew."""
        ...

    def end(self, match: int) -> None: ...

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

    def leave(self, match: int, agent: str) -> None:
        """It has no memory."""

    def end(self, match: int) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


class Policies:
    """Policies of ours, by agent: a recurrent state for each, and noise for each match."""

    def __init__(self, of: Mapping[str, Acts], places: int, deterministic: bool) -> None:
        self._models = {agent: str(id(policy)) for agent, policy in of.items()}
        self._policies = {str(id(policy)): policy for policy in of.values()}
        sources = {model: Fixed(policy, 0) for model, policy in self._policies.items()}
        self._minds = Minds(sources, torch.Generator(), explore=False)  # noise comes from the matches
        self._draws = not deterministic
        self._generators = [torch.Generator() for _ in range(places)]
        self._states: dict[tuple[int, str], State] = {}

    def begin(self, match: int, seed: int) -> None:
        self._generators[match].manual_seed(seed)

    def act(self, asked: Sequence[Asked]) -> list[Any]:
        by_model: dict[str, list[int]] = {}
        for row, one in enumerate(asked):
            by_model.setdefault(self._models[one.agent], []).append(row)
        actions: list[Any] = [None] * len(asked)
        with self._minds.acting():
            for model, rows in by_model.items():
                told = [(asked[r].observation, self._states.get(asked[r][:2]), asked[r].mask) for r in rows]
                for row, made in zip(rows, self._minds.decide(model, told, self._noise(model, asked, rows)), strict=True):
                    self._states[asked[row][:2]] = made.state
                    actions[row] = plain_action(made.action)
        return actions

    def _noise(self, model: str, asked: Sequence[Asked], rows: Sequence[int]) -> Array | None:
        """From a stream of the match: who else plays makes no difference."""
        if not self._draws:
            return None
        policy = self._policies[model]
        return np.concatenate([policy.draw_noise(1, self._generators[asked[row].match]) for row in rows])

    def leave(self, match: int, agent: str) -> None:
        self._states.pop((match, agent), None)

    def end(self, match: int) -> None:
        for key in [key for key in self._states if key[0] == match]:
            del self._states[key]

    def close(self) -> None:
        """Whoever lent the policies has them."""


class Called:
    """Somebody who answers games at an address: a session for each match, or one for each agent where there are no seats."""

    def __init__(self, one: Served, agents: Mapping[str, AgentSpaces]) -> None:
        self._client = Client(one.url, one.token, _REACH_S)
        self._fit = {agent: spaces.Fit(known.action, f"the action of {agent}") for agent, known in agents.items()}
        self._url = one.url
        self._names: dict[int, str] = {}
        self._open: dict[tuple[int, str], str] = {}
        self._gone = ""
        try:
            spec = self._client.spec()
            self._seated = "seats" in spec
            self._check(spec, agents)
        except BaseException:
            self._client.close()
            raise

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

    def act(self, asked: Sequence[Asked]) -> list[Any]:
        groups: dict[tuple[int, str], list[int]] = {}
        for row, one in enumerate(asked):
            groups.setdefault((one.match, "" if self._seated else one.agent), []).append(row)
        actions: list[Any] = [None] * len(asked)
        for key, rows in groups.items():
            for row, action in zip(rows, self._answers(key, [asked[row] for row in rows]), strict=True):
                actions[row] = action
        return actions

    def _answers(self, key: tuple[int, str], asked: Sequence[Asked]) -> list[Any]:
        if self._gone:
            return [Lost(self._gone)] * len(asked)
        try:
            reply = decode(self._client.tick(self._session(key), encode(self._body(asked), "msgpack")))
            given = reply["actions"] if self._seated else {asked[0].agent: reply["action"]}
            return [plain_action(self._fit[one.agent](given[one.agent])) for one in asked]
        except Unreachable as error:
            self._gone = _first(error)
            return [Lost(self._gone)] * len(asked)
        except LudusError as error:
            return [Lost(_first(error))] * len(asked)
        except (ValueError, KeyError, TypeError) as error:
            return [Lost(f"{self._url} answered what is no action: {error}"[:_SHORT])] * len(asked)

    def _session(self, key: tuple[int, str]) -> str:
        if key not in self._open:
            match, agent = key
            name = f"{self._names[match]}-{agent}" if agent else self._names[match]
            self._client.start(name, match=self._names[match])
            self._open[key] = name
        return self._open[key]

    def _body(self, asked: Sequence[Asked]) -> dict[str, Any]:
        told = {one.agent: _told(one) for one in asked}
        return {"seats": told} if self._seated else told[asked[0].agent]

    def leave(self, match: int, agent: str) -> None:
        if not self._seated:
            self._close((match, agent))

    def end(self, match: int) -> None:
        for key in [key for key in self._open if key[0] == match]:
            self._close(key)

    def _close(self, key: tuple[int, str]) -> None:
        name = self._open.pop(key, None)
        if name is not None and not self._gone:
            with contextlib.suppress(LudusError):  # a session that is not ended is forgotten there after a while
                self._client.end(name)

    def close(self) -> None:
        for key in list(self._open):
            self._close(key)
        self._client.close()


def _told(one: Asked) -> dict[str, Any]:
    said: dict[str, Any] = {"observation": map_tree(_listed, one.observation), "reward": one.reward}
    return said if one.mask is None else said | {"action_mask": one.mask.tolist()}


def _listed(part: Any) -> Any:
    return np.asarray(part).tolist()


def _first(error: LudusError) -> str:
    return error.message[:_SHORT]


# -- what is kept -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatchRecording:
    """All steps of a match, on disk; and its actions, to play it again for a film."""

    world: World
    steps: Path
    seed: int
    actions: Sequence[Mapping[str, Any]]
    earned: Mapping[str, float]
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
            with VideoWriter(aside, frame_rate(match.metadata) * (speed or 1.0)) as writer:
                earned = dict.fromkeys(match.agents, 0.0)
                moved = match.reset(self.seed)
                writer.add(check_rgb(match.render(), self.world.name))
                for number, actions in enumerate(self.actions):
                    if {turn.agent for turn in moved.turns} != set(actions):
                        break
                    moved = match.step(actions)
                    for agent, reward in step_of(number, {}, actions, moved).rewards.items():
                        earned[agent] += reward
                    writer.add(check_rgb(match.render(), self.world.name))
            if earned != self.earned:
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
        self.course = hashlib.blake2b(digest_size=16)
        self.steps = 0
        self.paper = contextlib.ExitStack()
        self.ledger: Ledger | None = None
        self.written: Path | None = None

    def begin(self, pairing: Pairing, agents: Sequence[str], aside: Path | None) -> None:
        self.pairing, self.steps, self.actions = pairing, 0, []
        self.course = hashlib.blake2b(str(pairing.a_camp).encode(), digest_size=16)
        self.earned, self.decisions = dict.fromkeys(agents, 0.0), dict.fromkeys(agents, 0)
        if aside is not None:
            self.written = aside / str(pairing.number)
            self.ledger = Ledger(self.paper.enter_context(Part(self.written, save_info=False)), pairing.number, agents)

    def note(self, actions: Mapping[str, Any], moved: Moved) -> None:
        step = step_of(self.steps, {turn.agent: turn.observation for turn in self.moved.turns}, actions, moved)
        for agent, reward in step.rewards.items():
            self.earned[agent] += reward
        for agent, action in actions.items():
            self.decisions[agent] += 1
            for _, part in leaves(action):
                self.course.update(np.asarray(part).tobytes())
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
        places = min(at_once, terms.games)
        try:
            self._copies = Copies(world.make, places, forgiving=True)
            self._stack.callback(self._copies.close)
            agents = self._copies[0].agents
            self.camps = camps_of(list(agents), camps, world.name)
            self._minds: dict[Who, Mind] = {}
            for who, one in zip(("a", "b"), pair, strict=True):
                sides = (0, 1) if terms.swap_sides else (int(who == "b"),)
                own = {agent: agents[agent] for side in sides for agent in self.camps[side]}
                mind = _mind(one, own, world, places, terms.deterministic)
                self._stack.callback(mind.close)
                self._minds["a" if who == "a" else "b"] = mind
        except BaseException:
            self._stack.close()
            raise
        self._agents = list(agents)
        self._courses: Counter[bytes] = Counter()
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
        waiting = iter(schedule(self._terms, 0))
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
        played, different = self._courses.total(), len(self._courses)
        if played >= _SEVERAL and different <= played / 2:
            self.notes.append(
                f"of {played} matches only {different} went different ways, so the interval says too little: where nothing is left to "
                "chance, --explore draws the actions"
            )

    def _begin(self, table: _Table, waiting: Iterator[Pairing], tell: Tell) -> None:
        for pairing in waiting:
            table.begin(pairing, self._agents, self._aside)
            try:
                table.moved = self._copies[table.number].reset(pairing.seed)
            except EnvironmentFault as fault:
                self._fail(table, _first(fault), tell)
                self._copies.renew(table.number)
                continue
            for who, mind in self._minds.items():
                mind.begin(table.number, noise_seed(pairing.seed, int(who == "b")))
            if not table.moved.over:
                return
            self._end(table, tell)

    def _decided(self, live: Sequence[_Table]) -> dict[int, dict[str, Any]]:
        asked: dict[Who, list[Asked]] = {"a": [], "b": []}
        for table in live:
            assert table.pairing is not None
            for turn in table.moved.turns:
                who = who_of(self._camp[turn.agent], table.pairing.a_camp)
                asked[who].append(Asked(table.number, turn.agent, turn.observation, turn.mask, turn.reward))
        actions: dict[int, dict[str, Any]] = {table.number: {} for table in live}
        for who, rows in asked.items():
            for one, action in zip(rows, self._minds[who].act(rows) if rows else (), strict=True):
                actions[one.match][one.agent] = action
        return actions

    def _advance(self, table: _Table, actions: Mapping[str, Any], waiting: Iterator[Pairing], tell: Tell) -> None:
        lost = next((action for action in actions.values() if isinstance(action, Lost)), None)
        try:
            if lost is None:
                table.note(actions, self._copies[table.number].step(actions))
        except EnvironmentFault as fault:
            self._fail(table, _first(fault), tell)
            self._copies.renew(table.number)
            self._begin(table, waiting, tell)
            return
        if lost is not None:
            self._fail(table, lost.why, tell)
        elif table.moved.over or table.steps >= self._limit:
            self._end(table, tell)
        else:
            for left in table.moved.leaving:
                for mind in self._minds.values():
                    mind.leave(table.number, left.agent)
            return
        self._begin(table, waiting, tell)

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
        winner = None if cut or earned[0] == earned[1] else who_of(int(earned[1] > earned[0]), pairing.a_camp)
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
            lopsided=abs(earned[0] - earned[1]),
        )
        recording = None
        if table.written is not None and table.steps:
            recording = MatchRecording(self._world, table.written, pairing.seed, table.actions, dict(table.earned), self.notes)
        tell(played, recording)


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
        policy = of[agent] = one.seats.get(agent, one.policy)
        _check_fits(one.label, policy.observation_space, policy.action_space, agent, known)
    return Policies(of, places, deterministic)


def _check_fits(who: str, seen: gym.Space[Any], done: gym.Space[Any], agent: str, known: AgentSpaces) -> None:
    """Raises IncompatibleCheckpoint."""
    for what, mine, there in (("sees", seen, known.observation), ("does", done, known.action)):
        if _form(mine, what) != _form(there, what):
            raise IncompatibleCheckpoint(f"{who} cannot play {agent!r}: what it {what} is {mine}, and there it is {there}.")


def _form(space: gym.Space[Any], what: str) -> Any:
    return spaces.array_spec(space) if what == "sees" else spaces.to_json(space)
