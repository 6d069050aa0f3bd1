"""Frames: the format of all messages between the processes of a run, over asyncio streams and blocking sockets.

A frame is two lengths, a msgpack map (the header) and raw bytes (the body). Frames cannot execute code, and every length is checked
before it is used. Connections between machines are authenticated first (`process.auth`).
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from ludus.errors import Damaged, UsageError, WorkerFailed

Header = dict[str, Any]
Body = bytes | bytearray | memoryview

MAX_HEADER = 1 << 24
MAX_BODY = 1 << 28
"""Largest body of a frame over an asyncio stream, and so the largest item of a buffer: 256 MiB."""
MAX_SOCKET_BODY = 1 << 36
"""Largest body of a frame over a `FrameSocket`: the whole batch of a learner."""
REPLY_TIMEOUT_S = 60.0
_LENGTHS = struct.Struct("<IQ")
_RDHUP = getattr(select, "POLLRDHUP", 0)


def encode_frame(header: Mapping[str, Any], *parts: Body, max_body: int = MAX_BODY) -> list[Body]:
    """Pieces of a frame, not joined, so that large bodies are not copied. Raises UsageError when it is too large."""
    size = sum(len(part) for part in parts)
    packed: bytes = msgpack.packb(header)
    if size > max_body or len(packed) > MAX_HEADER:
        raise UsageError(
            f"A message of {size + len(packed)} bytes is too large for one frame ({max_body}).", "Send smaller items."
        )
    return [_LENGTHS.pack(len(packed), size) + packed, *parts]


def _decode_lengths(data: Body, max_body: int) -> tuple[int, int]:
    header_size, body_size = _LENGTHS.unpack(data)
    if header_size > MAX_HEADER or body_size > max_body:
        raise Damaged(f"A frame claims {header_size} + {body_size} bytes.")
    return header_size, body_size


def _decode_header(data: Body) -> Header:
    try:
        header = msgpack.unpackb(data)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise Damaged(f"The header of a frame is malformed: {error}.") from error
    if not isinstance(header, dict):
        raise Damaged("The header of a frame is not a map.")
    return header


async def read_frame(reader: asyncio.StreamReader) -> tuple[Header, bytes]:
    """Read the next frame. Raises Damaged for malformed data, EOFError at the end of the connection."""
    try:
        header_size, body_size = _decode_lengths(await reader.readexactly(_LENGTHS.size), MAX_BODY)
        header = _decode_header(await reader.readexactly(header_size))
        return header, await reader.readexactly(body_size) if body_size else b""
    except OSError as error:
        raise EOFError from error


class FrameSocket:
    """Frames over a blocking socket, for one thread. Each header names its operation: `op`.

    `peer`: its name in errors; `is_remote`: it is on another machine.
    """

    def __init__(self, connection: socket.socket, peer: str, *, is_remote: bool = False) -> None:
        self._connection, self.peer, self.is_remote = connection, peer, is_remote
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN | _RDHUP)

    def send(self, header: Mapping[str, Any], *parts: Body, timeout_s: float = REPLY_TIMEOUT_S) -> None:
        """Raises WorkerFailed when the peer is gone or does not read."""
        self._connection.settimeout(timeout_s)
        try:
            for piece in encode_frame(header, *parts, max_body=MAX_SOCKET_BODY):
                self._connection.sendall(piece)
        except OSError as error:
            raise WorkerFailed(f"{self.peer} does not read any more: {error or 'no answer'}.", "See its log.") from error

    def has_data(self, timeout_s: float = 0.0) -> bool:
        """Return whether there is something to receive, including end of file."""
        return bool(self._poll.poll(timeout_s * 1000))

    @property
    def is_closed(self) -> bool:
        """Whether the peer has closed the connection, as far as the system knows."""
        return any(events & (select.POLLHUP | select.POLLERR | _RDHUP) for _, events in self._poll.poll(0))

    def receive(self, op: str | None = None, timeout_s: float = REPLY_TIMEOUT_S) -> tuple[Header, bytearray]:
        """Receive the next frame, which must have the operation `op` if given. Raises WorkerFailed, Damaged."""
        self._connection.settimeout(timeout_s)  # for each piece: a large body takes its time
        try:
            header_size, body_size = _decode_lengths(self._receive_exactly(_LENGTHS.size), MAX_SOCKET_BODY)
            header = _decode_header(self._receive_exactly(header_size))
            if op not in (None, header.get("op")):
                raise Damaged(f"{self.peer} sent {header.get('op')!r} where {op!r} was expected.")
            return header, self._receive_exactly(body_size)
        except OSError as error:
            raise WorkerFailed(f"{self.peer} did not answer: {error or 'no answer'}.", "See its log.") from error
        except EOFError as error:
            raise WorkerFailed(f"{self.peer} is gone.", "It was stopped or it died; see its log.") from error

    def _receive_exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return data

    def close(self) -> None:
        self._connection.close()
