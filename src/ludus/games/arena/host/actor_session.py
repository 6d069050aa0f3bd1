"""A session with an actor over HTTP; every call returns within its time limit, with a reply or the reason for none."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from ludus.errors import DeadlineMissed, LudusError, Refused, Unreachable
from ludus.games.arena.host.match import ActorCamp
from ludus.protocol.client import AsyncClient

log = logging.getLogger(__name__)

_OVER: Final = frozenset({404, 410, 500, 504})
"""Statuses after which the session no longer exists and another one can be started."""
_BUSY: Final = frozenset({429, 503})
_UNUSABLE: Final = 422
_SESSIONS: Final = 4
"""Maximum number of successive sessions of one match; then the actor is lost."""
_END_S: Final = 5.0
_MAX_REASON: Final = 500
"""Maximum length of a reason in characters."""
_CLOCK_S: Final = 0.05
"""Tolerance of a wait that ends early."""


class ActorReply(NamedTuple):
    """A reply, or None and the reason. `fresh`: a new session replaced the old one. `gone`: the actor is lost."""

    reply: bytes | None
    why: str = ""
    fresh: bool = False
    gone: bool = False


class ActorSession:
    """Successive sessions with one actor, until it is lost. Methods raise only CancelledError."""

    def __init__(
        self,
        remote: ActorCamp,
        name: str,
        match: str,
        start: bytes,
        patience_s: float,
        client: AsyncClient | None = None,
        side: str | None = None,
    ) -> None:
        """`name`: prefix of the session ids. `match`: id shared by the sessions of one match. `start`: first body. `client`: an open
        client of an earlier session with the same actor. `side`: number of the camp; None: the session plays both."""
        self.remote, self._name, self._match, self._start_body, self._side = remote, name, match, start, side
        self._limit_s, self._patience_s = max(remote.timeout_s, patience_s), patience_s
        # Pauses between retries grow by 0.2 s; this number fills `patience_s`.
        retries = int((1 + math.sqrt(1 + 40 * patience_s)) / 2)
        self.client = client or AsyncClient(remote.url, remote.token, self._limit_s, retries)
        self._session = ""
        self._sessions = 0
        self._since: float | None = None  # time of the first request without a reply
        self._gone = False
        self._accepts_info = True  # until a body with optional information is rejected

    async def start(self) -> ActorReply:
        """Start a session."""
        self._session = f"{self._name}-{uuid.uuid4().hex[:12]}"  # unique: a session of a killed game may still be open
        self._sessions += 1
        try:
            async with asyncio.timeout(self._limit_s):
                reply = await self.client.start(self._session, self._start_body, self._match, side=self._side)
        except TimeoutError:
            return self._give_up(f"{self.remote.url} did not begin a session within {self._limit_s:g} s.")
        except LudusError as error:
            return self._give_up(str(error))
        self._since = None
        return ActorReply(reply)

    async def tick(self, body: bytes, without: bytes | None = None) -> ActorReply:
        """Request actions. `without`: the body without optional information, for actors that reject it."""
        self._since = self._since or time.monotonic()
        try:
            reply = await self._send(lambda sent: self.client.tick(self._session, sent, self.remote.timeout_s), body, without)
        except Refused as error:
            return await self._handle_refusal(error)
        except DeadlineMissed as error:
            return self._no_reply(error.message)
        except Unreachable as error:  # not slow: a shorter limit applies
            return self._no_reply(str(error), self._patience_s)
        self._since = None
        return ActorReply(reply)

    async def end(self, body: bytes, without: bytes | None = None) -> bytes:
        """End the session and return the reply; empty if there is none. Failures are logged: the actor expires the session."""
        if not self._session:
            return b""
        reply = b""
        try:
            async with asyncio.timeout(min(self._limit_s, _END_S)):
                reply = await self._send(lambda sent: self.client.end(self._session, sent), body, without)
        except (TimeoutError, LudusError) as error:
            if not self._gone:  # otherwise already logged
                what = "the actor refused the end" if isinstance(error, Refused) else "the end did not reach the actor"
                log.warning("%s: %s: %s", self._session, what, (str(error) or "timed out")[:_MAX_REASON])
        self._session = ""
        return reply

    async def _send(self, request: Callable[[bytes], Awaitable[bytes]], body: bytes, without: bytes | None) -> bytes:
        """Send `body`, or `without` to an actor that rejects optional information."""
        if without is None:
            return await request(body)
        if self._accepts_info:
            try:
                return await request(body)
            except Refused as error:
                if error.status != _UNUSABLE:
                    raise
                self._accepts_info = False
        return await request(without)

    async def _handle_refusal(self, error: Refused) -> ActorReply:
        why = f"{error.status} {error.error}: {error}"
        if error.status in _BUSY:
            return self._no_reply(why)
        if error.status not in _OVER or self._sessions >= _SESSIONS:
            return self._give_up(why)
        log.warning("%s: session lost, starting another one: %s", self._session, why[:_MAX_REASON])
        reply = await self.start()
        return reply if reply.gone else ActorReply(None, why[:_MAX_REASON], fresh=True)

    def _no_reply(self, why: str, limit_s: float | None = None) -> ActorReply:
        """Return no reply; after `limit_s` without one the actor is lost."""
        silent_s = 0.0 if self._since is None else time.monotonic() - self._since
        enough_s = self._limit_s if limit_s is None else limit_s
        return self._give_up(why) if silent_s >= enough_s - _CLOCK_S else ActorReply(None, why[:_MAX_REASON])

    def _give_up(self, why: str) -> ActorReply:
        self._gone = True
        return ActorReply(None, why[:_MAX_REASON], gone=True)
