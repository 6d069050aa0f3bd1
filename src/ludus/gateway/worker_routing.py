"""Workers of one gateway to each other: connections handed over as sockets, strays forwarded as messages.

Both ways are unix sockets in a private directory of the run. A worker that is gone is noticed at once: whoever waits for it
is told that the session is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgpack

from ludus.errors import Refused
from ludus.gateway.sessions import lost, refuse
from ludus.protocol.spec import END, NOTHING_ASKED, START, TICK, About

if TYPE_CHECKING:
    from ludus.gateway.http_connection import Connection, Exchange
    from ludus.gateway.server import Gateway

log = logging.getLogger(__name__)

_MAX_HANDED = 64 << 10  # bytes that travel with a socket; more would not fit into one datagram
_MAX_BEHIND = 64 << 20  # bytes that may wait for one worker
_COUNT = "count"  # asks how many sessions the other worker has
_KIND_CODES = {START: 0, TICK: 1, END: 2, _COUNT: 3}
_KINDS = (START, TICK, END, _COUNT)
_COUNT_S = 1.0
_SIZE = struct.Struct("!I")


class Peers:
    def __init__(self, gateway: Gateway, slot: int, paths: Sequence[str]) -> None:
        self._gateway, self._slot, self._paths = gateway, slot, list(paths)
        self._links: dict[int, _Link] = {}
        self._incoming: set[_Incoming] = set()
        self._inbox: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._adopting: set[asyncio.Task[None]] = set()
        self.handed_over = self.forwarded = 0

    async def start(self) -> None:
        own = self._paths[self._slot]
        for path in (own + ".h", own + ".f"):
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()  # of the worker that had this slot before
        self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._inbox.setblocking(False)
        self._inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self._inbox.bind(own + ".h")
        self._gateway.loop.add_reader(self._inbox.fileno(), self._receive)
        self._server = await self._gateway.loop.create_unix_server(lambda: _Incoming(self._gateway, self._incoming), own + ".f")

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

    def hand_over(self, connection: Connection, slot: int, data: bytes) -> bool:
        transport = connection.transport
        if transport is None or len(data) > _MAX_HANDED:
            return False
        theirs = transport.get_extra_info("socket")
        transport.pause_reading()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.setblocking(False)
                out.connect(self._paths[slot] + ".h")
                socket.send_fds(out, [data], [theirs.fileno()])
        except OSError:  # dead, or its inbox is full: requests are forwarded instead
            transport.resume_reading()
            return False
        self.handed_over += 1
        connection.detach()
        return True

    def _receive(self) -> None:
        assert self._inbox is not None
        for _ in range(64):
            try:
                data, fds, _, _ = socket.recv_fds(self._inbox, _MAX_HANDED, 1, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
            except BlockingIOError:
                return
            except OSError:
                log.exception("receiving a connection from another worker failed")
                return
            for fd in fds:
                taken = socket.socket(fileno=fd)
                taken.setblocking(False)
                task = self._gateway.loop.create_task(self._gateway.adopt(taken, data))
                self._adopting.add(task)
                task.add_done_callback(self._adopting.discard)

    # -- single requests

    def forward(self, owner: int, kind: str, session: bytes, seq: int, about: About, body: bytes, exchange: Exchange) -> None:
        link = self._links.get(owner)
        if link is None or link.lost:
            link = self._links[owner] = _Link(self._gateway.loop, self._paths[owner] + ".f")
        self.forwarded += 1
        link.send(kind, session, seq, about, body, exchange)

    async def in_play(self) -> bool:
        """Whether a worker to which we have forwarded requests still has sessions, or does not say so in time."""
        asked = []
        for link in self._links.values():
            if not link.lost:
                asked.append(_Asked(self._gateway.loop))
                link.send(_COUNT, b"", -1, NOTHING_ASKED, b"", asked[-1])
        if asked:
            await asyncio.wait([ask.answer for ask in asked], timeout=_COUNT_S)
        return any(not ask.answer.done() or ask.answer.result() for ask in asked)


class _Frames(asyncio.Protocol):
    """Length, then a msgpack array; both ends are ours."""

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
            self.frame(msgpack.unpackb(bytes(buffer[at + 4 : at + 4 + size])))
            at += 4 + size
        if at:
            del buffer[:at]

    def frame(self, message: list[object]) -> None:
        raise NotImplementedError

    def write(self, message: list[object]) -> None:
        if self.transport is not None:
            self.transport.write(_framed(message))

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


def _framed(message: list[object]) -> bytes:
    packed: bytes = msgpack.packb(message)
    return _SIZE.pack(len(packed)) + packed


class _Link(_Frames):
    """To the owner of sessions that strayed to us."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: str) -> None:
        super().__init__()
        self.lost = False
        self._waiting: dict[int, tuple[str, Exchange | _Asked]] = {}
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

    def send(self, kind: str, session: bytes, seq: int, about: About, body: bytes, exchange: Exchange | _Asked) -> None:
        transport = self.transport
        behind = len(self._early) if transport is None else transport.get_write_buffer_size()
        if behind > _MAX_BEHIND:
            refuse(exchange, Refused(503, "worker_busy", "The worker for this session is behind.", "Try again.", 1))
            return
        self._number += 1
        self._waiting[self._number] = (kind, exchange)
        framed = _framed([self._number, _KIND_CODES[kind], session, seq, about, body])
        if transport is None:
            self._early += framed
        else:
            transport.write(framed)

    def frame(self, message: list[object]) -> None:
        number, status, body, retry_after_s, port = message
        waiting = self._waiting.pop(cast(int, number), None)
        if waiting is not None:
            waiting[1].reply(cast(int, status), cast(bytes, body), cast("float | None", retry_after_s), cast(int, port))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost, self.transport = True, None
        waiting, self._waiting = self._waiting, {}
        for kind, exchange in waiting.values():
            away = Refused(503, "worker_away", "The worker for this session is being replaced.", "Try again.", 1)
            refuse(exchange, away if kind is START else lost())

    def close(self) -> None:
        self._connecting.cancel()
        super().close()


class _Incoming(_Frames):
    """From a worker whose connection brought one of our sessions."""

    def __init__(self, gateway: Gateway, all_of_them: set[_Incoming]) -> None:
        super().__init__()
        self._gateway, self._all = gateway, all_of_them
        self.port = gateway.direct_port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._all.discard(self)

    def frame(self, message: list[object]) -> None:
        number, kind, session, seq, about, body = message
        exchange = _Forwarded(self, cast(int, number))
        if kind == _KIND_CODES[_COUNT]:
            exchange.reply(200, b"%d" % len(self._gateway.sessions))
            return
        handle = self._gateway.sessions.handle
        handle(
            _KINDS[cast(int, kind)],
            cast(bytes, session),
            cast(int, seq),
            About(*cast("list[Any]", about)),
            cast(bytes, body),
            exchange,
        )


class _Asked:
    """How many sessions another worker has; none when it is gone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.answer: asyncio.Future[int] = loop.create_future()

    def reply(self, status: int, body: bytes, retry_after_s: float | None = None, port: int = 0) -> None:
        if not self.answer.done():
            self.answer.set_result(int(body) if status == 200 else 0)


class _Forwarded:
    __slots__ = ("_incoming", "_number")

    def __init__(self, incoming: _Incoming, number: int) -> None:
        self._incoming, self._number = incoming, number

    def reply(self, status: int, body: bytes, retry_after_s: float | None = None) -> None:
        self._incoming.write([self._number, status, body, retry_after_s, self._incoming.port])
