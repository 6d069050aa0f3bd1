"""Stage for matches of a PettingZoo environment with two camps of agents, in this process: many at once, one batch per policy and step.

A slot whose match is over starts the next one. Each match has its own random streams. The camp with the higher mean return wins.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import logging
import re
import resource
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ludus.config.schema import PreprocessConfig
from ludus.core import spaces
from ludus.core.tree import Tree, leaves
from ludus.envs.faults import close_quietly
from ludus.envs.pettingzoo import AgentSpaces, MatchStep, MultiAgentMatch, make_match
from ludus.envs.preprocessing import for_evaluation, preprocess_of
from ludus.envs.video_writer import FrameProgress, VideoWriter
from ludus.envs.wrappers import WrapperList
from ludus.errors import EnvironmentFault, UsageError
from ludus.experiments.evaluation.rollout_file import AgentStepWriter, EpisodeSteps, RolloutFile
from ludus.experiments.evaluation.video import check_rgb, frame_rate
from ludus.experiments.runs.checkpoint import agents_of
from ludus.io.atomic_file import path_for_replace
from ludus.process import screen_choice
from ludus.process.screen_choice import AUTO
from ludus.sampling.episode_runner import episode_step_limit
from ludus.sampling.multi_agent.env_copies import EnvCopies
from ludus.sampling.multi_agent.play import Step, step_of
from ludus.sampling.multi_agent.seating import NOT_OVER, compare_sides
from ludus.tournament.contestants import Contestant, FunctionContestant, TrainedContestant
from ludus.tournament.players import ActionRequest, MatchPlayer, NoAction, make_player
from ludus.tournament.result import SIDES, WHO, HeroStats, MatchResult, Who, contestant_in_camp, failure_text
from ludus.tournament.settings import BattleSettings, Pairing, noise_seed, schedule
from ludus.tournament.stage import MatchEnd, OnMatchEnd, Stage, single_torch_thread

log = logging.getLogger(__name__)

MAX_PARALLEL: Final = 16
_RECREATE_ATTEMPTS: Final = 5
_MIN_FOR_REPEAT_NOTE: Final = 10
"""Fewest matches after which a note about repeated courses is worthwhile."""
_NUMBER_SUFFIX = re.compile(r"[_\- ]*[0-9]+$")

Camps = tuple[tuple[str, ...], tuple[str, ...]]
"""The agents of blue and of red."""


@dataclass(frozen=True)
class BattleEnv:
    """How to make the environment of a battle."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    wrappers: WrapperList = ()
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    display: str = AUTO

    def make(self, render_mode: str | None = None) -> MultiAgentMatch:
        screen_choice.configure(self.display)
        return make_match(self.name, self.config, render_mode, self.wrappers, self.preprocess)

    def check_renders(self) -> None:
        """Raises UsageError if the environment renders no images."""
        match = self.make("rgb_array")
        try:
            match.reset(0)
            check_rgb(match.render(), self.name)
        finally:
            close_quietly(match)


def choose_env(pair: Sequence[Contestant], name: str | None, options: Mapping[str, Any]) -> tuple[BattleEnv | None, list[str]]:
    """The environment to play, and notes: the named one, else that of the first contestant trained with several agents, else None.

    It is made as in that contestant's training; `options` override its env_config.
    """
    several = [one for one in pair if isinstance(one, TrainedContestant | FunctionContestant) and agents_of(one.settings)]
    known = sorted(several, key=lambda one: isinstance(one, FunctionContestant))  # training tells more than the file of a league
    if not known and name is None:
        return None, []
    chosen = name or known[0].env
    first = next((one for one in known if one.env == chosen), None)
    notes = [f"{one.label} was trained in {one.env}" for one in known if one.env != chosen]
    settings = _env_settings(first)
    others = [one for one in known if one.env == chosen and _env_settings(one) != settings]
    notes += [f"{one.label} was trained in {chosen} with other settings than in this battle" for one in others]
    config, wrappers, preprocess = settings
    display = AUTO if first is None else first.settings.get("display", AUTO)
    return BattleEnv(chosen, {**config, **options}, wrappers, preprocess, display), notes


def _env_settings(one: TrainedContestant | FunctionContestant | None) -> tuple[dict[str, Any], WrapperList, PreprocessConfig]:
    """env_config, wrappers and preprocessing of a contestant's training; rewards are not clipped."""
    settings: Mapping[str, Any] = {} if one is None else one.settings
    return dict(settings.get("env_config") or {}), settings.get("wrappers") or (), for_evaluation(preprocess_of(settings))


def split_camps(agents: Sequence[str], patterns: str | None, env: str) -> Camps:
    """Assign agents to camps by `patterns` ("red_*/blue_*"), else as two agents or as two kinds of numbered agents.

    Raises UsageError.
    """
    hint = "Name the agents of both camps: --camps 'red_*/blue_*'."
    if patterns is None:
        kinds: dict[str, list[str]] = {}
        for agent in agents:
            kinds.setdefault(agent if len(agents) == 2 else _NUMBER_SUFFIX.sub("", agent), []).append(agent)
        if len(kinds) != 2:
            raise UsageError(f"The agents of {env} are {', '.join(agents)}: which are the two camps?", hint)
        first, second = kinds.values()
        return tuple(first), tuple(second)
    parts = [[part.strip() for part in camp.split(",")] for camp in patterns.split("/")]
    if len(parts) != 2:
        raise UsageError(
            f"--camps {patterns!r} does not have two parts.", "Write agents of blue, a slash, agents of red: 'red_*/blue_*'."
        )
    camps = [tuple(a for a in agents if any(fnmatch.fnmatchcase(a, part) for part in camp)) for camp in parts]
    for agent in agents:
        number = sum(agent in camp for camp in camps)
        if number != 1:
            wrong = "in both camps" if number else "in no camp"
            raise UsageError(f"{agent!r} of {env} is {wrong} of {patterns!r}; its agents are {', '.join(agents)}.", hint)
    if not all(camps):
        raise UsageError(f"A camp of {patterns!r} is empty.", hint)
    return camps[0], camps[1]


# -- recordings -------------------------------------------------------------------------------------------------------


class _TraceHash:
    """A hash of all observations, actions and rewards of a match; equal for matches that took the same course."""

    def __init__(self, a_camp: int) -> None:
        self._hash = hashlib.blake2b(str(a_camp).encode(), digest_size=16)

    def update(self, step: Step) -> None:
        for values in (step.observations, step.actions, step.rewards):
            for agent, value in values.items():
                self._hash.update(agent.encode())
                for _, part in leaves(value):
                    self._hash.update(np.asarray(part).tobytes())

    def digest(self) -> bytes:
        return self._hash.digest()


def _observations(after_step: MatchStep) -> dict[str, Tree]:
    return {turn.agent: turn.observation for turn in after_step.turns}


@dataclass(frozen=True)
class EnvMatchRecording:
    """The steps of a match, on disk, and its actions, from which a video is rendered by playing the match again."""

    env: BattleEnv
    steps: Path
    seed: int
    actions: Sequence[Mapping[str, Any]]
    a_camp: int
    trace: bytes
    notes: list[str]

    def write(self, path: Path) -> Path:
        path = path.with_suffix(".npz")
        with RolloutFile(path, save_info=False) as steps:
            steps.extend(self.steps)
            steps.write()
        return path

    def write_video(self, path: Path, speed: float | None, progress: FrameProgress | None = None) -> Path:
        """Raises UsageError if the environment renders no images."""
        path = path.with_suffix(".mp4")
        match = self.env.make("rgb_array")
        rate = frame_rate(match.metadata) * (1.0 if speed is None else speed)
        try:
            with path_for_replace(path) as temporary, VideoWriter(temporary, rate) as writer:
                trace, after_step = _TraceHash(self.a_camp), match.reset(self.seed)
                writer.add(check_rgb(match.render(), self.env.name))
                for number, actions in enumerate(self.actions):
                    if after_step.over or {turn.agent for turn in after_step.turns} != set(actions):
                        break
                    after = match.step(actions)
                    trace.update(step_of(number, _observations(after_step), actions, after))
                    after_step = after
                    writer.add(check_rgb(match.render(), self.env.name))
                    if progress is not None:
                        progress(writer.frames, len(self.actions) + 1)
            if trace.digest() != self.trace:
                self.notes.append(
                    f"{path.name} shows another course than the match: {self.env.name} is not reproducible with the same seed"
                )
        finally:
            close_quietly(match)
        return path

    def discard(self) -> None:
        shutil.rmtree(self.steps, ignore_errors=True)


# -- the matches ------------------------------------------------------------------------------------------------------


class _LiveMatch:
    """A slot that plays one match after the other, and the state of its current match."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pairing: Pairing | None = None
        self.last_step = MatchStep(over=True)
        self.returns: dict[str, float] = {}
        self.decisions: dict[str, int] = {}
        self.actions: list[Mapping[str, Any]] = []
        self.trace = _TraceHash(0)
        self.acted: set[str] = set()
        self.unacted_rewards = 0
        """Rewards of agents that left without having acted, in all matches of this slot. They count for the agent."""
        self.steps = 0
        self.open_files = contextlib.ExitStack()
        self.ledger: AgentStepWriter | None = None
        self.steps_dir: Path | None = None

    def begin(self, pairing: Pairing, agents: Sequence[str], scratch_dir: Path | None) -> None:
        self.pairing, self.steps, self.actions = pairing, 0, []
        self.acted.clear()
        self.trace = _TraceHash(pairing.a_camp)
        self.returns, self.decisions = dict.fromkeys(agents, 0.0), dict.fromkeys(agents, 0)
        if scratch_dir is not None:
            self.steps_dir = scratch_dir / str(pairing.number)
            self.ledger = AgentStepWriter(
                self.open_files.enter_context(EpisodeSteps(self.steps_dir, save_info=False)), pairing.number, agents
            )

    def note(self, actions: Mapping[str, Any], after_step: MatchStep) -> None:
        step = step_of(self.steps, _observations(self.last_step), actions, after_step)
        self.trace.update(step)
        for agent, reward in step.rewards.items():
            self.returns[agent] += reward
        for agent in actions:
            self.decisions[agent] += 1
        self.acted.update(actions)
        for left in after_step.departures:
            self.unacted_rewards += left.agent not in self.acted and left.reward != 0
            self.acted.discard(left.agent)
        if self.ledger is not None:
            self.ledger.add(step)
            self.actions.append(actions)
        self.last_step, self.steps = after_step, self.steps + 1

    def close_files(self) -> None:
        """Complete the files of the match and free the slot."""
        if self.ledger is not None:
            self.ledger.close()
        self.open_files.close()
        self.pairing, self.ledger = None, None


class EnvStage(Stage):
    """Plays matches of two contestants in a multi-agent environment."""

    def __init__(
        self,
        pair: tuple[Contestant, Contestant],
        env: BattleEnv,
        settings: BattleSettings,
        *,
        camps: str | None = None,
        scratch_dir: Path | None = None,
        max_parallel: int = MAX_PARALLEL,
    ) -> None:
        """`scratch_dir`: receives the steps of the matches; None: no recording. Raises UsageError, IncompatibleCheckpoint, Unreachable."""
        super().__init__()
        arena_options = {
            "--mode": settings.mode,
            "--lineup": settings.lineups,
            "--every": settings.every,
            "--seconds": settings.seconds,
        }
        for name, value in arena_options.items():
            if value is not None:
                raise UsageError(f"{name} is for the Arena.", "Leave it out; options of an environment are -o KEY=VALUE.")
        self._env, self._scratch_dir = env, scratch_dir
        self._step_limit = episode_step_limit(env.name)
        self._deterministic = settings.deterministic
        self._pairings = schedule(settings, 0)
        with contextlib.ExitStack() as stack:
            self._copies = EnvCopies(env.make, 1, forgiving=True)
            stack.callback(self._close_copies)
            agents = self._copies[0].agents
            slots = _parallel_matches(min(max_parallel, settings.games), agents, writes=scratch_dir is not None)
            self._copies.extend(env.make() for _ in range(slots - 1))
            self.camps = split_camps(list(agents), camps, env.name)
            self._players: dict[Who, MatchPlayer] = {}
            for who, one in zip(WHO, pair, strict=True):
                sides = {camp for camp in (0, 1) for pairing in self._pairings if contestant_in_camp(camp, pairing.a_camp) == who}
                own = {agent: agents[agent] for side in sorted(sides) for agent in self.camps[side]}
                player = make_player(one, own, env.name, slots, settings.deterministic)
                stack.callback(player.close)
                self._players[who] = player
            self._stack = stack.pop_all()
        self._agents = list(agents)
        self._traces: Counter[bytes] = Counter()
        self._late_rewards, self._last_fault = 0, ""
        self._camp = {agent: camp for camp, members in enumerate(self.camps) for agent in members}
        self._matches = [_LiveMatch(number) for number in range(slots)]

    @property
    def pairings(self) -> list[Pairing]:
        return self._pairings

    @property
    def description(self) -> dict[str, object]:
        camps = {side: list(members) for side, members in zip(SIDES, self.camps, strict=True)}
        return {"game": self._env.name, "options": dict(self._env.config), "camps": camps, "where": "this process"}

    def play(self, pairings: Sequence[Pairing], on_end: OnMatchEnd) -> None:
        waiting = iter(pairings)
        with contextlib.ExitStack() as stack:
            stack.enter_context(single_torch_thread())
            for match in self._matches:
                stack.callback(match.open_files.close)
                self._begin(match, waiting, on_end)
            while live := [match for match in self._matches if match.pairing is not None]:
                actions = self._choose_actions(live)
                for match in live:
                    self._advance(match, actions[match.number], waiting, on_end)
        for pairing in waiting:  # no environment is left to play them
            on_end(MatchEnd(MatchResult(pairing.number, pairing.a_camp, pairing.seed, failed=self._last_fault)))
        self._add_notes()

    def _add_notes(self) -> None:
        played, different = self._traces.total(), len(self._traces)
        if self._deterministic and played >= _MIN_FOR_REPEAT_NOTE and different <= played / 2:
            self.notes.append(
                f"only {different} of {played} matches took different courses, so the interval is too narrow: --explore samples the "
                "actions"
            )
        late = (
            self._late_rewards
            + sum(match.late_rewards for match in self._copies)
            - sum(match.unacted_rewards for match in self._matches)
        )
        if late > 0:
            self.notes.append(f"{late} rewards came to agents that had left or not yet joined; they are not counted")

    def _recreate_env(self, match: _LiveMatch) -> bool:
        """Replace the environment of a slot after a fault. False: it cannot be made, and the slot plays no further match."""
        late = self._copies[match.number].late_rewards
        for _ in range(_RECREATE_ATTEMPTS):
            try:
                self._copies.recreate(match.number)
            except EnvironmentFault as fault:
                self._last_fault = failure_text(fault)
            else:
                self._late_rewards += late
                return True
        log.warning("An environment could not be recreated; its slot plays no further match: %s", self._last_fault)
        return False

    def _close_copies(self) -> None:
        for match in self._copies:
            close_quietly(match)

    def _begin(self, match: _LiveMatch, waiting: Iterator[Pairing], on_end: OnMatchEnd) -> None:
        for pairing in waiting:
            match.begin(pairing, self._agents, self._scratch_dir)
            try:
                match.last_step = self._copies[match.number].reset(pairing.seed)
            except EnvironmentFault as fault:
                self._fail(match, failure_text(fault), on_end)
                if not self._recreate_env(match):
                    return
                continue
            if not match.last_step.over:
                for who, player in self._players.items():
                    player.begin(match.number, noise_seed(pairing.seed, WHO.index(who)))
                return
            self._fail(match, f"{self._env.name} is over before any agent has acted", on_end)

    def _choose_actions(self, live: Sequence[_LiveMatch]) -> dict[int, dict[str, Any]]:
        requests: dict[Who, list[ActionRequest]] = {"a": [], "b": []}
        for match in live:
            for turn in match.last_step.turns:
                requests[self._who(match, turn.agent)].append(
                    ActionRequest(match.number, turn.agent, turn.observation, turn.mask, turn.reward)
                )
        actions: dict[int, dict[str, Any]] = {match.number: {} for match in live}
        for who, rows in requests.items():
            for request, action in zip(rows, self._players[who].act(rows) if rows else (), strict=True):
                actions[request.match][request.agent] = action
        return actions

    def _advance(self, match: _LiveMatch, actions: Mapping[str, Any], waiting: Iterator[Pairing], on_end: OnMatchEnd) -> None:
        if no_action := next((action for action in actions.values() if isinstance(action, NoAction)), None):
            self._fail(match, no_action.reason, on_end)
        else:
            try:
                match.note(actions, self._copies[match.number].step(actions))
            except EnvironmentFault as fault:
                self._fail(match, failure_text(fault), on_end)
                if not self._recreate_env(match):
                    return
            else:
                for left in match.last_step.departures:
                    self._players[self._who(match, left.agent)].leave(match.number, left)
                if not match.last_step.over and match.steps < self._step_limit:
                    return
                self._end(match, on_end)
        self._begin(match, waiting, on_end)

    def _who(self, match: _LiveMatch, agent: str) -> Who:
        assert match.pairing is not None
        return contestant_in_camp(self._camp[agent], match.pairing.a_camp)

    def _release_slot(self, match: _LiveMatch) -> Pairing:
        assert match.pairing is not None
        pairing = match.pairing
        match.close_files()
        for player in self._players.values():
            player.end(match.number)
        return pairing

    def _fail(self, match: _LiveMatch, reason: str, on_end: OnMatchEnd) -> None:
        pairing = self._release_slot(match)
        if match.steps_dir is not None:
            shutil.rmtree(match.steps_dir, ignore_errors=True)
        on_end(MatchEnd(MatchResult(pairing.number, pairing.a_camp, pairing.seed, failed=reason)))

    def _end(self, match: _LiveMatch, on_end: OnMatchEnd) -> None:
        truncated = not match.last_step.over
        self._traces[match.trace.digest()] += 1
        pairing = self._release_slot(match)
        of_camp = [[match.returns[agent] for agent in camp] for camp in self.camps]
        found = compare_sides(of_camp[pairing.a_camp], of_camp[1 - pairing.a_camp])  # for A
        counted = NOT_OVER if truncated else found
        winner: Who | None = None if counted.score == 0.5 else "a" if counted.score == 1.0 else "b"
        heroes = tuple(
            HeroStats(
                contestant_in_camp(self._camp[agent], pairing.a_camp),
                agent,
                {"return": match.returns[agent], "decisions": float(match.decisions[agent])},
            )
            for agent in self._agents
        )
        result = MatchResult(
            pairing.number,
            pairing.a_camp,
            pairing.seed,
            winner=winner,
            reason=f"not over after {match.steps} steps" if truncated else "earned more" if winner else "earned the same",
            ticks=match.steps,
            heroes=heroes,
            lopsided=2 * abs(found.gain),
            gain=counted.gain,
        )
        recording = None
        if match.steps_dir is not None and match.steps:
            recording = EnvMatchRecording(
                self._env, match.steps_dir, pairing.seed, match.actions, pairing.a_camp, match.trace.digest(), self.notes
            )
        on_end(MatchEnd(result, recording))


def _parallel_matches(wanted: int, agents: Mapping[str, AgentSpaces], *, writes: bool) -> int:
    """Number of slots. Each column of a recording is an open file, which RLIMIT_NOFILE bounds."""
    if not writes:
        return wanted
    observed = sum(1 for known in agents.values() for _ in leaves(spaces.array_spec(known.observation)))
    acted = sum(1 for known in agents.values() for _ in leaves(spaces.array_spec(known.action, "action")))
    columns = 2 * observed + acted + len(agents) + 8  # final observations and their index have their own columns
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(wanted, soft_limit // 2 // columns))
