"""What a gateway worker of a training needs: policies that follow the learner, and a way to send it what they did."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.inference.engine import Engine, Newest
from ludus.models.weights import serialization
from ludus.models.weights.shared_weights import BoardReader
from ludus.sampling.segment_recorder import session_spec
from ludus.transport.multi_producer import Lane, LaneWriter

COUNTED = ("requests", "failed", "timed_out", "silent", "refused", "discarded_steps")
CURRENT = ("sessions",)
"""What workers tell the learner of themselves."""

_ORIGINS = 1 << 32  # sessions of one process, before their numbers would meet those of another


@dataclass
class Played:
    """Makes the actors of a worker. Travels as plain data; networks and connections are made in the worker."""

    seats: Mapping[str, str]
    """Seat → model."""
    models: Mapping[str, tuple[bytes, str]]
    """Model → its description, and where its weights appear."""
    steps: int
    lanes: Sequence[Lane]
    """Ways to the learner, one for each worker."""
    explore: bool = True
    _made: dict[str, Seat] = field(default_factory=dict, init=False, repr=False)
    _writer: LaneWriter | None = field(default=None, init=False, repr=False)

    def load(self) -> None:
        deciding = {}
        for name, (description, board) in self.models.items():
            engine = Engine(serialization.policy_from(description), BoardReader(Path(board)))
            deciding[name] = BatchedPolicy(Newest(engine), deterministic=not self.explore)
        specs = {name: session_spec(model.policy, self.steps, name) for name, model in deciding.items()}
        self._writer = LaneWriter(self.lanes, specs)
        first = os.getpid() * _ORIGINS
        for seat, model in self.seats.items():
            self._made[seat] = Seat(deciding[model], self._writer.rooms[model], first_origin=first)
            first += _ORIGINS // len(self.seats)

    def __call__(self) -> BuiltinActor:
        return BuiltinActor(self._made)

    def report(self, name: str, counters: Mapping[str, Any]) -> None:
        """How this worker is doing, for the learner's metrics."""
        assert self._writer is not None
        numbers = {key: float(value) for key, value in counters.items() if isinstance(value, (int, float))}
        discarded = sum(seat.stats.discarded for seat in self._made.values())
        self._writer.count(numbers | {"discarded_steps": float(discarded)})
