"""Cost of a hero decision over HTTP: game processes of the Arena with a trivial actor.

python -m bench.arena_http                1v1 and 3v3, one match in a process and sixteen
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import uvloop

from bench.transport import keep
from ludus.distributed.gateway_workers import bind
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.host.match import read_plan
from ludus.games.arena.main import play, prepare
from ludus.gateway.actor import Actor
from ludus.gateway.server import Gateway

LIMIT_S = 120.0
NOTHING = [0, 0, 0, 0]
GOAL, FRAMES, ROUNDS = 3_000, 1_500, 5
WAYS = (("1v1", 1), ("1v1", 16), ("3v3", 1), ("3v3", 16))

HOW = """\
A game process plays the matches and requests the actions of all heroes of both camps over HTTP from an actor in another process: msgpack, one session
per camp, observations and masks built and sent. The actor is a Ludus gateway with a few lines that decode the message and answer "nothing". Per core: hero
decisions per second of CPU time of game and actor together. Median [least–most] of {rounds} interleaved rounds."""


class Trivial(Actor):
    """Decodes the observations and does nothing."""

    async def tick(self, body: bytes) -> bytes:
        seats = msgpack.unpackb(body)["seats"]
        reply: bytes = msgpack.packb({"actions": dict.fromkeys(seats, NOTHING)})
        return reply


@dataclass(frozen=True)
class Row:
    mode: str
    matches: int
    decisions: int
    """Hero decisions requested over HTTP."""
    seconds: float
    game_cpu_s: float
    actor_cpu_s: float

    @property
    def per_core(self) -> float:
        """Decisions per second of CPU time of game and actor."""
        return self.decisions / (self.game_cpu_s + self.actor_cpu_s)


@contextmanager
def actor() -> Iterator[tuple[str, Connection]]:
    """Start a gateway process; yield its address and a pipe that returns its CPU time."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(LIMIT_S):
            raise TimeoutError("The actor did not start.")
        yield f"http://127.0.0.1:{ours.recv()}", ours
    finally:
        process.terminate()
        process.join(LIMIT_S)


def _serve(pipe: Connection) -> None:
    listening = bind("127.0.0.1", 0)

    async def serve() -> None:
        gateway = Gateway(Trivial)
        await gateway.start([listening])
        asked = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), asked.set)
        pipe.send(listening.getsockname()[1])
        while True:
            await asked.wait()
            pipe.recv()
            asked.clear()
            pipe.send(_cpu_s())

    uvloop.run(serve())


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _actor_cpu_s(pipe: Connection) -> float:
    pipe.send(None)
    if not pipe.poll(LIMIT_S):
        raise TimeoutError("The actor does not answer.")
    used: float = pipe.recv()
    return used


def through_http(mode: str, matches: int, frames: int = 1500) -> Row:
    """Measure `matches` matches of one process with the actor in both camps."""
    prepare()
    with actor() as (url, pipe):
        for limit in (60, frames):  # a short one first as warm-up
            before, busy, at = _actor_cpu_s(pipe), _cpu_s(), time.perf_counter()
            results = _play(mode, matches, limit, url)
            seconds, game, there = time.perf_counter() - at, _cpu_s() - busy, _actor_cpu_s(pipe) - before
    assert not any(result["lost"] or result["late"] or result["garbled"] for result in results)
    decisions = sum(hero["asked"] for result in results for hero in result["heroes"])
    return Row(mode, matches, decisions, seconds, game, there)


def _play(mode: str, matches: int, frames: int, url: str) -> list[dict[str, Any]]:
    camps = [{"url": url}, {"url": url}]
    config = {"mode": mode, "camps": camps, "max_frames": frames}
    plans = [read_plan(config | {"runtime_id": f"bench-{i}", "seed": i}, (None, None), BOTS) for i in range(matches)]
    return play(plans)[1]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| mode | matches in a process | decisions/s per core | goal | decisions/s by the clock | game, µs a decision | actor, µs |",
        "|---|" + "---:|" * 2 + "---|" + "---:|" * 3,
    ]
    for mode, matches in WAYS:
        found = [row for row in rows if (row["mode"], row["matches"]) == (mode, matches)]
        core = statistics.median(row["per_core"] for row in found)
        game, there = (
            statistics.median(1e6 * row[key] / row["decisions"] for row in found) for key in ("game_cpu_s", "actor_cpu_s")
        )
        cells = [
            f"{core:,.0f} [{min(row['per_core'] for row in found):,.0f}–{max(row['per_core'] for row in found):,.0f}]",
            f"≥ {GOAL:,}: {'reached' if core >= GOAL else 'missed'}",
            f"{statistics.median(row['decisions'] / row['seconds'] for row in found):,.0f}",
            f"{game:.0f}",
            f"{there:.0f}",
        ]
        lines.append(f"| {mode} | {matches} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=FRAMES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for mode, matches in WAYS:
            row = through_http(mode, matches, args.frames)
            rows.append({"round": number, **dataclasses.asdict(row), "per_core": row.per_core})
            print(rows[-1], flush=True)
    body = f"{table(rows)}\n\nLoad of the machine before it: {load:.1f}."
    keep("arena-http", args.frames >= FRAMES and args.rounds >= ROUNDS, rows, body, HOW.format(rounds=args.rounds))


if __name__ == "__main__":
    main()
