"""Policy-space response oracles (Lanctot et al. 2017) with exact best responses, for games whose tree can be enumerated."""

from __future__ import annotations

import numpy as np

from ludus.game_theory.exploitability import best_response
from ludus.game_theory.game_tree import Doubles, GameTree
from ludus.game_theory.meta_solvers import MetaSolver, nash
from ludus.game_theory.mixtures import TreePayoffs, realisation_weights


class ExactPSRO:
    """Populations of both players, grown by one best response per iteration and player against the meta-strategy of the other."""

    def __init__(self, tree: GameTree, solve: MetaSolver = nash) -> None:
        self._tree, self._solve = tree, solve
        self.populations: tuple[list[Doubles], list[Doubles]] = ([], [])
        self._weights: tuple[list[Doubles], list[Doubles]] = ([], [])
        self._table = TreePayoffs(tree)
        for player in (0, 1):
            self._add(player, tree.uniform())
        self.meta = self._solve(self.payoffs())

    def payoffs(self) -> Doubles:
        """[population of player 0, population of player 1] expected return of player 0."""
        return self._table.payoffs()

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
        self._table.add(strategy, (player,))
        reached = self._tree.reach(strategy, player, own=True)
        self._weights[player].append(realisation_weights(self._tree, strategy, player, reached))
