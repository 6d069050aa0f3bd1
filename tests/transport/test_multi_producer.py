"""Segments of many sessions in many workers: whole, counted, and gone with whoever was killed before he committed."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ludus.buffers.collate import CollatedBatches
from ludus.core.types import Segments
from ludus.errors import MemoryClosed, WorkerFailed
from ludus.testing.memory_contract import SPEC, sign, signature
from ludus.transport.multi_producer import Lane, LaneWriter, MultiProducerMemory, SessionWriter
from ludus.transport.ring_buffer import RingWriter
from tests.waiting import wait_until

SPECS = {"left": SPEC, "right": replace(SPEC, model="right")}
COUNTED, CURRENT = ("requests", "failed"), ("sessions",)
WAIT_S = 20.0


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MultiProducerMemory]:
    made = MultiProducerMemory(SPECS, tmp_path, 400, COUNTED, CURRENT)
    yield made
    made.close()


@contextlib.contextmanager
def writing(lane: Lane) -> Iterator[LaneWriter]:
    writer = LaneWriter([lane], SPECS)
    yield writer
    writer.close()


@contextlib.contextmanager
def process(work: Callable[[], object]) -> Iterator[int]:
    """A process of its own; it is killed at the end of the block if it has not ended."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def put(room: SessionWriter, number: int, steps: int = 4) -> None:
    block = room.reserve(0)
    assert block is not None
    block.valid[:] = False
    block.valid[:steps] = True
    room.commit(sign(block, number))


def numbers(memory: MultiProducerMemory, model: str = "left") -> list[int]:
    """All that wait, taken and released."""
    seen = []
    while (block := memory.take(model)) is not None:
        seen.append(signature(block))
        memory.release(block)
    return seen


# -- what travels


def test_everything_of_a_segment_arrives_and_again_in_a_used_block(memory: MultiProducerMemory) -> None:
    (lane,) = memory.add_lanes(1)
    with writing(lane) as writer:
        for seed in range(3):
            block = writer.writers["left"].reserve(0)
            assert block is not None
            draw = np.random.default_rng(seed)
            block.reward[:] = draw.normal(size=block.reward.shape)
            block.observation["picture"][:] = draw.integers(0, 255, block.observation["picture"].shape)
            block.state[0][:] = draw.normal(size=block.state[0].shape)
            block.origin[0] = 7 + seed
            block.episode_return, block.episode_length = np.array([1.5], np.float32), np.array([4])
            sent = replace(block, reward=block.reward.copy(), state=(block.state[0].copy(),))
            picture = block.observation["picture"].copy()
            writer.writers["left"].commit(block)
            taken = memory.take("left")
            assert taken is not None
            np.testing.assert_array_equal(taken.reward, sent.reward)
            np.testing.assert_array_equal(taken.observation["picture"], picture)
            np.testing.assert_array_equal(taken.state[0], sent.state[0])
            assert (int(taken.origin[0]), float(taken.episode_return[0]), taken.rows) == (7 + seed, 1.5, 1)
            memory.release(taken)
    assert memory.take("left") is None


def test_many_sessions_record_at_a_time_and_each_model_gets_its_own(memory: MultiProducerMemory) -> None:
    (lane,) = memory.add_lanes(1)
    with writing(lane) as writer:
        blocks = [(name, sign(_reserved(writer.writers[name]), i)) for i in range(20) for name in SPECS]
        abandoned = _reserved(writer.writers["left"])
        for name, block in reversed(blocks):
            writer.writers[name].commit(block)
        writer.writers["left"].abandon(abandoned)
        with pytest.raises(ValueError, match="committed without"):
            writer.writers["left"].commit(blocks[0][1])
    for name in SPECS:
        assert numbers(memory, name) == [*range(19, -1, -1)]


def _reserved(room: SessionWriter) -> Segments:
    block = room.reserve(0)
    assert block is not None
    return block


def test_a_batch_is_gathered_from_all_workers(memory: MultiProducerMemory) -> None:
    lanes = memory.add_lanes(2)
    batches = CollatedBatches([memory.of("left"), memory.of("right")], 14)
    with writing(lanes[0]) as one, writing(lanes[1]) as two:
        put(one.writers["left"], 1, steps=4)
        put(two.writers["left"], 2, steps=3)
        assert batches.take(0) is None
        put(one.writers["left"], 3, steps=4)
        put(two.writers["left"], 4, steps=3)
        batch = batches.take(0)
    assert batch is not None
    assert batch.steps == 14
    assert sorted(batch.reward[0].tolist()) == [1, 2, 3, 4]
    assert memory.stats().released == 4


# -- bounds


def test_without_room_a_segment_is_dropped_and_counted_and_what_waits_is_not_touched(tmp_path: Path) -> None:
    memory = MultiProducerMemory(SPECS, tmp_path, 1 << 40)
    (lane,) = memory.add_lanes(1)
    with writing(lane) as writer:
        for number in range(5000):  # a ring has room for 4096 records
            put(writer.writers["left"], number)
        stats = memory.stats()
        assert stats.dropped > 0
        assert stats.committed + stats.dropped == 5000
        assert numbers(memory) == [*range(stats.committed)]
        put(writer.writers["left"], 7)
        assert numbers(memory) == [7]
    memory.close()


def test_what_is_too_old_is_dropped_oldest_first_and_counted(memory: MultiProducerMemory) -> None:
    (lane,) = memory.add_lanes(1)
    with writing(lane) as writer:
        for number in range(150):  # 600 steps, where 400 may wait
            put(writer.writers["left"], number)
        assert numbers(memory) == [*range(50, 150)]
        assert memory.stats().dropped == 50


def test_a_model_that_is_hardly_learned_from_does_not_take_room_from_another(memory: MultiProducerMemory) -> None:
    (lane,) = memory.add_lanes(1)
    with writing(lane) as writer:
        put(writer.writers["left"], 0)
        held = memory.take("left")
        for turn in range(100):
            for number in range(90):
                put(writer.writers["right"], number)
            assert numbers(memory, "right") == [*range(90)], turn
    assert held is not None
    assert signature(held) == 0
    assert memory.stats().dropped == 0


# -- waking


def test_a_waiting_reader_is_woken_by_a_commit_in_another_process(memory: MultiProducerMemory) -> None:
    lanes = memory.add_lanes(1)
    go, start = os.pipe()[::-1]

    def write() -> None:
        os.read(start, 1)
        put(LaneWriter(lanes, SPECS).writers["left"], 5)

    with process(write):
        memory.wait(0)  # from now on it is to be rung
        began = time.monotonic()
        os.write(go, b"x")
        while memory.take("left") is None:
            memory.wait(WAIT_S)
        assert time.monotonic() - began < WAIT_S / 2, "nobody rang"


# -- workers that die


def test_the_lane_of_a_dead_worker_is_taken_over_with_its_numbers(memory: MultiProducerMemory) -> None:
    lanes = memory.add_lanes(2)

    def write() -> None:
        writer = LaneWriter(lanes, SPECS)
        writer.count({"requests": 10, "sessions": 3})
        put(writer.writers["left"], 1)
        sign(_reserved(writer.writers["left"]), 2)  # never committed
        time.sleep(WAIT_S)

    with process(write) as pid:
        wait_until(lambda: memory.stats().waiting)
        assert (memory.total("requests"), memory.total("sessions")) == (10, 3)
        os.kill(pid, signal.SIGKILL)
    writer = LaneWriter(lanes, SPECS)
    assert writer.lane == lanes[0]
    assert (memory.total("requests"), memory.total("sessions")) == (10, 0)
    writer.count({"requests": 5, "failed": 1, "sessions": 2, "unheard of": 9})
    assert [memory.total(name) for name in (*COUNTED, *CURRENT)] == [15, 1, 2]
    put(writer.writers["left"], 3)
    assert numbers(memory) == [1, 3]
    writer.close()
    memory.close()
    assert memory.total("requests") == 15, "the last report may come after"


def test_a_worker_without_a_free_lane_is_an_error(memory: MultiProducerMemory) -> None:
    lanes = memory.add_lanes(1)

    def hold() -> None:
        writer = LaneWriter(lanes, SPECS)
        put(writer.writers["left"], 0)
        time.sleep(WAIT_S)

    with process(hold):
        wait_until(lambda: memory.stats().waiting)
        with pytest.raises(WorkerFailed, match="All 1 lanes"):
            LaneWriter(lanes, SPECS)


def test_kills_at_any_moment_lose_nothing_that_was_committed(tmp_path: Path) -> None:
    memory = MultiProducerMemory(SPECS, tmp_path, 1 << 40)
    lanes = memory.add_lanes(1)

    def write(first: int) -> None:
        writer = LaneWriter(lanes, SPECS)
        number, parent = first, os.getppid()
        while os.getppid() == parent:
            if writer.writers["left"].stats().waiting < 1000:
                put(writer.writers["left"], number)
                number += 1

    seen: list[int] = []
    draw = random.Random(1)
    for _ in range(8):
        before = len(seen)
        with process(functools.partial(write, before)) as pid:
            wait_until(lambda: memory.stats().waiting)
            until = time.monotonic() + draw.uniform(0, 0.05)
            while time.monotonic() < until:
                if (block := memory.take("left")) is not None:
                    seen.append(signature(block))
                    memory.release(block)
            os.kill(pid, signal.SIGKILL)
        seen += numbers(memory)
        assert len(seen) > before
    assert seen == [*range(len(seen))]
    assert memory.stats().dropped == 0
    memory.close()


# -- workers that go wrong


def rubbish(lane: Lane, data: bytes) -> None:
    with RingWriter(Path(lane.rings["left"])) as ring:
        room = ring.reserve(len(data))
        assert room is not None
        room[:] = data
        ring.commit()


@pytest.mark.parametrize("data", [b"?", b"\xff" * 100_000, bytes(3000)])
def test_who_commits_rubbish_is_cut_off_and_the_others_are_learned_from(
    memory: MultiProducerMemory, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    lanes = memory.add_lanes(2)
    with writing(lanes[0]) as bad, writing(lanes[1]) as good:
        bad.count({"requests": 4})
        put(bad.writers["left"], 1)
        held = memory.take("left")
        assert held is not None
        bad.close()
        rubbish(lanes[0], data)
        put(good.writers["left"], 2)
        assert numbers(memory) == [2]
        assert memory.cut_off() == [os.getpid()]
        assert memory.cut_off() == []
        assert memory.stats().dropped == 1
        assert "cut off" in caplog.text
        assert signature(held) == 1, "what was taken before may still be read"
        memory.release(held)
        fresh = LaneWriter([lanes[0]], SPECS)
        fresh.count({"requests": 1})
        assert memory.total("requests") == 5
        put(fresh.writers["left"], 3)
        assert numbers(memory) == [3]
        fresh.close()


def test_who_is_cut_off_plays_on_without_harm(memory: MultiProducerMemory) -> None:
    (lane,) = memory.add_lanes(1)
    writer = LaneWriter([lane], SPECS)
    ring = writer.writers["left"]._ring
    room = ring.reserve(8)
    assert room is not None
    ring.commit()
    assert memory.take("left") is None
    put(writer.writers["left"], 1)
    assert memory.take("left") is None
    assert writer.writers["left"].stats().dropped == 1
    writer.close()


# -- closing


def test_when_it_is_closed_what_was_taken_may_be_read_and_nothing_more_comes(memory: MultiProducerMemory) -> None:
    (lane,) = memory.add_lanes(1)
    with writing(lane) as writer:
        put(writer.writers["left"], 1)
        put(writer.writers["left"], 2)
        held = memory.take("left")
        assert held is not None
        memory.close()
        memory.close()
        put(writer.writers["left"], 3)  # into the void
        assert signature(held) == 1
        memory.release(held)
    with pytest.raises(MemoryClosed):
        memory.take("left")
    with pytest.raises(ValueError, match="released without"):
        memory.release(held)


def test_it_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    def descriptors() -> list[str]:
        """Of this process, to anything in the memory's directory; also what was unlinked."""
        return [at for link in Path("/proc/self/fd").iterdir() if (at := _target(link)).startswith(str(tmp_path))]

    memory = MultiProducerMemory(SPECS, tmp_path, 400)
    (lane,) = memory.add_lanes(1)
    with writing(lane) as writer:
        put(writer.writers["left"], 1)
        held = memory.take("left")
        assert descriptors()
    assert held is not None
    memory.close()
    memory.release(held)
    del held  # its arrays keep the memory that they point into
    assert descriptors() == []


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # the one that lists the others
        return ""
