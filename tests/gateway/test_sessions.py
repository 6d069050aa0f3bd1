"""SessionTable without sockets: order of requests, retries, time limits, misbehaving actors."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import json
import logging
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, ParamSpec

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from ludus.errors import Refused
from ludus.gateway.actor import Actor
from ludus.gateway.sessions import SessionLimits, SessionTable
from ludus.models.inference.micro_batcher import MicroBatcher
from ludus.protocol.spec import DEFAULT_OPTIONS
from tests.waiting import wait_until_async

P = ParamSpec("P")
Reply = tuple[int, bytes]

PATIENCE_S = 10.0
LONG_S = 1000.0
"""Longer than any test waits; tests advance the clock instead."""


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await test(*args, **kwargs)

        uvloop.run(bounded())

    return run


class Asked:
    """A request and its reply; a second reply raises."""

    def __init__(self) -> None:
        self.heard: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.retry_after_s: float | None = None

    def reply(self, status: int, body: bytes, retry_after_s: float | None = None) -> None:
        self.heard.set_result((status, body))
        self.retry_after_s = retry_after_s

    def __await__(self) -> Any:
        return self.heard.__await__()


class Table:
    """A SessionTable as used by a connection: requests come from callbacks of the loop."""

    def __init__(self, make_actor: Callable[[], Any], limits: SessionLimits, lost_for: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.sessions = SessionTable(make_actor, limits, self.loop, lost_until=self.loop.time() + lost_for)

    def send(self, kind: str, id_: str = "a", body: bytes = b"", seq: int = -1) -> Asked:
        asked = Asked()
        self.loop.call_soon(self.sessions.handle, kind, id_.encode(), seq, DEFAULT_OPTIONS, body, asked)
        return asked

    async def ask(self, kind: str, id_: str = "a", body: bytes = b"", seq: int = -1) -> Reply:
        return await self.send(kind, id_, body, seq).heard

    async def open(self, *ids: str, seq: int = -1) -> None:
        for id_ in ids or ("a",):
            assert (await self.ask("start", id_, seq=seq))[0] == 200

    def later(self, seconds: float) -> None:
        """Sweep the sessions as if this much time had passed."""
        self.sessions.sweep(self.loop.time() + seconds)


@contextlib.asynccontextmanager
async def table(make_actor: Callable[[], Any], *, lost_for: float = -1.0, **limits: Any) -> AsyncIterator[Table]:
    made = Table(
        make_actor, SessionLimits(**{"tick_s": LONG_S, "silent_s": 2 * LONG_S, "retry_s": 4 * LONG_S, **limits}), lost_for
    )
    try:
        yield made
    finally:
        await made.sessions.close(1.0)


def refusal(reply: Reply) -> tuple[int, str]:
    status, body = reply
    data = json.loads(body)
    assert set(data) - {"last"} == {"error", "message", "hint"}
    return status, data["error"]


class Diary(Actor):
    """Records every call; `calls` is shared by all actors of a test."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    async def start(self, session: str, body: bytes) -> bytes:
        self.calls.append(("start", session, body))
        return b"started:" + body

    async def tick(self, body: bytes) -> bytes:
        self.calls.append(("tick", body))
        return b"ticked:" + body

    async def end(self, body: bytes) -> bytes:
        self.calls.append(("end", self.ended_by, body))
        return b"ended:" + body


class Gated(Diary):
    """Its ticks wait until the test releases them."""

    gate: asyncio.Event

    async def tick(self, body: bytes) -> bytes:
        self.calls.append(("tick", body))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.calls.append("cancelled")
            raise
        return b"ticked:" + body


def gated(calls: list[Any]) -> tuple[Callable[[], Gated], asyncio.Event]:
    gate = asyncio.Event()

    def make() -> Gated:
        actor = Gated(calls)
        actor.gate = gate
        return actor

    return make, gate


# -- start, tick, end


@on_loop
async def test_a_session_starts_ticks_and_ends() -> None:
    calls: list[Any] = []
    async with table(lambda: Diary(calls)) as games:
        assert await games.ask("start", "m1", b"s") == (200, b"started:s")
        assert await games.ask("tick", "m1", b"t") == (200, b"ticked:t")
        assert await games.ask("end", "m1", b"e") == (200, b"ended:e")
        assert len(games.sessions) == 0
    assert calls == [("start", "m1", b"s"), ("tick", b"t"), ("end", "game", b"e")]


@on_loop
async def test_every_session_has_an_actor_of_its_own() -> None:
    class Counting(Actor):
        def __init__(self) -> None:
            self.count = 0

        async def tick(self, body: bytes) -> bytes:
            self.count += 1
            return b"%d" % self.count

    async with table(Counting) as games:
        await games.open("a", "b")
        assert [(await games.ask("tick", id_))[1] for id_ in "aabab"] == [b"1", b"2", b"1", b"3", b"2"]


@on_loop
async def test_requests_out_of_order_are_refused() -> None:
    async with table(lambda: Diary([])) as games:
        assert refusal(await games.ask("tick")) == (404, "unknown_session")
        assert refusal(await games.ask("end")) == (404, "unknown_session")
        await games.open()
        assert refusal(await games.ask("start")) == (409, "already_started")
        assert (await games.ask("end"))[0] == 200
        assert refusal(await games.ask("tick")) == (404, "unknown_session")
        assert refusal(await games.ask("end")) == (404, "unknown_session")
        await games.open()
        assert (await games.ask("tick"))[0] == 200


@on_loop
async def test_sessions_of_a_worker_that_died_are_lost_and_may_start_again() -> None:
    async with table(lambda: Diary([]), lost_for=LONG_S) as games:
        assert refusal(await games.ask("tick")) == (410, "session_lost")
        assert refusal(await games.ask("end")) == (410, "session_lost")
        await games.open()
        assert (await games.ask("tick"))[0] == 200


@on_loop
async def test_sessions_are_bounded() -> None:
    async with table(lambda: Diary([]), sessions=2) as games:
        await games.open("a", "b")
        third = games.send("start", "c")
        assert refusal(await third) == (503, "too_many_sessions")
        assert third.retry_after_s is not None
        assert (await games.ask("end", "a"))[0] == 200
        await games.open("c")


@on_loop
async def test_replies_of_ended_sessions_are_bounded() -> None:
    async with table(lambda: Diary([]), sessions=2) as games:
        for i in range(50):
            await games.open(f"s{i}", seq=0)
            assert (await games.ask("end", f"s{i}", seq=1))[0] == 200
        assert len(games.sessions._ended) == 4
        assert (await games.ask("end", "s49", seq=1))[0] == 200
        assert refusal(await games.ask("end", "s0", seq=1)) == (404, "unknown_session")


@on_loop
async def test_a_session_above_its_rate_gets_429_and_continues() -> None:
    async with table(lambda: Diary([]), requests_per_s=2.0) as games:
        await games.open(seq=0)
        assert [(await games.ask("tick", seq=seq))[0] for seq in (1, 2)] == [200, 200]
        hasty = games.send("tick", seq=3)
        assert refusal(await hasty) == (429, "too_many_requests")
        assert hasty.retry_after_s == 0.5
        limit = games.sessions._live[b"a"].rate_limit
        assert limit is not None
        limit._at -= 0.6  # that much later …
        assert (await games.ask("tick", seq=3))[0] == 200  # … its number has not been used up


# -- seq


@on_loop
async def test_a_repeated_seq_gets_the_same_reply_and_the_actor_is_called_once() -> None:
    calls: list[Any] = []
    async with table(lambda: Diary(calls)) as games:
        for kind, seq in (("start", 7), ("tick", 8), ("tick", 9), ("end", 10)):
            first = await games.ask(kind, body=b"first", seq=seq)
            assert first[0] == 200
            assert await games.ask(kind, body=b"first", seq=seq) == first
            assert await games.ask(kind, body=b"first", seq=seq) == first
        assert games.sessions.stats.repeated == 8
    assert [call[0] for call in calls] == ["start", "tick", "tick", "end"]


@on_loop
async def test_a_repeated_seq_with_another_body_is_not_a_retry() -> None:
    """Otherwise the reply to a late, abandoned request could be taken for that of the next one."""
    calls: list[Any] = []
    async with table(lambda: Diary(calls)) as games:
        await games.open(seq=0)
        first = await games.ask("tick", body=b"late", seq=1)
        other = await games.ask("tick", body=b"new", seq=1)
        assert refusal(other) == (409, "seq")
        assert json.loads(other[1])["last"] == 1
        assert await games.ask("tick", body=b"late", seq=1) == first
        assert (await games.ask("tick", body=b"new", seq=2))[0] == 200
    assert [call[1] for call in calls if call[0] == "tick"] == [b"late", b"new"]


@on_loop
async def test_after_a_refusal_the_previous_reply_is_still_available() -> None:
    class Strict(Diary):
        async def tick(self, body: bytes) -> bytes:
            if body == b"wrong":
                raise Refused(422, "observation", "It does not fit.")
            return b"fits"

    async with table(lambda: Strict([])) as games:
        await games.open(seq=0)
        first = await games.ask("tick", body=b"right", seq=1)
        assert refusal(await games.ask("tick", body=b"wrong", seq=2)) == (422, "observation")
        assert await games.ask("tick", body=b"right", seq=1) == first
        skipped = await games.ask("tick", body=b"right", seq=3)
        assert json.loads(skipped[1])["last"] == 1


@on_loop
async def test_replies_are_kept_only_for_numbered_requests() -> None:
    async with table(lambda: Diary([])) as games:
        for id_, seq in (("plain", -1), ("numbered", 0)):
            await games.open(id_, seq=seq)
            assert (await games.ask("tick", id_, b"x" * 1000, seq=seq + (seq >= 0)))[0] == 200
        assert len(games.sessions._live[b"plain"].last_reply[1]) == 0
        assert len(games.sessions._live[b"numbered"].last_reply[1]) > 1000
        for id_, seq in (("plain", -1), ("numbered", 2)):
            assert (await games.ask("end", id_, b"x" * 1000, seq=seq))[0] == 200
        assert len(games.sessions._ended[b"plain"].reply[1]) == 0
        assert len(games.sessions._ended[b"numbered"].reply[1]) > 1000


@pytest.mark.parametrize("kind", ["start", "tick", "end"])
@on_loop
async def test_retries_while_the_original_runs_wait_for_its_result(kind: str) -> None:
    calls: list[str] = []
    gate = asyncio.Event()

    class Slow(Actor):
        async def _slow(self, what: str) -> bytes:
            calls.append(what)
            if what == kind:
                await gate.wait()
            return b"result of " + what.encode()

        async def start(self, session: str, body: bytes) -> bytes:
            return await self._slow("start")

        async def tick(self, body: bytes) -> bytes:
            return await self._slow("tick")

        async def end(self, body: bytes) -> bytes:
            return await self._slow("end")

    async with table(Slow) as games:
        if kind != "start":
            await games.open(seq=0)
        seq = 0 if kind == "start" else 1
        asked = [games.send(kind, seq=seq) for _ in range(4)]
        await wait_until_async(lambda: kind in calls, PATIENCE_S)
        assert not any(one.heard.done() for one in asked)
        gate.set()
        assert [await one for one in asked] == [(200, b"result of " + kind.encode())] * 4
    assert calls.count(kind) == 1


@on_loop
async def test_skipped_old_and_misused_numbers_are_conflicts() -> None:
    calls: list[Any] = []
    async with table(lambda: Diary(calls)) as games:
        await games.open(seq=0)
        for seq in (1, 2, 3):
            assert (await games.ask("tick", seq=seq))[0] == 200
        assert refusal(await games.ask("tick", seq=5)) == (409, "seq")
        assert refusal(await games.ask("tick", seq=2)) == (409, "seq")
        assert refusal(await games.ask("end", seq=3)) == (409, "seq")
        assert refusal(await games.ask("start", seq=3)) == (409, "seq")
        assert refusal(await games.ask("start", seq=0)) == (409, "already_started")
        assert (await games.ask("tick", seq=4))[0] == 200
    assert [call[0] for call in calls if call[0] == "tick"] == ["tick"] * 4


@pytest.mark.parametrize("seq", [-1, 1])
@on_loop
async def test_two_different_ticks_at_once_are_a_conflict(seq: int) -> None:
    calls: list[Any] = []
    make, gate = gated(calls)
    async with table(make) as games:
        await games.open(seq=0 if seq >= 0 else -1)
        first, second = games.send("tick", seq=seq), games.send("tick", seq=seq + 1 if seq >= 0 else -1)
        end = games.send("end", seq=seq + 1 if seq >= 0 else -1)
        assert refusal(await second) == (409, "busy")
        assert refusal(await end) == (409, "busy")
        gate.set()
        assert (await first)[0] == 200
    assert calls.count(("tick", b"")) == 1


@on_loop
async def test_a_game_numbers_all_requests_of_a_session_or_none() -> None:
    async with table(lambda: Diary([])) as games:
        await games.open("numbered", seq=0)
        assert refusal(await games.ask("tick", "numbered")) == (400, "seq")
        assert (await games.ask("tick", "numbered", seq=1))[0] == 200
        await games.open("plain")
        assert refusal(await games.ask("tick", "plain", seq=1)) == (400, "seq")
        assert (await games.ask("tick", "plain"))[0] == 200


@on_loop
async def test_an_ended_session_is_remembered_for_the_retry_window_only() -> None:
    async with table(lambda: Diary([]), retry_s=60.0) as games:
        await games.open(seq=0)
        last = await games.ask("end", body=b"e", seq=1)
        games.later(59)
        assert await games.ask("end", body=b"e", seq=1) == last
        assert refusal(await games.ask("end", body=b"other", seq=1)) == (404, "unknown_session")
        games.later(61)
        assert refusal(await games.ask("end", body=b"e", seq=1)) == (404, "unknown_session")


class Picky(Diary):
    async def start(self, session: str, body: bytes) -> bytes:
        return await self._judge("start", body)

    async def tick(self, body: bytes) -> bytes:
        return await self._judge("tick", body)

    async def end(self, body: bytes) -> bytes:
        return await self._judge("end", body)

    async def _judge(self, kind: str, body: bytes) -> bytes:
        self.calls.append((kind, body))
        if body == b"bad":
            raise Refused(422, "observation", "It does not fit.", "Look at GET /spec.", 3.0)
        return b"fine"


class PickyPlain(Picky):
    def tick(self, body: bytes) -> bytes:  # type: ignore[override]
        self.calls.append(("tick", body))
        if body == b"bad":
            raise Refused(422, "observation", "It does not fit.", "Look at GET /spec.", 3.0)
        return b"fine"


@pytest.mark.parametrize("kind_of_actor", [Picky, PickyPlain])
@on_loop
async def test_a_refused_tick_leaves_the_session_open_and_its_number_free(kind_of_actor: type[Picky]) -> None:
    calls: list[Any] = []
    async with table(lambda: kind_of_actor(calls)) as games:
        await games.open(seq=0)
        bad = games.send("tick", body=b"bad", seq=1)
        assert refusal(await bad) == (422, "observation")
        assert bad.retry_after_s == 3.0
        assert await games.ask("start", seq=0) == (200, b"fine")  # what was answered before is still remembered
        assert await games.ask("tick", body=b"good", seq=1) == (200, b"fine")
        assert await games.ask("tick", body=b"good", seq=1) == (200, b"fine")
        assert refusal(await games.ask("end", body=b"bad", seq=2)) == (422, "observation")
        assert (await games.ask("end", seq=2))[0] == 200
        assert games.sessions.stats.refused == 2
        assert games.sessions.stats.failed == 0
    assert [call for call in calls if call[0] == "tick"] == [("tick", b"bad"), ("tick", b"good")]


@on_loop
async def test_a_refused_start_leaves_no_session() -> None:
    calls: list[Any] = []
    async with table(lambda: Picky(calls)) as games:
        assert refusal(await games.ask("start", body=b"bad", seq=0)) == (422, "observation")
        assert len(games.sessions) == 0
        assert refusal(await games.ask("tick", seq=1)) == (404, "unknown_session")
        assert (await games.ask("start", body=b"good", seq=0))[0] == 200
    assert ("end", b"") in calls  # of the second; at shutdown


@on_loop
async def test_a_refusal_without_an_error_status_is_a_failure() -> None:
    class Odd(Diary):
        async def tick(self, body: bytes) -> bytes:
            raise Refused(200, "fine", "Not an error at all.")

    async with table(lambda: Odd([])) as games:
        await games.open()
        assert refusal(await games.ask("tick")) == (500, "actor_failed")


REQUESTS = st.lists(st.tuples(st.sampled_from(["start", "tick", "end"]), st.integers(-1, 5)), max_size=25)


@given(REQUESTS)
def test_any_order_of_requests_gets_the_statuses_of_the_rules(requests: Sequence[tuple[str, int]]) -> None:
    """Compare sequences of requests with an independent model of the rules."""
    calls: list[Any] = []

    async def play() -> list[int]:
        async with table(lambda: Diary(calls)) as games:
            return [(await games.ask(kind, seq=seq))[0] for kind, seq in requests]

    def ruled() -> list[int]:
        heard: list[int] = []
        live: tuple[str, int] | None = None
        ended: tuple[str, int] | None = None
        for kind, seq in requests:
            if live is None:
                if kind == "start":
                    live, ended = (kind, seq), None
                    heard.append(200)
                else:
                    heard.append(200 if ended == (kind, seq) and seq >= 0 else 404)
            elif (seq >= 0) != (live[1] >= 0):
                heard.append(400)
            elif seq >= 0 and (kind, seq) == live:
                heard.append(200)
            elif kind == "start" or (seq >= 0 and seq != live[1] + 1):
                heard.append(409)
            else:
                heard.append(200)
                live, ended = (None, (kind, seq)) if kind == "end" else ((kind, seq), None)
        return heard

    expected = ruled()
    assert uvloop.run(play()) == expected
    made = Counter(call[0] for call in calls if call[:2] != ("end", "shutdown"))
    assert made["tick"] + made["start"] + made["end"] <= expected.count(200)


# -- silence and slowness


@on_loop
async def test_a_silent_session_is_ended_and_its_actor_notified() -> None:
    calls: list[Any] = []
    async with table(lambda: Diary(calls), silent_s=60.0) as games:
        await games.open("a", "b")
        games.later(59)
        assert len(games.sessions) == 2
        games.later(61)
        assert len(games.sessions) == 0
        await wait_until_async(lambda: len(calls) == 4, PATIENCE_S)
        assert refusal(await games.ask("tick")) == (410, "session_lost")
        assert games.sessions.stats.silent == 2
        await games.open("a")
        assert (await games.ask("tick"))[0] == 200
    assert calls[2:4] == [("end", "silent", b"")] * 2


@on_loop
async def test_silence_is_counted_from_the_reply_when_a_tick_takes_long() -> None:
    make, gate = gated([])
    async with table(make, silent_s=60.0, tick_s=LONG_S) as games:
        await games.open()
        tick = games.send("tick")
        await asyncio.sleep(0)
        games.later(200)
        gate.set()
        assert (await tick)[0] == 200
        games.later(250)
        assert len(games.sessions) == 1
        games.later(270)
        assert len(games.sessions) == 0


async def waits_for_an_event(gate: asyncio.Event, batch: MicroBatcher[bytes, bytes]) -> bytes:
    await gate.wait()
    return b""


async def waits_for_a_batch(gate: asyncio.Event, batch: MicroBatcher[bytes, bytes]) -> bytes:
    return await batch.submit(b"")


class Starved(MicroBatcher[bytes, bytes]):
    """Runs batches only when the test does, as if the model's process hung."""

    def submit(self, row: bytes) -> asyncio.Future[bytes]:
        self._loop = self._loop or asyncio.get_running_loop()
        self._rows = self._rows or [b"a row that is not waited for"]
        self._waiting = self._waiting or [_answer(self._loop)]
        return super().submit(row)


def _answer(loop: asyncio.AbstractEventLoop) -> Any:
    from ludus.models.inference.micro_batcher import BatchFuture

    return BatchFuture(loop=loop)


@pytest.mark.parametrize("wait", [waits_for_an_event, waits_for_a_batch])
@on_loop
async def test_an_async_tick_that_takes_too_long_ends_its_session(wait: Callable[..., Coroutine[Any, Any, bytes]]) -> None:
    calls: list[Any] = []
    gate, batch = asyncio.Event(), Starved(lambda rows: rows)

    class Slow(Diary):
        async def tick(self, body: bytes) -> bytes:
            if body == b"quick":
                return b""
            try:
                return await wait(gate, batch)
            finally:
                calls.append("left")

    async with table(lambda: Slow(calls), tick_s=30.0) as games:
        await games.open("a", "b")
        slow = games.send("tick")
        await asyncio.sleep(0.01)
        games.later(29)
        assert not slow.heard.done()
        games.later(31)
        assert refusal(await slow) == (504, "actor_timeout")
        assert refusal(await games.ask("tick")) == (410, "session_lost")
        await wait_until_async(lambda: ("end", "timeout", b"") in calls, PATIENCE_S)
        assert calls[2:] == ["left", ("end", "timeout", b"")]
        gate.set()
        if batch._rows:
            batch._flush()  # too late for anybody
        await asyncio.sleep(0.01)
        assert calls[2:] == ["left", ("end", "timeout", b"")]
        assert await games.ask("tick", "b", b"quick") == (200, b"")
        assert games.sessions.stats.timed_out == 1


@on_loop
async def test_a_retry_of_a_timed_out_tick_gets_the_same_reply() -> None:
    make, _ = gated([])
    async with table(make, tick_s=30.0) as games:
        await games.open(seq=0)
        asked = [games.send("tick", seq=1), games.send("tick", seq=1)]
        await asyncio.sleep(0)
        games.later(31)
        heard = [await one for one in asked]
        assert refusal(heard[0]) == (504, "actor_timeout")
        assert heard[1] == heard[0]
        assert await games.ask("tick", seq=1) == heard[0]
        assert refusal(await games.ask("tick", seq=2)) == (410, "session_lost")


@on_loop
async def test_a_tick_that_swallows_its_cancellation_is_still_followed_by_end() -> None:
    calls: list[Any] = []

    class Stubborn(Diary):
        async def tick(self, body: bytes) -> bytes:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            calls.append("tick is over")
            return b"too late"

    async with table(lambda: Stubborn(calls), tick_s=30.0) as games:
        await games.open()
        tick = games.send("tick")
        await asyncio.sleep(0)
        games.later(31)
        assert (await tick)[0] == 504
        await wait_until_async(lambda: len(calls) > 2, PATIENCE_S)
    assert calls[1:] == ["tick is over", ("end", "timeout", b"")]


@on_loop
async def test_end_is_not_called_while_a_tick_ignores_its_cancellation(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Any] = []
    release = asyncio.Event()

    class Deaf(Diary):
        async def tick(self, body: bytes) -> bytes:
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await release.wait()
            return b""

    async with table(lambda: Deaf(calls), tick_s=0.02) as games:
        await games.open()
        tick = games.send("tick")
        await asyncio.sleep(0)
        games.later(1)
        assert (await tick)[0] == 504
        await wait_until_async(lambda: "ignored its cancellation" in caplog.text, PATIENCE_S)
        release.set()
    assert [call[0] for call in calls] == ["start"]


class Plain:
    """An actor with plain methods that block until the test releases them."""

    ended_by = "game"

    def __init__(self, calls: list[Any], hold: threading.Event, began: threading.Event) -> None:
        self.calls, self.hold, self.began = calls, hold, began

    def start(self, session: str, body: bytes) -> bytes:
        self.calls.append("start")
        return b""

    def tick(self, body: bytes) -> bytes:
        self.calls.append("tick")
        self.began.set()
        assert self.hold.wait(PATIENCE_S)
        self.calls.append("tick returned")
        return body

    def end(self, body: bytes) -> bytes:
        self.calls.append(("end", self.ended_by))
        return b""


@on_loop
async def test_a_plain_tick_that_takes_too_long_is_answered_at_once_and_ended_after_it_returned() -> None:
    calls: list[Any] = []
    hold, began = threading.Event(), threading.Event()
    async with table(lambda: Plain(calls, hold, began), tick_s=30.0, threads=2) as games:
        await games.open()
        tick = games.send("tick")
        await wait_until_async(began.is_set, PATIENCE_S)
        games.later(31)
        assert refusal(await tick) == (504, "actor_timeout")
        assert refusal(await games.ask("tick")) == (410, "session_lost")
        assert calls == ["start", "tick"]
        hold.set()
        await wait_until_async(lambda: len(calls) == 4, PATIENCE_S)
    assert calls == ["start", "tick", "tick returned", ("end", "timeout")]


@on_loop
async def test_a_queued_plain_tick_that_times_out_is_never_called() -> None:
    calls: list[Any] = []
    hold, began = threading.Event(), threading.Event()
    async with table(lambda: Plain(calls, hold, began), tick_s=30.0, threads=1) as games:
        await games.open("a", "b")
        first, second = games.send("tick", "a"), games.send("tick", "b")
        await wait_until_async(began.is_set, PATIENCE_S)
        games.sessions._live[b"a"].request_at += LONG_S  # only the second is late
        games.later(31)
        assert refusal(await second) == (504, "actor_timeout")
        assert not games.sessions.threads_exhausted  # the only thread is busy, and will be free again
        hold.set()
        assert (await first)[0] == 200
        await wait_until_async(lambda: ("end", "timeout") in calls, PATIENCE_S)
    assert calls.count("tick") == 1


@on_loop
async def test_abandoned_calls_exhaust_the_thread_pool() -> None:
    hold, began = threading.Event(), threading.Event()
    async with table(lambda: Plain([], hold, began), tick_s=30.0, threads=2) as games:
        await games.open("a", "b")
        asked = [games.send("tick", "a")]
        await wait_until_async(began.is_set, PATIENCE_S)
        games.later(31)
        await wait_until_async(lambda: games.sessions.abandoned == 1, PATIENCE_S)
        assert not games.sessions.threads_exhausted
        began.clear()
        asked.append(games.send("tick", "b"))
        await wait_until_async(began.is_set, PATIENCE_S)
        games.later(31)
        await wait_until_async(lambda: games.sessions.threads_exhausted, PATIENCE_S)
        hold.set()
        assert [refusal(await one) for one in asked] == [(504, "actor_timeout")] * 2
        await wait_until_async(lambda: games.sessions.abandoned == 0, PATIENCE_S)


@pytest.mark.parametrize("kind", ["start", "end"])
@on_loop
async def test_a_start_or_end_that_takes_too_long_is_not_ended_again(kind: str) -> None:
    calls: list[Any] = []

    class Slow(Diary):
        async def start(self, session: str, body: bytes) -> bytes:
            await super().start(session, body)
            if kind == "start":
                await asyncio.Event().wait()
            return b""

        async def end(self, body: bytes) -> bytes:
            await super().end(body)
            if kind == "end":
                await asyncio.Event().wait()
            return b""

    async with table(lambda: Slow(calls), tick_s=30.0) as games:
        if kind == "end":
            await games.open()
        slow = games.send(kind)
        await wait_until_async(lambda: any(call[0] == kind for call in calls), PATIENCE_S)
        games.later(31)
        assert refusal(await slow) == (504, "actor_timeout")
        await asyncio.sleep(0.01)
        assert refusal(await games.ask("tick")) == (410, "session_lost")
    assert [call[0] for call in calls] == (["start"] if kind == "start" else ["start", "end"])


# -- actors that fail


def failing(where: str, error: BaseException) -> type[Diary]:
    class Failing(Diary):
        def __init__(self, calls: list[Any]) -> None:
            super().__init__(calls)
            self.fail("__init__")

        def fail(self, here: str) -> None:
            if here == where:
                raise error

        async def start(self, session: str, body: bytes) -> bytes:
            self.fail("start")
            return b""

        async def tick(self, body: bytes) -> bytes:
            self.fail("tick")
            return b""

        async def end(self, body: bytes) -> bytes:
            await super().end(body)
            self.fail("end")
            return b""

    return Failing


def failing_plain(where: str, error: BaseException) -> type[Diary]:
    class Failing(failing(where, error)):  # type: ignore[misc]
        def start(self, session: str, body: bytes) -> bytes:
            self.fail("start")
            return b""

        def tick(self, body: bytes) -> bytes:
            self.fail("tick")
            return b""

        def end(self, body: bytes) -> bytes:
            self.calls.append(("end", self.ended_by, body))
            self.fail("end")
            return b""

    return Failing


@pytest.mark.parametrize("make", [failing, failing_plain])
@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), asyncio.CancelledError(), KeyError()], ids=repr)
@pytest.mark.parametrize("where", ["__init__", "start", "tick", "end"])
@on_loop
async def test_an_actor_that_raises_ends_its_own_session_alone(
    make: Callable[[str, BaseException], type[Diary]], where: str, error: BaseException
) -> None:
    calls: list[Any] = []
    broken, kind = make(where, error), "start" if where == "__init__" else where
    made: list[str] = []

    def actor() -> Diary:
        made.append("")
        return Diary([]) if len(made) == 1 else broken(calls)

    async with table(actor) as games:
        await games.open("other", seq=0)
        if kind != "start":
            await games.open("broken", seq=0)
        seq = 0 if kind == "start" else 1
        heard = await games.ask(kind, "broken", seq=seq)
        assert refusal(heard) == (500, "actor_failed")
        assert f"{type(error).__name__} in {kind};" in json.loads(heard[1])["message"]
        assert await games.ask(kind, "broken", seq=seq) == heard  # so does a retry
        assert refusal(await games.ask("tick", "broken", seq=seq + 1)) == (410, "session_lost")
        assert await games.ask("tick", "other", b"x", seq=1) == (200, b"ticked:x")
        assert games.sessions.stats.failed == 1
        assert len(games.sessions) == 1
    ends = [call for call in calls if call[0] == "end"]
    expected: dict[str, list[Any]] = {"tick": [("end", "failed", b"")], "end": [("end", "game", b"")]}
    assert ends == expected.get(where, [])


@pytest.mark.parametrize("reply", ["text", None, 1, [b"x"]])
@pytest.mark.parametrize("kind", ["start", "tick", "end"])
@on_loop
async def test_an_actor_that_does_not_return_bytes_has_failed(kind: str, reply: Any) -> None:
    class Wrong(Actor):
        async def start(self, session: str, body: bytes) -> bytes:
            return reply if kind == "start" else b""

        async def tick(self, body: bytes) -> bytes:
            return reply  # type: ignore[no-any-return]

        async def end(self, body: bytes) -> bytes:
            return reply  # type: ignore[no-any-return]

    async with table(Wrong) as games:
        if kind != "start":
            await games.open()
        assert refusal(await games.ask(kind)) == (500, "actor_failed")
        assert len(games.sessions) == 0


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
@on_loop
async def test_every_kind_of_bytes_is_a_reply(wrap: Callable[[bytes], Any]) -> None:
    class Wrapped(Actor):
        async def tick(self, body: bytes) -> bytes:
            return wrap(body)  # type: ignore[no-any-return]

    async with table(Wrapped) as games:
        await games.open()
        assert await games.ask("tick", body=b"\0\xff") == (200, b"\0\xff")


@on_loop
async def test_a_tick_with_another_signature_has_failed() -> None:
    class Wrong(Actor):
        async def tick(self) -> bytes:  # type: ignore[override]
            return b""

    async with table(Wrong) as games:
        await games.open()
        assert refusal(await games.ask("tick")) == (500, "actor_failed")


@on_loop
async def test_an_end_that_raises_after_silence_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with table(lambda: failing("end", ValueError("no"))([]), silent_s=60.0) as games:
        await games.open()
        games.later(61)
        await wait_until_async(lambda: "end() raised" in caplog.text, PATIENCE_S)
        await games.open()
        assert (await games.ask("tick"))[0] == 200


# -- plain methods


@on_loop
async def test_plain_ticks_of_different_sessions_run_side_by_side_and_one_at_a_time_within_each() -> None:
    barrier = threading.Barrier(4)

    class Together(Actor):
        def tick(self, body: bytes) -> bytes:  # type: ignore[override]
            barrier.wait(PATIENCE_S)
            return body

    async with table(Together, threads=4) as games:
        await games.open(*"abcd")
        first = games.send("tick", "a", b"a")
        assert refusal(await games.ask("tick", "a")) == (409, "busy")
        rest = [games.send("tick", id_, id_.encode()) for id_ in "bcd"]
        assert [await one for one in [first, *rest]] == [(200, id_.encode()) for id_ in "abcd"]


@on_loop
async def test_a_plain_method_may_return_something_to_wait_for() -> None:
    class Wrapping(Actor):
        def tick(self, body: bytes) -> Any:
            async def later() -> bytes:
                await asyncio.sleep(0)
                return b"later:" + body

            return later()

    async with table(Wrapping) as games:
        await games.open()
        assert await games.ask("tick", body=b"x") == (200, b"later:x")


@on_loop
async def test_plain_methods_see_the_context_of_their_session() -> None:
    seat: contextvars.ContextVar[str] = contextvars.ContextVar("seat", default="none")

    class Mixed(Actor):
        async def start(self, session: str, body: bytes) -> bytes:
            seat.set(session)
            return b""

        def tick(self, body: bytes) -> bytes:  # type: ignore[override]
            return seat.get().encode()

    async with table(Mixed) as games:
        await games.open("a", "b")
        assert [(await games.ask("tick", id_))[1] for id_ in "ab"] == [b"a", b"b"]


# -- asyncio inside a tick: the same outcome as in an ordinary task


async def _child(result: str, fail: bool = False) -> str:
    await asyncio.sleep(0.001)
    if fail:
        raise ValueError(result)
    return result


BATCHERS: dict[asyncio.AbstractEventLoop, MicroBatcher[str, str]] = {}


def forward(row: str) -> asyncio.Future[str]:
    """A model that doubles its input, and raises for marked rows."""

    def run(rows: list[str]) -> list[str]:
        if "fail" in rows:
            raise ArithmeticError("the model failed")
        return [2 * one for one in rows]

    loop = asyncio.get_running_loop()
    return BATCHERS.setdefault(loop, MicroBatcher(run)).submit(row)


async def timeout_expires() -> str:
    try:
        async with asyncio.timeout(0.001):
            await asyncio.sleep(PATIENCE_S)
    except TimeoutError:
        return "expired"
    return "not"


async def timeout_of_zero() -> str:
    try:
        async with asyncio.timeout(0):
            await asyncio.sleep(PATIENCE_S)
    except TimeoutError:
        return "expired"
    return "not"


async def timeout_does_not_expire() -> str:
    async with asyncio.timeout(PATIENCE_S) as bound:
        await asyncio.sleep(0)
    return f"in time {bound.expired()}"


async def timeout_around_a_batch() -> str:
    async with asyncio.timeout(PATIENCE_S):
        return await forward("x")


async def timeout_and_cleaning_up() -> str:
    said = []
    try:
        async with asyncio.timeout(0.001):
            try:
                await asyncio.sleep(PATIENCE_S)
            finally:
                await asyncio.sleep(0)
                said.append(await forward("clean"))
    except TimeoutError:
        said.append("expired")
    async with asyncio.timeout(PATIENCE_S):
        said.append(await forward("after"))
    return " ".join(said)


async def nested_timeouts() -> str:
    said = []
    try:
        async with asyncio.timeout(0.001):
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.sleep(PATIENCE_S)
            except TimeoutError:
                said.append("inner")
    except TimeoutError:
        said.append("outer")
    return " ".join(said)


async def timeout_while_a_batch_never_comes() -> str:
    never = Starved(lambda rows: rows)
    try:
        async with asyncio.timeout(0.001):
            await never.submit(b"")
    except TimeoutError:
        second = await forward("fallback")
        asyncio.get_running_loop().call_soon(never._flush)  # the first comes while another is waited for
        third = asyncio.ensure_future(_child("third"))
        return second + await third + await forward("last")
    return "not"


async def wait_for_expires() -> str:
    try:
        return await asyncio.wait_for(_slow(), 0.001)
    except TimeoutError:
        return "expired"


async def _slow() -> str:
    await asyncio.sleep(PATIENCE_S)
    return "slow"


async def wait_for_in_time() -> str:
    return await asyncio.wait_for(_child("in time"), PATIENCE_S)


async def wait_for_a_batch() -> str:
    return await asyncio.wait_for(forward("x"), PATIENCE_S)


async def gather_children_and_batches() -> str:
    return " ".join(await asyncio.gather(_child("a"), forward("b"), _child("c"), forward("d")))


async def gather_with_exceptions() -> str:
    found = await asyncio.gather(_child("a", fail=True), forward("b"), return_exceptions=True)
    return " ".join(map(str, found))


async def group() -> str:
    async with asyncio.TaskGroup() as tasks:
        made = [tasks.create_task(_child(name)) for name in "abc"]
    return "".join(task.result() for task in made)


async def group_that_fails() -> str:
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_child("broken", fail=True))
            tasks.create_task(_slow())
    except ExceptionGroup as errors:
        return f"{errors.exceptions} {_self().cancelling()}"
    return "not"


async def group_that_fails_while_its_parent_waits() -> str:
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_child("broken", fail=True))
            await asyncio.sleep(PATIENCE_S)
    except ExceptionGroup as errors:
        return f"{errors.exceptions} {_self().cancelling()}"
    return "not"


async def sleeps_of_zero() -> str:
    for _ in range(5):
        await asyncio.sleep(0)
    return "awake"


async def many_batches() -> str:
    return "".join([await forward(name) for name in "abc"])


async def model_error() -> str:
    try:
        return await forward("fail")
    except ArithmeticError as error:
        return f"caught {error}"


async def shielded() -> str:
    inner = asyncio.ensure_future(_child("inner"))
    try:
        async with asyncio.timeout(0):
            await asyncio.shield(inner)
    except TimeoutError:
        return "expired, but " + await inner
    return "not"


def _self() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def current_task_stays() -> str:
    first = _self()
    await asyncio.sleep(0)
    second = _self()
    await forward("x")
    await _child("y")
    return f"{first is second is _self()} {first.done()} {first.cancelling()} {first.get_loop() is asyncio.get_running_loop()}"


async def cancels_itself() -> str:
    _self().cancel("enough")
    try:
        await forward("x")
    except asyncio.CancelledError as error:
        return f"cancelled {error.args} {_self().uncancel()}"
    return "not"


async def cancels_itself_before_a_sleep_of_zero() -> str:
    _self().cancel()
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        return f"cancelled {_self().uncancel()}"
    return "not"


async def is_cancelled_by_a_child() -> str:
    parent = _self()

    async def child() -> None:
        parent.cancel()

    task = asyncio.ensure_future(child())
    try:
        await Starved(lambda rows: rows).submit(b"")
    except asyncio.CancelledError:
        await task
        return f"cancelled {parent.uncancel()}"
    return "not"


async def is_cancelled_twice() -> str:
    parent, said = _self(), []
    asyncio.get_running_loop().call_later(0.001, parent.cancel)
    try:
        await asyncio.sleep(PATIENCE_S)
    except asyncio.CancelledError:
        said.append("once")
        asyncio.get_running_loop().call_later(0.001, parent.cancel)
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            said.append("twice")
    parent.uncancel()
    return f"{' '.join(said)} {parent.uncancel()}"


async def locks_and_queues() -> str:
    lock, queue = asyncio.Lock(), asyncio.Queue[str]()
    asyncio.get_running_loop().call_later(0.001, queue.put_nowait, "item")
    async with lock:
        return await queue.get()


async def a_thread() -> str:
    return await asyncio.to_thread(lambda: "from a thread")


async def an_async_generator() -> str:
    async def letters() -> AsyncIterator[str]:
        for name in "abc":
            await asyncio.sleep(0)
            yield await forward(name)

    return "".join([letter async for letter in letters()])


class Bare:
    def __await__(self) -> Any:
        yield "not a future"


async def waits_for_nonsense() -> str:
    try:
        await Bare()
    except RuntimeError:
        return "refused"
    return "not"


async def waits_for_another_loop() -> str:
    other = asyncio.new_event_loop()
    try:
        await other.create_future()
    except RuntimeError:
        return "refused"
    finally:
        other.close()
    return "not"


TICKS = [
    timeout_expires,
    timeout_of_zero,
    timeout_does_not_expire,
    timeout_around_a_batch,
    timeout_and_cleaning_up,
    nested_timeouts,
    timeout_while_a_batch_never_comes,
    wait_for_expires,
    wait_for_in_time,
    wait_for_a_batch,
    gather_children_and_batches,
    gather_with_exceptions,
    group,
    group_that_fails,
    group_that_fails_while_its_parent_waits,
    sleeps_of_zero,
    many_batches,
    model_error,
    shielded,
    current_task_stays,
    cancels_itself,
    cancels_itself_before_a_sleep_of_zero,
    is_cancelled_by_a_child,
    is_cancelled_twice,
    locks_and_queues,
    a_thread,
    an_async_generator,
    waits_for_nonsense,
    waits_for_another_loop,
]


@pytest.mark.parametrize("work", TICKS)
@on_loop
async def test_a_tick_may_use_asyncio_as_any_task_may(work: Callable[[], Coroutine[Any, Any, str]]) -> None:
    class Working(Actor):
        async def tick(self, body: bytes) -> bytes:
            return (await work()).encode()

    expected = (await asyncio.create_task(work())).encode()
    async with table(Working) as games:
        await games.open("a", "b")
        for _ in range(2):  # the second tick of a session finds nothing left over
            asked = [games.send("tick", id_) for id_ in "ab"]
            assert [await one for one in asked] == [(200, expected)] * 2


@on_loop
async def test_contextvars_belong_to_the_session_and_last_from_start_to_end() -> None:
    seat: contextvars.ContextVar[str] = contextvars.ContextVar("seat", default="none")
    ends: list[str] = []

    class Seated(Actor):
        async def start(self, session: str, body: bytes) -> bytes:
            seat.set(session)
            return b""

        async def tick(self, body: bytes) -> bytes:
            before = seat.get()
            await asyncio.sleep(0)
            await forward("x")
            assert seat.get() == before
            seat.set(before + "+")
            return before.encode()

        async def end(self, body: bytes) -> bytes:
            ends.append(seat.get())
            return b""

    async with table(Seated, silent_s=60.0) as games:
        await games.open("a", "b")
        assert [(await games.ask("tick", id_))[1] for id_ in "abab"] == [b"a", b"b", b"a+", b"b+"]
        assert (await games.ask("end", "a"))[0] == 200
        games.later(61)
        await wait_until_async(lambda: len(ends) == 2, PATIENCE_S)
    assert ends == ["a++", "b++"]
    assert seat.get() == "none"


@on_loop
async def test_a_model_that_raises_fails_every_session_that_waits_for_it() -> None:
    class Asking(Actor):
        async def tick(self, body: bytes) -> bytes:
            return (await forward(body.decode())).encode()

    async with table(Asking) as games:
        await games.open(*"abcd")
        asked = [games.send("tick", id_, b"fail" if id_ == "c" else b"x") for id_ in "abcd"]
        heard = [await one for one in asked]
        assert [refusal(reply) for reply in heard] == [(500, "actor_failed")] * 4
        assert "ArithmeticError" in json.loads(heard[0][1])["message"]
        await games.open("e")
        assert await games.ask("tick", "e", b"x") == (200, b"xx")


# -- the end of the server


@on_loop
async def test_closing_ends_every_session_and_notifies_every_actor() -> None:
    calls: list[Any] = []
    hold, began = threading.Event(), threading.Event()
    make, _ = gated(calls)
    actors = iter([make(), Diary(calls), Plain(calls, hold, began)])
    async with table(lambda: next(actors)) as games:
        await games.open("busy", "idle", "plain")
        busy, plain = games.send("tick", "busy"), games.send("tick", "plain")
        await wait_until_async(began.is_set, PATIENCE_S)
        closing = asyncio.create_task(games.sessions.close(PATIENCE_S))
        assert refusal(await busy) == refusal(await plain) == (503, "stopping")
        assert refusal(await games.ask("start", "new")) == (503, "stopping")
        assert refusal(await games.ask("tick", "idle")) == (410, "session_lost")
        hold.set()
        await closing
        assert len(games.sessions) == 0
    assert calls.count(("end", "shutdown", b"")) == 2
    assert calls.index("cancelled") < calls.index(("end", "shutdown", b""), calls.index("cancelled"))
    assert calls[-2:] == ["tick returned", ("end", "shutdown")]


@on_loop
async def test_closing_right_after_a_request_still_notifies_the_actor() -> None:
    calls: list[Any] = []
    hold, began = threading.Event(), threading.Event()
    hold.set()
    async with table(lambda: Plain(calls, hold, began)) as games:
        await games.open()
        asked = Asked()
        games.loop.call_soon(games.sessions.handle, "tick", b"a", -1, DEFAULT_OPTIONS, b"", asked)
        games.loop.call_soon(lambda: games.loop.create_task(games.sessions.close(PATIENCE_S)))
        assert (await asked)[0] in (200, 503)
        await wait_until_async(lambda: ("end", "shutdown") in calls, PATIENCE_S)


@on_loop
async def test_closing_does_not_wait_for_ever() -> None:
    class Deaf(Diary):
        async def end(self, body: bytes) -> bytes:
            await asyncio.Event().wait()
            return b""

    async with table(lambda: Deaf([])) as games:
        await games.open()
        await games.sessions.close(0.05)
        assert not games.sessions._end_tasks


@on_loop
async def test_nothing_is_kept_of_sessions_that_are_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "ludus")  # a captured record would keep the traceback
    made: weakref.WeakSet[Actor] = weakref.WeakSet()

    class LargestValues(Actor):
        def __init__(self) -> None:
            made.add(self)

        async def tick(self, body: bytes) -> bytes:
            if body == b"raise":
                raise ValueError
            return (await forward("x")).encode()

    async with table(LargestValues, silent_s=60.0) as games:
        for i in range(30):
            await games.open(f"s{i}")
            assert (await games.ask("tick", f"s{i}"))[0] == 200
            if i % 3 == 0:
                assert (await games.ask("end", f"s{i}"))[0] == 200
            elif i % 3 == 1:
                assert (await games.ask("tick", f"s{i}", b"raise"))[0] == 500
        games.later(61)
        await wait_until_async(lambda: not games.sessions._end_tasks, PATIENCE_S)
        gc.collect()
        assert not made
