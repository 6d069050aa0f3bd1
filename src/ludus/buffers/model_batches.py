"""Batches of several models from the blocks of workers; a worker writes one block of every model in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ludus.buffers.block_batches import BlockBatches, WorkerBlocks
from ludus.buffers.collate import without_empty_rows
from ludus.core.types import Segments
from ludus.transport.base import SegmentReader


def trim_batch(whole: Segments, results: Sequence[str]) -> Segments:
    """The batch without its empty rows, with only the first results, all of them in its first row."""
    batch = without_empty_rows(whole)
    sums = np.zeros((batch.rows, len(results), 2), np.float32)
    sums[0] = whole.results[:, : len(results)].sum(axis=0)
    return replace(batch, spec=replace(batch.spec, results=tuple(results)), results=sums)


class TrimmedBatches:
    """The batches of another reader, without their empty rows."""

    def __init__(
        self, batches: SegmentReader, results: Sequence[str], on_batch: Callable[[Segments], None] = lambda batch: None
    ) -> None:
        """`results`: those that batches keep. `on_batch` is called with every whole batch."""
        self._batches, self._results, self._on_batch = batches, tuple(results), on_batch
        self._taken: dict[int, Segments] = {}

    def take(self, timeout_s: float) -> Segments | None:
        whole = self._batches.take(timeout_s)
        if whole is None:
            return None
        self._on_batch(whole)
        batch = trim_batch(whole, self._results)
        self._taken[id(batch)] = whole
        return batch

    def release(self, segments: Segments) -> None:
        self._batches.release(self._taken.pop(id(segments)))


class _NextBlocks:
    """The next block of every worker, so that its model is known before it is taken."""

    def __init__(self, lanes: WorkerBlocks) -> None:
        self._lanes = lanes
        self._next: dict[int, Segments] = {}

    def __len__(self) -> int:
        return len(self._next)

    def take(self, worker: int, model: str) -> Segments | None:
        if worker not in self._next:
            block = self._lanes.take_block(worker)
            if block is None:
                return None
            self._next[worker] = block
        return self._next.pop(worker) if self._next[worker].model == model else None

    def release(self, worker: int, block: Segments) -> None:
        self._lanes.release_block(worker, block)


class _BlocksOfModel:
    """The blocks of one model. Implements WorkerBlocks."""

    def __init__(self, blocks: _NextBlocks, model: str, on_block: Callable[[Segments], None]) -> None:
        self._blocks, self._model, self._on_block = blocks, model, on_block
        self.env_steps: int | None = None
        """Environment steps of the blocks taken since it was reset."""

    def take_block(self, worker: int) -> Segments | None:
        block = self._blocks.take(worker, self._model)
        if block is not None:
            self._on_block(block)
            if block.env_steps is not None:
                self.env_steps = (self.env_steps or 0) + block.env_steps
        return block

    def release_block(self, worker: int, block: Segments) -> None:
        self._blocks.release(worker, block)


class ModelBatches:
    """A batch is `blocks` blocks of one model, without their empty rows. With `in_turn` the models follow each other in a fixed order."""

    def __init__(
        self,
        lanes: WorkerBlocks,
        models: Sequence[str],
        workers: int,
        blocks: int,
        *,
        in_turn: bool,
        newest: Callable[[str], int],
        max_lag: int | None = None,
        on_block: Callable[[Segments], None] = lambda block: None,
        results: Sequence[str] = (),
    ) -> None:
        """`newest`: newest version of a model. `on_block` is called with every block. `results`: those that batches keep, the first ones
        of the blocks.
        """
        self._next_blocks = _NextBlocks(lanes)
        self._lanes = {model: _BlocksOfModel(self._next_blocks, model, on_block) for model in models}
        self._batches = {
            model: BlockBatches(
                self._lanes[model], workers, blocks, in_turn=in_turn, newest=functools.partial(newest, model), max_lag=max_lag
            )
            for model in models
        }
        self._in_turn, self._order, self._results = in_turn, list(models), tuple(results)
        self._taken: dict[int, tuple[str, Segments]] = {}

    @property
    def waiting(self) -> int:
        """Number of blocks collected for the next batches."""
        return len(self._next_blocks) + sum(batches.waiting for batches in self._batches.values())

    @property
    def dropped(self) -> int:
        return sum(batches.dropped for batches in self._batches.values())

    def ready(self) -> bool:
        return self._ready_model() is not None

    def _ready_model(self) -> str | None:
        candidates = self._order[:1] if self._in_turn else self._order
        return next((model for model in candidates if self._batches[model].ready()), None)

    def take(self, timeout_s: float = 0.0) -> Segments | None:
        """Return the next batch or None. Never blocks."""
        model = self._ready_model()
        if model is None:
            return None
        whole = self._batches[model].take()
        assert whole is not None
        self._order.remove(model)
        self._order.append(model)  # the other models come first next time
        lane = self._lanes[model]
        batch = replace(trim_batch(whole, self._results), env_steps=lane.env_steps)
        lane.env_steps = None
        self._taken[id(batch)] = model, whole
        return batch

    def release(self, segments: Segments) -> None:
        if id(segments) not in self._taken:
            raise ValueError("A batch was released without having been taken.")
        model, whole = self._taken.pop(id(segments))
        self._batches[model].release(whole)
