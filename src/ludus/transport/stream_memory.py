"""Memory over an exchange: segments of workers that come and go, to learners that may be away.

Workers number what they send; the learner keeps account of the numbers. A message that comes twice, because an answer was lost or
a learner died before it said that it was done, is told by its number and counts once.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ludus.core.tree import Array
from ludus.core.types import Segments
from ludus.errors import Damaged, ExchangeUnavailable
from ludus.transport.base import MemoryStats
from ludus.transport.message_stream import Buffer, Delivery, Exchange
from ludus.transport.segment_codec import Compression, Decoder, Encoder, Rejected
from ludus.transport.shared_memory import Layout

log = logging.getLogger(__name__)

_WARN_EVERY_S = 30.0
_KINDS = 100  # of rejections that are told apart
_OPEN = 4096  # numbers of one worker that were passed over and may still come
_WORKERS = 1 << 16
_ORIGINS = 1 << 32  # rows of one worker
_AHEAD_BYTES = 64 << 20  # are pulled at a time, at most


class ExchangeWriter:
    """The writing half: a SegmentWriter for the one thread that plays, one block at a time.

    `commit` tries once to hand the block over. What cannot leave, because there is no room or no server, stays here as the one
    outgoing message; `reserve` and `flush` try again with the same number. Only a refusal (UsageError) is raised.
    `worker`: a name that no other process has at the same time. The numbers begin at 0 with every writer, whose own they are.
    """

    def __init__(
        self,
        exchange: Exchange,
        layout: Layout,
        *,
        worker: str,
        plan: str,
        compression: Compression = "none",
        when_full: Literal["wait", "drop"] = "wait",
    ) -> None:
        self._exchange, self._layout, self._when_full = exchange, layout, when_full
        self._encoder = Encoder(layout, worker, plan, compression)
        self._buffer = _aligned(layout.nbytes)
        self._block = layout.views(self._buffer)
        self._block.action_mask.fill(True)
        self._reserved = False
        self._message: list[Buffer] | None = None
        self._uncertain = False  # an attempt may have succeeded without our hearing of it
        self._seq = 0
        self._down = False
        self.pushed = self.dropped = self.failures = 0
        self.last_error = ""

    @property
    def outgoing(self) -> bool:
        """Whether a block waits here for room, or for the server."""
        return self._message is not None

    def reserve(self, timeout_s: float) -> Segments | None:
        """The block to write into; None while the one before it cannot leave. What was in it before is still in it."""
        if self._reserved:
            raise ValueError("A block was reserved before the one before it was committed or abandoned.")
        if not self.flush(timeout_s):
            return None
        self._reserved = True
        self._block.finals, self._block.env_steps = 0, None
        return self._block

    def commit(self, segments: Segments) -> None:
        self._give_back(segments, "committed")
        self._layout.seal(segments, self._buffer)
        self._message = self._encoder.encode(segments, self._buffer, self._seq)
        self.flush(0)

    def abandon(self, segments: Segments) -> None:
        self._give_back(segments, "abandoned")

    def _give_back(self, segments: Segments, what: str) -> None:
        if not self._reserved or segments is not self._block:
            raise ValueError(f"A block was {what} without having been reserved.")
        self._reserved = False

    def flush(self, timeout_s: float) -> bool:
        """Whether nothing is outgoing any more."""
        if self._message is None:
            return True
        try:
            pushed = self._exchange.push(self._message, timeout_s)
        except ExchangeUnavailable as error:
            self._fail(error)
            return False
        if self._down:
            self._down = False
            log.info("the memory can be reached again")
        if not pushed and self._when_full == "wait":
            return False
        self._message = None
        if pushed:
            self.pushed += 1
        else:
            self.dropped += 1
        if pushed or self._uncertain:  # another block under a number that may have arrived would pass for the same one
            self._seq += 1
        self._uncertain = False
        return True

    def _fail(self, error: ExchangeUnavailable) -> None:
        self.failures += 1
        self.last_error = error.message
        self._uncertain = True
        if not self._down:
            self._down = True
            log.warning("the memory cannot be reached; one block waits here until it can: %s", error.message)

    def stats(self) -> MemoryStats:
        """`taken` and `released` are not known here."""
        return MemoryStats(committed=self.pushed + self.outgoing, dropped=self.dropped, waiting=int(self.outgoing))

    def close(self) -> None:
        """What is still outgoing is given up, and counted. The exchange is closed by whoever opened it."""
        if self._message is not None:
            self._message = None
            self.dropped += 1


@dataclass(frozen=True, eq=False)
class Received:
    segments: Segments
    worker: str
    seq: int
    version: int
    """Of the weights: the newest that acted in it."""
    life: str = ""
    """Of the writer: numbers of different ones have nothing to do with each other."""


@dataclass
class _Account:
    """What is known of the numbers of one worker."""

    high: int
    """The highest that was taken."""
    missing: set[int] = field(default_factory=set)
    """Lower ones that were not: another reader has them, or they are lost."""
    held: set[int] = field(default_factory=set)
    """Taken and not released."""
    last: int = -2
    """What was taken last: rows go on from one number to the next, and not over a gap."""
    origin: int = 0
    resumed: bool = False
    """Nothing was taken since the state was loaded but what was open then: the rest of that may still come."""


class ExchangeReader:
    """The reading half, for one thread. Blocks are views of the messages and cannot be written to.

    `inspect` says what is wrong with a block, or None. `prefetch`: so many messages are pulled at a time, or 64 MB of them. A new reader takes over at
    once what earlier ones had in hand; where several read at a time, `reclaim_idle_s` says after how long one is taken for dead.
    """

    def __init__(
        self,
        exchange: Exchange,
        layout: Layout,
        *,
        plan: str,
        inspect: Callable[[Segments], str | None],
        prefetch: int = 64,
        reclaim_idle_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exchange, self._inspect, self._clock = exchange, inspect, clock
        self._prefetch = max(1, min(prefetch, _AHEAD_BYTES // layout.nbytes))
        self._decoder = Decoder(layout, plan)
        self._reclaim_idle_s = reclaim_idle_s
        self._reclaim_at = clock()
        self._arrived: deque[Delivery] = deque()
        self._held: dict[int, tuple[Received, str]] = {}
        self._done: list[str] = []
        self._accounts: dict[tuple[str, str], _Account] = {}
        self._origins = 0
        self._warned: dict[str, float] = {}
        self._down_since: float | None = None
        self._down_s = 0.0
        self.rejected: Counter[str] = Counter()
        self.discarded: Counter[str] = Counter()
        self.duplicates = self.lost = self.failures = self.reclaimed = 0
        """`lost`: numbers that were passed over. What was learned after the last checkpoint of a learner that died is among them, and
        what a server lost; where several read, also what the others have."""
        self.taken = self.released = 0
        self.last_error = ""
        self._reach(self._reclaim)

    # -- reading

    def take(self) -> Received | None:
        """The oldest that is at hand and good; never waits."""
        while self._arrived:
            delivery = self._arrived.popleft()
            received = self._opened(delivery)
            if received is not None:
                self._held[id(received)] = received, delivery.id
                self.taken += 1
                return received
            self._settled(delivery.id)
        return None

    def _opened(self, delivery: Delivery) -> Received | None:
        try:
            header, segments = self._decoder.decode(delivery.data)
            who = (header.worker, header.life)
            account = self._accounts.get(who)
            if account is not None and header.seq <= account.high and header.seq not in account.missing:
                self.duplicates += 1
                return None
            if (wrong := self._inspect(segments)) is not None:
                raise Rejected(wrong, f"from {header.worker!r}")
        except Rejected as rejected:
            self._reject(rejected)
            return None
        account = self._enter(who, header.seq)
        segments.origin = account.origin * _ORIGINS + segments.origin % _ORIGINS
        return Received(segments, header.worker, header.seq, header.version, header.life)

    def _enter(self, who: tuple[str, str], seq: int) -> _Account:
        account = self._accounts.pop(who, None) or _Account(
            high=-1
        )  # a life begins at 0: what is missing was learned by one that died
        if seq in account.missing:
            account.missing.remove(seq)
            self.lost -= not account.resumed
        else:
            self._pass_over(account, seq)
        if seq != account.last + 1:
            self._origins += 1
            account.origin = self._origins
        account.last = seq
        account.held.add(seq)
        self._accounts[who] = account  # at the end: the first is the one that was silent for longest
        if len(self._accounts) > _WORKERS:
            del self._accounts[next(iter(self._accounts))]
        return account

    def _pass_over(self, account: _Account, seq: int) -> None:
        """Count what never came, and remember it for a while: it may have been with a reader that died."""
        if account.resumed:
            account.resumed = False
            self.lost += len(account.missing)
        self.lost += seq - account.high - 1
        account.missing.update(range(max(account.high + 1, seq - _OPEN), seq))
        if len(account.missing) > _OPEN:
            account.missing = set(sorted(account.missing)[-_OPEN:])
        account.high = seq

    def _reject(self, rejected: Rejected) -> None:
        kind = rejected.kind if rejected.kind in self.rejected or len(self.rejected) < _KINDS else "other"
        self.rejected[kind] += 1
        now = self._clock()
        if now - self._warned.get(kind, -_WARN_EVERY_S) >= _WARN_EVERY_S:
            self._warned[kind] = now
            log.warning("a message was rejected (%d of this kind so far): %s", self.rejected[kind], rejected)

    # -- giving back

    def release(self, received: Received) -> None:
        """Learned from, or stored: it does not come again."""
        held = self._held.pop(id(received), None)
        if held is None:
            raise ValueError("A block was released without having been taken.")
        account = self._accounts.get((received.worker, received.life))
        if account is not None:
            account.held.discard(received.seq)
        self.released += 1
        self._settled(held[1])

    def discard(self, received: Received, why: str) -> None:
        """Not learned from (too old, say), and not to come again."""
        self.release(received)
        self.discarded[why] += 1

    def _settled(self, id_: str) -> None:
        self._done.append(id_)
        if len(self._done) >= self._prefetch and self._down_since is None:  # who waits, or settles, tries again
            self.settle()

    def settle(self) -> bool:
        """Tell the exchange what is done with. False: it could not be told now; it will be."""
        if not self._done:
            return True
        if not self._reach(lambda: self._exchange.acknowledge(self._done)):
            return False
        self._done = []
        return True

    # -- waiting

    def wait(self, timeout_s: float) -> bool:
        """Get more if nothing is at hand; waits while there is nothing. Whether something is at hand now."""
        end = self._clock() + timeout_s
        there = self.settle()
        if there and self._reclaim_at <= self._clock():
            there = self._reach(self._reclaim)
        if there and not self._arrived:
            self._reach(lambda: self._arrived.extend(self._exchange.pull(self._prefetch, max(0.0, end - self._clock()))))
        return bool(self._arrived)

    def _reclaim(self) -> None:
        """What earlier readers had in hand; once, unless several read at a time."""
        idle_s = self._reclaim_idle_s
        self.reclaimed += self._exchange.reclaim(idle_s or 0.0)
        self._reclaim_at = float("inf") if idle_s is None else self._clock() + max(1.0, idle_s / 2)

    def _reach(self, call: Callable[[], object]) -> bool:
        """Whether the server could be reached. Outages are counted, and told once each."""
        began = self._clock()
        try:
            call()
        except ExchangeUnavailable as error:
            self.failures += 1
            self.last_error = error.message
            if self._down_since is None:
                self._down_since = began
                log.warning("the memory cannot be reached: %s", error.message)
            return False
        if self._down_since is not None:
            self._down_s += self._clock() - self._down_since
            log.info("the memory can be reached again, after %.1f s", self._clock() - self._down_since)
            self._down_since = None
        return True

    @property
    def unavailable_s(self) -> float:
        """For how long the server has not been reached; 0: it was, when last tried."""
        return 0.0 if self._down_since is None else self._clock() - self._down_since

    @property
    def unavailable_total_s(self) -> float:
        return self._down_s + self.unavailable_s

    # -- what a checkpoint keeps

    def state(self) -> dict[str, Array]:
        """Which numbers of which workers are done with."""
        names = json.dumps(list(self._accounts)).encode()
        accounts = list(self._accounts.values())
        unfinished = [(at, seq) for at, account in enumerate(accounts) for seq in sorted(account.missing | account.held)]
        return {
            "workers": np.frombuffer(names, np.uint8).copy(),
            "high": np.array([account.high for account in accounts], np.int64),
            "open": np.array(unfinished, np.int64).reshape(-1, 2),
            "origins": np.array([self._origins], np.int64),
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Before anything is taken. Raises Damaged."""
        try:
            names = [(str(worker), str(life)) for worker, life in json.loads(np.asarray(state["workers"], np.uint8).tobytes())]
            high = np.asarray(state["high"], np.int64).tolist()
            accounts = {name: _Account(mark, resumed=True) for name, mark in zip(names, high, strict=True)}
            for at, seq in np.asarray(state["open"], np.int64).reshape(-1, 2).tolist():
                accounts[names[at]].missing.add(seq)
            origins = int(np.asarray(state["origins"]).reshape(-1)[0])
        except (LookupError, TypeError, ValueError) as error:
            raise Damaged(f"The numbers of the workers cannot be read: {error!r}.") from error
        self._origins = max(self._origins, origins)
        self._accounts = accounts

    def stats(self) -> MemoryStats:
        dropped = self.duplicates + sum(self.rejected.values()) + sum(self.discarded.values())
        return MemoryStats(self.taken + len(self._arrived), self.taken, self.released, dropped, len(self._arrived))

    def close(self) -> None:
        """What was taken and not released comes again, to the next reader. The exchange is closed by whoever opened it."""
        self.settle()
        self._arrived.clear()
        self._held.clear()


def _aligned(size: int, align: int = 64) -> memoryview:
    raw = np.zeros(size + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw.data[start : start + size]
