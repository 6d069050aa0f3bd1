"""Policy-space response oracles (Lanctot et al. 2017) with exact best responses, for games whose tree can be enumerated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ludus.game_theory.exploitability import best_response
from ludus.game_theory.game_tree import Doubles, GameTree
from ludus.game_theory.meta_solvers import MetaSolver, nash


class ExactPSRO:
    """Populations of both players, grown by one best response per iteration and player against the meta-strategy of the other."""

    def __init__(self, tree: GameTree, solve: MetaSolver = nash) -> None:
        self._tree, self._solve = tree, solve
        self.populations: tuple[list[Doubles], list[Doubles]] = ([], [])
        self._reach: tuple[list[Doubles], list[Doubles]] = ([], [])
        self._weights: tuple[list[Doubles], list[Doubles]] = ([], [])
        self._chance_utility = _terminal_weights(tree)
        for player in (0, 1):
            self._add(player, tree.uniform())
        self.meta = self._solve(self.payoffs())

    def payoffs(self) -> Doubles:
        """[population of player 0, population of player 1] expected return of player 0."""
        row, column = (np.array(reach) for reach in self._reach)
        return np.asarray((row * self._chance_utility) @ column.T, np.float64)

    def strategy(self) -> Doubles:
        """The meta-strategy of both players as one behaviour strategy."""
        parts = [sum(m * w for m, w in zip(self.meta[player], self._weights[player], strict=True)) for player in (0, 1)]
        return self._tree.normalise(np.where(self._tree.slot_player == 0, *parts))

    def step(self) -> float:
        """Add a best response of each player; return the exploitability of the meta-strategy that they respond to."""
        strategy = self.strategy()
        gains = 0.0
        for player in (0, 1):
            value, response = best_response(self._tree, strategy, player)
            gains += value
            self._add(player, response)
        self.meta = self._solve(self.payoffs())
        return gains / 2

    def _add(self, player: int, strategy: Doubles) -> None:
        self.populations[player].append(strategy)
        reached = self._tree.reach(strategy, player, own=True)
        self._reach[player].append(_at_terminals(self._tree, reached))
        self._weights[player].append(realisation_weights(self._tree, strategy, player, reached))


def realisation_weights(tree: GameTree, strategy: Doubles, player: int, reached: Sequence[Doubles]) -> Doubles:
    """[slots] probability that the player's own actions lead to each of that player's actions: the sequence form."""
    weights = np.zeros(tree.slots)
    for level, reach in zip(tree.levels, reached, strict=True):
        mine = level.player == player
        weights[level.slot[mine]] = reach[level.parent[mine]] * strategy[level.slot[mine]]
    return weights


def _at_terminals(tree: GameTree, by_level: Sequence[Doubles]) -> Doubles:
    return np.concatenate([values[level.terminal] for level, values in zip(tree.levels, by_level, strict=True)])


def _terminal_weights(tree: GameTree) -> Doubles:
    """[terminal nodes] return of player 0 times the probability of chance."""
    chance = tree.reach(np.ones(tree.slots), -2, own=False)  # players contribute a factor of 1
    utility = [level.utility for level in tree.levels]
    return _at_terminals(tree, chance) * _at_terminals(tree, utility)
