"""Rotating log files for the output of processes: the current file and one previous file, readable while written."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from ludus.io.log_dedup import MARK, LogDeduplicator
from ludus.io.regular_files import open_regular

MAX_BYTES = 8_000_000
_CHUNK = 256_000
_MAX_LINE = 1_000_000
_TAIL = 8_192
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


class LogWriter:
    """Appends to a file; a full file becomes `NAME.1` and replaces the previous one. Write errors lose lines and are counted."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path, self.lost = path, 0
        self._max_bytes = max_bytes
        self._file = self._size = -1
        self._open()

    def write(self, data: bytes) -> None:
        if self._size + len(data) > self._max_bytes and self._size > 0:
            self._rotate()
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

    def _rotate(self) -> None:
        self.close()
        with contextlib.suppress(OSError):  # continue in the current file
            os.replace(self.path, previous_path(self.path))
        with contextlib.suppress(OSError):
            self._open()

    def _open(self) -> None:
        if self.path.is_symlink():  # the logged program must not choose where we write
            self.path.unlink()
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | _NOFOLLOW, 0o600)
        self._size = os.fstat(self._file).st_size


class DeduplicatingLog:
    """A `LogWriter` that counts repeated lines instead of writing them (see `log_dedup`).

    While `pending`, call `tick()` about once per second. `last()` returns the last lines, written or not.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer = LogWriter(path, max_bytes)
        self._piece = min(_CHUNK, max_bytes)
        self._clock = clock
        self._repeats = LogDeduplicator()
        self._tail = b""
        self._unreported = 0

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
        """Write a piece, after a line with the number of bytes that a full disk has lost before."""
        lost = self.lost
        if self._unreported:
            self._writer.write(MARK + f"{self._unreported:,} bytes could not be written\n".encode())
            if self.lost > lost:
                self._writer.lost = lost + len(piece)
                self._unreported += len(piece)
                return
            self._unreported = 0
        self._writer.write(piece)
        self._unreported = self.lost - lost


class LogReader:
    """Reads the lines of a log, each once, from the oldest available one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self._rest = b""

    def lines(self) -> list[str]:
        """Return some unread lines; an empty list if there are none at the moment."""
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
        """Return a last line without a newline; to be called when the writer has ended."""
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
            following = self._open_next()
            if following < 0:
                return b""
            # Data written between our last read and the rotation; after it the file does not change.
            data = os.read(self._file, _CHUNK) if self._file >= 0 else b""
            if data:
                os.close(following)
                return data
            self.close()
            self._file = following

    def _open_next(self) -> int:
        """Open the file after the current one; -1 if there is none."""
        older, newer = _open_if_exists(previous_path(self.path)), _open_if_exists(self.path)
        mine = [found >= 0 and self._file >= 0 and os.path.sameopenfile(found, self._file) for found in (older, newer)]
        chosen = -1 if mine[1] else newer if mine[0] or older < 0 else older
        for found in (older, newer):
            if found >= 0 and found != chosen:
                os.close(found)
        return chosen


def tail(path: Path, lines: int) -> list[str]:
    """Return the last lines of a log; an empty list if it does not exist."""
    data = b""
    for part in (path, previous_path(path)):
        with contextlib.suppress(OSError), open_regular(part) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            data = file.read(_TAIL) + data
        if data.count(b"\n") > lines:
            break
    return [_text(line) for line in data.rstrip(b"\n").split(b"\n")[-lines:]] if data else []


def previous_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _open_if_exists(path: Path) -> int:
    try:
        with open_regular(path) as file:
            return os.dup(file.fileno())
    except FileNotFoundError:
        return -1


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").decode(errors="replace")
