"""Progress of an operation with N of M items: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from ludus.core.formatting import format_duration, format_number

LINE_EVERY_S = 10.0
"""Seconds between two lines without a terminal; a shorter operation prints none."""


class ProgressBar:
    """A context manager: `with ProgressBar("rendering", 300, "frames") as progress: … progress.advance()`.

    `total` is None while it is unknown; then the count and the time are shown. `deferred`: appears with its first update, for
    operations that print other lines first. Writes to stderr, so that results on stdout
    stay parseable. `update` and `advance` are cheap and may be called for every item, from any thread.
    """

    def __init__(
        self,
        action: str,
        total: int | None = None,
        unit: str = "",
        *,
        quiet: bool = False,
        deferred: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._action, self._total, self._unit, self._quiet, self._deferred = action, total, unit, quiet, deferred
        self._stream, self._clock = stream or sys.stderr, clock
        self._done = 0
        self._began = self._printed = clock()
        self._rich: Any = None
        self._task: Any = None

    def __enter__(self) -> ProgressBar:
        if not self._deferred:
            self._start()
        return self

    def _start(self) -> None:
        self._began = self._printed = self._clock()
        if not self._quiet and self._stream.isatty():
            self._rich = _rich_progress(self._stream, self._total is not None)
            self._rich.start()
            self._task = self._rich.add_task(self._action, total=self._total, counted=self._count_text())

    def __exit__(self, *exc: object) -> None:
        if self._rich is not None:
            self._rich.stop()
        elif self._printed > self._began:  # lines were printed: add one with the final count
            self._print_line(self._clock())

    def advance(self, number: int = 1) -> None:
        self.update(self._done + number)

    def update(self, done: int, total: int | None = None) -> None:
        """Set the number of items done so far, and `total` once it is known or has changed."""
        self._done = done
        self._total = self._total if total is None else total
        if self._deferred:
            self._deferred = False
            self._start()
        if self._rich is not None:
            self._rich.update(self._task, completed=done, total=self._total, counted=self._count_text())
        elif not self._quiet and (now := self._clock()) - self._printed >= LINE_EVERY_S:
            self._print_line(now)

    def _count_text(self) -> str:
        if self._total is None and not self._done:
            return ""
        of = "" if self._total is None else f" of {self._total:,}"
        return f"{self._done:,}{of} {self._unit}".rstrip()

    def _print_line(self, now: float) -> None:
        self._printed = now
        took = now - self._began
        print(progress_line(self._action, self._count_text(), self._done, self._total, took), file=self._stream, flush=True)


def progress_line(action: str, counted: str, done: int, total: int | None, took_s: float) -> str:
    """`rendering: 120 of 300 frames (40 %), 12 s, about 18 s left`."""
    amount = f"{counted} ({100 * done / total:.0f} %)" if total else counted
    return f"{action}: {', '.join(part for part in (amount, pace(done, total, took_s)) if part)}"


def pace(done: int, total: int | None, took_s: float) -> str:
    """The elapsed time, with the remaining time or the speed: `12 s, about 18 s left`."""
    parts = [format_duration(took_s)]
    if total and 0 < done < total:
        parts.append(f"about {format_duration(took_s / done * (total - done))} left")
    elif done and took_s > 0:
        parts.append(f"{format_number(done / took_s)} per second")
    return ", ".join(parts)


def _rich_progress(stream: TextIO, bounded: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.text import Text

    class Pace(ProgressColumn):
        """Redrawn on every refresh, so that the elapsed time advances without updates."""

        def render(self, task: Task) -> Text:
            total = None if task.total is None else int(task.total)
            return Text(pace(int(task.completed), total, task.elapsed or 0.0))

    words = (TextColumn("{task.description}"), TextColumn("{task.fields[counted]}"))
    columns = (words[0], BarColumn(bar_width=20), words[1]) if bounded else (SpinnerColumn(), *words)
    return Progress(*columns, Pace(), console=Console(file=stream), refresh_per_second=8)
