"""Micro-batching: all requests of one turn of the event loop are answered by one forward pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

Row = TypeVar("Row")
Out = TypeVar("Out")


class Resumable(Protocol):
    def resume(self) -> None: ...


class BatchFuture(asyncio.Future[Any]):
    """The result of one row: a future that any coroutine may await.

    Code that drives a coroutine by hand may set `waiter` when it waits for a BatchFuture: it is resumed as soon as the batch is done,
    without another turn of the loop.
    """

    waiter: Resumable | None = None


class MicroBatcher(Generic[Row, Out]):
    """Collects rows until the loop has handled all ready events, then runs them together.

    There is no timer: an idle server answers a single request at once; a busy one waits while every turn of the loop brings more rows.
    `run` owns the list that it gets and returns one result per row; if it raises, every caller gets that error.
    """

    def __init__(self, run: Callable[[list[Row]], Sequence[Out]], max_batch_size: int = 256) -> None:
        self._run, self._max = run, max_batch_size
        self._rows: list[Row] = []
        self._waiting: list[BatchFuture] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rows_last_turn = 0  # number of rows one turn ago
        self._last_batch_size = 0
        self.batches = self.answered = 0
        self.sizes = [0] * 32
        """Number of batches with 2^(k-1) ≤ rows < 2^k …"""
        self.seconds = [0.0] * 32
        """… and their total time in seconds."""

    def submit(self, row: Row) -> asyncio.Future[Out]:
        """Add a row; call on the event loop only. A cancelled caller does not affect the batch."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        answer = BatchFuture(loop=loop)
        if not self._rows:
            loop.call_soon(self._flush)
        self._rows.append(row)
        self._waiting.append(answer)
        return answer

    def close(self) -> None:
        """Drop the reference to `run`, which breaks a reference cycle. No rows may be submitted afterwards."""

        def raise_closed(rows: list[Row]) -> Sequence[Out]:
            raise RuntimeError("This model has been closed.")

        self._run = raise_closed

    def _flush(self) -> None:
        rows, waiting = self._rows, self._waiting
        assert self._loop is not None
        alone = len(rows) == 1 == self._last_batch_size
        if self._rows_last_turn < len(rows) < self._max and not alone:
            self._rows_last_turn = len(rows)
            self._loop.call_soon(self._flush)
            return
        self._rows_last_turn = 0
        if len(rows) > self._max:
            self._rows, self._waiting = rows[self._max :], waiting[self._max :]
            rows, waiting = rows[: self._max], waiting[: self._max]
            self._loop.call_soon(self._flush)
        else:
            self._rows, self._waiting = [], []
        self._last_batch_size = len(rows)
        self.batches += 1
        self.answered += len(rows)
        began = time.perf_counter()
        try:
            results = self._run(rows)
            size = len(rows).bit_length()
            self.sizes[size] += 1
            self.seconds[size] += time.perf_counter() - began
            if len(results) != len(rows):
                raise ValueError(f"A batch of {len(rows)} rows came back with {len(results)} results.")
        except Exception as error:  # passed on to every caller
            if isinstance(error, StopIteration):  # a future cannot carry it
                error = RuntimeError(f"The model raised {error!r}.")
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
                    if answer.waiter is not None:
                        answer.waiter.resume()
            return
        for answer, result in zip(waiting, results, strict=True):
            if not answer.done():
                answer.set_result(result)
                if answer.waiter is not None:
                    answer.waiter.resume()
