"""Stopping between two environment steps: on a signal, or when the time of the run is up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from ludus.algorithms.run_clock import RunClock
from ludus.errors import Interrupted
from ludus.process.host import StopSignal

FINAL_EVALUATION_S = 1.5
"""An evaluation may exceed `time_s` by this much; then it is broken off."""


class StopCheck:
    """Whether a run has to stop now. Samplers and evaluations ask before every call of an environment.

    A call that is under way is waited for, but not for long if this is the main thread: inside `interruptible()` Interrupted is
    raised in the middle of it.
    """

    def __init__(self, interrupted: Callable[[], bool], clock: RunClock) -> None:
        self._interrupted, self._clock = interrupted, clock
        self._signal = interrupted if isinstance(interrupted, StopSignal) else None

    def before_step(self) -> None:
        """Of training: starts the clock of the run. Raises Interrupted."""
        if not self._clock.started:
            self._start()
        self.raise_if_due()

    def _start(self) -> None:
        self._clock.start()
        left = self._clock.left_s
        if self._signal is not None and left is not None:
            self._signal.interrupt_later(max(0.0, left) + FINAL_EVALUATION_S)

    def raise_if_due(self) -> None:
        """Raises Interrupted."""
        if self._interrupted() or self._clock.is_up():
            raise Interrupted

    def before_evaluation_step(self) -> None:
        """Raises Interrupted."""
        if self.ends_evaluation():
            raise Interrupted

    def ends_evaluation(self) -> bool:
        return self._interrupted() or self._clock.is_up(FINAL_EVALUATION_S)

    def interruptible(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._signal is None else self._signal.interruptible()
