"""Games of OpenSpiel as environments with several agents: `openspiel/leduc_poker`, with game parameters in `env_config`.

Agents are `player_0`, `player_1`, …. An agent observes its information state if the game provides it, otherwise the observation
tensor; illegal actions are masked. Rewards are those since the agent's last action.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core.plugins import did_you_mean
from ludus.envs.faults import environment_errors
from ludus.envs.pettingzoo import AgentSpaces, Departure, MatchStep, Turn
from ludus.errors import ConfigError, MissingExtra, UnknownName

FAMILY = "openspiel"

_MAX_KEPT = 20_000  # states of a game that are kept with their observations; Leduc poker has 9,457
_MAX_GAMES = 8


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


class _Node:
    """A state of a game, with what a match asks of it. Never changed, so that copies of the environment share it."""

    __slots__ = ("children", "cumulative", "outcomes", "players", "rewards", "state", "views")

    def __init__(self, state: Any, players: int) -> None:
        self.state = state
        self.children: dict[Any, _Node] = {}
        """By action, or by the actions of all players."""
        self.rewards: list[float] | None = state.rewards() if any(state.rewards()) else None
        self.outcomes: list[int] = []
        """Of a chance node; empty otherwise."""
        self.cumulative: list[float] = []
        self.players: list[int] = []
        """Who acts; empty at chance nodes and at the end."""
        if state.is_chance_node():
            outcomes = state.chance_outcomes()
            total = sum(probability for _, probability in outcomes)
            self.outcomes = [outcome for outcome, _ in outcomes]
            self.cumulative = list(itertools.accumulate(probability / total for _, probability in outcomes))
        elif state.is_simultaneous_node():
            self.players = [player for player in range(players) if state.legal_actions(player)]
        elif not state.is_terminal():
            self.players = [state.current_player()]
        self.views: dict[int, tuple[Any, Any]] = {}
        """Player → observation and mask."""

    def draw(self, random: np.random.Generator) -> int:
        return self.outcomes[min(bisect.bisect_right(self.cumulative, random.random()), len(self.outcomes) - 1)]


class GameStates:
    """A game with the states that were visited first, up to a limit: computing a state costs far more than looking it up."""

    def __init__(self, game: Any) -> None:
        self.game, self.players, self.num_actions = game, game.num_players(), game.num_distinct_actions()
        kind = game.get_type()
        self._use_information_state = bool(kind.provides_information_state_tensor)
        if not self._use_information_state and not kind.provides_observation_tensor:
            raise ConfigError(f"{kind.short_name} has no observations as numbers.", "Choose a game with an observation tensor.")
        self.shape = tuple(
            game.information_state_tensor_shape() if self._use_information_state else game.observation_tensor_shape()
        )
        self.root = _Node(game.new_initial_state(), self.players)
        self._kept = 1

    def child(self, node: _Node, action: Any) -> _Node:
        """`action`: of the player who acts or of chance; a tuple of all players' actions if they act at once."""
        found = node.children.get(action)
        if found is None:
            state = node.state.clone()
            if isinstance(action, tuple):
                state.apply_actions(list(action))
            else:
                state.apply_action(action)
            found = _Node(state, self.players)
            if self._kept < _MAX_KEPT:
                self._kept += 1
                node.children[action] = found
        return found

    def view(self, node: _Node, player: int) -> tuple[Any, Any]:
        """What the player observes: the observation and the mask of allowed actions, both read-only."""
        found = node.views.get(player)
        if found is None:
            mask = np.zeros(self.num_actions, np.bool_)
            mask[node.state.legal_actions(player)] = True
            observation = self.observation(node.state, player)
            mask.flags.writeable = observation.flags.writeable = False
            found = node.views[player] = observation, mask
        return found

    def observation(self, state: Any, player: int) -> Any:
        tensor = state.information_state_tensor(player) if self._use_information_state else state.observation_tensor(player)
        return np.asarray(tensor, np.float32).reshape(self.shape)


@functools.lru_cache(maxsize=_MAX_GAMES)
def _states_of(name: str, parameters: str) -> GameStates:
    return GameStates(load_game(name, json.loads(parameters)))


class OpenSpielMatch:
    """One game of OpenSpiel, played again and again. Chance is drawn from the seed of the reset."""

    state_space: gym.Space[Any] | None = None
    late_rewards = 0
    metadata: Mapping[str, Any] = {}

    def __init__(self, name: str, parameters: Mapping[str, Any] | None = None, render_mode: str | None = None) -> None:
        """`render_mode` has no effect: OpenSpiel has no pictures of its games."""
        self.name = name
        try:
            given = json.dumps(dict(parameters or {}), sort_keys=True)
        except TypeError as error:
            raise ConfigError(f"A parameter of {name} is not a plain value: {error}.", "Check config.env_config.") from error
        self._states = _states_of(name.removeprefix(f"{FAMILY}/"), given)
        spaces = AgentSpaces(
            gym.spaces.Box(-np.inf, np.inf, self._states.shape, np.float32),
            gym.spaces.Discrete(self._states.num_actions),
            masked=True,
        )
        self._names = [f"player_{player}" for player in range(self._states.players)]
        self.agents: Mapping[str, AgentSpaces] = dict.fromkeys(self._names, spaces)
        self._node = self._states.root
        self._random = np.random.default_rng(0)
        self._pending = [0.0] * len(self._names)  # rewards since each player's last action
        self._steps = 0

    def reset(self, seed: int) -> MatchStep:
        self._random = np.random.default_rng(seed)
        self._node = self._states.root
        self._pending = [0.0] * len(self._names)
        return self._advance()

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        self._steps += 1
        with environment_errors(self.name, "step", self._steps):
            if self._node.state.is_simultaneous_node():
                action: Any = tuple(int(actions.get(name, 0)) for name in self._names)
            else:
                ((_, chosen),) = actions.items()
                action = int(chosen)
            self._node = self._states.child(self._node, action)
        self._add_rewards()
        return self._advance()

    def truncate(self) -> list[Departure]:
        rewards = [self._take_reward(player) for player in range(len(self._names))]
        return [
            Departure(
                name,
                rewards[player],
                terminated=False,
                truncated=True,
                observation=self._states.observation(self._node.state, player),
            )
            for player, name in enumerate(self._names)
        ]

    def _advance(self) -> MatchStep:
        """Play chance nodes up to the next decision or the end."""
        while self._node.outcomes:
            self._node = self._states.child(self._node, self._node.draw(self._random))
            self._add_rewards()
        if not self._node.players:
            return MatchStep((), [self._leave(player) for player in range(len(self._names))], over=True)
        return MatchStep([self._turn(player) for player in self._node.players])

    def _add_rewards(self) -> None:
        if self._node.rewards is not None:
            self._pending = [before + reward for before, reward in zip(self._pending, self._node.rewards, strict=True)]

    def _turn(self, player: int) -> Turn:
        observation, mask = self._states.view(self._node, player)
        return Turn(self._names[player], observation, mask, self._take_reward(player))

    def _leave(self, player: int) -> Departure:
        return Departure(self._names[player], self._take_reward(player), terminated=True, truncated=False)

    def _take_reward(self, player: int) -> float:
        reward, self._pending[player] = self._pending[player], 0.0
        return reward

    def state(self) -> Any:
        raise NotImplementedError(f"{self.name} has no global state")

    def render(self) -> Any:
        raise ConfigError(f"{self.name} cannot be rendered.", "OpenSpiel has no pictures of its games.")

    def close(self) -> None:
        pass
