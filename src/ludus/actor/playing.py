"""What a gateway worker of a training needs: policies that follow the learner, and a way to send it what they did."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.actor.agent import Seat
from ludus.actor.builtin import BuiltinActor
from ludus.actor.recorder import session_spec
from ludus.memory.stream import StreamWriter, counted
from ludus.model import saved
from ludus.model.acting import Deciding
from ludus.model.board import BoardReader
from ludus.model.inference import Engine, Newest

_ORIGINS = 1 << 32  # sessions of one process, before their numbers would meet those of another


@dataclass
class Played:
    """Makes the actors of a worker. Travels as plain data; networks and connections are made in the worker."""

    seats: Mapping[str, str]
    """Seat → model."""
    models: Mapping[str, tuple[bytes, str]]
    """Model → its description, and where its weights appear."""
    steps: int
    segments: str
    """The socket of the learner's memory."""
    _made: dict[str, Seat] = field(default_factory=dict, init=False, repr=False)
    _writers: list[StreamWriter] = field(default_factory=list, init=False, repr=False)

    def load(self) -> None:
        deciding, memories = {}, {}
        for name, (description, board) in self.models.items():
            source = Newest(Engine(saved.policy_from(description), BoardReader(Path(board))))
            deciding[name] = Deciding(source)
            memories[name] = StreamWriter(session_spec(deciding[name].policy, self.steps, name), self.segments)
        self._writers = list(memories.values())
        first = os.getpid() * _ORIGINS
        for seat, model in self.seats.items():
            self._made[seat] = Seat(deciding[model], memories[model], first_origin=first)
            first += _ORIGINS // len(self.seats)

    def __call__(self) -> BuiltinActor:
        return BuiltinActor(self._made)

    def report(self, name: str, counters: Mapping[str, Any]) -> None:
        """How this worker is doing, for the learner's metrics."""
        numbers = {key: value for key, value in counters.items() if isinstance(value, (int, float))}
        own = numbers | {
            "discarded_steps": sum(seat.stats.discarded for seat in self._made.values()),
            "dropped_segments": sum(writer.stats().dropped for writer in self._writers),
        }
        counted(self._writers[0], name, {key: float(value) for key, value in own.items()})
