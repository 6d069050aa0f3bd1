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
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from ludus.core import spaces
from ludus.core.tree import Tree, leaves
from ludus.envs.pettingzoo import AgentSpaces, MatchStep, MultiAgentMatch, make_match
from ludus.envs.video_writer import FrameProgress, VideoWriter
from ludus.envs.wrappers import WrapperList
from ludus.errors import EnvironmentFault, UsageError
from ludus.experiments.evaluation.rollout_file import Ledger, Part, StepLog
from ludus.experiments.evaluation.video import check_rgb, frame_rate
from ludus.experiments.model_choice import agents_of
from ludus.io.atomic_file import path_for_replace
from ludus.sampling.episode_runner import episode_step_limit
from ludus.sampling.multi_agent import EnvCopies, Step, step_of
from ludus.tournament.contestants import Contestant, Trained
from ludus.tournament.players import Asked, Lost, Mind, mind_of
from ludus.tournament.result import SIDES, WHO, Hero, Played, Who, who_of, why
from ludus.tournament.settings import Pairing, Terms, noise_seed, schedule

log = logging.getLogger(__name__)

AT_ONCE: Final = 16
_TRIES: Final = 5
_ROUNDING: Final = 1e-9
"""Of sums that are equal."""
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
    wrappers: WrapperList = ()

    def make(self, render_mode: str | None = None) -> MultiAgentMatch:
        return make_match(self.name, self.config, render_mode, self.wrappers)

    def check_pictures(self) -> None:
        """Raises UsageError when it has none."""
        match = self.make("rgb_array")
        try:
            match.reset(0)
            check_rgb(match.render(), self.name)
        finally:
            _closed(match)


def world_of(pair: Sequence[Contestant], name: str | None, options: Mapping[str, Any]) -> tuple[World | None, list[str]]:
    """The environment that is played: the one that is named, else that of whoever was trained with several agents; and what is to be
    said about it. None: neither. `options` go before what the training had."""
    known = [one for one in pair if isinstance(one, Trained) and agents_of(one.settings)]
    if not known and name is None:
        return None, []
    chosen = name or known[0].env
    first = next((one for one in known if one.env == chosen), None)
    notes = [f"{one.label} was trained in {one.env}" for one in known if one.env != chosen]
    settings = _made_with(first)
    others = [one for one in known if one.env == chosen and _made_with(one) != settings]
    notes += [f"{one.label} was trained in {chosen} with other settings than those that hold here" for one in others]
    config, wrappers = settings
    return World(chosen, {**config, **options}, wrappers), notes


def _made_with(one: Trained | None) -> tuple[dict[str, Any], WrapperList]:
    """env_config and wrappers of its training."""
    settings: Mapping[str, Any] = {} if one is None else one.settings
    return dict(settings.get("env_config") or {}), settings.get("wrappers") or ()


def _closed(match: MultiAgentMatch) -> None:
    with contextlib.suppress(Exception):  # one that is broken may not even close
        match.close()


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


def _seen(moved: MatchStep) -> dict[str, Tree]:
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
        with StepLog(path, save_info=False) as steps:
            steps.extend(self.steps)
            steps.write()
        return path

    def film(self, path: Path, speed: float | None, progress: FrameProgress | None = None) -> Path:
        """Raises UsageError when the environment has no pictures."""
        path = path.with_suffix(".mp4")
        match = self.world.make("rgb_array")
        rate = frame_rate(match.metadata) * (1.0 if speed is None else speed)
        try:
            with path_for_replace(path) as temporary, VideoWriter(temporary, rate) as writer:
                course, moved = _Course(self.a_camp), match.reset(self.seed)
                writer.add(check_rgb(match.render(), self.world.name))
                for number, actions in enumerate(self.actions):
                    if moved.over or {turn.agent for turn in moved.turns} != set(actions):
                        break
                    after = match.step(actions)
                    course.follow(step_of(number, _seen(moved), actions, after))
                    moved = after
                    writer.add(check_rgb(match.render(), self.world.name))
                    if progress is not None:
                        progress(writer.frames, len(self.actions) + 1)
            if course.digest() != self.course:
                self.notes.append(
                    f"{path.name} shows another course than the match: {self.world.name} does not go the same way twice with the same seed"
                )
        finally:
            _closed(match)
        return path

    def drop(self) -> None:
        shutil.rmtree(self.steps, ignore_errors=True)


# -- the matches ------------------------------------------------------------------------------------------------------


class _Table:
    """A place where one match is played after the other."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pairing: Pairing | None = None
        self.moved = MatchStep(over=True)
        self.earned: dict[str, float] = {}
        self.decisions: dict[str, int] = {}
        self.actions: list[Mapping[str, Any]] = []
        self.course = _Course(0)
        self.acted: set[str] = set()
        self.given = 0
        """Rewards of agents who left without having acted: they are theirs, in all matches so far."""
        self.steps = 0
        self.paper = contextlib.ExitStack()
        self.ledger: Ledger | None = None
        self.written: Path | None = None

    def begin(self, pairing: Pairing, agents: Sequence[str], aside: Path | None) -> None:
        self.pairing, self.steps, self.actions = pairing, 0, []
        self.acted.clear()
        self.course = _Course(pairing.a_camp)
        self.earned, self.decisions = dict.fromkeys(agents, 0.0), dict.fromkeys(agents, 0)
        if aside is not None:
            self.written = aside / str(pairing.number)
            self.ledger = Ledger(self.paper.enter_context(Part(self.written, save_info=False)), pairing.number, agents)

    def note(self, actions: Mapping[str, Any], moved: MatchStep) -> None:
        step = step_of(self.steps, _seen(self.moved), actions, moved)
        self.course.follow(step)
        for agent, reward in step.rewards.items():
            self.earned[agent] += reward
        for agent in actions:
            self.decisions[agent] += 1
        self.acted.update(actions)
        for left in moved.departures:
            self.given += left.agent not in self.acted and left.reward != 0
            self.acted.discard(left.agent)
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
        self._world, self._aside = world, aside
        self._limit = episode_step_limit(world.name)
        self.notes: list[str] = []
        self._stack = contextlib.ExitStack()
        self._queue = schedule(terms, 0)
        try:
            self._copies = EnvCopies(world.make, 1, forgiving=True)
            self._stack.callback(self._close_copies)
            agents = self._copies[0].agents
            places = _places(min(at_once, terms.games), agents, writes=aside is not None)
            self._copies.extend(world.make() for _ in range(places - 1))
            self.camps = camps_of(list(agents), camps, world.name)
            self._minds: dict[Who, Mind] = {}
            for who, one in zip(WHO, pair, strict=True):
                sides = {camp for camp in (0, 1) for pairing in self._queue if who_of(camp, pairing.a_camp) == who}
                own = {agent: agents[agent] for side in sorted(sides) for agent in self.camps[side]}
                mind = mind_of(one, own, world.name, places, terms.deterministic)
                self._stack.callback(mind.close)
                self._minds[who] = mind
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
        late = self._late + sum(match.late_rewards for match in self._copies) - sum(table.given for table in self._tables)
        if late > 0:
            self.notes.append(f"{late} rewards came to agents who had left or had not come yet; they are counted for nobody")

    def _renewed(self, table: _Table) -> bool:
        """Whether its environment could be made anew."""
        late = self._copies[table.number].late_rewards
        for _ in range(_TRIES):
            try:
                self._copies.recreate(table.number)
            except EnvironmentFault as fault:
                self._broken = why(fault)
            else:
                self._late += late
                return True
        log.warning("One of the environments cannot be made anew, and plays no further match: %s", self._broken)
        return False

    def _close_copies(self) -> None:
        for match in self._copies:
            _closed(match)

    def _begin(self, table: _Table, waiting: Iterator[Pairing], tell: Tell) -> None:
        for pairing in waiting:
            table.begin(pairing, self._agents, self._aside)
            try:
                table.moved = self._copies[table.number].reset(pairing.seed)
            except EnvironmentFault as fault:
                self._fail(table, why(fault), tell)
                if not self._renewed(table):
                    return
                continue
            if not table.moved.over:
                for who, mind in self._minds.items():
                    mind.begin(table.number, noise_seed(pairing.seed, WHO.index(who)))
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
                self._fail(table, why(fault), tell)
                if not self._renewed(table):
                    return
            else:
                for left in table.moved.departures:
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
