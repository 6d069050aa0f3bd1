"""Single copies of an environment with several agents, stepped one after the other."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from ludus.core.tree import Tree
from ludus.core.types import Bools, Ints
from ludus.envs.matches.rows import RowStep
from ludus.envs.pettingzoo import AgentSpaces, CentralState, Departure, MatchStep, MultiAgentMatch, Turn, take_statistics
from ludus.errors import EnvironmentFault
from ludus.models.inference.batched_policy import stack_masks, stack_rows
from ludus.sampling.multi_agent.copies import MatchCopies, MatchStreams
from ludus.sampling.multi_agent.policy_set import plain_actions

log = logging.getLogger(__name__)

MAX_EMPTY_MATCHES = 100
"""Consecutive matches that end before any agent acts, before an error is raised."""
MAX_CONSECUTIVE_FAULTS = 5
"""Faults of one environment without a successful step, before they are raised."""

Observed = TypeVar("Observed", Turn, Departure)


class EnvCopies(list[MultiAgentMatch], MatchCopies):
    """Copies of one environment, closed together. `forgiving`: a failed copy is recreated.

    `beat` is called before every call of an environment, including its constructor. It may raise Interrupted.
    """

    def __init__(
        self, make: Callable[[], MultiAgentMatch], count: int, *, forgiving: bool = False, beat: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._make, self.forgiving, self.beat = make, forgiving, beat
        self.restarts = 0
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(count):
                beat()
                self.append(make())
            undo.pop_all()

    @property
    def name(self) -> str:
        return self[0].name

    @property
    def agents(self) -> Mapping[str, AgentSpaces]:
        return self[0].agents

    @property
    def state_space(self) -> gym.Space[Any] | None:
        return self[0].state_space

    def open_source(self, streams: Sequence[MatchStreams], *, central: bool) -> CopySource:
        return CopySource(self, streams, central=central)

    def recreate(self, number: int) -> None:
        self.restarts += 1
        with contextlib.suppress(Exception):  # user code may raise anything, and it has failed already
            self[number].close()
        self[number] = self._make()

    def take_statistics(self) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for match in self:
            for name, value in take_statistics(match).items():
                found.setdefault(name, []).append(value)
        return {name: fmean(values) for name, values in found.items()}

    def close(self) -> None:
        for match in self:
            match.close()


class CopySource:
    """Steps the copies one after the other. Implements MatchSource."""

    def __init__(self, copies: EnvCopies, streams: Sequence[MatchStreams], *, central: bool) -> None:
        self._slots = [_MatchSlot(copies, number, streams[number], central=central) for number in range(len(copies))]
        self.over: Bools = np.ones(len(copies), np.bool_)
        self._agents = list(copies.agents)
        self._index = {agent: index for index, agent in enumerate(self._agents)}
        self._turns: dict[int, Turn] = {}  # by row
        self._departures: dict[int, Departure] = {}  # by row, of the last step
        self._actions: dict[int, Any] = {}  # row → action for the next step

    @property
    def late_rewards(self) -> int:
        return sum(slot.match.late_rewards for slot in self._slots)

    def begin(self, numbers: Sequence[int]) -> RowStep:
        for number in numbers:
            self._slots[number].begin()
            self.over[number] = False
        return self._read(numbers, departures=False)

    def acting_rows(self, playing: Bools | None) -> Ints:
        slots = self._slots if playing is None else [self._slots[number] for number in np.flatnonzero(playing).tolist()]
        return np.array([row for slot in slots for row in slot.rows], np.int64)

    def observation(self, rows: Ints) -> Tree:
        return stack_rows([self._turns[row].observation for row in rows.tolist()])

    def final_observation(self, rows: Ints) -> Tree:
        return stack_rows([self._departures[row].observation for row in rows.tolist()])

    def mask(self, rows: Ints) -> Bools | None:
        return stack_masks([self._turns[row].mask for row in rows.tolist()])

    def set_actions(self, rows: Ints, actions: Tree) -> None:
        self._actions.update(zip(rows.tolist(), plain_actions(actions, len(rows)), strict=True))

    def step(self, playing: Bools | None) -> RowStep:
        active = np.flatnonzero(~self.over if playing is None else playing & ~self.over).tolist()
        stepped, lost, width, actions = [], [], len(self._agents), self._actions
        for number in active:
            slot, first = self._slots[number], number * width
            try:
                slot.advance({self._agents[row - first]: actions[row] for row in slot.rows})
                stepped.append(number)
            except EnvironmentFault as fault:
                slot.recreate(fault)
                lost.append(number)
        actions.clear()
        result = self._read(stepped)
        if lost:
            self.abandon(lost)
            result.lost = lost
        return result

    def abandon(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._slots[number].current, self._slots[number].rows = MatchStep(over=True), []
            self.over[number] = True

    def _read(self, numbers: Sequence[int], *, departures: bool = True) -> RowStep:
        """The present steps of these copies as rows."""
        turns: list[int] = []
        turn_reward: list[float] = []
        left: dict[int, Departure] = {}
        for number in numbers:
            slot, first = self._slots[number], number * len(self._agents)
            step = slot.current
            if departures:
                for departure in step.departures:
                    left[first + self._index[departure.agent]] = departure
            slot.rows = []
            for turn in step.turns:
                row = first + self._index[turn.agent]
                slot.rows.append(row)
                turn_reward.append(turn.reward)
                self._turns[row] = turn
            turns += slot.rows
            if step.over:
                self.over[number] = True
        result = RowStep(np.array(turns, np.int64), np.array(turn_reward, np.float64))
        if left:
            result.departures = np.array(list(left), np.int64)
            result.departure_reward = np.array([departure.reward for departure in left.values()], np.float64)
            result.terminated = np.array([departure.terminated for departure in left.values()], np.bool_)
            result.observed = np.array([departure.observation is not None for departure in left.values()], np.bool_)
        self._departures = left
        return result


class _MatchSlot:
    """One copy of the environment and its current match."""

    def __init__(self, copies: EnvCopies, number: int, streams: MatchStreams, *, central: bool) -> None:
        self._copies, self._number, self._streams = copies, number, streams
        self._central = CentralState(self.match.agents, self.match.state_space) if central else None
        self._faults = 0
        self.current = MatchStep(over=True)
        self.rows: list[int] = []
        """That act now."""

    @property
    def match(self) -> MultiAgentMatch:
        return self._copies[self._number]

    def begin(self) -> None:
        """Start the next match, up to the first turn. Raises EnvironmentFault."""
        for _ in range(MAX_EMPTY_MATCHES):
            self._reset()
            if not self.current.over:
                return
        raise empty_matches_fault(self.match.name)

    def _reset(self) -> None:
        if self._central is not None:
            self._central.reset()
        while True:
            self._copies.beat()
            try:
                self.current = self.match.reset(self._streams.next_seed())
                break
            except EnvironmentFault as fault:
                self.recreate(fault)
        self._add_central_state()

    def advance(self, actions: Mapping[str, Any]) -> None:
        self._copies.beat()
        self.current = self.match.step(actions)
        self._faults = 0
        self._add_central_state()

    def _add_central_state(self) -> None:
        """Add the input of a centralised critic to the agents' observations."""
        step, central = self.current, self._central
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
            if self._faults >= MAX_CONSECUTIVE_FAULTS or not self._copies.forgiving:
                raise fault
            self._faults += 1
            log.warning("%s It is recreated.", fault)
            try:
                self._copies.recreate(self._number)
            except EnvironmentFault as another:
                fault = another
            else:
                return


def empty_matches_fault(name: str) -> EnvironmentFault:
    return EnvironmentFault(f"{name} ended before any agent acted, {MAX_EMPTY_MATCHES} times in a row.")


def _with_central_state(observed: Observed, central: CentralState, shared: Tree) -> Observed:
    return observed._replace(observation=central.combine(observed.agent, observed.observation, shared))
