"""Evaluations by other processes, while training goes on."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ludus.config.schema import AlgorithmConfig
from ludus.core.tree import Array
from ludus.core.types import DEFAULT_MODEL
from ludus.distributed.code_bundle import CodeBundle
from ludus.envs.vector_env import Environments
from ludus.envs.wrappers import wrapper_names
from ludus.errors import LudusError
from ludus.experiments.evaluation.evaluation import EvaluationPlan, Notice, warn_truncated_episodes
from ludus.experiments.evaluation.evaluation_video import RecordedVideos, VideoRecorder
from ludus.experiments.runs.checkpoint import FOLDER
from ludus.experiments.runs.remote_runs import store_of
from ludus.models.weights import serialization
from ludus.process import screen_choice
from ludus.process.workers.supervisor import Context, WorkerRestart
from ludus.process.workers.task_pool import TaskPool
from ludus.sampling.episode_runner import Score

log = logging.getLogger(__name__)

MakePlayer = Callable[[Context, Any, CodeBundle], Callable[[Mapping[str, Any]], dict[str, Any]]]
"""Makes what a worker calls with every task: (context, plan, code of the user) → player."""


class SharedPlan(Protocol):
    """A plan of evaluations whose rows can be played by several processes."""

    @property
    def env(self) -> str: ...
    @property
    def group(self) -> int:
        """Rows that one process must play together."""
        ...

    @property
    def groups(self) -> int: ...
    @property
    def videos(self) -> int: ...

    def seed_of(self, iteration: int) -> int: ...


def make_evaluation_workers(
    plan: EvaluationPlan, config: AlgorithmConfig, directory: Path, interrupted: Callable[[], bool], notice: Notice
) -> EvaluationWorkers:
    """`directory`: of the run. `notice` is called once if videos cannot be recorded."""
    bundle = CodeBundle.of(plan.env, *wrapper_names(config.wrappers), models=[config.model.custom_model])
    return EvaluationWorkers(plan, bundle, directory, worker_settings(config), interrupted, notice)


def worker_settings(config: AlgorithmConfig) -> WorkerSettings:
    restart = WorkerRestart(config.max_worker_restarts, config.worker_restart_backoff_s)
    return WorkerSettings(config.evaluation_num_workers, config.worker_hang_s, restart)


@dataclass(frozen=True)
class WorkerSettings:
    workers: int
    hang_s: float
    restart: WorkerRestart


class EvaluationWorkers:
    """Evaluates checkpointed versions in worker processes; the trainer polls for results."""

    def __init__(
        self,
        plan: SharedPlan,
        bundle: CodeBundle,
        directory: Path,
        pool: WorkerSettings,
        interrupted: Callable[[], bool],
        notice: Notice = log.warning,
        *,
        player: MakePlayer | None = None,
        details: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """`notice` is called once if videos cannot be recorded. `player`: plays the tasks of a worker; by default EvaluationPlayer.
        `details`: added to the tasks of an evaluation when it begins.
        """
        self._player, self._details = player or EvaluationPlayer, details
        self._plan, self._bundle, self._directory, self._pool = plan, bundle, directory, pool
        self.is_interrupted, self._notice = interrupted, notice
        self._records = bool(plan.videos)
        self._workers = min(pool.workers, plan.groups)
        self._tasks: TaskPool | None = None
        self._numbers = itertools.count(1)
        self._iteration: int | None = None
        self._open: dict[int, int] = {}  # task → first row
        self._parts: dict[int, Score] = {}
        self._error: LudusError | None = None

    @property
    def busy(self) -> bool:
        return self._iteration is not None

    @property
    def pids(self) -> list[int]:
        return [] if self._tasks is None else self._tasks.pids

    def begin(self, iteration: int, checkpoint: str) -> None:
        """Have that checkpoint played. Returns at once; nothing else may be under way."""
        if self._tasks is None:
            logs = self._directory / "logs" / "evaluation"
            self._tasks = TaskPool(
                "evaluation", self._player, self._plan, self._bundle,
                workers=self._workers, hang_s=self._pool.hang_s, restart=self._pool.restart, log_dir=logs, preload=("torch", __name__),
            )  # fmt: skip
        self._iteration, self._parts, self._error = iteration, {}, None
        where = {"run": str(self._directory.absolute()), "checkpoint": checkpoint, **self._details()}
        edges = (np.linspace(0, self._plan.groups, self._workers + 1).astype(int) * self._plan.group).tolist()
        for first, end in itertools.pairwise(edges):
            number = next(self._numbers)
            self._open[number] = first
            seed = self._plan.seed_of(iteration)
            video = iteration if first == 0 and self._records else None
            self._tasks.submit(number, {**where, "seed": seed, "first": first, "rows": end - first, "video": video})

    def poll(self, timeout_s: float = 0.0) -> tuple[int, Score | None] | None:
        """(iteration, score) when all of it has been played, None before; no score: it failed, which has been logged."""
        if self._iteration is None or self._tasks is None:
            return None
        for done in self._tasks.take(timeout_s):
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
        results = {
            name: (sum(part.results[name][0] for part in parts), sum(part.results[name][1] for part in parts))
            for name in parts[0].results
        }
        cut = sum(part.cut for part in parts)
        score = Score(returns, lengths, cut=cut, results=results, sides=sides, videos=parts[0].videos)
        warn_truncated_episodes(score, self._plan.env)
        return iteration, score

    def close(self) -> None:
        if self._tasks is not None:
            self._tasks.close()


def weights_of(task: Mapping[str, Any], model: str) -> Mapping[str, Array]:
    """Weights of a model in the checkpoint of a task."""
    key, name = f"{FOLDER}/{task['checkpoint']}", f"{model}.safetensors"
    return serialization.decode_weights(store_of(Path(task["run"])).get_file(key, name), f"{key}/{name}")[0]


def answer_of(score: Score, recorded: RecordedVideos) -> dict[str, Any]:
    """What a worker returns for a task."""
    lists = {"returns": score.returns, "lengths": score.lengths, "sides": score.sides}
    videos = {"videos": [str(path) for path in recorded.paths], "problem": recorded.problem}
    return {**lists, **videos, "cut": score.cut, "results": dict(score.results)}


class EvaluationPlayer:
    """What a worker does: load the weights of a checkpoint and play its share."""

    def __init__(self, context: Context, plan: EvaluationPlan, bundle: CodeBundle) -> None:
        torch.set_num_threads(1)
        screen_choice.configure(plan.display)
        bundle.unpack()
        self._context, self._plan, self._policy = context, plan, plan.policy()
        self._environments: dict[int, Environments] = {}  # by how many rows; shares differ by one
        self._recorder: VideoRecorder | None = None

    def __call__(self, task: Mapping[str, Any]) -> dict[str, Any]:
        decoded = weights_of(task, DEFAULT_MODEL)
        self._policy.load_weights(decoded)

        def is_interrupted() -> bool:
            self._context.beat()  # once per step
            return False

        rows = task["rows"]
        if rows not in self._environments:
            self._environments[rows] = self._plan.environments(rows, self._context.beat)
        score = self._plan.play(self._policy, self._environments[rows], task["seed"], task["first"], is_interrupted)
        recorded = RecordedVideos()
        if task["video"] is not None:
            self._recorder = self._recorder or self._plan.recorder(Path(task["run"]), self._context.beat)
            if self._recorder is not None:
                recorded = self._recorder.record(decoded, task["video"], task["seed"])
        return answer_of(score, recorded)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        for environments in self._environments.values():
            environments.close()
