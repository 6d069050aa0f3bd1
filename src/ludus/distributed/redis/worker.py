"""A worker of a fleet: samples with the newest weights and sends segments to the learner through a message stream.

    store ──worker spec, weights──▶ follower (threads) ──▶ sampler ──segments──▶ message stream

It needs only the store and the stream, may join and leave at any time, and survives outages of both: it continues with its last
weights and waits while the stream is full. Threads poll for new weights, so that sampling never waits for the network.
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

import gymnasium as gym
import numpy as np
import torch

from ludus.config.schema import PreprocessConfig, SelfPlayConfig
from ludus.core import renamed, spaces, trust
from ludus.distributed.match_blocks import MatchBlockSampler, MatchSamplingPlan, PinnedSource
from ludus.distributed.redis.messages import (
    END,
    NOTICE,
    PRESENCE,
    SPEC,
    MatchSpec,
    Presence,
    WeightsNotice,
    WorkerSpec,
    channel_in,
    weights_key,
)
from ludus.distributed.watched_thread import WatchedThread
from ludus.envs.pettingzoo import network_spaces
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
from ludus.launch.doctor.checks.graphics import require_screen
from ludus.models.devices import copy_for_acting, parse_device
from ludus.models.policy import Policy, Weights
from ludus.models.weights import serialization
from ludus.models.weights.version_store import PolicySource
from ludus.process import screen_choice
from ludus.process.host import keep_freed_memory
from ludus.process.signals import stop_on_signals
from ludus.process.workers.supervisor import FINAL_STATES, Context, Supervisor, WorkerRestart
from ludus.sampling.multi_agent.batches import MultiAgentSettings
from ludus.sampling.multi_agent.copies import MatchCopies
from ludus.sampling.multi_agent.vector_copies import make_copies
from ludus.sampling.sampler import Interruption, Sampler, SamplerTimes, segment_spec
from ludus.sampling.segment_recorder import session_spec
from ludus.sampling.self_play import with_past_opponents
from ludus.storage.base import Store, open_store
from ludus.transport.message_stream import MessageStream, open_message_stream
from ludus.transport.shared_memory import BlockLayout
from ludus.transport.stream_memory import StreamWriter

log = logging.getLogger(__name__)

BEAT_S = 2.0
"""Interval of a worker's heartbeat."""

_WAITING_POLL_S = 0.005
_NEWS_S = 0.05
_RETRY_S = 1.0
_REPORT_EVERY_S = 10.0
_ROOM_S = 0.2
_LEAVE_S = 5.0
_JOIN_S = 2.0
_NO_NEWS_S = 10.0
_HANG_S = 300.0
_POLL_S = 0.1
_RESTART = WorkerRestart(limit=None, steady_s=5.0)
_PRELOAD = ("numpy", "torch", "gymnasium", "ludus.distributed.redis.worker")

Announce = Callable[[str], None]


@dataclass(frozen=True)
class WorkerOptions:
    compression: Literal["none", "lz4", "zstd"] = "none"
    when_full: Literal["wait", "drop"] = "wait"
    name: str = field(default_factory=lambda: f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    """Unique among all workers of the run: segments are numbered per worker."""
    env: str | None = None
    """Refuse a spec with another environment."""


class _Ended(Exception):
    """Raised anywhere in the worker, even in the middle of a segment."""


class FleetWorker:
    """`run` samples until it is stopped or the run is over."""

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
        self._stop, self._announce, self._on_step = stop, announce, beat
        self._presence = Presence(platform.node(), os.getpid(), "starting")
        self._times: SamplerTimes | None = None
        self._restart_at = 0.0

    def run(self) -> str:
        """Returns why it ended: `stopped` or `over`. Raises IncompatibleCheckpoint when it cannot work for this run, EnvironmentFault."""
        torch.set_num_threads(1)
        keep_freed_memory()
        while True:
            try:
                spec = self._wait_for_spec()
                self._run_spec(spec)
            except _Ended as ended:
                if str(ended) in ("stopped", "over"):
                    return str(ended)
                self._report(f"{ended}; starting again")
                self._restart_at = time.monotonic() + _RETRY_S

    # -- start

    def _wait_for_spec(self) -> WorkerSpec:
        reported_at = -_REPORT_EVERY_S
        self._pause(self._restart_at - time.monotonic())
        while True:
            try:
                data = self._store.get(SPEC)
                with self._report_refusal(data):
                    spec = WorkerSpec.decode(data)
                    if self._options.env is not None and spec.env != renamed.current_name(self._options.env):
                        raise IncompatibleCheckpoint(
                            f"The learner's environment is {spec.env}, but this worker accepts only {self._options.env}."
                        )
                return spec
            except (NotFound, StoreUnavailable) as error:
                if time.monotonic() - reported_at >= _REPORT_EVERY_S:
                    reported_at = time.monotonic()
                    why = "there is no learner yet" if isinstance(error, NotFound) else error.message
                    self._report(f"waiting for the worker spec of a learner in {self._store.url}: {why}")
            self._pause(_RETRY_S)

    @contextlib.contextmanager
    def _report_refusal(self, spec: bytes) -> Iterator[None]:
        """Report an incompatibility to the learner, too."""
        try:
            yield
        except IncompatibleCheckpoint as error:
            channel, room = channel_in(spec)
            with (
                contextlib.suppress(LudusError),
                contextlib.closing(open_message_stream(self._memory, channel, room)) as stream,
            ):
                refused = replace(self._presence, state="refused", why=str(error))
                stream.post(f"{PRESENCE}{self._options.name}", refused.encode())
            raise

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._stop():
                raise _Ended("stopped")
            self._on_step()
            time.sleep(min(left, 0.1))

    # -- sampling

    def _run_spec(self, spec: WorkerSpec) -> None:
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(contextlib.closing(open_message_stream(self._memory, spec.channel, spec.room)))
            news = open_message_stream(self._memory, spec.channel, spec.room)
            follower = _Follower(news, self._store, spec, self._options.name, self._current_presence)
            stack.callback(follower.close)
            follower.start()
            try:
                environments = self._make_environments(spec)
                stack.callback(environments.close)
                policy = self._make_policy(spec, environments)
            except LudusError as error:
                self._presence = replace(self._presence, state="refused", why=str(error))
                follower.leave(keep=True)
                raise
            layout = self._layout_of(spec, environments, policy)
            self._report(f"worker {self._options.name}: {spec.num_envs} × {spec.env} for {self._store.url}")
            writer = StreamWriter(
                stream,
                layout,
                worker=self._options.name,
                plan=spec.fingerprint,
                compression=self._options.compression,
                when_full=self._options.when_full,
            )
            try:
                self._sample(spec, environments, policy, writer, follower)
            except _Ended as ended:
                if str(ended) == "stopped":  # else no learner would ever read it
                    with contextlib.suppress(LudusError):
                        writer.flush(_LEAVE_S)
                follower.leave()
                raise
            except EnvironmentFault as fault:
                self._presence = replace(self._presence, state="failed", why=str(fault))
                follower.leave(keep=True)
                raise

    def _make_environments(self, spec: WorkerSpec) -> Environments | MatchCopies:
        screen_choice.configure(spec.display)
        require_screen(spec.display, spec.env, spec.env_config)
        if spec.matches is not None:
            return make_copies(
                spec.env, spec.num_envs, spec.env_config, wrappers=spec.wrappers, preprocess=PreprocessConfig(**spec.preprocess),
                forgiving=spec.forgiving, beat=self._on_step,
            )  # fmt: skip
        environments = make_environments(
            spec.env, spec.num_envs, spec.env_config,
            preprocess=PreprocessConfig(**spec.preprocess), wrappers=spec.wrappers, forgiving=spec.forgiving,
        )  # fmt: skip
        environments.reset(spec.seed)  # only after a reset is it known whether it masks actions
        return environments

    def _make_policy(self, spec: WorkerSpec, environments: Environments | MatchCopies) -> Policy:
        """The policy of the spec. Raises IncompatibleCheckpoint when the environment here differs from the learner's."""
        if isinstance(environments, MatchCopies):
            self._check_agents(spec, environments)
        else:
            _check_spaces(spec, environments.observation_space, environments.action_space)
            if environments.masked != spec.masked:
                raise IncompatibleCheckpoint(f"{spec.env} masks actions on one side only.", "Install the same version of it.")
        return copy_for_acting(serialization.policy_from(spec.description), parse_device(spec.device, "inference_device"))

    @staticmethod
    def _check_agents(spec: WorkerSpec, copies: MatchCopies) -> None:
        matches = MatchSpec.decode(spec.matches or {})
        if list(copies.agents) != list(matches.policy_mapping):
            raise IncompatibleCheckpoint(
                f"{spec.env} has the agents {', '.join(copies.agents)} here; the learner's has {', '.join(matches.policy_mapping)}.",
                "Install the same version of the environment, with the same files.",
            )
        for agent in matches.policy_mapping:
            _check_spaces(spec, *network_spaces(copies, agent, central=bool(matches.settings["central"])))

    @staticmethod
    def _layout_of(spec: WorkerSpec, environments: Environments | MatchCopies, policy: Policy) -> BlockLayout:
        if isinstance(environments, MatchCopies):
            plan = _match_plan(spec, policy)
            return BlockLayout(plan.specs[0], plan.rows)
        return BlockLayout(segment_spec(policy, environments, spec.steps), spec.num_envs)

    def _sample(
        self,
        spec: WorkerSpec,
        environments: Environments | MatchCopies,
        policy: Policy,
        writer: StreamWriter,
        follower: _Follower,
    ) -> None:
        source = _FollowedSource(policy, follower)

        def beat() -> None:
            self._on_step()
            if self._stop():
                raise _Ended("stopped")
            follower.check()

        environments.beat = beat
        name = int.from_bytes(self._options.name.encode(), "little")
        seed = int(np.random.SeedSequence((spec.seed, name)).generate_state(1)[0]) % (1 << 30)
        self_play = SelfPlayConfig(**spec.self_play)
        self._wait_for_weights(follower, spec.in_turn, -1, 0, writer, beat)  # self-play begins with the first version
        sampler: Sampler | _FleetMatchSampler
        if isinstance(environments, MatchCopies):
            sampler = _FleetMatchSampler(
                environments, _match_plan(spec, policy), source, writer, seed, self_play, Interruption(beat)
            )
        else:
            facing = with_past_opponents(environments, source, self_play, seed)

            def timesteps(version: int) -> int:
                return 0 if follower.notice is None else follower.notice.timesteps

            sampler = Sampler(
                environments, facing, writer, seed, interruption=Interruption(beat), explore=spec.explore, timesteps=timesteps
            )
        self._times = sampler.times
        weights_s = blocked_s = 0.0
        with_version, made, blocks = -1, 0, 0
        while True:
            began = time.perf_counter()
            self._wait_for_weights(follower, spec.in_turn, with_version, made, writer, beat)
            weights_s += time.perf_counter() - began
            if self._presence.state in ("starting", "waiting for weights"):
                self._presence = replace(self._presence, state="sampling", why="")
            called, spent = time.perf_counter(), sampler.times.environment_s + sampler.times.policy_s
            sampled = sampler.step(_ROOM_S)
            spent = sampler.times.environment_s + sampler.times.policy_s - spent
            blocked_s += max(0.0, time.perf_counter() - called - spent)
            if sampled:  # with the weights that had arrived by then
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
        """Includes the steps of the current segment, which may take minutes. Called by the follower's thread."""
        times = self._times
        if times is None:
            return self._presence
        return replace(self._presence, steps=times.steps, environment_s=times.environment_s, policy_s=times.policy_s)

    def _wait_for_weights(
        self, follower: _Follower, in_turn: bool, with_version: int, made: int, writer: StreamWriter, beat: Callable[[], None]
    ) -> None:
        """Wait for weights with which a segment is wanted."""

        def usable_version() -> int | None:
            version, notice = follower.version, follower.notice
            if version is None or notice is None:
                return None
            if not in_turn:
                return version
            if version != notice.version or (version == with_version and made >= notice.share):
                return None
            return version

        if usable_version() is not None:
            return
        self._presence = replace(self._presence, state="waiting for weights", why=follower.trouble)
        while follower.wait(usable_version, _ROOM_S) is None:
            beat()
            self._presence = replace(self._presence, why=follower.trouble)
            if writer.outgoing:
                writer.flush(0)

    def _report(self, sentence: str) -> None:
        log.info("%s", sentence)
        if self._announce is not None:
            self._announce(sentence)


def _check_spaces(spec: WorkerSpec, observation: gym.Space[Any], action: gym.Space[Any]) -> None:
    for what, space in (("observation_space", observation), ("action_space", action)):
        here, there = spaces.to_json(space), spec.description[what]
        if here != there:
            raise IncompatibleCheckpoint(
                f"{spec.env} has another {what.replace('_', ' ')} here: {here}; the learner's is {there}.",
                "Install the same version of the environment, with the same files.",
            )


def _match_plan(spec: WorkerSpec, policy: Policy) -> MatchSamplingPlan:
    """Raises Damaged."""
    matches = MatchSpec.decode(spec.matches or {})
    return MatchSamplingPlan(
        policy_mapping=matches.policy_mapping,
        descriptions={matches.model: spec.description},
        specs=(replace(session_spec(policy, spec.steps, matches.model), results=matches.results),),
        rows=matches.rows,
        settings=MultiAgentSettings(**matches.settings),
        separate_rows=matches.separate_rows,
    )


class _FleetMatchSampler:
    """Matches of one policy, whose version changes between two batches."""

    def __init__(
        self,
        copies: MatchCopies,
        plan: MatchSamplingPlan,
        source: PolicySource,
        writer: StreamWriter,
        seed: int,
        self_play: SelfPlayConfig,
        interruption: Interruption,
    ) -> None:
        self._source = PinnedSource(source)
        self._sampler = MatchBlockSampler(
            copies, plan, {plan.specs[0].model: self._source}, writer, seed, self_play=self_play, interruption=interruption
        )

    @property
    def times(self) -> SamplerTimes:
        return self._sampler.times

    def step(self, timeout_s: float) -> bool:
        if self._sampler.is_between_batches():
            self._source.refresh()
        return self._sampler.step(timeout_s)


class _FollowedSource:
    """Loads the newest weights that have arrived into the policy of the worker."""

    def __init__(self, policy: Policy, follower: _Follower) -> None:
        self._policy, self._follower = policy, follower
        self.version = -1

    def newest(self) -> tuple[Policy, int]:
        newest = self._follower.weights
        assert newest is not None, "a worker samples only after it has weights"
        if newest[0] != self.version:
            self._policy.load_weights(newest[1])
            self.version = newest[0]
        return self._policy, self.version


class _Follower:
    """Two threads: one reads the notice and posts the presence of the worker, the other fetches the weights."""

    def __init__(
        self, stream: MessageStream, store: Store, spec: WorkerSpec, name: str, presence: Callable[[], Presence]
    ) -> None:
        self._stream, self._store, self._spec, self._name, self._presence = stream, store, spec, name, presence
        self._changed = threading.Condition()
        self._waiting = threading.Event()
        self._closed = threading.Event()
        self._beats = 0
        self._posted_at = -BEAT_S
        self.notice: WeightsNotice | None = None
        self.weights: tuple[int, Weights] | None = None
        self._troubles: dict[str, str] = {}
        self._over = self._spec_changed = False
        self._missing_since = math.inf  # the weights that the notice names are not in the store
        self._threads = [
            WatchedThread(name, functools.partial(self._repeat, name, work), self._notify)
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
        """Why there are no new weights."""
        return "; ".join(self._troubles.values())

    def check(self) -> None:
        """Raises _Ended when the run is over or its spec has changed, and errors that waiting cannot resolve."""
        for thread in self._threads:
            thread.check()
        notice = self.notice
        if self._over or (notice is not None and notice.over):
            raise _Ended("over")
        if self._spec_changed or (notice is not None and notice.orders != self._spec.fingerprint):
            raise _Ended("the worker spec has changed")

    def wait(self, usable_version: Callable[[], int | None], timeout_s: float) -> int | None:
        """Wait until `usable_version()` returns one; None after `timeout_s`."""

        def is_over() -> bool:
            return usable_version() is not None or any(thread.error is not None for thread in self._threads)

        self._waiting.set()
        try:
            with self._changed:
                self._changed.wait_for(is_over, timeout_s)
                return usable_version()
        finally:
            self._waiting.clear()

    def leave(self, keep: bool = False) -> None:
        """Remove the presence message of the worker, or keep it for the learner to read the reason."""
        self._end()
        if not self._threads[0].is_alive():
            with contextlib.suppress(LudusError):
                if keep:
                    self._post()
                else:
                    self._stream.erase(f"{PRESENCE}{self._name}")

    def close(self) -> None:
        self._end()
        if not self._threads[0].is_alive():
            self._stream.close()

    def _end(self) -> None:
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        self._threads[0].join(_JOIN_S)  # the other one may be downloading, and ends with the process

    # -- threads

    def _repeat(self, name: str, work: Callable[[], None]) -> None:
        """Repeat `work` until closed; outages are retried."""
        while not self._closed.is_set():
            try:
                work()
                self._troubles.pop(name, None)
            except (ExchangeUnavailable, StoreUnavailable, Damaged) as error:  # damaged data will be replaced by the learner
                if name not in self._troubles:
                    log.warning("cannot read news of the learner: %s", error)
                self._troubles[name] = str(error)
                self._closed.wait(_RETRY_S)

    def _notify(self, error: LudusError) -> None:
        """Wake `wait`: a thread has ended with an error that waiting cannot resolve, such as a wrong password."""
        with self._changed:
            self._changed.notify_all()

    def _read_news(self) -> None:
        if time.monotonic() - self._posted_at >= BEAT_S:
            self._post()
        data = self._stream.read(NOTICE)
        notice = None if data is None else WeightsNotice.decode(data)
        if notice is not None and notice != self.notice:
            with self._changed:
                self.notice = notice
                self._changed.notify_all()
        if self._waiting.is_set():
            self._closed.wait(_WAITING_POLL_S)
        else:
            self._waiting.wait(_NEWS_S)  # a caller that begins to wait ends this pause

    def _post(self) -> None:
        self._beats += 1
        self._stream.post(f"{PRESENCE}{self._name}", replace(self._presence(), beat=self._beats).encode())
        self._posted_at = time.monotonic()

    def _fetch_weights(self) -> None:
        def has_news() -> bool:
            new = self.notice
            return new is not None and new.orders == self._spec.fingerprint and not new.over and new.version != self.version

        with self._changed:
            found = self._changed.wait_for(lambda: has_news() or self._closed.is_set(), _NO_NEWS_S)
            notice = self.notice
        if not found:
            self._check_for_end()
        if not found or self._closed.is_set() or notice is None:
            return
        key = weights_key(notice.version)
        try:
            weights, _ = serialization.decode_weights(self._store.get(key), key)
        except NotFound:  # replaced meanwhile: the next notice names others; or the learner is gone
            now = time.monotonic()
            self._missing_since = min(self._missing_since, now)
            is_long = now - self._missing_since >= _NO_NEWS_S
            if is_long:
                self._check_for_end()
            self._closed.wait(_RETRY_S if is_long else _NEWS_S)
            return
        self._missing_since = math.inf
        with self._changed:
            self.weights = notice.version, weights
            self._changed.notify_all()

    def _check_for_end(self) -> None:
        """Without news for long: the run may have ended, or have another spec, without a notice."""
        with contextlib.suppress(NotFound):
            self._spec_changed = self._store.get(SPEC) != self._spec.encode()
        with contextlib.suppress(NotFound):
            self._store.get(END)
            self._over = True


# -- workers of this machine --------------------------------------------------------------------------------------------


def run_workers(
    memory: str,
    store_url: str,
    num: int,
    compression: str,
    when_full: str,
    env: str | None = None,
    announce: Announce | None = None,
) -> str:
    """Run workers on this machine until they are stopped or the run is over; returns which. Dead ones are replaced.

    Raises UsageError, IncompatibleCheckpoint when workers are refused: replacements would be, too.
    """
    trust.allow(env, memory, store_url)
    options = functools.partial(WorkerOptions, cast(Any, compression), cast(Any, when_full), env=env)
    with stop_on_signals() as stop:
        if num == 1:
            return FleetWorker(memory, open_store(store_url), options(), stop=stop, announce=announce).run()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        try:
            with Supervisor(preload=_PRELOAD) as supervisor:
                started = [
                    supervisor.start(
                        f"worker-{i}", _run_one, memory, store_url, options, fds=(writer,), restart=_RESTART, hang_s=_HANG_S
                    )
                    for i in range(num)
                ]
                if announce is not None:
                    announce(f"{num} workers for {store_url}")
                while not stop() and not all(process.state in FINAL_STATES for process in started):
                    time.sleep(_POLL_S)
                for process in started:
                    process.ask_to_stop(_LEAVE_S)
                for process in started:
                    process.wait(2 * _LEAVE_S)
            with contextlib.suppress(BlockingIOError):
                raise IncompatibleCheckpoint(os.read(reader, 1 << 12).decode().splitlines()[0])
            return "stopped" if stop() else "over"
        finally:
            os.close(reader)
            os.close(writer)


def _run_one(context: Context, memory: str, store_url: str, options: Callable[[], WorkerOptions]) -> None:
    """A refused worker ends with code 0, so that it is not restarted, and sends the reason."""
    with stop_on_signals() as stop:
        context.ready()
        try:
            FleetWorker(memory, open_store(store_url), options(), stop=stop, beat=context.beat).run()
        except (UsageError, IncompatibleCheckpoint) as error:
            log.error("%s", error)
            os.write(context.fds[0], f"{error}\n".encode()[:2000])
