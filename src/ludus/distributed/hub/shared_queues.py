"""Buffer items that stay in shared memory, in the ring of the producer that wrote them, as the hub sees them.

The hub passes references. An item that a consumer received is released by the consumer or when it disconnects; an item without
references (dropped by the queue, or its offer was cancelled) is released by its finalizer. Then its memory can be reused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path

from ludus.errors import Damaged, NotFound
from ludus.transport.ring_buffer import RingReader, RingRecord

RING_BYTES, ALL_BYTES = 1 << 28, 1 << 31
"""Maximum size of the ring of one producer, and of all rings together."""
_MIN_BYTES = 1 << 20


class SharedItem:
    """Reference to a record in a ring."""

    __slots__ = ("record", "released", "ring")

    def __init__(self, ring: ProducerRing, record: RingRecord) -> None:
        self.ring, self.record = ring, record
        self.released = False

    def __len__(self) -> int:
        return len(self.record.data)

    def release(self) -> None:
        """Free the record for reuse. Idempotent."""
        if not self.released:
            self.released = True
            self.ring.release(self.record)

    def __del__(self) -> None:
        self.release()

    @property
    def position(self) -> int:
        """Offset of the record in the file."""
        return self.ring.data_at + self.record.start

    def copy(self) -> bytes:
        return bytes(self.record.data)


def release_all(items: Iterable[SharedItem]) -> None:
    """Release explicitly: an exception keeps the frames of its traceback, and all references in them, alive."""
    for item in items:
        item.release()


class ProducerRing:
    """Ring of one producer. Its directory is removed when the producer has disconnected and no record is in use."""

    def __init__(self, directory: Path, size: int) -> None:
        directory.mkdir(mode=0o700)
        self.path, self.size = directory / "ring", size
        self.data_at = 0
        self._reader: RingReader | None = None
        self._in_use = 0
        self._pid = os.getpid()
        self._abandoned = self.removed = False

    def take_items(self, numbers: Sequence[int], upto: int) -> list[SharedItem]:
        """Take the records of these ascending numbers; all others before `upto` are released. Raises Damaged."""
        items: list[SharedItem] = []
        try:
            self._take_into(items, numbers, upto)
            if len(items) < len(numbers):
                raise Damaged(f"A producer refers to records that are not in its ring {self.path}.")
        except Damaged:
            release_all(items)
            raise
        return items

    def _take_into(self, items: list[SharedItem], numbers: Sequence[int], upto: int) -> None:
        reader, remaining = self._open_reader(), iter(numbers)
        expected = next(remaining, -1)
        while reader.taken < upto:
            record = reader.take()
            if record is None:
                break
            if record.number == expected:
                items.append(SharedItem(self, record))
                self._in_use += 1
                expected = next(remaining, -1)
            else:
                reader.release(record)

    def _open_reader(self) -> RingReader:
        if self._reader is None:
            try:
                self._reader = RingReader(self.path)
                self.data_at = self.path.stat().st_size - self._reader.capacity  # the records are at the end of the file
            except (NotFound, OSError) as error:
                raise Damaged(f"A producer refers to a ring that does not exist: {error}") from error
        return self._reader

    def release(self, record: RingRecord) -> None:
        if self._reader is not None and not self.removed and os.getpid() == self._pid:  # not in a fork of the hub
            self._reader.release(record)
            self._in_use -= 1
            if self._abandoned:
                self.abandon()

    def abandon(self) -> None:
        """Remove it as soon as no record is in use: its producer has disconnected."""
        self._abandoned = True
        if not self._in_use:
            self.remove()

    def remove(self) -> None:
        self.removed = True
        if self._reader is not None:
            self._reader.close()
        shutil.rmtree(self.path.parent, ignore_errors=True)


class ProducerRings:
    """All rings of a hub by producer. For the hub's thread only."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        self._directory = directory
        self._made = 0
        self._rings: dict[Hashable, ProducerRing] = {}
        self._abandoned_rings: list[ProducerRing] = []

    def grant(self, producer: Hashable, wanted: int) -> ProducerRing | None:
        """Reserve a ring for this producer; None when there is no memory to spare."""
        if producer in self._rings:
            raise Damaged("A producer requests a second ring.")
        spare = ALL_BYTES - sum(ring.size for ring in self._all())
        with contextlib.suppress(OSError):
            spare = min(spare, shutil.disk_usage(self._directory).free // 4)
        size = min(wanted, RING_BYTES, spare)
        if size < _MIN_BYTES:
            return None
        self._made += 1
        ring = self._rings[producer] = ProducerRing(self._directory / f"{self._made}", size)
        return ring

    def take_items(self, producer: Hashable, numbers: Sequence[int], upto: int) -> list[SharedItem]:
        """Raises Damaged."""
        if producer not in self._rings:
            raise Damaged("A producer without a ring refers to its records.")
        return self._rings[producer].take_items(numbers, upto)

    def on_disconnect(self, producer: Hashable) -> None:
        ring = self._rings.pop(producer, None)
        if ring is not None:
            self._abandoned_rings.append(ring)
            ring.abandon()

    def _all(self) -> Iterator[ProducerRing]:
        self._abandoned_rings = [ring for ring in self._abandoned_rings if not ring.removed]
        yield from self._rings.values()
        yield from self._abandoned_rings

    def close(self) -> None:
        for ring in list(self._all()):
            ring.remove()
