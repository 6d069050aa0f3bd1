"""The processes between us and the games that we start: `process.py` starts this program and is its only client.

    owner ──a byte and one end of a line, for each game──▶ keeper ──fork──▶ guard ──exec──▶ the game, and whatever that starts
      ▲                                                                      │
      └──────────────the line: what to start, stop │ started, exited─────────┘

The *keeper*, one for all games of an owner, forks guards: it is small and has one thread, so that this is cheap and safe, and so
that the kernel's signal for a parent's death, which is bound to the thread that forked, comes when it should.

A *guard* starts one game, in a session of its own, writes down what it says (repeated lines are counted) and ends it. All that a
game starts stays below its guard, whatever it does to get away: orphans fall to the guard, not to init. So whoever dies, nothing
is left: if the owner does, keeper and guards hear it on their lines; if the keeper does, the kernel tells the guards; if a guard
does, the kernel kills the game, and the rest falls to the keeper, which ends it.

A *warm* keeper has imported a module before it obeys (`warm.py`), and says on its own line whether it could. A game of that module
is a fork of the guard, where another is a program that it executes; all else is the same.

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
from ludus.process import identity, procfs
from ludus.process.signals import SignalQueue

if TYPE_CHECKING:
    from ludus.process.commands.prefork import Warm

LAST_LINES = 20
"""So many of a game's last lines are handed over with its exit code."""

_CHUNK = 65_536
_READS = 16
_TICK_S = 1.0
_ORDER_S = 10.0
_GONE_S = 10.0
_GUARDS_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP)
"""Only the first two have an effect; the others are for the owner. None is ignored: that would outlive exec, into the game."""
_LOOKS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between the times at which a game's threads are counted; from then on at the last of them."""


def say(line: socket.socket, **message: Any) -> None:
    """Whoever hung up does not want to know."""
    with contextlib.suppress(OSError):
        line.sendall(json_lines.encode(message))


# -- the guard ----------------------------------------------------------------------------------------------------------


class Guard:
    """One game, from its start until nothing of it is left."""

    def __init__(
        self, line: socket.socket, reader: LineReader, order: dict[str, Any], signals: SignalQueue, warm: Warm | None
    ) -> None:
        self._line, self._reader, self._signals = line, reader, signals
        self._game = 0
        self._returned: int | None = None
        self._alone = False
        """There is no process below this one."""
        self._deadline: float | None = None
        """Until then the game may end by itself; it has been asked to."""
        self._killed = False
        self._began = self._ticked = time.monotonic()
        self._looks, self._threads = 0, 0
        self._log = DeduplicatingLog(Path(order["log"]), order.get("log_bytes", MAX_BYTES))
        self._game, self._pipe = self._fork(order, warm) if order["warm"] else self._execute(order)
        say(line, started=self._game, guard=os.getpid())
        os.set_blocking(self._pipe.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ, self._copy)
        self._selector.register(line, selectors.EVENT_READ, self._hear)
        self._selector.register(signals, selectors.EVENT_READ, self._heed)

    def _execute(self, order: dict[str, Any]) -> tuple[int, IO[bytes]]:
        parent = os.getpid()
        self._process = subprocess.Popen(  # noqa: S603 # the owner's order is from whoever may start games here
            order["command"],
            env=order["environment"],
            cwd=order["directory"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: identity.end_with(parent, signal.SIGKILL),  # there are no threads here
        )
        assert self._process.stdout is not None
        return self._process.pid, self._process.stdout

    def _fork(self, order: dict[str, Any], warm: Warm | None) -> tuple[int, IO[bytes]]:
        if warm is None:
            raise ValueError("its keeper is not warm")
        pid, pipe = warm.start(order, (self._line, self._signals))
        return pid, open(pipe, "rb", buffering=0)

    def run(self) -> None:
        while not self._is_over():
            for key, _ in self._selector.select(self._until_next()):
                key.data()
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                self._killed = True
                break
            if self._log.pending and now >= self._ticked + _TICK_S:
                self._ticked = now
                self._log.tick()
            self._look(now)
        left = self._end_all()
        self._copy()
        self._log.close()
        say(
            self._line,
            exited=self._returned,
            killed=self._killed,
            left=left,
            lost=self._log.lost,
            lines=self._log.last(LAST_LINES),
        )

    def _is_over(self) -> bool:
        """One that was asked to end may leave others behind it that still save what they have; one that ended by itself may not."""
        return self._killed or self._alone or (self._returned is not None and self._deadline is None)

    def _until_next(self) -> float:
        now = time.monotonic()
        due = [self._look_due()]
        if self._deadline is not None:
            due.append(self._deadline)
        if self._log.pending:
            due.append(self._ticked + _TICK_S)
        return max(0.0, min(due) - now)

    # -- what happens

    def _copy(self) -> None:
        for _ in range(_READS):  # one that writes without end does not keep the others waiting
            try:
                data = os.read(self._pipe.fileno(), _CHUNK)
            except (BlockingIOError, ValueError):
                return
            if not data:
                self._selector.unregister(self._pipe)
                self._pipe.close()
                return
            self._log.write(data)

    def _hear(self) -> None:
        for line in self._reader.read():
            self._ask(float(json_lines.decode(line)["stop"]))
        if self._reader.at_end:  # the owner hung up, or is gone
            self._killed = True

    def _ask(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        if self._returned is None:
            for number in (signal.SIGTERM, signal.SIGCONT):  # one that is stopped could not end
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._game, number)

    def _heed(self) -> None:
        if signal.SIGTERM in self._signals.take():
            self._killed = True
        self._collect()

    def _collect(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == self._game:
                    self._returned = os.waitstatus_to_exitcode(status)
                if pid == 0:
                    return
        self._alone = True

    def _look_due(self) -> float:
        return self._began + sum(_LOOKS_S[: self._looks + 1]) + max(0, self._looks + 1 - len(_LOOKS_S)) * _LOOKS_S[-1]

    def _look(self, now: float) -> None:
        if now < self._look_due():
            return
        self._looks += 1
        threads = identity.threads_below(os.getpid())
        if threads != self._threads:
            self._threads = threads
            say(self._line, threads=threads)

    def _end_all(self) -> list[int]:
        """Returns who could not be killed."""
        deadline = time.monotonic() + _GONE_S
        # First its group, at one stroke: as long as its exit code is not taken the number is its own. (Elsewhere there is nothing else.)
        if self._returned is None or sys.platform != "linux":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._game, signal.SIGKILL)
        while True:
            left = identity.kill_descendants()
            self._collect()
            if self._alone:
                return []
            if time.monotonic() > deadline:
                return left
            time.sleep(0.005)  # a killed process is gone when the kernel gets round to it, which nothing here can wait for


def _guard(line: socket.socket, keeper: int, warm: Warm | None) -> None:
    identity.adopt_orphans()
    signals = SignalQueue(*_SIGNALS)
    identity.end_with(keeper, signal.SIGTERM)
    try:
        line.settimeout(_ORDER_S)
        reader = LineReader(line)
        order = reader.read_line(_ORDER_S)
        if order is None:
            return
        guard = Guard(line, reader, json_lines.decode(order), signals, warm)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        say(line, failed=getattr(error, "strerror", None) or str(error), file=str(getattr(error, "filename", None) or ""))
        return
    guard.run()


# -- the keeper ---------------------------------------------------------------------------------------------------------


class Keeper:
    """Forks a guard for each line that it is handed, until its owner is gone or hangs up."""

    def __init__(self, control: socket.socket, owner: int, warm: Warm | None) -> None:
        self._control, self._pid, self._warm = control, os.getpid(), warm
        self._guards: set[int] = set()
        self._over = False
        self._signals = SignalQueue(*_SIGNALS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._obey)
        self._selector.register(self._signals, selectors.EVENT_READ, self._heed)
        self._owner_fd: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # an old or other kernel
            # A second sign of the owner's end: what the owner forked without exec may hold a copy of the control socket.
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
        deadline = time.monotonic() + _GUARDS_S
        while self._guards and time.monotonic() < deadline:  # each ends its game, and writes down what that said
            self._collect()
            time.sleep(0.005)
        identity.end_descendants()

    def _end(self) -> None:
        self._over = True

    def _obey(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        except OSError:
            message, fds = b"", []
        if not message:
            self._over = True
        for fd in fds:
            os.set_inheritable(fd, False)
            self._fork(socket.socket(fileno=fd))

    def _fork(self, line: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            say(line, failed=f"no process can be started: {error.strerror}", file="")
            line.close()
            return
        if pid == 0:
            self._become_guard(line)
        self._guards.add(pid)
        line.close()

    def _become_guard(self, line: socket.socket) -> NoReturn:
        code = 1
        try:
            self._selector.close()
            self._signals.close()
            self._control.close()
            if self._owner_fd is not None:
                os.close(self._owner_fd)
            _guard(line, self._pid, self._warm)
            code = 0
        except BaseException:  # it ends here, and the keeper clears up after it
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)

    def _heed(self) -> None:
        if signal.SIGTERM in self._signals.take():
            self._over = True
        self._collect()

    def _collect(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._guards.discard(pid)
        self._end_strays()

    def _end_strays(self) -> None:
        """Who became our child without being a guard has lost his."""
        for stray in set(procfs.list_children(self._pid)) - self._guards:
            for pid in (stray, *procfs.list_descendants(stray)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _warm_up(name: str, control: socket.socket, owner: int) -> Warm:
    """What a failure has left here, memory and threads, goes with a new program in this very process: a keeper that is not warm."""
    from ludus.process.commands.prefork import CannotBeWarm, Warm

    def look(number: int, frame: FrameType | None) -> None:
        if os.getppid() != owner:  # nobody listens to its line in the meantime
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
    warm, failure = None, ""
    try:
        warm = Warm(name)
    except CannotBeWarm as error:
        failure = str(error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    say(control, failed=failure)
    if warm is None:
        control.set_inheritable(True)
        os.execv(sys.executable, keeper_command(control.fileno(), owner))  # noqa: S606
    return warm


def keeper_command(control: int, owner: int, warm: str = "") -> list[str]:
    """That starts a keeper; `control`: a descriptor that it inherits."""
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
    identity.adopt_orphans()
    control.set_inheritable(False)
    # What the owner ignores or blocks outlives exec, and must not reach the games.
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
    warm = _warm_up(words[2], control, owner) if words[2:] else None
    gc.collect()
    gc.freeze()  # a collection in a guard would copy pages that all of them share
    Keeper(control, owner, warm).run()


if __name__ == "__main__":
    main(sys.argv[1:])
