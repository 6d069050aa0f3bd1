"""Reporting of metrics: after updates, after evaluations, and at the end of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from ludus.algorithms.trainer import Trainer
from ludus.core.metrics import Numbers, Sink
from ludus.errors import LudusError, StoreUnavailable

log = logging.getLogger(__name__)


class MetricsReporter:
    """Writes metrics to the sinks of a run. Keeps the newest of them for its status and its result."""

    def __init__(self, sinks: Sequence[Sink], every_s: float = 0.0, constants: Numbers | None = None) -> None:
        """`every_s`: least training time between two reports of updates. `constants`: part of each of them."""
        self.sinks = sinks
        self.final: dict[str, float] = {}
        """Metrics of the end of the run, which no report holds."""
        self._every_s, self._constants = every_s, dict(constants or {})
        self._reported_at = -math.inf
        self._last: dict[str, float] = {}
        self._evaluation: dict[str, float] = {}
        self._is_failing = False

    def is_due(self, time_s: float) -> bool:
        return time_s - self._reported_at >= self._every_s

    def report_update(self, trainer: Trainer, *others: Numbers) -> None:
        self._reported_at = trainer.progress.time_s
        for numbers in (*others, self._constants):
            trainer.metrics |= numbers
        self._last = dict(trainer.metrics)
        self._write(self._last)

    def report_evaluation(self, numbers: dict[str, float], iterations: int, timesteps: int) -> None:
        """`iterations`, `timesteps`: of the version that was evaluated, which may be older than the newest."""
        self._evaluation = numbers
        self._write({"timesteps": timesteps, "iterations": iterations, **numbers})

    def newest(self, trainer: Trainer) -> dict[str, float]:
        """The newest value of every metric. May be called from any thread."""
        return {**trainer.counts(), **self._last, **trainer.metrics, **self._evaluation, **self.final}

    def _write(self, numbers: Numbers) -> None:
        for sink in self.sinks:
            try:
                sink.write(numbers)
            except StoreUnavailable as error:  # a shared directory: training does not depend on it
                if not self._is_failing:
                    log.warning("metrics not written: %s", error)
                self._is_failing = True
            else:
                self._is_failing = False

    def close(self) -> None:
        for sink in self.sinks:
            try:
                sink.close()
            except LudusError:  # such as a full disk; the other sinks are closed all the same
                log.exception("closing %s failed", type(sink).__name__)
