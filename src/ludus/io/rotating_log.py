"""What a process writes, kept in a bounded place: a file and the one before it. Read again, also while it is written."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from ludus.io.log_dedup import MARK, Repeats
from ludus.io.regular_files import open_regular

MAX_BYTES = 8_000_000
_CHUNK = 256_000
_MAX_LINE = 1_000_000
_TAIL = 8_192
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


class LogWriter:
    """Appends; when the file is full it becomes `NAME.1`, in place of the one that was. A disk that is full costs lines, nothing else."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path, self.lost = path, 0
        self._max_bytes = max_bytes
        self._file = self._size = -1
        self._open()

    def write(self, data: bytes) -> None:
        if self._size + len(data) > self._max_bytes and self._size > 0:
            self._turn()
        try:
            if self._file < 0:
                self._open()
            written = os.write(self._file, data)
        except OSError:
            self.lost += len(data)
            return
        self._size += written
        self.lost += len(data) - written

    def line(self, text: str) -> None:
        self.write(f"{text}\n".encode(errors="replace"))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _turn(self) -> None:
        self.close()
        with contextlib.suppress(OSError):  # it goes on in the file that it has
            os.replace(self.path, before(self.path))
        with contextlib.suppress(OSError):
            self._open()

    def _open(self) -> None:
        if self.path.is_symlink():  # put there by the program whose output this is: it must not choose where we write
            self.path.unlink()
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | _NOFOLLOW, 0o600)
        self._size = os.fstat(self._file).st_size


class CountingLog:
    """A `LogWriter` for programs that say the same thing every frame: lines that repeat are counted (`repeats.py`), the rest is written.

    While `pending`, call `tick()` about once a second. `last()` is what was said last, whether it was written or not.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer = LogWriter(path, max_bytes)
        self._piece = min(_CHUNK, max_bytes)
        self._clock = clock
        self._repeats = Repeats()
        self._tail = b""
        self._unsaid = 0

    @property
    def path(self) -> Path:
        return self._writer.path

    @property
    def lost(self) -> int:
        """Bytes that could not be written."""
        return self._writer.lost

    @property
    def pending(self) -> bool:
        return self._repeats.pending

    def write(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-_TAIL:] if len(data) < _TAIL else data[-_TAIL:]
        self._put(self._repeats.feed(data, self._clock()))

    def line(self, text: str) -> None:
        self.write(f"{text}\n".encode(errors="replace"))

    def tick(self) -> None:
        self._put(self._repeats.tick(self._clock()))

    def close(self) -> None:
        self._put(self._repeats.end())
        self._writer.close()

    def last(self, lines: int) -> list[str]:
        found = self._tail.replace(b"\r", b"\n").split(b"\n")
        whole = found if len(self._tail) < _TAIL else found[1:] or found
        return [_text(line) for line in whole if line.strip()][-lines:]

    def _put(self, data: bytes) -> None:
        while data:
            end = len(data) if len(data) <= self._piece else data.rfind(b"\n", 0, self._piece) + 1 or data.index(b"\n") + 1
            self._put_piece(data[:end])
            data = data[end:]

    def _put_piece(self, piece: bytes) -> None:
        """What a full disk has cost is said as soon as there is room again."""
        lost = self.lost
        if self._unsaid:
            self._writer.write(MARK + f"{self._unsaid:,} bytes could not be written\n".encode())
            if self.lost > lost:
                self._writer.lost = lost + len(piece)
                self._unsaid += len(piece)
                return
            self._unsaid = 0
        self._writer.write(piece)
        self._unsaid = self.lost - lost


class LogReader:
    """The lines of a log, each once, from the oldest that is left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self._rest = b""

    def lines(self) -> list[str]:
        """Some that were not read yet; none: there are no more at the moment."""
        while True:
            data = self._read()
            if not data:
                return []
            *whole, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _MAX_LINE:
                whole, self._rest = [*whole, self._rest], b""
            if whole:
                return [_text(line) for line in whole]

    def rest(self) -> list[str]:
        """The last line, if it has no end: for when nobody writes any more."""
        last, self._rest = self._rest, b""
        return [_text(last)] if last else []

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self) -> bytes:
        while True:
            data = os.read(self._file, _CHUNK) if self._file >= 0 else b""
            if data:
                return data
            following = self._following()
            if following < 0:
                return b""
            # What was written between the end that we saw and the turn; after the turn nobody writes there.
            data = os.read(self._file, _CHUNK) if self._file >= 0 else b""
            if data:
                os.close(following)
                return data
            self.close()
            self._file = following

    def _following(self) -> int:
        """The file after the one that is read, opened; -1: there is none."""
        older, newer = _opened(before(self.path)), _opened(self.path)
        mine = [found >= 0 and self._file >= 0 and os.path.sameopenfile(found, self._file) for found in (older, newer)]
        chosen = -1 if mine[1] else newer if mine[0] or older < 0 else older
        for found in (older, newer):
            if found >= 0 and found != chosen:
                os.close(found)
        return chosen


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log as it stands; none if there is no log."""
    data = b""
    for place in (path, before(path)):
        with contextlib.suppress(OSError), open_regular(place) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            data = file.read(_TAIL) + data
        if data.count(b"\n") > lines:
            break
    return [_text(line) for line in data.rstrip(b"\n").split(b"\n")[-lines:]] if data else []


def before(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _opened(path: Path) -> int:
    try:
        with open_regular(path) as file:
            return os.dup(file.fileno())
    except FileNotFoundError:
        return -1


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").decode(errors="replace")
