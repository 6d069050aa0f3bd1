"""The ring: a queue in shared memory that survives whoever is killed at it."""

from __future__ import annotations

import os
import resource
import stat
import struct
import tempfile
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ludus.errors import AlreadyExists, Damaged, LudusError, MemoryClosed, NotFound, StoreFull, UsageError
from ludus.transport import ring_buffer as rings
from ludus.transport.ring_buffer import RECORDS, RingReader, RingRecord, RingWriter, Wakeup, create_ring, record_bytes
from tests.transport.killing import forked, kill_readers, kill_writers, reap

CAPACITY = 1024


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_ring(tmp_path / "ring", CAPACITY)
    return tmp_path / "ring"


def put(writer: RingWriter, data: bytes) -> bool:
    room = writer.reserve(len(data))
    if room is None:
        return False
    room[:] = data
    writer.commit()
    return True


def get(reader: RingReader) -> bytes | None:
    record = reader.take()
    if record is None:
        return None
    data = bytes(record.data)
    reader.release(record)
    return data


# -- a queue ------------------------------------------------------------------------------------------------------------


def test_records_come_out_as_they_went_in(path: Path) -> None:
    with RingWriter(path) as writer, RingReader(path) as reader:
        for turn in range(20):  # several times around
            sent = [bytes([turn * 3 + i]) * (100 * i + 1) for i in range(3)]
            assert all(put(writer, data) for data in sent)
            assert reader.waiting == 3
            assert [get(reader) for _ in sent] == sent
            assert get(reader) is None
        assert (writer.committed, reader.committed, reader.released, reader.waiting) == (60, 60, 60, 0)


def test_a_full_ring_has_no_room_until_something_is_released(path: Path) -> None:
    with RingWriter(path) as writer, RingReader(path) as reader:
        assert [put(writer, bytes(256)) for _ in range(5)] == [True] * 4 + [False]
        record = reader.take()
        assert record is not None
        assert not put(writer, bytes(256)), "a record that is being read is not free"
        reader.release(record)
        assert put(writer, bytes(256))
        assert not put(writer, b"")


def test_a_record_that_can_never_fit_is_refused(path: Path) -> None:
    with RingWriter(path) as writer, RingReader(path) as reader:
        with pytest.raises(UsageError, match="1025 bytes never fits into a ring of 1024"):
            writer.reserve(CAPACITY + 1)
        for _ in range(3):  # but one that fills it does fit, wherever the ring stands
            assert put(writer, bytes(64))
            assert get(reader) == bytes(64)
            assert put(writer, bytes(CAPACITY))
            assert get(reader) == bytes(CAPACITY)


def test_room_is_made_in_the_order_of_the_records_whatever_the_order_of_release(path: Path) -> None:
    with RingWriter(path) as writer, RingReader(path) as reader:
        for i in range(4):
            assert put(writer, bytes([i]) * 256)
        first, second, third, _ = [reader.take() for _ in range(4)]
        assert first is not None
        assert second is not None
        assert third is not None
        reader.release(third)
        reader.release(second)
        assert not put(writer, bytes(256))
        assert bytes(first.data) == bytes(256)
        reader.release(first)
        assert [put(writer, bytes(256)) for _ in range(4)] == [True, True, True, False]


def test_only_what_is_held_can_be_released_and_only_once(path: Path) -> None:
    with RingWriter(path) as writer, RingReader(path) as reader:
        put(writer, b"a")
        put(writer, b"b")
        first, second = reader.take(), reader.take()
        assert first is not None
        assert second is not None
        for record in (second, first):
            reader.release(record)
            with pytest.raises(UsageError, match="is not held"):
                reader.release(record)
        with pytest.raises(UsageError, match="Record 2"):
            reader.release(RingRecord(2, 0, first.data))


def test_reservations_are_aligned_writable_and_one_at_a_time(path: Path) -> None:
    with RingWriter(path) as writer:
        with pytest.raises(UsageError, match="Nothing is reserved"):
            writer.commit()
        for size in (1, 63, 65):
            room = writer.reserve(size)
            assert room is not None
            array = np.frombuffer(room, np.uint8)
            assert array.ctypes.data % 64 == 0
            assert array.flags.writeable
            with pytest.raises(UsageError, match="has a reservation already"):
                writer.reserve(1)
            writer.commit()


def test_what_is_abandoned_is_never_seen(path: Path) -> None:
    with RingWriter(path) as writer, RingReader(path) as reader:
        room = writer.reserve(1000)
        assert room is not None
        room[:] = bytes(1000)
        writer.abandon()
        assert reader.take() is None
        assert put(writer, b"next")
        assert get(reader) == b"next"


def test_there_is_a_bound_on_the_number_of_records(tmp_path: Path) -> None:
    create_ring(tmp_path / "ring", 64 * (RECORDS + 10))
    with RingWriter(tmp_path / "ring") as writer, RingReader(tmp_path / "ring") as reader:
        assert sum(put(writer, b"x") for _ in range(RECORDS + 1)) == RECORDS
        assert get(reader) == b"x"
        assert put(writer, b"y")
        assert not put(writer, b"y")


def test_counters_of_the_writer_are_seen_by_the_reader_and_survive_it(path: Path) -> None:
    with RingReader(path) as reader:
        with RingWriter(path) as writer:
            writer.drop()
            writer.drop(2)
            writer.notes[63] = 1.5
            assert put(writer, b"x")
        with RingWriter(path) as writer:
            assert (writer.committed, writer.dropped, writer.notes[63]) == (1, 3, 1.5)
        assert (reader.committed, reader.dropped, reader.notes[63], len(reader.notes)) == (1, 3, 1.5, 64)


def test_views_outlive_the_ring_that_is_closed(path: Path) -> None:
    with RingWriter(path) as writer:
        put(writer, b"12345678")
    reader = RingReader(path)
    record = reader.take()
    assert record is not None
    array = np.frombuffer(record.data, np.uint8)
    reader.close()
    reader.close()
    path.unlink()
    assert array.tobytes() == b"12345678"


# -- against a model ----------------------------------------------------------------------------------------------------


class RingMachine(RuleBasedStateMachine):
    """Whatever is done in whatever order, and whoever is replaced: a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "ring"
        create_ring(self.path, CAPACITY)
        self.writer, self.reader = RingWriter(self.path), RingReader(self.path)
        self.reserved: memoryview | None = None
        self.sent: list[bytes] = []
        self.waiting: deque[int] = deque()
        self.held: dict[int, RingRecord] = {}
        self.unreleased: set[int] = set()  # as far as a new reader is concerned

    @precondition(lambda self: self.reserved is None)
    @rule(size=st.integers(0, CAPACITY))
    def reserve(self, size: int) -> None:
        self.reserved = self.writer.reserve(size)
        if self.reserved is None:
            assert self.unreleased, "an empty ring has no room"
        else:
            self.reserved[:] = bytes([len(self.sent) % 251]) * size

    @precondition(lambda self: self.reserved is not None)
    @rule()
    def commit(self) -> None:
        assert self.reserved is not None
        self.waiting.append(len(self.sent))
        self.unreleased.add(len(self.sent))
        self.sent.append(bytes(self.reserved))
        self.writer.commit()
        self.reserved = None

    @rule()
    def abandon(self) -> None:
        self.writer.abandon()
        self.reserved = None

    @rule()
    def take(self) -> None:
        record = self.reader.take()
        if not self.waiting:
            assert record is None
        else:
            assert record is not None
            assert record.number == self.waiting.popleft()
            self.held[record.number] = record

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        self.reader.release(self.held.pop(number))
        self.unreleased.discard(number)

    @rule()
    def replace_the_writer(self) -> None:
        self.writer.close()
        self.writer, self.reserved = RingWriter(self.path), None

    @rule()
    def replace_the_reader(self) -> None:
        oldest = min(self.unreleased, default=len(self.sent))
        self.held.clear()
        self.reader.close()
        self.reader = RingReader(self.path)
        self.waiting = deque(range(oldest, len(self.sent)))
        self.unreleased = set(self.waiting)

    @invariant()
    def what_is_held_does_not_change(self) -> None:
        for number, record in self.held.items():
            assert bytes(record.data) == self.sent[number]

    @invariant()
    def the_counts_add_up(self) -> None:
        assert self.writer.committed == self.reader.committed == len(self.sent)
        assert self.reader.waiting == len(self.waiting)

    def teardown(self) -> None:
        self.held.clear()
        self.reserved = None
        self.writer.close()
        self.reader.close()
        self.directory.cleanup()


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


# -- waiting ------------------------------------------------------------------------------------------------------------


def test_a_wakeup_that_was_rung_is_heard_once(tmp_path: Path) -> None:
    with Wakeup.create(tmp_path / "wakeup") as listener, Wakeup(tmp_path / "wakeup") as ringer:
        assert not listener.wait(0.01)
        ringer.notify()
        ringer.notify()
        assert listener.wait(0)
        assert not listener.wait(0)


def test_a_wakeup_is_found_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with Wakeup.create(tmp_path / "wakeup") as listener:
        (tmp_path / "elsewhere" / "wakeup").symlink_to(tmp_path / "wakeup")
        with Wakeup(tmp_path / "elsewhere" / "wakeup") as ringer:
            ringer.notify()
        assert listener.wait(0)


def test_a_notification_writes_nothing_while_no_process_waits(tmp_path: Path) -> None:
    with Wakeup.create(tmp_path / "wakeup") as listener, Wakeup(tmp_path / "wakeup") as ringer:
        for _ in range(100_000):  # more than a pipe holds: it would block, or fail
            ringer.notify()
        assert os.read(listener.fileno(), 100) == b"!"


def test_a_ringer_that_was_killed_before_the_byte_is_heard_all_the_same(tmp_path: Path) -> None:
    with Wakeup.create(tmp_path / "wakeup") as listener:
        flag = tmp_path / "wakeup.flag"
        flag.write_bytes(bytes(8) + flag.read_bytes()[8:])  # it took the flag down, and was no more
        assert listener.wait(0)
        assert not listener.wait(0)


def test_a_missing_wakeup_fifo_is_an_error(tmp_path: Path, path: Path) -> None:
    with pytest.raises(NotFound, match="no FIFO at"):
        Wakeup(tmp_path / "nothing")
    with pytest.raises(NotFound, match="no FIFO at"):
        RingWriter(path, tmp_path / "nothing")


def test_nothing_that_happens_between_looking_and_waiting_goes_unheard(tmp_path: Path) -> None:
    """Ping-pong between two processes: a single ring that is lost would make both wait for ever."""
    rounds = 3000
    for name in ("there", "back"):
        create_ring(tmp_path / name, 64)
        Wakeup.create(tmp_path / f"{name}.wakeup").close()

    def play(inwards: str, outwards: str, begins: bool) -> None:
        reader, wakeup = RingReader(tmp_path / inwards), Wakeup(tmp_path / f"{inwards}.wakeup")
        writer = RingWriter(tmp_path / outwards, tmp_path / f"{outwards}.wakeup")
        with reader, wakeup, writer:
            for turn in range(2 * rounds):
                if (turn % 2 == 0) == begins:
                    assert writer.reserve(8, 10.0) is not None
                    writer.commit()
                else:
                    while (record := reader.take()) is None:
                        assert wakeup.wait(10.0), f"nothing was heard in turn {turn}"
                    reader.release(record)

    pid = forked(lambda: play("there", "back", False))
    try:
        play("back", "there", True)
    finally:
        code = reap(pid)
    assert code == 0


def test_a_waiting_writer_gets_room_when_a_record_is_released(path: Path) -> None:
    with RingWriter(path) as writer, RingReader(path) as reader:
        assert put(writer, bytes(CAPACITY))
        record = reader.take()
        assert record is not None
        assert writer.reserve(1, 0.01) is None
        releasing = threading.Timer(0.05, reader.release, (record,))
        releasing.start()
        assert writer.reserve(1, 30.0) is not None
        releasing.join()


def test_a_ring_that_is_over_takes_nothing_more_and_gives_what_it_has(path: Path) -> None:
    with RingWriter(path) as writer, RingReader(path) as reader:
        assert put(writer, bytes(CAPACITY))
        ending = threading.Timer(0.05, reader.finish)
        ending.start()
        with pytest.raises(MemoryClosed, match="has finished the ring"):
            writer.reserve(1, 30.0)
        ending.join()
        assert reader.over
        assert get(reader) == bytes(CAPACITY)


# -- killed -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Path, Path]:
    create_ring(tmp_path / "large", 200_000)
    Wakeup.create(tmp_path / "wakeup").close()
    return tmp_path / "large", tmp_path / "wakeup"


def test_writers_that_are_killed_leave_nothing_torn_missing_or_doubled(shared: tuple[Path, Path]) -> None:
    tally = kill_writers(*shared, kills=15, seed=1)
    assert tally.records > 15


def test_what_a_killed_reader_did_not_release_comes_again_and_nothing_is_lost(shared: tuple[Path, Path]) -> None:
    tally = kill_readers(*shared, kills=10, seed=2)
    assert tally.records > 10


def test_a_ring_has_one_writing_process(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "_CLAIM_S", 0.0)

    def intrude() -> None:
        with pytest.raises(UsageError, match="another writer"):
            RingWriter(path)

    with RingWriter(path):
        assert reap(forked(intrude)) == 0
    pid = forked(lambda: RingWriter(path).close())
    assert reap(pid) == 0


# -- files --------------------------------------------------------------------------------------------------------------


def test_a_ring_belongs_to_its_user_alone_and_its_memory_is_taken_at_once(tmp_path: Path) -> None:
    create_ring(tmp_path / "ring", 1 << 20)
    status = (tmp_path / "ring").stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= 1 << 20
    with pytest.raises(AlreadyExists, match="ring"):
        create_ring(tmp_path / "ring", 1 << 20)
    with pytest.raises(UsageError, match="-5 bytes"):
        create_ring(tmp_path / "other", -5)


def test_no_room_for_a_ring_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    def create() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(StoreFull, match="Cannot allocate 104"):
            create_ring(tmp_path / "ring", 100 << 20)
        assert list(tmp_path.iterdir()) == []

    assert reap(forked(create)) == 0


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 1, "is not a ring"),
        (8, 2, "format 2"),
        (16, 1 << 20, "do not agree"),
        (24, 7, "do not agree"),
        (32, 0, "do not agree"),
        (64, 10_000, "10000 waiting records"),
        (128, 5, "waiting records"),
    ],
)
def test_a_damaged_header_is_noticed(path: Path, at: int, value: int, message: str) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + 8] = struct.pack("<Q", value)
    path.write_bytes(data)
    for side in (RingWriter, RingReader):
        with pytest.raises(Damaged, match=message):
            side(path)


def test_a_record_that_claims_to_be_elsewhere_is_noticed(path: Path) -> None:
    with RingWriter(path) as writer, RingReader(path) as reader:
        put(writer, b"x")
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(struct.pack("<QQ", 64, CAPACITY))
        with pytest.raises(Damaged, match=r"Record 0 .* claims 1024 bytes at 64 of 1024"):
            reader.take()


@pytest.mark.parametrize("size", [0, 100, 70_000])
def test_a_file_that_was_cut_off_is_noticed(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(Damaged):
        RingReader(path)


def test_a_missing_ring_is_an_error(tmp_path: Path) -> None:
    for side in (RingWriter, RingReader):
        with pytest.raises(NotFound, match="Cannot map"):
            side(tmp_path / "nothing")
    with pytest.raises(LudusError):
        create_ring(tmp_path / "no" / "directory", 100)


def test_the_room_that_a_record_takes_up_is_known() -> None:
    assert [record_bytes(size) for size in (0, 1, 64, 65)] == [64, 64, 64, 128]
