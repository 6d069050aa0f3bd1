"""The gateway: the HTTP server that games connect to. One per worker process; several workers share a port.

A session belongs to the worker that its id hashes to, whichever connection it arrives on. A connection whose first request
belongs to another worker moves there with its socket; later requests for other workers are forwarded one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import socket
import ssl
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ludus
from ludus.errors import Refused, UsageError
from ludus.gateway.auth import Tokens
from ludus.gateway.connection_slots import ConnectionSlots
from ludus.gateway.http_connection import AccessRecord, HttpConnection, HttpExchange, HttpLimits, Page
from ludus.gateway.sessions import SessionLimits, SessionTable
from ludus.gateway.worker_routing import WorkerRouter
from ludus.io.file_watcher import FileWatcher
from ludus.process.commands.thread_limits import open_file_limit, raise_open_file_limit
from ludus.protocol import spec
from ludus.protocol.spec import StartOptions

log = logging.getLogger(__name__)

_SWEEP_S = 0.1
_PAUSE_S = 0.5
_WATCH_S = 1.0
_RESERVED_FILES = 256
"""Open files reserved for logs, checkpoints and sockets to the other workers."""
_MIN_CONNECTIONS = 16
_MAX_REFUSED = 64
"""Refused connections that are kept until they have read the error; further ones are closed at once."""


@dataclass(frozen=True)
class GatewaySettings:
    http: HttpLimits = field(default_factory=HttpLimits)
    sessions: SessionLimits = field(default_factory=SessionLimits)
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    """File of several tokens, instead of `token`; reloaded when it changes."""
    token_rate: float = 0.0
    """Default requests per second of one token in each worker; 0 = unlimited."""
    tls: tuple[Path, Path] | None = None
    """Certificate chain and key; reloaded when they change."""
    drain_s: float = 0.0
    """Seconds for which open sessions continue after a stop request."""
    spec: dict[str, Any] = field(default_factory=dict)
    """Content of `GET /spec` in addition to the version: observation and action spaces, seats."""


class GatewayExtension(Protocol):
    """Adds pages and periodic work to a gateway. All methods run on its event loop."""

    def on_start(self, gateway: Gateway) -> None:
        """Called before the first request."""
        ...

    def sweep(self, now: float) -> None:
        """Called a few times a second."""
        ...

    def page(self, path: str) -> Page | None:
        """Return the page at `path` for an authorized client, or None if the extension has none."""
        ...

    async def on_stop(self) -> None:
        """Called after the last session has ended."""
        ...


def owner_of(session: bytes, slots: int) -> int:
    """The worker slot that owns a session; the same in every process and release."""
    return zlib.crc32(session) % slots


class Gateway:
    """Serves sessions of `make_actor` on bound sockets, on the running event loop."""

    def __init__(
        self,
        make_actor: Callable[[], Any],
        settings: GatewaySettings | None = None,
        *,
        slot: int = 0,
        peer_paths: Sequence[str] = (),
        direct_port: int = 0,
        lost_until: float = -math.inf,
        observer: Callable[[Refused], None] | None = None,
        extension: GatewayExtension | None = None,
    ) -> None:
        settings = settings or GatewaySettings()
        self._settings, self._extension = settings, extension
        self.loop = asyncio.get_running_loop()
        self.limits, self.direct_port = settings.http, direct_port
        files = [*(settings.tls or ()), *([settings.token_file] if settings.token_file else [])]
        self._file_watcher, self._watch_at = FileWatcher(*files) if files else None, self.loop.time() + _WATCH_S
        self.tokens = read_tokens(settings)
        self.access_log: Callable[[AccessRecord], None] | None = None
        self.log_ticks = False
        self._tls = None if settings.tls is None else tls_context(settings.tls)
        self.sessions = SessionTable(make_actor, settings.sessions, self.loop, lost_until=lost_until)
        self.refusals: Counter[str] = Counter()
        self._spec = settings.spec
        self._observer = observer
        self.slot, self._slots = slot, max(1, len(peer_paths))
        self._router = WorkerRouter(self, slot, peer_paths) if len(peer_paths) > 1 else None
        self._connections: set[HttpConnection] = set()
        self._admitted: ConnectionSlots[HttpConnection] = ConnectionSlots(
            affordable_connections(settings.http.connections), settings.http.connections_per_address
        )
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None
        if self._router is None:
            self.step = self.sessions.handle  # type: ignore[assignment,method-assign]  # this worker owns every session

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def draining(self) -> bool:
        return self.sessions.draining

    def drain(self) -> None:
        """Accept no new sessions; open ones continue."""
        self.sessions.draining = True

    async def has_open_sessions(self) -> bool:
        """Whether open sessions need this worker: its own, or another worker's that use its connections."""
        if len(self.sessions):
            return True
        return self._router is not None and bool(self._connections) and await self._router.has_open_sessions()

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        if self._extension is not None:
            self._extension.on_start(self)
        if self._router is not None:
            await self._router.start()
        handshake_s = None if self._tls is None else self.limits.receive_s
        for listening in sockets:
            serving = self.loop.create_server(
                lambda: HttpConnection(self), sock=listening, backlog=1024, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )
            self._servers.append(await serving)
        self._sweeper = self.loop.create_task(self._sweep())

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop listening, end every session (calling its actor's `end`), then close the connections."""
        for server in self._servers:
            server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        await self.sessions.close(grace_s)
        if self._extension is not None:
            await self._extension.on_stop()
        if self._router is not None:
            self._router.close()
        await self._close_connections(self.loop.time() + min(grace_s, self.limits.send_s))

    async def _close_connections(self, deadline: float) -> None:
        """Close after clients have read their replies; abort at the deadline."""
        for transport in [connection.transport for connection in self._connections if connection.transport is not None]:
            transport.close()
        await asyncio.sleep(0)
        while self._connections and self.loop.time() < deadline:
            await asyncio.sleep(_SWEEP_S / 10)
        for transport in [connection.transport for connection in self._connections if connection.transport is not None]:
            transport.abort()
        await asyncio.sleep(0)

    async def _sweep(self) -> None:
        before, was_late = self.loop.time(), False
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = self.loop.time()
            late_s = now - before - _SWEEP_S
            late = late_s > _PAUSE_S
            if late:  # the event loop was blocked: data that clients sent meanwhile has not been read yet
                self.sessions.extend_deadlines(late_s, now)
                for connection in self._connections:
                    connection.extend_deadlines(late_s, now)
            if not late or was_late:  # a loop that is late every time must still enforce time limits
                self.sweep(now)
            before, was_late = now, late

    def sweep(self, now: float) -> None:
        self.sessions.sweep(now)
        for connection in list(self._connections):
            connection.sweep(now)
        if self._extension is not None:
            self._extension.sweep(now)
        if self._file_watcher is not None and now >= self._watch_at:
            self._watch_at = now + _WATCH_S
            if self._file_watcher.has_changed():
                self._reload_credentials()

    def _reload_credentials(self) -> None:
        """Reload tokens and certificates; keep the current ones if the files cannot be used."""
        try:
            self.tokens = read_tokens(self._settings)
            self._admitted.revoke_all()
            for connection in self._connections:
                connection.revoke_authorization()
            if self._settings.token_file is not None:
                log.info("reloaded the tokens")
        except UsageError as error:
            log.error("cannot reload the tokens, keeping the previous ones: %s", error)
        if self._tls is None or self._settings.tls is None:
            return
        try:
            tls_context(self._settings.tls)  # check first: a half-written pair would damage the context in use
            _load_certificate(self._tls, self._settings.tls)  # used by new connections
            log.info("reloaded the certificate")
        except UsageError as error:
            log.error("cannot reload the certificate, keeping the previous one: %s", error)

    # -- RequestHandler

    def open_connection(self, connection: HttpConnection) -> str:
        self._connections.add(connection)
        assert connection.transport is not None
        address = str((connection.transport.get_extra_info("peername") or ("",))[0])
        admission = self._admitted.admit(connection, address, authorized=self.tokens is None)
        if admission.evicted is not None:
            self.refusals["evicted"] += 1
            if admission.evicted.transport is not None:
                admission.evicted.transport.abort()
        if not admission.admitted and len(self._connections) > len(self._admitted) + _MAX_REFUSED:
            self.refusals["too_many_connections"] += 1
            connection.transport.abort()
            return ""
        return admission.reason

    def authorize(self, connection: HttpConnection) -> None:
        self._admitted.authorize(connection)

    def is_authorized(self, connection: HttpConnection) -> bool:
        return self._admitted.is_authorized(connection)

    def close_connection(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        self._admitted.release(connection)

    def step(self, kind: str, session: bytes, seq: int, options: StartOptions, body: bytes, exchange: HttpExchange) -> None:
        owner = zlib.crc32(session) % self._slots
        if owner == self.slot or self._router is None:
            self.sessions.handle(kind, session, seq, options, body, exchange)
        else:
            self._router.forward(owner, kind, session, seq, options, body, exchange)

    def owner_elsewhere(self, session: bytes) -> int:
        owner = owner_of(session, self._slots)
        return -1 if owner == self.slot else owner

    def hand_over(self, connection: HttpConnection, slot: int, data: bytes) -> bool:
        # An encrypted connection cannot move: its requests are forwarded instead.
        return self._router is not None and self._tls is None and self._router.hand_over(connection, slot, data)

    async def adopt(self, accepted: socket.socket, data: bytes) -> None:
        """Serve a connection that another worker accepted; `data` is what that worker read from it."""
        try:
            await self.loop.connect_accepted_socket(lambda: HttpConnection(self, early=data), accepted)
        except OSError:  # the client has disconnected in the meantime
            accepted.close()

    def get(self, path: str, authorized: bool) -> Page:
        if path == spec.HEALTH:
            return Page(200, json.dumps({"status": "ok", **(self.counters() if authorized else {})}).encode())
        if path == spec.READY:
            return Page(503, b'{"status": "draining"}') if self.draining else Page(200, b'{"status": "ready"}')
        if path in spec.PAGES and not authorized:
            refused = Refused(401, "unauthorized", "The token is missing or wrong.", "Send Authorization: Bearer TOKEN.")
        elif path == spec.SPEC:
            return Page(200, json.dumps({"protocol": spec.VERSION, "ludus": ludus.__version__, **self._spec}).encode())
        else:
            page = self._extension.page(path) if self._extension is not None and authorized else None
            if page is not None:
                return page
            refused = Refused(404, "not_found", f"There is nothing at {path[:80]!r}.", "POST /step, GET /spec or GET /health")
        self.count_refusal(refused)
        return Page(refused.status, spec.error_body(refused))

    def count_refusal(self, refused: Refused) -> None:
        self.refusals[refused.error] += 1
        if self._observer is not None:
            self._observer(refused)

    def counters(self) -> dict[str, Any]:
        router = self._router
        routed = {} if router is None else {"handed_over": router.handed_over, "forwarded": router.forwarded}
        return {
            "slot": self.slot,
            "requests": self.sessions.requests,
            "connections": len(self._connections),
            "sessions": len(self.sessions),
            **self.sessions.stats.to_json(),
            **routed,
            "refused_before": dict(self.refusals),
        }


def affordable_connections(wanted: int) -> int:
    """Limit `wanted` by the open-file limit of this process, which is raised first where allowed."""
    files = open_file_limit()
    reserved = _RESERVED_FILES + (0 if files is None else files.used)
    limit = raise_open_file_limit(wanted + reserved)
    return wanted if limit is None else min(wanted, max(_MIN_CONNECTIONS, limit - reserved))


def read_tokens(settings: GatewaySettings) -> Tokens | None:
    """Raises UsageError."""
    if settings.token_file is not None:
        return Tokens.read(settings.token_file, settings.token_rate)
    return Tokens.single(settings.token, settings.token_rate) if settings.token else None


def tls_context(files: tuple[Path, Path]) -> ssl.SSLContext:
    """Raises UsageError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, files)
    return context


def _load_certificate(context: ssl.SSLContext, files: tuple[Path, Path]) -> None:
    def refuse_password() -> str:
        raise ValueError("the key has a password")

    certificate, key = files
    try:
        context.load_cert_chain(certificate, key, password=refuse_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        hint = "Both are PEM files: the chain, starting with the server's certificate, and its key, without a password."
        raise UsageError(f"Cannot use the certificate {certificate} with the key {key}: {reason}.", hint) from error
