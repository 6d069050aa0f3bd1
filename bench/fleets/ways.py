"""Ways for items from one writer to one reader: ours over Redis Streams, Redis otherwise, ZeroMQ, the ring, one process.

A way is two loops: one that writes numbered items until it is stopped, and a generator that yields the number of every item that
has arrived in the reader's batch. At most `ROOM` items are under way in each, but for the two that flood, which is what they are about.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import redis

from bench.fleets.items import Batch, Draft, EpisodeDraft, Item
from bench.fleets.services import Missing, RedisServer
from ludus.core.types import Segments
from ludus.transport.local import LocalMemory
from ludus.transport.ring_buffer import Wakeup, create_ring
from ludus.transport.shared_memory import SharedReader, SharedWriter, ring_capacity

ROOM = 128
READ = 16
"""Items per call, where a reader can ask for several."""
PIPED = 16
PACED_BYTES = 16 << 20
"""Half of what Redis keeps for a subscriber that does not keep up before it hangs up on it (client-output-buffer-limit: 32 MB)."""
WAIT_S = 10.0
PAUSE_S = 0.0002
KEY, GROUP = "items", "readers"


@dataclass
class Place:
    """Where one measurement happens."""

    item: Item
    directory: Path
    flight: np.ndarray
    """Shared by both sides: items written, items read."""
    server: RedisServer | None = None

    def client(self, resp: int = 2) -> redis.Redis:
        assert self.server is not None
        return self.server.client(resp)


Produce = Callable[[Place], None]
Consume = Callable[[Place], Iterator[int]]


@dataclass(frozen=True)
class Way:
    produce: Produce
    consume: Consume
    about: str
    server: str = "redis"
    """`redis`, `durable`, or empty: none."""
    threads: bool = False
    """Both sides in one process."""
    lossy: bool = False


class Silent(Exception):
    """Nothing came for so long."""


# -- ours ---------------------------------------------------------------------------------------------------------------

CHANNEL, WORKER, PLAN = "bench", "worker-0", "plan-0"


def exchanged(compression: Literal["none", "lz4"]) -> tuple[Produce, Consume]:
    def produce(place: Place) -> None:
        from ludus.transport.message_stream import open_message_stream
        from ludus.transport.stream_memory import StreamWriter

        assert place.server is not None
        exchange = open_message_stream(place.server.url, CHANNEL, ROOM)
        writer = StreamWriter(exchange, place.item.layout, worker=WORKER, plan=PLAN, compression=compression)
        number = 0
        while True:
            block = writer.reserve(WAIT_S)
            if block is None:
                raise Silent(f"no room for {WAIT_S:g} s: {writer.last_error}")
            place.item.write(block, number)
            writer.commit(block)
            number += 1
            place.flight[0] = number

    def consume(place: Place) -> Iterator[int]:
        from ludus.transport.message_stream import open_message_stream
        from ludus.transport.stream_memory import StreamReader

        assert place.server is not None
        exchange = open_message_stream(place.server.url, CHANNEL, ROOM)
        reader = StreamReader(exchange, place.item.layout, plan=PLAN, find_error=_inspection(place.item), prefetch=READ)
        batch = Batch(place.item)
        last = time.monotonic()
        while True:
            received = reader.take()
            if received is None:
                if reader.rejected:
                    raise AssertionError(f"rejected: {dict(reader.rejected)}")
                if time.monotonic() > last + WAIT_S:
                    raise Silent(f"nothing for {WAIT_S:g} s")
                reader.wait(WAIT_S)
                continue
            number = batch.segments(received.segments)
            reader.release(received)
            last = time.monotonic()
            yield number

    return produce, consume


def _inspection(item: Item) -> Callable[[Segments], str | None]:
    """That of the learner."""
    from ludus.buffers.segment_validation import SegmentValidator

    return SegmentValidator(*item.spaces, item.layout.spec).find_error


# -- Redis as it is -----------------------------------------------------------------------------------------------------


def _await_room(under_way: Callable[[], int], room: int) -> None:
    """Until there is room for another half of it."""
    end = time.monotonic() + WAIT_S
    while under_way() > room // 2:
        if time.monotonic() > end:
            raise Silent(f"no room for {WAIT_S:g} s")
        time.sleep(PAUSE_S)


def stream_written_one_by_one(place: Place) -> None:
    client, draft = place.client(), Draft(place.item)
    number = 0
    while True:
        if number % (ROOM // 2) == 0:  # it was at most half full, so the half that follows fits
            _await_room(lambda: client.xlen(KEY), ROOM)
        client.xadd(KEY, {"": draft.made(number)})
        number += 1
        place.flight[0] = number


def stream_written_in_lots(place: Place) -> None:
    client, draft = place.client(), Draft(place.item)
    number = 0
    while True:
        if number % (ROOM // 2) == 0:
            _await_room(lambda: client.xlen(KEY), ROOM)
        pipeline = client.pipeline(transaction=False)
        for _ in range(PIPED):
            pipeline.xadd(KEY, {"": bytes(draft.made(number))})  # the draft is used again before it is sent
            number += 1
        pipeline.execute()
        place.flight[0] = number


def stream_read(place: Place) -> Iterator[int]:
    client, batch = place.client(), Batch(place.item)
    client.xgroup_create(KEY, GROUP, "0", mkstream=True)
    while True:
        found = client.xreadgroup(GROUP, "reader", {KEY: ">"}, count=READ, block=int(WAIT_S * 1000))
        if not found:
            raise Silent(f"nothing for {WAIT_S:g} s")
        entries = _entries(found)
        for _, fields in entries:
            yield batch.bytes(next(iter(fields.values())))
        ids = [name for name, _ in entries]
        pipeline = client.pipeline(transaction=False)
        pipeline.xack(KEY, GROUP, *ids)
        pipeline.xdel(KEY, *ids)  # what is acknowledged makes room
        pipeline.execute()


def _entries(found: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Of the one stream, in either form in which the client answers."""
    entries: list[tuple[bytes, dict[bytes, bytes]]]
    if isinstance(found, dict):
        (entries,) = found.values()
        return entries[0] if entries and isinstance(entries[0], list) else entries
    ((_, entries),) = found
    return entries


def list_written(place: Place) -> None:
    client, draft = place.client(), Draft(place.item)
    number = 0
    while True:
        if number % (ROOM // 2) == 0:
            _await_room(lambda: client.llen(KEY), ROOM)
        client.lpush(KEY, draft.made(number))
        number += 1
        place.flight[0] = number


def list_read(place: Place) -> Iterator[int]:
    client, batch = place.client(), Batch(place.item)
    while True:
        found = client.brpop([KEY], timeout=WAIT_S)
        if found is None:
            raise Silent(f"nothing for {WAIT_S:g} s")
        yield batch.bytes(found[1])


def published(pickled: bool, paced: bool, resp: int = 2) -> tuple[Produce, Consume]:
    """Nobody tells a publisher that nobody keeps up. A paced one looks at the reader's count in shared memory, which costs nothing.

    `resp`: the protocol that the subscriber speaks. redis-py 8 speaks 3 unless told otherwise, and then makes a text of every message
    for a log that nobody reads (`handle_pubsub_push_response`): ten times the cost of receiving 96 KB.
    """

    def produce(place: Place) -> None:
        client, item, draft, steps = place.client(), place.item, Draft(place.item), EpisodeDraft(place.item)
        room = min(ROOM, PACED_BYTES // item.nbytes)
        number = 0
        while not client.pubsub_numsub(KEY)[0][1]:
            time.sleep(PAUSE_S)
        while True:
            if paced and number - place.flight[1] >= room:
                _await_room(lambda: number - int(place.flight[1]), room)  # noqa: B023  (called at once)
            client.publish(KEY, pickle.dumps(steps.made(number)) if pickled else draft.made(number))
            number += 1
            place.flight[0] = number

    def consume(place: Place) -> Iterator[int]:
        subscription, batch = place.client(resp).pubsub(ignore_subscribe_messages=True), Batch(place.item)
        subscription.subscribe(KEY)
        for message in subscription.listen():
            data = message["data"]
            yield batch.episode(pickle.loads(data)) if pickled else batch.bytes(data)

    return produce, consume


# -- without Redis ------------------------------------------------------------------------------------------------------


def zeromq(scheme: str) -> tuple[Produce, Consume]:
    """PUSH to PULL. Its high-water marks bound what is under way: half of the room on either side."""

    def opened(kind: str, place: Place) -> Any:
        try:
            import zmq
        except ImportError:
            raise Missing("pyzmq is not installed (pip install pyzmq)") from None
        end = zmq.Context().socket(getattr(zmq, kind))
        end.set_hwm(ROOM // 2)
        end.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        end.setsockopt(zmq.SNDTIMEO, int(WAIT_S * 1000))
        return end

    def produce(place: Place) -> None:
        socket, draft, number = opened("PUSH", place), Draft(place.item), 0
        socket.connect(_address(place))
        while True:
            socket.send(draft.made(number))
            number += 1
            place.flight[0] = number

    def consume(place: Place) -> Iterator[int]:
        socket, batch = opened("PULL", place), Batch(place.item)
        if scheme == "ipc":
            socket.bind(f"ipc://{place.directory}/zmq")
        else:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            (place.directory / "port").write_text(str(port))
        while True:
            yield batch.bytes(socket.recv(copy=False).buffer)

    def _address(place: Place) -> str:
        if scheme == "ipc":
            return f"ipc://{place.directory}/zmq"
        end = time.monotonic() + WAIT_S
        while not (place.directory / "port").exists() or not (port := (place.directory / "port").read_text()):
            if time.monotonic() > end:
                raise Silent("the reader has no port")
            time.sleep(PAUSE_S)
        return f"tcp://127.0.0.1:{port}"

    return produce, consume


def ring_written(place: Place) -> None:
    writer = SharedWriter(place.directory / "ring", place.item.layout, place.directory / "wakeup")
    while (block := writer.reserve(WAIT_S)) is not None:
        place.item.write(block, writer.committed)
        writer.commit(block)
        place.flight[0] = writer.committed
    raise Silent(f"no room for {WAIT_S:g} s")


def ring_read(place: Place) -> Iterator[int]:
    reader, wakeup, batch = (
        SharedReader(place.directory / "ring", place.item.layout),
        Wakeup(place.directory / "wakeup"),
        Batch(place.item),
    )
    last = time.monotonic()
    while time.monotonic() < last + WAIT_S:
        block = reader.take()
        if block is None:
            wakeup.wait(1.0)
            continue
        number = batch.segments(block)
        reader.release(block)
        last = time.monotonic()
        yield number
    raise Silent(f"nothing for {WAIT_S:g} s")


def prepare_ring(place: Place) -> None:
    create_ring(place.directory / "ring", ring_capacity(place.item.layout, ROOM))
    Wakeup.create(place.directory / "wakeup").close()


def in_process() -> tuple[Produce, Consume]:
    memories: dict[int, LocalMemory] = {}

    def memory(place: Place) -> LocalMemory:
        return memories.setdefault(id(place), LocalMemory(place.item.layout.spec, 1, ROOM))

    def produce(place: Place) -> None:
        room, number = memory(place), 0
        while (block := room.reserve(WAIT_S)) is not None:
            place.item.write(block, number)
            room.commit(block)
            number += 1
            place.flight[0] = number

    def consume(place: Place) -> Iterator[int]:
        room, batch = memory(place), Batch(place.item)
        while (block := room.take(WAIT_S)) is not None:
            number = batch.segments(block)
            room.release(block)
            yield number

    return produce, consume


OURS, OURS_DURABLE, BARE, BARE_DURABLE = "ludus", "ludus, AOF", "streams, bare", "streams, bare, AOF"
SEED = "pub/sub, pickled"
WAYS: dict[str, Way] = {
    OURS: Way(*exchanged("none"), "StreamWriter → Redis Streams → StreamReader, inspected as a learner does, acknowledged"),
    "ludus, lz4": Way(*exchanged("lz4"), "the same, compressed"),
    OURS_DURABLE: Way(*exchanged("none"), "the same without compression, a server with an append-only file", "durable"),
    BARE: Way(stream_written_one_by_one, stream_read, f"redis-py: XADD, XREADGROUP of {READ}, XACK + XDEL; XLEN twice per room"),
    "streams, bare, in lots": Way(stream_written_in_lots, stream_read, f"the same with {PIPED} XADD in a pipeline"),
    BARE_DURABLE: Way(stream_written_one_by_one, stream_read, "one by one, a server with an append-only file", "durable"),
    "list": Way(list_written, list_read, "LPUSH, BRPOP; LLEN twice per room; gone when it is read"),
    SEED: Way(
        *published(True, False),
        "a pickled episode of transition objects per PUBLISH, unpickled; nothing holds it back; RESP2",
        lossy=True,
    ),
    "pub/sub, pickled, RESP3": Way(
        *published(True, False, 3), "the same by redis-py 8 as it is when nothing is said", lossy=True
    ),
    "pub/sub, pickled, paced": Way(*published(True, True), "RESP2; the publisher knows what was read, at no cost", lossy=True),
    "pub/sub, bytes": Way(*published(False, False), "the record per PUBLISH; nothing holds it back", lossy=True),
    "pub/sub, bytes, paced": Way(*published(False, True), "the same; the publisher knows what was read, at no cost", lossy=True),
    "zmq tcp": Way(*zeromq("tcp"), "PUSH/PULL over TCP; no server, nothing is kept", ""),
    "zmq ipc": Way(*zeromq("ipc"), "PUSH/PULL over a Unix socket", ""),
    "ring": Way(ring_written, ring_read, "ludus.transport.shared_memory: one machine only", ""),
    "in process": Way(*in_process(), "ludus.transport.local: two threads of one process", "", threads=True),
}
