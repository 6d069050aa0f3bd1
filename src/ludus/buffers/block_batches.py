"""Batches for the trainer from the blocks of N sampling workers, in worker order or first come, first served."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from ludus.buffers.collate import copy_rows
from ludus.core.types import Floats, Ints, Segments

log = logging.getLogger(__name__)

_WARN_EVERY_S = 30.0


class WorkerBlocks(Protocol):
    """Blocks of N workers, each worker's in the order of writing."""

    def take_block(self, worker: int) -> Segments | None:
        """Return the next block of the worker, or None. Never blocks."""
        ...

    def release_block(self, worker: int, block: Segments) -> None: ...


class BlockBatches:
    """A batch is `blocks` blocks of equal size, copied once into a reused block.

    `in_turn`: take one block of every worker, in worker order, so that batches do not depend on timing. Otherwise take blocks
    as they arrive; they are copied and released at once, so a batch may be larger than the workers' memory.
    Blocks sampled with weights more than `max_lag` versions old are dropped and counted.
    """

    def __init__(
        self,
        lanes: WorkerBlocks,
        workers: int,
        blocks: int,
        *,
        in_turn: bool,
        newest: Callable[[], int],
        max_lag: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if in_turn and blocks != workers:
            raise ValueError(f"{blocks} blocks in turn from {workers} workers")
        self._lanes, self._workers, self._blocks, self._in_turn = lanes, workers, blocks, in_turn
        self._newest, self._max_lag, self._clock = newest, max_lag, clock
        self._held: dict[int, Segments] = {}
        self._episodes: list[tuple[Floats, Ints]] = []
        self._copied = self._next = 0
        self._batch: Segments | None = None
        self._taken = False
        self._warned_at = -_WARN_EVERY_S
        self.dropped = 0
        """Number of blocks dropped because of `max_lag`."""

    @property
    def waiting(self) -> int:
        """Number of blocks collected for the next batch."""
        return len(self._held) + self._copied

    def ready(self) -> bool:
        """Return whether `take` would return a batch."""
        while not self._taken and self.waiting < self._blocks:
            if not self._gather():
                return False
        return not self._taken

    def take(self, timeout_s: float = 0.0) -> Segments | None:
        """Return the next batch or None. Never blocks: the caller that drives the workers does the waiting."""
        if self._taken:
            raise ValueError("A batch was taken before the one before it was released.")
        if not self.ready():
            return None
        self._taken = True
        if self._blocks == 1:
            (block,) = self._held.values()
            if block.reward.flags.writeable:  # Ray's memory is read-only and tensors cannot share it
                return block
        for worker in sorted(self._held):
            self._copy(worker, self._held.pop(worker))
        assert self._batch is not None
        returns, lengths = zip(*self._episodes, strict=True)
        self._batch.episode_return, self._batch.episode_length = np.concatenate(returns), np.concatenate(lengths)
        self._copied = 0
        self._episodes.clear()
        return self._batch

    def release(self, segments: Segments) -> None:
        if not self._taken:
            raise ValueError("A batch was released without having been taken.")
        self._taken = False
        for worker in list(self._held):
            self._lanes.release_block(worker, self._held.pop(worker))

    def _copy(self, worker: int, block: Segments) -> None:
        if self._batch is None:
            self._batch = allocate_batch(block, self._blocks)
        if self._copied == 0:
            self._batch.finals = 0
        copy_rows(self._batch, block, self._copied * block.rows)
        self._episodes.append((block.episode_return, block.episode_length))
        self._copied += 1
        self._lanes.release_block(worker, block)

    def _gather(self) -> bool:
        """Collect one more block; return False if there is none."""
        for offset in range(self._workers):
            worker = (self._next + offset) % self._workers
            if self._in_turn and worker in self._held:
                continue
            block = self._lanes.take_block(worker)
            while block is not None and self._too_old(block):
                self._lanes.release_block(worker, block)
                block = self._lanes.take_block(worker)
            if block is not None:
                if self._in_turn or self._blocks == 1:
                    self._held[worker] = block
                else:
                    self._copy(worker, block)
                self._next = (worker + 1) % self._workers  # the other workers come first next time
                return True
        return False

    def _too_old(self, block: Segments) -> bool:
        if self._max_lag is None:
            return False
        lag = self._newest() - int(block.version.max())
        if lag <= self._max_lag:
            return False
        self.dropped += 1
        if self._clock() - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = self._clock()
            log.warning(
                "dropped experience that is %d updates old (max_lag is %d; %d blocks so far): sampling is ahead of "
                "learning; use fewer workers, or fewer blocks_ahead",
                lag,
                self._max_lag,
                self.dropped,
            )
        return True


def allocate_batch(block: Segments, count: int) -> Segments:
    spec = replace(block.spec, finals=block.spec.finals * count)
    return Segments.empty(spec, block.rows * count)
