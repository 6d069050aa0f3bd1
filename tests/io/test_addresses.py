from __future__ import annotations

import socket

import pytest

from ludus.io.addresses import (
    ANY_HOST,
    host_and_port,
    interface_addresses,
    is_tcp,
    local_address,
    make_listening_socket,
    plain_address,
    tcp_address,
    url_host,
)


@pytest.mark.parametrize("host", ["10.0.0.1", "node-1", "fe80::1"])
def test_an_address_comes_back_as_it_was(host: str) -> None:
    address = tcp_address(host, 7001)
    assert is_tcp(address)
    assert host_and_port(address) == (host, 7001)


@pytest.mark.parametrize(
    ("host", "written"), [("10.0.0.1", "10.0.0.1"), ("node-1", "node-1"), ("fd00::5", "[fd00::5]"), ("[::1]", "[::1]")]
)
def test_an_address_of_ipv6_is_in_brackets_in_a_url(host: str, written: str) -> None:
    assert url_host(host) == written


def test_an_ipv4_peer_has_its_own_address() -> None:
    for address, plain in (
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("fd00::ffff:1", "fd00::ffff:1"),
        ("::", "::"),
    ):
        assert plain_address(address) == plain


def test_a_server_on_all_addresses_serves_both_families() -> None:
    bound, host = make_listening_socket(ANY_HOST, socket.AF_INET6)
    with bound:
        bound.bind((host, 0))
        bound.listen()
        for client in ("127.0.0.1", "::1"):
            try:
                socket.create_connection((client, bound.getsockname()[1]), 5).close()
            except OSError:
                assert client == "::1", "this machine may have no IPv6"


def test_without_ipv6_a_server_on_all_addresses_serves_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without_ipv6(family: int, kind: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, kind)

    monkeypatch.setattr(socket, "socket", without_ipv6)
    bound, host = make_listening_socket(ANY_HOST, socket.AF_INET6)
    with bound:
        assert (bound.family, host) == (socket.AF_INET, "0.0.0.0")


def test_this_machine_is_seen_from_itself_as_loopback() -> None:
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert local_address("localhost", 80, socket.AF_INET) == "127.0.0.1"
    with pytest.raises(OSError, match=r".+"):
        local_address("no such name")


def test_the_loopback_interface_has_its_address() -> None:
    assert "127.0.0.1" in interface_addresses().values()
