"""Stopping of a run: its stop conditions, the time limit on its start, and interruption between two environment steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Progress
from ludus.config.schema import StopConfig
from ludus.errors import Interrupted, StartTimeout
from ludus.experiments.control.experience_source import ExperienceSource, RemoteSampling
from ludus.process.signals import StopSignal

FINAL_EVALUATION_S = 1.5
"""An evaluation may exceed `time_s` by this much; then it is interrupted."""


@dataclass(frozen=True)
class StopConditions:
    """When a run ends."""

    stop: StopConfig
    least_iteration: tuple[int, float] = (0, 0.0)
    """Steps and seconds that a `training_iteration` takes at least."""
    start_timeout_s: float | None = None
    """Seconds within which the first step has to be sampled; None: no limit."""

    def check_start(self, clock: RunClock, source: ExperienceSource) -> None:
        """Start the clock with the first step of remote sampling. Raises StartTimeout when there is none in time."""
        if clock.started or not isinstance(source, RemoteSampling):
            return
        if source.has_sampled():
            clock.start()
        elif self.start_timeout_s is not None and clock.startup_s >= self.start_timeout_s:
            raise StartTimeout(
                f"No step was sampled within {self.start_timeout_s:g} s of the start; waited for {source.waiting_for()}.",
                "Nothing was learned; see the logs in the run's directory. config.start_timeout_s allows a longer start.",
            )


def reached_condition(stop: StopConfig, progress: Progress) -> str | None:
    """The key of the first stop condition that holds."""
    mean = progress.episode_return_mean
    if stop.episode_return_mean is not None and not math.isnan(mean) and mean >= stop.episode_return_mean:
        return "episode_return_mean"
    if stop.timesteps is not None and progress.timesteps >= stop.timesteps:
        return "timesteps"
    if stop.iterations is not None and progress.iterations >= stop.iterations:
        return "iterations"
    if stop.training_iteration is not None and progress.training_iteration >= stop.training_iteration:
        return "training_iteration"
    if stop.episodes is not None and progress.episodes >= stop.episodes:
        return "episodes"
    if stop.time_s is not None and progress.time_s >= stop.time_s:
        return "time_s"
    return None


class StopCheck:
    """Whether a run has to stop now: because of a signal, or of its time limit. Checked before every call of an environment.

    A call in progress is waited for; in the main thread, inside `interruptible()`, Interrupted is soon raised in the middle of it.
    """

    def __init__(self, interrupted: Callable[[], bool], clock: RunClock) -> None:
        self._interrupted, self.clock = interrupted, clock
        self._signal = interrupted if isinstance(interrupted, StopSignal) else None

    def before_step(self) -> None:
        """Before a step of training: start the clock of the run. Raises Interrupted."""
        if not self.clock.started:
            self._start()
        self.raise_if_due()

    def _start(self) -> None:
        self.clock.start()
        left = self.clock.left_s
        if self._signal is not None and left is not None:
            self._signal.interrupt_later(max(0.0, left) + FINAL_EVALUATION_S)

    def raise_if_due(self) -> None:
        """Raises Interrupted."""
        if self._interrupted() or self.clock.is_up():
            raise Interrupted

    def before_evaluation_step(self) -> None:
        """Raises Interrupted."""
        if self.ends_evaluation():
            raise Interrupted

    def ends_evaluation(self) -> bool:
        return self._interrupted() or self.clock.is_up(FINAL_EVALUATION_S)

    def interruptible(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._signal is None else self._signal.interruptible()
