"""The production service, in one worker: the gateway and the policies of a run, without a trainer. The actor is that of training.

A session keeps the version that it began with until it ends. New versions come by the line-up; when more of them live side by
side than may, the sessions of the oldest move on to the current one.
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
from ludus.gateway.http_connection import Page, Replied
from ludus.gateway.latency_histogram import Meter
from ludus.gateway.server import Gateway, Watched
from ludus.models.inference.batched_policy import ActingPolicy, BatchedPolicy
from ludus.protocol import spec as protocol
from ludus.sampling.segment_recorder import acting_policy_spec
from ludus.serving import log_format, prometheus, release, routing_table
from ludus.serving.access_log import AccessLog
from ludus.serving.routing_table import Lineup
from ludus.transport.replay_log import RecordedRoom

log = logging.getLogger(__name__)

_SNAPSHOT_S = 1.0
_AGAIN_S = 5.0
_MOVES = 2000
"""Sessions that move at a turn, of which there are ten a second. With fewer, three versions share the core for longer (measured)."""


@dataclass(frozen=True)
class Recording:
    """The replay log: which part of the sessions is written down, where, and how much of it."""

    directory: Path
    fraction: float = 0.01
    limit_bytes: int = 1 << 30
    steps: int = 256


@dataclass(frozen=True)
class ServiceSettings:
    temperature: float = 0.0
    """Of sessions that ask for none: 0 takes the most probable action, 1 draws as in training."""
    max_live_versions: int = 2
    """Of one agent, levels not counted."""
    carry_state: bool = True
    """What becomes of the recurrent state of a session that moves to another version."""
    max_batch_size: int = 256
    access_log: str | None = None
    """A file, or "-"."""
    log_ticks: bool = False
    recording: Recording | None = None
    log_form: log_format.Form | None = None
    """Of what the workers say on the standard error; None: as Python does it."""


@dataclass(frozen=True)
class Fixed:
    """A policy that does not change any more."""

    policy: ActingPolicy
    version: int

    def newest(self) -> tuple[ActingPolicy, int]:
        return self.policy, self.version


class Live:
    """One release of one agent in this worker: what its sessions share."""

    def __init__(self, agent: str, loaded: release.Loaded, settings: ServiceSettings) -> None:
        self.agent, self.version, self._loaded = agent, loaded.version, loaded
        self.meter = Meter()
        self.deciding = {
            name: BatchedPolicy(Fixed(player, loaded.versions[name]), max_batch_size=settings.max_batch_size, deterministic=True)
            for name, player in loaded.players.items()
        }
        self.seats = {seat: Seat(self.deciding[name]) for seat, name in loaded.seats.items()}
        self.sessions: weakref.WeakSet[ServedActor] = weakref.WeakSet()
        self._recording = settings.recording
        self.rooms: dict[str, RecordedRoom] = {}

    def recorded_seats(self, temperature: float) -> dict[str, Seat]:
        """The same seats, for a session that is written down."""
        assert self._recording is not None
        seats = {}
        for seat, name in self._loaded.seats.items():
            room = self.rooms.get(name)
            if room is None:
                longest = json.loads(self._loaded.descriptions[name])["network"]["max_seq_len"]
                spec = acting_policy_spec(self._loaded.players[name], self._recording.steps, longest, name)
                room = self.rooms[name] = RecordedRoom(spec, self._directory(), self._recording.limit_bytes)
            seats[seat] = Seat(self.deciding[name], room.at(temperature), first_origin=int.from_bytes(os.urandom(6), "little"))
        return seats

    def _directory(self) -> Path:
        """Agents with names are kept apart: their models may be called alike."""
        assert self._recording is not None
        named = self.agent if self.agent != routing_table.DEFAULT_AGENT else ""
        return self._recording.directory / routing_table.as_file(named) if named else self._recording.directory

    def numbers(self) -> dict[str, Any]:
        batchers = [deciding.batcher for deciding in self.deciding.values()]
        return {
            "sessions": len(self.sessions),
            "batches": [sum(column) for column in zip(*(batcher.sizes for batcher in batchers), strict=True)],
            "batch_seconds": [sum(column) for column in zip(*(batcher.seconds for batcher in batchers), strict=True)],
            "answered": sum(batcher.answered for batcher in batchers),
            **self.meter.to_json(),
        }

    def close(self) -> None:
        """Nobody plays against it any more. May wait for the disk."""
        for deciding in self.deciding.values():
            deciding.batcher.close()
        for room in self.rooms.values():
            room.close()


class ServedActor(BuiltinActor):
    """The built-in actor, with the version and temperature that its session is given."""

    meter: Meter
    live: Live

    def __init__(self, service: Service) -> None:
        super().__init__({})
        self._service: Service | None = service

    async def start(self, session: str, body: bytes) -> bytes:
        assert self._service is not None
        service, self._service = self._service, None
        live = service.live_for(session, self.about)
        temperature = self.about.temperature if self.about.temperature >= 0 else service.settings.temperature
        self.sit(live.recorded_seats(temperature) if service.is_recorded(session) else live.seats)
        self._temperature = temperature
        await super().start(session, body)
        self.join(live)  # from here on nothing can be refused
        return json.dumps({"model": live.agent, "version": live.version}).encode()

    async def end(self, body: bytes) -> bytes:
        reply = await super().end(body)
        self.live.sessions.discard(self)
        return reply

    def join(self, live: Live) -> None:
        self.live, self.meter = live, live.meter
        live.sessions.add(self)


@dataclass
class Service:
    """Makes the actors of a worker, and is the house around its gateway. Travels to the worker as plain data."""

    directory: Path
    """Where the line-up is, and the files of its releases."""
    settings: ServiceSettings = field(default_factory=ServiceSettings)

    def load(self) -> None:
        """Once, in the worker, before its event loop begins."""
        np.seterr(over="ignore", invalid="ignore")  # what games send is looked at, and refused, where it matters
        self._watched = Watched(self.directory / routing_table.FILE)
        self._lineup = Lineup.read(self.directory)
        self._live: dict[tuple[str, int], Live] = {}
        self._retired: list[Live] = []
        self._moved: Counter[tuple[str, str]] = Counter()
        self._replayed = [0, 0]  # segments of releases that are gone: written, dropped
        self._loading: asyncio.Future[Any] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="release")
        self._gateway: Gateway | None = None
        self._log: AccessLog | None = None
        self._began = time.time()
        self._snapshot_at, self._again_at = 0.0, math.inf
        for name, version, path in self._missing(self._lineup):
            self._live[name, version] = Live(name, self._read(path), self.settings)

    def __call__(self) -> ServedActor:
        return ServedActor(self)

    # -- sessions

    def live_for(self, session: str, about: protocol.About) -> Live:
        """Raises Refused (404)."""
        return self._live[self._lineup.choose(session, about)]

    def is_recorded(self, session: str) -> bool:
        recording = self.settings.recording
        return recording is not None and routing_table.drawn(session, "record") < recording.fraction

    # -- new versions

    def _missing(self, wanted: Lineup) -> list[tuple[str, int, Path]]:
        return [
            (name, version, self.directory / path)
            for name, agent in wanted.agents.items()
            for version, path in agent.releases.items()
            if (name, version) not in self._live
        ]

    def _read(self, path: Path) -> release.Loaded:
        return release.read(path, values=self.settings.recording is not None)  # only who learns asks for them

    def _look(self) -> None:
        """Begin to load what the line-up has and we have not."""
        try:
            wanted = Lineup.read(self.directory)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.error("the line-up cannot be read; the versions of before go on: %r", error)
            self._again_at = asyncio.get_running_loop().time() + _AGAIN_S
            return
        missing = self._missing(wanted)

        def loaded() -> dict[tuple[str, int], release.Loaded]:
            return {(name, version): self._read(path) for name, version, path in missing}

        self._loading = asyncio.get_running_loop().run_in_executor(self._pool, loaded)
        self._loading.add_done_callback(lambda done: self._take_up(wanted, done))

    def _take_up(self, wanted: Lineup, loading: asyncio.Future[dict[tuple[str, int], release.Loaded]]) -> None:
        self._loading = None
        if loading.cancelled():
            return
        error = loading.exception()
        if error is not None:  # whatever a new version has wrong: runtimes of models raise exceptions of their own
            what = str(error) if isinstance(error, LudusError) else repr(error)
            log.error("a new version cannot be loaded; those of before go on: %s", what)
            self._again_at = asyncio.get_running_loop().time() + _AGAIN_S
            return
        for (name, version), found in loading.result().items():
            self._live[name, version] = Live(name, found, self.settings)
        self._lineup = wanted
        for name in wanted.agents:
            self._retire(name)
        self._move()
        self._tidy()

    def _retire(self, name: str) -> None:
        """When too many versions live side by side, the oldest have to go."""
        agent = self._lineup.agents[name]
        staying = {agent.current, *agent.levels} | ({agent.canary} if agent.canary is not None else set())
        living = [live for (of, _), live in self._live.items() if of == name and live.version not in agent.levels]
        living = [live for live in living if live.sessions or live.version in staying]  # in the order of their arrival
        leaving = [live for live in living if live.version not in staying]
        too_many = max(0, len(living) - self.settings.max_live_versions)
        gone = [*leaving[:too_many], *(live for live in leaving if live.version in agent.withdrawn)]
        before = [live for live in self._retired if live.agent != name or live.version not in staying]  # one may come back
        self._retired = list(dict.fromkeys([*before, *gone]))

    def _move(self) -> None:
        """Sessions of retired versions go on with the current one, some at every turn, so that no tick waits for thousands of
        others. Those that are being answered do so a little later."""
        if not self._retired or self._gateway is None:
            return
        retired, left = set(self._retired), _MOVES
        for session in self._gateway.sessions.idle():
            actor = session.actor
            if not isinstance(actor, ServedActor) or actor.live not in retired:
                continue
            left -= 1
            if left < 0:
                break
            target = self._live[actor.live.agent, self._lineup.agents[actor.live.agent].current]
            carried = actor.move(target.seats, carry=self.settings.carry_state)
            actor.live.sessions.discard(actor)
            actor.join(target)
            session.meter = target.meter
            self._moved[target.agent, "carried" if carried else "reset"] += 1
        self._retired = [live for live in self._retired if live.sessions]

    def _tidy(self) -> None:
        """What nobody plays against any more, and nobody can ask for, is let go."""
        for key, live in list(self._live.items()):
            agent = self._lineup.agents.get(live.agent)
            if not live.sessions and (agent is None or live.version not in agent.releases):
                del self._live[key]
                for room in live.rooms.values():
                    stats = room.stats()
                    self._replayed[0] += stats.written + stats.waiting
                    self._replayed[1] += stats.dropped
                self._pool.submit(live.close)  # it may have to wait for the disk

    # -- the house around the gateway

    def moved_in(self, gateway: Gateway) -> None:
        self._gateway = gateway
        if self.settings.log_form is not None:
            log_format.configure(self.settings.log_form, f"worker {gateway.slot}")
        if self.settings.access_log is not None:
            self._log = AccessLog(self.settings.access_log)
            gateway.logs, gateway.logs_ticks = self._note, self.settings.log_ticks
        self._snapshot()

    async def moved_out(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
        for live in self._live.values():
            live.close()
        self._snapshot()
        if self._log is not None:
            self._log.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def sweep(self, now: float) -> None:
        if self._loading is None and (self._watched.changed() or now >= self._again_at):
            self._again_at = math.inf
            self._look()
        self._move()
        if now >= self._snapshot_at:
            self._snapshot_at = now + _SNAPSHOT_S
            self._tidy()
            self._snapshot()

    def page(self, path: str) -> Page | None:
        if path != protocol.METRICS:
            return None
        self._snapshot()
        return Page(200, prometheus.text(prometheus.snapshots(self.directory), time.monotonic()), prometheus.MEDIA)

    def _note(self, replied: Replied) -> None:
        assert self._log is not None
        assert self._gateway is not None
        begun = self._gateway.sessions.find(replied.session) if replied.kind is protocol.START else None
        live = begun.actor.live if begun is not None and begun.opened else None
        self._log.request(
            kind=replied.kind or replied.path,
            status=replied.status,
            session=replied.session,
            seq=replied.seq,
            ms=replied.seconds * 1e3,
            request_id=replied.request_id,
            caller=replied.caller,
            peer=replied.peer,
            error=replied.error,
            model=live.agent if live is not None else "",
            version=live.version if live is not None else 0,
        )

    def _snapshot(self) -> None:
        assert self._gateway is not None
        prometheus.write_snapshot(self.directory, str(self._gateway.slot), self._numbers(self._gateway))

    def _numbers(self, gateway: Gateway) -> dict[str, Any]:
        rooms = [room.stats() for live in self._live.values() for room in live.rooms.values()]
        agents: dict[str, Any] = {}
        for name, agent in self._lineup.agents.items():
            agents[name] = {
                "current": agent.current,
                "canary": agent.canary,
                "moved": {how: self._moved[name, how] for how in ("carried", "reset")},
                "versions": {str(live.version): live.numbers() for live in self._live.values() if live.agent == name},
            }
        return {
            "at": time.monotonic(),  # of this machine, on which they are read
            "began": self._began,
            "draining": gateway.draining,
            "connections": gateway.connections,
            "sessions_limit": gateway.sessions.limits.sessions,
            "stats": gateway.sessions.stats.to_json(),
            "refused": dict(gateway.refusals + gateway.sessions.refusals),
            "agents": agents,
            "replay": {
                "segments": self._replayed[0] + sum(room.written for room in rooms),
                "dropped": self._replayed[1] + sum(room.dropped for room in rooms),
            },
            "log_dropped": self._log.stats().dropped if self._log is not None else 0,
        }
