"""Exchange: what machines that share nothing else use to hand messages to a learner, and notices to each other.

It carries bytes and knows nothing of segments; `transport/stream_memory.py` makes a memory of it. A message is delivered at least once,
to one of those who pull, and comes again until it is acknowledged. The board holds a few small notices by key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from ludus.core import plugins
from ludus.errors import UnknownName, UsageError

EMBEDDED = "embedded"
"""No server: the memory of this process, or of the processes of this machine."""

MESSAGE_STREAMS: Mapping[str, str] = {
    "redis": "ludus.transport.redis_stream:RedisMessageStream",
    "rediss": "ludus.transport.redis_stream:RedisMessageStream",
}

PASSWORD = "LUDUS_MEMORY_PASSWORD"  # noqa: S105 # the name of the variable

MAX_MESSAGE = 256 << 20
"""Half of what Redis takes at most."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Delivery:
    """A message, and the name by which it is acknowledged."""

    id: str
    data: Buffer


class MessageStream(Protocol):
    """Safe for one thread at a time. Every wait has a deadline.

    All calls raise ExchangeUnavailable when the server cannot be reached for longer than the call may take (it is tried again, with
    back-off, until then), and UsageError when it refuses us (a wrong password): trying again would not help.
    """

    def push(self, message: Buffer | Sequence[Buffer], timeout_s: float) -> bool:
        """Hand over a message (its pieces are joined). False: there was no room for so long, and it is not there.

        After ExchangeUnavailable it may be there or not: whoever pushes it again numbers it, so that the reader can tell.
        """
        ...

    def pull(self, most: int, timeout_s: float) -> list[Delivery]:
        """Up to so many messages that nobody else has, oldest first; waits only while there is none at all."""
        ...

    def acknowledge(self, ids: Sequence[str]) -> None:
        """They were learned from, stored or thrown away: they never come again, and their room is free."""
        ...

    def reclaim(self, idle_s: float) -> int:
        """What others pulled so long ago and did not acknowledge comes again, to this one; returns how many. 0: whatever they hold."""
        ...

    def waiting(self) -> int:
        """Messages that are not acknowledged, delivered or not."""
        ...

    def post(self, key: str, value: bytes, rank: int = 0) -> bool:
        """Put a notice on the board. False, and nothing is changed, while there is one of a higher rank at that key."""
        ...

    def read(self, key: str) -> bytes | None: ...

    def posted(self, prefix: str) -> dict[str, bytes]:
        """All notices whose key begins so."""
        ...

    def erase(self, key: str) -> None: ...

    def drop(self) -> None:
        """Remove everything of this channel: messages and notices. For tests, and for runs that are over."""
        ...

    def close(self) -> None: ...


def check_url(url: str) -> None:
    """Raises UnknownName, UsageError when no exchange can be meant. Nothing is imported or asked."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme not in MESSAGE_STREAMS and ":" not in scheme:
        raise UnknownName(f"Unknown memory {scheme!r}.", plugins.did_you_mean(scheme, MESSAGE_STREAMS))
    if not (rest if separator else ":" in url):
        ways = ", ".join(f"{scheme}://HOST:PORT" for scheme in MESSAGE_STREAMS)
        raise UsageError(f"{url!r} is not a memory that several machines can reach.", f"Use {ways}, or module:Class.")


def split_password(url: str) -> tuple[str, str | None]:
    """The URL without its password, and the password. Raises UsageError, which does not show it, where it cannot be told apart."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url, None
    try:
        parts = urlsplit(f"//{rest}")
    except ValueError:
        raise UsageError("The URL of the memory cannot be read.", f"Write USER@HOST; put the password into {PASSWORD}.") from None
    if ":" in parts.netloc and "@" in f"{parts.path}{parts.query}{parts.fragment}":  # as / ? and # in a password have it
        raise UsageError(
            "The URL of the memory has an @ behind its host, as when / ? or # are in a password.",
            f"Write USER@HOST; put the password into {PASSWORD}.",
        )
    if {"password", "username"} & dict(parse_qsl(parts.query, keep_blank_values=True)).keys():
        raise UsageError(
            "The URL of the memory has a user or a password in its query.", f"Write USER@HOST; put the password into {PASSWORD}."
        )
    if parts.password is None:
        return url, None
    user, _, place = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    return f"{scheme}:{urlunsplit(parts._replace(netloc=f'{name}@{place}' if name else place))}", unquote(parts.password)


def open_message_stream(url: str, channel: str, room: int) -> MessageStream:
    """The exchange at `scheme://…`, or of a user's class (`module:Class`, `module:Class://…`). Raises UnknownName, UsageError, ExchangeUnavailable.

    `channel`: the name of the run; channels of one server do not know of each other. `room`: messages that may wait in it.
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
