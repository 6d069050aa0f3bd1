"""Starts worker processes on this machine from a preloaded forkserver, watches them, and replaces those that die.

    with Supervisor(log_dir=run / "logs") as supervisor:
        worker = supervisor.start("sampler-0", sample, environment, restart=ALWAYS, hang_s=30)
        worker.wait_ready(60)

`sample(context, environment)` runs in the worker. Functions and arguments that are defined in the script itself are pickled by
value: the script needs no `if __name__ == "__main__"` and is not executed a second time. Workers never outlive the process
that started them.

All state changes happen in one thread, the monitor; other threads queue calls for it and wait. A signal handler may therefore
close the supervisor without a deadlock.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import io
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
from typing import IO, Any, Literal

import cloudpickle

from ludus.core.backoff import exponential_delay
from ludus.errors import UsageError, WorkerFailed
from ludus.io import json_lines
from ludus.io.json_lines import LineReader
from ludus.process.children import kill_group, wait_or_kill
from ludus.process.workers import forkserver
from ludus.process.workers.forkserver import Context as Context
from ludus.process.workers.forkserver import WorkerEnvironment

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "waiting", "done", "failed", "stopped"]

FINAL_STATES = ("done", "failed", "stopped")
STEADY_S = 10.0

CONFIRM_S = 0.2
"""Extra time before a silent worker is killed: after a suspend of the machine its heartbeat needs a moment."""

MAX_LINE_BYTES = 1_000_000

STUCK_S = 5.0
"""After this time without an answer the forkserver counts as dead."""


@dataclass(frozen=True)
class WorkerRestart:
    """How often, and after which delays, a dead worker is replaced."""

    limit: int | None = 0
    backoff_s: float = 0.05
    max_backoff_s: float = 5.0
    steady_s: float = STEADY_S
    """A worker that lived this long was healthy: the next back-off starts from the beginning."""

    def delay(self, deaths: int, in_a_row: int | None = None) -> float | None:
        """Seconds until the replacement after this many deaths in total; None: no replacement.

        `in_a_row`: deaths since a worker last lived for `steady_s` (default: all of them).
        """
        if self.limit is not None and deaths > self.limit:
            return None
        return exponential_delay(deaths if in_a_row is None else in_a_row, self.backoff_s, self.max_backoff_s)


NEVER = WorkerRestart()
ALWAYS = WorkerRestart(limit=None)


class Process:
    """A supervised worker across its incarnations. Created by `Supervisor.start`; its attributes are read-only."""

    def __init__(self, supervisor: Supervisor, name: str, incarnation: int, spec: _StartSpec) -> None:
        self.name, self.incarnation = name, incarnation
        self.pid: int | None = None
        self.state: State = "starting"
        self.error = ""
        self._supervisor, self._spec = supervisor, spec
        self._child: _Child | None = None
        self._deaths = self._in_a_row = 0
        self._resume_at: float | None = None
        self._stopping = self._was_ready = False

    def __repr__(self) -> str:
        return f"<Process {self.name!r} {self.state} pid={self.pid} incarnation={self.incarnation}>"

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the worker is or has been ready. Raises WorkerFailed when it has ended before, or after `timeout_s`."""
        state: State = self.state

        def is_settled() -> bool:
            nonlocal state
            state = self.state
            return state == "ready" or state in FINAL_STATES

        self._supervisor._wait(is_settled, timeout_s)
        if state == "ready" or (state == "done" and self._was_ready):
            return
        what = {
            "done": "ended before it was ready",
            "failed": "failed",
            "stopped": "was stopped",
        }.get(state, f"was not ready within {timeout_s:g} s ({state})")
        log_path = self._spec.environment.log_path
        why = f": {self.error.rstrip()}" if self.error else "."
        raise WorkerFailed(f"The worker {self.name!r} {what}{why}", f"Its log: {log_path}" if log_path else "")

    def wait(self, timeout_s: float) -> bool:
        """Return whether it reached a final state (done, failed or stopped) within `timeout_s`."""
        return self._supervisor._wait(lambda: self.state in FINAL_STATES, timeout_s)

    def ask_to_stop(self, grace_s: float = 5.0) -> None:
        """Send SIGTERM, after `grace_s` SIGKILL, without replacement. Returns at once."""
        self._supervisor._call_in_monitor(lambda: self._supervisor._stop(self, grace_s))

    def stop(self, grace_s: float = 5.0) -> None:
        """Like `ask_to_stop`, and wait until it has ended."""
        self.ask_to_stop(grace_s)
        if not self.wait(grace_s + 2 * STUCK_S) and not self._supervisor._in_monitor():
            log.error("the worker %s (pid %s) could not be stopped", self.name, self.pid)

    def kill(self) -> None:
        """Send SIGKILL and wait until it is dead; the restart policy applies. Returns at once if it is not running."""
        child = self._child
        if child is not None:
            self._supervisor._call_in_monitor(lambda: self._supervisor._kill(self, child))
            self._supervisor._wait(lambda: self._child is not child, 3 * STUCK_S)


@dataclass(frozen=True)
class _StartSpec:
    """Arguments of `Supervisor.start`, kept for replacements. Owns the descriptors."""

    environment: WorkerEnvironment
    payload: int
    fds: tuple[int, ...]
    restart: WorkerRestart
    hang_s: float | None
    on_change: Callable[[Process], None] | None

    def close(self) -> None:
        _close(self.payload, *self.fds)


class _Child:
    """The process of one incarnation: its report pipe and its heartbeat page."""

    def __init__(self, child_id: int) -> None:
        self.id, self.began = child_id, time.monotonic()
        self.pid: int | None = None
        self.ready_at: float | None = None
        self.suspected_at: float | None = None
        self.kill_at: float | None = None
        self.killed = self.terminated = False
        self.error = self.reason = ""  # cause of death: as reported by the worker; as decided by the supervisor
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

    def close_worker_ends(self) -> None:
        """Close the worker's ends after they were sent to the forkserver."""
        os.close(self.page_fd)
        os.close(self.report_fd)

    def close(self) -> None:
        self._page.close()
        os.close(self.report)

    def last_heartbeat(self) -> float:
        """Time of the last heartbeat, or of readiness if that is later."""
        beat: float = forkserver.BEAT.unpack_from(self._page)[0]
        return max(beat, self.ready_at or 0.0)

    def read_reports(self) -> bool:
        """Read what it has reported; returns False at the end of its pipe."""
        # Not all lines are valid: a worker may write to a descriptor that it has closed.
        for message in json_lines.decode_valid(self._reader.read_available()):
            self._handle_report(message)
        return not self._reader.at_end

    def _handle_report(self, message: dict[str, Any]) -> None:
        self.pid = message.get("pid", self.pid)
        self.terminated |= "terminated" in message
        self.error = self.error or message.get("error", "")
        if "ready" in message and self.ready_at is None:
            self.ready_at = time.monotonic()


class _ForkserverClient:
    """The forkserver process and the control socket to it."""

    def __init__(self, preload: Sequence[str]) -> None:
        self.control, theirs = socket.socketpair()
        self.is_ready = False
        self.control.settimeout(STUCK_S)
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(self.control.close)
            script = (
                f"import sys; sys.path[:] = {_sys_path()!r}; from ludus.process.workers.forkserver import main; "
                f"main({theirs.fileno()}, {os.getpid()}, {(*preload, __name__)!r})"
            )
            self._popen = subprocess.Popen(  # noqa: S603 - this interpreter, with a script of ours
                [sys.executable, *flags, "-c", script],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ,
                process_group=0,  # Ctrl-C at a terminal must not reach it
            )
            undo.pop_all()

    def spawn(self, child: _Child, incarnation: int, spec: _StartSpec) -> None:
        fds = (spec.payload, child.page_fd, child.report_fd, *spec.fds)
        self._send(forkserver.MESSAGE.pack(forkserver.SPAWN, incarnation, len(fds), child.id), fds)

    def signal(self, child: _Child, number: int) -> None:
        """Send a signal through the forkserver, which reaps its workers: the PID cannot have been reused."""
        self._send(forkserver.MESSAGE.pack(forkserver.SIGNAL, number, 0, child.id))

    def receive(self) -> tuple[int, int, int] | None:
        """Read (kind, argument, id of an incarnation); None when the forkserver is gone."""
        try:
            message = self.control.recv(forkserver.MESSAGE.size)
        except OSError:
            return None
        if len(message) < forkserver.MESSAGE.size:
            return None
        kind, argument, _, child_id = forkserver.MESSAGE.unpack(message)
        return kind, argument, child_id

    def kill(self) -> None:
        self._popen.kill()

    def end(self) -> int | None:
        """Close the control socket, wait until it has ended, and return its exit code."""
        self.control.close()
        if not self.is_ready:
            self._popen.kill()  # it is still importing and would notice only later; it has no workers yet
        return wait_or_kill(self._popen, STUCK_S)

    def release_after_fork(self) -> None:
        """Release it in a fork of this process."""
        self.control.close()
        self._popen.returncode = 0

    def _send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.control, [message], fds)
        except OSError:  # dead or stuck; its end of file on the control socket is handled in one place
            self._popen.kill()


class Supervisor:
    """Starts, watches and replaces workers. A context manager; leaving it stops all workers.

    The forkserver starts with the first worker and imports `preload`, which takes a moment. Variables that those libraries read at
    import (such as OMP_NUM_THREADS) have the values of that moment; everything else is as it is at each `start`.
    Each worker has its own process group; when it has ended, the rest of the group is killed. (Exception: if this process and the
    forkserver are killed at the same moment, programs that workers executed stay.)
    """

    def __init__(self, *, log_dir: Path | None = None, preload: Sequence[str] = ("numpy", "torch")) -> None:
        self._log_dir, self._preload = log_dir, tuple(preload)
        self._owner = os.getpid()
        # Re-entrant, and held by callers only for reading: a signal handler of the same thread may use all methods.
        self._changed = threading.Condition(threading.RLock())
        self._processes: dict[str, Process] = {}  # those not in a final state
        self._incarnations: dict[str, int] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._ids = itertools.count(1)
        self._forkserver: _ForkserverClient | None = None
        self._monitor: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._close_within: float | None = None
        self._ended = False
        _OPEN_SUPERVISORS.add(self)
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
        restart: WorkerRestart = NEVER,
        fds: Sequence[int] = (),
        hang_s: float | None = None,
        on_change: Callable[[Process], None] | None = None,
        **kwargs: Any,
    ) -> Process:
        """Call `target(context, *args, **kwargs)` in a new process; returns at once.

        `fds` are duplicated: the caller may close its own. A worker that was ready and sends no heartbeat for `hang_s` is killed and
        counts as dead. `on_change` is called in the monitor thread at each change of state: it must be short and must not
        wait for a worker. The worker gets the caller's environment, working directory and import path.
        """
        self._check(name, fds, hang_s)
        environment = WorkerEnvironment(
            name, self._log_path(name), _cwd(), dict(os.environ), _sys_path(), list(getattr(sys, "argv", []))
        )
        payload = _pack_payload(environment, target, args, kwargs)
        copies: list[int] = []
        try:
            copies.extend(os.dup(fd) for fd in fds)
        except OSError as error:
            _close(payload, *copies)
            raise UsageError(f"The descriptors {list(fds)} cannot be passed to the worker {name!r}: {error}.") from error
        try:
            return self._register(name, _StartSpec(environment, payload, tuple(copies), restart, hang_s, on_change))
        except UsageError:  # refused; after any other exception the monitor may own them already
            _close(payload, *copies)
            raise

    def close(self, grace_s: float = 5.0) -> None:
        """Stop all workers (SIGTERM, after `grace_s` SIGKILL), then end the forkserver. Idempotent."""
        with self._changed:
            if self._close_within is None:
                self._close_within = grace_s
            if self._monitor is None:
                self._shut_down()
        self._wake_monitor()
        if self._in_monitor() or (self._monitor is not None and self._monitor.ident is None):
            return  # called by on_change, or by a signal handler while start() creates the monitor, which then closes it
        if not self._wait(lambda: self._ended, grace_s + 4 * STUCK_S):
            log.error("the supervisor could not be closed in time")
        if self._monitor is not None:
            self._monitor.join(STUCK_S)
        atexit.unregister(self.close)

    # -- called from any thread

    def _check(self, name: str, fds: Sequence[int], hang_s: float | None) -> None:
        if not hasattr(os, "fork"):
            raise UsageError("Worker processes need a system with fork().", "On Windows, use the Linux subsystem (WSL).")
        if os.getpid() != self._owner:
            raise UsageError(f"This supervisor belongs to the process {self._owner}.", "Make one in this process.")
        if not name or "/" in name or not name.isprintable():
            raise UsageError(f"{name!r} cannot be the name of a worker: it also names a file.", "Use letters and digits.")
        if hang_s is not None and hang_s <= 0:
            raise UsageError(f"hang_s of the worker {name!r} is {hang_s}: it must be above 0, or None for no check.")
        maximum = forkserver.MAX_FDS - forkserver.OWN_FDS
        if len(fds) > maximum:
            raise UsageError(f"{len(fds)} descriptors for the worker {name!r}: at most {maximum} can be passed on.")

    def _log_path(self, name: str) -> Path | None:
        if self._log_dir is None:
            return None
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"log_dir {str(self._log_dir)!r} cannot be made: {error}.") from error
        return self._log_dir.absolute() / f"{name}.log"

    def _register(self, name: str, spec: _StartSpec) -> Process:
        with self._changed:
            if self._close_within is not None:
                raise UsageError(f"The worker {name!r} cannot start: its supervisor is closed.")
            if (other := self._processes.get(name)) is not None:
                raise UsageError(f"There is a worker {name!r} already; it is {other.state}.", "Stop it, or choose another name.")
            incarnation = self._incarnations[name] = self._incarnations.get(name, 0) + 1
            process = self._processes[name] = Process(self, name, incarnation, spec)
            if self._monitor is None:
                self._monitor = threading.Thread(target=self._run_monitor, name="ludus-supervisor", daemon=True)
                self._monitor.start()
        self._call_in_monitor(lambda: self._spawn(process))
        if self._ended:  # closed by a signal handler between these lines
            self._shut_down()
        return process

    def _active_processes(self) -> list[Process]:
        """Snapshot of the workers that are not in a final state; other threads may add more."""
        return list(self._processes.values())

    def _call_in_monitor(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._wake_monitor()

    def _wake_monitor(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake up anyway; closed: it has ended
            self._wake_sender.send(b"\0")

    def _in_monitor(self) -> bool:
        return threading.current_thread() is self._monitor

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        if self._in_monitor():  # called from on_change: waiting would block the thread that makes it come true
            return condition()
        with self._changed:
            return self._changed.wait_for(lambda: condition() or self._ended, timeout_s) and condition()

    # -- in the monitor thread

    def _run_monitor(self) -> None:
        try:
            self._selector.register(self._wake_receiver, selectors.EVENT_READ)
            while not self._has_stopped():
                for key, _ in self._selector.select(self._select_timeout()):
                    self._handle(key)
                while self._calls:
                    self._calls.popleft()()
                self._run_timers()
        except Exception as error:  # a bug here: kill the workers, which nothing watches any more, and wake up waiting threads
            log.exception("the supervisor failed; its workers are killed")
            for process in self._active_processes():
                process.error = process.error or f"the supervisor failed: {error!r}"
        finally:
            self._shut_down()

    def _has_stopped(self) -> bool:
        """Stop the workers after `close` was called; return whether all have ended."""
        if self._close_within is None:
            return False
        for process in self._active_processes():
            self._stop(process, self._close_within)
        return not self._active_processes()

    def _shut_down(self) -> None:
        """Release everything: last action of the monitor, or of the caller if there is no monitor."""
        for process in self._active_processes():
            self._release_child(process)
            self._finish(process, "failed" if process.error else "stopped")
        if not self._ended:
            if self._forkserver is not None:
                self._forkserver.end()
            self._selector.close()
            self._wake_sender.close()
            self._wake_receiver.close()
            _OPEN_SUPERVISORS.discard(self)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._wake_receiver:
            with contextlib.suppress(BlockingIOError):
                self._wake_receiver.recv(4096)
        elif isinstance(key.data, Process):
            self._read_reports(key.data)
        elif self._forkserver is not None and key.fileobj is self._forkserver.control:
            event = self._forkserver.receive()
            if event is None:
                self._on_forkserver_death()
            else:
                self._on_forkserver_message(*event)

    def _on_forkserver_message(self, kind: int, argument: int, child_id: int) -> None:
        if kind == forkserver.HELLO:
            assert self._forkserver is not None
            self._forkserver.is_ready = True
            for process in self._active_processes():
                self._spawn(process)
            return
        for process in self._active_processes():
            if process._child is not None and process._child.id == child_id:
                if kind == forkserver.EXIT:
                    self._on_death(process, argument)
                else:
                    self._on_death(process, None, f"the system could not fork: {os.strerror(argument)}")

    def _spawn(self, process: Process) -> None:
        """Request a fork. While the forkserver is still importing, its HELLO message triggers this again."""
        if process._child is not None or process.state != "starting":
            return
        try:
            if self._forkserver is None:
                self._forkserver = _ForkserverClient(self._preload)
                self._selector.register(self._forkserver.control, selectors.EVENT_READ)
            if not self._forkserver.is_ready:
                return
            child = process._child = _Child(next(self._ids))
        except OSError as error:
            self._on_death(process, None, f"could not be started: {error}")
            return
        self._selector.register(child.report, selectors.EVENT_READ, process)
        self._forkserver.spawn(child, process.incarnation, process._spec)
        child.close_worker_ends()

    def _read_reports(self, process: Process) -> None:
        child = process._child
        if child is None:
            return
        if not child.read_reports():
            self._unwatch(child)  # the forkserver reports its exit status
        process.pid = child.pid
        if child.ready_at is not None and process.state == "starting":
            process._was_ready = True
            self._set_state(process, "ready")

    def _stop(self, process: Process, grace_s: float) -> None:
        if process.state in FINAL_STATES:
            return
        child, first, process._stopping = process._child, not process._stopping, True
        if child is None or self._forkserver is None:
            self._finish(process, "stopped")
            return
        if first:
            self._forkserver.signal(child, signal.SIGTERM)
        if not child.killed:
            at = time.monotonic() + grace_s
            child.kill_at = at if child.kill_at is None else min(child.kill_at, at)

    def _kill(self, process: Process, child: _Child, reason: str = "") -> None:
        if process._child is child and self._forkserver is not None:
            child.reason = child.reason or reason
            child.killed, child.kill_at = True, time.monotonic() + STUCK_S
            self._forkserver.signal(child, signal.SIGKILL)

    def _on_death(self, process: Process, status: int | None, error: str = "") -> None:
        """Handle the death of a worker. `status` as in subprocess; None if unknown."""
        self._read_reports(process)  # its last report may not have been read yet
        child = process._child
        if child is not None:
            error = child.reason or child.error or error
            if child.terminated and status == 0 and not process._stopping:
                error = error or "ended by a SIGTERM that its supervisor did not send"
            self._release_child(process)
        if process._stopping:
            process.error = error or process.error
            self._finish(process, "stopped")
        elif status == 0 and not error:
            self._finish(process, "done")
        else:
            process.error = error or _describe_status(status)
            lifetime_s = time.monotonic() - child.began if child is not None else 0.0
            self._schedule_restart(process, lifetime_s)

    def _schedule_restart(self, process: Process, lifetime_s: float) -> None:
        process._deaths += 1
        process._in_a_row = 1 if lifetime_s >= process._spec.restart.steady_s else process._in_a_row + 1
        delay = process._spec.restart.delay(process._deaths, process._in_a_row)
        log.warning(
            "the worker %s died: %s; %s",
            process.name,
            process.error.rstrip().rpartition("\n")[2],
            "it is not replaced" if delay is None else f"it is replaced in {delay:.2f} s",
        )
        if delay is None:
            self._finish(process, "failed")
        else:
            process._resume_at = time.monotonic() + delay
            self._set_state(process, "waiting")

    def _release_child(self, process: Process) -> None:
        if process._child is not None:
            self._unwatch(process._child)
            process._child.close()
        process._child = process.pid = None

    def _unwatch(self, child: _Child) -> None:
        with contextlib.suppress(KeyError):  # unregistered before, at the end of its pipe
            self._selector.unregister(child.report)

    def _finish(self, process: Process, state: State) -> None:
        process._spec.close()
        process._resume_at = None
        self._set_state(process, state)

    def _set_state(self, process: Process, state: State) -> None:
        with self._changed:
            process.state = state
            if state == "starting":
                process.incarnation = self._incarnations[process.name] = process.incarnation + 1
            elif state in FINAL_STATES:
                self._processes.pop(process.name, None)
            self._changed.notify_all()
        if process._spec.on_change is not None:
            try:
                process._spec.on_change(process)
            except Exception:  # raised by the caller's function; monitoring goes on
                log.exception("on_change of the worker %s failed", process.name)

    def _on_forkserver_death(self) -> None:
        assert self._forkserver is not None
        self._selector.unregister(self._forkserver.control)
        error = f"the forkserver died ({_describe_status(self._forkserver.end())})"
        self._forkserver = None
        victims = [process for process in self._active_processes() if process.state in ("starting", "ready")]
        _wait_for_deaths([process._child for process in victims if process._child is not None], within_s=1.0)
        for process in victims:
            self._on_death(process, None, error)

    # -- timers, in the monitor thread

    def _next_deadline(self, process: Process) -> float | None:
        """Time of the next action for this worker unless an event comes first."""
        if process._resume_at is not None:
            return process._resume_at
        child, hang_s = process._child, process._spec.hang_s
        if child is None or child.kill_at is not None:
            return child.kill_at if child is not None else None
        if child.ready_at is None or hang_s is None:
            return None
        return child.last_heartbeat() + hang_s if child.suspected_at is None else child.suspected_at + CONFIRM_S

    def _select_timeout(self) -> float | None:
        times = [due for process in self._active_processes() if (due := self._next_deadline(process)) is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _run_timers(self) -> None:
        for process in self._active_processes():
            due, now = self._next_deadline(process), time.monotonic()
            if due is None or due > now:
                continue
            child = process._child
            if child is None:
                process._resume_at = None
                self._set_state(process, "starting")
                self._spawn(process)
            elif child.kill_at is None:
                self._check_heartbeat(process, child, now)
            elif not child.killed:
                self._kill(process, child, "did not end in time after SIGTERM and was killed")
            elif self._forkserver is not None:
                log.error("the forkserver did not kill the worker %s; killing the forkserver and all workers", process.name)
                child.kill_at = now + STUCK_S
                self._forkserver.kill()

    def _check_heartbeat(self, process: Process, child: _Child, now: float) -> None:
        """Handle a missing heartbeat: check again after CONFIRM_S, then kill."""
        hang_s = process._spec.hang_s
        assert hang_s is not None
        if now < child.last_heartbeat() + hang_s:
            child.suspected_at = None
        elif child.suspected_at is None:
            child.suspected_at = now
        else:
            self._kill(process, child, f"its loop was held for {hang_s:.1f} s")

    def _release_after_fork(self) -> None:
        """In a fork of this process: close everything that keeps workers or their sockets alive."""
        self._changed = threading.Condition(threading.RLock())  # a thread that does not exist here may hold the old one
        self._close_within, self._ended = 0.0, True
        if self._forkserver is not None:
            self._forkserver.release_after_fork()
        for end in (self._wake_sender, self._wake_receiver, self._selector):
            end.close()
        for process in self._active_processes():
            with contextlib.suppress(OSError):  # the monitor was about to close it
                process._spec.close()
            if process._child is not None:
                with contextlib.suppress(OSError):
                    process._child.close()


_OPEN_SUPERVISORS: set[Supervisor] = set()


def _release_all_after_fork() -> None:
    for supervisor in list(_OPEN_SUPERVISORS):
        supervisor._release_after_fork()
    _OPEN_SUPERVISORS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_all_after_fork)


def _wait_for_deaths(workers: Sequence[_Child], within_s: float) -> None:
    """Wait until the workers of a dead forkserver, which the kernel kills, are dead: a replacement must not meet its predecessor."""
    deadline = time.monotonic() + within_s
    for child in workers:
        child.read_reports()
        if child.pid is not None:
            kill_group(child.pid)  # also processes that the worker has started
    with selectors.DefaultSelector() as selector:
        for child in workers:
            selector.register(child.report, selectors.EVENT_READ, child)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if not key.data.read_reports():
                    selector.unregister(key.fileobj)


def _describe_status(status: int | None) -> str:
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
    except FileNotFoundError:  # it was removed
        return None


def _sys_path() -> list[str]:
    return [entry for entry in sys.path if isinstance(entry, str)]


# -- pickling ----------------------------------------------------------------------------------------------------------


def _pack_payload(
    environment: WorkerEnvironment, target: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Write everything a worker needs to an anonymous file, which every replacement reads again."""
    head = pickle.dumps(environment)
    fd = forkserver.anonymous_file()
    with contextlib.ExitStack() as undo, open(fd, "wb", closefd=False) as file:
        undo.callback(os.close, fd)
        file.write(forkserver.LENGTH.pack(len(head)) + head)
        if (error := _pickle_error((target, args, kwargs), file)) is not None:
            parts = [("the target", target), *((f"argument {i}", value) for i, value in enumerate(args, 1)), *kwargs.items()]
            raise UsageError(
                f"{_find_unpicklable(parts) or 'An argument'} cannot be sent to the worker {environment.name!r}: {error}",
                "Make it inside the worker, from plain values.",
            ) from error
        undo.pop_all()
    return fd


def describe_unpicklable(name: str, value: Any) -> str | None:
    """Describe which part of a value cannot be pickled, and why; None: all of it can."""
    error = _pickle_error(value)
    return None if error is None else f"{_find_unpicklable([(name, value)])} ({error})"


def _pickle_error(value: Any, file: IO[bytes] | None = None) -> Exception | None:
    """Pickle a value to `file` or to nowhere; returns the error, if any."""
    try:
        cloudpickle.dump(value, file or io.BytesIO())
    except Exception as error:  # whatever a user's __reduce__ raises
        return error
    return None


def _find_unpicklable(parts: Iterable[tuple[str, Any]], depth: int = 4) -> str | None:
    """The innermost of `parts` that cannot be pickled."""
    for label, value in parts:
        if _pickle_error(value) is not None:
            inner = _find_unpicklable(_subvalues(label, value), depth - 1) if depth else None
            return inner or f"{label} (of type {type(value).__qualname__})"
    return None


def _subvalues(label: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{label}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{label}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, FunctionType):
        with contextlib.suppress(ValueError):  # a closure variable without a value
            used = inspect.getclosurevars(value)
            yield from ((f"{name!r}, used by {label},", item) for name, item in {**used.nonlocals, **used.globals}.items())
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from ((f"{label}.{name}", item) for name, item in vars(value).items())
