"""Contract suite for memories. A backend is correct if it passes:

class TestMyMemory(MemoryContract):
    @pytest.fixture
    def make(self) -> MakeMemory:
        return MyMemory                        # called with (spec, rows, blocks)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from ludus.core.spaces import ArraySpec
from ludus.core.tree import leaves, map_tree
from ludus.core.types import Segments, SegmentSpec
from ludus.errors import MemoryClosed
from ludus.testing.background_call import Call
from ludus.transport.base import Memory

MakeMemory = Callable[[SegmentSpec, int, int], Memory]

ROWS = 3
SPEC = SegmentSpec(
    steps=4,
    observation={"picture": ArraySpec((2, 2, 1), np.dtype(np.uint8)), "vector": ArraySpec((5,), np.dtype(np.float32))},
    action=(ArraySpec((), np.dtype(np.int64)), ArraySpec((2,), np.dtype(np.float32))),
    mask_size=3,
    state=(ArraySpec((6,), np.dtype(np.float32)),),
    state_every=2,
    finals=2,
    model="left",
    results=("won", "seconds"),
)
"""Spec with all kinds of arrays that a transport must carry."""

_WAIT_S = 60.0  # how long a test waits for what must happen; never reached when it does
_SHORT_S = 0.02


class MemoryContract:
    @pytest.fixture
    def make(self) -> MakeMemory:
        raise NotImplementedError("Override the fixture `make`: (spec, rows, blocks) → an empty memory.")

    # -- order and bounds

    def test_blocks_come_out_in_the_order_in_which_they_were_committed(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 4)
        for turn in range(3):  # more often than there are blocks
            for i in range(4):
                write(memory, 10 * turn + i)
            assert [read(memory) for _ in range(4)] == [10 * turn + i for i in range(4)]

    def test_the_order_is_that_of_the_commits_not_of_the_reservations(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 2)
        one, two = reserve_block(memory), reserve_block(memory)
        sign(one, 1)
        sign(two, 2)
        memory.commit(two)
        memory.commit(one)
        assert [read(memory), read(memory)] == [2, 1]

    def test_a_block_has_the_shape_that_was_asked_for(self, make: MakeMemory) -> None:
        block = reserve_block(make(SPEC, ROWS, 1))
        expected = Segments.empty(SPEC, ROWS)
        assert block.rows == ROWS
        assert block.spec == SPEC
        for (path, got), (_, wanted) in zip(leaves(block.arrays()), leaves(expected.arrays()), strict=True):
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), path

    def test_a_full_memory_pushes_back(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 2)
        write(memory, 1)
        held = reserve_block(memory)
        assert memory.reserve(0) is None
        assert memory.reserve(_SHORT_S) is None
        memory.commit(sign(held, 2))
        assert memory.reserve(0) is None, "a committed block is not free"
        taken = memory.take(0)
        assert taken is not None
        assert memory.reserve(0) is None, "a taken block is not free before it is released"
        memory.release(taken)
        assert memory.reserve(0) is not None
        assert memory.reserve(0) is None

    def test_an_abandoned_block_is_free_again_and_never_seen_by_a_reader(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 1)
        block = sign(reserve_block(memory), 1)
        memory.abandon(block)
        assert memory.take(0) is None
        write(memory, 2)
        assert read(memory) == 2
        with pytest.raises(ValueError, match="abandoned"):
            memory.abandon(block)

    def test_an_empty_memory_gives_none(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 2)
        assert memory.take(0) is None
        assert memory.take(_SHORT_S) is None
        block = reserve_block(memory)
        assert memory.take(0) is None, "a block that is still being written cannot be taken"
        memory.commit(sign(block, 7))
        assert read(memory) == 7
        assert memory.take(0) is None

    def test_a_waiting_writer_gets_room_when_a_block_is_released(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 1)
        write(memory, 1)
        taken = memory.take(0)
        assert taken is not None
        waiting = Call(lambda: memory.reserve(_WAIT_S))
        memory.release(taken)
        assert waiting.result() is not None

    def test_a_waiting_reader_gets_a_block_when_it_is_committed(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 1)
        waiting = Call(lambda: read(memory, _WAIT_S))
        write(memory, 5)
        assert waiting.result() == 5

    # -- ownership

    def test_reserved_blocks_do_not_overlap(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 3)
        blocks = [sign(reserve_block(memory), i) for i in range(3)]
        assert [signature(block) for block in blocks] == [0, 1, 2]

    def test_a_taken_block_is_not_given_to_another_reader(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 3)
        write(memory, 1)
        write(memory, 2)
        first, second = memory.take(0), memory.take(0)
        assert first is not None
        assert second is not None
        sign(reserve_block(memory), 3)
        assert (signature(first), signature(second)) == (1, 2), "a writer was given a block that is being read"
        assert memory.take(0) is None

    def test_a_released_block_is_used_again(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 1)
        for i in range(5):
            write(memory, i)
            assert read(memory) == i

    def test_a_block_of_another_memory_is_rejected(self, make: MakeMemory) -> None:
        memory, other = make(SPEC, ROWS, 1), make(SPEC, ROWS, 1)
        for foreign in (Segments.empty(SPEC, ROWS), reserve_block(other)):
            with pytest.raises(ValueError, match="block"):
                memory.commit(foreign)
            with pytest.raises(ValueError, match="block"):
                memory.release(foreign)
        assert memory.take(0) is None
        assert memory.reserve(0) is not None
        assert memory.reserve(0) is None, "a refused block became one of its own"

    def test_a_block_can_be_given_back_only_once_and_only_by_its_holder(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 2)
        block = sign(reserve_block(memory), 1)
        with pytest.raises(ValueError, match="block"):
            memory.release(block)  # reserved, not taken
        memory.commit(block)
        with pytest.raises(ValueError, match="block"):
            memory.commit(block)
        taken = memory.take(0)
        assert taken is not None
        with pytest.raises(ValueError, match="block"):
            memory.commit(taken)  # taken, not reserved
        memory.release(taken)
        with pytest.raises(ValueError, match="block"):
            memory.release(taken)
        assert memory.take(0) is None
        assert len([b for b in (memory.reserve(0) for _ in range(3)) if b is not None]) == 2, "the number of blocks changed"

    # -- contents

    def test_everything_inside_a_block_arrives(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 1)
        for seed in range(2):  # the second time in a used block
            block = reserve_block(memory)
            _fill(block, seed)
            sent = map_tree(np.copy, block.arrays())
            finals = block.finals
            memory.commit(block)
            taken = memory.take(0)
            assert taken is not None
            assert (taken.finals, taken.model, taken.spec) == (finals, SPEC.model, SPEC)
            for (path, got), (_, wanted) in zip(leaves(taken.arrays()), leaves(sent), strict=True):
                np.testing.assert_array_equal(got, wanted, err_msg=path)
                assert got.dtype == wanted.dtype, path
            memory.release(taken)

    def test_a_fresh_reservation_holds_no_final_observations(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 1)
        block = reserve_block(memory)
        block.finals = 2
        memory.commit(block)
        memory.release(_present(memory.take(0)))
        assert reserve_block(memory).finals == 0

    # -- closing

    def test_closing_wakes_waiting_threads(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 1)
        takers = [Call(lambda: memory.take(_WAIT_S)) for _ in range(2)]
        reserve_block(memory)
        reservers = [Call(lambda: memory.reserve(_WAIT_S)) for _ in range(2)]
        memory.close()
        for call in (*takers, *reservers):
            with pytest.raises(MemoryClosed):
                call.result()

    def test_a_closed_memory_takes_nothing_new(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 2)
        memory.close()
        with pytest.raises(MemoryClosed):
            memory.reserve(0)
        with pytest.raises(MemoryClosed):
            memory.take(0)

    def test_what_was_committed_before_closing_can_still_be_taken(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 3)
        write(memory, 1)
        write(memory, 2)
        memory.close()
        assert [read(memory), read(memory)] == [1, 2]
        with pytest.raises(MemoryClosed):
            memory.take(0)

    def test_closing_twice_is_closing(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 1)
        memory.close()
        memory.close()
        with pytest.raises(MemoryClosed):
            memory.take(_SHORT_S)

    # -- counting

    def test_the_statistics_add_up(self, make: MakeMemory) -> None:
        memory = make(SPEC, ROWS, 3)
        for i in range(3):
            write(memory, i)
        assert memory.reserve(0) is None
        assert _counts(memory) == {"committed": 3, "taken": 0, "released": 0, "dropped": 0, "waiting": 3}
        taken = _present(memory.take(0))
        assert _counts(memory) == {"committed": 3, "taken": 1, "released": 0, "dropped": 0, "waiting": 2}
        memory.release(taken)
        read(memory)
        assert _counts(memory) == {"committed": 3, "taken": 2, "released": 2, "dropped": 0, "waiting": 1}

    # -- many at once

    @pytest.mark.parametrize(("producers", "consumers"), [(1, 1), (4, 1), (1, 4), (4, 4)])
    def test_many_writers_and_readers_lose_and_double_nothing(self, make: MakeMemory, producers: int, consumers: int) -> None:
        each = 60
        memory = make(SPEC, ROWS, 3)
        seen: list[list[int]] = [[] for _ in range(consumers)]

        def produce(who: int) -> None:
            for i in range(each):
                write(memory, 1000 * who + i, _WAIT_S)

        def consume(who: int) -> None:
            while True:
                try:
                    seen[who].append(read(memory, _WAIT_S))
                except MemoryClosed:
                    return

        readers = [Call(lambda c=c: consume(c)) for c in range(consumers)]  # type: ignore[misc]
        writers = [Call(lambda p=p: produce(p)) for p in range(producers)]  # type: ignore[misc]
        for writer in writers:
            writer.result()
        memory.close()
        for reader in readers:
            reader.result()
        everything = Counter(number for numbers in seen for number in numbers)
        assert everything == Counter(1000 * who + i for who in range(producers) for i in range(each))
        for numbers in seen:  # of each writer, every reader sees a rising sequence
            for who in range(producers):
                mine = [n for n in numbers if n // 1000 == who]
                assert mine == sorted(mine)
        total = producers * each
        assert _counts(memory) == {"committed": total, "taken": total, "released": total, "dropped": 0, "waiting": 0}


# -- a block that says who wrote it -------------------------------------------------------------------------------------


def sign(block: Segments, number: int) -> Segments:
    """Write a number into all arrays of a block."""
    block.reward[:] = number
    block.version[:] = number
    block.observation["vector"][:] = number
    return block


def signature(block: Segments) -> int:
    """Return the number that `sign` wrote; fails if two writers wrote to the block."""
    numbers = {int(n) for array in (block.reward, block.version, block.observation["vector"]) for n in np.unique(array)}
    assert len(numbers) == 1, f"a block holds parts of several: {numbers}"
    return numbers.pop()


def reserve_block(memory: Memory) -> Segments:
    return _present(memory.reserve(_WAIT_S))


def write(memory: Memory, number: int, timeout_s: float = 0) -> None:
    memory.commit(sign(_present(memory.reserve(timeout_s)), number))


def read(memory: Memory, timeout_s: float = 0) -> int:
    block = _present(memory.take(timeout_s))
    number = signature(block)
    memory.release(block)
    return number


def _present(block: Segments | None) -> Segments:
    assert block is not None, "the memory gave no block"
    return block


def _fill(block: Segments, seed: int) -> None:
    random = np.random.default_rng(seed)
    for _, array in leaves(block.arrays()):
        array[...] = random.integers(0, 2 if array.dtype == np.bool_ else 100, array.shape).astype(array.dtype)
    block.finals = 1 + seed
    block.episode_return = random.normal(size=3 + seed).astype(np.float32)
    block.episode_length = random.integers(1, 100, 3 + seed)


def _counts(memory: Memory) -> dict[str, int]:
    stats = memory.stats()
    return {name: getattr(stats, name) for name in ("committed", "taken", "released", "dropped", "waiting")}
