"""Whether an X server answers, asked in its own words: no library is needed, and nothing is left open.

DISPLAY may be set and lead nowhere: after a logout, in a job that inherited it from a login, in a container.
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
class Place:
    """`host`: empty for a socket of this machine."""

    host: str
    number: int


@dataclass(frozen=True)
class Entry:
    """Of an authority file. `number`: empty means any."""

    family: int
    address: bytes
    number: bytes
    name: bytes
    data: bytes


def place_of(display: str) -> Place | None:
    """None: no display can be meant."""
    matched = _DISPLAY.fullmatch(display.strip())
    if matched is None:
        return None
    host = matched["host"]
    return Place("" if host == "unix" else host, int(matched["number"]))


def silence(environ: Mapping[str, str], timeout_s: float = ANSWER_S) -> str:
    """Why the server that DISPLAY names does not answer; empty when it does. Never shows a secret."""
    display = environ.get(DISPLAY, "")
    if not display:
        return f"{DISPLAY} is not set"
    place = place_of(display)
    if place is None:
        return f"{DISPLAY}={display} is not the name of a display"
    try:
        with _connected(place, timeout_s) as connection:
            return _greeted(connection, _cookie(place, environ))
    except OSError as error:
        why = "it took too long" if isinstance(error, TimeoutError) else (error.strerror or str(error))
        return f"no X server answers at {DISPLAY}={display}: {why}"


def entries(data: bytes) -> Iterator[Entry]:
    """Of an authority file; what is cut off at its end is left out."""
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
            yield Entry(family, field(), field(), field(), field())


def written(entry: Entry) -> bytes:
    parts = (entry.address, entry.number, entry.name, entry.data)
    return struct.pack(">H", entry.family) + b"".join(struct.pack(">H", len(part)) + part for part in parts)


def for_any_display(cookie: bytes) -> bytes:
    """An authority file with one entry, for a display whose number is not known yet."""
    return written(Entry(_WILD, b"", b"", COOKIE, cookie))


def _connected(place: Place, timeout_s: float) -> socket.socket:
    if place.host:
        return socket.create_connection((place.host.strip("[]"), 6000 + place.number), timeout_s)
    path = f"{_SOCKETS}/X{place.number}"
    for address in (f"\0{path}", path):  # servers offer both; in a container only one may be reachable
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            if address == path:
                raise
        else:
            return connection
    raise AssertionError("the last address was tried")


def _cookie(place: Place, environ: Mapping[str, str]) -> bytes:
    file = Path(environ.get(AUTHORITY) or Path(environ.get("HOME") or "/") / ".Xauthority")
    try:
        data = file.read_bytes()
    except OSError:
        return b""
    number, here = str(place.number).encode(), os.uname().nodename.encode()
    for entry in entries(data):
        if entry.name != COOKIE or entry.number not in (b"", number):
            continue
        if entry.family == _WILD or (entry.family == _LOCAL and entry.address == here):
            return entry.data
        if place.host and entry.family == _INTERNET and entry.address == _internet(place.host):
            return entry.data
    return b""


def _internet(host: str) -> bytes:
    try:
        return socket.inet_aton(socket.gethostbyname(host))
    except OSError:
        return b""


def _greeted(connection: socket.socket, cookie: bytes) -> str:
    name = COOKIE if cookie else b""
    head = struct.pack("<cxHHHHxx", b"l", 11, 0, len(name), len(cookie))
    connection.sendall(head + _padded(name) + _padded(cookie))
    answer = b""
    while len(answer) < 8:
        more = connection.recv(8 - len(answer))
        if not more:
            return "the X server closed the connection"
        answer += more
    if answer[0] == _ACCEPTED:
        return ""
    said = connection.recv(answer[1]) if answer[0] == 0 else b""
    return f"the X server refuses us: {said.decode('latin-1').strip() or 'it requires authentication'}"


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
