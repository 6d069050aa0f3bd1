"""Requests and replies between the processes of a run, its hub and its inference workers.

Unix sockets on one machine, authenticated TCP connections between machines. Messages are frames (`distributed.frames`); a peer that
sends anything else is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludus import errors
from ludus.distributed.frames import Body, Header, encode_frame, read_frame
from ludus.errors import Damaged, LudusError, UsageError, WorkerFailed
from ludus.io.addresses import host_and_port, is_tcp
from ludus.process.auth import Authenticator, abort_when_unresponsive, open_connection, read_token, start_server

log = logging.getLogger(__name__)

Reply = list[tuple[Header, bytes]]
"""Frames of a reply: all but the last are marked `more`."""

MAX_UNREAD = 1 << 30
"""A peer with this many unread bytes is disconnected."""
CONNECT_S = 5.0
_SUN_PATH = 100  # limit for paths of unix sockets (108 on Linux, 104 on macOS)
_READ_AHEAD = 1 << 20


# -- errors as values --------------------------------------------------------------------------------------------------


def error_fields(error: BaseException) -> Header:
    """Encode an error as plain values."""
    if isinstance(error, LudusError):
        return {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"error": type(error).__name__, "message": str(error), "hint": ""}


_BUILTIN = {e.__name__: e for e in (ValueError, TypeError, RuntimeError, IndexError, KeyError, ZeroDivisionError, TimeoutError)}


def error_from(header: Mapping[str, Any]) -> Exception:
    """Decode an error: the same class for errors of Ludus and common builtin ones, else WorkerFailed."""
    name, message, hint = str(header.get("error")), str(header.get("message")), str(header.get("hint", ""))
    ours = getattr(errors, name, None)
    if isinstance(ours, type) and issubclass(ours, LudusError) and ours is not errors.Refused:
        return ours(message, hint)
    if name in _BUILTIN:
        return _BUILTIN[name](message)
    return WorkerFailed(f"{name}: {message}", hint)


# -- server ------------------------------------------------------------------------------------------------------------


class Peer:
    """Server side of one connection; `is_remote` for connections over TCP."""

    def __init__(self, writer: asyncio.StreamWriter, is_remote: bool = False) -> None:
        self._writer, self.is_remote = writer, is_remote

    @property
    def is_closed(self) -> bool:
        return self._writer.is_closing()

    def send(self, header: Mapping[str, Any], *parts: Body) -> None:
        """Queue a frame; never blocks. A peer that does not read its replies is disconnected."""
        if self.is_closed:
            return
        self._writer.writelines(encode_frame(header, *parts))
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD:
            log.warning("disconnected a peer that does not read its replies")
            self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()

    async def drain(self) -> None:
        with contextlib.suppress(OSError):
            await self._writer.drain()


OnFrame = Callable[[Peer, Header, bytes], Awaitable[None] | None]
Operation = Callable[[Peer, Header, bytes], Header | None]
"""Handles one kind of request; returns the reply, or None if it replies later or not at all."""
SendReply = Callable[..., None]
"""Called with (peer, request id), a header and parts of a body."""


async def listen_unix(path: Path, on_frame: OnFrame, on_disconnect: Callable[[Peer], None] | None = None) -> asyncio.Server:
    """Accept connections at `path`. Frames of one peer are handled in order; a peer whose frame raises Damaged is disconnected."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _serve_connection(reader, Peer(writer), on_frame, on_disconnect)

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(serve, check_socket_path(temporary), limit=_READ_AHEAD)
    os.replace(temporary, path)  # atomically replaces the socket of a predecessor
    return server


async def listen_tcp(
    bound: socket.socket, authenticator: Authenticator, on_frame: OnFrame, on_disconnect: Callable[[Peer], None] | None = None
) -> asyncio.Server:
    """Like `listen_unix`, on a bound TCP socket, for authenticated peers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _serve_connection(reader, Peer(writer, is_remote=True), on_frame, on_disconnect)

    return await start_server(bound, authenticator, serve, _READ_AHEAD)


async def _serve_connection(
    reader: asyncio.StreamReader, peer: Peer, on_frame: OnFrame, on_disconnect: Callable[[Peer], None] | None
) -> None:
    try:
        while True:
            waiting = on_frame(peer, *await read_frame(reader))
            if waiting is not None:
                await waiting
    except EOFError:
        pass
    except Damaged as error:
        log.warning("disconnected a peer: %s", error)
    finally:
        if on_disconnect is not None:
            on_disconnect(peer)
        peer.close()


def check_socket_path(path: Path) -> str:
    text = str(path)
    if len(os.fsencode(text)) > _SUN_PATH:
        raise UsageError(f"{text!r} is too long for a unix socket.", "Set TMPDIR to a shorter directory.")
    return text


# -- client ------------------------------------------------------------------------------------------------------------


class RpcConnection:
    """Client of one listener: concurrent requests, matched to replies by id.

    Belongs to the event loop that opened it. When the connection is lost, all pending requests raise WorkerFailed.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: str) -> None:
        self._reader, self._writer, self._what = reader, writer, what
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[asyncio.Future[Reply], Reply]] = {}
        self._lost: Exception | None = None
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._receive())
        self._watching = loop.create_task(abort_when_unresponsive(weakref.ref(writer))) if self.local_host else None

    @classmethod
    async def open(cls, address: str, what: str, timeout_s: float | None = None, token_file: str = "") -> RpcConnection:
        """Connect to a unix socket, or to `tcp://host:port` with the token in `token_file`.

        Raises WorkerFailed when the address cannot be reached, UsageError when the token is refused.
        """
        timeout_s = CONNECT_S if timeout_s is None else timeout_s
        try:
            if is_tcp(address):
                token, (host, port) = read_token(token_file), host_and_port(address)
                reader, writer = await open_connection(host, port, token, what, timeout_s=timeout_s, limit=_READ_AHEAD)
            else:
                async with asyncio.timeout(timeout_s):
                    reader, writer = await asyncio.open_unix_connection(address, limit=_READ_AHEAD)
        except OSError as error:
            raise WorkerFailed(
                f"{what} cannot be reached at {address}: {error or 'no answer'}.", "Check that it is still running."
            ) from error
        return cls(reader, writer, what)

    @property
    def local_host(self) -> str:
        """Address of this machine that the peer sees; empty for a unix socket."""
        name = self._writer.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def lost(self) -> Exception | None:
        return self._lost

    async def send(self, header: Mapping[str, Any], *parts: Body) -> None:
        """Send a message without a reply; waits while the socket is full."""
        self._check()
        self._writer.writelines(encode_frame(header, *parts))
        await self.drain()

    async def drain(self) -> None:
        """Wait until the socket has room. Raises WorkerFailed."""
        try:
            await self._writer.drain()
        except OSError:
            self._fail()
        self._check()

    def start(self, header: Header, *parts: Body) -> asyncio.Future[Reply]:
        """Send a request without waiting for room in the socket; the future is its reply."""
        self._check()
        number = next(self._ids)
        pieces = encode_frame({**header, "id": number}, *parts)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending[number] = future, []
        future.add_done_callback(lambda _: self._pending.pop(number, None))
        self._writer.writelines(pieces)
        return future

    async def request(self, header: Header, *parts: Body, timeout_s: float | None) -> Reply:
        """Raises the error of the peer, WorkerFailed when the connection is lost, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            return await self.start(header, *parts)

    async def close(self) -> None:
        self._fail()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _receive(self) -> None:
        try:
            while True:
                header, body = await read_frame(self._reader)
                entry = self._pending.get(header.get("id", 0))
                if entry is None:
                    continue  # its caller has cancelled the request
                future, frames = entry
                frames.append((header, body))
                if future.done():
                    continue
                if "error" in header:
                    future.set_exception(error_from(header))
                elif not header.get("more"):
                    future.set_result(frames)
        except (EOFError, OSError, Damaged):
            pass
        finally:
            self._fail()

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _fail(self) -> None:
        if self._lost is None:
            self._lost = WorkerFailed(f"{self._what} is gone.", "It was stopped or it died; see its log.")
        for future, _ in list(self._pending.values()):
            if not future.done():
                future.set_exception(self._lost)
        self._writer.close()
        if self._watching is not None:
            self._watching.cancel()


def split(body: Body, sizes: Sequence[int]) -> list[memoryview]:
    """Split a body into its items. Raises Damaged when the sizes do not match."""
    if any(not isinstance(size, int) or size < 0 for size in sizes) or sum(sizes) != len(body):
        raise Damaged(f"The sizes of {len(sizes)} items do not add up to {len(body)} bytes.")
    view, at, parts = memoryview(body), 0, []
    for size in sizes:
        parts.append(view[at : at + size])
        at += size
    return parts
