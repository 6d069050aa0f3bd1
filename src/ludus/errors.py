"""Every exception that Ludus raises on purpose.

    LudusError
    ├── UsageError                 the caller's input is invalid (exit code 2)
    │   ├── ConfigError            a key, value or combination in a config is wrong
    │   ├── UnknownName            no environment, algorithm, backend … of that name
    │   ├── MissingExtra           the feature needs a package that is not installed
    │   └── Untrusted              stored data names code that is neither given by the user nor in their project
    ├── EnvironmentFault           the user's environment raised, or returned an invalid value
    ├── TrainingDiverged           a loss or gradient became NaN or infinite
    ├── StoreError                 durable bytes could not be read or written
    │   ├── NotFound
    │   ├── AlreadyExists
    │   ├── Damaged                the stored bytes are corrupt
    │   ├── Fenced                 another process has taken over this run
    │   ├── StoreFull              no space left, or no permission to write
    │   └── StoreUnavailable       the store could not be reached; a retry may succeed
    ├── MemoryClosed               the other end of a memory is closed
    ├── ExchangeUnavailable        the message server of a fleet could not be reached
    ├── WorkerFailed               a worker process died, or could not start
    ├── StartTimeout               no step was sampled within the start-up time limit
    ├── Refused                    a game's request was rejected; carries the HTTP status
    ├── Unreachable                a game's request got no reply
    │   └── DeadlineMissed         or none by its deadline
    └── IncompatibleCheckpoint     a checkpoint of another environment, model or version

    Interrupted                    the run has to stop; outside the tree, and not an Exception

A message names the offending thing, its value and the remedy. All errors can be pickled, and so sent between processes.
"""

from __future__ import annotations

import errno
import sysconfig
import traceback
from pathlib import Path

_UNAVAILABLE = {
    errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.EPIPE, errno.EAGAIN, errno.ENXIO, errno.ENODEV,
}  # fmt: skip


class Interrupted(BaseException):
    """Raised between two environment steps when a run has to stop. Not an Exception: an environment's `except` must not catch it."""


class LudusError(Exception):
    """Base of the tree; `hint` is one sentence with the remedy."""

    exit_code = 1
    final = False
    """Whether a run that fails with it is not restarted."""

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
    """`error` is a machine-readable code; `retry_after_s` is set when a retry may succeed.

    `last`, with the code `seq`: number of the last request of this session that the server accepted.
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
    """Connection refused, broken or timed out; whether the server processed the request is unknown."""


class DeadlineMissed(Unreachable):
    """No reply to this tick by its deadline. The session continues with the next tick."""


class IncompatibleCheckpoint(LudusError):
    exit_code = 2


def is_unavailable(error: OSError) -> bool:
    """Whether an error means that the server of a network mount cannot be reached. (EIO may also be a broken disk.)"""
    return error.errno in _UNAVAILABLE


_PACKAGE = f"{Path(__file__).absolute().parent}/"
_LIBRARIES = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "purelib", "platlib"))


def user_frame(error: BaseException) -> str:
    """Return the innermost line of user code in a traceback, as ` (game.py:12, in reset)`.

    Without such a line, the innermost line of another library; '' when the call itself failed, as with wrong arguments.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({_relative(error.filename)}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [f for f in frames if not f.filename.startswith((_PACKAGE, "<"))]
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
