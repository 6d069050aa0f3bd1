"""Admission control: which connections a server keeps when all slots are taken.

Connections that have not yet sent a valid token cost an attacker nothing, so they must not keep out authorized ones: when all slots are
taken, the oldest unauthorized connection is closed in favour of the new one. A client sends its token with its first request, so it is
authorized long before it could be evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Admission(NamedTuple, Generic[Key]):
    """The decision about a new connection."""

    admitted: bool
    evicted: Key | None = None
    """A connection that the caller must close in favour of the new one."""
    reason: str = ""
    """Why the connection was not admitted."""


class ConnectionSlots(Generic[Key]):
    """Counts connections. Every method takes constant time."""

    def __init__(self, most: int, per_address: int = 0) -> None:
        """`per_address`: maximum per client address; 0 = unlimited."""
        self.most, self._per_address = most, per_address
        self._addresses: dict[Key, str] = {}
        self._unauthorized: dict[Key, None] = {}  # in order of arrival
        self._by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._addresses)

    def __contains__(self, key: Key) -> bool:
        return key in self._addresses

    @property
    def unauthorized_count(self) -> int:
        return len(self._unauthorized)

    def is_authorized(self, key: Key) -> bool:
        return key not in self._unauthorized

    def admit(self, key: Key, address: str = "", *, authorized: bool = False) -> Admission[Key]:
        """Take a slot for a new connection. The caller closes `evicted`, whose slot is already free."""
        if self._per_address and self._by_address[address] >= self._per_address:
            return Admission(False, reason=f"There are {self._per_address} connections from {address} already.")
        evicted = None
        if len(self._addresses) >= self.most:
            evicted = next(iter(self._unauthorized), None)
            if evicted is None:
                return Admission(False, reason="This server has too many connections.")
            self.release(evicted)
        self._addresses[key] = address
        self._by_address[address] += 1
        if not authorized:
            self._unauthorized[key] = None
        return Admission(True, evicted)

    def authorize(self, key: Key) -> None:
        """Protect the connection from eviction: it has sent a valid token."""
        self._unauthorized.pop(key, None)

    def revoke_all(self) -> None:
        """Mark every connection as unauthorized, after the tokens have changed."""
        self._unauthorized = dict.fromkeys(self._addresses)

    def release(self, key: Key) -> None:
        """Free the slot of a closed connection. Idempotent."""
        address = self._addresses.pop(key, None)
        self._unauthorized.pop(key, None)
        if address is None:
            return
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
