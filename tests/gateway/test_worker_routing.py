"""Routing between the workers of one gateway (here threads): every session reaches its owner on any port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.errors import Refused
from ludus.gateway import worker_routing
from ludus.gateway.actor import Actor
from ludus.gateway.http_connection import HttpLimits
from ludus.gateway.server import GatewaySettings, owner_of
from ludus.gateway.sessions import SessionLimits
from tests.gateway.wire import PATIENCE_S, Reply, Wire, ask, raw, step
from tests.local_servers import Served, gateway
from tests.waiting import wait_until

DIRECT = 40_000
"""The direct port of slot n is this + n."""


class Named(Actor):
    """Replies with its worker's slot."""

    def __init__(self, slot: int) -> None:
        self.slot = slot

    async def start(self, session: str, body: bytes) -> bytes:
        return b"%d" % self.slot

    async def tick(self, body: bytes) -> bytes:
        if body == b"bad":
            raise Refused(422, "observation", "It does not fit.", "", 7)
        return b"%d:%s" % (self.slot, body)

    async def end(self, body: bytes) -> bytes:
        return b"%d" % self.slot


@contextlib.contextmanager
def workers(directory: Path, count: int, settings: GatewaySettings | None = None) -> Iterator[list[Served]]:
    paths = [str(directory / str(slot)) for slot in range(count)]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                gateway(lambda slot=slot: Named(slot), settings, slot=slot, peer_paths=paths, direct_port=DIRECT + slot)  # type: ignore[misc]
            )
            for slot in range(count)
        ]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Served]]:
    with workers(tmp_path, 2) as both:
        yield both


def owned(slot: int, count: int = 2, *, slots: int = 2) -> list[str]:
    """Session ids that belong to a slot."""
    ids = (f"session-{i}" for i in range(10_000))
    found = [id_ for id_ in ids if owner_of(id_.encode(), slots) == slot]
    return found[:count]


def health(served: Served) -> dict[str, int]:
    counters: dict[str, int] = served.gateway.counters()
    return counters


def hold(served: Served, seconds: float) -> None:
    """Keep a worker's loop busy, beginning now."""
    began = threading.Event()

    def sleep() -> None:
        began.set()
        time.sleep(seconds)

    served.gateway.loop.call_soon_threadsafe(sleep)
    assert began.wait(PATIENCE_S)


def test_every_session_belongs_to_its_owner_on_any_port(tmp_path: Path) -> None:
    with workers(tmp_path, 3) as doors:
        ids = [f"session-{i}" for i in range(60)]
        for n, id_ in enumerate(ids):
            with Wire(doors[n % 3].port) as wire:
                assert wire.ask(step("start", id_)).body == b"%d" % owner_of(id_.encode(), 3)
        for n, id_ in enumerate(ids):
            with Wire(doors[(n + 1) % 3].port) as wire:
                owner = b"%d" % owner_of(id_.encode(), 3)
                assert wire.ask(step("tick", id_, b"x")).body == owner + b":x"
                assert wire.ask(step("end", id_)).body == owner
        for slot, served in enumerate(doors):
            assert health(served)["started"] == sum(owner_of(id_.encode(), 3) == slot for id_ in ids)
            assert health(served)["sessions"] == 0


def test_a_connection_moves_to_the_owner_of_its_first_session_and_then_costs_no_detour(two: list[Served]) -> None:
    (id_,) = owned(1, 1)
    with Wire(two[0].port) as wire:
        reply = wire.ask(step("start", id_))
        assert (reply.body, reply.headers["ludus-endpoint"]) == (b"1", f"127.0.0.1:{DIRECT + 1}")
        for i in range(20):
            assert wire.ask(step("tick", id_, b"%d" % i)).body == b"1:%d" % i
        wait_until(lambda: health(two[0])["connections"] == 0, PATIENCE_S)  # it has left when the move has been counted
        assert health(two[1])["connections"] == 1
        assert (health(two[0])["handed_over"], health(two[0])["forwarded"]) == (1, 0)
        assert health(two[0])["requests"] == 0


def test_a_connection_with_a_local_session_stays(two: list[Served]) -> None:
    (id_,) = owned(0, 1)
    with Wire(two[0].port) as wire:
        assert wire.ask(step("start", id_)).headers["ludus-endpoint"] == f"127.0.0.1:{DIRECT}"
        assert wire.ask(step("tick", id_, b"x")).body == b"0:x"
        assert (health(two[0])["handed_over"], health(two[0])["forwarded"]) == (0, 0)


def test_a_tick_may_be_the_first_request_of_a_connection_that_moves(two: list[Served]) -> None:
    (id_,) = owned(1, 1)
    assert ask(two[1].port, step("start", id_)).status == 200
    for i in range(5):
        with Wire(two[0].port) as wire:
            assert wire.ask(step("tick", id_, b"%d" % i)).body == b"1:%d" % i
            assert wire.ask(step("tick", id_, b"again")).body == b"1:again"
    wait_until(
        lambda: health(two[0])["handed_over"] == 5, PATIENCE_S
    )  # counted by another thread, perhaps after the reply is here


def test_pipelined_requests_move_with_the_connection(two: list[Served]) -> None:
    (ours,), (theirs, more) = owned(0, 1), owned(1, 2)
    assert ask(two[1].port, step("start", theirs)).status == ask(two[0].port, step("start", ours)).status == 200
    with Wire(two[0].port) as wire:
        wire.send(
            step("tick", theirs, b"one")
            + raw("GET /nowhere")
            + step("tick", ours, b"two")
            + step("start", more)
            + step("tick", theirs, b"three")
        )
        assert wire.read().body == b"1:one"
        assert wire.read().refusal == (404, "not_found")
        assert [reply.body for reply in wire.replies(3)] == [b"0:two", b"1", b"1:three"]
    wait_until(lambda: (health(two[0])["handed_over"], health(two[1])["forwarded"]) == (1, 1), PATIENCE_S)


def test_a_first_request_in_pieces_moves_when_its_owner_is_known(two: list[Served]) -> None:
    (id_,) = owned(1, 1)
    request = step("start", id_, b"a body that comes later")
    for cut in range(1, len(request), 7):
        with Wire(two[0].port) as wire:
            wire.send(request[:cut])
            time.sleep(0.002)
            assert wire.ask(request[cut:]).body == b"1"
            assert wire.ask(step("end", id_)).body == b"1"
    assert health(two[0])["forwarded"] == 0


def test_expect_100_continue_is_answered_by_the_owner(two: list[Served]) -> None:
    (id_,) = owned(1, 1)
    with Wire(two[0].port) as wire:
        wire.send(step("start", id_, b"body", headers=["Expect: 100-continue"])[:-4])
        assert wire.read().status == 100
        assert wire.ask(b"body").body == b"1"


def test_a_request_too_large_to_hand_over_is_forwarded(two: list[Served]) -> None:
    (id_,) = owned(1, 1)
    assert ask(two[1].port, step("start", id_)).status == 200
    with Wire(two[0].port) as wire:
        hold(two[0], 0.3)  # so that it is all there at the first look
        wire.send(step("tick", id_, b"x" * 200_000))
        assert wire.read().body == b"1:" + b"x" * 200_000
        assert (health(two[0])["handed_over"], health(two[0])["forwarded"]) == (0, 1)
        assert wire.ask(step("tick", id_, b"y")).body == b"1:y"
    large = b"z" * (5 << 20)
    assert ask(two[0].port, step("tick", id_, large)).body == b"1:" + large


def test_the_reply_to_a_forwarded_start_names_the_port_of_the_owner(two: list[Served]) -> None:
    (ours,), (theirs,) = owned(0, 1), owned(1, 1)
    with Wire(two[0].port) as wire:
        assert wire.ask(step("start", ours)).headers["ludus-endpoint"] == f"127.0.0.1:{DIRECT}"
        reply = wire.ask(step("start", theirs))
        assert (reply.body, reply.headers["ludus-endpoint"]) == (b"1", f"127.0.0.1:{DIRECT + 1}")


def test_forwarded_refusals_arrive_as_they_are(tmp_path: Path) -> None:
    settings = GatewaySettings(sessions=SessionLimits(sessions=1))
    with workers(tmp_path, 2, settings) as doors, Wire(doors[0].port) as wire:
        (ours,), (theirs, more) = owned(0, 1), owned(1, 2)
        assert wire.ask(step("start", ours)).status == 200
        assert wire.ask(step("tick", theirs, seq=1)).refusal == (404, "unknown_session")
        assert wire.ask(step("start", theirs, seq=0)).status == 200
        assert wire.ask(step("start", theirs, seq=9)).refusal == (409, "already_started")
        refused = wire.ask(step("tick", theirs, b"bad", seq=1))
        assert (refused.refusal, refused.headers["retry-after"]) == ((422, "observation"), "7")
        assert wire.ask(step("tick", theirs, b"one", seq=1)).body == b"1:one"
        assert wire.ask(step("tick", theirs, b"one", seq=1)).body == b"1:one"
        full = wire.ask(step("start", more))
        assert (full.refusal, full.headers["retry-after"]) == ((503, "too_many_sessions"), "1")


def test_mixed_sessions_on_one_connection_are_answered_correctly_in_order(tmp_path: Path) -> None:
    rng = random.Random(5)
    with workers(tmp_path, 3) as doors:
        ids = [id_ for slot in range(3) for id_ in owned(slot, 4, slots=3)]
        owner = {id_: b"%d" % owner_of(id_.encode(), 3) for id_ in ids}
        with Wire(doors[0].port) as wire:
            assert wire.ask(raw("GET /spec")).status == 200  # so it stays here
            for id_ in ids:
                assert wire.ask(step("start", id_)).body == owner[id_]
            for turn in range(30):
                asked = rng.sample(ids, rng.randint(1, len(ids)))
                wire.send(b"".join(step("tick", id_, b"%s %d" % (id_.encode(), turn)) for id_ in asked))
                assert [reply.body for reply in wire.replies(len(asked))] == [
                    b"%s:%s %d" % (owner[id_], id_.encode(), turn) for id_ in asked
                ]
            for id_ in ids:
                assert wire.ask(step("end", id_)).body == owner[id_]
        assert health(doors[0])["forwarded"] > 0
        assert all(health(door)["sessions"] == 0 for door in doors)


def test_without_the_token_no_connection_moves(tmp_path: Path) -> None:
    with workers(tmp_path, 2, GatewaySettings(token="s3cret")) as doors:
        (id_,) = owned(1, 1)
        with Wire(doors[0].port) as wire:
            assert wire.ask(step("start", id_)).refusal == (401, "unauthorized")
            assert wire.ask(step("start", id_, headers=["Authorization: Bearer s3cret"])).body == b"1"
        assert health(doors[0])["handed_over"] == 0


def test_a_full_worker_refuses_a_connection_that_is_handed_to_it(tmp_path: Path) -> None:
    with workers(tmp_path, 2, GatewaySettings(http=HttpLimits(connections=1))) as doors:
        first, second = owned(1, 2)
        with Wire(doors[0].port) as one:
            assert one.ask(step("start", first)).body == b"1"
            wait_until(lambda: health(doors[0])["connections"] == 0, PATIENCE_S)
            with Wire(doors[0].port) as two:
                assert two.ask(step("start", second)).refusal == (503, "too_many_connections")
                assert two.closed()
            assert one.ask(step("tick", first, b"x")).body == b"1:x"


# -- a worker that is not there


def gone(reply: Reply) -> None:
    assert reply.refusal == (410, "session_lost")


@pytest.mark.parametrize("stale", [False, True])
def test_sessions_of_a_dead_worker_are_lost_at_once_and_may_start_when_it_is_back(tmp_path: Path, stale: bool) -> None:
    paths = [str(tmp_path / str(slot)) for slot in range(2)]
    (ours,), (theirs,) = owned(0, 1), owned(1, 1)
    if stale:  # the files of the dead one are still there; nobody listens
        for ending, kind in ((".h", socket.SOCK_DGRAM), (".f", socket.SOCK_STREAM)):
            with socket.socket(socket.AF_UNIX, kind) as dead:
                dead.bind(paths[1] + ending)
    with gateway(lambda: Named(0), slot=0, peer_paths=paths) as alone, Wire(alone.port) as wire, Wire(alone.port) as other:
        gone(wire.ask(step("tick", theirs)))
        gone(wire.ask(step("end", theirs)))
        away = wire.ask(step("start", theirs))
        assert (away.refusal, away.headers["retry-after"]) == ((503, "worker_away"), "1")
        assert other.ask(step("start", ours)).body == b"0"
        wire.send(step("tick", theirs) + step("tick", ours, b"x") + step("start", theirs))
        gone(wire.read())
        assert wire.read().body == b"0:x"
        assert wire.read().refusal == (503, "worker_away")
        with gateway(lambda: Named(1), slot=1, peer_paths=paths):
            assert wire.ask(step("start", theirs)).body == b"1"
            assert wire.ask(step("tick", theirs, b"y")).body == b"1:y"
            assert ask(alone.port, step("tick", theirs, b"z")).body == b"1:z"
        gone(wire.ask(step("tick", theirs)))
        assert wire.ask(step("tick", ours, b"x")).body == b"0:x"


def test_requests_to_a_dying_worker_fail_at_once(tmp_path: Path) -> None:
    paths = [str(tmp_path / str(slot)) for slot in range(2)]
    (ours,), (theirs, more) = owned(0, 1), owned(1, 2)

    class Stuck(Named):
        async def start(self, session: str, body: bytes) -> bytes:
            return await (asyncio.Event().wait() if body == b"stick" else super().start(session, body))  # type: ignore[return-value]

        async def tick(self, body: bytes) -> bytes:
            await asyncio.Event().wait()
            return b""

    with (
        gateway(lambda: Named(0), slot=0, peer_paths=paths) as alive,
        gateway(lambda: Stuck(1), slot=1, peer_paths=paths) as dying,
        Wire(alive.port) as wire,
    ):
        assert wire.ask(step("start", ours)).body == b"0"
        assert wire.ask(step("start", theirs)).body == b"1"
        wire.send(step("tick", theirs) + step("start", more, b"stick"))
        wait_until(lambda: dying.gateway.sessions.requests == 3, PATIENCE_S)

        async def die() -> None:
            """Close every socket without notice, as the kernel does for a killed process."""
            assert dying.gateway._router is not None
            for incoming in list(dying.gateway._router._incoming):
                assert incoming.transport is not None
                incoming.transport.abort()

        dying.run(die())
        gone(wire.read())
        assert wire.read().refusal == (503, "worker_away")
        assert wire.ask(step("tick", ours, b"x")).body == b"0:x"


def test_when_too_many_connections_move_at_once_the_rest_is_forwarded(two: list[Served]) -> None:
    ids = owned(1, 100)
    with contextlib.ExitStack() as stack:
        hold(two[1], 0.3)
        wires = [stack.enter_context(Wire(two[0].port)) for _ in ids]
        for wire, id_ in zip(wires, ids, strict=True):
            wire.send(step("start", id_))
        assert [wire.read().body for wire in wires] == [b"1"] * len(ids)
        assert [wire.ask(step("tick", id_, b"x")).body for wire, id_ in zip(wires, ids, strict=True)] == [b"1:x"] * len(ids)
    wait_until(lambda: health(two[0])["handed_over"] > 0, PATIENCE_S)


def test_a_worker_with_a_large_backlog_gets_no_more_requests(two: list[Served], monkeypatch: pytest.MonkeyPatch) -> None:
    (ours,), (theirs, more) = owned(0, 1), owned(1, 2)
    with Wire(two[0].port) as wire:
        assert wire.ask(step("start", ours)).status == 200
        assert wire.ask(step("start", theirs)).status == wire.ask(step("start", more)).status == 200
        monkeypatch.setattr(worker_routing, "_MAX_BACKLOG", 1 << 20)
        hold(two[1], 0.5)
        wire.send(step("tick", theirs, b"x" * (4 << 20)) + step("tick", more, b"y"))
        assert wire.read().body == b"1:" + b"x" * (4 << 20)
        refused = wire.read()
        assert (refused.refusal, refused.headers["retry-after"]) == ((503, "worker_busy"), "1")
        assert wire.ask(step("tick", more, b"z")).body == b"1:z"


def test_clients_that_leave_while_they_move_leave_nothing_behind(two: list[Served]) -> None:
    (id_,) = owned(1, 1)
    assert ask(two[0].port, step("start", id_)).status == 200
    wait_until(lambda: health(two[0])["connections"] == health(two[1])["connections"] == 0, PATIENCE_S)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        hold(two[1], 0.05)
        for i in range(40):
            with Wire(two[0].port) as wire:
                wire.send(step("tick", id_, b"x"))
                if i % 2:
                    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: health(two[0])["connections"] == health(two[1])["connections"] == 0, PATIENCE_S)
    assert ask(two[0].port, step("tick", id_, b"still here")).body == b"1:still here"
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 4, PATIENCE_S)  # a link each way
