"""One game in three forms: as arrays for many matches, as a parallel and as a turn-based environment of PettingZoo.

Importable as `tests.vector_matches:…`. Agents of a hunt move at the same time; they wait, leave and may return, and what is left
is cut. In a count, agents act in turn.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from pettingzoo import AECEnv, ParallelEnv

from ludus.core.tree import Array, Tree
from ludus.core.types import Bools, Ints
from ludus.envs.matches.vector_multi_agent import VectorMultiAgentEnv, VectorMultiAgentStep

NAMES = ("ada", "bob", "cyd")
OBSERVATION = gym.spaces.Dict(
    {"place": gym.spaces.Box(-50, 50, (2,), np.float32), "kind": gym.spaces.Discrete(3), "flags": gym.spaces.MultiBinary(2)}
)
STATE = gym.spaces.Box(-50, 50, (6,), np.float32)
ACTION = gym.spaces.MultiDiscrete([3, 2])
_LIMIT = 9
PRESENT, WAITING, GONE = 0, 1, 2


class Hunt:
    """The rules of one match. Chance comes from the seed."""

    def __init__(self, returning: bool, masked: bool) -> None:
        self._returning, self._masked = returning, masked
        self.place = np.zeros((len(NAMES), 2), np.float32)
        self.status = np.full(len(NAMES), PRESENT)

    def reset(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.place[:] = self._random.normal(size=self.place.shape)
        self.status[:] = PRESENT
        self.clock = 0
        self.terminated, self.truncated = np.zeros((2, len(NAMES)), np.bool_)
        self.reward = np.zeros(len(NAMES))
        self._draw_masks()

    def _draw_masks(self) -> None:
        self.mask = np.ones((len(NAMES), 5), np.bool_)
        if self._masked:
            self.mask[np.arange(len(NAMES)), self._random.integers(3, size=len(NAMES))] = False

    @property
    def acting(self) -> Bools:
        return np.array(self.status == PRESENT)

    def step(self, actions: Array) -> None:
        self.clock += 1
        acts, gone = self.acting, self.status == GONE
        for agent in np.flatnonzero(acts):
            assert self.mask[agent, actions[agent, 0]], "a forbidden action"
            self.place[agent] += np.array(actions[agent], np.float32) - 1.0
        self.reward = np.where(gone, 0.0, self.place.sum(axis=1) / 7 + self._random.normal(size=len(NAMES)))
        dies = ~gone & (self._random.random(len(NAMES)) < 0.12)
        self.terminated, self.truncated = dies, ~gone & ~dies & (self.clock >= _LIMIT)
        waits = self._random.random(len(NAMES)) < 0.2
        returns = gone & (self._random.random(len(NAMES)) < 0.3) & self._returning & (self.clock < _LIMIT)
        self.status[:] = np.where(waits & (self.status != GONE), WAITING, np.where(gone, GONE, PRESENT))
        self.status[self.terminated | self.truncated] = GONE
        self.status[returns] = PRESENT
        self._draw_masks()

    def observe(self, agent: int) -> dict[str, Any]:
        kind = np.int64((self.clock + agent) % 3)
        flags = np.array([self.clock % 2, agent % 2], np.int8)
        return {"place": self.place[agent].copy(), "kind": kind, "flags": flags}

    def state(self) -> Array:
        return self.place.reshape(-1).copy()


class VectorHunt(VectorMultiAgentEnv):
    """All matches at once."""

    possible_agents = NAMES
    single_observation_space = OBSERVATION
    single_action_space = ACTION

    def __init__(self, num_envs: int, returning: bool = False, masked: bool = True, with_state: bool = False) -> None:
        self.num_envs, self._masked = num_envs, masked
        self._hunts = [Hunt(returning, masked) for _ in range(num_envs)]
        self.single_state_space = STATE if with_state else None
        for number, hunt in enumerate(self._hunts):
            hunt.reset(number)

    def reset(self, seeds: Ints, matches: Ints) -> VectorMultiAgentStep:
        for seed, number in zip(seeds.tolist(), matches.tolist(), strict=True):
            self._hunts[number].reset(seed)
        return self._result()

    def step(self, actions: Tree, playing: Bools) -> VectorMultiAgentStep:
        for number in np.flatnonzero(playing):
            self._hunts[number].step(actions[number])
        return self._result()

    def _result(self) -> VectorMultiAgentStep:
        def stack(name: str) -> Array:
            return np.stack([getattr(hunt, name) for hunt in self._hunts])

        seen = [[hunt.observe(agent) for agent in range(len(NAMES))] for hunt in self._hunts]
        observation = {key: np.array([[one[key] for one in match] for match in seen]) for key in OBSERVATION.spaces}
        mask = stack("mask") if self._masked else None
        ends = stack("terminated"), stack("truncated")
        return VectorMultiAgentStep(stack("acting"), observation, stack("reward"), *ends, action_mask=mask)

    def state(self) -> Array:
        return np.stack([hunt.state() for hunt in self._hunts])


class ParallelHunt(ParallelEnv):  # type: ignore[misc]
    """One match, as PettingZoo steps it."""

    metadata = {"name": "hunt"}  # noqa: RUF012
    possible_agents = list(NAMES)  # noqa: RUF012

    def __init__(self, returning: bool = False, masked: bool = True, with_state: bool = False) -> None:
        self._hunt, self._masked = Hunt(returning, masked), masked
        self.agents: list[str] = []
        if with_state:
            self.state_space = STATE

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return OBSERVATION

    def action_space(self, agent: str) -> gym.Space[Any]:
        return ACTION

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        assert seed is not None
        self._hunt.reset(seed)
        return self._seen()

    def _seen(self) -> tuple[dict[str, Any], dict[str, Any]]:
        hunt = self._hunt
        self.agents = [name for agent, name in enumerate(NAMES) if hunt.status[agent] != GONE]
        cut = hunt.acting | hunt.truncated
        seen = {name: hunt.observe(agent) for agent, name in enumerate(NAMES) if cut[agent]}
        return seen, {name: {"action_mask": hunt.mask[agent]} if self._masked else {} for agent, name in enumerate(NAMES)}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        hunt = self._hunt
        hunt.step(np.array([actions.get(name, (0, 0)) for name in NAMES]))
        flags = [dict(zip(NAMES, column.tolist(), strict=True)) for column in (hunt.reward, hunt.terminated, hunt.truncated)]
        seen, infos = self._seen()
        return seen, *flags, infos

    def state(self) -> Array:
        return self._hunt.state()


# -- in turn ------------------------------------------------------------------------------------------------------------

COUNT_TO = 12
COUNTED = gym.spaces.Box(0, 50, (3,), np.float32)


class VectorCount(VectorMultiAgentEnv):
    """Three agents add 1, 2 or 3 in turn; who reaches the end loses 2 points to the others. The seed says who begins, and where."""

    possible_agents = NAMES
    single_observation_space = COUNTED
    single_action_space = gym.spaces.Discrete(3)

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self._count, self._turn = np.zeros((2, num_envs), np.int64)

    def reset(self, seeds: Ints, matches: Ints) -> VectorMultiAgentStep:
        self._count[matches], self._turn[matches] = seeds % 5, seeds % 3
        return self._result(np.zeros(self.num_envs, np.bool_))

    def step(self, actions: Tree, playing: Bools) -> VectorMultiAgentStep:
        chosen = actions[np.arange(self.num_envs), self._turn]
        self._count[playing] += 1 + chosen[playing]
        over = playing & (self._count >= COUNT_TO)
        result = self._result(over)
        result.reward[over] = 1.0
        result.reward[np.flatnonzero(over), self._turn[over]] = -2.0
        moves = playing & ~over
        result.acting[np.arange(self.num_envs), self._turn] = False
        self._turn[moves] = (self._turn[moves] + 1) % 3
        result.acting[np.flatnonzero(moves), self._turn[moves]] = True
        result.observation[..., 1] = self._turn[:, None]
        return result

    def _result(self, over: Bools) -> VectorMultiAgentStep:
        shape = (self.num_envs, 3)
        observation = np.zeros((*shape, 3), np.float32)
        observation[..., 0], observation[..., 1], observation[..., 2] = self._count[:, None], self._turn[:, None], np.arange(3)
        ended = np.repeat(over[:, None], 3, axis=1)
        acting = (np.arange(3) == self._turn[:, None]) & ~ended
        return VectorMultiAgentStep(acting, observation, np.zeros(shape), ended, np.zeros(shape, np.bool_))


class TurnsCount(AECEnv):  # type: ignore[misc]
    """One match, as PettingZoo steps it."""

    metadata = {"name": "count"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = list(NAMES)

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return COUNTED

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        assert seed is not None
        self.agents = list(NAMES)
        self.rewards = dict.fromkeys(NAMES, 0.0)
        self._cumulative_rewards = dict.fromkeys(NAMES, 0.0)
        self.terminations, self.truncations = dict.fromkeys(NAMES, False), dict.fromkeys(NAMES, False)
        self.infos: dict[str, Any] = {name: {} for name in NAMES}
        self._count, self.agent_selection = seed % 5, NAMES[seed % 3]

    def observe(self, agent: str) -> Array:
        return np.array([self._count, NAMES.index(self.agent_selection), NAMES.index(agent)], np.float32)

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._count += 1 + action
        self._clear_rewards()
        if self._count >= COUNT_TO:
            self.terminations = dict.fromkeys(NAMES, True)
            self.rewards = {name: -2.0 if name == agent else 1.0 for name in NAMES}
        self.agent_selection = NAMES[(NAMES.index(agent) + 1) % 3]
        self._accumulate_rewards()
