"""The training loop of a run: sample, learn, then report, checkpoint, evaluate and check the stop conditions."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from ludus.algorithms.trainer import Trainer
from ludus.errors import LudusError, StoreUnavailable
from ludus.experiments.control.checkpointer import Checkpointer
from ludus.experiments.control.evaluation_schedule import EvaluationSchedule
from ludus.experiments.control.experience_source import ExperienceSource
from ludus.experiments.control.metrics_reporter import MetricsReporter
from ludus.experiments.control.stopping import StopConditions, reached_condition
from ludus.models.weights.version_store import LocalVersionStore

log = logging.getLogger(__name__)

_OWNER_CHECK_S = 2.0  # the status writer checks more often


class RunController:
    """Drives the components of a run. Everything happens in the thread that calls it, but `numbers`."""

    def __init__(
        self,
        trainer: Trainer,
        source: ExperienceSource,
        pool: LocalVersionStore,
        reporter: MetricsReporter,
        checkpointer: Checkpointer,
        evaluations: EvaluationSchedule,
        conditions: StopConditions,
    ) -> None:
        self._trainer, self._source, self._pool = trainer, source, pool
        self._reporter, self._checkpointer, self._evaluations = reporter, checkpointer, evaluations
        self._conditions, self._iterations = conditions, trainer.progress.iterations
        self.stopped_by: str | None = None
        """The stop condition that holds."""

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Train until a stop condition holds or `until()`. Raises LudusError if no component has anything to do."""
        while self.stopped_by is None and not until():
            sampled, learned, controlled = self._source.step(), self._trainer.step(), self.step()
            if not (sampled or learned or controlled):
                raise LudusError("Neither sampler nor trainer has anything to do: the run would wait forever.")

    @property
    def last_checkpoint(self) -> str | None:
        return self._checkpointer.last

    def numbers(self) -> dict[str, float]:
        """The newest value of every metric. May be called from any thread."""
        return self._reporter.newest(self._trainer)

    def hurry_checkpoints(self) -> None:
        """Write the first checkpoints soon, after a restart of the learner."""
        self._checkpointer.hurry()

    def checkpoint(self) -> str:
        return self._checkpointer.write()

    def step(self) -> bool:
        """Do what is due after an update; False when there was none, and nothing else to do.

        Report, then checkpoint, then evaluate. After a kill before the checkpoint, the next learner repeats the update, and its report
        replaces the first one. In the other order the report of that update would be missing.
        """
        progress = self._trainer.progress
        with contextlib.suppress(StoreUnavailable):  # reported when there is something to store
            self._pool.check_recently(_OWNER_CHECK_S)
        collected = self._evaluations.collect()
        self._conditions.check_start(self._trainer.clock, self._source)
        if progress.iterations == self._iterations:
            return self._stop_at_time_limit() or collected
        self._iterations = progress.iterations
        progress.count_training_iteration(*self._conditions.least_iteration)
        if self._conditions.stop.training_iteration is not None:
            self._trainer.metrics["training_iteration"] = progress.training_iteration
        self.stopped_by = self.stopped_by or reached_condition(self._conditions.stop, progress)
        if self.stopped_by or self._reporter.is_due(progress.time_s):
            self._reporter.report_update(self._trainer, self._source.metrics(), self._checkpointer.metrics())
        stored = due = self._is_checkpoint_due()
        if due and self.stopped_by is None:
            stored = self._checkpointer.try_write() is not None
        elif due:
            self._checkpointer.write_last()
        self._evaluations.after_update(checkpoint_due=due, store_failed=due and not stored)
        if self.stopped_by is not None:
            self._finish()
        return True

    def _is_checkpoint_due(self) -> bool:
        if self.stopped_by is not None:
            return self._checkpointer.schedule.at_end
        return self._checkpointer.is_due(self._trainer.progress)

    def _stop_at_time_limit(self) -> bool:
        """The time limit may be reached between two updates: while a batch is sampled, or while no game connects."""
        if self.stopped_by is not None or not self._trainer.clock.is_up():
            return False
        self.stopped_by = "time_s"
        self._count_unlearned()
        if self._checkpointer.schedule.at_end:
            self._checkpointer.write_last()
            iterations = self._trainer.progress.iterations
            if iterations and iterations != self._evaluations.last_iteration:
                self._evaluations.evaluate(checkpoint_due=True, store_failed=False)
        self._finish()
        return True

    def stop_early(self) -> None:
        """End a run that no stop condition ended: count what it did since the last update, and write a checkpoint."""
        self._count_unlearned()
        self._checkpointer.write_last()

    def _count_unlearned(self) -> None:
        """Count what happened since the last update: the run ends without another one."""
        progress = self._trainer.progress
        progress.time_s = max(progress.time_s, self._trainer.clock.elapsed_s)
        fps = progress.timesteps / progress.time_s if progress.time_s else 0.0
        unlearned = self._source.unlearned_steps()
        times = {"time_s": progress.time_s, "fps": fps, "unlearned_steps": unlearned}
        self._reporter.final |= {**self._source.metrics(), **times}
        log.info("%d sampled steps are discarded: they are less than a batch", unlearned)

    def _finish(self) -> None:
        self._evaluations.finish()
        self._checkpointer.finish()

    def close(self) -> None:
        self._reporter.close()
