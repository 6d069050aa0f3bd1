"""Leduc poker (Southey et al. 2005): six cards in two suits, two betting rounds with at most two raises of 2 and 4 chips each.

Actions: 0 = fold, 1 = call or check, 2 = raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.game_theory.extensive_game import CHANCE, TERMINAL

FOLD, CALL, RAISE = 0, 1, 2
_CARDS = 6  # rank: card // 2
_RAISE_CHIPS = (2, 4)
_MAX_RAISES = 2


@dataclass(frozen=True)
class LeducState:
    cards: tuple[int, ...] = ()
    """Private cards of player 0 and 1, then the public card, as far as they are dealt."""
    rounds: tuple[tuple[int, ...], ...] = ((),)
    """Actions of each betting round."""


class LeducPoker:
    name = "leduc_poker"
    num_actions = 3

    def root(self) -> LeducState:
        return LeducState()

    def player(self, state: LeducState) -> int:
        if len(state.cards) < 2:
            return CHANCE
        betting = state.rounds[-1]
        if betting[-1:] == (FOLD,):
            return TERMINAL
        if _is_round_over(betting):
            return TERMINAL if len(state.rounds) == 2 else CHANCE
        return len(betting) % 2

    def chance_outcomes(self, state: LeducState) -> Sequence[tuple[int, float]]:
        left = [card for card in range(_CARDS) if card not in state.cards]
        return [(card, 1 / len(left)) for card in left]

    def legal_actions(self, state: LeducState) -> Sequence[int]:
        betting = state.rounds[-1]
        facing_raise = betting[-1:] == (RAISE,)
        can_raise = betting.count(RAISE) < _MAX_RAISES
        return ((FOLD,) if facing_raise else ()) + (CALL,) + ((RAISE,) if can_raise else ())

    def child(self, state: LeducState, action: int) -> LeducState:
        if len(state.cards) < 2:
            return LeducState((*state.cards, action))
        if self.player(state) == CHANCE:
            return LeducState((*state.cards, action), (*state.rounds, ()))
        return LeducState(state.cards, (*state.rounds[:-1], (*state.rounds[-1], action)))

    def returns(self, state: LeducState) -> float:
        chips = chips_of(state)
        betting = state.rounds[-1]
        if betting[-1] == FOLD:
            return -chips[0] if len(betting) % 2 else chips[1]
        own, other, public = (card // 2 for card in state.cards)
        difference = (own == public, own) > (other == public, other), (own == public, own) < (other == public, other)
        return chips[1] if difference[0] else -chips[0] if difference[1] else 0.0

    def information(self, state: LeducState) -> tuple[int, tuple[int, ...], tuple[tuple[int, ...], ...]]:
        return state.cards[self.player(state)], state.cards[2:], state.rounds


def chips_of(state: LeducState) -> tuple[float, float]:
    """Chips that the players have put in, including the ante of 1."""
    chips = [1.0, 1.0]
    for betting, raise_chips in zip(state.rounds, _RAISE_CHIPS, strict=False):
        for number, action in enumerate(betting):
            if action != FOLD:
                chips[number % 2] = max(chips) + (raise_chips if action == RAISE else 0)
    return chips[0], chips[1]


def _is_round_over(betting: tuple[int, ...]) -> bool:
    return len(betting) >= 2 and betting[-1] == CALL
