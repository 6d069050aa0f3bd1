"""A minimal X11 client that checks whether an X server accepts connections, without libX11.

DISPLAY may be set without a server: after a logout, in a job that inherited it from a login, in a container.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DISPLAY, AUTHORITY = "DISPLAY", "XAUTHORITY"
COOKIE = b"MIT-MAGIC-COOKIE-1"
ANSWER_S = 2.0

_DISPLAY = re.compile(r"(?:\w+/)?(?P<host>[^:]*):(?P<number>\d+)(?:\.\d+)?")
_SOCKETS = "/tmp/.X11-unix"  # noqa: S108 - where X servers put them
_INTERNET, _LOCAL, _WILD = 0, 256, 65535
_ACCEPTED = 1


@dataclass(frozen=True)
class DisplayAddress:
    """`host` is empty for a local socket."""

    host: str
    number: int


@dataclass(frozen=True)
class AuthorityEntry:
    """An entry of an Xauthority file. An empty `number` matches any display."""

    family: int
    address: bytes
    number: bytes
    name: bytes
    data: bytes


def socket_path(number: int) -> Path:
    """The socket of a local X server."""
    return Path(f"{_SOCKETS}/X{number}")


def parse_display(display: str) -> DisplayAddress | None:
    """Parse the value of DISPLAY; return None if it is not a display name."""
    matched = _DISPLAY.fullmatch(display.strip())
    if matched is None:
        return None
    host = matched["host"]
    return DisplayAddress("" if host == "unix" else host, int(matched["number"]))


def connection_error(environ: Mapping[str, str], timeout_s: float = ANSWER_S) -> str:
    """Return why the server of DISPLAY does not accept a connection; empty if it does. Never contains a secret."""
    display = environ.get(DISPLAY, "")
    if not display:
        return f"{DISPLAY} is not set"
    address = parse_display(display)
    if address is None:
        return f"{DISPLAY}={display} is not a display name"
    try:
        with _connect(address, timeout_s) as connection:
            return _handshake(connection, _cookie(address, environ))
    except OSError as error:
        why = "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error))
        return f"no X server answers at {DISPLAY}={display}: {why}"


def entries(data: bytes) -> Iterator[AuthorityEntry]:
    """Yield the entries of an Xauthority file; a truncated last entry is skipped."""
    at = 0

    def field() -> bytes:
        nonlocal at
        (size,) = struct.unpack_from(">H", data, at)
        at += 2 + size
        if at > len(data):
            raise struct.error
        return data[at - size : at]

    with contextlib.suppress(struct.error):
        while at < len(data):
            (family,) = struct.unpack_from(">H", data, at)
            at += 2
            yield AuthorityEntry(family, field(), field(), field(), field())


def encode_entry(entry: AuthorityEntry) -> bytes:
    parts = (entry.address, entry.number, entry.name, entry.data)
    return struct.pack(">H", entry.family) + b"".join(struct.pack(">H", len(part)) + part for part in parts)


def wildcard_authority(cookie: bytes) -> bytes:
    """Return an Xauthority file with one entry that matches any display."""
    return encode_entry(AuthorityEntry(_WILD, b"", b"", COOKIE, cookie))


def _connect(address: DisplayAddress, timeout_s: float) -> socket.socket:
    if address.host:
        return socket.create_connection((address.host.strip("[]"), 6000 + address.number), timeout_s)
    path = str(socket_path(address.number))
    for name in (f"\0{path}", path):  # in a container only one of them may be reachable
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(name)
        except OSError:
            connection.close()
            if name == path:
                raise
        else:
            return connection
    raise AssertionError("unreachable")


def _cookie(address: DisplayAddress, environ: Mapping[str, str]) -> bytes:
    file = Path(environ.get(AUTHORITY) or Path(environ.get("HOME") or "/") / ".Xauthority")
    try:
        data = file.read_bytes()
    except OSError:
        return b""
    number, here = str(address.number).encode(), os.uname().nodename.encode()
    for entry in entries(data):
        if entry.name != COOKIE or entry.number not in (b"", number):
            continue
        if entry.family == _WILD or (entry.family == _LOCAL and entry.address == here):
            return entry.data
        if address.host and entry.family == _INTERNET and entry.address == _ipv4_bytes(address.host):
            return entry.data
    return b""


def _ipv4_bytes(host: str) -> bytes:
    try:
        return socket.inet_aton(socket.gethostbyname(host))
    except OSError:
        return b""


def _handshake(connection: socket.socket, cookie: bytes) -> str:
    """Return why the server refuses; empty if it accepts."""
    send_setup(connection, cookie)
    return _refusal(connection, receive(connection, 8))


def send_setup(connection: socket.socket, cookie: bytes) -> None:
    name = COOKIE if cookie else b""
    head = struct.pack("<cxHHHHxx", b"l", 11, 0, len(name), len(cookie))
    connection.sendall(head + _pad(name) + _pad(cookie))


def _refusal(connection: socket.socket, answer: bytes) -> str:
    if len(answer) < 8:
        return "the X server closed the connection"
    if answer[0] == _ACCEPTED:
        return ""
    reason = connection.recv(answer[1]) if answer[0] == 0 else b""
    return f"the X server refuses the connection: {reason.decode('latin-1').strip() or 'it requires authentication'}"


def open_connection(environ: Mapping[str, str], timeout_s: float = ANSWER_S) -> tuple[socket.socket, bytes]:
    """Connect to the server of DISPLAY; return the connection and the data of its setup reply. Raises OSError."""
    address = parse_display(environ.get(DISPLAY, ""))
    if address is None:
        raise OSError(f"{DISPLAY}={environ.get(DISPLAY, '')} is not a display name")
    connection = _connect(address, timeout_s)
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        send_setup(connection, _cookie(address, environ))
        head = receive(connection, 8)
        if why := _refusal(connection, head):
            raise OSError(why)
        setup = receive(connection, 4 * struct.unpack_from("<H", head, 6)[0])
        undo.pop_all()
    return connection, setup


def receive(connection: socket.socket, size: int) -> bytes:
    """Read `size` bytes, or fewer if the server closes the connection."""
    data = bytearray()
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return bytes(data)


def _pad(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
