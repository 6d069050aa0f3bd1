"""A thread for blocking calls to the head (GCS) of a Ray cluster: a call to a head that is gone may never return."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from ludus.distributed.watched_thread import WatchedThread
from ludus.errors import LudusError, Unreachable
from ludus.ray_cluster.cluster import Cluster
from ludus.ray_cluster.membership import Member

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3.0
_MEMBERS_S = 1.0
_TICK_S = 0.1
_MAX_UNANSWERED = 2
_STUCK_S = 2 * CALL_TIMEOUT_S
_GAP_S = 1.0


class StallAwareClock:
    """A monotonic clock that does not count the time during which this process was suspended. Thread-safe.

    `now` must be called several times per `_GAP_S`; a longer gap counts as a suspension.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._read_at = clock()
        self._missed_s = 0.0

    def now(self) -> float:
        with self._lock:
            now = self._clock()
            gap_s, self._read_at = now - self._read_at, now
            if gap_s > _GAP_S:
                log.warning("this process was suspended for %.1f s; all time-outs are extended by that", gap_s)
                self._missed_s += gap_s
            return now - self._missed_s


class GcsThread:
    """Polls the members of the cluster until `closing` is set and runs submitted calls until `close`.

    Callbacks run in this thread. `on_crash` is called if the thread ends with an error.
    """

    def __init__(
        self,
        cluster: Cluster,
        now: Callable[[], float],
        closing: threading.Event,
        on_members: Callable[[list[Member]], None],
        on_crash: Callable[[LudusError], None],
    ) -> None:
        self._cluster, self._now, self._closing = cluster, now, closing
        self._on_members = on_members
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Callable[[Exception], None]]] = queue.SimpleQueue()
        self._finish, self._discard = threading.Event(), threading.Event()
        self._replied_at = self._active_at = now()
        self._unanswered = 0
        self._thread = WatchedThread("ray-gcs", self._run, on_crash)

    def start(self) -> None:
        self._thread.start()

    def submit(self, call: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
        self._calls.put((call, on_error))

    def discard_calls(self) -> None:
        """Do not run the remaining calls at `close`: the cluster is lost."""
        self._discard.set()

    def close(self, timeout_s: float) -> None:
        """Run the remaining calls and end."""
        self._finish.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def head_lost_for_s(self, limit_s: float) -> float | None:
        """Seconds without a reply of the head, if that is above `limit_s` and several polls failed or one is stuck."""
        now = self._now()
        silent_s = now - self._replied_at
        is_lost = self._unanswered >= _MAX_UNANSWERED or now - self._active_at > _STUCK_S
        return silent_s if silent_s > limit_s and is_lost else None

    def _run(self) -> None:
        due = 0.0
        while not self._finish.is_set():
            with contextlib.suppress(queue.Empty):
                self._run_call(*self._calls.get(timeout=_TICK_S))
            if time.monotonic() >= due and not self._closing.is_set():
                self._poll_members()
                due = time.monotonic() + _MEMBERS_S
            self._active_at = self._now()
        with contextlib.suppress(queue.Empty):
            while not self._discard.is_set():
                self._run_call(*self._calls.get_nowait())

    def _run_call(self, call: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
        self._active_at = self._now()
        try:
            call()
        except Exception as error:  # Ray raises many types; the owner gives up the node
            on_error(error)

    def _poll_members(self) -> None:
        self._active_at = self._now()
        try:
            members = self._cluster.members(CALL_TIMEOUT_S)
        except Unreachable:
            self._unanswered += 1
        else:
            self._replied_at, self._unanswered = self._now(), 0
            self._on_members(members)
