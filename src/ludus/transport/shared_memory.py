"""Memory between two processes of one machine: segments are written and read in place in a ring buffer.

The arrays of a block are views of the ring on both sides; gathering the learner's batch is the only copy.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ludus.core.tree import Array, Tree, leaves, map_tree
from ludus.core.types import Segments, SegmentSpec
from ludus.errors import Damaged, UsageError
from ludus.transport.base import MemoryStats
from ludus.transport.ring_buffer import ALIGN, RingReader, RingRecord, RingWriter, record_bytes

_MAGIC = int.from_bytes(b"LUDBLOCK", "little")
_HEAD = ALIGN  # five numbers: magic, checksum of the layout, finals, episodes, environment steps + 1 (0: not counted)
_EPISODES = ("episode_return", "episode_length")
_NONE = {"episode_return": np.zeros(0, np.float32), "episode_length": np.zeros(0, np.int64)}


@dataclass(frozen=True)
class _ArraySlot:
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def view(self, whole: Array) -> Array:
        return np.ndarray(self.shape, self.dtype, whole, self.offset)


def _bytes_of(buffer: memoryview) -> Array:
    """Return an array that keeps the buffer alive, unlike `np.ndarray(…, buffer)`: blocks in use keep their ring mapped."""
    return np.frombuffer(buffer, np.uint8)


class BlockLayout:
    """Offsets of the arrays of a block of `rows` segments in a record, derived from the spec on both sides."""

    def __init__(self, spec: SegmentSpec, rows: int) -> None:
        self.spec, self.rows = spec, rows
        self._episodes = spec.steps * rows  # maximum number of episodes that end in a block
        arrays = Segments.empty(spec, rows).arrays()
        for name in _EPISODES:
            arrays[name] = np.zeros(self._episodes, arrays[name].dtype)
        end = _HEAD

        def place(array: Array) -> _ArraySlot:
            nonlocal end
            start, end = end, end + record_bytes(array.nbytes)
            return _ArraySlot(start, array.shape, array.dtype)

        self._places: dict[str, Tree] = {name: map_tree(place, tree) for name, tree in arrays.items()}
        self._viewed = [(name, tree) for name, tree in self._places.items() if name not in _EPISODES]
        self.nbytes = end
        """Size of a record."""
        described = [(path, p.offset, p.shape, p.dtype.str) for path, p in leaves(self._places)]
        self.checksum = zlib.crc32(repr((spec.model, described)).encode())
        """Equal for equal layouts."""

    def views(self, buffer: memoryview) -> Segments:
        """Return segments whose arrays are views of `buffer`."""
        whole = _bytes_of(buffer)
        views: dict[str, Any] = {
            name: tree.view(whole) if tree.__class__ is _ArraySlot else map_tree(lambda p: p.view(whole), tree)
            for name, tree in self._viewed
        }
        return Segments(spec=self.spec, model=self.spec.model, **views)

    def seal(self, segments: Segments, buffer: memoryview) -> None:
        """Write the parts that are not views: counts, and the episodes that ended in this block."""
        episodes = len(segments.episode_return)
        if episodes > self._episodes or len(segments.episode_length) != episodes:
            raise UsageError(f"{episodes} episodes cannot have ended in {self._episodes} steps.", "Was a block sealed twice?")
        head = buffer[:_HEAD].cast("Q")
        env_steps = 0 if segments.env_steps is None else segments.env_steps + 1
        head[0], head[1], head[2], head[3], head[4] = _MAGIC, self.checksum, segments.finals, episodes, env_steps
        if episodes:
            for name in _EPISODES:
                self._places[name].view(_bytes_of(buffer))[:episodes] = getattr(segments, name)

    def load(self, buffer: memoryview) -> Segments:
        """Return sealed segments as views of `buffer`; the numbers of episodes are copies. Raises Damaged."""
        return self.refresh(self.views(buffer), buffer)

    def refresh(self, segments: Segments, buffer: memoryview) -> Segments:
        """Update existing views of `buffer` after it was sealed again. Raises Damaged."""
        head = buffer[:_HEAD].cast("Q")
        finals, episodes = head[2], head[3]
        if head[0] != _MAGIC or head[1] != self.checksum:
            raise Damaged("A record does not contain segments of this layout.", "Do both sides have the same spec?")
        if finals > self.spec.finals or episodes > self._episodes:
            raise Damaged(f"A record claims {finals} final observations and {episodes} episodes.")
        segments.finals, segments.env_steps = finals, head[4] - 1 if head[4] else None
        for name in _EPISODES:  # copies: metrics use them after the block is released
            setattr(segments, name, self._places[name].view(_bytes_of(buffer))[:episodes].copy() if episodes else _NONE[name])
        return segments


class BlockLayouts:
    """Layouts of the blocks of several models that share a ring. Every record has the size of the largest block."""

    def __init__(self, layouts: Sequence[BlockLayout]) -> None:
        self._by_model = {layout.spec.model: layout for layout in layouts}
        self._by_checksum = {layout.checksum: layout for layout in layouts}
        self.models = tuple(self._by_model)
        self.nbytes = max(layout.nbytes for layout in layouts)
        """Size of a record."""

    def of(self, model: str) -> BlockLayout:
        return self._by_model[model]

    def written_in(self, buffer: memoryview) -> BlockLayout:
        """The layout of a sealed record. Raises Damaged."""
        layout = self._by_checksum.get(buffer[:_HEAD].cast("Q")[1])
        if layout is None:
            raise Damaged("A record does not contain segments of this layout.", "Do both sides have the same spec?")
        return layout


def ring_capacity(layouts: BlockLayout | BlockLayouts, blocks: int) -> int:
    """Return the capacity of a ring for `blocks` blocks."""
    return blocks * record_bytes(layouts.nbytes)


class SharedWriter:
    """SegmentWriter of a ring, for one thread. Blocks are cached by their position in the ring."""

    def __init__(self, ring: Path, layouts: BlockLayout | BlockLayouts, wakeup: Path | None = None) -> None:
        self.ring = RingWriter(ring, wakeup)
        self._layouts = _as_layouts(layouts)
        self._blocks: dict[int, tuple[Segments, memoryview]] = {}
        self._held: tuple[Segments, memoryview] | None = None

    def reserve(self, timeout_s: float, model: str | None = None) -> Segments | None:
        """Return a block to write into, or None if there is no room. Raises MemoryClosed.

        One block at a time. It contains the data of its last use. `model`: whose block; needed if the ring has several models.
        """
        buffer = self.ring.reserve(self._layouts.nbytes, timeout_s)
        if buffer is None:
            return None
        start, layout = self.ring.reserved_at, self._layouts.of(model or self._layouts.models[0])
        if start not in self._blocks or self._blocks[start][0].model != layout.spec.model:
            self._blocks[start] = _clear_block(layout, buffer), buffer
        self._held = self._blocks[start]
        self._held[0].finals = 0
        return self._held[0]

    def commit(self, segments: Segments) -> None:
        _, buffer = self._check_held(segments, "committed")
        self._layouts.of(segments.model).seal(segments, buffer)
        self._held = None
        self.ring.commit()

    def abandon(self, segments: Segments) -> None:
        self._check_held(segments, "abandoned")
        self._held = None
        self.ring.abandon()

    def _check_held(self, segments: Segments, what: str) -> tuple[Segments, memoryview]:
        if self._held is None or self._held[0] is not segments:
            raise ValueError(f"A block was {what} without having been reserved.")
        return self._held

    @property
    def committed(self) -> int:
        """Number of blocks committed in this ring, including earlier writers."""
        return self.ring.committed

    @property
    def notes(self) -> memoryview[float]:
        return self.ring.notes

    def drop(self, count: int = 1) -> None:
        """Count blocks that were dropped because there was no room."""
        self.ring.drop(count)

    def stats(self) -> MemoryStats:
        ring = self.ring
        return MemoryStats(ring.committed, ring.released, ring.released, ring.dropped, ring.committed - ring.released)

    def close(self) -> None:
        self._held = None
        self._blocks.clear()
        self.ring.close()


def _as_layouts(layouts: BlockLayout | BlockLayouts) -> BlockLayouts:
    return layouts if isinstance(layouts, BlockLayouts) else BlockLayouts([layouts])


def _clear_block(layout: BlockLayout, buffer: memoryview) -> Segments:
    np.frombuffer(buffer, np.uint8).fill(0)
    block = layout.views(buffer)
    block.action_mask.fill(True)
    return block


class SharedReader:
    """Reading half of a ring, for one thread. A taken block is a view of the ring, valid until it is released."""

    def __init__(self, ring: Path, layouts: BlockLayout | BlockLayouts) -> None:
        self.ring = RingReader(ring)
        self._layouts = _as_layouts(layouts)
        self._blocks: dict[int, Segments] = {}
        self._held: dict[int, tuple[Segments, RingRecord]] = {}

    def take(self) -> Segments | None:
        """Return the oldest block that was not taken, or None; never waits. Raises Damaged."""
        record = self.ring.take()
        if record is None:
            return None
        if len(record.data) != self._layouts.nbytes:
            raise Damaged(f"A record of {len(record.data)} bytes where a block has {self._layouts.nbytes}.")
        layout = self._layouts.written_in(record.data)
        if record.start not in self._blocks or self._blocks[record.start].model != layout.spec.model:
            self._blocks[record.start] = layout.views(record.data)
        block = layout.refresh(self._blocks[record.start], record.data)
        self._held[id(block)] = block, record
        return block

    def number(self, segments: Segments) -> int:
        """Return the sequence number of a held block in this ring."""
        return self._held[id(segments)][1].number

    def release(self, segments: Segments) -> None:
        """Release a block, in any order; space is freed in the order of the blocks."""
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
