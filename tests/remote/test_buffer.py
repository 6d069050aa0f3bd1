"""RemoteBuffer: each item is taken once, every drop is counted, and batches own their memory."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ludus
from ludus.core.metrics import read_jsonl
from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.remote import buffer as buffers
from ludus.remote.context import RunContext


def item(value: float) -> dict[str, Any]:
    return {"x": np.full((2, 3), value, np.float32), "pair": (value, np.int64(value)), "flag": value > 1}


def test_a_batch_is_a_stack_of_items_in_order(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", size=10, batch_size=3)
    for i in range(6):
        buffer.push(item(i))
    for start in (0, 3):
        batch = next(buffer)
        assert batch["x"].shape == (3, 2, 3)
        assert batch["x"].dtype == np.float32
        assert batch["x"][:, 0, 0].tolist() == [start, start + 1, start + 2]
        assert batch["pair"][1].tolist() == [start, start + 1, start + 2]
        assert batch["flag"].dtype == np.bool_


def test_single_items_come_as_they_were(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b")
    buffer.push(item(7))
    taken = buffer.take(10)
    assert taken["x"].shape == (2, 3)
    assert taken["x"].flags.writeable
    assert float(taken["pair"][0]) == 7


def test_batches_never_share_memory_with_each_other(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", size=64, batch_size=4)
    held = []
    for turn in range(10):
        for i in range(4):
            buffer.push(item(4 * turn + i))
        held.append(buffer.take(10))
    for turn, batch in enumerate(held):
        assert batch["x"][:, 1, 2].tolist() == [4 * turn + i for i in range(4)]
    held[0]["x"][:] = -1
    assert (held[1]["x"] >= 0).all()


def test_the_oldest_are_dropped_and_counted_in_stats_and_as_a_metric(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", size=4)
    buffer.push(*range(10)).wait(10)
    assert buffer.take(10) == 6
    stats = buffer.stats()
    assert (stats["size"], stats["pushed"], stats["dropped"]) == (4, 10, 6)
    run.close()
    assert read_jsonl(run.directory / "metrics.jsonl")[-1]["buffer/b/dropped"] == 6


def test_waiting_instead_of_dropping_waits_for_room(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", size=2)
    buffer.push(0.0, 1.0).wait(10)
    pushed = buffer.push(2.0, 3.0, drop=False)
    with pytest.raises(TimeoutError):
        pushed.wait(0.1)
    assert not pushed.done
    taken = [float(buffer.take(10)) for _ in range(4)]
    pushed.wait(10)
    assert taken == [0, 1, 2, 3]
    assert buffer.stats()["dropped"] == 0


def test_a_push_may_be_awaited_and_never_blocks_the_loop(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", size=2)

    async def play() -> int:
        turns = 0
        await buffer.push(0.0, 1.0)
        waiting = asyncio.ensure_future(_awaited(buffer.push(2.0, drop=False)))
        while not waiting.done():
            turns += 1
            if turns == 50:
                threading.Thread(target=buffer.take, args=(10,)).start()
            await asyncio.sleep(0.001)
        return turns

    assert asyncio.run(play()) >= 50


async def _awaited(pushed: buffers.Pushed) -> None:
    await pushed


def test_pushes_that_cannot_leave_are_dropped_oldest_first_and_counted(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "OUTBOX_PUSHES", 10)
    buffer = ludus.RemoteBuffer("b", size=1000)
    buffer.push(-1.0).wait(10)
    entered, go_on = threading.Event(), threading.Event()

    async def hold() -> None:
        entered.set()
        go_on.wait(10)

    run.client.submit(hold())  # the client's loop, and with it everything that leaves this process
    assert entered.wait(10)
    last = None
    for i in range(50):
        last = buffer.push(float(i))
    go_on.set()
    assert last is not None
    last.wait(10)  # it has left this process; who counts it is another
    deadline = time.monotonic() + 20
    while (stats := buffer.stats())["pushed"] < 51 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert stats["pushed"] == 51
    assert stats["dropped"] + stats["waiting"] == 51
    assert stats["dropped"] >= 38
    assert float(buffer.take(10)) == -1
    taken = [float(buffer.take(10)) for _ in range(stats["waiting"] - 1)]
    assert taken == sorted(taken)
    assert taken[-1] == 49


def test_several_consumers_share_the_items(run: RunContext) -> None:
    producer = ludus.RemoteBuffer("b", size=1000)
    for i in range(400):
        producer.push(float(i), drop=False)
    consumers = [ludus.RemoteBuffer("b", batch_size=5) for _ in range(4)]

    def consume(buffer: ludus.RemoteBuffer) -> list[float]:
        return [x for _ in range(18) for x in buffer.take(10).tolist()]

    with ThreadPoolExecutor(4) as pool:
        taken = [x for part in pool.map(consume, consumers) for x in part]
    assert len(taken) == len(set(taken)) == 360


def test_iteration_ends_when_the_run_does(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", batch_size=2)
    buffer.push(1.0, 2.0)
    seen: list[Any] = []
    consumer = threading.Thread(target=lambda: seen.extend(buffer))
    consumer.start()
    deadline = time.monotonic() + 10
    while not seen and time.monotonic() < deadline:
        time.sleep(0.001)
    run.close()
    consumer.join(10)
    assert not consumer.is_alive()
    assert len(seen) == 1


def test_a_closed_handle_ends_its_own_iteration_alone(run: RunContext) -> None:
    one, two = ludus.RemoteBuffer("b"), ludus.RemoteBuffer("b")
    one.close()
    assert list(one) == []
    two.push(5.0)
    assert two.take(10) == 5.0


def test_a_take_that_times_out_loses_nothing(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", batch_size=2)
    buffer.push(1.0)
    with pytest.raises(TimeoutError, match="buffer 'b'"):
        buffer.take(0.05)
    buffer.push(2.0)
    assert buffer.take(10).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("bad", ["text", object(), None, {"a": [[1], [2, 3]]}, {"a": np.array(["x"])}, {1: np.zeros(2), "1": 1}])
def test_what_is_no_item_is_refused_before_it_leaves(run: RunContext, bad: Any) -> None:
    buffer = ludus.RemoteBuffer("b")
    with pytest.raises(UsageError, match="buffer 'b'"):
        buffer.push(bad)
    assert buffer.stats()["pushed"] == 0


def test_items_that_do_not_stack_are_explained_and_the_next_batch_is_fine(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", batch_size=2)
    buffer.push({"x": np.zeros(2)}, {"x": np.zeros(3)}, {"x": np.ones(2)}, {"x": np.ones(2)})
    with pytest.raises(LudusError, match=r"float64\[2\]"):
        next(buffer)
    assert next(buffer)["x"].shape == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "holds nothing"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"size": 4, "batch_size": 5}, "does not fit"),
        ({"name": "a/b"}, "plain name"),
    ],
)
def test_wrong_sizes_and_names_are_refused(run: RunContext, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ludus.RemoteBuffer(**({"name": "b"} | arguments))


def test_its_size_is_given_once(run: RunContext) -> None:
    ludus.RemoteBuffer("b", size=7)
    assert ludus.RemoteBuffer("b").stats()["size"] == 7
    ludus.RemoteBuffer("b", size=7)
    with pytest.raises(UsageError, match="exists with size 7, not 8"):
        ludus.RemoteBuffer("b", size=8)


def test_the_default_size_is_512(run: RunContext) -> None:
    assert ludus.RemoteBuffer("b").stats()["size"] == 512


def test_an_item_that_no_frame_can_carry_is_refused(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "MAX_BODY", 1000)
    with pytest.raises(UsageError, match="larger than 1000"):
        ludus.RemoteBuffer("b").push(np.zeros(1000))


def test_a_handle_travels_as_its_name(run: RunContext) -> None:
    again = pickle.loads(pickle.dumps(ludus.RemoteBuffer("b", batch_size=2)))
    ludus.RemoteBuffer("b").push(1.0, 2.0)
    assert again.take(10).tolist() == [1.0, 2.0]


def test_a_waiting_offer_fails_when_the_run_ends(run: RunContext) -> None:
    buffer = ludus.RemoteBuffer("b", size=1)
    buffer.push(1.0).wait(10)
    pushed = buffer.push(2.0, drop=False)
    with pytest.raises(TimeoutError):
        pushed.wait(0.05)
    run.close()
    with pytest.raises(WorkerFailed):
        pushed.wait(10)


def test_large_items_cross_whole(run: RunContext, tmp_path: Path) -> None:
    buffer = ludus.RemoteBuffer("b", size=4, batch_size=2)
    big = np.random.default_rng(0).integers(0, 255, (6, 1 << 20), np.uint8)
    buffer.push(big, big[::-1])
    batch = buffer.take(30)
    np.testing.assert_array_equal(batch[0], big)
    np.testing.assert_array_equal(batch[1], big[::-1])
