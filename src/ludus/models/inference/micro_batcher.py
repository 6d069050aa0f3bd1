"""Micro-batching: whatever many sessions ask for in one turn of the event loop is answered by one forward pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

Row = TypeVar("Row")
Out = TypeVar("Out")


class Resumed(Protocol):
    def resume(self) -> None: ...


class Answer(asyncio.Future[Any]):
    """The result of one row: a future that anyone may await.

    Who runs a coroutine by hand and finds it waiting for an Answer may set `waiter`: it is resumed the moment the batch is
    done, without another turn of the loop.
    """

    waiter: Resumed | None = None


class Batcher(Generic[Row, Out]):
    """Collects rows until the loop has handled every event that is ready, then runs them together.

    There is no timer: an idle server answers a lone request at once, a busy one waits as long as every turn of the loop
    brings more rows. `run` gets a list that nobody else holds and returns one result per row; when it raises, every caller
    gets that error.
    """

    def __init__(self, run: Callable[[list[Row]], Sequence[Out]], max_batch_size: int = 256) -> None:
        self._run, self._max = run, max_batch_size
        self._rows: list[Row] = []
        self._waiting: list[Answer] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looked = 0  # how many rows there were a turn ago
        self._last = 0
        self.batches = self.answered = 0
        self.sizes = [0] * 32
        """How many batches there were of below 2^k rows, and not below 2^(k-1) …"""
        self.seconds = [0.0] * 32
        """… and how long they took."""

    def submit(self, row: Row) -> asyncio.Future[Out]:
        """On the event loop only. A caller that is cancelled leaves the batch unharmed."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        answer = Answer(loop=loop)
        if not self._rows:
            loop.call_soon(self._flush)
        self._rows.append(row)
        self._waiting.append(answer)
        return answer

    def close(self) -> None:
        """Let go of what runs the batches; nobody asks any more. (Else the two would keep each other alive.)"""
        self._run = _closed

    def _flush(self) -> None:
        rows, waiting = self._rows, self._waiting
        assert self._loop is not None
        alone = len(rows) == 1 == self._last
        if self._looked < len(rows) < self._max and not alone:
            self._looked = len(rows)
            self._loop.call_soon(self._flush)
            return
        self._looked = 0
        if len(rows) > self._max:
            self._rows, self._waiting = rows[self._max :], waiting[self._max :]
            rows, waiting = rows[: self._max], waiting[: self._max]
            self._loop.call_soon(self._flush)
        else:
            self._rows, self._waiting = [], []
        self._last = len(rows)
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
        except Exception as error:
            if isinstance(error, StopIteration):  # which no future can carry
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


def _closed(rows: list[Any]) -> Sequence[Any]:
    raise RuntimeError("This model has been let go.")
