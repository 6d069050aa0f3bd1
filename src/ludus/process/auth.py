"""Authenticated TCP connections between the machines of a run: connecting, listening, mutual authentication and keep-alive.

The token is never sent. Each side sends a nonce and proves by an HMAC over both nonces that it has the token. A recorded handshake is
useless later, and a process that took over the port does not learn the token. Nothing that a peer sends is parsed before its
proof is verified; unauthenticated connections are limited in time and number.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ludus.errors import UsageError, WorkerFailed
from ludus.io import tcp
from ludus.io.atomic_file import create_once

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""Time limit of the listening side of a handshake."""
MAX_UNAUTHENTICATED = 64
"""Connections whose handshake is not complete; beyond this the oldest is closed."""
PEER_TIMEOUT_S = 8.0
"""Seconds without an acknowledgement after which a peer counts as gone."""
_NONCE = _PROOF = 32
_MAX_TOKEN = 4096
_MAX_LOGGED_HOSTS = 1024


# -- tokens -------------------------------------------------------------------------------------------------------------


def write_token(path: Path, token: bytes | None = None) -> None:
    """Write a token (a new one by default) to a file with mode 0600. Raises FileExistsError."""
    create_once(path, token or secrets.token_hex(32).encode(), mode=0o600)


def read_token(path: str | Path) -> bytes:
    """Raises UsageError when the file cannot be read or the token is too short."""
    try:
        with open(path, "rb") as file:
            token = file.read(_MAX_TOKEN).strip()
    except OSError as error:
        raise UsageError(
            f"The token file {path} cannot be read: {error.strerror}.",
            "The run removes it when it ends; set LUDUS_TOKEN_FILE to that of a current run.",
        ) from error
    if len(token) < 16:
        raise UsageError(f"The token in {path} has {len(token)} bytes.", "Use 16 or more, such as 64 random hexadecimal digits.")
    return token


# -- handshake ----------------------------------------------------------------------------------------------------------


class HandshakeFailed(ConnectionError):
    """The peer uses another protocol or has another token."""


@dataclass(frozen=True)
class Handshake:
    """Messages of the handshake; the caller sends and receives them.

        listener  -> opening: magic, nonce
        caller    -> answer: magic, nonce, proof
        listener  -> confirmation: proof

    `magic`: 8 bytes that identify the protocol. `context`: hashed into the proofs, so that they are invalid in another protocol.
    """

    token: bytes = field(repr=False)
    magic: bytes = b"LUDUS-1\n"
    context: bytes = b""

    opening_bytes: ClassVar[int] = 8 + _NONCE
    answer_bytes: ClassVar[int] = 8 + _NONCE + _PROOF
    confirmation_bytes: ClassVar[int] = _PROOF

    def opening(self) -> bytes:
        return self.magic + secrets.token_bytes(_NONCE)

    def answer(self, opening: bytes) -> bytes:
        """Raises HandshakeFailed."""
        self._check_magic(opening)
        head = self.magic + secrets.token_bytes(_NONCE)
        return head + self._proof(b"caller", opening, head)

    def confirmation(self, opening: bytes, answer: bytes) -> bytes:
        """Raises HandshakeFailed."""
        self._check_magic(answer)
        if len(answer) != self.answer_bytes or not hmac.compare_digest(answer[-_PROOF:], self._proof(b"caller", opening, answer)):
            raise HandshakeFailed("it has another token")
        return self._proof(b"listener", opening, answer)

    def check(self, opening: bytes, answer: bytes, confirmation: bytes) -> None:
        """Raises HandshakeFailed."""
        if not hmac.compare_digest(confirmation, self._proof(b"listener", opening, answer)):
            raise HandshakeFailed("it does not know the token of this run")

    def _check_magic(self, message: bytes) -> None:
        if not message.startswith(self.magic):
            raise HandshakeFailed("it speaks another protocol")

    def _proof(self, role: bytes, opening: bytes, answer: bytes) -> bytes:
        nonces = slice(len(self.magic), len(self.magic) + _NONCE)
        return hmac.digest(self.token, self.context + role + opening[nonces] + answer[nonces], "sha256")


class _Reader(Protocol):
    async def readexactly(self, n: int, /) -> bytes: ...


class _Writer(Protocol):
    def write(self, data: bytes, /) -> object: ...


async def _run_listening_side(handshake: Handshake, reader: _Reader, writer: _Writer) -> None:
    """Raises HandshakeFailed, OSError, IncompleteReadError."""
    opening = handshake.opening()
    writer.write(opening)
    answer = await reader.readexactly(len(handshake.magic))
    if answer == handshake.magic:  # another protocol may send fewer bytes than a whole answer: do not wait for them
        answer += await reader.readexactly(handshake.answer_bytes - len(answer))
    writer.write(handshake.confirmation(opening, answer))


async def _run_calling_side(handshake: Handshake, reader: _Reader, writer: _Writer, what: str) -> None:
    """Raises UsageError when the tokens differ, WorkerFailed when the listener is not part of this run."""
    answer = b""
    try:
        opening = await reader.readexactly(handshake.opening_bytes)
        answer = handshake.answer(opening)
        writer.write(answer)
        handshake.check(opening, answer, await reader.readexactly(handshake.confirmation_bytes))
    except HandshakeFailed as error:
        why = "another process does, without the token of this run" if answer else str(error)
        raise WorkerFailed(f"{what} does not listen there: {why}.", "Check the address.") from error
    except asyncio.IncompleteReadError as error:
        if answer and not error.partial:
            raise UsageError(f"{what} refused the token.", "Set LUDUS_TOKEN_FILE to the token file of this run.") from error
        raise WorkerFailed(f"{what} closed the connection during the handshake.", "Check that it is still running.") from error
    except TimeoutError:
        raise
    except OSError as error:
        raise WorkerFailed(
            f"{what} closed the connection during the handshake: {error}.", "It may have another token, or be shutting down."
        ) from error


class Authenticator:
    """Listening side of the handshake, one per port. Runs on the event loop of its port."""

    def __init__(self, token: bytes) -> None:
        self._handshake = Handshake(token)
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}
        self._logged_hosts: set[str] = set()
        self.refused = 0

    async def authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether the peer has the token. If not, the connection is closed and counted in `refused`."""
        while len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.transport.abort()
        self._unauthenticated[writer] = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await _run_listening_side(self._handshake, reader, writer)
        except HandshakeFailed as error:
            self._refuse(writer, str(error))
        except TimeoutError:
            self._refuse(writer, f"it sent nothing for {HANDSHAKE_S:g} s")
        except (asyncio.IncompleteReadError, OSError):
            self._refuse(writer, "it closed the connection during the handshake")
        else:
            return True
        finally:
            self._unauthenticated.pop(writer, None)
        return False

    def _refuse(self, writer: asyncio.StreamWriter, why: str) -> None:
        self.refused += 1
        host = str((writer.get_extra_info("peername") or ("?",))[0])
        writer.transport.abort()
        # Once per host: a port scan must not fill the disk.
        if host not in self._logged_hosts and len(self._logged_hosts) < _MAX_LOGGED_HOSTS:
            self._logged_hosts.add(host)
            log.warning("refused a connection from %s: %s; further ones from this host are only counted", host, why)


# -- connections with asyncio -------------------------------------------------------------------------------------------


async def open_connection(
    host: str, port: int, token: bytes, what: str, *, timeout_s: float, limit: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and authenticate. `what`: name of the listener in errors; `limit`: of the reader's buffer.

    Raises OSError or TimeoutError when it cannot be reached, UsageError when the tokens differ, WorkerFailed when the listener is
    not part of this run.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port, limit=limit)
        with contextlib.ExitStack() as undo:
            undo.callback(writer.transport.abort)
            enable_keepalive(writer.get_extra_info("socket"))
            await _run_calling_side(Handshake(token), reader, writer, what)
            undo.pop_all()
    return reader, writer


async def start_server(
    bound: socket.socket,
    authenticator: Authenticator,
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    limit: int,
) -> asyncio.Server:
    """Accept connections on a bound socket; `serve` gets those that are authenticated. They are closed when it returns."""

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        enable_keepalive(writer.get_extra_info("socket"))
        watching = asyncio.get_running_loop().create_task(abort_when_unresponsive(weakref.ref(writer)))
        try:
            if await authenticator.authenticate(reader, writer):
                await serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the loop ends; asyncio would log a traceback
        finally:
            watching.cancel()
            writer.close()

    return await asyncio.start_server(run, sock=bound, limit=limit)


# -- connections with blocking sockets ----------------------------------------------------------------------------------


class _BlockingStream:
    """A connected socket with the methods of asyncio's streams that a handshake uses. They block, until the deadline."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def write(self, data: bytes) -> None:
        self._limit_wait()
        self._connection.sendall(data)

    async def readexactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._limit_wait()
            part = self._connection.recv(size - len(data))
            if not part:
                raise asyncio.IncompleteReadError(data, size)
            data += part
        return data

    def _limit_wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        self._connection.settimeout(left)


def _run_blocking(handshake: Coroutine[Any, Any, None]) -> None:
    """Run a handshake over a `_BlockingStream`: since that never suspends, one step completes it."""
    with contextlib.suppress(StopIteration):
        handshake.send(None)


def authenticate_blocking(connection: socket.socket, handshake: Handshake) -> None:
    """Listening side on an accepted socket, within HANDSHAKE_S. Raises OSError, EOFError; the caller closes the socket."""
    enable_keepalive(connection)
    stream = _BlockingStream(connection, time.monotonic() + HANDSHAKE_S)
    _run_blocking(_run_listening_side(handshake, stream, stream))


def connect_blocking(host: str, port: int, handshake: Handshake, what: str, timeout_s: float) -> socket.socket:
    """Connect and authenticate. Raises as `open_connection` does."""
    deadline = time.monotonic() + timeout_s  # the listener may serve others first
    connection = socket.create_connection((host, port), timeout_s)
    with contextlib.ExitStack() as undo:
        undo.enter_context(connection)
        enable_keepalive(connection)
        stream = _BlockingStream(connection, deadline)
        _run_blocking(_run_calling_side(handshake, stream, stream, what))
        undo.pop_all()
    return connection


# -- detection of unreachable peers -------------------------------------------------------------------------------------

_INFO = struct.Struct("=2xBB52xI")  # struct tcp_info: retransmits, probes, …, last_ack_recv in milliseconds
_CHECK_S = 1.0


def enable_keepalive(connection: socket.socket) -> None:
    tcp.keep_alive(connection, idle_s=2, lost_s=int(PEER_TIMEOUT_S))


def is_unresponsive(connection: socket.socket) -> bool:
    """Return whether sent data has been unacknowledged for longer than PEER_TIMEOUT_S.

    The kernel retries for about 15 minutes by default. TCP_USER_TIMEOUT would also close connections to a process that is only slow to
    read (its host acknowledges with a closed window); this checks only whether the host responds.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    retransmits, probes, last_ack_ms = _INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return bool((retransmits or probes) and last_ack_ms > PEER_TIMEOUT_S * 1000)


async def abort_when_unresponsive(reference: weakref.ref[asyncio.StreamWriter]) -> None:
    """Abort the connection when the peer's host stops responding. Holds only a weak reference."""
    while True:
        await asyncio.sleep(_CHECK_S)
        writer = reference()
        if writer is None or writer.is_closing():
            return
        try:
            gone = is_unresponsive(writer.get_extra_info("socket"))
        except OSError:  # closed meanwhile
            return
        if gone:
            log.warning("closed the connection to %s: no response for %g s", writer.get_extra_info("peername"), PEER_TIMEOUT_S)
            writer.transport.abort()
            return
        del writer
