"""Collation: many short segments become one batch. What sessions record has one row and any length; a learner wants a block."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ludus.memory.memory import MemoryStats, Waiting
from ludus.tree import Tree, map_tree
from ludus.types import Segments


def joined(parts: Sequence[Segments]) -> Segments:
    """One block with the rows of all `parts`, side by side; they must be of one spec without kept final observations."""
    first = parts[0]
    rows = sum(part.rows for part in parts)

    def along(axis: int, trees: Sequence[Tree]) -> Tree:
        return map_tree(lambda *leaves: np.concatenate(leaves, axis=axis), trees[0], *trees[1:])

    def field(name: str, axis: int = 1) -> Tree:
        return along(axis, [getattr(part, name) for part in parts])

    empty = Segments.empty(replace(first.spec, steps=0, finals=0), 0)
    return replace(
        empty,
        spec=first.spec,
        **{name: field(name) for name in _OVER_TIME},
        state=field("state") if first.spec.state_every else map_tree(lambda spec: spec.zeros(0, rows), first.spec.state),
        origin=field("origin", 0),
        episode_return=field("episode_return", 0),
        episode_length=field("episode_length", 0),
    )


_OVER_TIME = (
    *("observation", "action", "reward", "terminated", "truncated", "valid", "first"),
    *("log_prob", "value", "version", "action_mask"),
)


class Collated:
    """A memory as a trainer sees it: one `take` is one batch of at least `batch_steps` valid steps, from one model.

    Several memories (one per model) may stand behind it. What a batch was made of is given back as soon as it is copied.
    """

    def __init__(self, memories: Sequence[Waiting], batch_steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._memories, self._batch_steps, self._clock = list(memories), batch_steps, clock
        self._waiting: list[deque[Segments]] = [deque() for _ in memories]
        self._steps = [0] * len(self._memories)
        self._batches: set[int] = set()

    def ready(self) -> bool:
        """Whether `take(0)` would find a batch."""
        return any(self._gather(i) for i in range(len(self._memories)))

    def take(self, timeout_s: float) -> Segments | None:
        deadline = self._clock() + timeout_s
        while True:
            for i, memory in enumerate(self._memories):
                if self._gather(i):
                    return self._batch(i, memory)
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

    def _batch(self, i: int, memory: Waiting) -> Segments:
        parts = list(self._waiting[i])
        self._waiting[i].clear()
        self._steps[i] = 0
        batch = joined(parts)
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
