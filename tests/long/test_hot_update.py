"""Ten thousand sessions that remember are moved from version to version while they play: nobody fails, nobody forgets."""

from __future__ import annotations

import asyncio
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.core.tree import Array
from ludus.gateway.server import GatewaySettings
from ludus.gateway.sessions import SessionLimits
from ludus.models.policy import Policy
from ludus.serving.checkpoint_follower import CheckpointSource, UpdateSettings
from ludus.serving.launcher import RunningService
from ludus.serving.worker import ServiceSettings
from tests.long.record import record
from tests.serving.releases import checkpointed, metrics, policy, total

SESSIONS, CONNECTIONS, WORKERS, UPDATES, CALM_ROUNDS = 10_000, 32, 2, 4, 4
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@dataclass
class Crowd:
    """What every session must answer next: its version and its state, as rows."""

    versions: list[Policy]
    at: Array = field(default_factory=lambda: np.zeros(SESSIONS, np.int64))
    state: tuple[Array, ...] = ()
    moves: int = 0
    wrong: int = 0

    def __post_init__(self) -> None:
        self.state = tuple(np.stack([spec.zeros()] * SESSIONS) for spec in self.versions[0].state_spec())

    def check(self, seen: Array, answers: Array) -> None:
        """One tick of everybody. Each answer is that of the version of before or of a later one, from the state of before."""
        left, before = np.ones(SESSIONS, bool), tuple(part.copy() for part in self.state)
        for version, made in enumerate(self.versions):
            asked = np.flatnonzero(left & (self.at <= version))
            if not len(asked):
                continue
            acted = made.act(seen[asked], tuple(part[asked] for part in before))
            right = np.isclose(acted.action, answers[asked], atol=1e-4).all(axis=1)
            found = asked[right]
            self.moves += int((self.at[found] != version).sum())
            self.at[found] = version
            for part, after in zip(self.state, acted.state, strict=True):
                part[found] = after[right]
            left[found] = False
        self.wrong += int(left.sum())


class Line:
    """A kept connection on which one request follows the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, kind: bytes, session: int, body: bytes = b"") -> tuple[int, bytes]:
        head = b"POST /step HTTP/1.1\r\nsession: s%d\r\nstep_kind: %b\r\nContent-Length: %d\r\n\r\n"
        self._writer.write(head % (session, kind, len(body)) + body)
        async with asyncio.timeout(60):
            answer = await self._reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in answer.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            return int(answer[9:12]), await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.close()


@dataclass
class Load:
    lines: list[Line]
    failed: list[str] = field(default_factory=list)

    async def each(self, kind: bytes, bodies: list[bytes]) -> tuple[list[bytes], list[float]]:
        """Ask once for every session; replies, and how long each took."""
        replies, took = [b""] * SESSIONS, [0.0] * SESSIONS

        async def work(line: Line, sessions: range) -> None:
            for session in sessions:
                began = time.perf_counter()
                status, replies[session] = await line.ask(kind, session, bodies[session])
                took[session] = time.perf_counter() - began
                if status != 200:
                    self.failed.append(f"{kind!r} of session {session}: {status} {replies[session]!r}")

        await asyncio.gather(*(work(line, range(n, SESSIONS, CONNECTIONS)) for n, line in enumerate(self.lines)))
        return replies, took

    async def tick(self, crowd: Crowd, random: np.random.Generator) -> list[float]:
        seen = random.uniform(-2, 2, (SESSIONS, 3)).astype("<f4")
        head = struct.pack("<fI", 0, 0)
        replies, took = await self.each(b"tick", [head + row.tobytes() for row in seen])
        if not self.failed:
            crowd.check(seen, np.stack([np.frombuffer(reply, "<f4") for reply in replies]))
        return took


async def looked_after(service: RunningService, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await asyncio.to_thread(service.poll)
        await asyncio.sleep(0.1)


def p99_ms(took: list[float]) -> float:
    return round(1e3 * float(np.quantile(took, 0.99)), 2)


def test_ten_thousand_sessions_move_under_load_without_a_failed_tick_or_a_lost_memory(tmp_path: Path) -> None:
    versions = [policy(n) for n in range(1, UPDATES + 2)]
    checkpointed(tmp_path / "run", 1, versions[0])
    crowd, random = Crowd(versions), np.random.default_rng(0)
    gateway = GatewaySettings(sessions=SessionLimits(silent_s=300))
    offering, settings = UpdateSettings(follow=True, follow_s=0.2), ServiceSettings(max_live_versions=1)
    before: list[float] = []
    during: list[float] = []

    async def play(service: RunningService) -> tuple[Load, float]:
        port = service.fleet.address[1]
        lines = [Line(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        load, stop = Load(lines), asyncio.Event()
        caring = asyncio.create_task(looked_after(service, stop))
        try:
            await load.each(b"start", [b'{"format": "raw"}'] * SESSIONS)
            await load.tick(crowd, random)  # the first one of each session costs more
            for _ in range(CALM_ROUNDS):
                before.extend(await load.tick(crowd, random))
            for version in range(2, UPDATES + 2):
                checkpointed(tmp_path / "run", version, versions[version - 1])
                while not load.failed and not crowd.wrong and (crowd.at < version - 1).any():
                    during.extend(await load.tick(crowd, random))
            counted: Any = await asyncio.to_thread(metrics, port)
            await load.each(b"end", [b""] * SESSIONS)
            return load, total(counted, "ludus_sessions_moved_total", how="carried")
        finally:
            stop.set()
            await caring
            for line in lines:
                line.close()

    with RunningService(
        {"default": CheckpointSource(str(tmp_path / "run"))}, offering, settings, gateway, workers=WORKERS
    ) as service:
        load, moved = asyncio.run(play(service))
    record(
        "hot updates of ten thousand open sessions",
        sessions=SESSIONS,
        updates=UPDATES,
        ticks=len(before) + len(during),
        failed_ticks=len(load.failed),
        wrong_state_replies=crowd.wrong,
        moved=crowd.moves,
        p99_before_ms=p99_ms(before),
        p99_during_ms=p99_ms(during),
        slowest_during_ms=round(1e3 * max(during), 1),
    )
    assert load.failed == []
    assert crowd.wrong == 0
    assert crowd.moves == UPDATES * SESSIONS
    assert moved == pytest.approx(crowd.moves, abs=SESSIONS), "a snapshot may be a second old"
    assert max(during) < 30, "nobody waits for ever"
