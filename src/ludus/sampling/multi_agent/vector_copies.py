"""Matches of an environment that steps all of them with one call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.config.schema import PreprocessConfig
from ludus.core.tree import Tree, map_tree
from ludus.core.types import Bools, Ints
from ludus.envs.matches.rows import RowStep
from ludus.envs.matches.vector_central_state import VectorCentralState
from ludus.envs.matches.vector_multi_agent import VectorMatches
from ludus.envs.pettingzoo import AgentSpaces, make_match, make_vector_matches
from ludus.envs.wrappers import WrapperList
from ludus.errors import EnvironmentFault
from ludus.sampling.multi_agent.copies import MatchCopies, MatchStreams
from ludus.sampling.multi_agent.env_copies import MAX_CONSECUTIVE_FAULTS, MAX_EMPTY_MATCHES, EnvCopies, empty_matches_fault

log = logging.getLogger(__name__)


def make_copies(
    env: str,
    count: int,
    env_config: Mapping[str, Any] | None = None,
    *,
    wrappers: WrapperList = (),
    preprocess: PreprocessConfig | None = None,
    forgiving: bool = False,
    beat: Callable[[], None] = lambda: None,
) -> MatchCopies:
    """Make `count` copies of an environment with several agents: one environment that steps all of them if it can, otherwise single ones."""
    beat()
    vector = make_vector_matches(env, count, env_config, wrappers, preprocess)
    if vector is None:
        return EnvCopies(
            lambda: make_match(env, env_config, wrappers=wrappers, preprocess=preprocess), count, forgiving=forgiving, beat=beat
        )

    def make_again() -> VectorMatches:
        made = make_vector_matches(env, count, env_config, wrappers, preprocess)
        assert made is not None
        return made

    return VectorCopies(vector, make_again, forgiving=forgiving, beat=beat)


class VectorCopies(MatchCopies):
    """Matches that one environment steps. `forgiving`: it is recreated when it fails, and all its matches are lost."""

    def __init__(
        self,
        matches: VectorMatches,
        make: Callable[[], VectorMatches],
        *,
        forgiving: bool = False,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.matches, self._make, self.forgiving, self.beat = matches, make, forgiving, beat
        self.restarts = 0

    @property
    def name(self) -> str:
        return self.matches.name

    @property
    def agents(self) -> Mapping[str, AgentSpaces]:
        return self.matches.agents

    @property
    def state_space(self) -> gym.Space[Any] | None:
        return self.matches.state_space

    def __len__(self) -> int:
        return self.matches.num

    def open_source(self, streams: Sequence[MatchStreams], *, central: bool) -> VectorSource:
        return VectorSource(self, streams, central=central)

    def recreate(self) -> None:
        self.restarts += 1
        with contextlib.suppress(Exception):  # user code may raise anything, and it has failed already
            self.matches.close()
        late = self.matches.late_rewards
        self.matches = self._make()
        self.matches.late_rewards = late

    def close(self) -> None:
        self.matches.close()


class VectorSource:
    """Steps all matches with one call. Implements MatchSource."""

    def __init__(self, copies: VectorCopies, streams: Sequence[MatchStreams], *, central: bool) -> None:
        self._copies, self._streams = copies, streams
        self._central = VectorCentralState(copies.agents, copies.state_space, len(copies)) if central else None
        self._faults = 0
        copies.matches.abandon(range(len(copies)))

    @property
    def over(self) -> Bools:
        return self._copies.matches.over

    @property
    def late_rewards(self) -> int:
        return self._copies.matches.late_rewards

    def begin(self, numbers: Sequence[int]) -> RowStep:
        waiting, lost = list(numbers), set[int]()
        parts = []
        for _ in range(MAX_EMPTY_MATCHES):
            running = np.flatnonzero(~self.over).tolist()
            try:
                parts.append(self._reset(waiting))
            except EnvironmentFault as fault:  # all matches are lost with the environment
                self._recreate(fault)
                lost.update(set(running) - set(numbers))
                waiting, parts = list(numbers), []
                continue
            waiting = [number for number in waiting if self.over[number]]
            if not waiting:
                turns = np.concatenate([step.turns for step in parts])
                # A match that was over at once has no turns, so that every row is among them once.
                return RowStep(turns, np.concatenate([step.turn_reward for step in parts]), lost=sorted(lost))
        raise empty_matches_fault(self._copies.name)

    def _reset(self, numbers: Sequence[int]) -> RowStep:
        matches = self._copies.matches
        self._copies.beat()
        if self._central is not None:
            self._central.reset(numbers)
        seeds = np.array([self._streams[number].next_seed() for number in numbers], np.int64)
        step = matches.reset(np.array(numbers, np.int64), seeds)
        self._update_central(step)
        return step

    def acting_rows(self, playing: Bools | None) -> Ints:
        matches = self._copies.matches
        return np.flatnonzero(matches.acting if playing is None else matches.acting & np.repeat(playing, matches.width))

    def observation(self, rows: Ints) -> Tree:
        own = map_tree(lambda part: part[rows], self._copies.matches.observation)
        return own if self._central is None else self._central.combine(rows, own)

    def final_observation(self, rows: Ints) -> Tree:
        return self.observation(rows)

    def mask(self, rows: Ints) -> Bools | None:
        mask = self._copies.matches.mask
        return None if mask is None else mask[rows]

    def set_actions(self, rows: Ints, actions: Tree) -> None:
        map_tree(lambda part, own: part.__setitem__(rows, own), self._copies.matches.actions, actions)

    def step(self, playing: Bools | None) -> RowStep:
        matches = self._copies.matches
        active = ~matches.over if playing is None else playing & ~matches.over
        self._copies.beat()
        try:
            step = matches.step(active)
        except EnvironmentFault as fault:
            lost = np.flatnonzero(~matches.over).tolist()
            self._recreate(fault)
            return RowStep(lost=lost)
        self._faults = 0
        self._update_central(step)
        return step

    def abandon(self, numbers: Sequence[int]) -> None:
        self._copies.matches.abandon(numbers)

    def _update_central(self, step: RowStep) -> None:
        if self._central is not None:
            self._central.update(self._copies.matches, step)

    def _recreate(self, fault: EnvironmentFault) -> None:
        """Recreate the environment. Raises the fault if restarts are disabled or have failed repeatedly."""
        while True:
            if self._faults >= MAX_CONSECUTIVE_FAULTS or not self._copies.forgiving:
                raise fault
            self._faults += 1
            log.warning("%s It is recreated.", fault)
            try:
                self._copies.recreate()
            except EnvironmentFault as another:
                fault = another
            else:
                return
