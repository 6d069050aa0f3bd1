"""A bounded queue with waiting producers and consumers, as a pure state machine: no I/O, no clock, no threads.

Producers push (dropping and counting the oldest items) or offer (and wait for space); consumers request a number of items at
once. The caller calls `deliver` after every change and notifies the waiters that it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass
class QueueProgress(Generic[T]):
    """Waiters that were served: consumers with their items, and producers whose offers are in the queue."""

    deliveries: list[tuple[Hashable, list[T]]] = field(default_factory=list)
    accepted: list[Hashable] = field(default_factory=list)


class BoundedQueue(Generic[T]):
    """First in, first out; waiting consumers and producers are served in order of arrival."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a queue holds at least one item, not {size}")
        self.size = size
        self._items: deque[T] = deque()
        self._offers: deque[tuple[Hashable, deque[T]]] = deque()
        self._requests: deque[tuple[Hashable, int]] = deque()
        self._deliveries: list[tuple[Hashable, list[T]]] = []
        self.pushed = self.dropped = self.taken = 0

    def __len__(self) -> int:
        return len(self._items)

    def waiting(self) -> list[Any]:
        """Return the ids of all waiting producers and consumers."""
        return [who for who, _ in (*self._offers, *self._requests)]

    def push(self, items: Iterable[T]) -> int:
        """Add items, dropping the oldest if the queue is full. Return the number dropped."""
        dropped = 0
        for item in items:
            self.pushed += 1
            if len(self._items) >= self.size and not self._serve_consumers():
                self._items.popleft()
                dropped += 1
            self._items.append(item)
        self.dropped += dropped
        return dropped

    def offer(self, who: Hashable, items: Iterable[T]) -> None:
        """Add items as space becomes available, after earlier offers."""
        self._offers.append((who, deque(items)))

    def request(self, who: Hashable, count: int) -> None:
        """Wait for exactly `count` items."""
        if not 1 <= count <= self.size:
            raise ValueError(f"{count} items were requested at once from a queue that holds {self.size}")
        self._requests.append((who, count))

    def cancel(self, who: Hashable) -> None:
        """Remove all offers and requests of `who`."""
        self._offers = deque(entry for entry in self._offers if entry[0] != who)
        self._requests = deque(entry for entry in self._requests if entry[0] != who)
        self._deliveries = [entry for entry in self._deliveries if entry[0] != who]

    def deliver(self) -> QueueProgress[T]:
        """Serve all waiters that can be served, and return them."""
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
            if not self._serve_consumers():
                break
        deliveries, self._deliveries = self._deliveries, []
        return QueueProgress(deliveries, accepted)

    def _serve_consumers(self) -> bool:
        """Serve the first consumers if there are enough items; return whether any was served."""
        before = len(self._deliveries)
        while self._requests and len(self._items) >= self._requests[0][1]:
            who, count = self._requests.popleft()
            self._deliveries.append((who, [self._items.popleft() for _ in range(count)]))
            self.taken += count
        return len(self._deliveries) > before
