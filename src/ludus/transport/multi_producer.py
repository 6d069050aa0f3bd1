"""Memory with many producers: gateway workers send segments to the learner through ring buffers, one per worker and model.

A session fills a block in the private memory of its worker. A commit copies it into the ring and never waits: without room the
segment is dropped and counted. The learner reads segments in place. Segments beyond its capacity are dropped, oldest first.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ludus.core.types import Segments, SegmentSpec
from ludus.errors import Damaged, MemoryClosed, StoreFull, WorkerFailed
from ludus.transport.base import MemoryStats
from ludus.transport.ring_buffer import RECORDS, RingWriter, Wakeup, create_ring, record_bytes
from ludus.transport.shared_memory import BlockLayout, SharedReader

log = logging.getLogger(__name__)

_FREE_BLOCKS = 256  # maximum number of unused blocks kept for the next sessions
_MIN_RING_BYTES = 16 << 20
"""Minimum size of a ring: a few seconds of small observations."""
_MAX_RING_BYTES, _MAX_TOTAL_BYTES = 256 << 20, 1 << 30
"""Maximum size of one ring and of all rings, unless that is too small for _MIN_SEGMENTS."""
_MIN_SEGMENTS = 8
_EMPTIER = 4  # a record has the size of a full segment; segments may be shorter by this factor on average


@dataclass(frozen=True)
class Lane:
    """Files through which one worker at a time sends segments and counters; plain data that is sent to the workers."""

    rings: Mapping[str, str]
    """Model → path. The counters are the notes of the first ring."""
    lock: str
    wakeup: str
    counted: tuple[str, ...]
    """Counters that continue those of the previous writer."""
    current: tuple[str, ...]
    """Counters that start from 0 with each writer."""


class LaneWriter:
    """Worker's end of a lane: a writer for each model. For one thread; never waits.

    Claims the first lane without a live writer.
    """

    def __init__(self, lanes: Sequence[Lane], specs: Mapping[str, SegmentSpec]) -> None:
        """Raises WorkerFailed if every lane has a writer."""
        self.lane, self._claimed = _claim_lane(lanes)
        self.writers = {
            name: SessionWriter(Path(ring), BlockLayout(specs[name], 1), Path(self.lane.wakeup))
            for name, ring in self.lane.rings.items()
        }
        notes = self._notes = next(iter(self.writers.values())).notes
        counted, current = self.lane.counted, self.lane.current
        self._before = dict(zip(counted, notes[1 : 1 + len(counted)], strict=True))
        for number in range(len(current)):
            notes[1 + len(counted) + number] = 0.0
        notes[0] = os.getpid()

    def count(self, numbers: Mapping[str, float]) -> None:
        """Publish the counters of the lane."""
        for at, name in enumerate((*self.lane.counted, *self.lane.current), 1):
            self._notes[at] = self._before.get(name, 0.0) + numbers.get(name, 0.0)

    def close(self) -> None:
        """Idempotent."""
        if self._claimed >= 0:
            for writer in self.writers.values():
                writer.close()
            os.close(self._claimed)
            self._claimed = -1


def _claim_lane(lanes: Sequence[Lane]) -> tuple[Lane, int]:
    import fcntl

    for lane in lanes:
        file = os.open(lane.lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
        else:
            return lane, file
    raise WorkerFailed(f"All {len(lanes)} lanes to the learner are in use.", "Are there more workers than lanes?")


class SessionWriter:
    """SegmentWriter of one model, for any number of concurrently filled blocks."""

    def __init__(self, ring: Path, layout: BlockLayout, wakeup: Path) -> None:
        self._ring, self._layout = RingWriter(ring, wakeup), layout
        self.notes = self._ring.notes
        self._free: list[tuple[Segments, bytearray]] = []
        self._open: dict[int, tuple[Segments, bytearray]] = {}

    def reserve(self, timeout_s: float) -> Segments | None:
        block, buffer = self._free.pop() if self._free else self._allocate()
        block.finals = 0
        self._open[id(block)] = block, buffer
        return block

    def _allocate(self) -> tuple[Segments, bytearray]:
        buffer = bytearray(self._layout.nbytes)
        block = self._layout.views(memoryview(buffer))
        block.action_mask.fill(True)
        return block, buffer

    def commit(self, segments: Segments) -> None:
        buffer = self._pop_open(segments, "committed")
        self._layout.seal(segments, memoryview(buffer))
        try:
            record = self._ring.reserve(len(buffer))
        except (MemoryClosed, Damaged):  # the learner has ended or rejected this ring: games continue
            record = None
        if record is None:
            self._ring.drop()
        else:
            record[:] = buffer
            self._ring.commit()
        self._keep(segments, buffer)

    def abandon(self, segments: Segments) -> None:
        self._keep(segments, self._pop_open(segments, "abandoned"))

    def _pop_open(self, segments: Segments, what: str) -> bytearray:
        held = self._open.pop(id(segments), None)
        if held is None:
            raise ValueError(f"A block was {what} without having been reserved.")
        return held[1]

    def _keep(self, block: Segments, buffer: bytearray) -> None:
        if len(self._free) < _FREE_BLOCKS:
            self._free.append((block, buffer))

    def stats(self) -> MemoryStats:
        ring = self._ring
        return MemoryStats(ring.committed, ring.released, ring.released, ring.dropped, ring.committed - ring.released)

    def close(self) -> None:
        self._ring.close()


class MultiProducerMemory:
    """Learner's end, for one thread: takes the segments of all writers, for the models of `specs`.

    At most `capacity` steps of each model wait; older ones are dropped and counted. A ring with invalid records is replaced, and
    its writer is cut off.
    """

    def __init__(
        self,
        specs: Mapping[str, SegmentSpec],
        directory: Path,
        capacity: int,
        counted: Sequence[str] = (),
        current: Sequence[str] = (),
    ) -> None:
        self._layouts = {name: BlockLayout(spec, 1) for name, spec in specs.items()}
        self._directory, self._capacity = directory, capacity
        self._names = tuple(counted), tuple(current)
        self._wakeup = Wakeup.create(directory / "wakeup")
        self._lanes: list[Lane] = []
        self._readers: dict[str, dict[int, SharedReader]] = {name: {} for name in specs}  # by model and lane
        self._ready: dict[str, deque[tuple[Segments, SharedReader]]] = {name: deque() for name in specs}
        self._steps = dict.fromkeys(specs, 0)
        self._held: dict[int, tuple[Segments, SharedReader]] = {}
        self._retired: list[SharedReader] = []
        self._received = self._taken = self._released = self._stale = self._lost = 0
        self._cut_off: list[int] = []
        self._totals: dict[str, float] = {}
        self._closed = False

    def add_lanes(self, count: int) -> list[Lane]:
        """Create lanes for `count` more writers and return all lanes. Raises StoreFull."""
        for number in range(len(self._lanes), len(self._lanes) + count):
            lock = self._directory / f"{number}.lock"
            lock.touch(0o600)
            rings = {name: str(self._directory / f"{number}.{name}" / "ring") for name in self._layouts}
            for name, ring in rings.items():
                size = self._size(self._layouts[name], count * len(rings))
                self._readers[name][number] = _create_reader(Path(ring), size, self._layouts[name])
            self._lanes.append(Lane(rings, str(lock), str(self._wakeup.path), *self._names))
        return list(self._lanes)

    def _size(self, layout: BlockLayout, rings: int) -> int:
        """Return the size of a ring in bytes: enough for `capacity`, within the limits and half of the free memory."""
        record = record_bytes(layout.nbytes)
        needed = max(_EMPTIER * -(-self._capacity // layout.spec.steps) * record, _MIN_RING_BYTES)
        free = shutil.disk_usage(self._directory).free
        most = min(_MAX_RING_BYTES, _MAX_TOTAL_BYTES // rings, free // (2 * rings))
        return max(_MIN_SEGMENTS * record, min(needed, most, RECORDS * record))

    def of(self, model: str) -> ModelMemory:
        return ModelMemory(self, model)

    # -- reading

    def wait(self, timeout_s: float) -> None:
        """Wait until segments may have arrived since the last call. Call `take` first, then wait."""
        if not self._closed:
            self._wakeup.wait(timeout_s)

    def take(self, model: str) -> Segments | None:
        """Return the oldest waiting segment, or None; never waits. Raises MemoryClosed."""
        if self._closed:
            raise MemoryClosed("The memory was closed.")
        self._poll_rings(model)
        waiting = self._ready[model]
        if not waiting:
            return None
        block, reader = waiting.popleft()
        self._steps[model] -= block.steps
        self._taken += 1
        self._held[id(block)] = block, reader
        return block

    def _poll_rings(self, model: str) -> None:
        waiting = self._ready[model]
        for number, reader in list(self._readers[model].items()):
            try:
                while (block := reader.take()) is not None:
                    waiting.append((block, reader))
                    self._steps[model] += block.steps
                    self._received += 1
            except (Damaged, TypeError, ValueError) as error:  # TypeError, ValueError: numpy, arrays outside of the record
                self._cut_off_writer(model, number, error)
        while len(waiting) > 1 and self._steps[model] > self._capacity:
            self._drop(model)
            self._stale += 1

    def _drop(self, model: str) -> None:
        block, reader = self._ready[model].popleft()
        self._steps[model] -= block.steps
        reader.release(block)

    def release(self, segments: Segments) -> None:
        """Free the record of a segment that was copied into a batch."""
        held = self._held.pop(id(segments), None)
        if held is None:
            raise ValueError("A block was released without having been taken.")
        self._released += 1
        held[1].release(segments)
        if held[1] in self._retired:
            self._retired.remove(held[1])
            self._retire(held[1])

    # -- faulty writers

    def _cut_off_writer(self, model: str, number: int, error: Exception) -> None:
        """Discard the ring of a writer with invalid records, and create a new ring for its successor."""
        path, reader = Path(self._lanes[number].rings[model]), self._readers[model].pop(number)
        notes = list(reader.ring.notes)
        log.error("worker process %.0f sent invalid segments and is cut off: %s", notes[0], error)
        waiting = self._ready[model]
        for _ in range(len(waiting)):
            block, owner = waiting.popleft()
            if owner is reader:
                self._steps[model] -= block.steps
                reader.release(block)
                self._lost += 1
            else:
                waiting.append((block, owner))
        unread = 1 + min(max(0, reader.waiting), RECORDS)  # bounded: the counter may be invalid too
        self._lost += reader.ring.dropped + unread
        capacity = reader.ring.capacity
        self._retire(reader)
        self._cut_off.append(int(notes[0]) if math.isfinite(notes[0]) else 0)
        try:
            shutil.rmtree(path.parent, ignore_errors=True)
            fresh = self._readers[model][number] = _create_reader(path, capacity, self._layouts[model])
            for at, number_before in enumerate(notes):
                fresh.ring.notes[at] = number_before if math.isfinite(number_before) else 0.0
        except StoreFull as full:
            log.error("the ring %s cannot be replaced: %s", path, full)

    def _retire(self, reader: SharedReader) -> None:
        """End a ring for its writer, and close it when no array refers to it any more."""
        reader.ring.finish()
        stats = reader.stats()
        if stats.taken == stats.released:
            reader.close()
        else:
            self._retired.append(reader)

    def cut_off(self) -> list[int]:
        """Return the process ids of writers that were cut off since the last call and should be replaced."""
        pids, self._cut_off = self._cut_off, []
        return pids

    # -- counting

    def total(self, name: str) -> float:
        """Return the sum of a counter over all lanes, including earlier writers if it is in `counted`."""
        if self._closed:
            return self._totals[name]
        at = 1 + (*self._names[0], *self._names[1]).index(name)
        first = self._readers[next(iter(self._layouts))]
        return float(sum(reader.ring.notes[at] for reader in first.values()))

    def stats(self) -> MemoryStats:
        """`dropped`: no room in a ring, beyond the capacity, or cut off."""
        readers = [] if self._closed else [reader for lanes in self._readers.values() for reader in lanes.values()]
        waiting = sum(map(len, self._ready.values())) + sum(reader.waiting for reader in readers)
        dropped = self._stale + self._lost + sum(reader.ring.dropped for reader in readers)
        committed = self._received + sum(reader.waiting for reader in readers)
        return MemoryStats(committed, self._taken, self._released, dropped, waiting)

    def close(self) -> None:
        """Drop waiting segments. Taken ones stay valid and must still be released."""
        if self._closed:
            return
        self._totals = {name: self.total(name) for name in (*self._names[0], *self._names[1])}
        self._lost = self.stats().dropped - self._stale
        for model, waiting in self._ready.items():
            while waiting:
                self._drop(model)
        self._closed = True
        for lanes in self._readers.values():
            for reader in lanes.values():
                self._retire(reader)
            lanes.clear()  # the memory is unmapped with the last array that refers to it
        self._wakeup.close()


def _create_reader(path: Path, capacity: int, layout: BlockLayout) -> SharedReader:
    """Create a ring in a new directory (it has several files, which are removed together) and open it."""
    path.parent.mkdir(mode=0o700)
    create_ring(path, capacity)
    return SharedReader(path, layout)


class ModelMemory:
    """One model's part of a MultiProducerMemory."""

    def __init__(self, memory: MultiProducerMemory, model: str) -> None:
        self._memory, self._model = memory, model

    def take(self, timeout_s: float) -> Segments | None:
        """Never waits: the caller waits with `MultiProducerMemory.wait` for all models."""
        return self._memory.take(self._model)

    def release(self, segments: Segments) -> None:
        self._memory.release(segments)

    def stats(self) -> MemoryStats:
        return self._memory.stats()

    def close(self) -> None:
        self._memory.close()
