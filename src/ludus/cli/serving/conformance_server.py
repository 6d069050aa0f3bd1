"""The server behind `ludus check-game`: a gateway whose connections, sessions and bodies are all looked at."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ludus.errors import Refused
from ludus.gateway.actor import Actor
from ludus.gateway.http_connection import HttpConnection, HttpExchange, HttpLimits, Page
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


class CheckServer:
    """Answers like the real one: echoes raw bodies, or draws random actions. `tell` hears of each kind of finding once."""

    def __init__(
        self,
        conformance: Conformance,
        tell: Callable[[CheckFinding], None],
        seats: Mapping[str, SeatSpaces] | None = None,
        *,
        token: str | None = None,
        silent_s: float = 60.0,
        think_s: float = 0.005,
        http: HttpLimits | None = None,
    ) -> None:
        self.conformance, self.seats, self.think_s = conformance, seats, think_s
        self.rng = np.random.default_rng(0)
        self._tell = tell
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
        gateway = self._gateway = Gateway(lambda: CheckActor(self), self._settings, observer=self._refused)
        await gateway.start([])  # it sweeps; connections are made here, because each is looked at
        self._server = await gateway.loop.create_server(lambda: Line(Desk(self, gateway)), sock=bound, backlog=1024)

    async def close(self) -> None:
        """The summary is that of the moment before."""
        self.summary = self.conformance.summary()
        if self._server is not None:
            self._server.close()
        if self._gateway is not None:
            gateway, self._gateway = self._gateway, None
            await gateway.close()

    def see(self, event: Event) -> None:
        if self._gateway is not None:  # what happens because we leave is nobody's mistake
            self.report(self.conformance.observe(event))

    def report(self, findings: list[CheckFinding]) -> None:
        for finding in findings:
            self._tell(finding)

    def _refused(self, refused: Refused) -> None:
        self.see(RequestRejected(refused.error, refused.message))


class CheckActor(Actor):
    """Takes its time, as a model does: otherwise a client that does not wait would go unnoticed."""

    def __init__(self, server: CheckServer) -> None:
        self._server, self._session = server, b""

    async def start(self, session: str, body: bytes) -> bytes:
        self._session = session.encode("utf-8")
        return b""

    async def tick(self, body: bytes) -> bytes:
        acting = self._judge(TICK, body)
        await asyncio.sleep(self._server.think_s)
        seats = self._server.seats
        if seats is None:
            return body
        actions = {name: random_action(seats[name].action, self._server.rng, mask) for name, mask in acting.items()}
        message = {"action": actions.get(ONLY_SEAT)} if set(seats) == {ONLY_SEAT} else {"actions": actions}
        return encode(message, "msgpack" if is_msgpack(body) else "json")

    async def end(self, body: bytes) -> bytes:
        if self.ended_by == "game":
            self._judge(END, body)
            await asyncio.sleep(self._server.think_s)
        elif self.ended_by == "silent":
            self._server.see(SessionTimedOut(self._session))
        return b""

    def _judge(self, kind: str, body: bytes) -> dict[str, Any]:
        verdict = self._server.conformance.check_body(kind, self._session, body)
        self._server.report(verdict.findings)
        if verdict.refused is not None:
            raise verdict.refused
        return verdict.acting


class Desk:
    """What stands behind one connection: the gateway, and somebody who takes notes."""

    def __init__(self, server: CheckServer, gateway: Gateway) -> None:
        self._gateway = gateway
        self.see = server.see
        self.limits, self.loop, self.tokens = gateway.limits, gateway.loop, gateway.tokens
        self.access_log, self.log_ticks = gateway.access_log, gateway.log_ticks
        self.direct_port = 0
        self._connection: HttpConnection | None = None
        self._steps = 0

    def open_connection(self, connection: HttpConnection) -> str:
        self._connection = connection
        return self._gateway.open_connection(connection)

    def authorize(self, connection: HttpConnection) -> None:
        self._gateway.authorize(connection)

    def is_authorized(self, connection: HttpConnection) -> bool:
        return self._gateway.is_authorized(connection)

    def close_connection(self, connection: HttpConnection) -> None:
        self._gateway.close_connection(connection)
        self.see(ConnectionClosed(self._steps))

    def owner_elsewhere(self, session: bytes) -> int:
        return -1

    def hand_over(self, connection: HttpConnection, slot: int, data: bytes) -> bool:
        return False

    def step(self, kind: str, session: bytes, seq: int, options: StartOptions, body: bytes, exchange: HttpExchange) -> None:
        self._steps += 1
        began = self._connection.began if self._connection else 0.0
        took = self.loop.time() - began if began else 0.0
        noted: Any = Noted(self, exchange, (kind, session, seq), body, took)
        self._gateway.step(kind, session, seq, options, body, noted)

    def get(self, path: str, authorized: bool) -> Page:
        return self._gateway.get(path, authorized)

    def count_refusal(self, refused: Refused) -> None:
        self._gateway.count_refusal(refused)


class Noted:
    """An exchange whose reply is noted."""

    def __init__(self, desk: Desk, exchange: HttpExchange, request: tuple[str, bytes, int], body: bytes, took_s: float) -> None:
        self._desk, self._exchange, self._request = desk, exchange, request
        self._hash, self._size, self._took_s = hash(body), len(body), took_s

    def reply(self, status: int, body: bytes, retry_after_s: float | None = None, port: int = 0) -> None:
        refused = {} if status == 200 else json.loads(body)
        error, message = refused.get("error", ""), refused.get("message", "")
        self._desk.see(StepReplied(*self._request, status, error, message, self._hash, self._size, self._took_s))
        self._exchange.reply(status, body, retry_after_s, port)


class Line(HttpConnection):
    """A connection that tells what only it can see."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._see = desk.see
        self._gone = False

    def data_received(self, data: bytes) -> None:
        if not self.began and b" HTTP/1.0\r" in data.partition(b"\n")[0]:
            self._see(OldHttpVersion())
        super().data_received(data)

    def eof_received(self) -> bool:
        self._leave()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def _leave(self) -> None:
        if self.pending and not self._gone and not self.closing_at:
            self._gone = True
            self._see(ClientDisconnected())
