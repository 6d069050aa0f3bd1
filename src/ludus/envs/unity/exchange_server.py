"""The trainer's end of ML-Agents' gRPC method `Exchange`: a server for one player on the loopback interface, without threads.

    with ExchangeServer.bind(5005) as server:       # or the next free port
        request = server.receive(deadline, check)   # bytes of a message; accepts the player before the first one
        server.reply(answer)

The player calls one unary method, again and again, over one connection of HTTP/2 (RFC 9113) without TLS. That needs few of its
frames: the headers of requests are not decoded, those of replies are constant. A general server hands every call to a thread and
back, which takes longer than most steps of a game.

The port is bound from the start until `close`: two trainings never share one, whatever they were told to use.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import struct
import time
from collections.abc import Callable

from ludus.errors import EnvironmentFault

log = logging.getLogger(__name__)

PORTS = 1000
"""Ports that are tried, from the first one on."""

MAX_MESSAGE = 1 << 30

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_PADDED = 8
_INITIAL_WINDOW, _MAX_FRAME = 4, 5  # identifiers of settings
_DEFAULT_WINDOW, _DEFAULT_FRAME, _LARGEST_WINDOW, _LARGEST_FRAME = (1 << 16) - 1, 1 << 14, (1 << 31) - 1, (1 << 24) - 1
_REFUSED_STREAM, _INTERNAL_ERROR = 7, 2
_FRAME = struct.Struct(">BHBBI")  # length in 8 + 16 bits, type, flags, stream
_GRPC = struct.Struct(">BI")  # compressed, length

# ":status: 200" and "content-type: application/grpc", then "grpc-status: 0", as literals of HPACK (RFC 7541)
_REPLY_HEADERS = b"\x88\x0f\x10\x10application/grpc"
_REPLY_TRAILERS = b"\x00\x0bgrpc-status\x010"

_CHUNK = 1 << 18
_POLL_S = 0.25
"""Interval of `check` while nothing arrives."""

Check = Callable[[], object]
"""Raises an error when no message can be expected any more."""


class Disconnected(Exception):
    """The player has closed its connection."""


class ExchangeServer:
    """Holds a port of the loopback interface, and serves the first client that speaks HTTP/2; later ones are refused."""

    def __init__(self, port: int, listeners: list[socket.socket]) -> None:
        self.port = port
        self.refused = 0
        """Connections that were closed because a player was connected already."""
        self._listeners = listeners
        self._candidates: dict[int, tuple[socket.socket, bytearray]] = {}
        self._connection: _Connection | None = None
        self._poll = select.poll()
        for listener in listeners:
            self._poll.register(listener, select.POLLIN)

    @classmethod
    def bind(cls, port: int, *, tries: int = PORTS) -> ExchangeServer:
        """Bind the first free port from `port` on. Raises EnvironmentFault if there is none among `tries`."""
        last = min(port + tries, 65536)
        for number in range(port, last):
            listeners = _listen(number)
            if listeners is not None:
                if number != port:
                    log.info("Port %d is taken; the player uses %d.", port, number)
                return cls(number, listeners)
        if tries == 1:
            raise EnvironmentFault(f"Port {port} is taken by another program on this machine.")
        raise EnvironmentFault(f"All ports from {port} to {last - 1} are taken.", "Choose another env_config.base_port.")

    def __enter__(self) -> ExchangeServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def receive(self, timeout_s: float, check: Check = lambda: None) -> bytes:
        """The next request. Raises TimeoutError, Disconnected, and what `check` raises."""
        deadline = time.monotonic() + timeout_s
        while self._connection is None or (request := self._connection.take_request()) is None:
            self._wait(deadline, check)
        return request

    def reply(self, message: bytes, timeout_s: float, check: Check = lambda: None) -> None:
        """Answer the request that was taken last. Raises TimeoutError, Disconnected."""
        assert self._connection is not None
        connection = self._connection
        connection.reply(message)
        if connection.unsent:
            deadline = time.monotonic() + timeout_s
            while connection.unsent:
                self._wait(deadline, check)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        for candidate, _ in self._candidates.values():
            candidate.close()
        for listener in self._listeners:
            listener.close()
        self._candidates.clear()
        self._listeners = []

    def _wait(self, deadline: float, check: Check) -> None:
        left = deadline - time.monotonic()
        events = self._poll.poll(max(0.0, min(left, _POLL_S)) * 1000)
        if not events:
            check()
            if left <= 0:
                raise TimeoutError
        for descriptor, happened in events:
            if self._connection is not None and descriptor == self._connection.descriptor:
                if happened & select.POLLOUT:
                    self._connection.flush()
                if happened & ~select.POLLOUT:
                    self._connection.read()
                wanted = select.POLLIN | select.POLLOUT if self._connection.is_blocked else select.POLLIN
                self._poll.modify(descriptor, wanted)
            elif descriptor in self._candidates:
                self._read_preface(descriptor)
            else:
                self._accept(descriptor)

    def _accept(self, descriptor: int) -> None:
        listener = next(each for each in self._listeners if each.fileno() == descriptor)
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone away
            return
        except OSError as error:  # for example, no descriptor is left
            raise EnvironmentFault(f"No player can connect to port {self.port}: {error}.") from error
        if self._connection is not None:
            self.refused += 1
            log.warning("A second player has connected to port %d; it is refused.", self.port)
            client.close()
            return
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._candidates[client.fileno()] = client, bytearray()
        self._poll.register(client, select.POLLIN)

    def _read_preface(self, descriptor: int) -> None:
        """The first client that begins as HTTP/2 requires is the player."""
        client, begun = self._candidates[descriptor]
        try:
            data = client.recv(len(_PREFACE) - len(begun))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        begun += data
        if data and len(begun) < len(_PREFACE) and _PREFACE.startswith(begun):
            return
        del self._candidates[descriptor]
        if begun == _PREFACE and self._connection is None:
            self._connection = _Connection(client)
            return
        self._poll.unregister(descriptor)
        client.close()
        if begun == _PREFACE:
            self.refused += 1
        elif begun:
            log.warning("A program that is no player of Unity has connected to port %d; it is refused.", self.port)


class _Connection:
    """One connection of HTTP/2, as far as a gRPC client with unary calls uses it."""

    def __init__(self, client: socket.socket) -> None:
        self._socket, self.descriptor = client, client.fileno()
        self._received = bytearray()
        self._output = bytearray()
        self._bodies: dict[int, bytearray] = {}  # stream → data of a request that is not complete
        self._requests: list[tuple[int, bytes]] = []
        self._stream = 0  # of the request that was taken last
        self._data = memoryview(b"")  # of its reply, as far as the windows of the client do not allow to send it
        self._credit = _DEFAULT_WINDOW  # bytes that the client accepts on the connection
        self._stream_credit: dict[int, int] = {}  # stream → bytes in addition to the initial window
        self._initial_window, self._max_frame = _DEFAULT_WINDOW, _DEFAULT_FRAME
        self._consumed = 0
        settings = struct.pack(">HIHI", _INITIAL_WINDOW, _LARGEST_WINDOW, _MAX_FRAME, _LARGEST_FRAME)
        self._queue(_SETTINGS, 0, 0, settings)
        self._queue(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _LARGEST_WINDOW - _DEFAULT_WINDOW))
        self.flush()

    @property
    def is_blocked(self) -> bool:
        """Whether there is output that the socket does not take at the moment."""
        return bool(self._output)

    @property
    def unsent(self) -> bool:
        return bool(self._output) or bool(self._data)

    def take_request(self) -> bytes | None:
        if not self._requests:
            return None
        self._stream, request = self._requests.pop(0)
        return request

    def reply(self, message: bytes) -> None:
        self._queue(_HEADERS, 4, self._stream, _REPLY_HEADERS)
        self._data = memoryview(_GRPC.pack(0, len(message)) + message)
        self._send_data()

    def _send_data(self) -> None:
        """Send as much of the reply as the client accepts, and the trailers after it."""
        while self._data:
            room = min(self._credit, self._initial_window + self._stream_credit.get(self._stream, 0), self._max_frame)
            if room <= 0:
                break
            part, self._data = self._data[:room], self._data[room:]
            self._credit -= len(part)
            self._stream_credit[self._stream] = self._stream_credit.get(self._stream, 0) - len(part)
            self._queue(_DATA, 0, self._stream, part)
            if not self._data:
                self._queue(_HEADERS, 4 | _END_STREAM, self._stream, _REPLY_TRAILERS)
                del self._stream_credit[self._stream]
        self.flush()

    def _queue(self, kind: int, flags: int, stream: int, payload: bytes | memoryview) -> None:
        size = len(payload)
        self._output += _FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, stream)
        self._output += payload

    def flush(self) -> None:
        while self._output:
            try:
                sent = self._socket.send(self._output)
            except BlockingIOError:
                return
            except OSError as error:
                raise Disconnected(str(error)) from error
            del self._output[:sent]

    def read(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            raise Disconnected(str(error)) from error
        if not data:
            raise Disconnected("it has closed its connection")
        received = self._received
        received += data
        at, end = 0, len(received)
        while end - at >= _FRAME.size:
            high, low, kind, flags, stream = _FRAME.unpack_from(received, at)
            stop = at + _FRAME.size + (high << 16 | low)
            if stop > end:
                break
            if kind in _HANDLERS:
                try:
                    _HANDLERS[kind](self, flags, stream & 0x7FFFFFFF, bytes(received[at + _FRAME.size : stop]))
                except (struct.error, IndexError) as error:  # a payload that is shorter than its kind
                    raise Disconnected("it has sent a malformed frame of HTTP/2") from error
            at = stop
        del received[:at]
        self.flush()

    def _on_data(self, flags: int, stream: int, payload: bytes) -> None:
        self._consumed += len(payload)
        if self._consumed > 1 << 29:
            self._queue(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._consumed))
            self._consumed = 0
        if flags & _PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        body = self._bodies.get(stream)
        if body is None:
            return  # of a stream that was refused
        body += payload
        if len(body) > MAX_MESSAGE:
            raise Disconnected(f"it has sent a message of more than {MAX_MESSAGE:,} bytes")
        if flags & _END_STREAM:
            self._end_request(stream)

    def _on_headers(self, flags: int, stream: int, payload: bytes) -> None:
        if stream in self._bodies:  # trailers
            self._end_request(stream)
        elif flags & _END_STREAM:
            self._queue(_RST_STREAM, 0, stream, struct.pack(">I", _REFUSED_STREAM))  # a call without a message
        else:
            self._bodies[stream] = bytearray()

    def _end_request(self, stream: int) -> None:
        body = self._bodies.pop(stream)
        compressed, size = _GRPC.unpack_from(body) if len(body) >= _GRPC.size else (1, 0)
        if compressed or size != len(body) - _GRPC.size:
            self._queue(_RST_STREAM, 0, stream, struct.pack(">I", _INTERNAL_ERROR))
            raise Disconnected("it has sent a malformed message of gRPC")
        self._requests.append((stream, bytes(body[_GRPC.size :])))

    def _on_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if flags & _ACK:
            return
        for at in range(0, len(payload) - 5, 6):
            name, value = struct.unpack_from(">HI", payload, at)
            if name == _INITIAL_WINDOW:
                self._initial_window = value
            elif name == _MAX_FRAME:
                self._max_frame = value
        self._queue(_SETTINGS, _ACK, 0, b"")
        self._send_data()

    def _on_ping(self, flags: int, stream: int, payload: bytes) -> None:
        if not flags & _ACK:
            self._queue(_PING, _ACK, 0, payload)

    def _on_window_update(self, flags: int, stream: int, payload: bytes) -> None:
        (more,) = struct.unpack(">I", payload)
        if stream == 0:
            self._credit += more
        elif stream == self._stream or stream in self._bodies:
            self._stream_credit[stream] = self._stream_credit.get(stream, 0) + more
        if self._data:
            self._send_data()

    def _on_reset(self, flags: int, stream: int, payload: bytes) -> None:
        self._bodies.pop(stream, None)
        if stream == self._stream:
            raise Disconnected("it has cancelled its call")

    def _on_goaway(self, flags: int, stream: int, payload: bytes) -> None:
        raise Disconnected("it has ended its connection")

    def close(self) -> None:
        with contextlib.suppress(OSError, Disconnected):
            self._queue(_GOAWAY, 0, 0, struct.pack(">II", max(self._stream, 0), 0))
            self.flush()
        self._socket.close()


_HANDLERS: dict[int, Callable[[_Connection, int, int, bytes], None]] = {
    _DATA: _Connection._on_data,
    _HEADERS: _Connection._on_headers,
    _RST_STREAM: _Connection._on_reset,
    _SETTINGS: _Connection._on_settings,
    _PING: _Connection._on_ping,
    _GOAWAY: _Connection._on_goaway,
    _WINDOW_UPDATE: _Connection._on_window_update,
}


def _listen(port: int) -> list[socket.socket] | None:
    """Sockets that hold the port for both versions of the loopback address; None if it is taken.

    A player connects to `localhost`, which may be either.
    """
    listeners: list[socket.socket] = []
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:
                continue  # no such addresses on this machine
            for held in listeners:
                held.close()
            raise EnvironmentFault(f"Port {port} cannot be bound: {error}.") from error
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a connection that has ended
            listener.bind((address, port))
            listener.listen(8)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL and family == socket.AF_INET6:
                continue
            for held in listeners:
                held.close()
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return None
            raise EnvironmentFault(f"Port {port} cannot be bound: {error}.") from error
        listeners.append(listener)
    return listeners
