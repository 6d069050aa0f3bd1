"""Games as forks of a process that has imported their module: `Games(warm="my.game")`.

Imports take most of a game's start time and memory; a fork shares them. The module has a function
`main(argv: list[str]) -> int | None`, which runs one game and returns its exit code, and may have a function `prepare()`, which is
called once before the first game, to compile for instance. Neither the import nor `prepare` may leave a thread running: a fork has
only the forking thread, and locks that other threads held would stay locked.

A game gets a fresh environment, working directory, session, signal handlers and random seeds, and no descriptors except the standard
three and those that the module has opened. Values that the module or Python read only once are those of the import. Nothing runs
after `main`, not even `atexit` handlers, since those registered during the import are shared by all games.

Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol, TextIO

from ludus.process import children, procfs

ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""NumPy's linear algebra libraries start threads at import unless the environment forbids it."""

_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""Ignored by every Python process."""


class Closable(Protocol):
    def close(self) -> None: ...


class PreforkFailed(Exception):
    """Games cannot be forks of the module; the message is the reason."""


class PreforkModule:
    """The imported and prepared module. Raises PreforkFailed for any error of the module."""

    def __init__(self, name: str) -> None:
        before = _list_descriptors()
        try:
            module = importlib.import_module(name)
            main: Callable[[list[str]], object] | None = getattr(module, "main", None)
            if not callable(main):
                raise PreforkFailed(f"{name} has no function main(argv)")
            getattr(module, "prepare", lambda: None)()
        except PreforkFailed:
            raise
        except BaseException as error:  # user code: it may raise anything, even call sys.exit()
            traceback.print_exc()
            raise PreforkFailed(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        threads = _list_threads()
        if len(threads) > 1:
            raise PreforkFailed(
                f"{name} has started {len(threads) - 1} threads ({', '.join(threads)}), which a fork would not have"
            )
        self._module, self._main = module, main
        self._module_descriptors = _list_descriptors() - before
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else every fork would write the buffered text again

    def start(self, request: dict[str, Any], others: Iterable[Closable]) -> tuple[int, int]:
        """Fork a game; returns its PID and the read end of its output. `others`: objects to close in the fork.

        The game has its own session when this returns. Raises OSError if the request cannot be fulfilled.
        """
        guard = os.getpid()
        output, output_end = os.pipe()
        ready, ready_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(output)
            os.close(ready)
            self._run_in_fork(request, guard, output_end, ready_end, others)
        os.close(output_end)
        os.close(ready_end)
        with open(ready, "rb") as file:
            failure = file.read()  # ends when `main` begins, or the process has ended
        if failure:
            os.close(output)
            os.waitpid(pid, 0)
            raise OSError(*json.loads(failure))
        return pid, output

    # -- in the game's process

    def _run_in_fork(
        self, request: dict[str, Any], guard: int, output_end: int, ready_end: int, others: Iterable[Closable]
    ) -> NoReturn:
        code = 1
        try:
            try:
                os.setsid()
                children.die_with_parent(guard, signal.SIGKILL)
                for each in others:
                    each.close()
                _reset_signals()
                _redirect_streams(output_end)
                for descriptor in _list_descriptors() - self._module_descriptors - {0, 1, 2, ready_end}:
                    with contextlib.suppress(OSError):  # the descriptor of the listing itself
                        os.close(descriptor)
                self._apply_request(request)
            except (OSError, ValueError) as error:
                known = isinstance(error, OSError)
                failure = (error.errno, error.strerror, error.filename) if known else (0, str(error))  # type: ignore[union-attr]
                os.write(ready_end, json.dumps(failure).encode())
            else:
                os.close(ready_end)
                code = self._run_main(request["command"][1:])
        finally:
            os._exit(code)

    def _apply_request(self, request: dict[str, Any]) -> None:
        if request["directory"] is not None:
            os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv[:] = request["command"]
        sys.modules["__main__"] = self._module
        if "numpy.random" in sys.modules:  # `random` and numba reseed themselves after a fork
            sys.modules["numpy.random"].seed()
        children.set_name(request["name"])
        faulthandler.enable()

    def _run_main(self, arguments: list[str]) -> int:
        try:
            code = self._main(arguments)
        except SystemExit as end:
            code = end.code
        except BaseException:  # as the interpreter does
            traceback.print_exc()
            code = 1
        if code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
        with contextlib.suppress(OSError, ValueError):
            if "logging" in sys.modules:
                sys.modules["logging"].shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        return int(code or 0) & 0xFF


def _reset_signals() -> None:
    """Set the handlers of a fresh Python process."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # reserved by the C library
            signal.signal(number, signal.SIG_IGN if number in _IGNORED else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _redirect_streams(pipe: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number in (1, 2):
        os.dup2(pipe, number)
    # New streams: the module may have replaced them.
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), _open_line_buffered(1), _open_line_buffered(2)  # noqa: SIM115


def _open_line_buffered(number: int) -> TextIO:
    """Line-buffered, so that the last lines before a crash are not lost."""
    return open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def _list_descriptors() -> set[int]:
    return procfs.list_open_files() or set(range(os.sysconf("SC_OPEN_MAX")))


def _list_threads() -> list[str]:
    """Names of all threads in the kernel, or of Python threads where those cannot be listed."""
    return procfs.list_thread_names() or [thread.name for thread in threading.enumerate()]
