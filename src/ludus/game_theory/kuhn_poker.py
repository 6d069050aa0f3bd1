"""Kuhn poker (Kuhn 1950): three cards, one bet. Actions: 0 = pass, 1 = bet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.game_theory.extensive_game import CHANCE, TERMINAL

_CARDS = 3


@dataclass(frozen=True)
class KuhnState:
    cards: tuple[int, ...] = ()
    """Cards of player 0 and 1, as far as they are dealt."""
    bets: tuple[int, ...] = ()


class KuhnPoker:
    name = "kuhn_poker"
    num_actions = 2

    def root(self) -> KuhnState:
        return KuhnState()

    def player(self, state: KuhnState) -> int:
        if len(state.cards) < 2:
            return CHANCE
        return TERMINAL if state.bets in ((0, 0), (1, 0), (1, 1), (0, 1, 0), (0, 1, 1)) else len(state.bets) % 2

    def chance_outcomes(self, state: KuhnState) -> Sequence[tuple[int, float]]:
        left = [card for card in range(_CARDS) if card not in state.cards]
        return [(card, 1 / len(left)) for card in left]

    def legal_actions(self, state: KuhnState) -> Sequence[int]:
        return (0, 1)

    def child(self, state: KuhnState, action: int) -> KuhnState:
        if len(state.cards) < 2:
            return KuhnState((*state.cards, action))
        return KuhnState(state.cards, (*state.bets, action))

    def returns(self, state: KuhnState) -> float:
        match state.bets:
            case (1, 0):
                return 1.0
            case (0, 1, 0):
                return -1.0
        stake = 1.0 + (1 in state.bets)
        return stake if state.cards[0] > state.cards[1] else -stake

    def information(self, state: KuhnState) -> tuple[int, tuple[int, ...]]:
        return state.cards[self.player(state)], state.bets
