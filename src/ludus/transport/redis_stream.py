"""Message stream on a Redis server (6.2 or later): a Redis stream with one consumer group, and a hash of notices.

A message stays in the stream until it is acknowledged, so nothing is lost while no reader is connected, and messages of a reader
that died are redelivered. What survives a crash of Redis depends on `appendfsync`: see docs/fleets.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from ludus.core import plugins
from ludus.core.backoff import Backoff
from ludus.errors import ExchangeUnavailable, UsageError
from ludus.transport.message_stream import MAX_MESSAGE, PASSWORD, Buffer, Delivery

log = logging.getLogger(__name__)

_GROUP, _FIELD = b"learners", b"m"
_REPLY_S = 1.0  # for a reply, in addition to the caller's time limit: `timeout_s=0` still allows one round trip
_CALL_S = 1.0  # time limit of calls without a parameter for it
_BLOCK_S = 5.0  # a server that disappears silently is detected after this and _REPLY_S
_TRANSFER_S = 30.0  # for a transfer in progress
_MIN_RATE = 256 << 10  # bytes per second: sent data may still be in local buffers when the wait for the reply begins
_LINES_BYTES = 4096  # read-ahead: the lines between two messages, and little of the next message
_MAX_BULK = MAX_MESSAGE + (MAX_MESSAGE >> 6)  # with a header, and incompressible; larger ones are skipped
_FULL_S = (0.002, 0.05)  # interval of checks whether there is room: first, maximum
_DOWN_S = (0.05, 2.0)  # interval of connection attempts: first, maximum
_WARN_EVERY_S = 30.0
_UNSURE_S, _LOOK_S = 30.0, 1.0  # requests on an abandoned connection may reach the server late: check for so long, so often
_IDS = 1000  # per command
_PIECES = 256  # maximum for sendmsg

_LATER = ("LOADING", "READONLY", "MASTERDOWN", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MISCONF", "NOREPLICAS")
"""Temporary errors."""

_POST = b"""
local old = redis.call('HGET', KEYS[1], ARGV[1])
local rank = old and tonumber(string.match(old, '^(-?%d+) '))
if rank and rank > tonumber(ARGV[2]) and rank < 2^53 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
return 1
"""
_LEAVE = b"""
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  if consumer[2] == ARGV[2] and consumer[4] == 0 then return redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2]) end
end
return -1
"""
_RANKS = 1 << 53  # largest exact integer in Lua

Id = tuple[int, int]


class _ConnectionLost(Exception):
    """The connection broke or timed out. The message contains no secrets."""

    def __init__(self, why: str, at_once: bool = False) -> None:
        """`at_once`: an established connection broke, as after a restart of the server: reconnect without delay."""
        super().__init__(why)
        self.at_once = at_once


class _ErrorReply(str):
    """An error reply of the server."""


class _OutOfMemory(Exception):
    """The server has no memory left for the command (maxmemory)."""


class RedisMessageStream:
    """Connects on first use, and again after the connection was lost. One connection; one thread at a time.

    Every writer enforces `room` by the length in each reply: with N writers up to N - 1 more messages may wait. (A script that
    enforces it exactly halved the throughput.)
    """

    def __init__(self, url: str, channel: str, room: int) -> None:
        """Raises UsageError, MissingExtra."""
        if not channel or room < 1:
            raise UsageError(f"A message stream needs a channel name and room for messages, not {channel!r} and {room}.")
        self._connection = _RedisConnection(url)
        self._room = room
        self._stream = f"ludus:{{{channel}}}:messages".encode()  # braces: all keys of a channel are in one cluster slot
        self._board = f"ludus:{{{channel}}}:board".encode()
        self._name = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}".encode()
        self._length: int | None = None
        self._held: set[Id] = set()
        self._again: deque[Id] = deque()  # assigned to us, not delivered to the caller yet; oldest first
        self._unsure_until = self._look_at = 0.0  # a reply with messages was lost: they are assigned to us, ids unknown
        self._joined = False
        self._warned_at = -_WARN_EVERY_S
        self._add = (b"*5\r\n" + _bulk(b"XADD") + _bulk(self._stream) + _bulk(b"*") + _bulk(_FIELD), b"\r\n" + self._xlen())

    def _xlen(self) -> bytes:
        return _encode_command(b"XLEN", self._stream)

    # -- writing

    def push(self, message: Buffer | Sequence[Buffer], timeout_s: float) -> bool:
        pieces: list[Buffer] = [message] if isinstance(message, (bytes, bytearray, memoryview)) else list(message)
        if len(pieces) > _PIECES:
            pieces = [b"".join(pieces)]
        size = sum(memoryview(piece).nbytes for piece in pieces)
        request = [b"%b$%d\r\n" % (self._add[0], size), *pieces, self._add[1]]
        end = time.monotonic() + timeout_s
        backoff, unsure_until = Backoff(*_FULL_S, generator=random), self._unsure_until
        while True:
            try:
                if self._length is None:
                    self._create_group(end)  # before the server is full, which would prevent reading too
                if self._length is None or self._length >= self._room:
                    (self._length,) = self._ask([self._xlen()], 1, end)
                if self._length is not None and self._length < self._room:
                    _, self._length = self._ask(request, 2, end)
                    return True
            except _OutOfMemory:
                self._warn_of_memory()
                backoff = Backoff(_FULL_S[1], _FULL_S[1], generator=random)
            left = end - time.monotonic()
            if left <= 0 and self._unsure_until != unsure_until:  # an attempt without a reply may have succeeded
                raise ExchangeUnavailable(f"{self._connection.shown} was unreachable during a push, and has no room now.")
            if left <= 0:
                return False
            time.sleep(min(left, backoff.next_delay()))

    def _warn_of_memory(self) -> None:
        now = time.monotonic()
        if now - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = now
            log.warning("%s has no memory left (maxmemory): sending waits until there is room", self._connection.shown)

    # -- reading

    def pull(self, most: int, timeout_s: float) -> list[Delivery]:
        end = time.monotonic() + timeout_s
        while True:
            try:
                if self._look_at < self._unsure_until and self._look_at <= time.monotonic():
                    self._find_own(end)
                found = self._pull_again(most, end) if self._again else self._pull_new(most, end)
            except _Interrupted:
                continue
            if found or (not self._again and time.monotonic() >= end):
                self._held.update(number for number, _ in found)
                return [Delivery(_id_text(number), data) for number, data in found]

    def _pull_new(self, most: int, end: float) -> list[tuple[Id, Buffer]]:
        found = self._read(most, b">", end, min(end - time.monotonic(), _BLOCK_S))
        return [(number, data) for number, data in found if data is not None]

    def _pull_again(self, most: int, end: float) -> list[tuple[Id, Buffer]]:
        """Read the oldest of the messages in `_again`, except those that others have reclaimed since."""
        found = self._read(most, _id_bytes(_previous_id(self._again[0])), end)
        last, wanted = found[-1][0] if len(found) == most else self._again[-1], set(self._again)
        while self._again and self._again[0] <= last:
            self._again.popleft()
        if gone := [_id_bytes(number) for number, data in found if data is None]:  # acknowledged by the previous reader
            self._ask([_encode_command(b"XACK", self._stream, _GROUP, *gone)], 1, end)
        return [(number, data) for number, data in found if data is not None and number in wanted]

    def _read(self, most: int, after: bytes, end: float, block_s: float = 0.0) -> list[tuple[Id, Buffer | None]]:
        """Raises _Interrupted when the connection was lost: messages in the lost reply are assigned to us."""
        words = [b"XREADGROUP", b"GROUP", _GROUP, self._name, b"COUNT", b"%d" % most]
        if block_s > 0:
            words += [b"BLOCK", b"%d" % max(1, int(block_s * 1000))]
        answer = self._in_group(_encode_command(*words, b"STREAMS", self._stream, after), end, repeat=False)
        return [(_parse_id(name), _message_of(fields)) for name, fields in answer[0][1]] if answer else []

    def acknowledge(self, ids: Sequence[str]) -> None:
        end = time.monotonic() + _CALL_S
        for start in range(0, len(ids), _IDS):
            numbers = [_parse_id(name.encode()) for name in ids[start : start + _IDS]]
            names = [_id_bytes(number) for number in numbers]
            # In this order: a server that dies in between leaves a pending id without a message, not a message without a reader.
            self._ask(
                [_encode_command(b"XDEL", self._stream, *names) + _encode_command(b"XACK", self._stream, _GROUP, *names)], 2, end
            )
            self._held.difference_update(numbers)

    def reclaim(self, idle_s: float) -> int:
        end = time.monotonic() + _CALL_S
        cursor, claimed = b"0-0", list[Id]()
        while True:
            words = (self._stream, _GROUP, self._name, b"%d" % int(idle_s * 1000), cursor, b"COUNT", b"%d" % _IDS, b"JUSTID")
            answer = self._in_group(_encode_command(b"XAUTOCLAIM", *words), end)
            cursor = answer[0]
            claimed += [_parse_id(name) for name in answer[1] if name]
            if cursor == b"0-0":
                break
        return self._deliver_again(claimed)

    def _find_own(self, end: float) -> None:
        """Find messages that are assigned to us and were not received, after a reply was lost."""
        cursor, found = b"-", list[Id]()
        while True:
            answer = self._in_group(
                _encode_command(b"XPENDING", self._stream, _GROUP, cursor, b"+", b"%d" % _IDS, self._name), end
            )
            found += [_parse_id(entry[0]) for entry in answer]
            if len(answer) < _IDS:
                break
            cursor = b"(" + answer[-1][0]
        self._look_at = time.monotonic() + _LOOK_S
        self._deliver_again(found)

    def _deliver_again(self, ids: list[Id]) -> int:
        new = set(ids) - self._held - set(self._again)
        self._again = deque(sorted(new.union(self._again)))
        return len(new)

    def _in_group(self, request: bytes, end: float, repeat: bool = True) -> Any:
        """Run a command of a reader; create the group if it is missing, as after the server lost its data."""
        for _ in range(3):
            try:
                (answer,) = self._ask([request], 1, end, repeat)
            except _NoGroup:
                self._recreate_group(end)
            else:
                self._joined = True
                return answer
        raise ExchangeUnavailable(f"The consumer group at {self._connection.shown} disappears as soon as it is created.")

    def _recreate_group(self, end: float) -> None:
        if self._joined:
            log.warning("%s has lost its data, or the channel was dropped; continuing with new messages", self._connection.shown)
        self._held.clear()
        self._again.clear()
        try:
            self._create_group(end)
        except _OutOfMemory as error:
            raise ExchangeUnavailable(f"{self._connection.shown} has no memory left to create a consumer group.") from error

    def _create_group(self, end: float) -> None:
        """Create the consumer group unless it exists. Raises _OutOfMemory."""
        with contextlib.suppress(_GroupExists):
            self._ask([_encode_command(b"XGROUP", b"CREATE", self._stream, _GROUP, b"0", b"MKSTREAM")], 1, end)

    def waiting(self) -> int:
        return int(self._ask([self._xlen()], 1, time.monotonic() + _CALL_S)[0])

    # -- the board

    def post(self, key: str, value: bytes, rank: int = 0) -> bool:
        if not -_RANKS < rank < _RANKS:
            raise UsageError(f"The rank {rank} of the notice {key!r} is too large.", "It must be below 2^53.")
        end = time.monotonic() + _CALL_S
        request = _encode_command(b"EVAL", _POST, b"1", self._board, key.encode(), b"%d" % rank, bytes(value))
        try:
            return bool(self._ask([request], 1, end)[0])
        except _OutOfMemory as error:
            self._warn_of_memory()
            raise ExchangeUnavailable(f"{self._connection.shown} has no memory left for the notice {key!r}.") from error

    def read(self, key: str) -> bytes | None:
        (found,) = self._ask([_encode_command(b"HGET", self._board, key.encode())], 1, time.monotonic() + _CALL_S)
        return None if found is None else _strip_rank(found)

    def posted(self, prefix: str) -> dict[str, bytes]:
        (found,) = self._ask([_encode_command(b"HGETALL", self._board)], 1, time.monotonic() + _CALL_S)
        pairs = zip(found[::2], found[1::2], strict=True)
        return {
            bytes(name).decode("utf-8", "replace"): _strip_rank(value)
            for name, value in pairs
            if bytes(name).startswith(prefix.encode())
        }

    def erase(self, key: str) -> None:
        self._ask([_encode_command(b"HDEL", self._board, key.encode())], 1, time.monotonic() + _CALL_S)

    # -- the end

    def drop(self) -> None:
        self._ask([_encode_command(b"UNLINK", self._stream, self._board)], 1, time.monotonic() + _CALL_S)
        self._joined, self._length = False, None
        self._held.clear()
        self._again.clear()

    def close(self) -> None:
        """Leave the consumer group. Other readers can reclaim unacknowledged messages."""
        if self._joined and self._connection.connected:
            try:
                self._connection.exchange(
                    [_encode_command(b"EVAL", _LEAVE, b"1", self._stream, _GROUP, self._name)], 1, time.monotonic()
                )
            except (_ConnectionLost, UsageError) as error:
                log.debug("could not leave the consumer group: %s", error)
        self._connection.close()

    # -- requests

    def _ask(self, request: Sequence[Buffer], answers: int, end: float, repeat: bool = True) -> list[Any]:
        """Send a request, with retries until `end` (at least one attempt). Without `repeat`, raises _Interrupted instead."""
        while True:
            try:
                replies = self._connection.exchange(request, answers, end)
                error_reply = next((reply for reply in replies if isinstance(reply, _ErrorReply)), None)
                if error_reply is None:
                    return replies
                self._raise_error(error_reply)
            except _ConnectionLost as error:
                self._length = None
                self._look_at, self._unsure_until = 0.0, time.monotonic() + _UNSURE_S
                if not error.at_once and not self._connection.rest(end):
                    raise ExchangeUnavailable(
                        f"{self._connection.shown} cannot be reached: {error}.", "Is it running, and the address right?"
                    ) from error
                if not repeat:
                    raise _Interrupted from None

    def _raise_error(self, refusal: str) -> None:
        """Raise the exception for an error reply."""
        word, shown = refusal.split(" ", 1)[0], self._connection.shown
        if "OOM command not allowed" in refusal:
            raise _OutOfMemory
        if word in ("NOGROUP", "UNBLOCKED"):  # UNBLOCKED: the group was removed during a blocking read
            raise _NoGroup
        if word == "BUSYGROUP":
            raise _GroupExists
        if word in _LATER or any(f"-{later} " in refusal for later in _LATER):  # the latter: from a script
            self._connection.close()  # after a fail-over the host name may refer to another server
            raise _ConnectionLost(refusal)
        if word in ("NOAUTH", "WRONGPASS", "NOPERM"):
            raise _access_denied(shown, refusal)
        if word == "MOVED":
            raise UsageError(
                f"{shown} is a node of a Redis cluster that does not hold this channel.", f"Use {refusal.split()[-1]}."
            )
        if "unknown command" in refusal:
            raise UsageError(f"{shown} is too old: {refusal}.", "Redis 6.2 or later is needed.")
        raise UsageError(f"{shown} refuses: {refusal}.", "Does something else use the same keys?")


class _Interrupted(Exception):
    pass


class _NoGroup(Exception):
    pass


class _GroupExists(Exception):
    pass


def _access_denied(shown: str, refusal: str) -> UsageError:
    error = UsageError(
        f"{shown} refuses the user or the password.", f"Name the user in the URL; the password is taken from {PASSWORD}."
    )
    if refusal.startswith("NOPERM"):
        error = UsageError(
            f"{shown} does not allow it: {refusal}.", "Give the user ~ludus:* +@read +@write +@scripting +@connection."
        )
    error.final = True
    return error


# -- one connection -----------------------------------------------------------------------------------------------------


class _RedisConnection:
    """Requests and replies over one socket. redis-py connects (TLS, user, password, database); requests and replies are handled
    here, to avoid copies of messages and to enforce deadlines."""

    def __init__(self, url: str) -> None:
        redis = plugins.require("redis", "redis", "Memory on Redis")
        try:
            parts = urlsplit(url)
            options = redis.connection.parse_url(url)
            port = parts.port or 6379
        except ValueError as error:
            raise UsageError(f"The address of the memory is not a Redis URL: {error}.", "Use redis://USER@HOST:PORT/0.") from None
        self.shown = f"Redis at {parts.hostname or 'localhost'}:{port}"
        """For messages: without secrets."""
        kind = options.pop("connection_class", redis.connection.Connection)
        password = options.pop("password", None) or os.environ.get(PASSWORD) or None
        if parts.username and password is None:
            raise UsageError(
                f"There is no password for the user {unquote(parts.username)!r} of {self.shown}.", f"Set {PASSWORD}."
            )
        limits = {"socket_connect_timeout": _REPLY_S, "socket_timeout": _REPLY_S, "socket_keepalive": True}
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        try:
            self._client: Any = kind(**{**options, **limits, "password": password, "protocol": 2, "retry": retry})
        except (TypeError, ValueError, redis.exceptions.RedisError) as error:
            raise UsageError(f"The options in the URL of {self.shown} are not those of redis-py: {error}.") from None
        self._errors = redis.exceptions
        self._socket: Any = None
        self._parser: _ReplyParser | None = None
        self._backoff, self._not_before = Backoff(*_DOWN_S, generator=random), 0.0
        self._why = "it did not answer a moment ago"

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def exchange(self, request: Sequence[Buffer], answers: int, end: float) -> list[Any]:
        """Send a request and return `answers` replies, which include error replies. Raises _ConnectionLost, UsageError.

        The server must reply by `end` (at most _BLOCK_S) plus _REPLY_S; a transfer in progress gets more time.
        """
        worked = self._socket is not None
        if not worked:
            self._open()
        now = time.monotonic()
        size = sum(memoryview(piece).nbytes for piece in request)
        end = min(max(end, now), now + _BLOCK_S) + _REPLY_S + min(size / _MIN_RATE, _TRANSFER_S)
        try:
            self._send(request, end)
            assert self._parser is not None
            self._parser.until(end)
            replies = [self._parser.read() for _ in range(answers)]
        except (OSError, ValueError) as error:  # ValueError: not a reply of Redis
            self.close()
            if isinstance(error, TimeoutError):
                raise _ConnectionLost("it does not answer") from error
            raise _ConnectionLost(_reason(error), at_once=worked) from error
        except BaseException:  # interrupted by a signal: later replies on this connection would be out of order
            self.close()
            raise
        self._backoff.reset()
        self._not_before = 0.0
        return replies

    def rest(self, end: float) -> bool:
        """Wait before the next attempt; return False if there is no time for one."""
        now = time.monotonic()
        if self._not_before <= now:
            self._not_before = now + self._backoff.next_delay()
        if self._not_before >= end:
            return False
        time.sleep(max(0.0, self._not_before - now))
        return True

    def _open(self) -> None:
        if time.monotonic() < self._not_before:
            raise _ConnectionLost(self._why)
        try:
            self._client.connect()
        except (self._errors.RedisError, OSError) as error:
            self._client.disconnect()
            raise self._translate_error(error) from None
        self._socket = self._client._sock
        self._parser = _ReplyParser(self._socket)

    def _translate_error(self, error: Exception) -> Exception:
        """Return the exception to raise for a failed connection attempt."""
        if isinstance(error, (self._errors.AuthenticationError, self._errors.NoPermissionError)):
            return _access_denied(self.shown, str(error))
        cause = error.__cause__ or error.__context__ or error  # redis-py raises ConnectionError for all causes
        if isinstance(cause, ssl.SSLCertVerificationError):
            return UsageError(f"{self.shown} shows a certificate that is not trusted.", "Add ?ssl_ca_certs=FILE to the URL.")
        if isinstance(cause, FileNotFoundError):
            return UsageError(
                f"A file in the URL of {self.shown} does not exist.", "See ssl_ca_certs, ssl_certfile, ssl_keyfile."
            )
        if isinstance(error, self._errors.ResponseError) and not str(error).startswith(_LATER):
            return UsageError(f"{self.shown} refuses: {error}.")
        self._why = _reason(cause)
        return _ConnectionLost(self._why)

    def _send(self, request: Sequence[Buffer], end: float) -> None:
        sent, limit = 0, end + _TRANSFER_S
        if not isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(_time_left(end))
            sent = self._socket.sendmsg(request)
        for piece in request:
            left = memoryview(piece).cast("B")
            sent, left = max(0, sent - len(left)), left[sent:]
            while left:
                self._socket.settimeout(_time_left(end))
                left = left[self._socket.send(left) :]
                end = min(max(end, time.monotonic() + _REPLY_S), limit)

    def close(self) -> None:
        self._client.disconnect()
        self._socket = self._parser = None


class _ReplyParser:
    """Parses replies of the server (RESP 2). Messages are received directly into their final buffer.

    `until` sets the deadline; a reply in progress gets more time, up to _TRANSFER_S.
    """

    def __init__(self, connected: Any) -> None:
        self._socket = connected
        self._scatters = not isinstance(connected, ssl.SSLSocket)
        self._lines = bytearray(_LINES_BYTES)
        self._ahead = memoryview(self._lines)
        self._at = self._filled = 0
        self._end = self._limit = 0.0

    def until(self, end: float) -> None:
        self._end, self._limit = end, end + _TRANSFER_S

    def read(self) -> Any:
        """Return a number, bytes, None, a list of these, or an _ErrorReply. Raises OSError (also on time-out), ValueError."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            size = int(rest)
            return None if size < 0 else self._bulk(size)
        if kind == b"*":
            count = int(rest)
            return None if count < 0 else [self.read() for _ in range(count)]
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        if kind == b"-":
            return _ErrorReply(rest.decode("utf-8", "replace"))
        raise ValueError(f"it answers {line[:40]!r}, which is not Redis")

    def _line(self) -> bytes:
        while (stop := self._lines.find(b"\r\n", self._at, self._filled)) < 0:
            if self._at == 0 and self._filled == _LINES_BYTES:
                raise ValueError("it sends a line without an end, which is not Redis")
            self._read_ahead()
        line = bytes(self._ahead[self._at : stop])
        self._at = stop + 2
        return line

    def _read_ahead(self) -> None:
        self._ahead[: self._filled - self._at] = bytes(self._ahead[self._at : self._filled])
        self._at, self._filled = 0, self._filled - self._at
        self._filled += self._receive([self._ahead[self._filled :]])

    def _bulk(self, size: int) -> Buffer:
        """Read a bulk string and its terminator; short ones as bytes."""
        if size <= _LINES_BYTES // 2:
            while self._filled - self._at < size + 2:
                self._read_ahead()
            data = bytes(self._ahead[self._at : self._at + size])
            self._at += size + 2
            return data
        if size > _MAX_BULK:
            self._skip(size + 2)
            return b""
        body = np.empty(size + 2, np.uint8).data
        have = min(self._filled - self._at, size + 2)
        body[:have] = self._ahead[self._at : self._at + have]
        self._at += have
        while have < size + 2:  # the read-ahead buffer is empty; it takes what follows the body
            have += self._receive([body[have:], self._ahead])
            self._at, self._filled = 0, max(0, have - size - 2)
        return body[:size]

    def _skip(self, size: int) -> None:
        size -= self._filled - self._at
        while size > 0:
            self._at = self._filled = 0
            got = self._receive([self._ahead])
            self._at, self._filled = min(size, got), got
            size -= got

    def _receive(self, buffers: list[memoryview]) -> int:
        """Receive available data into the buffers, one after the other."""
        self._socket.settimeout(_time_left(self._end))
        size: int = self._socket.recvmsg_into(buffers)[0] if self._scatters else self._socket.recv_into(buffers[0])
        if not size:
            raise ConnectionResetError("it closed the connection")
        self._end = min(max(self._end, time.monotonic() + _REPLY_S), self._limit)
        return size


def _time_left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).rstrip(".")


# -- encoding -----------------------------------------------------------------------------------------------------------


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def _encode_command(*words: bytes) -> bytes:
    return b"*%d\r\n%b" % (len(words), b"".join(map(_bulk, words)))


def _parse_id(name: bytes) -> Id:
    milliseconds, _, number = name.partition(b"-")
    return int(milliseconds), int(number)


def _id_text(number: Id) -> str:
    return f"{number[0]}-{number[1]}"


def _id_bytes(number: Id) -> bytes:
    return b"%d-%d" % number


def _previous_id(number: Id) -> Id:
    return (number[0], number[1] - 1) if number[1] else (number[0] - 1, (1 << 64) - 1)


def _message_of(fields: list[bytes] | None) -> bytes | None:
    """Return the message of a stream entry; None if it was deleted, b"" if the entry is not ours."""
    if fields is None:
        return None
    return next((value for name, value in zip(fields[::2], fields[1::2], strict=False) if name == _FIELD), b"")


def _strip_rank(value: Buffer) -> bytes:
    return bytes(value).partition(b" ")[2]
