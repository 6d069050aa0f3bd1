"""Ring buffer of records in shared memory for one writer and one reader process, without copies; either may be killed.

The file has a page of counters, a table of records (start and length), and their bytes. The shared state is two counters:
records committed (owned by the writer) and released (owned by the reader). Each is one aligned store of eight bytes, made after
the data it refers to. A killed process thus leaves the ring in the state before its unfinished step: a partially written record
does not exist, and a record that was being read is read again.
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
"""Maximum number of records in a ring."""
NOTES = 64
"""Number of counters that the writer publishes to the reader."""

_MAGIC = int.from_bytes(b"LUDRING1", "little")
_VERSION = 1
_FIXED = struct.Struct("<QQQQ")  # magic, version, capacity, length of the table
_CHECKSUM = 4  # indices of cells of eight bytes; cells of writer and reader are on different cache lines
_COMMITTED, _DROPPED = 8, 9
_RELEASED = 16
_OVER = 24
_NOTES = 32
_TABLE = 512
_DATA = 8 * (_TABLE + 2 * RECORDS)

_SLICE_S = 0.1  # poll interval: the peer may be killed before it sends a wake-up
_CLAIM_S = 2.0  # time for a killed writer to disappear
_PAUSE_S = 0.01


def record_bytes(size: int) -> int:
    """Return the space that a record of `size` bytes takes in a ring."""
    return max(ALIGN, -(-size // ALIGN) * ALIGN)


def create_ring(path: Path, capacity: int) -> None:
    """Create an empty ring with room for `capacity` bytes of records. Raises StoreFull, AlreadyExists.

    All memory is allocated now: a page that cannot be allocated later would kill the process (SIGBUS).
    """
    if capacity <= 0:
        raise UsageError(f"The capacity of a ring cannot be {capacity} bytes.", "Give a positive number of bytes.")
    capacity = record_bytes(capacity)
    fixed = _FIXED.pack(_MAGIC, _VERSION, capacity, RECORDS)
    create_file(path, _DATA + capacity, fixed + struct.pack("<Q", zlib.crc32(fixed)))
    Wakeup.create(_room_path(path)).close()


class MemoryFence:
    """A full memory barrier: orders all reads and writes before the call against those after it.

    Python has no atomics, so locks are used: acquiring one keeps later accesses from moving up, releasing one keeps earlier
    accesses from moving down, and a release is never reordered with the next acquisition. Two pairs are needed: within a single
    one an earlier write and a later read could be reordered, which even x86 does.
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
    """Wakes one waiting process (a FIFO and a flag in shared memory); any number of processes may notify.

    A notification costs one memory read while the other process is not waiting. The waiting process first checks its condition,
    then calls `wait`: the flag was set by the previous `wait`, before the check, so no notification in between is lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = path.resolve()  # the flag is next to the FIFO itself, not next to a link to it
        self._fence = MemoryFence()
        try:
            # For reading and writing: opening never blocks, and the FIFO stays usable when other processes close it.
            self._fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise NotFound(f"There is no FIFO at {path}: {error.strerror}.", "Has its owner ended?") from error
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
            raise AlreadyExists(f"{path} exists already.") from error
        return cls(path)

    def notify(self) -> None:
        """Make the current or next `wait` return. The change it signals must have been stored before."""
        self._fence()
        if self._cells[0]:
            self._cells[0] = 0  # before the byte: the other order could undo the flag of the next wait
            with contextlib.suppress(BlockingIOError):  # the pipe is full of notifications
                os.write(self._fifo, b"!")

    def wait(self, timeout_s: float) -> bool:
        """Return True if there was (or may have been) a notification since the last call; False after `timeout_s`."""
        if self._cells[0] and not self._poll.poll(max(0.0, timeout_s) * 1000) and self._cells[0]:
            return False
        # A cleared flag means a notification, or a peer killed between flag and byte: check the condition in both cases.
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._fifo, 4096)) == 4096:
                pass
        self._cells[0] = 1
        self._fence()
        return True

    def fileno(self) -> int:
        """Return a descriptor that becomes readable on a notification; then call `wait(0)`."""
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
    """The mapped file, as writer and reader share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fence = MemoryFence()
        self._map, self._cells = _map_file(path, _DATA)
        self.capacity = self._check_header(path)
        self._bytes = memoryview(self._map)
        self._data = self._bytes[_DATA : _DATA + self.capacity]
        self.notes = self._bytes[8 * _NOTES : 8 * (_NOTES + NOTES)].cast("d")
        """Counters of the writer, which the reader may read at any time."""
        self._closed = False

    def _check_header(self, path: Path) -> int:
        magic, version, capacity, table = fixed = [self._cells[i] for i in range(4)]
        if magic != _MAGIC:
            raise Damaged(f"{path} is not a ring: it begins with {magic:#018x}.")
        if version != _VERSION:
            raise Damaged(f"{path} is a ring of format {version}, not {_VERSION}.", "Does another version of ludus use it?")
        if self._cells[_CHECKSUM] != zlib.crc32(_FIXED.pack(*fixed)) or table != RECORDS or capacity % ALIGN:
            raise Damaged(f"The sizes in the header of the ring {path} do not agree (capacity {capacity}, table {table}).")
        if len(self._map) != _DATA + capacity:
            raise Damaged(f"The ring {path} has {len(self._map)} bytes, not {_DATA + capacity}.", "Was it truncated?")
        waiting = self._cells[_COMMITTED] - self._cells[_RELEASED]
        if not 0 <= waiting <= RECORDS:
            raise Damaged(f"The counters of the ring {path} are invalid: {waiting} waiting records.")
        return capacity

    def _entry(self, number: int) -> tuple[int, int]:
        """Return start and length of a record."""
        at = _TABLE + 2 * (number % RECORDS)
        start, size = self._cells[at], self._cells[at + 1]
        if start % ALIGN or start + record_bytes(size) > self.capacity:
            raise Damaged(f"Record {number} of the ring {self.path} claims {size} bytes at {start} of {self.capacity}.")
        return start, size

    @property
    def committed(self) -> int:
        """Number of records committed since the ring was created."""
        return self._cells[_COMMITTED]

    @property
    def released(self) -> int:
        """Number of records released since the ring was created."""
        return self._cells[_RELEASED]

    @property
    def dropped(self) -> int:
        """Number of records that writers dropped because there was no room."""
        return self._cells[_DROPPED]

    @property
    def over(self) -> bool:
        return bool(self._cells[_OVER])

    def close(self) -> None:
        """Release the mapping; existing views keep it alive."""
        self._closed = True
        for view in (self.notes, self._data, self._bytes, self._cells):
            with contextlib.suppress(BufferError):  # an array still refers to it
                view.release()
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class RingWriter(_RingEnd):
    """The single writer of a ring, for one thread. A new writer continues after the last commit of the previous one."""

    def __init__(self, path: Path, wakeup: Path | None = None) -> None:
        """`wakeup`: path of the reader's Wakeup, which is notified at every commit. Raises UsageError, Damaged."""
        with contextlib.ExitStack() as undo:
            super().__init__(path)
            undo.callback(super().close)
            self._room = undo.enter_context(Wakeup(_room_path(path)))
            self._wakeup = undo.enter_context(Wakeup(wakeup)) if wakeup is not None else None
            self._claimed = _lock_writer(path)
            undo.callback(os.close, self._claimed)
            self._count = self._cells[_COMMITTED]  # after the lock: the previous writer has ended
            self._head = 0
            if self._count:
                start, size = self._entry(self._count - 1)
                self._head = start + record_bytes(size)
            self._reserved: tuple[int, int] | None = None
            undo.pop_all()

    def reserve(self, size: int, timeout_s: float = 0) -> memoryview | None:
        """Return `size` bytes to write to, aligned to 64, or None if there is no room. One reservation at a time.

        Raises UsageError if the ring is too small, MemoryClosed if the reader has finished it.
        """
        if self._reserved is not None:
            raise UsageError(f"The ring {self.path} has a reservation already.", "Commit or abandon it first.")
        if record_bytes(size) > self.capacity:
            raise UsageError(f"A record of {size} bytes never fits into a ring of {self.capacity}.", "Make the ring larger.")
        deadline = time.monotonic() + timeout_s if timeout_s > 0 else 0.0
        while (start := self._find_space(record_bytes(size))) is None:
            left = deadline - time.monotonic() if deadline else 0.0
            if left <= 0:
                return None
            self._room.wait(min(left, _SLICE_S))
        self._reserved = start, size
        return self._data[start : start + size]

    @property
    def reserved_at(self) -> int:
        """Start of the reservation in the ring."""
        assert self._reserved is not None
        return self._reserved[0]

    def _find_space(self, need: int) -> int | None:
        """Return the start of `need` contiguous free bytes."""
        if self._cells[_OVER]:
            raise MemoryClosed(f"The reader has finished the ring {self.path}.")
        released = self._cells[_RELEASED]
        self._fence()  # before the writer overwrites released records
        head, end = self._head, self.capacity
        if self._count == released:
            return head if head + need <= end else 0
        if self._count - released >= RECORDS:
            return None
        tail = self._entry(released)[0]
        if head <= tail:  # the free bytes are contiguous
            return head if head + need <= tail else None
        if head + need <= end:
            return head
        return 0 if need <= tail else None

    def commit(self) -> None:
        """Make the reserved record available to the reader."""
        if self._reserved is None:
            raise UsageError(f"Nothing is reserved in the ring {self.path}.", "Reserve before you commit.")
        start, size = self._reserved
        at = _TABLE + 2 * (self._count % RECORDS)
        self._cells[at], self._cells[at + 1] = start, size
        self._fence()  # the record must be visible before the counter
        self._count += 1
        self._cells[_COMMITTED] = self._count
        self._head = start + record_bytes(size)
        self._reserved = None
        if self._wakeup is not None:
            self._wakeup.notify()

    def abandon(self) -> None:
        """Cancel the reservation."""
        self._reserved = None

    def drop(self, count: int = 1) -> None:
        """Count records that were dropped because there was no room."""
        self._cells[_DROPPED] += count

    def close(self) -> None:
        if self._closed:
            return
        self._reserved = None
        self._room.close()
        if self._wakeup is not None:
            self._wakeup.close()
        super().close()
        os.close(self._claimed)


class RingRecord(NamedTuple):
    number: int
    """0, 1, 2, … since the ring was created."""
    start: int
    """Start in the ring, by which views of the same memory can be cached."""
    data: memoryview


class RingReader(_RingEnd):
    """The single reader of a ring, for one thread. A new reader begins with the oldest record that was not released."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._taken = self._cells[_RELEASED]
        self._early: set[int] = set()  # released before older records
        try:
            self._room = Wakeup(_room_path(path))
        except BaseException:
            super().close()
            raise

    def take(self) -> RingRecord | None:
        """Return the oldest record that was not taken, or None; never waits. It is valid until it is released."""
        number = self._taken
        if self._cells[_COMMITTED] <= number:
            return None
        self._fence()  # read the counter before the record
        start, size = self._entry(number)
        self._taken = number + 1
        return RingRecord(number, start, self._data[start : start + size])

    def release(self, record: RingRecord) -> None:
        """Release a record; its space is free when all older records are released too."""
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
        self._fence()  # finish reading before the writer may overwrite it
        self._cells[_RELEASED] = released
        self._room.notify()

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def waiting(self) -> int:
        """Number of records that can be taken now."""
        return self._cells[_COMMITTED] - self._taken

    def finish(self) -> None:
        """End the ring: the writer's current or next `reserve` raises MemoryClosed."""
        self._cells[_OVER] = 1
        self._room.notify()

    def close(self) -> None:
        if not self._closed:
            self._room.close()
            super().close()


# -- files --------------------------------------------------------------------------------------------------------------


def create_file(path: Path, size: int, content: bytes = b"", hint: str = "Enlarge the shared memory, or set LUDUS_SHM.") -> None:
    """Create a private file with `size` allocated bytes that begins with `content`. Raises StoreFull, AlreadyExists."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise AlreadyExists(f"{path} exists already.") from error
    except OSError as error:
        raise StoreFull(f"Cannot create {path}: {error.strerror}.") from error
    try:
        _allocate(file, size)
        os.pwrite(file, content, 0)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StoreFull(f"Cannot allocate {size} bytes for {path}: {error.strerror}.", hint) from error
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
    """Map a file; return the mapping, and its first `at_least` bytes as cells of eight bytes."""
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
        raise Damaged(f"{path} has {size} bytes, less than the {at_least} of its header.")
    return data, memoryview(data)[:at_least].cast("Q")


def _lock_writer(path: Path) -> int:
    """Lock the file for this writer and return the descriptor; the lock ends with the process. Raises UsageError."""
    import fcntl

    claimed = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    deadline = time.monotonic() + _CLAIM_S
    while True:
        try:
            fcntl.lockf(claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a POSIX lock is not inherited by forked children
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
