"""The process that forks workers, and the start of a worker. `supervisor.py` starts it and is its only client.

It is a fresh interpreter with the heavy modules imported and a single thread, so that forking it is safe and cheap. It watches its
control socket: at end of file it kills the workers and exits.

    supervisor ──SPAWN(id, incarnation) + descriptors, SIGNAL(id)───────────▶ forkserver ──fork──▶ worker
               ◀──HELLO, EXIT(id, status), NO_FORK(id, errno)──────────────             │
               ◀──a pipe: one JSON object per line: pid, ready, terminated, error───────┤
               ◀──a shared page: time of the worker's last heartbeat────────────────────┘
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import gc
import importlib
import logging
import mmap
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ludus.io import json_lines
from ludus.process import children, procfs, temp_dirs
from ludus.process.signals import SignalQueue

log = logging.getLogger(__name__)

MESSAGE = struct.Struct("<iiiq")
"""kind, argument, number of attached descriptors, id of the incarnation."""

SPAWN, SIGNAL, HELLO, EXIT, NO_FORK = range(5)

BEAT = struct.Struct("d")
PAGE_BYTES = BEAT.size
"""The shared page holds one float: `time.monotonic()` of the last heartbeat, a clock that all processes of a machine share."""

MAX_FDS = 253
"""Limit of Linux for descriptors in one message (SCM_MAX_FD)."""

OWN_FDS = 3
"""The first descriptors of a SPAWN message: payload, page, report."""

LOG_BYTES = 5_000_000
LOG_BACKUPS = 3
LOG_CHECK_S = 10.0
"""A log that exceeds LOG_BYTES is rotated, at the start of a worker and every LOG_CHECK_S; LOG_BACKUPS old files are kept."""

ERROR_CHARACTERS = 32_000
LENGTH = struct.Struct("<q")

_BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Blocked in the forkserver, which ends only with its control socket; a worker unblocks them after setting its handlers."""


def anonymous_file() -> int:
    """Return a descriptor of a file without a name."""
    if sys.platform == "linux":
        return os.memfd_create("ludus")
    else:  # noqa: RET505 - mypy narrows the platform in this form only
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def send_report(report: int, **message: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and this process will be killed
        json_lines.write(report, message)


@dataclass(frozen=True)
class WorkerEnvironment:
    """Environment of a worker: that of the supervisor's process at the call of `start`."""

    name: str
    log_path: Path | None
    cwd: str | None
    environ: dict[str, str]
    sys_path: list[str]
    argv: list[str]


class Context:
    """State of a worker process; the first argument of its target."""

    def __init__(
        self, name: str, incarnation: int, fds: tuple[int, ...], log_path: Path | None, *, page: int, report: int
    ) -> None:
        self.name, self.incarnation, self.fds, self.log_path = name, incarnation, fds, log_path
        self._beats = memoryview(mmap.mmap(page, PAGE_BYTES)).cast("d")
        self._report = report
        self._stopping = self._ready = False
        self._callbacks: list[Callable[[], object]] = []

    def ready(self) -> None:
        """Report that this worker is ready; from now on its heartbeat is monitored. Idempotent."""
        self.beat()
        if not self._ready:
            self._ready = True
            send_report(self._report, ready=True)

    def beat(self) -> None:
        """Record a heartbeat: a store into a shared page, about 0.15 µs."""
        self._beats[0] = time.monotonic()

    @property
    def stopping(self) -> bool:
        """Whether SIGTERM has arrived."""
        return self._stopping

    def on_stop(self, callback: Callable[[], object]) -> None:
        """Run `callback` in the main thread, inside the signal handler, on the first SIGTERM; now, if that has arrived already.

        For an event loop: `on_stop(lambda: loop.call_soon_threadsafe(stop))`. Without any callback SIGTERM raises
        SystemExit(0) in the main thread.
        """
        self._callbacks.append(callback)
        if self._stopping:
            callback()

    def _on_sigterm(self, number: int, frame: object) -> None:
        if self._stopping:
            return
        self._stopping = True
        send_report(self._report, terminated=True)
        if not self._callbacks:
            raise SystemExit(0)
        for callback in self._callbacks:
            callback()


@dataclass(frozen=True)
class SpawnedWorker:
    """Message and descriptors that a forked process starts from."""

    incarnation: int
    payload: int
    page: int
    report: int
    fds: tuple[int, ...]


# -- in the worker ------------------------------------------------------------------------------------------------------


def run(spawned: SpawnedWorker) -> NoReturn:
    """Run the worker and exit this process."""
    code, orderly = 1, False
    try:
        send_report(spawned.report, pid=os.getpid())
        _run_target(spawned)
        code, orderly = 0, True
    except SystemExit as end:
        code, orderly = _exit_code(end, spawned.report), True
    except BaseException as error:  # any error of the target must reach the supervisor and the log
        text = _traceback(error)
        send_report(spawned.report, error=text[-ERROR_CHARACTERS:])
        _write_to_stderr(text)
    _exit_process(code, orderly)


def _run_target(spawned: SpawnedWorker) -> None:
    with mmap.mmap(spawned.payload, 0, access=mmap.ACCESS_READ) as payload, memoryview(payload) as content:
        middle = LENGTH.size + LENGTH.unpack(content[: LENGTH.size])[0]
        environment: WorkerEnvironment = pickle.loads(content[LENGTH.size : middle])  # noqa: S301 - written by our own supervisor
        context = Context(
            environment.name, spawned.incarnation, spawned.fds, environment.log_path, page=spawned.page, report=spawned.report
        )
        _handle_signals(context)
        _apply_environment(environment)
        _log_to_stderr(environment.name)
        _reseed()
        target, args, kwargs = pickle.loads(content[middle:])  # noqa: S301 - likewise; needs sys.path
    os.close(spawned.payload)
    os.close(spawned.page)
    gc.enable()
    target(context, *args, **kwargs)


def _handle_signals(context: Context) -> None:
    signal.signal(signal.SIGTERM, context._on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which stops its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)


def _apply_environment(environment: WorkerEnvironment) -> None:
    if environment.log_path is not None:
        _log_output_to(environment.log_path)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr] # a kill must not eat lines
    if sys.stderr is not None:
        faulthandler.enable()
    kept = os.environ.get("OMP_WAIT_POLICY", "")
    os.environ.clear()
    os.environ.update({"OMP_WAIT_POLICY": kept} | environment.environ)
    sys.path[:], sys.argv[:] = environment.sys_path, environment.argv
    importlib.invalidate_caches()
    if environment.cwd is not None:
        os.chdir(environment.cwd)
    children.set_name(environment.name)


def _log_output_to(path: Path) -> None:
    """Append standard output and error to a log of limited size."""
    path = path.absolute()  # the worker may change its directory
    rotate(path)
    _redirect_output(path)
    threading.Thread(target=_rotate_periodically, args=(path,), name="ludus-log", daemon=True).start()


def _redirect_output(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def rotate(path: Path) -> bool:
    """Rename a log above LOG_BYTES to `.1`, `.1` to `.2` and so on; returns whether it did."""
    if not path.exists() or path.stat().st_size <= LOG_BYTES:
        return False
    for number in range(LOG_BACKUPS - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}.{number}", f"{path}.{number + 1}")
    os.replace(path, f"{path}.1")
    return True


def _rotate_periodically(path: Path) -> None:
    """Rotate the log periodically. Output between the rename and the reopening goes to the old file: nothing is lost."""
    while True:
        time.sleep(LOG_CHECK_S)
        with contextlib.suppress(OSError):  # disk full, or directory removed: the worker goes on
            if rotate(path):
                _redirect_output(path)


def _log_to_stderr(name: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{name.replace('%', '%%')}] %(name)s: %(message)s"))
    ours = logging.getLogger("ludus")
    ours.handlers[:] = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False


def _reseed() -> None:
    """Seed the generators that a fork would copy; `random` reseeds itself."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int.from_bytes(os.urandom(7), "little"))


def _traceback(error: BaseException) -> str:
    """Format the error without the frames of this file at the top."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _exit_code(end: SystemExit, report: int) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    send_report(report, error=str(end.code)[-ERROR_CHARACTERS:])
    _write_to_stderr(f"{end.code}\n")
    return 1


def _write_to_stderr(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # disk full, or closed by the target
            sys.stderr.write(text)


def _exit_process(code: int, orderly: bool) -> NoReturn:
    """Exit like the interpreter but without tearing down modules, which is slow with large libraries and known to crash.

    After an exception, threads are not joined: the worker is to be replaced at once.
    """
    try:
        if orderly:
            threading._shutdown()  # type: ignore[attr-defined] # joins non-daemon threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:  # also after SIGTERM or with a full disk
        os._exit(code)


def die_with_forkserver(forkserver: int, lifeline: int | None) -> None:
    """Have this process killed when the forkserver ends, for whatever reason."""
    if sys.platform != "linux" and lifeline is not None:
        threading.Thread(target=kill_at_end_of_file, args=(lifeline,), name="lifeline", daemon=True).start()
    children.die_with_parent(forkserver, signal.SIGKILL)


def kill_at_end_of_file(lifeline: int) -> None:
    """Kill this process when all write ends of the pipe are closed."""
    while os.read(lifeline, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


# -- in the forkserver --------------------------------------------------------------------------------------------------


class ForkServer:
    """Forks on request, reports deaths, and kills its workers when the supervisor's process is gone."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control, self._parent, self._pid = control, parent, os.getpid()
        self._ids: dict[int, int] = {}  # PID → id of the incarnation
        self._deaths = SignalQueue(signal.SIGCHLD)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._deaths, selectors.EVENT_READ)
        self._parent_fd: int | None = None
        self._lifeline: tuple[int, int] | None = None
        if sys.platform == "linux":
            # A fork of the parent without exec may hold a copy of the control socket: watch the parent process as well.
            with contextlib.suppress(OSError):  # not supported by this kernel
                self._parent_fd = os.pidfd_open(parent)
                self._selector.register(self._parent_fd, selectors.EVENT_READ)
        else:
            self._lifeline = os.pipe()

    def serve(self) -> SpawnedWorker:
        """Run the forkserver. Returns only in forked processes, with what they need."""
        if os.getppid() != self._parent:
            self._kill_workers_and_exit()
        self._send(HELLO)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._deaths:
                    self._reap()
                elif key.fileobj is self._control:
                    spawned = self._handle_request()
                    if spawned is not None:
                        return spawned
                else:
                    self._kill_workers_and_exit()

    def _handle_request(self) -> SpawnedWorker | None:
        try:
            message, fds, _, _ = socket.recv_fds(self._control, MESSAGE.size, MAX_FDS)
        except ConnectionResetError:
            self._kill_workers_and_exit()
        if len(message) < MESSAGE.size:  # a message this small arrives whole or not at all
            self._kill_workers_and_exit()
        for fd in fds:  # programs that a worker executes must not inherit them
            os.set_inheritable(fd, False)
        kind, argument, expected, child_id = MESSAGE.unpack(message)
        if kind == SPAWN:
            return self._spawn(child_id, argument, expected, fds)
        for pid, known in self._ids.items():
            if known == child_id:
                _signal(pid, argument)
        return None

    def _spawn(self, child_id: int, incarnation: int, expected: int, fds: list[int]) -> SpawnedWorker | None:
        problem = errno.EMFILE if len(fds) != expected else 0
        pid = -1
        if not problem:
            try:
                pid = os.fork()
            except OSError as error:
                problem = error.errno or errno.EAGAIN
        if pid == 0:
            self._detach_from_forkserver()
            payload, page, report = fds[:OWN_FDS]
            return SpawnedWorker(incarnation, payload, page, report, tuple(fds[OWN_FDS:]))
        for fd in fds:
            os.close(fd)
        if problem:
            self._send(NO_FORK, problem, child_id)
        else:
            self._ids[pid] = child_id
            with contextlib.suppress(OSError):  # the worker does it too; one of the two is first
                os.setpgid(pid, pid)
        return None

    def _detach_from_forkserver(self) -> None:
        """In a forked process: release everything of the forkserver, above all its ends of sockets."""
        # A new process group: what a worker starts can be ended with it, and Ctrl-C at a terminal reaches neither.
        os.setpgid(0, 0)
        die_with_forkserver(self._pid, self._lifeline[0] if self._lifeline else None)
        self._selector.close()
        self._deaths.close()
        self._control.close()
        for fd in (self._parent_fd, self._lifeline[1] if self._lifeline else None):
            if fd is not None:
                os.close(fd)

    def _reap(self) -> None:
        self._deaths.take()
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                child_id = self._ids.pop(pid, None)
                if child_id is not None:
                    children.kill_group(pid)  # processes that the worker left behind
                    self._send(EXIT, os.waitstatus_to_exitcode(status), child_id)

    def _send(self, kind: int, argument: int = 0, child_id: int = 0) -> None:
        try:
            self._control.sendall(MESSAGE.pack(kind, argument, 0, child_id))
        except OSError:
            self._kill_workers_and_exit()

    def _kill_workers_and_exit(self) -> NoReturn:
        deadline = time.monotonic() + 1.0
        for pid in self._ids:
            _signal(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # all have ended
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.002)
        # Killed workers could not remove their shared memory, and their parent may be dead as well.
        with contextlib.suppress(OSError):
            temp_dirs.sweep_all()
        os._exit(0)


def _signal(pid: int, number: int) -> None:
    """Send SIGKILL to the worker and its process group, every other signal to the worker alone, which then stops in order."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
    if number == signal.SIGKILL:
        children.kill_group(pid)


def _import_modules(names: Sequence[str], parent: int) -> None:
    for name in names:
        if os.getppid() != parent:
            os._exit(0)
        try:
            importlib.import_module(name)
        except ImportError as error:
            log.debug("%s is not preloaded: %s", name, error)
        except Exception as error:  # a user's module may raise anything; workers that need it report the error
            log.warning("%s is not preloaded: %s", name, error)


def _stop_blas_threads() -> None:
    """Fork once to end the threads that OpenBLAS starts at the import of numpy: it stops them before a fork."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    if (count := len(procfs.list_thread_names())) > 1:
        log.warning("a preloaded module runs %d threads; workers forked from this process may hang", count - 1)


def main(control: int, parent: int, preload: Sequence[str]) -> NoReturn:
    """Program of the forkserver. `control`: the inherited end of the socket to the process `parent`."""
    # Handlers and masks survive exec: what the parent ignored or blocked must not affect the workers.
    signal.pthread_sigmask(signal.SIG_SETMASK, _BLOCKED_SIGNALS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.set_inheritable(control, False)
    gc.disable()  # a collection would copy pages that workers share
    _import_modules(preload, parent)
    _stop_blas_threads()
    gc.collect()
    gc.freeze()
    run(ForkServer(socket.socket(fileno=control), parent).serve())
