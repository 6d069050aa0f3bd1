"""Publishes the weights of a fleet's learner: to the store, then as a notice to the workers."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque

from ludus.core.backoff import Backoff
from ludus.distributed.redis.messages import NOTICE, WEIGHTS, WeightsNotice, weights_key
from ludus.distributed.watched_thread import WatchedThread
from ludus.errors import ExchangeUnavailable, Fenced, LudusError, StoreUnavailable
from ludus.storage.base import Store
from ludus.transport.message_stream import MessageStream

log = logging.getLogger(__name__)

_RETRY_S, _MAX_RETRY_S = 1.0, 15.0
_KEPT_WEIGHTS = 4
_CLOSE_S = 10.0


class WeightsPublisher:
    """Publishes in a thread, always the newest version; versions that could not be published in time are skipped."""

    def __init__(self, stream: MessageStream, store: Store) -> None:
        self._stream, self._store = stream, store
        self._changed = threading.Condition()
        self._next: tuple[WeightsNotice, bytes | None] | None = None
        self._closing = False
        self._kept: deque[int] = deque()
        self._failing = False
        self.published = self.failures = 0
        self._thread = WatchedThread("weights-publisher", self._run)
        self._thread.start()
        self.check = self._thread.check
        """Raises the error that ended the thread."""

    def publish(self, notice: WeightsNotice, weights: bytes) -> None:
        with self._changed:
            self._next = notice, weights
            self._changed.notify_all()

    def amend(self, notice: WeightsNotice) -> None:
        """Replace the notice of a version, whether its weights are published already or still waiting."""
        with self._changed:
            weights = self._next[1] if self._next is not None else None
            self._next = notice, weights
            self._changed.notify_all()

    def close(self) -> None:
        """Finish the current transfer, for at most _CLOSE_S."""
        with self._changed:
            self._closing, self._next = True, None
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._stream.close()

    # -- the thread

    def _run(self) -> None:
        backoff = Backoff(_RETRY_S, _MAX_RETRY_S)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closing)
                if self._next is None:
                    return
                notice, weights = self._next
            try:
                self._publish(notice, weights)
            except (StoreUnavailable, ExchangeUnavailable) as error:
                self.failures += 1
                if not self._failing:
                    log.warning("publishing weights failed: %s; workers keep the previous version", error)
                self._failing = True
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, backoff.next_delay())
                continue
            if self._failing:
                log.warning("publishing weights works again")
            self._failing = False
            backoff.reset()
            with self._changed:
                if self._next is not None and self._next[0] is notice:
                    self._next = None

    def _publish(self, notice: WeightsNotice, weights: bytes | None) -> None:
        if weights is not None and notice.version not in self._kept:
            self._store.put(weights_key(notice.version), weights)
            self._kept.append(notice.version)
        if not self._stream.post(NOTICE, notice.encode(), notice.incarnation):
            raise Fenced(
                f"Another learner has taken over this run (this is incarnation {notice.incarnation}).",
                "A run has one learner: stop the other one, or leave this one stopped.",
            )
        if weights is not None:
            self.published += 1
            with contextlib.suppress(LudusError):
                self._delete_old_weights()

    def _delete_old_weights(self) -> None:
        if self.published == 1:  # of earlier learners; only older versions, since a later learner may have taken over
            for name in self._store.list(WEIGHTS):
                number = name.split(".")[0]
                if number.isdigit() and int(number) < min(self._kept):
                    self._store.delete(f"{WEIGHTS}/{name}")
        while len(self._kept) > _KEPT_WEIGHTS:
            self._store.delete(weights_key(self._kept.popleft()))
