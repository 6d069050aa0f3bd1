"""The last lines of what is followed, then those that come: all of one reading, so that none is lost between the two."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

_AHEAD = 100_000
"""Lines that are read before somebody takes them, at most."""
_LOOK_S = 1.0


def tailed(
    lines: Iterator[str], tail: int, there: Mapping[str, int], whose: Callable[[str], str], within_s: float
) -> Iterator[str]:
    """The last `tail` of those that are there already, then all that come, each once. `lines` may block, and is read in a thread.

    `there`: how many each process had written a moment ago. A log that has turned since has fewer left, and a last line may have no
    end yet; so after `within_s` what was read by then is taken for what was there. Too early means that more are shown than were
    asked for; what comes after the first that is shown is never left out.
    """
    last: deque[str] = deque(maxlen=tail)
    new: list[str] = []
    left, missing = Counter(there), sum(there.values())
    deadline = time.monotonic() + within_s
    with Ahead(lines) as ahead:
        while missing > 0 and not ahead.over and (wait_s := deadline - time.monotonic()) > 0:
            for line in ahead.take(wait_s):
                name = whose(line)
                if left[name] > 0:
                    left[name] -= 1
                    missing -= 1
                    last.append(line)
                else:
                    new.append(line)
        yield from last
        yield from new
        while not ahead.over:
            yield from ahead.take(_LOOK_S)
        ahead.finish()


class Ahead:
    """Reads an iterator that blocks in a thread, so that whoever waits for the next may do so for a limited time."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines: list[str] = []
        self._error: Exception | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        # A daemon: nobody can interrupt an iterator that waits, and the command that was interrupted ends.
        threading.Thread(target=self._read, args=(lines,), name="ludus-lines", daemon=True).start()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """There are no more to take, and none will come."""
        with self._changed:
            return self._ended and not self._lines

    def take(self, timeout_s: float) -> list[str]:
        """Those that have come; waits for the first. None: the time is up, or it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._ended, timeout_s)
            taken, self._lines = self._lines, []
            self._changed.notify_all()
        return taken

    def finish(self) -> None:
        """Raises what the iterator has raised."""
        if self._error is not None:
            raise self._error

    def _read(self, lines: Iterator[str]) -> None:
        try:
            for line in lines:
                with self._changed:
                    while len(self._lines) >= _AHEAD and not self._closed:
                        self._changed.wait(_LOOK_S)
                    if self._closed:
                        return
                    self._lines.append(line)
                    self._changed.notify_all()
        except Exception as error:  # whatever it is, it is the reader's, who gets it
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
