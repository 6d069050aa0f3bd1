"""Games of OpenSpiel as `ExtensiveGame`, so that their trees can be enumerated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ludus.errors import ConfigError
from ludus.game_theory.extensive_game import CHANCE, TERMINAL


class OpenSpielGame:
    """A two-player zero-sum game. States are OpenSpiel's; they are compared by identity."""

    def __init__(self, game: Any) -> None:
        """`game`: as `pyspiel.load_game` returns it. Simultaneous moves are played one after the other. Raises ConfigError."""
        import pyspiel

        kind = game.get_type()
        if game.num_players() != 2 or kind.utility not in (
            pyspiel.GameType.Utility.ZERO_SUM,
            pyspiel.GameType.Utility.CONSTANT_SUM,
        ):
            raise ConfigError(f"{kind.short_name} is not a two-player zero-sum game.", "Exploitability is defined for those.")
        if kind.dynamics == pyspiel.GameType.Dynamics.SIMULTANEOUS:
            game = pyspiel.convert_to_turn_based(game)
        self.game, self.name, self.num_actions = game, kind.short_name, game.num_distinct_actions()
        self._perfect = kind.information == pyspiel.GameType.Information.PERFECT_INFORMATION

    def root(self) -> Any:
        return self.game.new_initial_state()

    def player(self, state: Any) -> int:
        if state.is_terminal():
            return TERMINAL
        return CHANCE if state.is_chance_node() else int(state.current_player())

    def chance_outcomes(self, state: Any) -> Sequence[tuple[int, float]]:
        outcomes: Sequence[tuple[int, float]] = state.chance_outcomes()
        return outcomes

    def legal_actions(self, state: Any) -> Sequence[int]:
        actions: Sequence[int] = state.legal_actions()
        return actions

    def child(self, state: Any, action: int) -> Any:
        return state.child(action)

    def returns(self, state: Any) -> float:
        own, other = state.returns()
        return float(own - other) / 2  # constant-sum games are shifted to zero-sum

    def information(self, state: Any) -> str:
        return str(state) if self._perfect else str(state.information_state_string())
