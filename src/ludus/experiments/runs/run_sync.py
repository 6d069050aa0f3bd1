"""The carrier: takes what grows in the working directory of a run (metrics, logs) to the store where the run belongs."""

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
from ludus.experiments.runs.remote_runs import MOST_BYTES, WORKER, carried_files, is_remote, shown, store_of
from ludus.storage.base import Store, WriteGuard
from ludus.storage.local import LocalStore

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""It looks this often what has changed."""

BYTES_PER_S = 1 << 20
"""Of one file, in the mean: it goes whole every time, so that a long one goes less often."""

END_S = 60.0
"""At the end of a run, the longest wait for what has not been carried yet."""

_LOOK_S = 1.0
_LINES = (".jsonl", ".csv", ".log")


class Carrier:
    """Carries what has changed: now and then, after each checkpoint, and at the end.

    A context manager with a thread of its own; of a local run it does nothing. Failures are counted and said once, never raised:
    training goes on, and what could not be carried is tried again. `guard` raises Fenced when the run is another's now; then
    nothing more is carried. `mark` is looked at every second: when it changes (a new checkpoint), it is time to carry.
    """

    def __init__(
        self,
        directory: Path,
        *,
        guard: WriteGuard | None = None,
        mark: Callable[[], object] = lambda: None,
        every_s: float = EVERY_S,
    ) -> None:
        self._directory, self._guard, self._mark, self._every_s = directory, guard, mark, every_s
        self._store = store_of(directory) if is_remote(directory) else None
        self._carried: dict[str, tuple[int, int]] = {}  # file → its size and time when it was carried
        self._due: dict[str, float] = {}
        self._too_long: set[str] = set()
        self._over, self._wanted, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ludus-carrier", daemon=True)
        self._complained = False
        self.uploads = self.failures = 0
        self.last_error = ""
        self.fenced = False

    def __enter__(self) -> Carrier:
        if self._store is not None:
            with contextlib.suppress(LudusError):  # a full disk: whoever looks from here may see an older state
                LocalStore(self._directory).put(WORKER, json.dumps(run_status.identity()).encode())
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._store is None:
            return
        self._over.set()
        self._wanted.set()
        self._thread.join(END_S)
        with contextlib.suppress(LudusError):
            LocalStore(self._directory).delete(WORKER)
        if not self.fenced and (left := self.waiting()):
            log.warning("%s: not stored: %s; they are in %s", shown(self._directory), ", ".join(left[:5]), self._directory)

    def stats(self) -> dict[str, dict[str, int | str]]:
        """What a status says of it; nothing of a local run."""
        if self._store is None:
            return {}
        wrong: dict[str, int | str] = {"failures": self.failures, "last_error": self.last_error} if self.failures else {}
        return {"store": {"uploads": self.uploads, **wrong}}

    def waiting(self) -> list[str]:
        """What is not on the store as it is here."""
        return [] if self._store is None else [name for name, _ in self._changed()]

    def hurry(self) -> None:
        """Carry what has changed soon. Returns at once."""
        self._wanted.set()

    def carry(self) -> bool:
        """Carry everything that has changed, now; whether all of it arrived."""
        return self._pass(all_of_it=True)

    def _run(self) -> None:
        marked, next_at = self._mark(), 0.0
        while not self._over.is_set():
            hurried = self._wanted.wait(min(_LOOK_S, self._every_s))
            if self._over.is_set():
                break
            self._wanted.clear()
            now_marked = self._mark()
            hurried, marked = hurried or now_marked != marked, now_marked
            if hurried or time.monotonic() >= next_at:
                self._pass(all_of_it=False)
                next_at = time.monotonic() + self._every_s
        self._pass(all_of_it=True)

    def _pass(self, *, all_of_it: bool) -> bool:
        if self._store is None or self.fenced:
            return True
        with self._lock:
            now = time.monotonic()
            changed = [(name, seen) for name, seen in self._changed() if self._fits(name, seen)]
            due = [(name, seen) for name, seen in changed if all_of_it or now >= self._due.get(name, 0.0)]
            if due and not self._may():
                return False
            failed = 0
            for name, seen in due:
                failed += not self._one(self._store, name, seen)
                if not self._may():  # that may have taken its time, and the next one may be another's now
                    return False
                if failed > 1:  # it is not that file: the next one would fail as well, and take its time
                    break
            if due and not failed and self._complained:
                self._complained = False
                log.info("%s has everything again", shown(self._directory))
        return not failed

    def _fits(self, name: str, seen: tuple[int, int]) -> bool:
        fits = seen[0] <= MOST_BYTES
        if not fits and name not in self._too_long:
            self._too_long.add(name)
            where = self._directory / name
            log.warning("%s is longer than %d MB: what is added to it from now on stays here", where, MOST_BYTES >> 20)
        return fits

    def _may(self) -> bool:
        try:
            if self._guard is not None:
                self._guard()
        except Fenced as error:
            self.fenced = True
            log.warning("nothing more is carried to %s: %s", shown(self._directory), error)
            return False
        except LudusError as error:
            self._fail(error)
            return False
        return True

    def _one(self, store: Store, name: str, seen: tuple[int, int]) -> bool:
        try:
            data = _read(self._directory / name)
            store.put(name, data)
        except FileNotFoundError:  # rotated away meanwhile
            return True
        except (LudusError, OSError) as error:
            self._fail(error)
            return False
        self.uploads += 1
        self._carried[name] = seen
        self._due[name] = time.monotonic() + len(data) / BYTES_PER_S
        return True

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self.last_error = str(error)
        if not self._complained:
            self._complained = True
            log.warning("what was measured and logged cannot be stored for now, and will be later: %s", error)

    def _changed(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for name, path in carried_files(self._directory):
            with contextlib.suppress(OSError):  # rotated away meanwhile
                known = path.stat()
                seen = known.st_size, known.st_mtime_ns
                if self._carried.get(name) != seen:
                    yield name, seen


def _read(path: Path) -> bytes:
    """Whole lines only: another process goes on with them."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES)
    return data[: data.rfind(b"\n") + 1] if path.suffix in _LINES else data
