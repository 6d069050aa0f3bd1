"""Collation of many short segments (one row, any length, as sessions record them) into one batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ludus.core.tree import Array, map_tree
from ludus.core.types import OVER_STEPS, OVER_STEPS_AND_AFTER, Ints, Segments
from ludus.transport.base import MemoryStats, ReadableMemory


def join_segments(parts: Sequence[Segments]) -> Segments:
    """Return one block with the rows of all `parts`, padded to the longest.

    They must be of one model; parts that are shorter than their spec must not have final observations.
    """
    parts = [part.trim() for part in parts]
    steps, finals = max(1, *(part.spec.steps for part in parts)), sum(part.finals for part in parts)
    batch = Segments.empty(replace(parts[0].spec, steps=steps, finals=finals), sum(part.rows for part in parts))
    join_into(batch, parts)
    return batch


def join_into(batch: Segments, parts: Sequence[Segments]) -> None:
    """Copy `parts` into a block with space for all of their rows and final observations.

    Padding is not overwritten: reuse a block only for parts of its own length.
    """
    row, batch.finals = 0, 0
    for part in parts:
        put_rows(batch, part, row)
        row += part.rows
    batch.episode_return = np.concatenate([part.episode_return for part in parts])
    batch.episode_length = np.concatenate([part.episode_length for part in parts])


def split_repeated_origins(origin: Ints) -> list[Ints]:
    """Split rows into groups in which every origin occurs once. Rows of one origin are consecutive in time."""
    count = np.arange(len(origin))
    order = np.argsort(origin, kind="stable")
    begins = np.diff(origin[order], prepend=origin[order[:1]] - 1) != 0
    repetition = np.empty_like(count)
    repetition[order] = count - np.maximum.accumulate(np.where(begins, count, 0))
    return [np.flatnonzero(repetition == number) for number in range(int(repetition.max(initial=-1)) + 1)]


def put_rows(batch: Segments, part: Segments, row: int) -> None:
    """Copy one part to columns `row` … of the batch, and append its final observations."""
    columns = slice(row, row + part.rows)
    for name in (*OVER_STEPS, *OVER_STEPS_AND_AFTER, "state"):
        map_tree(lambda whole, own: _put(whole, own, columns), getattr(batch, name), getattr(part, name))
    batch.origin[columns], batch.results[columns] = part.origin, part.results
    _put_finals(batch, part, row)


def _put(whole: Array, own: Array, columns: slice) -> None:
    whole[: len(own), columns] = own


def _put_finals(batch: Segments, part: Segments, row: int) -> None:
    n = part.finals
    if not n:
        return
    at = slice(batch.finals, batch.finals + n)
    map_tree(lambda whole, own: _put_first(whole, own, at), batch.final_observation, part.final_observation)
    batch.final_at[at] = np.add(part.final_at[:n], (0, row))
    batch.final_value[at] = part.final_value[:n]
    batch.finals += n


def _put_first(whole: Array, own: Array, at: slice) -> None:
    whole[at] = own[: at.stop - at.start]


class CollatedBatches:
    """Batches of at least `batch_steps` valid steps of one model, from one memory per model.

    Segments are released to their memory as soon as they are copied into a batch.
    """

    def __init__(
        self, memories: Sequence[ReadableMemory], batch_steps: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._memories, self._batch_steps, self._clock = list(memories), batch_steps, clock
        self._waiting: list[deque[Segments]] = [deque() for _ in memories]
        self._steps = [0] * len(self._memories)
        self._next = 0
        self._batches: set[int] = set()

    @property
    def waiting_steps(self) -> int:
        """Number of steps collected for the next batch."""
        return sum(self._steps)

    def ready(self) -> bool:
        """Return whether `take(0)` would return a batch."""
        return any(self._gather(i) for i in range(len(self._memories)))

    def take(self, timeout_s: float) -> Segments | None:
        deadline = self._clock() + timeout_s
        while True:
            for i in (*range(self._next, len(self._memories)), *range(self._next)):
                if self._gather(i):
                    self._next = (i + 1) % len(self._memories)  # the other models come first next time
                    return self._batch(i, self._memories[i])
            if self._clock() >= deadline:
                return None
            time.sleep(0.001)

    def _gather(self, i: int) -> bool:
        while self._steps[i] < self._batch_steps:
            segment = self._memories[i].take(0)
            if segment is None:
                return False
            self._waiting[i].append(segment)
            self._steps[i] += segment.steps
        return True

    def _batch(self, i: int, memory: ReadableMemory) -> Segments:
        parts = list(self._waiting[i])
        self._waiting[i].clear()
        self._steps[i] = 0
        batch = join_segments(parts)
        for part in parts:
            memory.release(part)
        self._batches.add(id(batch))
        return batch

    def release(self, batch: Segments) -> None:
        if id(batch) not in self._batches:
            raise ValueError("A batch was released without having been taken.")
        self._batches.remove(id(batch))

    def stats(self) -> MemoryStats:
        parts = [memory.stats() for memory in self._memories]
        total = (sum(getattr(part, name) for part in parts) for name in ("committed", "taken", "released", "dropped", "waiting"))
        return MemoryStats(*total)

    def close(self) -> None:
        for memory in self._memories:
            memory.close()
