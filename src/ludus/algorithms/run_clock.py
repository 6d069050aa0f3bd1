"""The training time of a run (`time_s`) and its time limit."""

from __future__ import annotations

import time
from collections.abc import Callable


class RunClock:
    """Counts seconds of training from the first sampled step, including earlier parts of a resumed run.

    Start-up (environments, workers, connections) does not count: the clock runs from `start` on.
    """

    def __init__(self, limit_s: float | None = None, now: Callable[[], float] = time.perf_counter) -> None:
        self._limit_s, self._now = limit_s, now
        self._created = now()
        self._started: float | None = None
        self.before_s = 0.0
        """Seconds of earlier parts of the run."""

    def start(self) -> None:
        """Start the clock at the first sampled step. Further calls have no effect."""
        if self._started is None:
            self._started = self._now()

    @property
    def started(self) -> bool:
        return self._started is not None

    @property
    def part_s(self) -> float:
        """Seconds of this part of the run."""
        return 0.0 if self._started is None else self._now() - self._started

    @property
    def elapsed_s(self) -> float:
        return self.before_s + self.part_s

    @property
    def startup_s(self) -> float:
        """Seconds of start-up so far."""
        return (self._now() if self._started is None else self._started) - self._created

    @property
    def left_s(self) -> float | None:
        """Seconds until the limit; None without a limit."""
        return None if self._limit_s is None else self._limit_s - self.elapsed_s

    def is_up(self, allowance_s: float = 0.0) -> bool:
        """Return whether the limit is exceeded by `allowance_s`; False before the first step."""
        return self.started and self._limit_s is not None and self.elapsed_s >= self._limit_s + allowance_s
