"""Connect Four on bitboards, with a minimax player of limited depth: an opponent of known strength.

A board is two integers with 7 bits per column, the lowest bit at the bottom; the seventh bit of a column is always empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ludus.game_theory.connect_four_search import BOARD, COLUMNS, HEIGHT, ROWS, WIN, has_four, play, search, winning_squares

__all__ = ["COLUMNS", "ROWS", "MinimaxPlayer", "Position", "minimax_actions", "winning_squares"]

_TOPS = tuple(1 << (HEIGHT * column + ROWS - 1) for column in range(COLUMNS))


@dataclass(frozen=True)
class Position:
    """`own`: stones of the player to move; `occupied`: all stones."""

    own: int = 0
    occupied: int = 0

    def can_play(self, column: int) -> bool:
        return not self.occupied & _TOPS[column]

    def legal_actions(self) -> list[int]:
        return [column for column in range(COLUMNS) if self.can_play(column)]

    def play(self, column: int) -> Position:
        return Position(self.own ^ self.occupied, play(self.occupied, column))

    @property
    def lost(self) -> bool:
        """Whether the player who moved last has four in a row."""
        return has_four(self.own ^ self.occupied)

    @property
    def full(self) -> bool:
        return self.occupied == BOARD

    @classmethod
    def after(cls, columns: Sequence[int]) -> Position:
        """The position after these moves from the empty board."""
        position = cls()
        for column in columns:
            position = position.play(column)
        return position


def _value(position: Position, depth: int) -> int:
    return int(search(position.own, position.occupied, depth, -2 * WIN, 2 * WIN))


def minimax_actions(position: Position, depth: int) -> list[int]:
    """All moves that are best when looking `depth` moves ahead, the own one included."""
    values = {column: -_value(position.play(column), depth - 1) for column in position.legal_actions()}
    best = max(values.values())
    return [column for column, value in values.items() if value == best]


class MinimaxPlayer:
    """Looks `depth` moves ahead and draws among equally good moves."""

    def __init__(self, depth: int, random: np.random.Generator) -> None:
        self._depth, self._random = depth, random

    def choose(self, position: Position) -> int:
        return int(self._random.choice(minimax_actions(position, self._depth)))
