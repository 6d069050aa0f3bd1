"""A client with full control over the bytes, for invalid and hostile requests."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PATIENCE_S = 5.0
"""Time limit of every request in these tests."""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def refusal(self) -> tuple[int, str]:
        """(status, error word) of a reply in the error format, which is checked."""
        assert self.headers["content-type"] == "application/json"
        data = json.loads(self.body)
        last = data.pop("last", None)
        assert last is None or (isinstance(last, int) and data["error"] == "seq")
        assert set(data) == {"error", "message", "hint"}
        assert all(isinstance(value, str) for value in data.values())
        assert data["error"]
        assert data["message"]
        return self.status, data["error"]

    @property
    def message(self) -> str:
        return str(json.loads(self.body)["message"])

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)


class Wire:
    """One connection."""

    def __init__(self, port: int, *, receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE_S)
        try:
            self.socket.connect(("127.0.0.1", port))
        except OSError:
            self.socket.close()
            raise
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def send(self, *data: bytes) -> None:
        for part in data:
            self.socket.sendall(part)

    def finish(self) -> None:
        """Shut down the write side."""
        self.socket.shutdown(socket.SHUT_WR)

    def read(self, *, bodiless: bool = False) -> Reply:
        """The next reply. ConnectionError when the connection ends before it is complete."""
        while b"\r\n\r\n" not in self._read:
            self._more()
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        version, status, _ = lines[0].split(" ", 2)
        assert version == "HTTP/1.1"
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        assert len(headers) == len(lines) - 1, "a header came twice"
        length = 0 if status == "100" or bodiless else int(headers["content-length"])
        while len(self._read) < length:
            self._more()
        body, self._read = self._read[:length], self._read[length:]
        return Reply(int(status), headers, body)

    def ask(self, data: bytes) -> Reply:
        self.send(data)
        return self.read()

    def closed(self) -> bool:
        """True when the peer has closed; False when it sends more. Raises TimeoutError."""
        try:
            return not self._read and not self.socket.recv(1)
        except ConnectionError:
            return True

    def replies(self, count: int) -> list[Reply]:
        return [self.read() for _ in range(count)]

    def rest(self) -> Iterator[Reply]:
        """Every reply until the connection ends."""
        while True:
            try:
                yield self.read()
            except ConnectionError:
                return

    def _more(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError(f"closed after {self._read[:200]!r}")
        self._read += data


def step(kind: str, session: str, body: bytes = b"", *, seq: int | None = None, headers: Sequence[str] = ()) -> bytes:
    """A request as a game sends it."""
    numbered = [] if seq is None else [f"seq: {seq}"]
    lines = [f"session: {session}", f"step_kind: {kind}", f"Content-Length: {len(body)}", *numbered, *headers]
    return raw("POST /step", lines, body)


def raw(target: str, headers: Sequence[str] = (), body: bytes = b"", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{target} HTTP/{version}", *headers, "", ""]).encode("latin-1") + body


def ask(port: int, data: bytes) -> Reply:
    """Send one request on a new connection."""
    with Wire(port) as wire:
        return wire.ask(data)


def play(port: int, session: str, body: bytes = b"still here") -> None:
    """Play a whole session with an echo actor on a new connection, to check that the server works."""
    with Wire(port) as wire:
        assert wire.ask(step("start", session)).status == 200
        assert wire.ask(step("tick", session, body)).body == body
        assert wire.ask(step("end", session)).status == 200
