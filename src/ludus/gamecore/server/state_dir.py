"""Where a server keeps what it knows: one directory per game, saved states, its log. One server at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import time
import uuid
from pathlib import Path
from typing import Any, BinaryIO

from ludus.errors import Refused, UsageError
from ludus.gamecore.server.catalogue import NAME, STATE_NAME, States
from ludus.gamecore.server.command import CONFIG, Place
from ludus.gamecore.server.game_status import Status
from ludus.gamecore.server.request import ANY, Order, shown
from ludus.io import rotating_log
from ludus.io.atomic_file import replace_json
from ludus.io.regular_files import open_regular, read_regular
from ludus.process import identity, procfs

log = logging.getLogger(__name__)

PRIVATE = 0o700
MAX_RESULT = 16_384
MAX_LOG_BYTES = 1_000_000
MAX_KEPT = 64_000_000
_MAX_RECORD = 2_000_000
_REAP_S = 10.0
_REGISTRY = "system.reg"
_KEPT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,127}")
_ASIDE_S = 3600.0
"""A state that was begun so long ago and never got its name is nobody's."""


def default_directory(port: int) -> Path:
    """LUDUS_STATE_DIR, else XDG_STATE_HOME/ludus, else ~/.local/state/ludus; and below it one for each port."""
    own, shared = os.environ.get("LUDUS_STATE_DIR"), os.environ.get("XDG_STATE_HOME")
    if own:
        base = Path(own).absolute()
    elif shared and Path(shared).is_absolute():  # the specification says to ignore others
        base = Path(shared) / "ludus"
    else:
        base = Path.home() / ".local" / "state" / "ludus"
    return base / "gamecore" / str(port)


class Home:
    """The directory, locked for as long as this is open. Methods may wait for the disk; they may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.games, self.states, self._trash, self._kept = (
            self.directory / name for name in ("games", "states", "trash", "kept")
        )
        self.log = self.directory / "gamecore-server.log"
        try:
            for path in (self.directory, self.games, self.states, self._trash, self._kept):
                path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            owner = self.directory.stat().st_uid
        except OSError as error:
            raise UsageError(f"{self.directory} cannot be used: {error.strerror}.", "Choose another by --state-dir.") from error
        if owner != os.getuid():
            raise UsageError(f"{self.directory} belongs to another user.", "Choose another by --state-dir.")
        self._lock = _locked(self.directory / "lock")
        for path in self._kept.iterdir():  # of a server that was killed between two renames
            os.rename(path, self._trash / uuid.uuid4().hex)

    def close(self) -> None:
        os.close(self._lock)

    def __enter__(self) -> Home:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def mark(self) -> str:
        """What the paths of all configs of this home begin with."""
        return f"{self.games}{os.sep}"

    # -- games

    def place(self, runtime_id: str) -> Place:
        return Place(self.games / runtime_id)

    def make(self, place: Place, config: dict[str, Any], *, with_prefix: bool = False) -> None:
        """Anew: what an earlier game of this id left is gone.

        `with_prefix`: but for its Wine prefix, which takes seconds to make and hundreds of megabytes. One without a registry was not
        finished, or its server of Wine was killed before it wrote that down.
        """
        kept = self._kept / place.directory.name  # not in the trash, which another thread may be emptying
        if with_prefix and (place.prefix / _REGISTRY).is_file():
            with contextlib.suppress(OSError):
                os.rename(place.prefix, kept)
        self.discard(place)
        place.directory.mkdir(mode=PRIVATE)
        with contextlib.suppress(FileNotFoundError):
            os.rename(kept, place.prefix)
        replace_json(place.config, config, mode=0o600)

    def discard(self, place: Place) -> Path | None:
        """Out of the way at once; `empty_trash` takes its time."""
        away = self._trash / uuid.uuid4().hex
        try:
            os.rename(place.directory, away)
        except FileNotFoundError:
            return None
        return away

    def empty_trash(self) -> None:
        for path in self._trash.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def save(self, status: Status, processes: dict[int, str] | None = None, size: int = 0) -> None:
        """`processes`: by number, with when they began; `size`: of its directory. A full disk costs the record, not the game."""
        place = self.place(status.runtime_id)
        record = {"status": status.to_json(), "processes": processes or {}, "bytes": size}
        try:
            replace_json(place.record, record, mode=0o600)
        except OSError as error:
            log.warning("the record of %s cannot be written: %s", status.runtime_id, error)

    def load(self) -> list[tuple[Status, int]]:
        """All games that are known here, with the bytes of each, the oldest first. Those that ran are lost, and nothing of them
        runs any more."""
        found: list[tuple[Status, int]] = []
        processes: dict[int, str] = {}
        for directory in self.games.iterdir():
            place = Place(directory)
            try:
                data = json.loads(read_regular(place.record, _MAX_RECORD))
                status = Status.from_json(data["status"])
                if status.runtime_id != directory.name or NAME.fullmatch(directory.name) is None:
                    raise ValueError("it is the record of another game")
                began = {int(pid): str(since) for pid, since in data["processes"].items()}
                size = int(data["bytes"])
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("%s is no record of a game (%s) and is removed", place.record, error)
                self.discard(place)
                continue
            if not status.is_over:
                processes |= began
            found.append((status, size))
        self.reap(processes)
        settled = [(status, size) if status.is_over else (status, self._lose(status)) for status, size in found]
        return sorted(settled, key=lambda one: (one[0].finished or 0.0, one[0].started))

    def _lose(self, status: Status) -> int:
        place = self.place(status.runtime_id)
        status.state, status.pid, status.finished = "lost", None, time.time()
        status.reason = "The server was killed while it ran."
        status.last_lines = rotating_log.tail(place.log, 20)
        size = self.size(place)
        self.save(status, size=size)
        return size

    def reap(self, processes: dict[int, str]) -> None:
        """End whatever a server that was killed left behind. Its guards do that; this is for when they were killed too."""
        deadline = time.monotonic() + _REAP_S
        while left := {*_alive(processes), *_marked(f"{CONFIG}={self.mark}")}:
            if time.monotonic() > deadline:
                log.error("these processes of lost games could not be killed: %s", sorted(left))
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)  # a killed process is gone when the kernel gets round to it, which nothing here can wait for

    def size(self, place: Place) -> int:
        """Bytes of all that a game left in its directory."""
        total = 0
        for folder, _, names in os.walk(place.directory):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512  # noqa: PTH118
        return total

    # -- saved states

    def states_of(self, game: str, kind: str) -> Path:
        """Of matches of one kind: a state of 1v1 is none for 3v3."""
        directory = self.states / game / kind
        directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        return directory

    def saved(self, game: str, kind: str | None = None) -> list[Path]:
        """The oldest first; of all kinds, if none is named."""
        found: list[tuple[float, Path]] = []
        for directory in self._kinds(game) if kind is None else [self.states / game / kind]:
            with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False) and STATE_NAME.fullmatch(entry.name):
                        with contextlib.suppress(FileNotFoundError):
                            found.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
        return [path for _, path in sorted(found)]

    def _kinds(self, game: str) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):
            return [path for path in (self.states / game).iterdir() if path.is_dir() and not path.is_symlink()]
        return []

    def choose_state(self, order: Order) -> Path | None:
        """As `start_from` says; None: it begins anew. Raises Refused if there is none of this name."""
        name, which = order.start_from, f"{order.game} ({order.kind})"
        saved = self.saved(order.game, order.kind)
        if name is None:
            return None
        if name == ANY:
            if saved or not order.must_resume:
                return random.choice(saved) if saved else None  # noqa: S311
            raise Refused(404, "unknown_state", f"There is no saved state of {which}.", "Play matches that save some first.")
        for path in saved:
            if path.name == name:
                return path
        raise Refused(404, "unknown_state", f"{which} has no saved state {shown(name)}.", "Name one that exists, or say any.")

    def prune_states(self, game: str, keep: States) -> None:
        saved = self.saved(game)
        room = keep.keep_mb * 1e6
        for count, path in enumerate(reversed(saved)):
            with contextlib.suppress(OSError):
                room -= path.stat().st_size
                if count >= keep.keep or room < 0:
                    path.unlink()
        with contextlib.suppress(OSError):
            for path in [path for directory in self._kinds(game) for path in directory.iterdir()]:
                if path.name.startswith(".") and time.time() - path.lstat().st_mtime > _ASIDE_S:
                    path.unlink()


def read_result(path: Path) -> tuple[dict[str, Any] | None, str]:
    """What a game wrote as its result, and what is wrong with it."""
    try:
        data = json.loads(read_regular(path, MAX_RESULT), parse_constant=_not_finite, parse_float=_finite)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, f"Its result cannot be read: {error}."
    return (data, "") if isinstance(data, dict) else (None, "Its result is not a JSON object.")


def open_kept(directory: Path, result: object, what: str) -> tuple[BinaryIO, int]:
    """A file that a game has left in its directory and names in its result, as its `recording` or its `video`; and its size. Raises Refused."""
    name = result.get(what) if isinstance(result, dict) else None
    if not isinstance(name, str) or _KEPT.fullmatch(name) is None:
        raise Refused(
            404, "no_file", f"The game names no {what} in its result.", f'{{"{what}": "FILE"}}: a file in its directory.'
        )
    try:
        file = open_regular(directory / name)
    except FileNotFoundError:
        raise Refused(404, "no_file", f"The game has left no {name}.", "It is to be there before the result.") from None
    except OSError as error:
        raise Refused(404, "no_file", f"{name} cannot be read: {error.strerror or error}.") from None
    size = os.fstat(file.fileno()).st_size
    if size > MAX_KEPT:
        file.close()
        raise Refused(404, "no_file", f"{name} is larger than {MAX_KEPT:,} bytes.")
    return file, size


def last_lines(path: Path, lines: int) -> list[str]:
    """Of a log with the one before it; at most MAX_LOG_BYTES of it."""
    data = b""
    for place in (path, rotating_log.before(path)):
        with contextlib.suppress(OSError), open_regular(place) as file:  # the game can put a link in its place
            room = MAX_LOG_BYTES - len(data)
            file.seek(max(0, file.seek(0, os.SEEK_END) - room))
            data = file.read(room) + data
        if data.count(b"\n") > lines or len(data) >= MAX_LOG_BYTES:
            break
    return data.decode(errors="replace").splitlines()[-lines:] if lines else []


def _finite(word: str) -> float:
    value = float(word)
    return value if math.isfinite(value) else _not_finite(word)


def _not_finite(word: str) -> float:
    raise ValueError(f"{word} is not a number in JSON")


def _locked(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(handle, 32).decode(errors="replace").strip()
        os.close(handle)
        raise UsageError(
            f"Another gamecore server (process {holder or '?'}) uses {path.parent}.", "End it, or choose another --state-dir."
        ) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def _alive(processes: dict[int, str]) -> list[int]:
    found = [pid for pid, since in processes.items() if identity.is_alive(pid, since)]
    return [*found, *(below for pid in found for below in procfs.list_descendants(pid))]


def _marked(mark: str) -> list[int]:
    """Processes that were started as games of this home."""
    # A killed process has no environment any more, also while nobody has taken its exit code.
    return [pid for pid in procfs.list_pids() if any(entry.startswith(mark) for entry in procfs.read_environment(pid))]
