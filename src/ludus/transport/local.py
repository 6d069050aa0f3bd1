"""Memory within one process: a bounded number of blocks, allocated on demand, that circulate without copies."""

from __future__ import annotations

import threading
from collections import deque

from ludus.core.types import Segments, SegmentSpec
from ludus.errors import MemoryClosed
from ludus.transport.base import MemoryStats


class LocalMemory:
    """Thread-safe."""

    def __init__(self, spec: SegmentSpec, rows: int, blocks: int) -> None:
        self.spec, self._rows = spec, rows
        self._unallocated = blocks
        self._free: deque[Segments] = deque()
        self._ready: deque[Segments] = deque()
        self._writing: set[int] = set()
        self._reading: set[int] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._committed = self._taken = self._released = 0

    def reserve(self, timeout_s: float) -> Segments | None:
        with self._changed:
            if timeout_s > 0:
                self._changed.wait_for(lambda: self._free or self._unallocated or self._closed, timeout_s)
            if self._closed:
                raise MemoryClosed("The memory was closed.")
            if self._free:
                block = self._free.popleft()
            elif self._unallocated:
                block = Segments.empty(self.spec, self._rows)
                self._unallocated -= 1
            else:
                return None
            self._writing.add(id(block))
            block.finals = 0
            return block

    def commit(self, segments: Segments) -> None:
        with self._changed:
            self._give_back(self._writing, segments, "committed without having been reserved")
            self._ready.append(segments)
            self._committed += 1
            self._changed.notify_all()

    def abandon(self, segments: Segments) -> None:
        with self._changed:
            self._give_back(self._writing, segments, "abandoned without having been reserved")
            self._free.appendleft(segments)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> Segments | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed, timeout_s)
            if self._ready:
                block = self._ready.popleft()
                self._reading.add(id(block))
                self._taken += 1
                return block
            if self._closed:
                raise MemoryClosed("The memory was closed.")
            return None

    def release(self, segments: Segments) -> None:
        with self._changed:
            self._give_back(self._reading, segments, "released without having been taken")
            self._free.append(segments)
            self._released += 1
            self._changed.notify_all()

    @staticmethod
    def _give_back(holders: set[int], segments: Segments, wrong: str) -> None:
        if id(segments) not in holders:
            raise ValueError(f"A block was {wrong}.")
        holders.remove(id(segments))

    def stats(self) -> MemoryStats:
        with self._changed:
            return MemoryStats(self._committed, self._taken, self._released, 0, len(self._ready))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
