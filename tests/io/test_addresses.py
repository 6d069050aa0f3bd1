from __future__ import annotations

import socket

import pytest

from ludus.io.addresses import host_and_port, interface_addresses, is_tcp, local_address, tcp_address


@pytest.mark.parametrize("host", ["10.0.0.1", "node-1", "fe80::1"])
def test_an_address_comes_back_as_it_was(host: str) -> None:
    address = tcp_address(host, 7001)
    assert is_tcp(address)
    assert host_and_port(address) == (host, 7001)


def test_this_machine_is_seen_from_itself_as_loopback() -> None:
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert local_address("localhost", 80, socket.AF_INET) == "127.0.0.1"
    with pytest.raises(OSError, match=r".+"):
        local_address("no such name")


def test_the_loopback_interface_has_its_address() -> None:
    assert "127.0.0.1" in interface_addresses().values()
