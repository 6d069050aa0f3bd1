"""A worker of a fleet: plays with the newest weights it can get, and hands what it saw to whoever learns, wherever that is.

    store ──orders, weights──▶ follower (a thread) ──▶ sampler ──segments──▶ exchange

It needs nothing but the store and the exchange, may come and go at any time, and outlives both of them being away: it goes on
with its last weights, and waits where there is no room. A thread of its own asks for news, so that sampling never does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch

from ludus.config.schema import PreprocessConfig, SelfPlayConfig
from ludus.core import spaces, trust
from ludus.distributed.redis.messages import BULLETIN, END, ORDERS, PRESENCE, Bulletin, Orders, Presence, channel_in, weights_key
from ludus.envs.vector_env import Environments, make_environments
from ludus.errors import (
    Damaged,
    EnvironmentFault,
    ExchangeUnavailable,
    IncompatibleCheckpoint,
    LudusError,
    NotFound,
    StoreUnavailable,
    UsageError,
)
from ludus.models.devices import copy_for_acting, named_device
from ludus.models.policy import Policy, Weights
from ludus.models.weights import serialization
from ludus.process.host import keep_freed_memory, stop_on_signals
from ludus.process.workers.supervisor import OVER, Context, Restart, Supervisor
from ludus.sampling.sampler import Interruption, Sampler, SamplerTimes, segment_spec
from ludus.sampling.self_play import with_past_opponents
from ludus.storage.base import Store, open_store
from ludus.transport.message_stream import MessageStream, open_message_stream
from ludus.transport.shared_memory import BlockLayout
from ludus.transport.stream_memory import StreamWriter

log = logging.getLogger(__name__)

BEAT_S = 2.0
"""A worker shows that it lives once in so many seconds."""

_HUNGRY_S = 0.005
_NEWS_S = 0.05
_AGAIN_S = 1.0
_SAY_EVERY_S = 10.0
_ROOM_S = 0.2
_LEAVE_S = 5.0
_PATIENCE_S = 2.0
_OVER_S = 10.0
_HANG_S = 300.0
_LOOK_S = 0.1
_RESTART = Restart(limit=None, steady_s=5.0)
_PRELOAD = ("numpy", "torch", "gymnasium", "ludus.distributed.redis.worker")

Announce = Callable[[str], None]


@dataclass(frozen=True)
class WorkerOptions:
    compression: Literal["none", "lz4", "zstd"] = "none"
    when_full: Literal["wait", "drop"] = "wait"
    name: str = field(default_factory=lambda: f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    """Unlike that of any worker before: segments are numbered by worker."""
    env: str | None = None
    """Refuse orders that name another environment."""


class _Ended(Exception):
    """Raised wherever the worker is, in the middle of a segment too."""


class FleetWorker:
    """`run()` samples until it is told to stop, or until the run is over."""

    def __init__(
        self,
        memory: str,
        store: Store,
        options: WorkerOptions | None = None,
        *,
        stop: Callable[[], bool] = lambda: False,
        announce: Announce | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`beat` is called at every step of the environments."""
        self._memory, self._store, self._options = memory, store, options or WorkerOptions()
        self._stop, self._announce, self._beaten = stop, announce, beat
        self._presence = Presence(platform.node(), os.getpid(), "starting")
        self._times: SamplerTimes | None = None
        self._beginning_at = 0.0

    def run(self) -> str:
        """Why it ended: `stopped` or `over`. Raises IncompatibleCheckpoint when it is not fit for this run, EnvironmentFault."""
        torch.set_num_threads(1)
        keep_freed_memory()
        while True:
            try:
                orders = self._await_orders()
                self._work(orders)
            except _Ended as ended:
                if str(ended) in ("stopped", "over"):
                    return str(ended)
                self._say(f"{ended}; starting again")
                self._beginning_at = time.monotonic() + _AGAIN_S

    # -- before it begins

    def _await_orders(self) -> Orders:
        said_at = -_SAY_EVERY_S
        self._pause(self._beginning_at - time.monotonic())
        while True:
            try:
                data = self._store.get(ORDERS)
                with self._refusal(data):
                    orders = Orders.decode(data)
                    if self._options.env is not None and orders.env != self._options.env:
                        raise IncompatibleCheckpoint(
                            f"The orders name the environment {orders.env}, and this worker is for {self._options.env} alone."
                        )
                return orders
            except (NotFound, StoreUnavailable) as error:
                if time.monotonic() - said_at >= _SAY_EVERY_S:
                    said_at = time.monotonic()
                    why = "there is no learner yet" if isinstance(error, NotFound) else error.message
                    self._say(f"waiting for the orders of a learner in {self._store.url}: {why}")
            self._pause(_AGAIN_S)

    @contextlib.contextmanager
    def _refusal(self, orders: bytes) -> Iterator[None]:
        """Whoever does not fit says so to the learner, too."""
        try:
            yield
        except IncompatibleCheckpoint as error:
            channel, room = channel_in(orders)
            with (
                contextlib.suppress(LudusError),
                contextlib.closing(open_message_stream(self._memory, channel, room)) as exchange,
            ):
                refused = replace(self._presence, state="refused", why=str(error))
                exchange.post(f"{PRESENCE}{self._options.name}", refused.encode())
            raise

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._stop():
                raise _Ended("stopped")
            self._beaten()
            time.sleep(min(left, 0.1))

    # -- at work

    def _work(self, orders: Orders) -> None:
        with contextlib.ExitStack() as stack:
            exchange = stack.enter_context(contextlib.closing(open_message_stream(self._memory, orders.channel, orders.room)))
            news = open_message_stream(self._memory, orders.channel, orders.room)
            follower = _Follower(news, self._store, orders, self._options.name, self._current_presence)
            stack.callback(follower.close)
            follower.start()
            try:
                environments = self._environments(orders)
                stack.callback(environments.close)
                policy = self._fit(orders, environments)
            except LudusError as error:
                self._presence = replace(self._presence, state="refused", why=str(error))
                follower.farewell(keep=True)
                raise
            layout = BlockLayout(segment_spec(policy, environments, orders.steps), orders.num_envs)
            self._say(f"worker {self._options.name}: {orders.num_envs} × {orders.env} for {self._store.url}")
            writer = StreamWriter(
                exchange,
                layout,
                worker=self._options.name,
                plan=orders.fingerprint,
                compression=self._options.compression,
                when_full=self._options.when_full,
            )
            try:
                self._sample(orders, environments, policy, writer, follower)
            except _Ended as ended:
                if str(ended) == "stopped":  # else nobody learns from it any more, and it would be left in the exchange
                    with contextlib.suppress(LudusError):
                        writer.flush(_LEAVE_S)
                follower.farewell()
                raise
            except EnvironmentFault as fault:
                self._presence = replace(self._presence, state="failed", why=str(fault))
                follower.farewell(keep=True)
                raise

    def _environments(self, orders: Orders) -> Environments:
        environments = make_environments(
            orders.env, orders.num_envs, orders.env_config,
            preprocess=PreprocessConfig(**orders.preprocess), wrappers=orders.wrappers, forgiving=orders.forgiving,
        )  # fmt: skip
        environments.reset(orders.seed)  # only then does it show whether it masks actions
        return environments

    def _fit(self, orders: Orders, environments: Environments) -> Policy:
        """The policy of the orders. Raises IncompatibleCheckpoint when the environment here is not the learner's."""
        for what in ("observation_space", "action_space"):
            here, there = spaces.to_json(getattr(environments, what)), orders.description[what]
            if here != there:
                raise IncompatibleCheckpoint(
                    f"{orders.env} has another {what.replace('_', ' ')} here: {here}; the learner's is {there}.",
                    "Install the same version of the environment, and give it the same files.",
                )
        if environments.masked != orders.masked:
            raise IncompatibleCheckpoint(f"{orders.env} masks actions on one side only.", "Install the same version of it.")
        return copy_for_acting(serialization.policy_from(orders.description), named_device(orders.device, "inference_device"))

    def _sample(
        self, orders: Orders, environments: Environments, policy: Policy, writer: StreamWriter, follower: _Follower
    ) -> None:
        source = _FollowedSource(policy, follower)

        def beat() -> None:
            self._beaten()
            if self._stop():
                raise _Ended("stopped")
            follower.check()

        environments.beat = beat
        name = int.from_bytes(self._options.name.encode(), "little")
        seed = int(np.random.SeedSequence((orders.seed, name)).generate_state(1)[0]) % (1 << 30)
        facing = with_past_opponents(environments, source, SelfPlayConfig(**orders.self_play), seed)

        def timesteps(version: int) -> int:
            return 0 if follower.bulletin is None else follower.bulletin.timesteps

        sampler = Sampler(
            environments, facing, writer, seed, interruption=Interruption(beat), explore=orders.explore, timesteps=timesteps
        )
        self._times = sampler.times
        weights_s = blocked_s = 0.0
        with_version, made, blocks = -1, 0, 0
        while True:
            began = time.perf_counter()
            self._await_weights(follower, orders.in_turn, with_version, made, writer, beat)
            weights_s += time.perf_counter() - began
            if self._presence.state in ("starting", "waiting for weights"):
                self._presence = replace(self._presence, state="sampling", why="")
            asked, spent = time.perf_counter(), sampler.times.environment_s + sampler.times.policy_s
            sampled = sampler.step(_ROOM_S)
            spent = sampler.times.environment_s + sampler.times.policy_s - spent
            blocked_s += max(0.0, time.perf_counter() - asked - spent)
            if sampled:  # with whatever had arrived by then
                made = made + 1 if source.version == with_version else 1
                with_version, blocks = source.version, blocks + 1
            else:
                beat()
            self._presence = replace(
                self._presence,
                state="sampling" if sampled else "waiting for room",
                why=writer.last_error if writer.outgoing else "",
                version=with_version,
                blocks=blocks,
                dropped=writer.dropped,
                blocked_s=blocked_s,
                weights_wait_s=weights_s,
                env_restarts=environments.restarts,
            )

    def _current_presence(self) -> Presence:
        """With the steps of the segment that is being sampled: one may take minutes. Called by the follower's thread."""
        times = self._times
        if times is None:
            return self._presence
        return replace(self._presence, steps=times.steps, environment_s=times.environment_s, policy_s=times.policy_s)

    def _await_weights(
        self, follower: _Follower, in_turn: bool, with_version: int, made: int, writer: StreamWriter, beat: Callable[[], None]
    ) -> None:
        """Until there are weights with which a segment is wanted."""

        def wanted() -> int | None:
            version, bulletin = follower.version, follower.bulletin
            if version is None or bulletin is None:
                return None
            if not in_turn:
                return version
            if version != bulletin.version or (version == with_version and made >= bulletin.share):
                return None
            return version

        if wanted() is not None:
            return
        self._presence = replace(self._presence, state="waiting for weights", why=follower.trouble)
        while follower.wait(wanted, _ROOM_S) is None:
            beat()
            self._presence = replace(self._presence, why=follower.trouble)
            if writer.outgoing:
                writer.flush(0)

    def _say(self, sentence: str) -> None:
        log.info("%s", sentence)
        if self._announce is not None:
            self._announce(sentence)


class _FollowedSource:
    """The newest weights that have arrived, in the policy of the worker."""

    def __init__(self, policy: Policy, follower: _Follower) -> None:
        self._policy, self._follower = policy, follower
        self.version = -1

    def newest(self) -> tuple[Policy, int]:
        newest = self._follower.weights
        assert newest is not None, "a worker samples only when it has weights"
        if newest[0] != self.version:
            self._policy.load_weights(newest[1])
            self.version = newest[0]
        return self._policy, self.version


class _Follower:
    """Two threads: one reads the bulletin and shows that the worker lives, the other fetches the weights that it names."""

    def __init__(
        self, exchange: MessageStream, store: Store, orders: Orders, name: str, presence: Callable[[], Presence]
    ) -> None:
        self._exchange, self._store, self._orders, self._name, self._presence = exchange, store, orders, name, presence
        self._changed = threading.Condition()
        self._hungry = threading.Event()
        self._closed = threading.Event()
        self._beats = 0
        self._beaten_at = -BEAT_S
        self.bulletin: Bulletin | None = None
        self.weights: tuple[int, Weights] | None = None
        self._troubles: dict[str, str] = {}
        self._error: LudusError | None = None
        self._over = self._others = False
        self._missed_at = math.inf  # since when the weights that the bulletin names are not there
        self._threads = [
            threading.Thread(target=self._keep, args=(name, work), name=name, daemon=True)
            for name, work in (("news", self._read_news), ("weights", self._fetch_weights))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def version(self) -> int | None:
        return None if self.weights is None else self.weights[0]

    @property
    def trouble(self) -> str:
        """Why there is nothing new."""
        return "; ".join(self._troubles.values())

    def check(self) -> None:
        """Raises _Ended when the run is over or its orders are others, and whatever cannot be mended by waiting."""
        if self._error is not None:
            raise self._error
        bulletin = self.bulletin
        if self._over or (bulletin is not None and bulletin.over):
            raise _Ended("over")
        if self._others or (bulletin is not None and bulletin.orders != self._orders.fingerprint):
            raise _Ended("the orders have changed")

    def wait(self, wanted: Callable[[], int | None], timeout_s: float) -> int | None:
        """What `wanted()` says, once it says something; None: not for so long."""
        self._hungry.set()
        try:
            with self._changed:
                self._changed.wait_for(lambda: wanted() is not None or self._error is not None, timeout_s)
                return wanted()
        finally:
            self._hungry.clear()

    def farewell(self, keep: bool = False) -> None:
        """The worker leaves: its notice goes, or stays for the learner to read why."""
        self._end()
        if not self._threads[0].is_alive():
            with contextlib.suppress(LudusError):
                if keep:
                    self._post()
                else:
                    self._exchange.erase(f"{PRESENCE}{self._name}")

    def close(self) -> None:
        self._end()
        if not self._threads[0].is_alive():
            self._exchange.close()

    def _end(self) -> None:
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        self._threads[0].join(_PATIENCE_S)  # the other one may be in the middle of a download, and ends with the process

    # -- the threads

    def _keep(self, name: str, work: Callable[[], None]) -> None:
        """Do it until it is closed, whatever is away for a while."""
        while not self._closed.is_set():
            try:
                work()
                self._troubles.pop(name, None)
                continue
            except (ExchangeUnavailable, StoreUnavailable, Damaged) as error:  # damaged: rubbish that the learner will replace
                if name not in self._troubles:
                    log.warning("nothing new from the learner: %s", error)
                self._troubles[name] = str(error)
            except LudusError as error:  # such as a wrong password: nothing that waiting would mend
                self._fail(error)
                return
            except Exception as error:  # a bug must end the worker, not leave it deaf
                log.exception("a thread of the worker failed")
                self._fail(LudusError(f"{type(error).__name__}: {error}"))
                return
            self._closed.wait(_AGAIN_S)

    def _fail(self, error: LudusError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _read_news(self) -> None:
        if time.monotonic() - self._beaten_at >= BEAT_S:
            self._post()
        data = self._exchange.read(BULLETIN)
        bulletin = None if data is None else Bulletin.decode(data)
        if bulletin is not None and bulletin != self.bulletin:
            with self._changed:
                self.bulletin = bulletin
                self._changed.notify_all()
        if self._hungry.is_set():
            self._closed.wait(_HUNGRY_S)
        else:
            self._hungry.wait(_NEWS_S)  # whoever begins to wait for news does not wait for this pause, too

    def _post(self) -> None:
        self._beats += 1
        self._exchange.post(f"{PRESENCE}{self._name}", replace(self._presence(), beat=self._beats).encode())
        self._beaten_at = time.monotonic()

    def _fetch_weights(self) -> None:
        def wanted() -> bool:
            new = self.bulletin
            return new is not None and new.orders == self._orders.fingerprint and not new.over and new.version != self.version

        with self._changed:
            found = self._changed.wait_for(lambda: wanted() or self._closed.is_set(), _OVER_S)
            bulletin = self.bulletin
        if not found:
            self._look_for_the_end()
            return
        if self._closed.is_set() or bulletin is None:
            return
        key = weights_key(bulletin.version)
        try:
            weights, _ = serialization.decode_weights(self._store.get(key), key)
        except NotFound:  # they have been replaced, and the next bulletin names others; or nobody is left to name any
            self._miss()
            return
        self._missed_at = math.inf
        with self._changed:
            self.weights = bulletin.version, weights
            self._changed.notify_all()

    def _miss(self) -> None:
        now = time.monotonic()
        self._missed_at = min(self._missed_at, now)
        long = now - self._missed_at >= _OVER_S
        if long:
            self._look_for_the_end()
        self._closed.wait(_AGAIN_S if long else _NEWS_S)

    def _look_for_the_end(self) -> None:
        """Nothing was new for long: the learner may have come to its end when it could not say so, or use another channel now."""
        with contextlib.suppress(NotFound):
            self._others = self._store.get(ORDERS) != self._orders.encode()
        with contextlib.suppress(NotFound):
            self._store.get(END)
            self._over = True


# -- on this machine ----------------------------------------------------------------------------------------------------


def run_workers(
    memory: str,
    place: str,
    num: int,
    compression: str,
    when_full: str,
    env: str | None = None,
    announce: Announce | None = None,
) -> str:
    """So many workers on this machine, until they are told to stop or the run is over; returns which. One that dies is replaced.

    Raises UsageError, IncompatibleCheckpoint when workers are refused: the next ones would be, too.
    """
    trust.allow(env, memory, place)
    options = functools.partial(WorkerOptions, cast(Any, compression), cast(Any, when_full), env=env)
    with stop_on_signals() as stop:
        if num == 1:
            return FleetWorker(memory, open_store(place), options(), stop=stop, announce=announce).run()
        heard, said = os.pipe()
        os.set_blocking(heard, False)
        try:
            with Supervisor(preload=_PRELOAD) as supervisor:
                started = [
                    supervisor.start(
                        f"worker-{i}", _one_of_many, memory, place, options, fds=(said,), restart=_RESTART, hang_s=_HANG_S
                    )
                    for i in range(num)
                ]
                if announce is not None:
                    announce(f"{num} workers for {place}")
                while not stop() and not all(process.state in OVER for process in started):
                    time.sleep(_LOOK_S)
                for process in started:
                    process.ask_to_stop(_LEAVE_S)
                for process in started:
                    process.wait(2 * _LEAVE_S)
            with contextlib.suppress(BlockingIOError):
                raise IncompatibleCheckpoint(os.read(heard, 1 << 12).decode().splitlines()[0])
            return "stopped" if stop() else "over"
        finally:
            os.close(heard)
            os.close(said)


def _one_of_many(context: Context, memory: str, place: str, options: Callable[[], WorkerOptions]) -> None:
    """Ends well when it is refused, so that nobody starts it again; but says why."""
    with stop_on_signals() as stop:
        context.ready()
        try:
            FleetWorker(memory, open_store(place), options(), stop=stop, beat=context.beat).run()
        except (UsageError, IncompatibleCheckpoint) as error:
            log.error("%s", error)
            os.write(context.fds[0], f"{error}\n".encode()[:2000])
