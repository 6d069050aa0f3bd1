"""Segments over an exchange: in order, once each in one lineage, counted whatever happens to them. The server is a real one."""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.core.tree import leaves, map_tree
from ludus.core.types import Segments, SegmentSpec
from ludus.errors import Damaged, ExchangeUnavailable, MemoryClosed, UsageError
from ludus.testing.background_call import Call
from ludus.testing.memory_contract import ROWS, SPEC, MakeMemory, MemoryContract, sign, signature
from ludus.transport.base import Memory, MemoryStats
from ludus.transport.redis_stream import RedisMessageStream
from ludus.transport.segment_codec import Compression, SegmentEncoder
from ludus.transport.shared_memory import BlockLayout
from ludus.transport.stream_memory import ReceivedSegments, StreamReader, StreamWriter
from tests.redis_server import Line, RedisServer

pytestmark = pytest.mark.system

LAYOUT = BlockLayout(SPEC, ROWS)
WAIT_S = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), aof=False) as running:
        yield running


class Rig:
    """Ends of one channel, all closed when the test is over."""

    def __init__(self, server: RedisServer) -> None:
        self.server, self.channel = server, uuid.uuid4().hex
        self._open: list[RedisMessageStream] = []

    def exchange(self, room: int = 100) -> RedisMessageStream:
        exchange = RedisMessageStream(self.server.player_url, self.channel, room)
        self._open.append(exchange)
        return exchange

    def writer(self, worker: str = "w", *, room: int = 100, plan: str = "plan", **options: Any) -> StreamWriter:
        return StreamWriter(self.exchange(room), LAYOUT, worker=worker, plan=plan, **options)

    def reader(self, inspect: Callable[[Segments], str | None] = lambda _: None, **options: Any) -> StreamReader:
        return StreamReader(self.exchange(), LAYOUT, plan="plan", inspect=inspect, **options)

    def close(self) -> None:
        for exchange in self._open:
            exchange.close()


@pytest.fixture
def rig(server: RedisServer) -> Iterator[Rig]:
    made = Rig(server)
    yield made
    made.close()


def send(writer: StreamWriter, *numbers: int) -> None:
    for number in numbers:
        block = writer.reserve(WAIT_S)
        assert block is not None
        writer.commit(sign(block, number))
        assert not writer.outgoing


def taken(reader: StreamReader, count: int) -> list[ReceivedSegments]:
    found, end = list[ReceivedSegments](), time.monotonic() + WAIT_S
    while len(found) < count:
        received = reader.take()
        if received is not None:
            found.append(received)
        else:
            assert time.monotonic() < end, f"{len(found)} of {count} came"
            reader.wait(0.05)
    return found


def nothing_more(reader: StreamReader) -> bool:
    """Once everything that is there was looked at."""
    while reader.wait(0):
        if reader.take() is not None:
            return False
    return True


def signatures(received: list[ReceivedSegments]) -> list[int]:
    return [signature(one.segments) for one in received]


# -- the contract of every memory ---------------------------------------------------------------------------------------


class _Pair:
    """Both halves in one process, for several threads. The writer's own block is one of the blocks."""

    def __init__(self, rig: Rig, spec: SegmentSpec, rows: int, blocks: int) -> None:
        self._changed = threading.Condition()
        self.writer = rig.writer(room=max(1, blocks - 1))
        self.reader = rig.reader()
        self._reserved: Segments | None = None
        self._taken: dict[int, ReceivedSegments] = {}
        self._closed = False

    def reserve(self, timeout_s: float) -> Segments | None:
        def free() -> bool:
            if self._closed:
                raise MemoryClosed("closed")
            if self._reserved is None:
                self._reserved = self.writer.reserve(0)
                return self._reserved is not None
            return False

        return self._reserved if self._until(free, timeout_s) else None

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                if (left := end - time.monotonic()) <= 0:
                    return False
                self._changed.wait(min(left, 0.02))
            return True

    def commit(self, segments: Segments) -> None:
        with self._changed:
            self.writer.commit(segments)
            self._reserved = None
            self._changed.notify_all()

    def abandon(self, segments: Segments) -> None:
        with self._changed:
            self.writer.abandon(segments)
            self._reserved = None

    def take(self, timeout_s: float) -> Segments | None:
        found: list[ReceivedSegments] = []

        def there() -> bool:
            self.writer.flush(0)
            self.reader.wait(0)
            received = self.reader.take()
            if received is not None:
                found.append(received)
            elif self._closed and not self.writer.outgoing:
                raise MemoryClosed("closed and empty")
            return bool(found)

        if not self._until(there, timeout_s):
            return None
        with self._changed:
            self._taken[id(found[0].segments)] = found[0]
        return found[0].segments

    def release(self, segments: Segments) -> None:
        with self._changed:
            received = self._taken.pop(id(segments), None)
            if received is None:
                raise ValueError("no such block")
            self.reader.release(received)
            self.reader.settle()
            self._changed.notify_all()

    def stats(self) -> MemoryStats:
        with self._changed:
            committed, reader = self.writer.stats().committed, self.reader.stats()
            return MemoryStats(committed, reader.taken, reader.released, reader.dropped, committed - reader.taken)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class TestExchangedMemory(MemoryContract):
    @pytest.fixture
    def make(self, server: RedisServer) -> Iterator[MakeMemory]:
        rigs: list[Rig] = []

        def pair(spec: SegmentSpec, rows: int, blocks: int) -> Memory:
            rigs.append(Rig(server))
            return _Pair(rigs[-1], spec, rows, blocks)

        yield pair
        for rig in rigs:
            rig.close()

    # One block at a time is being written; and where a row came from is for the reader to say.
    test_the_order_is_that_of_the_commits_not_of_the_reservations = None  # type: ignore[assignment]
    test_reserved_blocks_do_not_overlap = None  # type: ignore[assignment]
    test_a_block_can_be_given_back_only_once_and_only_by_its_holder = None  # type: ignore[assignment]
    test_everything_inside_a_block_arrives = None  # type: ignore[assignment]


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_everything_inside_a_block_arrives(rig: Rig, compression: str) -> None:
    writer, reader, random = rig.writer("left-3", compression=compression), rig.reader(), np.random.default_rng(0)
    for turn in range(2):  # the second time in a used block
        block = writer.reserve(0)
        assert block is not None
        assert (block.finals, block.env_steps) == (0, None)
        for _, array in leaves(block.arrays()):
            array[...] = random.integers(0, 2 if array.dtype == np.bool_ else 100, array.shape).astype(array.dtype)
        block.finals, block.env_steps = 1, 5
        block.episode_return, block.episode_length = random.normal(size=2).astype(np.float32), random.integers(1, 9, 2)
        sent = map_tree(np.copy, block.arrays())
        writer.commit(block)
        (got,) = taken(reader, 1)
        assert (got.worker, got.seq, got.version) == ("left-3", turn, int(sent["version"].max()))
        assert (got.segments.finals, got.segments.env_steps) == (1, 5)
        for (path, one), (_, other) in zip(leaves(got.segments.arrays()), leaves(sent), strict=True):
            if path != "origin":
                np.testing.assert_array_equal(one, other, err_msg=path)
        reader.release(got)
    assert rig.writer().pushed == 0


# -- the writer ---------------------------------------------------------------------------------------------------------


def test_a_block_that_finds_no_room_waits_in_the_writer(rig: Rig) -> None:
    writer, reader = rig.writer(room=2), rig.reader()
    send(writer, 0, 1)
    block = writer.reserve(0)
    assert block is not None
    writer.commit(sign(block, 2))
    assert writer.outgoing
    assert writer.reserve(0) is None
    assert not writer.flush(0.02)
    assert (writer.pushed, writer.dropped, writer.failures) == (2, 0, 0)
    first = taken(reader, 1)[0]
    reader.release(first)
    assert reader.settle()
    assert writer.flush(WAIT_S)
    assert writer.stats().waiting == 0
    assert signatures(taken(reader, 2)) == [1, 2]
    assert (reader.lost, reader.duplicates) == (0, 0)


def test_a_writer_that_may_drop_does_so_and_counts_it_and_leaves_no_gap(rig: Rig) -> None:
    writer, reader = rig.writer(room=2, when_full="drop"), rig.reader()
    for number in range(5):
        block = writer.reserve(0)
        assert block is not None, "a writer that drops has always room"
        writer.commit(sign(block, number))
    assert (writer.pushed, writer.dropped) == (2, 3)
    for received in taken(reader, 2):
        reader.release(received)
    reader.settle()
    send(writer, 7)
    (last,) = taken(reader, 1)
    assert (last.seq, signature(last.segments), reader.lost) == (2, 7, 0)


def test_a_block_is_given_back_once_and_by_its_holder(rig: Rig) -> None:
    writer = rig.writer()
    block = writer.reserve(0)
    assert block is not None
    with pytest.raises(ValueError, match="before the previous one"):
        writer.reserve(0)
    with pytest.raises(ValueError, match="committed without"):
        writer.commit(Segments.empty(SPEC, ROWS))
    writer.abandon(block)
    with pytest.raises(ValueError, match="abandoned without"):
        writer.abandon(block)
    with pytest.raises(ValueError, match="committed without"):
        writer.commit(block)
    assert rig.exchange().waiting() == 0


class _Cut(RedisMessageStream):
    """A line that breaks after the message has arrived: the answer is what is lost."""

    broken = False

    def push(self, message: Any, timeout_s: float) -> bool:
        pushed = super().push(message, timeout_s)
        if self.broken and pushed:
            raise ExchangeUnavailable("The line broke.")
        return pushed


def test_a_message_whose_answer_was_lost_is_sent_again_and_counts_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    line = _Cut(rig.server.player_url, rig.channel, 100)
    writer, reader = StreamWriter(line, LAYOUT, worker="w", plan="plan"), rig.reader()
    line.broken = True
    block = writer.reserve(0)
    assert block is not None
    with caplog.at_level(logging.WARNING, "ludus.transport"):
        writer.commit(sign(block, 1))
        assert writer.reserve(0) is None
    assert writer.outgoing
    assert (writer.failures, writer.last_error) == (2, "The line broke.")
    assert len(caplog.records) == 1, "an outage is told once"
    line.broken = False
    send(writer, 2)
    line.close()
    assert signatures(taken(reader, 2)) == [1, 2]
    assert nothing_more(reader)
    assert (reader.duplicates, reader.lost) == (2, 0)


def test_a_dropped_block_that_may_have_arrived_keeps_its_number(rig: Rig) -> None:
    line = _Cut(rig.server.player_url, rig.channel, 1)
    writer, reader = StreamWriter(line, LAYOUT, worker="w", plan="plan", when_full="drop"), rig.reader()
    line.broken = True
    block = writer.reserve(0)
    assert block is not None
    writer.commit(sign(block, 1))  # it is there, and the writer does not know
    line.broken = False
    assert writer.flush(0)
    assert (writer.pushed, writer.dropped) == (0, 1)
    (first,) = taken(reader, 1)
    reader.release(first)
    reader.settle()
    send(writer, 2)
    line.close()
    assert signatures([first, *taken(reader, 1)]) == [1, 2], "another block under the same number would have been dropped"


def test_what_is_outgoing_when_a_writer_closes_is_counted(rig: Rig) -> None:
    writer = rig.writer(room=1)
    send(writer, 0)
    block = writer.reserve(0)
    assert block is not None
    writer.commit(block)
    writer.close()
    assert (writer.outgoing, writer.dropped) == (False, 1)


# -- the reader: once each ----------------------------------------------------------------------------------------------


def test_what_a_learner_that_died_had_in_hand_comes_to_the_next(rig: Rig) -> None:
    writer, dead = rig.writer(), rig.reader()
    send(writer, 0, 1, 2, 3)
    first, *_ = taken(dead, 3)
    dead.release(first)
    dead.settle()
    heir = rig.reader()
    heir.load_state(dead.state())
    assert heir.reclaimed == 3, "also what was only fetched ahead"
    assert signatures(taken(heir, 3)) == [1, 2, 3]
    assert (heir.duplicates, heir.lost) == (0, 0)


def test_what_was_learned_from_but_not_acknowledged_counts_once(rig: Rig) -> None:
    writer, dead = rig.writer(), rig.reader()
    send(writer, 0, 1, 2)
    for received in taken(dead, 2):
        dead.release(received)
    state = dead.state()  # killed after the checkpoint, before it could say that it was done
    heir = rig.reader()
    heir.load_state(state)
    assert signatures(taken(heir, 1)) == [2]
    assert nothing_more(heir)
    assert (heir.duplicates, heir.lost) == (2, 0)
    heir.settle()
    assert heir.rejected == Counter()
    assert rig.exchange().waiting() == 1


def test_what_was_learned_after_the_last_checkpoint_is_lost_and_counted(rig: Rig) -> None:
    writer, dead = rig.writer(), rig.reader()
    send(writer, 0, 1, 2, 3, 4, 5)
    held = taken(dead, 2)
    dead.release(held[0])
    state = dead.state()  # 0 is done with, 1 is in hand
    for received in [held[1], *taken(dead, 3)]:
        dead.release(received)
    dead.settle()  # 1 to 4 are acknowledged, and lost with this learner
    heir = rig.reader()
    heir.load_state(state)
    assert heir.lost == 0, "they might come again"
    (next_one,) = taken(heir, 1)
    assert (signature(next_one.segments), heir.lost, heir.duplicates) == (5, 4, 0)


def test_a_number_that_comes_again_while_it_is_in_hand_is_a_duplicate(rig: Rig) -> None:
    reader, exchange, block = rig.reader(), rig.exchange(), Segments.empty(SPEC, ROWS)
    buffer = memoryview(bytearray(LAYOUT.nbytes))
    LAYOUT.seal(block, buffer)
    encoder = SegmentEncoder(LAYOUT, "w", "plan")
    for seq in (0, 0, 1, 0, 1, 2):
        exchange.push(encoder.encode(block, buffer, seq), 0)
    assert [received.seq for received in taken(reader, 3)] == [0, 1, 2]
    assert reader.duplicates == 3


def test_a_worker_that_was_started_again_counts_anew(rig: Rig) -> None:
    reader = rig.reader()
    send(rig.writer("same"), 0, 1)
    send(rig.writer("same"), 2, 3)
    received = taken(reader, 4)
    assert signatures(received) == [0, 1, 2, 3]
    assert [one.seq for one in received] == [0, 1, 0, 1]
    assert (reader.duplicates, reader.lost) == (0, 0)


def test_several_readers_share_and_take_over_from_one_that_died(rig: Rig) -> None:
    writer = rig.writer()
    one, other = (rig.reader(prefetch=2, reclaim_idle_s=3600.0) for _ in range(2))
    send(writer, *range(8))
    mine = list[ReceivedSegments]()
    for reader in (one, other, one, other):
        received = taken(reader, 2)
        if reader is one:
            mine += received
            for each in received:
                one.release(each)
    assert signatures(mine) == [0, 1, 4, 5]
    one.settle()
    one._stream.reclaim(0)  # the other one died: what it had is old by now
    late = taken(one, 4)
    assert sorted(signatures(late)) == [2, 3, 6, 7], "older numbers than the newest are no duplicates if they never came"
    assert (one.duplicates, one.lost) == (0, 0)
    for each in late:
        one.release(each)
    one.settle()
    assert rig.exchange().waiting() == 0


def test_a_reader_among_several_looks_again_and_again_for_what_dead_ones_left(rig: Rig) -> None:
    now = [0.0]
    writer, dead = rig.writer(), rig.reader(reclaim_idle_s=3600.0)
    reader = rig.reader(reclaim_idle_s=0.001, clock=lambda: now[0])
    send(writer, 0)
    taken(dead, 1)
    time.sleep(0.01)  # by the clock of the server it is idle now
    assert not reader.wait(0)
    now[0] += 2.0
    assert reader.wait(0)
    assert signatures(taken(reader, 1)) == [0]
    assert reader.reclaimed == 1


def test_rows_keep_their_numbers_and_change_them_after_a_gap(rig: Rig) -> None:
    exchange, reader = rig.exchange(), rig.reader()
    block, buffer = Segments.empty(SPEC, ROWS), memoryview(bytearray(LAYOUT.nbytes))
    views = LAYOUT.views(buffer)
    views.origin[:] = [-5, 2, 1 << 40]  # whatever a worker says
    LAYOUT.seal(views, buffer)
    one, other = SegmentEncoder(LAYOUT, "one", "plan"), SegmentEncoder(LAYOUT, "other", "plan")
    for encoder, seq in ((one, 0), (other, 0), (one, 1), (one, 5), (one, 6), (other, 1)):
        exchange.push(encoder.encode(block, buffer, seq), 0)
    origins = [tuple(received.segments.origin.tolist()) for received in taken(reader, 6)]
    assert origins[0] == origins[2]
    assert origins[1] == origins[5]
    assert origins[3] == origins[4]
    distinct = {number for of_one in (origins[0], origins[1], origins[3]) for number in of_one}
    assert len(distinct) == 3 * ROWS, "rows of different workers, or from both sides of a gap, have the same number"
    assert reader.lost == 3
    heir = rig.reader()
    heir.load_state(reader.state())
    exchange.push(one.encode(block, buffer, 7), 0)
    while (received := taken(heir, 1)[0]).seq != 7:
        pass
    assert not distinct & set(received.segments.origin.tolist()), "a new learner cannot know where the rows went on"


def test_the_state_is_arrays_and_nonsense_is_not_loaded(rig: Rig) -> None:
    writer, reader = rig.writer('w"ö'), rig.reader()
    send(writer, 0, 1)
    reader.release(taken(reader, 1)[0])
    state = reader.state()
    assert all(isinstance(array, np.ndarray) and array.dtype.kind in "iu" for array in state.values())
    for name in state:
        with pytest.raises(Damaged):
            rig.reader().load_state({key: array for key, array in state.items() if key != name})
    for name in ("workers", "high", "open"):
        with pytest.raises(Damaged):
            rig.reader().load_state(state | {name: np.full(5, 300)})


# -- the reader: what it does not take ----------------------------------------------------------------------------------


def test_what_is_no_segment_of_this_plan_is_acknowledged_and_counted_by_kind(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    reader, exchange = rig.reader(lambda s: "too large" if s.reward.max() > 100 else None), rig.exchange()
    with caplog.at_level(logging.WARNING, "ludus.transport"):
        for _ in range(3):
            exchange.push(b"\x80\x04nonsense", 0)
            send(rig.writer(plan="other"), 1)
            send(rig.writer(), 101)
        send(rig.writer(), 7)
        (good,) = taken(reader, 1)
    assert signature(good.segments) == 7
    assert reader.rejected == {"not a message": 3, "another plan": 3, "too large": 3}
    assert len(caplog.records) == 3, "one line for each kind"
    reader.release(good)
    assert reader.settle()
    assert exchange.waiting() == 0, "what was rejected must not come again"


def test_kinds_of_rejections_are_bounded(rig: Rig) -> None:
    kinds = iter(range(1000))
    reader, writer = rig.reader(lambda _: f"reason {next(kinds)}"), rig.writer(room=1000)
    send(writer, *range(130))
    assert nothing_more(reader)
    assert sum(reader.rejected.values()) == 130
    assert len(reader.rejected) <= 101


def test_a_rejected_message_does_not_use_up_its_number(rig: Rig) -> None:
    verdicts = iter(["once", None])
    reader, exchange = rig.reader(lambda _: next(verdicts)), rig.exchange()
    block, buffer = Segments.empty(SPEC, ROWS), memoryview(bytearray(LAYOUT.nbytes))
    LAYOUT.seal(block, buffer)
    encoder = SegmentEncoder(LAYOUT, "w", "plan")
    for _ in range(2):  # somebody forged it first
        exchange.push(encoder.encode(block, buffer, 0), 0)
    assert taken(reader, 1)[0].seq == 0
    assert reader.duplicates == 0


def test_what_is_discarded_does_not_come_again_and_is_counted(rig: Rig) -> None:
    writer, reader = rig.writer(), rig.reader()
    send(writer, 0, 1)
    first, second = taken(reader, 2)
    reader.discard(first, "too old")
    reader.release(second)
    with pytest.raises(ValueError, match="released without"):
        reader.release(second)
    with pytest.raises(ValueError, match="released without"):
        reader.discard(first, "too old")
    assert reader.settle()
    assert reader.discarded == {"too old": 1}
    assert rig.exchange().waiting() == 0
    assert reader.stats() == MemoryStats(committed=2, taken=2, released=2, dropped=1, waiting=0)


def test_acknowledgements_are_sent_in_batches_and_by_waiting(rig: Rig) -> None:
    writer, reader, watch = rig.writer(), rig.reader(prefetch=4), rig.exchange()
    send(writer, *range(6))
    received = taken(reader, 6)
    for one in received[:3]:
        reader.release(one)
    assert watch.waiting() == 6
    reader.release(received[3])
    assert watch.waiting() == 2
    reader.release(received[4])
    reader.wait(0)
    assert watch.waiting() == 1
    reader.release(received[5])
    reader.close()
    assert watch.waiting() == 0


def test_take_never_asks_the_server(rig: Rig) -> None:
    writer, reader = rig.writer(), rig.reader()
    send(writer, 0)
    assert reader.take() is None
    assert reader.wait(WAIT_S)
    assert reader.take() is not None


# -- outages ------------------------------------------------------------------------------------------------------------


def test_an_outage_is_counted_logged_once_and_work_continues_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.transport.redis_stream._CALL_S", 0.1)
    with RedisServer(tmp_path, fsync="always") as server:
        rig = Rig(server)
        writer, reader = rig.writer(), rig.reader()
        send(writer, 0, 1)
        held = taken(reader, 2)
        reader.release(held[0])
        server.kill()
        block = writer.reserve(0)
        assert block is not None
        with caplog.at_level(logging.WARNING, "ludus.transport"):
            writer.commit(sign(block, 2))
            assert not writer.flush(0)
            assert not reader.wait(0)
            assert not reader.settle()
            reader.release(held[1])
        assert writer.outgoing
        assert writer.failures >= 2
        assert reader.failures >= 2
        assert reader.unavailable_s > 0
        assert len(caplog.records) == 2, "one line from each side"
        server.start()
        assert writer.flush(WAIT_S)
        assert signatures(taken(reader, 1)) == [2]
        assert reader.unavailable_s == 0 < reader.unavailable_total_s
        assert reader.settle()
        assert rig.exchange().waiting() == 1
        rig.close()


def test_a_reader_does_not_retry_an_unreachable_server_in_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.transport.redis_stream._CALL_S", 0.1)
    with RedisServer(tmp_path) as server:
        rig = Rig(server)
        writer, reader = rig.writer(), rig.reader(prefetch=2)
        send(writer, *range(8))
        received = taken(reader, 8)
        server.kill()
        for one in received:
            reader.release(one)
        assert reader.failures == 1
        server.start()
        end = time.monotonic() + WAIT_S
        while not reader.settle():
            assert time.monotonic() < end
        assert rig.exchange().waiting() == 0
        rig.close()


def test_a_reader_may_be_made_before_there_is_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.transport.redis_stream._CALL_S", 0.1)
    with RedisServer(tmp_path) as server:
        rig = Rig(server)
        first = rig.reader()
        send(rig.writer(), 0)
        taken(first, 1)
        server.kill()
        reader = rig.reader()
        assert (reader.reclaimed, reader.failures) == (0, 1)
        server.start()
        assert signatures(taken(reader, 1)) == [0], "what the reader before had in hand is taken over later"
        rig.close()


def test_a_refusal_is_raised_by_both_sides(server: RedisServer) -> None:
    wrong = RedisMessageStream(server.full_url.replace(server.password, "guess"), "c", 10)
    with pytest.raises(UsageError, match="password"):
        StreamReader(wrong, LAYOUT, plan="plan", inspect=lambda _: None)
    writer = StreamWriter(wrong, LAYOUT, worker="w", plan="plan")
    block = writer.reserve(0)
    assert block is not None
    with pytest.raises(UsageError, match="password"):
        writer.commit(block)


# -- everything at once -------------------------------------------------------------------------------------------------


class _Storm:
    """Writers and a learner that dies again and again, over a line that is cut, to a server that is paused and killed."""

    def __init__(self, server: RedisServer, line: Line, seed: int) -> None:
        self._url = server.player_url.replace(str(server.port), str(line.port))
        self._random = random.Random(seed)
        self.over = threading.Event()
        self.pushed: Counter[str] = Counter()
        self.learned: list[tuple[str, int]] = []
        self.lost = 0

    def exchange(self) -> RedisMessageStream:
        return RedisMessageStream(self._url, "storm", 40)

    def write(self, worker: str, compression: Compression) -> None:
        with closing(self.exchange()) as exchange:
            writer = StreamWriter(exchange, LAYOUT, worker=worker, plan="plan", compression=compression)
            while not self.over.is_set():
                if (block := writer.reserve(0.2)) is not None:
                    writer.commit(sign(block, self.pushed[worker] % 1000))
                    self.pushed[worker] += 1
            assert writer.flush(WAIT_S)

    def learn(self, done: Callable[[], bool]) -> None:
        """Each learner goes on from the last checkpoint, which is taken after every batch."""
        state: dict[str, Any] | None = None
        while state is None or not done():
            exchange = self.exchange()
            reader = StreamReader(exchange, LAYOUT, plan="plan", inspect=lambda _: None, prefetch=16)
            if state is not None:
                reader.load_state(state)
            held, dies_at = list[ReceivedSegments](), time.monotonic() + self._random.uniform(0.5, 4.0)
            while time.monotonic() < dies_at or (self.over.is_set() and not done()):
                if (received := reader.take()) is not None:
                    assert signature(received.segments) == received.seq % 1000
                    held.append(received)
                if received is None or len(held) >= self._random.choice((1, 5, 20)):
                    for one in held:
                        self.learned.append((one.worker, one.seq))
                        reader.release(one)
                    held, state = [], reader.state()
                    reader.wait(0.1)
            self.lost += reader.lost
            exchange._connection.close()  # without a word


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_every_segment_counts_once_whatever_happens_to_line_server_and_learner(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with RedisServer(tmp_path, fsync="always") as server, Line(server.port) as line, closing(server.client()) as oracle:
        storm = _Storm(server, line, seed)
        codecs: tuple[Compression, ...] = ("none", "lz4", "zstd")
        writing = [Call(partial(storm.write, f"w{number}", codec)) for number, codec in enumerate(codecs)]

        def done() -> bool:
            return storm.over.is_set() and not any(call.alive for call in writing) and not oracle.xlen("ludus:{storm}:messages")

        learning = Call(partial(storm.learn, done))
        end = time.monotonic() + 25.0
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.05, 0.4))
            what = chance.random()
            if what < 0.6:
                line.cut_after(**{chance.choice(("up", "down")): chance.randint(1, 20_000)})
            elif what < 0.75:
                with server.paused():
                    time.sleep(chance.uniform(0.1, 1.5))
            elif what < 0.85:
                server.restart()
        line.cut_after()
        storm.over.set()
        for call in (*writing, learning):
            call.result()
        assert line.cuts > 10
        assert Counter(storm.learned) == Counter((worker, seq) for worker, count in storm.pushed.items() for seq in range(count))
        assert storm.lost == 0
