"""Items of buffers that stay where their producers wrote them: in rings in shared memory, as the hub sees them.

The hub passes references around. What a consumer was given is released by it, or by its end; what nobody refers to any more,
because the queue dropped it or whoever offered it gave up, releases itself. Then there is room for another.
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
"""Of the ring of one producer, and of all of them, at most."""
_LEAST_BYTES = 1 << 20


class Shared:
    """A record that somebody still needs."""

    __slots__ = ("record", "released", "ring")

    def __init__(self, ring: Ring, record: RingRecord) -> None:
        self.ring, self.record = ring, record
        self.released = False

    def __len__(self) -> int:
        return len(self.record.data)

    def release(self) -> None:
        """Nobody reads it any more. Again: no effect."""
        if not self.released:
            self.released = True
            self.ring.let_go(self.record)

    def __del__(self) -> None:
        self.release()

    @property
    def at(self) -> int:
        """Where in the file it begins."""
        return self.ring.data_at + self.record.start

    def copy(self) -> bytes:
        return bytes(self.record.data)


def release(items: Iterable[Shared]) -> None:
    """Said, not left to the last reference: an error keeps the frames it went through, and all that is in them, as long as
    it is kept itself, by a log or by a cycle."""
    for item in items:
        item.release()


class Ring:
    """One producer's ring. Its directory goes when the producer has gone and nobody needs a record of it."""

    def __init__(self, directory: Path, size: int) -> None:
        directory.mkdir(mode=0o700)
        self.path, self.size = directory / "ring", size
        self.data_at = 0
        self._reader: RingReader | None = None
        self._needed = 0
        self._pid = os.getpid()
        self._orphan = self.removed = False

    def taken(self, numbers: Sequence[int], upto: int) -> list[Shared]:
        """The records of these rising numbers; all others before `upto` are not needed by anybody. Raises Damaged."""
        items: list[Shared] = []
        try:
            self._take_into(items, numbers, upto)
            if len(items) < len(numbers):
                raise Damaged(f"A producer speaks of records that are not in its ring {self.path}.")
        except Damaged:
            release(items)
            raise
        return items

    def _take_into(self, items: list[Shared], numbers: Sequence[int], upto: int) -> None:
        reader, named = self._opened(), iter(numbers)
        awaited = next(named, -1)
        while reader.taken < upto:
            record = reader.take()
            if record is None:
                break
            if record.number == awaited:
                items.append(Shared(self, record))
                self._needed += 1
                awaited = next(named, -1)
            else:
                reader.release(record)

    def _opened(self) -> RingReader:
        if self._reader is None:
            try:
                self._reader = RingReader(self.path)
                self.data_at = self.path.stat().st_size - self._reader.capacity  # its records are the last of the file
            except (NotFound, OSError) as error:
                raise Damaged(f"A producer speaks of a ring that is not there: {error}") from error
        return self._reader

    def let_go(self, record: RingRecord) -> None:
        if self._reader is not None and not self.removed and os.getpid() == self._pid:  # a forked copy has no say in it
            self._reader.release(record)
            self._needed -= 1
            if self._orphan:
                self.leave()

    def leave(self) -> None:
        """Its producer has gone."""
        self._orphan = True
        if not self._needed:
            self.remove()

    def remove(self) -> None:
        self.removed = True
        if self._reader is not None:
            self._reader.close()
        shutil.rmtree(self.path.parent, ignore_errors=True)


class Rings:
    """All rings of a hub, by the producer that has one. For the hub's own thread."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        self._directory = directory
        self._made = 0
        self._rings: dict[Hashable, Ring] = {}
        self._left: list[Ring] = []

    def grant(self, producer: Hashable, wanted: int) -> Ring | None:
        """Where this producer may make a ring, and how large; None when there is no memory to spare."""
        if producer in self._rings:
            raise Damaged("A producer asks for a second ring.")
        spare = ALL_BYTES - sum(ring.size for ring in self._all())
        with contextlib.suppress(OSError):
            spare = min(spare, shutil.disk_usage(self._directory).free // 4)
        size = min(wanted, RING_BYTES, spare)
        if size < _LEAST_BYTES:
            return None
        self._made += 1
        ring = self._rings[producer] = Ring(self._directory / f"{self._made}", size)
        return ring

    def taken(self, producer: Hashable, numbers: Sequence[int], upto: int) -> list[Shared]:
        """Raises Damaged."""
        if producer not in self._rings:
            raise Damaged("A producer without a ring speaks of its records.")
        return self._rings[producer].taken(numbers, upto)

    def gone(self, producer: Hashable) -> None:
        ring = self._rings.pop(producer, None)
        if ring is not None:
            self._left.append(ring)
            ring.leave()

    def _all(self) -> Iterator[Ring]:
        self._left = [ring for ring in self._left if not ring.removed]
        yield from self._rings.values()
        yield from self._left

    def close(self) -> None:
        for ring in list(self._all()):
            ring.remove()
