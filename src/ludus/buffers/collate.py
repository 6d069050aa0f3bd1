"""Collation of many short segments (one row, any length, as sessions record them) into one batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ludus.core.tree import map_tree
from ludus.core.types import OVER_STEPS, OVER_STEPS_AND_AFTER, Ints, Segments
from ludus.transport.base import MemoryStats, ReadableMemory


def join_segments(parts: Sequence[Segments]) -> Segments:
    """Return one block with the rows of all `parts`, padded to the longest.

    They must be of one model; parts that are shorter than their spec must not have final observations.
    """
    lengths = [part.used_steps for part in parts]  # not `trim`: thousands of short segments would cost more than their steps
    steps, finals = max(1, *lengths), sum(part.finals for part in parts)
    batch = Segments.empty(replace(parts[0].spec, steps=steps, finals=finals), sum(part.rows for part in parts))
    row = 0
    for part, used in zip(parts, lengths, strict=True):
        copy_rows(batch, part, row, used)
        row += part.rows
    batch.episode_return = np.concatenate([part.episode_return for part in parts])
    batch.episode_length = np.concatenate([part.episode_length for part in parts])
    return batch


def split_repeated_origins(origin: Ints) -> list[Ints]:
    """Split rows into groups in which every origin occurs once. Rows of one origin are consecutive in time."""
    count = np.arange(len(origin))
    order = np.argsort(origin, kind="stable")
    begins = np.diff(origin[order], prepend=origin[order[:1]] - 1) != 0
    repetition = np.empty_like(count)
    repetition[order] = count - np.maximum.accumulate(np.where(begins, count, 0))
    return [np.flatnonzero(repetition == number) for number in range(int(repetition.max(initial=-1)) + 1)]


def copy_rows(batch: Segments, part: Segments, row: int, steps: int | None = None) -> None:
    """Copy one part to columns `row` … of the batch, and append its final observations. Padding is not overwritten.

    `steps`: copy only that many steps of the part.
    """
    columns, n = slice(row, row + part.rows), part.finals
    used = part.spec.steps if steps is None else steps
    for names, rows in ((OVER_STEPS, used), (OVER_STEPS_AND_AFTER, used + 1)):
        for name in names:
            whole, own = getattr(batch, name), getattr(part, name)
            if isinstance(whole, np.ndarray):
                whole[:rows, columns] = own[:rows]
            else:
                map_tree(lambda to, of, rows=rows: to.__setitem__((slice(rows), columns), of[:rows]), whole, own)
    if part.spec.state_every:
        states = replace(part.spec, steps=used).states
        map_tree(lambda to, of: to.__setitem__((slice(states), columns), of[:states]), batch.state, part.state)
    batch.origin[columns], batch.results[columns] = part.origin, part.results
    if n:
        at = slice(batch.finals, batch.finals + n)
        map_tree(lambda whole, own: whole.__setitem__(at, own[:n]), batch.final_observation, part.final_observation)
        batch.final_at[at] = np.add(part.final_at[:n], (0, row))
        batch.final_value[at] = part.final_value[:n]
        batch.finals += n


def packed_rows(steps: int, decisions: int, seats: int) -> int:
    """Rows of `steps` steps that hold any segments of `seats` seats with `decisions` steps in all, as `pack_segments` places them.

    In the worst case every second step is a gap, and every seat has one row that is nearly empty.
    """
    return -(-2 * decisions // steps) + seats


def pack_segments(parts: Sequence[Segments], block: Segments, *, separate: bool = False) -> None:
    """Copy one-row segments into a block of fixed size, those of one origin one after the other in as few rows as they need.

    `parts` of one origin are in the order of time. `separate`: every segment has a row of its own. Where a segment does not end with a terminated episode, the next one begins after the
    index that holds its bootstrap observation. All other steps of the block become invalid. Raises ValueError if the block is too small.
    """
    for name in ("valid", "terminated", "truncated", "first"):
        getattr(block, name).fill(False)
    for name in ("reward", "value", "log_prob", "results"):
        getattr(block, name).fill(0)
    block.origin.fill(-1)
    rows: dict[int, tuple[int, int]] = {}  # origin → its newest row, and the first free step there
    used = 0
    for part in parts:
        length = int(np.count_nonzero(part.valid))
        if not length:
            continue
        origin = int(part.origin[0])
        row, start = rows.get(origin, (0, block.spec.steps))
        if separate or start + length > block.spec.steps:
            row, start, used = used, 0, used + 1
            if row == block.rows:
                raise ValueError(f"{len(parts)} segments do not fit into {block.rows} rows of {block.spec.steps} steps.")
        _put_at(block, part, row, start, length)
        end = start + length + (not part.terminated[length - 1, 0])
        every = block.spec.state_every
        rows[origin] = row, -(-end // every) * every if every else end  # recurrent states are stored at multiples of it
        block.origin[row] = origin
    block.version[:] = np.where(block.valid, block.version, block.version.max(where=block.valid, initial=0))


def _put_at(block: Segments, part: Segments, row: int, start: int, length: int) -> None:
    """Copy the valid steps of a segment, and the observation and value after them if there is an index for them."""
    steps = slice(start, start + length)
    for name in OVER_STEPS:
        map_tree(lambda whole, own: whole.__setitem__((steps, row), own[:length, 0]), getattr(block, name), getattr(part, name))
    after = slice(start, start + length + 1)
    for name in OVER_STEPS_AND_AFTER:
        map_tree(
            lambda whole, own: whole.__setitem__((after, row), own[: length + 1, 0]), getattr(block, name), getattr(part, name)
        )
    if every := block.spec.state_every:
        states = slice(start // every, start // every + -(-length // every))
        map_tree(
            lambda whole, own: whole.__setitem__((states, row), own[: states.stop - states.start, 0]), block.state, part.state
        )
    block.results[row] += part.results[0]


def without_empty_rows(block: Segments) -> Segments:
    """The rows with at least one valid step, as a copy; the block itself if all have one, or none. Final observations are not included."""
    used = np.flatnonzero(block.valid.any(axis=0))
    if len(used) in (0, block.rows):
        return block
    columns = {
        name: map_tree(lambda x: x[:, used], getattr(block, name)) for name in (*OVER_STEPS, *OVER_STEPS_AND_AFTER, "state")
    }
    return replace(block, origin=block.origin[used], results=block.results[used], cache={}, **columns)


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
