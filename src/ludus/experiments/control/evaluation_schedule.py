"""Evaluations during a run: when they are due, in this process or in others, and what their scores lead to."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from ludus.algorithms.trainer import Progress, Trainer
from ludus.errors import EnvironmentFault
from ludus.experiments.control.callbacks import show_videos
from ludus.experiments.control.checkpointer import Checkpointer
from ludus.experiments.control.metrics_reporter import MetricsReporter
from ludus.experiments.control.stopping import FINAL_EVALUATION_S
from ludus.sampling.episode_runner import Score

log = logging.getLogger(__name__)

LAST_EVALUATIONS_S = 300.0
"""Longest wait for evaluations of other processes at the end of a run."""

_DISPLAY_SHARE = 20.0
"""Training lasts this many times as long as an evaluation that only the display needs."""

_POLL_S = 0.2

Evaluate = Callable[[int], Score]
"""Plays the evaluation episodes of one iteration, while training waits."""


@runtime_checkable
class BackgroundEvaluation(Protocol):
    """Plays the evaluation episodes of one checkpoint at a time while training goes on."""

    @property
    def busy(self) -> bool: ...

    @property
    def is_interrupted(self) -> Callable[[], bool]: ...

    def begin(self, iteration: int, checkpoint: str) -> None: ...

    def poll(self, timeout_s: float = 0.0) -> tuple[int, Score | None] | None:
        """(iteration, its score or None if it failed); None: not finished within the time-out."""
        ...


@dataclass(frozen=True)
class EvaluationInterval:
    """0: only with checkpoints."""

    every: int = 0
    unit: Literal["iterations", "timesteps", "episodes"] = "iterations"

    def count(self, progress: Progress) -> int:
        counted: int = getattr(progress, self.unit)
        return counted

    def is_due(self, progress: Progress, before: int) -> bool:
        """Whether the count has reached or passed a multiple of the interval since it was `before`."""
        return bool(self.every) and self.count(progress) // self.every > before // self.every


@dataclass(frozen=True)
class _EvaluatedVersion:
    """A checkpoint that is being evaluated, or waits for it."""

    checkpoint: str
    iterations: int
    timesteps: int


class EvaluationSchedule:
    """Runs the evaluations of a run, reports their scores, and lets them choose the best checkpoint."""

    def __init__(
        self,
        evaluate: Evaluate | BackgroundEvaluation | None,
        interval: EvaluationInterval,
        trainer: Trainer,
        checkpointer: Checkpointer,
        reporter: MetricsReporter,
    ) -> None:
        self._background = evaluate if isinstance(evaluate, BackgroundEvaluation) else None
        self._inline = None if evaluate is None or isinstance(evaluate, BackgroundEvaluation) else evaluate
        self._interval, self._trainer, self._checkpointer, self._reporter = interval, trainer, checkpointer, reporter
        self._running: _EvaluatedVersion | None = None
        self._waiting: _EvaluatedVersion | None = None
        self._skipped = 0
        self._count = interval.count(trainer.progress)
        self._last_time_s, self._last_duration_s = trainer.progress.time_s, 0.0
        self.last_iteration = -1
        """The iteration that was evaluated last."""

    def after_update(self, *, checkpoint_due: bool, store_failed: bool) -> None:
        """`store_failed`: a checkpoint of this iteration could not be stored, and is not tried again now."""
        progress = self._trainer.progress
        before, self._count = self._count, self._interval.count(progress)
        if checkpoint_due or self._interval.is_due(progress, before):
            self.evaluate(checkpoint_due=checkpoint_due, store_failed=store_failed)
        elif self._is_display_due(progress):
            self._evaluate_inline(progress, judge=False)

    def evaluate(self, *, checkpoint_due: bool, store_failed: bool) -> None:
        progress = self._trainer.progress
        self.last_iteration = progress.iterations
        if self._background is not None:
            name = None if store_failed or self._checkpointer.is_store_failing else self._checkpointer.try_write(checkpoint_due)
            if name is not None:
                self.evaluate_checkpoint(name, progress.iterations, progress.timesteps)
        elif self._inline is not None:
            self._evaluate_inline(progress)

    def _evaluate_inline(self, progress: Progress, *, judge: bool = True) -> None:
        assert self._inline is not None
        began = time.monotonic()
        try:
            score = self._inline(progress.iterations)
        except EnvironmentFault as fault:  # training does not depend on it
            log.warning("an evaluation failed: %s", fault)
            return
        finally:
            self._last_time_s, self._last_duration_s = progress.time_s, time.monotonic() - began
        self._report(score, progress.iterations, progress.timesteps, judge=judge)

    def _is_display_due(self, progress: Progress) -> bool:
        """Whether the display needs an evaluation between those of the schedule. It judges no checkpoint."""
        every_s: float | None = getattr(self._inline, "every_s", None)
        if every_s is None:
            return False
        return progress.time_s - self._last_time_s >= max(every_s, _DISPLAY_SHARE * self._last_duration_s)

    # -- evaluations by other processes

    def evaluate_checkpoint(self, name: str, iterations: int, timesteps: int) -> None:
        """Start the evaluation, or queue it behind the running one, in place of one that waits already."""
        self._start_or_queue(_EvaluatedVersion(name, iterations, timesteps))

    def _start_or_queue(self, version: _EvaluatedVersion) -> None:
        assert self._background is not None
        if self._running is None:
            self._running = version
            self._pin()
            self._background.begin(version.iterations, version.checkpoint)
            return
        if self._waiting is not None:
            log.log(
                logging.INFO if self._skipped else logging.WARNING,
                "evaluations take longer than the time between them; checkpoint %s is skipped",
                self._waiting.checkpoint,
            )
            self._skipped += 1
        self._waiting = version
        self._pin()
        self._checkpointer.try_remove_old()

    def _pin(self) -> None:
        self._checkpointer.pinned = {version.checkpoint for version in (self._running, self._waiting) if version is not None}

    def collect(self, timeout_s: float = 0.0) -> bool:
        """Take the score of a finished background evaluation and start the next; False when there is none."""
        if self._background is None or self._running is None:
            return False
        finished = self._background.poll(timeout_s)
        if finished is None:
            return False
        version, waiting, self._running, self._waiting = self._running, self._waiting, None, None
        self._pin()
        if finished[1] is not None:
            self._report(finished[1], version.iterations, version.timesteps, version.checkpoint)
        if waiting is not None:
            self._start_or_queue(waiting)
        self._checkpointer.try_remove_old()
        return True

    def finish(self) -> None:
        """Wait for the last background evaluations, at most LAST_EVALUATIONS_S."""
        if self._background is None or self._running is None:
            return
        log.info("waiting for the last evaluations, at most %d s", LAST_EVALUATIONS_S)
        deadline = time.monotonic() + LAST_EVALUATIONS_S
        while self._running is not None:
            up = self._trainer.clock.is_up(FINAL_EVALUATION_S)
            if up or self._background.is_interrupted() or time.monotonic() >= deadline:
                self._mark_unfinished(f"of checkpoint {self._running.checkpoint} ")
                break
            self.collect(_POLL_S)

    # -- scores

    def _mark_unfinished(self, which: str = "") -> None:
        self._reporter.final["evaluation/unfinished"] = 1.0
        why = "the time limit was reached" if self._trainer.clock.is_up() else "the run was stopped"
        log.info("the evaluation %swas not finished: %s", which, why)

    def _report(self, score: Score, iterations: int, timesteps: int, name: str | None = None, *, judge: bool = True) -> None:
        """Report a score at the steps of its version. `judge`: it may make its checkpoint the best."""
        if not score.complete:
            self._mark_unfinished(f"({len(score.returns)} episodes ended) ")
            return
        if not score.returns:
            log.warning("an evaluation has no score: none of its episodes ended")
            return
        self._reporter.final.pop("evaluation/unfinished", None)
        self._reporter.report_evaluation(evaluation_metrics(score), iterations, timesteps)
        show_videos(self._reporter.sinks, score.videos, timesteps)
        if judge:
            self._checkpointer.judge(score.mean, "evaluation", name)


def evaluation_metrics(score: Score) -> dict[str, float]:
    numbers = {
        "evaluation/return_mean": score.mean,
        "evaluation/return_low": score.low,
        "evaluation/return_high": score.high,
        "evaluation/return_min": min(score.returns),
        "evaluation/return_max": max(score.returns),
        "evaluation/length_mean": sum(score.lengths) / len(score.lengths),
        "evaluation/episodes": len(score.returns),
        "evaluation/cut": score.cut,
        **{f"evaluation/{name}": value for name, value in score.numbers().items()},
    }
    return {key: value for key, value in numbers.items() if not math.isnan(value)}
