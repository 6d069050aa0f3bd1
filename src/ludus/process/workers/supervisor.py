"""Worker processes on this machine: started from a warm forkserver, watched, and replaced when they die.

    with Supervisor(log_dir=run / "logs") as supervisor:
        worker = supervisor.start("sampler-0", sample, environment, restart=ALWAYS, hang_s=30)
        worker.wait_ready(60)

`sample(context, environment)` runs in the worker. Function and arguments travel by value where they were defined in the
script itself, so the script needs no `if __name__ == "__main__"` and is not executed a second time. Nothing of this outlives
the process that started it, however that dies.

One thread, the monitor, owns every change of state; all other threads leave it a note and wait. So nothing here can deadlock
with a signal handler that closes the supervisor.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import itertools
import logging
import mmap
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import cloudpickle

from ludus.core.backoff import exponential_delay
from ludus.errors import UsageError, WorkerFailed
from ludus.io import json_lines
from ludus.io.json_lines import LineReader
from ludus.process.workers import forkserver
from ludus.process.workers.forkserver import Context as Context
from ludus.process.workers.forkserver import Place

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "waiting", "done", "failed", "stopped"]

OVER = ("done", "failed", "stopped")
STEADY_S = 10.0

CONFIRM_S = 0.2
"""A silent worker gets this much more before it is killed: a machine that was suspended has to wake up first."""

MAX_LINE_BYTES = 1_000_000

STUCK_S = 5.0
"""After this without an answer the forkserver is taken for dead."""


@dataclass(frozen=True)
class Restart:
    """How often, and how soon, a dead worker is replaced."""

    limit: int | None = 0
    backoff_s: float = 0.05
    max_backoff_s: float = 5.0
    steady_s: float = STEADY_S
    """A worker that lived this long was healthy: the next back-off starts from the beginning."""

    def delay(self, deaths: int, in_a_row: int | None = None) -> float | None:
        """Seconds until the replacement after this many deaths in all; None: no replacement.

        `in_a_row` counts the deaths since a worker last lived for `steady_s` (by default: all of them).
        """
        if self.limit is not None and deaths > self.limit:
            return None
        return exponential_delay(deaths if in_a_row is None else in_a_row, self.backoff_s, self.max_backoff_s)


NEVER = Restart()
ALWAYS = Restart(limit=None)


class Process:
    """A supervised worker, over its incarnations. Made by `Supervisor.start`; its attributes are to be read only."""

    def __init__(self, supervisor: Supervisor, name: str, incarnation: int, order: _Order) -> None:
        self.name, self.incarnation = name, incarnation
        self.pid: int | None = None
        self.state: State = "starting"
        self.error = ""
        self._supervisor, self._order = supervisor, order
        self._life: _Life | None = None
        self._deaths = self._in_a_row = 0
        self._resume_at: float | None = None
        self._stopping = self._was_ready = False

    def __repr__(self) -> str:
        return f"<Process {self.name!r} {self.state} pid={self.pid} incarnation={self.incarnation}>"

    def wait_ready(self, timeout_s: float) -> None:
        """Return when it serves, also if that was long ago. Raises WorkerFailed when it cannot any more, or not in time."""
        state: State = self.state

        def settled() -> bool:
            nonlocal state
            state = self.state
            return state == "ready" or state in OVER

        self._supervisor._wait(settled, timeout_s)
        if state == "ready" or (state == "done" and self._was_ready):
            return
        what = {
            "done": "ended before it was ready",
            "failed": "failed",
            "stopped": "was stopped",
        }.get(state, f"was not ready within {timeout_s:g} s ({state})")
        log_path = self._order.place.log_path
        why = f": {self.error.rstrip()}" if self.error else "."
        raise WorkerFailed(f"The worker {self.name!r} {what}{why}", f"Its log: {log_path}" if log_path else "")

    def wait(self, timeout_s: float) -> bool:
        """True when it is over for good: done, failed or stopped."""
        return self._supervisor._wait(lambda: self.state in OVER, timeout_s)

    def ask_to_stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM, after `grace_s` SIGKILL, no replacement. Returns at once."""
        self._supervisor._tell(lambda: self._supervisor._stop(self, grace_s))

    def stop(self, grace_s: float = 5.0) -> None:
        """The same, and returns when it is over."""
        self.ask_to_stop(grace_s)
        if not self.wait(grace_s + 2 * STUCK_S) and not self._supervisor._in_monitor():
            log.error("the worker %s (pid %s) could not be stopped", self.name, self.pid)

    def kill(self) -> None:
        """SIGKILL now; what follows is for its restart policy. Returns when it is dead; if it does not live, at once."""
        life = self._life
        if life is not None:
            self._supervisor._tell(lambda: self._supervisor._kill(self, life))
            self._supervisor._wait(lambda: self._life is not life, 3 * STUCK_S)


@dataclass(frozen=True)
class _Order:
    """What was asked for, in the form in which it can be carried out again and again. Owns the descriptors."""

    place: Place
    payload: int
    fds: tuple[int, ...]
    restart: Restart
    hang_s: float | None
    on_change: Callable[[Process], None] | None

    def close(self) -> None:
        _close(self.payload, *self.fds)


class _Life:
    """One incarnation, seen from here: the pipe on which it reports and the page on which it beats."""

    def __init__(self, number: int) -> None:
        self.number, self.began = number, time.monotonic()
        self.pid: int | None = None
        self.ready_at: float | None = None
        self.suspected_at: float | None = None
        self.kill_at: float | None = None
        self.killed = self.terminated = False
        self.error = self.verdict = ""  # why it dies: as it said itself; as we decided
        with contextlib.ExitStack() as undo:
            self.report, self.report_fd = os.pipe()
            self._reader = LineReader(self.report, MAX_LINE_BYTES, skip_long=True)
            undo.callback(os.close, self.report)
            undo.callback(os.close, self.report_fd)
            os.set_blocking(self.report, False)
            self.page_fd = forkserver.anonymous_file()
            undo.callback(os.close, self.page_fd)
            os.ftruncate(self.page_fd, forkserver.PAGE_BYTES)
            self._page = mmap.mmap(self.page_fd, forkserver.PAGE_BYTES)
            undo.pop_all()

    def given_away(self) -> None:
        """The other ends are on their way to the worker."""
        os.close(self.page_fd)
        os.close(self.report_fd)

    def close(self) -> None:
        self._page.close()
        os.close(self.report)

    def turned_at(self) -> float:
        """When its loop last turned, as far as we know."""
        beat: float = forkserver.BEAT.unpack_from(self._page)[0]
        return max(beat, self.ready_at or 0.0)

    def listen(self) -> bool:
        """Take in what it has reported; False when it will report no more."""
        for message in json_lines.decode_valid(self._reader.read_available()):  # a worker may write to a descriptor it had closed
            self._take(message)
        return not self._reader.at_end

    def _take(self, message: dict[str, Any]) -> None:
        self.pid = message.get("pid", self.pid)
        self.terminated |= "terminated" in message
        self.error = self.error or message.get("error", "")
        if "ready" in message and self.ready_at is None:
            self.ready_at = time.monotonic()


class _Forker:
    """The forkserver, seen from here."""

    def __init__(self, preload: Sequence[str]) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.greeted = False
        self.control.settimeout(STUCK_S)
        try:
            script = (
                f"import sys; sys.path[:] = {_sys_path()!r}; from ludus.process.workers.forkserver import main; "
                f"main({theirs.fileno()}, {os.getpid()}, {(*preload, __name__)!r})"
            )
            flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            self._popen = subprocess.Popen(  # noqa: S603 - this interpreter, with a script of ours
                [sys.executable, *flags, "-c", script],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ,
                process_group=0,  # Ctrl-C at a terminal is not for it
            )
        except BaseException:
            self.control.close()
            raise
        finally:
            theirs.close()

    def spawn(self, life: _Life, incarnation: int, order: _Order) -> None:
        fds = (order.payload, life.page_fd, life.report_fd, *order.fds)
        self._send(forkserver.MESSAGE.pack(forkserver.SPAWN, incarnation, len(fds), life.number), fds)

    def signal(self, life: _Life, number: int) -> None:
        """Through the one that reaps it: so the number cannot have become another process meanwhile."""
        self._send(forkserver.MESSAGE.pack(forkserver.SIGNAL, number, 0, life.number))

    def receive(self) -> tuple[int, int, int] | None:
        """(kind, argument, number of a life), or None when it is gone."""
        try:
            message = self.control.recv(forkserver.MESSAGE.size)
        except OSError:
            return None
        if len(message) < forkserver.MESSAGE.size:
            return None
        kind, argument, _, number = forkserver.MESSAGE.unpack(message)
        return kind, argument, number

    def kill(self) -> None:
        self._popen.kill()

    def end(self) -> int:
        """Cut its lifeline and wait for it; its exit code."""
        self.control.close()
        if not self.greeted:
            self._popen.kill()  # it is importing and would look up later; there is nothing it could leave behind
        try:
            return self._popen.wait(STUCK_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return self._popen.wait(STUCK_S)

    def forget(self) -> None:
        """In a copy of this process made by fork()."""
        self.control.close()
        self._popen.returncode = 0

    def _send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.control, [message], fds)
        except OSError:  # it is dead or stuck; the end of the stream tells, and that is handled in one place
            self._popen.kill()


class Supervisor:
    """Starts workers, watches them, replaces them. A context manager; leaving it stops them all.

    The forkserver starts with the first worker, and takes a moment: it imports `preload`. Variables that those libraries read
    when they are loaded (OMP_NUM_THREADS and the like) are those of that moment; everything else is as it is at each start().
    A worker has a process group of its own: when it is over, whatever else is left in the group is killed. (Not if this
    process and the forkserver are killed in the same moment: then the workers die, and what they executed goes on.)
    """

    def __init__(self, *, log_dir: Path | None = None, preload: Sequence[str] = ("numpy", "torch")) -> None:
        self._log_dir, self._preload = log_dir, tuple(preload)
        self._owner = os.getpid()
        # Re-entrant, and held by callers only to look: a signal handler of the same thread may use all of this.
        self._changed = threading.Condition(threading.RLock())
        self._processes: dict[str, Process] = {}  # those that are not over
        self._incarnations: dict[str, int] = {}
        self._notes: deque[Callable[[], None]] = deque()
        self._numbers = itertools.count(1)
        self._forker: _Forker | None = None
        self._monitor: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._close_within: float | None = None
        self._ended = False
        _LIVING.add(self)
        atexit.register(self.close)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(
        self,
        name: str,
        target: Callable[..., None],
        *args: Any,
        restart: Restart = NEVER,
        fds: Sequence[int] = (),
        hang_s: float | None = None,
        on_change: Callable[[Process], None] | None = None,
        **kwargs: Any,
    ) -> Process:
        """Call `target(context, *args, **kwargs)` in a new process; returns at once.

        `fds` are duplicated: the caller may close his. A worker that was ready and does not beat for `hang_s` is killed and
        counts as dead. `on_change` is called in the monitor's thread at each change of state: it must be short, and cannot
        wait for a worker. The caller's environment, working directory and import path go along.
        """
        self._check(name, fds, hang_s)
        place = Place(name, self._log_path(name), _cwd(), dict(os.environ), _sys_path(), list(getattr(sys, "argv", [])))
        payload = _packed(place, target, args, kwargs)
        copies: list[int] = []
        try:
            copies.extend(os.dup(fd) for fd in fds)
        except OSError as error:
            _close(payload, *copies)
            raise UsageError(f"The descriptors {list(fds)} cannot be passed to the worker {name!r}: {error}.") from error
        try:
            return self._enter(name, _Order(place, payload, tuple(copies), restart, hang_s, on_change))
        except UsageError:  # refused; after any other exception the monitor may own them already
            _close(payload, *copies)
            raise

    def close(self, grace_s: float = 5.0) -> None:
        """Stop all workers: SIGTERM to all at once, after `grace_s` SIGKILL; then end the forkserver. Again: no effect."""
        with self._changed:
            if self._close_within is None:
                self._close_within = grace_s
            if self._monitor is None:
                self._end()
        self._poke()
        if self._in_monitor() or (self._monitor is not None and self._monitor.ident is None):
            return  # asked for by on_change, or by a signal handler while start() is making the monitor, which will see to it
        if not self._wait(lambda: self._ended, grace_s + 4 * STUCK_S):
            log.error("the supervisor could not be closed in time")
        if self._monitor is not None:
            self._monitor.join(STUCK_S)
        atexit.unregister(self.close)

    # -- for callers in any thread

    def _check(self, name: str, fds: Sequence[int], hang_s: float | None) -> None:
        if not hasattr(os, "fork"):
            raise UsageError("Worker processes need a system with fork().", "On Windows, use the Linux subsystem (WSL).")
        if os.getpid() != self._owner:
            raise UsageError(f"This supervisor belongs to the process {self._owner}.", "Make one in this process.")
        if not name or "/" in name or not name.isprintable():
            raise UsageError(f"{name!r} cannot be the name of a worker: it also names a file.", "Use letters and digits.")
        if hang_s is not None and hang_s <= 0:
            raise UsageError(f"hang_s of the worker {name!r} is {hang_s}: it must be above 0, or None for no such check.")
        most = forkserver.MAX_FDS - forkserver.OWN_FDS
        if len(fds) > most:
            raise UsageError(f"{len(fds)} descriptors for the worker {name!r}: at most {most} can be passed on.")

    def _log_path(self, name: str) -> Path | None:
        if self._log_dir is None:
            return None
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"log_dir {str(self._log_dir)!r} cannot be made: {error}.") from error
        return self._log_dir.absolute() / f"{name}.log"

    def _enter(self, name: str, order: _Order) -> Process:
        with self._changed:
            if self._close_within is not None:
                raise UsageError(f"The worker {name!r} cannot start: its supervisor is closed.")
            if (other := self._processes.get(name)) is not None:
                raise UsageError(f"There is a worker {name!r} already; it is {other.state}.", "Stop it, or choose another name.")
            incarnation = self._incarnations[name] = self._incarnations.get(name, 0) + 1
            process = self._processes[name] = Process(self, name, incarnation, order)
            if self._monitor is None:
                self._monitor = threading.Thread(target=self._watch, name="ludus-supervisor", daemon=True)
                self._monitor.start()
        self._tell(lambda: self._spawn(process))
        if self._ended:  # closed by a signal handler between these lines
            self._end()
        return process

    def _living(self) -> list[Process]:
        """Those that are not over, in one step: other threads may add to them meanwhile."""
        return list(self._processes.values())

    def _tell(self, note: Callable[[], None]) -> None:
        self._notes.append(note)
        self._poke()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody is there
            self._wake.send(b"\0")

    def _in_monitor(self) -> bool:
        return threading.current_thread() is self._monitor

    def _wait(self, over: Callable[[], bool], timeout_s: float) -> bool:
        if self._in_monitor():  # in on_change: whoever would make it come true is waiting for us
            return over()
        with self._changed:
            return self._changed.wait_for(lambda: over() or self._ended, timeout_s) and over()

    # -- in the monitor's thread

    def _watch(self) -> None:
        try:
            self._selector.register(self._woken, selectors.EVENT_READ)
            while not self._finished():
                for key, _ in self._selector.select(self._until_next()):
                    self._handle(key)
                while self._notes:
                    self._notes.popleft()()
                self._keep_time()
        except Exception as error:
            # A mistake of ours. Workers that nobody watches are worse than none, and whoever waits must be told.
            log.exception("the supervisor failed; its workers are killed")
            for process in self._living():
                process.error = process.error or f"the supervisor failed: {error!r}"
        finally:
            self._end()

    def _finished(self) -> bool:
        """True when all has been stopped. Begins to stop when that has been asked for."""
        if self._close_within is None:
            return False
        for process in self._living():
            self._stop(process, self._close_within)
        return not self._living()

    def _end(self) -> None:
        """The last act of the monitor, or of whoever finds that there is none."""
        for process in self._living():
            self._bury(process)
            self._over(process, "failed" if process.error else "stopped")
        if not self._ended:
            if self._forker is not None:
                self._forker.end()
            self._selector.close()
            self._wake.close()
            self._woken.close()
            _LIVING.discard(self)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._woken:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        elif isinstance(key.data, Process):
            self._listen(key.data)
        elif self._forker is not None and key.fileobj is self._forker.control:
            event = self._forker.receive()
            if event is None:
                self._forker_died()
            else:
                self._forker_says(*event)

    def _forker_says(self, kind: int, argument: int, number: int) -> None:
        if kind == forkserver.HELLO:
            assert self._forker is not None
            self._forker.greeted = True
            for process in self._living():
                self._spawn(process)
            return
        for process in self._living():
            if process._life is not None and process._life.number == number:
                if kind == forkserver.EXIT:
                    self._died(process, argument)
                else:
                    self._died(process, None, f"the system could not fork: {os.strerror(argument)}")

    def _spawn(self, process: Process) -> None:
        """Have it forked; while the forkserver is still importing, its greeting will do that."""
        if process._life is not None or process.state != "starting":
            return
        try:
            if self._forker is None:
                self._forker = _Forker(self._preload)
                self._selector.register(self._forker.control, selectors.EVENT_READ)
            if not self._forker.greeted:
                return
            life = process._life = _Life(next(self._numbers))
        except OSError as error:
            self._died(process, None, f"could not be started: {error}")
            return
        self._selector.register(life.report, selectors.EVENT_READ, process)
        self._forker.spawn(life, process.incarnation, process._order)
        life.given_away()

    def _listen(self, process: Process) -> None:
        life = process._life
        if life is None:
            return
        if not life.listen():
            self._unwatch(life)  # that it is dead, and of what, the forkserver says
        process.pid = life.pid
        if life.ready_at is not None and process.state == "starting":
            process._was_ready = True
            self._enter_state(process, "ready")

    def _stop(self, process: Process, grace_s: float) -> None:
        if process.state in OVER:
            return
        life, first, process._stopping = process._life, not process._stopping, True
        if life is None or self._forker is None:
            self._over(process, "stopped")
            return
        if first:
            self._forker.signal(life, signal.SIGTERM)
        if not life.killed:
            at = time.monotonic() + grace_s
            life.kill_at = at if life.kill_at is None else min(life.kill_at, at)

    def _kill(self, process: Process, life: _Life, verdict: str = "") -> None:
        if process._life is life and self._forker is not None:
            life.verdict = life.verdict or verdict
            life.killed, life.kill_at = True, time.monotonic() + STUCK_S
            self._forker.signal(life, signal.SIGKILL)

    def _died(self, process: Process, status: int | None, error: str = "") -> None:
        """Decide what becomes of a worker that is dead, and do it. `status` as in subprocess; None when it is not known."""
        self._listen(process)  # what it said last may still be on its way
        life = process._life
        if life is not None:
            error = life.verdict or life.error or error
            if life.terminated and status == 0 and not process._stopping:
                error = error or "ended by a SIGTERM that its supervisor did not send"
            self._bury(process)
        if process._stopping:
            process.error = error or process.error
            self._over(process, "stopped")
        elif status == 0 and not error:
            self._over(process, "done")
        else:
            process.error = error or _described(status)
            lived = time.monotonic() - life.began if life is not None else 0.0
            self._replace(process, lived)

    def _replace(self, process: Process, lived: float) -> None:
        process._deaths += 1
        process._in_a_row = 1 if lived >= process._order.restart.steady_s else process._in_a_row + 1
        delay = process._order.restart.delay(process._deaths, process._in_a_row)
        log.warning(
            "the worker %s died: %s; %s",
            process.name,
            process.error.rstrip().rpartition("\n")[2],
            "it is not replaced" if delay is None else f"it is replaced in {delay:.2f} s",
        )
        if delay is None:
            self._over(process, "failed")
        else:
            process._resume_at = time.monotonic() + delay
            self._enter_state(process, "waiting")

    def _bury(self, process: Process) -> None:
        if process._life is not None:
            self._unwatch(process._life)
            process._life.close()
        process._life = process.pid = None

    def _unwatch(self, life: _Life) -> None:
        with contextlib.suppress(KeyError):  # its end was seen before
            self._selector.unregister(life.report)

    def _over(self, process: Process, state: State) -> None:
        process._order.close()
        process._resume_at = None
        self._enter_state(process, state)

    def _enter_state(self, process: Process, state: State) -> None:
        with self._changed:
            process.state = state
            if state == "starting":
                process.incarnation = self._incarnations[process.name] = process.incarnation + 1
            elif state in OVER:
                self._processes.pop(process.name, None)
            self._changed.notify_all()
        if process._order.on_change is not None:
            try:
                process._order.on_change(process)
            except Exception:  # the user's; the watch goes on
                log.exception("on_change of the worker %s failed", process.name)

    def _forker_died(self) -> None:
        assert self._forker is not None
        self._selector.unregister(self._forker.control)
        error = f"the forkserver died ({_described(self._forker.end())})"
        self._forker = None
        victims = [process for process in self._living() if process.state in ("starting", "ready")]
        _see_dead([process._life for process in victims if process._life is not None], within_s=1.0)
        for process in victims:
            self._died(process, None, error)

    # -- time, in the monitor's thread

    def _due(self, process: Process) -> float | None:
        """When something is to be done about this worker, unless something happens before."""
        if process._resume_at is not None:
            return process._resume_at
        life, hang_s = process._life, process._order.hang_s
        if life is None or life.kill_at is not None:
            return life.kill_at if life is not None else None
        if life.ready_at is None or hang_s is None:
            return None
        return life.turned_at() + hang_s if life.suspected_at is None else life.suspected_at + CONFIRM_S

    def _until_next(self) -> float | None:
        times = [due for process in self._living() if (due := self._due(process)) is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _keep_time(self) -> None:
        for process in self._living():
            due, now = self._due(process), time.monotonic()
            if due is None or due > now:
                continue
            life = process._life
            if life is None:
                process._resume_at = None
                self._enter_state(process, "starting")
                self._spawn(process)
            elif life.kill_at is None:
                self._suspect(process, life, now)
            elif not life.killed:
                self._kill(process, life, "did not end in time after SIGTERM and was killed")
            elif self._forker is not None:
                log.error("the forkserver did not kill the worker %s; it is killed itself, with all workers", process.name)
                life.kill_at = now + STUCK_S
                self._forker.kill()

    def _suspect(self, process: Process, life: _Life, now: float) -> None:
        """It has been silent for too long: the first time, look again a little later."""
        hang_s = process._order.hang_s
        assert hang_s is not None
        if now < life.turned_at() + hang_s:
            life.suspected_at = None
        elif life.suspected_at is None:
            life.suspected_at = now
        else:
            self._kill(process, life, f"its loop was held for {hang_s:.1f} s")

    def _forget(self) -> None:
        """In a copy of this process made by fork(): hold nothing that keeps workers or their sockets alive."""
        self._changed = threading.Condition(threading.RLock())  # the former may be held by a thread that is not here
        self._close_within, self._ended = 0.0, True
        if self._forker is not None:
            self._forker.forget()
        for end in (self._wake, self._woken, self._selector):
            end.close()
        for process in self._living():
            with contextlib.suppress(OSError):  # the monitor was about to close it
                process._order.close()
            if process._life is not None:
                with contextlib.suppress(OSError):
                    process._life.close()


_LIVING: set[Supervisor] = set()


def _forget_all() -> None:
    for supervisor in list(_LIVING):
        supervisor._forget()
    _LIVING.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _see_dead(lives: Sequence[_Life], within_s: float) -> None:
    """The kernel kills the workers of a dead forkserver; a replacement shall not meet its predecessor."""
    deadline = time.monotonic() + within_s
    for life in lives:
        life.listen()
        if life.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(life.pid, signal.SIGKILL)  # also what the worker has started
    with selectors.DefaultSelector() as selector:
        for life in lives:
            selector.register(life.report, selectors.EVENT_READ, life)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if not key.data.listen():
                    selector.unregister(key.fileobj)


def _described(status: int | None) -> str:
    if status is None:
        return "unknown"
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-status}"


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _cwd() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # somebody removed it
        return None


def _sys_path() -> list[str]:
    return [entry for entry in sys.path if isinstance(entry, str)]


# ---------------------------------------------------------------- by value


def _packed(place: Place, target: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A nameless file with all that a worker needs; it is read again for every replacement."""
    head = pickle.dumps(place)
    fd = forkserver.anonymous_file()
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(forkserver.LENGTH.pack(len(head)) + head)
            cloudpickle.dump((target, args, kwargs), file)
    except BaseException as error:
        os.close(fd)
        if not isinstance(error, Exception):
            raise
        parts = [("the target", target), *((f"argument {i}", value) for i, value in enumerate(args, 1)), *kwargs.items()]
        raise UsageError(
            f"{_culprit(parts) or 'An argument'} cannot be sent to the worker {place.name!r}: {error}",
            "Make it inside the worker, from plain values.",
        ) from error
    return fd


def unsendable_part(name: str, value: Any) -> str | None:
    """What of a value cannot be sent to another process, and why; None: all of it can."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # whatever a user's __reduce__ raises
        return f"{_culprit([(name, value)])} ({error})"
    return None


def _culprit(parts: Iterable[tuple[str, Any]], depth: int = 4) -> str | None:
    """The innermost thing among `parts` that cannot be pickled."""
    for label, value in parts:
        try:
            cloudpickle.dumps(value)
        except Exception:  # whatever a user's __reduce__ raises
            inner = _culprit(_parts(label, value), depth - 1) if depth else None
            return inner or f"{label} (of type {type(value).__qualname__})"
    return None


def _parts(label: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{label}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{label}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, FunctionType):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            used = inspect.getclosurevars(value)
            yield from ((f"{name!r}, used by {label},", item) for name, item in {**used.nonlocals, **used.globals}.items())
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from ((f"{label}.{name}", item) for name, item in vars(value).items())
