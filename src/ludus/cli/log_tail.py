"""`tail -n N -f` for the log of a job: the last lines and the new ones come from one iterator, so that none is lost between."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from ludus.errors import LudusError

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
    with BackgroundReader(lines) as reader:
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
        if reader.error is not None:
            raise reader.error


class BackgroundReader:
    """Reads a blocking iterator in a thread, so that the consumer can wait with a time limit."""

    def __init__(self, lines: Iterator[str]) -> None:
        self.over = False
        """Whether the iterator has ended and all its lines were taken."""
        self.error: Exception | None = None
        """The error with which the iterator ended, if any."""
        self._queue: queue.Queue[str | None] = queue.Queue(_MAX_BUFFERED)  # None: the end
        self._closed = threading.Event()
        # A daemon thread: a blocked iterator cannot be interrupted and must not keep the command from exiting.
        threading.Thread(target=self._read, args=(lines,), name="ludus-lines", daemon=True).start()

    def __enter__(self) -> BackgroundReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()

    def take(self, timeout_s: float) -> list[str]:
        """Wait for the next lines and return them; an empty list after `timeout_s` or at the end."""
        taken: list[str] = []
        with suppress(queue.Empty):
            line = self._queue.get(timeout=timeout_s)
            while line is not None:
                taken.append(line)
                line = self._queue.get_nowait()
            self.over = True
        return taken

    def _read(self, lines: Iterator[str]) -> None:
        try:
            for line in lines:
                self._put(line)
                if self._closed.is_set():
                    return
        except (LudusError, OSError, ValueError) as error:  # raised again in the thread of the consumer
            self.error = error
        finally:
            self._put(None)

    def _put(self, line: str | None) -> None:
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._queue.put(line, timeout=_POLL_S)
                return
