"""A small game together with what an environment shows of it, so that a network can be evaluated at all information sets at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ludus.core.tree import Array
from ludus.core.types import Bools
from ludus.envs.matches.rock_paper_scissors import ENV_NAME as ROCK_PAPER_SCISSORS
from ludus.envs.matches.rock_paper_scissors import read_stakes
from ludus.envs.openspiel import FAMILY, GameStates, load_game
from ludus.errors import ConfigError
from ludus.game_theory.game_tree import Doubles, GameTree, build_tree
from ludus.game_theory.openspiel_game import OpenSpielGame
from ludus.game_theory.rock_paper_scissors import RockPaperScissors

ActionProbabilities = Callable[[Array, Bools], Array]
"""Observations [N, …] and masks [N, actions] → probabilities [N, actions] of the allowed actions."""


class TabulatedPolicy(Protocol):
    def action_probabilities(self, observation: Any, mask: Any = None, *, deterministic: bool = False) -> Array: ...


@dataclass(frozen=True)
class ObservedGame:
    """A game tree with the observation and the action mask of every information set."""

    tree: GameTree
    agents: tuple[str, str]
    """Names of player 0 and player 1 in the environment."""
    observations: Array
    """[information sets, …]"""
    masks: Bools
    """[information sets, actions]"""

    def strategy(self, probabilities: ActionProbabilities) -> Doubles:
        """The strategy of a policy that plays both sides, from one batch."""
        found = np.asarray(probabilities(self.observations, self.masks), np.float64)
        return self.tree.normalise(found[self.masks])

    def strategy_of(self, policy: TabulatedPolicy, *, deterministic: bool = False) -> Doubles:
        return self.strategy(lambda o, m: policy.action_probabilities(o, m, deterministic=deterministic))

    def combine(self, first: Doubles, second: Doubles) -> Doubles:
        """The strategy that plays `first` as player 0 and `second` as player 1."""
        return np.where(self.tree.slot_player == 0, first, second)


def observe_game(env: str, env_config: Mapping[str, Any] | None = None, **limits: int) -> ObservedGame:
    """Enumerate the game of an environment. Raises ConfigError if it has no tree, or one that is too large.

    `limits`: `max_nodes` of `build_tree`.
    """
    if env == ROCK_PAPER_SCISSORS:
        tree = build_tree(RockPaperScissors(read_stakes(env_config)), **limits)
        sets = len(tree.information_sets)
        return ObservedGame(tree, ("player_0", "player_1"), np.zeros((sets, 1), np.float32), np.ones((sets, 3), np.bool_))
    if not env.startswith(f"{FAMILY}/"):
        raise ConfigError(f"The tree of {env} is not known.", f"Exact values exist for {FAMILY}/… and {ROCK_PAPER_SCISSORS}.")
    game = load_game(env.removeprefix(f"{FAMILY}/"), env_config)
    states = GameStates(game)
    if str(game.get_type().dynamics).endswith("SIMULTANEOUS"):
        raise ConfigError(
            f"The players of {env} act at the same time.", "Exact values exist for games whose players act in turn."
        )
    tree = build_tree(OpenSpielGame(game), **limits)
    masks = np.zeros((len(tree.information_sets), states.num_actions), np.bool_)
    for row, one in zip(masks, tree.information_sets, strict=True):
        if list(one.actions) != sorted(one.actions):
            raise ConfigError(f"{env} lists its legal actions out of order.", "Exact values need them in ascending order.")
        row[list(one.actions)] = True
    observations = np.stack([states.observation(one.state, one.player) for one in tree.information_sets])
    return ObservedGame(tree, ("player_0", "player_1"), observations, masks)
