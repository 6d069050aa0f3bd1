"""Games of OpenSpiel as environments with several agents: `openspiel/leduc_poker`, with game parameters in `env_config`.

Agents are `player_0`, `player_1`, …. An agent observes its information state if the game provides it, otherwise the observation
tensor; illegal actions are masked. Rewards are those since the agent's last action.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core.plugins import did_you_mean
from ludus.envs.faults import environment_errors
from ludus.envs.pettingzoo import AgentSpaces, Departure, MatchStep, Turn
from ludus.errors import ConfigError, MissingExtra, UnknownName

FAMILY = "openspiel"


def load_game(name: str, parameters: Mapping[str, Any] | None = None) -> Any:
    """Load a game by its OpenSpiel name. Raises UnknownName, MissingExtra, ConfigError."""
    try:
        import pyspiel
    except ModuleNotFoundError as error:
        raise MissingExtra("Games of OpenSpiel are not installed.", "pip install 'ludus[openspiel]'") from error
    known = pyspiel.registered_names()
    if name not in known:
        raise UnknownName(f"OpenSpiel has no game {name!r}.", did_you_mean(name, known))
    try:
        return pyspiel.load_game(name, dict(parameters or {}))
    except pyspiel.SpielError as error:
        raise ConfigError(f"OpenSpiel cannot load {name}: {error}", "Check config.env_config.") from error


class OpenSpielMatch:
    """One game of OpenSpiel, played again and again. Chance is drawn from the seed of the reset."""

    state_space: gym.Space[Any] | None = None
    late_rewards = 0
    metadata: Mapping[str, Any] = {}

    def __init__(self, name: str, parameters: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self._game = load_game(name.removeprefix(f"{FAMILY}/"), parameters)
        self._use_information_state = bool(self._game.get_type().provides_information_state_tensor)
        if not self._use_information_state and not self._game.get_type().provides_observation_tensor:
            raise ConfigError(f"{name} has no observations as numbers.", "Choose a game with an observation tensor.")
        shape = (
            self._game.information_state_tensor_shape() if self._use_information_state else self._game.observation_tensor_shape()
        )
        self._shape = tuple(shape)
        spaces = AgentSpaces(
            gym.spaces.Box(-np.inf, np.inf, self._shape, np.float32),
            gym.spaces.Discrete(self._game.num_distinct_actions()),
            masked=True,
        )
        self._names = [f"player_{player}" for player in range(self._game.num_players())]
        self.agents: Mapping[str, AgentSpaces] = dict.fromkeys(self._names, spaces)
        self._state: Any = None
        self._random = np.random.default_rng(0)
        self._pending = np.zeros(len(self._names))  # rewards since each player's last action
        self._acted: set[int] = set()
        self._steps = 0

    def reset(self, seed: int) -> MatchStep:
        self._random = np.random.default_rng(seed)
        self._state = self._game.new_initial_state()
        self._pending[:] = 0.0
        self._acted.clear()
        return self._advance()

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        self._steps += 1
        with environment_errors(self.name, "step", self._steps):
            if self._state.is_simultaneous_node():
                self._state.apply_actions([int(actions.get(name, 0)) for name in self._names])
            else:
                ((_, action),) = actions.items()
                self._state.apply_action(int(action))
        self._acted |= {self._names.index(name) for name in actions}
        return self._advance()

    def truncate(self) -> list[Departure]:
        rewards = [self._take_reward(player) for player in range(len(self._names))]
        return [
            Departure(name, rewards[player], terminated=False, truncated=True, observation=self._observation(player))
            for player, name in enumerate(self._names)
        ]

    def _advance(self) -> MatchStep:
        """Play chance nodes up to the next decision or the end."""
        if not self._state.is_chance_node():
            self._pending += self._state.rewards()
        while self._state.is_chance_node():
            outcomes, probabilities = zip(*self._state.chance_outcomes(), strict=True)
            weights = np.asarray(probabilities)
            self._state.apply_action(int(outcomes[self._random.choice(len(outcomes), p=weights / weights.sum())]))
            self._pending += self._state.rewards()
        if self._state.is_terminal():
            return MatchStep((), [self._leave(player) for player in range(len(self._names))], over=True)
        if self._state.is_simultaneous_node():
            players = [player for player in range(len(self._names)) if self._state.legal_actions(player)]
        else:
            players = [self._state.current_player()]
        return MatchStep([self._turn(player) for player in players])

    def _turn(self, player: int) -> Turn:
        mask = np.zeros(self._game.num_distinct_actions(), np.bool_)
        mask[self._state.legal_actions(player)] = True
        return Turn(self._names[player], self._observation(player), mask, self._take_reward(player))

    def _leave(self, player: int) -> Departure:
        return Departure(self._names[player], self._take_reward(player), terminated=True, truncated=False)

    def _take_reward(self, player: int) -> float:
        reward = float(self._pending[player])
        self._pending[player] = 0.0
        return reward

    def _observation(self, player: int) -> Any:
        state = self._state
        tensor = state.information_state_tensor(player) if self._use_information_state else state.observation_tensor(player)
        return np.asarray(tensor, np.float32).reshape(self._shape)

    def state(self) -> Any:
        raise NotImplementedError(f"{self.name} has no global state")

    def render(self) -> Any:
        raise ConfigError(f"{self.name} cannot be rendered.", "OpenSpiel has no pictures of its games.")

    def close(self) -> None:
        pass
