"""A session with an actor: whatever the actor does, an answer comes back in time, or the word that there is none."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from typing import Final, NamedTuple

from ludus.errors import DeadlineMissed, LudusError, Refused, Unreachable
from ludus.games.arena.host.match import ActorCamp
from ludus.protocol.client import AsyncClient

log = logging.getLogger(__name__)

_OVER: Final = frozenset({404, 410, 500, 504})
"""After these the session is no more; another one may be begun."""
_BUSY: Final = frozenset({429, 503})
_UNUSABLE: Final = 422
_SESSIONS: Final = 4
"""Of one match, one after the other: an actor that fails again and again is as good as gone."""
_END_S: Final = 5.0
_MAX_REASON: Final = 500
"""Characters of what a server says that are passed on."""
_CLOCK_S: Final = 0.05
"""A wait may end so much too early."""


class ActorReply(NamedTuple):
    """The reply; or none, and why. `fresh`: another session has begun in its place. `gone`: there will be none any more."""

    reply: bytes | None
    why: str = ""
    fresh: bool = False
    gone: bool = False


class ActorSession:
    """One session after the other with one actor, until it is gone. Nothing but CancelledError is raised."""

    def __init__(
        self, remote: ActorCamp, name: str, match: str, start: bytes, patience_s: float, client: AsyncClient | None = None
    ) -> None:
        """`name`: what the ids of the sessions begin with; `match` joins those of one match. `start`: the first body. `client`: one of an
        earlier talk with the same actor."""
        self.remote, self._name, self._match, self._start_body = remote, name, match, start
        self._limit_s, self._patience_s = max(remote.timeout_s, patience_s), patience_s
        # Its pauses grow by 0.2 s: so many fill the time, and then it says what was wrong.
        retries = int((1 + math.sqrt(1 + 40 * patience_s)) / 2)
        self.client = client or AsyncClient(remote.url, remote.token, self._limit_s, retries)
        self._session = ""
        self._sessions = 0
        self._since: float | None = None  # when it was first asked what it has not answered
        self._gone = False
        self._accepts_info = True  # until it turns out that it does not take what it may like to know

    async def start(self) -> ActorReply:
        """Begin a session."""
        self._session = f"{self._name}-{uuid.uuid4().hex[:12]}"  # fresh: one of a game that was killed may still be open
        self._sessions += 1
        try:
            async with asyncio.timeout(self._limit_s):
                reply = await self.client.start(self._session, self._start_body, self._match)
        except TimeoutError:
            return self._give_up(f"{self.remote.url} did not begin a session within {self._limit_s:g} s.")
        except LudusError as error:
            return self._give_up(str(error))
        self._since = None
        return ActorReply(reply)

    async def tick(self, body: bytes, without: bytes | None = None) -> ActorReply:
        """`without`: the same body without what the actor may like to know, for one that does not take it."""
        if without is not None and not self._accepts_info:
            body, without = without, None
        self._since = self._since or time.monotonic()
        try:
            reply = await self.client.tick(self._session, body, self.remote.timeout_s)
        except Refused as error:
            if error.status == _UNUSABLE and without is not None:
                self._accepts_info = False
                return await self.tick(without)
            return await self._handle_refusal(error)
        except DeadlineMissed as error:
            return self._no_reply(error.message)
        except Unreachable as error:  # nobody is there, who could be slow
            return self._no_reply(str(error), self._patience_s)
        self._since = None
        return ActorReply(reply)

    async def end(self, body: bytes, without: bytes | None = None) -> bytes:
        """The match is over; what the actor says to that. One that does not hear it will find out by itself."""
        if not self._session:
            return b""
        if without is not None and not self._accepts_info:
            body, without = without, None
        reply = b""
        try:
            async with asyncio.timeout(min(self._limit_s, _END_S)):
                reply = await self.client.end(self._session, body)
        except Refused as error:
            if error.status == _UNUSABLE and without is not None:
                self._accepts_info = False
                return await self.end(without)
            self._log_failure("the end was refused", error)
        except (TimeoutError, LudusError) as error:
            self._log_failure("the end was not heard", error)
        self._session = ""
        return reply

    async def _handle_refusal(self, error: Refused) -> ActorReply:
        why = f"{error.status} {error.error}: {error}"
        if error.status in _BUSY:
            return self._no_reply(why)
        if error.status not in _OVER or self._sessions >= _SESSIONS:
            return self._give_up(why)
        log.warning("%s: the session was lost, another one begins: %s", self._session, why[:_MAX_REASON])
        heard = await self.start()
        return heard if heard.gone else ActorReply(None, why[:_MAX_REASON], fresh=True)

    def _no_reply(self, why: str, limit_s: float | None = None) -> ActorReply:
        """No answer this time. When that has been so for long enough, nobody is there."""
        silent_s = 0.0 if self._since is None else time.monotonic() - self._since
        enough_s = self._limit_s if limit_s is None else limit_s
        return self._give_up(why) if silent_s >= enough_s - _CLOCK_S else ActorReply(None, why[:_MAX_REASON])

    def _give_up(self, why: str) -> ActorReply:
        self._gone = True
        return ActorReply(None, why[:_MAX_REASON], gone=True)

    def _log_failure(self, what: str, error: Exception) -> None:
        if not self._gone:  # else it was said
            log.warning("%s: %s: %s", self._session, what, (str(error) or "it took too long")[:_MAX_REASON])
