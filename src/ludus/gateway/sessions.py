"""Sessions: the state of each game's conversation with its actor, one call at a time, with safe retries.

Independent of the transport: requests arrive through `SessionTable.handle`, replies leave through `ReplyChannel`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from ludus.errors import Refused
from ludus.gateway.auth import RateLimit
from ludus.gateway.inline_task import InlineTask
from ludus.gateway.latency_histogram import LatencyHistogram
from ludus.protocol.spec import END, START, TICK, StartOptions, error_body

log = logging.getLogger(__name__)
_clock = time.perf_counter


class ReplyChannel(Protocol):
    """Where the reply to one request goes. `reply` is called exactly once; the client may have disconnected before."""

    def reply(self, status: int, body: bytes, retry_after_s: float | None = None) -> None: ...


def refuse(exchange: ReplyChannel, refused: Refused) -> None:
    exchange.reply(refused.status, error_body(refused), refused.retry_after_s)


@dataclass(frozen=True)
class SessionLimits:
    sessions: int = 20_000
    tick_s: float = 30.0
    """Time limit of one actor call; when it is exceeded the reply is 504 and the session ends."""
    silent_s: float = 60.0
    """Seconds without a request after which a session is truncated."""
    retry_s: float = 60.0
    """Seconds for which the last reply of an ended session is kept."""
    requests_per_s: float = 0.0
    """Per session; 0 = unlimited. A burst of one second's worth is allowed."""
    threads: int = 8
    """Thread-pool size for actors with plain (not async) methods."""


@dataclass
class SessionStats:
    started: int = 0
    ended: int = 0
    silent: int = 0
    timed_out: int = 0
    failed: int = 0
    shut_down: int = 0
    refused: int = 0
    repeated: int = 0

    def to_json(self) -> dict[str, int]:
        return dict(vars(self))


class Session(InlineTask):
    """One session: its actor and the request being processed.

    An async `tick` runs inline (see `InlineTask`). `start`, `end` and plain methods run in an asyncio task.
    """

    __slots__ = (
        "_table", "actor", "began", "body_hash", "busy", "checked_at", "end_reason", "exchange", "id", "kind",
        "last_body_hash", "last_kind", "last_reply", "latency", "options", "pool_call", "rate_limit", "request_at", "retries", "seq", "started",
        "task", "tick", "tick_ended",
    )  # fmt: skip

    def __init__(self, table: SessionTable, id_: bytes, options: StartOptions, now: float) -> None:
        super().__init__(table.loop)
        self._table = table
        self.id, self.options = id_, options
        self.latency = table.latency  # replaced by the actor's own, if it has one
        self.began = _clock()  # arrival of the current request
        self.actor: Any = None
        self.tick: Callable[[bytes], Coroutine[Any, Any, Any]] | None = None  # the actor's tick, when it is async
        self.started = False  # the actor's start has returned
        self.task: asyncio.Task[Any] | None = None
        self.pool_call: Future[Any] | None = None  # the last plain method submitted to the thread pool
        self.busy = False
        self.end_reason = ""
        self.tick_ended: asyncio.Future[None] | None = None  # done when an aborted tick has returned
        self.exchange: ReplyChannel | None = None
        self.retries: list[ReplyChannel] | None = None
        self.kind, self.seq = START, -1  # of the last accepted request; seq -1: this game does not number requests
        self.body_hash = self.last_body_hash = 0
        self.last_reply: tuple[int, bytes] = (200, b"")
        self.last_kind = START
        self.request_at = self.checked_at = now  # arrival of the last request; last sweep that found the session busy
        self.rate_limit = RateLimit(table.limits.requests_per_s) if table.limits.requests_per_s else None

    def begin(self, kind: str, body: bytes) -> None:
        """Call the actor for an accepted request."""
        if kind is TICK and self.tick is not None:
            try:
                self._coroutine = self.tick(body)
            except Exception as error:  # user code, for example a wrong signature
                self._on_error(error)
                return
            self._step(None)
        else:
            self.task = self._table.loop.create_task(self._call_actor(kind, body), context=self._context)

    @property
    def name(self) -> str:
        return self.id.decode("utf-8", "replace")

    def get_name(self) -> str:
        return f"session {self.name}"

    # -- start, end, and plain ticks

    async def _call_actor(self, kind: str, body: bytes) -> None:
        try:
            if kind is START:
                self.actor = self._table.make_actor()
                self.actor.match, self.actor.about = self.options.match, self.options
                reply = await self._call("start", self.name, body)
            else:
                reply = await self._call(kind, body)
            if self.end_reason or kind is TICK:
                self._on_result(reply)
            elif kind is START:
                self._on_started(_as_bytes(reply, kind))
            else:
                reply = _as_bytes(reply, kind)
                self.end_reason = "game"
                self._table.stats.ended += 1
                self._finish(reply)
        except (Exception, asyncio.CancelledError, SystemExit) as error:  # user code may raise anything
            self._on_error(error)

    async def _call(self, method: str, *args: Any) -> Any:
        function = getattr(self.actor, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        self.pool_call = self._table.pool.submit(self._context.copy().run, function, *args)
        result = await asyncio.shield(asyncio.wrap_future(self.pool_call))
        return await result if inspect.isawaitable(result) else result

    # -- outcomes

    def _on_started(self, reply: bytes) -> None:
        self.started = True
        if inspect.iscoroutinefunction(self.actor.tick):
            self.tick = self.actor.tick
        self.latency = getattr(self.actor, "latency", self.latency)
        self._table.stats.started += 1
        self._on_result(reply)

    def _on_result(self, reply: Any) -> None:
        if reply.__class__ is not bytes:
            try:
                reply = _as_bytes(reply, self.kind)
            except TypeError as error:
                self._on_error(error)
                return
        if self.end_reason:
            self._mark_tick_ended()
            return
        self.busy = False
        self.task = None
        self.last_kind, self.last_body_hash = self.kind, self.body_hash
        if self.kind is TICK:
            took = _clock() - self.began
            latency = self.latency  # LatencyHistogram.record, inlined: measured
            latency.seconds += took
            latency.buckets[int(took * 1e6).bit_length()] += 1
        if self.seq >= 0:  # requests without numbers cannot be retried
            self.last_reply = (200, reply)
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.reply(200, reply)
        if self.retries is not None:
            self._reply_to_retries(200, reply)

    def _on_error(self, error: BaseException) -> None:
        if self.end_reason:  # the session was aborted: nothing is left to report
            if not isinstance(error, asyncio.CancelledError):
                why = self.end_reason
                log.warning("session %s: the actor raised while the session was ended (%s)", self.name, why, exc_info=error)
            self._mark_tick_ended()
        elif isinstance(error, Refused) and 400 <= error.status < 600:
            self._reject(error)
        else:
            log.warning("session %s: the actor raised in %s", self.name, self.kind, exc_info=error)
            self.end_reason = "failed"
            self._table.stats.failed += 1
            self.latency.failed += 1
            where = f"The actor raised {type(error).__name__} in {self.kind}; the server's log has the traceback."
            self._finish(Refused(500, "actor_failed", where, "This session is over; start another."))
            self._table.schedule_end(self, None)

    def _mark_tick_ended(self) -> None:
        if self.tick_ended is not None and not self.tick_ended.done():
            self.tick_ended.set_result(None)

    def _reject(self, refused: Refused) -> None:
        """Reject the request and keep the session; the corrected request may use the same number."""
        self._table.stats.refused += 1
        self._table.refusals[refused.error] += 1
        self.busy = False
        self.task = None
        if self.started:
            self.kind, self.body_hash, self.seq = self.last_kind, self.last_body_hash, max(-1, self.seq - 1)
        else:
            self._table.remove(self)
        self._send_reply(refused.status, error_body(refused), refused.retry_after_s)

    def _finish(self, outcome: bytes | Refused) -> None:
        """End the session: send the last reply and keep it for retries."""
        reply = (200, outcome) if isinstance(outcome, bytes) else (outcome.status, error_body(outcome))
        self.last_reply, self.busy = reply, False
        self._table.archive(self)
        self._send_reply(*reply)

    def _send_reply(self, status: int, body: bytes, retry_after_s: float | None = None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.reply(status, body, retry_after_s)
        self._reply_to_retries(status, body, retry_after_s)

    def _reply_to_retries(self, status: int, body: bytes, retry_after_s: float | None = None) -> None:
        waiting, self.retries = self.retries, None
        for exchange in waiting or ():
            exchange.reply(status, body, retry_after_s)

    def abort(self, reason: str, refused: Refused) -> None:
        """End the session from outside: pending requests get `refused`, the actor's `end` is called with the reason."""
        self.end_reason = reason
        running: asyncio.Future[Any] | None = None
        if self.pool_call is not None:
            self.pool_call.cancel()  # in case it has not begun
        if self.busy and self.task is not None:
            running = self.task
            self.task.cancel()
        elif self.busy:
            running = self.tick_ended = self._table.loop.create_future()
            self.cancel()
        self._finish(refused)
        self._table.schedule_end(self, running)

    async def call_end(self, running: asyncio.Future[Any] | None) -> None:
        """Wait for the `running` call, then call the actor's `end` without a body. Its return value is ignored."""
        limit = self._table.limits.tick_s
        if running is not None and not (await asyncio.wait([running], timeout=limit))[0]:
            log.error("session %s: %s() ignored its cancellation; end() is not called", self.name, self.kind)
            return
        if self.pool_call is not None and not self.pool_call.done():
            await self._wait_for_thread(self.pool_call)
        if not self.started or self.kind is END:
            return
        try:
            self.actor.ended_by = self.end_reason
            async with asyncio.timeout(limit):
                await self._call(END, b"")
        except TimeoutError:
            log.warning("session %s: end() took longer than %s s", self.name, limit)
            if self.pool_call is not None:
                await self._wait_for_thread(self.pool_call)
        except (Exception, SystemExit) as error:  # user code may raise anything
            log.warning("session %s: end() raised after the session was %s", self.name, self.end_reason, exc_info=error)

    async def _wait_for_thread(self, call: Future[Any]) -> None:
        """Wait for a plain method, which cannot be interrupted: an actor gets one call at a time."""
        held = call.running()
        self._table.abandoned += held
        try:
            await asyncio.gather(asyncio.wrap_future(call), return_exceptions=True)
        finally:
            self._table.abandoned -= held


@dataclass(slots=True)
class _EndedSession:
    kind: str
    seq: int
    body_hash: int
    reply: tuple[int, bytes]
    reason: str
    at: float


_END_REASONS = {
    "failed": "its actor failed",
    "timeout": "a call of its actor took too long",
    "silent": "it was silent for too long",
    "shutdown": "the server is stopping",
}


class SessionTable:
    """All sessions of one worker. Not thread-safe: used on one event loop."""

    def __init__(
        self,
        make_actor: Callable[[], Any],
        limits: SessionLimits,
        loop: asyncio.AbstractEventLoop,
        *,
        lost_until: float = -math.inf,
    ) -> None:
        self.make_actor, self.limits, self.loop = make_actor, limits, loop
        self.stats = SessionStats()
        self.latency = LatencyHistogram()
        self.refusals: Counter[str] = Counter()  # by error word
        self.requests = 0
        self.abandoned = 0
        self.pool = ThreadPoolExecutor(limits.threads, thread_name_prefix="actor")
        self._live: dict[bytes, Session] = {}
        self._ended: dict[bytes, _EndedSession] = {}
        self._lost_until = lost_until
        self._end_tasks: set[asyncio.Task[None]] = set()
        self.closing = self.draining = False

    def __len__(self) -> int:
        return len(self._live)

    def find(self, id_: bytes) -> Session | None:
        return self._live.get(id_)

    def idle_sessions(self) -> Iterator[Session]:
        """Sessions that have started and wait for their next request."""
        return (session for session in list(self._live.values()) if session.started and not session.busy)

    @property
    def threads_exhausted(self) -> bool:
        """Whether abandoned calls occupy every thread of the pool, so that no plain method can run any more."""
        return self.abandoned >= self.limits.threads

    def handle(self, kind: str, id_: bytes, seq: int, options: StartOptions, body: bytes, exchange: ReplyChannel) -> None:
        """Accept one request. It is answered now or when the actor returns; never blocks and never raises."""
        self.requests += 1
        session = self._live.get(id_)
        if session is None:
            if kind is START:
                self._start(id_, seq, options, body, exchange)
            else:
                self._handle_unknown(id_, kind, seq, body, exchange)
            return
        if session.busy or kind is START or (seq != session.seq + 1 if session.seq >= 0 else seq >= 0):
            self._handle_out_of_order(session, kind, seq, body, exchange)
            return
        session.request_at = self.loop.time()
        if session.rate_limit is not None and not session.rate_limit.allow(session.request_at):
            wait_s = 1 / session.rate_limit.rate
            self._refuse(
                exchange, Refused(429, "too_many_requests", "This session sends too many requests.", "Slow down.", wait_s)
            )
            return
        session.kind, session.seq, session.body_hash = kind, seq, hash(body) if seq >= 0 else 0
        session.busy = True
        session.exchange = exchange
        session.began = _clock()
        session.begin(kind, body)

    def _handle_out_of_order(self, session: Session, kind: str, seq: int, body: bytes, exchange: ReplyChannel) -> None:
        """Answer anything but the next request of an idle session: a retry, or an error of the game.

        The body is compared as well: a request that the game gave up on may arrive after another one with the same number.
        """
        if 0 <= seq == session.seq and kind is session.kind and hash(body) == session.body_hash:
            self.stats.repeated += 1
            if session.busy:
                session.retries = [*(session.retries or ()), exchange]
            else:
                exchange.reply(*session.last_reply)
            return
        self._refuse(exchange, _order_error(session, kind, seq))

    def _refuse(self, exchange: ReplyChannel, refused: Refused) -> None:
        self.refusals[refused.error] += 1
        refuse(exchange, refused)

    def _start(self, id_: bytes, seq: int, options: StartOptions, body: bytes, exchange: ReplyChannel) -> None:
        if self.closing:
            self._refuse(exchange, Refused(503, "stopping", "This server is stopping.", "Try another one.", 1))
            return
        ended = self._ended.get(id_)
        if ended is not None and 0 <= seq == ended.seq and ended.kind is START:  # a retry of a start that failed
            exchange.reply(*ended.reply)
            return
        if self.draining:
            message = "This server accepts no new sessions; open ones continue."
            self._refuse(exchange, Refused(503, "draining", message, "Start elsewhere.", 1))
            return
        if len(self._live) >= self.limits.sessions:
            message = f"This worker has {len(self._live)} open sessions, its limit."
            self._refuse(exchange, Refused(503, "too_many_sessions", message, "End sessions, or raise the limit.", 1))
            return
        self._ended.pop(id_, None)
        session = Session(self, id_, options, self.loop.time())
        self._live[id_] = session
        session.seq, session.body_hash, session.busy, session.exchange = seq, hash(body), True, exchange
        session.begin(START, body)

    def _handle_unknown(self, id_: bytes, kind: str, seq: int, body: bytes, exchange: ReplyChannel) -> None:
        ended = self._ended.get(id_)
        if ended is not None:
            if 0 <= seq == ended.seq and kind is ended.kind and hash(body) == ended.body_hash:
                self.stats.repeated += 1
                exchange.reply(*ended.reply)
                return
            if ended.reason != "game":
                why = _END_REASONS.get(ended.reason, ended.reason)
                self._refuse(exchange, Refused(410, "session_lost", f"This session was ended: {why}.", "Start again."))
                return
            self._refuse(exchange, Refused(404, "unknown_session", "This session has ended.", "Send start first."))
        elif self.loop.time() < self._lost_until:
            self._refuse(exchange, session_lost())
        else:
            message = "There is no open session with this id."
            self._refuse(exchange, Refused(404, "unknown_session", message, f"Send start before {kind}."))

    def remove(self, session: Session) -> None:
        """Remove a session whose start was rejected."""
        self._live.pop(session.id, None)

    def archive(self, session: Session) -> None:
        """Remove an ended session and keep its last reply for retries."""
        if self._live.get(session.id) is not session:
            return
        del self._live[session.id]
        self._ended.pop(session.id, None)
        reply = session.last_reply if session.seq >= 0 else (0, b"")  # requests without numbers cannot be retried
        ended = _EndedSession(session.kind, session.seq, session.body_hash, reply, session.end_reason, self.loop.time())
        self._ended[session.id] = ended
        while len(self._ended) > 2 * self.limits.sessions:
            del self._ended[next(iter(self._ended))]

    def schedule_end(self, session: Session, running: asyncio.Future[Any] | None) -> None:
        """Call the actor's `end` in a separate task, after the `running` call."""
        task = self.loop.create_task(session.call_end(running), context=session._context)
        self._end_tasks.add(task)
        task.add_done_callback(self._end_tasks.discard)

    def sweep(self, now: float) -> None:
        """End silent and timed-out sessions and drop old replies. Call it a few times a second."""
        limits = self.limits
        for session in list(self._live.values()):
            if session.busy:
                session.checked_at = now
                if now - session.request_at > limits.tick_s:
                    self.stats.timed_out += 1
                    session.latency.timed_out += 1
                    message = f"The actor did not answer this {session.kind} within {limits.tick_s:g} s."
                    session.abort("timeout", Refused(504, "actor_timeout", message, "This session is over; start another."))
            elif now - max(session.checked_at, session.request_at) > limits.silent_s:
                self.stats.silent += 1
                session.abort("silent", session_lost("it was silent for too long"))
        for id_, ended in list(self._ended.items()):
            if now - ended.at <= limits.retry_s:
                break
            del self._ended[id_]

    def extend_deadlines(self, pause_s: float, now: float) -> None:
        """Extend all deadlines by a pause of the event loop."""
        for session in self._live.values():
            session.checked_at = min(now, session.checked_at + pause_s)
            session.request_at = min(now, session.request_at + pause_s)

    async def close(self, grace_s: float = 5.0) -> None:
        """End every session and call the `end` of its actor."""
        self.closing = True
        for session in list(self._live.values()):
            self.stats.shut_down += 1
            session.abort("shutdown", Refused(503, "stopping", "This server is stopping.", "Start again elsewhere.", 1))
        for _ in range(2):
            if self._end_tasks:
                await asyncio.wait(set(self._end_tasks), timeout=grace_s)
            for task in self._end_tasks:
                task.cancel()
        self.pool.shutdown(wait=False, cancel_futures=True)


def _order_error(session: Session, kind: str, seq: int) -> Refused:
    if (seq >= 0) != (session.seq >= 0):
        difference = "had a seq header, this has none" if session.seq >= 0 else "had no seq header, this has one"
        return Refused(400, "seq", f"The start of this session {difference}.", "Number all requests of a session, or none.")
    if 0 <= seq == session.seq:
        other = f"this is a {kind}" if kind is not session.kind else "this has another body"
        hint = "Add 1 for every new request."
        return Refused(409, "seq", f"seq {seq} was a {session.kind}; {other}.", hint, last=session.seq)
    if kind is START:
        hint = "End it first, or use a fresh id for every match."
        return Refused(409, "already_started", "A session with this id is open.", hint)
    if session.busy:
        message = f"The previous {session.kind} is still being processed."
        return Refused(409, "busy", message, "Wait for each reply before the next request.")
    hint = "Repeat the last number to retry, add 1 for a new request."
    return Refused(409, "seq", f"seq is {seq}, the last was {session.seq}.", hint, last=session.seq)


def session_lost(why: str = "its worker died") -> Refused:
    return Refused(410, "session_lost", f"This session is lost: {why}.", "Start again.")


def _as_bytes(reply: Any, kind: str) -> bytes:
    if isinstance(reply, (bytes, bytearray, memoryview)):
        return bytes(reply)
    raise TypeError(f"{kind}() returned {type(reply).__name__}, not bytes.")
