"""HTTP middleware of the server: authentication, limits of size and time, JSON error replies."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ludus.errors import LudusError, Refused
from ludus.gamecore.server.settings import ServerLimits
from ludus.gateway.auth import RateLimit, Tokens
from ludus.gateway.connection_slots import ConnectionSlots
from ludus.io.file_watcher import FileWatcher
from ludus.protocol.spec import REQUEST_ID_HEADER, error_body

log = logging.getLogger(__name__)

_CHECK_S = 1.0
_TOKENS_S = 1.0
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

LOGGED_PER_S = 20.0
"""Maximum rate of logged error replies; all of them are counted."""

Address = tuple[str, int]
AUTHORIZED = "is_known"
PUBLIC_PATHS = frozenset({"/health"})
"""Paths that need no token."""


class LimitedConnection(H11Protocol):
    """uvicorn's h11 connection with a connection limit and an idle time limit."""

    limits = ServerLimits()
    clients: ConnectionRegistry

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since, self._last_cycle = self.loop.time(), self.cycle
        self._address: Address = transport.get_extra_info("peername")[:2]
        if not self.clients.open(self._address, transport):
            transport.abort()
            return
        self._timer = self.loop.call_later(_CHECK_S, self._check_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.clients.close(self._address)
        if (timer := getattr(self, "_timer", None)) is not None:
            timer.cancel()

    def _check_idle(self) -> None:
        now = self.loop.time()
        busy = self.cycle is not None and not self.cycle.response_complete and not self.transport.is_closing()
        if busy or self.cycle is not self._last_cycle:
            self._idle_since, self._last_cycle = now, self.cycle
        idle_s = self.limits.idle_s
        if not self.clients.is_authorized(self._address):
            idle_s = min(idle_s, self.limits.unauthorized_idle_s)
        if now - self._idle_since > idle_s:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(_CHECK_S, self._check_idle)


class ConnectionRegistry(ConnectionSlots[Address]):
    """The connections of a server by client address; evicted ones are closed."""

    def __init__(self, limits: ServerLimits, *, tokens: bool) -> None:
        """`tokens`: whether clients must send one."""
        super().__init__(limits.connections, limits.connections_per_address)
        self._tokens = tokens
        self._transports: dict[Address, asyncio.Transport] = {}

    def open(self, address: Address, transport: asyncio.Transport) -> bool:
        """Return whether there is a slot for this connection."""
        admission = self.admit(address, address[0], authorized=not self._tokens)
        if admission.evicted is not None:
            self._transports.pop(admission.evicted).abort()
        if admission.admitted:
            self._transports[address] = transport
        return admission.admitted

    def close(self, address: Address) -> None:
        self.release(address)
        self._transports.pop(address, None)


def protocol_class(limits: ServerLimits, clients: ConnectionRegistry) -> type[LimitedConnection]:
    return type("LimitedConnection", (LimitedConnection,), {"limits": limits, "clients": clients})


class AccessMiddleware:
    """ASGI middleware that checks the token, limits rates, and adds a request id."""

    def __init__(
        self, app: ASGIApp, token_file: Path | None, limits: ServerLimits, replies: Counter[int], clients: ConnectionRegistry
    ) -> None:
        self._app, self._token_file, self._limits, self._replies = app, token_file, limits, replies
        self._clients = clients
        self._tokens = Tokens.read(token_file) if token_file is not None else None
        self._log_rate = RateLimit(LOGGED_PER_S)
        self._watcher, self._checked_at = FileWatcher(*([token_file] if token_file else [])), time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        given = headers.get(REQUEST_ID_HEADER.lower(), b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex

        async def send_reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count_reply(scope, message["status"], request_id)
                message.setdefault("headers", []).append((REQUEST_ID_HEADER.encode(), request_id.encode()))
            async with asyncio.timeout(self._limits.send_s):
                await send(message)

        try:
            if sum(name == b"authorization" for name, _ in scope["headers"]) > 1:
                raise Refused(400, "authorization", "This request has two Authorization headers.", "Send one.")
            authorized = self._admit(scope["path"], headers)
            if authorized and scope.get("client"):
                self._clients.authorize(tuple(scope["client"]))
            scope.setdefault("state", {})[AUTHORIZED] = authorized
        except Refused as refused:
            await error_response(refused)(scope, receive, send_reply)
            return
        await self._app(scope, receive, send_reply)

    def _admit(self, path: str, headers: dict[str, bytes]) -> bool:
        """Return whether the caller is authorized; others may use public paths only. Raises Refused."""
        if self._tokens is None:
            _refuse_browsers(headers)
            return True
        caller = self._reload_tokens().caller(headers.get("authorization", b""))
        if caller is None and path not in PUBLIC_PATHS:
            raise Refused(401, "unauthorized", "The token is missing or wrong.", "Send Authorization: Bearer TOKEN.")
        if caller is not None and caller.rate and not caller.allow(time.monotonic()):
            raise Refused(429, "too_many_requests", "This token sends too many requests.", "Slow down.", 1 / caller.rate)
        return caller is not None

    def _count_reply(self, scope: Scope, status: int, request_id: str) -> None:
        self._replies[status] += 1
        if status >= 400 and self._log_rate.allow(time.monotonic()):
            peer = (scope.get("client") or ("?",))[0]
            target = f"{scope['method'][:16]} {scope['path'][:128]!r}"
            log.info("refused: %d for %s from %s (request %s)", status, target, peer, request_id)

    def _reload_tokens(self) -> Tokens:
        """Reload the token file if it has changed; keep the current tokens if it is invalid."""
        assert self._tokens is not None
        now = time.monotonic()
        if self._token_file is not None and now - self._checked_at > _TOKENS_S:
            self._checked_at = now
            if self._watcher.has_changed():
                try:
                    self._tokens = Tokens.read(self._token_file)
                    self._clients.revoke_all()
                except LudusError as error:
                    log.warning("cannot reload the tokens, keeping the previous ones: %s", error)
        return self._tokens


def _refuse_browsers(headers: dict[str, bytes]) -> None:
    """Refuse requests from web pages, which could start games on a server without a token. Programs send no Origin."""
    host = headers.get("host", b"").decode("latin-1")
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    named = name.lower() not in ("", "localhost")
    if named:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name.strip("[]"))
            named = False
    if named or "origin" in headers:
        message = "This server has no token, so it refuses requests from web pages."
        raise Refused(403, "browser", message, "Call it by its IP address.")


async def read_body(request: Request, limits: ServerLimits) -> bytes:
    """Read the body. Raises Refused if it is too large or too slow."""
    most = limits.body_bytes
    too_large = Refused(413, "body", f"The body is larger than {most:,} bytes.", "Send less.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 12 or int(declared) > most):
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.receive_s):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError as error:
        raise Refused(408, "slow", f"The body was not received within {limits.receive_s:g} s.", "Send it at once.") from error
    except ClientDisconnect as error:
        raise Refused(400, "bad_request", "The client disconnected.") from error
    return b"".join(parts)


def error_response(refused: Refused, **more: Any) -> Response:
    """Return a refusal as a JSON response with extra fields `more`."""
    body: bytes = error_body(refused)
    if more:
        body = json.dumps({**json.loads(body), **more}).encode()
    headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
    if refused.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(refused.retry_after_s)))
    if refused.status in (401, 403, 408, 413):
        headers["Connection"] = "close"  # the rest of the request is not read
    return Response(body, refused.status, headers, "application/json")


async def on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Convert errors of Starlette's router."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:128]
    if error.status_code != 405:
        return error_response(Refused(error.status_code, "not_found", f"There is no page {path}.", "See docs/gamecore.md."))
    allowed = (error.headers or {}).get("Allow", "")
    message = f"{path} does not accept {request.method[:16]}."
    response = error_response(Refused(405, "method", message, f"It accepts {allowed}."))
    response.headers["Allow"] = allowed
    return response


async def on_error(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path[:128], exc_info=error)
    return JSONResponse({"error": "internal", "message": "The server failed.", "hint": "See its log."}, 500)
