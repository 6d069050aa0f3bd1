"""A Python module that is imported once, and games that are forks of the process which has it: `Games(warm="my.game")`.

What takes a game longest to start, and most of its memory, is what it imports; a fork has that already, and shares it. The module
has a `main(argv: list[str]) -> int | None`, which is one game from its start to its exit code, and may have a `prepare()`, which is
called once, before the first game: to compile what is to be compiled. Neither the import nor `prepare` may leave a thread running:
a fork has none but the one that forked, and whatever lock another held would be held for ever.

A game finds all as if it had been started afresh: its environment, directory, session, signals, random numbers, and no descriptor
but the usual three and those that the module itself has opened. Only what the module, or Python, reads but once is as it was then.
After `main` nothing else is run, no `atexit` either, since what is registered there while the module is imported is all games'.

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

from ludus.process import identity, procfs

ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""NumPy's linear algebra starts threads as soon as it is imported, unless its environment forbids it."""

_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""By every Python."""


class Closable(Protocol):
    def close(self) -> None: ...


class CannotBeWarm(Exception):
    """The module is not one that games can be forks of; the message is what the owner is told."""


class Warm:
    """The module, imported and prepared. Raises CannotBeWarm, whatever the module does."""

    def __init__(self, name: str) -> None:
        before = _descriptors()
        try:
            module = importlib.import_module(name)
            main: Callable[[list[str]], object] | None = getattr(module, "main", None)
            if not callable(main):
                raise CannotBeWarm(f"{name} has no function main(argv)")
            getattr(module, "prepare", lambda: None)()
        except CannotBeWarm:
            raise
        except BaseException as error:  # of a module that anyone may have written, sys.exit() included
            traceback.print_exc()
            raise CannotBeWarm(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        threads = _threads()
        if len(threads) > 1:
            raise CannotBeWarm(
                f"{name} has started {len(threads) - 1} threads ({', '.join(threads)}), which a fork would not have"
            )
        self._module, self._main = module, main
        self._its_own = _descriptors() - before
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else every game would say it once more

    def start(self, order: dict[str, Any], strange: Iterable[Closable]) -> tuple[int, int]:
        """Fork a game: its process, and where to read what it says. `strange`: what is open here and not for it.

        It has a session of its own when this returns. Raises OSError when it could not be given what was ordered.
        """
        guard = os.getpid()
        said, says = os.pipe()
        ready, readies = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(said)
            os.close(ready)
            self._become(order, guard, says, readies, strange)
        os.close(says)
        os.close(readies)
        with open(ready, "rb") as file:
            failure = file.read()  # ends when `main` begins, or the process is gone
        if failure:
            os.close(said)
            os.waitpid(pid, 0)
            raise OSError(*json.loads(failure))
        return pid, said

    # -- in the game's process

    def _become(self, order: dict[str, Any], guard: int, says: int, readies: int, strange: Iterable[Closable]) -> NoReturn:
        code = 1
        try:
            try:
                os.setsid()
                identity.die_with_parent(guard, signal.SIGKILL)
                for each in strange:
                    each.close()
                _reset_signals()
                _speak_to(says)
                for descriptor in _descriptors() - self._its_own - {0, 1, 2, readies}:
                    with contextlib.suppress(OSError):  # the one that the list was read with
                        os.close(descriptor)
                self._set_up(order)
            except (OSError, ValueError) as error:
                known = isinstance(error, OSError)
                failure = (error.errno, error.strerror, error.filename) if known else (0, str(error))  # type: ignore[union-attr]
                os.write(readies, json.dumps(failure).encode())
            else:
                os.close(readies)
                code = self._play(order["command"][1:])
        finally:
            os._exit(code)

    def _set_up(self, order: dict[str, Any]) -> None:
        if order["directory"] is not None:
            os.chdir(order["directory"])
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv[:] = order["command"]
        sys.modules["__main__"] = self._module
        if "numpy.random" in sys.modules:  # `random` and numba do so themselves
            sys.modules["numpy.random"].seed()
        identity.set_name(order["name"])
        faulthandler.enable()

    def _play(self, arguments: list[str]) -> int:
        try:
            code = self._main(arguments)
        except SystemExit as end:
            code = end.code
        except BaseException:  # as the interpreter would, with what is left to say
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
    """As a Python that has just been started."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # those that the C library keeps for itself
            signal.signal(number, signal.SIG_IGN if number in _IGNORED else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _speak_to(pipe: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number in (1, 2):
        os.dup2(pipe, number)
    # Not what the module may have put there.
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), _lines_to(1), _lines_to(2)  # noqa: SIM115


def _lines_to(number: int) -> TextIO:
    """One at a time: the last that a game said is what one wants to read."""
    return open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def _descriptors() -> set[int]:
    return procfs.list_open_files() or set(range(os.sysconf("SC_OPEN_MAX")))


def _threads() -> list[str]:
    """Their names: those of the kernel, where it lists them."""
    return procfs.list_thread_names() or [thread.name for thread in threading.enumerate()]
