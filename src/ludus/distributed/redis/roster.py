"""The workers of a fleet as its learner sees them, from the presence messages that they post."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ludus.distributed.redis.messages import PRESENCE, Presence
from ludus.distributed.redis.worker import BEAT_S
from ludus.distributed.sampling_plan import STEP_COUNTERS
from ludus.errors import Damaged

log = logging.getLogger(__name__)

SILENT_S = 5 * BEAT_S
"""A worker without a heartbeat for this long counts as lost."""

_SILENT = "has fallen silent"
_REMEMBERED = 4096  # workers that left, whose counters are replaced if they come back
_COUNTED = (*STEP_COUNTERS, "dropped")


@dataclass
class _Worker:
    presence: Presence
    heard_at: float


class WorkerRoster:
    """Counts joined, lost and refused workers and sums their counters. `erase(name)` removes a presence message."""

    def __init__(self, erase: Callable[[str], None]) -> None:
        self._erase = erase
        self._workers: dict[str, _Worker] = {}
        self._former: dict[str, Presence] = {}
        self._forgotten: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)
        self.refused: set[str] = set()
        self.joined = self.left = self.silent = 0

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def able(self) -> int:
        """Number of workers that can sample."""
        return sum(worker.presence.state not in ("refused", "failed") for worker in self._workers.values())

    def update(self, messages: Mapping[str, bytes], now: float) -> None:
        """Take all current presence messages by key; workers without one have left."""
        for key, data in messages.items():
            name = key.removeprefix(PRESENCE)
            try:
                self._update_worker(name, Presence.decode(data), now)
            except Damaged:
                self._erase(name)
        for name, worker in list(self._workers.items()):
            if f"{PRESENCE}{name}" not in messages:
                self._remove(name, worker, "left")
            elif now - worker.heard_at > SILENT_S:
                self._remove(name, worker, _SILENT)

    def extend_deadlines(self, now: float) -> None:
        """While the server cannot be reached, silence of a worker means nothing."""
        for worker in self._workers.values():
            worker.heard_at = now

    def _update_worker(self, name: str, presence: Presence, now: float) -> None:
        known = self._workers.get(name)
        if presence.state == "refused":
            if name not in self.refused:
                self.refused.add(name)
                log.warning("the worker %s is incompatible: %s", name, presence.why)
            self._erase(name)
            return
        if known is None:
            self.joined += self._former.pop(name, None) is None  # else it was only silent for a while
            log.info("worker %s joined (%s, pid %d)", name, presence.host, presence.pid)
            self._workers[name] = _Worker(presence, now)
        elif presence.beat != known.presence.beat:
            self._workers[name] = _Worker(presence, now)
        if presence.state == "failed":
            log.warning("the worker %s failed: %s", name, presence.why)
            self._remove(name, self._workers[name], "failed")

    def _remove(self, name: str, worker: _Worker, how: str) -> None:
        log.info("worker %s %s after %d segments", name, how, worker.presence.blocks)
        del self._workers[name]
        self.left += 1
        self.silent += how == _SILENT
        self._former[name] = worker.presence
        if len(self._former) > _REMEMBERED:
            oldest = self._former.pop(next(iter(self._former)))
            for counter in _COUNTED:
                self._forgotten[counter] += float(getattr(oldest, counter))
        if how != "left":
            self._erase(name)

    def totals(self) -> dict[str, float]:
        """Sums of the counters of all workers, including those that left."""
        totals = dict(self._forgotten)
        for presence in (*self._former.values(), *(worker.presence for worker in self._workers.values())):
            for counter in _COUNTED:
                totals[counter] += float(getattr(presence, counter))
        return totals

    def describe_states(self) -> str:
        return ", ".join(f"{name} is {worker.presence.state}" for name, worker in sorted(self._workers.items()))

    def status(self) -> list[dict[str, Any]]:
        return [
            {
                "worker": name,
                "node": worker.presence.host,
                "state": worker.presence.state,
                "pid": worker.presence.pid,
                "restarts": 0,
                "error": worker.presence.why,
                **{counter: getattr(worker.presence, counter) for counter in STEP_COUNTERS},
            }
            for name, worker in sorted(self._workers.items())
        ]
