"""Routing between the workers of one gateway: connections are handed over as sockets, single requests forwarded as messages.

Both use unix sockets in a private directory of the run. When a worker dies, requests forwarded to it are answered at once with
`session_lost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgpack

from ludus.errors import Refused
from ludus.gateway.sessions import refuse, session_lost
from ludus.protocol.spec import DEFAULT_OPTIONS, END, START, TICK, StartOptions

if TYPE_CHECKING:
    from ludus.gateway.http_connection import HttpConnection, HttpExchange
    from ludus.gateway.server import Gateway

log = logging.getLogger(__name__)

_MAX_HANDOVER = 64 << 10  # bytes sent along with a socket; more would not fit into one datagram
_MAX_BACKLOG = 64 << 20  # bytes that may wait for one worker
_COUNT = "count"  # requests the number of open sessions
_KINDS = (START, TICK, END, _COUNT)
_COUNT_S = 1.0
_SIZE = struct.Struct("!I")


class WorkerRouter:
    """One worker's links to the others."""

    def __init__(self, gateway: Gateway, slot: int, paths: Sequence[str]) -> None:
        self._gateway, self._slot, self._paths = gateway, slot, list(paths)
        self._links: dict[int, _OutgoingLink] = {}
        self._incoming: set[_IncomingLink] = set()
        self._inbox: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._adopting: set[asyncio.Task[None]] = set()
        self.handed_over = self.forwarded = 0

    async def start(self) -> None:
        own = self._paths[self._slot]
        for path in (own + ".h", own + ".f"):
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()  # left by the previous worker of this slot
        self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._inbox.setblocking(False)
        self._inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self._inbox.bind(own + ".h")
        self._gateway.loop.add_reader(self._inbox.fileno(), self._receive)
        self._server = await self._gateway.loop.create_unix_server(
            lambda: _IncomingLink(self._gateway, self._incoming), own + ".f"
        )

    def close(self) -> None:
        if self._inbox is not None:
            self._gateway.loop.remove_reader(self._inbox.fileno())
            self._inbox.close()
        if self._server is not None:
            self._server.close()
        for link in self._links.values():
            link.close()
        for incoming in self._incoming:
            incoming.close()

    # -- whole connections

    def hand_over(self, connection: HttpConnection, slot: int, data: bytes) -> bool:
        transport = connection.transport
        if transport is None or len(data) > _MAX_HANDOVER:
            return False
        client = transport.get_extra_info("socket")
        transport.pause_reading()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.setblocking(False)
                out.connect(self._paths[slot] + ".h")
                socket.send_fds(out, [data], [client.fileno()])
        except OSError:  # the worker is dead or its inbox is full: requests are forwarded instead
            transport.resume_reading()
            return False
        self.handed_over += 1
        connection.detach()
        return True

    def _receive(self) -> None:
        assert self._inbox is not None
        for _ in range(64):
            try:
                data, fds, _, _ = socket.recv_fds(self._inbox, _MAX_HANDOVER, 1, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
            except BlockingIOError:
                return
            except OSError:
                log.exception("receiving a connection from another worker failed")
                return
            for fd in fds:
                accepted = socket.socket(fileno=fd)
                accepted.setblocking(False)
                task = self._gateway.loop.create_task(self._gateway.adopt(accepted, data))
                self._adopting.add(task)
                task.add_done_callback(self._adopting.discard)

    # -- single requests

    def forward(
        self, owner: int, kind: str, session: bytes, seq: int, options: StartOptions, body: bytes, exchange: HttpExchange
    ) -> None:
        link = self._links.get(owner)
        if link is None or link.lost:
            link = self._links[owner] = _OutgoingLink(self._gateway.loop, self._paths[owner] + ".f")
        self.forwarded += 1
        link.send(kind, session, seq, options, body, exchange)

    async def has_open_sessions(self) -> bool:
        """Whether a worker that got forwarded requests has open sessions, or does not reply in time."""
        counts = []
        for link in self._links.values():
            if not link.lost:
                counts.append(_SessionCount(self._gateway.loop))
                link.send(_COUNT, b"", -1, DEFAULT_OPTIONS, b"", counts[-1])
        if counts:
            await asyncio.wait([count.result for count in counts], timeout=_COUNT_S)
        return any(not count.result.done() or count.result.result() for count in counts)


class _FrameProtocol(asyncio.Protocol):
    """Frames of a 4-byte length and a msgpack array."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= 4:
            (size,) = _SIZE.unpack_from(buffer, at)
            if len(buffer) - at - 4 < size:
                break
            self.handle_frame(msgpack.unpackb(bytes(buffer[at + 4 : at + 4 + size])))
            at += 4 + size
        if at:
            del buffer[:at]

    def handle_frame(self, message: list[Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


def _encode_frame(message: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(message)
    return _SIZE.pack(len(packed)) + packed


class _OutgoingLink(_FrameProtocol):
    """Connection to the worker that owns the forwarded requests."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: str) -> None:
        super().__init__()
        self.lost = False
        self._waiting: dict[int, tuple[str, HttpExchange | _SessionCount]] = {}
        self._number = 0
        self._early = bytearray()
        self._connecting = loop.create_task(self._connect(loop, path))

    async def _connect(self, loop: asyncio.AbstractEventLoop, path: str) -> None:
        try:
            await loop.create_unix_connection(lambda: self, path)
        except OSError:
            self.connection_lost(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        early, self._early = self._early, bytearray()
        self.transport.write(early)  # type: ignore[union-attr]

    def send(
        self, kind: str, session: bytes, seq: int, options: StartOptions, body: bytes, exchange: HttpExchange | _SessionCount
    ) -> None:
        transport = self.transport
        backlog = len(self._early) if transport is None else transport.get_write_buffer_size()
        if backlog > _MAX_BACKLOG:
            refuse(exchange, Refused(503, "worker_busy", "The worker of this session is overloaded.", "Try again.", 1))
            return
        self._number += 1
        self._waiting[self._number] = (kind, exchange)
        encoded = _encode_frame([self._number, _KINDS.index(kind), session, seq, options, body])
        if transport is None:
            self._early += encoded
        else:
            transport.write(encoded)

    def handle_frame(self, message: list[Any]) -> None:
        number, *reply = message
        if number in self._waiting:
            self._waiting.pop(number)[1].reply(*reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost, self.transport = True, None
        waiting, self._waiting = self._waiting, {}
        for kind, exchange in waiting.values():
            retry = Refused(503, "worker_away", "The worker for this session is being replaced.", "Try again.", 1)
            refuse(exchange, retry if kind is START else session_lost())

    def close(self) -> None:
        self._connecting.cancel()
        super().close()


class _IncomingLink(_FrameProtocol):
    """Connection from a worker that forwards requests to this one."""

    def __init__(self, gateway: Gateway, registry: set[_IncomingLink]) -> None:
        super().__init__()
        self._gateway, self._all = gateway, registry
        self.port = gateway.direct_port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._all.discard(self)

    def handle_frame(self, message: list[Any]) -> None:
        number, kind, session, seq, options, body = message
        exchange = _ForwardedReply(self, number)
        if _KINDS[kind] is _COUNT:
            exchange.reply(200, b"%d" % len(self._gateway.sessions))
        else:
            self._gateway.sessions.handle(_KINDS[kind], session, seq, StartOptions(*options), body, exchange)


class _SessionCount:
    """The number of open sessions of another worker; 0 when it is gone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.result: asyncio.Future[int] = loop.create_future()

    def reply(self, status: int, body: bytes, retry_after_s: float | None = None, port: int = 0) -> None:
        if not self.result.done():
            self.result.set_result(int(body) if status == 200 else 0)


@dataclass(slots=True)
class _ForwardedReply:
    incoming: _IncomingLink
    number: int

    def reply(self, status: int, body: bytes, retry_after_s: float | None = None) -> None:
        if self.incoming.transport is not None:
            message = [self.number, status, body, retry_after_s, self.incoming.port]
            self.incoming.transport.write(_encode_frame(message))
