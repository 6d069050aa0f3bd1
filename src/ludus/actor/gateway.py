"""The gateway: where games connect. One per worker process; several share a port and hand each other what is not theirs.

A session belongs to the worker that its id hashes to, whatever connection it comes by: a connection whose first request is
another worker's moves there, socket and all; single requests that stray later are forwarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ludus
from ludus.actor.http import Connection, Exchange, HttpLimits
from ludus.actor.peers import Peers
from ludus.actor.session import SessionLimits, Sessions
from ludus.errors import Refused
from ludus.game import protocol

_SWEEP_S = 0.1
_PAUSE_S = 0.5


@dataclass(frozen=True)
class GatewaySettings:
    http: HttpLimits = field(default_factory=HttpLimits)
    sessions: SessionLimits = field(default_factory=SessionLimits)
    token: str | None = field(default=None, repr=False)
    spec: dict[str, Any] = field(default_factory=dict)
    """What `GET /spec` says besides the version: observation and action spaces, seats."""


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
    ) -> None:
        settings = settings or GatewaySettings()
        self.loop = asyncio.get_running_loop()
        self.limits, self.direct_port = settings.http, direct_port
        self.authorization = f"Bearer {settings.token}".encode() if settings.token else None
        self.sessions = Sessions(make_actor, settings.sessions, self.loop, lost_until=lost_until)
        self.refusals: Counter[str] = Counter()
        self._spec = settings.spec
        self._observer = observer
        self._slot, self._slots = slot, max(1, len(peer_paths))
        self._peers = Peers(self, slot, peer_paths) if len(peer_paths) > 1 else None
        self._connections: set[Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None
        if self._peers is None:
            self.step = self.sessions.handle  # type: ignore[assignment,method-assign]  # every session is ours

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        if self._peers is not None:
            await self._peers.start()
        for listening in sockets:
            self._servers.append(await self.loop.create_server(lambda: Connection(self), sock=listening, backlog=1024))
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

    # -- what a connection asks of us

    def opened(self, connection: Connection) -> bool:
        self._connections.add(connection)
        return len(self._connections) <= self.limits.connections

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def step(self, kind: str, session: bytes, seq: int, match: bytes | None, body: bytes, exchange: Exchange) -> None:
        owner = zlib.crc32(session) % self._slots
        if owner == self._slot or self._peers is None:
            self.sessions.handle(kind, session, seq, match, body, exchange)
        else:
            self._peers.forward(owner, kind, session, seq, match, body, exchange)

    def elsewhere(self, session: bytes) -> int:
        owner = owner_of(session, self._slots)
        return -1 if owner == self._slot else owner

    def hand_over(self, connection: Connection, slot: int, data: bytes) -> bool:
        return self._peers is not None and self._peers.hand_over(connection, slot, data)

    async def adopt(self, taken: socket.socket, data: bytes) -> None:
        """A connection that another worker accepted, with what it has read of it."""
        try:
            await self.loop.connect_accepted_socket(lambda: Connection(self, early=data), taken)
        except OSError:  # the client has gone in the meantime
            taken.close()

    def get(self, path: str, authorized: bool) -> tuple[int, bytes]:
        if path == protocol.HEALTH:
            return 200, json.dumps({"status": "ok", **(self.counters() if authorized else {})}).encode()
        if path == protocol.SPEC and not authorized:
            refused = Refused(401, "unauthorized", "The token is missing or wrong.", "Send Authorization: Bearer TOKEN.")
        elif path == protocol.SPEC:
            return 200, json.dumps({"protocol": protocol.VERSION, "ludus": ludus.__version__, **self._spec}).encode()
        else:
            refused = Refused(404, "not_found", f"There is nothing at {path[:80]!r}.", "POST /step, GET /spec or GET /health")
        self.refused(refused)
        return refused.status, protocol.error_body(refused)

    def refused(self, refused: Refused) -> None:
        self.refusals[refused.error] += 1
        if self._observer is not None:
            self._observer(refused)

    def counters(self) -> dict[str, Any]:
        peers = {} if self._peers is None else {"handed_over": self._peers.handed_over, "forwarded": self._peers.forwarded}
        return {
            "slot": self._slot,
            "requests": self.sessions.requests,
            "connections": len(self._connections),
            "sessions": len(self.sessions),
            **self.sessions.stats.to_json(),
            **peers,
            "refused_before": dict(self.refusals),
        }
