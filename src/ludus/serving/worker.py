"""One worker of the production service: the gateway extension that serves the policies of a run, without a trainer.

A session keeps the version that it began with. New versions arrive through the routing table; when too many are loaded, the
sessions of the oldest move to the current one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ludus.errors import LudusError
from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor
from ludus.gateway.http_connection import AccessRecord, Page
from ludus.gateway.latency_histogram import LatencyHistogram
from ludus.gateway.server import Gateway
from ludus.io.file_watcher import FileWatcher
from ludus.models.inference.batched_policy import ActingPolicy, BatchedPolicy
from ludus.protocol import spec
from ludus.sampling.segment_recorder import acting_policy_spec
from ludus.serving import log_format, prometheus, release, routing_table
from ludus.serving.access_log import AccessEntry, AccessLog
from ludus.serving.routing_table import RoutingTable
from ludus.transport.replay_log import ReplayLogWriter

log = logging.getLogger(__name__)

_SNAPSHOT_S = 1.0
_RETRY_S = 5.0
_MOVES_PER_SWEEP = 2000
"""Sessions that move per sweep (ten sweeps a second). With fewer, three versions share the core for longer (measured)."""


@dataclass(frozen=True)
class ReplaySettings:
    """The replay log: directory, share of recorded sessions and size limit."""

    directory: Path
    fraction: float = 0.01
    limit_bytes: int = 1 << 30
    steps: int = 256


@dataclass(frozen=True)
class ServiceSettings:
    temperature: float = 0.0
    """Default of sessions: 0 takes the most probable action, 1 samples as in training."""
    max_live_versions: int = 2
    """Loaded versions per agent, without levels."""
    carry_state: bool = True
    """Whether a session that moves to another version keeps its recurrent state."""
    max_batch_size: int = 256
    access_log: str | None = None
    """A file, or "-" for the standard output."""
    log_ticks: bool = False
    recording: ReplaySettings | None = None
    log_form: log_format.Form | None = None
    """Format of the log on the standard error; None: Python's default."""


@dataclass(frozen=True)
class FixedPolicySource:
    """A policy source with one version."""

    policy: ActingPolicy
    version: int

    def newest(self) -> tuple[ActingPolicy, int]:
        return self.policy, self.version


class LiveRelease:
    """A loaded release of one agent, shared by its sessions."""

    def __init__(self, agent: str, loaded: release.LoadedRelease, settings: ServiceSettings) -> None:
        self.agent, self.version, self._loaded = agent, loaded.version, loaded
        self.latency = LatencyHistogram()
        self.policies = {
            name: BatchedPolicy(
                FixedPolicySource(player, loaded.versions[name]), max_batch_size=settings.max_batch_size, deterministic=True
            )
            for name, player in loaded.policies.items()
        }
        self.seats = {seat: Seat(self.policies[name]) for seat, name in loaded.seats.items()}
        self.sessions: weakref.WeakSet[ServedActor] = weakref.WeakSet()
        self._recording = settings.recording
        self.writers: dict[str, ReplayLogWriter] = {}

    def recording_seats(self, temperature: float) -> dict[str, Seat]:
        """Return seats that write to the replay log."""
        assert self._recording is not None
        seats = {}
        for seat, name in self._loaded.seats.items():
            writer = self.writers.get(name)
            if writer is None:
                longest = json.loads(self._loaded.descriptions[name])["network"]["max_seq_len"]
                segment_spec = acting_policy_spec(self._loaded.policies[name], self._recording.steps, longest, name)
                writer = self.writers[name] = ReplayLogWriter(segment_spec, self._directory(), self._recording.limit_bytes)
            seats[seat] = Seat(self.policies[name], writer.at(temperature), first_origin=int.from_bytes(os.urandom(6), "little"))
        return seats

    def _directory(self) -> Path:
        """Replay directory; named agents have subdirectories, because their model names may be equal."""
        assert self._recording is not None
        named = self.agent if self.agent != routing_table.DEFAULT_AGENT else ""
        return self._recording.directory / routing_table.escape_file_name(named) if named else self._recording.directory

    def metrics(self) -> dict[str, Any]:
        batchers = [policy.batcher for policy in self.policies.values()]
        return {
            "sessions": len(self.sessions),
            "batches": [sum(column) for column in zip(*(batcher.sizes for batcher in batchers), strict=True)],
            "batch_seconds": [sum(column) for column in zip(*(batcher.seconds for batcher in batchers), strict=True)],
            "answered": sum(batcher.answered for batcher in batchers),
            **self.latency.to_json(),
        }

    def close(self) -> None:
        """Release resources after the last session. May block on the disk."""
        for policy in self.policies.values():
            policy.batcher.close()
        for writer in self.writers.values():
            writer.close()


class ServedActor(BuiltinActor):
    """The built-in actor with the version and temperature of its session."""

    latency: LatencyHistogram
    live: LiveRelease

    def __init__(self, service: ServingWorker) -> None:
        super().__init__({})
        self._service: ServingWorker | None = service

    async def start(self, session: str, body: bytes) -> bytes:
        assert self._service is not None
        service, self._service = self._service, None
        live = service.live_for(session, self.about)
        temperature = self.about.temperature if self.about.temperature >= 0 else service.settings.temperature
        self.set_seats(live.recording_seats(temperature) if service.records_session(session) else live.seats)
        self._temperature = temperature
        await super().start(session, body)
        self.join(live)  # nothing can be refused from here on
        return json.dumps({"model": live.agent, "version": live.version}).encode()

    async def end(self, body: bytes) -> bytes:
        reply = await super().end(body)
        self.live.sessions.discard(self)
        return reply

    def join(self, live: LiveRelease) -> None:
        self.live, self.latency = live, live.latency
        live.sessions.add(self)


@dataclass
class ServingWorker:
    """Actor factory and gateway extension of one worker. Picklable until `load` is called in the worker."""

    directory: Path
    """Directory of the routing table and the releases."""
    settings: ServiceSettings = field(default_factory=ServiceSettings)

    def load(self) -> None:
        """Load the current releases. Called once in the worker, before its event loop starts."""
        np.seterr(over="ignore", invalid="ignore")  # values from games are checked where it matters
        self._watcher = FileWatcher(self.directory / routing_table.FILE)
        self._routes = RoutingTable.read(self.directory)
        self._live: dict[tuple[str, int], LiveRelease] = {}
        self._retired: list[LiveRelease] = []
        self._move_counts: Counter[tuple[str, str]] = Counter()
        self._replay_counts = [0, 0]  # written and dropped segments of unloaded releases
        self._loading: asyncio.Future[Any] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="release")
        self._gateway: Gateway | None = None
        self._log: AccessLog | None = None
        self._began = time.time()
        self._snapshot_at, self._retry_at = 0.0, math.inf
        for name, version, path in self._missing(self._routes):
            self._live[name, version] = LiveRelease(name, self._read(path), self.settings)

    def __call__(self) -> ServedActor:
        return ServedActor(self)

    # -- sessions

    def live_for(self, session: str, options: spec.StartOptions) -> LiveRelease:
        """Raises Refused (404)."""
        return self._live[self._routes.choose(session, options)]

    def records_session(self, session: str) -> bool:
        recording = self.settings.recording
        return recording is not None and routing_table.session_fraction(session, "record") < recording.fraction

    # -- new versions

    def _missing(self, wanted: RoutingTable) -> list[tuple[str, int, Path]]:
        return [
            (name, version, self.directory / path)
            for name, agent in wanted.agents.items()
            for version, path in agent.releases.items()
            if (name, version) not in self._live
        ]

    def _read(self, path: Path) -> release.LoadedRelease:
        return release.read(path, values=self.settings.recording is not None)  # values are needed for learning only

    def _load_new_releases(self) -> None:
        """Start loading the releases of the routing table that are not loaded yet."""
        try:
            wanted = RoutingTable.read(self.directory)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.error("cannot read the routing table, serving the previous versions: %r", error)
            self._retry_at = asyncio.get_running_loop().time() + _RETRY_S
            return
        missing = self._missing(wanted)

        def load_releases() -> dict[tuple[str, int], release.LoadedRelease]:
            return {(name, version): self._read(path) for name, version, path in missing}

        self._loading = asyncio.get_running_loop().run_in_executor(self._pool, load_releases)
        self._loading.add_done_callback(lambda done: self._install_releases(wanted, done))

    def _install_releases(
        self, wanted: RoutingTable, loading: asyncio.Future[dict[tuple[str, int], release.LoadedRelease]]
    ) -> None:
        self._loading = None
        if loading.cancelled():
            return
        error = loading.exception()
        if error is not None:  # model runtimes raise exceptions of their own
            message = str(error) if isinstance(error, LudusError) else repr(error)
            log.error("cannot load a new version, serving the previous ones: %s", message)
            self._retry_at = asyncio.get_running_loop().time() + _RETRY_S
            return
        for (name, version), found in loading.result().items():
            self._live[name, version] = LiveRelease(name, found, self.settings)
        self._routes = wanted
        for name in wanted.agents:
            self._retire_old_versions(name)
        self._move_sessions()
        self._unload_unused()

    def _retire_old_versions(self, name: str) -> None:
        """Retire the oldest versions when too many are loaded."""
        agent = self._routes.agents[name]
        staying = {agent.current, *agent.levels} | ({agent.canary} if agent.canary is not None else set())
        living = [live for (of, _), live in self._live.items() if of == name and live.version not in agent.levels]
        living = [live for live in living if live.sessions or live.version in staying]  # in order of arrival
        leaving = [live for live in living if live.version not in staying]
        too_many = max(0, len(living) - self.settings.max_live_versions)
        gone = [*leaving[:too_many], *(live for live in leaving if live.version in agent.withdrawn)]
        before = [live for live in self._retired if live.agent != name or live.version not in staying]  # a version may return
        self._retired = list(dict.fromkeys([*before, *gone]))

    def _move_sessions(self) -> None:
        """Move idle sessions of retired versions to the current one, a limited number per sweep so that ticks are not delayed."""
        if not self._retired or self._gateway is None:
            return
        retired, left = set(self._retired), _MOVES_PER_SWEEP
        for session in self._gateway.sessions.idle_sessions():
            actor = session.actor
            if not isinstance(actor, ServedActor) or actor.live not in retired:
                continue
            left -= 1
            if left < 0:
                break
            target = self._live[actor.live.agent, self._routes.agents[actor.live.agent].current]
            carried = actor.move(target.seats, carry=self.settings.carry_state)
            actor.live.sessions.discard(actor)
            actor.join(target)
            session.latency = target.latency
            self._move_counts[target.agent, "carried" if carried else "reset"] += 1
        self._retired = [live for live in self._retired if live.sessions]

    def _unload_unused(self) -> None:
        """Unload releases without sessions that are no longer offered."""
        for key, live in list(self._live.items()):
            agent = self._routes.agents.get(live.agent)
            if not live.sessions and (agent is None or live.version not in agent.releases):
                del self._live[key]
                for writer in live.writers.values():
                    stats = writer.stats()
                    self._replay_counts[0] += stats.written + stats.waiting
                    self._replay_counts[1] += stats.dropped
                self._pool.submit(live.close)  # may block on the disk

    # -- GatewayExtension

    def on_start(self, gateway: Gateway) -> None:
        self._gateway = gateway
        if self.settings.log_form is not None:
            log_format.configure(self.settings.log_form, f"worker {gateway.slot}")
        if self.settings.access_log is not None:
            self._log = AccessLog(self.settings.access_log)
            gateway.access_log, gateway.log_ticks = self._log_request, self.settings.log_ticks
        self._snapshot()

    async def on_stop(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
        for live in self._live.values():
            live.close()
        self._snapshot()
        if self._log is not None:
            self._log.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def sweep(self, now: float) -> None:
        if self._loading is None and (self._watcher.has_changed() or now >= self._retry_at):
            self._retry_at = math.inf
            self._load_new_releases()
        self._move_sessions()
        if now >= self._snapshot_at:
            self._snapshot_at = now + _SNAPSHOT_S
            self._unload_unused()
            self._snapshot()

    def page(self, path: str) -> Page | None:
        if path != spec.METRICS:
            return None
        self._snapshot()
        return Page(200, prometheus.render(prometheus.read_snapshots(self.directory), time.monotonic()), prometheus.MEDIA)

    def _log_request(self, record: AccessRecord) -> None:
        assert self._log is not None
        assert self._gateway is not None
        session = self._gateway.sessions.find(record.session) if record.kind is spec.START else None
        live = session.actor.live if session is not None and session.started else None
        entry = AccessEntry(
            kind=record.kind or record.path,
            status=record.status,
            session=record.session,
            seq=record.seq,
            ms=record.seconds * 1e3,
            request_id=record.request_id,
            caller=record.caller,
            peer=record.peer,
            error=record.error,
            model=live.agent if live is not None else "",
            version=live.version if live is not None else 0,
        )
        self._log.record(entry)

    def _snapshot(self) -> None:
        assert self._gateway is not None
        prometheus.write_snapshot(self.directory, str(self._gateway.slot), self._collect_metrics(self._gateway))

    def _collect_metrics(self, gateway: Gateway) -> dict[str, Any]:
        writers = [writer.stats() for live in self._live.values() for writer in live.writers.values()]
        agents: dict[str, Any] = {}
        for name, agent in self._routes.agents.items():
            agents[name] = {
                "current": agent.current,
                "canary": agent.canary,
                "moved": {how: self._move_counts[name, how] for how in ("carried", "reset")},
                "versions": {str(live.version): live.metrics() for live in self._live.values() if live.agent == name},
            }
        return {
            "at": time.monotonic(),  # comparable between processes of this machine
            "began": self._began,
            "draining": gateway.draining,
            "connections": gateway.connections,
            "sessions_limit": gateway.sessions.limits.sessions,
            "stats": gateway.sessions.stats.to_json(),
            "refused": dict(gateway.refusals + gateway.sessions.refusals),
            "agents": agents,
            "replay": {
                "segments": self._replay_counts[0] + sum(writer.written for writer in writers),
                "dropped": self._replay_counts[1] + sum(writer.dropped for writer in writers),
            },
            "log_dropped": self._log.stats().dropped if self._log is not None else 0,
        }
