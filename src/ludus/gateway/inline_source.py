"""Gathering: a gateway in this process lets games play until there is a batch to learn from, then pauses for the learner.

Nothing else runs between two batches, so an on-policy algorithm gets what its newest version did. Games wait a little while
the learner computes; they notice a slow reply, nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Mapping

import numpy as np
import torch

from ludus.buffers.collate import CollatedBatches
from ludus.core.tree import Array
from ludus.core.types import Segments, SegmentSpec
from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor
from ludus.gateway.server import Gateway, GatewaySettings
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.policy import Policy
from ludus.transport.local import LocalMemory

log = logging.getLogger(__name__)

_TURN_S = 0.25  # how long the others of the program wait at most for their turn
_ORIGINS = 1 << 40  # sessions of one seat, before their numbers would meet those of the next


class WatchedMemory(LocalMemory):
    """Says when something was committed."""

    def __init__(self, spec: SegmentSpec, rows: int, blocks: int) -> None:
        super().__init__(spec, rows, blocks)
        self.committed: Callable[[], None] = lambda: None

    def commit(self, segments: Segments) -> None:
        super().commit(segments)
        self.committed()


class Gathering:
    """One `step()` serves games until the memory holds a batch, or a moment has passed."""

    def __init__(
        self,
        listening: socket.socket,
        settings: GatewaySettings,
        seats: Mapping[str, str],
        deciding: Mapping[str, BatchedPolicy[Policy]],
        memories: Mapping[str, WatchedMemory],
        memory: CollatedBatches,
    ) -> None:
        self._deciding, self._memory = dict(deciding), memory
        self._seats = {
            name: Seat(deciding[model], memories[model], first_origin=number * _ORIGINS)
            for number, (name, model) in enumerate(seats.items())
        }
        self._loop = new_loop()
        self._enough = asyncio.Event()
        for watched in memories.values():
            watched.committed = self._committed
        self._gateway = self._loop.run_until_complete(self._open(listening, settings))
        self.address: tuple[str, int] = listening.getsockname()[:2]

    async def _open(self, listening: socket.socket, settings: GatewaySettings) -> Gateway:
        gateway = Gateway(lambda: BuiltinActor(self._seats), settings)
        await gateway.start([listening])
        return gateway

    def _committed(self) -> None:
        if self._memory.ready():
            self._enough.set()

    def step(self) -> bool:
        if not self._memory.ready():
            with contextlib.ExitStack() as acting:
                for policy in self._policies():
                    acting.enter_context(policy.acting())
                self._loop.run_until_complete(self._serve())
        return True  # waiting for games is work

    async def _serve(self) -> None:
        self._enough.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._enough.wait(), _TURN_S)

    def _policies(self) -> list[Policy]:
        return [deciding.policy for deciding in self._deciding.values()]

    def metrics(self) -> dict[str, float]:
        sessions = self._gateway.sessions
        stats = [seat.stats for seat in self._seats.values()]
        return {
            "games/sessions": float(len(sessions)),
            "games/requests": float(sessions.requests),
            "games/failed": float(sessions.stats.failed),
            "games/timed_out": float(sessions.stats.timed_out),
            "games/silent": float(sessions.stats.silent),
            "games/refused": float(sessions.stats.refused),
            "games/discarded_steps": float(sum(s.discarded for s in stats)),
            "games/unrecorded_steps": float(sum(s.unrecorded for s in stats)),
        }

    def has_sampled(self) -> bool:
        return self._gateway.sessions.requests > 0

    def awaited(self) -> str:
        return f"a game to connect to http://{self.address[0]}:{self.address[1]}/step"

    def unlearned_steps(self) -> int:
        return self._memory.waiting_steps

    def state(self) -> dict[str, Array]:
        return {name: deciding.generator.get_state().numpy() for name, deciding in self._deciding.items()}

    def load_state(self, state: dict[str, Array]) -> None:
        for name, deciding in self._deciding.items():
            if name in state:
                deciding.generator.set_state(torch.from_numpy(np.array(state[name])))

    def close(self) -> None:
        """Sessions end; their actors are told. What they had recorded so far is not learned from any more."""
        self._loop.run_until_complete(self._gateway.close())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


def new_loop() -> asyncio.AbstractEventLoop:
    """The fastest event loop there is."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
