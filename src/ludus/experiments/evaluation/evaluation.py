"""Evaluations of a run that steps its environments: in the training process, or in worker processes during training."""

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
from ludus.process.screen_choice import AUTO
from ludus.sampling.episode_runner import EpisodePlan, Score, episode_quota, episode_step_limit, play, preserve_random_state

if TYPE_CHECKING:
    from ludus.experiments.evaluation.evaluation_video import VideoRecorder
    from ludus.experiments.evaluation.evaluation_workers import EvaluationWorkers
    from ludus.experiments.evaluation.rollout import RolloutSpec

log = logging.getLogger(__name__)

Notice = Callable[[str], None]

MAX_ROWS = 16
STEPS_PER_ROW = 1000
"""Steps per row of an evaluation by steps: each row finishes its last episode, so few rows limit the overshoot."""


@dataclass(frozen=True)
class EvaluationPlan:
    """What every evaluation of a run plays. Plain values, which can be sent to another process."""

    env: str
    env_config: Mapping[str, Any]
    preprocess: PreprocessConfig
    wrappers: WrapperList
    description: Mapping[str, Any]
    duration: int
    by_steps: bool
    """Whether `duration` counts steps instead of episodes."""
    explore: bool
    seed: int
    forgiving: bool
    device: str
    display: str = AUTO
    group: int = 1
    """Rows that form one side of a match; they play the same number of episodes."""
    videos: int = 0
    """Number of first episodes of which videos are recorded."""

    @property
    def groups(self) -> int:
        wanted = max(1, self.duration // STEPS_PER_ROW) if self.by_steps else self.duration
        return max(1, min(math.ceil(wanted / self.group), MAX_ROWS // self.group))

    @property
    def rows(self) -> int:
        return self.groups * self.group

    def quota(self) -> Ints:
        """Episodes or steps of each row."""
        return episode_quota(math.ceil(self.duration / self.group), self.groups).repeat(self.group)

    def environments(self, rows: int, beat: Callable[[], None] = lambda: None) -> Environments:
        return make_environments(
            self.env, rows, self.env_config,
            preprocess=self.preprocess, wrappers=self.wrappers, forgiving=self.forgiving, beat=beat,
        )  # fmt: skip

    def policy(self) -> Policy:
        """A separate policy, so that evaluation does not affect training."""
        return copy_for_acting(serialization.policy_from(self.description), torch.device(self.device))

    def stage(self) -> RolloutSpec:
        """What the videos record."""
        from ludus.experiments.evaluation.rollout import RolloutSpec

        return RolloutSpec(
            self.env, self.env, {}, env_config=self.env_config, preprocess=self.preprocess, wrappers=self.wrappers, display=self.display,
            deterministic=not self.explore, recorded_episodes=self.videos,
        )  # fmt: skip

    def recorder(self, directory: Path, before_step: Callable[[], None]) -> VideoRecorder | None:
        """A recorder with a policy on the CPU; None if no videos are recorded."""
        if not self.videos:
            return None
        from ludus.experiments.evaluation.evaluation_video import VideoRecorder

        return VideoRecorder(self.stage(), serialization.policy_from(self.description), directory, before_step)

    def seed_of(self, iteration: int) -> int:
        return (self.seed * 7919 + iteration * 104_729 + 1) % (1 << 31)

    def play(self, policy: Policy, environments: Environments, seed: int, first: int, interrupted: Callable[[], bool]) -> Score:
        """Play the rows from `first` on, one per environment."""
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


class InlineEvaluation:
    """Evaluates in the training process, which waits. Has its own environments, policy and random state."""

    def __init__(
        self,
        plan: EvaluationPlan,
        trained: Policy,
        stop: StopCheck,
        directory: Path | None = None,
        notice: Notice = log.warning,
    ) -> None:
        """`directory`: of the run, for videos. `notice` is called once if they cannot be recorded."""
        self._plan, self._trained, self._stop, self._notice = plan, trained, stop, notice
        self._own: tuple[Policy, Environments] | None = None
        self._recorder = None if directory is None else plan.recorder(directory, stop.before_evaluation_step)

    def __call__(self, iteration: int) -> Score:
        try:
            with preserve_random_state(), self._stop.interruptible():
                score = self._play(iteration)
        except Interrupted:
            return Score((), (), complete=False)
        warn_truncated_episodes(score, self._plan.env)
        return replace(score, videos=self._record(iteration)) if score.complete else score

    def _record(self, iteration: int) -> tuple[Path, ...]:
        if self._recorder is None:
            return ()
        try:
            with preserve_random_state(), self._stop.interruptible():
                recorded = self._recorder.record(self._trained.weights(), iteration, self._plan.seed_of(iteration))
        except Interrupted:  # the score is valid
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
            self._own = self._plan.policy(), self._plan.environments(self._plan.rows, self._stop.before_evaluation_step)
        policy, environments = self._own
        policy.load_weights(self._trained.weights())
        return self._plan.play(policy, environments, self._plan.seed_of(iteration), 0, self._stop.ends_evaluation)

    def close(self) -> None:
        self._close_recorder()
        if self._own is not None:
            self._own[1].close()


def warn_truncated_episodes(score: Score, env: str) -> None:
    if score.cut:
        log.warning(
            "%d of %d episodes of an evaluation were cut after %d steps: %s did not end them. Give it a time limit.",
            score.cut, len(score.returns), episode_step_limit(env), env,
        )  # fmt: skip


def make_evaluation(
    resolved: ResolvedExperiment, policy: Policy, run: Run, stop: StopCheck, announce: Notice | None = None
) -> InlineEvaluation | EvaluationWorkers | None:
    """Raises ConfigError, EnvironmentFault if the environment of `evaluation_config` cannot be made."""
    config = resolved.config
    if not config.evaluation_duration:
        return None
    env = resolved.experiment.env
    wrapped: Any = {"preprocess": config.preprocess, "wrappers": config.wrappers}
    with preserve_random_state():  # as many rows as training, which are known to be possible
        rows_info = row_info(env, config.num_envs_per_worker, config.env_config, **wrapped)
    plan = _make_plan(env, config, policy, rows_info)
    if config.evaluation_config.env_config is not None:
        _check_spaces(plan, policy)
    with preserve_random_state():
        rows_info = row_info(env, plan.rows, plan.env_config, preprocess=plan.preprocess, wrappers=plan.wrappers)
    if rows_info.has_opponents:  # the first evaluation may be an hour away
        raise ConfigError(
            f"Evaluations of {env} need opponents from the past, which evaluations do not have.",
            "Set another opponent in config.evaluation_config.env_config, as {opponent: medium}, or evaluation_duration: 0.",
        )

    notice = make_notice(announce)
    if plan.videos:
        from ludus.experiments.evaluation.evaluation_video import find_recording_problem

        if (problem := find_recording_problem(plan.stage())) is not None:
            notice(problem)
            plan = replace(plan, videos=0)
    if not config.evaluation_num_workers:
        return InlineEvaluation(plan, policy, stop, run.directory, notice)
    from ludus.experiments.evaluation.evaluation_workers import make_evaluation_workers

    return make_evaluation_workers(plan, config, run.directory, stop.ends_evaluation, notice)


def make_notice(announce: Notice | None) -> Notice:
    """Log a sentence as a warning, and announce it."""

    def notice(sentence: str) -> None:
        log.warning("%s", sentence)
        if announce is not None:
            announce(f"warning: {sentence}")

    return notice


def _make_plan(env: str, config: AlgorithmConfig, policy: Policy, rows_info: RowInfo) -> EvaluationPlan:
    section = config.evaluation_config
    inherited = {key: value for key, value in config.env_config.items() if key not in rows_info.only_training}
    return EvaluationPlan(
        env=env,
        env_config={**inherited, **(section.env_config or {})},
        preprocess=for_evaluation(config.preprocess),
        wrappers=config.wrappers,
        description=policy.description(),
        duration=config.evaluation_duration,
        by_steps=config.evaluation_duration_unit == "timesteps",
        explore=section.explore,
        seed=config.seed,
        forgiving=config.restart_failed_sub_environments,
        display=config.display,
        device=config.inference_device if not config.evaluation_num_workers else "cpu",
        group=rows_info.group,
        videos=min(config.evaluation_video, config.evaluation_duration),
    )


def _check_spaces(plan: EvaluationPlan, policy: Policy) -> None:
    with preserve_random_state():
        one = plan.environments(1)
        try:
            theirs = spaces.to_json(one.observation_space), spaces.to_json(one.action_space)
        finally:
            one.close()
    if theirs != (spaces.to_json(policy.observation_space), spaces.to_json(policy.action_space)):
        raise ConfigError(
            f"config.evaluation_config.env_config changes the spaces of {plan.env} to {one.observation_space}"
            f" and {one.action_space}.",
            "Observation and action spaces must be the same as in training.",
        )
