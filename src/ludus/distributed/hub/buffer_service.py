"""Buffers of a run: the hub's operations on bounded queues of items, which arrive by socket or in shared memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.buffers.bounded_queue import BoundedQueue
from ludus.distributed.frames import MAX_BODY, Header
from ludus.distributed.hub.rpc import Operation, Peer, SendReply, split
from ludus.distributed.hub.shared_queues import ProducerRings, SharedItem, release_all
from ludus.errors import UsageError
from ludus.models.weights.model_registry import check_name

BUFFER_SIZE = 512
_CHUNK = MAX_BODY // 4

Item = bytes | memoryview | SharedItem


@dataclass
class _Buffer:
    queue: BoundedQueue[Item]
    lost: int = 0
    """Items that producers dropped before sending."""
    shared: int = 0
    """Items that came through shared memory."""

    def stats(self) -> dict[str, int]:
        queue = self.queue
        return {
            "size": queue.size,
            "waiting": len(queue),
            "pushed": queue.pushed + self.lost,
            "taken": queue.taken,
            "dropped": queue.dropped + self.lost,
            "shared": self.shared,
        }


class BufferService:
    """All buffers of a run. Runs on the hub's event loop. A request is identified by (peer, request id)."""

    def __init__(self, ring_directory: Path, reply: SendReply) -> None:
        self._reply = reply
        self._buffers: dict[str, _Buffer] = {}
        self._rings = ProducerRings(ring_directory)
        self._mapping: set[Peer] = set()
        """Consumers that can map the rings."""
        self._lent: dict[Hashable, list[SharedItem]] = {}
        """Items that consumers are copying from the rings, by request."""
        self.operations: dict[str, Operation] = {
            "buffer.open": self._open,
            "buffer.ring": self._grant_ring,
            "buffer.push": self._push,
            "buffer.offer": self._offer,
            "buffer.take": self._take,
            "buffer.release": self._release,
            "buffer.stats": self._stats,
        }

    def names(self) -> list[str]:
        return sorted(self._buffers)

    def gauges(self) -> dict[str, float]:
        return {
            f"buffer/{name}/{what}": value
            for name, buffer in self._buffers.items()
            for what, value in buffer.stats().items()
            if what != "size"
        }

    def cancel_waiting(self) -> None:
        """Answer all waiting requests: the run has ended."""
        for buffer in self._buffers.values():
            for request in buffer.queue.waiting():
                self._reply(request, {"closed": True})
                buffer.queue.cancel(request)

    def on_disconnect(self, peer: Peer) -> None:
        for buffer in self._buffers.values():
            for request in buffer.queue.waiting():
                if request[0] is peer:
                    buffer.queue.cancel(request)
            self._deliver(buffer)
        self._mapping.discard(peer)
        for request in [request for request in self._lent if isinstance(request, tuple) and request[0] is peer]:
            release_all(self._lent.pop(request))
        self._rings.on_disconnect(peer)

    def close(self) -> None:
        self._rings.close()

    # -- operations

    def _open(self, peer: Peer, header: Header, body: bytes) -> Header:
        name, size = check_name(header["name"]), header["size"]
        buffer = self._buffers.get(name)
        if buffer is None:
            if size is not None and size < 1:
                raise UsageError(f"A buffer of size {size} holds nothing.", "Give size=1 or more.")
            buffer = self._buffers[name] = _Buffer(BoundedQueue(BUFFER_SIZE if size is None else int(size)))
        elif size is not None and size != buffer.queue.size:
            raise UsageError(
                f"The buffer {name!r} exists with size {buffer.queue.size}, not {size}.", "Give its size in one place only."
            )
        return {"size": buffer.queue.size}

    def _grant_ring(self, peer: Peer, header: Header, body: bytes) -> Header:
        """Grant a producer a ring in shared memory; with an empty path its items come through the socket."""
        ring = self._rings.grant(peer, int(header["bytes"]))
        return {"path": ""} if ring is None else {"path": str(ring.path), "bytes": ring.size}

    def _push(self, peer: Peer, header: Header, body: bytes) -> None:
        buffer = self._buffers[header["name"]]
        buffer.lost += int(header.get("lost", 0))
        buffer.queue.push(self._items(peer, buffer, header, body))
        self._deliver(buffer)

    def _offer(self, peer: Peer, header: Header, body: bytes) -> None:
        buffer = self._buffers[header["name"]]
        buffer.queue.offer((peer, header["id"]), self._items(peer, buffer, header, body))
        self._deliver(buffer)

    def _take(self, peer: Peer, header: Header, body: bytes) -> None:
        buffer = self._buffers[header["name"]]
        if header["count"] > buffer.queue.size:
            raise UsageError(
                f"A batch of {header['count']} does not fit into the buffer {header['name']!r} of size {buffer.queue.size}.",
                "Make the buffer larger, or the batch smaller.",
            )
        if header.get("maps"):
            self._mapping.add(peer)
        buffer.queue.request((peer, header["id"]), int(header["count"]))
        self._deliver(buffer)

    def _release(self, peer: Peer, header: Header, body: bytes) -> None:
        release_all(self._lent.pop((peer, header["take"]), []))

    def _stats(self, peer: Peer, header: Header, body: bytes) -> Header:
        return self._buffers[header["name"]].stats()

    # -- items

    def _items(self, peer: Peer, buffer: _Buffer, header: Header, body: bytes) -> list[Item]:
        """Items of a message. `records`: for each its number in the producer's ring, or -1 if it is in the body (default)."""
        sizes, records = header["sizes"], header.get("records")
        if len(sizes) == 1 and sizes[0] == len(body):
            inline: list[Item] = [body]
        else:  # copies, so that an item does not keep the memory of its neighbours
            inline = [bytes(part) for part in split(body, sizes)]
        if records is None:
            return inline
        numbers = [number for number in records if number >= 0]
        if len(inline) + len(numbers) != len(records):  # checked before records are taken from the ring
            raise ValueError(f"{len(inline)} items, and not {len(records) - len(numbers)}")
        shared = self._rings.take_items(peer, numbers, int(header["upto"]))
        buffer.shared += len(shared)
        here, there = iter(inline), iter(shared)
        return [next(here) if number < 0 else next(there) for number in records]

    def _deliver(self, buffer: _Buffer) -> None:
        settled = buffer.queue.deliver()
        for request in settled.accepted:
            self._reply(request, {})
        for request, items in settled.deliveries:
            self._send_items(request, items)

    def _send_items(self, request: Any, items: list[Item]) -> None:
        """Reply in frames of bounded size, all but the last marked `more`. Consumers that map the rings get only positions."""
        shared = [item for item in items if isinstance(item, SharedItem)]
        if shared and request[0] in self._mapping:
            self._lent[request] = shared
        elif shared:
            items = [item.copy() if isinstance(item, SharedItem) else item for item in items]
            release_all(shared)
        part: list[Item] = []
        size = 0
        for item in items:
            inline_bytes = 0 if isinstance(item, SharedItem) else len(item)
            if part and size + inline_bytes > _CHUNK:
                self._send_frame(request, part, {"more": True})
                part, size = [], 0
            part.append(item)
            size += inline_bytes
        self._send_frame(request, part, {})

    def _send_frame(self, request: Any, items: list[Item], header: Header) -> None:
        inline = [item for item in items if not isinstance(item, SharedItem)]
        header["sizes"] = [len(item) for item in inline]
        if len(inline) < len(items):
            header["places"] = [
                [str(item.ring.path), item.position, len(item)] if isinstance(item, SharedItem) else None for item in items
            ]
        self._reply(request, header, *inline)
