"""Large items go through shared memory: same results, even if processes are killed, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import ludus
from ludus.distributed.hub.server import Hub
from ludus.errors import Damaged, WorkerFailed
from ludus.process.workers.supervisor import ALWAYS
from ludus.remote import buffer as buffers
from ludus.remote.context import RunContext
from tests.remote import pushing
from tests.remote.pushing import item, outbox, shared
from tests.waiting import wait_until

WAIT_S = 20.0

T = TypeVar("T")


def number(taken: Any) -> int:
    """Of an item, whole."""
    found = set(np.asarray(taken).tolist())
    assert len(found) == 1, "a torn item"
    return int(found.pop())


def numbers(buffer: ludus.RemoteBuffer, count: int) -> list[int]:
    return [number(buffer.take(WAIT_S)) for _ in range(count)]


def when_pushed(buffer: ludus.RemoteBuffer, count: int) -> dict[str, int]:
    """The counts when so many have arrived: they leave on another connection than the question."""
    wait_until(lambda: buffer.stats()["pushed"] >= count, what="not all arrive")
    stats = buffer.stats()
    assert stats["pushed"] == count
    return stats


def rings(run: RunContext) -> list[Path]:
    assert run.hub is not None
    return list((Path(run.hub.location.staging).parent / "rings").iterdir())


def on_hub(run: RunContext, look: Callable[[Hub], T]) -> T:
    """What is seen from the hub's own thread: from another one its tables change while they are looked at."""
    hub = run.hub
    assert hub is not None

    async def there() -> T:
        return look(hub)

    return asyncio.run_coroutine_threadsafe(there(), hub._loop).result(WAIT_S)


def held(run: RunContext) -> int:
    """References that the hub has to records."""
    return on_hub(run, lambda hub: sum(ring._in_use for ring in hub._buffers._rings._all()))


def accounts(run: RunContext, name: str) -> str:
    """Who has the records that the hub holds."""

    def look(hub: Hub) -> str:
        fifo = hub._buffers._buffers[name].queue
        lent = {str(who): len(items) for who, items in hub._buffers._lent.items()}
        rings = {ring.path.parent.name: (ring._in_use, ring._abandoned) for ring in hub._buffers._rings._all()}
        return f"{len(fifo)} inside, offers {[len(items) for _, items in fifo._offers]}, lent {lent}, rings {rings}"

    return on_hub(run, look)


# -- the same buffer


def test_large_items_come_in_order_between_small_ones_and_most_through_shared_memory(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", size=200)
    shared(buffer)
    for i in range(60):
        buffer.push(item(i) if i % 3 else np.full(1, i), drop=i % 2 == 0)
    assert numbers(buffer, 60) == [*range(60)]
    stats = buffer.stats()
    assert (stats["dropped"], stats["shared"]) == (0, 40)


def test_batches_are_in_memory_of_their_own(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", size=16, batch_size=4)
    shared(buffer)
    batches = []
    for turn in range(40):  # several times around the ring
        buffer.push(*[item(4 * turn + i) for i in range(4)]).wait(WAIT_S)
        batches.append(buffer.take(WAIT_S))
        batches[-1][0, 0] += 0  # it is ours to write to
    for turn, batch in enumerate(batches):
        assert [number(row) for row in batch] == [4 * turn + i for i in range(4)]


def test_every_reference_is_given_back(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", size=8, batch_size=4)
    shared(buffer)
    buffer.push(*map(item, range(20))).wait(WAIT_S)  # 12 are dropped
    taken = [number(row) for _ in range(2) for row in buffer.take(WAIT_S)]
    assert taken == [*range(12, 20)]
    wait_until(lambda: held(run) == 0, what="the hub still holds records")
    assert buffer.stats()["dropped"] == 12


def test_dropping_goes_on_through_shared_memory(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", size=2)
    shared(buffer)
    for i in range(300):
        buffer.push(item(i)).wait(WAIT_S)
    stats = when_pushed(buffer, 300)
    assert stats["dropped"] == 298
    assert stats["shared"] > 200
    assert numbers(buffer, 2) == [298, 299]


# -- no room


def test_what_has_no_room_in_the_ring_goes_through_the_socket_in_order_and_nothing_is_lost(
    run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "RING_BYTES", 1 << 20)
    buffer = ludus.RemoteBuffer("b", size=30)
    shared(buffer)
    pushes = [buffer.push(item(i), drop=False) for i in range(50)]  # 12 MB; 20 of them wait for room in the buffer
    with pytest.raises(TimeoutError):
        pushes[-1].wait(0.1)
    assert numbers(buffer, 50) == [*range(50)]
    for push in pushes:
        push.wait(WAIT_S)
    stats = buffer.stats()
    assert stats["dropped"] == 0
    assert 3 <= stats["shared"] < 30
    buffer.push(item(50)).wait(WAIT_S)
    assert numbers(buffer, 1) == [50]
    assert buffer.stats()["shared"] == stats["shared"] + 1, "there is room again"


def test_an_item_that_is_larger_than_the_ring_goes_through_the_socket(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "RING_BYTES", 1 << 20)
    buffer = ludus.RemoteBuffer("b")
    shared(buffer)
    large = np.arange(1 << 19)
    buffer.push(item(1), large, item(2))
    assert number(buffer.take(WAIT_S)) == 1
    np.testing.assert_array_equal(buffer.take(WAIT_S), large)
    assert number(buffer.take(WAIT_S)) == 2
    assert buffer.stats()["shared"] == 2


def test_without_shared_memory_everything_goes_through_the_socket(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.distributed.hub.shared_queues.ALL_BYTES", 0)
    buffer = ludus.RemoteBuffer("b")
    buffer.push(item(0)).wait(WAIT_S)
    wait_until(lambda: (task := outbox(buffer)._ring_task) is not None and task.done(), what="it was not asked for")
    buffer.push(item(1)).wait(WAIT_S)
    assert numbers(buffer, 2) == [0, 1]
    assert buffer.stats()["shared"] == 0


def test_records_of_pushes_that_never_left_make_room(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "OUTBOX_PUSHES", 4)
    monkeypatch.setattr(buffers, "RING_BYTES", 1 << 22)
    buffer = ludus.RemoteBuffer("b", size=100)
    shared(buffer)
    entered, go_on = threading.Event(), threading.Event()

    async def hold() -> None:
        entered.set()
        go_on.wait(WAIT_S)

    run.client.submit(hold())  # the client's loop, and with it everything that leaves this process
    assert entered.wait(WAIT_S)
    pushes = [buffer.push(item(i)) for i in range(40)]  # 10 MB, more than the ring has
    go_on.set()
    pushes[-1].wait(WAIT_S)
    stats = when_pushed(buffer, 40)
    assert stats["dropped"] + stats["waiting"] == 40
    kept = numbers(buffer, stats["waiting"])
    assert kept[-1] == 39
    assert kept == sorted(kept)
    for i in range(30):
        buffer.push(item(i)).wait(WAIT_S)
        assert numbers(buffer, 1) == [i]
    assert buffer.stats()["shared"] >= stats["shared"] + 30


# -- from another machine


def test_consumers_that_cannot_map_the_rings_get_the_bytes(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", size=100, batch_size=3)
    shared(buffer)
    buffer.push(*map(item, range(6))).wait(WAIT_S)
    run.location = replace(run.location, mirror="elsewhere")
    far = ludus.RemoteBuffer("b", batch_size=3)
    assert [number(row) for row in far.take(WAIT_S)] == [0, 1, 2]
    wait_until(lambda: held(run) == 0, what="what was sent as bytes is still held")
    assert [number(row) for row in far.take(WAIT_S)] == [3, 4, 5]
    other = ludus.RemoteBuffer("c")
    other.push(item(1)).wait(WAIT_S)
    assert outbox(other)._ring_task is None, "it cannot have a ring"
    assert numbers(other, 1) == [1]


# -- the end


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    with ludus.init(project=tmp_path, trial="t", report_interval_s=60) as session:
        buffer = ludus.RemoteBuffer("b")
        shared(buffer)
        buffer.push(item(1), item(2)).wait(WAIT_S)
        numbers(buffer, 1)
        assert rings(session)
        assert session.hub is not None
        place = Path(session.hub.location.staging).parent
    assert not place.exists()
    with pytest.raises(WorkerFailed):
        buffer.push(item(3))


def test_a_closed_consumer_gives_back_what_it_was_given(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", size=8)
    shared(buffer)
    buffer.push(item(1), item(2), item(3)).wait(WAIT_S)
    assert numbers(buffer, 1) == [1]
    wait_until(lambda: buffer.stats()["taken"] == 2, what="the next item does not come of itself")
    buffer.close()
    other = ludus.RemoteBuffer("b")
    assert numbers(other, 1) == [3], "what was on its way to the one that closed is lost with it"
    wait_until(lambda: held(run) == 0, what="the hub still holds records")


def test_what_a_consumer_held_is_released_by_its_end_and_not_by_the_last_reference(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", size=8)
    shared(buffer)
    buffer.push(item(1), item(2)).wait(WAIT_S)
    consumer = run.client.wait(run.client.connect(), WAIT_S)
    header = {"op": "buffer.take", "name": "b", "count": 2, "maps": True}
    reply = run.client.wait(consumer.request(header, timeout_s=WAIT_S), WAIT_S)
    assert len(reply[-1][0]["places"]) == 2
    assert run.hub is not None
    referred_to = list(run.hub._buffers._lent.values())
    assert held(run) == len(referred_to[0]) == 2
    run.client.wait(consumer.close(), WAIT_S)
    wait_until(lambda: held(run) == 0, what="the hub still holds records")


def test_what_is_given_to_a_consumer_that_has_just_died_is_released_though_the_error_of_its_socket_is_kept(
    run: RunContext,
) -> None:
    buffer = ludus.RemoteBuffer("b", size=8)
    shared(buffer)
    consumer = run.client.wait(run.client.connect(), WAIT_S)
    header = {"op": "buffer.take", "name": "b", "count": 2, "maps": True, "id": 1}
    run.client.wait(consumer.send(header), WAIT_S)
    wait_until(lambda: on_hub(run, lambda hub: hub._buffers._buffers["b"].queue.waiting()), what="it does not want anything")
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go_on.wait(WAIT_S)

    assert run.hub is not None
    gc.disable()  # the error, the socket's reader and the frames of the hub are a cycle
    try:
        run.hub._loop.call_soon_threadsafe(hold)
        assert entered.wait(WAIT_S)
        buffer.push(item(1), item(2)).wait(WAIT_S)  # the hub hears of it first, and only then of the end of the consumer
        run.client.wait(consumer.close(), WAIT_S)
        go_on.set()
        wait_until(lambda: buffer.stats()["taken"] == 2, what="the dead consumer was given nothing: this tests nothing")
        wait_until(lambda: held(run) == 0, what=lambda: f"the hub still holds records: {accounts(run, 'b')}")
    finally:
        go_on.set()
        gc.enable()


def test_a_batch_for_which_there_is_no_memory_is_given_back(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ludus.RemoteBuffer("b", size=8, batch_size=2)
    shared(buffer)
    buffer.push(item(1), item(2)).wait(WAIT_S)

    def no_memory(*_: object) -> None:
        raise MemoryError("there is none")

    with monkeypatch.context() as patched:
        patched.setattr(np, "stack", no_memory)
        with pytest.raises(MemoryError, match="there is none"):
            buffer.take(WAIT_S)
    wait_until(lambda: held(run) == 0, what=lambda: f"the hub still holds records: {accounts(run, 'b')}")
    buffer.push(item(3), item(4)).wait(WAIT_S)
    assert [number(row) for row in buffer.take(WAIT_S)] == [3, 4]


def test_what_a_producer_that_lies_had_written_is_given_back_though_its_error_is_kept(
    run: RunContext, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = ludus.RemoteBuffer("b", size=8)
    ring, connection = shared(buffer), outbox(buffer)._connection
    assert connection is not None
    for _ in range(2):
        assert ring.reserve(1 << 16) is not None
        ring.commit()
    lie = {"op": "buffer.push", "name": "b", "sizes": [], "records": [0, 1, 10_000], "upto": 10_001}
    run.client.wait(connection.send(lie), WAIT_S)
    wait_until(
        lambda: any(isinstance(kept, Damaged) for record in caplog.records for kept in record.args or ()), what="it is not told"
    )
    wait_until(lambda: held(run) == 0, what=lambda: f"the hub still holds records: {accounts(run, 'b')}")
    wait_until(lambda: not rings(run), what="its ring is still there")


# -- processes that are killed


def test_what_a_killed_producer_had_pushed_is_there_and_then_its_ring_goes(busy: RunContext, tmp_path: Path) -> None:
    note = tmp_path / "ring"
    arguments = (busy.ticket(1), "dead", 10, str(note))
    producer = busy.supervisor.start("pushes-some", pushing.push_some_and_stay, *arguments)
    producer.wait_ready(60)
    ring = Path(note.read_text())
    assert ring.exists()
    producer.kill()
    buffer = ludus.RemoteBuffer("dead")
    assert numbers(buffer, 10) == [*range(10)]
    assert buffer.stats()["shared"] == 10
    wait_until(lambda: not ring.parent.exists(), what="the ring is still there")


@pytest.mark.long
def test_producers_and_consumers_are_killed_and_the_buffer_goes_on(busy: RunContext) -> None:
    ticket, start = busy.ticket(1), busy.supervisor.start
    buffer = ludus.RemoteBuffer("kills")
    ours = on_hub(busy, lambda hub: set(hub._peers))
    workers = [start(f"push-{i}", pushing.push_for_ever, ticket, "kills", 1000 * i, i == 0, restart=ALWAYS) for i in range(2)]
    workers += [start("take", pushing.take_for_ever, ticket, "kills", 4, restart=ALWAYS)]
    draw = random.Random(2)
    for _ in range(6):
        for worker in workers:
            worker.wait_ready(60)
        before = buffer.stats()["taken"]
        wait_until(lambda floor=before: buffer.stats()["taken"] > floor, what="nothing is taken any more")  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.05))
        draw.choice(workers).kill()
    assert buffer.stats()["shared"] > 0
    for worker in workers:
        worker.stop()
    wait_until(lambda: on_hub(busy, lambda hub: hub._peers <= ours), what="the hub has not noticed that they are dead")
    while waiting := buffer.stats()["waiting"]:
        assert len(numbers(buffer, waiting)) == waiting, "what is inside can be taken"
    wait_until(lambda: held(busy) == 0, what=lambda: f"the hub still holds records: {accounts(busy, 'kills')}")
    buffer.close()
    wait_until(lambda: len(rings(busy)) <= 1, what=f"rings of the dead are left: {rings(busy)}")


def test_damaged_records_are_an_error_and_a_lying_producer_is_disconnected(busy: RunContext) -> None:
    buffer = ludus.RemoteBuffer("rubbish")
    producer = busy.supervisor.start("rubbish", pushing.write_rubbish, busy.ticket(1), "rubbish")
    producer.wait_ready(60)
    with pytest.raises(Damaged, match="not an encoded tree"):
        buffer.take(WAIT_S)
    assert numbers(buffer, 1) == [7]
    lived = len(rings(busy))
    (busy.directory / "lie").touch()
    wait_until(lambda: len(rings(busy)) == lived - 1, what="who lies keeps its ring")
    buffer.push(item(8)).wait(WAIT_S)
    assert numbers(buffer, 1) == [8], "the others go on"
    producer.stop()
