"""`tail -n N -f` for the log of a job: the last lines and the new ones come from one iterator, so that none is lost between."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

_MAX_BUFFERED = 100_000
"""Lines read ahead of the consumer, at most."""
_POLL_S = 1.0


def tail_lines(
    lines: Iterator[str], tail: int, existing: Mapping[str, int], process_of: Callable[[str], str], within_s: float
) -> Iterator[str]:
    """Yield the last `tail` of the existing lines, then every new one. `lines` may block and is read in a thread.

    `existing`: process name -> number of lines it had written when they were counted. A log that was rotated since then has
    fewer, and its last line may be incomplete; so after `within_s` seconds the lines read so far count as the existing ones.
    If that is too early, more than `tail` old lines are shown; no line after the first one shown is ever left out.
    """
    last: deque[str] = deque(maxlen=tail)
    new: list[str] = []
    left, missing = Counter(existing), sum(existing.values())
    deadline = time.monotonic() + within_s
    with LineReader(lines) as reader:
        while missing > 0 and not reader.over and (wait_s := deadline - time.monotonic()) > 0:
            for line in reader.take(wait_s):
                name = process_of(line)
                if left[name] > 0:
                    left[name] -= 1
                    missing -= 1
                    last.append(line)
                else:
                    new.append(line)
        yield from last
        yield from new
        while not reader.over:
            yield from reader.take(_POLL_S)
        reader.raise_error()


class LineReader:
    """Reads a blocking iterator in a thread, so that the consumer can wait with a time limit."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines: list[str] = []
        self._error: Exception | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        # A daemon thread: a blocked iterator cannot be interrupted and must not keep the command from exiting.
        threading.Thread(target=self._read, args=(lines,), name="ludus-lines", daemon=True).start()

    def __enter__(self) -> LineReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """Whether the iterator has ended and all its lines were taken."""
        with self._changed:
            return self._ended and not self._lines

    def take(self, timeout_s: float) -> list[str]:
        """Wait for the next lines and return them; an empty list after `timeout_s` or at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._ended, timeout_s)
            taken, self._lines = self._lines, []
            self._changed.notify_all()
        return taken

    def raise_error(self) -> None:
        """Raise the exception with which the iterator ended, if any."""
        if self._error is not None:
            raise self._error

    def _read(self, lines: Iterator[str]) -> None:
        try:
            for line in lines:
                with self._changed:
                    while len(self._lines) >= _MAX_BUFFERED and not self._closed:
                        self._changed.wait(_POLL_S)
                    if self._closed:
                        return
                    self._lines.append(line)
                    self._changed.notify_all()
        except Exception as error:  # re-raised in the consumer's thread by `raise_error`
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
