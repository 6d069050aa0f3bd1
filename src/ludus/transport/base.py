"""Memory: the way of segments from whoever plays to whoever learns.

A writer reserves a block, fills it in place and commits it; a reader takes it, learns from it and releases it. Between
processes the blocks are slots of a ring; here, in one process, they are the same arrays handed back and forth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ludus.core import plugins
from ludus.core.types import Segments, SegmentSpec

MEMORIES: Mapping[str, str] = {"local": "ludus.transport.local:LocalMemory"}


@dataclass(frozen=True)
class MemoryStats:
    committed: int = 0
    taken: int = 0
    released: int = 0
    dropped: int = 0
    waiting: int = 0


class Batches(Protocol):
    """What a learner needs of a memory."""

    def take(self, timeout_s: float) -> Segments | None: ...

    def release(self, segments: Segments) -> None: ...


class SegmentWriter(Protocol):
    """The writing half: what whoever plays needs of a memory."""

    def reserve(self, timeout_s: float) -> Segments | None: ...

    def commit(self, segments: Segments) -> None: ...

    def abandon(self, segments: Segments) -> None: ...


class Waiting(Batches, Protocol):
    """The reading half of a memory."""

    def stats(self) -> MemoryStats: ...

    def close(self) -> None: ...


class Memory(Protocol):
    """Bounded, first in first out. Every wait has a deadline; `timeout_s=0` never waits.

    A block belongs to the writer between reserve and commit, to the reader between take and release, to nobody else.
    """

    def reserve(self, timeout_s: float) -> Segments | None:
        """A block to write into, or None while all are in use (back-pressure). Raises MemoryClosed."""
        ...

    def commit(self, segments: Segments) -> None:
        """The block is complete; readers may take it."""
        ...

    def abandon(self, segments: Segments) -> None:
        """Give a reserved block back unwritten: whoever was to fill it failed."""
        ...

    def take(self, timeout_s: float) -> Segments | None:
        """The oldest committed block, or None. Raises MemoryClosed once closed and empty."""
        ...

    def release(self, segments: Segments) -> None:
        """Learned from or stored: the block may be used again."""
        ...

    def stats(self) -> MemoryStats: ...

    def close(self) -> None: ...


def make_memory(name: str, spec: SegmentSpec, rows: int, blocks: int) -> Memory:
    made: Memory = plugins.resolve("memory", name, MEMORIES)(spec, rows, blocks)
    return made
