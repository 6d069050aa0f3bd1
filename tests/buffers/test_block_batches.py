"""Batches of the blocks of workers: complete, in order where that was promised, nothing twice and nothing lost."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.buffers.block_batches import BlockBatches
from ludus.core.spaces import ArraySpec
from ludus.core.types import Segments, SegmentSpec

SPEC = SegmentSpec(3, ArraySpec((2,), np.dtype(np.float32)), ArraySpec((), np.dtype(np.int64)), finals=4)
ROWS = 2


def block(worker: int, number: int, version: int = 1, finals: int = 0) -> Segments:
    made = Segments.empty(SPEC, ROWS)
    made.observation[:] = 100 * worker + number
    made.reward[:] = 100 * worker + number
    made.valid[:] = True
    made.version[:] = version
    made.origin[:] = worker * ROWS + np.arange(ROWS)
    made.episode_return = np.array([worker], np.float32)
    made.episode_length = np.array([number])
    for i in range(finals):
        made.final_at[i] = (i % 3, i % ROWS)
        made.final_observation[i] = 1000 + 100 * worker + i
        made.final_value[i] = worker
    made.finals = finals
    return made


class Workers:
    """What workers have made and not yet got back."""

    def __init__(self, count: int) -> None:
        self.made: list[deque[Segments]] = [deque() for _ in range(count)]
        self.held: list[tuple[int, int]] = []
        self.released = 0

    def take_block(self, worker: int) -> Segments | None:
        if not self.made[worker]:
            return None
        taken = self.made[worker].popleft()
        self.held.append((worker, id(taken)))
        return taken

    def release_block(self, worker: int, block: Segments) -> None:
        self.held.remove((worker, id(block)))
        self.released += 1


def batches(workers: Workers, blocks: int, *, in_turn: bool, newest: int = 1, max_lag: int | None = None) -> BlockBatches:
    return BlockBatches(workers, len(workers.made), blocks, in_turn=in_turn, newest=lambda: newest, max_lag=max_lag)


def test_in_turn_a_batch_has_one_block_of_every_worker_in_worker_order() -> None:
    workers = Workers(3)
    made = batches(workers, 3, in_turn=True)
    for worker in (2, 0):
        for number in range(2):
            workers.made[worker].append(block(worker, number))
    assert made.take() is None
    workers.made[1].append(block(1, 0))
    batch = made.take()
    assert batch is not None
    assert batch.reward[0].tolist() == [0, 0, 100, 100, 200, 200]
    assert batch.origin.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.episode_return.tolist() == [0, 1, 2]
    assert not workers.held, "what was copied is given back at once"
    made.release(batch)
    assert made.take() is None
    workers.made[1].append(block(1, 1))
    following = made.take()
    assert following is not None
    assert following.reward[0].tolist() == [1, 1, 101, 101, 201, 201]


def test_final_observations_find_their_rows_in_the_batch() -> None:
    workers = Workers(3)
    made = batches(workers, 3, in_turn=True)
    for worker, finals in enumerate((1, 0, 3)):
        workers.made[worker].append(block(worker, 0, finals=finals))
    batch = made.take()
    assert batch is not None
    assert batch.finals == 4
    assert batch.final_at[:4].tolist() == [[0, 0], [0, 4], [1, 5], [2, 4]]
    assert batch.final_observation[:4, 0].tolist() == [1000, 1200, 1201, 1202]
    assert batch.final_value[:4].tolist() == [0, 2, 2, 2]
    made.release(batch)
    for worker in range(3):
        workers.made[worker].append(block(worker, 1))
    again = made.take()
    assert again is not None
    assert again.finals == 0, "the block is used again, and what was in it before is not"


def test_one_block_is_a_batch_without_a_copy_and_is_given_back_after_learning() -> None:
    workers = Workers(1)
    made = batches(workers, 1, in_turn=True)
    workers.made[0].append(block(0, 0))
    (own,) = workers.made[0]
    batch = made.take()
    assert batch is own
    assert workers.held
    made.release(own)
    assert not workers.held


def test_a_block_that_cannot_be_written_to_is_copied() -> None:
    workers = Workers(1)
    made = batches(workers, 1, in_turn=True)
    workers.made[0].append(block(0, 3))
    workers.made[0][0].reward.flags.writeable = False
    batch = made.take()
    assert batch is not None
    assert batch.reward.flags.writeable
    assert batch.reward[0].tolist() == [3, 3]
    assert not workers.held
    made.release(batch)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 5))
def test_as_they_come_every_block_is_in_exactly_one_batch(order: list[int], blocks: int) -> None:
    workers = Workers(4)
    made = batches(workers, blocks, in_turn=False)
    numbers = [0] * 4
    seen: list[float] = []
    for worker in order:
        workers.made[worker].append(block(worker, numbers[worker]))
        numbers[worker] += 1
        batch = made.take()
        if batch is not None:
            seen.extend(batch.reward[0, ::ROWS].tolist())
            made.release(batch)
    expected = sorted(100.0 * worker + number for worker in range(4) for number in range(numbers[worker]))
    whole = len(order) // blocks * blocks
    assert len(seen) == whole
    assert len(set(seen)) == whole
    assert set(seen) <= set(expected)
    for worker in range(4):
        own = [value for value in seen if value // 100 == worker]
        assert own == sorted(own) or blocks > 1
    assert workers.released == len(order), "also those of a batch that is not complete"


def test_as_they_come_blocks_are_given_back_before_the_batch_is_complete() -> None:
    workers = Workers(1)
    made = batches(workers, 3, in_turn=False)
    for number in range(2):
        workers.made[0].append(block(0, number, finals=number))
        assert not made.ready()
    assert not workers.held
    assert made.waiting == 2
    workers.made[0].append(block(0, 2, finals=2))
    batch = made.take()
    assert batch is not None
    assert batch.reward[0].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.final_at[: batch.finals].tolist() == [[0, 2], [0, 4], [1, 5]]
    assert batch.episode_length.tolist() == [0, 1, 2]


def test_a_fast_worker_does_not_starve_the_others() -> None:
    workers = Workers(2)
    made = batches(workers, 2, in_turn=False)
    workers.made[0].extend(block(0, number) for number in range(8))
    workers.made[1].append(block(1, 0))
    batch = made.take()
    assert batch is not None
    assert batch.reward[0].tolist() == [0, 0, 100, 100]


def test_too_old_blocks_are_dropped_counted_released_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers(1)
    made = batches(workers, 1, in_turn=False, newest=10, max_lag=3)
    for number, version in enumerate((5, 6, 7, 10)):
        workers.made[0].append(block(0, number, version))
    batch = made.take()
    assert batch is not None
    assert batch.reward[0, 0] == 2
    assert made.dropped == 2
    assert workers.released == 2
    assert [record.getMessage()[:40] for record in caplog.records] == ["dropped experience that is 5 updates old"]


def test_a_batch_is_taken_and_released_once() -> None:
    workers = Workers(1)
    made = batches(workers, 1, in_turn=True)
    with pytest.raises(ValueError, match="without having been taken"):
        made.release(block(0, 0))
    workers.made[0].extend([block(0, 0), block(0, 1)])
    assert made.take() is not None
    with pytest.raises(ValueError, match="before the one before"):
        made.take()
