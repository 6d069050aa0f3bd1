"""Experience source with a gateway in the learner's process: serves games until a batch is complete, then pauses.

An on-policy algorithm gets only experience of its newest version, because nothing is served while the learner computes; games
see a slow reply.
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
from ludus.config.schema import SelfPlayConfig
from ludus.core.tree import Array
from ludus.core.types import Segments, SegmentSpec
from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor, SelfPlayActor, SelfPlaySeats
from ludus.gateway.server import Gateway, GatewaySettings
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.policy import Policy
from ludus.sampling.session_opponents import MatchOpponents
from ludus.transport.local import LocalMemory

log = logging.getLogger(__name__)

_SERVE_S = 0.25  # maximum duration of one step
_ORIGINS = 1 << 40  # origin numbers reserved for one seat


class NotifyingMemory(LocalMemory):
    """Calls `on_commit` after each commit."""

    def __init__(self, spec: SegmentSpec, rows: int, blocks: int) -> None:
        super().__init__(spec, rows, blocks)
        self.on_commit: Callable[[], None] = lambda: None

    def commit(self, segments: Segments) -> None:
        super().commit(segments)
        self.on_commit()


class InlineGatewaySource:
    """Each `step()` serves games until the memory holds a batch, for at most a quarter of a second."""

    def __init__(
        self,
        listening: socket.socket,
        settings: GatewaySettings,
        seats: Mapping[str, str],
        deciding: Mapping[str, BatchedPolicy[Policy]],
        memories: Mapping[str, NotifyingMemory],
        memory: CollatedBatches,
        opponents: tuple[SelfPlayConfig, MatchOpponents] | None = None,
    ) -> None:
        """`opponents`: of matches in self-play; None: all sessions learn."""
        self._deciding, self._memory = dict(deciding), memory
        self._seats = {
            name: Seat(deciding[model], memories[model], first_origin=number * _ORIGINS)
            for number, (name, model) in enumerate(seats.items())
        }
        self._self_play = None if opponents is None else SelfPlaySeats(self._seats, *opponents)
        self._loop = new_loop()
        self._batch_ready = asyncio.Event()
        for notifying in memories.values():
            notifying.on_commit = self._on_commit
        self._gateway = self._loop.run_until_complete(self._start_gateway(listening, settings))
        self.address: tuple[str, int] = listening.getsockname()[:2]

    async def _start_gateway(self, listening: socket.socket, settings: GatewaySettings) -> Gateway:
        gateway = Gateway(self._make_actor, settings)
        await gateway.start([listening])
        return gateway

    def _make_actor(self) -> BuiltinActor:
        return BuiltinActor(self._seats) if self._self_play is None else SelfPlayActor(self._seats, self._self_play)

    def _on_commit(self) -> None:
        if self._memory.ready():
            self._batch_ready.set()

    def step(self) -> bool:
        if not self._memory.ready():
            self._batch_ready.clear()
            with contextlib.ExitStack() as acting, contextlib.suppress(TimeoutError):
                for deciding in self._deciding.values():
                    acting.enter_context(deciding.policy.acting())
                self._loop.run_until_complete(asyncio.wait_for(self._batch_ready.wait(), _SERVE_S))
        if self._self_play is not None:
            self._self_play.update()
        return True  # waiting for games is work

    def metrics(self) -> dict[str, float]:
        sessions, stats = self._gateway.sessions, [seat.stats for seat in self._seats.values()]
        counts = {"sessions": len(sessions), "requests": sessions.requests}
        counts |= {name: getattr(sessions.stats, name) for name in ("failed", "timed_out", "silent", "refused")}
        counts["discarded_steps"] = sum(one.discarded for one in stats)
        counts["unrecorded_steps"] = sum(one.unrecorded for one in stats)
        if self._self_play is not None:
            counts["opponent_sessions"] = self._self_play.opponent_sessions
        return {f"games/{name}": float(count) for name, count in counts.items()}

    def has_sampled(self) -> bool:
        return self._gateway.sessions.requests > 0

    def waiting_for(self) -> str:
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
        """End all sessions. Experience that was not yet taken is lost."""
        self._loop.run_until_complete(self._gateway.close())
        if self._self_play is not None:
            self._self_play.close()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


def new_loop() -> asyncio.AbstractEventLoop:
    """Create a uvloop event loop where available, else asyncio's default."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
