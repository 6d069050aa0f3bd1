"""The connection of one game: messages are JSON objects behind their length, 4 bytes, little-endian.

The game connects to a port of this machine's loopback interface. The port is bound before the game starts, and stays bound while it
runs, so that no other training can take it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ludus.errors import ConfigError, EnvironmentFault

MAX_MESSAGE_BYTES = 256 << 20
MAX_PORTS = 1000
"""Ports that are tried after the first one."""

_PREFIX = struct.Struct("<I")
_CHUNK = 1 << 18
_POLL_S = 0.2
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_QUOTED = 200


class Fault(Protocol):
    """Makes an error from what is known about the game. `gone`: its connection ended, and its process may be about to."""

    def __call__(self, message: str, hint: str = "", *, gone: bool = False) -> EnvironmentFault: ...


def bind_port(first: int, count: int = MAX_PORTS) -> socket.socket:
    """Listen on the first free port from `first` on. Raises ConfigError if all `count` are taken."""
    for port in range(first, min(first + count, 65536)):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(1)  # two sockets may bind a port with this option, but only one can listen
        except OSError as error:
            listener.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
        else:
            return listener
    ports = f"port {first} is" if count == 1 else f"the ports {first} to {min(first + count, 65536) - 1} are"
    raise ConfigError(f"config.env_config.port: {ports} taken by other programs.", f"See them with: ss -ltnp 'sport = :{first}'")


class GameConnection:
    """Messages to and from one game. After an error it cannot be used any more."""

    def __init__(self, stream: socket.socket, timeout_s: float, fault: Fault) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.settimeout(timeout_s)
        self._stream, self._timeout_s, self._fault = stream, timeout_s, fault
        self._received = bytearray()

    def send(self, message: Mapping[str, Any]) -> None:
        data = _to_json(message).encode()
        try:
            self._stream.sendall(_PREFIX.pack(len(data)) + data)
        except TimeoutError:
            raise self._fault(f"It did not read a message within {self._timeout_s:g} s.") from None
        except OSError as error:
            raise self._fault(f"Its connection broke: {error.strerror or error}.", gone=True) from error

    def receive(self, kind: str) -> dict[str, Any]:
        """The next message, which has the type `kind`. Raises EnvironmentFault."""
        deadline = time.monotonic() + self._timeout_s
        self._read(_PREFIX.size, deadline, kind)
        (length,) = _PREFIX.unpack_from(self._received)
        if length > MAX_MESSAGE_BYTES:
            raise self._fault(
                f"It announced a message of {length:,} bytes; at most {MAX_MESSAGE_BYTES:,} are accepted.",
                "Does it speak the protocol of Godot RL Agents?",
            )
        self._read(_PREFIX.size + length, deadline, kind)
        data = bytes(self._received[_PREFIX.size : _PREFIX.size + length])
        del self._received[: _PREFIX.size + length]
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            quoted = data[:_QUOTED].decode("utf-8", "replace")
            raise self._fault(f"It sent a message that is not JSON ({error}): {quoted!r}") from error
        found = message.get("type") if isinstance(message, dict) else None
        if found != kind:
            quoted = data[:_QUOTED].decode("utf-8", "replace")
            raise self._fault(f"It sent a message of type {found!r} where {kind!r} was due: {quoted!r}")
        return dict(message)

    def _read(self, size: int, deadline: float, kind: str) -> None:
        """Receive until `size` bytes are there."""
        while len(self._received) < size:
            try:
                data = self._stream.recv(_CHUNK)
                if time.monotonic() > deadline:  # it sends a byte now and then
                    raise TimeoutError
            except TimeoutError:
                raise self._fault(
                    f"It sent no {kind!r} within {self._timeout_s:g} s.", "A longer time: env_config: {timeout: 300}."
                ) from None
            except OSError as error:
                raise self._fault(f"Its connection broke: {error.strerror or error}.", gone=True) from error
            if not data:
                raise self._fault(f"It closed the connection where {kind!r} was due.", gone=True)
            self._received += data

    def close(self) -> None:
        """Ask the game to end, and close the connection."""
        with contextlib.suppress(OSError, EnvironmentFault):
            self._stream.settimeout(1.0)
            data = json.dumps({"type": "close"}).encode()
            self._stream.sendall(_PREFIX.pack(len(data)) + data)
        self._stream.close()


def accept(listener: socket.socket, timeout_s: float, check: Callable[[], None]) -> socket.socket | None:
    """Wait for the game to connect; None if it did not within `timeout_s`. `check` is called often, and may raise."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(min(left, _POLL_S))
        try:
            return listener.accept()[0]
        except TimeoutError:
            check()
    return None
