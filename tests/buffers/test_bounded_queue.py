"""The queue behind a buffer: what goes in comes out once and in order, or is counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.buffers.bounded_queue import BoundedQueue


def test_items_come_out_in_the_order_in_which_they_went_in() -> None:
    fifo: BoundedQueue[int] = BoundedQueue(4)
    fifo.push([1, 2, 3])
    fifo.request("a", 2)
    fifo.request("b", 1)
    assert fifo.deliver().deliveries == [("a", [1, 2]), ("b", [3])]


def test_the_oldest_leave_when_there_is_no_room_and_are_counted() -> None:
    fifo: BoundedQueue[int] = BoundedQueue(2)
    assert fifo.push([1, 2, 3, 4, 5]) == 3
    fifo.request("a", 2)
    assert fifo.deliver().deliveries == [("a", [4, 5])]
    assert (fifo.pushed, fifo.taken, fifo.dropped) == (5, 2, 3)


def test_nothing_is_dropped_while_a_consumer_waits_for_it() -> None:
    fifo: BoundedQueue[int] = BoundedQueue(2)
    fifo.request("a", 2)
    fifo.request("b", 2)
    assert fifo.push([1, 2, 3, 4, 5]) == 0
    assert fifo.deliver().deliveries == [("a", [1, 2]), ("b", [3, 4])]
    assert len(fifo) == 1


def test_an_offer_enters_as_room_appears_and_is_accepted_when_all_of_it_is_inside() -> None:
    fifo: BoundedQueue[int] = BoundedQueue(2)
    fifo.offer("p", [1, 2, 3, 4, 5])
    assert fifo.deliver().accepted == []
    fifo.request("a", 2)
    settled = fifo.deliver()
    assert settled.deliveries == [("a", [1, 2])]
    assert settled.accepted == []
    fifo.request("a", 2)
    settled = fifo.deliver()
    assert settled.deliveries == [("a", [3, 4])]
    assert settled.accepted == ["p"]
    assert fifo.dropped == 0


def test_one_settling_serves_many_wants_out_of_one_large_offer() -> None:
    fifo: BoundedQueue[int] = BoundedQueue(2)
    for consumer in "abc":
        fifo.request(consumer, 2)
    fifo.offer("p", range(6))
    settled = fifo.deliver()
    assert settled.deliveries == [("a", [0, 1]), ("b", [2, 3]), ("c", [4, 5])]
    assert settled.accepted == ["p"]


def test_a_cancelled_waiter_neither_receives_nor_adds_items() -> None:
    fifo: BoundedQueue[int] = BoundedQueue(1)
    fifo.request("gone", 1)
    fifo.cancel("gone")
    fifo.push([1])
    fifo.offer("also gone", [2])
    fifo.cancel("also gone")
    fifo.request("here", 1)
    assert fifo.deliver().deliveries == [("here", [1])]
    assert fifo.waiting() == []


@pytest.mark.parametrize("count", [0, 3])
def test_a_batch_that_can_never_be_filled_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="requested at once"):
        BoundedQueue[int](2).request("a", count)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 7)),
        st.tuples(st.just("offer"), st.integers(0, 7)),
        st.tuples(st.just("want"), st.integers(1, 4)),
    )
)


@given(size=st.integers(4, 6), operations=operations)
def test_every_item_is_taken_once_waits_or_was_counted_as_dropped(size: int, operations: list[tuple[str, int]]) -> None:
    fifo: BoundedQueue[tuple[str, int]] = BoundedQueue(size)
    next_number = {"push": 0, "offer": 0}
    taken: list[tuple[str, int]] = []
    for who, (what, count) in enumerate(operations):
        if what == "want":
            fifo.request(who, count)
        else:
            items = [(what, next_number[what] + i) for i in range(count)]
            next_number[what] += count
            fifo.push(items) if what == "push" else fifo.offer(who, items)
        for _, given_items in fifo.deliver().deliveries:
            taken += given_items
        assert len(fifo) <= size
    assert len(set(taken)) == len(taken) == fifo.taken
    assert fifo.pushed == fifo.taken + fifo.dropped + len(fifo)
    for kind in next_number:  # those of one kind never overtake each other
        numbers = [number for other, number in taken if other == kind]
        assert numbers == sorted(numbers)
