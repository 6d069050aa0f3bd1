"""Rock-paper-scissors with different stakes as an `ExtensiveGame`: player 1 acts second, without seeing the first action."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ludus.envs.matches.rock_paper_scissors import DEFAULT_STAKES, payoff_matrix
from ludus.game_theory.extensive_game import TERMINAL
from ludus.game_theory.game_tree import Doubles

Throws = tuple[int, ...]


class RockPaperScissors:
    name = "rock_paper_scissors"
    num_actions = 3

    def __init__(self, stakes: Sequence[float] = DEFAULT_STAKES) -> None:
        self._payoffs = payoff_matrix(stakes)
        self.equilibrium: Doubles = np.array([stakes[1], stakes[2], stakes[0]], np.float64) / sum(stakes)

    def root(self) -> Throws:
        return ()

    def player(self, state: Throws) -> int:
        return TERMINAL if len(state) == 2 else len(state)

    def chance_outcomes(self, state: Throws) -> Sequence[tuple[int, float]]:
        return ()

    def legal_actions(self, state: Throws) -> Sequence[int]:
        return (0, 1, 2)

    def child(self, state: Throws, action: int) -> Throws:
        return (*state, action)

    def returns(self, state: Throws) -> float:
        return float(self._payoffs[state])

    def information(self, state: Throws) -> int:
        return len(state)
