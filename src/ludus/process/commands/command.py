"""Games as processes that behave: started, watched and ended, with a bounded log, and none of them outlives us.

    with Games() as games:
        game = games.start(["./mygame", "--headless"], log=Path("logs/game-1.log"))
        ended = game.wait(timeout_s=600) or game.stop(grace_s=5)
        print(ended)  # "ended with code 0"; ended.last_lines

Games that are written in Python, and import much, start in milliseconds and share what they import as forks of one process:

    with Games(warm="mygame.main") as games:
        game = games.start(["mygame", "--headless"], warm=True, log=Path("logs/game-1.log"))

What the module must be like is in `warm.py`. The processes between us and the games, and why there are any, are in `keeper.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import signal
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
from ludus.process import identity
from ludus.process.commands.command_guard import keeper_command
from ludus.process.commands.prefork import ONE_THREAD
from ludus.process.commands.thread_limits import require_room, thread_limits

log = logging.getLogger(__name__)

GRACE_S = 5.0
WARM_S = 600.0
"""So long may a module take that is imported by a warm keeper. The Arena takes 0.7 s, but half a minute of CPU time on a machine where
it was never compiled, which was more than two minutes beside ten others that computed."""

_WARM_TRIES = 3
_START_S = 10.0
_GONE_S = 15.0
"""After a kill: longer than a guard tries, so that it can say what it could not kill."""

_CHUNK = 65_536
_GUARD_THREADS = 1


@dataclass(frozen=True)
class GameExit:
    """How a game ended, and that nothing of it is left.

    `code` is that of its process, negative for a signal; None when not even its guard lived to see it.
    `killed`: it did not end by itself in the time that it was given. `left`: processes that could not be killed.
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
        if self.code >= 0:
            return f"ended with code {self.code}"
        with contextlib.suppress(ValueError):
            return f"ended by signal {signal.Signals(-self.code).name}"
        return f"ended by signal {-self.code}"


class GameProcess:
    """One game, with all that it has started. Made by `Games.start`; may be used from any thread."""

    def __init__(
        self, name: str, kind: str, log_path: Path, line: socket.socket, on_exit: Callable[[GameProcess], object] | None
    ):
        self.name, self.kind, self.log_path = name, kind, log_path
        self.pid = self.guard = 0
        self.began = time.monotonic()
        self.threads = 1
        """As last counted, those of the processes that it started included; counted often at first, then every half minute."""
        self._line, self._reader, self._on_exit = line, LineReader(line), on_exit
        self._failure: str | None = None
        self._exit: GameExit | None = None
        self._begun, self._ended = threading.Event(), threading.Event()

    @property
    def exit(self) -> GameExit | None:
        """None while it runs."""
        return self._exit

    def wait(self, timeout_s: float) -> GameExit | None:
        """None when it still runs then."""
        self._ended.wait(timeout_s)
        return self._exit

    def ask_to_stop(self, grace_s: float = GRACE_S) -> None:
        """SIGTERM to its group; whatever is left of it after `grace_s` is killed. Does not wait; a shorter grace replaces a longer."""
        self._say(stop=max(0.0, grace_s))

    def stop(self, grace_s: float = GRACE_S) -> GameExit:
        """As `ask_to_stop`, and wait until nothing of it is left."""
        self.ask_to_stop(grace_s)
        ended = self.wait(grace_s + _GONE_S)
        if ended is None:
            raise WorkerFailed(f"The game {self.name} (process {self.pid}) could not be stopped.", "Its guard does not answer.")
        return ended

    def count_threads(self) -> int:
        """Now, instead of when it was last looked at."""
        if self._exit is None and self.guard:
            self.threads = max(1, identity.threads_below(self.guard))
        return self.threads

    def last_lines(self, count: int = 20) -> list[str]:
        """Of its log, as it is written by now: with counts in place of lines that were repeated."""
        return list(self._exit.last_lines[-count:]) if self._exit else rotating_log.tail(self.log_path, count)

    # -- by Games

    def _say(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._line.sendall(json_lines.encode(message))

    def _hear(self) -> bool:
        """Read what its guard says. False: that was the last."""
        for line in self._reader.read():
            self._told(json_lines.decode(line))
        if self._reader.at_end:
            self._end(GameExit(None, seconds=time.monotonic() - self.began))
        return not self._reader.at_end

    def _told(self, message: dict[str, Any]) -> None:
        if "started" in message:
            self.pid, self.guard = message["started"], message["guard"]
            self._begun.set()
        elif "threads" in message:
            self.threads = max(1, message["threads"])
        elif "failed" in message:
            self._failure = f"{message['failed']}{': ' if message['file'] else ''}{message['file']}"
            self._begun.set()
        elif "exited" in message:
            seconds, lines = time.monotonic() - self.began, tuple(message["lines"])
            self._end(GameExit(message["exited"], message["killed"], lines, tuple(message["left"]), message["lost"], seconds))

    def _end(self, how: GameExit) -> None:
        if self._ended.is_set():
            return
        self._exit = how
        self._begun.set()
        self._ended.set()
        if self._on_exit is not None and self.pid:
            try:
                self._on_exit(self)
            except Exception:  # the caller's own; the other games go on
                log.exception("what was to be done at the end of the game %s failed", self.name)


class _Keeper:
    """The process that starts games here, and our line to it."""

    def __init__(self, warm: str, environment: Mapping[str, str] | None) -> None:
        self.began = time.monotonic()
        self.control, theirs = socket.socketpair()
        self.control.settimeout(_START_S)
        with contextlib.closing(theirs):
            self.process = subprocess.Popen(  # noqa: S603 - this interpreter, with a program of ours
                keeper_command(theirs.fileno(), os.getpid(), warm),
                env={**(os.environ if environment is None else environment), **ONE_THREAD} if warm else None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C at a terminal is not for it
            )
        self.is_ready = threading.Event()
        """It takes orders, or is gone."""
        if not warm:
            self.is_ready.set()
        self.has_spoken = not warm
        """It has said whether it is warm, and why not: its failure."""
        self.failure = ""
        self._reader = LineReader(self.control)

    def hear(self) -> bool:
        """Read what it says. False: that was the last."""
        for line in self._reader.read():
            self.failure = json_lines.decode(line)["failed"]
            self.has_spoken = True
            return False
        if self._reader.at_end:
            self.end()
        return not self._reader.at_end

    def end(self) -> None:
        """Its exit code is known then."""
        try:
            self.process.wait(_GONE_S)
        except subprocess.TimeoutExpired:
            log.warning("the keeper of games (process %d) did not end and is killed", self.process.pid)
            self.process.kill()
            self.process.wait(_GONE_S)


class Games:
    """Starts games and looks after them; when it is closed, or this process is gone, however that happened, so are they.

    It costs one thread here, one small process for all games (`keeper.py`), and for each game a small process and a descriptor.
    Do not use it in a fork of the process that made it.

    `warm`: a module of which games can be started as forks (`warm.py`); it is imported in the background, in an `environment`
    (this process's if None) that only the process which imports it has. If that fails, commands can still be started.
    """

    def __init__(self, warm: str = "", environment: Mapping[str, str] | None = None) -> None:
        self._warm, self._environment = warm, environment
        self._warm_failure: str | None = None
        self._warm_deaths = 0
        self._lock, self._admission = threading.Lock(), threading.Lock()
        self._running: dict[int, GameProcess] = {}  # by the descriptor of its line
        self._peaks: dict[str, int] = {}
        self._closed = self._over = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, functools.partial(self._woken.recv, _CHUNK))
        self._keeper = self._start_keeper()
        self._thread = threading.Thread(target=self._listen, name="ludus-games", daemon=True)
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
    def keeper_pid(self) -> int:
        return self._keeper.process.pid

    @property
    def warm_failure(self) -> str | None:
        """Why no game can be a fork of the module; None: it can, or that is not known yet."""
        return self._warm_failure

    def wait_until_warm(self, timeout_s: float = WARM_S) -> None:
        """Raises WorkerFailed if the module cannot be kept warm, or is not yet."""
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
        """Blocks until the program runs, some milliseconds; raises WorkerFailed if it cannot be started, or if there is no room for it.

        `command` is run as it is, without a shell; a relative program is looked up in the PATH of `environment` (this process's
        if None). `kind`: games of one kind have about as many threads (the name of the program, if not given); `threads`: how
        many, if that is known in advance. `on_exit` is called once, in the thread that all games share: it must be quick.

        `warm`: a fork of the module that is kept warm, whose `main` is called with `command[1:]`; the first of it is no more than a
        name. The first such game waits until the module is imported.
        """
        kind = kind or Path(command[0]).name
        environment = dict(os.environ if environment is None else environment)
        log = log.absolute()
        if warm:
            self.wait_until_warm()
        elif self._warm:
            self._wait_until_ready(WARM_S)
        with self._admission:  # each is counted before there is room for the next
            self._require_room(kind, threads)
            log.parent.mkdir(parents=True, exist_ok=True)
            deadline = time.monotonic() + _START_S
            ours, theirs = socket.socketpair()
            # An environment may be larger than what a socket holds, and a keeper that is stopped reads nothing.
            ours.settimeout(_START_S)
            game = GameProcess(name or log.stem, kind, log, ours, on_exit)
            with contextlib.closing(theirs):
                self._hand_over(game, ours, theirs)
        game._say(
            command=[os.fspath(word) for word in command],
            environment=environment,
            directory=str(directory.absolute()) if directory else None,
            log=str(log),
            log_bytes=log_bytes,
            name=game.name,
            warm=warm,
        )
        if not game._begun.wait(max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            raise WorkerFailed(f"The game {game.name} was not started within {_START_S:g} s.", "Is this machine overloaded?")
        if game._failure is not None or not game.pid:
            why = game._failure or "its guard was killed"
            raise WorkerFailed(
                f"The game {game.name} cannot be started: {why}.", f"Its command is {list(command)!r}, its log {log}."
            )
        return game

    def close(self, grace_s: float = GRACE_S) -> None:
        """Stop all games, all at once, and wait until nothing of them is left."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            games = list(self._running.values())
        for game in games:
            game.ask_to_stop(grace_s)
        deadline = time.monotonic() + grace_s + _GONE_S
        for game in games:
            game.wait(max(0.0, deadline - time.monotonic()))
        keeper = self._keeper
        if not keeper.is_ready.is_set():
            keeper.process.terminate()  # it has started nothing, and does not listen yet
        self._hang_up(keeper)  # from here on it ends whatever is left, and itself
        keeper.end()
        self._over = True
        self._wake.send(b".")
        self._thread.join(_GONE_S)
        for game in self.running:  # its guard waits for a disk, and cannot be killed before that answers
            game._end(GameExit(None, killed=True))
        for end in (self._selector, self._wake, self._woken):
            end.close()

    # -- room

    def expected_threads(self, kind: str) -> int:
        """The most that a game of this kind was seen to have; 1 of one that was never seen."""
        return max([self._peaks.get(kind, 1), *(game.threads for game in self.running if game.kind == kind)])

    def _require_room(self, kind: str, threads: int | None) -> None:
        """Before a limit is reached: a game that cannot start one of its threads fails in ways that nobody can read."""
        with self._lock:
            if threads is not None:
                self._peaks[kind] = max(threads, self._peaks.get(kind, 1))
        limits = thread_limits()
        each = self.expected_threads(kind) + _GUARD_THREADS
        try:
            require_room(1, each, limits, self._promised())
        except WorkerFailed:
            for game in self.running:  # some may have started by now what they were still expected to
                game.count_threads()
            require_room(1, each, thread_limits(), self._promised())

    def _promised(self) -> int:
        """Threads that games are still going to start, as far as games of their kind are known."""
        running = self.running
        most = {kind: self.expected_threads(kind) for kind in {game.kind for game in running}}
        return sum(most[game.kind] - game.threads for game in running)

    # -- lines

    def _hand_over(self, game: GameProcess, ours: socket.socket, theirs: socket.socket) -> None:
        with self._lock:
            if self._closed:
                ours.close()
                raise WorkerFailed(f"The game {game.name} cannot be started: Games is closed.")
            self._revive()
            self._running[ours.fileno()] = game
            self._selector.register(ours, selectors.EVENT_READ, functools.partial(self._hear_game, game))
            self._wake.send(b".")
            try:
                socket.send_fds(self._keeper.control, [b"."], [theirs.fileno()])
            except OSError as error:
                self._forget(game)
                hint = "Its keeper does not answer." if isinstance(error, TimeoutError) else "Its keeper was killed; try again."
                raise WorkerFailed(f"The game {game.name} cannot be started: {error}.", hint) from error

    def _listen(self) -> None:
        while not self._over:
            for key, _ in self._selector.select():
                key.data()

    def _hear_game(self, game: GameProcess) -> None:
        if not game._hear():
            with self._lock:
                self._forget(game)

    def _forget(self, game: GameProcess) -> None:
        self._peaks[game.kind] = max(self._peaks.get(game.kind, 1), game.threads)
        if self._running.pop(game._line.fileno(), None) is not None:
            self._selector.unregister(game._line)
            game._line.close()

    # -- the keeper

    def _start_keeper(self) -> _Keeper:
        warm = self._warm if self._warm_failure is None else ""
        keeper = _Keeper(warm, self._environment)
        if warm:
            self._selector.register(keeper.control, selectors.EVENT_READ, functools.partial(self._hear_keeper, keeper))
            self._wake.send(b".")
        return keeper

    def _hear_keeper(self, keeper: _Keeper) -> None:
        if keeper.hear():
            return
        with self._lock:
            self._warm_failure = self._warm_failure or keeper.failure or None
            self._warm_deaths = 0 if keeper.has_spoken else self._warm_deaths
            with contextlib.suppress(KeyError, ValueError):  # it was hung up
                self._selector.unregister(keeper.control)
        keeper.is_ready.set()

    def _revive(self) -> None:
        """A keeper that was killed took its games along; the next ones have another."""
        code = self._keeper.process.poll()
        if code is None:
            return
        if not self._keeper.has_spoken:
            self._warm_deaths += 1
            if self._warm_deaths >= _WARM_TRIES:
                self._warm_failure = f"its process {GameExit(code)} when it was imported, {_WARM_TRIES} times in a row"
        self._hang_up(self._keeper)
        self._keeper = self._start_keeper()

    def _hang_up(self, keeper: _Keeper) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it was not listened to any more
            self._selector.unregister(keeper.control)
        keeper.control.close()
        keeper.is_ready.set()

    def _wait_until_ready(self, timeout_s: float) -> None:
        """Until a keeper takes orders, be it warm or not; raises WorkerFailed if none does within this time."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._closed:
                    return
                self._revive()
                keeper = self._keeper
            if keeper.is_ready.wait(max(0.0, deadline - time.monotonic())):
                if keeper.process.poll() is None:
                    return
            elif time.monotonic() < keeper.began + WARM_S:
                raise WorkerFailed(f"The module {self._warm} was not imported within {timeout_s:g} s.", "Give it more time.")
            else:
                with self._lock:
                    self._warm_failure = f"it was not imported within {WARM_S:g} s"
                keeper.process.kill()
                keeper.end()
