"""Environments with several agents that step many matches with one call of arrays.

A game implements `VectorMultiAgentEnv`. `VectorMatches` checks what it returns and presents its matches as rows; `SingleVectorMatch` is
one match of it, for rollouts and battles.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core.spaces import array_spec, bits, categories, choices, mask_size, squares_are_finite
from ludus.core.tree import Array, Tree, leaves, map_tree
from ludus.core.types import Bools, Ints
from ludus.envs.faults import close_quietly, environment_errors
from ludus.envs.matches.rows import Returns, RowStep
from ludus.envs.pettingzoo import MAX_IDLE_STEPS, MAX_REWARD, AgentSpaces, Departure, MatchStep, Turn
from ludus.errors import ConfigError, EnvironmentFault


@dataclass
class VectorMultiAgentStep:
    """All matches after a reset or a step. N matches, A agents in the order of `possible_agents`, M options of an action mask.

    The arrays may be buffers that the environment overwrites in its next call.
    """

    acting: Bools
    """[N, A] agents that act next: several of a match that act at the same time, or the one whose turn it is. The others wait."""
    observation: Tree
    """[N, A, …] of agents that act next, or were truncated; other entries are not read."""
    reward: Array
    """[N, A] of this step, for any agent, whether it has acted or not. Not read after a reset."""
    terminated: Bools
    """[N, A] agents whose episode has ended."""
    truncated: Bools
    """[N, A] agents whose episode was cut; its value is estimated from the observation."""
    action_mask: Bools | None = None
    """[N, A, M] options that agents which act next may choose, in the flat form of Gymnasium; None: all."""


class VectorMultiAgentEnv(abc.ABC):
    """N matches of a game with several agents, all with the same spaces. Base class; the constructor takes `num_envs`.

    A match is over when all its agents are terminated or truncated. An agent that acts in a later step has returned, and starts a new
    episode. An agent that takes no part in a match is terminated by the reset.
    """

    num_envs: int
    possible_agents: Sequence[str]
    single_observation_space: gym.Space[Any]
    """Of one agent in one match, without the action mask."""
    single_action_space: gym.Space[Any]
    single_state_space: gym.Space[Any] | None = None
    """Of the global state of one match, for a centralised value; None: it has none."""
    metadata: Mapping[str, Any] = {}

    @abc.abstractmethod
    def reset(self, seeds: Ints, matches: Ints) -> VectorMultiAgentStep:
        """Start the matches with the numbers `matches` [K] anew, each with its own seed [K]. The others stay as they are, and their part
        of the result is not read.

        A match must depend on its seed and the actions in it alone, so that it can be repeated.
        """

    @abc.abstractmethod
    def step(self, actions: Tree, playing: Bools) -> VectorMultiAgentStep:
        """Step the matches that are `playing` [N] with the actions [N, A, …] of all agents that act. Actions of other agents are arbitrary.
        Other matches stay as they are, and their part of the result is not read.
        """

    def state(self) -> Tree:
        """The global states [N, …] of all matches; only with a `single_state_space`."""
        raise NotImplementedError(f"{type(self).__name__} has a single_state_space and no state()")

    def render(self) -> Any:
        """A picture of match 0."""
        raise NotImplementedError(f"{type(self).__name__} cannot be rendered")

    def close(self) -> None:  # noqa: B027 - optional
        """No call follows."""


class VectorMatches:
    """The matches of one VectorMultiAgentEnv as rows. Checks what it returns, and adds up rewards between the turns of an agent."""

    def __init__(self, env: VectorMultiAgentEnv, name: str) -> None:
        self.name, self.env = name, env
        self._check_env()
        spaces = AgentSpaces(env.single_observation_space, env.single_action_space, masked=False)
        self.agents: Mapping[str, AgentSpaces] = dict.fromkeys(env.possible_agents, spaces)
        self.state_space = env.single_state_space
        self.late_rewards = 0
        self.steps = 0
        """Calls of step of the environment."""
        self.num, self.width = env.num_envs, len(self.agents)
        self.rows = self.num * self.width
        self.acting: Bools = np.zeros(self.rows, np.bool_)
        self.over: Bools = np.ones(self.num, np.bool_)
        self._spec = array_spec(env.single_observation_space)
        self._limits = categories(env.single_observation_space) | bits(env.single_observation_space)
        self._choices, self._mask_size = choices(env.single_action_space), mask_size(env.single_action_space)
        self.observation: Tree = map_tree(lambda spec: spec.zeros(self.rows), self._spec)
        """[rows, …] of rows that act now, or were truncated in the last step."""
        self.mask: Bools | None = None
        """[rows, M] of rows that act now."""
        self.actions: Tree = map_tree(lambda spec: spec.zeros(self.rows), array_spec(env.single_action_space, "action"))
        """[rows, …] for the next step."""
        self._left: Bools = np.ones(self.rows, np.bool_)  # rows whose agent is not in the match
        self._acted: Bools = np.zeros(self.rows, np.bool_)  # since the agent arrived
        self._pending: Returns = np.zeros(self.rows)  # rewards since the last action
        self._idle: Ints = np.zeros(self.num, np.int64)  # steps without an acting agent

    def _check_env(self) -> None:
        env, name = self.env, self.name
        agents = list(env.possible_agents)
        if not agents or not all(isinstance(agent, str) for agent in agents) or len(set(agents)) < len(agents):
            raise EnvironmentFault(f"possible_agents of {name} are {agents}.", "List the name of every agent once.")
        for attribute in ("single_observation_space", "single_action_space"):
            if not isinstance(getattr(env, attribute, None), gym.Space):
                raise EnvironmentFault(f"{name} has no {attribute}.", "Set it to the space of one agent in one match.")

    def reset(self, matches: Ints, seeds: Ints) -> RowStep:
        """Raises EnvironmentFault."""
        with environment_errors(self.name, "reset", self.steps):
            result = self.env.reset(seeds, matches)
        present = np.zeros((self.num, self.width), np.bool_)
        present[matches] = True
        rows = present.reshape(-1)
        self._left[rows] = self._acted[rows] = False
        self._pending[rows], self._idle[matches] = 0.0, 0
        return self._read(result, rows, None)

    def step(self, playing: Bools) -> RowStep:
        """Step the matches with `actions`. Raises EnvironmentFault."""
        self.steps += 1
        rows = np.repeat(playing, self.width)
        self._acted |= self.acting & rows
        shape = (self.num, self.width)
        with environment_errors(self.name, "step", self.steps):
            result = self.env.step(map_tree(lambda part: part.reshape(*shape, *part.shape[1:]), self.actions), playing)
        return self._read(result, rows, self._flat(result.reward, "reward", np.float64))

    def abandon(self, matches: Sequence[int]) -> None:
        """End these matches where they are."""
        self.over[matches] = True
        self.acting.reshape(self.num, self.width)[matches] = False

    def _flat(self, given: Any, name: str, dtype: type = np.bool_) -> Array:
        """One number or flag of every row."""
        array: Array = np.asarray(given, dtype)
        if array.shape != (self.num, self.width):
            raise EnvironmentFault(
                f"{self.name} returned {name} of shape {list(array.shape)} at step {self.steps}; it has {self.num} matches and "
                f"{self.width} agents.",
            )
        return array.reshape(-1)

    def _read(self, result: VectorMultiAgentStep, rows: Bools, reward: Array | None) -> RowStep:
        """`rows`: those of matches that were reset or stepped. `reward`: None after a reset."""
        if reward is not None:
            self._add_rewards(reward, rows)
        terminated = self._flat(result.terminated, "terminated")
        ends = (terminated | self._flat(result.truncated, "truncated")) & rows & ~self._left
        departures = np.flatnonzero(ends)
        departure_reward = self._pending[departures]
        self.late_rewards += int(np.count_nonzero(departure_reward[~self._acted[departures]]))
        self._leave(departures)

        acting = self._flat(result.acting, "acting") & rows & ~ends
        self.acting[rows] = acting[rows]
        turns = np.flatnonzero(acting)
        self._left[turns] = False
        turn_reward = self._pending[turns]
        self._pending[turns] = 0.0

        over: Bools = np.all(self._left.reshape(self.num, self.width), axis=1)
        present = rows.reshape(self.num, self.width)[:, 0]
        self.over[present] = over[present]
        self._check_idle(present & ~over)
        ended = terminated[departures]
        self._read_observations(result, turns, departures[~ended])
        return RowStep(turns, turn_reward, departures, departure_reward, ended, ~ended)

    def _add_rewards(self, reward: Array, rows: Bools) -> None:
        given = np.where(rows, reward, 0.0)
        if not (np.abs(given) <= MAX_REWARD).all():  # also rejects NaN
            row = int(np.flatnonzero(~(np.abs(given) <= MAX_REWARD))[0])
            raise EnvironmentFault(f"{self._where(row)} got the reward {given[row]}.")
        self.late_rewards += int(np.count_nonzero(given[self._left]))
        self._pending += np.where(self._left, 0.0, given)

    def _leave(self, rows: Ints) -> None:
        self._left[rows], self._acted[rows], self._pending[rows] = True, False, 0.0

    def _check_idle(self, present: Bools) -> None:
        waits = present & ~self.acting.reshape(self.num, self.width).any(axis=1)
        self._idle[present] += 1
        self._idle[present & ~waits] = 0
        if waits.any() and self._idle[waits].max() > MAX_IDLE_STEPS:
            raise EnvironmentFault(f"No agent of {self.name} has acted for {MAX_IDLE_STEPS} steps, and its match is not over.")

    def _read_observations(self, result: VectorMultiAgentStep, turns: Ints, truncated: Ints) -> None:
        rows = np.concatenate([turns, truncated]) if len(truncated) else turns
        if not len(rows):
            return
        try:
            given = dict(leaves(result.observation))
        except TypeError as error:
            raise EnvironmentFault(f"{self.name} returned no usable observation at step {self.steps}: {error}.") from error
        for path, stored in leaves(self.observation):
            self._read_leaf(path, stored, given, rows)
        if result.action_mask is not None:
            self._read_mask(np.asarray(result.action_mask), turns)
        elif self.mask is not None:
            self.mask[turns] = True

    def _read_leaf(self, path: str, stored: Array, given: Mapping[str, Any], rows: Ints) -> None:
        part = f" for {path!r}" if path else ""
        if path not in given:
            raise EnvironmentFault(f"{self.name} returned no observation{part} at step {self.steps}.")
        array = np.asarray(given[path])
        expected = (self.num, self.width, *stored.shape[1:])
        if array.shape != expected or not np.can_cast(array.dtype, stored.dtype, "same_kind"):
            raise EnvironmentFault(
                f"{self.name} returned {array.dtype}{list(array.shape)}{part} as observation at step {self.steps}; its space with "
                f"{self.num} matches of {self.width} agents is {stored.dtype}{list(expected)}."
            )
        values = array.reshape(self.rows, *stored.shape[1:])[rows]
        with np.errstate(over="ignore"):  # checked below
            stored[rows] = values
        if stored.dtype.kind == "f":
            seen = stored[rows]
            if not squares_are_finite(seen) and not np.isfinite(seen).all():
                bad = int(rows[~np.isfinite(seen.reshape(len(rows), -1)).all(axis=1)][0])
                raise EnvironmentFault(
                    f"{self._where(bad)} observes a number{part} that is not finite, or too large for float32."
                )
        elif path in self._limits:
            low, high = self._limits[path]
            if ((values < low) | (values >= high)).any():
                raise EnvironmentFault(
                    f"{self.name} returned categories{part} outside its observation space at step {self.steps}."
                )
        elif array.dtype != stored.dtype and not np.array_equal(stored[rows], values):
            raise EnvironmentFault(
                f"{self.name} returned integers{part} at step {self.steps} that do not fit into {stored.dtype}."
            )

    def _read_mask(self, given: Array, turns: Ints) -> None:
        if given.shape != (self.num, self.width, self._mask_size):
            raise EnvironmentFault(
                f"{self.name} returned an action_mask of shape {list(given.shape)} at step {self.steps}; with {self.num} matches of "
                f"{self.width} agents and {self._mask_size} options it is {[self.num, self.width, self._mask_size]}."
            )
        if self.mask is None:
            self.mask = np.ones((self.rows, self._mask_size), np.bool_)
        allowed = given.reshape(self.rows, -1)[turns].astype(np.bool_)
        self.mask[turns] = allowed
        for part in self._choices:
            nothing = ~allowed[:, part].any(axis=1)
            if nothing.any():
                raise EnvironmentFault(
                    f"The action_mask of {self._where(int(turns[nothing][0]))} forbids every action (options {part.start} to {part.stop - 1}).",
                    "Leave at least one option of every choice allowed.",
                )

    def _where(self, row: int) -> str:
        agent = list(self.agents)[row % self.width]
        return f"{agent!r} in match {row // self.width} of {self.name} at step {self.steps}"

    def state(self) -> Tree:
        """[N, …] the global states. Raises EnvironmentFault."""
        with environment_errors(self.name, "state", self.steps):
            given = dict(leaves(self.env.state()))
        assert self.state_space is not None
        stored = map_tree(lambda spec: spec.zeros(self.num), array_spec(self.state_space, "state"))
        for path, array in leaves(stored):
            if path not in given or np.shape(given[path]) != array.shape:
                shape = "nothing" if path not in given else f"an array of shape {list(np.shape(given[path]))}"
                part = f" for {path!r}" if path else ""
                raise EnvironmentFault(f"state() of {self.name} returned {shape}{part}; it takes {list(array.shape)}.")
            array[:] = given[path]
        return stored

    def waiting_rewards(self) -> dict[int, float]:
        """Row → reward since its last action, of all rows in a match that do not act now; they are taken."""
        rows = np.flatnonzero(~self._left & ~self.acting & np.repeat(~self.over, self.width))
        rewards = self._pending[rows].tolist()
        self._pending[rows] = 0.0
        return dict(zip(rows.tolist(), rewards, strict=True))

    def close(self) -> None:
        close_quietly(self.env)


class SingleVectorMatch:
    """One match of a VectorMultiAgentEnv with `num_envs` 1. Implements MultiAgentMatch."""

    def __init__(self, env: VectorMultiAgentEnv, name: str) -> None:
        self._matches = VectorMatches(env, name)
        if env.num_envs != 1:
            raise ConfigError(f"{name} has {env.num_envs} matches where one was asked for.", "Return as many as `num_envs` says.")
        self.name, self.agents, self.state_space = name, self._matches.agents, self._matches.state_space
        self._names = list(self.agents)

    @property
    def late_rewards(self) -> int:
        return self._matches.late_rewards

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._matches.env.metadata

    def reset(self, seed: int) -> MatchStep:
        return self._present(self._matches.reset(np.zeros(1, np.int64), np.array([seed])))

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        for agent, action in actions.items():
            row = self._names.index(agent)
            map_tree(lambda part, own, row=row: part.__setitem__(row, own), self._matches.actions, action)
        return self._present(self._matches.step(np.ones(1, np.bool_)))

    def truncate(self) -> Sequence[Departure]:
        """Agents that wait for their turn have no observation."""
        waiting = self._matches.waiting_rewards()
        acting = [
            Departure(self._names[row], 0.0, False, True, self._observation(row))
            for row in np.flatnonzero(self._matches.acting).tolist()
        ]
        return [*acting, *(Departure(self._names[row], reward, False, True) for row, reward in waiting.items())]

    def _present(self, step: RowStep) -> MatchStep:
        mask = self._matches.mask
        turns = [
            Turn(self._names[row], self._observation(row), None if mask is None else mask[row].copy(), reward)
            for row, reward in zip(step.turns.tolist(), step.turn_reward.tolist(), strict=True)
        ]
        departures = [
            Departure(self._names[row], reward, ended, not ended, None if ended else self._observation(row))
            for row, reward, ended in zip(
                step.departures.tolist(), step.departure_reward.tolist(), step.terminated.tolist(), strict=True
            )
        ]
        return MatchStep(turns, departures, bool(self._matches.over[0]))

    def _observation(self, row: int) -> Tree:
        return map_tree(lambda part: part[row].copy(), self._matches.observation)

    def state(self) -> Tree:
        return map_tree(lambda part: np.array(part[0]), self._matches.state())

    def render(self) -> Any:
        with environment_errors(self.name, "render", self._matches.steps):
            return self._matches.env.render()

    def close(self) -> None:
        self._matches.close()
