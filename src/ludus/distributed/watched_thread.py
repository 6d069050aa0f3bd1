"""A background thread whose owner learns of the error that ended it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ludus.errors import LudusError

log = logging.getLogger(__name__)


class WatchedThread(threading.Thread):
    """Daemon thread that keeps the error that ended it: `check` raises it. `on_error` is called in the thread."""

    def __init__(self, name: str, work: Callable[[], None], on_error: Callable[[LudusError], None] = lambda error: None) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._on_error = work, on_error
        self.error: LudusError | None = None

    def run(self) -> None:
        try:
            self._work()
        except LudusError as error:
            self._end(error)
        except Exception as error:  # a bug in any thread must end the owner, not leave it waiting
            log.error("the thread %s failed", self.name, exc_info=error)
            self._end(LudusError(f"{type(error).__name__}: {error}"))

    def _end(self, error: LudusError) -> None:
        self.error = error
        self._on_error(error)

    def check(self) -> None:
        """Raises the error that ended the thread."""
        if self.error is not None:
            raise self.error
