"""The learner's side of a fleet: segments from workers, weights and notices to workers.

    message stream ──▶ reader ──▶ batches ──▶ trainer ──new version──▶ publisher (a thread) ──▶ store, then the notice

Workers join and leave on their own; the learner only counts them. If sampling and learning alternate, a batch has only segments
of the newest version, and the notice contains the number of segments that each worker makes (its share).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ludus.buffers.block_batches import allocate_batch
from ludus.buffers.collate import copy_rows
from ludus.core.tree import Array
from ludus.core.types import Segments
from ludus.distributed.redis import roster
from ludus.distributed.redis.messages import CHANNEL, END, NOTICE, PRESENCE, SPEC, WEIGHTS, WeightsNotice, WorkerSpec
from ludus.distributed.redis.publisher import WeightsPublisher
from ludus.distributed.redis.roster import WorkerRoster
from ludus.distributed.sampling_pool import RateWindow
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
from ludus.transport.message_stream import open_message_stream
from ludus.transport.shared_memory import BlockLayout
from ludus.transport.stream_memory import ReceivedSegments, StreamReader

log = logging.getLogger(__name__)

_WAIT_S = 0.1
_UPDATE_S = 1.0
_SLOW_FACTOR = 3.0  # without a segment for this multiple of the usual time of a batch, the share is raised
_MIN_SLOW_S, _FIRST_SLOW_S = 0.5, 2.0
_ANNOUNCE_EVERY_S, _ANNOUNCE_FIRST_S = 30.0, 10.0
_CHECK_SPEC_S = 10.0
_LEAVE_S = 3.0
UNREACHED_S = 300.0
"""A learner that has never reached its message stream fails after this time."""

TOO_OLD, UNMADE = "too old", "of a version that was not made"

Announce = Callable[[str], None]


class VersionAges:
    """Number of updates since a version was made, also across restarts, where version numbers jump and weights do not."""

    def __init__(self, first: int, resumed: int | None) -> None:
        """`first`: the first version of this learner; `resumed`: the number of the same weights in the checkpoint."""
        self.newest = self._first = first
        self._resumed = resumed

    def __call__(self, version: int) -> int:
        if version >= self._first:
            return self.newest - version
        if self._resumed is None:
            return self.newest
        return self.newest - self._first + abs(self._resumed - version)  # also for versions after the checkpoint, which are lost


@dataclass(frozen=True)
class BatchSettings:
    """What a batch consists of."""

    layout: BlockLayout
    blocks: int
    """Number of blocks in a batch."""
    max_age: int | None
    """Older blocks, in updates, are discarded."""
    inspect: Callable[[Segments], str | None]
    """Returns what is wrong with received segments."""


@dataclass(frozen=True)
class PublishedWeights:
    """The weights that the learner publishes."""

    latest: Callable[[], tuple[int, Mapping[str, Array]]]
    """The newest version and its weights."""
    resumed: int | None = None
    """The version of the first weights in the checkpoint they came from."""
    timesteps: Callable[[int], int] = lambda version: 0
    """Timesteps of training at a version."""


@dataclass(frozen=True)
class FleetRun:
    """The run and this learner's right to write to it."""

    store: Store
    incarnation: int
    is_finished: Callable[[], bool]
    """Called by `close`: whether the workers are to end as well."""
    confirm: Callable[[], None]
    """Raises Fenced when another learner has taken over the run."""


class FleetBatches:
    """Batches for a trainer: a fixed number of segments of equal size, copied into a block that is reused.

    Segments are acknowledged when the batch is released: if the learner is killed before, its successor receives them again.
    """

    def __init__(self, reader: StreamReader, settings: BatchSettings, age: VersionAges, is_owner: Callable[[], bool]) -> None:
        """`is_owner` is called for segments of a version that this learner has not made. It raises Fenced if another learner has
        taken over the run, and returns False if that cannot be determined now."""
        self._reader, self.blocks, self._age, self._max_age = reader, settings.blocks, age, settings.max_age
        self._is_owner = is_owner
        self._unknown: list[ReceivedSegments] = []
        self._batch: Segments | None = None
        self._held: list[ReceivedSegments] = []
        self._taken = False

    @property
    def waiting(self) -> int:
        return len(self._held)

    def ready(self) -> bool:
        """Return whether `take` would return a batch. Copies what has arrived."""
        while not self._taken and len(self._held) < self.blocks:
            received = self._reader.take()
            if received is None:
                return False
            age = self._age(received.version)
            if age < 0:
                self._check_unknown_version(received)
            elif self._max_age is not None and age > self._max_age:
                self._reader.discard(received, TOO_OLD)
            else:
                self._add(received)
        return not self._taken

    def _check_unknown_version(self, received: ReceivedSegments) -> None:
        """Discard segments of a version that this learner did not make, once it is certain that it still owns the run."""
        self._unknown.append(received)
        if self._is_owner():
            for wrong in self._unknown:
                self._reader.discard(wrong, UNMADE)
            self._unknown.clear()

    def _add(self, received: ReceivedSegments) -> None:
        if self._batch is None:
            self._batch = allocate_batch(received.segments, self.blocks)
        if not self._held:
            self._batch.finals = 0
        copy_rows(self._batch, received.segments, len(self._held) * received.segments.rows)
        self._held.append(received)

    def take(self, timeout_s: float = 0.0) -> Segments | None:
        """Never waits: `RedisFleet.step` does."""
        if self._taken:
            raise ValueError("A batch was taken before the one before it was released.")
        if not self.ready():
            return None
        assert self._batch is not None
        self._taken = True
        parts = [received.segments for received in self._held]
        self._batch.episode_return = np.concatenate([part.episode_return for part in parts])
        self._batch.episode_length = np.concatenate([part.episode_length for part in parts])
        counted = [part.env_steps for part in parts if part.env_steps is not None]
        self._batch.env_steps = sum(counted) if counted else None
        return self._batch

    def release(self, segments: Segments) -> None:
        if not self._taken or segments is not self._batch:
            raise ValueError("A batch was released without having been taken.")
        self._taken = False
        for received in self._held:
            self._reader.release(received)
        self._held.clear()
        self._reader.settle()


class _Share:
    """Number of segments that each worker makes with a version, if sampling and learning alternate."""

    def __init__(self, blocks: int, now: float) -> None:
        self._blocks = blocks
        self._batch_times: deque[float] = deque(maxlen=16)
        self._began_at = self._progress_at = now
        self._waiting = 0
        self.value = blocks

    def begin(self, workers: int, now: float, *, is_new_version: bool) -> None:
        """Divide the blocks of the next batch among the workers."""
        if is_new_version:
            self._batch_times.append(now - self._began_at)
        self._began_at = self._progress_at = now
        self._waiting = 0
        self.value = math.ceil(self._blocks / max(1, workers))

    def raise_if_slow(self, workers: int, waiting: int, now: float) -> bool:
        """Raise the share when a worker is slow or gone, or a segment was lost; returns whether it was raised."""
        if waiting != self._waiting:
            self._waiting, self._progress_at = waiting, now
        times = self._batch_times
        limit_s = max(_SLOW_FACTOR * float(np.median(times)), _MIN_SLOW_S) if times else _FIRST_SLOW_S
        if now - self._progress_at < limit_s or not workers:
            return False
        self.value += 1
        self._progress_at = now
        return True


class RedisFleet:
    """All workers of a run, on any machine. `step` waits for a batch, or for _WAIT_S, and updates the list of workers."""

    def __init__(
        self,
        memory: str,
        spec: WorkerSpec,
        run: FleetRun,
        weights: PublishedWeights,
        settings: BatchSettings,
        *,
        announce: Announce | None = None,
        more_metrics: Callable[[], dict[str, float]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory`: URL of the message stream. `more_metrics`: what is reported besides."""
        self._more_metrics = more_metrics
        self._spec, self._run, self._weights = spec, run, weights
        self._announce, self._clock = announce, clock
        self._roster = WorkerRoster(self._erase_presence)
        self._window = RateWindow()
        self._waited_s = 0.0
        self._created_at, self._unreached = clock(), "it was not tried yet"
        self._updated_at = -_UPDATE_S
        self._status: dict[str, Any] = {"nodes": [], "workers": []}
        self._announced_at = clock() - _ANNOUNCE_EVERY_S + _ANNOUNCE_FIRST_S
        version, newest = weights.latest()
        self._age = VersionAges(version, weights.resumed)
        self._stream = open_message_stream(memory, spec.channel, spec.room)
        self._publisher: WeightsPublisher | None = None
        self._spec_checked_at = clock()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            run.confirm()
            run.store.put(SPEC, spec.encode())
            run.store.delete(END)
            self._publisher = WeightsPublisher(open_message_stream(memory, spec.channel, spec.room), run.store)
            self._share = _Share(settings.blocks, clock())
            self.publish(version, newest)
            with contextlib.suppress(ExchangeUnavailable):  # segments held by a dead learner; those of a living one follow later
                self._stream.reclaim(0)
            self._reader = StreamReader(
                self._stream, settings.layout, plan=spec.fingerprint, inspect=settings.inspect, reclaim_idle_s=roster.SILENT_S
            )
            self.batches = FleetBatches(self._reader, settings, self._age, self._is_owner)
            undo.pop_all()

    @property
    def joined(self) -> int:
        return self._roster.joined

    @property
    def left(self) -> int:
        return self._roster.left

    @property
    def silent(self) -> int:
        return self._roster.silent

    # -- called by the training loop

    def step(self) -> bool:
        if self._clock() - self._updated_at >= _UPDATE_S:
            self._update()  # before reading segments: after a long suspension another learner may own the run
        began = self._clock()
        if not self.batches.ready():
            self._reader.wait(_WAIT_S)
            self._waited_s += self._clock() - began
        alternates = self._spec.in_turn and not self.batches.ready()
        if alternates and self._share.raise_if_slow(self._roster.able, self.batches.waiting, self._clock()):
            self._active_publisher.amend(self._notice())
        return True

    def publish(self, version: int, weights: Mapping[str, Array]) -> None:
        """Publish new weights to all workers. Does not wait until that is done."""
        self._share.begin(self._roster.able, self._clock(), is_new_version=version != self._age.newest)
        self._age.newest = version
        self._active_publisher.publish(self._notice(), serialization.encode_weights(weights))

    def _notice(self) -> WeightsNotice:
        version = self._age.newest
        timesteps = self._weights.timesteps(version)
        return WeightsNotice(self._run.incarnation, version, self._share.value, self._spec.fingerprint, timesteps)

    @property
    def _active_publisher(self) -> WeightsPublisher:
        assert self._publisher is not None, "it is closed"
        return self._publisher

    # -- workers

    def _update(self) -> None:
        self._updated_at = self._clock()
        self._active_publisher.check()
        try:
            presences = self._stream.posted(PRESENCE)
            newest = self._stream.read(NOTICE)
        except ExchangeUnavailable as error:
            if self._unreached:
                self._unreached = error.message
                if self._updated_at - self._created_at >= UNREACHED_S:
                    raise StartTimeout(
                        f"The memory was never reached within {UNREACHED_S:g} s: {error.message}", error.hint
                    ) from error
            self._announce_at_intervals(f"cannot connect to Redis; retrying: {error.message}")
            self._roster.extend_deadlines(self._updated_at)
            return
        self._unreached = ""
        self._check_owner(newest)
        if newest is None:  # also after a restart of the server without its data
            self._active_publisher.amend(self._notice())
        if self._updated_at - self._spec_checked_at >= _CHECK_SPEC_S:
            self._restore_spec()
        self._roster.update(presences, self._updated_at)
        if not self._roster and not self.batches.waiting:
            self._announce_at_intervals("no worker has joined: start one with ludus fleet worker --memory … --store …")
        self._status = {"nodes": [], "workers": self._roster.status()}

    def _restore_spec(self) -> None:
        """Write the worker spec again if a learner that has lost the run has overwritten it."""
        self._spec_checked_at = self._updated_at
        with contextlib.suppress(StoreUnavailable, NotFound):
            if self._run.store.get(SPEC) != self._spec.encode():
                self._run.confirm()
                self._run.store.put(SPEC, self._spec.encode())

    def _is_owner(self) -> bool:
        try:
            self._check_owner(self._stream.read(NOTICE))
        except ExchangeUnavailable:
            return False
        return True

    def _check_owner(self, notice: bytes | None) -> None:
        if notice is None:
            return
        with contextlib.suppress(Damaged):
            newest = WeightsNotice.decode(notice).incarnation
            if newest > self._run.incarnation:
                raise Fenced(
                    f"Another learner has taken over this run (incarnation {newest}, this is {self._run.incarnation}).",
                    "A run has one learner: stop the other one, or leave this one stopped.",
                )

    def _erase_presence(self, name: str) -> None:
        with contextlib.suppress(ExchangeUnavailable):
            self._stream.erase(f"{PRESENCE}{name}")

    def _announce_at_intervals(self, sentence: str) -> None:
        if self._clock() - self._announced_at >= _ANNOUNCE_EVERY_S:
            self._announced_at = self._clock()
            log.warning("%s", sentence)
            if self._announce is not None:
                self._announce(sentence)

    # -- status

    def metrics(self) -> dict[str, float]:
        totals = self._roster.totals()
        reader, publisher = self._reader, self._active_publisher
        return {
            "sampler/workers": float(len(self._roster)),
            **self._window.metrics(self._clock(), totals | {"waited_s": self._waited_s}, max(1, len(self._roster))),
            "fleet/joined": float(self.joined),
            "fleet/left": float(self.left),
            "fleet/silent": float(self.silent),
            "fleet/refused": float(len(self._roster.refused)),
            "fleet/duplicates": float(reader.duplicates),
            "fleet/lost": float(reader.lost),
            "fleet/rejected": float(sum(reader.rejected.values())),
            "fleet/discarded": float(sum(reader.discarded.values())),
            "fleet/dropped": totals["dropped"],
            "fleet/published": float(publisher.published),
            "fleet/publish_failures": float(publisher.failures),
            "fleet/unavailable_s": float(reader.unavailable_total_s),
            "memory/waiting": float(self.batches.waiting),
            **self._more_metrics(),
        }

    def has_sampled(self) -> bool:
        return self._roster.totals()["steps"] > 0 or self.batches.waiting > 0

    def waiting_for(self) -> str:
        if self._unreached:
            return f"the memory, which was never reached: {self._unreached.rstrip('.')}"
        if not self._roster:
            return "a worker: none has joined (ludus fleet worker --memory … --store … starts one)"
        return f"the first step of its workers: {self._roster.describe_states()}"

    def unlearned_steps(self) -> int:
        return 0  # segments without acknowledgement stay in the message stream, for the next learner of this run

    def status(self) -> dict[str, Any]:
        """Workers as last seen, as plain values. Thread-safe."""
        return self._status

    def state(self) -> dict[str, Array]:
        """Position in the segments of each worker up to which the learner has learned."""
        return self._reader.state()

    def load_state(self, state: dict[str, Array]) -> None:
        if "workers" in state:  # else the run was sampled in another way until now
            self._reader.load_state(state)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
            if self._run.is_finished():
                self._end_workers()
        self._stream.close()

    def _end_workers(self) -> None:
        """Record the end of the run in the store and the message stream; delete the stream when the workers have left."""
        store = self._run.store
        with contextlib.suppress(LudusError):
            self._run.confirm()
            store.put(END, b"")
            for name in store.list(WEIGHTS):
                store.delete(f"{WEIGHTS}/{name}")
        try:
            over = replace(self._notice(), over=True)
            if not self._stream.post(NOTICE, over.encode(), self._run.incarnation):
                return
            deadline = time.monotonic() + _LEAVE_S
            while self._stream.posted(PRESENCE) and time.monotonic() < deadline:
                time.sleep(_WAIT_S)
            self._stream.drop()
        except LudusError as error:
            log.warning("could not notify the workers that the run is over; they will see it in the store: %s", error)


def channel_of(store: Store, new: str | None = None) -> str:
    """Channel of a run, the same for all its learners; `new` is stored if there is none. Raises NotFound without either."""
    if new is not None:
        with contextlib.suppress(AlreadyExists):
            store.put(CHANNEL, new.encode(), overwrite=False)
    return store.get(CHANNEL).decode("ascii", "replace")
