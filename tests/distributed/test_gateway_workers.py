"""Gateway workers as real processes: they share a port, pass sockets to each other, die, hang and are replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from ludus.distributed import gateway_workers
from ludus.distributed.gateway_workers import GatewayProgram, GatewayWorkers, bind, check_exposure
from ludus.errors import UsageError, WorkerFailed
from ludus.gateway.actor import Actor
from ludus.gateway.server import GatewaySettings, owner_of
from ludus.gateway.sessions import SessionLimits
from ludus.process.workers.supervisor import Supervisor
from tests.gateway.wire import Reply, Wire, ask, raw, step
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their pid")]

SOON_S = 20.0


class Local(Actor):
    """Knows in which process it lives, and blocks it when told to."""

    def __init__(self, diary: str = "") -> None:
        self.diary = diary

    async def start(self, session: str, body: bytes) -> bytes:
        return b"%d" % os.getpid()

    async def tick(self, body: bytes) -> bytes:
        if body == b"block":
            time.sleep(60)
        return b"%d:%s" % (os.getpid(), body)

    async def end(self, body: bytes) -> bytes:
        if self.diary:
            with open(self.diary, "a") as file:
                file.write(f"{self.ended_by}\n")
        return b"%d" % os.getpid()


class Blocking(Local):
    def tick(self, body: bytes) -> bytes:  # type: ignore[override]
        if body == b"block":
            time.sleep(60)
        return body


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    with Supervisor(preload=("ludus.gateway.server",), log_dir=tmp_path_factory.mktemp("logs")) as made:
        yield made


@contextlib.contextmanager
def serving(
    supervisor: Supervisor,
    workers: int,
    make_actor: Callable[[], Actor] = Local,
    **limits: float,
) -> Iterator[GatewayWorkers]:
    settings = GatewaySettings(sessions=SessionLimits(**limits))  # type: ignore[arg-type]
    made = GatewayWorkers(supervisor, GatewayProgram(make_actor, settings), port=0, workers=workers)
    try:
        made.wait_ready(SOON_S)
        yield made
    finally:
        made.close()


def owned(slot: int, slots: int, count: int = 1, prefix: str = "session") -> list[str]:
    ids = (f"{prefix}-{i}" for i in range(10_000))
    return [id_ for id_ in ids if owner_of(id_.encode(), slots) == slot][:count]


def kill(served: GatewayWorkers, slot: int) -> int:
    """kill -9, as the out-of-memory killer would do it; the process id."""
    pid = served.workers[slot].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def replaced(served: GatewayWorkers, slot: int, incarnation: int = 2) -> None:
    wait_until(lambda: served.workers[slot].incarnation == incarnation)
    served.workers[slot].wait_ready(SOON_S)


def pids(served: GatewayWorkers) -> list[bytes]:
    return [b"%d" % (worker.pid or 0) for worker in served.workers]


def health(served: GatewayWorkers, slot: int) -> dict[str, int]:
    counters: dict[str, int] = ask(served.direct_addresses[slot][1], raw("GET /health")).json
    return counters


def test_workers_share_the_port_and_every_session_lives_with_its_owner(supervisor: Supervisor) -> None:
    with serving(supervisor, 3) as served:
        port, owners = served.address[1], pids(served)
        assert len(set(owners)) == 3
        ids = [f"shared-{i}" for i in range(60)]
        for _ in range(3):
            for id_ in ids:
                owner = owner_of(id_.encode(), 3)
                with Wire(port) as wire:
                    started = wire.ask(step("start", id_))
                    assert started.body == owners[owner]
                    host, _, direct = started.headers["ludus-endpoint"].partition(":")
                    assert (host, int(direct)) == served.direct_addresses[owner]
                    assert wire.ask(step("tick", id_, b"x")).body == owners[owner] + b":x"
                assert ask(port, step("end", id_)).body == owners[owner]
        counters = [health(served, slot) for slot in range(3)]
        assert [one["slot"] for one in counters] == [0, 1, 2]
        assert sum(one["started"] for one in counters) == 180
        assert sum(one["handed_over"] for one in counters) > 0
        assert sum(one["forwarded"] for one in counters) == 0


def test_the_direct_port_needs_no_detour(supervisor: Supervisor) -> None:
    with serving(supervisor, 2) as served:
        for slot in (0, 1):
            (id_,) = owned(slot, 2)
            direct = int(ask(served.address[1], step("start", id_)).headers["ludus-endpoint"].rpartition(":")[2])
            before = [health(served, other)["handed_over"] for other in (0, 1)]
            with Wire(direct) as wire:
                assert wire.ask(step("tick", id_, b"x")).body == pids(served)[slot] + b":x"
            assert [health(served, other)["handed_over"] for other in (0, 1)] == before


def test_mixed_and_large_requests_find_their_way_between_processes(supervisor: Supervisor) -> None:
    with serving(supervisor, 2) as served:
        owners = pids(served)
        ids = [id_ for pair in zip(owned(0, 2, 4), owned(1, 2, 4), strict=True) for id_ in pair]
        with Wire(served.direct_addresses[0][1]) as wire:
            assert wire.ask(raw("GET /spec")).status == 200  # from here on it stays
            for n, id_ in enumerate(ids):
                started = wire.ask(step("start", id_))
                assert started.body == owners[n % 2]
                assert int(started.headers["ludus-endpoint"].rpartition(":")[2]) == served.direct_addresses[n % 2][1]
            for turn in range(20):
                wire.send(b"".join(step("tick", id_, b"%d" % turn) for id_ in ids))
                assert [reply.body for reply in wire.replies(8)] == [b"%s:%d" % (owners[n % 2], turn) for n in range(8)]
            large = os.urandom(3 << 20)
            assert wire.ask(step("tick", ids[1], large)).body == owners[1] + b":" + large
        assert health(served, 0)["forwarded"] == 4 + 4 * 20 + 1
        with Wire(served.direct_addresses[0][1]) as wire:
            assert wire.ask(step("tick", ids[1], large)).body == owners[1] + b":" + large
            assert wire.ask(step("tick", ids[1], b"x")).body == owners[1] + b":x"


# -- kill -9


@dataclass
class Game(threading.Thread):
    """Plays one session after the other until it is stopped; records the replies."""

    port: int
    id_: str
    stopping: threading.Event
    ticks: int = 0
    starts: int = 0
    heard: list[tuple[int, str]] = field(default_factory=list)
    cut_off: int = 0
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                with contextlib.suppress(ConnectionError), Wire(self.port) as wire:
                    self.play(wire)
                    continue
                self.cut_off += 1
        except BaseException as error:
            self.wrong.append(repr(error))

    def play(self, wire: Wire) -> None:
        owner = b""
        while not self.stopping.is_set():
            reply = wire.ask(step("tick", self.id_, b"x"))
            if reply.status == 200:
                self.ticks += 1
                if owner and reply.body != owner + b":x":
                    self.wrong.append(f"{reply.body!r} instead of {owner!r}")
                continue
            self.refused(reply)
            reply = wire.ask(step("start", self.id_))
            if reply.status == 200:
                owner = reply.body
                self.starts += 1
            elif reply.refusal != (409, "already_started"):
                self.refused(reply)
                time.sleep(0.02)

    def refused(self, reply: Reply) -> None:
        self.heard.append(reply.refusal)


def test_a_killed_worker_costs_its_own_sessions_only(supervisor: Supervisor) -> None:
    with serving(supervisor, 3) as served:
        stopping = threading.Event()
        games = [[Game(served.address[1], id_, stopping) for id_ in owned(slot, 3, 4, "load")] for slot in range(3)]
        everyone = [game for several in games for game in several]
        for game in everyone:
            game.start()
        wait_until(lambda: all(game.ticks > 20 for game in everyone))
        kill(served, 1)
        replaced(served, 1)
        wait_until(lambda: all(game.starts == 2 for game in games[1]))
        before = {game: game.ticks for game in everyone}
        wait_until(lambda: all(game.ticks > before[game] + 20 for game in everyone))
        stopping.set()
        for game in everyone:
            game.join(SOON_S)
            assert not game.is_alive()
            assert not game.wrong
        for game in games[0] + games[2]:  # unharmed: one start, never cut off, nothing refused but the first tick
            assert (game.starts, game.cut_off, game.heard) == (1, 0, [(404, "unknown_session")])
        for game in games[1]:
            assert game.cut_off <= 2
            assert game.heard[0] == (404, "unknown_session")
            assert (410, "session_lost") in game.heard
            assert set(game.heard[1:]) <= {(410, "session_lost"), (503, "worker_away")}


def test_a_forwarded_request_fails_at_once_when_its_worker_dies(supervisor: Supervisor) -> None:
    with serving(supervisor, 2, tick_s=30.0) as served, Wire(served.direct_addresses[0][1]) as wire:
        (ours,), (theirs,) = owned(0, 2), owned(1, 2)
        assert wire.ask(step("start", ours)).status == wire.ask(step("start", theirs)).status == 200
        wire.send(step("tick", theirs, b"block") + step("tick", ours, b"x"))
        time.sleep(0.1)
        kill(served, 1)
        assert wire.read().refusal == (410, "session_lost")
        assert wire.read().status == 200
        reply = wire.ask(step("start", theirs))
        assert reply.status == 200 or reply.refusal == (503, "worker_away")
        replaced(served, 1)
        if reply.status != 200:
            assert wire.ask(step("tick", theirs)).refusal == (410, "session_lost")
            assert wire.ask(step("start", theirs)).status == 200
        assert wire.ask(step("tick", theirs, b"y")).body == pids(served)[1] + b":y"
        assert wire.ask(step("tick", ours, b"x")).body == pids(served)[0] + b":x"


def test_clients_of_a_single_worker_wait_for_its_replacement(supervisor: Supervisor) -> None:
    with serving(supervisor, 1) as served:
        port = served.address[1]
        with Wire(port) as wire:
            assert wire.ask(step("start", "alone")).status == 200
            kill(served, 0)
            assert wire.closed()
        assert ask(port, step("tick", "alone")).refusal == (410, "session_lost")
        assert ask(port, step("start", "alone")).status == 200
        assert ask(port, step("tick", "alone", b"x")).status == 200


# -- workers that hang


@pytest.mark.parametrize(("actor", "first"), [(Local, None), (Blocking, (504, "actor_timeout"))])
def test_a_worker_whose_loop_or_pool_is_held_is_replaced(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, actor: type[Actor], first: tuple[int, str] | None
) -> None:
    monkeypatch.setattr(gateway_workers, "_GRACE_S", 0.5)
    with serving(supervisor, 2, actor, tick_s=0.5, threads=1) as served, Wire(served.address[1]) as other:
        (ours,), (theirs,) = owned(0, 2), owned(1, 2)
        assert other.ask(step("start", ours)).status == 200
        with Wire(served.address[1]) as wire:
            assert wire.ask(step("start", theirs)).status == 200
            wire.send(step("tick", theirs, b"block"))
            if first is not None:
                assert wire.read().refusal == first
            assert wire.closed()
        assert other.ask(step("tick", ours, b"x")).status == 200
        replaced(served, 1)
        assert ask(served.address[1], step("tick", theirs)).refusal == (410, "session_lost")
        assert ask(served.address[1], step("start", theirs)).status == 200
        assert other.ask(step("tick", ours, b"x")).status == 200
        assert served.workers[0].incarnation == 1


# -- beginning and end


def test_closing_tells_the_actors_and_leaves_nothing(supervisor: Supervisor, tmp_path: Path) -> None:
    diary = tmp_path / "ends"
    with serving(supervisor, 2, partial(Local, str(diary))) as served:
        scratch = served._scratch.path
        assert scratch.exists()
        port, running = served.address[1], [worker.pid for worker in served.workers]
        with contextlib.ExitStack() as stack:
            for i in range(6):
                wire = stack.enter_context(Wire(port))
                assert wire.ask(step("start", f"closing-{i}")).status == 200
            served.close()
            served.close()
    assert diary.read_text().split() == ["shutdown"] * 6
    assert not scratch.exists()
    for pid in running:
        assert pid is not None
        assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(ConnectionError):
        Wire(port)
    bind("127.0.0.1", port).close()


# -- draining


def closing(served: GatewayWorkers) -> threading.Thread:
    thread = threading.Thread(target=served.close, daemon=True)
    thread.start()
    return thread


def drained(supervisor: Supervisor, drain_s: float, workers: int = 2) -> GatewayWorkers:
    made = GatewayWorkers(supervisor, GatewayProgram(Local, GatewaySettings(drain_s=drain_s)), port=0, workers=workers)
    made.wait_ready(SOON_S)
    return made


def test_a_fleet_that_closes_lets_sessions_finish_and_ends_with_the_last_of_them(supervisor: Supervisor) -> None:
    served = drained(supervisor, drain_s=60)
    owners, (mine,), (theirs,) = pids(served), owned(0, 2), owned(1, 2)
    with Wire(served.direct_addresses[0][1]) as wire, Wire(served.direct_addresses[0][1]) as lone:
        assert wire.ask(raw("GET /spec")).status == 200  # it stays with worker 0, which forwards
        assert wire.ask(step("start", theirs)).body == owners[1]
        assert lone.ask(step("start", mine)).body == owners[0]
        closed = closing(served)
        wait_until(lambda: wire.ask(raw("GET /ready")).status == 503)
        wait_until(lambda: ask(served.address[1], step("start", "another")).refusal == (503, "draining"))
        assert lone.ask(step("tick", mine, b"x")).body == owners[0] + b":x"
        assert lone.ask(step("end", mine)).body == owners[0]
        for n in range(10):  # worker 0 has no session left, but this one arrives on its connection
            assert wire.ask(step("tick", theirs, b"%d" % n)).body == owners[1] + b":%d" % n
            time.sleep(0.03)
        assert closed.is_alive()
        assert wire.ask(step("end", theirs)).body == owners[1]
        closed.join(SOON_S)
    assert not closed.is_alive(), "it does not wait any more"
    assert [worker.state for worker in served.workers] == ["stopped", "stopped"]


def test_a_request_that_takes_too_long_is_an_error(supervisor: Supervisor) -> None:
    served = drained(supervisor, drain_s=0.5, workers=1)
    with Wire(served.address[1]) as wire:
        assert wire.ask(step("start", "slow")).status == 200
        began = time.monotonic()
        closed = closing(served)
        last: list[Reply] = []
        with contextlib.suppress(ConnectionError):
            while True:
                last.append(wire.ask(step("tick", "slow", b"x")))
                time.sleep(0.01)
        closed.join(SOON_S)
        assert time.monotonic() - began >= 0.5
        assert {reply.status for reply in last} <= {200, 503}
        assert last[-1].status == 200 or last[-1].refusal == (503, "stopping")
    assert not closed.is_alive()


def test_a_fleet_without_sessions_does_not_wait(supervisor: Supervisor) -> None:
    served = drained(supervisor, drain_s=600)
    with Wire(served.address[1]) as idle:
        assert idle.ask(raw("GET /ready")).status == 200
        closed = closing(served)
        closed.join(SOON_S)
        assert not closed.is_alive()


def _fail() -> None:
    raise LookupError("the model is not there")


def test_a_worker_that_cannot_start_reports_the_reason(supervisor: Supervisor) -> None:
    made = GatewayWorkers(supervisor, GatewayProgram(Local, prepare=_fail), port=0, workers=1)
    try:
        wait_until(lambda: "the model is not there" in made.workers[0].error)
        with pytest.raises(WorkerFailed, match="the model is not there"):
            made.wait_ready(0.1)
    finally:
        made.close()


def test_an_address_that_is_taken_or_not_ours_is_a_usage_error(supervisor: Supervisor) -> None:
    with contextlib.closing(bind("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"Cannot listen on 127.0.0.1:{port}: Address already in use"):
            GatewayWorkers(supervisor, GatewayProgram(Local), port=port)
    with pytest.raises(UsageError, match=r"Cannot listen on 203\.0\.113\.1"):
        GatewayWorkers(supervisor, GatewayProgram(Local, GatewaySettings(token="t")), host="203.0.113.1")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_beyond_this_machine_a_token_is_needed(host: str) -> None:
    with pytest.raises(UsageError, match="without a token"):
        check_exposure(host, None)
    with pytest.raises(UsageError, match="without a token"):
        check_exposure(host, "")
    check_exposure(host, "s3cret")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_needs_no_token(host: str) -> None:
    check_exposure(host, None)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_endpoints_of_ipv6_are_in_brackets(supervisor: Supervisor) -> None:
    try:
        bind("::1", 0).close()
    except UsageError:
        pytest.skip("no IPv6 on this machine")
    made = GatewayWorkers(supervisor, GatewayProgram(Local), host="::1", port=0)
    try:
        made.wait_ready(SOON_S)
        with socket.create_connection(made.address, 5) as connected:
            connected.sendall(step("start", "six"))
            assert f"Ludus-Endpoint: [::1]:{made.direct_addresses[0][1]}".encode() in connected.recv(4096)
    finally:
        made.close()


def test_workers_on_all_addresses_serve_ipv4_and_name_its_endpoints(supervisor: Supervisor) -> None:
    """As in a pod: the probes and clients of a cluster may be of either family."""
    made = GatewayWorkers(supervisor, GatewayProgram(Local, GatewaySettings(token="s3cret")), host="::", port=0)
    try:
        made.wait_ready(SOON_S)
        with socket.create_connection(("127.0.0.1", made.address[1]), 5) as connected:
            connected.sendall(step("start", "four", headers=["Authorization: Bearer s3cret"]))
            assert f"Ludus-Endpoint: 127.0.0.1:{made.direct_addresses[0][1]}".encode() in connected.recv(4096)
    finally:
        made.close()


def test_a_long_temporary_path_does_not_hinder(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with serving(supervisor, 2) as served:
        (theirs,) = owned(1, 2)
        assert ask(served.direct_addresses[0][1], step("start", theirs)).body == pids(served)[1]
