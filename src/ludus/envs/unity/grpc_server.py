"""Unary gRPC calls of one client over HTTP/2 without encryption, answered by the thread that asks for them.

    with GrpcServer("127.0.0.1", 5005) as server:
        while (request := server.receive(timeout_s=1.0)) is None:
            …                                  # for example, check whether the player still runs
        server.reply(answer)

grpcio's server passes each call through its own threads, which takes 0.2 ms of CPU for a message of a player; this one takes 0.02 ms
(`python -m bench.unity`), and has no threads that a fork could break. It serves the one method of a Unity player, so it does not
decode the headers of a call: their content is the same each time.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from types import TracebackType
from typing import Final

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 0x1
_END_HEADERS, _PADDED = 0x4, 0x8
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 4, 5  # settings
_REFUSED_STREAM: Final = 7
_LARGEST_WINDOW: Final = 2**31 - 1
_DEFAULT_WINDOW: Final = 65_535
_FRAME_SIZE: Final = 1 << 20  # of received frames, at most
_HEAD: Final = 9  # bytes before the payload of a frame
_CHUNK: Final = 1 << 18

_RESPONSE: Final = b"\x88\x0f\x10\x10application/grpc"  # :status 200, content-type
_TRAILERS: Final = b"\x00\x0bgrpc-status\x010"

MAX_MESSAGE_BYTES: Final = 1 << 29
_CANDIDATES = 8
"""Open connections of which none has sent a call, at most."""


class ConnectionLost(Exception):
    """The client closed the connection, or sent something that is not gRPC."""


class GrpcServer:
    """A port of this machine and the first client that sends a call to it; further ones are refused until it has left.

    Raises OSError if the port is taken. `port` 0 takes a free one. Not for several threads, and not for forks.
    """

    def __init__(self, host: str, port: int, write_timeout_s: float = 60.0) -> None:
        self._listener = socket.create_server((host, port), backlog=16)
        self._listener.setblocking(False)
        self._write_timeout_s = write_timeout_s
        self.port: int = self._listener.getsockname()[1]
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._listening = self._listener.fileno()
        self._candidates: dict[int, _Connection] = {}
        self._client: _Connection | None = None
        self.refused = 0
        """Number of connections that were closed because there was a client."""

    def __enter__(self) -> GrpcServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        return self._client is not None

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the message of the next call; None if none is complete after `timeout_s`. Raises ConnectionLost."""
        client = self._client
        if client is not None and (message := client.next_message()) is not None:
            return message
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            for number, _ in self._poll.poll(1000 * left):
                if number == self._listening:
                    self._accept()
                elif self._client is not None and number == self._client.number:
                    self._client.read()
                    if (message := self._client.next_message()) is not None:
                        return message
                elif number in self._candidates and (message := self._first_message(number)) is not None:
                    return message
        return None

    def reply(self, message: bytes) -> None:
        """Answer the call that was received last. Raises ConnectionLost."""
        if self._client is None:
            raise ConnectionLost("there is no connection")
        self._client.reply(message)

    def disconnect(self) -> None:
        """Close the connection of the client, if there is one; another one may connect then."""
        if self._client is not None:
            self._drop(self._client)
            self._client = None

    def close(self) -> None:
        self.disconnect()
        for candidate in list(self._candidates.values()):
            self._drop(candidate)
        self._candidates.clear()
        self._listener.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # it has given up in the meantime
            return
        if self._client is not None or len(self._candidates) >= _CANDIDATES:
            self.refused += 1
            accepted.close()
            return
        candidate = _Connection(accepted, self._write_timeout_s)
        self._candidates[candidate.number] = candidate
        self._poll.register(candidate.number, select.POLLIN)

    def _first_message(self, number: int) -> bytes | None:
        """Read from a connection that has not sent a call yet. With its first call it becomes the client."""
        candidate = self._candidates[number]
        try:
            candidate.read()
            message = candidate.next_message()
        except ConnectionLost:
            self._drop(self._candidates.pop(number))
            return None
        if message is not None:
            self._client = self._candidates.pop(number)
            self.refused += len(self._candidates)
            for other in self._candidates.values():
                self._drop(other)
            self._candidates.clear()
        return message

    def _drop(self, connection: _Connection) -> None:
        self._poll.unregister(connection.number)
        connection.close()


class _Connection:
    """The server's side of an HTTP/2 connection, with one call at a time."""

    def __init__(self, accepted: socket.socket, write_timeout_s: float) -> None:
        self._socket = accepted
        self.number = accepted.fileno()
        accepted.setblocking(True)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        timeout = struct.pack("ll", int(write_timeout_s), int(write_timeout_s % 1 * 1e6))
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._received = bytearray()
        self._greeted = False
        self._stream = 0  # of the current call; 0: none
        self._message = bytearray()
        self._complete = False
        self._connection_window = self._stream_window = self._initial_window = _DEFAULT_WINDOW
        self._frame_size = 16_384
        self._unacknowledged = 0

    def read(self) -> None:
        """Read what has arrived; blocks if that is nothing. Raises ConnectionLost."""
        try:
            more = self._socket.recv(_CHUNK)
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not more:
            raise ConnectionLost("the connection was closed")
        self._received += more

    def next_message(self) -> bytes | None:
        """Return the message of a call if it has arrived completely. Raises ConnectionLost."""
        if not self._greeted:
            head = bytes(self._received[: len(_PREFACE)])
            if not _PREFACE.startswith(head):
                raise ConnectionLost("the client does not speak HTTP/2")
            if len(head) < len(_PREFACE):
                return None
            self._greet()
        while not self._complete:
            if not self._take_frame():
                return None
        self._complete = False
        size = int.from_bytes(self._message[1:5], "big")
        if len(self._message) != 5 + size or self._message[0]:
            raise ConnectionLost(f"a call of {len(self._message)} bytes is not one plain message")
        return bytes(self._message[5:])

    def _greet(self) -> None:
        del self._received[: len(_PREFACE)]
        self._greeted = True
        settings = struct.pack(">HIHI", _INITIAL_WINDOW_SIZE, _LARGEST_WINDOW, _MAX_FRAME_SIZE, _FRAME_SIZE)
        window = struct.pack(">I", _LARGEST_WINDOW - _DEFAULT_WINDOW)
        self._send(_frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window))

    def _take_frame(self) -> bool:
        """Process one frame; return False if it has not arrived completely."""
        received = self._received
        if len(received) < _HEAD:
            return False
        size = int.from_bytes(received[:3], "big")
        if size > _FRAME_SIZE:
            raise ConnectionLost(f"a frame of {size:,} bytes")
        if len(received) < _HEAD + size:
            return False
        kind, flags, stream = received[3], received[4], int.from_bytes(received[5:9], "big") & _LARGEST_WINDOW
        payload = bytes(received[_HEAD : _HEAD + size])
        del received[: _HEAD + size]
        if kind == _DATA:
            self._take_data(stream, flags, payload)
        elif kind == _HEADERS:
            self._begin_call(stream, flags)
        elif kind == _SETTINGS:
            if not flags & _ACK:
                self._adopt_settings(payload)
        elif kind == _PING:
            if not flags & _ACK:
                self._send(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            self._widen(stream, int.from_bytes(payload, "big") & _LARGEST_WINDOW)
        elif kind == _RST_STREAM and stream == self._stream:
            raise ConnectionLost("the call was cancelled")
        return True  # all others do not matter for calls without header fields

    def _begin_call(self, stream: int, flags: int) -> None:
        if self._stream:
            self._send(_frame(_RST_STREAM, 0, stream, struct.pack(">I", _REFUSED_STREAM)))
            return
        if flags & _END_STREAM:
            raise ConnectionLost("a call without a message")
        self._stream, self._stream_window = stream, self._initial_window
        self._message.clear()

    def _take_data(self, stream: int, flags: int, payload: bytes) -> None:
        self._unacknowledged += len(payload)
        if self._unacknowledged > _LARGEST_WINDOW // 2:
            self._send(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._unacknowledged)))
            self._unacknowledged = 0
        if stream != self._stream:
            return
        self._message += payload[1 : len(payload) - payload[0]] if flags & _PADDED and payload else payload
        if len(self._message) > MAX_MESSAGE_BYTES:
            raise ConnectionLost(f"a message of more than {MAX_MESSAGE_BYTES:,} bytes")
        self._complete = bool(flags & _END_STREAM)

    def _adopt_settings(self, payload: bytes) -> None:
        if len(payload) % 6:
            raise ConnectionLost("settings that are cut off")
        for name, value in struct.iter_unpack(">HI", payload):
            if name == _INITIAL_WINDOW_SIZE:
                self._stream_window += value - self._initial_window
                self._initial_window = value
            elif name == _MAX_FRAME_SIZE:
                self._frame_size = value
        self._send(_frame(_SETTINGS, _ACK, 0, b""))

    def _widen(self, stream: int, more: int) -> None:
        if stream == 0:
            self._connection_window += more
        elif stream == self._stream:
            self._stream_window += more

    def reply(self, message: bytes) -> None:
        """Answer the current call. Raises ConnectionLost."""
        if not self._stream:
            raise ConnectionLost("there is no call to answer")
        stream, body = self._stream, struct.pack(">BI", 0, len(message)) + message
        headers = _frame(_HEADERS, _END_HEADERS, stream, _RESPONSE)
        trailers = _frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, _TRAILERS)
        if len(body) <= min(self._frame_size, self._connection_window, self._stream_window):
            self._connection_window -= len(body)
            self._send(headers + _frame(_DATA, 0, stream, body) + trailers)
        else:
            self._send(headers)
            self._send_in_parts(body)
            self._send(trailers)
        self._stream = 0

    def _send_in_parts(self, body: bytes) -> None:
        at = 0
        while at < len(body):
            size = min(self._frame_size, self._connection_window, self._stream_window, len(body) - at)
            if size <= 0:
                if not self._take_frame():
                    self.read()  # until the client allows more
                continue
            self._send(_frame(_DATA, 0, self._stream, body[at : at + size]))
            self._connection_window -= size
            self._stream_window -= size
            at += size

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def close(self) -> None:
        """Tell the client that no call is answered any more, and close the connection."""
        with contextlib.suppress(OSError):
            self._socket.send(_frame(_GOAWAY, 0, 0, struct.pack(">II", _LARGEST_WINDOW, 0)), socket.MSG_DONTWAIT)
        self._socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
