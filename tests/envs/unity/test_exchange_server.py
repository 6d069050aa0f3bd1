"""The gRPC server of a Unity player, called by the official gRPC library in another process."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from ludus.envs.unity.exchange_server import Disconnected, ExchangeServer
from ludus.errors import EnvironmentFault

WAIT_S = 20.0
FIRST_PORT = 21_000


@pytest.fixture
def server() -> Iterator[ExchangeServer]:
    with ExchangeServer.bind(FIRST_PORT) as bound:
        yield bound


def start_client(server: ExchangeServer, program: str) -> subprocess.Popen[str]:
    """Run lines that call `exchange(bytes)`."""
    pytest.importorskip("grpc")
    before = f"""
        import grpc
        channel = grpc.insecure_channel("localhost:{server.port}", options=[("grpc.max_receive_message_length", -1)])
        exchange = channel.unary_unary("/communicator_objects.UnityToExternalProto/Exchange")
    """
    lines = textwrap.dedent(before) + textwrap.dedent(program)
    return subprocess.Popen([sys.executable, "-c", lines], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_messages_of_all_sizes_arrive_and_are_answered(server: ExchangeServer) -> None:
    sizes = [0, 1, 300, 16_384, 65_535, 65_536, 5_000_000]
    client = start_client(
        server,
        f"""
        for size in {sizes}:
            data = bytes(number % 251 for number in range(size))
            assert exchange(data, timeout={WAIT_S}) == data[::-1], size
        print("all", flush=True)
        """,
    )
    with client:
        for _ in sizes:
            server.reply(server.receive(WAIT_S)[::-1], WAIT_S)
        with pytest.raises(Disconnected):
            server.receive(WAIT_S)
        assert client.stdout is not None
        assert client.stdout.read().strip() == "all"


def test_a_second_client_is_refused_and_the_first_goes_on(server: ExchangeServer) -> None:
    client = start_client(server, f"print([exchange(b'one', timeout={WAIT_S}), exchange(b'two', timeout={WAIT_S})])")
    with client:
        assert server.receive(WAIT_S) == b"one"
        with socket.create_connection(("127.0.0.1", server.port)) as second:
            second.settimeout(WAIT_S)
            with pytest.raises(TimeoutError):
                server.receive(0.1)
            assert second.recv(1) == b""
        assert server.refused == 1
        server.reply(b"1", WAIT_S)
        assert server.receive(WAIT_S) == b"two"
        server.reply(b"2", WAIT_S)
        assert client.stdout is not None
        assert client.stdout.read().strip() == "[b'1', b'2']"


def test_a_program_that_speaks_http_1_is_refused_and_the_player_can_still_connect(server: ExchangeServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        browser.settimeout(WAIT_S)
        with pytest.raises(TimeoutError):
            server.receive(0.1)
        with pytest.raises((ConnectionResetError, AssertionError)):
            assert browser.recv(1) != b""
    assert not server.is_connected
    with start_client(server, f"exchange(b'player', timeout={WAIT_S})"):
        assert server.receive(WAIT_S) == b"player"
        server.reply(b"", WAIT_S)


def test_the_port_is_held_and_the_next_server_takes_another_one(server: ExchangeServer) -> None:
    with ExchangeServer.bind(server.port) as other:
        assert other.port > server.port
    with pytest.raises(EnvironmentFault, match=f"Port {server.port} is taken"):
        ExchangeServer.bind(server.port, tries=1)


def test_a_port_of_another_program_on_all_addresses_is_not_used() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with ExchangeServer.bind(port) as server:
            assert server.port > port


def test_it_listens_on_the_loopback_interface_only(server: ExchangeServer) -> None:
    addresses = {listener.getsockname()[0] for listener in server._listeners}
    assert addresses <= {"127.0.0.1", "::1"}
    assert "127.0.0.1" in addresses


def test_a_check_that_fails_ends_the_wait(server: ExchangeServer) -> None:
    began = time.monotonic()

    def check() -> None:
        raise RuntimeError("the player has ended")

    with pytest.raises(RuntimeError, match="the player has ended"):
        server.receive(600.0, check)
    assert time.monotonic() - began < 60


def test_a_client_that_cancels_its_call_is_noticed(server: ExchangeServer) -> None:
    client = start_client(server, "call = exchange.future(b'x'); import time; time.sleep(1); call.cancel(); time.sleep(600)")
    with client:
        assert server.receive(WAIT_S) == b"x"
        with pytest.raises(Disconnected):
            server.receive(WAIT_S)
        client.kill()


@pytest.mark.parametrize(
    "frame",
    [
        b"\0\0\x05\0\x01\0\0\0\x01" + b"\0\0\0\0\x09",  # a message that is shorter than its prefix says
        b"\0\0\x06\0\x01\0\0\0\x01" + b"\x01\0\0\0\x01x",  # a compressed message
        b"\0\0\x01\0\x01\0\0\0\x01" + b"\0",  # less than a prefix
        b"\0\0\0\0\x09\0\0\0\x01",  # padded, without the length of the padding
        b"\0\0\x02\x08\0\0\0\0\0" + b"12",  # a window update of two bytes
    ],
)
def test_broken_frames_end_the_connection(server: ExchangeServer, frame: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        client.sendall(b"\0\0\x01\x01\x04\0\0\0\x01" + b"\x83" + frame)
        with pytest.raises(Disconnected):
            server.receive(WAIT_S)


def test_a_client_that_takes_nothing_is_given_up(server: ExchangeServer) -> None:
    """It opened no window for an answer of this size."""
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        client.sendall(b"\0\0\x01\x01\x04\0\0\0\x01" + b"\x83" + b"\0\0\x06\0\x01\0\0\0\x01" + b"\0\0\0\0\x01x")
        assert server.receive(WAIT_S) == b"x"
        with pytest.raises(TimeoutError):
            server.reply(bytes(1_000_000), 0.2)


def test_a_connection_for_which_no_descriptor_is_left_is_an_error(server: ExchangeServer) -> None:
    class FullListener(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            raise OSError(errno.EMFILE, "Too many open files")

    first = server._listeners[0]
    full = FullListener(fileno=first.detach())
    server._listeners[0] = full
    with socket.create_connection(("127.0.0.1", server.port)), pytest.raises(EnvironmentFault, match="Too many open files"):
        server.receive(WAIT_S, lambda: None)
