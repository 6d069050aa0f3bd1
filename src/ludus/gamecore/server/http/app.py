"""The gamecore server: starts, watches and stops games over HTTP.

    serve(Settings(port=23432, games=Path("games.yaml")))           # until SIGTERM
    with running(Settings(port=0, state_dir=tmp)) as server: …      # in a thread; server.url

Endpoints are in `routes.py` and `routes_v2.py`, access control in `middleware.py`, the games in `process_table.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludus.errors import UsageError, WorkerFailed
from ludus.gamecore.server import catalogue
from ludus.gamecore.server.settings import ServerLimits, Settings
from ludus.gamecore.server.state_dir import StateDir, default_directory
from ludus.gateway.auth import RateLimit
from ludus.io.addresses import make_listening_socket
from ludus.io.rotating_log import LogWriter

if TYPE_CHECKING:
    from ludus.gamecore.server.http.middleware import ConnectionRegistry

__all__ = ["RunningServer", "ServerLimits", "Settings", "running", "serve"]

log = logging.getLogger(__name__)

STOP_S = 5.0
_START_S, _END_S = 60.0, 60.0
_BACKLOG = 1024
_WARNINGS_PER_S = 2.0
Announce = Callable[[str, int], object]


def serve(
    settings: Settings, *, supervise: bool = False, announce: Announce | None = None, listening: socket.socket | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then stop all games. Raises UsageError, ConfigError or MissingExtra before it listens.

    `supervise`: run the server in a child process that is restarted when it dies; `listening`: an already bound socket.
    """
    settings.check()
    bound = listen(settings.host, settings.port) if listening is None else listening
    with contextlib.closing(bound):
        if supervise:
            from ludus.gamecore.server.watchdog import supervise_server

            supervise_server(settings, bound, announce)
            return
        with _open_state_dir(settings, bound) as state_dir:
            asyncio.run(_run(settings, bound, state_dir, announce))


class RunningServer:
    """A server in a background thread of this process."""

    def __init__(self, settings: Settings) -> None:
        settings.check()
        self._bound = listen(settings.host, settings.port)
        self.host, self.port = self._bound.getsockname()[:2]
        self._settings = settings
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="gamecore-server")

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def start(self) -> None:
        self._thread.start()
        if not self._ready.wait(_START_S):
            raise WorkerFailed(f"The gamecore server at {self.url} did not start within {_START_S:g} s.")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise WorkerFailed(f"The gamecore server at {self.url} did not stop within {_END_S:g} s.")
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        try:
            with contextlib.closing(self._bound), _open_state_dir(self._settings, self._bound) as state_dir:
                asyncio.run(self._run(state_dir))
        except BaseException as error:  # a thread has no caller: raised again by `start` or `close`
            self._error = error
        finally:
            self._ready.set()

    async def _run(self, state_dir: StateDir) -> None:
        self._loop = asyncio.get_running_loop()
        await _run(self._settings, self._bound, state_dir, lambda host, port: self._ready.set(), self._stop)


@contextlib.contextmanager
def running(settings: Settings) -> Iterator[RunningServer]:
    server = RunningServer(settings)
    server.start()
    try:
        yield server
    finally:
        server.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; on `::` it accepts both families. Raises UsageError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound, own = make_listening_socket(host, family)
    except OSError as error:
        raise UsageError(f"{host} is not an address of this machine: {error.strerror}.", "Use 127.0.0.1.") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address if own == host else (own, port))
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        hint = "Choose another port, or stop the process that uses it."
        raise UsageError(f"Cannot listen on {host}:{port}: {error.strerror}.", hint) from error
    return bound


@contextlib.contextmanager
def _open_state_dir(settings: Settings, bound: socket.socket) -> Iterator[StateDir]:
    """Open and lock the state directory, and log to a file in it."""
    directory = default_directory(bound.getsockname()[1]) if settings.state_dir is None else settings.state_dir.expanduser()
    with StateDir(directory) as state_dir, _log_to_file(state_dir.log):
        yield state_dir


async def _run(
    settings: Settings, bound: socket.socket, state_dir: StateDir, announce: Announce | None, stop: asyncio.Event | None = None
) -> None:
    from ludus.gamecore.server.http.middleware import AccessMiddleware, ConnectionRegistry
    from ludus.gamecore.server.http.routes import build_app
    from ludus.gamecore.server.process_table import ProcessTable, TableLimits

    games = catalogue.read(settings.games)
    host, port = bound.getsockname()[:2]
    ended = asyncio.Event() if stop is None else stop
    async with ProcessTable(games, state_dir, TableLimits(settings.max_games, settings.keep)) as table:
        replies: Counter[int] = Counter()
        limits = settings.affordable_limits()
        clients = ConnectionRegistry(limits, tokens=settings.token_file is not None)
        app = AccessMiddleware(build_app(table, limits, replies), settings.token_file, limits, replies, clients)
        server, started = _server(app, limits, clients)
        with _signals(ended, server):
            serving = asyncio.create_task(server.serve([bound]))
            await _wait_or_fail(started.wait(), serving)
            log.info("serving %s at %s:%d, process state in %s", ", ".join(games.games), host, port, state_dir.directory)
            if announce is not None:
                announce(host, port)
            await _wait_or_fail(ended.wait(), serving)
            log.info("stopping %d games", len(table.running))
            await table.close(STOP_S)
            server.should_exit = True
            await serving
    log.info("stopped")


def _server(app: Any, limits: ServerLimits, clients: ConnectionRegistry) -> tuple[Any, asyncio.Event]:
    import uvicorn

    from ludus.gamecore.server.http.middleware import protocol_class

    started = asyncio.Event()

    class Server(uvicorn.Server):
        """Leaves signals to the caller, and sets `started` when it listens."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            started.set()

    config = uvicorn.Config(
        app,
        http=protocol_class(limits, clients),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, int(limits.idle_s)),
        timeout_graceful_shutdown=int(STOP_S),
        h11_max_incomplete_event_size=limits.head_bytes,
    )
    return Server(config), started


async def _wait_or_fail(awaited: Any, serving: asyncio.Task[None]) -> None:
    """Wait for `awaited` or the end of the server, whose exception is raised."""
    waiting = asyncio.ensure_future(awaited)
    try:
        await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if serving.done():
        serving.result()


@contextlib.contextmanager
def _signals(ended: asyncio.Event, server: Any) -> Iterator[None]:
    """The first signal stops the games; a second one closes connections at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        server.force_exit = ended.is_set()
        ended.set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class _LogFile(logging.Handler):
    """Writes to a rotating log file."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._log = LogWriter(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._log.line(self.format(record))

    def close(self) -> None:
        self._log.close()
        super().close()


@contextlib.contextmanager
def _log_to_file(path: Path) -> Iterator[None]:
    try:
        handler = _LogFile(path)
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror}.", "Choose another --state-dir.") from error
    loggers = [logging.getLogger(name) for name in ("ludus.gamecore.server", "ludus.process.commands", "uvicorn.error")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()) if logger.name != "uvicorn.error" else logging.WARNING)
    rate_limit = RateLimit(_WARNINGS_PER_S)

    def limit_warnings(record: logging.LogRecord) -> bool:  # invalid requests must not fill the log
        return record.levelno > logging.WARNING or rate_limit.allow(time.monotonic())

    loggers[-1].addFilter(limit_warnings)
    try:
        yield
    finally:
        loggers[-1].removeFilter(limit_warnings)
        for logger, level in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
        handler.close()
