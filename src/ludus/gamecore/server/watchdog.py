"""A small parent that starts the server again when it dies. It holds the listening socket, so that callers wait instead of being refused.

Like all who look after processes here it has one thread: the kernel's signal for a parent's death is bound to the thread that forked.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ludus.core.backoff import exponential_delay
from ludus.process import identity
from ludus.process.signals import SignalQueue

if TYPE_CHECKING:
    from ludus.gamecore.server.http.app import Announce
    from ludus.gamecore.server.settings import Settings

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S, STEADY_S = 0.2, 30.0, 60.0
"""A server that lived for STEADY_S was healthy: the next back-off begins anew."""

HOPELESS = 2
"""The exit code of a server that was given something wrong: another one would fail alike."""

STOP_S = 60.0
_LOOK_S = 0.5


def backoff_s(short_lives: int) -> float:
    """Seconds until the next life, after so many short ones in a row (at least one)."""
    return exponential_delay(short_lives, FIRST_BACKOFF_S, MAX_BACKOFF_S)


def keep_going(settings: Settings, bound: socket.socket, announce: Announce | None) -> None:
    """Until SIGTERM or SIGINT, or until a server ends by itself. Raises SystemExit with its code if that is not 0."""
    host, port = bound.getsockname()[:2]
    with _Ear((signal.SIGTERM, signal.SIGINT)) as ear:
        short_lives = 0
        while True:
            began = time.monotonic()
            with _Life(settings.to_json(), bound) as life:
                if life.begins(ear) and announce is not None:
                    announce(host, port)
                    announce = None
                code = life.outlive(ear)
            if ear.is_told() or code in (0, HOPELESS):
                break
            short_lives = 1 if time.monotonic() - began >= STEADY_S else short_lives + 1
            pause = backoff_s(short_lives)
            log.error("the gamecore server (process %d) ended with code %d and is started again in %g s", life.pid, code, pause)
            if ear.wait_until_told(pause):
                return
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


class _Life:
    """One server, from its start to its end."""

    def __init__(self, settings: str, bound: socket.socket) -> None:
        self._ready, ready = os.pipe()
        parent = os.getpid()
        try:
            self._server = subprocess.Popen(  # noqa: S603 - this interpreter, with a program of ours
                [sys.executable, "-P", "-m", "ludus.gamecore.server", settings, str(bound.fileno()), str(ready)],
                stdin=subprocess.DEVNULL,
                pass_fds=[bound.fileno(), ready],
                start_new_session=True,  # Ctrl-C at a terminal is for us, and we tell it
                preexec_fn=lambda: identity.die_with_parent(parent, signal.SIGTERM),  # there are no threads here
            )
        finally:
            os.close(ready)
        self.pid = self._server.pid

    def __enter__(self) -> _Life:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ready)
        if self._server.poll() is None:
            self._server.kill()
            self._server.wait(STOP_S)

    def begins(self, ear: _Ear) -> bool:
        """Wait until it serves. False: it has ended before, or we are to end."""
        while not ear.is_told():
            if ear.wait(STOP_S, self._ready):
                return os.read(self._ready, 1) == b"."
        return False

    def outlive(self, ear: _Ear) -> int:
        """Its exit code. Once we are asked to end so is it; it has STOP_S to stop its games."""
        deadline = None
        while True:
            is_told = ear.is_told()
            if (code := self._server.poll()) is not None:  # an end after this makes `wait` return at once
                return code
            if is_told and deadline is None:
                self._server.send_signal(signal.SIGTERM)
                deadline = time.monotonic() + STOP_S
            if deadline is not None and time.monotonic() > deadline:
                self._server.kill()
            ear.wait(_LOOK_S)


class _Ear:
    """Signals that end us, and that of a child, as something to wait for."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._signals = SignalQueue(*numbers, signal.SIGCHLD)
        self._told = False

    def __enter__(self) -> _Ear:
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.close()

    def is_told(self) -> bool:
        """To end."""
        self._told |= any(number != signal.SIGCHLD for number in self._signals.take())
        return self._told

    def wait(self, timeout_s: float, other: int | None = None) -> bool:
        """Until a signal comes, or something can be read from `other`: then True."""
        signals = self._signals.fileno()
        found = select.select([signals] if other is None else [signals, other], [], [], timeout_s)[0]
        return other in found

    def wait_until_told(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self.is_told() and (left := deadline - time.monotonic()) > 0:
            self.wait(left)
        return self._told
