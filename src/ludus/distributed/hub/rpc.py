"""Frames over a socket: how the processes of one run talk to their hub and to their inference workers.

On one machine it is a unix socket that only this user can reach, between machines TCP behind a `Authenticator`. A frame is two lengths,
a msgpack map and raw bytes. Nothing in it can run code; every length is bounded before it is believed, and a peer that sends
anything else is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import struct
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

from ludus import errors
from ludus.errors import Damaged, LudusError, UsageError, WorkerFailed
from ludus.io.addresses import host_and_port, is_tcp
from ludus.process.auth import Authenticator, abort_when_unresponsive, client_handshake, enable_keepalive, read_token

log = logging.getLogger(__name__)

Header = dict[str, Any]
Body = bytes | bytearray | memoryview
Reply = list[tuple[Header, bytes]]
"""The frames of a reply: all but the last are marked `more`."""

MAX_HEADER = 1 << 24
MAX_BODY = 1 << 28
"""The largest single message, and so the largest single item of a buffer: 256 MiB."""
MAX_UNREAD = 1 << 30
"""A peer that lets this much pile up without reading it is cut off."""
CONNECT_S = 5.0
_LENGTHS = struct.Struct("<II")
_SUN_PATH = 100  # bytes that a path of a unix socket may have, with some to spare (108 on Linux, 104 on macOS)
_READ_AHEAD = 1 << 20


def frame(header: Mapping[str, Any], *parts: Body) -> list[Body]:
    """The pieces of a frame, not joined, so that large bodies are not copied. Raises UsageError when it is too large."""
    size = sum(len(part) for part in parts)
    packed: bytes = msgpack.packb(header)
    if size > MAX_BODY or len(packed) > MAX_HEADER:
        raise UsageError(
            f"A message of {size + len(packed)} bytes is too large for one frame ({MAX_BODY}).", "Send smaller items."
        )
    return [_LENGTHS.pack(len(packed), size) + packed, *parts]


async def read_frame(reader: asyncio.StreamReader) -> tuple[Header, bytes]:
    """The next frame. Raises Damaged on rubbish, EOFError when the peer is gone."""
    try:
        lengths = await reader.readexactly(_LENGTHS.size)
        header_size, body_size = _LENGTHS.unpack(lengths)
        if header_size > MAX_HEADER or body_size > MAX_BODY:
            raise Damaged(f"A frame claims {header_size} + {body_size} bytes.")
        header = msgpack.unpackb(await reader.readexactly(header_size))
        body = await reader.readexactly(body_size) if body_size else b""
    except (asyncio.IncompleteReadError, OSError) as error:
        raise EOFError from error
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise Damaged(f"The header of a frame is malformed: {error}.") from error
    if not isinstance(header, dict):
        raise Damaged("The header of a frame is not a map.")
    return header, body


# -- errors that cross -------------------------------------------------------------------------------------------------


def error_fields(error: BaseException) -> Header:
    """An error as plain values."""
    if isinstance(error, LudusError):
        return {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"error": type(error).__name__, "message": str(error), "hint": ""}


_BUILTIN = {e.__name__: e for e in (ValueError, TypeError, RuntimeError, IndexError, KeyError, ZeroDivisionError, TimeoutError)}


def error_from(header: Mapping[str, Any]) -> Exception:
    """The error that the other side raised: the same class where it is one of ours or a plain builtin one."""
    name, message, hint = str(header.get("error")), str(header.get("message")), str(header.get("hint", ""))
    ours = getattr(errors, name, None)
    if isinstance(ours, type) and issubclass(ours, LudusError) and ours is not errors.Refused:
        return ours(message, hint)
    if name in _BUILTIN:
        return _BUILTIN[name](message)
    return WorkerFailed(f"{name}: {message}", hint)


# -- the side that listens ---------------------------------------------------------------------------------------------


class Peer:
    """The listening side of one connection; `away` when it came from another machine, or could have."""

    def __init__(self, writer: asyncio.StreamWriter, away: bool = False) -> None:
        self._writer, self.away = writer, away

    @property
    def gone(self) -> bool:
        return self._writer.is_closing()

    def send(self, header: Mapping[str, Any], *parts: Body) -> None:
        """Queue a frame; never waits. A peer that does not read what it asked for is cut off."""
        if self.gone:
            return
        self._writer.writelines(frame(header, *parts))
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD:
            log.warning("a peer does not read its replies; it is disconnected")
            self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()

    async def flushed(self) -> None:
        with contextlib.suppress(OSError):
            await self._writer.drain()


OnFrame = Callable[[Peer, Header, bytes], Awaitable[None] | None]


async def listen(path: Path, on_frame: OnFrame, on_gone: Callable[[Peer], None] | None = None) -> asyncio.Server:
    """Accept connections at `path`. Frames of one peer are handled in order; one that raises Damaged loses its peer."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _talk(reader, Peer(writer), on_frame, on_gone)

    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(talk, check_socket_path(aside), limit=_READ_AHEAD)
    os.replace(aside, path)  # so that the socket of a predecessor is replaced in one step
    return server


async def listen_beyond(
    bound: socket.socket, guard: Authenticator, on_frame: OnFrame, on_gone: Callable[[Peer], None] | None = None
) -> asyncio.Server:
    """The same on a listening TCP socket, for those whom the guard admits."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        enable_keepalive(writer.get_extra_info("socket"))
        watching = asyncio.get_running_loop().create_task(abort_when_unresponsive(weakref.ref(writer)))
        try:
            if await guard.authenticate(reader, writer):
                await _talk(reader, Peer(writer, away=True), on_frame, on_gone)
        finally:
            watching.cancel()
            writer.close()

    return await asyncio.start_server(talk, sock=bound, limit=_READ_AHEAD)


async def _talk(reader: asyncio.StreamReader, peer: Peer, on_frame: OnFrame, on_gone: Callable[[Peer], None] | None) -> None:
    try:
        while True:
            waiting = on_frame(peer, *await read_frame(reader))
            if waiting is not None:
                await waiting
    except EOFError:
        pass
    except Damaged as error:
        log.warning("a peer is disconnected: %s", error)
    finally:
        if on_gone is not None:
            on_gone(peer)
        peer.close()


def check_socket_path(path: Path) -> str:
    text = str(path)
    if len(os.fsencode(text)) > _SUN_PATH:
        raise UsageError(f"{text!r} is too long for a unix socket.", "Set TMPDIR to a shorter directory.")
    return text


# -- the side that asks ------------------------------------------------------------------------------------------------


class Connection:
    """A client of one listener: many requests may be under way at once, each is answered by its id.

    Lives on the event loop that opened it. When the listener is lost, everything that waits gets WorkerFailed.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: str) -> None:
        self._reader, self._writer, self._what = reader, writer, what
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[Reply], Reply]] = {}
        self._lost: Exception | None = None
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._receive())
        self._watching = loop.create_task(abort_when_unresponsive(weakref.ref(writer))) if self.local_host else None

    @classmethod
    async def open(cls, address: str, what: str, timeout_s: float | None = None, token_file: str = "") -> Connection:
        """To the path of a unix socket, or to `tcp://host:port` with the token in that file. Raises WorkerFailed when nobody
        listens there, UsageError when the token is refused."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_S if timeout_s is None else timeout_s):
                if is_tcp(address):
                    token = read_token(token_file)
                    reader, writer = await asyncio.open_connection(*host_and_port(address), limit=_READ_AHEAD)
                    enable_keepalive(writer.get_extra_info("socket"))
                    await client_handshake(reader, writer, token, what)
                else:
                    reader, writer = await asyncio.open_unix_connection(address, limit=_READ_AHEAD)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if isinstance(error, (OSError, TimeoutError)):
                raise WorkerFailed(
                    f"{what} cannot be reached at {address}: {error or 'no answer'}.", "Is it still running?"
                ) from error
            raise
        return cls(reader, writer, what)

    @property
    def local_host(self) -> str:
        """The address of this machine that the other side sees; empty for a unix socket."""
        name = self._writer.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def lost(self) -> Exception | None:
        return self._lost

    async def send(self, header: Mapping[str, Any], *parts: Body) -> None:
        """One way, no reply; waits while the socket is full."""
        self._check()
        self._writer.writelines(frame(header, *parts))
        await self.flushed()

    async def flushed(self) -> None:
        """The socket has room again. Raises WorkerFailed."""
        try:
            await self._writer.drain()
        except OSError:
            self._fail()
        self._check()

    def start(self, header: Header, *parts: Body) -> asyncio.Future[Reply]:
        """Send a request, without waiting for room in the socket; the future is its reply."""
        self._check()
        number = next(self._ids)
        pieces = frame({**header, "id": number}, *parts)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future, []
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        self._writer.writelines(pieces)
        return future

    async def request(self, header: Header, *parts: Body, timeout_s: float | None) -> Reply:
        """Raises what the other side raised, WorkerFailed when it is lost, TimeoutError."""
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
                entry = self._waiting.get(header.get("id", 0))
                if entry is None:
                    continue  # of a request that was given up
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
        for future, _ in list(self._waiting.values()):
            if not future.done():
                future.set_exception(self._lost)
        self._writer.close()
        if self._watching is not None:
            self._watching.cancel()


def split(body: Body, sizes: Sequence[int]) -> list[memoryview]:
    """Cut a body into its items. Raises Damaged when the sizes do not fit."""
    if any(not isinstance(size, int) or size < 0 for size in sizes) or sum(sizes) != len(body):
        raise Damaged(f"The sizes of {len(sizes)} items do not add up to {len(body)} bytes.")
    view, at, parts = memoryview(body), 0, []
    for size in sizes:
        parts.append(view[at : at + size])
        at += size
    return parts
