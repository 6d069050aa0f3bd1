"""Micro-batching for the stacks that have none: what is queued in this turn of the event loop shares one forward pass."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Row = TypeVar("Row")


class Batcher(Generic[Row]):
    def __init__(self, run: Callable[[Sequence[Row]], list[bytes]]) -> None:
        self._run = run
        self._bodies: list[Row] = []
        self._waiting: list[asyncio.Future[bytes]] = []

    def submit(self, body: Row) -> asyncio.Future[bytes]:
        loop = asyncio.get_running_loop()
        if not self._bodies:
            loop.call_soon(self._flush)
        future: asyncio.Future[bytes] = loop.create_future()
        self._bodies.append(body)
        self._waiting.append(future)
        return future

    def _flush(self) -> None:
        bodies, waiting = self._bodies, self._waiting
        self._bodies, self._waiting = [], []
        for future, result in zip(waiting, self._run(bodies), strict=True):
            if not future.done():
                future.set_result(result)


def spare_the_collector() -> None:
    """What is loaded by now stays: full collections need not visit it. With torch that is most of a tuned server's p99."""
    gc.collect()
    gc.freeze()
