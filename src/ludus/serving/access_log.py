"""The access log: one JSON line per request, written by a background thread; the event loop only appends to a queue.

Never contains bodies or tokens. Ids chosen by games are truncated and escaped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ludus.errors import UsageError

log = logging.getLogger(__name__)

STDOUT = "-"

_SESSION_CHARS = 256  # the protocol's limit
_ID_CHARS = 128
_WORD_CHARS = 64
_PIPE_BYTES = 4096  # PIPE_BUF: writes up to this size to a pipe are atomic
_FILE_BYTES = 1 << 18
_WARN_S = 60.0  # between two warnings


@dataclass(frozen=True)
class AccessLogStats:
    written: int = 0
    dropped: int = 0
    """Lines lost because the queue was full or the disk failed."""


class AccessEntry(NamedTuple):
    """One answered request. `caller` is the name of its token, never the token."""

    kind: str
    status: int
    session: bytes | str = b""
    seq: int = -1
    ms: float = 0.0
    request_id: bytes | str = b""
    caller: str = ""
    peer: str = ""
    error: str = ""
    model: str = ""
    version: int = 0


class AccessLog:
    """Several processes may append to one file: every write appends whole lines (O_APPEND).

    A file that was moved away (logrotate) is created again. Disk errors cost lines, which are counted, never requests.
    """

    def __init__(
        self, path: Path | str, *, capacity: int = 20_000, flush_s: float = 0.25, clock: Callable[[], float] = time.time
    ) -> None:
        """`path`: "-" is the standard output. `capacity`: of the queue, in lines. Raises UsageError if it cannot be opened."""
        self._path = None if str(path) == STDOUT else Path(path)
        self._capacity, self._flush_s, self._clock = capacity, flush_s, clock
        self._waiting: deque[tuple[float, AccessEntry]] = deque()  # append and popleft are atomic: the event loop needs no lock
        self._written = self._lost = 0
        self._refused = 0  # counted by the event loop; the others by the flushing thread
        self._reported = 0  # dropped lines that the log itself reports
        self._line_cut = False  # the last line was written in part
        self._failing = False
        self._warned = -math.inf
        self._flushing = threading.Lock()
        self._closing = threading.Event()
        try:
            self._fd = self._open()
        except OSError as error:
            hint = "Choose a file that this user may write, or - for the standard output."
            raise UsageError(f"Cannot open the access log {str(path)!r}: {error.strerror}.", hint) from error
        self._thread = threading.Thread(target=self._run, name="access log", daemon=True)
        self._thread.start()

    def record(self, entry: AccessEntry) -> None:
        """Append a line for one request. Takes no lock and never blocks."""
        if len(self._waiting) >= self._capacity:
            self._refused += 1
            return
        self._waiting.append((self._clock(), entry))

    def stats(self) -> AccessLogStats:
        return AccessLogStats(self._written, self._refused + self._lost)

    def flush(self) -> None:
        """Write the queued lines. The thread does so a few times a second."""
        with self._flushing:
            entries = [self._waiting.popleft() for _ in range(len(self._waiting))]
            dropped = self._refused + self._lost
            lines = [_line(at, entry) for at, entry in entries]
            note = [_dropped_line(self._clock(), dropped - self._reported)] if dropped > self._reported else []
            try:
                self._reopen_if_moved()
                done = self._write([*note, *lines])
            except OSError as error:
                self._fail(error)
                done = 0
            if done and note:
                self._reported, done = dropped, done - 1
            self._written += done
            self._lost += len(lines) - done

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the queued lines within the time-out."""
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("access log: could not write the last lines within %g s", timeout_s)
        elif self._fd >= 0:
            fd, self._fd = self._fd, -1
            if self._path is not None:
                os.close(fd)

    def __enter__(self) -> AccessLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(self._flush_s):
            if self._waiting:
                self.flush()
        if self._waiting or self._refused + self._lost > self._reported:
            self.flush()

    # -- the file

    def _open(self) -> int:
        if self._path is None:
            sys.stdout.flush()
            return sys.stdout.fileno()
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _reopen_if_moved(self) -> None:
        if self._path is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if self._fd >= 0 and os.path.samestat(self._path.stat(), os.fstat(self._fd)):
                return
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        self._line_cut = False
        self._fd = self._open()

    def _write(self, lines: list[bytes]) -> int:
        """Write lines, and return how many were written completely."""
        plain = stat.S_ISREG(os.fstat(self._fd).st_mode)
        done = 0
        for batch in _batches(lines, _FILE_BYTES if plain else _PIPE_BYTES):
            data = (b"\n" if self._line_cut else b"") + b"".join(batch)
            begun = len(data) - sum(map(len, batch))
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]  # one call, unless the disk is nearly full
                    self._line_cut = bool(rest) and data[-len(rest) - 1 : -len(rest)] != b"\n"
            except OSError as error:
                self._fail(error)
                return done + data[begun : len(data) - len(rest)].count(b"\n")
            done += len(batch)
        if lines and self._failing:
            self._failing = False
            log.warning("access log: writing works again")
        return done

    def _fail(self, error: OSError) -> None:
        if not self._failing and time.monotonic() - self._warned > _WARN_S:
            self._warned = time.monotonic()
            where = "the standard output" if self._path is None else self._path
            log.warning("access log: dropping lines: %s: %s", error.strerror or error, where)
        self._failing = True


# -- lines ---------------------------------------------------------------------------------------------------------------


def _batches(lines: list[bytes], limit: int) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for line in lines:
        if batch and size + len(line) > limit:
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += len(line)
    if batch:
        yield batch


def _line(at: float, entry: AccessEntry) -> bytes:
    fields: dict[str, object] = {"time": _time(at), "kind": _text(entry.kind, _WORD_CHARS), "status": entry.status}
    for name, text, chars in (
        ("session", entry.session, _SESSION_CHARS),
        ("request_id", entry.request_id, _ID_CHARS),
        ("caller", entry.caller, _WORD_CHARS),
        ("peer", entry.peer, _WORD_CHARS),
        ("error", entry.error, _WORD_CHARS),
        ("model", entry.model, _WORD_CHARS),
    ):
        if text:
            fields[name] = _text(text, chars)
    if entry.seq >= 0:
        fields["seq"] = entry.seq
    if entry.version:
        fields["version"] = entry.version
    fields["ms"] = round(entry.ms, 3) if math.isfinite(entry.ms) else None
    return json.dumps(fields).encode() + b"\n"  # ASCII, so that no id can contain a line break


def _dropped_line(at: float, dropped: int) -> bytes:
    return json.dumps({"time": _time(at), "kind": "dropped", "lines": dropped}).encode() + b"\n"


def _time(at: float) -> str:
    whole = math.floor(at)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{int((at - whole) * 1000):03d}Z"


def _text(given: bytes | str, chars: int) -> str:
    text = given.decode("utf-8", "backslashreplace") if isinstance(given, bytes) else given
    return text if len(text) <= chars else text[: chars - 1] + "…"
