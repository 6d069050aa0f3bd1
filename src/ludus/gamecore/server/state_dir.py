"""State directory of a server: one directory per game, saved states, the server log. Locked by one server at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
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
from ludus.gamecore.server.catalogue import NAME, STATE_NAME, StatePolicy
from ludus.gamecore.server.command import CONFIG, GameDirectory
from ludus.gamecore.server.game_status import GameStatus
from ludus.gamecore.server.request import ANY, GameRequest, parse_finite_json, quote
from ludus.io import rotating_log
from ludus.io.atomic_file import replace_json
from ludus.io.regular_files import open_regular, read_regular
from ludus.process import identity, procfs

log = logging.getLogger(__name__)

PRIVATE = 0o700
MAX_RESULT = 16_384
MAX_LOG_BYTES = 1_000_000
MAX_ARTIFACT = 64_000_000
_MAX_RECORD = 2_000_000
_REAP_S = 10.0
_REGISTRY = "system.reg"
_ARTIFACT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,127}")
_INCOMPLETE_S = 3600.0
"""Age after which an incomplete saved state is deleted."""


def default_directory(port: int) -> Path:
    """gamecore/PORT below LUDUS_STATE_DIR, else XDG_STATE_HOME/ludus, else ~/.local/state/ludus."""
    own, shared = os.environ.get("LUDUS_STATE_DIR"), os.environ.get("XDG_STATE_HOME")
    if own:
        base = Path(own).absolute()
    elif shared and Path(shared).is_absolute():  # the XDG specification ignores relative paths
        base = Path(shared) / "ludus"
    else:
        base = Path.home() / ".local" / "state" / "ludus"
    return base / "gamecore" / str(port)


class StateDir:
    """The directory, locked until `close`. Methods block on the disk and are thread-safe."""

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
            raise UsageError(f"Cannot use {self.directory}: {error.strerror}.", "Choose another with --state-dir.") from error
        if owner != os.getuid():
            raise UsageError(f"{self.directory} belongs to another user.", "Choose another with --state-dir.")
        self._lock = _lock_file(self.directory / "lock")
        for path in self._kept.iterdir():  # left by a server that was killed between two renames
            os.rename(path, self._trash / uuid.uuid4().hex)

    def close(self) -> None:
        os.close(self._lock)

    def __enter__(self) -> StateDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def mark(self) -> str:
        """Common prefix of all config paths of this directory."""
        return f"{self.games}{os.sep}"

    # -- games

    def game_dir(self, runtime_id: str) -> GameDirectory:
        return GameDirectory(self.games / runtime_id)

    def create(self, game_dir: GameDirectory, config: dict[str, Any], *, with_prefix: bool = False) -> None:
        """Create the directory of a game and remove that of an earlier game with this id.

        `with_prefix`: keep its Wine prefix, which takes seconds to create and hundreds of megabytes. A prefix without a registry is
        incomplete and is not kept.
        """
        kept = self._kept / game_dir.path.name  # not in the trash, which another thread may be emptying
        if with_prefix and (game_dir.prefix / _REGISTRY).is_file():
            with contextlib.suppress(OSError):
                os.rename(game_dir.prefix, kept)
        self.discard(game_dir)
        game_dir.path.mkdir(mode=PRIVATE)
        with contextlib.suppress(FileNotFoundError):
            os.rename(kept, game_dir.prefix)
        replace_json(game_dir.config, config, mode=0o600)

    def discard(self, game_dir: GameDirectory) -> None:
        """Move the directory of a game to the trash; `empty_trash` deletes it."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(game_dir.path, self._trash / uuid.uuid4().hex)

    def empty_trash(self) -> None:
        for path in self._trash.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def save(self, status: GameStatus, processes: dict[int, str] | None = None, size: int = 0) -> None:
        """Write the record of a game. `processes`: start time by pid; `size`: of its directory. Only logs disk errors."""
        game_dir = self.game_dir(status.runtime_id)
        record = {"status": status.to_json(), "processes": processes or {}, "bytes": size}
        try:
            replace_json(game_dir.record, record, mode=0o600)
        except OSError as error:
            log.warning("cannot write the record of %s: %s", status.runtime_id, error)

    def load(self) -> list[tuple[GameStatus, int]]:
        """Load all records with their sizes, oldest first. Games that were running become `lost`, and their processes are killed."""
        found: list[tuple[GameStatus, int]] = []
        processes: dict[int, str] = {}
        for directory in self.games.iterdir():
            game_dir = GameDirectory(directory)
            try:
                data = json.loads(read_regular(game_dir.record, _MAX_RECORD))
                status = GameStatus.from_json(data["status"])
                if status.runtime_id != directory.name or NAME.fullmatch(directory.name) is None:
                    raise ValueError("it is the record of another game")
                began = {int(pid): str(since) for pid, since in data["processes"].items()}
                size = int(data["bytes"])
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("%s is not a record of a game (%s): removing it", game_dir.record, error)
                self.discard(game_dir)
                continue
            if not status.is_over:
                processes |= began
            found.append((status, size))
        self.reap(processes)
        statuses = [(status, size) if status.is_over else (status, self._mark_lost(status)) for status, size in found]
        return sorted(statuses, key=lambda one: (one[0].finished or 0.0, one[0].started))

    def _mark_lost(self, status: GameStatus) -> int:
        game_dir = self.game_dir(status.runtime_id)
        status.state, status.pid, status.finished = "lost", None, time.time()
        status.reason = "The server was killed while it ran."
        status.last_lines = rotating_log.tail(game_dir.log, 20)
        size = self.size(game_dir)
        self.save(status, size=size)
        return size

    def reap(self, processes: dict[int, str]) -> None:
        """Kill the processes that a killed server left behind, in case their guards were killed as well."""
        deadline = time.monotonic() + _REAP_S
        while left := self._list_processes(processes):
            if time.monotonic() > deadline:
                log.error("cannot kill these processes of lost games: %s", sorted(left))
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)  # not our children, so there is nothing to wait on

    def _list_processes(self, processes: dict[int, str]) -> set[int]:
        """Find these processes with their descendants, and all others that were started as games of this directory."""
        alive = [pid for pid, since in processes.items() if identity.is_alive(pid, since)]
        below = [child for pid in alive for child in procfs.list_descendants(pid)]
        mark = f"{CONFIG}={self.mark}"  # a killed process has no environment, even as a zombie
        marked = [pid for pid in procfs.list_pids() if any(entry.startswith(mark) for entry in procfs.read_environment(pid))]
        return {*alive, *below, *marked}

    def size(self, game_dir: GameDirectory) -> int:
        """Disk usage of a game's directory in bytes."""
        total = 0
        for folder, _, names in os.walk(game_dir.path):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512  # noqa: PTH118
        return total

    # -- saved states

    def states_dir(self, game: str, kind: str) -> Path:
        """Directory of the saved states of one kind of match, such as 1v1."""
        directory = self.states / game / kind
        directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        return directory

    def list_states(self, game: str, kind: str | None = None) -> list[Path]:
        """Saved states, oldest first; of all kinds if `kind` is None."""
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

    def choose_state(self, request: GameRequest) -> Path | None:
        """Return the state for `start_from`; None: a new match. Raises Refused if the named state does not exist."""
        name, which = request.start_from, f"{request.game} ({request.kind})"
        saved = self.list_states(request.game, request.kind)
        if name is None:
            return None
        if name == ANY:
            if saved or not request.must_resume:
                return random.choice(saved) if saved else None  # noqa: S311
            raise Refused(404, "unknown_state", f"There is no saved state of {which}.", "Play matches that save states first.")
        for path in saved:
            if path.name == name:
                return path
        raise Refused(404, "unknown_state", f"{which} has no saved state {quote(name)}.", "Name an existing one, or use any.")

    def prune_states(self, game: str, keep: StatePolicy) -> None:
        room = keep.keep_mb * 1e6
        for count, path in enumerate(reversed(self.list_states(game))):
            with contextlib.suppress(OSError):
                room -= path.stat().st_size
                if count >= keep.keep or room < 0:
                    path.unlink()
        with contextlib.suppress(OSError):
            for path in [path for directory in self._kinds(game) for path in directory.iterdir()]:
                if path.name.startswith(".") and time.time() - path.lstat().st_mtime > _INCOMPLETE_S:
                    path.unlink()


def read_result(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the result that a game wrote, or the reason why it cannot be read."""
    try:
        data = parse_finite_json(read_regular(path, MAX_RESULT))
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, f"Cannot read its result: {error}."
    return (data, "") if isinstance(data, dict) else (None, "Its result is not a JSON object.")


def open_artifact(directory: Path, result: object, what: str) -> tuple[BinaryIO, int]:
    """Open the file that the result names as `recording` or `video`, and return its size. Raises Refused."""
    name = result.get(what) if isinstance(result, dict) else None
    if not isinstance(name, str) or _ARTIFACT_NAME.fullmatch(name) is None:
        hint = f'{{"{what}": "FILE"}}: a file in its directory.'
        raise Refused(404, "no_file", f"The game names no {what} in its result.", hint)
    try:
        file = open_regular(directory / name)
    except FileNotFoundError:
        raise Refused(404, "no_file", f"The game left no file {name}.", "A game writes it before its result.") from None
    except OSError as error:
        raise Refused(404, "no_file", f"Cannot read {name}: {error.strerror or error}.") from None
    size = os.fstat(file.fileno()).st_size
    if size > MAX_ARTIFACT:
        file.close()
        raise Refused(404, "no_file", f"{name} is larger than {MAX_ARTIFACT:,} bytes.")
    return file, size


def last_lines(path: Path, lines: int) -> list[str]:
    """Return the last lines of a rotated log, from at most MAX_LOG_BYTES."""
    data = b""
    for game_dir in (path, rotating_log.previous_path(path)):
        with contextlib.suppress(OSError), open_regular(game_dir) as file:  # the game can put a link in its place
            room = MAX_LOG_BYTES - len(data)
            file.seek(max(0, file.seek(0, os.SEEK_END) - room))
            data = file.read(room) + data
        if data.count(b"\n") > lines or len(data) >= MAX_LOG_BYTES:
            break
    return data.decode(errors="replace").splitlines()[-lines:] if lines else []


def _lock_file(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(handle, 32).decode(errors="replace").strip()
        os.close(handle)
        message = f"Another gamecore server (process {holder or '?'}) uses {path.parent}."
        raise UsageError(message, "Stop it, or choose another --state-dir.") from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle
