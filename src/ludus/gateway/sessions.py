"""Sessions: which game talks to which actor, one call at a time, with safe retries. No sockets in here."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import math
import time
from asyncio.tasks import _enter_task, _leave_task  # for tasks of one's own: docs.python.org/3/library/asyncio-extending.html
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from ludus.errors import Refused
from ludus.gateway.latency_histogram import Meter
from ludus.models.inference.micro_batcher import BatchFuture
from ludus.protocol.spec import END, START, TICK, About, error_body

log = logging.getLogger(__name__)
_clock = time.perf_counter


class Exchange(Protocol):
    """One request that waits for its reply. `reply` is called exactly once; nobody may be listening any more."""

    def reply(self, status: int, body: bytes, retry_after_s: float | None = None) -> None: ...


def refuse(exchange: Exchange, refused: Refused) -> None:
    exchange.reply(refused.status, error_body(refused), refused.retry_after_s)


@dataclass(frozen=True)
class SessionLimits:
    sessions: int = 20_000
    tick_s: float = 30.0
    """A call of the actor that takes longer is answered with 504, and its session ends."""
    silent_s: float = 60.0
    """A session without a request for so long is truncated."""
    retry_s: float = 60.0
    """How long the last reply of an ended session is remembered."""
    requests_per_s: float = 0.0
    """Per session; 0 = unlimited. A burst of one second's worth is allowed."""
    threads: int = 8
    """For actors with plain (not async) methods."""


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


class Session:
    """One conversation: its actor, and the request that is being answered.

    An async `tick` is stepped right here, without a task of its own: most ticks wait for nothing, or only for a batch of the
    model, which resumes them directly. While a tick runs, this object is the current task (`asyncio.current_task`) and does
    what one does, so that `asyncio.timeout`, task groups and the like work. Begin and resume ticks from callbacks of the
    loop only: inside another task asyncio would refuse to change the current one.
    """

    __slots__ = (
        "__weakref__", "_cancel_message", "_cancels", "_context", "_coroutine", "_fut_waiter", "_must_cancel", "_table",
        "about", "actor", "allowance", "began", "busy", "call", "exchange", "id", "kind", "last", "last_kind", "last_said", "meter",
        "name", "opened", "over", "said", "seen", "seq", "settled", "since", "task", "tick", "waiting",
    )  # fmt: skip

    def __init__(self, table: Sessions, id_: bytes, about: About, now: float) -> None:
        self._table = table
        self.id, self.name, self.about = id_, id_.decode("utf-8", "replace"), about
        self.meter = table.meter  # its actor may bring another
        self.began = _clock()  # when the request came that is being answered
        self.actor: Any = None
        self.tick: Callable[[bytes], Coroutine[Any, Any, Any]] | None = None  # the actor's, when it is async
        self.opened = False  # its start has returned
        self.task: asyncio.Task[Any] | None = None
        self.call: Future[Any] | None = None  # the last plain method that went to the pool
        self.busy = False
        self.over = ""  # why it ended
        self.settled: asyncio.Future[None] | None = None  # done when the tick that was cut has ended
        self.exchange: Exchange | None = None
        self.waiting: list[Exchange] | None = None
        self.kind, self.seq = START, -1  # of the last accepted request; -1: this game does not number them
        self.said = self.last_said = 0  # the hash of its body
        self.last: tuple[int, bytes] = (200, b"")  # what was answered last, and to what
        self.last_kind = START
        self.since = self.seen = now  # when the last request came; when it was last looked at while busy
        self.allowance = max(table.limits.requests_per_s, 1.0)
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self._context = contextvars.copy_context()
        self._cancels = 0
        self._must_cancel = False  # these three as in asyncio.Task, where some libraries look for them
        self._cancel_message: Any = None
        self._fut_waiter: Any = None

    def begin(self, kind: str, body: bytes) -> None:
        """Call the actor for a request that was accepted."""
        if kind is TICK and self.tick is not None:
            try:
                self._coroutine = self.tick(body)
            except Exception as error:  # its signature is another
                self._raised(error)
                return
            self._step(None)
        else:
            self.task = self._table.loop.create_task(self._converse(kind, body), context=self._context)

    # -- an async tick, step by step

    def resume(self) -> None:
        """The batch that the tick was waiting for is done."""
        self._fut_waiter = None
        self._step(None)

    def _step(self, thrown: BaseException | None) -> None:
        coroutine, loop = self._coroutine, self._table.loop
        assert coroutine is not None
        resume: Any = coroutine.send if thrown is None else coroutine.throw
        task: Any = self
        _enter_task(loop, task)
        try:
            waited = self._context.run(resume, thrown)
        except StopIteration as stop:
            _leave_task(loop, task)
            self._left()
            self._answer(stop.value)
        except BaseException as error:
            _leave_task(loop, task)
            self._left()
            self._raised(error)
            if isinstance(error, KeyboardInterrupt):
                raise
        else:
            _leave_task(loop, task)
            if waited.__class__ is BatchFuture and waited.waiter is None:
                waited._asyncio_future_blocking = False
                waited.waiter = self
                self._fut_waiter = waited
            else:
                self._wait_for(waited)
            if self._must_cancel and self._cancel_waited():
                self._must_cancel = False

    def _left(self) -> None:
        self._coroutine = None
        if self._cancels:  # of a tick that cancelled itself; the next one begins afresh
            self._cancels, self._must_cancel = 0, False

    def _wait_for(self, waited: Any) -> None:
        """As asyncio.Task does it."""
        loop = self._table.loop
        if waited is None:
            loop.call_soon(self._go_on, None)
        elif not getattr(waited, "_asyncio_future_blocking", False):
            loop.call_soon(self._step, RuntimeError(f"tick() cannot wait for {waited!r}."))
        elif waited.get_loop() is not loop:
            loop.call_soon(self._step, RuntimeError(f"tick() waits for {waited!r} of another event loop."))
        else:
            waited._asyncio_future_blocking = False
            waited.add_done_callback(self._go_on)
            self._fut_waiter = waited

    def _go_on(self, waited: asyncio.Future[Any] | None) -> None:
        self._fut_waiter = None
        thrown: BaseException | None = None
        if self._must_cancel:
            self._must_cancel = False
            thrown = asyncio.CancelledError(*([] if self._cancel_message is None else [self._cancel_message]))
        elif waited is not None:
            try:
                waited.result()
            except BaseException as error:  # whatever it was, it belongs to the tick
                thrown = error
        self._step(thrown)

    def _cancel_waited(self) -> bool:
        waited = self._fut_waiter
        if waited is None:
            return False
        if waited.__class__ is BatchFuture and waited.waiter is self:
            waited.waiter = None  # a batch does not tell of what is cancelled, and must not resume us later
            waited.add_done_callback(self._go_on)
        return bool(waited.cancel(msg=self._cancel_message))

    # -- what asyncio expects of the current task

    def cancel(self, msg: Any = None) -> bool:
        if self._coroutine is None:
            return False
        self._cancels += 1
        self._cancel_message = msg
        if not self._cancel_waited():
            self._must_cancel = True
        return True

    def cancelling(self) -> int:
        return self._cancels

    def uncancel(self) -> int:
        self._cancels = max(0, self._cancels - 1)
        return self._cancels

    def done(self) -> bool:
        return self._coroutine is None

    def cancelled(self) -> bool:
        return False

    def get_name(self) -> str:
        return f"session {self.name}"

    def get_coro(self) -> Coroutine[Any, Any, Any] | None:
        return self._coroutine

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._table.loop

    # -- start, end, and ticks that are plain methods

    async def _converse(self, kind: str, body: bytes) -> None:
        try:
            if kind is START:
                self.actor = self._table.make_actor()
                self.actor.match, self.actor.about = self.about.match, self.about
                reply = await self._call("start", self.name, body)
            else:
                reply = await self._call(kind, body)
            if self.over or kind is TICK:
                self._answer(reply)
            elif kind is START:
                self._opened(_as_bytes(reply, kind))
            else:
                self._closed(_as_bytes(reply, kind))
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            self._raised(error)

    async def _call(self, method: str, *args: Any) -> Any:
        function = getattr(self.actor, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        self.call = self._table.pool.submit(self._context.copy().run, function, *args)
        result = await asyncio.shield(asyncio.wrap_future(self.call))
        return await result if inspect.isawaitable(result) else result

    # -- what came of it

    def _opened(self, reply: bytes) -> None:
        self.opened = True
        if inspect.iscoroutinefunction(self.actor.tick):
            self.tick = self.actor.tick
        self.meter = getattr(self.actor, "meter", self.meter)
        self._table.stats.started += 1
        self._answer(reply)

    def _closed(self, reply: bytes) -> None:
        self.over = "game"
        self._table.stats.ended += 1
        self._finish(reply)

    def _answer(self, reply: Any) -> None:
        if reply.__class__ is not bytes:
            try:
                reply = _as_bytes(reply, self.kind)
            except TypeError as error:
                self._raised(error)
                return
        if self.over:
            self._settle()
            return
        self.busy = False
        self.task = None
        self.last_kind, self.last_said = self.kind, self.said
        if self.kind is TICK:
            took = _clock() - self.began
            meter = self.meter  # Meter.took, without the call
            meter.seconds += took
            meter.buckets[int(took * 1e6).bit_length()] += 1
        if self.seq >= 0:  # without numbers nothing can be repeated
            self.last = (200, reply)
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.reply(200, reply)
        if self.waiting is not None:
            self._tell_waiting(200, reply)

    def _raised(self, error: BaseException) -> None:
        if self.over:  # it was cut; how its code took that does not matter
            if not isinstance(error, asyncio.CancelledError):
                log.warning("session %s: its actor raised while it was ended (%s)", self.name, self.over, exc_info=error)
            self._settle()
        elif isinstance(error, Refused) and 400 <= error.status < 600:
            self._refused(error)
        else:
            log.warning("session %s: its actor raised in %s", self.name, self.kind, exc_info=error)
            self.over = "failed"
            self._table.stats.failed += 1
            self.meter.failed += 1
            where = f"The actor raised {type(error).__name__} in {self.kind}; the server's log has the traceback."
            self._finish(Refused(500, "actor_failed", where, "This session is over; start another."))
            self._table.see_off(self, None)

    def _settle(self) -> None:
        if self.settled is not None and not self.settled.done():
            self.settled.set_result(None)

    def _refused(self, refused: Refused) -> None:
        """The request was wrong, not the session; it may be sent again, corrected, with the same number."""
        self._table.stats.refused += 1
        self._table.refusals[refused.error] += 1
        self.busy = False
        self.task = None
        if self.opened:
            self.kind, self.said, self.seq = self.last_kind, self.last_said, max(-1, self.seq - 1)
        else:
            self._table.drop(self)
        self._tell(refused.status, error_body(refused), refused.retry_after_s)

    def _finish(self, outcome: bytes | Refused) -> None:
        """The session is over: say so, and remember what was said."""
        reply = (200, outcome) if isinstance(outcome, bytes) else (outcome.status, error_body(outcome))
        self.last, self.busy = reply, False
        self._table.bury(self)
        self._tell(*reply)

    def _tell(self, status: int, body: bytes, retry_after_s: float | None = None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.reply(status, body, retry_after_s)
        self._tell_waiting(status, body, retry_after_s)

    def _tell_waiting(self, status: int, body: bytes, retry_after_s: float | None = None) -> None:
        waiting, self.waiting = self.waiting, None
        for exchange in waiting or ():
            exchange.reply(status, body, retry_after_s)

    def cut(self, reason: str, refused: Refused) -> None:
        """End it from outside: whoever waits gets `refused`, the actor's `end` is called with the reason."""
        self.over = reason
        running: asyncio.Future[Any] | None = None
        if self.call is not None:
            self.call.cancel()  # in case that it has not begun
        if self.busy and self.task is not None:
            running = self.task
            self.task.cancel()
        elif self.busy:
            running = self.settled = self._table.loop.create_future()
            self.cancel()
        self._finish(refused)
        self._table.see_off(self, running)

    async def dismiss(self, running: asyncio.Future[Any] | None) -> None:
        """Tell the actor that it is over, without a body, once it is not `running` any more. Nobody waits for its answer."""
        limit = self._table.limits.tick_s
        if running is not None and not (await asyncio.wait([running], timeout=limit))[0]:
            log.error("session %s: its %s goes on although it was cancelled; end() is not called", self.name, self.kind)
            return
        if self.call is not None and not self.call.done():
            await self._returned(self.call)
        if not self.opened or self.kind is END:
            return
        try:
            self.actor.ended_by = self.over
            async with asyncio.timeout(limit):
                await self._call(END, b"")
        except TimeoutError:
            log.warning("session %s: end() took longer than %s s", self.name, limit)
            if self.call is not None:
                await self._returned(self.call)
        except (Exception, SystemExit) as error:
            log.warning("session %s: end() raised after the session was %s", self.name, self.over, exc_info=error)

    async def _returned(self, call: Future[Any]) -> None:
        """One call at a time: a plain method cannot be interrupted, only waited for."""
        held = call.running()
        self._table.abandoned += held
        try:
            await asyncio.gather(asyncio.wrap_future(call), return_exceptions=True)
        finally:
            self._table.abandoned -= held


@dataclass(slots=True)
class _Ended:
    kind: str
    seq: int
    said: int
    reply: tuple[int, bytes]
    reason: str
    at: float


_WHY = {
    "failed": "its actor failed",
    "timeout": "a call of its actor took too long",
    "silent": "it was silent for too long",
    "shutdown": "the server is stopping",
}


class Sessions:
    """All sessions of one worker. Lives on one event loop."""

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
        self.meter = Meter()
        self.refusals: Counter[str] = Counter()  # by their words
        self.requests = 0
        self.abandoned = 0
        self.pool = ThreadPoolExecutor(limits.threads, thread_name_prefix="actor")
        self._live: dict[bytes, Session] = {}
        self._ended: dict[bytes, _Ended] = {}
        self._lost_until = lost_until
        self._leaving: set[asyncio.Task[None]] = set()
        self.closing = self.draining = False

    def __len__(self) -> int:
        return len(self._live)

    def find(self, id_: bytes) -> Session | None:
        return self._live.get(id_)

    def idle(self) -> Iterator[Session]:
        """Those that are open and not being answered."""
        return (session for session in list(self._live.values()) if session.opened and not session.busy)

    @property
    def stuck(self) -> bool:
        """Every thread of the pool is held by a call that was given up: nothing plain will ever run again."""
        return self.abandoned >= self.limits.threads

    def handle(self, kind: str, id_: bytes, seq: int, about: About, body: bytes, exchange: Exchange) -> None:
        """Accept one request. The exchange is answered now or when the actor has; this never blocks and never raises."""
        self.requests += 1
        session = self._live.get(id_)
        if session is None:
            if kind is START:
                self._start(id_, seq, about, body, exchange)
            else:
                self._absent(id_, kind, seq, body, exchange)
            return
        if session.busy or kind is START or (seq != session.seq + 1 if session.seq >= 0 else seq >= 0):
            self._out_of_turn(session, kind, seq, body, exchange)
            return
        if self.limits.requests_per_s and not self._within_rate(session):
            wait = 1 / self.limits.requests_per_s
            self._refuse(exchange, Refused(429, "too_many_requests", "This session sends too many requests.", "Slow down.", wait))
            return
        session.kind, session.seq, session.said = kind, seq, hash(body) if seq >= 0 else 0
        session.busy = True
        session.exchange = exchange
        session.since = self.loop.time()
        session.began = _clock()
        session.begin(kind, body)

    def _out_of_turn(self, session: Session, kind: str, seq: int, body: bytes, exchange: Exchange) -> None:
        """Everything but the next request of an idle session: a retry, or a mistake.

        What a game gave up may arrive after it asked for something else by the same number: another body is no retry.
        """
        if 0 <= seq == session.seq and kind is session.kind and hash(body) == session.said:
            self.stats.repeated += 1
            if session.busy:
                session.waiting = [*(session.waiting or ()), exchange]
            else:
                exchange.reply(*session.last)
            return
        self._refuse(exchange, _mistake(session, kind, seq))

    def _within_rate(self, session: Session) -> bool:
        now, rate = self.loop.time(), self.limits.requests_per_s
        session.allowance = min(max(rate, 1.0), session.allowance + (now - session.since) * rate)
        session.since = now
        if session.allowance < 1:
            return False
        session.allowance -= 1
        return True

    def _refuse(self, exchange: Exchange, refused: Refused) -> None:
        self.refusals[refused.error] += 1
        refuse(exchange, refused)

    def _start(self, id_: bytes, seq: int, about: About, body: bytes, exchange: Exchange) -> None:
        if self.closing:
            self._refuse(exchange, Refused(503, "stopping", "This server is stopping.", "Try another one.", 1))
            return
        ended = self._ended.get(id_)
        if ended is not None and 0 <= seq == ended.seq and ended.kind is START:  # it failed; a retry hears the same
            exchange.reply(*ended.reply)
            return
        if self.draining:
            message = "This server takes no new sessions any more; those in play go on."
            self._refuse(exchange, Refused(503, "draining", message, "Start elsewhere.", 1))
            return
        if len(self._live) >= self.limits.sessions:
            message = f"This worker has {len(self._live)} open sessions, its limit."
            self._refuse(exchange, Refused(503, "too_many_sessions", message, "End sessions, or raise the limit.", 1))
            return
        self._ended.pop(id_, None)
        session = Session(self, id_, about, self.loop.time())
        self._live[id_] = session
        session.seq, session.said, session.busy, session.exchange = seq, hash(body), True, exchange
        session.begin(START, body)

    def _absent(self, id_: bytes, kind: str, seq: int, body: bytes, exchange: Exchange) -> None:
        ended = self._ended.get(id_)
        if ended is not None:
            if 0 <= seq == ended.seq and kind is ended.kind and hash(body) == ended.said:
                self.stats.repeated += 1
                exchange.reply(*ended.reply)
                return
            if ended.reason != "game":
                why = _WHY.get(ended.reason, ended.reason)
                self._refuse(exchange, Refused(410, "session_lost", f"This session was ended: {why}.", "Start again."))
                return
            self._refuse(exchange, Refused(404, "unknown_session", "This session has ended.", "Send start first."))
        elif self.loop.time() < self._lost_until:
            self._refuse(exchange, lost())
        else:
            message = "There is no open session of this id."
            self._refuse(exchange, Refused(404, "unknown_session", message, f"Send start before {kind}."))

    def drop(self, session: Session) -> None:
        """Forget it as if it had never been."""
        self._live.pop(session.id, None)

    def bury(self, session: Session) -> None:
        """It is over: remember its last reply for retries."""
        if self._live.get(session.id) is not session:
            return
        del self._live[session.id]
        self._ended.pop(session.id, None)
        reply = session.last if session.seq >= 0 else (0, b"")  # without numbers nobody can ask for it again
        self._ended[session.id] = _Ended(session.kind, session.seq, session.said, reply, session.over, self.loop.time())
        while len(self._ended) > 2 * self.limits.sessions:
            del self._ended[next(iter(self._ended))]

    def see_off(self, session: Session, running: asyncio.Future[Any] | None) -> None:
        """Its actor hears that it is over, in a task of its own, once the call that is `running` has ended."""
        task = self.loop.create_task(session.dismiss(running), context=session._context)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def sweep(self, now: float) -> None:
        """Call it a few times a second: ends what is silent or takes too long, forgets what is old."""
        limits = self.limits
        for session in list(self._live.values()):
            if session.busy:
                session.seen = now
                if now - session.since > limits.tick_s:
                    self.stats.timed_out += 1
                    session.meter.timed_out += 1
                    message = f"The actor did not answer this {session.kind} within {limits.tick_s:g} s."
                    session.cut("timeout", Refused(504, "actor_timeout", message, "This session is over; start another."))
            elif now - max(session.seen, session.since) > limits.silent_s:
                self.stats.silent += 1
                session.cut("silent", lost("it was silent for too long"))
        for id_, ended in list(self._ended.items()):
            if now - ended.at <= limits.retry_s:
                break
            del self._ended[id_]

    def forgive(self, pause_s: float, now: float) -> None:
        """The event loop stood still for so long: nobody is to blame for that time."""
        for session in self._live.values():
            session.seen = min(now, session.seen + pause_s)
            session.since = min(now, session.since + pause_s)

    async def close(self, grace_s: float = 5.0) -> None:
        """End every session; actors are told."""
        self.closing = True
        for session in list(self._live.values()):
            self.stats.shut_down += 1
            session.cut("shutdown", Refused(503, "stopping", "This server is stopping.", "Start again elsewhere.", 1))
        if self._leaving:
            await asyncio.wait(set(self._leaving), timeout=grace_s)
        for task in self._leaving:
            task.cancel()
        if self._leaving:
            await asyncio.wait(set(self._leaving), timeout=grace_s)
        self.pool.shutdown(wait=False, cancel_futures=True)


def _mistake(session: Session, kind: str, seq: int) -> Refused:
    if (seq >= 0) != (session.seq >= 0):
        said = "had a seq header, this has none" if session.seq >= 0 else "had no seq header, this has one"
        return Refused(400, "seq", f"The start of this session {said}.", "Number all requests of a session, or none.")
    if 0 <= seq == session.seq:
        other = f"this is a {kind}" if kind is not session.kind else "this has another body"
        hint = "Add 1 for every new request."
        return Refused(409, "seq", f"seq {seq} was a {session.kind}; {other}.", hint, last=session.seq)
    if kind is START:
        hint = "End it first, or use a fresh id for every match."
        return Refused(409, "already_started", "A session of this id is open.", hint)
    if session.busy:
        message = f"The {session.kind} before is still being answered."
        return Refused(409, "busy", message, "Wait for each reply before the next request.")
    hint = "Repeat the last number to retry, add 1 for a new request."
    return Refused(409, "seq", f"seq is {seq}, the last was {session.seq}.", hint, last=session.seq)


def lost(why: str = "its worker died") -> Refused:
    return Refused(410, "session_lost", f"This session is lost: {why}.", "Start again.")


def _as_bytes(reply: Any, kind: str) -> bytes:
    if isinstance(reply, (bytes, bytearray, memoryview)):
        return bytes(reply)
    raise TypeError(f"{kind}() returned {type(reply).__name__}, not bytes.")
