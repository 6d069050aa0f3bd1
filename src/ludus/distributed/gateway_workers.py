"""Gateway worker processes that share a port; each also has its own direct port. Dead workers are replaced."""

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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.errors import UsageError, WorkerFailed
from ludus.gateway.server import Gateway, GatewayExtension, GatewaySettings
from ludus.io.addresses import make_listening_socket
from ludus.process.temp_dirs import TempDir, short_temp_dir
from ludus.process.workers.supervisor import ALWAYS, Context, Process, Supervisor

log = logging.getLogger(__name__)

_BEAT_S = 0.2
_STARTS = 3  # failed starts before wait_ready gives up
_REPORT_S = 1.0
_GRACE_S = 3.0
_STOP_S = 5.0
_DRAIN_POLL_S = 0.05


@dataclass(frozen=True)
class GatewayProgram:
    """What each gateway worker runs; sent to the worker processes."""

    make_actor: Callable[[], Any]
    settings: GatewaySettings = field(default_factory=GatewaySettings)
    prepare: Callable[[], object] | None = None
    """Called once in each worker, before it serves."""
    report: Callable[[str, Mapping[str, Any]], None] | None = None
    """Called every second with the name of the worker and its counters."""
    extension: GatewayExtension | None = None


class GatewayWorkers:
    """Binds the ports once in this process, so that clients of a dead worker wait for its replacement. Workers start immediately."""

    def __init__(
        self,
        supervisor: Supervisor,
        program: GatewayProgram,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        workers: int = 1,
        listening: socket.socket | None = None,
    ) -> None:
        settings = program.settings
        check_exposure(host if listening is None else listening.getsockname()[0], settings.token or settings.token_file)
        self._grace_s = settings.drain_s + _STOP_S
        self._scratch = TempDir(short_temp_dir())
        self._sockets: list[socket.socket] = []
        self.workers: list[Process] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if listening is not None:
                host, port = listening.getsockname()[:2]
                self._sockets.append(listening)
            shared = listening or self._bind(host, port)
            self.address: tuple[str, int] = (host, shared.getsockname()[1])
            paths = [f"{self._scratch.path}/{slot}" for slot in range(workers)]
            for slot in range(workers):
                direct = self._bind(host, 0)
                self.workers.append(
                    supervisor.start(
                        f"gateway-{self.address[1]}-{slot}",
                        _serve,
                        program,
                        slot,
                        paths,
                        restart=ALWAYS,
                        fds=(shared.fileno(), direct.fileno()),
                        hang_s=settings.sessions.tick_s + _GRACE_S,
                    )
                )
            undo.pop_all()

    def _bind(self, host: str, port: int) -> socket.socket:
        bound = bind(host, port)
        self._sockets.append(bound)
        return bound

    @property
    def direct_addresses(self) -> list[tuple[str, int]]:
        """Direct address of each worker, by slot."""
        return [bound.getsockname()[:2] for bound in self._sockets[1:]]

    def wait_ready(self, timeout_s: float) -> None:
        """Raises WorkerFailed with the worker's error as soon as one has failed to start _STARTS times."""
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
        """Stop the workers; open sessions get the drain time of the settings. Returns when every worker has ended."""
        for bound in self._sockets:
            bound.close()
        for worker in self.workers:
            worker.ask_to_stop(self._grace_s)
        for worker in self.workers:
            worker.stop(self._grace_s)
        self._scratch.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; on `::` it accepts both families. Raises UsageError when the address is in use or not local."""
    bound, own = make_listening_socket(host, socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((own, port))
        bound.listen(1024)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"Cannot listen on {host}:{port}: {error.strerror}.", "Choose another port, or stop the process that uses it."
        ) from error
    return bound


def check_exposure(host: str, secret: str | Path | None) -> None:
    """Raises UsageError for an address other than loopback without a token."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost" and not secret:
        raise UsageError(
            f"Listening on {host} without a token would accept anyone.",
            "Give a token (--token-file FILE), or listen on 127.0.0.1.",
        )


def run_loop(main: Any) -> None:
    """Run a coroutine with uvloop where available."""
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        import uvloop

        uvloop.run(main)


def _serve(context: Context, program: GatewayProgram, slot: int, paths: Sequence[str]) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the policy runs in the event loop; more threads would compete with other workers
    if program.prepare is not None:
        program.prepare()
    gc.freeze()  # collections need not visit what is loaded by now
    run_loop(_run_gateway(context, program, slot, paths))


async def _run_gateway(context: Context, program: GatewayProgram, slot: int, paths: Sequence[str]) -> None:
    settings, report = program.settings, program.report
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    context.on_stop(lambda: loop.call_soon_threadsafe(stop.set))
    sockets = [socket.socket(fileno=os.dup(fd)) for fd in context.fds]
    lost_until = loop.time() + settings.sessions.silent_s if context.incarnation > 1 else -math.inf
    gateway = Gateway(
        program.make_actor,
        settings,
        slot=slot,
        peer_paths=paths,
        direct_port=sockets[1].getsockname()[1],
        lost_until=lost_until,
        extension=program.extension,
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
        await asyncio.sleep(_DRAIN_POLL_S)
    await gateway.close()
