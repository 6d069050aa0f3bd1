"""A small parent that starts the server again when it dies. It holds the listening socket, so that callers wait instead of being refused.

Like all who look after processes here it has one thread: the kernel's signal for a parent's death is bound to the thread that forked.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

from ludus import pids

if TYPE_CHECKING:
    from ludus.gamecore.server import Announce
    from ludus.gamecore.settings import Settings

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S, STEADY_S = 0.2, 30.0, 60.0
"""A server that lived for STEADY_S was healthy: the next back-off begins anew."""

HOPELESS = 2
"""The exit code of a server that was given something wrong: another one would fail alike."""

STOP_S = 60.0


def backoff_s(short_lives: int) -> float:
    """Seconds until the next life, after so many short ones in a row (at least one)."""
    return min(FIRST_BACKOFF_S * 2.0 ** min(short_lives - 1, 16), MAX_BACKOFF_S)


def keep_going(settings: Settings, bound: socket.socket, announce: Announce | None) -> None:
    """Until SIGTERM or SIGINT, or until a server ends by itself. Raises SystemExit with its code if that is not 0."""
    host, port = bound.getsockname()[:2]
    told = settings.to_json()
    with _Ear((signal.SIGTERM, signal.SIGINT)) as ear:
        short_lives = 0
        while True:
            began = time.monotonic()
            server = _start(told, bound)
            if announce is not None:
                announce(host, port)
                announce = None
            code = _outlive(server, ear)
            if ear.is_told() or code in (0, HOPELESS):
                break
            short_lives = 1 if time.monotonic() - began >= STEADY_S else short_lives + 1
            pause = backoff_s(short_lives)
            log.error("the gamecore server (process %d) ended with code %d and is started again in %g s", server.pid, code, pause)
            ear.wait(pause)
            if ear.is_told():
                return
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


def _start(told: str, bound: socket.socket) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    return subprocess.Popen(  # noqa: S603 - this interpreter, with a program of ours
        [sys.executable, "-P", "-m", "ludus.gamecore", told, str(bound.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[bound.fileno()],
        start_new_session=True,  # Ctrl-C at a terminal is for us, and we tell it
        preexec_fn=lambda: pids.end_with(parent, signal.SIGTERM),  # there are no threads here
    )


def _outlive(server: subprocess.Popen[bytes], ear: _Ear) -> int:
    """Its exit code. Once we are asked to end so is it; it has STOP_S to stop its games."""
    deadline = None
    while True:
        code = server.poll()
        if code is not None:
            return code
        if ear.is_told() and deadline is None:
            server.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_S
        if deadline is not None and time.monotonic() > deadline:
            server.kill()
        ear.wait(0.5 if deadline is None else 0.05)


class _Ear:
    """Signals that end us, and that of a child, as something to wait for."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._numbers = (*numbers, signal.SIGCHLD)
        self._here, self._there = socket.socketpair()
        for end in (self._here, self._there):
            end.setblocking(False)
        self._told = False

    def __enter__(self) -> _Ear:
        self._fd = signal.set_wakeup_fd(self._there.fileno(), warn_on_full_buffer=False)
        self._before: dict[int, Any] = {number: signal.signal(number, self._hear) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd)
        self._here.close()
        self._there.close()

    def is_told(self) -> bool:
        """To end."""
        return self._told

    def wait(self, timeout_s: float) -> None:
        """Until a signal comes."""
        import select

        if select.select([self._here], [], [], timeout_s)[0]:
            self._here.recv(4096)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._told = True
