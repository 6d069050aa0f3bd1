"""Test servers on an event loop in a background thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvloop

from ludus.cli.serving.conformance_server import ConformanceServer
from ludus.distributed.gateway_workers import bind
from ludus.gateway.server import Gateway, GatewaySettings
from ludus.protocol.conformance import CheckFinding, Conformance

T = TypeVar("T")
LIMIT_S = 20.0


@contextlib.contextmanager
def loop_thread() -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
    """Return a function that runs a coroutine on the loop and waits for it."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(LIMIT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT_S)
        loop.close()


@dataclass
class Served:
    gateway: Gateway
    port: int
    run: Callable[[Coroutine[Any, Any, Any]], Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def gateway(
    make_actor: Callable[[], Any], settings: GatewaySettings | None = None, *, port: int = 0, **more: Any
) -> Iterator[Served]:
    listening = bind("127.0.0.1", port)
    port = listening.getsockname()[1]

    async def start() -> Gateway:
        made = Gateway(make_actor, settings, **more)
        await made.start([listening])
        return made

    with loop_thread() as run:
        served = Served(run(start()), port, run)
        try:
            yield served
        finally:
            run(served.gateway.close())


@dataclass
class Checked:
    server: ConformanceServer
    port: int
    findings: list[CheckFinding] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tell(self, finding: CheckFinding) -> None:
        with self.changed:
            self.findings.append(finding)
            self.changed.notify_all()

    def hears(self, kind: str) -> str:
        """Wait for a finding of this kind, and return its text."""
        with self.changed:
            assert self.changed.wait_for(lambda: any(f.check.kind == kind for f in self.findings), LIMIT_S), self.findings
            return next(f.seen for f in self.findings if f.check.kind == kind)

    @property
    def kinds(self) -> set[str]:
        return {finding.check.kind for finding in self.findings}


@contextlib.contextmanager
def checking(conformance: Conformance | None = None, **settings: Any) -> Iterator[Checked]:
    listening = bind("127.0.0.1", 0)
    checked = Checked(None, listening.getsockname()[1])  # type: ignore[arg-type]
    checked.server = ConformanceServer(conformance or Conformance(), checked.tell, **settings)
    with loop_thread() as run:
        run(checked.server.start(listening))
        try:
            yield checked
        finally:
            run(checked.server.close())


def received(connected: socket.socket) -> bytes:
    """Read one reply by its Content-Length, or until the peer closes."""
    data = b""
    while True:
        head, mark, body = data.partition(b"\r\n\r\n")
        if mark:
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            if len(body) >= length:
                return data
        more = connected.recv(65536)
        if not more:
            return data
        data += more


def say(port: int, raw: bytes) -> bytes:
    """Send bytes on a new connection, and return the reply."""
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connected:
        connected.sendall(raw)
        return received(connected)


def step(kind: str, session: str, body: bytes = b"", *headers: str) -> bytes:
    """A request as a game sends it."""
    lines = ["POST /step HTTP/1.1", f"session: {session}", f"step_kind: {kind}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body
