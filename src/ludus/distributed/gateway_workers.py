"""Gateway workers: N processes that share a port, each with a direct port of its own, replaced when they die."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludus.errors import UsageError, WorkerFailed
from ludus.gateway.server import Gateway, GatewayExtension, GatewaySettings
from ludus.process.temp_dirs import Scratch
from ludus.process.workers.supervisor import ALWAYS, Context, Process, Supervisor

log = logging.getLogger(__name__)

_BEAT_S = 0.2
_STARTS = 3  # that may fail before we believe that it will not start
_REPORT_S = 1.0
_GRACE_S = 3.0
_STOP_S = 5.0
_DRAINED_S = 0.05


class GatewayFleet:
    """Binds the ports here, once, so that a replaced worker finds its clients waiting. Workers start at once."""

    def __init__(
        self,
        supervisor: Supervisor,
        make_actor: Callable[[], Any],
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        workers: int = 1,
        listening: socket.socket | None = None,
        settings: GatewaySettings | None = None,
        prepare: Callable[[], None] | None = None,
        report: Callable[[str, Mapping[str, Any]], None] | None = None,
        extension: GatewayExtension | None = None,
    ) -> None:
        settings = settings or GatewaySettings()
        check_exposure(host if listening is None else listening.getsockname()[0], settings.token or settings.token_file)
        self._grace_s = settings.drain_s + _STOP_S
        self._scratch = Scratch(_near(Path(tempfile.gettempdir())))
        self._sockets: list[socket.socket] = []
        self.workers: list[Process] = []
        try:
            if listening is not None:
                host, port = listening.getsockname()[:2]
                self._sockets.append(listening)
            shared = listening or self._bound(host, port)
            self.address: tuple[str, int] = (host, shared.getsockname()[1])
            paths = [f"{self._scratch.path}/{slot}" for slot in range(workers)]
            for slot in range(workers):
                direct = self._bound(host, 0)
                self.workers.append(
                    supervisor.start(
                        f"gateway-{self.address[1]}-{slot}",
                        _serve,
                        make_actor,
                        settings,
                        slot,
                        paths,
                        prepare,
                        report,
                        extension,
                        restart=ALWAYS,
                        fds=(shared.fileno(), direct.fileno()),
                        hang_s=settings.sessions.tick_s + _GRACE_S,
                    )
                )
        except BaseException:
            self.close()
            raise

    def _bound(self, host: str, port: int) -> socket.socket:
        bound = bind(host, port)
        self._sockets.append(bound)
        return bound

    @property
    def direct_addresses(self) -> list[tuple[str, int]]:
        """Where each worker alone can be reached, by slot."""
        return [bound.getsockname()[:2] for bound in self._sockets[1:]]

    def wait_ready(self, timeout_s: float) -> None:
        """Raises WorkerFailed with the worker's own error, as soon as one has failed to start a few times."""
        deadline = time.monotonic() + timeout_s
        for worker in self.workers:
            while True:
                try:
                    worker.wait_ready(min(0.2, max(0.0, deadline - time.monotonic())))
                    break
                except WorkerFailed:
                    if worker.error and worker.incarnation >= _STARTS:
                        raise WorkerFailed(f"{worker.name} does not start: {worker.error.strip()}") from None
                    if time.monotonic() >= deadline:
                        raise

    def close(self) -> None:
        """Sessions in play get the time that the settings give them. Returns when every worker is gone."""
        for bound in self._sockets:
            bound.close()
        for worker in self.workers:
            worker.ask_to_stop(self._grace_s)
        for worker in self.workers:
            worker.stop(self._grace_s)
        self._scratch.close()


def _near(temp: Path) -> Path:
    """The path of a unix socket may have about 100 bytes, of which ours takes half."""
    return temp if len(os.fsencode(temp)) <= 40 or not Path("/tmp").is_dir() else Path("/tmp")  # noqa: S108


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError when the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(1024)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"Cannot listen on {host}:{port}: {error.strerror}.", "Choose another port, or stop the process that uses it."
        ) from error
    return bound


def check_exposure(host: str, secret: str | Path | None) -> None:
    """Beyond this machine we listen only with a token."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost" and not secret:
        raise UsageError(
            f"Listening on {host} without a token would let anyone in.",
            "Give a token (--token-file FILE), or listen on 127.0.0.1.",
        )


def run_loop(main: Any) -> None:
    """Run a coroutine on the fastest event loop there is."""
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        import uvloop

        uvloop.run(main)


def _serve(
    context: Context,
    make_actor: Callable[[], Any],
    settings: GatewaySettings,
    slot: int,
    paths: Sequence[str],
    prepare: Callable[[], None] | None,
    report: Callable[[str, Mapping[str, Any]], None] | None,
    extension: GatewayExtension | None,
) -> None:
    """A worker's life: `prepare` once, then serve; `report` gets its counters every second."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the event loop computes; more threads would take turns with the other workers
    if prepare is not None:
        prepare()
    gc.freeze()  # what is loaded stays: collections need not look at it again
    run_loop(_worker(context, make_actor, settings, slot, paths, report, extension))


async def _worker(
    context: Context,
    make_actor: Callable[[], Any],
    settings: GatewaySettings,
    slot: int,
    paths: Sequence[str],
    report: Callable[[str, Mapping[str, Any]], None] | None,
    extension: GatewayExtension | None,
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def asked_to_stop() -> None:
        loop.call_soon_threadsafe(stop.set)

    context.on_stop(asked_to_stop)
    sockets = [socket.socket(fileno=os.dup(fd)) for fd in context.fds]
    lost_until = loop.time() + settings.sessions.silent_s if context.incarnation > 1 else -math.inf
    gateway = Gateway(
        make_actor,
        settings,
        slot=slot,
        peer_paths=paths,
        direct_port=sockets[1].getsockname()[1],
        lost_until=lost_until,
        extension=extension,
    )
    await gateway.start(sockets)
    context.ready()
    reported = loop.time()
    while not stop.is_set():
        if report is not None and loop.time() - reported >= _REPORT_S:
            reported = loop.time()
            report(context.name, gateway.counters())
        if not gateway.sessions.threads_exhausted:
            context.beat()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _BEAT_S)
    gateway.drain()
    drained_by = loop.time() + settings.drain_s
    while loop.time() < drained_by and await gateway.has_open_sessions():
        context.beat()
        await asyncio.sleep(_DRAINED_S)
    await gateway.close()
