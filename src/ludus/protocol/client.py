"""Game-side client of the protocol. Every request is numbered, so that a retry after a broken connection is safe.

    with Client("http://127.0.0.1:8000") as client:
        client.start("match-17")
        action = client.tick("match-17", observation)
        client.end("match-17")

A game that cannot wait gives its ticks a deadline, and a fallback:

    with Client(deadline_s=0.03, fallback="repeat", default=NOTHING) as client: …

Uses the standard library only. `AsyncClient` has the same methods as coroutines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import ssl
import time
from collections.abc import Generator, Mapping
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar, cast, get_args
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
"""TCP keep-alive: drop a connection whose host does not respond. A reply itself may take longer."""
_CONNECT_S = 10.0
"""Time limit for connecting."""
_RETRY_S = 0.2
"""Delay before the second retry after a broken connection; the first is immediate, because usually an idle connection was closed."""
_BUSY_S, _MAX_BUSY_S = 0.002, 0.02
"""Delays between requests to a session that is still computing an abandoned tick."""
_MAX_HEAD = 64 << 10
_MAX_BODY = 256 << 20
_MAX_CHUNK_LINE = 1024
_MAX_INTERIM = 8
"""Maximum of 1xx replies before the final one."""
_SESSION_ENDED = frozenset({410, 500, 504})
"""Status codes of a Ludus server after which the session has ended."""
_RETRY_LATER = frozenset({429, 503})
"""Status codes after which the same request may be sent again."""
_CONFLICT = 409

Address = tuple[str, int]
Fallback = Literal["error", "repeat", "default"]
_Kept = TypeVar("_Kept")


class _ClientBase(Generic[_Kept]):
    """Options, counters and kept connections of both clients."""

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
        self._protocol = _ClientProtocol(url, token, timeout_s, retries, direct, cafile)
        self._protocol.set_fallback(deadline_s, fallback, default)
        self._kept: dict[Address, _Kept] = {}

    @property
    def missed(self) -> int:
        """How many ticks were not answered by their deadline."""
        return self._protocol.missed

    def missed_of(self, session: str) -> int:
        """Those of one session, while it is open; 0 for any other."""
        state = self._protocol.sessions.get(session)
        return 0 if state is None else state.missed


class Client(_ClientBase[tuple[socket.socket, "_HttpReplyParser"]]):
    """Blocking client on one kept connection; use one per thread. `timeout_s` limits each attempt, including connecting.

    Raises Refused for every reply that is not 200 (429 and 503: after the retries), and Unreachable when there is no reply or only
    one of a proxy (500, 502, 504 without a Ludus body). After Unreachable it is unknown whether the server processed the request:
    repeat it with the same body, or end the session.

    `deadline_s` limits a tick with all its retries. When it is missed, `tick` returns the fallback: `repeat` returns the last reply
    to a tick of this session (before the first one `default`), `default` returns those bytes, `error` raises DeadlineMissed.
    `missed` is incremented in every case. The next tick may have a different body: the client finds out which ones were processed.

    `direct`: after `start`, connect to the worker that owns the session (`Ludus-Endpoint`) instead of the shared port.
    `cafile`: with https, the certificates to trust instead of the system's.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Open sessions stay open on the server; the next call connects again."""
        while self._kept:
            self._kept.popitem()[1][0].close()

    def spec(self) -> dict[str, Any]:
        """Fetch the protocol version and, if declared, the observation and action spaces."""
        return _parse_spec(self._drive(self._protocol.get(SPEC)))

    def start(
        self,
        session: str,
        body: bytes = b"",
        match: str | None = None,
        *,
        side: str | None = None,
        model: str | None = None,
        version: int | None = None,
        temperature: float | None = None,
    ) -> bytes:
        """`match`, `side`: the match, and which of its sides the session plays. `model`, `version` and `temperature` ask for what plays;
        left out, the server decides.
        """
        headers = _start_headers({"match": match, "side": side, "model": model}, version, temperature)
        return self._drive(self._protocol.step(START, session, body, headers))

    def tick(self, session: str, body: bytes, deadline_s: float | None = None) -> bytes:
        """`deadline_s`: for this tick, instead of the client's."""
        deadline = self._protocol.deadline_for(deadline_s)
        return self._drive(
            self._protocol.step(TICK, session, body) if deadline is None else self._protocol.tick(session, body, deadline)
        )

    def end(self, session: str, body: bytes = b"") -> bytes:
        return self._drive(self._protocol.step(END, session, body))

    def _drive(self, steps: _Steps) -> bytes:
        try:
            attempt = next(steps)
            while True:
                if attempt.after_s:
                    time.sleep(attempt.after_s)
                try:
                    attempt = steps.send(self._send_attempt(attempt))
                except OSError as error:
                    attempt = steps.send(error)
        except StopIteration as stop:
            return cast(bytes, stop.value)

    def _send_attempt(self, attempt: _Attempt) -> _Reply:
        address, deadline = attempt.address, _Deadline(attempt.timeout_s)
        kept = self._kept.pop(address) if address in self._kept else None
        connected, reader = kept or (self._connect(address, deadline), _HttpReplyParser())
        try:
            connected.settimeout(max(deadline.left_s, 1e-3))
            connected.sendall(attempt.request)
            while (reply := reader.feed(connected.recv(65536))) is None:
                if deadline.left_s <= 0:
                    raise TimeoutError("timed out")
                connected.settimeout(deadline.left_s)
            if not reply.close:
                self._kept[address] = connected, reader
        finally:
            if address not in self._kept:  # also when interrupted: a late reply must not be taken for the next one
                connected.close()
        return reply

    def _connect(self, address: Address, deadline: _Deadline) -> socket.socket:
        with contextlib.ExitStack() as undo:
            connected = undo.enter_context(_open_socket(address, deadline))
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._protocol.tls is not None:
                connected.settimeout(max(deadline.left_s, 1e-3))
                named = self._protocol.address[0]  # workers share the service's certificate
                connected = self._protocol.tls.wrap_socket(connected, server_hostname=named)
            undo.pop_all()
        return connected


class AsyncClient(_ClientBase["_AsyncConnection"]):
    """`Client` for one event loop. Concurrent calls share one connection and wait for each other."""

    _queued = 0
    """Requests that wait for the connection."""

    @functools.cached_property
    def _lock(self) -> asyncio.Lock:
        return asyncio.Lock()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Open sessions stay open on the server; the next call connects again."""
        while self._kept:
            self._kept.popitem()[1].close()
        await asyncio.sleep(0)  # the sockets close in the next iteration of the loop

    async def spec(self) -> dict[str, Any]:
        """Fetch the protocol version and, if declared, the observation and action spaces."""
        return _parse_spec(await self._drive(self._protocol.get(SPEC)))

    async def start(
        self,
        session: str,
        body: bytes = b"",
        match: str | None = None,
        *,
        side: str | None = None,
        model: str | None = None,
        version: int | None = None,
        temperature: float | None = None,
    ) -> bytes:
        """`match`, `side`: the match, and which of its sides the session plays. `model`, `version` and `temperature` ask for what plays;
        left out, the server decides.
        """
        headers = _start_headers({"match": match, "side": side, "model": model}, version, temperature)
        return await self._drive(self._protocol.step(START, session, body, headers))

    async def tick(self, session: str, body: bytes, deadline_s: float | None = None) -> bytes:
        """`deadline_s`: for this tick, instead of the client's."""
        deadline = self._protocol.deadline_for(deadline_s)
        if deadline is None:
            return await self._drive(self._protocol.step(TICK, session, body))
        if not self._lock.locked() and not self._queued:
            await self._lock.acquire()  # saves the cost of a timer
        elif not await self._acquire(deadline):
            message = f"The connection was not free within {deadline.limit_s:g} s."
            return self._protocol.miss(session, DeadlineMissed(message, _SESSION_CONTINUES))
        try:
            return await self._run(self._protocol.tick(session, body, deadline))
        finally:
            self._lock.release()

    async def end(self, session: str, body: bytes = b"") -> bytes:
        return await self._drive(self._protocol.step(END, session, body))

    async def _acquire(self, deadline: _Deadline | None = None) -> bool:
        """Acquire the connection, or return False at the deadline."""
        self._queued += 1
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline.left_s)):
                return await self._lock.acquire()
        except TimeoutError:
            return False
        finally:
            self._queued -= 1

    async def _drive(self, steps: _Steps) -> bytes:
        await self._acquire()
        try:
            return await self._run(steps)
        finally:
            self._lock.release()

    async def _run(self, steps: _Steps) -> bytes:
        try:
            attempt = next(steps)
            while True:
                if attempt.after_s:
                    await asyncio.sleep(attempt.after_s)
                try:
                    attempt = steps.send(await self._send_attempt(attempt))
                except OSError as error:
                    attempt = steps.send(error)
        except StopIteration as stop:
            return cast(bytes, stop.value)

    async def _send_attempt(self, attempt: _Attempt) -> _Reply:
        deadline = _Deadline(attempt.timeout_s)
        connection = self._kept.pop(attempt.address, None) or await self._connect(attempt.address, deadline)
        try:
            reply = await connection.send(attempt.request, deadline)
            if not reply.close:
                self._kept[attempt.address] = connection
        finally:
            if attempt.address not in self._kept:  # also when cancelled: a late reply must not be taken for the next one
                connection.close()
        return reply

    async def _connect(self, address: Address, deadline: _Deadline) -> _AsyncConnection:
        loop, tls = asyncio.get_running_loop(), self._protocol.tls
        named = self._protocol.address[0] if tls else None  # workers share the service's certificate
        async with asyncio.timeout(min(deadline.left_s, _CONNECT_S)):
            _, connection = await loop.create_connection(_AsyncConnection, *address, ssl=tls, server_hostname=named)
        return connection


def _open_socket(address: Address, deadline: _Deadline) -> socket.socket:
    """Try each address of the host with a share of the remaining time, because the first may not respond at all."""
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for left, (family, kind, protocol, _, where) in zip(range(len(found), 0, -1), found, strict=True):
        with contextlib.ExitStack() as undo:
            connected = undo.enter_context(socket.socket(family, kind, protocol))
            connected.settimeout(max(min(deadline.left_s, _CONNECT_S) / left, 1e-3))
            try:
                connected.connect(where)
                keep_alive(connected, _IDLE_S, _LOST_S)
            except OSError:
                if left == 1 or deadline.left_s <= 0:
                    raise
                continue
            undo.pop_all()
            return connected
    raise OSError(f"the host {address[0]!r} has no address")


# -- shared protocol logic: numbering, retries, interpretation of replies; no sockets --------------------------------------


_SESSION_CONTINUES = "The session continues with the next tick."


class _Deadline:
    """A monotonic deadline."""

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
    """Delay before the attempt."""
    timeout_s: float
    """Time limit from connecting to the last byte of the reply."""


class _Reply(NamedTuple):
    status: int
    body: bytes
    retry_after_s: float | None
    endpoint: str
    close: bool


_Steps = Generator[_Attempt, _Reply | OSError, bytes]
"""Yields attempts, receives their outcomes, returns the body of the reply."""


class _Session:
    __slots__ = ("endpoint", "head", "last_action", "missed", "seq", "seq_uncertain", "unanswered")

    def __init__(self, head: bytes, seq: int) -> None:
        self.head, self.seq = head, seq
        """`seq` is the number of the next request."""
        self.unanswered: tuple[str, bytes, bytes] | None = None  # (kind, body, headers) sent with that number without a reply
        # An attempt without a reply may still arrive after later ones: `seq` is then a guess that the server corrects.
        self.seq_uncertain = False
        self.missed = 0
        self.last_action: bytes | None = None  # body of the last reply to a tick
        self.endpoint: Address | None = None


class _ClientProtocol:
    """Sans-I/O state of a client: its sessions, numbering, retries and fallbacks."""

    def __init__(
        self, url: str, token: str | None, timeout_s: float, retries: int, direct: bool, cafile: str | None = None
    ) -> None:
        parts = urlsplit(url)
        hint = "It looks like http://127.0.0.1:8000."
        try:
            port = parts.port
        except ValueError as error:
            raise UsageError(f"The url {url!r} has an invalid port.", hint) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"The url {url!r} does not name a server.", hint)
        if not (timeout_s > 0 and retries >= 0):
            raise UsageError(f"timeout_s is {timeout_s}, retries is {retries}.", "The first is above 0, the second 0 or more.")
        self.tls = _tls_context(parts.scheme, cafile)
        self.address: Address = (parts.hostname, port or (443 if self.tls else 80))
        self._path = parts.path.rstrip("/")
        self._common = f"Host: {_header('url', parts.netloc.rpartition('@')[2])}\r\n"
        if token is not None:
            self._common += f"Authorization: Bearer {_header('token', token)}\r\n"
        self._timeout_s, self._retries, self._direct = timeout_s, retries, direct
        self.sessions: dict[str, _Session] = {}
        self._starts = 0
        self.missed = 0
        self.set_fallback(None, "error", None)

    def set_fallback(self, deadline_s: float | None, fallback: Fallback, default: bytes | None) -> None:
        """Set the deadline of ticks and what to return when it is missed. Raises UsageError."""
        if fallback not in get_args(Fallback):
            raise UsageError(f"fallback is {fallback!r}.", f"It is one of {', '.join(get_args(Fallback))}.")
        if fallback == "default" and default is None:
            raise UsageError("fallback is 'default', but there is no default.", "Give the bytes of an action as default.")
        self._deadline_s, self._fallback, self._default = _check_deadline_s(deadline_s), fallback, default

    def deadline_for(self, deadline_s: float | None) -> _Deadline | None:
        """Deadline of a tick that begins now; None: no deadline."""
        limit_s = self._deadline_s if deadline_s is None else _check_deadline_s(deadline_s)
        return None if limit_s is None else _Deadline(limit_s)

    def get(self, path: str) -> _Steps:
        request = f"GET {self._path}{path} HTTP/1.1\r\n{self._common}\r\n".encode("latin-1")
        reply = yield from self._send_with_retries(request, _Session(b"", 0))
        if reply.status != 200:
            raise _to_refused(reply)
        return reply.body

    def step(self, kind: str, session: str, body: bytes, headers: bytes = b"") -> _Steps:
        """Send a step with retries. After Unreachable, repeat the same step or send the end."""
        state = self._begin_session(session, body, headers) if kind is START else self._find_session(session)
        earlier, state.unanswered = state.unanswered, (kind, body, headers)
        if earlier is not None and earlier != state.unanswered and kind is TICK:
            state.unanswered = earlier
            raise Unreachable(
                f"The last {earlier[0]} of session {session!r} got no reply; the server may have processed it.",
                "Send the same body again, or end the session.",
            )
        reply = yield from self._send_with_retries(_request(state, kind, state.seq, body, headers), state)
        if reply.status == 200:
            state.seq += kind is not END
        elif kind is not START and _resync(state, reply):
            if kind is TICK:
                state.unanswered = None  # it has no number yet
            reply = yield from self._send_by_deadline(state, kind, body, _Deadline(self._timeout_s))
        state.unanswered = None
        return self._finish_step(session, state, kind, reply)

    def tick(self, session: str, body: bytes, deadline: _Deadline) -> _Steps:
        """Send a tick with a deadline; returns its reply or the fallback."""
        state = self._find_session(session)
        if state.unanswered is not None:
            if state.unanswered[0] is not TICK:
                return (yield from self.step(TICK, session, body))  # raises the matching error
            state.unanswered, state.seq = None, state.seq + 1
        try:
            reply = yield from self._send_by_deadline(state, TICK, body, deadline)
        except Unreachable as error:
            return self.miss(session, error)
        if reply.status in _RETRY_LATER:
            return self.miss(session, _to_refused(reply))
        return self._finish_step(session, state, TICK, reply)

    def miss(self, session: str, error: LudusError) -> bytes:
        """Count a missed deadline and return the fallback. Raises `error` when there is none."""
        state = self._find_session(session)
        state.missed += 1
        self.missed += 1
        fallback = state.last_action if self._fallback == "repeat" else None
        if fallback is None and self._fallback != "error":
            fallback = self._default
        if fallback is None:
            raise error
        return fallback

    def _finish_step(self, session: str, state: _Session, kind: str, reply: _Reply) -> bytes:
        """Update the session after a reply, and return its body. Raises Refused."""
        if reply.status != 200:
            refused = _to_refused(reply)
            lost = refused.error == "unknown_session" or (reply.status in _SESSION_ENDED and refused.error != "http")
            if kind is START or lost:
                self.sessions.pop(session, None)
            raise refused
        if kind is END:
            del self.sessions[session]
        elif kind is TICK:
            state.last_action = reply.body
        elif self._direct and reply.endpoint:
            with contextlib.suppress(ValueError):
                parts = urlsplit(f"//{reply.endpoint}")
                state.endpoint = (parts.hostname, parts.port) if parts.hostname and parts.port else None
        return reply.body

    def _send_by_deadline(
        self, state: _Session, kind: str, body: bytes, deadline: _Deadline
    ) -> Generator[_Attempt, _Reply | OSError, _Reply]:
        """Send one request, repeatedly if needed, until the deadline. Raises Unreachable.

        Leaves the session consistent even when interrupted: a tick that may have been processed keeps its number, so that no
        reply is taken for that of another request.
        """
        number, after_s, failures, rounds = state.seq, 0.0, 0, 0
        while True:
            left_s = deadline.left_s - after_s
            if left_s <= 0:
                raise _deadline_error(kind, deadline)
            address = state.endpoint or self.address
            uncertain, state.seq_uncertain, state.seq = state.seq_uncertain, True, number + (kind is TICK)
            outcome = yield _Attempt(address, _request(state, kind, number, body), after_s, left_s)
            if not isinstance(outcome, _Reply) or _is_proxy_error(outcome):
                failures += 1
                state.endpoint = None  # the shared port may know more
                if deadline.left_s <= 0 or isinstance(outcome, TimeoutError):
                    raise _deadline_error(kind, deadline) from _cause(outcome)
                after_s = _retry_delay_s(outcome, failures)
                if failures > self._retries or after_s >= deadline.left_s:
                    raise _unreachable(address, outcome, deadline.limit_s, failures - 1) from _cause(outcome)
                continue  # same number: the server processes it once
            if outcome.status == 200:
                state.seq_uncertain, state.seq = uncertain, number + 1
                return outcome
            if _is_ludus_reply(outcome) or outcome.status < 500:
                state.seq_uncertain, state.seq = uncertain, number
            if sync := _resync(state, outcome):
                number, rounds = state.seq, rounds + 1
                after_s = min(_BUSY_S * rounds, _MAX_BUSY_S) if sync == "busy" or rounds > 2 else 0.0
                continue
            failures += 1
            after_s = _retry_delay_s(outcome, failures)
            if outcome.status not in _RETRY_LATER or failures > self._retries or after_s >= deadline.left_s:
                return outcome

    def _begin_session(self, session: str, body: bytes, headers: bytes) -> _Session:
        state = self.sessions.get(session)
        if state is not None and state.unanswered == (START, body, headers):
            return state  # the same start again
        head = f"POST {self._path}{STEP} HTTP/1.1\r\n{self._common}Ludus-Session: {_header('session', session)}\r\n"
        # Every start has its own number, so that a new one is never taken for a retry of a failed one.
        fresh = self.sessions[session] = _Session(head.encode(), self._starts)
        self._starts += 1
        return fresh

    def _find_session(self, session: str) -> _Session:
        try:
            return self.sessions[session]
        except KeyError:
            message = f"This client has no open session {session!r}."
            raise Refused(404, "unknown_session", message, "Call start first.") from None

    def _send_with_retries(self, request: bytes, state: _Session) -> Generator[_Attempt, _Reply | OSError, _Reply]:
        """Send a request until there is a reply, which may be a refusal. Raises Unreachable."""
        after_s = 0.0
        for attempt in range(self._retries + 1):
            address = state.endpoint or self.address
            uncertain, state.seq_uncertain = state.seq_uncertain, True
            outcome = yield _Attempt(address, request, after_s, self._timeout_s)
            after_s = _retry_delay_s(outcome, attempt + 1)
            if not isinstance(outcome, _Reply):
                state.endpoint = None  # the shared port may know more
                continue
            if _is_ludus_reply(outcome) or outcome.status < 500:
                state.seq_uncertain = uncertain
            if not _is_proxy_error(outcome) and outcome.status not in _RETRY_LATER:
                return outcome
            if after_s > self._timeout_s:  # longer than the time limit of an attempt: leave it to the caller
                break
        if isinstance(outcome, _Reply) and not _is_proxy_error(outcome):
            return outcome
        raise _unreachable(address, outcome, self._timeout_s, attempt) from _cause(outcome)


def _request(state: _Session, kind: str, number: int, body: bytes, headers: bytes = b"") -> bytes:
    return b"%bLudus-Step: %b\r\nLudus-Seq: %d\r\n%bContent-Length: %d\r\n\r\n%b" % (
        state.head, kind.encode(), number, headers, len(body), body,
    )  # fmt: skip


def _start_headers(named: Mapping[str, str | None], version: int | None, temperature: float | None) -> bytes:
    """Encode the optional headers of start. Raises UsageError."""
    if version is not None and not 0 <= version <= MAX_SEQ:
        raise UsageError(f"version is {version}.", "It is a whole number, 0 or more.")
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if temperature is not None and not (number and 0 <= temperature <= MAX_TEMPERATURE):
        raise UsageError(f"temperature is {temperature!r}.", f"It is a number from 0 to {MAX_TEMPERATURE:g}.")
    lines = [f"Ludus-{name.title()}: {_header(name, value)}\r\n" for name, value in named.items() if value is not None]
    if version is not None:
        lines.append(f"Ludus-Version: {version}\r\n")
    if temperature is not None:
        lines.append(f"Ludus-Temperature: {temperature}\r\n")
    return "".join(lines).encode()


def _check_deadline_s(deadline_s: float | None) -> float | None:
    if deadline_s is not None and not 0 < deadline_s < float("inf"):
        raise UsageError(f"deadline_s is {deadline_s}.", "It is a number of seconds above 0, or None.")
    return deadline_s


def _tls_context(scheme: str, cafile: str | None) -> ssl.SSLContext | None:
    if scheme != "https":
        if cafile is not None:
            raise UsageError(f"cafile is {cafile!r}, but the url is not https://.", "Correct the url, or leave cafile out.")
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


def _to_refused(reply: _Reply) -> Refused:
    found = refusal_from(reply.status, reply.body)
    return Refused(found.status, found.error, found.message, found.hint, reply.retry_after_s)


def _is_ludus_reply(reply: _Reply) -> bool:
    """Whether the reply comes from a Ludus server, not from a proxy."""
    return reply.status == 200 or refusal_from(reply.status, reply.body).error != "http"


def _is_proxy_error(reply: _Reply) -> bool:
    """Whether a proxy answered for the server, so that it is unknown whether the request was processed."""
    return reply.status >= 500 and reply.status not in _RETRY_LATER and not _is_ludus_reply(reply)


def _resync(state: _Session, reply: _Reply) -> str:
    """Resynchronise an uncertain `seq` from a 409 reply: "seq" (state.seq is corrected), "busy" (send again) or "" (neither)."""
    if reply.status != _CONFLICT or not state.seq_uncertain:
        return ""
    refused = refusal_from(reply.status, reply.body)
    if refused.error == "seq" and refused.last is not None:
        state.seq = refused.last + 1
        return "seq"
    return "busy" if refused.error == "busy" else ""


def _retry_delay_s(outcome: _Reply | OSError, failures: int) -> float:
    """Delay before the next attempt."""
    if not isinstance(outcome, _Reply):
        return _RETRY_S * (failures - 1)
    return _RETRY_S * failures if outcome.retry_after_s is None else outcome.retry_after_s


def _cause(outcome: _Reply | OSError) -> OSError | None:
    return outcome if isinstance(outcome, OSError) else None


def _deadline_error(kind: str, deadline: _Deadline) -> DeadlineMissed:
    hint = _SESSION_CONTINUES if kind is TICK else "Try again, or leave the session to end by itself."
    return DeadlineMissed(f"No reply to this {kind} within {deadline.limit_s:g} s.", hint)


def _unreachable(address: Address, error: _Reply | OSError, timeout_s: float, retries: int) -> Unreachable:
    where = f"{address[0]}:{address[1]}"
    tries = f"{retries + 1} attempts" if retries else "1 attempt"
    if isinstance(error, _Reply):
        reason = f"{error.status} {REASONS.get(error.status, '')}".rstrip()
        message = f"{where} answered {reason}, which is not a reply of a Ludus server ({tries})."
        return Unreachable(message, "Check that it is running.")
    if isinstance(error, TimeoutError):
        hint = "Check whether the server is overloaded or its actor blocks, or raise timeout_s."
        return Unreachable(f"{where} did not answer within {timeout_s:g} s ({tries}).", hint)
    if isinstance(error, ConnectionRefusedError):
        return Unreachable(f"Nothing listens on {where} ({tries}).", "Start the server, or correct the url.")
    if isinstance(error, socket.gaierror):
        return Unreachable(f"The host {address[0]!r} is unknown.", "Correct the url.")
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "Give cafile= with the authority that signed it, and use the name of the certificate in the url."
        return Unreachable(f"The certificate of {where} is not trusted: {error.verify_message}.", hint)
    hint = "Check that it is a running Ludus server; a server with a certificate needs https://."
    return Unreachable(f"The connection to {where} broke ({tries}): {error.strerror or error}.", hint)


def _parse_spec(body: bytes) -> dict[str, Any]:
    try:
        spec = json.loads(body)
    except ValueError:
        spec = None
    if not isinstance(spec, dict):
        raise Refused(200, "http", "The server's /spec is not a JSON object.", "Check that it is a Ludus server.")
    return spec


# -- replies ------------------------------------------------------------------------------------------------------------


class _Head(NamedTuple):
    status: int
    length: int
    """Length of the body; -1: chunked."""
    retry_after_s: float | None
    endpoint: str
    close: bool


class _HttpReplyParser:
    """Incremental parser of replies. Raises ConnectionError on anything that is not a reply of known length.

    `pipelined`: further replies may follow at once; `take` returns those that are complete. Otherwise they are an error.
    """

    def __init__(self, *, pipelined: bool = False) -> None:
        self._pipelined = pipelined
        self._buffer = b""
        self._raw = b""  # head of the previous reply, usually equal to the next one
        self._head = _Head(0, 0, None, "", False)
        self._chunks: list[bytes] | None = None  # of the reply being read
        self._chunked = 0  # their bytes
        self._interim = 0

    def feed(self, data: bytes) -> _Reply | None:
        if not data:
            raise ConnectionResetError("it was closed by the server")
        self._buffer = self._buffer + data if self._buffer else data
        return self.take()

    def take(self) -> _Reply | None:
        """Return the next complete reply of the data so far."""
        buffer = self._buffer
        if self._chunks is not None:
            return self._read_chunks(self._chunks)
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
            return self._read_chunks(self._chunks)
        if len(buffer) < end + length:
            return None
        self._buffer = self._after_reply(buffer[end + length :])
        return _Reply(status, buffer[end : end + length], retry_after_s, endpoint, close)

    @property
    def has_data(self) -> bool:
        """Whether there is data that no reply has used."""
        return bool(self._buffer)

    def _after_reply(self, rest: bytes) -> bytes:
        if rest and not self._pipelined:
            raise ConnectionError("unexpected data after the reply")
        return rest

    def _after_interim(self, rest: bytes) -> _Reply | None:
        self._interim += 1
        if self._interim > _MAX_INTERIM or self._head.status == 101:
            raise ConnectionError("the server sends interim replies only")
        self._buffer = b""
        reply = self.feed(rest) if rest else None
        if reply is not None:
            self._interim = 0
        return reply

    def _read_chunks(self, chunks: list[bytes]) -> _Reply | None:
        buffer, at = self._buffer, 0
        while True:
            end = buffer.find(b"\r\n", at)
            if end < 0 and len(buffer) - at > _MAX_CHUNK_LINE:
                raise ConnectionError("the size of a chunk does not end")
            digits = buffer[at:end].partition(b";")[0].rstrip() if end >= 0 else b"0"
            if not digits or len(digits) > 16 or digits.strip(b"0123456789abcdefABCDEF"):
                raise ConnectionError("a chunk has no size")
            size = int(digits, 16)
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
        """Skip the trailers, which an empty line ends."""
        stop = rest.find(b"\r\n\r\n") + 4
        if stop < 4:
            if len(rest) > _MAX_HEAD:
                raise ConnectionError("its trailers do not end")
            self._buffer = b"0" + rest
            return None
        self._buffer, self._chunks, self._chunked = self._after_reply(rest[stop:]), None, 0
        return _Reply(self._head.status, body, self._head.retry_after_s, self._head.endpoint, self._head.close)


def _parse_head(raw: bytes) -> _Head:
    first, *lines = raw.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    code, after = rest[:3], rest[3:4]
    is_status = code.isascii() and code.isdigit() and len(code) == 3 and after in ("", " ")
    if version not in ("HTTP/1.1", "HTTP/1.0") or not is_status:
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
    except (KeyError, ValueError):  # dates are not supported; a Ludus server does not send them
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


class _AsyncConnection(asyncio.Protocol):
    """One connection of an AsyncClient."""

    def __init__(self) -> None:
        self._reader = _HttpReplyParser()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[_Reply] | None = None
        self._lost: OSError | None = None
        self._deadline: _Deadline | None = None  # of the last request
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def send(self, request: bytes, deadline: _Deadline) -> asyncio.Future[_Reply]:
        loop = asyncio.get_running_loop()
        self._waiter, self._deadline = loop.create_future(), deadline
        if loop is not self._loop:  # the original loop receives no more data
            self._lost = self._lost or ConnectionResetError("its event loop has ended")
        if self._lost is not None or self._transport is None:
            self._waiter.set_exception(self._lost or ConnectionResetError("it was closed"))
            return self._waiter
        self._transport.write(request)
        if self._timer is None or deadline.left_s < self._timer.when() - loop.time():
            self._check_deadline(loop)
        return self._waiter

    def _check_deadline(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail the current request at its deadline. One timer serves many requests: it re-arms itself when it fires early."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._deadline is None or self._waiter is None or self._waiter.done():
            return
        left_s = self._deadline.left_s
        if left_s <= 0:
            self.fail(TimeoutError("timed out"))
        else:
            self._timer = loop.call_later(max(left_s, 1e-3), self._check_deadline, loop)  # uvloop has no timer for 0 s

    def fail(self, error: OSError) -> None:
        self._lost = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
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
