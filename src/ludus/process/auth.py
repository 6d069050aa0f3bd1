"""Who may speak on a port that other machines can reach: those who know the token of the run.

The token never travels. Each side sends a number of its own and proves, by a keyed hash over both, that it has the token: so
somebody who listens cannot pass for one of us later, and a caller does not give the token to somebody who took the hub's port.
Until that is done, nothing of what a stranger sends is parsed; strangers have little time, little room, and no queue.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import struct
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ludus.errors import UsageError, WorkerFailed
from ludus.io import tcp
from ludus.io.atomic_file import create_once

log = logging.getLogger(__name__)

GREETING_S = 5.0
"""How long a stranger has to prove itself."""
MAX_STRANGERS = 64
"""Connections that have not proved anything yet; the oldest gives way to the next."""
LOST_S = 8.0
"""Seconds without a sign of life after which the other machine is given up."""
_NONCE = _PROOF = 32
_MAX_TOKEN = 4096
_TOLD = 1024


# -- tokens -------------------------------------------------------------------------------------------------------------


def write_token(path: Path, token: bytes | None = None) -> None:
    """A token (a new one, unless it is given) in a file that its user alone can read. Raises FileExistsError."""
    create_once(path, token or secrets.token_hex(32).encode(), mode=0o600)


def read_token(path: str | Path) -> bytes:
    """Raises UsageError when there is none."""
    try:
        with open(path, "rb") as file:
            token = file.read(_MAX_TOKEN).strip()
    except OSError as error:
        raise UsageError(
            f"The token file {path} cannot be read: {error.strerror}.",
            "It belongs to the run and is gone with it; set LUDUS_TOKEN_FILE.",
        ) from error
    if len(token) < 16:
        raise UsageError(f"The token in {path} has {len(token)} bytes.", "Use 16 or more, such as 64 random hexadecimal digits.")
    return token


# -- the handshake ------------------------------------------------------------------------------------------------------


class HandshakeFailed(ConnectionError):
    """The other side speaks another protocol, or has another token."""


@dataclass(frozen=True)
class Handshake:
    """Mutual proof of a token, as bytes; sending and receiving them is left to the caller.

        listener  -> opening: magic, nonce
        caller    -> answer: magic, nonce, proof
        listener  -> confirmation: proof

    `magic`: 8 bytes that name the protocol. `context`: hashed into the proofs, so that they are of no use in another protocol.
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


class Guard:
    """The listening side. One for each port; everything here happens on its event loop."""

    def __init__(self, token: bytes) -> None:
        self._handshake = Handshake(token)
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._told: set[str] = set()
        self.refused = 0

    async def admits(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the other side has the token. If not, it is cut off here, and counted."""
        while len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            async with asyncio.timeout(GREETING_S):
                why = await self._doubt(reader, writer)
        except TimeoutError:
            why = f"it said nothing for {GREETING_S:g} s"
        except (asyncio.IncompleteReadError, OSError):
            why = "it left before it had proved anything"
        finally:
            self._strangers.pop(writer, None)
        if why:
            self._refuse(writer, why)
        return not why

    async def _doubt(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Why it is not one of us; empty when it is."""
        handshake, opening = self._handshake, self._handshake.opening()
        writer.write(opening)
        answer = await reader.readexactly(len(handshake.magic))
        if answer == handshake.magic:  # a stranger may send less than a whole answer, and is not waited for
            answer += await reader.readexactly(handshake.answer_bytes - len(answer))
        try:
            writer.write(handshake.confirmation(opening, answer))
        except HandshakeFailed as error:
            return str(error)
        return ""

    def _refuse(self, writer: asyncio.StreamWriter, why: str) -> None:
        self.refused += 1
        who = str((writer.get_extra_info("peername") or ("?",))[0])
        writer.transport.abort()
        if who not in self._told and len(self._told) < _TOLD:  # once for each: a port that is scanned must not fill the disk
            self._told.add(who)
            log.warning("a connection from %s is refused: %s; further ones are only counted", who, why)


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, what: str) -> None:
    """The calling side. Raises UsageError when the tokens differ, WorkerFailed when it is not one of us. Has no time-out."""
    handshake, answer = Handshake(token), b""
    try:
        opening = await reader.readexactly(handshake.opening_bytes)
        answer = handshake.answer(opening)
        writer.write(answer)
        handshake.check(opening, answer, await reader.readexactly(handshake.confirmation_bytes))
    except HandshakeFailed as error:
        if not answer:
            raise WorkerFailed(f"{what} is not what listens there: {error}.", "Is the address right?") from error
        raise WorkerFailed(
            f"{what} does not know the token of this run: somebody else listens there.", "Is the address right?"
        ) from error
    except asyncio.IncompleteReadError as error:
        if answer and not error.partial:
            raise UsageError(f"{what} refuses our token.", "Give the token of this very run (LUDUS_TOKEN_FILE).") from error
        raise WorkerFailed(f"{what} left while it was greeted.", "Is it still running?") from error
    except OSError as error:
        raise WorkerFailed(
            f"{what} left while it was greeted: {error}.", "Is its token another one, or is it just ending?"
        ) from error


# -- is the other machine still there? -----------------------------------------------------------------------------------

_INFO = struct.Struct("=2xBB52xI")  # struct tcp_info: retransmits, probes, …, last_ack_recv in milliseconds
_LOOK_S = 1.0


def keep_alive(connection: socket.socket) -> None:
    tcp.keep_alive(connection, idle_s=2, lost_s=int(LOST_S))


def unanswered(connection: socket.socket) -> bool:
    """Whether what was sent has gone unacknowledged for too long.

    The kernel itself would try for a quarter of an hour. Its TCP_USER_TIMEOUT would also cut off a process that is only slow
    to read (its machine acknowledges, with a closed window); here only silence counts.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    retransmits, probes, last_ack_ms = _INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return bool((retransmits or probes) and last_ack_ms > LOST_S * 1000)


async def watch(watched: weakref.ref[asyncio.StreamWriter]) -> None:
    """Break the connection when the other machine is gone. Holds nothing: a connection that nobody uses any more may go."""
    while True:
        await asyncio.sleep(_LOOK_S)
        writer = watched()
        if writer is None or writer.is_closing():
            return
        try:
            gone = unanswered(writer.get_extra_info("socket"))
        except OSError:  # closed meanwhile
            return
        if gone:
            log.warning(
                "nothing was heard from %s for %g s; the connection is given up", writer.get_extra_info("peername"), LOST_S
            )
            writer.transport.abort()
            return
        del writer
