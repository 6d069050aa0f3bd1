"""Replay log: segments of served matches in files, from which a learner's memory can be filled.

A file is a magic line and records; the first record describes the others. A record is its length, its checksum, a checksum of
these two, and the data, so that readers detect and skip the partial record of a killed process.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple
from weakref import WeakValueDictionary

import msgpack
import numpy as np

from ludus.core.tree import Tree, decode, encode, leaves, map_tree
from ludus.core.types import OVER_STEPS, OVER_STEPS_AND_AFTER, Segments, SegmentSpec
from ludus.errors import Damaged, NotFound, UsageError
from ludus.transport.base import SegmentWriter
from ludus.transport.segment_codec import spec_from_plain, spec_to_plain

log = logging.getLogger(__name__)

SUFFIX = ".ludus"

_MAGIC = b"LUDUSLOG1\n"
_HEAD = struct.Struct("<II")  # length and checksum of a record
_CHECK = struct.Struct("<I")  # checksum of that
_HEAD_BYTES = _HEAD.size + _CHECK.size
_BATCH_BYTES = 8 << 20  # maximum that is encoded and written at once
_GATHER_S = 0.2  # interval of writes
_LOCK_S = 5.0  # time limit for the lock of the directory
_FILES = 64  # approximate number of files at the limit


# -- writing: the event loop's side --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayLogStats:
    written: int = 0
    """Segments in files."""
    dropped: int = 0
    """Segments lost because the queue was full, the directory at its limit, or a write failed."""
    waiting: int = 0
    bytes: int = 0
    """Written by this writer."""
    state: str = "recording"
    """Or "full" (the directory is at its limit) or "failing" (write error), until writing succeeds again."""


class ReplayLogWriter:
    """SegmentWriter for one event loop that never blocks it: a thread encodes and writes.

    Segments that exceed the queue, the limit of the directory or the disk are dropped and counted. The limit applies to all
    files of the directory, also of other writers; files are never deleted.
    """

    def __init__(
        self,
        spec: SegmentSpec,
        directory: Path | str,
        limit_bytes: int,
        *,
        temperature: float = 1.0,
        file_bytes: int = 0,
        queue_bytes: int = 64 << 20,
        open_bytes: int = 1 << 30,
        retry_s: float = 10.0,
    ) -> None:
        """`temperature`: default sampling temperature of the actions (see `at`). `file_bytes`: 0 = derived from the limit.

        `open_bytes`: limit for all blocks that are being filled; beyond it `reserve` returns None. `retry_s`: delay after a
        write error.
        """
        self._spec, self._temperature, self._retry_s = spec, temperature, retry_s
        self._files = _LogFiles(Path(directory), spec, temperature, limit_bytes, file_bytes or _file_bytes(limit_bytes))
        self._queue_bytes = queue_bytes
        self._block_bytes = Segments.empty(spec, 1).nbytes
        self._max_open = max(1, open_bytes // self._block_bytes)
        self._open: WeakValueDictionary[int, Segments] = WeakValueDictionary()  # weak: a session may end without abandon()
        self._queue: deque[tuple[Segments, float, int]] = deque()
        self._bytes = self._unwritten = 0
        self._changed = threading.Condition()
        self._closed = False
        self._dropped = 0
        self._state = "recording"
        self._thread = threading.Thread(target=self._write, name="replay log", daemon=True)
        self._thread.start()

    def at(self, temperature: float) -> SegmentWriter:
        """Return a writer for sessions with another sampling temperature, which is stored with their segments."""
        return self if temperature == self._temperature else _TemperatureWriter(self, temperature)

    def reserve(self, timeout_s: float) -> Segments | None:
        """Never waits. Returns None when closed, or while open blocks use all memory that they may use."""
        if self._closed or len(self._open) >= self._max_open:
            return None
        block = Segments.empty(self._spec, 1)
        self._open[id(block)] = block
        return block

    def commit(self, segments: Segments) -> None:
        self.commit_at(segments, self._temperature)

    def commit_at(self, segments: Segments, temperature: float) -> None:
        self._give_back(segments, "committed")
        size = self._block_bytes * (segments.steps + 1) // (self._spec.steps + 1)  # of the touched memory
        with self._changed:
            if self._closed or (self._unwritten and self._bytes + size > self._queue_bytes):
                self._dropped += 1
                return
            self._queue.append((segments, temperature, size))
            self._unwritten += 1
            before, self._bytes = self._bytes, self._bytes + size
            if len(self._queue) == 1 or before < _BATCH_BYTES <= self._bytes:
                self._changed.notify_all()

    def abandon(self, segments: Segments) -> None:
        self._give_back(segments, "abandoned")

    def _give_back(self, segments: Segments, what: str) -> None:
        if self._open.pop(id(segments), None) is None:
            raise ValueError(f"A block was {what} without having been reserved.")

    def stats(self) -> ReplayLogStats:
        with self._changed:
            return ReplayLogStats(self._files.written, self._dropped, self._unwritten, self._files.bytes, self._state)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write waiting segments within the time limit, and drop the rest. Later commits are dropped too."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._changed:
                log.warning("replay log: %d segments could not be written within %g s", self._unwritten, timeout_s)
                self._dropped += len(self._queue)
                self._unwritten -= len(self._queue)
                self._queue.clear()

    def __enter__(self) -> ReplayLogWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the thread

    def _write(self) -> None:
        while batch := self._next_batch():
            before = self._files.written
            state, why = "recording", ""
            try:
                records = [record for record in map(self._encode, batch) if record is not None]
                if self._files.write(records) < len(records):
                    state, why = (
                        "full",
                        f"the files in {self._files.directory} take up {self._files.limit_bytes} bytes, the limit",
                    )
            except OSError as error:
                state, why = "failing", f"{error.strerror or error}: {self._files.directory}"
            self._finish_batch(batch, self._files.written - before, state, why)
        with contextlib.suppress(OSError):  # only the final sync failed
            self._files.finish()

    def _next_batch(self) -> list[tuple[Segments, float, int]]:
        """Wait for the segments of the next write; an empty list when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            pause, full = (self._retry_s, False) if self._state == "failing" else (_GATHER_S, True)
            self._changed.wait_for(lambda: self._closed or (full and self._bytes >= _BATCH_BYTES), pause)
            batch: list[tuple[Segments, float, int]] = []
            size = 0
            while self._queue and (not batch or size + self._queue[0][2] <= _BATCH_BYTES):
                batch.append(self._queue.popleft())
                size += batch[-1][2]
            return batch

    def _encode(self, item: tuple[Segments, float, int]) -> bytes | None:
        segments, temperature = item[0].trim(), item[1]
        meta = {"steps": segments.spec.steps, "finals": segments.finals, "temperature": temperature}
        try:
            return _frame(encode(segments.arrays(), meta))
        except (TypeError, ValueError):  # such as a dtype without wire format: drop the segment, keep the thread
            log.exception("replay log: a segment cannot be encoded")
            return None

    def _finish_batch(self, batch: Sequence[tuple[Segments, float, int]], written: int, state: str, why: str) -> None:
        with self._changed:
            self._dropped += len(batch) - written
            self._unwritten -= len(batch)
            self._bytes -= sum(size for _, _, size in batch)
            changed, self._state = state != self._state, state
        if changed and why:
            log.warning("replay log: segments are dropped: %s", why)
        elif changed:
            log.warning("replay log: recording continues; %d segments were dropped so far", self._dropped)


class _TemperatureWriter:
    """A view of a ReplayLogWriter with another temperature."""

    def __init__(self, writer: ReplayLogWriter, temperature: float) -> None:
        self._writer, self._temperature = writer, temperature

    def reserve(self, timeout_s: float) -> Segments | None:
        return self._writer.reserve(timeout_s)

    def commit(self, segments: Segments) -> None:
        self._writer.commit_at(segments, self._temperature)

    def abandon(self, segments: Segments) -> None:
        self._writer.abandon(segments)


# -- writing: files ------------------------------------------------------------------------------------------------------


def _file_bytes(limit_bytes: int) -> int:
    return max(1 << 20, min(256 << 20, limit_bytes // _FILES))


class _LogFiles:
    """The files of one writer, within a limit that all writers of the directory share."""

    def __init__(self, directory: Path, spec: SegmentSpec, temperature: float, limit_bytes: int, file_bytes: int) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        self._spec, self._temperature, self._file_bytes = spec, temperature, file_bytes
        self._file: BinaryIO | None = None
        self._path = directory
        self._size = 0
        self._numbers = itertools.count()
        self.written = self.bytes = 0

    def write(self, records: Sequence[bytes]) -> int:
        """Append as many records as the limit allows, in order; return their number.

        Raises OSError; records written before are intact and counted in `written`, and the next call begins a new file.
        """
        before, waiting = self.written, deque(records)
        self.directory.mkdir(parents=True, exist_ok=True)
        with _lock_directory(self.directory):
            left = self.limit_bytes - used_bytes(self.directory)
            while waiting:
                if self._file is not None and (self._is_gone() or self._size + len(waiting[0]) > self._file_bytes):
                    self.finish()
                parts = [self._file_header()] if self._file is None else []
                size = sum(map(len, parts))
                first = True
                while waiting and size + len(waiting[0]) <= left:
                    if not first and self._size + size + len(waiting[0]) > self._file_bytes:
                        break
                    first = False
                    size += len(waiting[0])
                    parts.append(waiting.popleft())
                if first:
                    break  # at the limit
                self._append(b"".join(parts), len(parts) - (self._file is None))
                left -= size
        return self.written - before

    def finish(self) -> None:
        """Complete the current file."""
        file, self._file, self._size = self._file, None, 0
        if file is not None:
            with file:
                os.fsync(file.fileno())

    def _file_header(self) -> bytes:
        """Return the start of a file, with the spec of its segments."""
        about = {
            "format": 1,
            "model": self._spec.model,
            "temperature": self._temperature,
            "created": time.time(),
            "spec": spec_to_plain(self._spec),
        }
        return _MAGIC + _frame(msgpack.packb(about))

    def _append(self, data: bytes, records: int) -> None:
        file = self._file = self._file or self._open()
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            self._file = None
            with file, contextlib.suppress(OSError):  # readers would skip a partial record too
                file.truncate(self._size)
                if not self._size:
                    self._path.unlink()  # new and empty
            self._size = 0
            raise
        self._size += len(data)
        self.bytes += len(data)
        self.written += records

    def _open(self) -> BinaryIO:
        """Create the next file. Names sort by time, and are unique among hosts that share the directory."""
        name = re.sub(r"[^\w.-]", "_", self._spec.model)[:80]
        made = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        for number in self._numbers:
            self._path = self.directory / f"{name}-{made}-{os.getpid()}-{number:04d}{SUFFIX}"
            with contextlib.suppress(FileExistsError):
                return open(self._path, "xb", buffering=0)
        raise AssertionError("numbers do not end")

    def _is_gone(self) -> bool:
        """Whether the file was moved or deleted."""
        assert self._file is not None
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return True


def used_bytes(directory: Path | str) -> int:
    """Return the size of all recordings in a directory."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):  # moved meanwhile
                    total += entry.stat().st_size
    return total


@contextlib.contextmanager
def _lock_directory(directory: Path) -> Iterator[None]:
    """Lock the directory among all writers, so that they keep the limit together. The lock ends with the process.

    Raises OSError on time-out. On file systems without locks the limit is approximate.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, "another process holds the directory for too long") from error
                time.sleep(0.005)
            except OSError:
                break
        yield
    finally:
        os.close(fd)


def _frame(data: bytes) -> bytes:
    head = _HEAD.pack(len(data), zlib.crc32(data))
    return head + _CHECK.pack(zlib.crc32(head)) + data


# -- reading -------------------------------------------------------------------------------------------------------------


@dataclass
class ReadCounts:
    """Numbers of files and segments that were read or skipped."""

    files: int = 0
    segments: int = 0
    steps: int = 0
    torn: int = 0
    """Files with a partial record at the end: their writer was killed, or is still writing."""
    damaged: int = 0
    """Damaged records, or files that are damaged from some point on."""
    unfit: int = 0
    """Segments of another model, shape or temperature."""
    full: bool = False
    """Whether `fill` stopped early because the memory had no room."""


class ReplayRecord(NamedTuple):
    segments: Segments
    temperature: float


def read_recorded(where: Path | str, *, temperature: float | None = None, counts: ReadCounts | None = None) -> Iterator[Segments]:
    """Yield the segments of a file, or of all files of a directory in the order of their names. Arrays are read-only.

    `temperature`: only segments that were sampled at this one. Damaged parts are skipped, logged and counted in `counts`. Raises
    NotFound.
    """
    counts = ReadCounts() if counts is None else counts
    for path in list_recordings(where):
        for segments, drawn_at in read_file(path, counts):
            if temperature is not None and drawn_at != temperature:
                counts.unfit += 1
                continue
            counts.segments += 1
            counts.steps += segments.steps
            yield segments


def check_writable(directory: Path | str) -> None:
    """Create the directory, and raise UsageError unless it is writable."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        hint = "Choose a directory that this user may write."
        raise UsageError(f"Nothing can be recorded into {str(directory)!r}: {error.strerror}.", hint) from error


def list_recordings(where: Path | str) -> list[Path]:
    """Return the files of a directory, or the one file. Raises NotFound."""
    where = Path(where)
    if where.is_dir():
        return sorted(path for path in where.iterdir() if path.suffix == SUFFIX and path.is_file())
    if not where.exists():
        raise NotFound(f"There is no recording at {str(where)!r}.", "Give the directory that `ludus serve` records into.")
    return [where]


def read_file(path: Path, counts: ReadCounts) -> Iterator[ReplayRecord]:
    """Yield all intact records of one file."""
    counts.files += 1
    try:
        with path.open("rb") as file:
            yield from _read_records(file, counts)
    except (Damaged, OSError) as error:
        counts.damaged += 1
        log.warning("replay log: skipping the rest of %s: %s", path, error)


def _read_records(file: BinaryIO, counts: ReadCounts) -> Iterator[ReplayRecord]:
    size = os.fstat(file.fileno()).st_size  # records appended while we read may be partial
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC[: len(magic)]:
        raise Damaged("It is not a recording, or one of a newer version.")
    spec: SegmentSpec | None = None
    while size - file.tell() >= _HEAD_BYTES:
        head = file.read(_HEAD_BYTES)
        length, checksum = _HEAD.unpack(head[: _HEAD.size])
        if zlib.crc32(head[: _HEAD.size]) != _CHECK.unpack(head[_HEAD.size :])[0]:
            raise Damaged(f"The header of the record at byte {file.tell() - _HEAD_BYTES} is damaged.")
        if length > size - file.tell():
            break
        data = file.read(length)
        intact = zlib.crc32(data) == checksum
        if spec is None:
            if not intact:
                raise Damaged("Its description is damaged.")
            spec = _parse_spec(data)
            continue
        try:
            if not intact:
                raise Damaged("Its checksum is wrong.")
            recorded = _parse_record(spec, data)
        except Damaged as error:
            counts.damaged += 1
            log.warning("replay log: skipping a record of %s: %s", file.name, error)
        else:
            yield recorded
    else:
        if spec is not None and file.tell() == size:
            return
    counts.torn += 1


def _parse_spec(data: bytes) -> SegmentSpec:
    try:
        about = msgpack.unpackb(data)
        return spec_from_plain(about["spec"])
    except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise Damaged(f"Its description is malformed: {error}.") from error


def _parse_record(spec: SegmentSpec, data: bytes) -> ReplayRecord:
    arrays, meta = decode(data)
    try:
        spec = replace(spec, steps=int(meta["steps"]))
        template = Segments.empty(replace(spec, steps=0, finals=0), 0)  # empty: sizes in the file are not validated yet
        segments = replace(template, spec=spec, finals=int(meta["finals"]), **arrays)
        if "results" not in arrays:  # files of earlier releases
            segments.results = np.zeros((segments.rows, 0, 2), np.float32)
        _check(segments, template)
        return ReplayRecord(segments, float(meta["temperature"]))
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise Damaged(f"A segment is malformed: {error}.") from error


def _check(segments: Segments, template: Segments) -> None:
    """Raise ValueError unless every array has the shape and dtype of the spec."""
    spec, rows = segments.spec, segments.rows
    lead = {
        **dict.fromkeys(OVER_STEPS, (spec.steps, rows)),
        **dict.fromkeys(OVER_STEPS_AND_AFTER, (spec.steps + 1, rows)),
        "state": (spec.states, rows),
        "origin": (rows,),
        "results": (rows,),
        **dict.fromkeys(("final_at", "final_observation", "final_value"), (spec.finals,)),
    }
    expected = template.arrays()
    for name, found in segments.arrays().items():
        leaves_found, leaves_expected = dict(leaves(found)), dict(leaves(expected[name]))
        if leaves_found.keys() != leaves_expected.keys():
            raise ValueError(f"{name} has the parts {sorted(leaves_found)}, not {sorted(leaves_expected)}")
        for part, leaf in leaves_found.items():
            like = leaves_expected[part]
            shape = (*lead[name], *like.shape[len(lead[name]) :]) if name in lead else (leaf.size,)
            if leaf.shape != shape or leaf.dtype != like.dtype:
                raise ValueError(f"{name} {part} is {leaf.dtype}{list(leaf.shape)}, not {like.dtype}{list(shape)}")
    if not 0 <= segments.finals <= spec.finals:
        raise ValueError(f"{segments.finals} final observations in room for {spec.finals}")


# -- filling a memory ----------------------------------------------------------------------------------------------------


def fill(memory: SegmentWriter, where: Path | str, *, temperature: float | None = 1.0, timeout_s: float = 60.0) -> ReadCounts:
    """Write recorded segments to a memory, whose blocks must have one row and be at least as long as the segments.

    Stops when the memory has no room for `timeout_s`. Skips segments of another model or shape, and of another temperature unless
    `temperature` is None: the log-probabilities in a segment are those of temperature 1, which would be wrong for its actions.
    """
    counts = ReadCounts()
    block: Segments | None = None
    skipped = 0
    for segments in read_recorded(where, temperature=temperature, counts=counts):
        if block is None:
            block = memory.reserve(timeout_s)
        if block is None:
            counts.full = True
            counts.segments -= 1
            counts.steps -= segments.steps
            break
        if not _fits(segments, block):
            skipped += 1
            counts.segments -= 1
            counts.steps -= segments.steps
            continue
        _copy_segments(segments, block)
        memory.commit(block)
        block = None
    if block is not None:
        memory.abandon(block)
    counts.unfit += skipped
    if counts.unfit:
        log.warning("replay log: skipped %d segments of %s with another model, shape or temperature", counts.unfit, where)
    return counts


def _fits(segments: Segments, block: Segments) -> bool:
    return (
        segments.rows == block.rows
        and segments.spec.steps <= block.spec.steps
        and not segments.finals
        and replace(segments.spec, steps=0, finals=0) == replace(block.spec, steps=0, finals=0)
    )


def _copy_segments(segments: Segments, block: Segments) -> None:
    for name in (*OVER_STEPS, *OVER_STEPS_AND_AFTER, "state"):
        map_tree(
            lambda whole, own, blank=name == "action_mask": _copy_rows(whole, own, blank),
            getattr(block, name),
            getattr(segments, name),
        )
    block.origin[:], block.results[:] = segments.origin, segments.results
    block.episode_return, block.episode_length = segments.episode_return.copy(), segments.episode_length.copy()


def _copy_rows(whole: Tree, own: Tree, blank: bool) -> None:
    whole[: len(own)] = own
    whole[len(own) :] = blank
