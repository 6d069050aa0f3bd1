"""The Python client: numbering, retries and errors, with real gateways and misbehaving servers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ludus.errors import LudusError, Refused, Unreachable, UsageError
from ludus.gateway.actor import Actor
from ludus.gateway.server import GatewaySettings
from ludus.gateway.sessions import SessionLimits
from ludus.protocol.client import AsyncClient, Client
from tests.local_servers import Served, gateway


class Counting(Actor):
    """Replies with its number of ticks, which reveals requests processed twice."""

    def __init__(self) -> None:
        self.ticks = 0

    async def start(self, session: str, body: bytes) -> bytes:
        return b"started " + session.encode() + b" " + body

    async def tick(self, body: bytes) -> bytes:
        if body == b"refuse":
            raise Refused(422, "observation", "It does not fit.", "Send another.")
        if body == b"raise":
            raise RuntimeError("broken")
        self.ticks += 1
        return b"%d %b" % (self.ticks, body)

    async def end(self, body: bytes) -> bytes:
        return b"ended %d" % self.ticks


@pytest.fixture
def served() -> Iterator[Served]:
    with gateway(Counting, GatewaySettings(spec={"observation_space": {"type": "Discrete", "n": 3}})) as served:
        yield served


# -- a server that follows a script -------------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@contextlib.contextmanager
def scripted(*turns: bytes | Callable[[socket.socket], None] | None) -> Iterator[tuple[str, list[bytes]]]:
    """A scripted server: for each request bytes to reply, None to close, or a function. Yields (url, requests)."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)

        def serve() -> None:
            left = list(turns)
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                while left:
                    connected = stack.enter_context(listening.accept()[0])
                    connected.settimeout(10)
                    while left and (request := connected.recv(65536)):
                        requests.append(request)
                        turn = left.pop(0)
                        if turn is None:
                            connected.close()
                            break
                        if isinstance(turn, bytes):
                            connected.sendall(turn)
                            if b"Connection: close" in turn:
                                break
                        else:
                            turn(connected)
                            break
                while listening.accept():
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", requests
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(10)


def stay_silent(connected: socket.socket) -> None:
    """Keeps the connection open without a reply."""


def seq_of(request: bytes) -> int:
    return next(int(line.partition(b":")[2]) for line in request.split(b"\r\n") if line.lower().startswith(b"ludus-seq"))


# -- playing


def test_a_match_is_played_from_start_to_end(served: Served) -> None:
    with Client(served.url) as client:
        assert client.start("a", b"map 3", match="m-1") == b"started a map 3"
        assert client.tick("a", b"x") == b"1 x"
        assert client.tick("a", bytes(300_000))[:2] == b"2 "
        assert client.tick("a", b"") == b"3 "
        assert client.end("a") == b"ended 3"
    assert len(served.gateway.sessions) == 0


def test_sessions_of_one_client_do_not_disturb_each_other(served: Served) -> None:
    with Client(served.url) as client:
        for name in ("a", "b", "größe 7"):
            client.start(name)
        for number in range(1, 4):
            assert [client.tick(name, b"") for name in ("b", "a", "größe 7")] == [b"%d " % number] * 3
        assert client.end("größe 7") == b"ended 3"


def test_the_connection_is_kept(served: Served) -> None:
    with Client(served.url) as client:
        client.start("a")
        for _ in range(5):
            client.tick("a", b"")
        assert served.gateway.counters()["connections"] == 1


def test_an_id_may_be_used_again_after_its_end(served: Served) -> None:
    with Client(served.url) as client:
        for _ in range(3):
            client.start("a")
            assert client.tick("a", b"") == b"1 "
            client.end("a")


def test_spec_returns_version_and_spaces(served: Served) -> None:
    with Client(served.url) as client:
        assert client.spec()["protocol"] == 1
        assert client.spec()["observation_space"] == {"type": "Discrete", "n": 3}


def test_the_token_is_required() -> None:
    with gateway(Counting, GatewaySettings(token="s3cret")) as served:
        with Client(served.url, token="s3cret") as client:
            assert client.start("a") == b"started a "
        with Client(served.url, token="wrong") as client, pytest.raises(Refused) as refused:
            client.start("b")
        assert (refused.value.status, refused.value.error) == (401, "unauthorized")


# -- refusals


def test_a_refused_tick_may_be_corrected(served: Served) -> None:
    with Client(served.url) as client:
        client.start("a")
        with pytest.raises(Refused) as refused:
            client.tick("a", b"refuse")
        assert (refused.value.status, refused.value.error, refused.value.hint) == (422, "observation", "Send another.")
        assert client.tick("a", b"x") == b"1 x"


def test_a_session_whose_actor_failed_is_over(served: Served) -> None:
    with Client(served.url) as client:
        client.start("a")
        with pytest.raises(Refused, match="RuntimeError") as refused:
            client.tick("a", b"raise")
        assert refused.value.status == 500
        with pytest.raises(Refused) as refused:
            client.tick("a", b"x")
        assert (refused.value.status, refused.value.error) == (404, "unknown_session")
        client.start("a")
        assert client.tick("a", b"x") == b"1 x"


def test_a_start_after_one_that_failed_is_not_taken_for_its_retry() -> None:
    fail = [True, False]

    class Failing(Counting):
        async def start(self, session: str, body: bytes) -> bytes:
            if fail.pop(0):
                raise RuntimeError("not yet")
            return b"now"

    with gateway(Failing) as served, Client(served.url) as client:
        with pytest.raises(Refused, match="RuntimeError"):
            client.start("a")
        assert client.start("a") == b"now"


def test_another_clients_session_is_refused_by_the_server(served: Served) -> None:
    with Client(served.url) as one, Client(served.url) as other:
        one.start("a")
        one.tick("a", b"")
        with pytest.raises(Refused) as refused:
            other.start("a")
        assert (refused.value.status, refused.value.error) == (409, "already_started")


def test_a_foreign_reply_is_refused_with_its_status() -> None:
    page = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 6\r\n\r\n<html>"
    with scripted(page) as (url, _), Client(url) as client, pytest.raises(Refused) as refused:
        client.start("a")
    assert (refused.value.status, refused.value.error) == (403, "http")


def test_a_spec_that_is_not_json_is_refused() -> None:
    with scripted(OK) as (url, _), Client(url) as client, pytest.raises(Refused, match="not a JSON object"):
        client.spec()


# -- retries


def test_a_lost_reply_is_requested_again_with_the_same_seq() -> None:
    with scripted(OK, None, OK) as (url, requests), Client(url) as client:
        client.start("a")
        assert client.tick("a", b"x") == b"ok"
    assert requests[1] == requests[2]
    assert [seq_of(r) for r in requests] == [0, 1, 1]


def test_a_retry_does_not_count_twice(served: Served) -> None:
    """A proxy between client and gateway loses every third reply."""
    upstream = ("127.0.0.1", served.port)
    with _lossy_proxy(upstream, lose_every=3) as url, Client(url) as client:
        client.start("a")
        assert [client.tick("a", b"x") for _ in range(10)] == [b"%d x" % (i + 1) for i in range(10)]
        assert client.end("a") == b"ended 10"
    assert served.gateway.sessions.stats.repeated >= 3


@contextlib.contextmanager
def _lossy_proxy(upstream: tuple[str, int], lose_every: int) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            count = 0
            with contextlib.suppress(OSError):
                while True:
                    with listening.accept()[0] as client, socket.create_connection(upstream, 10) as server:
                        client.settimeout(10)
                        while request := client.recv(65536):
                            server.sendall(request)
                            reply, count = server.recv(65536), count + 1
                            if count % lose_every == 0:
                                break
                            client.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(15)


def test_retry_after_is_honoured_within_the_retries() -> None:
    busy = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n"
    with scripted(busy, busy, OK) as (url, requests), Client(url, retries=2) as client:
        assert client.start("a") == b"ok"
    assert len(requests) == 3
    with scripted(busy, busy, OK) as (url, requests), Client(url, retries=1) as client, pytest.raises(Refused) as refused:
        client.start("a")
    assert (refused.value.status, refused.value.retry_after_s, len(requests)) == (503, 0.0, 2)


def test_a_wait_longer_than_the_time_out_is_left_to_the_caller() -> None:
    busy = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3600\r\nContent-Length: 0\r\n\r\n"
    with scripted(busy, OK) as (url, requests), Client(url) as client, pytest.raises(Refused) as refused:
        client.start("a")
    assert (refused.value.status, refused.value.retry_after_s, len(requests)) == (429, 3600.0, 1)


def test_a_real_limit_on_the_rate_is_obeyed() -> None:
    settings = GatewaySettings(sessions=SessionLimits(requests_per_s=2.0))
    with gateway(Counting, settings) as served, Client(served.url) as client:
        client.start("a")
        assert [client.tick("a", b"") for _ in range(4)] == [b"1 ", b"2 ", b"3 ", b"4 "]


# -- when there is no answer


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}", retries=1) as client, pytest.raises(Unreachable) as error:
        client.start("a")
    assert f"127.0.0.1:{port}" in error.value.message
    assert error.value.hint == "Start the server, or correct the url."


def test_a_silent_server_times_out() -> None:
    given_up = pytest.raises(Unreachable, match=r"within 0\.1 s")
    with scripted(stay_silent) as (url, _), Client(url, timeout_s=0.1, retries=0) as client, given_up:
        client.start("a")


def test_a_trickling_server_times_out() -> None:
    def trickle(connected: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connected.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while True:
                connected.sendall(b"x" * 10)
                threading.Event().wait(0.02)

    given_up = pytest.raises(Unreachable, match=r"within 0\.3 s")
    with scripted(trickle) as (url, _), Client(url, timeout_s=0.3, retries=0) as client, given_up:
        client.start("a")


@pytest.mark.parametrize(
    "rubbish",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nno length",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n",
        b"HTTP/1.1 abc OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nmore than that",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
    ],
)
def test_a_reply_that_is_not_http_is_an_error(rubbish: bytes) -> None:
    broke = pytest.raises(Unreachable, match="broke")
    with scripted(rubbish) as (url, _), Client(url, timeout_s=2.0, retries=0) as client, broke:
        client.start("a")


def test_after_no_answer_only_the_same_tick_or_the_end_may_follow() -> None:
    with scripted(OK, None, OK) as (url, requests), Client(url, retries=0) as client:
        client.start("a")
        with pytest.raises(Unreachable):
            client.tick("a", b"x")
        with pytest.raises(Unreachable, match="got no reply"):
            client.tick("a", b"y")
        assert client.tick("a", b"x") == b"ok"
    assert [seq_of(r) for r in requests] == [0, 1, 1]


@pytest.mark.parametrize("counted", [True, False])
def test_a_session_with_an_unanswered_tick_can_be_ended(counted: bool) -> None:
    words = b'{"error": "seq", "message": "m", "hint": "h", "last": 1}'
    conflict = b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\n\r\n%b" % (len(words), words)
    with scripted(OK, None, *([conflict] if counted else []), OK) as (url, requests), Client(url, retries=0) as client:
        client.start("a")
        with pytest.raises(Unreachable):
            client.tick("a", b"x")
        assert client.end("a") == b"ok"
    assert [seq_of(r) for r in requests] == ([0, 1, 1, 2] if counted else [0, 1, 1])


def test_a_connection_that_the_server_closes_is_replaced() -> None:
    closing = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    with scripted(closing, OK) as (url, _), Client(url, retries=0) as client:
        assert client.start("a") == b"ok"
        assert client.tick("a", b"") == b"ok"


# -- the direct way


def test_the_endpoint_is_followed_only_when_asked(served: Served) -> None:
    direct = f"HTTP/1.1 200 OK\r\nLudus-Endpoint: 127.0.0.1:{served.port}\r\nContent-Length: 0\r\n\r\n".encode()
    with scripted(direct, OK) as (url, requests), Client(url, direct=False) as client:
        client.start("a")
        assert client.tick("a", b"") == b"ok"
        assert len(requests) == 2
    with scripted(direct) as (url, requests), Client(url, direct=True) as client:
        client.start("a")
        with pytest.raises(Refused) as refused:
            client.tick("a", b"")  # the real gateway knows nothing of a start that the scripted one answered
        assert (refused.value.status, len(requests)) == (404, 1)


def test_a_closed_direct_port_falls_back_to_the_shared_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    direct = f"HTTP/1.1 200 OK\r\nLudus-Endpoint: 127.0.0.1:{port}\r\nContent-Length: 0\r\n\r\n".encode()
    with scripted(direct, OK) as (url, requests), Client(url, direct=True) as client:
        client.start("a")
        assert client.tick("a", b"") == b"ok"
    assert [seq_of(r) for r in requests] == [0, 1]


# -- what cannot be


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://host:port", "http://host/?q=1", "http://host:99999"]
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="url"):
        Client(url)


@pytest.mark.parametrize("session", ["", "a\r\nX: y", " a", "a\n", "x" * 257, "\x00"])
def test_a_session_that_cannot_be_a_header_is_refused(session: str) -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(UsageError, match="session"):
        client.start(session)


def test_a_token_that_cannot_be_a_header_is_refused_without_being_shown() -> None:
    with pytest.raises(UsageError) as error:
        Client(token="se\r\ncret")
    assert "cret" not in str(error.value)


def test_a_tick_without_a_start_is_refused_before_anything_is_sent() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(Refused) as refused:
        client.tick("a", b"")
    assert (refused.value.status, refused.value.error) == (404, "unknown_session")


@pytest.mark.parametrize("settings", [{"timeout_s": 0}, {"retries": -1}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Client(**settings)


# -- the same, awaited


def test_the_async_client_plays_many_matches_at_a_time(served: Served) -> None:
    async def match(name: str) -> bytes:
        async with AsyncClient(served.url) as client:
            await client.start(name)
            for number in range(1, 11):
                assert await client.tick(name, b"x") == b"%d x" % number
            return await client.end(name)

    async def play() -> list[bytes]:
        return await asyncio.gather(*(match(f"s{i}") for i in range(20)))

    assert asyncio.run(play()) == [b"ended 10"] * 20


def test_tasks_share_an_async_client(served: Served) -> None:
    async def play() -> list[bytes]:
        async with AsyncClient(served.url) as client:

            async def match(name: str) -> bytes:
                await client.start(name)
                await asyncio.gather(*(client.tick(name, b"") for _ in range(5)))
                return await client.end(name)

            return await asyncio.gather(*(match(f"s{i}") for i in range(5)))

    assert asyncio.run(play()) == [b"ended 5"] * 5


def test_the_async_client_has_the_same_errors(served: Served) -> None:
    async def play() -> list[str]:
        said = []
        async with AsyncClient(served.url) as client:
            await client.start("a")
            assert (await client.spec())["protocol"] == 1
            for body in (b"refuse", b"raise", b"x"):
                try:
                    await client.tick("a", body)
                except LudusError as error:
                    said.append(error.error if isinstance(error, Refused) else type(error).__name__)
        return said

    assert asyncio.run(play()) == ["observation", "actor_failed", "unknown_session"]


def test_the_async_client_retries_and_gives_up() -> None:
    async def play(url: str, **settings: Any) -> bytes:
        async with AsyncClient(url, **settings) as client:
            await client.start("a")
            return await client.tick("a", b"x")

    with scripted(OK, None, OK) as (url, requests):
        assert asyncio.run(play(url)) == b"ok"
    assert requests[1] == requests[2]
    with scripted(OK, stay_silent) as (url, _), pytest.raises(Unreachable, match=r"within 0\.1 s"):
        asyncio.run(play(url, timeout_s=0.1, retries=0))
    with scripted(OK, b"rubbish") as (url, _), pytest.raises(Unreachable, match="broke"):
        asyncio.run(play(url, retries=0))


def test_a_cancelled_tick_does_not_answer_the_next_one() -> None:
    release = asyncio.Event()

    class Waiting(Counting):
        async def tick(self, body: bytes) -> bytes:
            if body == b"slow":
                await release.wait()
            return await super().tick(body)

    with gateway(Waiting) as served:

        async def play() -> bytes:
            async with AsyncClient(served.url) as client:
                await client.start("a")
                task = asyncio.create_task(client.tick("a", b"slow"))
                while served.gateway.sessions.requests < 2:
                    await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                with pytest.raises(Unreachable, match="got no reply"):
                    await client.tick("a", b"next")
                served.gateway.loop.call_soon_threadsafe(release.set)
                assert await client.tick("a", b"slow") == b"1 slow"
                return await client.tick("a", b"next")

        assert asyncio.run(play()) == b"2 next"


# -- a machine that vanishes ----------------------------------------------------------------------------------------------


def asked_for_a_sign_of_life(connection: socket.socket) -> tuple[int, int]:
    """Keep-alive settings: idle time, and total time until a connection is dropped."""
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    idle, every, times = (connection.getsockopt(socket.IPPROTO_TCP, name) for name in names)
    return idle, idle + every * times


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system does not say when it asks")
def test_a_long_wait_detects_a_lost_host(served: Served) -> None:
    with Client(served.url, timeout_s=3600) as client:
        client.start("one")
        ((connection, _),) = client._kept.values()
        assert asked_for_a_sign_of_life(connection) == (5, 10)

    async def asynchronously() -> tuple[int, int]:
        async with AsyncClient(served.url, timeout_s=3600) as client:
            await client.start("two")
            (wire,) = client._kept.values()
            assert wire._transport is not None
            return asked_for_a_sign_of_life(wire._transport.get_extra_info("socket"))

    assert asyncio.run(asynchronously()) == (5, 10)
