"""Messages between rank 0 and another rank of the learners: small frames over a connected socket.

On one node this is a socket pair. A rank on another node connects to the listener of rank 0, and both prove by a keyed hash that
they know the token of the run before anything else is read. Frames contain no code.
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

REPLY_TIMEOUT_S = 60.0

_FRAME = struct.Struct("<Bqqq")
"""Kind, two numbers, size of the body."""
_MAX_BODY = 1 << 36
_MAGIC = b"LUDUS-L\n"
_HANDSHAKE_S = 5.0
_CLOSED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)

Body = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Frame:
    kind: int
    first: int
    second: int
    body: bytearray


class LearnerChannel:
    """One end of the channel, for one thread. `other`: name of the peer in messages; `is_remote`: it is on another node."""

    def __init__(self, connection: socket.socket, other: str, *, is_remote: bool = False) -> None:
        self._connection, self.other, self.is_remote = connection, other, is_remote
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN | getattr(select, "POLLRDHUP", 0))

    def send(self, kind: int, first: int = 0, second: int = 0, *body: Body, timeout_s: float = REPLY_TIMEOUT_S) -> None:
        """Raises WorkerFailed when the peer is gone or does not read."""
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(_FRAME.pack(kind, first, second, sum(map(len, body))))
            for part in body:
                self._connection.sendall(part)
        except OSError as error:
            raise WorkerFailed(f"{self.other} does not read any more: {error or 'no answer'}.", "See its log.") from error

    def has_data(self, timeout_s: float = 0.0) -> bool:
        """Return whether there is something to receive, including end of file."""
        return bool(self._poll.poll(timeout_s * 1000))

    @property
    def is_closed(self) -> bool:
        """Whether the peer has closed the connection, as far as the system knows."""
        return any(events & _CLOSED for _, events in self._poll.poll(0))

    def receive(self, kind: int | None = None, timeout_s: float = REPLY_TIMEOUT_S) -> Frame:
        """Receive the next frame, which must be of `kind` if that is given. Raises WorkerFailed, Damaged."""
        self._connection.settimeout(timeout_s)
        try:
            found, first, second, size = _FRAME.unpack(_receive_exactly(self._connection, _FRAME.size))
            if not 0 <= size <= _MAX_BODY or kind not in (None, found):
                raise Damaged(f"{self.other} sent a frame of kind {found} with {size} bytes where {kind} was expected.")
            return Frame(found, first, second, _receive_exactly(self._connection, size))
        except OSError as error:
            raise WorkerFailed(f"{self.other} did not answer: {error or 'no answer'}.", "See its log.") from error
        except EOFError as error:
            raise WorkerFailed(f"{self.other} is gone.", "It was stopped or it died; see its log.") from error

    def close(self) -> None:
        self._connection.close()


def _receive_exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """Without a deadline, the time-out of the connection applies to every piece: long bodies take their time."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if deadline is not None:
            _limit_to(connection, deadline)
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


def _limit_to(connection: socket.socket, deadline: float) -> None:
    """Limit the next operation to the deadline. Raises TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    connection.settimeout(left)


# -- between nodes ------------------------------------------------------------------------------------------------------


class LearnerListener:
    """Accepts ranks of other nodes. Listens on the given address of this node, on a free port unless one is given."""

    def __init__(self, host: str, token: bytes, port: int = 0) -> None:
        if len(token) < 16:
            raise UsageError(f"A token of {len(token)} bytes is too short.", "Use 16 random bytes or more.")
        self.host, self._handshake = host, _handshake(token)
        self._listening = socket.create_server((host, port))
        self.address = tcp_address(host, self._listening.getsockname()[1])

    def accept_rank(self, within_s: float) -> LearnerChannel | None:
        """The next connection with the token, or None; others are closed. Handshakes run one after another."""
        deadline = time.monotonic() + within_s
        while (left := deadline - time.monotonic()) > 0:
            self._listening.settimeout(left)
            try:
                connection, peer = self._listening.accept()
            except TimeoutError:
                break
            try:
                self._run_handshake(connection, time.monotonic() + _HANDSHAKE_S)
            except (OSError, EOFError) as error:
                log.warning("refused a connection from %s: %s", peer[0], error or "it closed the connection")
                connection.close()
            else:
                return LearnerChannel(connection, f"The learner at {peer[0]}", is_remote=True)
        return None

    def _run_handshake(self, connection: socket.socket, deadline: float) -> None:
        """Run the whole handshake before the deadline: a peer that sends byte by byte must not block the others."""
        _limit_to(connection, deadline)
        enable_keepalive(connection)
        opening = self._handshake.opening()
        connection.sendall(opening)
        answer = bytes(_receive_exactly(connection, self._handshake.answer_bytes, deadline))
        connection.sendall(self._handshake.confirmation(opening, answer))

    def close(self) -> None:
        self._listening.close()


def connect(address: str, token: bytes, timeout_s: float = REPLY_TIMEOUT_S) -> LearnerChannel:
    """Connect to rank 0 at `tcp://host:port`. Raises WorkerFailed when it is not there, UsageError when the tokens differ."""
    host, port = host_and_port(address)
    connection: socket.socket | None = None
    deadline = time.monotonic() + timeout_s  # other handshakes may come first
    try:
        connection = socket.create_connection((host, port), timeout_s)
        enable_keepalive(connection)
        handshake = _handshake(token)
        opening = bytes(_receive_exactly(connection, handshake.opening_bytes, deadline))
        answer = handshake.answer(opening)
        connection.sendall(answer)
        handshake.check(opening, answer, bytes(_receive_exactly(connection, handshake.confirmation_bytes, deadline)))
    except (OSError, EOFError) as error:
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()
        if isinstance(error, (EOFError, ConnectionResetError)) and connection is not None:
            raise UsageError(
                f"The learner at {address} refused the token.", "Set LUDUS_TOKEN_FILE to the token file of this run."
            ) from error
        raise WorkerFailed(
            f"There is no learner at {address}: {error}.", "Check the address, and that its run is alive."
        ) from error
    return LearnerChannel(connection, "Learner 0", is_remote=True)


def _handshake(token: bytes) -> Handshake:
    return Handshake(token, magic=_MAGIC, context=_MAGIC)
