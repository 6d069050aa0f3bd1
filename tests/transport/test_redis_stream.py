"""The exchange over a real Redis server: the contract, and what becomes of it when the server is killed, paused, full or strict."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ludus.errors import ExchangeUnavailable, UnknownName, UsageError
from ludus.testing.background_call import Call
from ludus.testing.exchange_contract import ExchangeContract, MakeExchange, contents, pull_all
from ludus.testing.memory_contract import ROWS, SPEC, sign, signature
from ludus.transport.message_stream import PASSWORD, MessageStream, open_message_stream
from ludus.transport.redis_stream import RedisMessageStream, _ConnectionLost, _ErrorReply
from ludus.transport.shared_memory import BlockLayout
from ludus.transport.stream_memory import StreamReader, StreamWriter
from tests.redis_server import Line, RedisServer

pytestmark = pytest.mark.system

WAIT_S = 30.0
SOON_S = 10.0  # a call that returns by then did not hang; how fast it is, is not the question


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """For tests that leave it as it was."""
    with RedisServer(tmp_path_factory.mktemp("redis"), aof=False) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, fsync="always") as own:
        yield own


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that give up sooner than is good for real networks."""
    monkeypatch.setattr("ludus.transport.redis_stream._CALL_S", 0.1)
    monkeypatch.setattr("ludus.transport.redis_stream._REPLY_S", 0.1)


class TestRedisExchange(ExchangeContract):
    @pytest.fixture
    def make(self, shared: RedisServer) -> MakeExchange:
        return lambda channel, room: RedisMessageStream(shared.player_url, channel, room)


def open_exchange(url: str, channel: str = "run", room: int = 100) -> RedisMessageStream:
    return RedisMessageStream(url, channel, room)


def refusal(url: str) -> UsageError:
    with closing(open_exchange(url)) as exchange, pytest.raises(UsageError) as caught:
        exchange.waiting()
    return caught.value


# -- killed -------------------------------------------------------------------------------------------------------------


def kill_under_writing(server: RedisServer, kills: int, between_s: float) -> tuple[list[int], int, StreamReader]:
    """Numbers that arrived, how many were pushed, and the reader; the server is killed so often on the way."""
    layout, over, arrived = BlockLayout(SPEC, ROWS), threading.Event(), list[int]()
    ends = [open_exchange(server.player_url, "run", 50) for _ in range(3)]
    writer = StreamWriter(ends[0], layout, worker="w", plan="p")
    reader = StreamReader(ends[1], layout, plan="p", inspect=lambda _: None)

    def write() -> int:
        number = 0
        while not over.is_set():
            if (block := writer.reserve(0.2)) is not None:
                writer.commit(sign(block, number % 1000))
                number += 1
        assert writer.flush(WAIT_S)
        return number

    def read() -> None:
        while not (over.is_set() and not writing.alive and ends[1].waiting() == 0):
            if (received := reader.take()) is None:
                reader.wait(0.1)
                continue
            arrived.append(received.seq)
            assert signature(received.segments) == received.seq % 1000
            reader.release(received)

    writing = Call(write)
    reading = Call(read)
    for _ in range(kills):
        seen = len(arrived)
        time.sleep(between_s)
        server.kill()
        server.start()
        end = time.monotonic() + WAIT_S
        while len(arrived) <= seen and time.monotonic() < end:
            time.sleep(0.01)
    over.set()
    pushed = writing.result()
    reading.result()
    for exchange in ends:
        exchange.close()
    return arrived, pushed, reader


def test_a_server_that_is_killed_loses_nothing_that_it_took(server: RedisServer) -> None:
    arrived, pushed, reader = kill_under_writing(server, kills=3, between_s=0.15)
    assert pushed > 50
    assert sorted(arrived) == list(range(pushed)), "every message once"
    assert reader.lost == 0


@pytest.mark.long
def test_a_server_that_is_killed_often_loses_nothing_that_it_took(server: RedisServer) -> None:
    arrived, pushed, reader = kill_under_writing(server, kills=40, between_s=0.5)
    assert sorted(arrived) == list(range(pushed))
    assert reader.lost == 0


def test_what_a_process_that_was_killed_had_in_hand_comes_to_the_next(shared: RedisServer) -> None:
    channel = uuid.uuid4().hex
    script = (
        "import sys, time; from ludus.transport.message_stream import open_message_stream\n"
        "got = open_message_stream(sys.argv[1], sys.argv[2], 10).pull(2, 30)\n"
        "print(len(got), flush=True); time.sleep(600)"
    )
    with closing(open_exchange(shared.full_url, channel)) as exchange:
        for number in range(3):
            exchange.push(b"%d" % number, 0)
        environment = os.environ | {PASSWORD: shared.password}
        command = [sys.executable, "-c", script, shared.url, channel]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"2\n"
            reader.send_signal(signal.SIGKILL)
        assert exchange.reclaim(0) == 2
        assert contents(pull_all(exchange, 3)) == [b"0", b"1", b"2"]


def test_a_server_that_lost_its_data_is_used_as_a_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        RedisServer(tmp_path, aof=False) as server,
        closing(open_exchange(server.player_url)) as one,
        closing(open_exchange(server.player_url, room=2)) as other,
    ):
        other.push(b"gone", 0)
        other.push(b"gone too", 0)
        (held,) = one.pull(1, 0)
        server.restart()
        with caplog.at_level(logging.WARNING, "ludus.transport"):
            assert one.pull(1, 0.05) == []
        assert "has lost its data" in caplog.text
        one.acknowledge([held.id])
        assert other.push(b"new", WAIT_S), "the room that it had filled is empty"
        assert contents(pull_all(one, 1)) == [b"new"]


def test_a_reader_that_waits_when_the_data_is_lost_goes_on_waiting(server: RedisServer) -> None:
    with closing(open_exchange(server.player_url)) as reader, closing(open_exchange(server.player_url)) as writer:
        assert reader.pull(1, 0) == []
        waiting = Call(lambda: contents(reader.pull(1, WAIT_S)))
        oracle = server.client()
        with closing(oracle):
            end = time.monotonic() + WAIT_S
            while not oracle.info("clients")["blocked_clients"] and time.monotonic() < end:
                time.sleep(0.005)
            oracle.flushall()
        assert writer.push(b"after", 0)
        assert waiting.result() == [b"after"]


# -- out of reach -------------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[MessageStream], object]] = {
    "push": lambda e: e.push(bytes(100_000), 0.1),
    "push at once": lambda e: e.push(b"", 0),
    "pull": lambda e: e.pull(5, 0.1),
    "acknowledge": lambda e: e.acknowledge(["1-1"]),
    "reclaim": lambda e: e.reclaim(0),
    "waiting": lambda e: e.waiting(),
    "post": lambda e: e.post("key", b""),
    "read": lambda e: e.read("key"),
    "posted": lambda e: e.posted(""),
    "erase": lambda e: e.erase("key"),
    "drop": lambda e: e.drop(),
}


@pytest.mark.usefixtures("quick")
def test_no_call_outlasts_a_server_that_does_not_answer(server: RedisServer) -> None:
    with closing(open_exchange(server.player_url)) as used, closing(open_exchange(server.player_url)) as fresh:
        assert used.pull(1, 0) == []
        with server.paused():
            for name, call in CALLS.items():
                for exchange in (used, fresh):
                    began = time.monotonic()
                    with pytest.raises(ExchangeUnavailable, match=f"127.0.0.1:{server.port}"):
                        call(exchange)
                    assert time.monotonic() - began < SOON_S, name
            used.close()
        assert used.push(b"x", WAIT_S)
        assert fresh.push(b"x", WAIT_S)
        assert fresh.waiting() >= 2


def test_what_a_paused_server_gave_to_a_connection_that_was_given_up_comes_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.transport.redis_stream._REPLY_S", 0.2)
    with closing(open_exchange(server.player_url)) as reader, closing(open_exchange(server.player_url)) as writer:
        for number in range(3):
            writer.push(b"%d" % number, 0)
        assert contents(reader.pull(1, 0)) == [b"0"]
        with server.paused(), pytest.raises(ExchangeUnavailable):
            reader.pull(10, 0)  # the request is on its way, and the server will serve it when it wakes
        assert contents(reader.pull(10, WAIT_S)) == [b"1", b"2"]
        assert reader.pull(10, 0) == []


@pytest.mark.usefixtures("quick")
def test_a_server_that_is_not_there_is_named_and_found_when_it_comes(server: RedisServer) -> None:
    server.kill()
    with closing(open_exchange(server.full_url)) as exchange:
        for call in CALLS.values():
            with pytest.raises(ExchangeUnavailable, match=f"127.0.0.1:{server.port} cannot be reached") as caught:
                call(exchange)
            assert server.password not in repr(caught.value) + repr(caught.value.__cause__)
        waiting = Call(lambda: exchange.push(b"x", WAIT_S))
        server.start()
        assert waiting.result() is True


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_line_that_is_cut_anywhere_loses_nothing(shared: RedisServer, way: str) -> None:
    channel, body = uuid.uuid4().hex, os.urandom(20_000)
    with Line(shared.port) as line:
        url = shared.player_url.replace(str(shared.port), str(line.port))
        with closing(open_exchange(url, channel, 1000)) as writer, closing(open_exchange(url, channel, 1000)) as reader:
            found, number = list[int](), 0
            for place in (1, 3, 40, 70, 100, 300, 2_000, 15_000, 20_050, 20_090, 20_120, 39_000, 41_000, 60_300):
                for _ in range(2):
                    line.cut_after(**{way: place})
                    for _ in range(2):
                        assert writer.push([b"%06d" % number, body], WAIT_S)
                        number += 1
                    for delivery in reader.pull(10, 0.02):
                        assert bytes(delivery.data[6:]) == body
                        found.append(int(bytes(delivery.data[:6])))
                        reader.acknowledge([delivery.id])
            line.cut_after()
            while portion := reader.pull(10, 0.1):
                found += [int(bytes(delivery.data[:6])) for delivery in portion]
                reader.acknowledge([delivery.id for delivery in portion])
            assert line.cuts >= 20
            assert set(found) == set(range(number))
            assert reader.waiting() == 0


@pytest.mark.usefixtures("quick")
def test_a_server_that_is_not_redis_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            for greeting in (
                b"HTTP/1.1 400 Bad Request\r\n\r\n",
                b"\x16\x03\x01garbage",
                b"",
                b"*-7\r\n$99999999999999\r\n",
                b"+" * 9000,
            ):
                near, _ = listener.accept()
                with near:
                    near.recv(100)
                    near.sendall(greeting)

        serving = Call(serve)
        for _ in range(5):
            with (
                closing(open_exchange(f"redis://127.0.0.1:{port}")) as exchange,
                pytest.raises((ExchangeUnavailable, UsageError)),
            ):
                exchange.push(b"x", 0)
        serving.result()


# -- strict -------------------------------------------------------------------------------------------------------------


def test_a_wrong_password_is_a_usage_error_that_tells_the_host_and_no_secret(
    shared: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(PASSWORD, raising=False)
    caplog.set_level(logging.DEBUG)
    for url in (
        shared.url,
        shared.full_url.replace(shared.password, "guessed-secret"),
        shared.player_url.replace(shared.player_password, "guessed-secret"),
        shared.player_url.replace("player", "stranger"),
    ):
        error = refusal(url)
        assert f"127.0.0.1:{shared.port}" in error.message
        assert PASSWORD in error.hint
        shown = f"{error!r} {error.__cause__!r} {caplog.text}"
        assert not any(secret in shown for secret in ("guessed-secret", shared.password, shared.player_password))


def test_the_password_is_taken_from_the_environment(shared: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, shared.player_password)
    with closing(open_message_stream(shared.url.replace("://", "://player@"), "environment", 5)) as exchange:
        assert exchange.push(b"x", 0)
    monkeypatch.delenv(PASSWORD)
    with pytest.raises(UsageError, match=f"no password for the user 'player' of Redis at 127.0.0.1:{shared.port}"):
        open_exchange(shared.url.replace("://", "://player@"))


def test_a_user_without_permission_gets_the_needed_acl(shared: RedisServer) -> None:
    with closing(shared.client()) as admin:
        admin.execute_command("ACL", "SETUSER", "guest", "on", ">guestpw", "~other:*", "+@all")
    error = refusal(shared.url.replace("://", "://guest:guestpw@"))
    assert "does not allow" in error.message
    assert "~ludus:*" in error.hint
    assert "guestpw" not in repr(error)


def test_keys_of_something_else_are_not_touched(shared: RedisServer) -> None:
    with closing(shared.client()) as admin:
        admin.set("ludus:{taken}:messages", "mine")
        with closing(open_exchange(shared.full_url, "taken")) as exchange, pytest.raises(UsageError, match="WRONGTYPE"):
            exchange.push(b"x", 0)
        assert admin.get("ludus:{taken}:messages") == b"mine"


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"x y", b"\xff\xff", b"99999999999999999999 x", b" ", b"1e300 x"])
def test_garbage_in_place_of_a_notice_is_replaced(shared: RedisServer, garbage: bytes) -> None:
    with closing(shared.client()) as admin, closing(open_exchange(shared.full_url, "spoiled")) as exchange:
        assert exchange.post("worker/1", b"before", 5)
        admin.hset("ludus:{spoiled}:board", "worker/1", garbage)
        exchange.read("worker/1")
        assert exchange.post("worker/1", b"after")
        assert exchange.read("worker/1") == b"after"
        exchange.drop()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("redis://host:port", UsageError),
        ("redis://host?nonsense=1", UsageError),
        ("redis://host?db=many", UsageError),
        ("rabbit://host", UnknownName),
        ("host:6379", UnknownName),
        ("local", UsageError),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        open_message_stream(url, "run", 5)


def test_a_channel_needs_a_name_and_room(shared: RedisServer) -> None:
    for channel, room in (("", 5), ("run", 0)):
        with pytest.raises(UsageError, match="channel"):
            open_exchange(shared.url, channel, room)


def test_over_tls_the_certificate_is_checked(tmp_path: Path) -> None:
    with RedisServer(tmp_path, aof=False, tls=True) as server:
        large = os.urandom(3_000_000)
        with closing(open_exchange(server.player_url)) as writer, closing(open_exchange(server.full_url)) as reader:
            assert writer.push([b"head", large, b"tail"], WAIT_S)
            assert contents(pull_all(reader, 1)) == [b"head" + large + b"tail"]
        untrusting = server.full_url.partition("?")[0]
        assert "not trusted" in refusal(untrusting).message
        assert "does not exist" in refusal(f"{untrusting}?ssl_ca_certs=/nowhere/ca.crt").message


# -- full, and read-only ------------------------------------------------------------------------------------------------


def test_a_server_without_memory_counts_as_full(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ludus.transport")
    with closing(open_exchange(server.player_url)) as exchange, closing(server.client()) as admin:
        assert exchange.push(bytes(1_000_000), 0)
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] - 200_000)
        assert not exchange.push(bytes(1_000_000), 0)
        assert not exchange.push(bytes(1_000_000), 0.1)
        assert "no memory left" in caplog.text
        assert len(caplog.records) == 1
        with pytest.raises(ExchangeUnavailable, match="no memory left"):
            exchange.post("key", b"value")
        (held,) = pull_all(exchange, 1)  # reading is what makes room
        exchange.acknowledge([held.id])
        assert exchange.push(b"small", WAIT_S)
        admin.config_set("maxmemory", 0)
        assert exchange.post("key", b"value")


def test_a_message_that_may_be_there_is_not_called_refused(shared: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to it is lost, and then there is no memory for it any more."""
    with closing(open_exchange(shared.full_url, uuid.uuid4().hex)) as exchange:
        exchange_once, pushed = exchange._connection.exchange, list[bool]()

        def answer(request: Any, answers: int, end: float) -> list[Any]:
            if answers != 2 or not pushed:
                said = exchange_once(request, answers, end)
            if answers != 2:
                return said
            pushed.append(True)
            if len(pushed) == 1:
                raise _ConnectionLost("it closed the connection", at_once=True)
            return [_ErrorReply("OOM command not allowed when used memory > 'maxmemory'."), 1]

        monkeypatch.setattr(exchange._connection, "exchange", answer)
        with pytest.raises(ExchangeUnavailable, match="no room now"):
            exchange.push(b"x", 0)
        assert exchange.waiting() == 1


@pytest.mark.usefixtures("quick")
def test_a_server_that_only_reads_for_now_is_waited_for(server: RedisServer) -> None:
    with closing(open_exchange(server.player_url)) as exchange, closing(server.client()) as admin:
        assert exchange.push(b"1", 0)
        admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        for call in (CALLS["push"], CALLS["pull"], CALLS["post"]):
            with pytest.raises(ExchangeUnavailable, match="READONLY"):
                call(exchange)
        waiting = Call(lambda: exchange.push(b"2", WAIT_S))
        admin.execute_command("REPLICAOF", "NO", "ONE")
        assert waiting.result() is True
        assert b"2" in contents(pull_all(exchange, exchange.waiting()))


def test_a_message_above_the_size_limit_is_skipped(shared: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.transport.redis_stream._MAX_BULK", 10_000)
    channel = uuid.uuid4().hex
    with closing(open_exchange(shared.full_url, channel)) as exchange:
        for size in (10, 10_001, 9_000, 100_000, 20):
            exchange.push(bytes(size), 0)
        assert [len(data) for data in contents(pull_all(exchange, 5))] == [10, 0, 9_000, 0, 20]


def test_what_another_program_put_into_the_stream_is_delivered_as_nothing(shared: RedisServer) -> None:
    channel = uuid.uuid4().hex
    with closing(open_exchange(shared.full_url, channel)) as exchange, closing(shared.client()) as admin:
        admin.xadd(f"ludus:{{{channel}}}:messages", {"who": "somebody", "what": "else"})
        exchange.push(b"ours", 0)
        assert contents(pull_all(exchange, 2)) == [b"", b"ours"]


# -- tidy ---------------------------------------------------------------------------------------------------------------


def consumers(admin: Any, channel: str) -> int:
    return len(admin.xinfo_consumers(f"ludus:{{{channel}}}:messages", "learners"))


def test_a_reader_leaves_the_group_unless_it_has_something_in_hand(shared: RedisServer) -> None:
    channel = uuid.uuid4().hex
    with closing(shared.client()) as admin, closing(open_exchange(shared.player_url, channel)) as writer:
        for number in range(2):
            writer.push(b"%d" % number, 0)
        first, second = open_exchange(shared.player_url, channel), open_exchange(shared.player_url, channel)
        (done,) = first.pull(1, 0)
        assert len(second.pull(1, 0)) == 1
        first.acknowledge([done.id])
        assert consumers(admin, channel) == 2
        first.close()
        second.close()
        assert consumers(admin, channel) == 1
        with closing(open_exchange(shared.player_url, channel)) as heir:
            assert heir.reclaim(0) == 1


def test_what_is_dropped_leaves_no_key_behind(shared: RedisServer) -> None:
    channel = uuid.uuid4().hex
    with closing(shared.client()) as admin, closing(open_exchange(shared.player_url, channel)) as exchange:
        exchange.push(b"x", 0)
        exchange.post("key", b"")
        assert len(admin.keys(f"ludus:{{{channel}}}:*")) == 2
        exchange.drop()
        assert admin.keys(f"ludus:{{{channel}}}:*") == []


def test_acknowledged_messages_take_up_no_memory(shared: RedisServer) -> None:
    channel = uuid.uuid4().hex
    with closing(shared.client()) as admin, closing(open_exchange(shared.player_url, channel, 1000)) as exchange:
        for _ in range(3):
            for size in (100, 10_000):
                for _ in range(100):
                    exchange.push(bytes(size), 0)
            exchange.acknowledge([delivery.id for delivery in pull_all(exchange, 200)])
        assert admin.memory_usage(f"ludus:{{{channel}}}:messages") < 10_000
