"""Writing of checkpoints: when they are due, retries while the store is unavailable, the best one, and removal of old ones."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ludus.algorithms.trainer import Progress, Trainer
from ludus.core.backoff import Backoff
from ludus.errors import Fenced, NotFound, StoreError, StoreUnavailable
from ludus.experiments.control.experience_source import ExperienceSource
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.checkpoint import BestRecord
from ludus.models.weights.version_store import LocalVersionStore
from ludus.storage.base import Store

log = logging.getLogger(__name__)

SOON_S = 30.0
"""A restarted learner writes its first checkpoint after this time, then after twice as much, up to the time of the schedule."""

RETRY_S = 10.0
"""A checkpoint that could not be stored is retried after this training time, then after twice as much, …"""

_RETRY_AT_MOST_S = 300.0

LAST_S = 120.0
LAST_AGAIN_S = 1.0
"""The last checkpoint of a run is retried for LAST_S: after LAST_AGAIN_S, then after twice as much, …"""


@dataclass(frozen=True)
class CheckpointSchedule:
    """When checkpoints are written, and how many are kept."""

    every_iterations: int = 0
    """0: not by count."""
    every_s: float = 0.0
    """Seconds of training; 0: not by time."""
    at_end: bool = True
    keep: int | None = None
    """None: all."""


class StoreRetry:
    """Retries of a store that is unavailable, in training time."""

    def __init__(self) -> None:
        self.failures = 0
        self._backoff, self._retry_at = Backoff(RETRY_S, _RETRY_AT_MOST_S), math.inf

    def fail(self, now_s: float, error: StoreUnavailable) -> None:
        self.failures += 1
        delay_s = self._backoff.next_delay()
        self._retry_at = now_s + delay_s
        log.warning("not stored; retry in %.0f s (failure %d): %s", delay_s, self.failures, error)

    def succeed(self) -> None:
        self._backoff.reset()
        self._retry_at = math.inf

    @property
    def is_retrying(self) -> bool:
        return not math.isinf(self._retry_at)

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._retry_at

    def is_waiting(self, now_s: float) -> bool:
        """The store failed a moment ago: every further request may block as long as that one."""
        return now_s < self._retry_at < math.inf


class BestCheckpoint:
    """The mark of the best checkpoint. `pending` is one that is not written yet."""

    def __init__(self, store: Store, pool: LocalVersionStore) -> None:
        self._store, self._pool = store, pool
        self.pending: BestRecord | None = None
        self.written: BestRecord | None = None  # as we wrote it: a trainer that was cut off may write another one later
        with contextlib.suppress(StoreError):  # a damaged mark is replaced
            self.written = checkpoint.read_best(store)

    @property
    def names(self) -> set[str]:
        return {best.checkpoint for best in (self.written, self.pending) if best is not None}

    def is_beaten_by(self, score: float) -> bool:
        return all(score >= best.score for best in (self.written, self.pending) if best is not None)

    def write_pending(self) -> None:
        if self.pending is None:
            return
        self._pool.check()
        self._write(self.pending)
        self.written, self.pending = self.pending, None

    def repair(self) -> None:
        """Write the mark again if a trainer that was cut off has replaced it."""
        if self.written is not None and checkpoint.best_name(self._store) != self.written.checkpoint:
            log.warning("the mark of the best checkpoint, %s, was replaced; it is written again", self.written.checkpoint)
            self._write(self.written)

    def _write(self, best: BestRecord) -> None:
        incarnation = self._pool.incarnation(self._pool.names()[0])
        checkpoint.mark_best(self._store, best.checkpoint, best.score, best.by, incarnation)


class Checkpointer:
    """Writes the checkpoints of a run and removes old ones."""

    def __init__(
        self,
        trainer: Trainer,
        source: ExperienceSource,
        pool: LocalVersionStore,
        store: Store,
        schedule: CheckpointSchedule,
        config: Mapping[str, Any],
        *,
        on_written: Callable[[str], None] = lambda name: None,
        judge_by_training: bool = False,
    ) -> None:
        """`config`: the experiment, stored with each checkpoint. `judge_by_training`: the training return decides which is the best."""
        self._trainer, self._source, self._pool, self._store = trainer, source, pool, store
        self.schedule, self._config = schedule, config
        self._on_written, self._judge_by_training = on_written, judge_by_training
        self.last: str | None = None
        """Name of the newest checkpoint of this process."""
        self.pinned: set[str] = set()
        """Checkpoints that evaluations still need."""
        self._iteration, self._written_at, self._soon_s = -1, trainer.progress.time_s, math.inf
        self._own: set[str] = set()
        self._surplus: set[str] = set()  # written for an evaluation alone
        self._unstored: set[tuple[str, int]] = set()  # model versions whose checkpoint could not be stored
        self._retry = StoreRetry()
        self._best = BestCheckpoint(store, pool)

    def hurry(self) -> None:
        """Write the first checkpoints soon: learners may die more often than checkpoints are due by time."""
        self._soon_s = SOON_S

    def is_due(self, progress: Progress) -> bool:
        """By the schedule, while training goes on."""
        by_time = bool(self.schedule.every_s) and progress.time_s - self._written_at >= min(self.schedule.every_s, self._soon_s)
        if self._retry.is_retrying:  # the store is unavailable: not more often than its retries
            return self._retry.is_due(progress.time_s)
        every = self.schedule.every_iterations
        return by_time or bool(every and progress.iterations % every == 0)

    @property
    def is_store_failing(self) -> bool:
        return self._retry.is_waiting(self._trainer.progress.time_s)

    def metrics(self) -> dict[str, float]:
        return {"checkpoint/failures": float(self._retry.failures)} if self._retry.failures else {}

    def write(self, due: bool = True) -> str:
        """Store the state of the run, once per iteration, and remove old checkpoints. Returns the name.

        `due` False: written for an evaluation, and removed after it unless it is the best.
        """
        progress = self._trainer.progress
        if self._iteration == progress.iterations and self.last:
            if due:
                self._surplus.discard(self.last)
            return self.last
        name = self._store_state()
        self.last, self._iteration = name, progress.iterations
        self._own.add(name)
        self._retry.succeed()
        if due:
            self._written_at = progress.time_s
            self._soon_s *= 2
            self._on_written(name)
        else:
            self._surplus.add(name)
        if self._judge_by_training:
            self.judge(progress.episode_return_mean, "training")
        with self._retry_if_unavailable():
            self._best.write_pending()
            self.remove_old()
        log.info("checkpoint %s at %d timesteps", name, progress.timesteps)
        return name

    def try_write(self, due: bool = True) -> str | None:
        """As `write`; None: the store is unavailable, and a retry is scheduled."""
        try:
            return self.write(due)
        except StoreUnavailable as error:
            self._retry.fail(self._trainer.progress.time_s, error)
            return None

    def write_last(self) -> str:
        """As `write`, for the end of a run: what is not stored now is lost. Blocks up to LAST_S; then raises StoreUnavailable."""
        backoff, deadline = Backoff(LAST_AGAIN_S, 15 * LAST_AGAIN_S), time.monotonic() + LAST_S
        while True:
            try:
                name = self.write()
                self._best.write_pending()
                return name
            except StoreUnavailable as error:
                wait_s = backoff.next_delay()
                if time.monotonic() + wait_s > deadline:
                    raise
                log.warning("the last checkpoint is not stored; retrying for %d s: %s", deadline - time.monotonic(), error)
            time.sleep(wait_s)

    def finish(self) -> None:
        """Write a pending mark of the best checkpoint."""
        if self._best.pending is not None:
            with self._retry_if_unavailable():  # the checkpoint itself is stored
                self.write_last()

    def judge(self, score: float, by: str, name: str | None = None) -> None:
        """Keep the best checkpoint so far, whether one was due or not. `name`: the one that was judged, if not the newest."""
        if math.isnan(score):
            return
        if self.is_store_failing:
            if name is not None and self._best.is_beaten_by(score):
                self._best.pending = BestRecord(name, score, by)
            return
        with self._retry_if_unavailable():
            if self._best.is_beaten_by(score):
                best = name or self.write()
                self._best.pending = BestRecord(best, score, by)
                self._surplus.discard(best)
                self._best.write_pending()

    def remove_old(self) -> None:
        """Remove what exceeds `keep`, and what was evaluated and is not the best; never the newest. Raises Fenced, StoreError."""
        self._pool.check()
        self._best.repair()
        self._remove_foreign()
        spared = self.pinned | self._best.names
        removed = checkpoint.apply_retention(self._store, self.schedule.keep, self.last, spared=spared, surplus=self._surplus)
        for name in self._surplus - spared - {self.last}:
            removed[name] = checkpoint.delete_checkpoint(self._store, name)
            self._surplus.discard(name)
        for versions in removed.values():
            for model, version in versions.items():
                self._pool.forget(model, version)
        for model, version in self._unstored:
            self._pool.forget(model, version)
        self._unstored.clear()

    def try_remove_old(self) -> None:
        if not self.is_store_failing:  # else with the next checkpoint
            with self._retry_if_unavailable():
                self.remove_old()

    def _remove_foreign(self) -> None:
        """Remove what a trainer that was cut off has written; with `keep: None` it stays and is ignored."""
        if self.schedule.keep is None or checkpoint.BEGUN_FROM not in self._pool.began:
            return
        began = self._pool.began[checkpoint.BEGUN_FROM]
        foreign = [n for n in checkpoint.names(self._store) if n not in self._own and checkpoint.is_after(n, began)]
        for name in foreign:
            if self._best.written is not None and name == self._best.written.checkpoint:
                continue
            if checkpoint.is_superseded(self._store, name):
                log.warning("checkpoint %s is of a trainer that had been cut off; it is deleted", name)
                checkpoint.delete_checkpoint(self._store, name)

    def _store_state(self) -> str:
        """Raises Fenced: then nothing of it is visible."""
        versions = {name: self._keep_version(name) for name in self._trainer.algorithms}
        try:
            name = self._put(versions)
        except NotFound:  # the new owner of the run, or a trainer that took itself for it, removed the unfinished checkpoint
            self._pool.check()
            name = self._put(versions)
        self._unstored -= set(versions.items())
        try:
            self._pool.check()
        except StoreUnavailable:
            pass
        except Fenced:  # taken over between the guard and the checkpoint
            with contextlib.suppress(StoreError):
                checkpoint.delete_checkpoint(self._store, name)
            raise
        return name

    def _put(self, versions: Mapping[str, int]) -> str:
        progress, algorithms = self._trainer.progress, self._trainer.algorithms
        state = {"progress": progress.to_json(), "config": self._config}
        return checkpoint.write(
            self._store, progress.iterations, algorithms, versions, self._source.state(), state,
            incarnations={model: self._pool.incarnation(model) for model in algorithms}, guard=self._pool.confirm,
        )  # fmt: skip

    def _keep_version(self, model: str) -> int:
        self._unstored.add((model, self._pool.newest(model)[1]))
        return self._pool.keep(model)

    @contextlib.contextmanager
    def _retry_if_unavailable(self) -> Iterator[None]:
        """Training continues if the store is unavailable; what could not be stored is retried."""
        try:
            yield
        except StoreUnavailable as error:
            self._retry.fail(self._trainer.progress.time_s, error)
