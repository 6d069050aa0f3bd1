"""Workers of a gateway are killed again and again under load: every request is answered, and only what must be lost is lost."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import pytest

from ludus.distributed.gateway_workers import GatewayProgram, GatewayWorkers
from ludus.errors import Refused, Unreachable
from ludus.gateway.actor import Actor
from ludus.gateway.server import owner_of
from ludus.process.workers.supervisor import Supervisor
from ludus.protocol.client import AsyncClient
from tests.long.record import record

KILLS, GAMES, WORKERS = 40, 48, 3
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


class Counting(Actor):
    """Answers with how many ticks it has seen: a wrong or doubled call shows at once."""

    def __init__(self) -> None:
        self.session, self.count = "", 0

    async def start(self, session: str, body: bytes) -> bytes:
        self.session = session
        return b"0"

    async def tick(self, body: bytes) -> bytes:
        self.count += 1
        return f"{self.session} {self.count}".encode()


@dataclass
class Tally:
    answered: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    innocent: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    killed_at: dict[int, float] = field(default_factory=dict)


async def play(port: int, number: int, tally: Tally, stop: asyncio.Event) -> None:
    match = 0
    while not stop.is_set():
        match += 1
        session, ticks, began = f"game-{number}-{match}", 0, time.monotonic()
        async with AsyncClient(f"http://127.0.0.1:{port}", timeout_s=10.0, retries=20) as client:
            try:
                await client.start(session)
                while not stop.is_set() and ticks < 200:
                    asked = time.monotonic()
                    reply = await client.tick(session, b"x")
                    tally.slowest_s = max(tally.slowest_s, time.monotonic() - asked)
                    ticks += 1
                    tally.answered += 1
                    if reply != f"{session} {ticks}".encode():
                        tally.wrong.append(f"{session}: tick {ticks} was answered {reply!r}")
                        return
                await client.end(session)
            except Refused as refused:
                owner = owner_of(session.encode(), WORKERS)
                if refused.status == 410 and tally.killed_at.get(owner, 0.0) >= began:
                    tally.lost += 1
                elif refused.status != 503:
                    tally.innocent.append(f"{session}: {refused.status} {refused.message}")
            except Unreachable as error:
                tally.innocent.append(f"{session}: {error}")


def test_kills_under_load_cost_only_the_sessions_of_the_dead() -> None:
    tally, chance = Tally(), random.Random(0)
    with Supervisor(preload=("numpy",)) as supervisor:
        fleet = GatewayWorkers(supervisor, GatewayProgram(Counting), port=0, workers=WORKERS)
        fleet.wait_ready(60)

        async def run() -> None:
            stop = asyncio.Event()
            games = [asyncio.create_task(play(fleet.address[1], number, tally, stop)) for number in range(GAMES)]
            for _ in range(KILLS):
                await asyncio.sleep(0.3 + 0.3 * chance.random())
                slot = chance.randrange(WORKERS)
                tally.killed_at[slot] = time.monotonic()
                await asyncio.to_thread(fleet.workers[slot].kill)
                await asyncio.to_thread(fleet.workers[slot].wait_ready, 30)
                tally.killed_at[slot] = time.monotonic()  # on a busy machine a session may begin between the kill and the death
            await asyncio.sleep(1)
            stop.set()
            await asyncio.wait_for(asyncio.gather(*games), 60)

        try:
            asyncio.run(run())
        finally:
            fleet.close()
    record(
        "kills of gateway workers under load",
        kills=KILLS,
        ticks=tally.answered,
        sessions_lost=tally.lost,
        wrong_replies=len(tally.wrong),
        others_hurt=len(tally.innocent),
        slowest_reply_s=round(tally.slowest_s, 3),
    )
    assert tally.wrong == []
    assert tally.innocent == []
    assert tally.lost > 0, "nobody was playing on the workers that died"
    assert tally.answered > 1000
