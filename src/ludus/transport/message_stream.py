"""Message stream: protocol for message servers between the machines of a fleet.

It carries bytes; `stream_memory` sends segments through it. A message is delivered at least once, to one of the readers, and
redelivered until it is acknowledged. A board holds small notices by key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from ludus.core import plugins
from ludus.errors import UnknownName, UsageError

MESSAGE_STREAMS: Mapping[str, str] = {
    "redis": "ludus.transport.redis_stream:RedisMessageStream",
    "rediss": "ludus.transport.redis_stream:RedisMessageStream",
}

PASSWORD = "LUDUS_MEMORY_PASSWORD"  # noqa: S105 # the name of the variable

MAX_MESSAGE = 256 << 20
"""Bytes; half of the limit of Redis."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Delivery:
    """A message, and the id by which it is acknowledged."""

    id: str
    data: Buffer


class MessageStream(Protocol):
    """For one thread at a time. Every wait has a time limit.

    All calls retry with back-off within their time limit, and then raise ExchangeUnavailable. They raise UsageError when the
    server denies access (a wrong password).
    """

    def push(self, message: Buffer | Sequence[Buffer], timeout_s: float) -> bool:
        """Send a message (pieces are joined). Returns False if there was no room within the time limit; nothing was sent.

        After ExchangeUnavailable the message may have been sent or not: senders number messages, so that readers detect
        duplicates.
        """
        ...

    def pull(self, most: int, timeout_s: float) -> list[Delivery]:
        """Return up to `most` messages that no other reader has, oldest first; waits only while there are none."""
        ...

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Mark messages as processed: they are not redelivered, and their room is free."""
        ...

    def reclaim(self, idle_s: float) -> int:
        """Take over messages that other readers pulled at least `idle_s` ago and did not acknowledge; return their number."""
        ...

    def waiting(self) -> int:
        """Return the number of unacknowledged messages, delivered or not."""
        ...

    def post(self, key: str, value: bytes, rank: int = 0) -> bool:
        """Set a notice. Returns False and changes nothing if the key has a notice of a higher rank."""
        ...

    def read(self, key: str) -> bytes | None: ...

    def posted(self, prefix: str) -> dict[str, bytes]:
        """Return all notices whose key begins with `prefix`."""
        ...

    def erase(self, key: str) -> None: ...

    def drop(self) -> None:
        """Remove all messages and notices of this channel. For tests and finished runs."""
        ...

    def close(self) -> None: ...


def check_url(url: str) -> None:
    """Raise UnknownName or UsageError if the URL cannot be a message stream. Imports nothing and does not connect."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme not in MESSAGE_STREAMS and ":" not in scheme:
        raise UnknownName(f"Unknown memory {scheme!r}.", plugins.did_you_mean(scheme, MESSAGE_STREAMS))
    if not (rest if separator else ":" in url):
        ways = ", ".join(f"{scheme}://HOST:PORT" for scheme in MESSAGE_STREAMS)
        raise UsageError(f"{url!r} is not a memory that several machines can reach.", f"Use {ways}, or module:Class.")


def split_password(url: str) -> tuple[str, str | None]:
    """Return the URL without its password, and the password. Raises UsageError (without the password) if it is ambiguous."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url, None
    try:
        parts = urlsplit(f"//{rest}")
    except ValueError:
        raise UsageError(
            "The URL of the memory cannot be parsed.", f"Write USER@HOST; put the password into {PASSWORD}."
        ) from None
    if ":" in parts.netloc and "@" in f"{parts.path}{parts.query}{parts.fragment}":  # a password with / ? or #
        raise UsageError(
            "The URL of the memory has an @ after its host, as when a password contains / ? or #.",
            f"Write USER@HOST; put the password into {PASSWORD}.",
        )
    if {"password", "username"} & dict(parse_qsl(parts.query, keep_blank_values=True)).keys():
        raise UsageError(
            "The URL of the memory has a user or a password in its query.", f"Write USER@HOST; put the password into {PASSWORD}."
        )
    if parts.password is None:
        return url, None
    user, _, host = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    return f"{scheme}:{urlunsplit(parts._replace(netloc=f'{name}@{host}' if name else host))}", unquote(parts.password)


def open_message_stream(url: str, channel: str, room: int) -> MessageStream:
    """Open the stream at `scheme://…`, or of a user's class (`module:Class`, `module:Class://…`).

    `channel`: name of the run; channels of one server are independent. `room`: maximum number of waiting messages. Raises
    UnknownName, UsageError, ExchangeUnavailable.
    """
    check_url(url)
    scheme, separator, _ = url.partition("://")
    make = (
        plugins.resolve("memory", scheme, MESSAGE_STREAMS)
        if separator
        else plugins.import_object(url, "memory", plugins.is_class)
    )
    opened: MessageStream = make(url, channel, room)
    return opened
