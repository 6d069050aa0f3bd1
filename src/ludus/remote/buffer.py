"""RemoteBuffer: a named queue of the run. Actors push items; learners iterate over batches of them.

On the hub's machine large items stay in a ring in shared memory, where their producer wrote them: the hub passes their
position, and a consumer copies them into its batch. Items that are small, do not fit, or come from another machine go
through the hub's socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ludus.core import tree
from ludus.core.tree import Tree, TreeEncoder
from ludus.distributed.frames import MAX_BODY, Header
from ludus.distributed.hub.rpc import Reply, RpcConnection, split
from ludus.errors import Damaged, LudusError, UsageError, WorkerFailed
from ludus.remote.context import RunContext, current
from ludus.transport.ring_buffer import RingWriter, create_ring, record_bytes

log = logging.getLogger(__name__)

OUTBOX_PUSHES = 1024
OFFERS = 4096
"""Pushes of one process with drop=False that may wait for room."""
OUTBOX_BYTES = 1 << 29
"""Bytes that may wait in this process to be sent; beyond that the oldest are dropped and counted."""
SHARED_BYTES = 1 << 14
"""Items of at least this size go through shared memory; sending the position of a smaller one takes as long as sending it."""
RING_BYTES = 1 << 28
"""Maximum size of the ring of one process and buffer."""
_MIN_RING_BYTES = 1 << 22
_IN_FLIGHT_ITEMS = 64  # items that have left the queue but are not yet released, with a margin
_FRAME_PUSHES, _FRAME_BYTES = 256, 1 << 20  # limits for waiting pushes that are sent in one frame
_THREAD_BYTES = 1 << 18  # a larger batch is copied in a thread, not on the client's loop
_RING_S = 60.0
_POLL_S = 0.1


class Pushed:
    """Result of `push`, which may be ignored. `await` it, or call `wait`, to know that the items were sent.

    With `drop=False` that means that all of them are in the buffer; else that they have left this process.
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


@dataclass(slots=True, eq=False)
class _Push:
    """Items of one push: numbers of records in the ring of this process, or encoded bytes."""

    items: list[int | bytearray]
    drop: bool
    upto: int
    """All records before this one belong to this push or to an earlier one."""
    largest: int
    size: int = field(init=False)
    """Bytes to be sent."""
    future: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.size = sum(len(item) for item in self.items if not isinstance(item, int))


class Outbox:
    """Pushes of this process to one buffer, sent in order by the client's loop. `add` never blocks."""

    def __init__(self, run: RunContext, name: str, size: int) -> None:
        self._run, self._name, self._size = run, name, size
        self._writing = threading.Lock()  # acquired first: records must be announced in the order in which they are written
        self._lock = threading.Lock()
        self._waiting: deque[_Push] = deque()
        self._bytes = self._lost = self._offered = 0
        self._sending = False
        self._error: Exception | None = None
        self._connection: RpcConnection | None = None
        self._ring: RingWriter | None = None
        self._ring_task: asyncio.Task[None] | None = None
        self._closed = False
        run.on_close(self.close)

    def add(self, items: list[TreeEncoder], drop: bool) -> Pushed:
        with self._writing:
            with self._lock:
                if self._error is not None:
                    raise self._error
                if not drop and self._offered >= OFFERS:
                    message = f"{self._offered} pushes to {self._name!r} with drop=False wait for room."
                    raise UsageError(message, "Await each before the next.")
            written = [self._write_item(item) for item in items]
            upto = 0 if self._ring is None else self._ring.committed
            push = _Push(written, drop, upto, max((item.size for item in items), default=0))
            with self._lock:
                if self._error is not None:
                    raise self._error
                if not drop:
                    self._offered += 1
                    push.future.add_done_callback(self._on_offer_done)
                self._waiting.append(push)
                self._bytes += push.size
                self._drop_oldest()
                start = not self._sending
                self._sending = True
        if start:
            try:
                self._run.client.submit(self._send_all())
            except WorkerFailed as error:  # this process has left the run
                self._fail(error)
                raise
        return Pushed(push.future)

    def _write_item(self, item: TreeEncoder) -> int | bytearray:
        """Write the item to the ring if there is room, and return its number; else return its bytes."""
        ring = self._ring
        if ring is not None and SHARED_BYTES <= item.size <= ring.capacity:
            room = ring.reserve(item.size)
            if room is not None:
                with contextlib.ExitStack() as undo:
                    undo.callback(ring.abandon)  # after Ctrl-C, or when another thread changed the array
                    item.write_into(room)
                    undo.pop_all()
                ring.commit()
                return ring.committed - 1
        return item.bytes()

    def _on_offer_done(self, _: Future[None]) -> None:
        self._offered -= 1

    def _drop_oldest(self) -> None:
        """Drop the oldest pushes that may be dropped. Pushes with drop=False are limited by OFFERS."""
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
        pushes: list[_Push] = []
        try:
            if self._connection is None:
                self._connection = await self._run.client.connect()
            while True:
                with self._lock:
                    if not self._waiting:
                        self._sending = False
                        return
                    pushes = self._next_pushes()
                    lost, self._lost = self._lost, 0
                size = max(push.largest for push in pushes)
                if self._ring_task is None and size >= SHARED_BYTES and self._run.location.is_local:
                    self._ring_task = asyncio.get_running_loop().create_task(self._make_ring(self._connection, size))
                await self._send(self._connection, pushes, lost)
        except Exception as error:  # last resort of this task: pending and later pushes raise the error
            self._fail(error, pushes)

    def _next_pushes(self) -> list[_Push]:
        """The next push, and later ones that are sent in the same frame."""
        pushes, size = [self._waiting.popleft()], 0
        while self._waiting and pushes[-1].drop and self._waiting[0].drop and len(pushes) < _FRAME_PUSHES:
            size += pushes[-1].size
            if size + self._waiting[0].size > _FRAME_BYTES:
                break
            pushes.append(self._waiting.popleft())
        self._bytes -= sum(push.size for push in pushes)
        return pushes

    def _fail(self, error: Exception, sending: Iterable[_Push] = ()) -> None:
        """Raise the error in pushes that are being sent, pending and later ones."""
        with self._lock:
            self._error, self._sending = error, False
            failed, self._waiting = self._waiting, deque()
        for push in (*sending, *failed):
            if not push.future.done():
                push.future.set_exception(error)

    async def _send(self, connection: RpcConnection, pushes: list[_Push], lost: int) -> None:
        items = [item for push in pushes for item in push.items]
        inline = [item for item in items if not isinstance(item, int)]
        header: Header = {"op": "buffer.push" if pushes[0].drop else "buffer.offer", "name": self._name}
        header |= {"sizes": [len(item) for item in inline], "lost": lost}
        if pushes[-1].upto:
            header |= {"records": [item if isinstance(item, int) else -1 for item in items], "upto": pushes[-1].upto}
        if pushes[0].drop:
            await connection.send(header, *inline)
            for push in pushes:
                push.future.set_result(None)
        else:
            (push,) = pushes
            reply = connection.start(header, *inline)
            reply.add_done_callback(lambda done: _resolve_offer(done, push.future))
            await connection.drain()

    # -- the ring

    async def _make_ring(self, connection: RpcConnection, size: int) -> None:
        """Request a ring, in the background, after the first large item."""
        wanted = min(RING_BYTES, max(_MIN_RING_BYTES, record_bytes(size) * (self._size + _IN_FLIGHT_ITEMS)))
        try:
            reply = await connection.request({"op": "buffer.ring", "bytes": wanted}, timeout_s=_RING_S)
            granted = reply[-1][0]
            if granted["path"]:
                await asyncio.to_thread(self._open_ring, Path(granted["path"]), int(granted["bytes"]))
        except (LudusError, TimeoutError, OSError) as error:
            log.warning("items of the buffer %s are sent through a socket instead of shared memory: %s", self._name, error)

    def _open_ring(self, path: Path, size: int) -> None:
        create_ring(path, size)
        ring = RingWriter(path)
        with self._writing:
            if self._closed:
                ring.close()
            else:
                self._ring = ring

    def close(self) -> None:
        """Stop writing to the ring; the hub owns what is in it."""
        with self._writing:
            self._closed = True
            if self._ring is not None:
                self._ring.close()
                self._ring = None


def _resolve_offer(done: asyncio.Future[Reply], future: Future[None]) -> None:
    if future.done():
        return
    if done.cancelled() or (done.exception() is None and done.result()[-1][0].get("closed")):
        future.set_exception(WorkerFailed("The run ended before these items were inside the buffer."))
    elif error := done.exception():
        future.set_exception(error)
    else:
        future.set_result(None)


class RemoteBuffer:
    """A queue with a name, created by the first process that opens it.

        buffer = ludus.RemoteBuffer("replay", size=512, batch_size=8)
        buffer.push({"observation": image, "reward": 1.0})      # from an actor; never blocks
        for batch in buffer:                                    # in a learner: arrays [8, …] that it owns
            …

    It holds `size` items (default 512). An item is an array or number, or nested dicts and tuples of them. When
    it is full, `push` drops the oldest item and counts it (`stats()`, and the metric `buffer/<name>/dropped`); `push(…,
    drop=False)` waits instead. Each item goes to one consumer. Without a `batch_size` iteration yields single items.
    """

    def __init__(self, name: str, size: int | None = None, batch_size: int | None = None) -> None:
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise UsageError(f"batch_size={batch_size!r} is not a positive integer.")
        self.name, self.batch_size = name, batch_size
        self._consumer: _Consumer | None = None
        self._lock = threading.Lock()
        self._attached: tuple[RunContext, Outbox] | None = None
        held = self._open(size)
        if batch_size is not None and batch_size > held:
            message = f"batch_size={batch_size} does not fit into the buffer {name!r} of size {held}."
            raise UsageError(message, "Make the buffer larger.")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle as the name; it is opened on first use in the other process of the run."""
        return {"name": self.name, "batch_size": self.batch_size, "_consumer": None, "_attached": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def __repr__(self) -> str:
        return f"RemoteBuffer({self.name!r}, batch_size={self.batch_size})"

    def _open(self, size: int | None) -> int:
        run = current("RemoteBuffer")
        key = ("buffer", self.name)
        with run.lock:
            known: tuple[int, Outbox] | None = run.shared.get(key)
            if known is None or size not in (None, known[0]):
                held = int(run.client.call({"op": "buffer.open", "name": self.name, "size": size})["size"])
                known = run.shared[key] = (held, known[1] if known else Outbox(run, self.name, held))
        self._attached = run, known[1]
        return known[0]

    def _attach(self) -> tuple[RunContext, Outbox]:
        if self._attached is None or not self._attached[0].is_current_process:
            self._consumer, self._lock = None, threading.Lock()
            self._open(None)
        assert self._attached is not None
        return self._attached

    # -- producing

    def push(self, *items: Tree, drop: bool = True) -> Pushed:
        """Put items in. Never blocks; they are sent in order in the background. Raises UsageError for invalid items.

        With `drop=False` await the result (or call its `wait`): a producer that never does is refused after OFFERS pushes.
        """
        _, outbox = self._attach()
        return outbox.add([_encode_item(item, self.name) for item in items], drop)

    def stats(self) -> dict[str, int]:
        """size, waiting (items inside), pushed, taken, dropped; shared: items that came through shared memory."""
        run, _ = self._attach()
        reply = run.client.call({"op": "buffer.stats", "name": self.name})
        return {key: int(value) for key, value in reply.items() if key != "id"}

    # -- consuming

    def __iter__(self) -> Iterator[Tree]:
        return self

    def __next__(self) -> Tree:
        while True:
            with contextlib.suppress(TimeoutError):
                return self.take(60.0)

    def take(self, timeout_s: float) -> Tree:
        """The next batch (or item). Raises TimeoutError; StopIteration when the run ends; WorkerFailed when it is lost."""
        run, _ = self._attach()
        with self._lock:
            if self._consumer is None:
                self._consumer = _Consumer(run, self.name, self.batch_size or 1, self._form)
            return self._consumer.take(timeout_s)

    def _form(self, items: list[Tree]) -> Tree:
        """Copy the items: the memory that they are views of is reused."""
        return tree.map_tree(np.array, items[0]) if self.batch_size is None else _stack_items(items, self.name)

    def close(self) -> None:
        """End the iteration of this handle. The buffer itself lives as long as the run."""
        consumer = self._consumer
        if consumer is None:
            consumer = self._consumer = _Consumer(self._attach()[0], self.name, 1, self._form)
        consumer.close()  # without the lock, which a waiting `take` holds: this ends the waiting


class _Consumer:
    """Connection of one consumer. The next batch is fetched and formed while the current one is used."""

    def __init__(self, run: RunContext, name: str, count: int, form: Callable[[list[Tree]], Tree]) -> None:
        self._run, self._name, self._count, self._form = run, name, count, form
        self._connection: RpcConnection | None = None
        self._next: Future[_FormedBatch | None] | None = None
        self._ring_maps = _RingMaps()
        self._over = False

    def take(self, timeout_s: float) -> Tree:
        try:
            formed = self._wait_for_batch(time.monotonic() + timeout_s)
        except TimeoutError:
            raise TimeoutError(f"Nothing to take from the buffer {self._name!r} within {timeout_s:g} s.") from None
        except (WorkerFailed, CancelledError):
            if self._run.ended:  # the run was closed meanwhile
                raise StopIteration from None
            raise
        if formed is None:
            self._over = True
            raise StopIteration
        self._next = self._run.client.submit(self._request())
        if formed.error is not None:
            raise formed.error
        return formed.batch

    def _wait_for_batch(self, deadline: float) -> _FormedBatch | None:
        while not (self._over or self._run.ended):
            if self._next is None:
                self._next = self._run.client.submit(self._request())
            # In short intervals, because the end of the run is only a flag, which a signal handler may set.
            wait([self._next], max(0.0, min(_POLL_S, deadline - time.monotonic())))
            if self._next.done():
                done, self._next = self._next, None  # after an error, a later call starts a new request
                return done.result()
            if time.monotonic() >= deadline:
                raise TimeoutError
        raise StopIteration

    async def _request(self) -> _FormedBatch | None:
        """The next batch; None at the end of the run."""
        if self._connection is None:
            self._connection = await self._run.client.connect()
        header = {"op": "buffer.take", "name": self._name, "count": self._count, "maps": self._run.location.is_local}
        reply = await self._connection.request(header, timeout_s=None)
        if reply[-1][0].get("closed"):
            return None
        size = sum(sum(part["sizes"]) + sum(place[2] for place in part.get("places", ()) if place) for part, _ in reply)
        formed = self._form_batch(reply) if size < _THREAD_BYTES else await asyncio.to_thread(self._form_batch, reply)
        if any("places" in part for part, _ in reply):
            await self._connection.send({"op": "buffer.release", "take": reply[-1][0]["id"]})
        return formed

    def _form_batch(self, reply: Reply) -> _FormedBatch:
        try:
            return _FormedBatch(self._form([tree.decode(item)[0] for part, body in reply for item in self._items(part, body)]))
        except Exception as error:  # items of users: raised by `take`; the next batch may succeed, even after a MemoryError
            return _FormedBatch(None, error)

    def _items(self, header: Header, body: bytes) -> list[memoryview]:
        inline = iter(split(body, header["sizes"]))
        places = header.get("places")
        if places is None:
            return list(inline)
        return [next(inline) if place is None else self._ring_maps.view(*place) for place in places]

    def close(self) -> None:
        self._over = True
        if self._connection is not None:
            self._run.client.wait(self._connection.close(), 5.0)


class _FormedBatch(NamedTuple):
    """A batch, or the error of forming it."""

    batch: Tree
    error: Exception | None = None


class _RingMaps:
    """Read-only maps of producers' rings."""

    def __init__(self) -> None:
        self._maps: dict[str, memoryview] = {}

    def view(self, path: str, at: int, size: int) -> memoryview:
        """`size` bytes of a ring. Raises WorkerFailed, Damaged."""
        whole = self._maps.get(path)
        if whole is None:
            whole = self._map_ring(path)
        if not 0 <= at <= at + size <= len(whole):
            raise Damaged(f"The ring {path} has {len(whole)} bytes, not {at + size}.")
        return whole[at : at + size]

    def _map_ring(self, path: str) -> memoryview:
        self._maps = {known: mapped for known, mapped in self._maps.items() if Path(known).exists()}  # drop removed rings
        try:
            with open(path, "rb") as file:
                whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            message = f"The items of a producer cannot be read: {path}: {error}."
            raise WorkerFailed(message, "Its ring may have been removed.") from error
        self._maps[path] = whole
        return whole


def _encode_item(item: Tree, name: str) -> TreeEncoder:
    try:
        data = TreeEncoder(item)
    except (TypeError, ValueError, AttributeError) as error:
        message = f"This cannot be pushed to the buffer {name!r}: {error}"
        raise UsageError(message, "Items are arrays and numbers, in dicts and tuples.") from error
    if data.size > MAX_BODY:
        message = f"An item of {data.size} bytes for the buffer {name!r} is larger than {MAX_BODY}."
        raise UsageError(message, "Push smaller items.")
    return data


def _stack_items(items: list[Tree], name: str) -> Tree:
    try:
        return tree.stack(items)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        first = {path or "item": f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in tree.leaves(items[0])}
        raise LudusError(
            f"The items of a batch from the buffer {name!r} differ: {first} and others.",
            "Push items of one structure and shape, or take single items (batch_size=None).",
        ) from error
