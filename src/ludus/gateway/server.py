"""The gateway: where games connect. One per worker process; several share a port and hand each other what is not theirs.

A session belongs to the worker that its id hashes to, whatever connection it comes by: a connection whose first request is
another worker's moves there, socket and all; single requests that stray later are forwarded.
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
from ludus.gateway.http_connection import Connection, Exchange, HttpLimits, Page, Replied
from ludus.gateway.sessions import SessionLimits, Sessions
from ludus.gateway.worker_routing import Peers
from ludus.process.commands.thread_limits import open_file_limit, raise_open_file_limit
from ludus.protocol import spec as protocol
from ludus.protocol.spec import About

log = logging.getLogger(__name__)

_SWEEP_S = 0.1
_PAUSE_S = 0.5
_WATCH_S = 1.0
_OWN_FILES = 256
"""Open files for everything but connections: logs, checkpoints, sockets to the other workers."""
_LEAST_CONNECTIONS = 16
_LINGERING = 64
"""Refused connections that may wait to read their refusal; further ones are closed without one."""


@dataclass(frozen=True)
class GatewaySettings:
    http: HttpLimits = field(default_factory=HttpLimits)
    sessions: SessionLimits = field(default_factory=SessionLimits)
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    """Several tokens, instead of `token`; read again whenever it changes."""
    token_rate: float = 0.0
    """Requests per second of a token whose line says nothing else, in each worker; 0 = unlimited."""
    tls: tuple[Path, Path] | None = None
    """Certificate chain and key; read again whenever they change."""
    drain_s: float = 0.0
    """How long sessions may play on when the worker is asked to stop."""
    spec: dict[str, Any] = field(default_factory=dict)
    """What `GET /spec` says besides the version: observation and action spaces, seats."""


class House(Protocol):
    """What may stand around a gateway: it adds pages, and does its own things now and then."""

    def moved_in(self, gateway: Gateway) -> None:
        """On the event loop, before the first request."""
        ...

    def sweep(self, now: float) -> None:
        """On the event loop, a few times a second."""
        ...

    def page(self, path: str) -> Page | None:
        """For whoever is authorised; None: not a page of ours."""
        ...

    async def moved_out(self) -> None:
        """After the last session has ended."""
        ...


class Watched:
    """Notices that files were changed or replaced."""

    def __init__(self, *paths: Path) -> None:
        self._paths = [path.expanduser() for path in paths]
        self._seen = self._look()

    def _look(self) -> list[tuple[int, int, int]]:
        seen = []
        for path in self._paths:
            with contextlib.suppress(OSError):
                status = path.stat()
                seen.append((status.st_mtime_ns, status.st_ino, status.st_size))
        return seen

    def changed(self) -> bool:
        """Since we were asked last."""
        before, self._seen = self._seen, self._look()
        return before != self._seen


def owner_of(session: bytes, slots: int) -> int:
    """The worker slot that a session belongs to; the same in every process, for ever."""
    return zlib.crc32(session) % slots


class Gateway:
    """Serves sessions of `make_actor` on sockets that are already bound. Lives on the running event loop."""

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
        house: House | None = None,
    ) -> None:
        settings = settings or GatewaySettings()
        self._settings, self._house = settings, house
        self.loop = asyncio.get_running_loop()
        self.limits, self.direct_port = settings.http, direct_port
        files = [*(settings.tls or ()), *([settings.token_file] if settings.token_file else [])]
        self._watched, self._watch_at = Watched(*files) if files else None, self.loop.time() + _WATCH_S
        self.tokens = read_tokens(settings)
        self.logs: Callable[[Replied], None] | None = None
        self.logs_ticks = False
        self._tls = None if settings.tls is None else tls_context(settings.tls)
        self.sessions = Sessions(make_actor, settings.sessions, self.loop, lost_until=lost_until)
        self.refusals: Counter[str] = Counter()
        self._spec = settings.spec
        self._observer = observer
        self.slot, self._slots = slot, max(1, len(peer_paths))
        self._peers = Peers(self, slot, peer_paths) if len(peer_paths) > 1 else None
        self._connections: set[Connection] = set()
        self._admitted: ConnectionSlots[Connection] = ConnectionSlots(
            affordable_connections(settings.http.connections), settings.http.connections_per_address
        )
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None
        if self._peers is None:
            self.step = self.sessions.handle  # type: ignore[assignment,method-assign]  # every session is ours

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def draining(self) -> bool:
        return self.sessions.draining

    def drain(self) -> None:
        """No new sessions from now on; those in play go on."""
        self.sessions.draining = True

    async def in_play(self) -> bool:
        """Whether sessions go on that need this worker: its own, or another's whose requests come by its connections."""
        if len(self.sessions):
            return True
        return self._peers is not None and bool(self._connections) and await self._peers.in_play()

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        if self._house is not None:
            self._house.moved_in(self)
        if self._peers is not None:
            await self._peers.start()
        handshake_s = None if self._tls is None else self.limits.receive_s
        for listening in sockets:
            serving = self.loop.create_server(
                lambda: Connection(self), sock=listening, backlog=1024, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )
            self._servers.append(await serving)
        self._sweeper = self.loop.create_task(self._sweep())

    async def close(self, grace_s: float = 5.0) -> None:
        """No new connections; every session ends, its actor told; then the connections close."""
        for server in self._servers:
            server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        await self.sessions.close(grace_s)
        if self._house is not None:
            await self._house.moved_out()
        if self._peers is not None:
            self._peers.close()
        await self._hang_up(self.loop.time() + min(grace_s, self.limits.send_s))

    async def _hang_up(self, deadline: float) -> None:
        """Every client gets what was said to it, unless it takes too long to read."""
        for connection in list(self._connections):
            if connection.transport is not None:
                connection.transport.close()
        await asyncio.sleep(0)
        while self._connections and self.loop.time() < deadline:
            await asyncio.sleep(_SWEEP_S / 10)
        for connection in list(self._connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)

    async def _sweep(self) -> None:
        before, was_late = self.loop.time(), False
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = self.loop.time()
            late_s = now - before - _SWEEP_S
            late = late_s > _PAUSE_S
            if late:  # our loop stood still, not the games: what they sent meanwhile has not been read yet
                self.sessions.forgive(late_s, now)
                for connection in self._connections:
                    connection.forgive(late_s, now)
            if not late or was_late:  # also when it stands still again and again: then too, somebody has to be cut off
                self.sweep(now)
            before, was_late = now, late

    def sweep(self, now: float) -> None:
        self.sessions.sweep(now)
        for connection in list(self._connections):
            connection.sweep(now)
        if self._house is not None:
            self._house.sweep(now)
        if self._watched is not None and now >= self._watch_at:
            self._watch_at = now + _WATCH_S
            if self._watched.changed():
                self._reread()

    def _reread(self) -> None:
        """Tokens and certificates as they are now. What cannot be read changes nothing."""
        try:
            self.tokens = read_tokens(self._settings)
            self._admitted.revoke_all()
            for connection in self._connections:
                connection.forget_caller()
            if self._settings.token_file is not None:
                log.info("read the tokens again")
        except UsageError as error:
            log.error("keeping the tokens of before: %s", error)
        if self._tls is None or self._settings.tls is None:
            return
        try:
            tls_context(self._settings.tls)  # a pair of which one half is not there yet would spoil the one that is in use
            _load_certificate(self._tls, self._settings.tls)  # for the connections to come
            log.info("read the certificate again")
        except UsageError as error:
            log.error("keeping the certificate of before: %s", error)

    # -- what a connection asks of us

    def open_connection(self, connection: Connection) -> str:
        self._connections.add(connection)
        assert connection.transport is not None
        address = str((connection.transport.get_extra_info("peername") or ("",))[0])
        admission = self._admitted.admit(connection, address, authorized=self.tokens is None)
        if admission.evicted is not None:
            self.refusals["evicted"] += 1
            if admission.evicted.transport is not None:
                admission.evicted.transport.abort()
        if not admission.admitted and len(self._connections) > len(self._admitted) + _LINGERING:
            self.refusals["too_many_connections"] += 1
            connection.transport.abort()
            return ""
        return admission.reason

    def authorize(self, connection: Connection) -> None:
        self._admitted.authorize(connection)

    def is_authorized(self, connection: Connection) -> bool:
        return self._admitted.is_authorized(connection)

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._admitted.release(connection)

    def step(self, kind: str, session: bytes, seq: int, about: About, body: bytes, exchange: Exchange) -> None:
        owner = zlib.crc32(session) % self._slots
        if owner == self.slot or self._peers is None:
            self.sessions.handle(kind, session, seq, about, body, exchange)
        else:
            self._peers.forward(owner, kind, session, seq, about, body, exchange)

    def elsewhere(self, session: bytes) -> int:
        owner = owner_of(session, self._slots)
        return -1 if owner == self.slot else owner

    def hand_over(self, connection: Connection, slot: int, data: bytes) -> bool:
        # What is encrypted can only be read here: then each request is forwarded.
        return self._peers is not None and self._tls is None and self._peers.hand_over(connection, slot, data)

    async def adopt(self, taken: socket.socket, data: bytes) -> None:
        """A connection that another worker accepted, with what it has read of it."""
        try:
            await self.loop.connect_accepted_socket(lambda: Connection(self, early=data), taken)
        except OSError:  # the client has gone in the meantime
            taken.close()

    def get(self, path: str, authorized: bool) -> Page:
        if path == protocol.HEALTH:
            return Page(200, json.dumps({"status": "ok", **(self.counters() if authorized else {})}).encode())
        if path == protocol.READY:
            return Page(503, b'{"status": "draining"}') if self.draining else Page(200, b'{"status": "ready"}')
        if path in protocol.PAGES and not authorized:
            refused = Refused(401, "unauthorized", "The token is missing or wrong.", "Send Authorization: Bearer TOKEN.")
        elif path == protocol.SPEC:
            return Page(200, json.dumps({"protocol": protocol.VERSION, "ludus": ludus.__version__, **self._spec}).encode())
        else:
            page = self._house.page(path) if self._house is not None and authorized else None
            if page is not None:
                return page
            refused = Refused(404, "not_found", f"There is nothing at {path[:80]!r}.", "POST /step, GET /spec or GET /health")
        self.refused(refused)
        return Page(refused.status, protocol.error_body(refused))

    def refused(self, refused: Refused) -> None:
        self.refusals[refused.error] += 1
        if self._observer is not None:
            self._observer(refused)

    def counters(self) -> dict[str, Any]:
        peers = {} if self._peers is None else {"handed_over": self._peers.handed_over, "forwarded": self._peers.forwarded}
        return {
            "slot": self.slot,
            "requests": self.sessions.requests,
            "connections": len(self._connections),
            "sessions": len(self.sessions),
            **self.sessions.stats.to_json(),
            **peers,
            "refused_before": dict(self.refusals),
        }


def affordable_connections(wanted: int) -> int:
    """As many of these connections as there can be open files in this process, whose limit is raised for them if it may be."""
    used = open_file_limit()
    taken = _OWN_FILES + (0 if used is None else used.used)
    limit = raise_open_file_limit(wanted + taken)
    return wanted if limit is None else min(wanted, max(_LEAST_CONNECTIONS, limit - taken))


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
    certificate, key = files
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        hint = (
            "Both are PEM files: the chain with the server's own certificate first, and the key of that one, without a password."
        )
        raise UsageError(f"Cannot use the certificate {certificate} with the key {key}: {reason}.", hint) from error


def _no_password() -> str:
    raise ValueError("the key asks for a password")
