"""HTTP/1.1 server connection for games, parsed by httptools, with bounds on all memory and time a client can use.

Knows requests and replies, not sessions. Replies leave in the order of their requests (pipelining).
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import unquote

import httptools

from ludus.errors import Refused
from ludus.gateway.auth import Caller, Tokens
from ludus.io.addresses import plain_address, url_host
from ludus.protocol import spec
from ludus.protocol.spec import (
    DEFAULT_OPTIONS,
    END,
    ENDPOINT_HEADER,
    KINDS,
    MAX_NAME_BYTES,
    MAX_SEQ,
    MAX_TEMPERATURE,
    REASONS,
    REQUEST_ID_HEADER,
    START,
    STEP,
    TICK,
    StartOptions,
    error_body,
)


@dataclass(frozen=True)
class HttpLimits:
    header_bytes: int = 16 << 10
    headers: int = 64
    body_bytes: int = 8 << 20
    connections: int = 10_000
    pipelined: int = 32
    """Requests of one connection that may wait for their replies; above this the connection is not read."""
    receive_s: float = 10.0
    """Time limit for a whole request, from its first byte."""
    send_s: float = 10.0
    """Time limit for a client to read its replies."""
    idle_s: float = 300.0
    """Time limit between two requests of a connection."""
    unauthorized_idle_s: float = 10.0
    """The same for a connection that has not yet sent a valid token."""
    connections_per_address: int = 0
    """Connections per client address and worker; 0 = unlimited (behind a proxy all clients share one address)."""


class Page(NamedTuple):
    """The reply to a GET."""

    status: int
    body: bytes
    media: str = "application/json"


class AccessRecord(NamedTuple):
    """The access-log fields of one reply. Never holds a body or a token."""

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


class RequestHandler(Protocol):
    """The server behind a connection."""

    limits: HttpLimits
    loop: asyncio.AbstractEventLoop
    tokens: Tokens | None
    """Accepted tokens; None: no authentication."""
    access_log: Callable[[AccessRecord], None] | None
    """Called for every reply except successful ticks; for those too with `log_ticks`."""
    log_ticks: bool
    direct_port: int
    """A port that reaches this worker only; 0: none."""

    def open_connection(self, connection: HttpConnection) -> str:
        """Return why this connection cannot be served, or an empty string."""
        ...

    def authorize(self, connection: HttpConnection) -> None:
        """Called when the connection sends a valid token for the first time."""
        ...

    def is_authorized(self, connection: HttpConnection) -> bool: ...

    def close_connection(self, connection: HttpConnection) -> None: ...

    def owner_elsewhere(self, session: bytes) -> int:
        """Return the slot of the other worker that owns this session, or -1."""
        ...

    def hand_over(self, connection: HttpConnection, slot: int, data: bytes) -> bool:
        """Pass a connection and the bytes read from it to another worker. False when that is not possible now."""
        ...

    def step(self, kind: str, session: bytes, seq: int, options: StartOptions, body: bytes, exchange: HttpExchange) -> None: ...

    def get(self, path: str, authorized: bool) -> Page: ...

    def count_refusal(self, refused: Refused) -> None: ...


_SESSION, _KIND, _SEQ, _MATCH, _LENGTH, _CODING, _AUTH, _EXPECT, _MODEL, _VERSION, _TEMPERATURE, _ID, _SIDE = range(1, 14)
_HEADERS: dict[bytes, int] = {
    **dict.fromkeys(spec.SESSION_HEADERS, _SESSION),
    **dict.fromkeys(spec.KIND_HEADERS, _KIND),
    **dict.fromkeys(spec.SEQ_HEADERS, _SEQ),
    **dict.fromkeys(spec.MATCH_HEADERS, _MATCH),
    **dict.fromkeys(spec.SIDE_HEADERS, _SIDE),
    **dict.fromkeys(spec.MODEL_HEADERS, _MODEL),
    **dict.fromkeys(spec.VERSION_HEADERS, _VERSION),
    **dict.fromkeys(spec.TEMPERATURE_HEADERS, _TEMPERATURE),
    REQUEST_ID_HEADER.lower().encode(): _ID,
    b"content-length": _LENGTH,
    b"transfer-encoding": _CODING,
    b"authorization": _AUTH,
    b"expect": _EXPECT,
}
_OCTET_STREAM = b"\r\nContent-Type: application/octet-stream\r\n\r\n"
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: "
_HEADS = {length: _OK + str(length).encode() + _OCTET_STREAM for length in range(1024)}
_LINGER_S = 2.0
_UNAUTHORIZED_BODY = 4 << 10  # body bytes accepted from an unauthorized client
_UNAUTHORIZED = Refused(401, "unauthorized", "The token is missing or wrong.", "Send Authorization: Bearer TOKEN.")
_TWO_TOKENS = Refused(400, "authorization", "This request has two Authorization headers.", "Send one.")
_STEP_PREFIX = b"/step/"  # followed by the name of a model
_MAX_ID = 128
_ID_NUMBERS = itertools.count()
_ID_PREFIX = f"{time.time_ns() // 1_000_000:x}"  # makes ids unique across restarts
_clock = time.perf_counter
_HEAD = "head"  # the kind of an exchange whose reply has no body
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_UPGRADE = Refused(
    400,
    "upgrade",
    "This request asks for another protocol than HTTP/1.1.",
    "Configure the client for HTTP/1.1 (curl: --http1.1, Java: HttpClient.Version.HTTP_1_1).",
)
_TOO_MANY_HEADERS = Refused(431, "headers_too_large", "The headers of this request are too many or too large.", "Send fewer.")


@dataclass(slots=True, eq=False)
class HttpExchange:
    """One request on one connection, waiting for its reply."""

    _connection: HttpConnection
    kind: str
    close: bool
    session: bytes = b""
    seq: int = -1
    request_id: str = ""
    caller: Caller | None = None
    raw: bytes | None = None
    """The reply, while it waits for earlier ones."""
    media: str = ""
    began: float = field(default_factory=_clock)

    def reply(self, status: int, body: bytes, retry_after_s: float | None = None, port: int = 0) -> None:
        """Send the reply. `port`: direct port of the worker that answered, if it is another one."""
        connection = self._connection
        if status == 200 and self.kind is TICK and not self.close:
            length = len(body)
            head = _HEADS[length] if length < 1024 else _OK + str(length).encode() + _OCTET_STREAM
            if self.request_id:
                head = head[:-2] + f"{REQUEST_ID_HEADER}: {self.request_id}\r\n\r\n".encode()
            if connection.log_ticks:
                connection.log(self, status, body)
        else:
            if status != 200 and not self.request_id and connection.has_access_log:
                self.request_id = f"{_ID_PREFIX}-{next(_ID_NUMBERS):x}"
            head = self._head(status, len(body), retry_after_s, port)
            is_error = status not in (200, 503) if self.media else status != 200  # 503 of /ready is no error
            if is_error or self.kind in (START, END) or (self.kind is TICK and connection.log_ticks):
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
                elif connection.reading_paused:
                    connection.resume_reading()
        else:
            self.raw = head + body
            connection.write_ready()

    def refuse(self, refused: Refused) -> None:
        self.reply(refused.status, error_body(refused), refused.retry_after_s)

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


_NO_MATCH = (0, 0, -1, b"", "")
_DIGITS = (_LENGTH, _SEQ)
_PLAIN = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:"
"""Characters of a typical session or request id. Ids with others are valid but take the parser's path."""


class HeaderTemplate:
    """A parsed header block with variable fields (Content-Length, session, seq, X-Request-Id), to recognise the next tick's
    block without parsing it."""

    __slots__ = ("_exact_head", "_exact_match", "_fields", "_tail", "caller", "options")

    def __init__(self, fields: tuple[tuple[bytes, int], ...], tail: bytes, options: StartOptions, caller: Caller | None) -> None:
        self._fields, self._tail = fields, tail
        self.options, self.caller = options, caller
        self._exact_head, self._exact_match = b"\r", _NO_MATCH  # no request begins with \r

    @classmethod
    def learn(cls, head: bytes, options: StartOptions = DEFAULT_OPTIONS, caller: Caller | None = None) -> HeaderTemplate | None:
        """Build a template from one header block. None when a field is missing, repeated or unusual."""
        fields: list[tuple[bytes, int]] = []
        after = at = 0
        for line in head.split(b"\r\n"):
            name, colon, value = line.partition(b":")
            code = _HEADERS.get(name.lower())
            if colon and code in (_LENGTH, _SEQ, _SESSION, _ID):
                begin = at + len(line) - len(value.lstrip(b" \t"))
                text = value.strip(b" \t")
                if line[-1:].isspace() or not (text.isdigit() if code in _DIGITS else _is_plain(text)):
                    return None
                fields.append((head[after:begin], code))
                after = at + len(line)
            at += len(line) + 2
        codes = [code for _, code in fields]
        if len(set(codes)) != len(codes) or _LENGTH not in codes or _SESSION not in codes:
            return None
        template = cls(tuple(fields), head[after:], options, caller)
        if _SEQ not in codes and _ID not in codes:  # blocks are identical while bodies have the same size
            template._exact_head, template._exact_match = head, template.match(head)
        return template

    def match(self, data: bytes) -> tuple[int, int, int, bytes, str]:
        """Return (offset of the body, its length, seq or -1, session, request id); the offset is 0 without a match."""
        if data.startswith(self._exact_head):
            return self._exact_match
        at, length, seq, session, request_id = 0, 0, -1, b"", b""
        for piece, code in self._fields:
            if not data.startswith(piece, at):
                return _NO_MATCH
            at += len(piece)
            if code in _DIGITS:
                end = data.find(b"\r", at, at + 19)  # at most eighteen digits, which fit into 63 bits
                text = data[at:end]
                if end < 0 or not text.isdigit():
                    return _NO_MATCH
                if code == _LENGTH:
                    length = int(text)
                else:
                    seq = int(text)
            else:
                end = data.find(b"\r", at, at + (MAX_NAME_BYTES if code == _SESSION else _MAX_ID) + 1)
                text = data[at:end]
                if end < 0 or not _is_plain(text):
                    return _NO_MATCH
                if code == _SESSION:
                    session = text
                else:
                    request_id = text
            at = end
        if not data.startswith(self._tail, at):
            return _NO_MATCH
        return at + len(self._tail), length, seq, session, request_id.decode()


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_plain(text: bytes) -> bool:
    return bool(text) and not text.translate(None, _PLAIN)


@dataclass(slots=True)
class _Request:
    """The request being parsed."""

    started: bool = False  # begun and not complete
    headers_done: bool = False
    stalled_bytes: int = 0  # received without progress of the parser, which checks exact bounds only after the headers
    head_bytes: int = 0
    headers: int = 0
    expects_continue: bool = False
    url: bytes = b""
    session: bytes = b""
    kind: bytes = b""
    seq: int = -1
    options: StartOptions = DEFAULT_OPTIONS
    request_id: str = ""
    length: int = -1
    authorization: bytes = b""
    body: list[bytes] = field(default_factory=list)
    body_bytes: int = 0
    error: Refused | None = None  # rejects this request; the connection stays open
    is_plain_tick: bool = False  # its header block can serve as a template


@dataclass(slots=True)
class _Handover:
    """Whether a connection moves to another worker. Decided when the headers of its first request are complete."""

    possible: bool
    received: list[bytes] = field(default_factory=list)
    slot: int = -1
    """The worker that gets the connection; -1: this one keeps it."""


class HttpConnection(asyncio.Protocol):
    """Feeds bytes to the parser and passes every complete request to the handler.

    A game on a kept connection mostly repeats the header block of its previous request, but for Content-Length and seq: then
    the parsed form is used again (measured: saves a third of the cost of a small request).
    """

    def __init__(self, handler: RequestHandler, *, early: bytes = b"") -> None:
        """`early`: bytes that another worker read before it handed the connection over."""
        self._handler, self._handle_step = handler, handler.step
        self.log_ticks = handler.log_ticks and handler.access_log is not None
        self._caller: Caller | None = None  # sender of the last valid Authorization header
        self._valid_authorization: bytes | None = None
        self._peer = ""
        self._pipelined = handler.limits.pipelined
        self.transport: asyncio.Transport | None = None
        self.pending: deque[HttpExchange] = deque()
        self.reading_paused = False  # too many replies are pending
        self.began = 0.0  # arrival of the first byte of the incomplete request; 0: there is none
        self.stalled = 0.0  # since when the client does not read; 0: it does
        self.requests = 0
        self._idle_since = (0, handler.loop.time())  # (number of requests, since when there were no more)
        self.closing_at = 0.0
        self.path = ""
        self._parser: Any = httptools.HttpRequestParser(self)
        self._early = early
        self._handover = _Handover(possible=not early)
        self._template: HeaderTemplate | None = None  # header block of the last plain tick
        self._refused: Refused | None = None  # why this connection will be closed
        self._eof = False  # the client has closed its side
        self._received_at = 0.0  # arrival of the bytes being parsed
        self._begun_requests = 0  # requests that began in these bytes
        self._request = _Request()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        problem = self._handler.open_connection(self)
        if problem and self.transport is not None:
            self._refuse(Refused(503, "too_many_connections", problem, "Try again later.", 1))
        early, self._early = self._early, b""
        if early:
            self.data_received(early)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._parser = None  # breaks the reference cycle, so that both are freed at once
        self.pending.clear()
        self._handler.close_connection(self)

    def eof_received(self) -> bool:
        self._eof = True
        if self.pending:  # the client may still read its replies
            self.pending[-1].close = True
        return bool(self.pending)

    def pause_writing(self) -> None:
        self.stalled = self._handler.loop.time()
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.stalled = 0.0
        if self.transport is not None and not self.reading_paused:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        template = self._template
        if template is not None and not self.began and len(self.pending) < self._pipelined:
            at, length, seq, session, request_id = template.match(data)
            if at and len(data) == at + length and length <= self._handler.limits.body_bytes:
                self.requests += 1
                caller = template.caller
                exchange = HttpExchange(self, TICK, False, session, seq, request_id, caller)
                self.pending.append(exchange)
                if caller is None or not caller.rate or self._allow_request(caller, exchange):
                    self._handle_step(TICK, session, seq, template.options, data[at:], exchange)
                return
        self._receive(data)

    # -- parsing

    def _receive(self, data: bytes) -> None:
        if self.closing_at:
            return  # bytes after a refused request are ignored
        handover = self._handover
        fresh, self._begun_requests = not self.began, 0
        body_bytes = 0 if fresh else self._request.body_bytes
        self._received_at = self._handler.loop.time()
        if handover.possible:
            handover.received.append(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._refused is None:
                self._refused = Refused(400, "malformed", f"This is not a valid HTTP/1.1 request: {error}.")
        request = self._request  # the parser's callbacks replace it
        if self._is_closing():
            self.began = 0.0
            return
        if self._refused is not None:
            self._refuse(self._refused)
        elif handover.slot >= 0:
            self._hand_over()
        elif not request.started:
            handover.received.clear()  # empty lines before the first request
        elif self._begun_requests == 0 or (fresh and self._begun_requests == 1):  # all bytes belong to one request
            in_body = request.headers_done and request.body_bytes > body_bytes
            request.stalled_bytes = 0 if in_body else request.stalled_bytes + len(data)
            if request.stalled_bytes > 2 * self._handler.limits.header_bytes:  # an incomplete header or trailer is buffered
                self._refuse(_TOO_MANY_HEADERS)
        if fresh and request.is_plain_tick and not self.began:
            end = data.find(b"\r\n\r\n") + 4
            if len(data) == end + request.length:  # exactly one plain tick
                self._template = HeaderTemplate.learn(data[:end], request.options, self._caller)

    def on_message_begin(self) -> None:
        self._request = _Request(started=True)
        self.began = self._received_at
        self._begun_requests += 1

    def on_url(self, url: bytes) -> None:
        request = self._request
        request.url += url
        request.head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self._request
        request.headers += 1
        request.head_bytes += len(name) + len(value) + 4
        if request.headers_done:  # a trailer after the body: counted, otherwise ignored
            if self._refused is None and self._has_too_many_headers():
                self._refused = _TOO_MANY_HEADERS
            return
        code = _HEADERS.get(name) or _HEADERS.get(name.lower())
        if code is None:
            return
        value = value.rstrip(b" \t")
        if code == _SESSION:
            if request.session and request.session != value:
                request.error = Refused(400, "session", "This request names two sessions.", "Send one session header.")
            request.session = value
        elif code == _KIND:
            if request.kind and request.kind != value:
                request.error = Refused(400, "step_kind", "This request names two kinds of step.", "Send one step_kind header.")
            request.kind = value
        elif code == _LENGTH:
            request.length = int(value) if value.isdigit() else -1
        elif code == _SEQ:
            before, request.seq = request.seq, _parse_number(value)
            if request.seq < 0:
                request.error = Refused(400, "seq", f"seq is {_quote(value)}.", "It is a whole number: 0, 1, 2, …")
            elif 0 <= before != request.seq:
                request.error = Refused(400, "seq", "This request has two numbers.", "Send one seq header.")
        elif code in (_MATCH, _SIDE, _MODEL, _VERSION, _TEMPERATURE):
            self._set_option(code, value)
        elif code == _ID:
            text = value[:_MAX_ID].decode("latin-1")
            request.request_id = text if text.isascii() and text.isprintable() else ""  # safe in a header and a log line
        elif code == _AUTH:
            if request.authorization:
                self._refused = _TWO_TOKENS
            request.authorization = value
        elif code == _CODING:
            if value.lower() != b"chunked":
                request.error = Refused(501, "transfer_encoding", f"Transfer-Encoding: {_quote(value)} is not supported.")
        elif value.lower() == b"100-continue":
            request.expects_continue = True
        else:
            request.error = Refused(417, "expectation", f"Expect: {_quote(value)} is not supported.")

    def _set_option(self, code: int, value: bytes) -> None:
        """Parse one header of `StartOptions`."""
        request = self._request
        if code == _VERSION:
            number = _parse_number(value)
            if number < 0:
                request.error = Refused(400, "version", f"The version is {_quote(value)}.", "It is a whole number.")
            request.options = request.options._replace(version=number)
        elif code == _TEMPERATURE:
            try:
                temperature = float(value) if len(value) < 40 and b"_" not in value else math.nan  # Python also reads 1_0
            except ValueError:
                temperature = math.nan
            if not 0 <= temperature <= MAX_TEMPERATURE:
                hint = "It is a number from 0 (the most probable action) to 100; 1 draws as in training."
                request.error = Refused(400, "temperature", f"The temperature is {_quote(value)}.", hint)
            request.options = request.options._replace(temperature=temperature)
        elif len(value) > MAX_NAME_BYTES:
            message, hint = f"The name of a match, side or model is longer than {MAX_NAME_BYTES} bytes.", "Use a shorter one."
            request.error = Refused(400, "model", message, hint) if code == _MODEL else Refused(400, "session", message, hint)
        elif not _is_utf8(value):
            message = f"The name {_quote(value)} of a match, side or model is not UTF-8."
            request.error = Refused(400, "model" if code == _MODEL else "session", message, "Use ASCII or UTF-8.")
        else:
            text, options = value.decode(), request.options
            if code == _MATCH:
                request.options = options._replace(match=text)
            else:
                request.options = options._replace(side=text) if code == _SIDE else options._replace(model=text)

    def on_headers_complete(self) -> None:
        handover = self._handover
        request = self._request
        request.headers_done = True
        if self._refused is not None or handover.slot >= 0 or self._is_closing():
            return
        if self._parser.should_upgrade():  # the parser would not parse the body
            self._refused = _UPGRADE
            return
        self._refused = _TOO_MANY_HEADERS if self._has_too_many_headers() else self._body_limit_error()
        if self._refused is not None:
            return
        if handover.possible:
            if request.session and self._is_authorized():
                handover.slot = self._handler.owner_elsewhere(request.session)
            if handover.slot >= 0:
                return
            handover.possible = False
            handover.received.clear()
        if request.expects_continue and self._parser.get_http_version() == "1.1":
            interim = HttpExchange(self, "", False)
            interim.raw = _CONTINUE
            self.pending.append(interim)
            self.write_ready()

    def _is_closing(self) -> bool:
        """Whether the last request of this connection was received; further bytes are ignored."""
        return bool(self.closing_at or (self.pending and self.pending[-1].close))

    def _has_too_many_headers(self) -> bool:
        request = self._request
        limits = self._handler.limits
        return request.headers > limits.headers or request.head_bytes > limits.header_bytes

    def _body_limit_error(self) -> Refused | None:
        request = self._request
        most = self._handler.limits.body_bytes
        size = max(request.length, request.body_bytes)
        if size > _UNAUTHORIZED_BODY and not self._is_authorized():
            return _UNAUTHORIZED
        if size <= most:
            return None
        return Refused(413, "body_too_large", f"The body is larger than {most} bytes.", "Send less, or raise the limit.")

    def on_body(self, body: bytes) -> None:
        request = self._request
        request.body_bytes += len(body)
        if self._refused is None and self._handover.slot < 0:
            self._refused = self._body_limit_error()
            if self._refused is None:
                request.body.append(body)
            else:
                request.body.clear()

    def on_message_complete(self) -> None:
        request = self._request
        request.started = False
        if self._refused is not None or self._handover.slot >= 0 or self.transport is None or self._is_closing():
            return
        self.requests += 1
        url = request.url.partition(b"?")[0]
        if not url.startswith(b"/"):  # absolute form, as sent to a proxy: http://host/step
            url = b"/" + url.partition(b"://")[2].partition(b"/")[2]
        self.path = url.decode("latin-1")
        body = request.body[0] if len(request.body) == 1 else b"".join(request.body)
        version = self._parser.get_http_version()
        close = not self._parser.should_keep_alive() or version != "1.1"
        if version not in ("1.0", "1.1"):
            error = Refused(505, "http_version", f"HTTP/{version} is not supported.", "Configure the client for HTTP/1.1.")
            self._reject(error, close)
        elif url != b"/step" and not url.startswith(_STEP_PREFIX):
            self._get_page(close)
        elif self._parser.get_method() != b"POST":
            self._reject(Refused(405, "method", "Steps are sent by POST.", "POST /step"), close)
        else:
            self._step(body, close)
        self.began = 0.0
        if len(self.pending) >= self._handler.limits.pipelined and self.transport is not None:
            self.reading_paused = True
            self.transport.pause_reading()

    def _step(self, body: bytes, close: bool) -> None:
        request = self._request
        kind = KINDS.get(request.kind) or KINDS.get(request.kind.lower())
        if self.path != STEP:
            self._set_option(_MODEL, unquote(self.path[len(_STEP_PREFIX) :]).encode())
        error = request.error
        if not self._is_authorized():
            error = _UNAUTHORIZED
        elif error is not None:
            pass
        elif kind is None:
            problem = f"step_kind is {_quote(request.kind)}" if request.kind else "The step_kind header is missing"
            error = Refused(400, "step_kind", f"{problem}.", "It is start, tick or end (as Ludus-Step behind a proxy).")
        elif not request.session:
            hint = "Send a session header (Ludus-Session behind a proxy) with an id of your choice."
            error = Refused(400, "session", "The session header is missing or empty.", hint)
        elif len(request.session) > MAX_NAME_BYTES:
            error = Refused(400, "session", f"The session id is longer than {MAX_NAME_BYTES} bytes.", "A UUID will do.")
        elif not _is_utf8(request.session):
            error = Refused(400, "session", f"The session id {_quote(request.session)} is not UTF-8.", "A UUID will do.")
        if error is not None:
            self._reject(error, close)
            return
        assert kind is not None
        repeatable = kind is TICK and not close and not request.expects_continue
        request.is_plain_tick = repeatable and request.length == len(body) and not self.pending
        caller = self._caller
        exchange = HttpExchange(self, kind, close, request.session, request.seq, request.request_id, caller)
        self.pending.append(exchange)
        if caller is None or not caller.rate or self._allow_request(caller, exchange):
            self._handle_step(kind, request.session, request.seq, request.options, body, exchange)

    def _allow_request(self, caller: Caller, exchange: HttpExchange) -> bool:
        """Apply the caller's rate limit; False: the request was answered with 429."""
        if caller.allow(_clock()):
            return True
        refused = Refused(429, "too_many_requests", "This token sends too many requests.", "Slow down.", 1 / caller.rate)
        self._handler.count_refusal(refused)
        exchange.refuse(refused)
        return False

    def _get_page(self, close: bool) -> None:
        method = self._parser.get_method()
        if method not in (b"GET", b"HEAD"):
            message = f"{self.path[:80]} does not accept {method.decode('latin-1')}."
            exists = self.path in spec.PAGES
            error = Refused(405, "method", message, "GET it.") if exists else Refused(404, "not_found", message, "POST /step")
            self._reject(error, close)
            return
        authorized = self._is_authorized()
        caller = self._caller if authorized else None
        kind = _HEAD if method == b"HEAD" else ""
        exchange = HttpExchange(self, kind, close, request_id=self._request.request_id, caller=caller)
        self.pending.append(exchange)
        if caller is None or not caller.rate or self._allow_request(caller, exchange):
            page = self._handler.get(self.path, authorized)
            exchange.media = page.media
            exchange.reply(page.status, page.body)

    def _reject(self, refused: Refused, close: bool) -> None:
        request = self._request
        self._handler.count_refusal(refused)
        kind = _HEAD if self._parser.get_method() == b"HEAD" else KINDS.get(request.kind.lower(), "")
        caller = None if refused is _UNAUTHORIZED else self._caller
        exchange = HttpExchange(self, kind, close, request.session[:MAX_NAME_BYTES], request.seq, request.request_id, caller)
        self.pending.append(exchange)
        exchange.refuse(refused)

    def _is_authorized(self) -> bool:
        request = self._request
        tokens = self._handler.tokens
        if tokens is None:
            return True
        if self._valid_authorization is None or not hmac.compare_digest(request.authorization, self._valid_authorization):
            caller = tokens.caller(request.authorization)
            if caller is None:
                return False
            self._caller, self._valid_authorization = caller, request.authorization
            self._handler.authorize(self)
        return True

    @property
    def has_access_log(self) -> bool:
        return self._handler.access_log is not None

    def revoke_authorization(self) -> None:
        """Require a valid token again, after the tokens have changed."""
        self._template = self._caller = self._valid_authorization = None

    def log(self, exchange: HttpExchange, status: int, body: bytes) -> None:
        access_log = self._handler.access_log
        if access_log is None:
            return
        if not self._peer and self.transport is not None:
            self._peer = str((self.transport.get_extra_info("peername") or ("",))[0])
        error = "" if status == 200 else spec.refusal_from(status, body).error
        took, caller = _clock() - exchange.began, "" if exchange.caller is None else exchange.caller.name
        path = STEP if exchange.session else self.path[:MAX_NAME_BYTES]
        rest = (exchange.session, exchange.seq, took, exchange.request_id, caller, self._peer, error)
        access_log(AccessRecord(exchange.kind, path, status, *rest))

    # -- handover to another worker

    def _hand_over(self) -> None:
        handover = self._handover
        slot, data = handover.slot, b"".join(handover.received)
        handover.received.clear()
        handover.slot, handover.possible = -1, False
        if self._handler.hand_over(self, slot, data):
            return
        # Not possible now: parse again here, and let the handler forward each request.
        self._parser = httptools.HttpRequestParser(self)
        self._request = _Request()
        self.began = 0.0
        self._receive(data)

    def detach(self) -> None:
        """Stop reading and writing: another process owns the socket now."""
        self.closing_at = self._handler.loop.time()
        if self.transport is not None:
            self.transport.abort()

    # -- replies

    def endpoint(self, port: int) -> str:
        """Return HOST:PORT of one worker's direct port (0: this worker's), with the host that the client connected to."""
        port = port or self._handler.direct_port
        if not port or self.transport is None:
            return ""
        host = plain_address(self.transport.get_extra_info("sockname")[0])
        return f"{url_host(host)}:{port}"

    def write_ready(self) -> None:
        """Write the complete replies at the head of the queue."""
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
                self.resume_reading()

    def resume_reading(self) -> None:
        if self.reading_paused and len(self.pending) <= self._handler.limits.pipelined // 2 and self.transport is not None:
            self.reading_paused = False
            if not self.stalled:
                self.transport.resume_reading()

    def _refuse(self, refused: Refused) -> None:
        """Send an error after the pending replies, and close."""
        self._handler.count_refusal(refused)
        self._template = None
        exchange = HttpExchange(self, "", True)
        self.pending.append(exchange)
        self.closing_at = self._handler.loop.time() + _LINGER_S
        exchange.refuse(refused)

    def finish(self) -> None:
        """Close the write side; abort a little later, because the client may still be sending."""
        self._template = None
        self.pending.clear()
        if self.transport is None:
            return
        self.closing_at = self._handler.loop.time() + _LINGER_S
        if self._eof or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.transport.write_eof()
            self.transport.resume_reading()  # read and drop the rest: a reset could destroy the reply

    def extend_deadlines(self, pause_s: float, now: float) -> None:
        """Extend the client's deadlines by a pause of the event loop."""
        if self.began:
            self.began = min(now, self.began + pause_s)
        if self.stalled:
            self.stalled = min(now, self.stalled + pause_s)
        self._idle_since = (self._idle_since[0], min(now, self._idle_since[1] + pause_s))

    def sweep(self, now: float) -> None:
        """Close the connection if it is too slow, idle or finished. Called a few times a second."""
        if self.transport is None:
            return
        limits = self._handler.limits
        if self.closing_at:
            sent = not self.pending and not self.transport.get_write_buffer_size()
            if now > self.closing_at + (0.0 if sent else limits.send_s):
                self.transport.abort()
        elif self.stalled:
            if now - self.stalled > limits.send_s:
                self.transport.abort()
        elif self.began and not self.reading_paused:
            if now - self.began > limits.receive_s:
                message = f"This request was not received within {limits.receive_s:g} s."
                self._refuse(Refused(408, "too_slow", message, "Send headers and body at once."))
        elif self.pending or self.requests != self._idle_since[0]:
            self._idle_since = (self.requests, now)
        else:
            authorized = self._handler.is_authorized(self)
            idle_s = limits.idle_s if authorized else min(limits.idle_s, limits.unauthorized_idle_s)
            if now - self._idle_since[1] > idle_s:
                self.finish()


def _parse_number(value: bytes) -> int:
    if value.isdigit() and len(value) < 20:
        number = int(value)
        return number if number <= MAX_SEQ else -1
    return -1


def _quote(value: bytes) -> str:
    return repr(value[:40].decode("latin-1"))
