"""Settings of this process: memory allocator, cores, stop signals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from ludus.errors import Interrupted

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks instead of returning them to the kernel. Returns whether that was possible.

    By default every temporary tensor above 128 KB is a fresh mapping whose pages are faulted in one by one; in a training
    step of 4,096 samples that was 2,700 faults and 45 % of the time.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return all(
        mallopt(key, value) for key, value in ((_M_MMAP_THRESHOLD, 1 << 28), (_M_TRIM_THRESHOLD, 1 << 29), (_M_TOP_PAD, 1 << 24))
    )


def usable_cores() -> int:
    """Number of cores this process may run on, by its CPU affinity where the system supports it."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


_REPEAT_S = 10.0

INTERRUPT_AFTER_S = 1.0
"""A call of an environment that takes longer than this after the signal is interrupted."""

_WAKE = getattr(signal, "SIGURG", None)
"""Wakes the main thread. The default action of this signal is to ignore it: harmless when the handler is gone."""


class StopSignal:
    """Set by Ctrl-C or SIGTERM. The second signal raises KeyboardInterrupt.

    A SIGTERM shortly after the first signal is ignored: process managers often signal both the group and its leader.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._set_at = 0.0
        self._regions = 0
        self._due = False
        self._timers: list[threading.Timer] = []

    def __call__(self) -> bool:
        return self.name is not None

    def set(self, number: int) -> None:
        if self.name is not None:
            if number == signal.SIGTERM and time.monotonic() < self._set_at + _REPEAT_S:
                return
            raise KeyboardInterrupt
        self.name, self._set_at = signal.Signals(number).name, time.monotonic()
        self.interrupt_later(INTERRUPT_AFTER_S)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A region of the main thread in which Interrupted may be raised at any point, even inside a call of an environment."""
        self._regions += 1
        try:
            yield
        finally:
            self._regions -= 1

    def interrupt_later(self, seconds: float) -> None:
        """Raise Interrupted in the main thread after this time, if it is in an interruptible region then. Thread-safe."""
        timer = threading.Timer(seconds, self.interrupt_now)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def interrupt_now(self) -> None:
        """Raise Interrupted in the main thread now, if it is in an interruptible region. Thread-safe."""
        if _WAKE is not None:
            self._due = True  # the wake-up signal is shared by all StopSignals of the process
            signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)

    def on_wake(self) -> None:
        due, self._due = self._due, False
        if due and self._regions:
            raise Interrupted

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Handle SIGINT and SIGTERM inside the block and restore the previous handlers afterwards. Does nothing outside the main thread."""
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, lambda n, _: stop.set(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    if _WAKE is not None:
        before[_WAKE] = signal.signal(_WAKE, lambda n, _: stop.on_wake())
    try:
        yield stop
    finally:
        stop.close()
        for number, handler in before.items():
            signal.signal(number, handler)
