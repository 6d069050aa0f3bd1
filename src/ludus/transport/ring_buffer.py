"""A ring of records in shared memory: one process writes, another reads, no copy in between, and either may be killed.

The file holds a page of counters, a table of records (where they start, how long they are) and the room for their bytes. Two
counters are all there is to agree on: how many records were ever committed (the writer's) and how many released (the
reader's). Each is one aligned store of eight bytes, made after everything it speaks of; so whoever dies leaves the ring as it
was before his last finished step: a half-written record never existed, and one that was being read is there to be read again.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import struct
import threading
import time
import zlib
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from ludus.errors import AlreadyExists, Damaged, MemoryClosed, NotFound, StoreFull, UsageError

ALIGN = 64  # a cache line: views of any dtype are aligned, and no two records share a line
RECORDS = 4096
"""At most so many records are in a ring at a time, however small they are."""
NOTES = 64

_MAGIC = int.from_bytes(b"LUDRING1", "little")
_VERSION = 1
_FIXED = struct.Struct("<QQQQ")  # magic, version, capacity, length of the table
_CHECKSUM = 4  # indices of cells of eight bytes; what different sides write lies on different cache lines
_COMMITTED, _DROPPED = 8, 9
_RELEASED = 16
_OVER = 24
_NOTES = 32
_TABLE = 512
_DATA = 8 * (_TABLE + 2 * RECORDS)

_SLICE_S = 0.1  # whoever rings may be killed before he does: look again this often
_CLAIM_S = 2.0  # for a killed writer to be gone
_PAUSE_S = 0.01


def record_bytes(size: int) -> int:
    """What a record of `size` bytes takes up; a ring of N such records has the capacity N times this."""
    return max(ALIGN, -(-size // ALIGN) * ALIGN)


def create_ring(path: Path, capacity: int) -> None:
    """Make an empty ring with room for `capacity` bytes of records. Raises StoreFull, AlreadyExists.

    The memory is taken now: a page that cannot be had later would kill whoever touches it (SIGBUS) and raise nothing.
    """
    if capacity <= 0:
        raise UsageError(f"A ring of {capacity} bytes has room for nothing.", "Give the capacity in bytes.")
    capacity = record_bytes(capacity)
    fixed = _FIXED.pack(_MAGIC, _VERSION, capacity, RECORDS)
    create_file(path, _DATA + capacity, fixed + struct.pack("<Q", zlib.crc32(fixed)))
    Wakeup.create(_room_path(path)).close()


class MemoryFence:
    """Calling it orders everything before it against everything after it, reads and writes, on every processor.

    Python has no atomics. A lock is what it has: taking one keeps what follows from moving up, releasing one keeps what came
    before from moving down, and a release is never overtaken by the acquisition after it. Hence two pairs: a single one would
    let an earlier write and a later read meet inside it and swap, which even x86 does to plain stores and loads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        lock = self._lock
        with lock:
            pass
        with lock:
            pass


class Wakeup:
    """Wakes one process that waits; any number may ring. Ringing costs a memory read while nobody listens.

    Whoever waits looks first for what he waits for, then calls `wait`: the flag that asks to be rung is set before he looks, by
    the call before, so nothing that happens in between goes unheard.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = path.resolve()  # the flag lies beside the bell itself, not beside a link to it
        self._fence = MemoryFence()
        try:
            # For reading and writing: opening never blocks, and the bell outlives whoever else has it open.
            self._fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise NotFound(f"There is no bell at {path}: {error.strerror}.", "Has its owner ended?") from error
        try:
            self._map, self._cells = _map_file(_flag_path(path), 8)
        except BaseException:
            os.close(self._fifo)
            raise
        self._poll = select.poll()
        self._poll.register(self._fifo, select.POLLIN)

    @classmethod
    def create(cls, path: Path) -> Wakeup:
        create_file(_flag_path(path), ALIGN, struct.pack("<Q", 1))
        try:
            os.mkfifo(path, 0o600)
        except FileExistsError as error:
            raise AlreadyExists(f"There is something at {path} already.") from error
        return cls(path)

    def ring(self) -> None:
        """Make a `wait` return, the one that is under way or the next. What it is about must have been stored before."""
        self._fence()
        if self._cells[0]:
            self._cells[0] = 0  # before the byte: the other order could undo the flag of the next wait
            with contextlib.suppress(BlockingIOError):  # full of unheard rings
                os.write(self._fifo, b"!")

    def wait(self, timeout_s: float) -> bool:
        """Whether somebody has rung since the last call (or may have: look again). False after `timeout_s`."""
        if self._cells[0] and not self._poll.poll(max(0.0, timeout_s) * 1000) and self._cells[0]:
            return False
        # Without the flag somebody has rung, or was killed on the way from the flag to the byte: also a reason to look.
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._fifo, 4096)) == 4096:
                pass
        self._cells[0] = 1
        self._fence()
        return True

    def fileno(self) -> int:
        """Becomes readable when the bell is rung; then call `wait(0)`."""
        return self._fifo

    def close(self) -> None:
        if self._fifo >= 0:
            os.close(self._fifo)
            self._fifo = -1
            self._cells.release()
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _RingEnd:
    """What writer and reader have in common: the mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fence = MemoryFence()
        self._map, self._cells = _map_file(path, _DATA)
        self.capacity = self._checked(path)
        self._bytes = memoryview(self._map)
        self._data = self._bytes[_DATA : _DATA + self.capacity]
        self.notes = self._bytes[8 * _NOTES : 8 * (_NOTES + NOTES)].cast("d")
        """Numbers of the writer that the reader may look at any time."""
        self._closed = False

    def _checked(self, path: Path) -> int:
        magic, version, capacity, table = fixed = [self._cells[i] for i in range(4)]
        if magic != _MAGIC:
            raise Damaged(f"{path} is not a ring: it begins with {magic:#018x}.")
        if version != _VERSION:
            raise Damaged(f"{path} is a ring of format {version}, not {_VERSION}.", "Does another version of ludus use it?")
        if self._cells[_CHECKSUM] != zlib.crc32(_FIXED.pack(*fixed)) or table != RECORDS or capacity % ALIGN:
            raise Damaged(f"The sizes in the header of the ring {path} do not agree (capacity {capacity}, table {table}).")
        if len(self._map) != _DATA + capacity:
            raise Damaged(f"The ring {path} has {len(self._map)} bytes, not {_DATA + capacity}.", "Was it cut off?")
        waiting = self._cells[_COMMITTED] - self._cells[_RELEASED]
        if not 0 <= waiting <= RECORDS:
            raise Damaged(f"The counters of the ring {path} say that {waiting} records wait.")
        return capacity

    def _entry(self, number: int) -> tuple[int, int]:
        """Where a record starts, and its length."""
        at = _TABLE + 2 * (number % RECORDS)
        start, size = self._cells[at], self._cells[at + 1]
        if start % ALIGN or start + record_bytes(size) > self.capacity:
            raise Damaged(f"Record {number} of the ring {self.path} claims {size} bytes at {start} of {self.capacity}.")
        return start, size

    @property
    def committed(self) -> int:
        """Records ever committed in this ring, by all its writers."""
        return self._cells[_COMMITTED]

    @property
    def released(self) -> int:
        """Records that made room again, all up to this number."""
        return self._cells[_RELEASED]

    @property
    def dropped(self) -> int:
        """What writers counted as lost for want of room."""
        return self._cells[_DROPPED]

    @property
    def over(self) -> bool:
        return bool(self._cells[_OVER])

    def close(self) -> None:
        """Let go of the mapping; views that are still held keep it alive."""
        self._closed = True
        for view in (self.notes, self._data, self._bytes, self._cells):
            with contextlib.suppress(BufferError):  # an array made from it lives
                view.release()
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class RingWriter(_RingEnd):
    """The one writer of a ring, for one thread. A new one goes on after the last commit of the one before."""

    def __init__(self, path: Path, bell: Path | None = None) -> None:
        """`bell`: of the reader; it is rung at every commit for which the reader may be waiting. Raises UsageError, Damaged."""
        with contextlib.ExitStack() as undo:
            super().__init__(path)
            undo.callback(super().close)
            self._room = undo.enter_context(Wakeup(_room_path(path)))
            self._bell = undo.enter_context(Wakeup(bell)) if bell is not None else None
            self._claimed = _lock_writer(path)
            undo.callback(os.close, self._claimed)
            self._count = self._cells[_COMMITTED]  # after the claim: the writer before has written its last
            self._head = 0
            if self._count:
                start, size = self._entry(self._count - 1)
                self._head = start + record_bytes(size)
            self._reserved: tuple[int, int] | None = None
            undo.pop_all()

    def reserve(self, size: int, timeout_s: float = 0) -> memoryview | None:
        """`size` bytes to write to, aligned to 64, or None while there is no room. At most one reservation at a time.

        Raises UsageError when there can never be room, MemoryClosed when the ring is over.
        """
        if self._reserved is not None:
            raise UsageError(f"The ring {self.path} has a reservation already.", "Commit or abandon it first.")
        if record_bytes(size) > self.capacity:
            raise UsageError(f"A record of {size} bytes never fits into a ring of {self.capacity}.", "Make the ring larger.")
        deadline = time.monotonic() + timeout_s if timeout_s > 0 else 0.0
        while (start := self._place(record_bytes(size))) is None:
            left = deadline - time.monotonic() if deadline else 0.0
            if left <= 0:
                return None
            self._room.wait(min(left, _SLICE_S))
        self._reserved = start, size
        return self._data[start : start + size]

    @property
    def reserved_at(self) -> int:
        """Where in the ring the reservation begins: two at one place are never there at the same time."""
        assert self._reserved is not None
        return self._reserved[0]

    def _place(self, need: int) -> int | None:
        """Where `need` bytes in a row are free."""
        if self._cells[_OVER]:
            raise MemoryClosed(f"The ring {self.path} is over.")
        released = self._cells[_RELEASED]
        self._fence()  # what the reader read is read: it may be written over
        head, end = self._head, self.capacity
        if self._count == released:
            return head if head + need <= end else 0
        if self._count - released >= RECORDS:
            return None
        tail = self._entry(released)[0]
        if head <= tail:  # the free bytes are in one piece
            return head if head + need <= tail else None
        if head + need <= end:
            return head
        return 0 if need <= tail else None

    def commit(self) -> None:
        """The reserved record is complete; the reader may take it."""
        if self._reserved is None:
            raise UsageError(f"Nothing is reserved in the ring {self.path}.", "Reserve before you commit.")
        start, size = self._reserved
        at = _TABLE + 2 * (self._count % RECORDS)
        self._cells[at], self._cells[at + 1] = start, size
        self._fence()  # the record and its place are there before anybody hears of them
        self._count += 1
        self._cells[_COMMITTED] = self._count
        self._head = start + record_bytes(size)
        self._reserved = None
        if self._bell is not None:
            self._bell.ring()

    def abandon(self) -> None:
        """The reserved record is not to be: its room is free again."""
        self._reserved = None

    def drop(self, count: int = 1) -> None:
        """Count what was thrown away because there was no room."""
        self._cells[_DROPPED] += count

    def close(self) -> None:
        if self._closed:
            return
        self._reserved = None
        self._room.close()
        if self._bell is not None:
            self._bell.close()
        super().close()
        os.close(self._claimed)


class RingRecord(NamedTuple):
    number: int
    """0, 1, 2, … since the ring was made."""
    start: int
    """Where in the ring: records at one place are never there at the same time."""
    data: memoryview


class RingReader(_RingEnd):
    """The one reader of a ring, for one thread. A new one begins with the oldest record that was not released: what its
    predecessor took and never released comes again."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._taken = self._cells[_RELEASED]
        self._early: set[int] = set()  # released, while older ones are still held
        try:
            self._room = Wakeup(_room_path(path))
        except BaseException:
            super().close()
            raise

    def take(self) -> RingRecord | None:
        """The oldest record that was not taken; never waits. It stays as it is until it is released."""
        number = self._taken
        if self._cells[_COMMITTED] <= number:
            return None
        self._fence()  # the count was read before the record
        start, size = self._entry(number)
        self._taken = number + 1
        return RingRecord(number, start, self._data[start : start + size])

    def release(self, record: RingRecord) -> None:
        """Done with it: its room is free once all older ones are released, too."""
        number, released = record.number, self._cells[_RELEASED]
        if not released <= number < self._taken or number in self._early:
            raise UsageError(f"Record {number} of the ring {self.path} is not held.", "Release once what was taken.")
        if number != released:
            self._early.add(number)
            return
        released += 1
        while released in self._early:
            self._early.remove(released)
            released += 1
        self._fence()  # everything was read before the writer may write over it
        self._cells[_RELEASED] = released
        self._room.ring()

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def waiting(self) -> int:
        """Records that could be taken now."""
        return self._cells[_COMMITTED] - self._taken

    def finish(self) -> None:
        """The ring is over: its writer's next `reserve`, or the one that waits, raises MemoryClosed."""
        self._cells[_OVER] = 1
        self._room.ring()

    def close(self) -> None:
        if not self._closed:
            self._room.close()
            super().close()


# -- files --------------------------------------------------------------------------------------------------------------


def create_file(path: Path, size: int, content: bytes) -> None:
    """A private file of `size` bytes that are really there, beginning with `content`. Raises StoreFull, AlreadyExists."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise AlreadyExists(f"There is something at {path} already.") from error
    except OSError as error:
        raise StoreFull(f"Cannot make {path}: {error.strerror}.") from error
    try:
        _allocate(file, size)
        os.pwrite(file, content, 0)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StoreFull(
            f"Cannot take {size} bytes for {path}: {error.strerror}.", "Give shared memory more room, or set LUDUS_SHM."
        ) from error
    finally:
        os.close(file)


def _allocate(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    zeros = bytes(1 << 20)
    for at in range(0, size, len(zeros)):
        os.pwrite(file, zeros[: size - at], at)


def _map_file(path: Path, at_least: int) -> tuple[mmap.mmap, memoryview]:
    """The whole file, and its first `at_least` bytes as cells of eight."""
    try:
        with open(path, "r+b") as file:
            data = mmap.mmap(file.fileno(), 0)
    except OSError as error:
        raise NotFound(f"Cannot map {path}: {error.strerror}.", "Has its owner ended?") from error
    except ValueError as error:  # an empty file
        raise Damaged(f"{path} is empty.") from error
    if len(data) < at_least:
        size = len(data)
        data.close()
        raise Damaged(f"{path} has {size} bytes, not even the {at_least} of its header.")
    return data, memoryview(data)[:at_least].cast("Q")


def _lock_writer(path: Path) -> int:
    """A descriptor whose lock says that this process is the writer; it ends with the process, however that ends."""
    import fcntl

    claimed = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    deadline = time.monotonic() + _CLAIM_S
    while True:
        try:
            fcntl.lockf(claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process: what it forks does not hold on to it
            return claimed
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN) or time.monotonic() > deadline:
                os.close(claimed)
                raise UsageError(f"The ring {path} has another writer.", "End it first.") from error
            time.sleep(_PAUSE_S)


def _room_path(path: Path) -> Path:
    return path.with_name(path.name + ".room")


def _flag_path(path: Path) -> Path:
    return path.with_name(path.name + ".flag")
