"""The processes between a `Games`, the owner, and the commands (games) that it starts. `command.py` is the only client.

    owner ──a byte and one end of a channel, per game──▶ spawner ──fork──▶ guard ──exec──▶ the game and its child processes
      ▲                                                                      │
      └──────────────channel: what to start, stop │ started, exited──────────┘

The *spawner*, one per owner, forks guards. It is small and has a single thread, so that forking is cheap and safe, and so that the
parent-death signal, which the kernel binds to the forking thread, arrives when the process ends.

A *guard* starts one game in a new session, logs its output (repeated lines are counted) and ends it. It is the subreaper of
everything that the game starts: orphans become its children, not those of init. Nothing is left whichever process dies: if the owner
dies, spawner and guards read end of file; if the spawner dies, the kernel signals the guards; if a guard dies, the kernel kills the
game, and its other processes become children of the spawner, which kills them.

A *warm* spawner has imported a module first (`prefork.py`) and reports on its control socket whether that succeeded. A game of that
module is a fork of the guard instead of an executed program; everything else is the same.

Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, NoReturn

from ludus.io import json_lines
from ludus.io.json_lines import LineReader
from ludus.io.rotating_log import MAX_BYTES, DeduplicatingLog
from ludus.process import children, procfs
from ludus.process.children import start_child
from ludus.process.signals import SignalQueue

if TYPE_CHECKING:
    from ludus.process.commands.prefork import PreforkModule

LAST_LINES = 20
"""Number of a game's last lines that are sent with its exit code."""

_CHUNK = 65_536
_READS = 16
_TICK_S = 1.0
_REQUEST_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 10.0
_GUARDS_TIMEOUT_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP)
"""Only the first two have an effect; the others are for the owner. None is ignored: that would survive exec, in the game."""
_COUNT_INTERVALS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between the counts of a game's threads; the last value repeats."""


def send_message(channel: socket.socket, **message: Any) -> None:
    """Send a message; a closed channel is not an error."""
    with contextlib.suppress(OSError):
        channel.sendall(json_lines.encode(message))


# -- the guard ----------------------------------------------------------------------------------------------------------


class CommandGuard:
    """Runs one game, from its start until all its processes have ended."""

    def __init__(
        self,
        channel: socket.socket,
        reader: LineReader,
        request: dict[str, Any],
        signals: SignalQueue,
        warm: PreforkModule | None,
    ) -> None:
        self._channel, self._reader, self._signals = channel, reader, signals
        self._game = 0
        self._exit_code: int | None = None
        self._no_children = False
        """There is no process below this one."""
        self._deadline: float | None = None
        """Set when the game was asked to stop: it is killed at this time."""
        self._killed = False
        self._began = self._last_tick = time.monotonic()
        self._counts, self._threads = 0, 0
        self._log = DeduplicatingLog(Path(request["log"]), request.get("log_bytes", MAX_BYTES))
        self._game, self._pipe = self._fork(request, warm) if request["warm"] else self._execute(request)
        send_message(channel, started=self._game, guard=os.getpid())
        os.set_blocking(self._pipe.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ, self._copy_output)
        self._selector.register(channel, selectors.EVENT_READ, self._read_requests)
        self._selector.register(signals, selectors.EVENT_READ, self._handle_signals)

    def _execute(self, request: dict[str, Any]) -> tuple[int, IO[bytes]]:
        self._process = start_child(
            request["command"],
            env=request["environment"],
            cwd=request["directory"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._process.stdout is not None
        return self._process.pid, self._process.stdout

    def _fork(self, request: dict[str, Any], warm: PreforkModule | None) -> tuple[int, IO[bytes]]:
        if warm is None:
            raise ValueError("its spawner is not warm")
        pid, pipe = warm.start(request, (self._channel, self._signals))
        return pid, open(pipe, "rb", buffering=0)

    def run(self) -> None:
        while not self._is_over():
            for key, _ in self._selector.select(self._select_timeout()):
                key.data()
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                self._killed = True
                break
            if self._log.pending and now >= self._last_tick + _TICK_S:
                self._last_tick = now
                self._log.tick()
            self._count_threads(now)
        left = self._kill_all()
        self._copy_output()
        self._log.close()
        send_message(
            self._channel,
            exited=self._exit_code,
            killed=self._killed,
            left=left,
            lost=self._log.lost,
            lines=self._log.last(LAST_LINES),
        )

    def _is_over(self) -> bool:
        """A game that was asked to stop may leave processes that still save their state until the deadline; otherwise they are killed."""
        return self._killed or self._no_children or (self._exit_code is not None and self._deadline is None)

    def _select_timeout(self) -> float:
        now = time.monotonic()
        due = [self._next_count()]
        if self._deadline is not None:
            due.append(self._deadline)
        if self._log.pending:
            due.append(self._last_tick + _TICK_S)
        return max(0.0, min(due) - now)

    # -- events

    def _copy_output(self) -> None:
        for _ in range(_READS):  # bounded, so that endless output does not block the other events
            try:
                data = os.read(self._pipe.fileno(), _CHUNK)
            except (BlockingIOError, ValueError):
                return
            if not data:
                self._selector.unregister(self._pipe)
                self._pipe.close()
                return
            self._log.write(data)

    def _read_requests(self) -> None:
        for line in self._reader.read():
            self._request_stop(float(json_lines.decode(line)["stop"]))
        if self._reader.at_end:  # the owner closed it or is gone
            self._killed = True

    def _request_stop(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        if self._exit_code is None:
            for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process could not end
                children.kill_group(self._game, number)

    def _handle_signals(self) -> None:
        if signal.SIGTERM in self._signals.take():
            self._killed = True
        self._reap_children()

    def _reap_children(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == self._game:
                    self._exit_code = os.waitstatus_to_exitcode(status)
                if pid == 0:
                    return
        self._no_children = True

    def _next_count(self) -> float:
        return (
            self._began
            + sum(_COUNT_INTERVALS_S[: self._counts + 1])
            + max(0, self._counts + 1 - len(_COUNT_INTERVALS_S)) * _COUNT_INTERVALS_S[-1]
        )

    def _count_threads(self, now: float) -> None:
        if now < self._next_count():
            return
        self._counts += 1
        threads = children.threads_below(os.getpid())
        if threads != self._threads:
            self._threads = threads
            send_message(self._channel, threads=threads)

    def _kill_all(self) -> list[int]:
        """Kill everything; returns the processes that could not be killed."""
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        # The process group first: its id stays valid until the exit code is collected. (Other systems have only this.)
        if self._exit_code is None or sys.platform != "linux":
            children.kill_group(self._game)
        while True:
            left = children.kill_descendants()
            self._reap_children()
            if self._no_children:
                return []
            if time.monotonic() > deadline:
                return left
            time.sleep(0.005)  # a killed process disappears asynchronously; there is no event to wait for


def _run_guard(channel: socket.socket, spawner: int, warm: PreforkModule | None) -> None:
    children.adopt_orphans()
    signals = SignalQueue(*_SIGNALS)
    children.die_with_parent(spawner, signal.SIGTERM)
    try:
        channel.settimeout(_REQUEST_TIMEOUT_S)
        reader = LineReader(channel)
        request = reader.read_line(_REQUEST_TIMEOUT_S)
        if request is None:
            return
        guard = CommandGuard(channel, reader, json_lines.decode(request), signals, warm)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        send_message(
            channel, failed=getattr(error, "strerror", None) or str(error), file=str(getattr(error, "filename", None) or "")
        )
        return
    guard.run()


# -- the spawner --------------------------------------------------------------------------------------------------------


class Spawner:
    """Forks a guard for each channel it receives, until its owner ends or closes the control socket."""

    def __init__(self, control: socket.socket, owner: int, warm: PreforkModule | None) -> None:
        self._control, self._pid, self._warm = control, os.getpid(), warm
        self._guards: set[int] = set()
        self._over = False
        self._signals = SignalQueue(*_SIGNALS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._accept_channel)
        self._selector.register(self._signals, selectors.EVENT_READ, self._handle_signals)
        self._owner_fd: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # not supported by this kernel
            # A fork of the owner without exec may hold a copy of the control socket: watch the owner process as well.
            self._owner_fd = os.pidfd_open(owner)
            self._selector.register(self._owner_fd, selectors.EVENT_READ, self._end)
        self._over = os.getppid() != owner

    def run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select():
                key.data()
        for pid in self._guards:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _GUARDS_TIMEOUT_S
        while self._guards and time.monotonic() < deadline:  # each ends its game and writes the rest of its log
            self._reap_children()
            time.sleep(0.005)
        children.end_descendants()

    def _end(self) -> None:
        self._over = True

    def _accept_channel(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        except OSError:
            message, fds = b"", []
        if not message:
            self._over = True
        for fd in fds:
            os.set_inheritable(fd, False)
            self._fork(socket.socket(fileno=fd))

    def _fork(self, channel: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            send_message(channel, failed=f"no process can be started: {error.strerror}", file="")
            channel.close()
            return
        if pid == 0:
            self._become_guard(channel)
        self._guards.add(pid)
        channel.close()

    def _become_guard(self, channel: socket.socket) -> NoReturn:
        code = 1
        try:
            self._selector.close()
            self._signals.close()
            self._control.close()
            if self._owner_fd is not None:
                os.close(self._owner_fd)
            _run_guard(channel, self._pid, self._warm)
            code = 0
        finally:  # this fork must not return into the spawner's loop
            if code:
                import traceback

                traceback.print_exc()
            os._exit(code)

    def _handle_signals(self) -> None:
        if signal.SIGTERM in self._signals.take():
            self._over = True
        self._reap_children()

    def _reap_children(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._guards.discard(pid)
        for stray in set(procfs.list_children(self._pid)) - self._guards:  # their guard has died
            children.kill(stray, *procfs.list_descendants(stray))


def _import_warm_module(name: str, control: socket.socket, owner: int) -> PreforkModule:
    """Import the module. After a failure, replace this process by a fresh spawner without one, to get rid of memory and threads."""
    from ludus.process.commands.prefork import PreforkFailed, PreforkModule

    def exit_without_owner(number: int, frame: FrameType | None) -> None:
        if os.getppid() != owner:  # the control socket is not read during the import
            os._exit(1)

    signal.signal(signal.SIGALRM, exit_without_owner)
    signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
    warm, failure = None, ""
    try:
        warm = PreforkModule(name)
    except PreforkFailed as error:
        failure = str(error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    send_message(control, failed=failure)
    if warm is None:
        control.set_inheritable(True)
        os.execv(sys.executable, spawner_command(control.fileno(), owner))  # noqa: S606
    return warm


def spawner_command(control: int, owner: int, warm: str = "") -> list[str]:
    """Command line of a spawner; `control`: a descriptor that it inherits."""
    return [
        sys.executable,
        "-P",
        "-m",
        "ludus.process.commands.command_guard",
        str(control),
        str(owner),
        *([warm] if warm else []),
    ]


def main(words: list[str]) -> None:
    control, owner = socket.socket(fileno=int(words[0])), int(words[1])
    children.adopt_orphans()
    control.set_inheritable(False)
    # Ignored and blocked signals survive exec and must not reach the games.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
    ):
        signal.signal(number, signal.SIG_DFL)
    warm = _import_warm_module(words[2], control, owner) if words[2:] else None
    gc.collect()
    gc.freeze()  # a collection in a guard would copy pages that all guards share
    Spawner(control, owner, warm).run()


if __name__ == "__main__":
    main(sys.argv[1:])
