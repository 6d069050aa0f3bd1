"""This process's connection to the hub: an event loop in its own thread, with RPC connections on it.

Plain code calls and waits, with a time-out; coroutines await; neither blocks the caller's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ludus.distributed.frames import Body, Header
from ludus.distributed.hub.rpc import RpcConnection
from ludus.distributed.hub.server import HubLocation
from ludus.distributed.hub.weight_transfer import upload
from ludus.errors import LudusError, WorkerFailed

T = TypeVar("T")

CALL_S = 60.0
FLUSH_S = 0.5
HUB = "The hub of this run"


class HubConnection:
    """Thread-safe. Not for a fork of the process, which makes its own."""

    def __init__(self, location: HubLocation) -> None:
        self.location = location
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ludus-client", daemon=True)
        self._thread.start()
        self._closed = False
        self._control: RpcConnection | None = None
        self._metrics = MetricSums()
        self._flusher: Future[None] | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._control = self.wait(self.connect(), CALL_S)
            self.call({"op": "hello", "node": location.node}, timeout_s=10.0)
            undo.pop_all()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def connect(self) -> RpcConnection:
        """Open another connection to the hub, on `self.loop`."""
        return await RpcConnection.open(self.location.socket, HUB, token_file=self.location.token_file)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the client's loop."""
        if self._closed:
            work.close()
            raise WorkerFailed("This process has left its run.", "Call ludus.init to open it, or another one.")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run a coroutine on the client's loop and block this thread until it is done. Raises TimeoutError."""
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()  # after a time-out or an interrupt; else it is done

    def call(self, header: Header, *parts: Body, timeout_s: float = CALL_S) -> Header:
        """Send a request to the hub. Raises the hub's error; WorkerFailed when it is gone or does not reply."""
        return self.wait(self._request(header, *parts, timeout_s=timeout_s), timeout_s + 5.0)

    async def _request(self, header: Header, *parts: Body, timeout_s: float) -> Header:
        assert self._control is not None
        try:
            reply = await self._control.request(header, *parts, timeout_s=timeout_s)
        except TimeoutError as error:
            message = f"{HUB} did not reply to {header['op']} within {timeout_s:g} s."
            raise WorkerFailed(message, "Its process may be suspended or overloaded.") from error
        return reply[-1][0]

    @property
    def lost(self) -> Exception | None:
        """Set when the hub is gone."""
        return self._control.lost if self._control is not None else None

    def check(self) -> None:
        """Raises WorkerFailed when the hub is gone."""
        if self.lost is not None:
            raise self.lost

    def upload(self, data: bytes) -> str:
        """Stage bytes at the hub from another machine; returns the name of the file. Raises StoreFull, WorkerFailed."""
        return self.wait(upload(functools.partial(self._request, timeout_s=CALL_S), data), None)

    # -- metrics

    def metric(self, name: str, value: float) -> None:
        """Never blocks: numbers are collected here and sent in the background."""
        self._metrics.add(name, value)
        if self._flusher is None:
            with self._metrics.lock:
                if self._flusher is None:
                    self._flusher = self.submit(self._flush_periodically())

    async def _flush_periodically(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self._flush()

    async def _flush(self) -> None:
        entries = self._metrics.take()
        if entries and self._control is not None and self._control.lost is None:
            await self._control.request({"op": "metric", "entries": entries}, timeout_s=CALL_S)

    def flush(self, timeout_s: float = 5.0) -> None:
        """Send the numbers reported so far to the hub. Raises WorkerFailed, TimeoutError."""
        self.wait(self._flush(), timeout_s)

    def close(self) -> None:
        """Send the remaining metrics; pending requests then raise WorkerFailed. Idempotent."""
        if self._closed:
            return
        with contextlib.suppress(LudusError, OSError):  # the hub may be gone, or not reply in time
            self.flush(2.0)
        self._closed = True
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close_connections(), self.loop).result(5.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)
        if not self.loop.is_running():
            self.loop.close()

    async def _close_connections(self) -> None:
        if self._control is not None:
            await self._control.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class MetricSums:
    """Sums and counts by name between two flushes. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, value: float) -> None:
        with self.lock:
            total, count = self._sums.get(name, (0.0, 0))
            if name == "timesteps":  # the highest value, not a mean
                self._sums[name] = max(total, value), 1
            else:
                self._sums[name] = total + value, count + 1

    def take(self) -> list[tuple[str, float, int]]:
        with self.lock:
            sums, self._sums = self._sums, {}
        return [(name, total, count) for name, (total, count) in sums.items()]
