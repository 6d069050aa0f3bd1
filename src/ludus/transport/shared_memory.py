"""Memory between two processes of one machine: segments are written in place in a ring and read from where they lie.

The arrays of a block are views of the ring on both sides. What a sampler writes is what a learner's batch is gathered from:
that gathering is the only copy.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ludus.core.tree import Array, Tree, leaves, map_tree
from ludus.core.types import Segments, SegmentSpec
from ludus.errors import Damaged, UsageError
from ludus.transport.base import MemoryStats
from ludus.transport.ring_buffer import ALIGN, Record, RingReader, RingWriter, record_bytes

_MAGIC = int.from_bytes(b"LUDBLOCK", "little")
_HEAD = ALIGN  # four numbers: magic, checksum of the layout, finals, episodes
_EPISODES = ("episode_return", "episode_length")
_NONE = {"episode_return": np.zeros(0, np.float32), "episode_length": np.zeros(0, np.int64)}


@dataclass(frozen=True)
class _Place:
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def view(self, whole: Array) -> Array:
        return np.ndarray(self.shape, self.dtype, whole, self.offset)


def _bytes_of(buffer: memoryview) -> Array:
    """Holds on to the buffer, which `np.ndarray(…, buffer)` itself would not: a block that is still in use keeps its ring mapped after the
    reader has closed."""
    return np.frombuffer(buffer, np.uint8)


class Layout:
    """Where the arrays of a block of `rows` segments lie in a record; the same on both sides, for it follows from the spec."""

    def __init__(self, spec: SegmentSpec, rows: int) -> None:
        self.spec, self.rows = spec, rows
        self._episodes = spec.steps * rows  # no more can end in a block
        arrays = Segments.empty(spec, rows).arrays()
        for name in _EPISODES:
            arrays[name] = np.zeros(self._episodes, arrays[name].dtype)
        end = _HEAD

        def place(array: Array) -> _Place:
            nonlocal end
            start, end = end, end + record_bytes(array.nbytes)
            return _Place(start, array.shape, array.dtype)

        self._places: dict[str, Tree] = {name: map_tree(place, tree) for name, tree in arrays.items()}
        self._viewed = [(name, tree) for name, tree in self._places.items() if name not in _EPISODES]
        self.nbytes = end
        """Of a record."""
        described = [(path, p.offset, p.shape, p.dtype.str) for path, p in leaves(self._places)]
        self.checksum = zlib.crc32(repr((spec.model, described)).encode())
        """Two layouts with the same one are the same."""

    def views(self, buffer: memoryview) -> Segments:
        """Segments whose arrays are views of `buffer`: writing to them writes to it."""
        whole = _bytes_of(buffer)
        views: dict[str, Any] = {
            name: tree.view(whole) if tree.__class__ is _Place else map_tree(lambda p: p.view(whole), tree)
            for name, tree in self._viewed
        }
        return Segments(spec=self.spec, model=self.spec.model, **views)

    def seal(self, segments: Segments, buffer: memoryview) -> None:
        """Write what is not in the views: the counts, and the episodes that ended in this block."""
        episodes = len(segments.episode_return)
        if episodes > self._episodes or len(segments.episode_length) != episodes:
            raise UsageError(f"{episodes} episodes cannot have ended in {self._episodes} steps.", "Was a block sealed twice?")
        head = buffer[:_HEAD].cast("Q")
        head[0], head[1], head[2], head[3] = _MAGIC, self.checksum, segments.finals, episodes
        if episodes:
            for name in _EPISODES:
                self._places[name].view(_bytes_of(buffer))[:episodes] = getattr(segments, name)

    def load(self, buffer: memoryview) -> Segments:
        """What was sealed: views of `buffer`, but for the few numbers of the episodes. Raises Damaged."""
        return self.refresh(self.views(buffer), buffer)

    def refresh(self, segments: Segments, buffer: memoryview) -> Segments:
        """The same views of `buffer` after it was sealed once more."""
        head = buffer[:_HEAD].cast("Q")
        finals, episodes = head[2], head[3]
        if head[0] != _MAGIC or head[1] != self.checksum:
            raise Damaged("A record does not hold segments of this shape.", "Do both sides have the same spec?")
        if finals > self.spec.finals or episodes > self._episodes:
            raise Damaged(f"A record claims {finals} final observations and {episodes} episodes.")
        segments.finals = finals
        for name in _EPISODES:  # a copy: they are kept for the metrics long after the block is released
            setattr(segments, name, self._places[name].view(_bytes_of(buffer))[:episodes].copy() if episodes else _NONE[name])
        return segments


def ring_capacity(layout: Layout, blocks: int) -> int:
    """Of a ring with room for so many blocks."""
    return blocks * record_bytes(layout.nbytes)


class SharedWriter:
    """The writing half: a SegmentWriter for the one thread that plays. Blocks are cached by where they lie in the ring."""

    def __init__(self, ring: Path, layout: Layout, bell: Path | None = None) -> None:
        self.ring = RingWriter(ring, bell)
        self._layout = layout
        self._blocks: dict[int, tuple[Segments, memoryview]] = {}
        self._held: tuple[Segments, memoryview] | None = None

    def reserve(self, timeout_s: float) -> Segments | None:
        """A block to write into, one at a time, or None while there is no room. Raises MemoryClosed.

        Waiting never takes longer than `timeout_s`; what was in the block before is still in it, as in any memory.
        """
        buffer = self.ring.reserve(self._layout.nbytes, timeout_s)
        if buffer is None:
            return None
        start = self.ring.reserved_at
        if start not in self._blocks:
            self._blocks[start] = self._fresh(buffer), buffer
        self._held = self._blocks[start]
        self._held[0].finals = 0
        return self._held[0]

    def _fresh(self, buffer: memoryview) -> Segments:
        np.frombuffer(buffer, np.uint8).fill(0)
        block = self._layout.views(buffer)
        block.action_mask.fill(True)
        return block

    def commit(self, segments: Segments) -> None:
        _, buffer = self._given_back(segments, "committed")
        self._layout.seal(segments, buffer)
        self._held = None
        self.ring.commit()

    def abandon(self, segments: Segments) -> None:
        self._given_back(segments, "abandoned")
        self._held = None
        self.ring.abandon()

    def _given_back(self, segments: Segments, what: str) -> tuple[Segments, memoryview]:
        if self._held is None or self._held[0] is not segments:
            raise ValueError(f"A block was {what} without having been reserved.")
        return self._held

    @property
    def committed(self) -> int:
        """Blocks ever committed in this ring, by its earlier writers, too."""
        return self.ring.committed

    @property
    def notes(self) -> memoryview[float]:
        return self.ring.notes

    def drop(self, count: int = 1) -> None:
        """Count blocks that were thrown away for want of room."""
        self.ring.drop(count)

    def stats(self) -> MemoryStats:
        ring = self.ring
        return MemoryStats(ring.committed, ring.released, ring.released, ring.dropped, ring.committed - ring.released)

    def close(self) -> None:
        self._held = None
        self._blocks.clear()
        self.ring.close()


class SharedReader:
    """The reading half, for one thread. A taken block is a view of the ring: it is good until it is released."""

    def __init__(self, ring: Path, layout: Layout) -> None:
        self.ring = RingReader(ring)
        self._layout = layout
        self._blocks: dict[int, Segments] = {}
        self._held: dict[int, tuple[Segments, Record]] = {}

    def take(self) -> Segments | None:
        """The oldest block that was not taken; never waits. Raises Damaged."""
        record = self.ring.take()
        if record is None:
            return None
        if record.start not in self._blocks:
            if len(record.data) != self._layout.nbytes:
                raise Damaged(f"A record of {len(record.data)} bytes where a block has {self._layout.nbytes}.")
            self._blocks[record.start] = self._layout.views(record.data)
        block = self._layout.refresh(self._blocks[record.start], record.data)
        self._held[id(block)] = block, record
        return block

    def number(self, segments: Segments) -> int:
        """Of a block that is held: how many were committed in this ring before it."""
        return self._held[id(segments)][1].number

    def release(self, segments: Segments) -> None:
        """In any order; room is made in the order of the blocks."""
        held = self._held.pop(id(segments), None)
        if held is None:
            raise ValueError("A block was released without having been taken.")
        self.ring.release(held[1])

    @property
    def waiting(self) -> int:
        return self.ring.waiting

    @property
    def committed(self) -> int:
        return self.ring.committed

    @property
    def notes(self) -> memoryview[float]:
        return self.ring.notes

    def stats(self) -> MemoryStats:
        ring = self.ring
        held = len(self._held)
        return MemoryStats(ring.committed, ring.taken, ring.taken - held, ring.dropped, ring.waiting)

    def close(self) -> None:
        self._held.clear()
        self._blocks.clear()
        self.ring.close()
