"""The protocol from the game's side: every request is numbered, so a retry after a broken connection is safe.

    with Client("http://127.0.0.1:8000") as client:
        client.start("match-17")
        action = client.tick("match-17", observation)
        client.end("match-17")

Standard library only. `AsyncClient` has the same methods, to be awaited.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Generator
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from ludus.errors import Refused, Unreachable, UsageError
from ludus.game.protocol import END, ENDPOINT_HEADER, MAX_NAME_BYTES, REASONS, SPEC, START, STEP, TICK, refusal_from

_PAUSE_S = 0.2
"""Before the second retry after a broken connection; the first is made at once: most often an idle connection was closed."""
_MAX_HEAD = 64 << 10
_MAX_BODY = 256 << 20
_OVER = frozenset({404, 410, 500, 504})
"""After these the session is no more."""

Address = tuple[str, int]


class Client:
    """Blocks; one per thread, on one kept connection. `timeout_s` is for each attempt, from connecting to the last byte.

    Raises Refused for every answer that is not 200 (after the retries, for 429 and 503), Unreachable when none comes. After
    Unreachable it is not known whether the request counted: repeat it with the same body, or end the session.

    `direct`: after `start` go to the worker that owns the session (`Ludus-Endpoint`), past the shared port.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        token: str | None = None,
        timeout_s: float = 10.0,
        retries: int = 2,
        direct: bool = False,
    ) -> None:
        self._talk = _Talk(url, token, timeout_s, retries, direct)
        self._timeout_s = timeout_s
        self._sockets: dict[Address, tuple[socket.socket, _Reader]] = {}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Open sessions stay open on the server; the next call connects again."""
        while self._sockets:
            self._sockets.popitem()[1][0].close()

    def spec(self) -> dict[str, Any]:
        """The protocol's version, and the observation and action spaces if the server has told them."""
        return _spec_from(self._drive(self._talk.get(SPEC)))

    def start(self, session: str, body: bytes = b"", match: str | None = None) -> bytes:
        return self._drive(self._talk.step(START, session, body, match))

    def tick(self, session: str, body: bytes) -> bytes:
        return self._drive(self._talk.step(TICK, session, body))

    def end(self, session: str, body: bytes = b"") -> bytes:
        return self._drive(self._talk.step(END, session, body))

    def _drive(self, talk: _Conversation) -> bytes:
        try:
            attempt = next(talk)
            while True:
                if attempt.after_s:
                    time.sleep(attempt.after_s)
                try:
                    attempt = talk.send(self._once(attempt))
                except OSError as error:
                    attempt = talk.send(error)
        except StopIteration as stop:
            return cast(bytes, stop.value)

    def _once(self, attempt: _Attempt) -> _Reply:
        address, deadline = attempt.address, time.monotonic() + self._timeout_s
        kept = self._sockets.pop(address) if address in self._sockets else None
        connected, reader = kept or (self._connect(address), _Reader())
        try:
            connected.settimeout(self._timeout_s)
            connected.sendall(attempt.request)
            while (reply := reader.feed(connected.recv(65536))) is None:
                connected.settimeout(max(deadline - time.monotonic(), 1e-3))
        except BaseException:  # also when interrupted: what comes later on this connection is not the answer to the next request
            connected.close()
            raise
        if reply.close:
            connected.close()
        else:
            self._sockets[address] = connected, reader
        return reply

    def _connect(self, address: Address) -> socket.socket:
        connected = socket.create_connection(address, self._timeout_s)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = self._talk.tls
            return connected if tls is None else tls.wrap_socket(connected, server_hostname=address[0])
        except BaseException:
            connected.close()
            raise


class AsyncClient:
    """As `Client`, on one event loop. Calls from several tasks take turns on the one connection."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        token: str | None = None,
        timeout_s: float = 10.0,
        retries: int = 2,
        direct: bool = False,
    ) -> None:
        self._talk = _Talk(url, token, timeout_s, retries, direct)
        self._timeout_s = timeout_s
        self._wires: dict[Address, _Wire] = {}
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Open sessions stay open on the server; the next call connects again."""
        while self._wires:
            self._wires.popitem()[1].close()
        await asyncio.sleep(0)  # the sockets are closed in the next turn of the loop

    async def spec(self) -> dict[str, Any]:
        """The protocol's version, and the observation and action spaces if the server has told them."""
        return _spec_from(await self._drive(self._talk.get(SPEC)))

    async def start(self, session: str, body: bytes = b"", match: str | None = None) -> bytes:
        return await self._drive(self._talk.step(START, session, body, match))

    async def tick(self, session: str, body: bytes) -> bytes:
        return await self._drive(self._talk.step(TICK, session, body))

    async def end(self, session: str, body: bytes = b"") -> bytes:
        return await self._drive(self._talk.step(END, session, body))

    async def _drive(self, talk: _Conversation) -> bytes:
        async with self._turn:
            try:
                attempt = next(talk)
                while True:
                    if attempt.after_s:
                        await asyncio.sleep(attempt.after_s)
                    try:
                        attempt = talk.send(await self._once(attempt))
                    except OSError as error:
                        attempt = talk.send(error)
            except StopIteration as stop:
                return cast(bytes, stop.value)

    async def _once(self, attempt: _Attempt) -> _Reply:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        wire = self._wires.pop(attempt.address, None) or await self._connect(attempt.address)
        late = loop.call_at(deadline, wire.fail, TimeoutError("timed out"))
        try:
            reply = await wire.ask(attempt.request)
        except BaseException:  # also when cancelled: what comes later on this connection is not the answer to the next request
            wire.close()
            raise
        finally:
            late.cancel()
        if reply.close:
            wire.close()
        else:
            self._wires[attempt.address] = wire
        return reply

    async def _connect(self, address: Address) -> _Wire:
        loop, tls = asyncio.get_running_loop(), self._talk.tls
        async with asyncio.timeout(self._timeout_s):
            _, wire = await loop.create_connection(_Wire, *address, ssl=tls, server_hostname=address[0] if tls else None)
        return wire


# -- what both share: numbers, retries, what a reply means. No sockets in here. ------------------------------------------


class _Attempt(NamedTuple):
    address: Address
    request: bytes
    after_s: float
    """To be waited first."""


class _Reply(NamedTuple):
    status: int
    body: bytes
    retry_after_s: float | None
    endpoint: str
    close: bool


_Conversation = Generator[_Attempt, _Reply | OSError, bytes]
"""Yields what is to be sent, is sent what came of it, returns the body of the reply."""


class _Session:
    __slots__ = ("endpoint", "head", "seq", "unsure")

    def __init__(self, head: bytes, seq: int) -> None:
        self.head, self.seq = head, seq
        """`seq` is the number of the next request."""
        self.unsure: tuple[str, bytes] | None = None  # what was sent with that number and never answered
        self.endpoint: Address | None = None


class _Talk:
    def __init__(self, url: str, token: str | None, timeout_s: float, retries: int, direct: bool) -> None:
        parts = urlsplit(url)
        hint = "It looks like http://127.0.0.1:8000."
        try:
            port = parts.port
        except ValueError as error:
            raise UsageError(f"The url {url!r} has a port that is none.", hint) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"The url {url!r} does not name a server.", hint)
        if not (timeout_s > 0 and retries >= 0):
            raise UsageError(f"timeout_s is {timeout_s}, retries is {retries}.", "The first is above 0, the second 0 or more.")
        if direct and parts.scheme == "https":
            raise UsageError("direct=True does not go with https://: the direct ports of workers speak plain HTTP.")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.address: Address = (parts.hostname, port or (443 if self.tls else 80))
        self._path = parts.path.rstrip("/")
        self._common = f"Host: {_header('url', parts.netloc.rpartition('@')[2])}\r\n"
        if token is not None:
            self._common += f"Authorization: Bearer {_header('token', token)}\r\n"
        self._timeout_s, self._retries, self._direct = timeout_s, retries, direct
        self._sessions: dict[str, _Session] = {}
        self._starts = 0

    def get(self, path: str) -> _Conversation:
        reply = yield from self._insist(f"GET {self._path}{path} HTTP/1.1\r\n{self._common}\r\n".encode("latin-1"), None)
        if reply.status != 200:
            raise _refused(reply)
        return reply.body

    def step(self, kind: str, session: str, body: bytes, match: str | None = None) -> _Conversation:
        known = self._begin(session, body) if kind is START else self._open(session)
        earlier, known.unsure = known.unsure, (kind, body)
        if earlier is not None and earlier != (kind, body) and kind is TICK:
            known.unsure = earlier
            raise Unreachable(
                f"The last {earlier[0]} of session {session!r} was never answered; it may have counted.",
                "Send the same body again, or end the session.",
            )
        reply = yield from self._insist(_request(known, kind, body, match), known)
        if kind is END and earlier is not None and earlier[0] is not END and reply.status == 409:
            known.seq += 1  # what was never answered did count
            reply = yield from self._insist(_request(known, kind, body, match), known)
        known.unsure = None
        if reply.status != 200:
            if kind is START or reply.status in _OVER:
                self._sessions.pop(session, None)
            raise _refused(reply)
        known.seq += 1
        if kind is END:
            del self._sessions[session]
        elif kind is START and self._direct and reply.endpoint:
            known.endpoint = _address(reply.endpoint)
        return reply.body

    def _begin(self, session: str, body: bytes) -> _Session:
        known = self._sessions.get(session)
        if known is not None and known.unsure == (START, body):
            return known  # the same start again
        head = f"POST {self._path}{STEP} HTTP/1.1\r\n{self._common}Ludus-Session: {_header('session', session)}\r\n"
        # Every start has a number of its own: a new one is never taken for the retry of one that failed.
        fresh = self._sessions[session] = _Session(head.encode(), self._starts)
        self._starts += 1
        return fresh

    def _open(self, session: str) -> _Session:
        try:
            return self._sessions[session]
        except KeyError:
            message = f"This client has no open session {session!r}."
            raise Refused(404, "unknown_session", message, "Call start first.") from None

    def _insist(self, request: bytes, known: _Session | None) -> Generator[_Attempt, _Reply | OSError, _Reply]:
        """Attempts until there is an answer. Whether the last is a refusal is for the caller to see."""
        after_s = 0.0
        for attempt in range(self._retries + 1):
            address = (known and known.endpoint) or self.address
            outcome = yield _Attempt(address, request, after_s)
            if isinstance(outcome, _Reply):
                if outcome.status not in (429, 503):
                    return outcome
                asked = outcome.retry_after_s
                after_s = _PAUSE_S * (attempt + 1) if asked is None else asked
                if after_s > self._timeout_s:  # longer than we would wait for an answer: the caller knows what to do meanwhile
                    return outcome
            else:
                after_s = _PAUSE_S * attempt
                if known is not None:
                    known.endpoint = None  # the shared port may know more
        if isinstance(outcome, _Reply):
            return outcome
        raise _unreachable(address, outcome, self._timeout_s, self._retries) from outcome


def _request(known: _Session, kind: str, body: bytes, match: str | None) -> bytes:
    paired = b"" if match is None else f"Ludus-Match: {_header('match', match)}\r\n".encode()
    return b"%bLudus-Step: %b\r\nLudus-Seq: %d\r\n%bContent-Length: %d\r\n\r\n%b" % (
        known.head, kind.encode(), known.seq, paired, len(body), body,
    )  # fmt: skip


def _header(what: str, value: str) -> str:
    size = len(value.encode())
    if not value or size > MAX_NAME_BYTES * (16 if what == "token" else 1) or value != value.strip() or not value.isprintable():
        hint = f"It is up to {MAX_NAME_BYTES} bytes of UTF-8 without control characters; a UUID will do."
        raise UsageError(f"The {what} cannot be sent in a header." if what == "token" else f"The {what} is {value!r}.", hint)
    return value


def _refused(reply: _Reply) -> Refused:
    found = refusal_from(reply.status, reply.body)
    return Refused(found.status, found.error, found.message, found.hint, reply.retry_after_s)


def _unreachable(address: Address, error: OSError, timeout_s: float, retries: int) -> Unreachable:
    where = f"{address[0]}:{address[1]}"
    tries = f"{retries + 1} attempts" if retries else "1 attempt"
    if isinstance(error, TimeoutError):
        hint = "Is the server overloaded, or its actor stuck? timeout_s can be raised."
        return Unreachable(f"{where} did not answer within {timeout_s:g} s ({tries}).", hint)
    if isinstance(error, ConnectionRefusedError):
        return Unreachable(f"Nothing listens on {where} ({tries}).", "Start the server, or correct the url.")
    if isinstance(error, socket.gaierror):
        return Unreachable(f"The host {address[0]!r} is not known.", "Correct the url.")
    hint = "Is it a Ludus server, and is it still running?"
    return Unreachable(f"The connection to {where} broke ({tries}): {error.strerror or error}.", hint)


def _address(endpoint: str) -> Address | None:
    try:
        parts = urlsplit(f"//{endpoint}")
        return (parts.hostname, parts.port) if parts.hostname and parts.port else None
    except ValueError:
        return None


def _spec_from(body: bytes) -> dict[str, Any]:
    try:
        spec = json.loads(body)
    except ValueError:
        spec = None
    if not isinstance(spec, dict):
        raise Refused(200, "http", "The server's /spec is not a JSON object.", "Is it a Ludus server?")
    return spec


# -- replies ------------------------------------------------------------------------------------------------------------


class _Reader:
    """Bytes in, replies out, one at a time. Raises ConnectionError on anything that is not a reply of known length."""

    def __init__(self) -> None:
        self._buffer = b""
        self._head = b""  # of the reply before, which is mostly that of the next one too
        self._parsed: tuple[int, int, float | None, str, bool] = (0, 0, None, "", False)

    def feed(self, data: bytes) -> _Reply | None:
        if not data:
            raise ConnectionResetError("it was closed by the server")
        buffer = self._buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n") + 4
        if end < 4:
            if len(buffer) > _MAX_HEAD or not b"HTTP/1.".startswith(buffer[:7]):
                raise ConnectionError("what came back is not HTTP/1.1")
            return None
        head = buffer[:end]
        if head != self._head:
            self._parsed, self._head = _parse_head(head), head
        status, length, retry_after_s, endpoint, close = self._parsed
        if len(buffer) < end + length:
            return None
        if len(buffer) > end + length:
            raise ConnectionError("more came back than was asked for")
        self._buffer = b""
        return _Reply(status, buffer[end:], retry_after_s, endpoint, close)


def _parse_head(head: bytes) -> tuple[int, int, float | None, str, bool]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    code = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdigit() and len(code) == 3):
        raise ConnectionError(f"what came back is not HTTP/1.1 ({first[:40]!r})")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    length = fields.get("content-length", "")
    if not (length.isascii() and length.isdigit()) or int(length) > _MAX_BODY:
        raise ConnectionError(f"a reply {code} {REASONS.get(int(code), '')} came without a usable Content-Length")
    try:
        retry_after_s = max(0.0, float(fields["retry-after"]))
    except (KeyError, ValueError):  # it may also be a date; our server does not send one
        retry_after_s = None
    close = version == "HTTP/1.0" or fields.get("connection", "").lower() == "close"
    return int(code), int(length), retry_after_s, fields.get(ENDPOINT_HEADER.lower(), ""), close


class _Wire(asyncio.Protocol):
    """One connection of an AsyncClient."""

    def __init__(self) -> None:
        self._reader = _Reader()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[_Reply] | None = None
        self._lost: OSError | None = None

    def ask(self, request: bytes) -> asyncio.Future[_Reply]:
        self._waiter = asyncio.get_running_loop().create_future()
        if self._lost is not None or self._transport is None:
            self._waiter.set_exception(self._lost or ConnectionResetError("it was closed"))
        else:
            self._transport.write(request)
        return self._waiter

    def fail(self, error: OSError) -> None:
        self._lost = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(exc if isinstance(exc, OSError) else ConnectionResetError("it was closed by the server"))

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            self.fail(ConnectionError("something came back that nobody asked for"))
            return
        try:
            reply = self._reader.feed(data)
        except ConnectionError as error:
            self.fail(error)
            return
        if reply is not None:
            self._waiter.set_result(reply)
