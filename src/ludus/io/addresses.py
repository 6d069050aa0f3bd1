"""Addresses of processes and of this machine."""

from __future__ import annotations

import socket

from ludus.errors import UsageError

_SCHEME = "tcp://"
ANY_HOST = "::"
"""Host of a server that listens on all addresses of both families."""

_ANY_IPV4 = "0.0.0.0"  # noqa: S104
_MAPPED = "::ffff:"


def tcp_address(host: str, port: int) -> str:
    """`tcp://host:port`."""
    return f"{_SCHEME}{url_host(host)}:{port}"


def url_host(host: str) -> str:
    """Return a host as URLs contain it: an IPv6 address is in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def plain_address(address: str) -> str:
    """Return the address of a connection; that of an IPv4 peer at a socket for both families is an IPv4 address."""
    rest = address.removeprefix(_MAPPED)
    return rest if "." in rest else address


def make_listening_socket(host: str, family: int) -> tuple[socket.socket, str]:
    """Return a TCP socket, not yet bound, and the host to bind it to. `::` accepts both families, or IPv4 where there is no IPv6."""
    if host != ANY_HOST:
        return socket.socket(family, socket.SOCK_STREAM), host
    try:
        found = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:  # a kernel without IPv6
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM), _ANY_IPV4
    found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return found, host


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
