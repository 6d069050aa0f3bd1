"""The client contract (deadlines, fallbacks, resynchronisation) for the Python clients."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import uvloop

from ludus.errors import DeadlineMissed, LudusError, Refused, Unreachable, UsageError
from ludus.gateway.server import GatewaySettings
from ludus.protocol.client import AsyncClient, Client, _Attempt, _ClientProtocol, _Deadline, _Reply
from ludus.protocol.spec import START
from tests.clients.contract import SOON_S, Bot, Contract, HostileContract, actor
from tests.clients.driving import Driver, Outcome
from tests.clients.hostile import OK, answering, header, listening, read_request, refusal, wire
from tests.local_servers import Served, gateway

_LOST = {"unknown_session", "session_lost", "actor_failed", "actor_timeout"}


class Played(Driver):
    """A driver for the Python client, like those of other languages."""

    def __init__(self, form: Literal["blocking", "async"], retries: int = 2) -> None:
        self._form, self._retries = form, retries
        self._runner = asyncio.Runner()
        self._client: Client | AsyncClient | None = None
        self._session = ""
        self.other = []

    def do(self, command: str, body: bytes | None = None, **more: Any) -> Outcome:
        if command == "open":
            self._missed = 0
        before, began = self._count(), time.monotonic()
        status, word, hint = 0, "-", ""
        try:
            kind, said = "ok", self._call(command, body or b"", more)
        except LudusError as error:
            kind, said, hint = _kind(error), error.message.encode(), error.hint
            if isinstance(error, Refused):
                status, word = error.status, error.error
        self._missed += self._count() - before
        told = {"status": str(status), "word": word, "hint": "x" + hint.encode().hex(), "missed": str(self._missed)}
        flag = str(int(self._count() > before))
        return Outcome(kind, said, {**told, "flag": flag, "ms": str(1e3 * (time.monotonic() - began))})

    def _count(self) -> int:
        return 0 if self._client is None else self._client.missed

    def _run(self, result: Any) -> Any:
        return self._runner.run(result) if self._form == "async" else result

    def _call(self, command: str, body: bytes, more: dict[str, Any]) -> bytes:
        if command == "open":
            self._open(more)
            return b""
        client = self._client
        assert client is not None
        if command == "spec":
            return str(self._run(client.spec())).replace("'", '"').encode()
        if command == "start":
            self._missed = 0
            if not more.pop("again", 0):
                self._session = more.pop("session", uuid.uuid4().hex)
            return bytes(self._run(client.start(self._session, body, **more)))
        if command == "end":
            return bytes(self._run(client.end(self._session, body)))
        if command == "raw":
            body = struct.pack("<fI2fqBid2B3B", -1.5, 2 | 4, 0.25, -3.0, -2, 200, 7, 0.1, 1, 2, 1, 0, 1)
        deadline_s = more["deadline_ms"] / 1e3 if "deadline_ms" in more else None
        return bytes(self._run(client.tick(self._session, body, deadline_s)))

    def _open(self, more: dict[str, Any]) -> None:
        self.close()
        make: Callable[..., Client | AsyncClient] = Client if self._form == "blocking" else AsyncClient

        async def made() -> Client | AsyncClient:
            return make(
                more["url"],
                more.get("token"),
                more.get("timeout_ms", 10_000) / 1e3,
                self._retries,
                deadline_s=more.get("deadline_ms", 10_000) / 1e3,
                fallback=more.get("fallback", "error"),
                default=bytes.fromhex(more["default"]) if "default" in more else None,
                cafile=str(more["certificate"]) if "certificate" in more else None,
            )

        self._client = self._runner.run(made())
        self._missed = 0

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            self._run(client.close())

    @contextlib.contextmanager
    def until_the_end(self) -> Iterator[Played]:
        with self._runner:
            yield self
            self.close()


def _kind(error: LudusError) -> str:
    if isinstance(error, Refused):
        return "lost" if error.error in _LOST else "refused"
    kinds = {DeadlineMissed: "deadline", Unreachable: "unreachable", UsageError: "usage"}
    return kinds[type(error)]


class TestBlocking(Contract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Iterator[Driver]:
        with Played("blocking").until_the_end() as played:
            yield played


class TestAsync(Contract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Iterator[Driver]:
        with Played("async").until_the_end() as played:
            yield played


class TestBlockingAgainstHostileServers(HostileContract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Iterator[Driver]:
        with Played("blocking", retries=1).until_the_end() as played:
            yield played


class TestAsyncAgainstHostileServers(HostileContract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Iterator[Driver]:
        with Played("async", retries=1).until_the_end() as played:
            yield played


# -- what only this client has


@pytest.fixture
def served() -> Iterator[Served]:
    Bot.patience.clear()
    Bot.asked.clear()
    with gateway(actor, GatewaySettings()) as served:
        yield served
    Bot.patience.set()


def test_missed_ticks_are_counted_for_the_client_and_for_each_session(served: Served) -> None:
    with Client(served.url, deadline_s=0.05, fallback="default", default=b"nothing") as client:
        for name in ("a", "b"):
            client.start(name)
        assert client.tick("a", b"wait") == b"nothing"
        assert client.tick("a", b"wait") == b"nothing"
        assert client.tick("b", b"x", deadline_s=10.0) == b"1 x"
        assert (client.missed, client.missed_of("a"), client.missed_of("b"), client.missed_of("c")) == (2, 2, 0, 0)
        Bot.patience.set()
        client.end("a")
        assert (client.missed, client.missed_of("a")) == (2, 0)


def test_a_tick_without_a_deadline_resynchronises_after_a_missed_one(served: Served) -> None:
    with Client(served.url) as client:
        client.start("a")
        with pytest.raises(DeadlineMissed) as missed:
            client.tick("a", b"wait", deadline_s=0.1)
        assert Bot.asked.wait(SOON_S)
        assert missed.value.hint == "The session continues with the next tick."
        threading.Timer(0.05, Bot.patience.set).start()
        assert client.tick("a", b"x") == b"2 x"
        assert client.tick("a", b"y") == b"3 y"


def test_a_deadline_helps_after_a_tick_that_had_none_was_never_answered(served: Served) -> None:
    with wire(served.port) as between, Client(between.url, retries=0) as client:
        client.start("a")
        between.plan("lose reply")
        with pytest.raises(Unreachable):
            client.tick("a", b"x")
        with pytest.raises(Unreachable, match="got no reply"):
            client.tick("a", b"y")
        assert client.tick("a", b"y", deadline_s=10.0) == b"2 y"


def test_the_end_waits_for_a_tick_without_a_deadline_that_is_still_being_computed(served: Served) -> None:
    with wire(served.port) as between, Client(between.url, retries=0) as client:
        client.start("a")
        between.plan("hang up")
        with pytest.raises(Unreachable):
            client.tick("a", b"wait")
        assert Bot.asked.wait(SOON_S)
        threading.Timer(0.05, Bot.patience.set).start()
        assert client.end("a") == b"ended 1 "


def test_a_tick_of_one_task_does_not_wait_longer_for_the_connection_than_its_deadline(served: Served) -> None:
    async def play() -> tuple[bytes, bytes, bytes]:
        async with AsyncClient(served.url, fallback="default", default=b"nothing") as client:
            await client.start("slow")
            await client.start("hasty")
            slow = asyncio.create_task(client.tick("slow", b"wait"))
            while served.gateway.sessions.requests < 3:
                await asyncio.sleep(0.005)
            hasty = await client.tick("hasty", b"x", deadline_s=0.05)
            assert client.missed_of("hasty") == 1
            Bot.patience.set()
            return await slow, hasty, await client.tick("hasty", b"y", deadline_s=10.0)

    assert asyncio.run(play()) == (b"1 wait", b"nothing", b"1 y")


LOOPS = [asyncio.new_event_loop, pytest.param(uvloop.new_event_loop, id="uvloop")]


@pytest.mark.parametrize("loop", LOOPS)
def test_each_tick_has_its_own_deadline_whatever_that_of_the_last_one_was(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """The server delays each reply by the milliseconds in the body."""

    def slow(connected: socket.socket, over: threading.Event) -> None:
        while (request := read_request(connected)) is not None:
            over.wait(int(request.partition(b"\r\n\r\n")[2] or b"0") / 1e3)
            connected.sendall(OK)

    async def play(url: str) -> list[float]:
        took = []
        async with AsyncClient(url, retries=0) as client:
            await client.start("a")
            await client.tick("a", b"0", 0.05)
            await client.tick("a", b"200", 2.0)  # the time of the one before ends while it is under way
            for given_s in (0.3, 0.1):  # a later end than the one that is watched for, and a sooner one
                began = time.monotonic()
                with pytest.raises(DeadlineMissed):
                    await client.tick("a", b"1500", given_s)
                took.append(time.monotonic() - began - given_s)
                await client.tick("a", b"0", 5.0)
        return took

    with listening(slow) as port, asyncio.Runner(loop_factory=loop) as runner:
        late_s = runner.run(asyncio.wait_for(play(f"http://127.0.0.1:{port}"), 20))
    assert min(late_s) >= -0.01
    assert max(late_s) < 1.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # nobody can close what an ended loop has left
def test_a_connection_of_a_loop_that_has_ended_is_replaced(served: Served) -> None:
    client = AsyncClient(served.url, timeout_s=5.0)
    asyncio.run(client.start("a"))
    began = time.monotonic()
    assert asyncio.run(asyncio.wait_for(client.tick("a", b"x"), 20))
    assert time.monotonic() - began < 4, "it need not find out by waiting"
    del client
    gc.collect()


def test_a_cancelled_tick_with_a_deadline_does_not_answer_the_next_one(served: Served) -> None:
    async def play() -> bytes:
        async with AsyncClient(served.url, deadline_s=10.0) as client:
            await client.start("a")
            task = asyncio.create_task(client.tick("a", b"wait"))
            while served.gateway.sessions.requests < 2:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            Bot.patience.set()
            return await client.tick("a", b"next")

    assert asyncio.run(play()) == b"2 next"


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_reply_in_chunks_is_read_however_it_is_cut(size: int) -> None:
    reply = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\na\r\n\r\nb\r\nhello world\r\n0\r\nx: y\r\n\r\n"

    def serve(connected: socket.socket, over: threading.Event) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while read_request(connected) is not None:
            for at in range(0, len(reply), size):
                connected.sendall(reply[at : at + size])

    with listening(serve) as port, Client(f"http://127.0.0.1:{port}") as client:
        assert [client.start("a"), client.tick("a", b"x"), client.end("a")] == [b"a\r\nhello world"] * 3


def test_a_flood_of_small_chunks_is_read_in_time() -> None:
    """Every chunk costs the same."""
    flood = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n"
    with answering(flood) as server, Client(server.url, timeout_s=8.0, retries=0) as client:
        assert client.start("a") == b"x" * 200_000


@pytest.mark.parametrize("status", ["500", "502", "504"])
def test_a_proxy_reply_without_a_deadline_leaves_the_outcome_unknown(served: Served, status: str) -> None:
    with wire(served.port) as between, Client(between.url, retries=1) as client:
        client.start("a")
        between.plan(status)
        assert client.tick("a", b"x") == b"1 x"
        between.plan(status, status)
        with pytest.raises(Unreachable, match=f"answered {status}"):
            client.tick("a", b"y")
        with pytest.raises(Unreachable, match="got no reply"):
            client.tick("a", b"z")
        assert client.tick("a", b"y") == b"2 y"
        between.plan(status, status)
        with pytest.raises(Unreachable):
            client.tick("a", b"z")
        assert client.end("a") == b"ended 3 "


def test_a_foreign_page_ends_no_session(served: Served) -> None:
    pages = [refusal(b"<html>", status) for status in ("404 Not Found", "410 Gone")]
    with answering(OK, *pages, OK) as server, Client(server.url) as client:
        client.start("a")
        for _ in pages:
            with pytest.raises(Refused):
                client.tick("a", b"x")
        assert client.tick("a", b"x") == b"ok"


def test_the_addresses_of_a_host_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first address drops packets, as a firewall does; the second answers slowly."""

    def answer(connected: socket.socket, over: threading.Event) -> None:
        read_request(connected)
        over.wait(0.05)
        connected.sendall(OK)

    with socket.socket() as full, contextlib.ExitStack() as knocking, listening(answer) as port:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            one = knocking.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        tcp = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        found = [(*tcp, full.getsockname()), (*tcp, ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **more: found)
        with Client("http://two-addresses.example", timeout_s=1.0, retries=0) as client:
            assert client.start("a") == b"ok"


@pytest.mark.parametrize("looks", range(2, 7))
def test_a_possibly_processed_tick_keeps_its_seq(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """The clock jumps at each call of time.monotonic in turn."""
    protocol = _ClientProtocol("http://host", None, 1.0, 2, False)
    start = protocol.step(START, "a", b"")
    began = _number(next(start))
    with pytest.raises(StopIteration):
        start.send(_Reply(200, b"", None, "", False))
    clock = iter([0.0] * looks)
    monkeypatch.setattr("ludus.protocol.client.time.monotonic", lambda: next(clock, 100.0))
    tick = protocol.tick("a", b"x", _Deadline(10.0))
    assert _number(next(tick)) == began + 1
    with pytest.raises(Unreachable):
        collections.deque(tick.send(ConnectionResetError("gone")) for _ in range(3))
    monkeypatch.undo()
    assert _number(next(protocol.tick("a", b"y", _Deadline(10.0)))) == began + 2


def _number(attempt: _Attempt) -> int:
    return int(header(attempt.request, "ludus-seq"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline_s": 0},
        {"deadline_s": float("nan")},
        {"deadline_s": float("inf")},
        {"fallback": "Repeat"},
        {"fallback": "default"},
        {"cafile": "/nowhere"},
        {"url": "https://host", "cafile": "/nowhere"},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Client(**wrong)


@pytest.mark.parametrize("wrong", [{"version": -1}, {"temperature": -0.5}, {"temperature": float("nan")}, {"model": "a\nb"}])
def test_invalid_start_options_are_refused(wrong: dict[str, Any]) -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(UsageError):
        client.start("a", **wrong)


def test_the_direct_port_may_use_tls() -> None:
    Client("https://host", direct=True).close()
