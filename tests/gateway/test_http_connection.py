"""HTTP connections: valid, invalid and hostile requests over real sockets and in every possible fragmentation."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import re
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.gateway import http_connection
from ludus.gateway.actor import Actor
from ludus.gateway.http_connection import HeaderTemplate, HttpConnection, HttpExchange, HttpLimits
from ludus.gateway.server import Gateway, GatewaySettings
from ludus.gateway.sessions import Session, SessionLimits
from ludus.protocol.spec import DEFAULT_OPTIONS, START
from tests.gateway.wire import PATIENCE_S, Reply, Wire, ask, play, raw, step
from tests.local_servers import Served, gateway
from tests.waiting import wait_until

MB = 1 << 20


class Echo(Actor):
    async def tick(self, body: bytes) -> bytes:
        return body

    async def end(self, body: bytes) -> bytes:
        return body


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Shared by tests without lasting effects; each checks that the server still works."""
    with gateway(Echo) as served:
        yield served


def limited(**limits: Any) -> GatewaySettings:
    return GatewaySettings(http=HttpLimits(**limits))


# -- well-formed


def test_a_connection_is_kept_for_many_requests(server: Served) -> None:
    with Wire(server.port) as wire:
        assert wire.ask(step("start", "kept")).status == 200
        for i in range(100):
            assert wire.ask(step("tick", "kept", b"%d" % i)).body == b"%d" % i
        assert wire.ask(step("end", "kept", b"bye")).body == b"bye"


@pytest.mark.parametrize("body", [b"", b"\0", bytes(range(256)), b"\r\n\r\n", b"x" * 1023, b"x" * 1024, b"\xff" * MB])
def test_bodies_and_replies_are_any_bytes(server: Served, body: bytes) -> None:
    with Wire(server.port) as wire:
        for _ in range(3):
            play(server.port, "bytes", body)
        assert wire.ask(step("start", "bytes2")).body == b""
        for _ in range(3):
            reply = wire.ask(step("tick", "bytes2", body))
            assert (reply.body, reply.headers["content-type"]) == (body, "application/octet-stream")
        assert wire.ask(step("end", "bytes2", body)).body == body


def test_a_chunked_body_is_assembled_and_its_trailers_are_ignored(server: Served) -> None:
    head = raw("POST /step", ["session: chunks", "step_kind: tick", "Transfer-Encoding: chunked"])
    with Wire(server.port) as wire:
        assert wire.ask(step("start", "chunks")).status == 200
        assert wire.ask(head + b"3\r\nabc\r\n4;why=not\r\nd\r\ne\r\n0\r\n\r\n").body == b"abcd\r\ne"
        assert wire.ask(head + b"0\r\n\r\n").body == b""
        assert wire.ask(head + b"1\r\nx\r\n0\r\nsession: another\r\nstep_kind: end\r\nseq: 7\r\n\r\n").body == b"x"
        assert wire.ask(step("end", "chunks")).status == 200


def test_pipelined_requests_are_answered_in_order(server: Served) -> None:
    ids = [f"p{i}" for i in range(10)]
    with Wire(server.port) as wire:
        wire.send(b"".join(step("start", id_) for id_ in ids))
        assert [reply.status for reply in wire.replies(10)] == [200] * 10
        wire.send(b"".join(step("tick", id_, id_.encode()) for id_ in ids * 300))  # far more than a read, or the limit
        assert [reply.body for reply in wire.replies(3000)] == [id_.encode() for id_ in ids * 300]
        wire.send(b"".join(step("end", id_) for id_ in ids))
        assert [reply.status for reply in wire.replies(10)] == [200] * 10


def test_replies_keep_the_order_of_their_requests_even_if_later_ones_are_ready_first() -> None:
    release = asyncio.Event()

    class Ordered(Echo):
        async def tick(self, body: bytes) -> bytes:
            if body == b"release":
                release.set()
            else:
                await release.wait()
            return body

    with gateway(Ordered) as served, Wire(served.port) as wire:
        wire.send(*(step("start", id_) for id_ in "abc"))
        assert [reply.status for reply in wire.replies(3)] == [200] * 3
        wrong = raw("GET /nowhere")
        wire.send(step("tick", "a", b"first") + step("tick", "b", b"second") + wrong + step("tick", "c", b"release"))
        assert [reply.body for reply in wire.replies(2)] == [b"first", b"second"]
        assert wire.read().refusal == (404, "not_found")
        assert wire.read().body == b"release"


def test_expect_100_continue_is_answered_once_per_request(server: Served) -> None:
    with Wire(server.port) as wire:
        assert wire.ask(step("start", "patient")).status == 200
        for _ in range(3):
            body = b"x" * 1000
            wire.send(step("tick", "patient", body, headers=["Expect: 100-continue"])[: -len(body)])
            assert wire.read().status == 100
            assert wire.ask(body).body == body
        assert wire.ask(step("tick", "patient", headers=["Expect: 100-Continue"])).status == 100
        assert wire.read().status == 200
        assert wire.ask(step("tick", "patient", headers=["Expect: a miracle"])).refusal == (417, "expectation")
        assert wire.ask(step("end", "patient")).status == 200


def test_100_continue_comes_after_the_pending_replies() -> None:
    release = asyncio.Event()

    class Slow(Echo):
        async def tick(self, body: bytes) -> bytes:
            if body == b"slow":
                await release.wait()
            return body

    with gateway(Slow) as served, Wire(served.port) as wire:
        wire.send(step("start", "a"), step("start", "b"))
        assert [reply.status for reply in wire.replies(2)] == [200, 200]
        wire.send(step("tick", "a", b"slow") + step("tick", "b", b"later", headers=["Expect: 100-continue"])[:-5])

        async def let_go() -> None:
            release.set()

        served.run(let_go())
        assert wire.read().body == b"slow"
        assert wire.read().status == 100
        assert wire.ask(b"later").body == b"later"


@pytest.mark.parametrize(
    ("version", "headers"), [("1.0", []), ("1.0", ["Connection: keep-alive"]), ("1.1", ["Connection: close"])]
)
def test_connection_close_ends_the_connection_after_its_reply(
    server: Served, version: str, headers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = server.gateway.refusals["malformed"]
    with Wire(server.port) as wire:
        request = raw("GET /spec", headers, version=version)
        wire.send(request + step("start", "never", headers=["Expect: 100-continue"]))
        reply = wire.read()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert wire.closed()
    assert ask(server.port, step("tick", "never")).refusal == (404, "unknown_session")
    assert server.gateway.refusals["malformed"] == before
    assert not caplog.records


def test_a_client_that_has_finished_sending_still_gets_its_replies() -> None:
    class Slow(Echo):
        async def tick(self, body: bytes) -> bytes:
            await asyncio.sleep(0.05)
            return body

    with gateway(Slow) as served, Wire(served.port) as wire:
        wire.send(step("start", "half"))
        assert wire.read().status == 200
        wire.send(step("tick", "half", b"one") + raw("GET /nowhere") + step("tick", "half", b"two")[:30])
        wire.finish()
        assert [reply.status for reply in wire.rest()] == [200, 404]
        wait_until(lambda: not served.gateway._connections, PATIENCE_S)  # at once, not after the time for clients that linger


def test_head_is_answered_without_a_body_and_the_connection_stays_open(server: Served) -> None:
    with Wire(server.port) as wire:
        for target, status in (("HEAD /health", 200), ("HEAD /nowhere", 404), ("HEAD /step", 405)):
            wire.send(raw(target))
            reply = wire.read(bodiless=True)
            assert reply.status == status
            assert int(reply.headers["content-length"]) > 0
        assert wire.ask(raw("GET /spec")).status == 200


def test_paths_and_methods_that_do_not_exist_are_named(server: Served) -> None:
    with Wire(server.port) as wire:
        assert wire.ask(raw("GET /nowhere")).refusal == (404, "not_found")
        assert wire.ask(raw("POST /nowhere", ["Content-Length: 3"], b"abc")).refusal == (404, "not_found")
        assert wire.ask(raw("GET /")).refusal == (404, "not_found")
        assert wire.ask(raw("OPTIONS *")).refusal == (404, "not_found")
        reply = wire.ask(raw("GET /step"))
        assert (reply.refusal, reply.headers["allow"]) == ((405, "method"), "POST")
        reply = wire.ask(raw("POST /spec", ["Content-Length: 0"]))
        assert (reply.refusal, reply.headers["allow"]) == ((405, "method"), "GET")
        reply = wire.ask(raw("DELETE /health"))
        assert (reply.refusal, reply.headers["allow"]) == ((405, "method"), "GET")
        assert wire.ask(raw("GET /spec?verbose=1")).status == 200
        assert wire.ask(raw("GET http://example.org/spec")).status == 200
        assert len(wire.ask(raw("GET /" + "x" * 5000)).body) < 1000


# -- the same bytes, cut anywhere


class Paper(asyncio.Transport):
    """A transport that stores what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def write_eof(self) -> None:
        self.written += b"<EOF>"

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


OPEN = (b"a", b"b", b"c")
NUMBERED = b"n"


def conversation(parts: Sequence[Sequence[bytes]]) -> bytes:
    """Replies to several connections that send these fragments, with sessions already open."""

    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        served = Gateway(Echo, GatewaySettings(http=HttpLimits(body_bytes=2000)))
        heard: list[asyncio.Future[int]] = []

        class Opening:
            def __init__(self) -> None:
                self.heard: asyncio.Future[int] = loop.create_future()
                heard.append(self.heard)

            def reply(self, status: int, body: bytes, retry_after_s: float | None = None) -> None:
                self.heard.set_result(status)

        for id_ in (*OPEN, NUMBERED):
            served.sessions.handle(START, id_, 0 if id_ == NUMBERED else -1, DEFAULT_OPTIONS, b"", cast(HttpExchange, Opening()))
        assert await asyncio.gather(*heard) == [200] * (len(OPEN) + 1)
        papers = [Paper() for _ in parts]

        def send() -> None:
            for paper, fragments in zip(papers, parts, strict=True):
                connection = HttpConnection(served)
                connection.connection_made(paper)
                for fragment in fragments:
                    if fragment:
                        connection.data_received(fragment)

        loop.call_soon(send)
        await asyncio.sleep(0)
        while any(connection.pending for connection in served._connections):
            await asyncio.sleep(0)
        await served.close(0)
        return b"".join(paper.written for paper in papers)

    said: bytes = uvloop.run(main())
    return said


bodies = st.one_of(st.binary(max_size=30), st.just(b"\r\n\r\n"), st.just(b"POST /step HTTP/1.1\r\n\r\n"), st.just(b"x" * 1500))


@st.composite
def requests(draw: st.DrawFn) -> list[bytes]:
    """Requests that keep their connection open and, as those of games, differ only in seq and body."""
    kind = draw(st.sampled_from(["tick", "tick", "tick", "TICK", "dance", ""]))
    session = draw(st.sampled_from([*OPEN, NUMBERED, NUMBERED, b"unknown", b""])).decode()
    name = draw(st.sampled_from(["session", "Session", "game_id", "Ludus-Session", "LUDUS-SESSION", "game-id"]))
    kind_name = draw(st.sampled_from(["step_kind", "Ludus-Step", "step-kind"]))
    seq_name = draw(st.sampled_from(["", "", "seq", "Ludus-Seq"] if session != NUMBERED.decode() else ["seq", "Ludus-Seq"]))
    space = draw(st.sampled_from([" ", "", " \t"]))
    more = draw(
        st.lists(st.sampled_from(["Host: h", "seq: x", "match: m", "X: y", "session: a", "seq: 1", "X: seq: 2"]), max_size=2)
    )
    shape = draw(st.sampled_from(["plain", "plain", "plain", "chunked", "get", "head", "put", "bare"]))
    path = draw(st.sampled_from(["spec", "nowhere", "step"]))
    made = []
    for _ in range(draw(st.integers(1, 4))):
        body, seq = draw(bodies), draw(st.sampled_from(["1", "2", "3", "01", "1 ", "-1", "x", "9" * 18, "9" * 19, "9" * 30, ""]))
        lines = [f"{name}: {session}", f"{kind_name}:{kind}", *([f"{seq_name}:{space}{seq}"] if seq_name else []), *more]
        if shape == "get":
            made.append(raw(f"GET /{path}", lines))
        elif shape == "head":
            made.append(raw("HEAD /spec", lines))
        elif shape == "bare":
            made.append(raw("POST /step", lines))
        elif shape == "chunked":
            pieces = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:7], body[7:]) if piece)
            made.append(raw("POST /step", [*lines, "Transfer-Encoding: chunked"], pieces + b"0\r\n\r\n"))
        else:
            target = "PUT /step" if shape == "put" else "POST /step"
            made.append(raw(target, [*lines, f"Content-Length:{space}{len(body)}"], body))
    return made


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    stream = [request for several in draw(st.lists(requests(), min_size=1, max_size=4)) for request in several]
    rubbish, large, old = b"rubbish\r\n\r\n", raw("POST /step", ["Content-Length: 5000"]), raw("GET /spec", version="1.0")
    last = draw(st.sampled_from([b"", rubbish, large, old]))
    return [*stream, last] if last else stream


@given(streams(), st.data())
@settings(max_examples=150)
def test_fragmentation_does_not_change_the_replies(stream: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(stream)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=30)))
    fragments = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    expected = conversation([[whole]])
    assert conversation([fragments]) == expected
    assert conversation([stream]) == expected


def test_splitting_at_every_byte_does_not_change_the_replies() -> None:
    stream = [
        step("tick", "a", b"body"),
        step("tick", "a", b"ydob"),
        raw("POST /step", ["session: b", "step_kind: tick", "Transfer-Encoding: chunked"], b"3\r\nabc\r\n0\r\n\r\n"),
        raw("GET /spec"),
        step("tick", "nobody"),
    ]
    whole = b"".join(stream)
    expected = conversation([[whole]])
    assert expected.count(b"HTTP/1.1 200 OK") == 4
    assert all(conversation([[whole[:cut], whole[cut:]]]) == expected for cut in range(len(whole)))
    assert conversation([[whole[i : i + 1] for i in range(len(whole))]]) == expected


@given(streams())
@settings(max_examples=150)
def test_a_matched_header_block_means_the_same_as_on_a_fresh_connection(stream: list[bytes]) -> None:
    assert conversation([stream]) == conversation([[request] for request in stream])


def test_a_matched_header_block_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    received = HttpConnection._receive

    def spy(connection: HttpConnection, data: bytes) -> None:
        parsed.append(data)
        received(connection, data)

    monkeypatch.setattr(HttpConnection, "_receive", spy)
    for ticks in (
        [step("tick", "a", b"x" * i) for i in range(5)],
        [step("tick", "n", b"x" * i, seq=1 + i) for i in range(5)],
    ):
        assert conversation([ticks]).count(b"200 OK") == 5
        assert parsed == ticks[:1]
        parsed.clear()


def test_a_matched_header_block_keeps_the_body_limit() -> None:
    heard = conversation([[step("tick", "a", b"x"), step("tick", "a", b"x" * 2001), step("tick", "a", b"x")]])
    assert heard.count(b"200 OK") == 1
    assert heard.count(b"413 Content Too Large") == 1


# -- bounds


def test_a_body_that_is_announced_too_large_is_refused_before_it_is_sent(server: Served) -> None:
    with Wire(server.port) as wire:
        started = wire.ask(step("start", "large"))
        assert started.status == 200
        wire.send(raw("POST /step", ["session: large", "step_kind: tick", f"Content-Length: {100 * MB}"]))
        reply = wire.read()
        assert (reply.refusal, reply.headers["connection"]) == ((413, "body_too_large"), "close")
        assert wire.closed()
    play(server.port, "after large")
    assert ask(server.port, step("tick", "large", b"goes on")).body == b"goes on"


def test_a_client_that_sends_100_megabytes_anyway_gets_the_refusal() -> None:
    with gateway(Echo) as served, Wire(served.port) as wire:
        wire.send(raw("POST /step", ["session: a", "step_kind: start", f"Content-Length: {100 * MB}"]))
        sent = 0
        try:
            while sent < 100 * MB:
                sent += wire.socket.send(b"x" * MB)
        except ConnectionError:
            pass
        assert wire.read().refusal == (413, "body_too_large")
        play(served.port, "after")


def test_a_chunked_body_is_refused_when_it_has_grown_too_large() -> None:
    with gateway(Echo, limited(body_bytes=1000)) as served, Wire(served.port) as wire:
        wire.send(raw("POST /step", ["session: a", "step_kind: start", "Transfer-Encoding: chunked"]))
        wire.send(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        wire.send(b"1\r\nx\r\n")
        assert wire.read().refusal == (413, "body_too_large")
        assert wire.closed()
        assert ask(served.port, step("tick", "a")).refusal == (404, "unknown_session")
        play(served.port, "after")


def test_the_largest_body_that_is_allowed_is_taken() -> None:
    with gateway(Echo, limited(body_bytes=1000)) as served, Wire(served.port) as wire:
        assert wire.ask(step("start", "a")).status == 200
        assert wire.ask(step("tick", "a", b"x" * 1000)).body == b"x" * 1000
        assert wire.ask(step("tick", "a", b"x" * 1001)).refusal == (413, "body_too_large")


@pytest.mark.parametrize(
    "flood",
    [
        raw("GET /spec", [f"h{i}: x" for i in range(65)]),
        raw("GET /spec", [f"h{i}: {'x' * 400}" for i in range(50)]),
        raw("GET /" + "x" * 20_000),
        b"GET /spec HTTP/1.1\r\nendless: " + b"x" * 100_000,
        b"GET /spec HTTP/1.1\r\n" + b"x" * 100_000,
        b"GET /spec HTTP/1.1\r\n" + b"many: more\r\n" * 10_000,
        raw("POST /step", ["Transfer-Encoding: chunked"], b"1\r\nx\r\n0\r\n" + b"trailer: more\r\n" * 10_000),
        raw("POST /step", ["Transfer-Encoding: chunked"], b"1\r\nx\r\n0\r\ntrailer: " + b"x" * 900_000),
    ],
    ids=["too many", "too large", "long url", "endless value", "endless name", "flood", "trailers", "endless trailer"],
)
def test_headers_that_are_too_many_or_too_large_are_refused(server: Served, flood: bytes) -> None:
    with Wire(server.port) as wire:
        wire.send(flood)
        reply = wire.read()
        assert (reply.refusal, reply.headers["connection"]) == ((431, "headers_too_large"), "close")
        assert wire.closed()
    play(server.port, "after headers")


def test_headers_just_within_their_bounds_are_taken(server: Served) -> None:
    with Wire(server.port) as wire:
        assert wire.ask(raw("GET /spec", [f"h{i}: x" for i in range(64)])).status == 200
        assert wire.ask(raw("GET /spec", [f"h{i}: {'x' * 400}" for i in range(38)])).status == 200


def test_a_client_that_pipelines_too_much_is_not_read() -> None:
    release = asyncio.Event()

    class Slow(Echo):
        async def tick(self, body: bytes) -> bytes:
            await release.wait()
            return body

    tick = step("tick", "a", b"body")
    with gateway(Slow) as served, Wire(served.port) as wire:
        assert wire.ask(step("start", "a")).status == 200
        wire.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            wire.socket.sendall(tick * 500_000)
        (connection,) = served.gateway._connections
        assert len(connection.pending) <= HttpLimits().pipelined + (256 << 10) // len(tick) + 1
        wire.socket.settimeout(PATIENCE_S)

        async def let_go() -> None:
            release.set()

        served.run(let_go())
        assert wire.read().body == b"body"
        assert wire.read().refusal == (409, "busy")


def test_connections_are_bounded() -> None:
    with gateway(Echo, limited(connections=2)) as served:
        with Wire(served.port) as first, Wire(served.port) as second, Wire(served.port) as third:
            assert first.ask(step("start", "a")).status == second.ask(step("start", "b")).status == 200
            refused = third.read()
            assert refused.refusal == (503, "too_many_connections")
            assert int(refused.headers["retry-after"]) >= 1
            assert third.closed()
            assert first.ask(step("tick", "a", b"x")).body == b"x"
        wait_until(lambda: not served.gateway._connections, PATIENCE_S)
        play(served.port, "after")


def test_connections_without_a_token_never_keep_a_client_out() -> None:
    settings = GatewaySettings(http=HttpLimits(connections=4), token="secret")
    bearer = ["Authorization: Bearer secret"]
    with gateway(Echo, settings) as served, contextlib.ExitStack() as stack:
        client = stack.enter_context(Wire(served.port))
        assert client.ask(step("start", "a", headers=bearer)).status == 200
        silent = [stack.enter_context(Wire(served.port)) for _ in range(30)]
        assert silent[0].closed()  # the oldest makes room
        with Wire(served.port) as late:
            assert late.ask(step("start", "b", headers=bearer)).status == 200
        assert client.ask(step("tick", "a", b"x", headers=bearer)).body == b"x"
        assert served.gateway.counters()["refused_before"]["evicted"] >= 26


def test_a_connection_that_sends_no_token_is_closed_sooner_than_an_idle_client() -> None:
    settings = GatewaySettings(http=HttpLimits(unauthorized_idle_s=0.2), token="secret")
    with gateway(Echo, settings) as served, Wire(served.port) as silent, Wire(served.port) as wrong, Wire(served.port) as client:
        assert client.ask(step("start", "a", headers=["Authorization: Bearer secret"])).status == 200
        assert wrong.ask(step("start", "b", headers=["Authorization: Bearer guess"])).refusal == (401, "unauthorized")
        assert silent.closed()
        assert wrong.closed()
        assert client.ask(step("tick", "a", b"x", headers=["Authorization: Bearer secret"])).body == b"x"


def test_connections_of_one_address_can_be_bounded() -> None:
    with gateway(Echo, limited(connections_per_address=1)) as served, Wire(served.port) as first:
        assert first.ask(step("start", "a")).status == 200
        with Wire(served.port) as second:
            assert second.read().refusal == (503, "too_many_connections")


def test_a_request_with_two_tokens_is_refused(server: Served) -> None:
    both = ["Authorization: Bearer one", "Authorization: Bearer two"]
    assert ask(server.port, step("start", "a", headers=both)).refusal == (400, "authorization")


@pytest.mark.parametrize("name", ["session", "match", "side", "model"])
def test_a_name_that_is_not_utf_8_is_refused(server: Served, name: str) -> None:
    asked = step("start", "s", headers=[] if name == "session" else [f"{name}: XX"])
    asked = asked.replace(b"session: s\r\n", b"session: \xff\xfe\r\n") if name == "session" else asked.replace(b"XX", b"\xff\xfe")
    assert ask(server.port, asked).refusal == (400, "model" if name == "model" else "session")


def test_numbers_are_written_as_numbers(server: Served) -> None:
    for header in ("temperature: 1_0", "version: 1_0", "seq: 1_0"):
        assert ask(server.port, step("start", "a", headers=[header])).status == 400


# -- slowness


@pytest.mark.parametrize("sent", [b"P", b"POST /step HTTP/1.1\r\nsession: a\r\n", step("tick", "a", b"body")[:-1]])
def test_an_incomplete_request_times_out(sent: bytes) -> None:
    with gateway(Echo, limited(receive_s=0.2)) as served, Wire(served.port) as wire:
        wire.send(sent)
        reply = wire.read()
        assert (reply.refusal, reply.headers["connection"]) == ((408, "too_slow"), "close")
        assert wire.closed()
        play(served.port, "after")


def test_a_byte_now_and_then_does_not_keep_a_request_alive() -> None:
    with gateway(Echo, limited(receive_s=0.3)) as served, Wire(served.port) as wire:
        wire.socket.settimeout(0.05)
        sent = 0
        for byte in step("start", "loris", b"x" * 200):
            wire.send(bytes([byte]))
            sent += 1
            try:
                wire.socket.recv(1, socket.MSG_PEEK)
                break
            except TimeoutError:
                pass
        wire.socket.settimeout(PATIENCE_S)
        assert wire.read().refusal == (408, "too_slow")
        assert sent < 100
        play(served.port, "after")


def test_time_is_counted_for_each_request_and_not_for_a_stream_of_them() -> None:
    with gateway(Echo, limited(receive_s=0.4)) as served, Wire(served.port) as wire:
        assert wire.ask(step("start", "stream")).status == 200
        tick = step("tick", "stream", b"body")
        wire.send(tick[:20])
        for _ in range(10):  # between two writes there is always half a request
            time.sleep(0.08)
            wire.send(tick[20:] + tick[:20])
            assert wire.read().body == b"body"


def test_a_client_that_does_not_read_is_disconnected() -> None:
    with gateway(Echo, limited(send_s=0.2)) as served, Wire(served.port, receive_buffer=4096) as wire:
        assert wire.ask(step("start", "unread")).status == 200
        wire.socket.settimeout(0.02)
        unsent = memoryview(step("tick", "unread", b"x" * (4 * MB)) * 12)
        while served.gateway._connections:
            with contextlib.suppress(TimeoutError, ConnectionError):
                unsent = unsent[wire.socket.send(unsent) :]
        assert len(unsent) > 24 * MB  # it was not all read in the hope that somebody would want it
        play(served.port, "after")


def test_a_slow_reader_gets_its_last_reply_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_LINGER_S", 0.1)
    body = b"x" * (4 * MB)
    with gateway(Echo, limited(send_s=5.0)) as served, Wire(served.port, receive_buffer=4096) as wire:
        assert wire.ask(step("start", "slow")).status == 200
        wire.send(step("tick", "slow", body, headers=["Connection: close"]))
        time.sleep(0.5)
        assert wire.read().body == body
        assert wire.closed()


def test_idle_connections_are_closed_and_busy_ones_are_not() -> None:
    class Slow(Echo):
        async def tick(self, body: bytes) -> bytes:
            await asyncio.sleep(0.6)
            return body

    with gateway(Slow, limited(idle_s=0.2)) as served, Wire(served.port) as idle, Wire(served.port) as busy:
        assert busy.ask(step("start", "a")).status == 200
        busy.send(step("tick", "a", b"late"))
        assert idle.closed()
        assert busy.read().body == b"late"
        assert busy.closed()


def test_an_idle_connection_that_has_not_read_its_reply_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_LINGER_S", 0.1)
    body = b"x" * (60 << 10)
    with gateway(Echo, limited(idle_s=0.2, send_s=0.2)) as served, Wire(served.port, receive_buffer=2048) as wire:
        assert wire.ask(step("start", "a")).status == 200
        wire.send(step("tick", "a", body))
        wait_until(lambda: not served.gateway._connections, PATIENCE_S)


# -- malformed

MALFORMED = {
    "no http": b"hello\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50,
    "http 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "nul in a header": raw("POST /step", ["session: a\0b"]),
    "nul in a name": raw("POST /step", ["ses\0sion: ab"]),
    "control character": raw("POST /step", ["session: a\x01b"]),
    "negative length": raw("POST /step", ["session: smuggled", "step_kind: start", "Content-Length: -1"]),
    "signed length": raw("POST /step", ["session: smuggled", "step_kind: start", "Content-Length: +3"], b"abc"),
    "huge length": raw("POST /step", ["session: smuggled", "step_kind: start", f"Content-Length: {10**30}"]),
    "length in words": raw("POST /step", ["session: smuggled", "step_kind: start", "Content-Length: three"], b"abc"),
    "hexadecimal length": raw("POST /step", ["session: smuggled", "step_kind: start", "Content-Length: 0x3"], b"abc"),
    "list of lengths": raw("POST /step", ["session: smuggled", "step_kind: start", "Content-Length: 3, 3"], b"abc"),
    "two lengths": raw(
        "POST /step", ["session: smuggled", "step_kind: start", "Content-Length: 0", "Content-Length: 5"], b"abcde"
    ),
    "the same length twice": raw("POST /step", ["session: smuggled", "step_kind: start", *["Content-Length: 1"] * 2], b"a"),
    "length and chunks": raw(
        "POST /step",
        ["session: smuggled", "step_kind: start", "Content-Length: 5", "Transfer-Encoding: chunked"],
        b"0\r\n\r\n" + step("start", "smuggled"),
    ),
    "chunks and length": raw(
        "POST /step",
        ["session: smuggled", "step_kind: start", "Transfer-Encoding: chunked", "Content-Length: 5"],
        b"0\r\n\r\n" + step("start", "smuggled"),
    ),
    "unknown coding": raw(
        "POST /step",
        ["session: smuggled", "step_kind: start", "Transfer-Encoding: xchunked"],
        b"0\r\n\r\n" + step("start", "smuggled"),
    ),
    "chunked is not last": raw(
        "POST /step", ["session: smuggled", "step_kind: start", "Transfer-Encoding: chunked, identity"], b"0\r\n\r\n"
    ),
    "space before the colon": raw("POST /step", ["session: smuggled", "step_kind: start", "Content-Length : 3"], b"abc"),
    "folded header": raw("POST /step", ["session: smuggled", "step_kind: start", "x: y\r\n Content-Length: 3"], b"abc"),
    "bare line feeds": b"POST /step HTTP/1.1\nsession: smuggled\nstep_kind: start\n\n",
    "bare carriage return": raw("POST /step", ["session: smuggled\rstep_kind: start"]),
    "chunk size overflow": raw(
        "POST /step", ["session: smuggled", "step_kind: start", "Transfer-Encoding: chunked"], b"f" * 20 + b"\r\n"
    ),
    "negative chunk": raw("POST /step", ["session: smuggled", "step_kind: start", "Transfer-Encoding: chunked"], b"-1\r\nx"),
    "chunk longer than it says": raw(
        "POST /step", ["session: smuggled", "step_kind: start", "Transfer-Encoding: chunked"], b"2\r\nabcd\r\n0\r\n\r\n"
    ),
    "version": raw("POST /step", ["session: smuggled", "step_kind: start", "Content-Length: 0"], version="1.7"),
    "nul in the url": raw("GET /sp\0ec"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_input_that_is_not_http_is_refused_without_side_effects(server: Served, name: str) -> None:
    with Wire(server.port) as wire:
        assert wire.ask(raw("GET /spec")).status == 200
        wire.send(MALFORMED[name])
        reply = wire.read()
        assert (reply.refusal, reply.headers["connection"]) == ((400, "malformed"), "close")
        assert wire.closed()
    assert ask(server.port, step("tick", "smuggled")).refusal == (404, "unknown_session")
    play(server.port, "after malformed")


@pytest.mark.parametrize(
    "headers", [["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"], ["Connection: upgrade", "Upgrade: websocket"]]
)
def test_an_upgrade_is_refused_with_a_hint(server: Served, headers: list[str]) -> None:
    with Wire(server.port) as wire:
        assert wire.ask(step("start", "upgrading")).status == 200
        reply = wire.ask(step("tick", "upgrading", b"body", headers=headers))
        assert (reply.refusal, reply.headers["connection"]) == ((400, "upgrade"), "close")
        assert "HTTP/1.1" in reply.json["hint"]
        assert wire.closed()
    assert ask(server.port, step("tick", "upgrading", b"not lost")).body == b"not lost"
    assert ask(server.port, step("end", "upgrading")).status == 200


def test_unsupported_versions_and_codings_are_refused(server: Served) -> None:
    with Wire(server.port) as wire:
        coded = raw("POST /step", ["session: x", "step_kind: start", "Transfer-Encoding: gzip, chunked"], b"0\r\n\r\n")
        assert wire.ask(coded).refusal == (501, "transfer_encoding")
        assert wire.ask(raw("POST /step", ["Content-Length: 0"], version="2.0")).refusal == (505, "http_version")
        assert wire.closed()


def test_a_wrong_content_length_is_detected(server: Served) -> None:
    with Wire(server.port) as wire:  # shorter than the body: the rest is taken for a request, which it is not
        assert wire.ask(step("start", "liar")).status == 200
        wire.send(raw("POST /step", ["session: liar", "step_kind: tick", "Content-Length: 3"], b"abc{json}\r\n"))
        assert wire.read().body == b"abc"
        assert wire.read().refusal == (400, "malformed")
        assert wire.closed()
    with Wire(server.port) as wire:  # longer: it is never complete, and nothing is done
        wire.send(raw("POST /step", ["session: liar", "step_kind: tick", "Content-Length: 30"], b"abc"))
        wire.finish()
        assert wire.closed()
    assert ask(server.port, step("end", "liar", b"e")).body == b"e"


def test_a_million_random_bytes_do_no_harm(server: Served) -> None:
    noise = random.Random(3).randbytes(MB)
    for prefix in (
        b"",
        b"POST /step HTTP/1.1\r\n",
        b"POST /step HTTP/1.1\r\nsession: noise\r\n\r\n",
        b"\0" * 1000,
        b"\r\n" * 1000,
    ):
        with Wire(server.port) as wire:
            try:
                wire.send(prefix, noise)
            except ConnectionError:
                continue
            assert list(wire.rest())[-1].refusal in ((400, "malformed"), (431, "headers_too_large"))
    for start in range(0, 200_000, 1000):
        with Wire(server.port) as wire:
            wire.send(noise[start : start + 1000])
            wire.finish()
            assert all(reply.status == 400 for reply in _survive(wire))
    play(server.port, "after noise")


def _survive(wire: Wire) -> list[Reply]:
    return list(wire.rest())


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=20), st.sampled_from([b"\r\n", b"POST /step HTTP/1.1\r\n", b"Content-Length: 5\r\n", b"0\r\n"])
        )
    )
)
@settings(max_examples=100)
def test_nothing_that_is_sent_makes_a_connection_raise(fragments: list[bytes]) -> None:
    heard = conversation([fragments])
    assert heard == b"" or heard.startswith(b"HTTP/1.1 ")


def test_empty_lines_before_a_request_are_ignored() -> None:
    with gateway(Echo) as served, Wire(served.port) as wire:
        wire.send(b"\r\n" * 100_000)
        assert wire.ask(raw("GET /spec")).status == 200
        (connection,) = served.gateway._connections
        assert not connection._handover.received


# -- leaving


def alive(*kinds: type) -> int:
    gc.collect()
    return sum(isinstance(thing, kinds) for thing in gc.get_objects())


def reset(wire: Wire) -> None:
    """Close with RST, which the peer sees as an error."""
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.socket.close()


def test_two_thousand_broken_connections_leave_nothing_behind() -> None:
    class Slow(Echo):
        async def tick(self, body: bytes) -> bytes:
            await asyncio.sleep(0.01)
            return b"x" * 100_000

    settings = GatewaySettings(http=HttpLimits(receive_s=0.5), sessions=SessionLimits(silent_s=0.5, tick_s=2.0))
    with gateway(Slow, settings) as served:
        play_slowly(served.port)
        before = alive(HttpConnection, HttpExchange, Session)
        for i in range(2000):
            with Wire(served.port) as wire:
                request = step("start", f"gone{i}") + step("tick", f"gone{i}", b"x" * 50)
                if i % 4 == 0:
                    wire.send(request[: 1 + i % len(request)])
                elif i % 4 == 1:
                    wire.send(request)
                elif i % 4 == 2:
                    wire.send(step("start", f"gone{i}"))
                    assert wire.read().status == 200
                    wire.send(step("tick", f"gone{i}"))
                if i % 3:
                    reset(wire)
        wait_until(lambda: not served.gateway._connections, PATIENCE_S)
        wait_until(lambda: not len(served.gateway.sessions), PATIENCE_S)
        wait_until(lambda: not served.gateway.sessions._end_tasks, PATIENCE_S)
        served.gateway.sessions._ended.clear()
        wait_until(lambda: alive(HttpConnection, HttpExchange, Session) <= before, PATIENCE_S)
        play_slowly(served.port)


def play_slowly(port: int) -> None:
    with Wire(port) as wire:
        assert wire.ask(step("start", "slow")).status == 200
        assert len(wire.ask(step("tick", "slow")).body) == 100_000
        assert wire.ask(step("end", "slow")).status == 200
        wire.finish()
        assert wire.closed()


def test_the_reply_to_a_disconnected_client_is_kept_for_its_retry() -> None:
    calls: list[bytes] = []
    release = asyncio.Event()

    class Slow(Echo):
        async def tick(self, body: bytes) -> bytes:
            calls.append(body)
            await release.wait()
            return b"result of " + body

    with gateway(Slow) as served:
        with Wire(served.port) as wire:
            assert wire.ask(step("start", "a", seq=0)).status == 200
            wire.send(step("tick", "a", b"first", seq=1))
            wait_until(lambda: calls == [b"first"], PATIENCE_S)
            reset(wire)
        wait_until(lambda: not served.gateway._connections, PATIENCE_S)

        async def let_go() -> None:
            release.set()

        served.run(let_go())
        assert ask(served.port, step("tick", "a", b"first", seq=1)).body == b"result of first"
    assert calls == [b"first"]


def test_disconnecting_during_a_large_reply_is_harmless() -> None:
    with gateway(Echo) as served, Wire(served.port) as other:
        assert other.ask(step("start", "other")).status == 200
        for i in range(10):
            with Wire(served.port, receive_buffer=4096) as wire:
                assert wire.ask(step("start", f"big{i}", seq=0)).status == 200
                wire.send(step("tick", f"big{i}", b"x" * MB, seq=1))
                assert wire.socket.recv(1000)
                reset(wire)
            assert other.ask(step("tick", "other", b"fine")).body == b"fine"
            assert ask(served.port, step("tick", f"big{i}", b"x" * MB, seq=1)).body == b"x" * MB
        wait_until(lambda: len(served.gateway._connections) == 1, PATIENCE_S)


_WORDS = st.text("abcXYZ019-_.:", min_size=1, max_size=12).map(str.encode)


@given(st.binary(max_size=6), st.integers(0, 10**17), st.integers(0, 10**6), _WORDS, _WORDS, st.permutations(range(4)))
def test_a_template_matches_other_values_or_not_at_all(
    noise: bytes, seq: int, length: int, session: bytes, id_: bytes, order: list[int]
) -> None:
    def block(seq: int, length: int, session: bytes, id_: bytes) -> bytes:
        lines = [b"Content-Length: %d" % length, b"session: %b" % session, b"seq:%d" % seq, b"X-Request-Id: %b" % id_]
        return b"POST /step HTTP/1.1\r\n" + b"\r\n".join(lines[i] for i in order) + b"\r\n\r\n"

    template = HeaderTemplate.learn(block(7, 42, b"s", b"i"))
    assert template is not None
    head = block(seq, length, session, id_)
    assert template.match(head + b"body") == (len(head), length, seq, session, id_.decode())
    shape = re.escape(block(0, 0, b"S", b"I"))
    shape = shape.replace(rb"\ 0", rb"\ [0-9]+").replace(rb":0", rb":[0-9]+")
    shape = shape.replace(rb"\ S", rb"\ [\w.:-]+").replace(rb"\ I", rb"\ [\w.:-]+")
    for at in range(len(head)):
        other = head[:at] + noise + head[at + len(noise) :]
        begins = template.match(other)[0]
        assert begins == 0 or re.fullmatch(shape, other[:begins])


@pytest.mark.parametrize("header", ["session: a b", "session: ä", "X-Request-Id: a/b", "session: a\r\nsession: a", "seq: 1 "])
def test_an_unusual_header_block_gives_no_template(header: str) -> None:
    lines = ["POST /step HTTP/1.1", "Content-Length: 1", *([] if header.startswith("session") else ["session: s"]), header]
    assert HeaderTemplate.learn(("\r\n".join(lines) + "\r\n\r\n").encode()) is None
