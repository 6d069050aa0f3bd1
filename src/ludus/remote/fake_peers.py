"""Fakes of both ends of the protocol: an actor with constant replies, and a game that plays without end.

RemoteActor(port=8000).serve(FakeActor, fake_actor_tick_return=b"left")
stats = FakeGamecore("http://127.0.0.1:8000", games=64, ticks=100).run(seconds=10)
"""

from __future__ import annotations

import asyncio
import functools
import math
import mmap
import os
import struct
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ludus.core.spaces import SpaceParser
from ludus.distributed.gateway_workers import run_loop
from ludus.errors import LudusError, Refused, UsageError
from ludus.gateway.actor import Actor
from ludus.protocol.client import AsyncClient
from ludus.protocol.codec import ONLY_SEAT, Format, bounds_error, decode, encode, parse_seats, random_observation

_PAUSE_S = 0.2
"""Pause after a failed match, to avoid flooding a server that is down."""
_LEAVE_S = 5.0
"""Time for ending the running matches at the end."""


class Traffic:
    """Counters of requests and body bytes; with a directory, readable from other processes."""

    _FORM = struct.Struct("=3q")

    def __init__(self, directory: Path | None = None) -> None:
        self.counts: array[int] | memoryview[int] = array("q", [0, 0, 0])
        if directory is not None:
            path = directory / str(os.getpid())
            path.write_bytes(bytes(self._FORM.size))
            with path.open("r+b") as file:
                self.counts = memoryview(mmap.mmap(file.fileno(), self._FORM.size)).cast("q")

    @classmethod
    def sum(cls, directory: Path) -> tuple[int, int, int]:
        """(requests, bytes in, bytes out) of all processes that use the directory."""
        parts = [cls._FORM.unpack(path.read_bytes()) for path in directory.iterdir() if path.stat().st_size == cls._FORM.size]
        return sum(p[0] for p in parts), sum(p[1] for p in parts), sum(p[2] for p in parts)


class FakeActor(Actor):
    """Replies with constants."""

    def __init__(
        self,
        fake_actor_tick_return: bytes = b"fake_actor_tick_return",
        fake_actor_end_return: bytes = b"fake_actor_end_return",
        traffic: Traffic | None = None,
    ) -> None:
        self._tick_return, self._end_return = fake_actor_tick_return, fake_actor_end_return
        self._counts = (traffic or Traffic()).counts

    async def start(self, session: str, body: bytes) -> bytes:
        return self._answer(body, b"")

    async def tick(self, body: bytes) -> bytes:
        return self._answer(body, self._tick_return)

    async def end(self, body: bytes) -> bytes:
        return self._answer(body, self._end_return) if self.ended_by == "game" else b""

    def _answer(self, body: bytes, reply: bytes) -> bytes:
        counts = self._counts
        counts[0] += 1
        counts[1] += len(body)
        counts[2] += len(reply)
        return reply


class FakeActors:
    """Makes the fake actors of a worker process, which share their counters."""

    def __init__(self, tick_return: bytes, end_return: bytes, directory: Path) -> None:
        self._returns, self._directory = (tick_return, end_return), directory
        self._traffic: Traffic | None = None

    def __call__(self) -> FakeActor:
        if self._traffic is None:
            self._traffic = Traffic(self._directory)
        return FakeActor(*self._returns, self._traffic)


# -- the game -----------------------------------------------------------------------------------------------------------


class LatencyQuantiles:
    """A histogram from 1 µs to about 20 minutes in steps of 2 %, of constant size."""

    _STEP = math.log(1.02)

    def __init__(self) -> None:
        self._counts = np.zeros(1060, np.int64)

    def add(self, seconds: float) -> None:
        self._counts[min(1059, int(math.log(max(1.0, seconds * 1e6)) / self._STEP))] += 1

    def quantile(self, q: float) -> float:
        """In seconds; NaN without measurements."""
        total = int(self._counts.sum())
        if not total:
            return math.nan
        at = int(np.searchsorted(np.cumsum(self._counts), q * total))
        return math.exp((at + 0.5) * self._STEP) / 1e6


@dataclass
class GamecoreStats:
    requests: int = 0
    """Answered with status 200."""
    matches: int = 0
    bytes_out: int = 0
    """Bytes of bodies sent by the game."""
    bytes_in: int = 0
    seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    """By error code; `unreachable`, and `action` for invalid replies."""
    example: str = ""
    """The first error message."""
    latencies: LatencyQuantiles = field(default_factory=LatencyQuantiles, repr=False)

    def to_json(self) -> dict[str, Any]:
        p50, p99 = (self.latencies.quantile(q) for q in (0.5, 0.99))
        return {
            **{name: getattr(self, name) for name in ("requests", "matches", "bytes_out", "bytes_in")},
            "seconds": round(self.seconds, 3),
            "requests_per_s": round(self.requests / self.seconds, 1) if self.seconds else None,
            "p50_ms": None if math.isnan(p50) else round(p50 * 1e3, 3),
            "p99_ms": None if math.isnan(p99) else round(p99 * 1e3, 3),
            "errors": dict(self.errors),
            "example": self.example,
        }


class GameScript:
    """Bodies that the fake games send: the same bytes for every tick, or a function of its number."""

    def __init__(self, body: bytes | Callable[[int], bytes]) -> None:
        self._body = body

    def tick(self, number: int) -> bytes:
        return self._body if isinstance(self._body, bytes) else self._body(number)

    def end(self) -> bytes:
        return b""

    def find_error(self, reply: bytes) -> str:
        """Describe what is wrong with the reply to a tick; empty if it is valid."""
        return ""


class SpacesScript(GameScript):
    """Random observations of the declared spaces, for the built-in actor; checks that its actions are in theirs."""

    _VARIETY = 64

    def __init__(self, spec: dict[str, Any], form: Format, seed: int = 0) -> None:
        self._seats, self._form = parse_seats(spec), form
        self._parsers = {name: SpaceParser(seat.action, "action") for name, seat in self._seats.items()}
        rng = np.random.default_rng(seed)
        first = self._encode_step(rng, 0.0)  # no reward before the first action
        later = [self._encode_step(rng, float(rng.normal())) for _ in range(self._VARIETY)]
        super().__init__(lambda number: later[number % self._VARIETY] if number else first)
        self._last = encode(self._message({name: {"reward": 1.0, "terminated": True} for name in self._seats}), form)

    def _message(self, parts: dict[str, Any]) -> dict[str, Any]:
        return parts[ONLY_SEAT] if set(parts) == {ONLY_SEAT} else {"seats": parts}

    def _encode_step(self, rng: np.random.Generator, reward: float) -> bytes:
        fields = {"reward": reward, "terminated": False, "truncated": False}
        parts = {name: {"observation": random_observation(seat.observation, rng), **fields} for name, seat in self._seats.items()}
        return encode(self._message(parts), self._form)

    def end(self) -> bytes:
        return self._last

    def find_error(self, reply: bytes) -> str:
        try:
            message = decode(reply)
        except ValueError as error:
            return f"The reply is not {self._form}: {error}."
        single = set(self._seats) == {ONLY_SEAT}
        key = "action" if single else "actions"
        if not isinstance(message, dict) or message.keys() != {key}:
            return f"The reply is {str(message)[:80]}, not an object with {key!r} alone."
        actions = {ONLY_SEAT: message[key]} if single else message[key]
        if not isinstance(actions, dict) or actions.keys() != self._seats.keys():
            return f"Actions came back for {actions!r:.80}, the seats are {sorted(self._seats)}."
        for name, action in actions.items():
            try:
                fitted = self._parsers[name](action)
            except ValueError as error:
                return f"The action does not fit its space: {error}."
            if problem := bounds_error(self._seats[name].action, fitted, "action"):
                return problem
        return ""


class FakeGamecore:
    """Plays `games` matches at a time, each start → `ticks` × tick → end, repeatedly.

    `body`: the bytes of every tick, or a function of its number within the match. With `form` the spaces are requested by
    GET /spec, bodies are random observations, and actions are checked. One connection per game, or `connections` shared ones.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        games: int = 1,
        ticks: int = 100,
        body: bytes | Callable[[int], bytes] = b"fake_gamecore_tick",
        *,
        form: Format | None = None,
        connections: int | None = None,
        think_s: float = 0.0,
        token: str | None = None,
        timeout_s: float = 10.0,
        retries: int = 2,
        seed: int = 0,
    ) -> None:
        if games < 1 or ticks < 0 or (connections is not None and connections < 1):
            message = f"games is {games}, ticks {ticks}, connections {connections}."
            raise UsageError(message, "games and connections must be at least 1.")
        self._games, self._ticks, self._think_s, self._seed = games, ticks, think_s, seed
        self._body, self._form = body, form
        self._connections = min(connections or games, games)
        self._client = functools.partial(AsyncClient, url, token, timeout_s, retries)
        self._id = uuid.uuid4().hex[:12]
        self._stopping = False
        self.stats = GamecoreStats()
        self.playing = 0

    def run(self, seconds: float | None = None, matches: int | None = None) -> GamecoreStats:
        """Play in this thread for `seconds`, or `matches` of each game. Raises the errors of the server's /spec."""
        run_loop(self.play(seconds, matches))
        return self.stats

    async def play(self, seconds: float | None = None, matches: int | None = None) -> None:
        """Like `run`, on the running event loop."""
        self._stopping = False
        clients = [self._client() for _ in range(self._connections)]
        games: list[asyncio.Task[None]] = []
        began = time.monotonic()
        try:
            if self._form is None:
                script = GameScript(self._body)
            else:
                script = SpacesScript(await clients[0].spec(), self._form, self._seed)
            games = [asyncio.create_task(self._game(clients[i % len(clients)], i, matches, script)) for i in range(self._games)]
            _, rest = await asyncio.wait(games, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            self.stop()
            if rest:
                await asyncio.wait(rest, timeout=self._think_s + _LEAVE_S)
        finally:
            self.stats.seconds += time.monotonic() - began
            for game in games:
                game.cancel()
            ends = await asyncio.gather(*games, return_exceptions=True)
            for client in clients:
                await client.close()
        for end in ends:  # only a body function of the caller can have raised
            if isinstance(end, Exception):
                raise end

    def stop(self) -> None:
        """End every match at its next tick and start no others."""
        self._stopping = True

    async def _game(self, client: AsyncClient, number: int, matches: int | None, script: GameScript) -> None:
        match = 0
        while not self._stopping and (matches is None or match < matches):
            failed: LudusError | None = None
            self.playing += 1
            try:
                await self._match(client, f"fake-{self._id}-{number}-{match}", script)
                self.stats.matches += 1
            except LudusError as error:
                failed = error
            finally:
                self.playing -= 1
            if failed is not None:
                self._count_error(failed.error if isinstance(failed, Refused) else "unreachable", str(failed))
                await asyncio.sleep(_PAUSE_S)
            match += 1

    async def _match(self, client: AsyncClient, session: str, script: GameScript) -> None:
        stats = self.stats
        self._count_request(b"", await client.start(session))
        for number in range(self._ticks):
            if self._stopping:
                break
            if self._think_s:
                await asyncio.sleep(self._think_s)
            body, sent = script.tick(number), time.perf_counter()
            reply = await client.tick(session, body)
            stats.latencies.add(time.perf_counter() - sent)  # the clock of uvloop is coarse
            self._count_request(body, reply)
            error = script.find_error(reply)
            if error:
                self._count_error("action", error)
        body = script.end()
        self._count_request(body, await client.end(session, body))

    def _count_request(self, body: bytes, reply: bytes) -> None:
        stats = self.stats
        stats.requests += 1
        stats.bytes_out += len(body)
        stats.bytes_in += len(reply)

    def _count_error(self, kind: str, what: str) -> None:
        self.stats.errors[kind] += 1
        self.stats.example = self.stats.example or what
