"""Micro-batching: whatever many sessions ask for in one turn of the event loop is answered by one forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Row = TypeVar("Row")
Out = TypeVar("Out")


class Batcher(Generic[Row, Out]):
    """Collects rows until the loop has handled every event that is ready, then runs them together.

    There is no timer: an idle server answers a lone request at once, a busy one finds more rows waiting each time. `run`
    gets a list that nobody else holds and returns one result per row; when it raises, every caller gets that error.
    """

    def __init__(self, run: Callable[[list[Row]], Sequence[Out]], max_batch_size: int = 256) -> None:
        self._run, self._max = run, max_batch_size
        self._rows: list[Row] = []
        self._waiting: list[asyncio.Future[Out]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.batches = self.answered = 0

    def submit(self, row: Row) -> asyncio.Future[Out]:
        """On the event loop only. A caller that is cancelled leaves the batch unharmed."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Out] = loop.create_future()
        if not self._rows:
            loop.call_soon(self._flush)
        self._rows.append(row)
        self._waiting.append(future)
        return future

    def _flush(self) -> None:
        rows, waiting = self._rows, self._waiting
        if len(rows) > self._max:
            self._rows, self._waiting = rows[self._max :], waiting[self._max :]
            rows, waiting = rows[: self._max], waiting[: self._max]
            assert self._loop is not None
            self._loop.call_soon(self._flush)
        else:
            self._rows, self._waiting = [], []
        self.batches += 1
        self.answered += len(rows)
        try:
            results = self._run(rows)
            if len(results) != len(rows):
                raise ValueError(f"A batch of {len(rows)} rows came back with {len(results)} results.")
        except Exception as error:
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        for future, result in zip(waiting, results, strict=True):
            if not future.done():
                future.set_result(result)
