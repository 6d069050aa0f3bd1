"""RemoteBuffer: a named queue of the run. Actors push what they saw; learners iterate over batches of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np

from ludus import tree
from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.remote.session import Session, current
from ludus.runtime.wire import MAX_BODY, Connection, Header, Reply, split
from ludus.tree import Tree

OUTBOX_PUSHES = 1024
OFFERS = 4096
"""Pushes of one process with drop=False that may wait for room."""
OUTBOX_BYTES = 1 << 29
"""What may wait in this process to be sent; beyond it the oldest is dropped, and counted."""
_LOOK_S = 0.1


class Pushed:
    """What `push` returns: nothing needs to be done with it. `await` it, or call `wait`, to know that the items are gone.

    With `drop=False` that is when all of them are inside the buffer; else when they have left this process.
    """

    __slots__ = ("_future",)

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.wrap_future(self._future).__await__()

    def wait(self, timeout_s: float) -> None:
        """Raises TimeoutError; WorkerFailed when the hub is gone."""
        self._future.result(timeout_s)

    @property
    def done(self) -> bool:
        return self._future.done()


class _Push:
    __slots__ = ("drop", "future", "items", "size")

    def __init__(self, items: list[bytes], drop: bool) -> None:
        self.items, self.drop = items, drop
        self.size = sum(len(item) for item in items)
        self.future: Future[None] = Future()


class Outbox:
    """Pushes of this process to one buffer, sent in order by the client's loop. `put` never blocks."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name
        self._lock = threading.Lock()
        self._waiting: deque[_Push] = deque()
        self._bytes = self._lost = self._offered = 0
        self._sending = False
        self._error: Exception | None = None
        self._connection: Connection | None = None

    def put(self, items: list[bytes], drop: bool) -> Pushed:
        push = _Push(items, drop)
        with self._lock:
            if self._error is not None:
                raise self._error
            if not drop and self._offered >= OFFERS:
                raise UsageError(
                    f"{self._offered} pushes to {self._name!r} with drop=False wait for room.", "Await each before the next."
                )
            if not drop:
                self._offered += 1
                push.future.add_done_callback(self._answered)
            self._waiting.append(push)
            self._bytes += push.size
            self._make_room()
            start = not self._sending
            self._sending = True
        if start:
            try:
                self._session.client.submit(self._send_all())
            except WorkerFailed as error:  # this process has left the run
                self._fail(error)
                raise
        return Pushed(push.future)

    def _answered(self, _: Future[None]) -> None:
        self._offered -= 1

    def _make_room(self) -> None:
        """Drop the oldest that may be dropped. Pushes that wait for room are held by those who wait for them."""
        droppable = [push for push in self._waiting if push.drop] if self._full() else []
        for push in droppable:
            if not self._full():
                break
            self._waiting.remove(push)
            self._bytes -= push.size
            self._lost += len(push.items)
            push.future.set_result(None)

    def _full(self) -> bool:
        return len(self._waiting) > OUTBOX_PUSHES or self._bytes > OUTBOX_BYTES

    async def _send_all(self) -> None:
        try:
            if self._connection is None:
                self._connection = await self._session.client.connect()
            while True:
                with self._lock:
                    if not self._waiting:
                        self._sending = False
                        return
                    push = self._waiting.popleft()
                    self._bytes -= push.size
                    lost, self._lost = self._lost, 0
                await self._send(self._connection, push, lost)
        except Exception as error:  # the hub is gone
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Whoever waits, and whoever pushes next, is told."""
        with self._lock:
            self._error, self._sending = error, False
            failed, self._waiting = self._waiting, deque()
        for push in failed:
            push.future.set_exception(error)

    async def _send(self, connection: Connection, push: _Push, lost: int) -> None:
        header: Header = {"op": "buffer.push" if push.drop else "buffer.offer", "name": self._name}
        header |= {"sizes": [len(item) for item in push.items], "lost": lost}
        try:
            if push.drop:
                await connection.send(header, *push.items)
                push.future.set_result(None)
            else:
                reply = connection.start(header, *push.items)
                reply.add_done_callback(lambda done: _settle(done, push.future))
                await connection.flushed()
        except Exception as error:
            if not push.future.done():
                push.future.set_exception(error)
            raise


def _settle(done: asyncio.Future[Reply], future: Future[None]) -> None:
    if future.done():
        return
    if done.cancelled() or (done.exception() is None and done.result()[-1][0].get("closed")):
        future.set_exception(WorkerFailed("The run ended before these items were inside the buffer."))
    elif error := done.exception():
        future.set_exception(error)
    else:
        future.set_result(None)


class RemoteBuffer:
    """A queue with a name: made by whoever comes first, found by everybody else in the run.

        buffer = ludus.RemoteBuffer("replay", size=512, batch_size=8)
        buffer.push({"observation": image, "reward": 1.0})      # from an actor; never blocks
        for batch in buffer:                                    # in a learner: arrays [8, …], in memory of their own
            …

    It holds `size` items (512 unless somebody says otherwise). An item is an array or number, or dicts and tuples of them. When
    it is full, `push` drops the oldest item, and counts it (`stats()`, and the metric `buffer/<name>/dropped`); `push(…,
    drop=False)` waits instead. Each item goes to one consumer. Without a `batch_size` iteration yields single items.
    """

    def __init__(self, name: str, size: int | None = None, batch_size: int | None = None) -> None:
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise UsageError(f"batch_size={batch_size!r} is not a positive whole number.")
        self.name, self.batch_size = name, batch_size
        self._consumer: _Consumer | None = None
        self._lock = threading.Lock()
        self._attached: tuple[Session, Outbox] | None = None
        held = self._open(size)
        if batch_size is not None and batch_size > held:
            raise UsageError(f"batch_size={batch_size} does not fit into the buffer {name!r} of size {held}.", "Make it larger.")

    def __reduce__(self) -> tuple[Any, ...]:
        """As an argument to another process of the run, a buffer is its name; it is opened when it is first used there."""
        return _unattached, (self.name, self.batch_size)

    def __repr__(self) -> str:
        return f"RemoteBuffer({self.name!r}, batch_size={self.batch_size})"

    def _open(self, size: int | None) -> int:
        session = current("RemoteBuffer")
        key = ("buffer", self.name)
        with session.lock:
            known: tuple[int, Outbox] | None = session.shared.get(key)
            if known is None or size not in (None, known[0]):
                held = int(session.client.call({"op": "buffer.open", "name": self.name, "size": size})["size"])
                known = session.shared[key] = (held, known[1] if known else Outbox(session, self.name))
        self._attached = session, known[1]
        return known[0]

    def _here(self) -> tuple[Session, Outbox]:
        if self._attached is None or not self._attached[0].here:
            self._consumer, self._lock = None, threading.Lock()
            self._open(None)
        assert self._attached is not None
        return self._attached

    # -- producing

    def push(self, *items: Tree, drop: bool = True) -> Pushed:
        """Put items in. Never blocks; they leave in the background, in order. Raises UsageError for what is no item.

        With `drop=False` await the result (or call its `wait`): a producer that never does is refused after a while.
        """
        _, outbox = self._here()
        return outbox.put([_encoded(item, self.name) for item in items], drop)

    def stats(self) -> dict[str, int]:
        """size, waiting (items inside), pushed, taken, dropped."""
        session, _ = self._here()
        reply = session.client.call({"op": "buffer.stats", "name": self.name})
        return {key: int(value) for key, value in reply.items() if key != "id"}

    # -- consuming

    def __iter__(self) -> Iterator[Tree]:
        return self

    def __next__(self) -> Tree:
        while True:
            try:
                return self.take(60.0)
            except TimeoutError:
                continue

    def take(self, timeout_s: float) -> Tree:
        """The next batch (or item). Raises TimeoutError; StopIteration when the run ends; WorkerFailed when it is lost."""
        session, _ = self._here()
        with self._lock:
            if self._consumer is None:
                self._consumer = _Consumer(session, self.name, self.batch_size or 1)
            items = self._consumer.take(timeout_s)
        if self.batch_size is None:
            return tree.map_tree(np.array, items[0])
        return _stacked(items, self.name)

    def close(self) -> None:
        """This handle takes no more: its iteration ends. The buffer itself lives as long as the run."""
        consumer = self._consumer
        if consumer is None:
            consumer = self._consumer = _Consumer(self._here()[0], self.name, 1)
        consumer.close()  # without the lock, which whoever waits for a batch holds: this is what ends the waiting


class _Consumer:
    """One consumer's connection. While a batch is worked on, the next one is on its way."""

    def __init__(self, session: Session, name: str, count: int) -> None:
        self._session, self._name, self._count = session, name, count
        self._connection: Connection | None = None
        self._next: Future[Reply] | None = None
        self._over = False

    def take(self, timeout_s: float) -> list[Tree]:
        try:
            reply = self._waited(time.monotonic() + timeout_s)
        except TimeoutError:
            raise TimeoutError(f"Nothing to take from the buffer {self._name!r} within {timeout_s:g} s.") from None
        except (WorkerFailed, CancelledError):
            self._next = None
            if self._session.ended:  # left in order, while we waited
                raise StopIteration from None
            raise
        if reply[-1][0].get("closed"):
            self._over = True
            raise StopIteration
        self._next = self._session.client.submit(self._request())
        return [tree.decode(item)[0] for header, body in reply for item in split(body, header["sizes"])]

    def _waited(self, deadline: float) -> Reply:
        while not (self._over or self._session.ended):
            if self._next is None:
                self._next = self._session.client.submit(self._request())
            try:
                # In slices, because the end of the run is a flag: a signal handler may set it, and nothing more.
                return self._next.result(max(0.0, min(_LOOK_S, deadline - time.monotonic())))
            except FutureTimeout:
                if time.monotonic() >= deadline:
                    raise
            except Exception:
                self._next = None
                raise
        raise StopIteration

    async def _request(self) -> Reply:
        if self._connection is None:
            self._connection = await self._session.client.connect()
        header = {"op": "buffer.take", "name": self._name, "count": self._count}
        return await self._connection.request(header, timeout_s=None)

    def close(self) -> None:
        self._over = True
        if self._connection is not None:
            self._session.client.wait(self._connection.close(), 5.0)


def _unattached(name: str, batch_size: int | None) -> RemoteBuffer:
    handle = RemoteBuffer.__new__(RemoteBuffer)
    handle.name, handle.batch_size, handle._consumer, handle._attached = name, batch_size, None, None
    handle._lock = threading.Lock()
    return handle


def _encoded(item: Tree, name: str) -> bytes:
    try:
        data = tree.encode(item)
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"This cannot be pushed to the buffer {name!r}: {error}", "Items are arrays and numbers, in dicts and tuples."
        ) from error
    if len(data) > MAX_BODY:
        raise UsageError(f"An item of {len(data)} bytes for the buffer {name!r} is larger than {MAX_BODY}.", "Push smaller ones.")
    return data


def _stacked(items: list[Tree], name: str) -> Tree:
    try:
        return tree.stack(items)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise LudusError(
            f"The items of a batch from the buffer {name!r} differ: {_shapes(items[0])} and others.",
            "Push items of one structure and shape, or take single ones (batch_size=None).",
        ) from error


def _shapes(item: Tree) -> dict[str, str]:
    return {path or "item": f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in tree.leaves(item)}
