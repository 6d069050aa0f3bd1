"""Unary gRPC calls over an HTTP/2 connection without encryption, one at a time."""

from __future__ import annotations

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 0x1, 0x1, 0x4, 0x8
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5  # settings
LARGEST_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
CHUNK = 1 << 18
HEAD = struct.Struct(">BHBBI")  # of a frame: length in 8 + 16 bits, kind, flags, stream


class ConnectionEnded(Exception):
    """The server closed the connection, or refused the call."""


class GrpcClient:
    """A connection to a server. Raises OSError if it cannot be opened."""

    def __init__(self, host: str, port: int, method: str, timeout_s: float | None = None) -> None:
        self._socket = socket.create_connection((host, port), timeout_s)
        self.port = port
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._headers = self._header_block(method, f"{host}:{port}")
        self._received = bytearray()
        self._stream = -1
        self._connection_window = self._stream_window = self._initial_window = DEFAULT_WINDOW
        self._frame_size = 16_384
        self._unacknowledged = 0
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, LARGEST_WINDOW)
        window = struct.pack(">I", LARGEST_WINDOW - DEFAULT_WINDOW)
        self._socket.sendall(PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, window))

    @staticmethod
    def _header_block(method: str, authority: str) -> bytes:
        def literal(value: str) -> bytes:
            return bytes((len(value),)) + value.encode()

        indexed = b"\x83\x86"  # :method POST, :scheme http
        named = b"\x04" + literal(method) + b"\x01" + literal(authority)  # :path, :authority
        content_type = b"\x0f\x10" + literal("application/grpc")
        return indexed + named + content_type + b"\x00" + literal("te") + literal("trailers")

    def call(self, request: bytes) -> bytes:
        """Send a message and return the answer. Raises ConnectionEnded."""
        try:
            return self._call(request)
        except OSError as error:
            raise ConnectionEnded(str(error)) from error

    def _call(self, request: bytes) -> bytes:
        self._stream += 2
        self._stream_window = self._initial_window
        body = struct.pack(">BI", 0, len(request)) + request
        headers = _frame(HEADERS, END_HEADERS, self._stream, self._headers)
        if len(body) <= min(self._frame_size, self._connection_window, self._stream_window):
            self._connection_window -= len(body)
            self._socket.sendall(headers + _frame(DATA, END_STREAM, self._stream, body))
        else:
            self._socket.sendall(headers)
            self._send_in_parts(body)
        answer = bytearray()
        while not self._read_frame(answer):
            pass
        if len(answer) < 5:
            raise ConnectionEnded("the server refused the call")
        return bytes(answer[5 : 5 + int.from_bytes(answer[1:5], "big")])

    def _send_in_parts(self, body: bytes) -> None:
        at = 0
        while at < len(body):
            size = min(self._frame_size, self._connection_window, self._stream_window, len(body) - at)
            if size <= 0:
                self._read_frame(bytearray())  # until the server allows more
                continue
            last = END_STREAM if at + size == len(body) else 0
            self._socket.sendall(_frame(DATA, last, self._stream, body[at : at + size]))
            self._connection_window -= size
            self._stream_window -= size
            at += size

    def _read_frame(self, answer: bytearray) -> bool:
        """Read one frame; return whether the answer is complete."""
        received = self._received
        while len(received) < HEAD.size:
            self._receive()
        high, low, kind, flags, stream = HEAD.unpack_from(received)
        end = HEAD.size + (high << 16 | low)
        while len(received) < end:
            self._receive()
        payload = received[HEAD.size : end]
        del received[:end]
        size = len(payload)
        if kind == HEADERS:
            return stream == self._stream and bool(flags & END_STREAM)
        if kind == DATA:
            self._acknowledge(size)
            if stream == self._stream:
                answer += payload[1 : size - payload[0]] if flags & PADDED else payload
        elif kind == SETTINGS and not flags & ACK:
            self._adopt(payload)
        elif kind == PING and not flags & ACK:
            self._socket.sendall(_frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(payload, "big") & LARGEST_WINDOW
            if stream == 0:
                self._connection_window += more
            elif stream == self._stream:
                self._stream_window += more
        elif kind == RST_STREAM and stream == self._stream:
            raise ConnectionEnded(f"the server cancelled the call: {int.from_bytes(payload, 'big')}")
        elif kind == GOAWAY and int.from_bytes(payload[:4], "big") & LARGEST_WINDOW < self._stream:
            raise ConnectionEnded("the server takes no more calls")
        return kind == DATA and stream == self._stream and bool(flags & END_STREAM)

    def _adopt(self, settings: bytearray) -> None:
        for name, value in struct.iter_unpack(">HI", settings):
            if name == INITIAL_WINDOW_SIZE:
                self._stream_window += value - self._initial_window
                self._initial_window = value
            elif name == MAX_FRAME_SIZE:
                self._frame_size = value
        self._socket.sendall(_frame(SETTINGS, ACK, 0, b""))

    def _acknowledge(self, size: int) -> None:
        self._unacknowledged += size
        if self._unacknowledged > LARGEST_WINDOW // 2:
            self._socket.sendall(_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._unacknowledged)))
            self._unacknowledged = 0

    def _receive(self) -> None:
        more = self._socket.recv(CHUNK)
        if not more:
            raise ConnectionEnded("the server closed the connection")
        self._received += more

    def close(self) -> None:
        self._socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes | bytearray) -> bytes:
    size = len(payload)
    return HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload
