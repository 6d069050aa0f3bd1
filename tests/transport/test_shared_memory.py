"""Memory between two processes: segments in place in a ring, seen by the other side without a copy."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.tree import leaves
from ludus.core.types import Segments, SegmentSpec
from ludus.envs.vector_env import Environments, LoopEnvironments, VectorEnvironments
from ludus.errors import Damaged, MemoryClosed, UsageError
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.sampling.sampler import Sampler, segment_spec
from ludus.testing.memory_contract import ROWS, SPEC, MakeMemory, MemoryContract, sign, signature
from ludus.transport.base import Memory, MemoryStats, SegmentWriter
from ludus.transport.local import LocalMemory
from ludus.transport.ring_buffer import Wakeup, create_ring
from ludus.transport.shared_memory import BlockLayout, BlockLayouts, SharedReader, SharedWriter, ring_capacity
from tests.transport.killing import forked, reap


class _Pair:
    """Both halves in one process, for several threads, so that the contract of every memory can be held against them."""

    def __init__(self, directory: Path, spec: SegmentSpec, rows: int, blocks: int) -> None:
        directory.mkdir()
        layout = BlockLayout(spec, rows)
        create_ring(directory / "ring", ring_capacity(layout, blocks))
        self.writer, self.reader = SharedWriter(directory / "ring", layout), SharedReader(directory / "ring", layout)
        self._changed = threading.Condition()
        self._reserved: Segments | None = None

    def reserve(self, timeout_s: float) -> Segments | None:
        end = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self.reader.ring.over:
                    raise MemoryClosed("over")
                if self._reserved is None:
                    self._reserved = self.writer.reserve(0)
                    if self._reserved is not None:
                        return self._reserved
                if (left := end - time.monotonic()) <= 0:
                    return None
                self._changed.wait(left)

    def commit(self, segments: Segments) -> None:
        with self._changed:
            self.writer.commit(segments)
            self._reserved = None
            self._changed.notify_all()

    def abandon(self, segments: Segments) -> None:
        with self._changed:
            self.writer.abandon(segments)
            self._reserved = None
            self._changed.notify_all()

    def take(self, timeout_s: float) -> Segments | None:
        end = time.monotonic() + timeout_s
        with self._changed:
            while (block := self.reader.take()) is None:
                if self.reader.ring.over:
                    raise MemoryClosed("over")
                if (left := end - time.monotonic()) <= 0:
                    return None
                self._changed.wait(left)
            return block

    def release(self, segments: Segments) -> None:
        with self._changed:
            self.reader.release(segments)
            self._changed.notify_all()

    def stats(self) -> MemoryStats:
        with self._changed:
            return self.reader.stats()

    def close(self) -> None:
        with self._changed:
            self.reader.ring.finish()
            self._changed.notify_all()


class TestSharedMemory(MemoryContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeMemory:
        made = iter(range(100))

        def pair(spec: SegmentSpec, rows: int, blocks: int) -> Memory:
            return _Pair(tmp_path / str(next(made)), spec, rows, blocks)

        return pair

    # A ring has one reservation at a time, so what is promised of several at once does not arise.
    test_the_order_is_that_of_the_commits_not_of_the_reservations = None  # type: ignore[assignment]
    test_reserved_blocks_do_not_overlap = None  # type: ignore[assignment]
    test_a_block_can_be_given_back_only_once_and_only_by_its_holder = None  # type: ignore[assignment]


@pytest.fixture
def halves(tmp_path: Path) -> tuple[SharedWriter, SharedReader]:
    return made(tmp_path, BlockLayout(SPEC, ROWS), 2)


def made(directory: Path, layout: BlockLayout, blocks: int) -> tuple[SharedWriter, SharedReader]:
    create_ring(directory / "ring", ring_capacity(layout, blocks))
    return SharedWriter(directory / "ring", layout), SharedReader(directory / "ring", layout)


def reserved(room: SegmentWriter) -> Segments:
    block = room.reserve(0)
    assert block is not None
    return block


def taken(reader: SharedReader) -> Segments:
    block = reader.take()
    assert block is not None
    return block


def test_a_block_can_be_given_back_only_once_and_only_by_its_holder(halves: tuple[SharedWriter, SharedReader]) -> None:
    writer, reader = halves
    block = sign(reserved(writer), 1)
    writer.commit(block)
    with pytest.raises(ValueError, match="committed without"):
        writer.commit(block)
    with pytest.raises(ValueError, match="abandoned without"):
        writer.abandon(block)
    with pytest.raises(ValueError, match="released without"):
        reader.release(block)
    out = taken(reader)
    reader.release(out)
    with pytest.raises(ValueError, match="released without"):
        reader.release(out)
    with pytest.raises(UsageError, match="has a reservation already"):
        [writer.reserve(0) for _ in range(2)]


def test_what_the_writer_writes_is_what_the_reader_has(halves: tuple[SharedWriter, SharedReader]) -> None:
    """The very same memory, mapped twice: what is written after the hand-over shows on the other side."""
    writer, reader = halves
    block = sign(reserved(writer), 1)
    writer.commit(block)
    out = taken(reader)
    assert signature(out) == 1
    sign(block, 2)
    assert signature(out) == 2


def test_blocks_at_one_place_are_one_object_so_that_their_cache_is_kept(halves: tuple[SharedWriter, SharedReader]) -> None:
    writer, reader = halves
    seen = set()
    for i in range(6):
        block = reserved(writer)
        assert block.cache.setdefault("view", block.reward).base is block.reward.base
        seen.add(id(block))
        writer.commit(sign(block, i))
        out = taken(reader)
        assert (reader.number(out), signature(out)) == (i, i)
        reader.release(out)
    assert len(seen) == 2


def test_arrays_are_aligned_writable_and_good_for_torch(halves: tuple[SharedWriter, SharedReader]) -> None:
    block = reserved(halves[0])
    for path, array in leaves({k: v for k, v in block.arrays().items() if not k.startswith("episode")}):
        assert array.ctypes.data % 64 == 0, path
        assert array.flags.writeable, path
        torch.from_numpy(array).fill_(1)
        assert (array == 1).all(), path


def test_a_fresh_block_is_as_an_empty_one_and_all_is_allowed(tmp_path: Path) -> None:
    layout = BlockLayout(SPEC, ROWS)
    writer, _ = made(tmp_path, layout, 1)
    block = reserved(writer)
    for _, array in leaves(block.arrays()):
        array.fill(7)
    writer.abandon(block)
    writer.close()
    block = reserved(SharedWriter(tmp_path / "ring", layout))
    for (path, got), (_, wanted) in zip(leaves(block.arrays()), leaves(Segments.empty(SPEC, ROWS).arrays()), strict=True):
        np.testing.assert_array_equal(got, wanted, err_msg=path)


def test_the_episodes_of_a_block_may_be_kept_when_it_is_released(halves: tuple[SharedWriter, SharedReader]) -> None:
    writer, reader = halves
    kept = []
    for i in range(5):
        block = sign(reserved(writer), i)
        block.episode_return, block.episode_length = np.full(i, i, np.float32), np.full(i, i)
        writer.commit(block)
        out = taken(reader)
        kept.append((out.episode_return, out.episode_length))
        reader.release(out)
    assert [(a.tolist(), b.tolist()) for a, b in kept] == [([i] * i, [i] * i) for i in range(5)]


def test_more_episodes_than_steps_are_refused(halves: tuple[SharedWriter, SharedReader]) -> None:
    writer, _ = halves
    block = reserved(writer)
    block.episode_return = np.zeros(SPEC.steps * ROWS + 1, np.float32)
    block.episode_length = np.zeros(SPEC.steps * ROWS + 1, np.int64)
    with pytest.raises(UsageError, match="13 episodes cannot have ended in 12 steps"):
        writer.commit(block)
    writer.abandon(block)


def test_sides_that_disagree_about_the_shape_notice(tmp_path: Path) -> None:
    writer, _ = made(tmp_path, BlockLayout(SPEC, ROWS), 2)
    writer.commit(sign(reserved(writer), 1))
    with pytest.raises(Damaged, match="where a block has"):
        SharedReader(tmp_path / "ring", BlockLayout(SPEC, ROWS + 5)).take()
    with pytest.raises(Damaged, match="not contain segments of this layout"):
        SharedReader(tmp_path / "ring", BlockLayout(replace(SPEC, model="right"), ROWS)).take()


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["write", "abandon", "take", "release oldest", "release newest", "new writer"]), max_size=60))
def test_it_is_a_queue_whatever_is_done(tmp_path_factory: pytest.TempPathFactory, actions: list[str]) -> None:
    directory, layout, blocks = tmp_path_factory.mktemp("queue"), BlockLayout(SPEC, ROWS), 3
    writer, reader = made(directory, layout, blocks)
    waiting: deque[int] = deque()
    held: deque[tuple[int, Segments]] = deque()
    unreleased: list[int] = []  # from the oldest that is held or waits, as room is made in this order
    written = 0
    for action in actions:
        if action == "write":
            block = writer.reserve(0)
            assert (block is None) == (len(unreleased) == blocks)
            if block is not None:
                writer.commit(sign(block, written))
                waiting.append(written)
                unreleased.append(written)
                written += 1
        elif action == "abandon":
            block = writer.reserve(0)
            if block is not None:
                writer.abandon(sign(block, -1))
        elif action == "take":
            out = reader.take()
            assert (out is None) == (not waiting)
            if out is not None:
                assert signature(out) == waiting[0]
                held.append((waiting.popleft(), out))
        elif action.startswith("release") and held:
            number, out = held.popleft() if action.endswith("oldest") else held.pop()
            assert signature(out) == number
            reader.release(out)
            oldest = min([n for n, _ in held] + list(waiting), default=written)
            unreleased = [n for n in unreleased if n >= oldest]
        elif action == "new writer":
            writer.close()
            writer = SharedWriter(directory / "ring", layout)
        assert all(signature(out) == number for number, out in held)
    assert writer.committed == written
    held.clear()
    writer.close()
    reader.close()


def test_two_processes_hand_over_blocks_of_everything(tmp_path: Path) -> None:
    layout, last = BlockLayout(SPEC, ROWS), 2000
    create_ring(tmp_path / "ring", ring_capacity(layout, 3))
    wakeup = Wakeup.create(tmp_path / "wakeup")

    def write() -> None:
        writer = SharedWriter(tmp_path / "ring", layout, tmp_path / "wakeup")
        for i in range(last):
            block = writer.reserve(30.0)
            assert block is not None
            sign(block, i)
            block.finals = i % 3
            block.episode_return, block.episode_length = np.full(i % 5, i, np.float32), np.full(i % 5, i)
            writer.commit(block)
        writer.notes[0] = last

    pid = forked(write)
    reader, seen = SharedReader(tmp_path / "ring", layout), 0
    while seen < last:
        block = reader.take()
        if block is None:
            assert wakeup.wait(30.0)
            continue
        assert (signature(block), block.finals, block.episode_return.tolist()) == (seen, seen % 3, [seen] * (seen % 5))
        reader.release(block)
        seen += 1
    assert reap(pid) == 0
    assert reader.notes[0] == last
    assert reader.stats() == MemoryStats(last, last, last, 0, 0)


# -- a sampler ----------------------------------------------------------------------------------------------------------


class _One:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def newest(self) -> tuple[Policy, int]:
        return self._policy, 3


def environments(kind: str) -> Environments:
    def make() -> gym.Env[Any, Any]:
        return gym.wrappers.TimeLimit(gym.make("CartPole-v1").unwrapped, 7)

    if kind == "loop":
        return LoopEnvironments("short", [make() for _ in range(3)])
    return VectorEnvironments("short", SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode.SAME_STEP))


@pytest.mark.parametrize("kind", ["loop", "vector"])
@pytest.mark.parametrize("core", [None, "lstm"])
def test_a_sampler_writes_into_a_ring_what_it_writes_into_any_memory(tmp_path: Path, kind: str, core: str | None) -> None:
    torch.manual_seed(0)
    first, second = environments(kind), environments(kind)
    policy = Policy(first.observation_space, first.action_space, NetworkConfig(core=core))
    spec = segment_spec(policy, first, 10)
    writer, reader = made(tmp_path, BlockLayout(spec, first.num), 2)
    local = LocalMemory(spec, first.num, 2)
    shared, plain = Sampler(first, _One(policy), writer, 5), Sampler(second, _One(policy), local, 5)
    for _ in range(5):  # more often than there are blocks
        assert shared.step()
        assert plain.step()
        got, wanted = taken(reader), local.take(0)
        assert wanted is not None
        assert got.finals == wanted.finals
        for (path, a), (_, b) in zip(leaves(got.arrays()), leaves(wanted.arrays()), strict=True):
            if path.startswith("final_"):
                a, b = a[: got.finals], b[: got.finals]
            np.testing.assert_array_equal(a, b, err_msg=path)
        reader.release(got)
        local.release(wanted)
    first.close()
    second.close()


def test_blocks_of_several_models_share_a_ring(tmp_path: Path) -> None:
    other = replace(SPEC, model="other", steps=SPEC.steps + 3)
    layouts = BlockLayouts([BlockLayout(SPEC, ROWS), BlockLayout(other, 1)])
    create_ring(tmp_path / "ring", ring_capacity(layouts, 2))
    writer, reader = SharedWriter(tmp_path / "ring", layouts), SharedReader(tmp_path / "ring", layouts)
    random = np.random.default_rng(0)
    for number, spec in enumerate([SPEC, other, other, SPEC, SPEC, SPEC, other]):  # every position of the ring changes its model
        block = writer.reserve(0, spec.model)
        assert block is not None
        assert not block.valid.any() or number > 3, "another model's data must not be visible"
        block.reward[...] = sent = random.normal(size=block.reward.shape).astype(np.float32)
        block.env_steps = number if number % 2 else None
        writer.commit(block)
        taken = reader.take()
        assert taken is not None
        assert (taken.model, taken.spec, taken.env_steps) == (spec.model, spec, number if number % 2 else None)
        np.testing.assert_array_equal(taken.reward, sent)
        reader.release(taken)
    writer.close()
    reader.close()
