"""Memory of workers that each play many sessions: segments reach the learner through rings, one per worker and model.

A session fills a block in its worker's own memory, for as long as that takes. Committing is one copy into the ring and never
waits: without room the segment is dropped and counted. The learner's batch is gathered from where the segments lie in the ring.
What waits too long for the learner is dropped there, oldest first, and counted too.
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
from ludus.transport.ring_buffer import RECORDS, Bell, RingWriter, create_ring, record_bytes
from ludus.transport.shared_memory import Layout, SharedReader

log = logging.getLogger(__name__)

_FREE_BLOCKS = 256  # kept for the next sessions, once their segments are in the ring
_RING_BYTES = 16 << 20
"""Of one ring, at least: a few seconds of small observations, however short the segments are."""
_MOST_BYTES, _ALL_BYTES = 256 << 20, 1 << 30
"""Of one ring, and of all of them, at most; unless that is not even room for a few segments."""
_FEW = 8
_EMPTIER = 4  # a segment takes up the room of a full one; on average it may be this much shorter


@dataclass(frozen=True)
class Lane:
    """Where one worker at a time leaves its segments and its counters; plain data that travels to the workers."""

    rings: Mapping[str, str]
    """By model. The numbers are notes of the first one."""
    lock: str
    bell: str
    counted: tuple[str, ...]
    """Numbers that go on where those of a predecessor ended."""
    current: tuple[str, ...]
    """Numbers that begin anew."""


class LaneWriter:
    """A worker's end of a lane: a room for the segments of every model. For one thread, which never waits.

    It takes the first lane that is free; that of a dead worker is, whatever it was doing when it died.
    """

    def __init__(self, lanes: Sequence[Lane], specs: Mapping[str, SegmentSpec]) -> None:
        """Raises WorkerFailed when every lane has a writer."""
        self.lane, self._claimed = _free(lanes)
        self.rooms = {
            name: SessionRoom(Path(ring), Layout(specs[name], 1), Path(self.lane.bell)) for name, ring in self.lane.rings.items()
        }
        notes = self._notes = next(iter(self.rooms.values())).notes
        counted, current = self.lane.counted, self.lane.current
        self._before = dict(zip(counted, notes[1 : 1 + len(counted)], strict=True))
        for number in range(len(current)):
            notes[1 + len(counted) + number] = 0.0
        notes[0] = os.getpid()

    def count(self, numbers: Mapping[str, float]) -> None:
        """How this worker is doing: all the numbers that the lane has a place for."""
        for at, name in enumerate((*self.lane.counted, *self.lane.current), 1):
            self._notes[at] = self._before.get(name, 0.0) + numbers.get(name, 0.0)

    def close(self) -> None:
        """Again: no effect."""
        if self._claimed >= 0:
            for room in self.rooms.values():
                room.close()
            os.close(self._claimed)
            self._claimed = -1


def _free(lanes: Sequence[Lane]) -> tuple[Lane, int]:
    import fcntl

    for lane in lanes:
        file = os.open(lane.lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
        else:
            return lane, file
    raise WorkerFailed(f"All {len(lanes)} ways to the learner are in use.", "Are there more workers than it was told of?")


class SessionRoom:
    """The writing half for one model: any number of blocks are being filled at a time."""

    def __init__(self, ring: Path, layout: Layout, bell: Path) -> None:
        self._ring, self._layout = RingWriter(ring, bell), layout
        self.notes = self._ring.notes
        self._free: list[tuple[Segments, bytearray]] = []
        self._open: dict[int, tuple[Segments, bytearray]] = {}

    def reserve(self, timeout_s: float) -> Segments | None:
        block, buffer = self._free.pop() if self._free else self._made()
        block.finals = 0
        self._open[id(block)] = block, buffer
        return block

    def _made(self) -> tuple[Segments, bytearray]:
        buffer = bytearray(self._layout.nbytes)
        block = self._layout.views(memoryview(buffer))
        block.action_mask.fill(True)
        return block, buffer

    def commit(self, segments: Segments) -> None:
        buffer = self._given_back(segments, "committed")
        self._layout.seal(segments, memoryview(buffer))
        try:
            room = self._ring.reserve(len(buffer))
        except (MemoryClosed, Damaged):  # the learner has ended, or will not read this ring any more: games need not suffer
            room = None
        if room is None:
            self._ring.drop()
        else:
            room[:] = buffer
            self._ring.commit()
        self._keep(segments, buffer)

    def abandon(self, segments: Segments) -> None:
        self._keep(segments, self._given_back(segments, "abandoned"))

    def _given_back(self, segments: Segments, what: str) -> bytearray:
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


class GatheredMemory:
    """The learner's end, for one thread: takes what all writers commit, for the models of `specs`.

    Of each model at most `capacity` steps wait; what is older is dropped and counted, so that nothing stale is learned from.
    A ring that holds anything but segments is taken from its writer, and replaced for the next one.
    """

    def __init__(
        self,
        specs: Mapping[str, SegmentSpec],
        directory: Path,
        capacity: int,
        counted: Sequence[str] = (),
        current: Sequence[str] = (),
    ) -> None:
        self._layouts = {name: Layout(spec, 1) for name, spec in specs.items()}
        self._directory, self._capacity = directory, capacity
        self._names = tuple(counted), tuple(current)
        self._bell = Bell.create(directory / "bell")
        self._lanes: list[Lane] = []
        self._readers: dict[str, dict[int, SharedReader]] = {name: {} for name in specs}  # by model and lane
        self._ready: dict[str, deque[tuple[Segments, SharedReader]]] = {name: deque() for name in specs}
        self._steps = dict.fromkeys(specs, 0)
        self._held: dict[int, tuple[Segments, SharedReader]] = {}
        self._retired: list[SharedReader] = []
        self._seen = self._taken = self._released = self._stale = self._lost = 0
        self._cut_off: list[int] = []
        self._totals: dict[str, float] = {}
        self._closed = False

    def add_lanes(self, count: int) -> list[Lane]:
        """SegmentWriter for so many writers. Raises StoreFull."""
        for number in range(len(self._lanes), len(self._lanes) + count):
            lock = self._directory / f"{number}.lock"
            lock.touch(0o600)
            rings = {name: str(self._directory / f"{number}.{name}" / "ring") for name in self._layouts}
            for name, ring in rings.items():
                size = self._size(self._layouts[name], count * len(rings))
                self._readers[name][number] = _made(Path(ring), size, self._layouts[name])
            self._lanes.append(Lane(rings, str(lock), str(self._bell.path), *self._names))
        return list(self._lanes)

    def _size(self, layout: Layout, rings: int) -> int:
        """Of a ring, in bytes: for all that may wait, if there is so much memory."""
        one = record_bytes(layout.nbytes)
        wanted = max(_EMPTIER * -(-self._capacity // layout.spec.steps) * one, _RING_BYTES)
        most = min(_MOST_BYTES, _ALL_BYTES // rings, shutil.disk_usage(self._directory).free // (2 * rings))
        return max(_FEW * one, min(wanted, most, RECORDS * one))

    def of(self, model: str) -> ModelGathered:
        return ModelGathered(self, model)

    # -- reading

    def wait(self, timeout_s: float) -> None:
        """Until something may have arrived since the last call, or the time is up. Look first, then wait."""
        if not self._closed:
            self._bell.wait(timeout_s)

    def take(self, model: str) -> Segments | None:
        """The oldest segment that waits; never waits itself. Raises MemoryClosed."""
        if self._closed:
            raise MemoryClosed("The memory was closed.")
        self._look(model)
        waiting = self._ready[model]
        if not waiting:
            return None
        block, reader = waiting.popleft()
        self._steps[model] -= block.steps
        self._taken += 1
        self._held[id(block)] = block, reader
        return block

    def _look(self, model: str) -> None:
        waiting = self._ready[model]
        for number, reader in list(self._readers[model].items()):
            try:
                while (block := reader.take()) is not None:
                    waiting.append((block, reader))
                    self._steps[model] += block.steps
                    self._seen += 1
            except (Damaged, TypeError, ValueError) as error:  # the last two: numpy's, of arrays where there is no room for them
                self._cut(model, number, error)
        while len(waiting) > 1 and self._steps[model] > self._capacity:
            self._drop(model)
            self._stale += 1

    def _drop(self, model: str) -> None:
        block, reader = self._ready[model].popleft()
        self._steps[model] -= block.steps
        reader.release(block)

    def release(self, segments: Segments) -> None:
        """Copied into a batch: its room in the ring is free."""
        held = self._held.pop(id(segments), None)
        if held is None:
            raise ValueError("A block was released without having been taken.")
        self._released += 1
        held[1].release(segments)
        if held[1] in self._retired:
            self._retired.remove(held[1])
            self._retire(held[1])

    # -- writers that went wrong

    def _cut(self, model: str, number: int, error: Exception) -> None:
        """What this writer committed cannot be trusted any more; its successor gets a fresh ring."""
        path, reader = Path(self._lanes[number].rings[model]), self._readers[model].pop(number)
        notes = list(reader.ring.notes)
        log.error("the segments of worker process %.0f cannot be read, it is cut off: %s", notes[0], error)
        waiting = self._ready[model]
        for _ in range(len(waiting)):
            block, owner = waiting.popleft()
            if owner is reader:
                self._steps[model] -= block.steps
                reader.release(block)
                self._lost += 1
            else:
                waiting.append((block, owner))
        unread = 1 + min(max(0, reader.waiting), RECORDS)  # this one, and those after it, if the count is not rubbish too
        self._lost += reader.ring.dropped + unread
        capacity = reader.ring.capacity
        self._retire(reader)
        self._cut_off.append(int(notes[0]) if math.isfinite(notes[0]) else 0)
        try:
            shutil.rmtree(path.parent, ignore_errors=True)
            fresh = self._readers[model][number] = _made(path, capacity, self._layouts[model])
            for at, number_before in enumerate(notes):
                fresh.ring.notes[at] = number_before if math.isfinite(number_before) else 0.0
        except StoreFull as full:
            log.error("the ring %s cannot be replaced: %s", path, full)

    def _retire(self, reader: SharedReader) -> None:
        """Its writer hears that nobody reads any more. The memory must not go while arrays still point into it."""
        reader.ring.finish()
        stats = reader.stats()
        if stats.taken == stats.released:
            reader.close()
        else:
            self._retired.append(reader)

    def cut_off(self) -> list[int]:
        """Process numbers of writers that were cut off since the last call: they ought to be replaced."""
        pids, self._cut_off = self._cut_off, []
        return pids

    # -- counting

    def total(self, name: str) -> float:
        """A number of the writers, over all lanes; those that died included, if it is one that goes on."""
        if self._closed:
            return self._totals[name]
        at = 1 + (*self._names[0], *self._names[1]).index(name)
        first = self._readers[next(iter(self._layouts))]
        return float(sum(reader.ring.notes[at] for reader in first.values()))

    def stats(self) -> MemoryStats:
        """`dropped`: for want of room in the rings, too old, or cut off."""
        readers = [] if self._closed else [reader for lanes in self._readers.values() for reader in lanes.values()]
        waiting = sum(map(len, self._ready.values())) + sum(reader.waiting for reader in readers)
        dropped = self._stale + self._lost + sum(reader.ring.dropped for reader in readers)
        committed = self._seen + sum(reader.waiting for reader in readers)
        return MemoryStats(committed, self._taken, self._released, dropped, waiting)

    def close(self) -> None:
        """What was taken may still be read, and is to be released; what waits is given up."""
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
            lanes.clear()  # the memory is given back with the last array that points into it
        self._bell.close()


def _made(path: Path, capacity: int, layout: Layout) -> SharedReader:
    """A ring has several files: in a directory of its own, where nothing else is in the way of removing it."""
    path.parent.mkdir(mode=0o700)
    create_ring(path, capacity)
    return SharedReader(path, layout)


class ModelGathered:
    """One model's part of a GatheredMemory."""

    def __init__(self, memory: GatheredMemory, model: str) -> None:
        self._memory, self._model = memory, model

    def take(self, timeout_s: float) -> Segments | None:
        """Never waits: whoever drives the learner does, for all models at once."""
        return self._memory.take(self._model)

    def release(self, segments: Segments) -> None:
        self._memory.release(segments)

    def stats(self) -> MemoryStats:
        return self._memory.stats()

    def close(self) -> None:
        self._memory.close()
