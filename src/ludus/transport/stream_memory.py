"""Memory over a message stream: segments from workers on any machine to the learner, both of which may restart.

Workers number their messages, and the learner tracks the numbers, so that a message that is delivered twice (a reply was lost, or
a learner died before the acknowledgement) is used once.
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
from ludus.transport.message_stream import Buffer, Delivery, MessageStream
from ludus.transport.segment_codec import Compression, RejectedMessage, SegmentDecoder, SegmentEncoder
from ludus.transport.shared_memory import BlockLayout

log = logging.getLogger(__name__)

_WARN_EVERY_S = 30.0
_MAX_KINDS = 100  # separately counted kinds of rejected messages
_MAX_MISSING = 4096  # tracked missing numbers of one worker
_MAX_WORKERS = 1 << 16
_ORIGINS = 1 << 32  # rows of one worker
_PREFETCH_BYTES = 64 << 20  # maximum that is pulled at once


class StreamWriter:
    """SegmentWriter of a message stream, for one thread and one block at a time.

    `commit` tries once to send the block. If there is no room or no server, it stays here as the outgoing message, and `reserve`
    and `flush` retry with the same number. Only UsageError (access denied) is raised. `worker`: name that is unique among running
    processes. Numbers begin at 0 with every writer.
    """

    def __init__(
        self,
        stream: MessageStream,
        layout: BlockLayout,
        *,
        worker: str,
        plan: str,
        compression: Compression = "none",
        when_full: Literal["wait", "drop"] = "wait",
    ) -> None:
        self._stream, self._layout, self._when_full = stream, layout, when_full
        self._encoder = SegmentEncoder(layout, worker, plan, compression)
        self._buffer = _allocate_aligned(layout.nbytes)
        self._block = layout.views(self._buffer)
        self._block.action_mask.fill(True)
        self._reserved = False
        self._message: list[Buffer] | None = None
        self._uncertain = False  # an attempt without a reply may have succeeded
        self._seq = 0
        self._down = False
        self.pushed = self.dropped = self.failures = 0
        self.last_error = ""

    @property
    def outgoing(self) -> bool:
        """Whether a block is waiting to be sent."""
        return self._message is not None

    def reserve(self, timeout_s: float, model: str | None = None) -> Segments | None:
        """Return the block to write into, with its old content; None while the previous one cannot be sent. `model`: there is one."""
        if self._reserved:
            raise ValueError("A block was reserved before the previous one was committed or abandoned.")
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
        """Try to send the outgoing message; return whether there is none any more."""
        if self._message is None:
            return True
        try:
            pushed = self._stream.push(self._message, timeout_s)
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
        if pushed or self._uncertain:  # a number that may have arrived must not be used for another block
            self._seq += 1
        self._uncertain = False
        return True

    def _fail(self, error: ExchangeUnavailable) -> None:
        self.failures += 1
        self.last_error = error.message
        self._uncertain = True
        if not self._down:
            self._down = True
            log.warning("cannot reach the memory; one block waits until it can be sent: %s", error.message)

    def stats(self) -> MemoryStats:
        """`taken` and `released` are unknown here."""
        return MemoryStats(committed=self.pushed + self.outgoing, dropped=self.dropped, waiting=int(self.outgoing))

    def close(self) -> None:
        """Drop and count an outgoing message. The caller closes the stream."""
        if self._message is not None:
            self._message = None
            self.dropped += 1


@dataclass(frozen=True, eq=False)
class ReceivedSegments:
    segments: Segments
    worker: str
    seq: int
    version: int
    """Newest version of the weights that acted in it."""
    life: str = ""
    """Id of the writer, whose sequence numbers these are."""


@dataclass
class _WorkerProgress:
    """Sequence numbers of one worker."""

    high: int
    """Highest number that was taken."""
    missing: set[int] = field(default_factory=set)
    """Lower numbers that were not taken: with another reader, or lost."""
    held: set[int] = field(default_factory=set)
    """Taken and not released."""
    last: int = -2
    """Number that was taken last: episodes continue from one number to the next, and not over a gap."""
    origin: int = 0
    resumed: bool = False
    """Whether only missing numbers of the loaded state were taken since: more of them may still arrive."""


class StreamReader:
    """Reading half of a message stream, for one thread. Blocks are read-only views of the messages.

    `inspect` returns a reason to reject a block, or None. `prefetch`: messages to pull at once, at most 64 MB. A new reader takes
    over messages of earlier readers at once; with several readers, `reclaim_idle_s` is the time after which one counts as dead.
    """

    def __init__(
        self,
        stream: MessageStream,
        layout: BlockLayout,
        *,
        plan: str,
        inspect: Callable[[Segments], str | None],
        prefetch: int = 64,
        reclaim_idle_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._inspect, self._clock = stream, inspect, clock
        self._prefetch = max(1, min(prefetch, _PREFETCH_BYTES // layout.nbytes))
        self._decoder = SegmentDecoder(layout, plan)
        self._reclaim_idle_s = reclaim_idle_s
        self._reclaim_at = clock()
        self._arrived: deque[Delivery] = deque()
        self._held: dict[int, tuple[ReceivedSegments, str]] = {}
        self._done: list[str] = []
        self._progress: dict[tuple[str, str], _WorkerProgress] = {}
        self._origins = 0
        self._warned: dict[str, float] = {}
        self._down_since: float | None = None
        self._down_s = 0.0
        self.rejected: Counter[str] = Counter()
        self.discarded: Counter[str] = Counter()
        self.duplicates = self.lost = self.failures = self.reclaimed = 0
        """`lost`: missing numbers: used after the last checkpoint of a learner that died, lost by the server, or taken by other
        readers."""
        self.taken = self.released = 0
        self.last_error = ""
        self._try(self._reclaim)

    # -- reading

    def take(self) -> ReceivedSegments | None:
        """Return the oldest valid block that was pulled, or None; never waits."""
        while self._arrived:
            delivery = self._arrived.popleft()
            received = self._decode(delivery)
            if received is not None:
                self._held[id(received)] = received, delivery.id
                self.taken += 1
                return received
            self._mark_done(delivery.id)
        return None

    def _decode(self, delivery: Delivery) -> ReceivedSegments | None:
        try:
            header, segments = self._decoder.decode(delivery.data)
            who = (header.worker, header.life)
            progress = self._progress.get(who)
            if progress is not None and header.seq <= progress.high and header.seq not in progress.missing:
                self.duplicates += 1
                return None
            if (wrong := self._inspect(segments)) is not None:
                raise RejectedMessage(wrong, f"from {header.worker!r}")
        except RejectedMessage as rejected:
            self._reject(rejected)
            return None
        progress = self._record(who, header.seq)
        segments.origin = progress.origin * _ORIGINS + segments.origin % _ORIGINS
        return ReceivedSegments(segments, header.worker, header.seq, header.version, header.life)

    def _record(self, who: tuple[str, str], seq: int) -> _WorkerProgress:
        progress = self._progress.pop(who, None) or _WorkerProgress(high=-1)  # numbers begin at 0
        if seq in progress.missing:
            progress.missing.remove(seq)
            self.lost -= not progress.resumed
        else:
            self._skip_to(progress, seq)
        if seq != progress.last + 1:
            self._origins += 1
            progress.origin = self._origins
        progress.last = seq
        progress.held.add(seq)
        self._progress[who] = progress  # last: the first one is the least recently seen
        if len(self._progress) > _MAX_WORKERS:
            del self._progress[next(iter(self._progress))]
        return progress

    def _skip_to(self, progress: _WorkerProgress, seq: int) -> None:
        """Count missing numbers as lost, and remember some of them: a reader that died may have had them."""
        if progress.resumed:
            progress.resumed = False
            self.lost += len(progress.missing)
        self.lost += seq - progress.high - 1
        progress.missing.update(range(max(progress.high + 1, seq - _MAX_MISSING), seq))
        if len(progress.missing) > _MAX_MISSING:
            progress.missing = set(sorted(progress.missing)[-_MAX_MISSING:])
        progress.high = seq

    def _reject(self, rejected: RejectedMessage) -> None:
        kind = rejected.kind if rejected.kind in self.rejected or len(self.rejected) < _MAX_KINDS else "other"
        self.rejected[kind] += 1
        now = self._clock()
        if now - self._warned.get(kind, -_WARN_EVERY_S) >= _WARN_EVERY_S:
            self._warned[kind] = now
            log.warning("a message was rejected (%d of this kind so far): %s", self.rejected[kind], rejected)

    # -- releasing

    def release(self, received: ReceivedSegments) -> None:
        """Mark a block as used: it is not delivered again."""
        held = self._held.pop(id(received), None)
        if held is None:
            raise ValueError("A block was released without having been taken.")
        progress = self._progress.get((received.worker, received.life))
        if progress is not None:
            progress.held.discard(received.seq)
        self.released += 1
        self._mark_done(held[1])

    def discard(self, received: ReceivedSegments, why: str) -> None:
        """Release a block that was not used, such as one that is too old."""
        self.release(received)
        self.discarded[why] += 1

    def _mark_done(self, id_: str) -> None:
        self._done.append(id_)
        if len(self._done) >= self._prefetch and self._down_since is None:  # `wait` and `settle` retry after an outage
            self.settle()

    def settle(self) -> bool:
        """Acknowledge released messages. Returns False if the server cannot be reached; a later call retries."""
        if not self._done:
            return True
        if not self._try(lambda: self._stream.acknowledge(self._done)):
            return False
        self._done = []
        return True

    # -- waiting

    def wait(self, timeout_s: float) -> bool:
        """Pull messages if none are available, and wait for them. Returns whether `take` has something to return."""
        end = self._clock() + timeout_s
        reachable = self.settle()
        if reachable and self._reclaim_at <= self._clock():
            reachable = self._try(self._reclaim)
        if reachable and not self._arrived:
            self._try(lambda: self._arrived.extend(self._stream.pull(self._prefetch, max(0.0, end - self._clock()))))
        return bool(self._arrived)

    def _reclaim(self) -> None:
        """Take over messages of earlier readers: once, or periodically with several readers."""
        idle_s = self._reclaim_idle_s
        self.reclaimed += self._stream.reclaim(idle_s or 0.0)
        self._reclaim_at = float("inf") if idle_s is None else self._clock() + max(1.0, idle_s / 2)

    def _try(self, call: Callable[[], object]) -> bool:
        """Return whether the server could be reached. Outages are counted, and logged once each."""
        began = self._clock()
        try:
            call()
        except ExchangeUnavailable as error:
            self.failures += 1
            self.last_error = error.message
            if self._down_since is None:
                self._down_since = began
                log.warning("cannot reach the memory: %s", error.message)
            return False
        if self._down_since is not None:
            self._down_s += self._clock() - self._down_since
            log.info("the memory can be reached again, after %.1f s", self._clock() - self._down_since)
            self._down_since = None
        return True

    @property
    def unavailable_s(self) -> float:
        """Seconds since the server could not be reached; 0 = the last call reached it."""
        return 0.0 if self._down_since is None else self._clock() - self._down_since

    @property
    def unavailable_total_s(self) -> float:
        return self._down_s + self.unavailable_s

    # -- checkpoints

    def state(self) -> dict[str, Array]:
        """Return the processed numbers of all workers, for a checkpoint."""
        names = json.dumps(list(self._progress)).encode()
        workers = list(self._progress.values())
        unfinished = [(at, seq) for at, progress in enumerate(workers) for seq in sorted(progress.missing | progress.held)]
        return {
            "workers": np.frombuffer(names, np.uint8).copy(),
            "high": np.array([progress.high for progress in workers], np.int64),
            "open": np.array(unfinished, np.int64).reshape(-1, 2),
            "origins": np.array([self._origins], np.int64),
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Restore `state` before anything is taken. Raises Damaged."""
        try:
            names = [(str(worker), str(life)) for worker, life in json.loads(np.asarray(state["workers"], np.uint8).tobytes())]
            high = np.asarray(state["high"], np.int64).tolist()
            workers = {name: _WorkerProgress(mark, resumed=True) for name, mark in zip(names, high, strict=True)}
            for at, seq in np.asarray(state["open"], np.int64).reshape(-1, 2).tolist():
                workers[names[at]].missing.add(seq)
            origins = int(np.asarray(state["origins"]).reshape(-1)[0])
        except (LookupError, TypeError, ValueError) as error:
            raise Damaged(f"The stored message numbers of the workers are invalid: {error!r}.") from error
        self._origins = max(self._origins, origins)
        self._progress = workers

    def stats(self) -> MemoryStats:
        dropped = self.duplicates + sum(self.rejected.values()) + sum(self.discarded.values())
        return MemoryStats(self.taken + len(self._arrived), self.taken, self.released, dropped, len(self._arrived))

    def close(self) -> None:
        """Acknowledge released messages; others are delivered to the next reader. The caller closes the stream."""
        self.settle()
        self._arrived.clear()
        self._held.clear()


def _allocate_aligned(size: int, align: int = 64) -> memoryview:
    raw = np.zeros(size + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw.data[start : start + size]
