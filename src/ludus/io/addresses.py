"""Addresses of processes and of this machine."""

from __future__ import annotations

import socket

from ludus.errors import UsageError

_SCHEME = "tcp://"


def tcp_address(host: str, port: int) -> str:
    """`tcp://host:port`."""
    return f"{_SCHEME}[{host}]:{port}" if ":" in host else f"{_SCHEME}{host}:{port}"


def is_tcp(address: str) -> bool:
    return address.startswith(_SCHEME)


def host_and_port(address: str) -> tuple[str, int]:
    """Of `tcp://host:port`. Raises UsageError."""
    host, _, port = address.removeprefix(_SCHEME).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not is_tcp(address) or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{address!r} is not an address.", "Write tcp://host:port.")
    return host, int(port)


def local_address(host: str, port: int = 9, family: int = socket.AF_UNSPEC) -> str:
    """The address of this machine that `host` sees; nothing is sent. Raises OSError when the name or the way there is not known."""
    found, _, _, _, address = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
    with socket.socket(found, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_addresses() -> dict[str, str]:
    """Name of each network interface -> its first IPv4 address; empty for one that has none."""
    import psutil

    return {
        name: next((address.address for address in addresses if address.family == socket.AF_INET), "")
        for name, addresses in psutil.net_if_addrs().items()
    }
