"""Evaluations of several agents as plain values: played in the training process or by workers, with the same matches."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ludus.config.schema import PreprocessConfig
from ludus.core.types import Ints
from ludus.distributed.code_bundle import CodeBundle
from ludus.envs.faults import close_quietly
from ludus.envs.pettingzoo import MatchStep, MatchWrapper, MultiAgentMatch, make_match
from ludus.envs.registry import PLAYER_FAMILIES
from ludus.envs.wrappers import WrapperList
from ludus.experiments.evaluation.evaluation import MAX_ROWS, STEPS_PER_ROW
from ludus.experiments.evaluation.evaluation_video import (
    MAX_STEPS,
    RecordedVideos,
    RecordingErrors,
    encode_episode,
    video_path,
)
from ludus.experiments.evaluation.evaluation_workers import answer_of, weights_of
from ludus.experiments.evaluation.screen_video import make_recorded_match
from ludus.experiments.evaluation.video import FrameFile, check_rgb, frame_rate
from ludus.models.centralized_critic import actor_policy
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.models.weights.version_store import FixedSource, PolicySource
from ludus.process import screen_choice
from ludus.process.screen_choice import AUTO
from ludus.process.workers.supervisor import Context
from ludus.sampling.episode_runner import EpisodePlan, Score, episode_quota, episode_step_limit, preserve_random_state
from ludus.sampling.multi_agent.copies import MatchCopies
from ludus.sampling.multi_agent.env_copies import EnvCopies
from ludus.sampling.multi_agent.play import CopyShare, play_matches
from ludus.sampling.multi_agent.vector_copies import make_copies
from ludus.sampling.opponents import RANDOM, Opponent

Sources = Mapping[str, PolicySource]
"""Model → policy, as it acts in evaluations."""


@dataclass(frozen=True)
class OpponentDescription:
    """An opponent that can be sent to another process."""

    name: str
    agents: Mapping[str, str]
    """Agent → model of the opponent."""
    models: Mapping[str, tuple[Mapping[str, Any], bytes]]
    """Model → description and encoded weights."""

    @classmethod
    def of(cls, opponent: Opponent) -> OpponentDescription:
        agents: dict[str, str] = {}
        models: dict[str, tuple[Mapping[str, Any], bytes]] = {}
        first: dict[int, str] = {}  # policy → the first agent that it plays, whose name its model has here
        for agent, policy in opponent.policies.items():
            agents[agent] = first.setdefault(id(policy), agent)
            if agents[agent] == agent:
                models[agent] = policy.description(), serialization.encode_weights(policy.weights())
        return cls(opponent.name, agents, models)

    def load(self) -> Opponent:
        policies: dict[str, Policy] = {}
        for model, (description, weights) in self.models.items():
            policies[model] = serialization.policy_from(description)
            policies[model].load_weights(serialization.decode_weights(weights, f"opponent {self.name}")[0])
        return Opponent(self.name, {agent: policies[model] for agent, model in self.agents.items()})


@dataclass(frozen=True)
class MatchEvaluationPlan:
    """What every evaluation of a run with several agents plays. Plain values, which can be sent to another process."""

    env: str
    env_config: Mapping[str, Any]
    preprocess: PreprocessConfig
    wrappers: WrapperList
    agents: Mapping[str, str]
    """Agent → model."""
    descriptions: Mapping[str, Mapping[str, Any]]
    """Model → description, as in `model.json`."""
    duration: int
    by_steps: bool
    """Whether `duration` counts environment steps instead of matches."""
    explore: bool
    seed: int
    forgiving: bool
    display: str = AUTO
    videos: int = 0
    """Number of first matches of which videos are recorded."""
    opponent: OpponentDescription | None = None
    group: int = field(default=1, init=False)

    @property
    def groups(self) -> int:
        """Copies of the environment that are played at the same time. A copy may be a program that takes gigabytes: of those, one."""
        most = 1 if self.env in PLAYER_FAMILIES else MAX_ROWS
        return max(1, min(self.duration // STEPS_PER_ROW if self.by_steps else self.duration, most))

    def quota(self) -> Ints:
        """Matches or steps of each copy."""
        return episode_quota(self.duration, self.groups)

    def seed_of(self, iteration: int) -> int:
        return (self.seed * 7919 + iteration * 104_729 + 1) % (1 << 31)

    def make(self, render_mode: str | None = None) -> MultiAgentMatch:
        return make_match(self.env, self.env_config, render_mode, self.wrappers, self.preprocess)

    def copies(self, count: int, beat: Callable[[], None]) -> MatchCopies:
        return make_copies(
            self.env,
            count,
            self.env_config,
            wrappers=self.wrappers,
            preprocess=self.preprocess,
            forgiving=self.forgiving,
            beat=beat,
        )

    def play(
        self,
        sources: Sources,
        copies: MatchCopies,
        seed: int,
        *,
        first: int = 0,
        opponent: Opponent | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Score:
        """Play the matches of the copies from number `first` on."""
        quota = self.quota()[first : first + len(copies)]
        plan = EpisodePlan(quota, self.by_steps, episode_step_limit(self.env))
        return self._play(sources, copies, plan, seed, first, opponent, interrupted)

    def replay(
        self, sources: Sources, match: MultiAgentMatch, copy: int, count: int, seed: int, opponent: Opponent | None
    ) -> None:
        """Play the first `count` matches of one copy in another environment, which may be one that records them."""
        plan = EpisodePlan(count, max_steps=MAX_STEPS)
        self._play(sources, EnvCopies(lambda: match, 1), plan, seed, copy, opponent)

    def _play(
        self,
        sources: Sources,
        copies: MatchCopies,
        plan: EpisodePlan,
        seed: int,
        first: int,
        opponent: Opponent | None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Score:
        return play_matches(
            copies,
            self.agents,
            sources,
            plan,
            seed,
            deterministic=not self.explore,
            opponent=opponent,
            share=CopyShare(first, self.groups),
            interrupted=interrupted,
        )


def acting_sources(policies: Mapping[str, Policy]) -> dict[str, FixedSource[Policy]]:
    """The policies as they play: without the state of a centralised critic."""
    return {name: FixedSource(actor_policy(policy)) for name, policy in policies.items()}


# -- videos -------------------------------------------------------------------------------------------------------------


class _FilmedMatch(MatchWrapper):
    """Writes a frame before every step, each match to a file of its own. A context manager, which closes the last file."""

    def __init__(self, match: MultiAgentMatch, scratch_dir: Path, before_step: Callable[[], None]) -> None:
        super().__init__(match)
        self._scratch_dir, self._before_step = scratch_dir, before_step
        self._file = contextlib.ExitStack()
        self._frames: FrameFile | None = None
        self.files: list[Path] = []
        """Of the matches with at least one step, in order."""

    def __enter__(self) -> _FilmedMatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def reset(self, seed: int) -> MatchStep:
        self._before_step()
        self._file.close()
        self._frames = None
        return super().reset(seed)

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        self._before_step()
        if self._frames is None:
            self.files.append(self._scratch_dir / str(len(self.files)))
            self._frames = self._file.enter_context(FrameFile(self.files[-1]))
        self._frames.add(check_rgb(self.render(), self.name), 0.0)
        return super().step(actions)

    def close(self) -> None:
        """The match belongs to the recorder."""


class MatchVideoRecorder:
    """Plays the first matches of an evaluation again, with rendering, and writes each to `videos/` of the run as an mp4.

    They are the same matches if the environment follows its seed, with the same opponents. `before_step` runs before every step and every
    encoded frame; what it raises ends the recording, and no file is left of the match that was open.
    """

    def __init__(self, plan: MatchEvaluationPlan, directory: Path, before_step: Callable[[], None]) -> None:
        """`directory`: of the run."""
        self._plan, self._videos, self._before_step = plan, directory / "videos", before_step
        self._match: MultiAgentMatch | None = None

    def record(self, sources: Sources, iteration: int, opponent: Opponent | None) -> RecordedVideos:
        """Never raises what the environment, its renderer or the disk raise: that is `RecordedVideos.problem`."""
        plan, paths = self._plan, dict[int, Path]()
        with RecordingErrors(plan.env) as errors:
            self._match = self._match or make_recorded_match(plan.make, plan.env)
            for copy in range(min(plan.groups, plan.videos)):
                numbers = range(copy, plan.videos, plan.groups)  # match number n is played by copy n modulo the number of copies
                with self._film(sources, copy, len(numbers), plan.seed_of(iteration), opponent) as films:
                    for number, frames in zip(numbers, films, strict=False):  # a copy whose match was cut plays no more
                        path = video_path(self._videos, iteration, number)
                        encode_episode(path, frames, frame_rate(self._match.metadata), self._before_step)
                        paths[number] = path
        return RecordedVideos(tuple(paths[number] for number in sorted(paths)), errors.problem)

    @contextlib.contextmanager
    def _film(self, sources: Sources, copy: int, count: int, seed: int, opponent: Opponent | None) -> Iterator[list[Path]]:
        """Frame files of the first matches of a copy, inside the block."""
        assert self._match is not None
        with tempfile.TemporaryDirectory(prefix="ludus-") as scratch_dir:
            with _FilmedMatch(self._match, Path(scratch_dir), self._before_step) as filmed:
                self._plan.replay(sources, filmed, copy, count, seed, opponent)
            yield filmed.files

    def close(self) -> None:
        if self._match is not None:
            self._match.close()
            self._match = None


def find_recording_problem(plan: MatchEvaluationPlan) -> str | None:
    """Why matches cannot be recorded, found by rendering the beginning of one; None: they can."""
    with RecordingErrors(plan.env) as errors, preserve_random_state():
        match = make_recorded_match(plan.make, plan.env)
        try:
            match.reset(plan.seed)
            check_rgb(match.render(), plan.env)
        finally:
            close_quietly(match)
    return errors.problem


# -- workers ------------------------------------------------------------------------------------------------------------


class MatchEvaluationPlayer:
    """What a worker does: load the weights of all models of a checkpoint, and play its share of the copies."""

    def __init__(self, context: Context, plan: MatchEvaluationPlan, bundle: CodeBundle) -> None:
        torch.set_num_threads(1)
        screen_choice.configure(plan.display)
        bundle.unpack()
        self._context, self._plan = context, plan
        self._policies = {model: serialization.policy_from(described) for model, described in plan.descriptions.items()}
        self._sources = acting_sources(self._policies)
        self._opponent = None if plan.opponent is None else plan.opponent.load()
        self._copies: dict[int, MatchCopies] = {}  # by their number; shares differ by one
        self._recorder: MatchVideoRecorder | None = None

    def __call__(self, task: Mapping[str, Any]) -> dict[str, Any]:
        for model, policy in self._policies.items():
            policy.load_weights(weights_of(task, model))
        opponent = RANDOM if task["random"] else self._opponent
        rows = task["rows"]
        if rows not in self._copies:
            self._copies[rows] = self._plan.copies(rows, self._context.beat)
        score = self._plan.play(self._sources, self._copies[rows], task["seed"], first=task["first"], opponent=opponent)
        recorded = RecordedVideos()
        if task["video"] is not None:
            self._recorder = self._recorder or MatchVideoRecorder(self._plan, Path(task["run"]), self._context.beat)
            recorded = self._recorder.record(self._sources, task["video"], opponent)
        return answer_of(score, recorded)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        for copies in self._copies.values():
            copies.close()
