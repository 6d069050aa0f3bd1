"""HTTP/1.1 for games: one connection, parsed by httptools, with bounds on everything a client can make us hold.

A connection knows requests and replies, nothing of sessions. Replies leave in the order of their requests.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import unquote

import httptools

from ludus.errors import Refused
from ludus.gateway.auth import Caller, Tokens
from ludus.protocol import spec
from ludus.protocol.spec import (
    END,
    ENDPOINT_HEADER,
    KINDS,
    MAX_NAME_BYTES,
    MAX_SEQ,
    MAX_TEMPERATURE,
    NOTHING_ASKED,
    REASONS,
    REQUEST_ID_HEADER,
    START,
    STEP,
    TICK,
    About,
    error_body,
)


@dataclass(frozen=True)
class HttpLimits:
    header_bytes: int = 16 << 10
    headers: int = 64
    body_bytes: int = 8 << 20
    connections: int = 10_000
    pipelined: int = 32
    """Requests of one connection that may wait for their replies; then we stop reading."""
    receive_s: float = 10.0
    """For a whole request, from its first byte."""
    send_s: float = 10.0
    """For a client to read what it asked for."""
    idle_s: float = 300.0
    """Between two requests of a connection."""
    unauthorized_idle_s: float = 10.0
    """The same for a connection that has not yet sent a valid token."""
    connections_per_address: int = 0
    """Connections of one client address, in each worker; 0 = any number, as behind a proxy, where all have the same."""


class Page(NamedTuple):
    """What a GET is answered with."""

    status: int
    body: bytes
    media: str = "application/json"


class Replied(NamedTuple):
    """What there is to be logged of an answered request. Never its body, never its token."""

    kind: str
    path: str
    status: int
    session: bytes
    seq: int
    seconds: float
    request_id: str
    caller: str
    peer: str
    error: str


class Service(Protocol):
    """What stands behind a connection."""

    limits: HttpLimits
    loop: asyncio.AbstractEventLoop
    tokens: Tokens | None
    """Who may call; None: anyone."""
    logs: Callable[[Replied], None] | None
    """Hears of every reply but good ticks; of those too with `logs_ticks`."""
    logs_ticks: bool
    direct_port: int
    """Where this worker alone can be reached; 0: nowhere else."""

    def open_connection(self, connection: Connection) -> str:
        """Why this connection cannot be served; empty: it can."""
        ...

    def authorize(self, connection: Connection) -> None:
        """The connection has sent a valid token for the first time."""
        ...

    def is_authorized(self, connection: Connection) -> bool: ...

    def closed(self, connection: Connection) -> None: ...

    def elsewhere(self, session: bytes) -> int:
        """The slot of another worker that owns this session, or -1."""
        ...

    def hand_over(self, connection: Connection, slot: int, data: bytes) -> bool:
        """Give a connection, with what was read from it, to another worker. False when that is not possible now."""
        ...

    def step(self, kind: str, session: bytes, seq: int, about: About, body: bytes, exchange: Exchange) -> None: ...

    def get(self, path: str, authorized: bool) -> Page: ...

    def refused(self, refused: Refused) -> None:
        """Counted, and looked at by whoever checks games."""
        ...


_SESSION, _KIND, _SEQ, _MATCH, _LENGTH, _CODING, _AUTH, _EXPECT, _MODEL, _VERSION, _TEMPERATURE, _ID = range(1, 13)
_HEADERS: dict[bytes, int] = {
    **dict.fromkeys(spec.SESSION_HEADERS, _SESSION),
    **dict.fromkeys(spec.KIND_HEADERS, _KIND),
    **dict.fromkeys(spec.SEQ_HEADERS, _SEQ),
    **dict.fromkeys(spec.MATCH_HEADERS, _MATCH),
    **dict.fromkeys(spec.MODEL_HEADERS, _MODEL),
    **dict.fromkeys(spec.VERSION_HEADERS, _VERSION),
    **dict.fromkeys(spec.TEMPERATURE_HEADERS, _TEMPERATURE),
    REQUEST_ID_HEADER.lower().encode(): _ID,
    b"content-length": _LENGTH,
    b"transfer-encoding": _CODING,
    b"authorization": _AUTH,
    b"expect": _EXPECT,
}
_TYPE = b"\r\nContent-Type: application/octet-stream\r\n\r\n"
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: "
_HEADS = {length: _OK + str(length).encode() + _TYPE for length in range(1024)}
_LINGER_S = 2.0
_STRANGERS_BODY = 4 << 10  # what we read of a request before we know who it is from
_UNAUTHORIZED = Refused(401, "unauthorized", "The token is missing or wrong.", "Send Authorization: Bearer TOKEN.")
_TWO_TOKENS = Refused(400, "authorization", "This request has two Authorization headers.", "Send one.")
_STEP_TO = b"/step/"  # and the name of a model
_MAX_ID = 128
_NUMBERS = itertools.count()
_BOOT = f"{time.time_ns() // 1_000_000:x}"  # so that ids are not those of an earlier life
_clock = time.perf_counter
_HEAD = "head"  # the kind of an exchange whose reply has no body
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_UPGRADE = Refused(
    400,
    "upgrade",
    "This request asks for another protocol than HTTP/1.1.",
    "Tell the client to use HTTP/1.1 (curl: --http1.1, Java: HttpClient.Version.HTTP_1_1).",
)
_TOO_MANY_HEADERS = Refused(431, "headers_too_large", "The headers of this request are too many or too large.", "Send fewer.")


class Exchange:
    """One request on one connection, waiting for its reply."""

    __slots__ = ("_connection", "began", "caller", "close", "kind", "media", "raw", "request_id", "seq", "session")

    def __init__(
        self,
        connection: Connection,
        kind: str,
        close: bool,
        session: bytes = b"",
        seq: int = -1,
        id_: str = "",
        caller: Caller | None = None,
    ) -> None:
        self._connection, self.kind, self.close = connection, kind, close
        self.raw: bytes | None = None  # the reply, while earlier ones are missing
        self.session, self.seq, self.request_id, self.caller = session, seq, id_, caller
        self.media = ""
        self.began = _clock()

    def reply(self, status: int, body: bytes, retry_after_s: float | None = None, port: int = 0) -> None:
        """`port` is the direct port of the worker that has answered, if that is not this one."""
        connection = self._connection
        if status == 200 and self.kind is TICK and not self.close:
            length = len(body)
            head = _HEADS[length] if length < 1024 else _OK + str(length).encode() + _TYPE
            if self.request_id:
                head = head[:-2] + f"{REQUEST_ID_HEADER}: {self.request_id}\r\n\r\n".encode()
            if connection.logs_ticks:
                connection.log(self, status, body)
        else:
            if status != 200 and not self.request_id and connection.logged:
                self.request_id = f"{_BOOT}-{next(_NUMBERS):x}"
            head = self._head(status, len(body), retry_after_s, port)
            told = status not in (200, 503) if self.media else status != 200  # a page that says "not now" refuses nobody
            if told or self.kind in (START, END) or (self.kind is TICK and connection.logs_ticks):
                connection.log(self, status, body)
            if self.kind is _HEAD:
                body = b""
        pending = connection.pending
        if len(pending) == 1 and pending[0] is self:
            pending.clear()
            transport = connection.transport
            if transport is not None:
                transport.write(head + body)
                if self.close:
                    connection.finish()
                elif connection.held_back:
                    connection.go_on()
        else:
            self.raw = head + body
            connection.write_ready()

    def _head(self, status: int, length: int, retry_after_s: float | None, port: int) -> bytes:
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}", f"Content-Length: {length}"]
        json_reply = status != 200 or self.kind not in (START, TICK, END)
        lines.append(f"Content-Type: {self.media or ('application/json' if json_reply else 'application/octet-stream')}")
        endpoint = self._connection.endpoint(port) if self.kind is START and status == 200 else ""
        if endpoint:
            lines.append(f"{ENDPOINT_HEADER}: {endpoint}")
        if retry_after_s is not None:
            lines.append(f"Retry-After: {max(1, math.ceil(retry_after_s))}")
        if self.request_id:
            lines.append(f"{REQUEST_ID_HEADER}: {self.request_id}")
        if status == 401:
            lines.append("WWW-Authenticate: Bearer")
        if status == 405:
            lines.append("Allow: GET" if self._connection.path in spec.PAGES else "Allow: POST")
        if self.close:
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


_UNKNOWN = (0, 0, -1, b"", "")
_DIGITS = (_LENGTH, _SEQ)
_PLAIN = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:"
"""What a session or request id is usually made of. Others are right too, and are parsed."""


class KnownHead:
    """A header block that was parsed once, with holes where it may differ from one tick to the next: Content-Length, the
    session, seq and X-Request-Id when it has them."""

    __slots__ = ("_exact", "_holes", "_last", "_said", "about", "caller")

    def __init__(self, holes: tuple[tuple[bytes, int], ...], last: bytes, about: About, caller: Caller | None) -> None:
        self._holes, self._last = holes, last
        self.about, self.caller = about, caller
        self._exact, self._said = b"\r", _UNKNOWN  # what no request begins with

    @classmethod
    def learned(cls, head: bytes, about: About = NOTHING_ASKED, caller: Caller | None = None) -> KnownHead | None:
        """None when something does not stand where, or as, it should."""
        holes: list[tuple[bytes, int]] = []
        after = at = 0
        for line in head.split(b"\r\n"):
            name, colon, value = line.partition(b":")
            code = _HEADERS.get(name.lower())
            if colon and code in (_LENGTH, _SEQ, _SESSION, _ID):
                begin = at + len(line) - len(value.lstrip(b" \t"))
                said = value.strip(b" \t")
                if line[-1:].isspace() or not (said.isdigit() if code in _DIGITS else _is_plain(said)):
                    return None
                holes.append((head[after:begin], code))
                after = at + len(line)
            at += len(line) + 2
        codes = [code for _, code in holes]
        if len(set(codes)) != len(codes) or _LENGTH not in codes or _SESSION not in codes:
            return None
        known = cls(tuple(holes), head[after:], about, caller)
        if _SEQ not in codes and _ID not in codes:  # bodies of one size: then all of it is the same
            known._exact, known._said = head, known.read(head)
        return known

    def read(self, data: bytes) -> tuple[int, int, int, bytes, str]:
        """(where the body begins, its length, seq or -1, session, request id); the first is 0 when the block is another one."""
        if data.startswith(self._exact):
            return self._said
        at, length, seq, session, id_ = 0, 0, -1, b"", b""
        for piece, code in self._holes:
            if not data.startswith(piece, at):
                return _UNKNOWN
            at += len(piece)
            if code in _DIGITS:
                end = data.find(b"\r", at, at + 19)  # eighteen digits at most: they fit into 63 bits
                said = data[at:end]
                if end < 0 or not said.isdigit():
                    return _UNKNOWN
                if code == _LENGTH:
                    length = int(said)
                else:
                    seq = int(said)
            else:
                end = data.find(b"\r", at, at + (MAX_NAME_BYTES if code == _SESSION else _MAX_ID) + 1)
                said = data[at:end]
                if end < 0 or not _is_plain(said):
                    return _UNKNOWN
                if code == _SESSION:
                    session = said
                else:
                    id_ = said
            at = end
        if not data.startswith(self._last, at):
            return _UNKNOWN
        return at + len(self._last), length, seq, session, id_.decode()


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_plain(said: bytes) -> bool:
    return bool(said) and not said.translate(None, _PLAIN)


class Connection(asyncio.Protocol):
    """Feeds bytes to the parser; every complete request goes to the service.

    A game on a kept connection mostly sends the same header block again and again: when it is the block of the request
    before, but for Content-Length and seq, its parsed form is used again (measured: a third of the cost of a small request).
    """

    def __init__(self, service: Service, *, early: bytes = b"") -> None:
        """`early`: what another worker has read of this connection before it was handed over."""
        self._service, self._step_to = service, service.step
        self.logs_ticks = service.logs_ticks and service.logs is not None
        self._caller: Caller | None = None  # who sent the last token that was right, and which that was
        self._vouched: bytes | None = None
        self._peer = ""
        self._pipelined = service.limits.pipelined
        self.transport: asyncio.Transport | None = None
        self.pending: deque[Exchange] = deque()
        self.held_back = False  # we do not read, because too many replies are pending
        self.began = 0.0  # when the first byte of the request that is being received came; 0: none is
        self.stalled = 0.0  # since when the client does not read
        self.requests = 0
        self._swept = (0, service.loop.time())  # how many requests there were, and since when there were no more
        self.closing_at = 0.0
        self.path = ""
        self._parser: Any = httptools.HttpRequestParser(self)
        self._early = early
        self._first = not early  # the headers of the first request are not complete: the connection may be handed over
        self._raw: list[bytes] = []
        self._give_to = -1
        self._known: KnownHead | None = None  # the header block of the last plain tick
        self._refused: Refused | None = None  # why this connection will be closed
        self._ended = False  # the client sends no more
        self._now = 0.0  # when the bytes came that are being parsed
        self._begun = 0  # how many requests began in them
        self._reset()

    def _reset(self) -> None:
        self._started = False  # a request has begun and is not complete
        self._headers_done = False
        self._waiting_bytes = 0  # received without getting further: exact bounds are checked when headers are complete
        self._head_bytes = 0
        self._headers = 0
        self._expects = False
        self._url = b""
        self._session = b""
        self._kind = b""
        self._seq = -1
        self._about = NOTHING_ASKED
        self._request_id = ""
        self._length = -1
        self._auth = b""
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._wrong: Refused | None = None  # what is wrong with this request; the connection goes on
        self._remember = False

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        problem = self._service.open_connection(self)
        if problem and self.transport is not None:
            self._refuse(Refused(503, "too_many_connections", problem, "Try again later.", 1))
        early, self._early = self._early, b""
        if early:
            self.data_received(early)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._parser = None  # it refers to us: so both are freed now, not by some later collection
        self.pending.clear()
        self._service.closed(self)

    def eof_received(self) -> bool:
        self._ended = True
        if self.pending:  # it still wants its replies
            self.pending[-1].close = True
        return bool(self.pending)

    def pause_writing(self) -> None:
        self.stalled = self._service.loop.time()
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.stalled = 0.0
        if self.transport is not None and not self.held_back:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        known = self._known
        if known is not None and not self.began and len(self.pending) < self._pipelined:
            at, length, seq, session, id_ = known.read(data)
            if at and len(data) == at + length and length <= self._service.limits.body_bytes:
                self.requests += 1
                caller = known.caller
                exchange = Exchange(self, TICK, False, session, seq, id_, caller)
                self.pending.append(exchange)
                if caller is None or not caller.rate or self._within(caller, exchange):
                    self._step_to(TICK, session, seq, known.about, data[at:], exchange)
                return
        self._receive(data)

    # -- parsing

    def _receive(self, data: bytes) -> None:
        if self.closing_at:
            return  # what follows a refused request is not read
        fresh, self._begun = not self.began, 0
        body_bytes = 0 if fresh else self._body_bytes
        self._now = self._service.loop.time()
        if self._first:
            self._raw.append(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._refused is None:
                self._refused = Refused(400, "malformed", f"This is not an HTTP/1.1 request we can read: {error}.")
        if self._said_goodbye():
            self.began = 0.0
            return
        if self._refused is not None:
            self._refuse(self._refused)
        elif self._give_to >= 0:
            self._hand_over()
        elif not self._started:
            self._raw.clear()  # empty lines before the first request
        elif self._begun == 0 or (fresh and self._begun == 1):  # all of it belongs to one request
            in_body = self._headers_done and self._body_bytes > body_bytes
            self._waiting_bytes = 0 if in_body else self._waiting_bytes + len(data)
            if self._waiting_bytes > 2 * self._service.limits.header_bytes:  # the parser holds an unfinished header, or trailer
                self._refuse(_TOO_MANY_HEADERS)
        if fresh and self._remember and not self.began:
            self._learn(data)

    def on_message_begin(self) -> None:
        self._reset()
        self._started = True
        self.began = self._now
        self._begun += 1

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._headers_done:  # a trailer, after the body: it is counted, and means nothing
            if self._refused is None and self._too_many():
                self._refused = _TOO_MANY_HEADERS
            return
        code = _HEADERS.get(name) or _HEADERS.get(name.lower())
        if code is None:
            return
        value = value.rstrip(b" \t")
        if code == _SESSION:
            if self._session and self._session != value:
                self._wrong = Refused(400, "session", "This request names two sessions.", "Send one session header.")
            self._session = value
        elif code == _KIND:
            if self._kind and self._kind != value:
                self._wrong = Refused(400, "step_kind", "This request names two kinds of step.", "Send one step_kind header.")
            self._kind = value
        elif code == _LENGTH:
            self._length = int(value) if value.isdigit() else -1
        elif code == _SEQ:
            before, self._seq = self._seq, _number(value)
            if self._seq < 0:
                self._wrong = Refused(400, "seq", f"seq is {_shown(value)}.", "It is a whole number: 0, 1, 2, …")
            elif 0 <= before != self._seq:
                self._wrong = Refused(400, "seq", "This request has two numbers.", "Send one seq header.")
        elif code in (_MATCH, _MODEL, _VERSION, _TEMPERATURE):
            self._ask(code, value)
        elif code == _ID:
            self._request_id = _identified(value)
        elif code == _AUTH:
            if self._auth:
                self._refused = _TWO_TOKENS
            self._auth = value
        elif code == _CODING:
            if value.lower() != b"chunked":
                self._wrong = Refused(501, "transfer_encoding", f"Transfer-Encoding: {_shown(value)} is not supported.")
        elif value.lower() == b"100-continue":
            self._expects = True
        else:
            self._wrong = Refused(417, "expectation", f"Expect: {_shown(value)} is not supported.")

    def _ask(self, code: int, value: bytes) -> None:
        """What else a start may say."""
        if code == _VERSION:
            number = _number(value)
            if number < 0:
                self._wrong = Refused(400, "version", f"The version is {_shown(value)}.", "It is a whole number.")
            self._about = self._about._replace(version=number)
        elif code == _TEMPERATURE:
            temperature = _decimal(value)
            if not 0 <= temperature <= MAX_TEMPERATURE:
                hint = "It is a number from 0 (the most probable action) to 100; 1 draws as in training."
                self._wrong = Refused(400, "temperature", f"The temperature is {_shown(value)}.", hint)
            self._about = self._about._replace(temperature=temperature)
        elif len(value) > MAX_NAME_BYTES:
            match, message = code == _MATCH, f"The name of a match or model is longer than {MAX_NAME_BYTES} bytes."
            hint = "Use a shorter one."
            self._wrong = Refused(400, "session", message, hint) if match else Refused(400, "model", message, hint)
        elif not _is_utf8(value):
            what = "session" if code == _MATCH else "model"
            self._wrong = Refused(400, what, f"The name {_shown(value)} of a match or model is not UTF-8.", "Use ASCII or UTF-8.")
        else:
            text = value.decode()
            self._about = self._about._replace(match=text) if code == _MATCH else self._about._replace(model=text)

    def on_headers_complete(self) -> None:
        self._headers_done = True
        if self._refused is not None or self._give_to >= 0 or self._said_goodbye():
            return
        if self._parser.should_upgrade():  # the parser would leave the body to the other protocol
            self._refused = _UPGRADE
        else:
            self._refused = _TOO_MANY_HEADERS if self._too_many() else self._too_large()
        if self._refused is not None:
            return
        if self._first:
            if self._session and self._authorized():
                self._give_to = self._service.elsewhere(self._session)
            if self._give_to >= 0:
                return
            self._first = False
            self._raw.clear()
        if self._expects and self._parser.get_http_version() == "1.1":
            go_ahead = Exchange(self, "", False)
            go_ahead.raw = _CONTINUE
            self.pending.append(go_ahead)
            self.write_ready()

    def _said_goodbye(self) -> bool:
        """A request was to be the last one: what follows it is nothing to us."""
        return bool(self.closing_at or (self.pending and self.pending[-1].close))

    def _too_many(self) -> bool:
        limits = self._service.limits
        return self._headers > limits.headers or self._head_bytes > limits.header_bytes

    def _too_large(self) -> Refused | None:
        most = self._service.limits.body_bytes
        size = max(self._length, self._body_bytes)
        if size > _STRANGERS_BODY and not self._authorized():
            return _UNAUTHORIZED
        if size <= most:
            return None
        return Refused(413, "body_too_large", f"The body is larger than {most} bytes.", "Send less, or raise the limit.")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._refused is None and self._give_to < 0:
            self._refused = self._too_large()
            if self._refused is None:
                self._body.append(body)
            else:
                self._body.clear()

    def on_message_complete(self) -> None:
        self._started = False
        if self._refused is not None or self._give_to >= 0 or self.transport is None:
            return
        if self._said_goodbye():
            return
        self.requests += 1
        url = self._url.partition(b"?")[0]
        if not url.startswith(b"/"):  # as to a proxy: http://host/step
            url = b"/" + url.partition(b"://")[2].partition(b"/")[2]
        self.path = url.decode("latin-1")
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        version = self._parser.get_http_version()
        close = not self._parser.should_keep_alive() or version != "1.1"
        if version not in ("1.0", "1.1"):
            wrong = Refused(505, "http_version", f"HTTP/{version} is not spoken here.", "Tell the client to use HTTP/1.1.")
            self._answer_now(wrong, close)
        elif url != b"/step" and not url.startswith(_STEP_TO):
            self._other(close)
        elif self._parser.get_method() != b"POST":
            self._answer_now(Refused(405, "method", "Steps are sent by POST.", "POST /step"), close)
        else:
            self._step(body, close)
        self.began = 0.0
        if len(self.pending) >= self._service.limits.pipelined and self.transport is not None:
            self.held_back = True
            self.transport.pause_reading()

    def _step(self, body: bytes, close: bool) -> None:
        kind = KINDS.get(self._kind) or KINDS.get(self._kind.lower())
        if self.path != STEP:
            self._ask(_MODEL, unquote(self.path[len(_STEP_TO) :]).encode())
        wrong = self._wrong
        if not self._authorized():
            wrong = _UNAUTHORIZED
        elif wrong is not None:
            pass
        elif kind is None:
            found = f"step_kind is {_shown(self._kind)}" if self._kind else "The step_kind header is missing"
            wrong = Refused(400, "step_kind", f"{found}.", "It is start, tick or end (as Ludus-Step behind a proxy).")
        elif not self._session:
            hint = "Send a session header (Ludus-Session behind a proxy) with an id of your choice."
            wrong = Refused(400, "session", "The session header is missing or empty.", hint)
        elif len(self._session) > MAX_NAME_BYTES:
            wrong = Refused(400, "session", f"The session id is longer than {MAX_NAME_BYTES} bytes.", "A UUID will do.")
        elif not _is_utf8(self._session):
            wrong = Refused(400, "session", f"The session id {_shown(self._session)} is not UTF-8.", "A UUID will do.")
        if wrong is not None or kind is None:
            assert wrong is not None
            self._answer_now(wrong, close)
            return
        same = kind is TICK and not close and not self._expects  # would mean the same if it came again
        self._remember = same and self._length == len(body) and not self.pending
        caller = self._caller
        exchange = Exchange(self, kind, close, self._session, self._seq, self._request_id, caller)
        self.pending.append(exchange)
        if caller is None or not caller.rate or self._within(caller, exchange):
            self._step_to(kind, self._session, self._seq, self._about, body, exchange)

    def _within(self, caller: Caller, exchange: Exchange) -> bool:
        """Whether this caller may ask once more now; else it has been told."""
        if caller.allow(_clock()):
            return True
        refused = Refused(429, "too_many_requests", "This token sends too many requests.", "Slow down.", 1 / caller.rate)
        self._service.refused(refused)
        exchange.reply(refused.status, error_body(refused), refused.retry_after_s)
        return False

    def _other(self, close: bool) -> None:
        method = self._parser.get_method()
        if method not in (b"GET", b"HEAD"):
            what = f"{self.path[:80]} does not take {method.decode('latin-1')}."
            known = self.path in spec.PAGES
            wrong = Refused(405, "method", what, "GET it.") if known else Refused(404, "not_found", what, "POST /step")
            self._answer_now(wrong, close)
            return
        authorized = self._authorized()
        caller = self._caller if authorized else None
        exchange = Exchange(self, _HEAD if method == b"HEAD" else "", close, id_=self._request_id, caller=caller)
        self.pending.append(exchange)
        if caller is None or not caller.rate or self._within(caller, exchange):
            page = self._service.get(self.path, authorized)
            exchange.media = page.media
            exchange.reply(page.status, page.body)

    def _answer_now(self, refused: Refused, close: bool) -> None:
        self._service.refused(refused)
        kind = _HEAD if self._parser.get_method() == b"HEAD" else KINDS.get(self._kind.lower(), "")
        caller = None if refused is _UNAUTHORIZED else self._caller
        exchange = Exchange(self, kind, close, self._session[:MAX_NAME_BYTES], self._seq, self._request_id, caller)
        self.pending.append(exchange)
        exchange.reply(refused.status, error_body(refused), refused.retry_after_s)

    def _authorized(self) -> bool:
        tokens = self._service.tokens
        if tokens is None:
            return True
        if self._vouched is None or not hmac.compare_digest(self._auth, self._vouched):
            caller = tokens.caller(self._auth)
            if caller is None:
                return False
            self._caller, self._vouched = caller, self._auth
            self._service.authorize(self)
        return True

    @property
    def logged(self) -> bool:
        return self._service.logs is not None

    def forget_caller(self) -> None:
        """The tokens have changed: who this is must be shown again."""
        self._known = self._caller = self._vouched = None

    def log(self, exchange: Exchange, status: int, body: bytes) -> None:
        logs = self._service.logs
        if logs is None:
            return
        if not self._peer and self.transport is not None:
            self._peer = str((self.transport.get_extra_info("peername") or ("",))[0])
        error = "" if status == 200 else spec.refusal_from(status, body).error
        took, caller = _clock() - exchange.began, "" if exchange.caller is None else exchange.caller.name
        path = STEP if exchange.session else self.path[:MAX_NAME_BYTES]
        said = (exchange.session, exchange.seq, took, exchange.request_id, caller, self._peer, error)
        logs(Replied(exchange.kind, path, status, *said))

    def _learn(self, data: bytes) -> None:
        """`data` was exactly one plain tick: the same header block again will mean the same, but for its numbers."""
        end = data.find(b"\r\n\r\n") + 4
        if len(data) == end + self._length:
            self._known = KnownHead.learned(data[:end], self._about, self._caller)

    # -- handing over

    def _hand_over(self) -> None:
        slot, data = self._give_to, b"".join(self._raw)
        self._raw.clear()
        self._give_to, self._first = -1, False
        if self._service.hand_over(self, slot, data):
            return
        # Not possible now: parse again, here, and let the service forward each request.
        self._parser = httptools.HttpRequestParser(self)
        self._reset()
        self.began = 0.0
        self._receive(data)

    def detach(self) -> None:
        """The socket lives on in another process; nothing more is read or written here."""
        self.closing_at = self._service.loop.time()
        if self.transport is not None:
            self.transport.abort()

    # -- replies

    def endpoint(self, port: int) -> str:
        """The port of one worker alone (0: ours), at the address by which the client has reached us."""
        port = port or self._service.direct_port
        if not port or self.transport is None:
            return ""
        host = self.transport.get_extra_info("sockname")[0]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def write_ready(self) -> None:
        """Write the replies at the head of the line that are complete."""
        out: list[bytes] = []
        close = False
        while self.pending and self.pending[0].raw is not None and not close:
            exchange = self.pending.popleft()
            out.append(cast(bytes, exchange.raw))
            close = exchange.close
        if out and self.transport is not None:
            self.transport.write(b"".join(out))
            if close:
                self.finish()
            else:
                self.go_on()

    def go_on(self) -> None:
        if self.held_back and len(self.pending) <= self._service.limits.pipelined // 2 and self.transport is not None:
            self.held_back = False
            if not self.stalled:
                self.transport.resume_reading()

    def _refuse(self, refused: Refused) -> None:
        """The connection cannot be trusted any further: say why, after the replies that are due, and close."""
        self._service.refused(refused)
        self._known = None
        exchange = Exchange(self, "", True)
        self.pending.append(exchange)
        self.closing_at = self._service.loop.time() + _LINGER_S
        exchange.reply(refused.status, error_body(refused), refused.retry_after_s)

    def finish(self) -> None:
        """All is said. The client may still be sending: close our side, read no more of it, and hang up a little later."""
        self._known = None
        self.pending.clear()
        if self.transport is None:
            return
        self.closing_at = self._service.loop.time() + _LINGER_S
        if self._ended or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.transport.write_eof()
            self.transport.resume_reading()  # what is still being sent is read and dropped: a reset could eat our reply

    def forgive(self, pause_s: float, now: float) -> None:
        """Our own event loop stood still for so long: the client is not to blame for that time."""
        if self.began:
            self.began = min(now, self.began + pause_s)
        if self.stalled:
            self.stalled = min(now, self.stalled + pause_s)
        self._swept = (self._swept[0], min(now, self._swept[1] + pause_s))

    def sweep(self, now: float) -> None:
        """A few times a second: cut off who is too slow, too idle, or done with."""
        if self.transport is None:
            return
        limits = self._service.limits
        if self.closing_at:
            said = not self.pending and not self.transport.get_write_buffer_size()
            if now > self.closing_at + (0.0 if said else limits.send_s):
                self.transport.abort()
        elif self.stalled:
            if now - self.stalled > limits.send_s:
                self.transport.abort()
        elif self.began and not self.held_back:
            if now - self.began > limits.receive_s:
                message = f"This request was not received within {limits.receive_s:g} s."
                self._refuse(Refused(408, "too_slow", message, "Send headers and body at once."))
        elif self.pending or self.requests != self._swept[0]:
            self._swept = (self.requests, now)
        elif now - self._swept[1] > self._idle_s(limits):
            self.finish()

    def _idle_s(self, limits: HttpLimits) -> float:
        return limits.idle_s if self._service.is_authorized(self) else min(limits.idle_s, limits.unauthorized_idle_s)


def _number(value: bytes) -> int:
    if value.isdigit() and len(value) < 20:
        number = int(value)
        return number if number <= MAX_SEQ else -1
    return -1


def _decimal(value: bytes) -> float:
    try:
        return float(value) if len(value) < 40 and b"_" not in value else math.nan  # Python also reads 1_0 as a number
    except ValueError:
        return math.nan


def _identified(value: bytes) -> str:
    """A request id that may be written into a header and a log."""
    text = value[:_MAX_ID].decode("latin-1")
    return text if text.isascii() and text.isprintable() else ""


def _shown(value: bytes) -> str:
    text: Any = value[:40].decode("latin-1")
    return repr(text)
