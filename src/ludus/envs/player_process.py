"""Games that an environment starts itself: the players of Unity and Godot, game servers, private X servers.

    with PlayerProcess(["./Game.x86_64", "-batchmode"], name="Game", log=Path("logs/Player-0.log")) as player:
        while not connected:
            player.check()  # raises EnvironmentFault with its exit code and last lines when it has ended
            …

The program runs under the guard of `ludus.process.commands`: it has its own session, its output goes to a bounded log in which
repeated lines are counted, and it ends with all its child processes when it is closed or when this process ends, even by SIGKILL.
Before a start, the threads that such a program is known to use are compared with the limits of this machine.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ludus.display.game_screen import GameScreen
from ludus.display.screen_grab import Picture
from ludus.errors import EnvironmentFault, UsageError, WorkerFailed
from ludus.io.rotating_log import MAX_BYTES
from ludus.process import temp_dirs
from ludus.process.commands.command import GRACE_S, GameExit, GameProcess, Games
from ludus.process.commands.thread_limits import ResourceLimit, thread_limits
from ludus.process.screen_choice import XVFB
from ludus.process.temp_dirs import TempDir

SHOWN_LINES = 5
"""Number of last lines of a log in an error message."""

SPARE_THREADS = 32
"""Threads that must be left after a player has started its own: for this process, its workers and a shell."""

_LINE_CHARACTERS = 160


class _SharedGames:
    """The `Games` of this process, which all its players share. Started with the first player and closed with the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._games: Games | None = None
        self._users = 0
        self._owner = 0
        self._threads: dict[str, int] = {}

    def acquire(self) -> Games:
        with self._lock:
            if self._owner != os.getpid():  # a fork has a copy that it must not use
                self._games, self._users, self._owner = None, 0, os.getpid()
            if self._games is None:
                self._games = Games()
            self._users += 1
            return self._games

    def release(self, games: Games) -> None:
        with self._lock:
            if games is not self._games or self._owner != os.getpid():
                return
            self._users -= 1
            if self._users:
                return
            self._games = None
        games.close(grace_s=0.0)

    def expected_threads(self, kind: str) -> int | None:
        return self._threads.get(kind)

    def note_threads(self, kind: str, count: int) -> None:
        self._threads[kind] = max(count, self._threads.get(kind, 1))


_shared = _SharedGames()


def opens_window(env: str, env_config: Mapping[str, Any], display: str) -> bool:
    """Whether an environment starts players that draw. A Unity player whose `no_graphics` is not given may be a build for servers."""
    if env == "unity":
        no_graphics = env_config.get("no_graphics")
        return no_graphics is False or (no_graphics is None and display == XVFB)
    return env == "godot_rl" and bool(env_config.get("show_window"))


def open_screen(player: str, *, recorded: bool = False, environment: Mapping[str, str] | None = None) -> GameScreen:
    """The screen of a player with graphics by `config.display`, whose OpenGL has been checked. `recorded`: pictures of it are wanted.

    The caller closes it, or gives it to the player. Raises ConfigError, MissingExtra, WorkerFailed.
    """
    screen = GameScreen(window=True, recorded=recorded, environ=environment)
    with contextlib.ExitStack() as undo:
        undo.callback(screen.close)
        screen.check_opengl(player)
        undo.pop_all()
    return screen


class PlayerProcess:
    """A running program with all processes that it has started. Closed by `close` or as a context manager; not for forks.

    `log`: file of its output; None: a temporary file that is removed with the player. `environment`: all its variables; None: those of
    this process. `threads`: number of threads that such a program uses, if known in advance; otherwise the number that an earlier
    one of the same program had in this process. `grace_s`: time between SIGTERM and SIGKILL. `screen`: what it draws on; closed with
    the player, also if it cannot be started. Raises EnvironmentFault.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        name: str = "",
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        threads: int | None = None,
        grace_s: float = GRACE_S,
        log_bytes: int = MAX_BYTES,
        screen: GameScreen | None = None,
    ) -> None:
        self.command = [os.fspath(word) for word in command]
        self.name = name or Path(self.command[0]).name
        self.grace_s = grace_s
        self._kind = self.command[0]
        self._closed, self.screen = False, screen
        self._keeps_log = log is not None
        with contextlib.ExitStack() as stack:
            if screen is not None:
                stack.callback(screen.close)
                environment = screen.environment(os.environ if environment is None else environment)
            if log is None:
                folder = TempDir(temp_dirs.short_temp_dir())
                stack.callback(folder.close)
                log = folder.path / "player.log"
            games = _shared.acquire()
            stack.callback(_shared.release, games)
            expected = threads if threads is not None else _shared.expected_threads(self._kind)
            try:
                self._game: GameProcess = games.start(
                    self.command,
                    log=log,
                    name=self.name,
                    kind=self._kind,
                    environment=environment,
                    directory=directory,
                    threads=expected,
                    log_bytes=log_bytes,
                )
            except (WorkerFailed, OSError) as error:
                message, hint = (error.message, error.hint) if isinstance(error, WorkerFailed) else (str(error), "")
                raise EnvironmentFault(f"{self.name} cannot be started. {message}", hint) from error
            self._resources = stack.pop_all()

    def __enter__(self) -> PlayerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(0.0 if error is not None else None)

    @property
    def pid(self) -> int:
        return self._game.pid

    @property
    def log_path(self) -> Path:
        return self._game.log_path

    @property
    def exit(self) -> GameExit | None:
        """How it ended; None while it runs."""
        return self._game.exit

    def last_lines(self, count: int = SHOWN_LINES) -> list[str]:
        """Last lines of its log. Repeated lines are replaced by their count."""
        return self._game.last_lines(count)

    def wait(self, timeout_s: float) -> GameExit | None:
        """Wait until it has ended; None if it still runs after `timeout_s`."""
        return self._game.wait(timeout_s)

    def check(self) -> None:
        """Raise EnvironmentFault if it has ended."""
        if self._game.exit is not None:
            raise self.fault(f"{self.name} {self._game.exit}.")

    def check_threads(self, limits: Sequence[ResourceLimit] | None = None) -> int:
        """Count its threads, to be called once it has started them, and remember the number for the next start.

        Raises EnvironmentFault if it has left fewer than SPARE_THREADS: the next thread of any process would fail obscurely.
        """
        count = self._game.count_threads()
        _shared.note_threads(self._kind, count)
        tightest = min(thread_limits() if limits is None else limits, key=lambda limit: limit.left, default=None)
        if tightest is not None and tightest.left < min(SPARE_THREADS, tightest.limit // 10):
            raise self.fault(
                f"{self.name} (process {self.pid}) has {count:,} threads, and {tightest.left:,} are left of {tightest.limit:,}"
                f" ({tightest.name}).",
                f"Start fewer games here, spread them over more machines, or {tightest.fix}.",
            )
        return count

    def fault(self, message: str, hint: str = "") -> EnvironmentFault:
        """An error whose message ends with how the program ended, and the last lines of its log.

        One line, since the last line of a worker's log is the reason that its run shows.
        """
        parts = [message]
        if self._game.exit is not None and str(self._game.exit) not in message:
            parts.append(f"Its process {self._game.exit}.")
        if self.screen is not None and (problem := self.screen.problem()):
            parts.append(f"Its screen: {problem}.")
        lines = [line.strip()[:_LINE_CHARACTERS] for line in self.last_lines() if line.strip()]
        where = f" of {self.log_path}" if self._keeps_log else ""
        parts.append(f"Last lines{where}: {' | '.join(lines).rstrip('.')}." if lines else f"The log{where} is empty.")
        return EnvironmentFault(" ".join(parts), hint)

    def frame(self) -> Picture:
        """The picture of its window, uint8 [H, W, 3]. Raises UsageError, WorkerFailed."""
        if self.screen is None:
            raise UsageError(f"{self.name} draws on no screen of Ludus.", "Record without --video, or start it with graphics.")
        return self.screen.frame()

    def close(self, grace_s: float | None = None) -> GameExit | None:
        """Send SIGTERM, and SIGKILL after `grace_s`; wait until all its processes have ended. Repeated calls have no effect."""
        if self._closed:
            return self._game.exit
        self._closed = True
        try:
            if self._game.exit is None:
                _shared.note_threads(self._kind, self._game.threads)
                with contextlib.suppress(WorkerFailed):  # blocked by disk I/O; its guard goes on
                    self._game.stop(self.grace_s if grace_s is None else grace_s)
        finally:
            self._resources.close()
        return self._game.exit
