"""Memory: transport of segments from samplers to the learner.

A writer reserves a block, fills it in place and commits it; a reader takes it, learns from it and releases it. Between
processes the blocks are records of a ring buffer; within one process they are arrays that circulate.
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


class SegmentReader(Protocol):
    """The part of a memory that a learner uses."""

    def take(self, timeout_s: float) -> Segments | None: ...

    def release(self, segments: Segments) -> None: ...


class SegmentWriter(Protocol):
    """The part of a memory that a sampler uses."""

    def reserve(self, timeout_s: float) -> Segments | None: ...

    def commit(self, segments: Segments) -> None: ...

    def abandon(self, segments: Segments) -> None: ...


class ReadableMemory(SegmentReader, Protocol):
    """The reading half of a memory, with statistics."""

    def stats(self) -> MemoryStats: ...

    def close(self) -> None: ...


class Memory(Protocol):
    """A bounded FIFO queue of blocks. Every wait has a time limit; `timeout_s=0` never waits.

    The writer owns a block between reserve and commit, the reader between take and release.
    """

    def reserve(self, timeout_s: float) -> Segments | None:
        """Return a block to write into, or None while all are in use (back-pressure). Raises MemoryClosed."""
        ...

    def commit(self, segments: Segments) -> None:
        """Hand a complete block to the reader."""
        ...

    def abandon(self, segments: Segments) -> None:
        """Return a reserved block unused."""
        ...

    def take(self, timeout_s: float) -> Segments | None:
        """Return the oldest committed block, or None. Raises MemoryClosed when closed and empty."""
        ...

    def release(self, segments: Segments) -> None:
        """Free a taken block for reuse."""
        ...

    def stats(self) -> MemoryStats: ...

    def close(self) -> None: ...


def make_memory(name: str, spec: SegmentSpec, rows: int, blocks: int) -> Memory:
    made: Memory = plugins.resolve("memory", name, MEMORIES)(spec, rows, blocks)
    return made
