"""The learner's side of a fleet: segments from whoever sends them, weights and news to whoever asks.

    exchange ──▶ reader ──▶ batches ──▶ trainer ──new version──▶ press (a thread) ──▶ store, then the bulletin

Workers come and go by themselves; here they are only counted. Where sampling and learning take turns, a batch is made of
segments of the newest version alone, and the bulletin says how many of them each worker is to make.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ludus.buffers.block_batches import allocate_batch
from ludus.buffers.collate import put_rows
from ludus.core.backoff import Backoff
from ludus.core.tree import Array
from ludus.core.types import Segments
from ludus.distributed.redis.messages import (
    BULLETIN,
    CHANNEL,
    END,
    ORDERS,
    PRESENCE,
    WEIGHTS,
    Bulletin,
    Orders,
    Presence,
    weights_key,
)
from ludus.distributed.redis.worker import BEAT_S
from ludus.distributed.sampling_pool import NOTES, Window
from ludus.errors import (
    AlreadyExists,
    Damaged,
    ExchangeUnavailable,
    Fenced,
    LudusError,
    NotFound,
    StartTimeout,
    StoreUnavailable,
)
from ludus.models.weights import serialization
from ludus.storage.base import Store
from ludus.transport.message_stream import MessageStream, open_message_stream
from ludus.transport.shared_memory import BlockLayout
from ludus.transport.stream_memory import ReceivedSegments, StreamReader

log = logging.getLogger(__name__)

SILENT_S = 5 * BEAT_S
"""A worker that shows no sign of life for so long is counted as lost."""

_WAIT_S = 0.1
_LOOK_S = 1.0
_AGAIN_S = 1.0
_MOST_AGAIN_S = 15.0
_KEPT_WEIGHTS = 4
_SLOW = 3.0  # times what a batch usually takes, without a segment: then workers are asked for more than their share
_SOON_S, _FIRST_S = 0.5, 2.0
_LAST_WORD_S = 10.0
_SAY_EVERY_S, _SAY_FIRST_S = 30.0, 10.0
_ORDERS_S = 10.0
_HOME_S = 3.0
UNREACHED_S = 300.0
"""A learner that has never reached its memory gives up after this time."""

_REMEMBERED = 4096  # workers that left, whose counts come back with them

SILENT = "has fallen silent"
_COUNTED = (*NOTES, "dropped")

TOO_OLD, UNMADE = "too old", "of a version that was not made"

Announce = Callable[[str], None]


class Ages:
    """How many updates ago a version was made, over restarts too: numbers jump there, and weights do not."""

    def __init__(self, first: int, resumed: int | None) -> None:
        """`first`: the version with which this learner began; `resumed`: what the same weights were called before."""
        self.newest = self._first = first
        self._resumed = resumed

    def __call__(self, version: int) -> int:
        if version >= self._first:
            return self.newest - version
        if self._resumed is None:
            return self.newest
        return self.newest - self._first + abs(self._resumed - version)  # of a future that was lost, too


class FleetBatches:
    """What a trainer takes: so many segments of equal size, copied into a block that is used again.

    They are acknowledged when the batch is released: whoever is killed before that gets them again.
    """

    def __init__(self, reader: StreamReader, blocks: int, age: Ages, max_age: int | None, is_ours: Callable[[], bool]) -> None:
        """`is_ours`: asked when there are segments of a version that is not made yet. Raises Fenced if another learner has made it;
        False: it cannot be known now."""
        self._reader, self._blocks, self._age, self._max_age = reader, blocks, age, max_age
        self._is_ours = is_ours
        self._doubtful: list[ReceivedSegments] = []
        self._batch: Segments | None = None
        self._held: list[ReceivedSegments] = []
        self._taken = False

    @property
    def waiting(self) -> int:
        return len(self._held)

    @property
    def blocks(self) -> int:
        return self._blocks

    def ready(self) -> bool:
        """Whether `take` would find a batch. Copies what has come."""
        while not self._taken and len(self._held) < self._blocks:
            received = self._reader.take()
            if received is None:
                return False
            age = self._age(received.version)
            if age < 0:
                self._doubt(received)
            elif self._max_age is not None and age > self._max_age:
                self._reader.discard(received, TOO_OLD)
            else:
                self._put(received)
        return not self._taken

    def _doubt(self, received: ReceivedSegments) -> None:
        """A version that this learner did not make: a lie, or this learner is not the one that learns any more."""
        self._doubtful.append(received)
        if self._is_ours():
            for lie in self._doubtful:
                self._reader.discard(lie, UNMADE)
            self._doubtful.clear()

    def _put(self, received: ReceivedSegments) -> None:
        if self._batch is None:
            self._batch = allocate_batch(received.segments, self._blocks)
        if not self._held:
            self._batch.finals = 0
        put_rows(self._batch, received.segments, len(self._held) * received.segments.rows)
        self._held.append(received)

    def take(self, timeout_s: float = 0.0) -> Segments | None:
        """Never waits: the fleet does."""
        if self._taken:
            raise ValueError("A batch was taken before the one before it was released.")
        if not self.ready():
            return None
        assert self._batch is not None
        self._taken = True
        parts = [received.segments for received in self._held]
        self._batch.episode_return = np.concatenate([part.episode_return for part in parts])
        self._batch.episode_length = np.concatenate([part.episode_length for part in parts])
        return self._batch

    def release(self, segments: Segments) -> None:
        if not self._taken or segments is not self._batch:
            raise ValueError("A batch was released without having been taken.")
        self._taken = False
        for received in self._held:
            self._reader.release(received)
        self._held.clear()
        self._reader.settle()


@dataclass
class _Worker:
    presence: Presence
    heard_at: float


class Fleet:
    """All workers of a run, wherever they are. `step()` waits for a batch, or a moment, and sees who is there."""

    def __init__(
        self,
        memory: str,
        store: Store,
        orders: Orders,
        incarnation: int,
        *,
        inspect: Callable[[Segments], str | None],
        layout: BlockLayout,
        blocks: int,
        max_age: int | None,
        resumed: int | None,
        latest: Callable[[], tuple[int, Mapping[str, Array]]],
        finished: Callable[[], bool],
        confirm: Callable[[], None],
        timesteps: Callable[[int], int] = lambda version: 0,
        announce: Announce | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timesteps`: of training, when that version is made. `latest`: the newest version and its weights; `resumed`: what these were called in the checkpoint they came from;
        `finished`: asked when it is closed, whether the workers may go home; `confirm` raises Fenced when the run is another's."""
        self._orders, self._incarnation, self._finished = orders, incarnation, finished
        self._announce, self._clock, self._timesteps = announce, clock, timesteps
        self._workers: dict[str, _Worker] = {}
        self._refused: set[str] = set()
        self.joined = self.left = self.silent = 0
        self._gone_by: dict[str, Presence] = {}
        self._past: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)
        self._window = Window()
        self._waited_s = 0.0
        self._created_at, self._unreached = clock(), "it was not tried yet"
        self._looked_at = -_LOOK_S
        self._status: dict[str, Any] = {"nodes": [], "workers": []}
        self._times: deque[float] = deque(maxlen=16)
        self._said_at = clock() - _SAY_EVERY_S + _SAY_FIRST_S
        version, weights = latest()
        self._age = Ages(version, resumed)
        self._exchange = open_message_stream(memory, orders.channel, orders.room)
        self._press: _Press | None = None
        self._store, self._confirm, self._ordered_at = store, confirm, clock()
        try:
            confirm()
            store.put(ORDERS, orders.encode())
            store.delete(END)
            self._press = _Press(open_message_stream(memory, orders.channel, orders.room), store)
            self._share = self._fair_share(blocks)
            self._begun_at = self._asked_at = clock()
            self._here = 0
            self.publish(version, weights)
            with contextlib.suppress(ExchangeUnavailable):  # what a learner that died had in hand; of one that lives yet, later
                self._exchange.reclaim(0)
            self._reader = StreamReader(self._exchange, layout, plan=orders.fingerprint, inspect=inspect, reclaim_idle_s=SILENT_S)
            self.batches = FleetBatches(self._reader, blocks, self._age, max_age, self._is_ours)
        except BaseException:
            self.close()
            raise

    # -- for the program

    def step(self) -> bool:
        if self._clock() - self._looked_at >= _LOOK_S:
            self._look()  # before anything is pulled: whoever slept for long may not be the one to pull any more
        began = self._clock()
        if not self.batches.ready():
            self._reader.wait(_WAIT_S)
            self._waited_s += self._clock() - began
        if self._orders.in_turn and not self.batches.ready():
            self._ask_for_more()
        return True

    def publish(self, version: int, weights: Mapping[str, Array]) -> None:
        """New weights for everyone. Does not wait until they are out."""
        now = self._clock()
        if version != self._age.newest:
            self._times.append(now - self._begun_at)
        self._age.newest, self._begun_at, self._asked_at, self._here = version, now, now, 0
        if hasattr(self, "batches"):
            self._share = self._fair_share(self.batches.blocks)
        assert self._press is not None
        self._press.publish(self._bulletin(), serialization.encode_weights(weights))

    def _bulletin(self) -> Bulletin:
        version = self._age.newest
        return Bulletin(self._incarnation, version, self._share, self._orders.fingerprint, self._timesteps(version))

    def _fair_share(self, blocks: int) -> int:
        return math.ceil(blocks / max(1, self._able()))

    def _able(self) -> int:
        return sum(worker.presence.state not in ("refused", "failed") for worker in self._workers.values())

    def _ask_for_more(self) -> None:
        """Somebody who was counted on is slow or gone, or a segment was lost: there is to be more of it."""
        now = self._clock()
        if self.batches.waiting != self._here:
            self._here, self._asked_at = self.batches.waiting, now
        patience = max(_SLOW * float(np.median(self._times)), _SOON_S) if self._times else _FIRST_S
        if now - self._asked_at < patience or not self._able():
            return
        self._share += 1
        self._asked_at = now
        assert self._press is not None
        self._press.amend(self._bulletin())

    # -- who is there

    def _look(self) -> None:
        self._looked_at = self._clock()
        assert self._press is not None
        self._press.check()
        try:
            notices = self._exchange.posted(PRESENCE)
            newest = self._exchange.read(BULLETIN)
        except ExchangeUnavailable as error:
            if self._unreached:
                self._unreached = error.message
                if self._looked_at - self._created_at >= UNREACHED_S:
                    raise StartTimeout(
                        f"The memory was never reached within {UNREACHED_S:g} s: {error.message}", error.hint
                    ) from error
            self._say_now_and_then(f"cannot connect to Redis; retrying: {error.message}")
            for worker in self._workers.values():  # nobody can be heard now
                worker.heard_at = self._looked_at
            return
        self._unreached = ""
        self._check_owner(newest)
        if newest is None:  # a server that has lost everything, too
            self._press.amend(self._bulletin())
        if self._looked_at - self._ordered_at >= _ORDERS_S:
            self._keep_orders()
        for name, data in notices.items():
            try:
                self._hear(name.removeprefix(PRESENCE), Presence.decode(data))
            except Damaged:
                self._erase(name.removeprefix(PRESENCE))
        for name, worker in list(self._workers.items()):
            if f"{PRESENCE}{name}" not in notices:
                self._gone(name, worker, "left")
            elif self._looked_at - worker.heard_at > SILENT_S:
                self._gone(name, worker, SILENT)
        if not self._workers and not self.batches.waiting:
            self._say_now_and_then("no worker is here: ludus fleet worker --memory … --store … brings one")
        self._status = self._seen_now()

    def _keep_orders(self) -> None:
        """A learner that was cut off while it began may have written its own over ours."""
        self._ordered_at = self._looked_at
        with contextlib.suppress(StoreUnavailable, NotFound):
            if self._store.get(ORDERS) != self._orders.encode():
                self._confirm()
                self._store.put(ORDERS, self._orders.encode())

    def _is_ours(self) -> bool:
        try:
            self._check_owner(self._exchange.read(BULLETIN))
        except ExchangeUnavailable:
            return False
        return True

    def _check_owner(self, notice: bytes | None) -> None:
        if notice is None:
            return
        with contextlib.suppress(Damaged):
            newest = Bulletin.decode(notice).incarnation
            if newest > self._incarnation:
                raise Fenced(
                    f"Another learner has taken this run over (incarnation {newest}, this is {self._incarnation}).",
                    "One run has one learner: stop the other, or leave this one stopped.",
                )

    def _hear(self, name: str, presence: Presence) -> None:
        known = self._workers.get(name)
        if presence.state == "refused":
            if name not in self._refused:
                self._refused.add(name)
                log.warning("the worker %s does not fit: %s", name, presence.why)
            self._erase(name)
            return
        if known is None:
            self.joined += self._gone_by.pop(name, None) is None  # else it was only not heard for a while
            log.info("worker %s joined (%s, pid %d)", name, presence.host, presence.pid)
            self._workers[name] = _Worker(presence, self._looked_at)
        elif presence.beat != known.presence.beat:
            self._workers[name] = _Worker(presence, self._looked_at)
        if presence.state == "failed":
            log.warning("the worker %s failed: %s", name, presence.why)
            self._gone(name, self._workers[name], "failed")

    def _gone(self, name: str, worker: _Worker, how: str) -> None:
        log.info("worker %s %s after %d segments", name, how, worker.presence.blocks)
        del self._workers[name]
        self.left += 1
        self.silent += how == SILENT
        self._gone_by[name] = worker.presence
        if len(self._gone_by) > _REMEMBERED:
            oldest = self._gone_by.pop(next(iter(self._gone_by)))
            for note in _COUNTED:
                self._past[note] += float(getattr(oldest, note))
        if how != "left":
            self._erase(name)

    def _erase(self, name: str) -> None:
        with contextlib.suppress(ExchangeUnavailable):
            self._exchange.erase(f"{PRESENCE}{name}")

    def _say_now_and_then(self, sentence: str) -> None:
        if self._clock() - self._said_at >= _SAY_EVERY_S:
            self._said_at = self._clock()
            log.warning("%s", sentence)
            if self._announce is not None:
                self._announce(sentence)

    # -- what there is to say

    def _totals(self) -> dict[str, float]:
        totals = dict(self._past)
        for presence in (*self._gone_by.values(), *(worker.presence for worker in self._workers.values())):
            for note in _COUNTED:
                totals[note] += float(getattr(presence, note))
        return totals

    def metrics(self) -> dict[str, float]:
        totals = self._totals()
        seconds, new = self._window.since(self._clock(), totals | {"waited_s": self._waited_s})
        spent = sum(new[name] for name in ("environment_s", "policy_s", "blocked_s", "weights_wait_s"))
        everyone = max(
            max(seconds, 1e-9) * max(1, len(self._workers)), spent
        )  # counters come with whole segments: shares add up to 1 at most
        reader = self._reader
        assert self._press is not None
        return {
            "sampler/workers": float(len(self._workers)),
            "sampler/fps": new["steps"] / max(seconds, 1e-9),
            "sampler/env_share": new["environment_s"] / everyone,
            "sampler/policy_share": new["policy_s"] / everyone,
            "sampler/blocked_share": new["blocked_s"] / everyone,
            "sampler/weights_wait_share": new["weights_wait_s"] / everyone,
            "sampler/env_restarts": totals["env_restarts"],
            "learner/wait_share": min(1.0, new["waited_s"] / max(seconds, 1e-9)),
            "fleet/joined": float(self.joined),
            "fleet/left": float(self.left),
            "fleet/silent": float(self.silent),
            "fleet/refused": float(len(self._refused)),
            "fleet/duplicates": float(reader.duplicates),
            "fleet/lost": float(reader.lost),
            "fleet/rejected": float(sum(reader.rejected.values())),
            "fleet/discarded": float(sum(reader.discarded.values())),
            "fleet/dropped": totals["dropped"],
            "fleet/published": float(self._press.published),
            "fleet/publish_failures": float(self._press.failures),
            "fleet/unavailable_s": float(reader.unavailable_total_s),
            "memory/waiting": float(self.batches.waiting),
        }

    def has_sampled(self) -> bool:
        return self._totals()["steps"] > 0 or self.batches.waiting > 0

    def awaited(self) -> str:
        if self._unreached:
            return f"the memory, which was never reached: {self._unreached.rstrip('.')}"
        if not self._workers:
            return "a worker: none has joined (ludus fleet worker --memory … --store … starts one)"
        states = ", ".join(f"{name} is {worker.presence.state}" for name, worker in sorted(self._workers.items()))
        return f"the first step of its workers: {states}"

    def unlearned_steps(self) -> int:
        return 0  # what is not acknowledged stays in the memory, for the next learner of this run

    def status(self) -> dict[str, Any]:
        """Who samples where and how, as plain values. May be called by any thread: it is what was last seen."""
        return self._status

    def _seen_now(self) -> dict[str, Any]:
        workers = [
            {
                "worker": name,
                "node": worker.presence.host,
                "state": worker.presence.state,
                "pid": worker.presence.pid,
                "restarts": 0,
                "error": worker.presence.why,
                **{note: getattr(worker.presence, note) for note in NOTES},
            }
            for name, worker in sorted(self._workers.items())
        ]
        return {"nodes": [], "workers": workers}

    def state(self) -> dict[str, Array]:
        """How far the segments of each worker have been learned from."""
        return self._reader.state()

    def load_state(self, state: dict[str, Array]) -> None:
        if "workers" in state:  # else the run was sampled in another way until now
            self._reader.load_state(state)

    def close(self) -> None:
        if self._press is not None:
            self._press.close()
            self._press = None
            if self._finished():
                self._send_home()
        self._exchange.close()

    def _send_home(self) -> None:
        """The run is over: say so where workers look, and leave nothing in the exchange when they are gone."""
        with contextlib.suppress(LudusError):
            self._confirm()
            self._store.put(END, b"")
            for name in self._store.list(WEIGHTS):
                self._store.delete(f"{WEIGHTS}/{name}")
        try:
            over = replace(self._bulletin(), over=True)
            if not self._exchange.post(BULLETIN, over.encode(), self._incarnation):
                return
            deadline = time.monotonic() + _HOME_S
            while self._exchange.posted(PRESENCE) and time.monotonic() < deadline:
                time.sleep(_WAIT_S)
            self._exchange.drop()
        except LudusError as error:
            log.warning("could not notify the workers that the run is over; they will see it in the store: %s", error)


class _Press:
    """Brings new weights out, in a thread: the newest ones, whatever happened to those before."""

    def __init__(self, exchange: MessageStream, store: Store) -> None:
        self._exchange, self._store = exchange, store
        self._changed = threading.Condition()
        self._next: tuple[Bulletin, bytes | None] | None = None
        self._closing = False
        self._error: LudusError | None = None
        self._kept: deque[int] = deque()
        self._said = False
        self.published = self.failures = 0
        self._thread = threading.Thread(target=self._work, name="press", daemon=True)
        self._thread.start()

    def publish(self, bulletin: Bulletin, weights: bytes) -> None:
        with self._changed:
            self._next = bulletin, weights
            self._changed.notify_all()

    def amend(self, bulletin: Bulletin) -> None:
        """The same version with another share, unless the version itself is still on its way."""
        with self._changed:
            weights = self._next[1] if self._next is not None else None
            self._next = bulletin, weights
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what ended the thread."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """What is on its way is finished, if that does not take long."""
        with self._changed:
            self._closing, self._next = True, None
            self._changed.notify_all()
        self._thread.join(_LAST_WORD_S)
        if not self._thread.is_alive():
            self._exchange.close()

    # -- the thread

    def _work(self) -> None:
        backoff = Backoff(_AGAIN_S, _MOST_AGAIN_S)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closing)
                if self._next is None:
                    return
                bulletin, weights = self._next
            try:
                self._bring(bulletin, weights)
            except (StoreUnavailable, ExchangeUnavailable) as error:
                self.failures += 1
                if not self._said:
                    log.warning("new weights do not get out: %s; workers go on with those they have", error)
                self._said = True
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, backoff.next_delay())
                continue
            except LudusError as error:
                self._error = error
                return
            except Exception as error:  # a bug must end the learner, not leave its workers without news
                log.exception("the press failed")
                self._error = LudusError(f"{type(error).__name__}: {error}")
                return
            if self._said:
                log.warning("new weights get out again")
            self._said = False
            backoff.reset()
            with self._changed:
                if self._next is not None and self._next[0] is bulletin:
                    self._next = None

    def _bring(self, bulletin: Bulletin, weights: bytes | None) -> None:
        if weights is not None and bulletin.version not in self._kept:
            self._store.put(weights_key(bulletin.version), weights)
            self._kept.append(bulletin.version)
        if not self._exchange.post(BULLETIN, bulletin.encode(), bulletin.incarnation):
            raise Fenced(
                f"Another learner has taken this run over (this is incarnation {bulletin.incarnation}).",
                "One run has one learner: stop the other, or leave this one stopped.",
            )
        if weights is not None:
            self.published += 1
            if self.published == 1:
                self._forget_earlier()
            self._tidy()

    def _tidy(self) -> None:
        with contextlib.suppress(LudusError):
            while len(self._kept) > _KEPT_WEIGHTS:
                self._store.delete(weights_key(self._kept.popleft()))

    def _forget_earlier(self) -> None:
        """Weights that earlier learners left behind; never those of a later one."""
        with contextlib.suppress(LudusError):
            for name in self._store.list(WEIGHTS):
                number = name.split(".")[0]
                if number.isdigit() and int(number) < min(self._kept):
                    self._store.delete(f"{WEIGHTS}/{name}")


def channel_of(store: Store, new: str | None = None) -> str:
    """The channel of a run: the same for all of its learners, whoever was first. Without `new`: raises NotFound if it has none."""
    if new is not None:
        with contextlib.suppress(AlreadyExists):
            store.put(CHANNEL, new.encode(), overwrite=False)
    return store.get(CHANNEL).decode("ascii", "replace")
