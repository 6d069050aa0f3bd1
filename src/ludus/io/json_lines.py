"""JSON objects between processes, one on each line, over pipes and sockets."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MAX_LINE_BYTES = 64 << 20
_CHUNK = 65_536


class LineTooLong(ValueError):
    """A line without an end."""


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes | str) -> dict[str, Any]:
    """Raises ValueError unless the line is a JSON object."""
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError(f"{line[:40]!r} is not a JSON object")
    return message


def decode_valid(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Skips lines that are not JSON objects: torn by a kill, or printed by a library into our descriptor."""
    for line in lines:
        with contextlib.suppress(ValueError):
            yield decode(line)


def decode_marked(line: bytes, mark: str) -> dict[str, Any] | None:
    """The JSON object after `mark`; None for any other line, such as the output of a login script."""
    text = line.decode(errors="replace")
    if text.startswith(mark):
        with contextlib.suppress(ValueError):
            return decode(text.removeprefix(mark))
    return None


def write(fd: int, message: Mapping[str, Any]) -> None:
    """Write a whole line to a blocking descriptor. Raises OSError."""
    line = encode(message)
    while line:
        line = line[os.write(fd, line) :]


def write_marked(mark: str, message: Mapping[str, Any]) -> None:
    """Write a line that `decode_marked` recognizes to the standard output."""
    sys.stdout.write(f"{mark}{json.dumps(message)}\n")
    sys.stdout.flush()


class LineSplitter:
    """Splits a stream of bytes into lines, in whatever pieces it arrives.

    A line of more than `max_bytes` raises LineTooLong; with `skip_long` it is dropped.
    """

    def __init__(self, max_bytes: int = MAX_LINE_BYTES, *, skip_long: bool = False) -> None:
        self._max_bytes, self._skip_long = max_bytes, skip_long
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def has_partial_line(self) -> bool:
        return self._size > 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their newlines."""
        *ends, rest = data.split(b"\n")
        lines = []
        for end in ends:
            self._add(end)
            if self._size <= self._max_bytes:
                lines.append(b"".join(self._parts))
            self._parts, self._size = [], 0
        self._add(rest)
        return lines

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= self._max_bytes:
            self._parts.append(part)
        elif self._skip_long:
            self._parts.clear()
        else:
            raise LineTooLong(f"a line is longer than {self._max_bytes} bytes")


class LineReader:
    """Reads lines from a pipe or socket, which it does not close. A last line without a newline is never returned."""

    def __init__(self, source: int | socket.socket, max_bytes: int = MAX_LINE_BYTES, *, skip_long: bool = False) -> None:
        self._source, self._splitter = source, LineSplitter(max_bytes, skip_long=skip_long)
        self._lines: deque[bytes] = deque()
        self.at_end = False
        """The other end is closed, or the connection broke."""

    @property
    def has_partial_line(self) -> bool:
        return self._splitter.has_partial_line

    def read(self) -> list[bytes]:
        """Read once, and return the lines that are complete now. Blocks if the source does; raises TimeoutError if it has a time-out."""
        data = self._read()
        return self._splitter.feed(data) if data else []

    def read_available(self) -> Iterator[bytes]:
        """All lines that a non-blocking source has now."""
        while data := self._read():
            yield from self._splitter.feed(data)

    def read_line(self, timeout_s: float | None = None) -> bytes | None:
        """Wait for the next line; None at the end. Raises TimeoutError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._source, selectors.EVENT_READ)
            while not self._lines and not self.at_end:
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not selector.select(left):
                    raise TimeoutError("no line was received in time")
                self._lines += self.read()
        return self._lines.popleft() if self._lines else None

    def _read(self) -> bytes:
        """Empty when there is nothing now, or at the end."""
        try:
            data = os.read(self._source, _CHUNK) if isinstance(self._source, int) else self._source.recv(_CHUNK)
        except BlockingIOError:
            return b""
        except TimeoutError:
            raise
        except OSError:
            data = b""
        self.at_end = not data
        return data
