"""The process that forks workers, and what a worker does first. `processes.py` starts it and is its only client.

It is a fresh interpreter with the heavy modules imported, and it has one thread, so that a fork of it is safe and cheap. Its
control socket is its lifeline: when the other end is gone, so are the workers and it.

    supervisor ──SPAWN(number, incarnation) + descriptors, SIGNAL(number)──▶ forkserver ──fork──▶ worker
               ◀──HELLO, EXIT(number, status), NO_FORK(number, errno)──────             │
               ◀──a pipe: one JSON object per line: pid, ready, terminated, error───────┤
               ◀──a shared page: when the worker's loop last turned─────────────────────┘
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
from ludus.process import identity, procfs, temp_dirs
from ludus.process.signals import SignalQueue

log = logging.getLogger(__name__)

MESSAGE = struct.Struct("<iiiq")
"""kind, argument, descriptors that come along, number of the life it is about."""

SPAWN, SIGNAL, HELLO, EXIT, NO_FORK = range(5)

BEAT = struct.Struct("d")
PAGE_BYTES = BEAT.size
"""The shared page holds one float: `time.monotonic()` of the last beat, a clock that all processes of a machine share."""

MAX_FDS = 253
"""Descriptors that Linux carries in one message (SCM_MAX_FD)."""

OWN_FDS = 3
"""The first descriptors of a SPAWN are ours: payload, page, report."""

LOG_BYTES = 5_000_000
LOG_BACKUPS = 3
LOG_LOOK_S = 10.0
"""A log that has grown beyond LOG_BYTES is put aside, at the start of a worker and while it lives; so many old ones are kept."""

ERROR_CHARACTERS = 32_000
LENGTH = struct.Struct("<q")

_HELD_BACK = (signal.SIGTERM, signal.SIGINT)
"""Blocked in the forkserver, which ends by its lifeline alone; a worker opens them once it can handle them."""


def anonymous_file() -> int:
    """A descriptor of a file without a name, gone with its last descriptor."""
    if sys.platform == "linux":
        return os.memfd_create("ludus")
    else:  # noqa: RET505 - the type checker follows a choice of platform in this form only
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def tell(report: int, **message: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and this process is about to be
        json_lines.write(report, message)


@dataclass(frozen=True)
class Place:
    """Where a worker is to find itself: as the supervisor's process was at the moment of start()."""

    name: str
    log_path: Path | None
    cwd: str | None
    environ: dict[str, str]
    sys_path: list[str]
    argv: list[str]


class Context:
    """What a worker knows about itself; the first argument of its target."""

    def __init__(
        self, name: str, incarnation: int, fds: tuple[int, ...], log_path: Path | None, *, page: int, report: int
    ) -> None:
        self.name, self.incarnation, self.fds, self.log_path = name, incarnation, fds, log_path
        self._beats = memoryview(mmap.mmap(page, PAGE_BYTES)).cast("d")
        self._report = report
        self._stopping = self._ready = False
        self._callbacks: list[Callable[[], object]] = []

    def ready(self) -> None:
        """Say that this worker serves now; from here on its beats are watched. Again: no effect."""
        self.beat()
        if not self._ready:
            self._ready = True
            tell(self._report, ready=True)

    def beat(self) -> None:
        """Say that the loop turns. A store into a shared page, about 0.15 µs."""
        self._beats[0] = time.monotonic()

    @property
    def stopping(self) -> bool:
        """SIGTERM came."""
        return self._stopping

    def on_stop(self, callback: Callable[[], object]) -> None:
        """`callback` runs in the main thread, inside the signal handler, on the first SIGTERM; now, if that came already.

        An event loop is told by `on_stop(lambda: loop.call_soon_threadsafe(stop))`. Without any callback SIGTERM raises
        SystemExit(0) in the main thread.
        """
        self._callbacks.append(callback)
        if self._stopping:
            callback()

    def _terminated(self, number: int, frame: object) -> None:
        if self._stopping:
            return
        self._stopping = True
        tell(self._report, terminated=True)
        if not self._callbacks:
            raise SystemExit(0)
        for callback in self._callbacks:
            callback()


@dataclass(frozen=True)
class Job:
    """What a forked process has in its hands."""

    incarnation: int
    payload: int
    page: int
    report: int
    fds: tuple[int, ...]


# ---------------------------------------------------------------- in the worker


def run(job: Job) -> NoReturn:
    """Be the worker; ends this process."""
    code, orderly = 1, False
    try:
        tell(job.report, pid=os.getpid())
        _work(job)
        code, orderly = 0, True
    except SystemExit as end:
        code, orderly = _exit_code(end, job.report), True
    except BaseException as error:  # whatever the target raises has to reach the supervisor and the log
        text = _traceback(error)
        tell(job.report, error=text[-ERROR_CHARACTERS:])
        _complain(text)
    _leave(code, orderly)


def _work(job: Job) -> None:
    with mmap.mmap(job.payload, 0, access=mmap.ACCESS_READ) as payload, memoryview(payload) as content:
        middle = LENGTH.size + LENGTH.unpack(content[: LENGTH.size])[0]
        place: Place = pickle.loads(content[LENGTH.size : middle])  # noqa: S301 - written by our own supervisor
        context = Context(place.name, job.incarnation, job.fds, place.log_path, page=job.page, report=job.report)
        _handle_signals(context)
        _move_to(place)
        _log_to_stderr(place.name)
        _reseed()
        target, args, kwargs = pickle.loads(content[middle:])  # noqa: S301 - likewise; after sys.path is in place
    os.close(job.payload)
    os.close(job.page)
    gc.enable()
    target(context, *args, **kwargs)


def _handle_signals(context: Context) -> None:
    signal.signal(signal.SIGTERM, context._terminated)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which stops us in order
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)


def _move_to(place: Place) -> None:
    if place.log_path is not None:
        _append_output_to(place.log_path)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr] # a kill must not eat lines
    if sys.stderr is not None:
        faulthandler.enable()
    kept = os.environ.get("OMP_WAIT_POLICY", "")
    os.environ.clear()
    os.environ.update({"OMP_WAIT_POLICY": kept} | place.environ)
    sys.path[:], sys.argv[:] = place.sys_path, place.argv
    importlib.invalidate_caches()
    if place.cwd is not None:
        os.chdir(place.cwd)
    identity.set_name(place.name)


def _append_output_to(path: Path) -> None:
    """Standard output and error go to the end of `path`, which is kept from growing without end."""
    path = path.absolute()  # the worker may move
    rotate(path)
    _redirect_output(path)
    threading.Thread(target=_keep_small, args=(path,), name="ludus-log", daemon=True).start()


def _redirect_output(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def rotate(path: Path) -> bool:
    """Put a log aside that has grown large: it becomes `.1`, what was `.1` becomes `.2`, the oldest goes. True when it did."""
    if not path.exists() or path.stat().st_size <= LOG_BYTES:
        return False
    for number in range(LOG_BACKUPS - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}.{number}", f"{path}.{number + 1}")
    os.replace(path, f"{path}.1")
    return True


def _keep_small(path: Path) -> None:
    """What is written between putting the log aside and opening the next one lands in the former: nothing is lost."""
    while True:
        time.sleep(LOG_LOOK_S)
        with contextlib.suppress(OSError):  # the disk is full, or the directory was removed: the worker has better things to do
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
    """A fork copies the state of generators; `random` reseeds itself, the others are told to."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int.from_bytes(os.urandom(7), "little"))


def _traceback(error: BaseException) -> str:
    """Without the frames of this file at its top, which say nothing about the error."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _exit_code(end: SystemExit, report: int) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    tell(report, error=str(end.code)[-ERROR_CHARACTERS:])
    _complain(f"{end.code}\n")
    return 1


def _complain(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # the disk is full, or the target has closed it
            sys.stderr.write(text)


def _leave(code: int, orderly: bool) -> NoReturn:
    """What an interpreter does at its end, except taking itself apart: slow with large libraries, and known to crash there.

    After an exception threads are not waited for: the worker is to be replaced, not to linger half alive.
    """
    try:
        if orderly:
            threading._shutdown()  # type: ignore[attr-defined] # joins what is not a daemon
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:  # whatever comes in between, SIGTERM or a full disk
        os._exit(code)


def end_with_forkserver(forkserver: int, lifeline: int | None) -> None:
    """From now on this process is killed when the forkserver is gone, however that happened."""
    if sys.platform != "linux" and lifeline is not None:
        threading.Thread(target=watch, args=(lifeline,), name="lifeline", daemon=True).start()
    identity.die_with_parent(forkserver, signal.SIGKILL)


def watch(lifeline: int) -> None:
    """Wait until nobody holds the other end of this pipe, then die at once."""
    while os.read(lifeline, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------- in the forkserver


class ForkServer:
    """Forks on request, reports deaths, and kills its workers when the supervisor's process is gone."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control, self._parent, self._pid = control, parent, os.getpid()
        self._numbers: dict[int, int] = {}  # pid → number of the life it lives
        self._deaths = SignalQueue(signal.SIGCHLD)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._deaths, selectors.EVENT_READ)
        self._parent_fd: int | None = None
        self._lifeline: tuple[int, int] | None = None
        if sys.platform == "linux":
            # A second sign of the parent's end: what the parent forked without exec may hold a copy of the control socket.
            with contextlib.suppress(OSError):  # an old or simulated kernel
                self._parent_fd = os.pidfd_open(parent)
                self._selector.register(self._parent_fd, selectors.EVENT_READ)
        else:
            self._lifeline = os.pipe()

    def serve(self) -> Job:
        """Returns in each forked process, with its job. The forkserver itself stays inside until its end."""
        if os.getppid() != self._parent:
            self._end()
        self._send(HELLO)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._deaths:
                    self._reap()
                elif key.fileobj is self._control:
                    job = self._obey()
                    if job is not None:
                        return job
                else:
                    self._end()

    def _obey(self) -> Job | None:
        try:
            message, fds, _, _ = socket.recv_fds(self._control, MESSAGE.size, MAX_FDS)
        except ConnectionResetError:
            self._end()
        if len(message) < MESSAGE.size:  # so small a message arrives whole or not at all
            self._end()
        for fd in fds:  # received ones would leak into every program that a worker executes
            os.set_inheritable(fd, False)
        kind, argument, expected, number = MESSAGE.unpack(message)
        if kind == SPAWN:
            return self._spawn(number, argument, expected, fds)
        for pid, known in self._numbers.items():
            if known == number:
                _signal(pid, argument)
        return None

    def _spawn(self, number: int, incarnation: int, expected: int, fds: list[int]) -> Job | None:
        problem = errno.EMFILE if len(fds) != expected else 0
        pid = -1
        if not problem:
            try:
                pid = os.fork()
            except OSError as error:
                problem = error.errno or errno.EAGAIN
        if pid == 0:
            self._let_go()
            payload, page, report = fds[:OWN_FDS]
            return Job(incarnation, payload, page, report, tuple(fds[OWN_FDS:]))
        for fd in fds:
            os.close(fd)
        if problem:
            self._send(NO_FORK, problem, number)
        else:
            self._numbers[pid] = number
            with contextlib.suppress(OSError):  # the worker does it too; whoever comes first
                os.setpgid(pid, pid)
        return None

    def _let_go(self) -> None:
        """In a forked process: keep nothing of the forkserver, above all no end of its socket."""
        # A group of its own: what a worker starts can be ended with it, and Ctrl-C at a terminal reaches neither.
        os.setpgid(0, 0)
        end_with_forkserver(self._pid, self._lifeline[0] if self._lifeline else None)
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
                number = self._numbers.pop(pid, None)
                if number is not None:
                    _kill_group(pid)  # what it has left behind
                    self._send(EXIT, os.waitstatus_to_exitcode(status), number)

    def _send(self, kind: int, argument: int = 0, number: int = 0) -> None:
        try:
            self._control.sendall(MESSAGE.pack(kind, argument, 0, number))
        except OSError:
            self._end()

    def _end(self) -> NoReturn:
        deadline = time.monotonic() + 1.0
        for pid in self._numbers:
            _signal(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # they are gone
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.002)
        # A process that was killed could not remove its shared memory, and its parent may be dead as well.
        with contextlib.suppress(OSError):
            temp_dirs.sweep_all()
        os._exit(0)


def _signal(pid: int, number: int) -> None:
    """SIGKILL is also for what the worker has started, every other signal for the worker alone, who is to stop in order."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
    if number == signal.SIGKILL:
        _kill_group(pid)


def _kill_group(pid: int) -> None:
    """A number stays taken as long as a group bears it, so this cannot hit somebody else's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _import(names: Sequence[str], parent: int) -> None:
    for name in names:
        if os.getppid() != parent:
            os._exit(0)
        try:
            importlib.import_module(name)
        except ImportError as error:
            log.debug("%s is not preloaded: %s", name, error)
        except Exception as error:  # a module of the user's; the workers that need it will see its error
            log.warning("%s is not preloaded: %s", name, error)


def _be_alone() -> None:
    """OpenBLAS starts threads when numpy is imported, and stops them before any fork: one fork, and they are gone."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    if (count := len(procfs.list_thread_names())) > 1:
        log.warning("a preloaded module runs %d threads; forking beside them may hang workers", count - 1)


def main(control: int, parent: int, preload: Sequence[str]) -> NoReturn:
    """`control` is the inherited end of the socket to the process `parent`."""
    # Handlers and masks outlive exec: what the parent ignored or blocked must not reach the workers.
    signal.pthread_sigmask(signal.SIG_SETMASK, _HELD_BACK)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.set_inheritable(control, False)
    gc.disable()  # a collection in between would leave holes in pages that workers share
    _import(preload, parent)
    _be_alone()
    gc.collect()
    gc.freeze()
    run(ForkServer(socket.socket(fileno=control), parent).serve())
