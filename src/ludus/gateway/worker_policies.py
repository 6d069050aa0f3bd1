"""Actors of a gateway worker in training: policies that follow the learner's weights and write segments to it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.config.schema import SelfPlayConfig
from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor, SelfPlayActor, SelfPlaySeats
from ludus.gateway.http_connection import Page
from ludus.gateway.server import Gateway
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.inference.engine import EnginePolicySource, InferenceEngine
from ludus.models.weights import serialization
from ludus.models.weights.shared_weights import SharedWeightsReader
from ludus.sampling.league_sessions import make_match_opponents
from ludus.sampling.segment_recorder import session_spec
from ludus.transport.multi_producer import Lane, LaneWriter

COUNTER_METRICS = ("requests", "failed", "timed_out", "silent", "refused", "discarded_steps", "opponent_sessions")
GAUGE_METRICS = ("sessions",)
"""Metrics that workers report to the learner."""

_ORIGINS = 1 << 32  # origin numbers reserved for one process


@dataclass(frozen=True)
class WorkerSelfPlay:
    """Self-play of the sessions of a worker."""

    settings: SelfPlayConfig
    seed: int
    """The same for all workers, so that they agree on which side learns."""
    run: str
    """Directory of the run, which may have stored earlier versions."""
    workers: int
    """Number of workers that serve the game."""


@dataclass
class WorkerActorFactory:
    """Creates the actors of a worker. Picklable; `load` creates networks and connections in the worker process.

    Also the extension of its gateway, which is notified when the worker stops.
    """

    seats: Mapping[str, str]
    """Seat name → model name."""
    models: Mapping[str, tuple[bytes, str]]
    """Model name → (serialized policy, path of its shared weights)."""
    steps: int
    lanes: Sequence[Lane]
    """Segment queues to the learner, one per worker."""
    explore: bool = True
    self_play: WorkerSelfPlay | None = None
    _seats: dict[str, Seat] = field(default_factory=dict, init=False, repr=False)
    _writer: LaneWriter | None = field(default=None, init=False, repr=False)
    _self_play: SelfPlaySeats | None = field(default=None, init=False, repr=False)

    def load(self) -> None:
        deciding, sources = {}, {}
        for name, (description, board) in self.models.items():
            engine = InferenceEngine(serialization.policy_from(description), SharedWeightsReader(Path(board)))
            sources[name] = EnginePolicySource(engine)
            deciding[name] = BatchedPolicy(sources[name], deterministic=not self.explore)
        specs = {name: session_spec(model.policy, self.steps, name) for name, model in deciding.items()}
        self._writer = LaneWriter(self.lanes, specs)
        first = os.getpid() * _ORIGINS
        for seat, model in self.seats.items():
            self._seats[seat] = Seat(deciding[model], self._writer.writers[model], first_origin=first)
            first += _ORIGINS // len(self.seats)
        if self.self_play is not None:
            (model,) = self.models
            settings, league = self.self_play.settings, self.self_play.settings.opponents == "league"
            opponents = make_match_opponents(
                settings,
                deciding[model],
                sources[model],
                self.self_play.seed,
                seats=list(self.seats),
                model=model,
                run=Path(self.self_play.run),
                deterministic=not self.explore,
            )
            whole = league and self.self_play.workers > 1
            self._self_play = SelfPlaySeats(self._seats, settings, opponents, whole_matches=whole)

    def __call__(self) -> BuiltinActor:
        return BuiltinActor(self._seats) if self._self_play is None else SelfPlayActor(self._seats, self._self_play)

    def report(self, name: str, counters: Mapping[str, Any]) -> None:
        """Send this worker's counters to the learner."""
        assert self._writer is not None
        numbers = {key: float(value) for key, value in counters.items() if isinstance(value, (int, float))}
        discarded = sum(seat.stats.discarded for seat in self._seats.values())
        opponents = 0 if self._self_play is None else self._self_play.opponent_sessions
        self._writer.count(numbers | {"discarded_steps": float(discarded), "opponent_sessions": float(opponents)})
        if self._self_play is not None:
            self._self_play.update()

    # -- GatewayExtension

    def on_start(self, gateway: Gateway) -> None:
        """Nothing to start."""

    def sweep(self, now: float) -> None:
        """`report` does the periodic work."""

    def page(self, path: str) -> Page | None:
        return None

    async def on_stop(self) -> None:
        if self._self_play is not None:
            self._self_play.close()
