"""Mixtures of strategies: one is drawn at the start of a match and played to its end.

By Kuhn's theorem a mixture is equivalent to one behaviour strategy: at every information set the strategies are weighted by the
probability that their own actions lead there. Averaging the action probabilities without these weights is not equivalent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ludus.game_theory.game_tree import Doubles, GameTree


def mix_strategies(tree: GameTree, strategies: Sequence[Doubles], weights: Sequence[float] | Doubles) -> Doubles:
    """The behaviour strategy of both players that is equivalent to drawing one of the strategies with these weights."""
    return tree.normalise(
        sum((w * realisation_plan(tree, s) for w, s in zip(weights, strategies, strict=True)), np.zeros(tree.slots))
    )


def realisation_plan(tree: GameTree, strategy: Doubles) -> Doubles:
    """[slots] probability that the acting player's own actions lead to each action: the sequence form of both players."""
    plan = np.zeros(tree.slots)
    for player in (0, 1):
        plan += realisation_weights(tree, strategy, player, tree.reach(strategy, player, own=True))
    return plan


def realisation_weights(tree: GameTree, strategy: Doubles, player: int, reached: Sequence[Doubles]) -> Doubles:
    """The realisation plan of one player; 0 at the other's slots. `reached`: `tree.reach` of that player's own actions."""
    weights = np.zeros(tree.slots)
    for level, reach in zip(tree.levels, reached, strict=True):
        mine = level.player == player
        weights[level.slot[mine]] = reach[level.parent[mine]] * strategy[level.slot[mine]]
    return weights


class TreePayoffs:
    """Exact expected returns between strategies, cached by what each contributes."""

    def __init__(self, tree: GameTree) -> None:
        self._tree = tree
        chance = tree.reach(np.ones(tree.slots), -2, own=False)  # players contribute a factor of 1
        self._chance_utility = _at_terminals(tree, chance) * _at_terminals(tree, [level.utility for level in tree.levels])
        self._reach: tuple[list[Doubles], list[Doubles]] = ([], [])

    def add(self, strategy: Doubles, players: Sequence[int] = (0, 1)) -> None:
        """Add the strategy to the populations of these players."""
        for player in players:
            self._reach[player].append(_at_terminals(self._tree, self._tree.reach(strategy, player, own=True)))

    def payoffs(self) -> Doubles:
        """[population of player 0, population of player 1] expected return of player 0."""
        row, column = (np.array(reach) for reach in self._reach)
        return np.asarray((row * self._chance_utility) @ column.T, np.float64)

    def symmetric(self) -> Doubles:
        """[population, population] expected return of the row strategy if sides are drawn for every match."""
        payoffs = self.payoffs()
        return np.asarray((payoffs - payoffs.T) / 2, np.float64)


def _at_terminals(tree: GameTree, by_level: Sequence[Doubles]) -> Doubles:
    return np.concatenate([values[level.terminal] for level, values in zip(tree.levels, by_level, strict=True)])
