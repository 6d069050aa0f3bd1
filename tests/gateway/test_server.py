"""The protocol from the game's side: one gateway on a real port."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ludus
from ludus.errors import Refused
from ludus.gateway.actor import Actor
from ludus.gateway.server import GatewaySettings, owner_of
from ludus.gateway.sessions import SessionLimits
from ludus.protocol.spec import MAX_SEQ
from tests.gateway.wire import PATIENCE_S, Wire, ask, play, raw, step
from tests.local_servers import Served, gateway
from tests.waiting import wait_until


class Echo(Actor):
    async def start(self, session: str, body: bytes) -> bytes:
        return session.encode() + b":" + body

    async def tick(self, body: bytes) -> bytes:
        return body

    async def end(self, body: bytes) -> bytes:
        return body


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with gateway(Echo) as served:
        yield served


def limited(**limits: Any) -> GatewaySettings:
    return GatewaySettings(sessions=SessionLimits(**limits))


# -- names


@pytest.mark.parametrize("session", ["session", "game_id", "game-id", "Ludus-Session", "SESSION", "LUDUS-SESSION"])
@pytest.mark.parametrize("kind", ["step_kind", "step-kind", "Ludus-Step", "STEP_KIND"])
@pytest.mark.parametrize("stop", ["end", "stop", "END"])
def test_every_spelling_of_the_headers_works(server: Served, session: str, kind: str, stop: str) -> None:
    with Wire(server.port) as wire:
        for said, body in (("start", b"s"), ("tick", b"t"), (stop, b"e")):
            headers = [f"{session}: spelled", f"{kind}:{said}", "Content-Length: 1", "Ludus-Match: m1"]
            reply = wire.ask(raw("POST /step", headers, body))
            assert (reply.status, reply.body) == (200, b"spelled:s" if said == "start" else body)


@pytest.mark.parametrize("seq", ["seq", "Ludus-Seq", "SEQ"])
def test_every_spelling_of_the_number_works(server: Served, seq: str) -> None:
    with Wire(server.port) as wire:
        assert wire.ask(step("start", seq, headers=[f"{seq}: 0"])).status == 200
        assert wire.ask(step("tick", seq, b"one", headers=[f"{seq}: 1"])).body == b"one"
        assert wire.ask(step("tick", seq, b"one", headers=[f"{seq}: 1"])).body == b"one"
        assert wire.ask(step("tick", seq, b"two", headers=[f"{seq}: 3"])).refusal == (409, "seq")
        assert wire.ask(step("end", seq, headers=[f"{seq}: 2"])).status == 200


def test_white_space_around_values_is_not_part_of_them(server: Served) -> None:
    with Wire(server.port) as wire:
        headers = ["session: \t spaced \t", "step_kind: start  ", "seq: 0 ", "Content-Length: 0 "]
        assert wire.ask(raw("POST /step", headers)).body == b"spaced:"
        assert wire.ask(step("tick", "spaced", b"x", seq=1)).body == b"x"
        assert wire.ask(step("end", "spaced", seq=2)).status == 200


@pytest.mark.parametrize("session", ["x" * 256, "Ünïcödé-∀", "a b/c?d=e&f#g;h,i"])
def test_session_ids_are_any_text_up_to_256_bytes(server: Served, session: str) -> None:
    sent = session.encode().decode("latin-1")
    with Wire(server.port) as wire:
        assert wire.ask(step("start", sent)).body == session.encode() + b":"
        assert wire.ask(step("tick", sent, b"x")).body == b"x"
        assert wire.ask(step("end", sent)).status == 200


WRONG = {
    "no session": (["step_kind: start"], "session"),
    "empty session": (["session:", "step_kind: start"], "session"),
    "long session": ([f"session: {'x' * 257}", "step_kind: start"], "session"),
    "long match": (["session: w", f"match: {'x' * 257}", "step_kind: start"], "session"),
    "two sessions": (["session: w", "session: v", "step_kind: start"], "session"),
    "two spellings": (["session: w", "game_id: v", "step_kind: start"], "session"),
    "no kind": (["session: w"], "step_kind"),
    "empty kind": (["session: w", "step_kind:"], "step_kind"),
    "unknown kind": (["session: w", "step_kind: jump"], "step_kind"),
    "two kinds": (["session: w", "step_kind: start", "Ludus-Step: tick"], "step_kind"),
    "negative seq": (["session: w", "step_kind: start", "seq: -1"], "seq"),
    "empty seq": (["session: w", "step_kind: start", "seq:"], "seq"),
    "fractional seq": (["session: w", "step_kind: start", "seq: 1.0"], "seq"),
    "seq in words": (["session: w", "step_kind: start", "seq: one"], "seq"),
    "seq in other digits": (["session: w", "step_kind: start", "seq: \xb2"], "seq"),
    "huge seq": (["session: w", "step_kind: start", f"seq: {MAX_SEQ + 1}"], "seq"),
    "endless seq": (["session: w", "step_kind: start", f"seq: {'9' * 5000}"], "seq"),
    "two seqs": (["session: w", "step_kind: start", "seq: 1", "seq: 2"], "seq"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_headers_are_named_and_the_connection_stays_open(server: Served, name: str) -> None:
    headers, error = WRONG[name]
    with Wire(server.port) as wire:
        reply = wire.ask(raw("POST /step", [*headers, "Content-Length: 4"], b"body"))
        assert reply.refusal == (400, error)
        assert reply.json["hint"]
        assert "connection" not in reply.headers
        assert wire.ask(step("tick", "w")).refusal == (404, "unknown_session")
    play(server.port, "after wrong headers")


def test_the_largest_number_is_taken(server: Served) -> None:
    with Wire(server.port) as wire:
        assert wire.ask(step("start", "many", seq=MAX_SEQ - 1)).status == 200
        assert wire.ask(step("tick", "many", b"x", seq=MAX_SEQ)).body == b"x"
        assert wire.ask(step("tick", "many", b"x", seq=MAX_SEQ)).body == b"x"
        assert wire.ask(step("tick", "many", b"y", seq=MAX_SEQ)).refusal == (409, "seq")


# -- what is refused


def test_each_client_error_has_its_status(server: Served) -> None:
    with Wire(server.port) as wire:
        assert wire.ask(step("tick", "m")).refusal == (404, "unknown_session")
        assert wire.ask(step("end", "m")).refusal == (404, "unknown_session")
        assert wire.ask(step("start", "m", seq=0)).status == 200
        assert wire.ask(step("start", "m", seq=5)).refusal == (409, "already_started")
        assert wire.ask(step("tick", "m")).refusal == (400, "seq")
        assert wire.ask(step("tick", "m", seq=2)).refusal == (409, "seq")
        assert wire.ask(step("tick", "m", seq=1)).status == 200
        assert wire.ask(step("end", "m", seq=1)).refusal == (409, "seq")
        assert wire.ask(step("end", "m", seq=2)).status == 200
        assert wire.ask(step("tick", "m", seq=3)).refusal == (404, "unknown_session")


def test_sessions_do_not_depend_on_their_connections(server: Served) -> None:
    assert ask(server.port, step("start", "wanderer", seq=0)).status == 200
    assert ask(server.port, step("tick", "wanderer", b"x", seq=1)).body == b"x"
    assert ask(server.port, step("tick", "wanderer", b"x", seq=1)).body == b"x"
    assert ask(server.port, step("end", "wanderer", b"z", seq=2)).body == b"z"
    assert ask(server.port, step("end", "wanderer", b"z", seq=2)).body == b"z"


def test_the_actor_may_refuse_a_body(server: Served) -> None:
    class Picky(Echo):
        async def tick(self, body: bytes) -> bytes:
            if body == b"bad":
                raise Refused(422, "observation", "obs[3] is NaN.", "Send finite numbers.")
            if body == b"later":
                raise Refused(503, "warming_up", "Not yet.", "Try again.", 1.2)
            return body

    with gateway(Picky) as served, Wire(served.port) as wire:
        assert wire.ask(step("start", "a", seq=0)).status == 200
        reply = wire.ask(step("tick", "a", b"bad", seq=1))
        assert reply.refusal == (422, "observation")
        assert reply.json == {"error": "observation", "message": "obs[3] is NaN.", "hint": "Send finite numbers."}
        later = wire.ask(step("tick", "a", b"later", seq=1))
        assert (later.refusal, later.headers["retry-after"]) == ((503, "warming_up"), "2")
        assert wire.ask(step("tick", "a", b"good", seq=1)).body == b"good"


def test_an_actor_that_raises_or_returns_a_wrong_type_ends_only_its_session() -> None:
    class Fragile(Echo):
        async def tick(self, body: bytes) -> bytes:
            if body == b"raise":
                raise ZeroDivisionError("secret of the server")
            return "text" if body == b"text" else body  # type: ignore[return-value]

    with gateway(Fragile) as served, Wire(served.port) as wire:
        for body, named in ((b"raise", "ZeroDivisionError"), (b"text", "TypeError")):
            assert wire.ask(step("start", "broken")).status == 200
            assert wire.ask(step("start", "sound")).status == 200
            reply = wire.ask(step("tick", "broken", body))
            assert reply.refusal == (500, "actor_failed")
            assert named in reply.message
            assert b"secret" not in reply.body
            assert wire.ask(step("tick", "broken")).refusal == (410, "session_lost")
            assert wire.ask(step("tick", "sound", b"fine")).body == b"fine"
            assert wire.ask(step("end", "sound")).status == 200


# -- limits and time


def test_too_many_sessions_get_retry_after() -> None:
    with gateway(Echo, limited(sessions=2)) as served, Wire(served.port) as wire:
        assert [wire.ask(step("start", id_)).status for id_ in "ab"] == [200, 200]
        reply = wire.ask(step("start", "c"))
        assert (reply.refusal, reply.headers["retry-after"]) == ((503, "too_many_sessions"), "1")
        assert wire.ask(step("end", "a")).status == 200
        assert wire.ask(step("start", "c")).status == 200


def test_too_many_requests_get_retry_after() -> None:
    with gateway(Echo, limited(requests_per_s=5.0)) as served, Wire(served.port) as wire:
        assert wire.ask(step("start", "a")).status == wire.ask(step("start", "b")).status == 200
        replies = [wire.ask(step("tick", "a")) for _ in range(30)]
        assert [reply.status for reply in replies[:5]] == [200] * 5
        assert replies[-1].refusal == (429, "too_many_requests")
        assert replies[-1].headers["retry-after"] == "1"
        assert wire.ask(step("tick", "b")).status == 200
        wait_until(lambda: wire.ask(step("tick", "a")).status == 200, PATIENCE_S)


def test_a_silent_session_ends_with_its_reason() -> None:
    ends: list[str] = []

    class Told(Echo):
        async def end(self, body: bytes) -> bytes:
            ends.append(self.ended_by)
            return b""

    with gateway(Told, limited(silent_s=0.3)) as served, Wire(served.port) as wire:
        assert wire.ask(step("start", "quiet")).status == wire.ask(step("start", "lively")).status == 200

        def lively() -> bool:
            assert wire.ask(step("tick", "lively")).status == 200
            return bool(ends)

        wait_until(lively, PATIENCE_S)
        assert ends == ["silent"]
        assert wire.ask(step("tick", "quiet")).refusal == (410, "session_lost")
        assert wire.ask(step("end", "lively")).status == 200
        assert wire.ask(step("start", "quiet")).status == 200
    assert ends == ["silent", "game", "shutdown"]


def test_ticks_that_take_too_long_end_their_sessions() -> None:
    calls: list[str] = []
    hold = threading.Event()

    class Slow(Echo):
        async def tick(self, body: bytes) -> bytes:
            if body == b"slow":
                await asyncio.sleep(PATIENCE_S)
            return body

        async def end(self, body: bytes) -> bytes:
            calls.append(f"async {self.ended_by}")
            return b""

    class SlowPlain(Echo):
        def tick(self, body: bytes) -> bytes:  # type: ignore[override]
            if body == b"slow":
                hold.wait(PATIENCE_S)
                calls.append("plain returned")
            return body

        async def end(self, body: bytes) -> bytes:
            calls.append(f"plain {self.ended_by}")
            return b""

    kinds = iter([Slow, SlowPlain, Slow])
    with gateway(lambda: next(kinds)(), limited(tick_s=0.3)) as served, Wire(served.port) as wire:
        assert [wire.ask(step("start", id_)).status for id_ in "abc"] == [200] * 3
        wire.send(step("tick", "a", b"slow") + step("tick", "b", b"slow"))
        assert [reply.refusal for reply in wire.replies(2)] == [(504, "actor_timeout")] * 2
        assert [wire.ask(step("tick", id_)).refusal for id_ in "ab"] == [(410, "session_lost")] * 2
        assert wire.ask(step("tick", "c", b"quick")).body == b"quick"
        wait_until(lambda: calls == ["async timeout"], PATIENCE_S)
        hold.set()
        wait_until(lambda: calls == ["async timeout", "plain returned", "plain timeout"], PATIENCE_S)


class Holding(Echo):
    """Its ticks block the event loop."""

    async def tick(self, body: bytes) -> bytes:
        time.sleep(float(body or b"0"))
        return body


def test_a_blocked_event_loop_extends_the_deadlines_of_games() -> None:
    with gateway(Holding, limited(silent_s=0.5)) as served, Wire(served.port) as wire, Wire(served.port) as other:
        assert wire.ask(step("start", "holds")).status == other.ask(step("start", "waits")).status == 200
        wire.send(step("tick", "holds", b"1.5"))
        time.sleep(0.2)
        other.send(step("tick", "waits"))
        assert wire.read().body == b"1.5"
        assert other.read().status == 200
        assert other.ask(step("tick", "waits")).status == 200


def test_a_repeatedly_blocked_loop_still_ends_silent_sessions() -> None:
    with gateway(Holding, limited(silent_s=0.3)) as served, Wire(served.port) as wire:
        assert wire.ask(step("start", "holds")).status == wire.ask(step("start", "silent")).status == 200
        for _ in range(15):
            if not served.gateway.sessions.stats.silent:
                assert wire.ask(step("tick", "holds", b"0.65")).status == 200
        assert served.gateway.sessions.stats.silent


def test_plain_actors_answer_many_games_at_once() -> None:
    barrier = threading.Barrier(4)

    class Together(Echo):
        def tick(self, body: bytes) -> bytes:  # type: ignore[override]
            barrier.wait(PATIENCE_S)
            return body

    def game(id_: str) -> bytes:
        with Wire(served.port) as wire:
            assert wire.ask(step("start", id_)).status == 200
            return wire.ask(step("tick", id_, id_.encode())).body

    with gateway(Together, limited(threads=4)) as served, ThreadPoolExecutor(4) as games:
        assert list(games.map(game, "abcd")) == [b"a", b"b", b"c", b"d"]


# -- tokens


def test_without_the_token_every_request_is_refused() -> None:
    settings = GatewaySettings(token="s3cret", spec={"observation_space": {"type": "Box"}})
    with gateway(Echo, settings) as served, Wire(served.port) as wire:
        for header in (
            [],
            ["Authorization: Bearer wrong!"],
            ["Authorization: s3cret"],
            ["Authorization: Bearer s3cretX"],
            ["Authorization:"],
        ):
            for request in (step("start", "a", b"body", headers=header), raw("GET /spec", header)):
                reply = wire.ask(request)
                assert (reply.refusal, reply.headers["www-authenticate"]) == ((401, "unauthorized"), "Bearer")
            assert wire.ask(raw("GET /health", header)).json == {"status": "ok"}
        assert not len(served.gateway.sessions)
        right = ["Authorization: Bearer s3cret"]
        assert wire.ask(step("start", "a", headers=right)).status == 200
        for _ in range(3):
            assert wire.ask(step("tick", "a", b"x", headers=right)).body == b"x"
            assert wire.ask(step("tick", "a", b"x", headers=["Authorization: Bearer s3creX"])).refusal == (401, "unauthorized")
            assert wire.ask(step("tick", "a", b"x")).refusal == (401, "unauthorized")
        assert wire.ask(raw("GET /spec", right)).json["observation_space"] == {"type": "Box"}
        assert wire.ask(raw("GET /health", right)).json["sessions"] == 1


def test_without_the_token_no_large_body_is_read() -> None:
    with gateway(Echo, GatewaySettings(token="s3cret")) as served, Wire(served.port) as wire:
        wire.send(raw("POST /step", ["session: a", "step_kind: start", "Content-Length: 1000000"]))
        reply = wire.read()
        assert (reply.refusal, reply.headers["connection"]) == ((401, "unauthorized"), "close")
        assert wire.closed()
        with Wire(served.port) as other:
            other.send(
                raw("POST /step", ["session: a", "step_kind: start", "Transfer-Encoding: chunked"], b"fffff\r\n" + b"x" * 9000)
            )
            assert other.read().refusal == (401, "unauthorized")
            assert other.closed()


# -- what the server says about itself


def test_the_spec_has_the_version_and_what_was_declared() -> None:
    spec = {"observation_space": {"type": "Box", "shape": [4]}, "action_space": {"type": "Discrete", "n": 2}}
    with gateway(Echo, GatewaySettings(spec=spec)) as served:
        assert ask(served.port, raw("GET /spec")).json == {"protocol": 1, "ludus": ludus.__version__, **spec}


def test_health_counts() -> None:
    with gateway(Echo) as served, Wire(served.port) as wire:
        assert wire.ask(step("start", "a", seq=0)).status == wire.ask(step("start", "b", seq=0)).status == 200
        assert wire.ask(step("start", "a", seq=0)).status == 200
        assert wire.ask(step("end", "b", seq=1)).status == 200
        assert wire.ask(raw("GET /nowhere")).status == 404
        assert wire.ask(step("", "a")).status == 400
        health = wire.ask(raw("GET /health")).json
    expected = {
        "status": "ok",
        "slot": 0,
        "requests": 4,
        "connections": 1,
        "sessions": 1,
        "started": 2,
        "ended": 1,
        "repeated": 1,
    }
    assert health | expected == health
    assert health["refused_before"] == {"not_found": 1, "step_kind": 1}


def test_the_reply_to_start_names_the_direct_port() -> None:
    with gateway(Echo, direct_port=4711) as served, Wire(served.port) as wire:
        assert wire.ask(step("start", "a")).headers["ludus-endpoint"] == "127.0.0.1:4711"
        assert "ludus-endpoint" not in wire.ask(step("tick", "a")).headers
        assert "ludus-endpoint" not in wire.ask(step("start", "a")).headers
    with gateway(Echo) as served:
        assert "ludus-endpoint" not in ask(served.port, step("start", "a")).headers


def test_the_observer_gets_every_request_refused_before_a_session() -> None:
    seen: list[str] = []
    with gateway(Echo, observer=lambda refused: seen.append(refused.error)) as served:
        ask(served.port, raw("GET /nowhere"))
        ask(served.port, b"rubbish\r\n\r\n")
        ask(served.port, step("", "a"))
        ask(served.port, step("tick", "a"))
    assert seen == ["not_found", "malformed", "step_kind"]


def test_the_owner_of_a_session_never_changes() -> None:
    assert [owner_of(id_, 4) for id_ in (b"", b"a", b"match-17", "∀".encode())] == [0, 3, 2, 3]
    spread = [owner_of(b"%d" % i, 3) for i in range(3000)]
    assert all(900 < spread.count(slot) < 1100 for slot in range(3))


# -- the end


def test_a_closing_gateway_notifies_games_and_actors() -> None:
    ends: list[str] = []

    class Slow(Echo):
        async def tick(self, body: bytes) -> bytes:
            await asyncio.sleep(PATIENCE_S)
            return body

        async def end(self, body: bytes) -> bytes:
            ends.append(self.ended_by)
            return b""

    with gateway(Slow) as served:
        with Wire(served.port) as busy, Wire(served.port) as idle:
            assert busy.ask(step("start", "busy")).status == idle.ask(step("start", "idle")).status == 200
            busy.send(step("tick", "busy"))
            wait_until(lambda: served.gateway.sessions.requests == 3, PATIENCE_S)
            served.run(served.gateway.close())
            assert busy.read().refusal == (503, "stopping")
            assert busy.closed()
            assert idle.closed()
        with pytest.raises(ConnectionError):
            Wire(served.port)
    assert ends == ["shutdown", "shutdown"]
