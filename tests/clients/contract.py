"""The contract of all clients, in any language. A test class inherits from Contract and provides a `driver`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from ludus.errors import Refused
from ludus.gateway.actor import Actor
from ludus.gateway.server import GatewaySettings
from tests.clients.driving import Driver, Outcome
from tests.clients.hostile import (
    CHUNKED,
    MISBEHAVIOURS,
    OK,
    REFUSALS,
    STRANGE,
    Misbehaviour,
    Wire,
    answering,
    body_of,
    header,
    hostile,
    listening,
    mutated,
    read_request,
    refusal,
    wire,
)
from tests.local_servers import Served, checking, gateway
from tests.tools import need

SOON_S = 8.0
"""Longer than every deadline and time-out here, shorter than the wait of a hanging client."""
MISS_MS = 100
"""A deadline that a delayed tick misses. Calls that must succeed have seconds."""


class Bot(Actor):
    """Replies with its number of ticks and the body, which reveals requests processed twice and mixed-up replies."""

    patience = threading.Event()
    """A tick with body `wait` is answered when this is set."""
    asked = threading.Event()
    """Set when such a tick has arrived."""

    def __init__(self) -> None:
        self.ticks = 0

    async def start(self, session: str, body: bytes) -> bytes:
        return b"started " + session.encode() + b" " + body + b" " + self.match.encode()

    async def tick(self, body: bytes) -> bytes:
        self.ticks += 1
        if body == b"refuse":
            self.ticks -= 1
            raise Refused(422, "observation", "It does not fit: größer.", 'Send "another".')
        if body == b"raise":
            raise RuntimeError("broken")
        if body == b"wait":
            self.asked.set()
        while body == b"wait" and not self.patience.is_set():
            await asyncio.sleep(0.005)
        return body if body[:4] == struct.pack("<f", -1.5) else b"%d %b" % (self.ticks, body)

    async def end(self, body: bytes) -> bytes:
        return b"ended %d " % self.ticks + body


def actor() -> Bot:
    """A separate factory per test, because it counts."""
    return Bot()


def left_waiting(driver: Driver) -> Outcome:
    """Send a tick that misses its deadline, and return when the actor has received it."""
    Bot.asked.clear()
    late = driver.do("tick", b"wait", deadline_ms=MISS_MS)
    assert Bot.asked.wait(SOON_S)
    return late


class EssentialContract:
    """The driver is created once per class; every test opens its own client and sessions."""

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls) -> Iterator[Served]:
        Bot.patience.clear()
        with gateway(actor, GatewaySettings(spec={"observation_space": {"type": "Discrete", "n": 3}})) as served:
            yield served

    @pytest.fixture
    def between(self, served: Served) -> Iterator[Wire]:
        Bot.patience.clear()
        with wire(served.port) as between:
            yield between
            Bot.patience.set()

    def test_a_match_is_played_from_start_to_end(self, driver: Driver, served: Served) -> None:
        driver.open(served.url)
        every_byte = bytes(range(256))
        assert driver.ok("start", b"map \xff", session="größe", match="m1") == b"started gr\xc3\xb6\xc3\x9fe map \xff m1"
        assert driver.ok("tick", b"x") == b"1 x"
        assert driver.ok("tick", every_byte) == b"2 " + every_byte
        assert driver.ok("tick", b"") == b"3 "
        assert driver.ok("tick", every_byte * 400) == b"4 " + every_byte * 400
        assert driver.ok("end", b"won") == b"ended 4 won"

    def test_a_refused_tick_leaves_the_session_as_it_was(self, driver: Driver, served: Served) -> None:
        driver.open(served.url)
        driver.ok("start")
        driver.ok("tick", b"a")
        refused = driver.do("tick", b"refuse")
        assert refused.refusal == ("refused", 422, "observation")
        assert refused.body.decode() == "It does not fit: größer."
        assert bytes.fromhex(refused.more["hint"][1:]).decode() == 'Send "another".'
        assert driver.ok("tick", b"b") == b"2 b"

    def test_a_session_lost_by_the_server_is_recognised(self, driver: Driver, served: Served) -> None:
        driver.open(served.url, fallback="default", default="00")
        driver.ok("start")
        assert driver.do("tick", b"raise").refusal == ("lost", 500, "actor_failed")
        assert driver.do("tick", b"x").kind == "lost"
        assert driver.ok("start", session="again") == b"started again  "

    @pytest.mark.parametrize("fate", ["lose request", "lose reply"])
    def test_a_request_whose_connection_breaks_is_sent_again_and_counts_once(
        self, driver: Driver, between: Wire, fate: str
    ) -> None:
        driver.open(between.url)
        between.plan(fate, "pass", fate, "pass", fate, fate, "pass", fate, "pass")
        assert driver.ok("start", session=f"s-{fate[5:]}").startswith(b"started")
        assert driver.ok("tick", b"a") == b"1 a"
        twice = driver.do("tick", b"b")
        assert (twice.body, twice.missed) == (b"2 b", 0)
        assert driver.ok("end", b"") == b"ended 2 "
        first = between.seqs[0]
        assert [seq - first for seq in between.seqs] == [0, 0, 1, 1, 2, 2, 2, 3, 3]
        assert not between.fates

    def test_the_last_action_is_repeated_when_the_actor_is_late(self, driver: Driver, between: Wire) -> None:
        driver.open(between.url, fallback="repeat", deadline_ms=5000)
        driver.ok("start")
        assert driver.ok("tick", b"a") == b"1 a"
        late = left_waiting(driver)
        assert (late.kind, late.body, late.missed, late.fell_back) == ("ok", b"1 a", 1, True)
        again = driver.do("tick", b"b", deadline_ms=MISS_MS)  # the actor still waits: 409 busy
        assert (again.kind, again.body, again.missed, again.fell_back) == ("ok", b"1 a", 2, True)
        Bot.patience.set()
        good = driver.do("tick", b"c")
        assert (good.kind, good.body, good.missed, good.fell_back) == ("ok", b"3 c", 2, False)
        assert driver.ok("tick", b"d") == b"4 d"
        assert driver.ok("end", b"") == b"ended 4 "

    def test_a_tick_waits_for_the_one_before_within_its_own_deadline(self, driver: Driver, between: Wire) -> None:
        driver.open(between.url, fallback="repeat", default="00")
        driver.ok("start")
        assert left_waiting(driver).fell_back

        def be_patient() -> None:
            between.heard(4)  # the start, the tick that waits, and two that met a busy session
            Bot.patience.set()

        threading.Thread(target=be_patient, daemon=True).start()
        good = driver.do("tick", b"b")
        assert (good.body, good.missed) == (b"2 b", 1)

    def test_a_request_lost_silently_is_not_processed(self, driver: Driver, between: Wire) -> None:
        driver.open(between.url, fallback="default", default="00ff")
        between.plan("pass", "swallow request", "pass")
        driver.ok("start")
        lost = driver.do("tick", b"a", deadline_ms=MISS_MS)
        between.settled(2)
        assert (lost.body, lost.missed, lost.fell_back) == (b"\x00\xff", 1, True)
        good = driver.do("tick", b"b")
        assert (good.body, good.missed, good.fell_back) == (b"1 b", 1, False)
        assert driver.ok("tick", b"c") == b"2 c"
        assert driver.ok("end", b"") == b"ended 2 "
        first = between.seqs[0]
        assert [seq - first for seq in between.seqs] == [0, 1, 2, 1, 2, 3]

    def test_a_reply_lost_silently_is_never_taken_for_the_next(self, driver: Driver, between: Wire) -> None:
        driver.open(between.url, fallback="default", default="00")
        between.plan("pass", "swallow reply", "pass", "swallow reply", "swallow reply")
        driver.ok("start")
        assert driver.do("tick", b"a", deadline_ms=MISS_MS).fell_back
        between.settled(2)
        assert driver.ok("tick", b"b") == b"2 b"
        assert driver.do("tick", b"c", deadline_ms=MISS_MS).fell_back
        between.settled(4)
        assert driver.do("tick", b"d", deadline_ms=MISS_MS).fell_back
        between.settled(5)
        last = driver.do("tick", b"e")
        assert (last.body, last.missed) == (b"5 e", 3)
        assert driver.ok("end", b"") == b"ended 5 "

    def test_a_very_late_tick_does_not_block_a_resynchronised_session(self, driver: Driver, between: Wire) -> None:
        driver.open(between.url, fallback="default", default="00")
        between.plan("pass", "swallow request", "hold request")
        driver.ok("start")
        for body, count in ((b"a", 2), (b"b", 3)):
            assert driver.do("tick", body, deadline_ms=MISS_MS).fell_back
            between.heard(count)
        assert driver.ok("tick", b"c") == b"1 c"  # by the number of a; all is well again
        between.release()
        between.settled(5)  # of them c is two; b has counted now, by its own number
        assert driver.ok("tick", b"d") == b"3 d"
        last = driver.do("tick", b"e")
        assert (last.body, last.missed) == (b"4 e", 2)
        assert driver.ok("end", b"") == b"ended 4 "

    def test_start_and_end_have_no_fallback(self, driver: Driver, between: Wire) -> None:
        driver.open(between.url, fallback="default", default="00")
        between.plan(*["lose request"] * 3)
        assert driver.do("start").kind == "unreachable"
        driver.ok("start")
        assert driver.ok("tick", b"a") == b"1 a"
        between.plan(*["lose reply"] * 3)
        assert driver.do("end", b"bye").kind == "unreachable"
        assert driver.ok("end", b"bye") == b"ended 1 bye"
        assert len(set(between.requests[-4:])) == 1


class Contract(EssentialContract):
    has_tls = True

    # -- playing

    def test_the_connection_is_kept_and_every_request_is_numbered(self, driver: Driver, between: Wire, served: Served) -> None:
        driver.open(between.url)
        driver.ok("start")
        for _ in range(3):
            driver.ok("tick", b"x")
        assert served.gateway.counters()["connections"] == 1
        driver.ok("end")
        first = between.seqs[0]
        assert between.seqs == [first, first + 1, first + 2, first + 3, first + 4]

    def test_sessions_have_fresh_names(self, driver: Driver, between: Wire) -> None:
        driver.open(between.url)
        for _ in range(2):
            driver.ok("start")
            driver.ok("end")
        assert len({header(request, "ludus-session") for request in between.requests}) == 2

    def test_start_sends_its_options(self, driver: Driver) -> None:
        with answering(OK) as server:
            driver.open(server.url, token="s3cret")
            driver.ok("start", b"hello", session="a", match="m", side="red", model="blue", version=12, temperature=0.25)
            driver.ok("tick", b"x")
        start, tick = server.requests
        told = {
            name: header(start, f"ludus-{name}")
            for name in ("session", "step", "match", "side", "model", "version", "temperature")
        }
        assert told == {
            "session": "a", "step": "start", "match": "m", "side": "red", "model": "blue", "version": "12", "temperature": "0.25",
        }  # fmt: skip
        assert header(tick, "ludus-model") == ""
        assert header(tick, "ludus-match") == ""
        assert {header(request, "authorization") for request in server.requests} == {"Bearer s3cret"}
        assert (start.split(b"\r\n")[0], body_of(start)) == (b"POST /step HTTP/1.1", b"hello")

    def test_spec_returns_the_spaces(self, driver: Driver, served: Served) -> None:
        driver.open(served.url)
        assert b'"observation_space"' in driver.ok("spec")

    def test_raw_bodies_are_little_endian(self, driver: Driver, served: Served) -> None:
        driver.open(served.url)
        driver.ok("start")
        values = struct.pack("<fI2fqBid2B", -1.5, 2 | 4, 0.25, -3.0, -2, 200, 7, 0.1, 1, 2)
        assert driver.ok("raw") == values + bytes([1, 0, 1])

    # -- refusals

    def test_an_unknown_session_is_lost_too(self, driver: Driver, served: Served) -> None:
        with gateway(actor) as restarted, wire(served.port) as between:
            driver.open(between.url, fallback="repeat", default="00")
            driver.ok("start")
            driver.ok("tick", b"x")
            between.port_behind = restarted.port  # for new connections
            between.plan("lose request")
            assert driver.do("tick", b"x").refusal == ("lost", 404, "unknown_session")

    def test_the_token_is_required(self, driver: Driver) -> None:
        with gateway(actor, GatewaySettings(token="s3cret")) as served:
            driver.open(served.url, token="wrong", fallback="default", default="00")
            assert driver.do("start").refusal == ("refused", 401, "unauthorized")
            driver.open(served.url)
            assert driver.do("start").refusal == ("refused", 401, "unauthorized")
            driver.open(served.url, token="s3cret")
            assert driver.ok("start", session="a") == b"started a  "
            assert driver.ok("tick", b"x") == b"1 x"

    def test_a_token_or_name_that_would_forge_a_header_is_never_sent(self, driver: Driver, served: Served) -> None:
        assert driver.do("open", url=served.url, token="a\tb").kind == "usage"
        driver.open(served.url)
        assert driver.do("start", session="x" * 300).kind == "usage"
        assert driver.do("start", match="a\x01b").kind == "usage"

    def test_an_unreachable_server_is_an_error_soon(self, driver: Driver) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        driver.open(f"http://127.0.0.1:{port}", timeout_ms=2000)
        outcome = driver.do("start")
        assert outcome.kind == "unreachable"
        assert outcome.took_s < SOON_S
        assert str(port) in outcome.body.decode()

    # -- deadlines

    def test_a_request_that_arrives_late_disturbs_nothing(self, driver: Driver, between: Wire) -> None:
        driver.open(between.url, fallback="default", default="00")
        between.plan("pass", "delay request")
        driver.ok("start")
        assert driver.do("tick", b"late", deadline_ms=MISS_MS).fell_back
        between.heard(2)
        number, _, body = driver.ok("tick", b"b").partition(b" ")
        assert (body, int(number) in (1, 2)) == (b"b", True)
        assert driver.ok("tick", b"c").endswith(b" c")
        assert driver.ok("tick", b"c").endswith(b" c")

    def test_without_a_fallback_a_missed_deadline_is_an_error_and_the_session_goes_on(
        self, driver: Driver, between: Wire
    ) -> None:
        driver.open(between.url)
        driver.ok("start")
        driver.ok("tick", b"a")
        late = left_waiting(driver)
        assert (late.kind, late.missed, late.fell_back) == ("deadline", 1, True)
        assert late.took_s < SOON_S
        Bot.patience.set()
        assert driver.ok("tick", b"b") == b"3 b"

    def test_before_the_first_action_there_is_nothing_to_repeat(self, driver: Driver, between: Wire) -> None:
        driver.open(between.url, fallback="repeat", deadline_ms=MISS_MS)
        driver.ok("start", b"not an action")
        assert driver.do("tick", b"wait").kind == "deadline"
        driver.open(between.url, fallback="repeat", deadline_ms=MISS_MS, default="07")
        driver.ok("start", b"not an action")
        assert driver.do("tick", b"wait").body == b"\x07"

    def test_the_end_comes_through_after_missed_ticks(self, driver: Driver, between: Wire) -> None:
        driver.open(between.url, fallback="default", default="00")
        for fate, counted in (("swallow request", 0), ("swallow reply", 1)):
            between.plan("pass", fate)
            driver.ok("start")
            assert driver.do("tick", b"a", deadline_ms=MISS_MS).fell_back
            between.settled(len(between.requests))
            assert driver.ok("end", b"") == b"ended %d " % counted
        driver.ok("start")
        assert left_waiting(driver).fell_back
        threading.Timer(0.05, Bot.patience.set).start()
        assert driver.ok("end", b"") == b"ended 1 "

    def test_the_end_comes_through_when_a_tick_arrives_long_after_it_was_given_up(self, driver: Driver, between: Wire) -> None:
        driver.open(between.url, fallback="default", default="00")
        between.plan("pass", "swallow request", "hold request")
        driver.ok("start")
        for body, count in ((b"a", 2), (b"wait", 3)):
            assert driver.do("tick", body, deadline_ms=MISS_MS).fell_back
            between.heard(count)
        assert driver.ok("tick", b"c") == b"1 c"
        Bot.asked.clear()
        between.release()
        assert Bot.asked.wait(SOON_S)
        threading.Timer(0.05, Bot.patience.set).start()
        assert driver.ok("end", b"") == b"ended 2 "

    def test_a_server_without_room_is_asked_again(self, driver: Driver) -> None:
        full = refusal(b'{"error": "worker_busy", "message": "m", "hint": "wait"}', "503 Service Unavailable", 0.05)
        with answering(full, OK, full, OK) as server:
            driver.open(server.url)
            assert driver.ok("start") == b"ok"
            assert driver.ok("tick", b"x") == b"ok"
        seqs = [int(header(request, "ludus-seq")) for request in server.requests]
        assert [seq - seqs[0] for seq in seqs] == [0, 0, 1, 1]

    def test_a_server_that_has_no_room_for_long_is_a_missed_tick(self, driver: Driver) -> None:
        full = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 30\r\nContent-Length: 0\r\n\r\n"
        with answering(OK, full) as server:
            driver.open(server.url, fallback="default", default="05", deadline_ms=300)
            driver.ok("start")
            late = driver.do("tick", b"x")
            assert (late.kind, late.body, late.missed) == ("ok", b"\x05", 1)
            assert driver.do("end").refusal[:2] == ("refused", 503)

    # -- proxies

    @pytest.mark.parametrize("status", ["500", "502", "504"])
    def test_a_proxy_reply_leaves_the_outcome_unknown(self, driver: Driver, between: Wire, status: str) -> None:
        driver.open(between.url, fallback="default", default="00")
        between.plan(status, status, status, "pass", status, "pass", status, status, status, "pass", status, status, status)
        assert driver.do("start", b"map").kind == "unreachable"
        assert driver.ok("start", b"map", again=1).startswith(b"started")
        assert driver.ok("tick", b"a") == b"1 a"
        late = driver.do("tick", b"b")
        assert (late.kind, late.body, late.missed, late.fell_back) == ("ok", b"\x00", 1, True)
        assert driver.ok("tick", b"c") == b"3 c"
        assert driver.do("end", b"").kind == "unreachable"
        assert driver.ok("end", b"") == b"ended 3 "
        first = between.seqs[0]
        assert [seq - first for seq in between.seqs] == [0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 4]

    def test_an_unanswered_tick_may_have_been_processed_whatever_its_retry_returns(self, driver: Driver, between: Wire) -> None:
        driver.open(between.url, fallback="default", default="00")
        between.plan("pass", "lose reply", "full")
        driver.ok("start")
        assert driver.do("tick", b"a").fell_back
        assert driver.ok("tick", b"b") == b"2 b"
        assert driver.ok("end", b"") == b"ended 2 "

    # -- TLS

    def test_tls_requires_a_trusted_certificate(self, driver: Driver, served: Served, tmp_path: Path) -> None:
        if not self.has_tls:
            pytest.skip("this client has no TLS of its own")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate = self_signed(tmp_path)
        context.load_cert_chain(tmp_path / "both.pem")
        with wire(served.port, tls=context) as between:
            driver.open(f"https://localhost:{between.port}", timeout_ms=3000)
            assert driver.do("start").kind == "unreachable"
            driver.open(f"https://localhost:{between.port}", certificate=certificate, fallback="default", default="00")
            assert driver.ok("start", session="safe") == b"started safe  "
            assert driver.ok("tick", b"x" * 100_000) == b"1 " + b"x" * 100_000
            between.plan("swallow reply")
            assert driver.do("tick", b"y", deadline_ms=MISS_MS).fell_back
            between.settled(3)
            assert driver.ok("tick", b"z") == b"3 z"
            assert driver.ok("end", b"") == b"ended 3 "


class HostileContract:
    """Servers that misbehave."""

    @pytest.mark.parametrize("name", MISBEHAVIOURS)
    def test_a_server_that(self, driver: Driver, name: str) -> None:
        with hostile(MISBEHAVIOURS[name], after=2) as server:
            driver.open(server.url)
            assert driver.ok("start") == b"ok"
            assert driver.ok("tick", b"x") == b"ok"
            tick = driver.do("tick", b"y", deadline_ms=40)
            assert tick.kind in ("deadline", "unreachable"), tick
            assert (tick.missed, tick.took_s < SOON_S) == (1, True)
            driver.open(server.url, timeout_ms=40)
            start = driver.do("start")
            assert (start.kind, start.took_s < SOON_S) == ("unreachable", True)

    @pytest.mark.parametrize("name", STRANGE)
    def test_a_reply_may_be_unusual(self, driver: Driver, name: str) -> None:
        reply, body = STRANGE[name]
        with answering(reply) as server:
            driver.open(server.url)
            assert driver.ok("start") == body
            assert driver.ok("tick", b"x") == body

    @pytest.mark.parametrize("name", REFUSALS)
    def test_a_refusal_of_another_kind_of_server_is_a_refusal(self, driver: Driver, name: str) -> None:
        with answering(OK, refusal(REFUSALS[name])) as server:
            driver.open(server.url, fallback="default", default="00")
            driver.ok("start")
            refused = driver.do("tick", b"x")
            assert (refused.kind, refused.refusal[1]) == ("refused", 409)

    def test_a_server_that_never_agrees_about_numbers_costs_one_deadline(self, driver: Driver) -> None:
        never = refusal(b'{"error": "seq", "message": "m", "hint": "h", "last": 3}')
        with hostile(MISBEHAVIOURS["stays silent"], after=1) as server:
            driver.open(server.url, fallback="default", default="00")
            driver.ok("start")
            assert driver.do("tick", b"x", deadline_ms=MISS_MS).fell_back
            port = server.port
        with answering(never, port=port) as stubborn:
            late = driver.do("tick", b"x", deadline_ms=500)
            assert (late.kind, late.body, late.missed) == ("ok", b"\x00", 2)
            assert 2 < len(stubborn.requests) < 200, "it asks again and again, with pauses"


class CornerContract:
    """Rare cases."""

    def test_whatever_comes_back_is_an_answer_or_an_error(self, driver: Driver) -> None:
        rng = random.Random(7)
        left = [OK, *(mutated(rng) for _ in range(150))]

        def serve(connected: socket.socket, over: threading.Event) -> None:
            if read_request(connected) is not None and left:
                connected.sendall(left.pop(0))

        with listening(serve) as port:
            driver.open(f"http://127.0.0.1:{port}", retries=0)
            driver.ok("start")
            kinds = {driver.do("tick", b"x", deadline_ms=2000).kind for _ in range(150)}
        assert kinds <= {"ok", "refused", "lost", "unreachable", "deadline"}
        assert {"ok", "unreachable", "refused"} <= kinds, "the bytes were all of one kind"

    def test_a_reply_that_drips_byte_by_byte_is_read(self, driver: Driver) -> None:
        def drip(connected: socket.socket, over: threading.Event) -> None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while read_request(connected) is not None:
                for byte in b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + STRANGE["in chunks"][0]:
                    connected.sendall(bytes([byte]))

        with listening(drip) as port:
            driver.open(f"http://127.0.0.1:{port}")
            assert [driver.ok("start"), driver.ok("tick", b"x"), driver.ok("end")] == [b"ok"] * 3

    def test_a_reply_beyond_the_limit_is_an_error(self, driver: Driver) -> None:
        endless = Misbehaviour(CHUNKED, pour=b"400\r\n" + bytes(1024) + b"\r\n")
        with hostile(endless) as server:
            driver.open(server.url, max_reply_bytes=100_000)
            outcome = driver.do("start")
            assert (outcome.kind, re.search(b"too l(ong|arge)", outcome.body) is not None) == ("unreachable", True)
        for size, kind in ((1000, "ok"), (1001, "unreachable")):
            with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)) as server:
                driver.open(server.url, max_reply_bytes=1000)
                assert driver.do("start").kind == kind

    def test_an_address_that_swallows_everything_costs_the_time_out(self, driver: Driver) -> None:
        """A full backlog drops connections, as a firewall does."""
        with socket.socket() as full, contextlib.ExitStack() as knocking:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for _ in range(4):
                one = knocking.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            driver.open(f"http://127.0.0.1:{full.getsockname()[1]}", timeout_ms=200)
            outcome = driver.do("start")
            assert (outcome.kind, outcome.took_s < SOON_S) == ("unreachable", True)

    def test_a_name_that_nobody_has_is_an_error(self, driver: Driver) -> None:
        driver.open("http://no-such-host.invalid:80", timeout_ms=2000)
        outcome = driver.do("start")
        assert (outcome.kind, outcome.took_s < SOON_S) == ("unreachable", True)

    def test_a_server_that_does_not_read_costs_one_deadline(self, driver: Driver) -> None:
        def deaf(connected: socket.socket, over: threading.Event) -> None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            if read_request(connected) is not None:
                connected.sendall(OK)
                over.wait(SOON_S)

        with listening(deaf) as port:
            driver.open(f"http://127.0.0.1:{port}", fallback="default", default="05")
            driver.ok("start")
            late = driver.do("tick", zeros=16 << 20, deadline_ms=150)
            assert (late.kind, late.body, late.missed) == ("ok", b"\x05", 1)
            assert late.took_s < SOON_S

    def test_a_refusal_that_comes_before_the_body_was_sent_is_heard_and_the_connection_left(self, driver: Driver) -> None:
        """The next reply would be taken for the rest of the body."""
        large = refusal(b'{"error": "body_too_large", "message": "m", "hint": "h"}', "413 Content Too Large")
        connections = itertools.count()

        def refuse(connected: socket.socket, over: threading.Event) -> None:
            if next(connections):
                read_request(connected)
                connected.sendall(OK)
                return
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connected.recv(1000)
            connected.sendall(large)
            over.wait(SOON_S)

        with listening(refuse) as port:
            driver.open(f"http://127.0.0.1:{port}", timeout_ms=5000)
            assert driver.do("start", zeros=16 << 20).refusal == ("refused", 413, "body_too_large")
            assert driver.ok("start", b"small") == b"ok"

    def test_a_start_and_an_end_without_an_answer_may_be_made_again_and_count_once(self, driver: Driver) -> None:
        with gateway(actor) as served, wire(served.port) as between:
            driver.open(between.url, retries=0)
            between.plan("lose reply", "pass", "pass", "lose reply")
            assert driver.do("start", b"map").kind == "unreachable"
            assert driver.ok("start", b"map", again=1).startswith(b"started")
            assert driver.ok("tick", b"x") == b"1 x"
            assert driver.do("end", b"won").kind == "unreachable"
            assert driver.ok("end", b"won") == b"ended 1 won"
            stats = served.gateway.sessions.stats
            assert (stats.started, stats.ended) == (1, 1)
        assert between.requests[0] == between.requests[1]
        assert between.requests[3] == between.requests[4]

    def test_what_is_not_open_cannot_be_ticked(self, driver: Driver) -> None:
        with answering(OK) as server:
            driver.open(server.url)
            driver.ok("start")
            driver.ok("end")
            assert driver.do("tick", b"x").kind == "usage"
        assert len(server.requests) == 2


def self_signed(directory: Path) -> Path:
    """A certificate for localhost; with its key in both.pem."""
    key, made = directory / "key.pem", directory / "made.crt"
    subprocess.run(
        [
            need("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2",
            "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", made,
        ],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    (directory / "both.pem").write_text(key.read_text() + made.read_text())
    return made


def environment(home: Path) -> dict[str, str]:
    """Environment of a program that may write into `home`."""
    return os.environ | {"HOME": str(home), "XDG_DATA_HOME": str(home), "XDG_CONFIG_HOME": str(home), "LC_ALL": "C.UTF-8"}


class Balancer(Actor):
    """Balances a pole by a rule, from raw bodies, and records each session."""

    ended: ClassVar[list[tuple[int, float, int]]] = []
    """Ticks, the sum of rewards and the last flags of every session that ended."""
    clumsy = False

    async def start(self, session: str, body: bytes) -> bytes:
        assert json.loads(body) == {"format": "raw"}
        self.ticks, self.rewards = 0, 0.0
        return b""

    async def tick(self, body: bytes) -> bytes:
        reward, flags, x, speed, angle, turning = struct.unpack("<fI4f", body)
        assert flags == 0
        self.ticks, self.rewards = self.ticks + 1, self.rewards + reward
        return struct.pack("<q", int((angle + 0.3 * turning + 0.05 * x + 0.1 * speed > 0) != self.clumsy))

    async def end(self, body: bytes) -> bytes:
        if self.ended_by == "game":
            reward, flags = struct.unpack_from("<fI", body)
            self.ended.append((self.ticks, self.rewards + reward, flags))
        return b""


class Clumsy(Balancer):
    clumsy = True


def can_be_won_and_lost(*command: str | Path, home: Path) -> None:
    """An example game, which plays three matches of at most 500 frames."""
    assert _played(Balancer, command, home) == [(500, 500.0, 2)] * 3
    for ticks, rewards, flags in _played(Clumsy, command, home):
        assert 3 < ticks < 100
        assert (rewards, flags) == (ticks, 1)


def makes_no_mistakes(*command: str | Path, home: Path) -> None:
    """The game passes `ludus check-game`."""
    with checking() as checked:
        _run(command, checked.url, home)
    assert checked.findings == []
    assert checked.server.conformance.matches == 3


def _played(actor: type[Balancer], command: Sequence[str | Path], home: Path) -> list[tuple[int, float, int]]:
    Balancer.ended.clear()
    with gateway(actor) as served:
        said = _run(command, served.url, home)
    ended = list(Balancer.ended)
    told = re.findall(r"^match \d+: (\d+) frames, 0 missed$", said, re.MULTILINE)
    assert [int(frames) for frames in told] == [ticks for ticks, _, _ in ended]
    assert len(ended) == 3
    return ended


def _run(command: Sequence[str | Path], url: str, home: Path) -> str:
    filled = [str(word).format(url=url) for word in command]
    done = subprocess.run(filled, capture_output=True, text=True, timeout=60, env=environment(home))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
