"""A bounded queue with waiting sides, as a pure state machine: no I/O, no clock, no threads.

Producers either push (the oldest items make room, and are counted) or offer (and wait for room); consumers want so many items
at once. `settle` says what that comes to; whoever drives the queue calls it after every change and tells those who wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass
class Settled(Generic[T]):
    """What has come to pass: items for consumers, and producers whose offers are inside."""

    given: list[tuple[Hashable, list[T]]] = field(default_factory=list)
    accepted: list[Hashable] = field(default_factory=list)


class Fifo(Generic[T]):
    """First in, first out; consumers and waiting producers are served in the order in which they asked."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a queue holds at least one item, not {size}")
        self.size = size
        self._items: deque[T] = deque()
        self._offers: deque[tuple[Hashable, deque[T]]] = deque()
        self._wants: deque[tuple[Hashable, int]] = deque()
        self._given: list[tuple[Hashable, list[T]]] = []
        self.pushed = self.dropped = self.taken = 0

    def __len__(self) -> int:
        return len(self._items)

    def waiting(self) -> list[Any]:
        """Who waits, on either side."""
        return [who for who, _ in (*self._offers, *self._wants)]

    def push(self, items: Iterable[T]) -> int:
        """Put items in; the oldest leave when there is no room. Returns how many left."""
        dropped = 0
        for item in items:
            self.pushed += 1
            if len(self._items) >= self.size and not self._hand_over():
                self._items.popleft()
                dropped += 1
            self._items.append(item)
        self.dropped += dropped
        return dropped

    def offer(self, who: Hashable, items: Iterable[T]) -> None:
        """Put items in as room appears, after the offers that came before."""
        self._offers.append((who, deque(items)))

    def want(self, who: Hashable, count: int) -> None:
        """Ask for exactly `count` items."""
        if not 1 <= count <= self.size:
            raise ValueError(f"{count} items are wanted at once from a queue that holds {self.size}")
        self._wants.append((who, count))

    def cancel(self, who: Hashable) -> None:
        """Forget what `who` waits for, on either side."""
        self._offers = deque(entry for entry in self._offers if entry[0] != who)
        self._wants = deque(entry for entry in self._wants if entry[0] != who)
        self._given = [entry for entry in self._given if entry[0] != who]

    def settle(self) -> Settled[T]:
        """Move what can be moved."""
        accepted: list[Hashable] = []
        while True:
            while self._offers and len(self._items) < self.size:
                who, items = self._offers[0]
                while items and len(self._items) < self.size:
                    self._items.append(items.popleft())
                    self.pushed += 1
                if not items:
                    accepted.append(who)
                    self._offers.popleft()
            if not self._hand_over():
                break
        given, self._given = self._given, []
        return Settled(given, accepted)

    def _hand_over(self) -> bool:
        """Give the first consumers what they want, if it is there."""
        before = len(self._given)
        while self._wants and len(self._items) >= self._wants[0][1]:
            who, count = self._wants.popleft()
            self._given.append((who, [self._items.popleft() for _ in range(count)]))
            self.taken += count
        return len(self._given) > before
