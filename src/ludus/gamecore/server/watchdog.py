"""Watchdog: a parent process that restarts the server when it dies, and holds the listening socket so that callers can wait.

Single-threaded, because the kernel binds the parent-death signal to the thread that forked.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from ludus.core.backoff import exponential_delay
from ludus.process.children import start_child
from ludus.process.signals import SignalQueue

if TYPE_CHECKING:
    from ludus.gamecore.server.http.app import Announce
    from ludus.gamecore.server.settings import Settings

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S, STEADY_S = 0.2, 30.0, 60.0
"""The back-off starts again after a server has run for STEADY_S."""

USAGE_ERROR = 2
"""Exit code of a server with wrong settings, which is not restarted."""

STOP_S = 60.0
_POLL_S = 0.5


def supervise_server(settings: Settings, bound: socket.socket, announce: Announce | None) -> None:
    """Run servers until SIGTERM, SIGINT or a normal exit. Raises SystemExit with the exit code if it is not 0."""
    host, port = bound.getsockname()[:2]
    with _SignalWaiter() as signals:
        short_runs = 0
        while True:
            began = time.monotonic()
            with _ServerProcess(settings.to_json(), bound) as server:
                if server.wait_until_ready(signals) and announce is not None:
                    announce(host, port)
                    announce = None
                code = server.wait(signals)
            if signals.stop_requested() or code in (0, USAGE_ERROR):
                break
            short_runs = 1 if time.monotonic() - began >= STEADY_S else short_runs + 1
            pause = exponential_delay(short_runs, FIRST_BACKOFF_S, MAX_BACKOFF_S)
            log.error("the gamecore server (process %d) exited with code %d; restarting in %g s", server.pid, code, pause)
            if signals.wait_for_stop(pause):
                return
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


class _ServerProcess:
    """One server process."""

    def __init__(self, settings: str, bound: socket.socket) -> None:
        self._ready, ready = os.pipe()
        try:
            self._server = start_child(  # in its own session: Ctrl-C goes to the watchdog, which forwards it
                [sys.executable, "-P", "-m", "ludus.gamecore.server", settings, str(bound.fileno()), str(ready)],
                death_signal=signal.SIGTERM,
                pass_fds=[bound.fileno(), ready],
            )
        finally:
            os.close(ready)
        self.pid = self._server.pid

    def __enter__(self) -> _ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ready)
        if self._server.poll() is None:
            self._server.kill()
            self._server.wait(STOP_S)

    def wait_until_ready(self, signals: _SignalWaiter) -> bool:
        """Wait until the server listens. False: it has exited, or a stop was requested."""
        while not signals.stop_requested():
            if signals.wait(STOP_S, self._ready):
                return os.read(self._ready, 1) == b"."
        return False

    def wait(self, signals: _SignalWaiter) -> int:
        """Wait for the exit and return its code. Forwards a stop request; the server has STOP_S to stop its games."""
        deadline = None
        while True:
            stop_requested = signals.stop_requested()
            if (code := self._server.poll()) is not None:  # a later exit makes `wait` return at once
                return code
            if stop_requested and deadline is None:
                self._server.send_signal(signal.SIGTERM)
                deadline = time.monotonic() + STOP_S
            if deadline is not None and time.monotonic() > deadline:
                self._server.kill()
            signals.wait(_POLL_S)


class _SignalWaiter:
    """Waits for stop signals and SIGCHLD."""

    def __init__(self) -> None:
        self._signals = SignalQueue(signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        self._stop = False

    def __enter__(self) -> _SignalWaiter:
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.close()

    def stop_requested(self) -> bool:
        self._stop |= any(number != signal.SIGCHLD for number in self._signals.take())
        return self._stop

    def wait(self, timeout_s: float, other: int | None = None) -> bool:
        """Wait for a signal or for data on `other`; returns whether `other` is readable."""
        signals = self._signals.fileno()
        found = select.select([signals] if other is None else [signals, other], [], [], timeout_s)[0]
        return other in found

    def wait_for_stop(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self.stop_requested() and (left := deadline - time.monotonic()) > 0:
            self.wait(left)
        return self._stop
