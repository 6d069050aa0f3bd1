"""Rings of producers as the hub sees them: referenced records stay, others make room, and all are removed at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.distributed.hub import shared_queues as module
from ludus.distributed.hub.shared_queues import ProducerRing, ProducerRings
from ludus.errors import Damaged
from ludus.transport.ring_buffer import RingWriter, create_ring


@pytest.fixture
def rings(tmp_path: Path) -> Iterator[ProducerRings]:
    made = ProducerRings(tmp_path / "rings")
    yield made
    made.close()


def granted(rings: ProducerRings, producer: str, size: int = 1 << 20) -> ProducerRing:
    ring = rings.grant(producer, size)
    assert ring is not None
    return ring


def written(ring: ProducerRing, *items: bytes) -> RingWriter:
    create_ring(ring.path, ring.size)
    writer = RingWriter(ring.path)
    for item in items:
        put(writer, item)
    return writer


def put(writer: RingWriter, item: bytes) -> bool:
    room = writer.reserve(len(item))
    if room is None:
        return False
    room[:] = item
    writer.commit()
    return True


def test_items_are_in_the_file_at_their_position(rings: ProducerRings) -> None:
    ring = granted(rings, "p")
    with written(ring, b"one", b"second", b"3"):
        items = rings.take_items("p", [0, 1, 2], 3)
        whole = ring.path.read_bytes()
        assert [whole[item.position : item.position + len(item)] for item in items] == [b"one", b"second", b"3"]
        assert [item.copy() for item in items] == [b"one", b"second", b"3"]


def test_unreferenced_records_make_room(rings: ProducerRings) -> None:
    ring = granted(rings, "p")
    with written(ring) as writer:
        for turn in range(10):
            assert all(put(writer, b"x" * (1 << 18)) for _ in range(4)), f"no room in turn {turn}"
            assert not put(writer, b"x")
            items = rings.take_items("p", [4 * turn + 2], 4 * turn + 4)
            assert [len(item) for item in items] == [1 << 18]
            del items


def test_a_record_stays_exactly_as_long_as_it_is_referenced(rings: ProducerRings) -> None:
    ring = granted(rings, "p")
    with written(ring, b"a" * (1 << 19), b"b" * (1 << 19)) as writer:
        first, second = rings.take_items("p", [0, 1], 2)
        again = [first]
        del second
        assert not put(writer, b"c" * (1 << 18)), "the older one is needed"
        del first
        assert not put(writer, b"c" * (1 << 18))
        again.clear()
        assert put(writer, b"c" * (1 << 18))


def test_released_records_make_room_even_if_still_referenced(rings: ProducerRings) -> None:
    ring = granted(rings, "p")
    with written(ring, b"a" * (1 << 20)) as writer:
        items = rings.take_items("p", [0], 1)
        items[0].release()
        items[0].release()
        assert put(writer, b"b" * (1 << 20))
        (second,) = rings.take_items("p", [1], 2)
        items.clear()
        assert second.copy() == b"b" * (1 << 20)
        assert not put(writer, b"c"), "a reference that was released has released another record"


def test_the_ring_of_a_dead_producer_goes_with_its_last_item(rings: ProducerRings) -> None:
    ring = granted(rings, "p")
    written(ring, b"kept", b"also").close()
    items = rings.take_items("p", [0, 1], 2)
    rings.on_disconnect("p")
    assert [item.copy() for item in items] == [b"kept", b"also"]
    assert ring.path.exists()
    del items
    assert not ring.path.parent.exists()


def test_a_ring_that_was_never_used_goes_with_its_producer(rings: ProducerRings) -> None:
    unmade, unspoken_of = granted(rings, "p"), granted(rings, "q")
    written(unspoken_of, b"x").close()
    for producer in ("p", "q", "stranger"):
        rings.on_disconnect(producer)
    assert not unmade.path.parent.exists()
    assert not unspoken_of.path.parent.exists()


def test_closing_removes_everything_and_items_may_go_later(rings: ProducerRings, tmp_path: Path) -> None:
    ring = granted(rings, "p")
    with written(ring, b"x"):
        items = rings.take_items("p", [0], 1)
        rings.close()
        assert list((tmp_path / "rings").iterdir()) == []
        del items


def test_a_copy_of_the_process_releases_nothing(rings: ProducerRings) -> None:
    ring = granted(rings, "p")
    with written(ring, b"a" * (1 << 20)) as writer:
        items = rings.take_items("p", [0], 1)
        pid = os.fork()
        if pid == 0:
            items.clear()
            os._exit(0)
        os.waitpid(pid, 0)
        assert not put(writer, b"b")
        assert items[0].copy() == b"a" * (1 << 20)


@pytest.mark.parametrize(("numbers", "upto"), [([0, 1], 2), ([5], 6), ([1, 0], 2), ([0], 0)])
def test_records_that_are_not_there_are_damage(rings: ProducerRings, numbers: list[int], upto: int) -> None:
    with written(granted(rings, "p"), b"one"), pytest.raises(Damaged, match="not in its ring"):
        rings.take_items("p", numbers, upto)


def test_rings_that_are_not_there_are_damage(rings: ProducerRings) -> None:
    with pytest.raises(Damaged, match="without a ring"):
        rings.take_items("p", [0], 1)
    ring = granted(rings, "p")
    with pytest.raises(Damaged, match="does not exist"):
        rings.take_items("p", [0], 1)
    ring.path.write_bytes(b"rubbish" * 100_000)
    with pytest.raises(Damaged, match="not a ring"):
        rings.take_items("p", [0], 1)
    with pytest.raises(Damaged, match="second ring"):
        rings.grant("p", 1 << 20)


def test_all_rings_together_are_bounded(rings: ProducerRings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALL_BYTES", 5 << 20)
    monkeypatch.setattr(module, "RING_BYTES", 3 << 20)
    assert granted(rings, "a", 1 << 30).size == 3 << 20
    assert granted(rings, "b", 1 << 30).size == 2 << 20
    assert rings.grant("c", 1 << 30) is None
    rings.on_disconnect("a")
    assert granted(rings, "c", 1 << 21).size == 2 << 20
