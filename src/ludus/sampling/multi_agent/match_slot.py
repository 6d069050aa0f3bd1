"""The state of one copy of an environment: its current match, and its agents with their recorders."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from ludus.core.tree import Tree
from ludus.envs.pettingzoo import CentralState, Departure, MatchStep, MultiAgentMatch, Turn
from ludus.errors import EnvironmentFault
from ludus.models.inference.batched_policy import State
from ludus.sampling.multi_agent.env_copies import EnvCopies
from ludus.sampling.multi_agent.seating import Seating
from ludus.sampling.segment_recorder import SegmentRecorder

log = logging.getLogger(__name__)

_MAX_EMPTY_MATCHES = 100  # consecutive matches that end before any agent acts
_MAX_CONSECUTIVE_FAULTS = 5  # of one copy, without a successful step
_OF_ACTIONS = 1  # the random stream of a copy for actions, apart from that of its resets

Observed = TypeVar("Observed", Turn, Departure)


@dataclass
class Seat:
    """One agent of one copy."""

    agent: str
    own_recorder: SegmentRecorder | None
    learns: bool = True
    """False while an opponent plays this seat: its steps are not recorded, and its episodes not counted."""
    state: State | None = None
    acted: bool = False
    total_reward: float = 0.0
    length: int = 0

    @property
    def recorder(self) -> SegmentRecorder | None:
        return self.own_recorder if self.learns else None

    def reset(self) -> None:
        self.state, self.acted, self.total_reward, self.length = None, False, 0.0, 0


class MatchSlot:
    """One copy of the environment with its seats. All randomness of its resets comes from `seed` and the number of the copy, which is
    counted from `first_copy` on.
    """

    def __init__(
        self, copies: EnvCopies, number: int, seats: Mapping[str, Seat], seed: int, *, central: bool, first_copy: int
    ) -> None:
        self._copies, self._number, self.seats = copies, number, seats
        self._seeds = np.random.default_rng([seed, number + first_copy])
        own_seeds = np.random.SeedSequence([seed, number + first_copy, _OF_ACTIONS])
        self.random = np.random.default_rng(own_seeds)
        """Of random actions."""
        self.generator = torch.Generator().manual_seed(int(own_seeds.generate_state(1, np.uint64)[0] >> 1))
        """Of the actions of policies, if every copy has its own."""
        self.central = CentralState(self.match.agents, self.match.state_space) if central else None
        self.returns = dict.fromkeys(seats, 0.0)
        self.seating = Seating({})
        self.steps = 0
        self._faults = 0
        self.current = MatchStep(over=True)

    @property
    def match(self) -> MultiAgentMatch:
        return self._copies[self._number]

    def begin(self, seating: Seating) -> None:
        """Start the next match, up to the first turn. Raises EnvironmentFault."""
        self.seating = seating
        for agent, seat in self.seats.items():
            seat.learns = seating.recorded is None or agent in seating.recorded
        for _ in range(_MAX_EMPTY_MATCHES):
            self._reset()
            if not self.current.over:
                return
        raise EnvironmentFault(f"{self.match.name} ended before any agent acted, {_MAX_EMPTY_MATCHES} times in a row.")

    def _reset(self) -> None:
        for seat in self.seats.values():
            seat.reset()
        self.returns, self.steps = dict.fromkeys(self.seats, 0.0), 0
        if self.central is not None:
            self.central.reset()
        while True:
            self._copies.beat()
            try:
                self.current = self.match.reset(int(self._seeds.integers(1 << 31)))
                break
            except EnvironmentFault as fault:
                self.recreate(fault)
        self._add_central_state()

    def advance(self, actions: Mapping[str, Any]) -> None:
        self._copies.beat()
        self.current = self.match.step(actions)
        self.steps, self._faults = self.steps + 1, 0
        self._add_central_state()

    def abandon(self) -> None:
        """End the match where it is; the outcome of the last actions is unknown and not recorded."""
        for seat in self.seats.values():
            if seat.recorder is not None:
                seat.recorder.discard_pending()
            seat.reset()
        self.current = MatchStep(over=True)

    def add_reward(self, agent: str, reward: float) -> Seat:
        seat = self.seats[agent]
        self.returns[agent] += reward
        seat.total_reward += reward
        return seat

    def _add_central_state(self) -> None:
        """Add the input of a centralised critic to the agents' observations."""
        step, central = self.current, self.central
        if central is None:
            return
        central.update(step)
        if step.turns or any(left.observation is not None for left in step.departures):
            shared = central.shared_state(self.match)
            turns = [_with_central_state(turn, central, shared) for turn in step.turns]
            departures = [
                left if left.observation is None else _with_central_state(left, central, shared) for left in step.departures
            ]
            self.current = MatchStep(turns, departures, step.over)
        central.remove_departed(step)

    def recreate(self, fault: EnvironmentFault) -> None:
        """Recreate the environment. Raises the fault if restarts are disabled or have failed repeatedly."""
        while True:
            if self._faults >= _MAX_CONSECUTIVE_FAULTS or not self._copies.forgiving:
                raise fault
            self._faults += 1
            log.warning("%s It is recreated.", fault)
            try:
                self._copies.recreate(self._number)
            except EnvironmentFault as another:
                fault = another
            else:
                return


def _with_central_state(observed: Observed, central: CentralState, shared: Tree) -> Observed:
    return replace(observed, observation=central.combine(observed.agent, observed.observation, shared))
