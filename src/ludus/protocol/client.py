"""The protocol from the game's side: every request is numbered, so a retry after a broken connection is safe.

    with Client("http://127.0.0.1:8000") as client:
        client.start("match-17")
        action = client.tick("match-17", observation)
        client.end("match-17")

A game that cannot wait gives its ticks a deadline, and says what to do instead:

    with Client(deadline_s=0.03, fallback="repeat", default=NOTHING) as client: …

Standard library only. `AsyncClient` has the same methods, to be awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import Generator, Mapping
from typing import Any, Literal, NamedTuple, cast, get_args
from urllib.parse import urlsplit

from ludus.errors import DeadlineMissed, LudusError, Refused, Unreachable, UsageError
from ludus.io.tcp import keep_alive
from ludus.protocol.spec import (
    END,
    ENDPOINT_HEADER,
    MAX_NAME_BYTES,
    MAX_SEQ,
    MAX_TEMPERATURE,
    REASONS,
    SPEC,
    START,
    STEP,
    TICK,
    refusal_from,
)

_IDLE_S, _LOST_S = 5, 10
"""A machine that has not said a word for so long while we wait for its answer is gone: a game may wait for an hour, but not for nobody."""
_CONNECT_S = 10.0
"""To reach it at all, at most."""
_PAUSE_S = 0.2
"""Before the second retry after a broken connection; the first is made at once: most often an idle connection was closed."""
_BUSY_PAUSE_S, _MAX_BUSY_PAUSE_S = 0.002, 0.02
"""Between requests to a session that still computes a tick that was given up."""
_MAX_HEAD = 64 << 10
_MAX_BODY = 256 << 20
_MAX_CHUNK_LINE = 1024
_MAX_INTERIM = 8
"""Replies 1xx before the one that counts."""
_OVER = frozenset({410, 500, 504})
"""After these, in our words, the session is no more."""
_NOT_NOW = frozenset({429, 503})
"""After these the same request may be sent again, later."""
_OUT_OF_TURN = 409

Address = tuple[str, int]
Fallback = Literal["error", "repeat", "default"]


class Client:
    """Blocks; one per thread, on one kept connection. `timeout_s` is for each attempt, from connecting to the last byte.

    Raises Refused for every answer that is not 200 (after the retries, for 429 and 503), Unreachable when none comes, or one
    from a proxy in its stead (500, 502, 504 without our words). After Unreachable it is not known whether the request counted:
    repeat it with the same body, or end the session.

    `deadline_s` is for a tick with all its retries. When it is missed, `tick` returns the fallback: `repeat` the last reply to a
    tick of this session (before the first one `default`), `default` those bytes, `error` none: it raises DeadlineMissed. In every
    case `missed` goes up, and the next tick may say something else: the client finds out what has counted.

    `direct`: after `start` go to the worker that owns the session (`Ludus-Endpoint`), past the shared port.
    `cafile`: with https, the certificates to trust instead of the system's.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        token: str | None = None,
        timeout_s: float = 10.0,
        retries: int = 2,
        direct: bool = False,
        *,
        deadline_s: float | None = None,
        fallback: Fallback = "error",
        default: bytes | None = None,
        cafile: str | None = None,
    ) -> None:
        self._talk = _Talk(url, token, timeout_s, retries, direct, cafile)
        self._talk.fall_back(deadline_s, fallback, default)
        self._sockets: dict[Address, tuple[socket.socket, _Reader]] = {}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Open sessions stay open on the server; the next call connects again."""
        while self._sockets:
            self._sockets.popitem()[1][0].close()

    @property
    def missed(self) -> int:
        """How many ticks were not answered by their deadline."""
        return self._talk.missed

    def missed_of(self, session: str) -> int:
        """Those of one session, while it is open; 0 for any other."""
        return self._talk.missed_of(session)

    def spec(self) -> dict[str, Any]:
        """The protocol's version, and the observation and action spaces if the server has told them."""
        return _spec_from(self._drive(self._talk.get(SPEC)))

    def start(
        self,
        session: str,
        body: bytes = b"",
        match: str | None = None,
        *,
        model: str | None = None,
        version: int | None = None,
        temperature: float | None = None,
    ) -> bytes:
        """`model`, `version` and `temperature` ask for what plays; left out, the server decides."""
        about = _about(match, model, version, temperature)
        return self._drive(self._talk.step(START, session, body, about))

    def tick(self, session: str, body: bytes, deadline_s: float | None = None) -> bytes:
        """`deadline_s`: for this one, instead of the client's."""
        until = self._talk.until(deadline_s)
        return self._drive(self._talk.step(TICK, session, body) if until is None else self._talk.tick(session, body, until))

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
        address, until = attempt.address, _Until(attempt.timeout_s)
        kept = self._sockets.pop(address) if address in self._sockets else None
        connected, reader = kept or (self._connect(address, until), _Reader())
        try:
            connected.settimeout(max(until.left_s, 1e-3))
            connected.sendall(attempt.request)
            while (reply := reader.feed(connected.recv(65536))) is None:
                if until.left_s <= 0:
                    raise TimeoutError("timed out")
                connected.settimeout(until.left_s)
        except BaseException:  # also when interrupted: what comes later on this connection is not the answer to the next request
            connected.close()
            raise
        if reply.close:
            connected.close()
        else:
            self._sockets[address] = connected, reader
        return reply

    def _connect(self, address: Address, until: _Until) -> socket.socket:
        connected = _connected(address, until)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = self._talk.tls
            if tls is None:
                return connected
            connected.settimeout(max(until.left_s, 1e-3))
            return tls.wrap_socket(connected, server_hostname=self._talk.address[0])  # a worker has the certificate of the house
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
        *,
        deadline_s: float | None = None,
        fallback: Fallback = "error",
        default: bytes | None = None,
        cafile: str | None = None,
    ) -> None:
        self._talk = _Talk(url, token, timeout_s, retries, direct, cafile)
        self._talk.fall_back(deadline_s, fallback, default)
        self._wires: dict[Address, _Wire] = {}
        self._turn = asyncio.Lock()
        self._queued = 0
        """Requests that wait for their turn."""

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Open sessions stay open on the server; the next call connects again."""
        while self._wires:
            self._wires.popitem()[1].close()
        await asyncio.sleep(0)  # the sockets are closed in the next turn of the loop

    @property
    def missed(self) -> int:
        """How many ticks were not answered by their deadline."""
        return self._talk.missed

    def missed_of(self, session: str) -> int:
        """Those of one session, while it is open; 0 for any other."""
        return self._talk.missed_of(session)

    async def spec(self) -> dict[str, Any]:
        """The protocol's version, and the observation and action spaces if the server has told them."""
        return _spec_from(await self._drive(self._talk.get(SPEC)))

    async def start(
        self,
        session: str,
        body: bytes = b"",
        match: str | None = None,
        *,
        model: str | None = None,
        version: int | None = None,
        temperature: float | None = None,
    ) -> bytes:
        """`model`, `version` and `temperature` ask for what plays; left out, the server decides."""
        about = _about(match, model, version, temperature)
        return await self._drive(self._talk.step(START, session, body, about))

    async def tick(self, session: str, body: bytes, deadline_s: float | None = None) -> bytes:
        """`deadline_s`: for this one, instead of the client's."""
        until = self._talk.until(deadline_s)
        if until is None:
            return await self._drive(self._talk.step(TICK, session, body))
        if not self._turn.locked() and not self._queued:
            await self._turn.acquire()  # at once, without the price of a timer
        elif not await self._taken(until):
            return self._talk.miss(session, DeadlineMissed(f"The connection was not free within {until.limit_s:g} s.", _GOES_ON))
        try:
            return await self._converse(self._talk.tick(session, body, until))
        finally:
            self._turn.release()

    async def end(self, session: str, body: bytes = b"") -> bytes:
        return await self._drive(self._talk.step(END, session, body))

    async def _taken(self, until: _Until) -> bool:
        """Have the connection. Whoever has it now may keep it for longer than this tick can wait."""
        self._queued += 1
        try:
            async with asyncio.timeout(max(0.0, until.left_s)):
                await self._turn.acquire()
        except TimeoutError:
            return False
        finally:
            self._queued -= 1
        return True

    async def _drive(self, talk: _Conversation) -> bytes:
        self._queued += 1
        try:
            await self._turn.acquire()
        finally:
            self._queued -= 1
        try:
            return await self._converse(talk)
        finally:
            self._turn.release()

    async def _converse(self, talk: _Conversation) -> bytes:
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
        until = _Until(attempt.timeout_s)
        wire = self._wires.pop(attempt.address, None) or await self._connect(attempt.address, until)
        try:
            reply = await wire.ask(attempt.request, until)
        except BaseException:  # also when cancelled: what comes later on this connection is not the answer to the next request
            wire.close()
            raise
        if reply.close:
            wire.close()
        else:
            self._wires[attempt.address] = wire
        return reply

    async def _connect(self, address: Address, until: _Until) -> _Wire:
        loop, tls = asyncio.get_running_loop(), self._talk.tls
        named = self._talk.address[0] if tls else None  # a worker has the certificate of the house
        async with asyncio.timeout(min(until.left_s, _CONNECT_S)):
            _, wire = await loop.create_connection(_Wire, *address, ssl=tls, server_hostname=named)
        return wire


def _connected(address: Address, until: _Until) -> socket.socket:
    """Each address of the host that is left gets its share of the time: the first may be a black hole."""
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for left, (family, kind, protocol, _, where) in zip(range(len(found), 0, -1), found, strict=True):
        connected = socket.socket(family, kind, protocol)
        try:
            connected.settimeout(max(min(until.left_s, _CONNECT_S) / left, 1e-3))
            connected.connect(where)
            keep_alive(connected, _IDLE_S, _LOST_S)
            return connected
        except BaseException as error:
            connected.close()
            if left == 1 or until.left_s <= 0 or not isinstance(error, OSError):
                raise
    raise OSError(f"the host {address[0]!r} has no address")


# -- what both share: numbers, retries, what a reply means. No sockets in here. ------------------------------------------


_GOES_ON = "The session goes on with the next tick."


class _Until:
    """A time that is running out."""

    __slots__ = ("_at", "limit_s")

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self._at = limit_s, time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return self._at - time.monotonic()


class _Attempt(NamedTuple):
    address: Address
    request: bytes
    after_s: float
    """To be waited first."""
    timeout_s: float
    """From connecting to the last byte of the reply."""


class _Reply(NamedTuple):
    status: int
    body: bytes
    retry_after_s: float | None
    endpoint: str
    close: bool


_Conversation = Generator[_Attempt, _Reply | OSError, bytes]
"""Yields what is to be sent, is sent what came of it, returns the body of the reply."""


class _Session:
    __slots__ = ("action", "doubt", "endpoint", "head", "missed", "seq", "unsure")

    def __init__(self, head: bytes, seq: int) -> None:
        self.head, self.seq = head, seq
        """`seq` is the number of the next request."""
        self.unsure: tuple[str, bytes, bytes] | None = None  # what was sent with that number and never answered
        # An attempt was never answered. It may still arrive, after any number of others: from then on `seq` is our best guess,
        # and the server corrects it.
        self.doubt = False
        self.missed = 0
        self.action: bytes | None = None  # the last reply to a tick
        self.endpoint: Address | None = None


class _Talk:
    def __init__(
        self, url: str, token: str | None, timeout_s: float, retries: int, direct: bool, cafile: str | None = None
    ) -> None:
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
        self.tls = _tls(parts.scheme, cafile)
        self.address: Address = (parts.hostname, port or (443 if self.tls else 80))
        self._path = parts.path.rstrip("/")
        self._common = f"Host: {_header('url', parts.netloc.rpartition('@')[2])}\r\n"
        if token is not None:
            self._common += f"Authorization: Bearer {_header('token', token)}\r\n"
        self._timeout_s, self._retries, self._direct = timeout_s, retries, direct
        self._sessions: dict[str, _Session] = {}
        self._starts = 0
        self.missed = 0
        self.fall_back(None, "error", None)

    def fall_back(self, deadline_s: float | None, fallback: Fallback, default: bytes | None) -> None:
        """What to do when a tick takes too long."""
        if fallback not in get_args(Fallback):
            raise UsageError(f"fallback is {fallback!r}.", f"It is one of {', '.join(get_args(Fallback))}.")
        if fallback == "default" and default is None:
            raise UsageError("fallback is 'default', and there is no default.", "Give the bytes of an action as default.")
        self._deadline_s, self._fallback, self._default = _deadline(deadline_s), fallback, default

    def until(self, deadline_s: float | None) -> _Until | None:
        """When a tick that begins now is too late; None: never."""
        limit_s = self._deadline_s if deadline_s is None else _deadline(deadline_s)
        return None if limit_s is None else _Until(limit_s)

    def missed_of(self, session: str) -> int:
        return self._sessions[session].missed if session in self._sessions else 0

    def get(self, path: str) -> _Conversation:
        request = f"GET {self._path}{path} HTTP/1.1\r\n{self._common}\r\n".encode("latin-1")
        reply = yield from self._insist(request, _Session(b"", 0))
        if reply.status != 200:
            raise _refused(reply)
        return reply.body

    def step(self, kind: str, session: str, body: bytes, about: bytes = b"") -> _Conversation:
        """A step that insists. After Unreachable the same step may be made again, or the end."""
        known = self._begin(session, body, about) if kind is START else self._open(session)
        earlier, known.unsure = known.unsure, (kind, body, about)
        if earlier is not None and earlier != known.unsure and kind is TICK:
            known.unsure = earlier
            raise Unreachable(
                f"The last {earlier[0]} of session {session!r} was never answered; it may have counted.",
                "Send the same body again, or end the session.",
            )
        reply = yield from self._insist(_request(known, kind, known.seq, body, about), known)
        if reply.status == 200:
            known.seq += kind is not END
        elif kind is not START and _place(known, reply):
            if kind is TICK:
                known.unsure = None  # it has no number yet
            reply = yield from self._by(known, kind, body, _Until(self._timeout_s))
        known.unsure = None
        return self._settled(session, known, kind, reply)

    def tick(self, session: str, body: bytes, until: _Until) -> _Conversation:
        """A tick that gives up: its reply, or the fallback."""
        known = self._open(session)
        if known.unsure is not None:
            if known.unsure[0] is not TICK:
                return (yield from self.step(TICK, session, body))  # says what is missing
            known.unsure, known.seq = None, known.seq + 1
        try:
            reply = yield from self._by(known, TICK, body, until)
        except Unreachable as error:
            return self.miss(session, error)
        if reply.status in _NOT_NOW:
            return self.miss(session, _refused(reply))
        return self._settled(session, known, TICK, reply)

    def miss(self, session: str, error: LudusError) -> bytes:
        """The fallback. Raises the error when there is none."""
        known = self._open(session)
        known.missed += 1
        self.missed += 1
        instead = known.action if self._fallback == "repeat" else None
        if instead is None and self._fallback != "error":
            instead = self._default
        if instead is None:
            raise error
        return instead

    def _settled(self, session: str, known: _Session, kind: str, reply: _Reply) -> bytes:
        """The server has answered: what that means for the session. Raises Refused."""
        if reply.status != 200:
            refused = _refused(reply)
            lost = refused.error == "unknown_session" or (reply.status in _OVER and refused.error != "http")
            if kind is START or lost:
                self._sessions.pop(session, None)
            raise refused
        if kind is END:
            del self._sessions[session]
        elif kind is TICK:
            known.action = reply.body
        elif self._direct and reply.endpoint:
            known.endpoint = _address(reply.endpoint)
        return reply.body

    def _by(self, known: _Session, kind: str, body: bytes, until: _Until) -> Generator[_Attempt, _Reply | OSError, _Reply]:
        """One request by a given time, however often it has to be sent. Raises Unreachable.

        Whatever happens in between, an interrupt included, the session is left such that the next request finds its place: a
        tick that may have counted keeps its number for ever, so that no reply is taken for that of another request.
        """
        number, after_s, failures, rounds = known.seq, 0.0, 0, 0
        while True:
            left_s = until.left_s - after_s
            if left_s <= 0:
                raise _late(kind, until)
            address = known.endpoint or self.address
            doubt, known.doubt, known.seq = known.doubt, True, number + (kind is TICK)
            outcome = yield _Attempt(address, _request(known, kind, number, body), after_s, left_s)
            if not isinstance(outcome, _Reply) or _in_its_stead(outcome):
                failures += 1
                known.endpoint = None  # the shared port may know more
                if until.left_s <= 0 or isinstance(outcome, TimeoutError):
                    raise _late(kind, until) from _cause(outcome)
                after_s = _pause_s(outcome, failures)
                if failures > self._retries or after_s >= until.left_s:
                    raise _unreachable(address, outcome, until.limit_s, failures - 1) from _cause(outcome)
                continue  # the same number: it counts once
            if outcome.status == 200:
                known.doubt, known.seq = doubt, number + 1
                return outcome
            if _ours(outcome) or outcome.status < 500:
                known.doubt, known.seq = doubt, number
            if place := _place(known, outcome):
                number, rounds = known.seq, rounds + 1
                after_s = min(_BUSY_PAUSE_S * rounds, _MAX_BUSY_PAUSE_S) if place == "busy" or rounds > 2 else 0.0
                continue
            failures += 1
            after_s = _pause_s(outcome, failures)
            if outcome.status not in _NOT_NOW or failures > self._retries or after_s >= until.left_s:
                return outcome

    def _begin(self, session: str, body: bytes, about: bytes) -> _Session:
        known = self._sessions.get(session)
        if known is not None and known.unsure == (START, body, about):
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

    def _insist(self, request: bytes, known: _Session) -> Generator[_Attempt, _Reply | OSError, _Reply]:
        """Attempts until there is an answer. Whether the last is a refusal is for the caller to see."""
        after_s = 0.0
        for attempt in range(self._retries + 1):
            address = known.endpoint or self.address
            doubt, known.doubt = known.doubt, True
            outcome = yield _Attempt(address, request, after_s, self._timeout_s)
            after_s = _pause_s(outcome, attempt + 1)
            if not isinstance(outcome, _Reply):
                known.endpoint = None  # the shared port may know more
                continue
            if _ours(outcome) or outcome.status < 500:
                known.doubt = doubt
            if not _in_its_stead(outcome) and outcome.status not in _NOT_NOW:
                return outcome
            if after_s > self._timeout_s:  # longer than we would wait for an answer: the caller knows what to do meanwhile
                break
        if isinstance(outcome, _Reply) and not _in_its_stead(outcome):
            return outcome
        raise _unreachable(address, outcome, self._timeout_s, attempt) from _cause(outcome)


def _request(known: _Session, kind: str, number: int, body: bytes, about: bytes = b"") -> bytes:
    return b"%bLudus-Step: %b\r\nLudus-Seq: %d\r\n%bContent-Length: %d\r\n\r\n%b" % (
        known.head, kind.encode(), number, about, len(body), body,
    )  # fmt: skip


def _about(match: str | None, model: str | None, version: int | None, temperature: float | None) -> bytes:
    """The headers that only a start has."""
    if version is not None and not 0 <= version <= MAX_SEQ:
        raise UsageError(f"version is {version}.", "It is a whole number, 0 or more.")
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if temperature is not None and not (number and 0 <= temperature <= MAX_TEMPERATURE):
        raise UsageError(f"temperature is {temperature!r}.", f"It is a number from 0 to {MAX_TEMPERATURE:g}.")
    named = {"match": match, "model": model}
    lines = [f"Ludus-{name.title()}: {_header(name, value)}\r\n" for name, value in named.items() if value is not None]
    if version is not None:
        lines.append(f"Ludus-Version: {version}\r\n")
    if temperature is not None:
        lines.append(f"Ludus-Temperature: {temperature}\r\n")
    return "".join(lines).encode()


def _deadline(deadline_s: float | None) -> float | None:
    if deadline_s is not None and not 0 < deadline_s < float("inf"):
        raise UsageError(f"deadline_s is {deadline_s}.", "It is a number of seconds above 0, or None.")
    return deadline_s


def _tls(scheme: str, cafile: str | None) -> ssl.SSLContext | None:
    if scheme != "https":
        if cafile is not None:
            raise UsageError(f"cafile is {cafile!r}, and the url has no https://.", "Correct the url, or leave cafile out.")
        return None
    try:
        return ssl.create_default_context(cafile=cafile)
    except OSError as error:
        raise UsageError(f"There are no certificates in {cafile!r}: {error.strerror or error}.", "It is a PEM file.") from error


def _header(what: str, value: str) -> str:
    size = len(value.encode())
    if not value or size > MAX_NAME_BYTES * (16 if what == "token" else 1) or value != value.strip() or not value.isprintable():
        hint = f"It is up to {MAX_NAME_BYTES} bytes of UTF-8 without control characters; a UUID will do."
        raise UsageError(f"The {what} cannot be sent in a header." if what == "token" else f"The {what} is {value!r}.", hint)
    return value


def _refused(reply: _Reply) -> Refused:
    found = refusal_from(reply.status, reply.body)
    return Refused(found.status, found.error, found.message, found.hint, reply.retry_after_s)


def _ours(reply: _Reply) -> bool:
    """A server of ours speaks, not a proxy."""
    return reply.status == 200 or refusal_from(reply.status, reply.body).error != "http"


def _in_its_stead(reply: _Reply) -> bool:
    """A proxy that did not hear the server's answer: nobody knows whether the request counted."""
    return reply.status >= 500 and reply.status not in _NOT_NOW and not _ours(reply)


def _place(known: _Session, reply: _Reply) -> str:
    """What a reply says about where a session in doubt is: `seq`, and known.seq is right now; `busy`, ask again; or nothing."""
    if reply.status != _OUT_OF_TURN or not known.doubt:
        return ""
    refused = refusal_from(reply.status, reply.body)
    if refused.error == "seq" and refused.last is not None:
        known.seq = refused.last + 1
        return "seq"
    return "busy" if refused.error == "busy" else ""


def _pause_s(outcome: _Reply | OSError, failures: int) -> float:
    """Before the next attempt."""
    if not isinstance(outcome, _Reply):
        return _PAUSE_S * (failures - 1)
    return _PAUSE_S * failures if outcome.retry_after_s is None else outcome.retry_after_s


def _cause(outcome: _Reply | OSError) -> OSError | None:
    return outcome if isinstance(outcome, OSError) else None


def _late(kind: str, until: _Until) -> DeadlineMissed:
    hint = _GOES_ON if kind is TICK else "Try again, or leave the session to end by itself."
    return DeadlineMissed(f"No answer to this {kind} within {until.limit_s:g} s.", hint)


def _unreachable(address: Address, error: _Reply | OSError, timeout_s: float, retries: int) -> Unreachable:
    where = f"{address[0]}:{address[1]}"
    tries = f"{retries + 1} attempts" if retries else "1 attempt"
    if isinstance(error, _Reply):
        reason = f"{error.status} {REASONS.get(error.status, '')}".rstrip()
        return Unreachable(f"{where} answered {reason}, which is no answer of a Ludus server ({tries}).", "Is it running?")
    if isinstance(error, TimeoutError):
        hint = "Is the server overloaded, or its actor stuck? timeout_s can be raised."
        return Unreachable(f"{where} did not answer within {timeout_s:g} s ({tries}).", hint)
    if isinstance(error, ConnectionRefusedError):
        return Unreachable(f"Nothing listens on {where} ({tries}).", "Start the server, or correct the url.")
    if isinstance(error, socket.gaierror):
        return Unreachable(f"The host {address[0]!r} is not known.", "Correct the url.")
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "Give cafile= with the authority that signed it, and the name that it is for in the url."
        return Unreachable(f"The certificate of {where} is not trusted: {error.verify_message}.", hint)
    hint = "Is it a Ludus server, and is it still running? A server with a certificate is asked by https://."
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


class _Head(NamedTuple):
    status: int
    length: int
    """Of the body; -1: it comes in chunks."""
    retry_after_s: float | None
    endpoint: str
    close: bool


class _Reader:
    """Bytes in, replies out, one at a time. Raises ConnectionError on anything that is not a reply of known length."""

    def __init__(self) -> None:
        self._buffer = b""
        self._raw = b""  # the head of the reply before, which is mostly that of the next one too
        self._head = _Head(0, 0, None, "", False)
        self._chunks: list[bytes] | None = None  # those of the reply that is being read
        self._chunked = 0  # their bytes
        self._interim = 0

    def feed(self, data: bytes) -> _Reply | None:
        if not data:
            raise ConnectionResetError("it was closed by the server")
        buffer = self._buffer = self._buffer + data if self._buffer else data
        if self._chunks is not None:
            return self._in_chunks(self._chunks)
        end = buffer.find(b"\r\n\r\n") + 4
        if end < 4:
            if len(buffer) > _MAX_HEAD or not b"HTTP/1.".startswith(buffer[:7]):
                raise ConnectionError("what came back is not HTTP/1.1")
            return None
        raw = buffer[:end]
        if raw != self._raw:
            self._head, self._raw = _parse_head(raw), raw
        status, length, retry_after_s, endpoint, close = self._head
        if status < 200:
            return self._after_interim(buffer[end:])
        if length < 0:
            self._buffer, self._chunks = buffer[end:], []
            return self._in_chunks(self._chunks)
        if len(buffer) < end + length:
            return None
        if len(buffer) > end + length:
            raise ConnectionError("more came back than was asked for")
        self._buffer = b""
        return _Reply(status, buffer[end:], retry_after_s, endpoint, close)

    def _after_interim(self, rest: bytes) -> _Reply | None:
        self._interim += 1
        if self._interim > _MAX_INTERIM or self._head.status == 101:
            raise ConnectionError("it never comes to an answer")
        self._buffer = b""
        reply = self.feed(rest) if rest else None
        if reply is not None:
            self._interim = 0
        return reply

    def _in_chunks(self, chunks: list[bytes]) -> _Reply | None:
        buffer, at = self._buffer, 0
        while True:
            end = buffer.find(b"\r\n", at)
            if end < 0 and len(buffer) - at > _MAX_CHUNK_LINE:
                raise ConnectionError("the size of a chunk does not end")
            size = _chunk_size(buffer[at:end]) if end >= 0 else 0
            self._chunked += size
            if self._chunked > _MAX_BODY:
                raise ConnectionError("the reply is too large")
            begin, after = end + 2, end + 4 + size
            if end < 0 or (size and len(buffer) < after):
                self._chunked -= size
                self._buffer = buffer[at:]
                return None
            if not size:
                return self._after_chunks(buffer[end:], b"".join(chunks))
            if buffer[after - 2 : after] != b"\r\n":
                raise ConnectionError("a chunk does not end where it should")
            chunks.append(buffer[begin : after - 2])
            at = after

    def _after_chunks(self, rest: bytes, body: bytes) -> _Reply | None:
        """Trailers mean nothing to us; an empty line ends them."""
        stop = rest.find(b"\r\n\r\n") + 4
        if stop < 4:
            if len(rest) > _MAX_HEAD:
                raise ConnectionError("its trailers do not end")
            self._buffer = b"0" + rest
            return None
        if stop < len(rest):
            raise ConnectionError("more came back than was asked for")
        self._buffer, self._chunks, self._chunked = b"", None, 0
        return _Reply(self._head.status, body, self._head.retry_after_s, self._head.endpoint, self._head.close)


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].rstrip()
    if not digits or len(digits) > 16 or digits.strip(b"0123456789abcdefABCDEF"):
        raise ConnectionError("a chunk has no size")
    return int(digits, 16)


def _parse_head(raw: bytes) -> _Head:
    first, *lines = raw.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    code, after = rest[:3], rest[3:4]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (
        code.isascii() and code.isdigit() and len(code) == 3 and after in ("", " ")
    ):
        raise ConnectionError(f"what came back is not HTTP/1.1 ({first[:40]!r})")
    fields: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines if line):
        name, value = name.lower(), value.strip()
        if name in ("content-length", "transfer-encoding") and fields.get(name, value) != value:
            raise ConnectionError(f"a reply {code} has two lengths")
        fields[name] = value
    close = version == "HTTP/1.0" or fields.get("connection", "").lower() == "close"
    try:
        retry_after_s = max(0.0, float(fields["retry-after"]))
    except (KeyError, ValueError):  # it may also be a date; our server does not send one
        retry_after_s = None
    return _Head(int(code), _length(code, fields), retry_after_s, fields.get(ENDPOINT_HEADER.lower(), ""), close)


def _length(code: str, fields: Mapping[str, str]) -> int:
    length, coding = fields.get("content-length"), fields.get("transfer-encoding")
    if code[0] == "1" and length is coding is None:
        return 0
    if coding is not None and length is None and coding.lower() == "chunked":
        return -1
    if coding is not None or length is None or not (length.isascii() and length.isdigit()) or len(length) > 18:
        raise ConnectionError(f"a reply {code} {REASONS.get(int(code), '')} came without a usable Content-Length")
    if int(length) > _MAX_BODY:
        raise ConnectionError("the reply is too large")
    return int(length)


class _Wire(asyncio.Protocol):
    """One connection of an AsyncClient."""

    def __init__(self) -> None:
        self._reader = _Reader()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[_Reply] | None = None
        self._lost: OSError | None = None
        self._until: _Until | None = None  # of the request that was sent last
        self._watch: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def ask(self, request: bytes, until: _Until) -> asyncio.Future[_Reply]:
        loop = asyncio.get_running_loop()
        self._waiter, self._until = loop.create_future(), until
        if loop is not self._loop:  # that one hears no answer any more
            self._lost = self._lost or ConnectionResetError("its event loop has ended")
        if self._lost is not None or self._transport is None:
            self._waiter.set_exception(self._lost or ConnectionResetError("it was closed"))
            return self._waiter
        self._transport.write(request)
        if self._watch is None or until.left_s < self._watch.when() - loop.time():
            self._watch_over(loop)
        return self._waiter

    def _watch_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer for many requests: it goes off for the last that it was set for, and looks at the one that is under way."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._until is None or self._waiter is None or self._waiter.done():
            return
        left_s = self._until.left_s
        if left_s <= 0:
            self.fail(TimeoutError("timed out"))
        else:
            self._watch = loop.call_later(max(left_s, 1e-3), self._watch_over, loop)  # what is due at once is no timer for uvloop

    def fail(self, error: OSError) -> None:
        self._lost = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.close()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._transport is not None:
            with contextlib.suppress(RuntimeError):  # of a loop that has ended
                self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        keep_alive(transport.get_extra_info("socket"), _IDLE_S, _LOST_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(exc if isinstance(exc, OSError) else ConnectionResetError("it was closed by the server"))

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            self.fail(ConnectionError("received a reply to no request"))
            return
        try:
            reply = self._reader.feed(data)
        except ConnectionError as error:
            self.fail(error)
            return
        if reply is not None:
            self._waiter.set_result(reply)
