"""Uploads the growing files of a working directory (metrics, logs) to the remote store of the run."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ludus.errors import Fenced, LudusError
from ludus.experiments.runs import run_status
from ludus.experiments.runs.remote_runs import MAX_FILE_BYTES, SYNC_OWNER_FILE, display_path, is_remote, store_of, synced_files
from ludus.storage.base import Store, WriteGuard
from ludus.storage.local import LocalStore

log = logging.getLogger(__name__)

SYNC_INTERVAL_S = 5.0
MAX_BYTES_PER_S = 1 << 20
"""Mean upload rate of one file. Files are uploaded completely, so a large one is uploaded less often."""

FINAL_SYNC_TIMEOUT_S = 60.0
"""Longest wait for pending uploads at the end of a run."""

_POLL_S = 1.0
_LINE_SUFFIXES = (".jsonl", ".csv", ".log")


class RunSync:
    """Uploads changed files of a working directory: periodically, after each checkpoint and at the end.

    A context manager with a background thread; it does nothing for a local run. Failures are counted and logged once, never raised,
    and uploads are retried. `guard` raises Fenced if another process owns the run now; then uploading stops. `mark` is polled every
    second; when its value changes (a new checkpoint), an upload starts.
    """

    def __init__(
        self,
        directory: Path,
        *,
        guard: WriteGuard | None = None,
        mark: Callable[[], object] = lambda: None,
        every_s: float = SYNC_INTERVAL_S,
    ) -> None:
        self._directory, self._guard, self._mark, self._every_s = directory, guard, mark, every_s
        self._store = store_of(directory) if is_remote(directory) else None
        self._uploaded: dict[str, tuple[int, int]] = {}  # file → its size and mtime when it was uploaded
        self._due: dict[str, float] = {}
        self._too_long: set[str] = set()
        self._stop, self._requested, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ludus-run-sync", daemon=True)
        self._warned = False
        self.uploads = self.failures = 0
        self.last_error = ""
        self.fenced = False

    def __enter__(self) -> RunSync:
        if self._store is not None:
            with contextlib.suppress(LudusError):  # a full disk: readers on this host may see an older state
                LocalStore(self._directory).put(SYNC_OWNER_FILE, json.dumps(run_status.identity()).encode())
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._store is None:
            return
        self._stop.set()
        self._requested.set()
        self._thread.join(FINAL_SYNC_TIMEOUT_S)
        with contextlib.suppress(LudusError):
            LocalStore(self._directory).delete(SYNC_OWNER_FILE)
        if not self.fenced and (left := self.pending()):
            log.warning(
                "%s: not uploaded: %s; the files are in %s", display_path(self._directory), ", ".join(left[:5]), self._directory
            )

    def stats(self) -> dict[str, dict[str, int | str]]:
        """Counters for the status; empty for a local run."""
        if self._store is None:
            return {}
        wrong: dict[str, int | str] = {"failures": self.failures, "last_error": self.last_error} if self.failures else {}
        return {"store": {"uploads": self.uploads, **wrong}}

    def pending(self) -> list[str]:
        """Files that differ from those on the store."""
        return [] if self._store is None else [name for name, _ in self._changed_files()]

    def request(self) -> None:
        """Request an upload soon. Does not block."""
        self._requested.set()

    def upload_now(self) -> bool:
        """Upload all changed files now; returns whether all uploads succeeded."""
        return self._upload_changed(everything=True)

    def _run(self) -> None:
        last_mark, next_at = self._mark(), 0.0
        while not self._stop.is_set():
            requested = self._requested.wait(min(_POLL_S, self._every_s))
            if self._stop.is_set():
                break
            self._requested.clear()
            mark = self._mark()
            requested, last_mark = requested or mark != last_mark, mark
            if requested or time.monotonic() >= next_at:
                self._upload_changed(everything=False)
                next_at = time.monotonic() + self._every_s
        self._upload_changed(everything=True)

    def _upload_changed(self, *, everything: bool) -> bool:
        if self._store is None or self.fenced:
            return True
        with self._lock:
            now = time.monotonic()
            changed = [(name, stamp) for name, stamp in self._changed_files() if self._is_small_enough(name, stamp)]
            due = [(name, stamp) for name, stamp in changed if everything or now >= self._due.get(name, 0.0)]
            if due and not self._may_upload():
                return False
            failed = 0
            for name, stamp in due:
                failed += not self._upload_file(self._store, name, stamp)
                if not self._may_upload():  # an upload may be slow, and the run may have been claimed meanwhile
                    return False
                if failed > 1:  # the store has a problem, not the file: the others would fail too
                    break
            if due and not failed and self._warned:
                self._warned = False
                log.info("uploads to %s succeed again", display_path(self._directory))
        return not failed

    def _is_small_enough(self, name: str, stamp: tuple[int, int]) -> bool:
        fits = stamp[0] <= MAX_FILE_BYTES
        if not fits and name not in self._too_long:
            self._too_long.add(name)
            where = self._directory / name
            log.warning("%s is larger than %d MB and is no longer uploaded", where, MAX_FILE_BYTES >> 20)
        return fits

    def _may_upload(self) -> bool:
        try:
            if self._guard is not None:
                self._guard()
        except Fenced as error:
            self.fenced = True
            log.warning("uploads to %s stop: %s", display_path(self._directory), error)
            return False
        except LudusError as error:
            self._fail(error)
            return False
        return True

    def _upload_file(self, store: Store, name: str, stamp: tuple[int, int]) -> bool:
        try:
            data = _read(self._directory / name)
            store.put(name, data)
        except FileNotFoundError:  # rotated away meanwhile
            return True
        except (LudusError, OSError) as error:
            self._fail(error)
            return False
        self.uploads += 1
        self._uploaded[name] = stamp
        self._due[name] = time.monotonic() + len(data) / MAX_BYTES_PER_S
        return True

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self.last_error = str(error)
        if not self._warned:
            self._warned = True
            log.warning("uploading metrics and logs failed and is retried: %s", error)

    def _changed_files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for name, path in synced_files(self._directory):
            with contextlib.suppress(OSError):  # rotated away meanwhile
                known = path.stat()
                stamp = known.st_size, known.st_mtime_ns
                if self._uploaded.get(name) != stamp:
                    yield name, stamp


def _read(path: Path) -> bytes:
    """The content of a file; of line-based files only complete lines, as a resumed run appends to them."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES)
    return data[: data.rfind(b"\n") + 1] if path.suffix in _LINE_SUFFIXES else data
