from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from ludus.envs.unity.grpc_server import ConnectionLost, GrpcServer
from tests.unity_player.grpc_client import ConnectionEnded, GrpcClient
from tests.unity_player.messages import METHOD

TIMEOUT_S = 20.0


@pytest.fixture
def server() -> Iterator[GrpcServer]:
    with GrpcServer("127.0.0.1", 0, write_timeout_s=TIMEOUT_S) as served:
        yield served


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def connect(server: GrpcServer) -> GrpcClient:
    return GrpcClient("127.0.0.1", server.port, METHOD, TIMEOUT_S)


def answer(server: GrpcServer, make: Callable[[bytes], bytes] = lambda request: request) -> bytes:
    request = server.receive(TIMEOUT_S)
    assert request is not None
    server.reply(make(request))
    return request


@pytest.mark.parametrize("size", [0, 1, 100, 16_379, 16_380, 70_000, 3_000_000])
def test_messages_of_any_size_go_both_ways(server: GrpcServer, executor: ThreadPoolExecutor, size: int) -> None:
    with contextlib.closing(connect(server)) as client:
        for content in (b"a", b"b"):
            called = executor.submit(client.call, content * size)
            assert answer(server, bytes.upper) == content * size
            assert called.result(TIMEOUT_S) == content.upper() * size


@pytest.mark.parametrize("size", [1, 40_000, 6_000_000])
def test_the_client_of_grpcio_is_answered(server: GrpcServer, executor: ThreadPoolExecutor, size: int) -> None:
    """Unity's client is built on the same library."""
    grpc = pytest.importorskip("grpc")
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options=unlimited) as channel:
        call = channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None)
        for _ in range(50 if size < 10_000 else 3):
            called: Future[bytes] = executor.submit(call, b"x" * size, timeout=TIMEOUT_S)
            assert answer(server, bytes.upper) == b"x" * size
            assert called.result(TIMEOUT_S) == b"X" * size


def test_nothing_is_received_before_the_time_is_over(server: GrpcServer) -> None:
    assert server.receive(0.01) is None
    assert not server.connected
    with contextlib.closing(connect(server)):
        assert server.receive(0.05) is None, "connected, but without a call"
        assert not server.connected


def test_the_port_is_held(server: GrpcServer) -> None:
    with pytest.raises(OSError, match="in use"):
        GrpcServer("127.0.0.1", server.port)


def test_a_port_is_free_again_after_its_server(server: GrpcServer, executor: ThreadPoolExecutor) -> None:
    with contextlib.closing(connect(server)) as client:
        called = executor.submit(client.call, b"x")
        answer(server)
        called.result(TIMEOUT_S)
        server.close()
        with GrpcServer("127.0.0.1", server.port):
            pass


def test_a_second_client_is_refused_and_the_first_one_goes_on(server: GrpcServer, executor: ThreadPoolExecutor) -> None:
    with contextlib.closing(connect(server)) as first:
        called = executor.submit(first.call, b"first")
        answer(server)
        called.result(TIMEOUT_S)
        with contextlib.closing(connect(server)) as second:
            refused = executor.submit(second.call, b"second")
            assert server.receive(0.2) is None
            with pytest.raises(ConnectionEnded):
                refused.result(TIMEOUT_S)
        assert server.refused == 1
        called = executor.submit(first.call, b"again")
        assert answer(server) == b"again"
        assert called.result(TIMEOUT_S) == b"again"


def test_another_client_may_come_after_a_disconnect(server: GrpcServer, executor: ThreadPoolExecutor) -> None:
    with contextlib.closing(connect(server)) as first:
        called = executor.submit(first.call, b"first")
        assert server.receive(TIMEOUT_S) == b"first"
        server.disconnect()
        with pytest.raises(ConnectionEnded):
            called.result(TIMEOUT_S)
    with contextlib.closing(connect(server)) as second:
        called = executor.submit(second.call, b"second")
        assert answer(server) == b"second"
        assert called.result(TIMEOUT_S) == b"second"


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HT", b"\0" * 100])
def test_strangers_do_not_keep_the_player_out(server: GrpcServer, executor: ThreadPoolExecutor, greeting: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as stranger:
        stranger.sendall(greeting)
        assert server.receive(0.02) is None
        with contextlib.closing(connect(server)) as client:
            called = executor.submit(client.call, b"player")
            assert answer(server) == b"player"
            assert called.result(TIMEOUT_S) == b"player"


def test_a_client_that_leaves_is_reported(server: GrpcServer, executor: ThreadPoolExecutor) -> None:
    client = connect(server)
    called = executor.submit(client.call, b"x")
    answer(server)
    called.result(TIMEOUT_S)
    client.close()
    with pytest.raises(ConnectionLost):
        server.receive(TIMEOUT_S)


def test_a_client_that_leaves_before_the_answer_is_reported(server: GrpcServer) -> None:
    grpc = pytest.importorskip("grpc")
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        future = channel.unary_unary(METHOD).future(b"x", timeout=TIMEOUT_S)
        assert server.receive(TIMEOUT_S) == b"x"
        future.cancel()
        with pytest.raises(ConnectionLost, match="cancelled"):
            server.receive(TIMEOUT_S)


def test_a_client_that_takes_nothing_is_given_up(executor: ThreadPoolExecutor) -> None:
    """It opened no window for an answer of this size."""
    with (
        GrpcServer("127.0.0.1", 0, write_timeout_s=0.2) as server,
        socket.create_connection(("127.0.0.1", server.port)) as client,
    ):
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
        headers = b"\0\0\x01\x01\x04\0\0\0\x01" + b"\x83"
        data = b"\0\0\x06\0\x01\0\0\0\x01" + b"\0\0\0\0\x01x"
        client.sendall(preface + headers + data)
        assert server.receive(TIMEOUT_S) == b"x"
        with pytest.raises(ConnectionLost):
            server.reply(b"y" * 1_000_000)


@pytest.mark.parametrize(
    "frame",
    [
        b"\0\0\x05\0\x01\0\0\0\x01" + b"\0\0\0\0\x09",  # shorter than its prefix says
        b"\0\0\x06\0\x01\0\0\0\x01" + b"\x01\0\0\0\x01x",  # compressed
        b"\0\0\x01\0\x01\0\0\0\x01" + b"\0",
        b"\xff\xff\xff\0\x01\0\0\0\x01",
        b"\0\0\x05\x04\0\0\0\0\0" + b"12345",
        b"\0\0\x04\x03\0\0\0\0\x01" + b"\0\0\0\x08",
    ],
)
def test_a_client_with_broken_frames_does_not_become_the_player(server: GrpcServer, frame: bytes) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as client:
        client.sendall(preface + b"\0\0\x01\x01\x04\0\0\0\x01" + b"\x83" + frame)
        assert server.receive(0.05) is None
        assert not server.connected
        while client.recv(1000):
            pass


def test_pings_are_answered_while_a_call_waits(server: GrpcServer) -> None:
    with contextlib.closing(connect(server)) as client:
        thread = threading.Thread(target=client.call, args=(b"x",), daemon=True)
        thread.start()
        assert server.receive(TIMEOUT_S) == b"x"
        client._socket.sendall(b"\0\0\x08\x06\0\0\0\0\0" + b"12345678")
        assert server.receive(0.05) is None
        server.reply(b"y")
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
