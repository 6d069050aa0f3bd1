"""Which connections a server keeps when it has more than it can hold.

A server with tokens serves two kinds of connections: those that have sent a valid token, and those that have not yet. The second kind
costs an attacker nothing, so it must never keep the first kind out: when all slots are taken, the oldest connection without a token is
closed in favour of the new one. A client sends its token with its first request, so it is authorised long before its turn comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Admission(NamedTuple, Generic[Key]):
    """The answer to a new connection."""

    admitted: bool
    evicted: Key | None = None
    """A connection to close in favour of the new one."""
    reason: str = ""
    """Why it was not admitted."""


class ConnectionSlots(Generic[Key]):
    """Counts connections. Every method takes constant time."""

    def __init__(self, most: int, per_address: int = 0) -> None:
        """`per_address`: connections of one client address; 0 = any number."""
        self.most, self._per_address = most, per_address
        self._addresses: dict[Key, str] = {}
        self._unauthorized: dict[Key, None] = {}  # in order of arrival
        self._by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._addresses)

    def __contains__(self, key: Key) -> bool:
        return key in self._addresses

    @property
    def unauthorized(self) -> int:
        return len(self._unauthorized)

    def is_authorized(self, key: Key) -> bool:
        return key not in self._unauthorized

    def admit(self, key: Key, address: str = "", *, authorized: bool = False) -> Admission[Key]:
        """Take a slot for a new connection. The caller closes `evicted`, which holds no slot any more."""
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
        """The connection has sent a valid token: it is not evicted."""
        self._unauthorized.pop(key, None)

    def revoke_all(self) -> None:
        """The tokens have changed: every connection must show a valid one again."""
        self._unauthorized = dict.fromkeys(self._addresses)

    def release(self, key: Key) -> None:
        """The connection is closed. Releasing it again does nothing."""
        address = self._addresses.pop(key, None)
        self._unauthorized.pop(key, None)
        if address is None:
            return
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
