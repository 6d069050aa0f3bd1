"""Signals: through a descriptor that a select loop can wait for, or as a flag that stops a run."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType

from ludus.errors import Interrupted

_MAX_BYTES = 4096
_REPEAT_S = 10.0

INTERRUPT_AFTER_S = 1.0
"""A call of an environment that takes longer than this after the signal is interrupted."""

_WAKE = getattr(signal, "SIGURG", None)
"""Wakes the main thread. The default action of this signal is to ignore it: harmless when the handler is gone."""


class SignalQueue:
    """Becomes readable when one of the signals arrives. Create it in the main thread; a process has one at a time.

    `restore`: `close` restores the previous handlers. Otherwise the signals have no effect afterwards, as suits a process that is
    about to exit with its own exit code.
    """

    def __init__(self, *numbers: int, restore: bool = True) -> None:
        self._restore = restore
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        self._earlier_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        # A signal without a Python handler does not reach the descriptor, and an ignored one stays ignored across exec.
        self._earlier = {number: signal.signal(number, _do_nothing) for number in numbers}

    def __enter__(self) -> SignalQueue:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._receiver.fileno()

    def take(self) -> bytes:
        """Numbers of the signals since the last call; does not block."""
        with contextlib.suppress(BlockingIOError):
            return self._receiver.recv(_MAX_BYTES)
        return b""

    def close(self) -> None:
        """May also be called in a fork of the process that created it."""
        if self._receiver.fileno() < 0:
            return
        signal.set_wakeup_fd(self._earlier_fd)
        for number, handler in self._earlier.items():
            if self._restore and handler is not None:  # None: it was not set from Python
                signal.signal(number, handler)
        self._receiver.close()
        self._sender.close()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Python writes the number to the wakeup descriptor."""


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
