"""Runs programs, such as games, under guards: started, watched and ended, with a bounded log, and never outliving this process.

    with Games() as games:
        game = games.start(["./mygame", "--headless"], log=Path("logs/game-1.log"))
        ended = game.wait(timeout_s=600) or game.stop(grace_s=5)
        print(ended)  # "ended with code 0"; ended.last_lines

Games written in Python can be forks of one process that has imported their module: they start in milliseconds and share memory.

    with Games(warm="mygame.main") as games:
        game = games.start(["mygame", "--headless"], warm=True, log=Path("logs/game-1.log"))

`prefork.py` lists what the module must provide. `command_guard.py` describes the processes between this one and the games.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ludus.errors import WorkerFailed
from ludus.io import json_lines, rotating_log
from ludus.io.json_lines import LineReader
from ludus.io.rotating_log import MAX_BYTES
from ludus.process import children
from ludus.process.children import describe_exit, wait_or_kill
from ludus.process.commands.command_guard import spawner_command
from ludus.process.commands.prefork import ONE_THREAD
from ludus.process.commands.thread_limits import require_room, thread_limits

log = logging.getLogger(__name__)

GRACE_S = 5.0
WARM_S = 600.0
"""Time limit for the import of a warm module. The Arena takes 0.7 s, but half a minute of CPU time where it was never compiled,
which took more than two minutes on a machine with ten other busy processes."""

_WARM_TRIES = 3
_START_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 15.0
"""Wait after a kill: longer than a guard tries, so that it can report what it could not kill."""

_CHUNK = 65_536
_GUARD_THREADS = 1


@dataclass(frozen=True)
class GameExit:
    """How a command ended. None of its processes are left, except those in `left`.

    `code`: exit code of its process, negative for a signal; None if its guard was killed too.
    `killed`: it did not end by itself in the time it was given. `left`: processes that could not be killed.
    """

    code: int | None
    killed: bool = False
    last_lines: tuple[str, ...] = ()
    left: tuple[int, ...] = ()
    lost_log_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.code is None:
            return "ended because its supervisor ended"
        return f"ended {'with' if self.code >= 0 else 'by'} {describe_exit(self.code)}"


class GameProcess:
    """A running command with all processes that it has started. Created by `Games.start`; thread-safe."""

    def __init__(
        self, name: str, kind: str, log_path: Path, channel: socket.socket, on_exit: Callable[[GameProcess], object] | None
    ):
        self.name, self.kind, self.log_path = name, kind, log_path
        self.pid = self.guard = 0
        self.began = time.monotonic()
        self.threads = 1
        """Last count, including its child processes; updated often at first, then every half minute."""
        self._channel, self._reader, self._on_exit = channel, LineReader(channel), on_exit
        self._failure: str | None = None
        self._exit: GameExit | None = None
        self._started, self._ended = threading.Event(), threading.Event()

    @property
    def exit(self) -> GameExit | None:
        """None while it runs."""
        return self._exit

    def wait(self, timeout_s: float) -> GameExit | None:
        """Returns None if it still runs after `timeout_s`."""
        self._ended.wait(timeout_s)
        return self._exit

    def ask_to_stop(self, grace_s: float = GRACE_S) -> None:
        """Send SIGTERM to its process group; after `grace_s` the rest is killed. Does not wait; a shorter grace replaces a longer one."""
        self._send(stop=max(0.0, grace_s))

    def stop(self, grace_s: float = GRACE_S) -> GameExit:
        """Like `ask_to_stop`, and wait until all its processes have ended."""
        self.ask_to_stop(grace_s)
        ended = self.wait(grace_s + _KILL_TIMEOUT_S)
        if ended is None:
            raise WorkerFailed(f"The game {self.name} (process {self.pid}) could not be stopped.", "Its guard does not respond.")
        return ended

    def count_threads(self) -> int:
        """Count its threads now; see `threads`."""
        if self._exit is None and self.guard:
            self.threads = max(1, children.threads_below(self.guard))
        return self.threads

    def last_lines(self, count: int = 20) -> list[str]:
        """Last lines of its log. Repeated lines are replaced by their count."""
        return list(self._exit.last_lines[-count:]) if self._exit else rotating_log.tail(self.log_path, count)

    # -- called by Games

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._channel.sendall(json_lines.encode(message))

    def _read_messages(self) -> bool:
        """Read messages of its guard; returns False at end of file."""
        for line in self._reader.read():
            self._handle_message(json_lines.decode(line))
        if self._reader.at_end:
            self._set_exit(GameExit(None, seconds=time.monotonic() - self.began))
        return not self._reader.at_end

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "started" in message:
            self.pid, self.guard = message["started"], message["guard"]
            self._started.set()
        elif "threads" in message:
            self.threads = max(1, message["threads"])
        elif "failed" in message:
            self._failure = f"{message['failed']}{': ' if message['file'] else ''}{message['file']}"
            self._started.set()
        elif "exited" in message:
            seconds, lines = time.monotonic() - self.began, tuple(message["lines"])
            self._set_exit(
                GameExit(message["exited"], message["killed"], lines, tuple(message["left"]), message["lost"], seconds)
            )

    def _set_exit(self, outcome: GameExit) -> None:
        if self._ended.is_set():
            return
        self._exit = outcome
        self._started.set()
        self._ended.set()
        if self._on_exit is not None and self.pid:
            try:
                self._on_exit(self)
            except Exception:  # raised by the caller's function; the other commands go on
                log.exception("on_exit of the game %s failed", self.name)


class _Spawner:
    """The spawner process and the control socket to it."""

    def __init__(self, warm: str, environment: Mapping[str, str] | None) -> None:
        self.began = time.monotonic()
        self.control, theirs = socket.socketpair()
        self.control.settimeout(_START_TIMEOUT_S)
        with contextlib.closing(theirs):
            self.process = subprocess.Popen(  # noqa: S603 - this interpreter, with a program of ours
                spawner_command(theirs.fileno(), os.getpid(), warm),
                env={**(os.environ if environment is None else environment), **ONE_THREAD} if warm else None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C at a terminal must not reach it
            )
        self.is_ready = threading.Event()
        """It accepts requests, or has ended."""
        if not warm:
            self.is_ready.set()
        self.has_reported = not warm
        """It has reported whether the import succeeded, and otherwise `failure`."""
        self.failure = ""
        self._reader = LineReader(self.control)

    def read_messages(self) -> bool:
        """Read its messages; returns False after the last one."""
        for line in self._reader.read():
            self.failure = json_lines.decode(line)["failed"]
            self.has_reported = True
            return False
        if self._reader.at_end:
            self.end()
        return not self._reader.at_end

    def end(self) -> None:
        """Wait until it has ended; kill it after a time-out."""
        wait_or_kill(self.process, _KILL_TIMEOUT_S)


class Games:
    """Starts commands under guards. When it is closed, or this process ends for whatever reason, so do the commands.

    Costs one thread here, one small process for all commands (the spawner), and a small process and a descriptor per command.
    Must not be used in a fork of the process that created it.

    `warm`: a module whose games can be forks (`prefork.py`). It is imported in the background, in `environment` (that of this process
    if None), which only the importing process has. If the import fails, commands can still be started.
    """

    def __init__(self, warm: str = "", environment: Mapping[str, str] | None = None) -> None:
        self._warm, self._environment = warm, environment
        self._warm_failure: str | None = None
        self._warm_deaths = 0
        self._lock, self._admission = threading.Lock(), threading.Lock()
        self._running: dict[int, GameProcess] = {}  # by the descriptor of its channel
        self._peaks: dict[str, int] = {}
        self._closed = self._over = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, functools.partial(self._woken.recv, _CHUNK))
        self._spawner = self._start_spawner()
        self._thread = threading.Thread(target=self._run, name="ludus-games", daemon=True)
        self._thread.start()

    def __enter__(self) -> Games:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(GRACE_S if error is None else 0.0)

    @property
    def running(self) -> list[GameProcess]:
        with self._lock:
            return list(self._running.values())

    @property
    def spawner_pid(self) -> int:
        return self._spawner.process.pid

    @property
    def warm_failure(self) -> str | None:
        """Why no game can be a fork of the module; None: it can, or that is not known yet."""
        return self._warm_failure

    def wait_until_warm(self, timeout_s: float = WARM_S) -> None:
        """Raises WorkerFailed if the module cannot be kept warm or is not imported in time."""
        if not self._warm:
            raise WorkerFailed("No module is kept warm here.", "Name one: Games(warm=MODULE).")
        self._wait_until_ready(timeout_s)
        if self._warm_failure is not None:
            raise WorkerFailed(
                f"The module {self._warm} cannot be kept warm: {self._warm_failure}.",
                "Start its games as commands, or correct it.",
            )

    def start(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        warm: bool = False,
        log: Path,
        name: str = "",
        kind: str = "",
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        threads: int | None = None,
        log_bytes: int = MAX_BYTES,
        on_exit: Callable[[GameProcess], object] | None = None,
    ) -> GameProcess:
        """Start a program and return when it runs, after some milliseconds. Raises WorkerFailed if that fails or a thread limit is reached.

        `command` is run without a shell; a relative program is looked up in the PATH of `environment` (that of this process
        if None). `kind`: commands of one kind have about the same number of threads (default: name of the program); `threads`: that
        number, if known in advance. `on_exit` is called once, in a thread that all commands share: it must be quick.

        `warm`: fork the warm module and call its `main` with `command[1:]`; `command[0]` is only a name. The first such call waits for
        the import of the module.
        """
        kind = kind or Path(command[0]).name
        environment = dict(os.environ if environment is None else environment)
        log = log.absolute()
        if warm:
            self.wait_until_warm()
        elif self._warm:
            self._wait_until_ready(WARM_S)
        with self._admission:  # each command is counted before the next one is admitted
            self._require_room(kind, threads)
            log.parent.mkdir(parents=True, exist_ok=True)
            deadline = time.monotonic() + _START_TIMEOUT_S
            ours, theirs = socket.socketpair()
            # An environment may be larger than a socket buffer, and a stopped spawner reads nothing.
            ours.settimeout(_START_TIMEOUT_S)
            game = GameProcess(name or log.stem, kind, log, ours, on_exit)
            with contextlib.closing(theirs):
                self._send_to_spawner(game, ours, theirs)
        game._send(
            command=[os.fspath(word) for word in command],
            environment=environment,
            directory=str(directory.absolute()) if directory else None,
            log=str(log),
            log_bytes=log_bytes,
            name=game.name,
            warm=warm,
        )
        if not game._started.wait(max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            raise WorkerFailed(
                f"The game {game.name} was not started within {_START_TIMEOUT_S:g} s.", "Is this machine overloaded?"
            )
        if game._failure is not None or not game.pid:
            why = game._failure or "its guard was killed"
            raise WorkerFailed(
                f"The game {game.name} cannot be started: {why}.", f"Its command is {list(command)!r}, its log {log}."
            )
        return game

    def close(self, grace_s: float = GRACE_S) -> None:
        """Stop all commands at the same time and wait until their processes have ended."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            games = list(self._running.values())
        for game in games:
            game.ask_to_stop(grace_s)
        deadline = time.monotonic() + grace_s + _KILL_TIMEOUT_S
        for game in games:
            game.wait(max(0.0, deadline - time.monotonic()))
        spawner = self._spawner
        if not spawner.is_ready.is_set():
            spawner.process.terminate()  # it has started nothing and does not read its socket yet
        self._disconnect(spawner)  # it then ends what is left, and itself
        spawner.end()
        self._over = True
        self._wake.send(b".")
        self._thread.join(_KILL_TIMEOUT_S)
        for game in self.running:  # its guard is blocked by disk I/O and cannot be killed before that returns
            game._set_exit(GameExit(None, killed=True))
        for end in (self._selector, self._wake, self._woken):
            end.close()

    # -- thread limits

    def expected_threads(self, kind: str) -> int:
        """Highest thread count seen of a command of this kind; 1 if there was none."""
        return max([self._peaks.get(kind, 1), *(game.threads for game in self.running if game.kind == kind)])

    def _require_room(self, kind: str, threads: int | None) -> None:
        """Raise WorkerFailed before a thread limit is reached: a game that cannot start a thread fails with an obscure error."""
        with self._lock:
            if threads is not None:
                self._peaks[kind] = max(threads, self._peaks.get(kind, 1))
        limits = thread_limits()
        each = self.expected_threads(kind) + _GUARD_THREADS
        try:
            require_room(1, each, limits, self._pending_threads())
        except WorkerFailed:
            for game in self.running:  # some may have started the expected threads by now
                game.count_threads()
            require_room(1, each, thread_limits(), self._pending_threads())

    def _pending_threads(self) -> int:
        """Threads that running commands are still expected to start, by their kind."""
        running = self.running
        most = {kind: self.expected_threads(kind) for kind in {game.kind for game in running}}
        return sum(most[game.kind] - game.threads for game in running)

    # -- channels to guards

    def _send_to_spawner(self, game: GameProcess, ours: socket.socket, theirs: socket.socket) -> None:
        with self._lock:
            if self._closed:
                ours.close()
                raise WorkerFailed(f"The game {game.name} cannot be started: its Games is closed.")
            self._restart_dead_spawner()
            self._running[ours.fileno()] = game
            self._selector.register(ours, selectors.EVENT_READ, functools.partial(self._on_guard_message, game))
            self._wake.send(b".")
            try:
                socket.send_fds(self._spawner.control, [b"."], [theirs.fileno()])
            except OSError as error:
                self._forget(game)
                hint = (
                    "Its spawner does not respond." if isinstance(error, TimeoutError) else "Its spawner was killed; try again."
                )
                raise WorkerFailed(f"The game {game.name} cannot be started: {error}.", hint) from error

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select():
                key.data()

    def _on_guard_message(self, game: GameProcess) -> None:
        if not game._read_messages():
            with self._lock:
                self._forget(game)

    def _forget(self, game: GameProcess) -> None:
        self._peaks[game.kind] = max(self._peaks.get(game.kind, 1), game.threads)
        if self._running.pop(game._channel.fileno(), None) is not None:
            self._selector.unregister(game._channel)
            game._channel.close()

    # -- the spawner

    def _start_spawner(self) -> _Spawner:
        warm = self._warm if self._warm_failure is None else ""
        spawner = _Spawner(warm, self._environment)
        if warm:
            self._selector.register(spawner.control, selectors.EVENT_READ, functools.partial(self._on_spawner_message, spawner))
            self._wake.send(b".")
        return spawner

    def _on_spawner_message(self, spawner: _Spawner) -> None:
        if spawner.read_messages():
            return
        with self._lock:
            self._warm_failure = self._warm_failure or spawner.failure or None
            self._warm_deaths = 0 if spawner.has_reported else self._warm_deaths
            with contextlib.suppress(KeyError, ValueError):  # disconnected before
                self._selector.unregister(spawner.control)
        spawner.is_ready.set()

    def _restart_dead_spawner(self) -> None:
        """Start a new spawner if the current one has ended (its commands ended with it)."""
        code = self._spawner.process.poll()
        if code is None:
            return
        if not self._spawner.has_reported:
            self._warm_deaths += 1
            if self._warm_deaths >= _WARM_TRIES:
                self._warm_failure = f"its process {GameExit(code)} when it was imported, {_WARM_TRIES} times in a row"
        self._disconnect(self._spawner)
        self._spawner = self._start_spawner()

    def _disconnect(self, spawner: _Spawner) -> None:
        with contextlib.suppress(KeyError, ValueError):  # unregistered before
            self._selector.unregister(spawner.control)
        spawner.control.close()
        spawner.is_ready.set()

    def _wait_until_ready(self, timeout_s: float) -> None:
        """Wait until a spawner, warm or not, accepts requests. Raises WorkerFailed after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._closed:
                    return
                self._restart_dead_spawner()
                spawner = self._spawner
            if spawner.is_ready.wait(max(0.0, deadline - time.monotonic())):
                if spawner.process.poll() is None:
                    return
            elif time.monotonic() < spawner.began + WARM_S:
                raise WorkerFailed(f"The module {self._warm} was not imported within {timeout_s:g} s.", "Allow more time.")
            else:
                with self._lock:
                    self._warm_failure = f"it was not imported within {WARM_S:g} s"
                spawner.process.kill()
                spawner.end()
