"""What a process writes, kept in a bounded place: a file and the one before it. Read again, also while it is written."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MAX_BYTES = 8_000_000
_CHUNK = 256_000
_MAX_LINE = 1_000_000


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
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size


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


def before(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").decode(errors="replace")
