"""Evaluations of a run that calls its environments: inline, or by other processes while training goes on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ludus.config.schema import AlgorithmConfig, PreprocessConfig
from ludus.core import spaces
from ludus.core.types import Ints
from ludus.envs.preprocessing import for_evaluation
from ludus.envs.vector_env import Environments, RowInfo, make_environments, row_info
from ludus.envs.wrappers import WrapperList
from ludus.errors import ConfigError, Interrupted
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.resolve import ResolvedExperiment
from ludus.experiments.runs.run_dir import Run
from ludus.models.devices import copy_for_acting
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.sampling.episode_runner import EpisodePlan, Score, episode_quota, episode_step_limit, play, preserve_random_state

if TYPE_CHECKING:
    from ludus.experiments.evaluation.evaluation_video import VideoRecorder
    from ludus.experiments.evaluation.evaluation_workers import EvaluationWorkers
    from ludus.experiments.evaluation.rollout import Stage

log = logging.getLogger(__name__)

Notice = Callable[[str], None]

_ROWS = 16
_STEPS_OF_A_ROW = 1000
"""An evaluation by steps has a row for so many: each finishes its last episode, and few rows overshoot by little."""


@dataclass(frozen=True)
class Course:
    """What is played in every evaluation of a run: plain values, which may go to another process."""

    env: str
    env_config: Mapping[str, Any]
    preprocess: PreprocessConfig
    wrappers: WrapperList
    description: Mapping[str, Any]
    duration: int
    by_steps: bool
    """`duration` counts them; else episodes."""
    explore: bool
    seed: int
    forgiving: bool
    device: str
    group: int = 1
    """So many rows are a side of a match, and play as many episodes as each other."""
    videos: int = 0
    """Of so many of the first episodes videos are recorded."""

    @property
    def groups(self) -> int:
        wanted = max(1, self.duration // _STEPS_OF_A_ROW) if self.by_steps else self.duration
        return max(1, min(math.ceil(wanted / self.group), _ROWS // self.group))

    @property
    def rows(self) -> int:
        return self.groups * self.group

    def quota(self) -> Ints:
        """Of each row."""
        return episode_quota(math.ceil(self.duration / self.group), self.groups).repeat(self.group)

    def environments(self, rows: int, beat: Callable[[], None] = lambda: None) -> Environments:
        return make_environments(
            self.env, rows, self.env_config,
            preprocess=self.preprocess, wrappers=self.wrappers, forgiving=self.forgiving, beat=beat,
        )  # fmt: skip

    def policy(self) -> Policy:
        """A policy of its own, so that nothing it does while it plays is seen by whoever trains."""
        return copy_for_acting(serialization.policy_from(self.description), torch.device(self.device))

    def stage(self) -> Stage:
        """What a video shows."""
        from ludus.experiments.evaluation.rollout import Stage

        return Stage(
            self.env, self.env, {}, env_config=self.env_config, preprocess=self.preprocess, wrappers=self.wrappers,
            deterministic=not self.explore, filmed=self.videos,
        )  # fmt: skip

    def recorder(self, directory: Path, before_step: Callable[[], None]) -> VideoRecorder | None:
        """With a policy on the CPU; None: no videos are wanted."""
        if not self.videos:
            return None
        from ludus.experiments.evaluation.evaluation_video import VideoRecorder

        return VideoRecorder(self.stage(), serialization.policy_from(self.description), directory, before_step)

    def seed_of(self, iteration: int) -> int:
        return (self.seed * 7919 + iteration * 104_729 + 1) % (1 << 31)

    def play(self, policy: Policy, environments: Environments, seed: int, first: int, interrupted: Callable[[], bool]) -> Score:
        """The share of the rows from `first` on, as many as there are environments."""
        quota = self.quota()[first : first + environments.num]
        with policy.acting():
            return play(
                policy,
                environments,
                EpisodePlan(quota, self.by_steps, episode_step_limit(self.env), self.group),
                seed + first // self.group,
                deterministic=not self.explore,
                interrupted=interrupted,
                noise_seed=seed + first,
            )


class Evaluation:
    """Inline: training waits. Own environments, own policy, own random numbers: it does not notice more than that."""

    def __init__(
        self, course: Course, trained: Policy, stop: StopCheck, directory: Path | None = None, notice: Notice = log.warning
    ) -> None:
        """`directory`: of the run, if videos are recorded. `notice` is called once if they cannot be."""
        self._course, self._trained, self._stop, self._notice = course, trained, stop, notice
        self._own: tuple[Policy, Environments] | None = None
        self._recorder = None if directory is None else course.recorder(directory, stop.before_evaluation_step)

    def __call__(self, iteration: int) -> Score:
        try:
            with preserve_random_state(), self._stop.interruptible():
                score = self._play(iteration)
        except Interrupted:
            return Score((), (), complete=False)
        warn_of_cuts(score, self._course.env)
        return replace(score, videos=self._record(iteration)) if score.complete else score

    def _record(self, iteration: int) -> tuple[Path, ...]:
        if self._recorder is None:
            return ()
        try:
            with preserve_random_state(), self._stop.interruptible():
                recorded = self._recorder.record(self._trained.weights(), iteration, self._course.seed_of(iteration))
        except Interrupted:  # the score stands
            return ()
        if recorded.problem is not None:
            self._notice(recorded.problem)
            self._close_recorder()
        return recorded.paths

    def _close_recorder(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def _play(self, iteration: int) -> Score:
        if self._own is None:
            self._own = self._course.policy(), self._course.environments(self._course.rows, self._stop.before_evaluation_step)
        policy, environments = self._own
        policy.load_weights(self._trained.weights())
        return self._course.play(policy, environments, self._course.seed_of(iteration), 0, self._stop.ends_evaluation)

    def close(self) -> None:
        self._close_recorder()
        if self._own is not None:
            self._own[1].close()


def warn_of_cuts(score: Score, env: str) -> None:
    if score.cut:
        log.warning(
            "%d of %d episodes of an evaluation were cut after %d steps: %s did not end them. Let it: a time limit, for example.",
            score.cut, len(score.returns), episode_step_limit(env), env,
        )  # fmt: skip


def make_evaluation(
    resolved: ResolvedExperiment, policy: Policy, run: Run, stop: StopCheck, announce: Notice | None = None
) -> Evaluation | EvaluationWorkers | None:
    """Raises ConfigError, EnvironmentFault when `evaluation_config` asks for an environment that cannot be."""
    config = resolved.config
    if not config.evaluation_duration:
        return None
    env = resolved.experiment.env
    wrapped: Any = {"preprocess": config.preprocess, "wrappers": config.wrappers}
    with preserve_random_state():  # as many rows as training has: so many there can be
        said = row_info(env, config.num_envs_per_worker, config.env_config, **wrapped)
    course = _course(env, config, policy, said)
    if config.evaluation_config.env_config is not None:
        _check(course, policy)
    with preserve_random_state():
        said = row_info(env, course.rows, course.env_config, preprocess=course.preprocess, wrappers=course.wrappers)
    if said.has_opponents:  # the first evaluation may be an hour away
        raise ConfigError(
            f"Evaluations of {env} would have opponents from the past, and nobody there has one.",
            "Say whom they play in config.evaluation_config.env_config, as {opponent: medium}; or set evaluation_duration: 0.",
        )

    def notice(sentence: str) -> None:
        log.warning("%s", sentence)
        if announce is not None:
            announce(f"warning: {sentence}")

    if course.videos:
        from ludus.experiments.evaluation.evaluation_video import why_not_recorded

        if (problem := why_not_recorded(course.stage())) is not None:
            notice(problem)
            course = replace(course, videos=0)
    if not config.evaluation_num_workers:
        return Evaluation(course, policy, stop, run.directory, notice)
    from ludus.experiments.evaluation.evaluation_workers import make_evaluation_workers

    return make_evaluation_workers(course, config, run.directory, stop.ends_evaluation, notice)


def _course(env: str, config: AlgorithmConfig, policy: Policy, said: RowInfo) -> Course:
    section = config.evaluation_config
    taken_over = {key: value for key, value in config.env_config.items() if key not in said.only_training}
    return Course(
        env=env,
        env_config={**taken_over, **(section.env_config or {})},
        preprocess=for_evaluation(config.preprocess),
        wrappers=config.wrappers,
        description=policy.description(),
        duration=config.evaluation_duration,
        by_steps=config.evaluation_duration_unit == "timesteps",
        explore=section.explore,
        seed=config.seed,
        forgiving=config.restart_failed_sub_environments,
        device=config.inference_device if not config.evaluation_num_workers else "cpu",
        group=said.group,
        videos=min(config.evaluation_video, config.evaluation_duration),
    )


def _check(course: Course, policy: Policy) -> None:
    with preserve_random_state():
        one = course.environments(1)
        try:
            theirs = spaces.to_json(one.observation_space), spaces.to_json(one.action_space)
        finally:
            one.close()
    if theirs != (spaces.to_json(policy.observation_space), spaces.to_json(policy.action_space)):
        raise ConfigError(
            f"config.evaluation_config.env_config makes another environment of {course.env}: it shows {one.observation_space}"
            f" and takes {one.action_space}.",
            "What an agent sees and does must be the same as in training.",
        )
