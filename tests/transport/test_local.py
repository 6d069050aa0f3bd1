"""Memory within one process: the contract of every memory, and that it copies nothing."""

from __future__ import annotations

import numpy as np
import pytest

from ludus.errors import UnknownName
from ludus.testing.memory_contract import ROWS, SPEC, MakeMemory, MemoryContract, reserve_block, sign
from ludus.transport.base import make_memory
from ludus.transport.local import LocalMemory


class TestLocalMemory(MemoryContract):
    @pytest.fixture
    def make(self) -> MakeMemory:
        return LocalMemory


def test_a_block_is_handed_over_without_a_copy() -> None:
    memory = LocalMemory(SPEC, ROWS, 1)
    written = sign(reserve_block(memory), 1)
    memory.commit(written)
    taken = memory.take(0)
    assert taken is written
    memory.release(taken)
    assert memory.reserve(0) is written


def test_views_of_a_block_are_kept_with_it() -> None:
    memory = LocalMemory(SPEC, ROWS, 1)
    block = reserve_block(memory)
    block.cache["view"] = view = block.reward[0]
    memory.commit(block)
    taken = memory.take(0)
    assert taken is not None
    memory.release(taken)
    again = reserve_block(memory)
    assert again.cache["view"] is view
    assert np.shares_memory(view, again.reward)


def test_a_memory_is_made_by_name() -> None:
    assert isinstance(make_memory("local", SPEC, ROWS, 2), LocalMemory)
    assert isinstance(make_memory("ludus.transport.local:LocalMemory", SPEC, ROWS, 2), LocalMemory)
    with pytest.raises(UnknownName, match="Did you mean 'local'"):
        make_memory("locl", SPEC, ROWS, 2)
