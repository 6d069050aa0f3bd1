"""The server of `ludus check-game`: a gateway that checks all connections, sessions and bodies."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from ludus.errors import Refused
from ludus.gateway.actor import Actor
from ludus.gateway.http_connection import HttpConnection, HttpExchange, HttpLimits
from ludus.gateway.server import Gateway, GatewaySettings
from ludus.gateway.sessions import SessionLimits
from ludus.protocol.codec import ONLY_SEAT, SeatSpaces, encode, is_msgpack, random_action, seats_to_spec
from ludus.protocol.conformance import (
    CheckFinding,
    ClientDisconnected,
    Conformance,
    ConformanceReport,
    ConnectionClosed,
    Event,
    OldHttpVersion,
    RequestRejected,
    SessionTimedOut,
    StepReplied,
)
from ludus.protocol.spec import END, TICK, StartOptions


class ConformanceServer:
    """Answers like an agent server: echoes raw bodies, or draws random actions. Calls `on_finding` once per kind of finding."""

    def __init__(
        self,
        conformance: Conformance,
        on_finding: Callable[[CheckFinding], None],
        seats: Mapping[str, SeatSpaces] | None = None,
        *,
        token: str | None = None,
        silent_s: float = 60.0,
        think_s: float = 0.005,
        http: HttpLimits | None = None,
    ) -> None:
        self.conformance, self.seats, self.think_s = conformance, seats, think_s
        self.rng = np.random.default_rng(0)
        self._on_finding = on_finding
        self._settings = GatewaySettings(
            http=http or HttpLimits(),
            sessions=SessionLimits(silent_s=silent_s),
            token=token,
            spec=seats_to_spec(seats) if seats else {},
        )
        self._gateway: Gateway | None = None
        self._server: asyncio.Server | None = None
        self.summary: ConformanceReport = conformance.summary()

    async def start(self, bound: socket.socket) -> None:
        def observe_refusal(refused: Refused) -> None:
            self.observe(RequestRejected(refused.error, refused.message))

        gateway = self._gateway = Gateway(lambda: ConformanceActor(self), self._settings, observer=observe_refusal)
        await gateway.start([])  # without sockets: connections are created below, to observe each one
        self._server = await gateway.loop.create_server(
            lambda: ObservedConnection(ObservedGateway(self, gateway)), sock=bound, backlog=1024
        )

    async def close(self) -> None:
        """Store the summary, then close the server; what clients do because of that is not counted."""
        self.summary = self.conformance.summary()
        if self._server is not None:
            self._server.close()
        if self._gateway is not None:
            gateway, self._gateway = self._gateway, None
            await gateway.close()

    def observe(self, event: Event) -> None:
        if self._gateway is not None:  # events after `close` are not the client's mistakes
            self.report(self.conformance.observe(event))

    def report(self, findings: list[CheckFinding]) -> None:
        for finding in findings:
            self._on_finding(finding)


class ConformanceActor(Actor):
    """Replies after a delay, as a model does; otherwise a client that does not wait would not be detected."""

    def __init__(self, server: ConformanceServer) -> None:
        self._server, self._session = server, b""

    async def start(self, session: str, body: bytes) -> bytes:
        self._session = session.encode("utf-8")
        return b""

    async def tick(self, body: bytes) -> bytes:
        acting = self._check_body(TICK, body)
        await asyncio.sleep(self._server.think_s)
        seats = self._server.seats
        if seats is None:
            return body
        actions = {name: random_action(seats[name].action, self._server.rng, mask) for name, mask in acting.items()}
        message = {"action": actions.get(ONLY_SEAT)} if set(seats) == {ONLY_SEAT} else {"actions": actions}
        return encode(message, "msgpack" if is_msgpack(body) else "json")

    async def end(self, body: bytes) -> bytes:
        if self.ended_by == "game":
            self._check_body(END, body)
            await asyncio.sleep(self._server.think_s)
        elif self.ended_by == "silent":
            self._server.observe(SessionTimedOut(self._session))
        return b""

    def _check_body(self, kind: str, body: bytes) -> dict[str, Any]:
        verdict = self._server.conformance.check_body(kind, self._session, body)
        self._server.report(verdict.findings)
        if verdict.refused is not None:
            raise verdict.refused
        return verdict.acting


class ObservedGateway:
    """The gateway as one connection uses it, with an observer of its requests."""

    def __init__(self, server: ConformanceServer, gateway: Gateway) -> None:
        self._gateway = gateway
        self.observe = server.observe
        self._connection: HttpConnection | None = None
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateway, name)

    def open_connection(self, connection: HttpConnection) -> str:
        self._connection = connection
        return self._gateway.open_connection(connection)

    def close_connection(self, connection: HttpConnection) -> None:
        self._gateway.close_connection(connection)
        self.observe(ConnectionClosed(self._steps))

    def step(self, kind: str, session: bytes, seq: int, options: StartOptions, body: bytes, exchange: HttpExchange) -> None:
        self._steps += 1
        began = self._connection.began if self._connection else 0.0
        took = self._gateway.loop.time() - began if began else 0.0
        observed: Any = ObservedExchange(self, exchange, (kind, session, seq), body, took)
        self._gateway.step(kind, session, seq, options, body, observed)


class ObservedExchange:
    """An exchange that reports its reply to the conformance check."""

    def __init__(
        self, gateway: ObservedGateway, exchange: HttpExchange, request: tuple[str, bytes, int], body: bytes, took_s: float
    ) -> None:
        self._gateway, self._exchange, self._request = gateway, exchange, request
        self._hash, self._size, self._took_s = hash(body), len(body), took_s

    def reply(self, status: int, body: bytes, retry_after_s: float | None = None, port: int = 0) -> None:
        refused = {} if status == 200 else json.loads(body)
        error, message = refused.get("error", ""), refused.get("message", "")
        self._gateway.observe(StepReplied(*self._request, status, error, message, self._hash, self._size, self._took_s))
        self._exchange.reply(status, body, retry_after_s, port)


class ObservedConnection(HttpConnection):
    """A connection that reports HTTP/1.0 requests and hang-ups."""

    def __init__(self, gateway: ObservedGateway) -> None:
        super().__init__(cast(Any, gateway))
        self._observe = gateway.observe
        self._gone = False

    def data_received(self, data: bytes) -> None:
        if not self.began and b" HTTP/1.0\r" in data.partition(b"\n")[0]:
            self._observe(OldHttpVersion())
        super().data_received(data)

    def eof_received(self) -> bool:
        self._on_hang_up()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_hang_up()
        super().connection_lost(exc)

    def _on_hang_up(self) -> None:
        if self.pending and not self._gone and not self.closing_at:
            self._gone = True
            self._observe(ClientDisconnected())
