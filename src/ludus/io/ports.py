"""Free ports for programs that bind a port themselves."""

from __future__ import annotations

import errno
import socket
from typing import Final

_TRIES: Final = 100


def reserve_tcp_port(name: str) -> tuple[int, socket.socket]:
    """Return a free TCP port of loopback, and a socket that reserves it against other callers with this name while it is open."""
    return _reserve(name, socket.SOCK_STREAM, "127.0.0.1")


def reserve_udp_port(name: str) -> tuple[int, socket.socket]:
    """Return a UDP port that is free on every interface, and a socket that reserves it like `reserve_tcp_port`."""
    return _reserve(name, socket.SOCK_DGRAM, "")


def _reserve(name: str, kind: socket.SocketKind, address: str) -> tuple[int, socket.socket]:
    for _ in range(_TRIES):
        with socket.socket(socket.AF_INET, kind) as bound:
            bound.bind((address, 0))
            port = int(bound.getsockname()[1])
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0ludus-{name}-{port}")  # abstract socket: freed with the process
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port, claim
    raise OSError(errno.EADDRINUSE, f"{_TRIES} free ports in turn were reserved by other processes")
