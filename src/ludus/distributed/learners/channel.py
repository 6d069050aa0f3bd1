"""The conversation between rank 0 and another rank of the learners: small frames over a connected socket.

On one node that is a socket pair which only the two hold. A rank on another node calls the entrance of rank 0, and both prove
by a keyed hash that they know the token of the run before anything else is read. Nothing in a frame is code.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import time
from dataclasses import dataclass

from ludus.errors import Damaged, UsageError, WorkerFailed
from ludus.io.addresses import host_and_port, tcp_address
from ludus.process.auth import Handshake, enable_keepalive

log = logging.getLogger(__name__)

HELLO, WELCOME, READY, JOIN, STATE, SPEC, LEARN, DONE = range(1, 9)
"""Kinds of frames, in the order in which they first appear."""

ANSWER_S = 60.0

_FRAME = struct.Struct("<Bqqq")
"""Kind, two numbers, bytes that follow."""
_MAX_BODY = 1 << 36
_MAGIC = b"LUDUS-L\n"
_GREETING_S = 5.0
_GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)

Body = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Frame:
    kind: int
    first: int
    second: int
    body: bytearray


class Link:
    """One end; for one thread. `other` is how messages call the other end; `far` when it is on another node."""

    def __init__(self, connection: socket.socket, other: str, *, far: bool = False) -> None:
        self._connection, self.other, self.far = connection, other, far
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN | getattr(select, "POLLRDHUP", 0))

    def send(self, kind: int, first: int = 0, second: int = 0, *body: Body, timeout_s: float = ANSWER_S) -> None:
        """Raises WorkerFailed when the other end is gone, or does not read."""
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(_FRAME.pack(kind, first, second, sum(map(len, body))))
            for part in body:
                self._connection.sendall(part)
        except OSError as error:
            raise WorkerFailed(f"{self.other} does not listen any more: {error or 'no answer'}.", "See its log.") from error

    def waiting(self, timeout_s: float = 0.0) -> bool:
        """Whether there is something to receive, if only the end."""
        return bool(self._poll.poll(timeout_s * 1000))

    @property
    def gone(self) -> bool:
        """Whether the other end has hung up, as far as the system knows."""
        return any(events & _GONE for _, events in self._poll.poll(0))

    def receive(self, kind: int | None = None, timeout_s: float = ANSWER_S) -> Frame:
        """The next frame, which must be of this kind if one is given. Raises WorkerFailed, Damaged."""
        self._connection.settimeout(timeout_s)
        try:
            found, first, second, size = _FRAME.unpack(_exactly(self._connection, _FRAME.size))
            if not 0 <= size <= _MAX_BODY or kind not in (None, found):
                raise Damaged(f"{self.other} sent a frame of kind {found} with {size} bytes where {kind} was expected.")
            return Frame(found, first, second, _exactly(self._connection, size))
        except OSError as error:
            raise WorkerFailed(f"{self.other} did not answer: {error or 'no answer'}.", "See its log.") from error
        except EOFError as error:
            raise WorkerFailed(f"{self.other} is gone.", "It was stopped or it died; see its log.") from error

    def close(self) -> None:
        self._connection.close()


def _exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """Without a deadline, every piece has the time-out of the connection: long bodies take their time."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if deadline is not None:
            _hurry(connection, deadline)
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


def _hurry(connection: socket.socket, deadline: float) -> None:
    """What comes next has until then. Raises TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    connection.settimeout(left)


# -- between nodes ------------------------------------------------------------------------------------------------------


class Entrance:
    """Where ranks of other nodes come in. Listens on the given address of this node, on any free port unless one is given."""

    def __init__(self, host: str, token: bytes, port: int = 0) -> None:
        if len(token) < 16:
            raise UsageError(f"A token of {len(token)} bytes is too short.", "Use 16 random ones or more.")
        self.host, self._handshake = host, _handshake(token)
        self._listening = socket.create_server((host, port))
        self.address = tcp_address(host, self._listening.getsockname()[1])

    def admit(self, within_s: float) -> Link | None:
        """The next one that knows the token, or None; strangers are cut off. They are heard one after another."""
        deadline = time.monotonic() + within_s
        while (left := deadline - time.monotonic()) > 0:
            self._listening.settimeout(left)
            try:
                connection, peer = self._listening.accept()
            except TimeoutError:
                break
            try:
                self._greet(connection, time.monotonic() + _GREETING_S)
            except (OSError, EOFError) as error:
                log.warning("a connection from %s is refused: %s", peer[0], error or "it left")
                connection.close()
            else:
                return Link(connection, f"The learner at {peer[0]}", far=True)
        return None

    def _greet(self, connection: socket.socket, deadline: float) -> None:
        """All of it until then: whoever says a byte now and then must not keep others waiting."""
        _hurry(connection, deadline)
        enable_keepalive(connection)
        opening = self._handshake.opening()
        connection.sendall(opening)
        answer = bytes(_exactly(connection, self._handshake.answer_bytes, deadline))
        connection.sendall(self._handshake.confirmation(opening, answer))

    def close(self) -> None:
        self._listening.close()


def enter(address: str, token: bytes, timeout_s: float = ANSWER_S) -> Link:
    """Call rank 0 at `tcp://host:port`. Raises WorkerFailed when it is not there, UsageError when the tokens differ."""
    host, port = host_and_port(address)
    connection: socket.socket | None = None
    deadline = time.monotonic() + timeout_s  # others may be heard before us
    try:
        connection = socket.create_connection((host, port), timeout_s)
        enable_keepalive(connection)
        handshake = _handshake(token)
        opening = bytes(_exactly(connection, handshake.opening_bytes, deadline))
        answer = handshake.answer(opening)
        connection.sendall(answer)
        handshake.check(opening, answer, bytes(_exactly(connection, handshake.confirmation_bytes, deadline)))
    except (OSError, EOFError) as error:
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()
        if isinstance(error, (EOFError, ConnectionResetError)) and connection is not None:
            raise UsageError(
                f"The learner at {address} refused the token.", "Set LUDUS_TOKEN_FILE to the token file of this run."
            ) from error
        raise WorkerFailed(f"There is no learner at {address}: {error}.", "Is the address right, and its run alive?") from error
    return Link(connection, "Learner 0", far=True)


def _handshake(token: bytes) -> Handshake:
    return Handshake(token, magic=_MAGIC, context=_MAGIC)
