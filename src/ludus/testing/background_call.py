"""A function call in a background thread, for tests of what blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_WAIT_S = 60.0  # never reached unless the call hangs


class Call:
    """Starts at once, in a daemon thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self._value = function()
        except BaseException as error:  # raised by `result`, in the thread of the test
            self._error = error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        """Wait for the end of the call; return its value or raise its exception."""
        self._thread.join(_WAIT_S)
        assert not self.alive, "the call hangs"
        if self._error is not None:
            raise self._error
        return self._value
