"""The hub: at most one per run, robust against garbage, and gone without leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ludus.core.metrics import read_jsonl
from ludus.distributed.frames import MAX_BODY, Header, encode_frame
from ludus.distributed.hub import server as hubs
from ludus.distributed.hub.metrics_report import Tally
from ludus.distributed.hub.rpc import RpcConnection, error_fields, error_from, split
from ludus.distributed.hub.server import Hub, HubLocation, find_or_start
from ludus.errors import Damaged, UnknownName, UsageError, WorkerFailed

T = TypeVar("T")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    _, opened = find_or_start(tmp_path, report_s=0.05)
    assert opened is not None
    yield opened
    opened.close()


def talk(place: HubLocation, work: Callable[[RpcConnection], Coroutine[Any, Any, T]]) -> T:
    async def main() -> T:
        connection = await RpcConnection.open(place.socket, "The hub")
        try:
            return await asyncio.wait_for(work(connection), 20)
        finally:
            await connection.close()

    return asyncio.run(main())


def ask(place: HubLocation, header: Header, *parts: bytes) -> Header:
    async def work(connection: RpcConnection) -> Header:
        return (await connection.request(header, *parts, timeout_s=10))[-1][0]

    return talk(place, work)


# -- who is the hub


def test_it_is_private_and_leaves_nothing_behind(tmp_path: Path) -> None:
    place, hub = find_or_start(tmp_path)
    assert hub is not None
    record = tmp_path / "hub.json"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    for directory in (place.scratch, Path(place.staging).parent):
        assert stat.S_IMODE(Path(directory).stat().st_mode) == 0o700
    assert len(os.fsencode(place.socket)) < 100
    hub.close()
    assert not record.exists()
    assert not Path(place.scratch).exists()
    assert not Path(place.staging).parent.exists()


def test_a_second_comer_finds_the_first(tmp_path: Path, hub: Hub) -> None:
    place, second = find_or_start(tmp_path)
    assert second is None
    assert place == hub.location
    assert ask(place, {"op": "hello"})["pid"] == os.getpid()


class Rival:
    """A process that opens the run and holds it until it is asked to end, or killed."""

    def __init__(self, directory: Path) -> None:
        self.go, start = os.pipe()[::-1]
        reading, self._tell = os.pipe()
        self._told = reading
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.read(start, 1)
                place, hub = find_or_start(directory)
                os.write(self._tell, json.dumps([hub is not None, place.socket, place.scratch, place.staging]).encode() + b"\n")
                time.sleep(60)
            finally:
                os._exit(1)

    def start(self) -> None:
        os.write(self.go, b"x")

    def outcome(self) -> tuple[bool, str, str, str]:
        with os.fdopen(os.dup(self._told)) as told:
            return tuple(json.loads(told.readline()))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_of_many_that_come_at_once_one_becomes_the_hub_and_when_it_is_killed_the_next_replaces_it(tmp_path: Path) -> None:
    rivals = [Rival(tmp_path) for _ in range(4)]
    try:
        for rival in rivals:
            rival.start()
        outcomes = [rival.outcome() for rival in rivals]
        owners = [rival for rival, outcome in zip(rivals, outcomes, strict=True) if outcome[0]]
        assert len(owners) == 1
        assert len({outcome[1] for outcome in outcomes}) == 1, "they are not at the same hub"
        owners[0].kill()
        rivals.remove(owners[0])
        place, mine = find_or_start(tmp_path)
        assert mine is not None
        try:
            assert ask(place, {"op": "hello"})["pid"] == os.getpid()
            assert not Path(outcomes[0][2]).exists(), "the dead one's directory was not swept"
            assert not Path(outcomes[0][3]).exists(), "the dead one's shared memory was not swept"
        finally:
            mine.close()
    finally:
        for rival in rivals:
            rival.kill()


def test_a_run_that_is_open_on_another_machine_is_not_taken(tmp_path: Path) -> None:
    with open(tmp_path / ".hub.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (tmp_path / "hub.json").write_text('{"pid": 5, "host": "elsewhere", "place": {}}')
        with pytest.raises(UsageError, match="process 5 on elsewhere"):
            find_or_start(tmp_path)


@pytest.mark.parametrize("record", [None, "{", '{"pid": 5}', '{"pid": 5, "place": {"socket": "/nowhere"}}'])
def test_an_owner_that_does_not_answer_is_named_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str | None
) -> None:
    monkeypatch.setattr(hubs, "CLAIM_S", 0.1)
    with open(tmp_path / ".hub.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if record is not None:
            (tmp_path / "hub.json").write_text(record)
        with pytest.raises(WorkerFailed, match="does not respond"):
            find_or_start(tmp_path)


def test_a_copy_of_the_process_does_not_hold_the_run(tmp_path: Path) -> None:
    _, hub = find_or_start(tmp_path)
    assert hub is not None
    pid = os.fork()
    if pid == 0:
        hub.release_after_fork()
        time.sleep(60)
        os._exit(0)
    try:
        hub.close()
        _, again = find_or_start(tmp_path)
        assert again is not None
        again.close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# -- what it hears

RUBBISH = {
    "text": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "a header beyond all bounds": struct.pack("<IQ", 0xFFFFFFFF, 0),
    "a body beyond all bounds": struct.pack("<IQ", 1, MAX_BODY + 1) + b"\xc0",
    "no msgpack": struct.pack("<IQ", 4, 0) + b"\xc1\xc1\xc1\xc1",
    "half a map": struct.pack("<IQ", 1, 0) + b"\x82",
    "deep nesting": struct.pack("<IQ", 100_000, 0) + b"\x91" * 100_000,
    "not a map": b"".join(encode_frame([1, 2])),  # type: ignore[arg-type]
    "no operation": b"".join(encode_frame({"id": 1})),
    "an unknown operation": b"".join(encode_frame({"op": "format c:", "id": 1})),
    "an operation that is a list": b"".join(encode_frame({"op": [1]})),
    "missing fields": b"".join(encode_frame({"op": "buffer.push", "id": 1})),
    "fields of wrong types": b"".join(encode_frame({"op": "metric", "entries": [[1, "x", None]]})),
    "an unknown buffer": b"".join(encode_frame({"op": "buffer.push", "name": "none", "sizes": []})),
    "a path for a file": b"".join(
        encode_frame({"op": "model.publish", "id": 1, "name": "m", "file": "../../etc/passwd", "step": 1})
    ),
}


@pytest.mark.parametrize("name", RUBBISH)
def test_a_peer_that_sends_garbage_is_disconnected_and_others_are_not_affected(hub: Hub, name: str) -> None:
    with socket.socket(socket.AF_UNIX) as bad:
        bad.settimeout(10)
        bad.connect(hub.location.socket)
        bad.sendall(RUBBISH[name])
        assert bad.recv(1000) == b""
    assert ask(hub.location, {"op": "hello"})["pid"] == os.getpid()


def test_a_million_random_bytes_leave_it_standing(hub: Hub) -> None:
    noise = random.Random(1)
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as bad:
            bad.settimeout(10)
            bad.connect(hub.location.socket)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                bad.sendall(noise.randbytes(50_000))
    assert ask(hub.location, {"op": "hello"})["pid"] == os.getpid()


def test_an_incomplete_frame_affects_no_other_peer(hub: Hub) -> None:
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(hub.location.socket)
        slow.sendall(b"".join(encode_frame({"op": "hello", "id": 1}))[:-1])
        assert ask(hub.location, {"op": "hello"})["pid"] == os.getpid()


def test_an_error_reaches_the_caller_as_it_was_raised(hub: Hub) -> None:
    with pytest.raises(UnknownName, match="no model 'ghost'"):
        ask(hub.location, {"op": "model.find", "name": "ghost"})
    with pytest.raises(UsageError, match="not a plain name"):
        ask(hub.location, {"op": "buffer.open", "name": "../x", "size": None})


# -- buffers


def test_each_item_goes_to_one_consumer_and_a_consumer_that_leaves_takes_none(hub: Hub) -> None:
    ask(hub.location, {"op": "buffer.open", "name": "b", "size": 8})

    async def work(first: RpcConnection) -> list[bytes]:
        gone = await RpcConnection.open(hub.location.socket, "The hub")
        never = gone.start({"op": "buffer.take", "name": "b", "count": 2})
        await gone.drain()
        await gone.request({"op": "hello"}, timeout_s=5)
        takes = [first.start({"op": "buffer.take", "name": "b", "count": 2}) for _ in range(2)]
        await first.request({"op": "hello"}, timeout_s=5)
        await gone.close()
        assert isinstance(never.exception(), WorkerFailed)
        while len(hub._buffers._buffers["b"].queue.waiting()) == 3:  # until the hub has noticed
            await asyncio.sleep(0.001)
        await first.send({"op": "buffer.push", "name": "b", "sizes": [1, 1, 1, 1]}, b"abcd")
        replies = [await take for take in takes]
        return [bytes(part) for reply in replies for header, body in reply for part in split(body, header["sizes"])]

    assert talk(hub.location, work) == [b"a", b"b", b"c", b"d"]


def test_a_batch_larger_than_a_frame_comes_in_several(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.distributed.hub.buffer_service._CHUNK", 10)
    ask(hub.location, {"op": "buffer.open", "name": "b", "size": 8})

    async def work(connection: RpcConnection) -> list[list[int]]:
        await connection.send({"op": "buffer.push", "name": "b", "sizes": [6, 6, 20, 1]}, b"x" * 33)
        reply = await connection.request({"op": "buffer.take", "name": "b", "count": 4}, timeout_s=5)
        assert sum(len(body) for _, body in reply) == 33
        return [header["sizes"] for header, _ in reply]

    assert talk(hub.location, work) == [[6], [6], [20], [1]]


def test_a_waiting_take_returns_when_the_run_ends(tmp_path: Path) -> None:
    place, hub = find_or_start(tmp_path)
    assert hub is not None

    async def work(connection: RpcConnection) -> Header:
        await connection.request({"op": "buffer.open", "name": "b", "size": 1}, timeout_s=5)
        waiting = connection.start({"op": "buffer.take", "name": "b", "count": 1})
        await connection.request({"op": "hello"}, timeout_s=5)
        closing = asyncio.get_running_loop().run_in_executor(None, hub.close)
        reply = await waiting
        await closing
        with pytest.raises(WorkerFailed, match="gone"):
            await connection.request({"op": "hello"}, timeout_s=5)
        return reply[-1][0]

    assert talk(place, work)["closed"] is True


# -- metrics


def test_numbers_are_averaged_over_a_report_and_counted_on_when_the_run_is_opened_again(tmp_path: Path) -> None:
    for life in (1, 2):
        place, hub = find_or_start(tmp_path, report_s=600)
        assert hub is not None
        ask(place, {"op": "metric", "entries": [["loss", 3.0, 2], ["timesteps", 50.0, 1]]})
        ask(place, {"op": "metric", "entries": [["loss", 9.0, 1], ["timesteps", 40.0, 1]]})
        ask(place, {"op": "buffer.open", "name": "b", "size": 1})
        hub.close()
        row = read_jsonl(tmp_path / "metrics.jsonl")[-1]
        assert row["loss"] == 4.0
        assert row["timesteps"] == 50
        assert row["iterations"] == row["incarnation"] == life
        assert row["buffer/b/dropped"] == 0
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 2
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_drops_are_counted_wherever_they_happen(hub: Hub) -> None:
    async def work(connection: RpcConnection) -> Header:
        await connection.request({"op": "buffer.open", "name": "b", "size": 1}, timeout_s=5)
        await connection.send({"op": "buffer.push", "name": "b", "sizes": [1, 1], "lost": 3}, b"ab")
        return (await connection.request({"op": "buffer.stats", "name": "b"}, timeout_s=5))[-1][0]

    stats = talk(hub.location, work)
    assert (stats["pushed"], stats["dropped"], stats["waiting"]) == (5, 4, 1)


def test_reports_are_written_while_it_runs(hub: Hub, tmp_path: Path) -> None:
    ask(hub.location, {"op": "metric", "entries": [["x", 1.0, 1]]})
    deadline = time.monotonic() + 10
    while not read_jsonl(tmp_path / "metrics.jsonl"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]["x"] == 1.0


def test_endless_new_names_do_not_fill_the_memory() -> None:
    tally = Tally()
    for i in range(20_000):
        tally.add(f"n{i}", 1.0, 1)
    taken = tally.take()
    assert len(taken) == 10_001
    assert taken["metrics/lost"] == 10_000


# -- the wire


@pytest.mark.parametrize("error", [UsageError("a", "b"), ValueError("v"), WorkerFailed("w")])
def test_errors_survive_the_wire(error: Exception) -> None:
    again = error_from(error_fields(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_an_error_of_a_class_we_do_not_know_keeps_its_name() -> None:
    assert str(error_from({"error": "CudaError", "message": "boom"})) == "CudaError: boom"


def test_sizes_that_do_not_add_up_are_damage() -> None:
    for sizes in ([1, 1], [4], [-1, 4], ["x"]):
        with pytest.raises(Damaged):
            split(b"abc", sizes)  # type: ignore[arg-type]


def test_a_message_that_is_too_large_is_refused_before_it_is_sent() -> None:
    with pytest.raises(UsageError, match="too large"):
        encode_frame({}, b"x" * 11, max_body=10)


def test_an_address_without_a_listener_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="cannot be reached"):
        asyncio.run(RpcConnection.open(str(tmp_path / "nobody"), "The hub"))
