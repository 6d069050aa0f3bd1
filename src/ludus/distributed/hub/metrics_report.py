"""Metrics of a run: means between two reports, written to `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from ludus.core.metrics import JsonLinesSink, Numbers, Sink, TensorBoardSink, read_jsonl

log = logging.getLogger(__name__)

_MAX_NAMES = 10_000


class Tally:
    """Means of metrics between two reports. `timesteps` is not averaged: the highest value counts."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self.timesteps: float | None = None
        self.lost = 0

    def add(self, name: str, total: float, count: int) -> None:
        if name == "timesteps":
            self.timesteps = max(self.timesteps or 0.0, total / count)
            return
        if name not in self._sums and len(self._sums) >= _MAX_NAMES:
            self.lost += count
            return
        before = self._sums.get(name, (0.0, 0))
        self._sums[name] = before[0] + total, before[1] + count

    def take(self) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in self._sums.items()}
        if self.lost:
            means["metrics/lost"] = self.lost
        self._sums, self.lost = {}, 0
        return means


class MetricsReport:
    """Collects metrics in the hub's event loop and numbers the reports; `write` and `close` may run in another thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tally = Tally()
        self._sinks: list[Sink] = []
        self._iterations = 0
        self._began = time.monotonic()

    def open(self) -> None:
        """Open the files of the run; numbering continues after the last report in them."""
        path = self._directory / "metrics.jsonl"
        before = read_jsonl(path)
        self._iterations = int(before[-1]["iterations"]) if before else 0
        incarnation = int(before[-1].get("incarnation", 1)) + 1 if before else 1
        self._sinks = [JsonLinesSink(path, incarnation), TensorBoardSink(self._directory)]

    def add(self, entries: Iterable[tuple[str, float, int]]) -> None:
        """Add (name, sum, count) of values. Raises ValueError."""
        for name, total, count in entries:
            if not isinstance(name, str) or count < 1:
                raise ValueError(f"{name!r} × {count}")
            self._tally.add(name, float(total), int(count))

    def take(self, gauges: Numbers, versions: Mapping[str, int]) -> Numbers:
        """The next report: means since the last one and current `gauges`; empty if there are neither."""
        numbers = {**self._tally.take(), **gauges}
        if not numbers:
            return {}
        self._iterations += 1
        steps = self._tally.timesteps
        if steps is None or not math.isfinite(steps):
            steps = max(versions.values(), default=self._iterations)
        head = {"iterations": self._iterations, "timesteps": steps, "time_s": time.monotonic() - self._began}
        return head | numbers

    def write(self, numbers: Numbers) -> None:
        if not numbers:
            return
        log.info("%s", "  ".join(f"{name} {value:.5g}" for name, value in numbers.items()))
        for sink in self._sinks:
            sink.write(numbers)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
