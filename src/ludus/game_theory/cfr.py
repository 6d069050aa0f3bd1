"""Counterfactual regret minimisation (Zinkevich et al. 2007) and CFR+ (Tammelin 2014), with alternating updates."""

from __future__ import annotations

import numpy as np

from ludus.game_theory.game_tree import Doubles, GameTree


class CFR:
    """Iterates towards a Nash equilibrium; `average` is the result."""

    def __init__(self, tree: GameTree, *, plus: bool = False) -> None:
        self._tree, self._plus = tree, plus
        self._regret = np.zeros(tree.slots)
        self._weights = np.zeros(tree.slots)
        self.iterations = 0

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            self.iterations += 1
            for player in (0, 1):
                self._update(player)

    def average(self) -> Doubles:
        return self._tree.normalise(self._weights)

    def _update(self, player: int) -> None:
        tree = self._tree
        strategy = tree.normalise(np.maximum(self._regret, 0.0))
        own, others = tree.reach(strategy, player, own=True), tree.reach(strategy, player, own=False)
        sign = 1.0 if player == 0 else -1.0
        gained, added, values = np.zeros(tree.slots), np.zeros(tree.slots), np.zeros(0)
        for level, own_reach, other_reach in zip(reversed(tree.levels), reversed(own), reversed(others), strict=True):
            here = sign * level.utility
            if level.parent.size:
                probability, below = tree.edge_probabilities(level, strategy), values[level.child]
                here = here + np.bincount(level.parent, probability * below, minlength=here.size)
                mine = level.player == player
                if mine.any():
                    slots, parents = level.slot[mine], level.parent[mine]
                    gained += np.bincount(slots, other_reach[parents] * (below[mine] - here[parents]), minlength=tree.slots)
                    added += np.bincount(slots, own_reach[parents] * probability[mine], minlength=tree.slots)
            values = here
        mine = tree.slot_player == player
        self._regret[mine] += gained[mine]
        if self._plus:
            np.maximum(self._regret, 0.0, out=self._regret)
        self._weights[mine] += added[mine] * (self.iterations if self._plus else 1)
