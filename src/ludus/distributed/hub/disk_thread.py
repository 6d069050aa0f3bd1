"""A thread for disk operations, so that an event loop does not block on them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class DiskThread:
    """Runs functions one after the other. A failure is logged; later ones may succeed."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ludus-disk", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        return self._queue.qsize()

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def close(self, timeout_s: float = 60.0) -> None:
        """Return when everything submitted is done."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:  # any failure of storage or sinks, such as a full disk, must not end the hub
                log.error("writing to the run directory failed: %s", error)
