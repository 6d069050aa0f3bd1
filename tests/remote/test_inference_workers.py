"""Inference in separate processes: the same results, even while workers die."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import ludus
from ludus.errors import UsageError, WorkerFailed
from ludus.gateway.agent import Seat, SeatAgent
from ludus.models.policy import Policy
from ludus.process.workers.supervisor import Process
from ludus.remote import inference_workers
from ludus.remote.context import RunContext
from tests.remote.parts import Scale, scaled

X = np.ones(3, np.float32)


def row(value: float) -> Any:
    return np.full(3, value, np.float32)


def alone(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def made(busy: RunContext, name: str, count: int = 2) -> tuple[ludus.RemoteModel, list[Process]]:
    model = ludus.RemoteModel(name, Scale(), forward_args=(X,), num_workers=count)
    processes = [busy.supervisor._processes[f"inference-{name}-{index}"] for index in range(count)]
    for process in processes:
        process.wait_ready(60)
    return model, processes


def stop(processes: list[Process]) -> None:
    for process in processes:
        process.stop()


def test_answers_come_from_the_workers_with_the_newest_weights(busy: RunContext) -> None:
    model, processes = made(busy, "remote")
    assert ludus.RemoteModel("remote")._shared_model.workers == model._shared_model.workers

    async def play(base: int) -> list[float]:
        outputs = await asyncio.gather(*(model.forward(row(base + i)) for i in range(40)))
        return [float(output[0]) for output in outputs]

    assert asyncio.run(play(20)) == [20.0 + i for i in range(40)]
    version = model.publish_weights(scaled(3))
    assert asyncio.run(play(20)) == [3 * (20.0 + i) for i in range(40)]
    output, seen = alone(model.forward_versioned(row(2)))
    assert seen == version
    assert output.flags.writeable
    np.testing.assert_array_equal(model(row(5)), row(15))

    async def inside() -> Any:
        return model(row(5))  # plain code on a running loop

    np.testing.assert_array_equal(asyncio.run(inside()), row(15))
    here = ludus.RemoteModel("remote", local_mode=True)
    assert here._shared_model.workers == []
    np.testing.assert_array_equal(here(row(5)), row(15))
    with ThreadPoolExecutor(4) as pool:
        assert [float(y[0]) for y in pool.map(lambda i: model(row(20 + i)), range(20))] == [3 * (20.0 + i) for i in range(20)]
    stop(processes)


def test_workers_may_be_given_to_a_model_that_exists(busy: RunContext) -> None:
    alone_before = ludus.RemoteModel("later", Scale())
    assert alone_before._shared_model.workers == []
    model = ludus.RemoteModel("later", num_workers=1)
    assert len(model._shared_model.workers) == 1
    np.testing.assert_array_equal(model(row(5)), row(5))
    stop([busy.supervisor._processes["inference-later-0"]])


def test_errors_reach_those_they_concern(busy: RunContext) -> None:
    model, processes = made(busy, "errors", 1)

    async def play() -> list[Any]:
        waiting = [model.forward(row(1)), model.forward(np.zeros(4, np.float32)), model.forward(row(2))]
        return list(await asyncio.gather(*waiting, return_exceptions=True))

    good, misfit, also = asyncio.run(play())
    assert isinstance(misfit, UsageError)
    np.testing.assert_array_equal(good, row(1))
    np.testing.assert_array_equal(also, row(2))
    with pytest.raises(ZeroDivisionError, match="thirteen"):
        alone(model.forward(row(13)))
    np.testing.assert_array_equal(model(row(4)), row(4))
    stop(processes)


def test_nothing_that_was_handed_out_is_written_again(busy: RunContext) -> None:
    model, processes = made(busy, "held", 1)
    held: list[tuple[int, Any]] = []

    async def play() -> None:
        for turn in range(50):
            values = [100 + 5 * turn + i for i in range(5)]
            held.extend(zip(values, await asyncio.gather(*(model.forward(row(v)) for v in values)), strict=True))

    asyncio.run(play())
    for value, output in held:
        np.testing.assert_array_equal(output, row(value))
    held[0][1][:] = -1
    np.testing.assert_array_equal(held[1][1], row(101))
    stop(processes)


def test_under_load_the_death_of_a_worker_loses_no_reply(busy: RunContext) -> None:
    model, processes = made(busy, "dying")
    deaths = 0

    async def session(number: int, until: float) -> int:
        asked = 0
        while time.monotonic() < until:
            value = 1000 + number * 100 + asked % 100
            output = await model.forward(row(value))
            assert float(output[0]) == value
            asked += 1
        return asked

    async def play() -> list[int]:
        nonlocal deaths
        sessions = [asyncio.ensure_future(session(i, time.monotonic() + 2.5)) for i in range(20)]
        for process in (processes[0], processes[1], processes[0]):
            await asyncio.sleep(0.6)
            if process.state == "ready" and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
                deaths += 1
        return list(await asyncio.gather(*sessions))

    asked = asyncio.run(play())
    assert deaths >= 2
    assert min(asked) > 10
    for process in processes:
        process.wait_ready(30)
    np.testing.assert_array_equal(model(row(7)), row(7))
    stop(processes)


def test_a_request_that_kills_two_workers_is_not_tried_on_a_third(busy: RunContext) -> None:
    model, processes = made(busy, "poison")
    before = [process.incarnation for process in processes]
    with pytest.raises(WorkerFailed, match="Two inference workers died"):
        alone(model.forward(row(666)))
    np.testing.assert_array_equal(model(row(1)), row(1))
    for process in processes:
        process.wait_ready(30)
    assert sum(process.incarnation for process in processes) == sum(before) + 2
    stop(processes)


def test_unreachable_workers_are_an_error_for_the_caller(busy: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processes = made(busy, "absent", 1)
    np.testing.assert_array_equal(model(row(1)), row(1))
    stop(processes)
    monkeypatch.setattr(inference_workers, "UNREACHABLE_S", 0.2)
    with pytest.raises(WorkerFailed, match="could be reached"):
        alone(model.forward(row(1)))
    with pytest.raises(WorkerFailed, match="could be reached"):
        model(row(1))


def test_a_policy_decides_through_its_workers(busy: RunContext) -> None:
    policy = Policy(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(3))
    model = ludus.RemoteModel("policy", policy, num_workers=1)

    async def play() -> None:
        agent = SeatAgent(Seat(model))
        assert await agent.act(np.zeros(3, np.float32), mask=[False, False, True]) == 2
        decision = await model.decide(np.zeros(3, np.float32))
        assert decision.version == 1
        assert 0 <= int(decision.action) < 3

    asyncio.run(play())
    busy.supervisor._processes["inference-policy-0"].stop()


def test_structures_survive_the_wire() -> None:
    structure = (
        "tuple",
        (("tuple", ((np.dtype(np.float32), (2, 3)),)), ("dict", (("a", ("none",)), ("b", (np.dtype(np.bool_), ()))))),
    )
    assert inference_workers.from_wire(inference_workers.to_wire(structure)) == structure
