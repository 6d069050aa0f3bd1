"""Micro-batching: who is answered together, in which order, and what one caller's trouble means for the others."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from ludus.models.inference.micro_batcher import BatchFuture, MicroBatcher

Batches = list[list[int]]


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        async def bounded() -> None:
            async with asyncio.timeout(10):
                await test()

        uvloop.run(bounded())

    return run


def doubling(max_batch_size: int = 256) -> tuple[MicroBatcher[int, int], Batches]:
    batches: Batches = []

    def run(rows: list[int]) -> list[int]:
        batches.append(list(rows))
        return [2 * row for row in rows]

    return MicroBatcher(run, max_batch_size), batches


@on_loop
async def test_requests_of_one_turn_are_one_batch_with_a_result_each() -> None:
    batcher, batches = doubling()
    assert await asyncio.gather(*(batcher.submit(row) for row in range(50))) == [2 * row for row in range(50)]
    assert batches == [list(range(50))]
    assert (batcher.batches, batcher.answered) == (1, 50)


@on_loop
async def test_a_lone_request_waits_for_turns_of_the_loop_and_not_for_time() -> None:
    batcher, batches = doubling()
    for row in range(3):
        answer = batcher.submit(row)
        for _ in range(3):  # an idle loop turns at once
            await asyncio.sleep(0)
        assert answer.result() == 2 * row
    assert batches == [[0], [1], [2]]


@on_loop
async def test_the_second_lone_request_in_a_row_waits_for_one_turn_only() -> None:
    batcher, _ = doubling()
    await batcher.submit(1)
    answer = batcher.submit(2)
    await asyncio.sleep(0)
    assert answer.done()


@on_loop
async def test_a_batch_grows_as_long_as_every_turn_brings_rows() -> None:
    batcher, batches = doubling()
    loop = asyncio.get_running_loop()
    answers = [batcher.submit(0), batcher.submit(1)]

    def more(row: int) -> None:
        answers.append(batcher.submit(row))
        if row < 5:
            loop.call_soon(more, row + 1)

    loop.call_soon(more, 2)
    while len(answers) < 6:
        await asyncio.sleep(0)
    assert await asyncio.gather(*answers) == [0, 2, 4, 6, 8, 10]
    assert batches[0][:2] == [0, 1]
    assert len(batches) < 6


@on_loop
async def test_too_many_rows_are_split_and_none_is_lost() -> None:
    batcher, batches = doubling(max_batch_size=8)
    assert await asyncio.gather(*(batcher.submit(row) for row in range(21))) == [2 * row for row in range(21)]
    assert [len(batch) for batch in batches] == [8, 8, 5]
    assert [row for batch in batches for row in batch] == list(range(21))


@on_loop
async def test_a_batch_size_of_one_is_possible() -> None:
    batcher, batches = doubling(max_batch_size=1)
    assert await asyncio.gather(*(batcher.submit(row) for row in range(3))) == [0, 2, 4]
    assert batches == [[0], [1], [2]]


@on_loop
async def test_a_caller_that_is_cancelled_leaves_the_batch_unharmed() -> None:
    batcher, batches = doubling()

    async def ask(row: int) -> int:
        return await batcher.submit(row)

    tasks = [asyncio.create_task(ask(row)) for row in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [found[0], found[2], found[3]] == [0, 4, 6]
    assert isinstance(found[1], asyncio.CancelledError)
    assert sum(map(len, batches)) == 4


@on_loop
async def test_an_error_reaches_every_caller_of_that_batch_only() -> None:
    def run(rows: list[int]) -> list[int]:
        if 13 in rows:
            raise ArithmeticError("the model failed")
        return rows

    batcher = MicroBatcher(run)
    found = await asyncio.gather(*(batcher.submit(row) for row in (1, 13, 2)), return_exceptions=True)
    assert [str(error) for error in found] == ["the model failed"] * 3
    assert all(isinstance(error, ArithmeticError) for error in found)
    assert [await answer for answer in (batcher.submit(1), batcher.submit(2))] == [1, 2]


@pytest.mark.parametrize("results", [[], [1], [1, 2, 3]])
def test_a_wrong_number_of_results_is_an_error_for_every_caller(results: Sequence[int]) -> None:
    @on_loop
    async def check() -> None:
        batcher: MicroBatcher[int, int] = MicroBatcher(lambda rows: results)
        found = await asyncio.gather(batcher.submit(1), batcher.submit(2), return_exceptions=True)
        assert [str(error) for error in found] == [f"A batch of 2 rows came back with {len(results)} results."] * 2

    check()


@on_loop
async def test_rows_that_come_while_a_batch_runs_are_in_the_next() -> None:
    later: list[asyncio.Future[int]] = []
    batches: Batches = []

    def run(rows: list[int]) -> list[int]:
        batches.append(rows)
        if rows == [1]:
            later.append(batcher.submit(2))
        return rows

    batcher = MicroBatcher(run)
    assert await batcher.submit(1) == 1
    assert await later[0] == 2
    assert batches == [[1], [2]]


@on_loop
async def test_the_list_that_a_batch_gets_is_its_own() -> None:
    kept: Batches = []

    def run(rows: list[int]) -> list[int]:
        kept.append(rows)
        return rows

    batcher = MicroBatcher(run, max_batch_size=2)
    await asyncio.gather(*(batcher.submit(row) for row in range(5)))
    await batcher.submit(9)
    assert kept == [[0, 1], [2, 3], [4], [9]]


class Waiter:
    def __init__(self, answer: asyncio.Future[int]) -> None:
        assert isinstance(answer, BatchFuture)
        self.answer, self.seen = answer, list[Any]()
        answer.waiter = self

    def resume(self) -> None:
        assert self.answer.done()
        self.seen.append(self.answer.exception() or self.answer.result())


@on_loop
async def test_a_waiter_is_resumed_once_with_its_result_or_error() -> None:
    batcher: MicroBatcher[int, float] = MicroBatcher(lambda rows: [1 / row for row in rows])
    good = Waiter(batcher.submit(2))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert good.seen == [0.5]
    bad = Waiter(batcher.submit(0))  # type: ignore[arg-type]
    left = batcher.submit(4)
    left.cancel()
    await asyncio.sleep(0.01)
    assert [type(error) for error in bad.seen] == [ZeroDivisionError]


@given(st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=8), st.integers(1, 5))
def test_any_arrival_of_rows_gets_every_row_its_own_answer(turns: list[list[int]], max_batch_size: int) -> None:
    async def main() -> None:
        batcher, batches = doubling(max_batch_size)
        asked: list[tuple[int, asyncio.Future[int]]] = []
        for rows in turns:
            asked += [(row, batcher.submit(row)) for row in rows]
            await asyncio.sleep(0)
        assert [await answer for _, answer in asked] == [2 * row for row, _ in asked]
        assert [row for batch in batches for row in batch] == [row for row, _ in asked]
        assert all(len(batch) <= max_batch_size for batch in batches)

    uvloop.run(main())
