"""Producers and consumers of the tests of buffers, in separate processes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

import ludus
from ludus.process.workers.supervisor import Context
from ludus.remote.buffer import Outbox
from ludus.remote.context import JoinTicket, adopt, current
from ludus.transport.ring_buffer import RingWriter

WORDS = 1 << 15
"""Of 8 bytes: an item of 256 KB, which goes through shared memory."""


def item(number: int) -> npt.NDArray[np.int64]:
    return np.full(WORDS, number, np.int64)


def outbox(buffer: ludus.RemoteBuffer) -> Outbox:
    return buffer._attach()[1]


def shared(buffer: ludus.RemoteBuffer) -> RingWriter:
    """This process's ring for the buffer: made now, and not with the first item."""
    session, box = buffer._attach()

    async def share() -> None:
        if box._connection is None:
            box._connection = await session.client.connect()
        if box._ring_task is None:
            box._ring_task = asyncio.get_running_loop().create_task(box._make_ring(box._connection, item(0).nbytes))
        assert box._ring_task is not None
        await box._ring_task

    session.client.wait(share(), 20)
    assert box._ring is not None, "no ring"
    return box._ring


def push_for_ever(context: Context, ticket: JoinTicket, name: str, first: int, drop: bool) -> None:
    """Rising numbers from `first`."""
    adopt(ticket)
    buffer = ludus.RemoteBuffer(name)
    context.ready()
    while not context.stopping:
        buffer.push(item(first), drop=drop).wait(60)
        first += 1


def push_some_and_stay(context: Context, ticket: JoinTicket, name: str, count: int, note: str) -> None:
    adopt(ticket)
    buffer = ludus.RemoteBuffer(name)
    Path(note).write_text(str(shared(buffer).path))
    for number in range(count):
        buffer.push(item(number)).wait(20)
    context.ready()
    while not context.stopping:
        time.sleep(0.05)


def take_for_ever(context: Context, ticket: JoinTicket, name: str, batch: int) -> None:
    adopt(ticket)
    buffer = ludus.RemoteBuffer(name, batch_size=batch)
    context.ready()
    while not context.stopping:
        try:
            taken = buffer.take(0.2)
        except TimeoutError:
            continue
        assert all(len(set(row.tolist())) == 1 for row in taken), "a torn item"


def write_rubbish(context: Context, ticket: JoinTicket, name: str) -> None:
    """Overwrite a record in the ring, then report more records than were written."""
    adopt(ticket)
    buffer = ludus.RemoteBuffer(name)
    ring, box = shared(buffer), outbox(buffer)
    with box._writing:
        room = ring.reserve(1 << 16)
        assert room is not None
        room[:] = b"\xff" * (1 << 16)
        ring.commit()
        number = ring.committed - 1
    connection = box._connection
    assert connection is not None
    header = {"op": "buffer.push", "name": name, "sizes": [], "records": [number], "upto": number + 1}
    current("test").client.wait(connection.send(header), 10)
    buffer.push(item(7)).wait(10)
    context.ready()
    while not context.stopping:
        time.sleep(0.02)
        if (Path(current("test").directory) / "lie").exists():
            header = {"op": "buffer.push", "name": name, "sizes": [], "records": [10_000], "upto": 10_001}
            current("test").client.wait(connection.send(header), 10)
            break
