"""Delivers signals through a file descriptor that a select or poll loop can wait for."""

from __future__ import annotations

import contextlib
import signal
import socket
from types import FrameType

_MAX_BYTES = 4096


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
