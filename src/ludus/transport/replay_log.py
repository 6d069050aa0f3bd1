"""The replay log: segments of live matches in files, in the form in which a learner's memory gets them.

A file is a magic line and records, of which the first describes the rest. A record is its length, its checksum, a checksum of
these two, and the bytes: whatever a killed process leaves half-written is recognised and left out by whoever reads.
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

from ludus.core.spaces import ArraySpec
from ludus.core.tree import Tree, decode, encode, leaves, map_tree
from ludus.core.types import OVER_STEPS, OVER_STEPS_AND_AFTER, Segments, SegmentSpec
from ludus.errors import Damaged, NotFound, UsageError
from ludus.transport.base import SegmentWriter

log = logging.getLogger(__name__)

SUFFIX = ".ludus"

_MAGIC = b"LUDUSLOG1\n"
_HEAD = struct.Struct("<II")  # length and checksum of a record
_CHECK = struct.Struct("<I")  # checksum of that
_HEAD_BYTES = _HEAD.size + _CHECK.size
_TURN_BYTES = 8 << 20  # that are encoded and written at once: bounds what the writer holds besides its queue
_GATHER_S = 0.2  # segments are written a few times a second, not one by one
_LOCK_S = 5.0  # for other processes to write their turn
_FILES = 64  # into how many files the whole is cut, roughly


# -- writing: the side of the event loop ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayLogStats:
    written: int = 0
    """Segments that are in files."""
    dropped: int = 0
    """Segments that are not: the queue was full, the directory at its bound, or the disk refused."""
    waiting: int = 0
    bytes: int = 0
    """Written by this room."""
    state: str = "recording"
    """Or "full" (the directory is at its bound), or "failing" (the disk refused); both are left when there is room again."""


class ReplayLogWriter:
    """Takes segments from whoever plays, on one event loop, without ever blocking it: a thread encodes and writes.

    What does not fit into the queue, the directory's bound or the disk is dropped and counted. The bound holds for all files
    of the directory, whoever wrote them; nothing is ever deleted.
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
        """`temperature`: at which actions are drawn, where `at` says nothing else. `file_bytes`: 0 = as the limit suggests.

        `open_bytes`: of all blocks that are being filled; beyond it `reserve` gives None. `retry_s`: after the disk refused.
        """
        self._spec, self._temperature, self._retry_s = spec, temperature, retry_s
        self._files = _LogFiles(Path(directory), spec, temperature, limit_bytes, file_bytes or _file_bytes(limit_bytes))
        self._queue_bytes = queue_bytes
        self._block_bytes = Segments.empty(spec, 1).nbytes
        self._may_be_open = max(1, open_bytes // self._block_bytes)
        self._open: WeakValueDictionary[int, Segments] = WeakValueDictionary()  # weak: an agent may be lost with its session
        self._queue: deque[tuple[Segments, float, int]] = deque()
        self._bytes = self._unwritten = 0
        self._changed = threading.Condition()
        self._closed = False
        self._dropped = 0
        self._state = "recording"
        self._thread = threading.Thread(target=self._write, name="replay log", daemon=True)
        self._thread.start()

    def at(self, temperature: float) -> SegmentWriter:
        """The same room for sessions whose actions are drawn at another temperature; their segments say so."""
        return self if temperature == self._temperature else _TemperatureWriter(self, temperature)

    def reserve(self, timeout_s: float) -> Segments | None:
        """Never waits. None once closed, or while the open blocks take up all the memory that they may."""
        if self._closed or len(self._open) >= self._may_be_open:
            return None
        block = Segments.empty(self._spec, 1)
        self._open[id(block)] = block
        return block

    def commit(self, segments: Segments) -> None:
        self.commit_at(segments, self._temperature)

    def commit_at(self, segments: Segments, temperature: float) -> None:
        self._give_back(segments, "committed")
        size = self._block_bytes * (segments.steps + 1) // (self._spec.steps + 1)  # of memory that was ever written to
        with self._changed:
            if self._closed or (self._unwritten and self._bytes + size > self._queue_bytes):
                self._dropped += 1
                return
            self._queue.append((segments, temperature, size))
            self._unwritten += 1
            before, self._bytes = self._bytes, self._bytes + size
            if len(self._queue) == 1 or before < _TURN_BYTES <= self._bytes:
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
        """Write what waits, as far as the time suffices; the rest counts as dropped. Later commits are dropped, too."""
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
        while turn := self._next():
            before = self._files.written
            state, why = "recording", ""
            try:
                records = [record for record in map(self._encoded, turn) if record is not None]
                if self._files.write(records) < len(records):
                    state, why = (
                        "full",
                        f"the files in {self._files.directory} take up {self._files.limit_bytes} bytes, the limit",
                    )
            except OSError as error:
                state, why = "failing", f"{error.strerror or error}: {self._files.directory}"
            self._turn_over(turn, self._files.written - before, state, why)
        with contextlib.suppress(OSError):  # what is in the file is there; there is nobody left to tell
            self._files.finish()

    def _next(self) -> list[tuple[Segments, float, int]]:
        """The segments of one turn; none: it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            pause, full = (self._retry_s, False) if self._state == "failing" else (_GATHER_S, True)
            self._changed.wait_for(lambda: self._closed or (full and self._bytes >= _TURN_BYTES), pause)
            turn: list[tuple[Segments, float, int]] = []
            size = 0
            while self._queue and (not turn or size + self._queue[0][2] <= _TURN_BYTES):
                turn.append(self._queue.popleft())
                size += turn[-1][2]
            return turn

    def _encoded(self, item: tuple[Segments, float, int]) -> bytes | None:
        segments, temperature = item[0].trim(), item[1]
        meta = {"steps": segments.spec.steps, "finals": segments.finals, "temperature": temperature}
        try:
            return _frame(encode(segments.arrays(), meta))
        except (TypeError, ValueError):  # of a dtype that has no wire format, say: the thread outlives it, the segment does not
            log.exception("replay log: a segment cannot be written")
            return None

    def _turn_over(self, turn: Sequence[tuple[Segments, float, int]], written: int, state: str, why: str) -> None:
        with self._changed:
            self._dropped += len(turn) - written
            self._unwritten -= len(turn)
            self._bytes -= sum(size for _, _, size in turn)
            changed, self._state = state != self._state, state
        if changed and why:
            log.warning("replay log: segments are dropped: %s", why)
        elif changed:
            log.warning("replay log: recording continues; %d segments were dropped so far", self._dropped)


class _TemperatureWriter:
    """A room whose segments were drawn at one temperature."""

    def __init__(self, room: ReplayLogWriter, temperature: float) -> None:
        self._room, self._temperature = room, temperature

    def reserve(self, timeout_s: float) -> Segments | None:
        return self._room.reserve(timeout_s)

    def commit(self, segments: Segments) -> None:
        self._room.commit_at(segments, self._temperature)

    def abandon(self, segments: Segments) -> None:
        self._room.abandon(segments)


# -- writing: the side of the disk ---------------------------------------------------------------------------------------


def _file_bytes(limit_bytes: int) -> int:
    return max(1 << 20, min(256 << 20, limit_bytes // _FILES))


class _LogFiles:
    """The files that one room writes, one after the other, within a bound that all writers of the directory share."""

    def __init__(self, directory: Path, spec: SegmentSpec, temperature: float, limit_bytes: int, file_bytes: int) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        self._spec, self._temperature, self._file_bytes = spec, temperature, file_bytes
        self._file: BinaryIO | None = None
        self._path = directory
        self._size = 0
        self._numbers = itertools.count()
        self.written = self.bytes = 0

    def write(self, records: Sequence[bytes]) -> int:
        """Append as many as the bound allows, in order; how many those were.

        Raises OSError; what had been written before is intact, `written` has counted it, and the next call begins a new file.
        """
        before, waiting = self.written, deque(records)
        self.directory.mkdir(parents=True, exist_ok=True)
        with _lock_directory(self.directory):
            left = self.limit_bytes - used_bytes(self.directory)
            while waiting:
                if self._file is not None and (self._gone() or self._size + len(waiting[0]) > self._file_bytes):
                    self.finish()
                parts = [self._opening()] if self._file is None else []
                size = sum(map(len, parts))
                first = True
                while waiting and size + len(waiting[0]) <= left:
                    if not first and self._size + size + len(waiting[0]) > self._file_bytes:
                        break
                    first = False
                    size += len(waiting[0])
                    parts.append(waiting.popleft())
                if first:
                    break  # the bound
                self._append(b"".join(parts), len(parts) - (self._file is None))
                left -= size
        return self.written - before

    def finish(self) -> None:
        """The file is complete."""
        file, self._file, self._size = self._file, None, 0
        if file is not None:
            with file:
                os.fsync(file.fileno())

    def _opening(self) -> bytes:
        """What a file begins with: enough to read the rest anywhere."""
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
            with file, contextlib.suppress(OSError):  # readers recognise a torn end; without it the file is tidier
                file.truncate(self._size)
                if not self._size:
                    self._path.unlink()  # ours, made a moment ago and empty
            self._size = 0
            raise
        self._size += len(data)
        self.bytes += len(data)
        self.written += records

    def _open(self) -> BinaryIO:
        """Names sort by time. They are fresh even where hosts share the directory."""
        name = re.sub(r"[^\w.-]", "_", self._spec.model)[:80]
        made = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        for number in self._numbers:
            self._path = self.directory / f"{name}-{made}-{os.getpid()}-{number:04d}{SUFFIX}"
            with contextlib.suppress(FileExistsError):
                return open(self._path, "xb", buffering=0)
        raise AssertionError("numbers do not end")

    def _gone(self) -> bool:
        """Somebody has moved the file away; what we wrote into it from now on might be lost."""
        assert self._file is not None
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return True


def used_bytes(directory: Path | str) -> int:
    """Bytes of all recordings in a directory."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):  # moved away while we look
                    total += entry.stat().st_size
    return total


@contextlib.contextmanager
def _lock_directory(directory: Path) -> Iterator[None]:
    """One writer at a time, over all processes, so that together they keep to the bound. Given up by the dead at once.

    Raises OSError when somebody takes too long. On file systems without locks the bound is approximate.
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


# -- what a file says of itself ------------------------------------------------------------------------------------------


def spec_to_plain(spec: SegmentSpec) -> dict[str, object]:
    """A specification as plain values; `spec_from_plain` makes an equal one."""
    trees = {name: _tree_to_plain(getattr(spec, name)) for name in ("observation", "action", "state")}
    numbers = {name: getattr(spec, name) for name in ("steps", "mask_size", "state_every", "finals")}
    return {**trees, **numbers, "model": spec.model, "results": list(spec.results)}


def spec_from_plain(plain: dict[str, object]) -> SegmentSpec:
    """Raises Damaged."""
    try:
        trees = {name: _tree_from_plain(plain[name]) for name in ("observation", "action", "state")}
        numbers = {name: int(str(plain[name])) for name in ("steps", "mask_size", "state_every", "finals")}
        if min(numbers.values()) < 0:
            raise ValueError(f"negative: {numbers}")
        results = plain.get("results", [])  # files of earlier versions have none
        if not isinstance(results, list):
            raise ValueError(f"results: {results!r}")
        steps, masks, every, finals = (numbers[name] for name in ("steps", "mask_size", "state_every", "finals"))
        return SegmentSpec(
            steps, trees["observation"], trees["action"], masks, trees["state"], every, finals, str(plain["model"]),
            tuple(map(str, results)),
        )  # fmt: skip
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, SyntaxError) as error:
        raise Damaged(f"This does not describe segments: {error}.") from error


def _tree_to_plain(tree: Tree) -> Tree:
    if isinstance(tree, dict):
        return {"d": {key: _tree_to_plain(item) for key, item in tree.items()}}
    if isinstance(tree, tuple):
        return {"t": [_tree_to_plain(item) for item in tree]}
    return [list(tree.shape), tree.dtype.str]


def _tree_from_plain(plain: Tree) -> Tree:
    if isinstance(plain, dict):
        return (
            {key: _tree_from_plain(item) for key, item in plain["d"].items()}
            if "d" in plain
            else tuple(map(_tree_from_plain, plain["t"]))
        )
    shape, dtype = plain
    return ArraySpec(tuple(map(int, shape)), np.dtype(dtype))


# -- reading -------------------------------------------------------------------------------------------------------------


@dataclass
class ReadCounts:
    """What was found, and what was left out."""

    files: int = 0
    segments: int = 0
    steps: int = 0
    torn: int = 0
    """Files that end in the middle of a record: their writer was killed, or still writes."""
    damaged: int = 0
    """Records, or files from some point on, whose bytes are not what was written."""
    unfit: int = 0
    """Segments of another model or shape, or drawn at another temperature, than what was asked for."""
    full: bool = False
    """`fill` has stopped before the end: the memory had no room."""


class ReplayRecord(NamedTuple):
    segments: Segments
    temperature: float


def read_recorded(where: Path | str, *, temperature: float | None = None, counts: ReadCounts | None = None) -> Iterator[Segments]:
    """All segments of a file, or of the files of a directory in the order of their names. Their arrays cannot be written to.

    `temperature`: only what was drawn at this one. Damaged parts are left out, logged and counted in `counts`. Raises NotFound.
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
    """Whether recordings can be put there; the directory is made. Raises UsageError."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        hint = "Choose a directory that this user may write."
        raise UsageError(f"Nothing can be recorded into {str(directory)!r}: {error.strerror}.", hint) from error


def list_recordings(where: Path | str) -> list[Path]:
    """The files of a directory, or the one file. Raises NotFound."""
    where = Path(where)
    if where.is_dir():
        return sorted(path for path in where.iterdir() if path.suffix == SUFFIX and path.is_file())
    if not where.exists():
        raise NotFound(f"There is no recording at {str(where)!r}.", "Give the directory that `ludus serve` records into.")
    return [where]


def read_file(path: Path, counts: ReadCounts) -> Iterator[ReplayRecord]:
    """Everything that is whole in one file."""
    counts.files += 1
    try:
        with path.open("rb") as file:
            yield from _read_records(file, counts)
    except (Damaged, OSError) as error:
        counts.damaged += 1
        log.warning("replay log: %s is left out from here on: %s", path, error)


def _read_records(file: BinaryIO, counts: ReadCounts) -> Iterator[ReplayRecord]:
    size = os.fstat(file.fileno()).st_size  # of now: what is appended while we read may be half there
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC[: len(magic)]:
        raise Damaged("It is not a recording, or one of a newer version.")
    spec: SegmentSpec | None = None
    while size - file.tell() >= _HEAD_BYTES:
        head = file.read(_HEAD_BYTES)
        length, checksum = _HEAD.unpack(head[: _HEAD.size])
        if zlib.crc32(head[: _HEAD.size]) != _CHECK.unpack(head[_HEAD.size :])[0]:
            raise Damaged(f"The record at byte {file.tell() - _HEAD_BYTES} does not say how long it is.")
        if length > size - file.tell():
            break
        data = file.read(length)
        sound = zlib.crc32(data) == checksum
        if spec is None:
            if not sound:
                raise Damaged("What it says of itself is damaged.")
            spec = _parse_spec(data)
            continue
        try:
            if not sound:
                raise Damaged("Its checksum is wrong.")
            recorded = _parse_record(spec, data)
        except Damaged as error:
            counts.damaged += 1
            log.warning("replay log: a record of %s is left out: %s", file.name, error)
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
        raise Damaged(f"What it says of itself is malformed: {error}.") from error


def _parse_record(spec: SegmentSpec, data: bytes) -> ReplayRecord:
    arrays, meta = decode(data)
    try:
        spec = replace(spec, steps=int(meta["steps"]))
        template = Segments.empty(replace(spec, steps=0, finals=0), 0)  # nothing is allocated before it is believed
        segments = replace(template, spec=spec, finals=int(meta["finals"]), **arrays)
        if "results" not in arrays:  # it was written before episodes had any
            segments.results = np.zeros((segments.rows, 0, 2), np.float32)
        _check(segments, template)
        return ReplayRecord(segments, float(meta["temperature"]))
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise Damaged(f"A segment is malformed: {error}.") from error


def _check(segments: Segments, template: Segments) -> None:
    """Every array has the shape and dtype that the specification asks for. Raises ValueError."""
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


# -- learning from it ----------------------------------------------------------------------------------------------------


def fill(memory: SegmentWriter, where: Path | str, *, temperature: float | None = 1.0, timeout_s: float = 60.0) -> ReadCounts:
    """Put recorded segments into a memory, whose blocks must have one row and be at least as long as what was recorded.

    Stops when the memory has no room for `timeout_s`. Left out is what is of another model or shape and, unless `temperature`
    is None, what was drawn at another temperature: the log-probabilities of a segment are those of temperature 1, so to
    most algorithms its actions would look as if the policy had chosen them so.
    """
    counts = ReadCounts()
    block: Segments | None = None
    left_out = 0
    for segments in read_recorded(where, temperature=temperature, counts=counts):
        if block is None:
            block = memory.reserve(timeout_s)
        if block is None:
            counts.full = True
            counts.segments -= 1
            counts.steps -= segments.steps
            break
        if not _fits(segments, block):
            left_out += 1
            counts.segments -= 1
            counts.steps -= segments.steps
            continue
        _copy_segments(segments, block)
        memory.commit(block)
        block = None
    if block is not None:
        memory.abandon(block)
    counts.unfit += left_out
    if counts.unfit:
        log.warning("replay log: %d segments of %s are of another model, shape or temperature", counts.unfit, where)
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
