"""Every exception that Ludus raises on purpose.

    LudusError
    ├── UsageError                 the caller asked for something that cannot be (exit code 2)
    │   ├── ConfigError            a key, value or combination in a config is wrong
    │   ├── UnknownName            no environment, algorithm, backend … of that name
    │   ├── MissingExtra           the feature needs a package that is not installed
    │   └── Untrusted              stored data names code that the user did not name and that is not theirs
    ├── EnvironmentFault           the user's environment raised, or returned something unusable
    ├── TrainingDiverged           a loss or gradient became NaN or infinite
    ├── StoreError                 durable bytes could not be read or written
    │   ├── NotFound
    │   ├── AlreadyExists
    │   ├── Damaged                the bytes are there and are not what was written
    │   ├── Fenced                 another process has taken this run over
    │   ├── StoreFull              no space left, or not allowed to write
    │   └── StoreUnavailable       it could not be reached, or refused for the moment; later it may not
    ├── MemoryClosed               the other side of a memory is gone
    ├── ExchangeUnavailable        the server between the machines of a fleet could not be reached
    ├── WorkerFailed               a process of ours died, or could not start
    ├── StartTimeout               no step was sampled within the time allowed for start-up
    ├── Refused                    a game's request was not served; it carries the status that the game sees
    ├── Unreachable                a game's request was not answered at all
    │   └── DeadlineMissed         or not by its deadline
    └── IncompatibleCheckpoint     a checkpoint of another environment, model or version

    Interrupted                    the run has to stop; outside the tree, and not an Exception

A message names the offending thing, its value and the remedy. All of them survive pickling, so they may cross a process.
"""

from __future__ import annotations

import errno
import sysconfig
import traceback
from pathlib import Path

_AWAY = {
    errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.EPIPE, errno.EAGAIN, errno.ENXIO, errno.ENODEV,
}  # fmt: skip


class Interrupted(BaseException):
    """Raised between two environment steps when a run has to stop. Not an Exception: an environment's `except` must not catch it."""


class LudusError(Exception):
    """Base of the tree; `hint` says what to do about it, in one sentence."""

    exit_code = 1
    final = False
    """A run that ends with it does not try again."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class UsageError(LudusError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class UnknownName(UsageError):
    pass


class MissingExtra(UsageError):
    pass


class Untrusted(UsageError):
    pass


class EnvironmentFault(LudusError):
    pass


class TrainingDiverged(LudusError):
    pass


class StoreError(LudusError):
    pass


class NotFound(StoreError):
    pass


class AlreadyExists(StoreError):
    pass


class Damaged(StoreError):
    pass


class Fenced(StoreError):
    pass


class StoreFull(StoreError):
    pass


class StoreUnavailable(StoreError):
    pass


class MemoryClosed(LudusError):
    pass


class ExchangeUnavailable(LudusError):
    pass


class WorkerFailed(LudusError):
    pass


class StartTimeout(LudusError):
    pass


class Refused(LudusError):
    """`error` is a word that a program can test for; `retry_after_s` is set when trying again may help.

    `last`, with the word `seq`: the number of the last request of this session that the server accepted.
    """

    def __init__(
        self,
        status: int,
        error: str,
        message: str,
        hint: str = "",
        retry_after_s: float | None = None,
        last: int | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.args = (status, error, message, hint, retry_after_s, last)
        self.status, self.error, self.retry_after_s, self.last = status, error, retry_after_s, last


class Unreachable(LudusError):
    """Nobody listens there, the connection broke, or it took too long: it is not known whether the request counted."""


class DeadlineMissed(Unreachable):
    """No answer to this tick by its deadline. The session goes on: the next tick may say something else."""


class IncompatibleCheckpoint(LudusError):
    exit_code = 2


def is_away(error: OSError) -> bool:
    """Whether a mount says this whose server cannot be reached. EIO may be a broken disk too; then it is said again and again."""
    return error.errno in _AWAY


_OURS = f"{Path(__file__).absolute().parent}/"
_LIBRARIES = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "purelib", "platlib"))


def place_of(error: BaseException) -> str:
    """` (game.py:12, in reset)`: the innermost line of the user's own code that an exception passed through.

    Without such a line, the innermost of another library. Empty when the call itself failed, as with wrong arguments.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({_relative(error.filename)}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [f for f in frames if not f.filename.startswith((_OURS, "<"))]
    own = [f for f in foreign if not f.filename.startswith(_LIBRARIES)]
    if not foreign:
        return ""
    at = (own or foreign)[-1]
    return f" ({_relative(at.filename)}:{at.lineno}, in {at.name})"


def _relative(filename: str) -> str:
    try:
        return filename.removeprefix(f"{Path.cwd()}/")
    except OSError:  # the working directory is gone
        return filename
