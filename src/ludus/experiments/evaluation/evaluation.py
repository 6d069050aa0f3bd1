"""Evaluations of a run that calls its environments: inline, or by other processes while training goes on."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ludus.config.schema import AlgorithmConfig, PreprocessConfig
from ludus.core import spaces
from ludus.core.tree import Array
from ludus.core.types import DEFAULT_MODEL, Ints
from ludus.distributed.code_bundle import Luggage
from ludus.envs.preprocessing import for_evaluation
from ludus.envs.vector_env import Environments, RowInfo, make_environments, row_info
from ludus.envs.wrappers import WrapperList, wrapper_names
from ludus.errors import ConfigError, Interrupted, LudusError
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.evaluation.evaluation_video import Recorded, VideoRecorder, why_not_recorded
from ludus.experiments.evaluation.rollout import Stage
from ludus.experiments.resolve import ResolvedExperiment
from ludus.experiments.runs.checkpoint import FOLDER
from ludus.experiments.runs.remote_runs import store_of
from ludus.experiments.runs.run_dir import Run
from ludus.models.devices import acting_on
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.process.workers.supervisor import Context, RestartPolicy
from ludus.process.workers.task_pool import TaskPool
from ludus.sampling.episode_runner import EpisodePlan, Score, episode_quota, episode_step_limit, play, preserve_random_state

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
    luggage: Luggage
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
        return acting_on(serialization.policy_from(self.description), torch.device(self.device))

    def stage(self) -> Stage:
        """What a video shows."""
        return Stage(
            self.env, self.env, {}, env_config=self.env_config, preprocess=self.preprocess, wrappers=self.wrappers,
            deterministic=not self.explore, filmed=self.videos,
        )  # fmt: skip

    def recorder(self, directory: Path, before_step: Callable[[], None]) -> VideoRecorder | None:
        """With a policy on the CPU; None: no videos are wanted."""
        return (
            VideoRecorder(self.stage(), serialization.policy_from(self.description), directory, before_step)
            if self.videos
            else None
        )

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


class EvaluationWorkers:
    """Other processes play the versions that were checkpointed; whoever trains looks now and then whether they are done."""

    def __init__(
        self,
        course: Course,
        directory: Path,
        workers: int,
        hang_s: float,
        restart: RestartPolicy,
        interrupted: Callable[[], bool],
        notice: Notice = log.warning,
    ) -> None:
        """`notice` is called once if videos cannot be recorded."""
        self._course, self._directory, self.interrupted, self._notice = course, directory, interrupted, notice
        self._records = bool(course.videos)
        self._workers = min(workers, course.groups)
        self._hang_s, self._restart = hang_s, restart
        self._errands: TaskPool | None = None
        self._numbers = itertools.count(1)
        self._iteration: int | None = None
        self._open: dict[int, int] = {}  # errand → first row
        self._parts: dict[int, Score] = {}
        self._error: LudusError | None = None

    @property
    def busy(self) -> bool:
        return self._iteration is not None

    @property
    def pids(self) -> list[int]:
        return [] if self._errands is None else self._errands.pids

    def begin(self, iteration: int, checkpoint: str) -> None:
        """Have that checkpoint played. Returns at once; nothing else may be under way."""
        if self._errands is None:
            logs = self._directory / "logs" / "evaluation"
            self._errands = TaskPool(
                "evaluation", Player, self._course,
                workers=self._workers, hang_s=self._hang_s, restart=self._restart, log_dir=logs, preload=("torch", __name__),
            )  # fmt: skip
        self._iteration, self._parts, self._error = iteration, {}, None
        where = {"run": str(self._directory.absolute()), "checkpoint": checkpoint}
        edges = (np.linspace(0, self._course.groups, self._workers + 1).astype(int) * self._course.group).tolist()
        for first, end in itertools.pairwise(edges):
            number = next(self._numbers)
            self._open[number] = first
            seed = self._course.seed_of(iteration)
            video = iteration if first == 0 and self._records else None
            self._errands.submit(number, {**where, "seed": seed, "first": first, "rows": end - first, "video": video})

    def finished(self, timeout_s: float = 0.0) -> tuple[int, Score | None] | None:
        """(iteration, score) when all of it has been played, None before; no score: it failed, which has been said."""
        if self._iteration is None or self._errands is None:
            return None
        for done in self._errands.take(timeout_s):
            first = self._open.pop(done.number)
            if done.error is not None:
                self._error = done.error
            else:
                played = done.answer
                results = {name: tuple(both) for name, both in played["results"].items()}
                returns, lengths, sides = (tuple(played[name]) for name in ("returns", "lengths", "sides"))
                videos = tuple(map(Path, played["videos"]))
                self._parts[first] = Score(returns, lengths, cut=played["cut"], results=results, sides=sides, videos=videos)
                if played["problem"] is not None:
                    self._records = False
                    self._notice(played["problem"])
        if self._open:
            return None
        iteration, self._iteration = self._iteration, None
        if self._error is not None:
            log.warning("the evaluation of iteration %d failed: %s", iteration, self._error)
            return iteration, None
        parts = [self._parts[first] for first in sorted(self._parts)]
        returns, lengths, sides = (
            tuple(itertools.chain(*values)) for values in zip(*((p.returns, p.lengths, p.sides) for p in parts), strict=True)
        )
        told = {name: _added([part.results[name] for part in parts]) for name in parts[0].results}
        cut = sum(part.cut for part in parts)
        score = Score(returns, lengths, cut=cut, results=told, sides=sides, videos=parts[0].videos)
        warn_of_cuts(score, self._course.env)
        return iteration, score

    def close(self) -> None:
        if self._errands is not None:
            self._errands.close()


def _added(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(total for total, _ in pairs), sum(count for _, count in pairs)


class Player:
    """What a worker does: load the weights of a checkpoint and play its share."""

    def __init__(self, context: Context, course: Course) -> None:
        torch.set_num_threads(1)
        course.luggage.unpack()
        self._context, self._course, self._policy = context, course, course.policy()
        self._environments: dict[int, Environments] = {}  # by how many rows; shares differ by one
        self._recorder: VideoRecorder | None = None

    def __call__(self, errand: Mapping[str, Any]) -> dict[str, Any]:
        key, name = f"{FOLDER}/{errand['checkpoint']}", f"{DEFAULT_MODEL}.safetensors"
        weights = store_of(Path(errand["run"])).get_file(key, name)
        decoded = serialization.decode_weights(weights, f"{key}/{name}")[0]
        self._policy.load_weights(decoded)
        score = self._course.play(self._policy, self._rows(errand["rows"]), errand["seed"], errand["first"], self._turned)
        lists = {"returns": score.returns, "lengths": score.lengths, "sides": score.sides}
        recorded = Recorded() if errand["video"] is None else self._record(errand, decoded)
        videos = {"videos": [str(path) for path in recorded.paths], "problem": recorded.problem}
        return {**lists, **videos, "cut": score.cut, "results": dict(score.results)}

    def _record(self, errand: Mapping[str, Any], weights: Mapping[str, Array]) -> Recorded:
        if self._recorder is None:
            self._recorder = self._course.recorder(Path(errand["run"]), self._context.beat)
        return Recorded() if self._recorder is None else self._recorder.record(weights, errand["video"], errand["seed"])

    def _rows(self, rows: int) -> Environments:
        if rows not in self._environments:
            self._environments[rows] = self._course.environments(rows)
            self._environments[rows].beat = self._context.beat
        return self._environments[rows]

    def _turned(self) -> bool:
        self._context.beat()
        return False

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        for environments in self._environments.values():
            environments.close()


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

    if course.videos and (problem := why_not_recorded(course.stage())) is not None:
        notice(problem)
        course = replace(course, videos=0)
    if not config.evaluation_num_workers:
        return Evaluation(course, policy, stop, run.directory, notice)
    restart = RestartPolicy(config.max_worker_restarts, config.worker_restart_backoff_s)
    workers = config.evaluation_num_workers
    return EvaluationWorkers(course, run.directory, workers, config.worker_hang_s, restart, stop.ends_evaluation, notice)


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
        luggage=Luggage.of(env, *wrapper_names(config.wrappers), models=[config.model.custom_model]),
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
