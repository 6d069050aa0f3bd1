"""Connect Four on bitboards, with a minimax player of limited depth: an opponent of known strength.

A board is two integers with 7 bits per column, the lowest bit at the bottom; the seventh bit of a column is always empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

COLUMNS, ROWS = 7, 6
_HEIGHT = ROWS + 1
_COLUMN = (1 << ROWS) - 1
_BOTTOM = sum(1 << (_HEIGHT * column) for column in range(COLUMNS))
_BOARD = _BOTTOM * _COLUMN
_TOPS = tuple(1 << (_HEIGHT * column + ROWS - 1) for column in range(COLUMNS))
_CENTRE_FIRST = (3, 2, 4, 1, 5, 0, 6)
_WIN = 1_000_000
_DIRECTIONS = (1, _HEIGHT - 1, _HEIGHT, _HEIGHT + 1)


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
        stone = self.occupied + (1 << (_HEIGHT * column)) & (_COLUMN << (_HEIGHT * column))
        return Position(self.own ^ self.occupied, self.occupied | stone)

    @property
    def lost(self) -> bool:
        """Whether the player who moved last has four in a row."""
        return has_four(self.own ^ self.occupied)

    @property
    def full(self) -> bool:
        return self.occupied == _BOARD

    @classmethod
    def after(cls, columns: Sequence[int]) -> Position:
        """The position after these moves from the empty board."""
        position = cls()
        for column in columns:
            position = position.play(column)
        return position


def has_four(stones: int) -> bool:
    for step in _DIRECTIONS:
        pairs = stones & (stones >> step)
        if pairs & (pairs >> (2 * step)):
            return True
    return False


def winning_squares(stones: int, occupied: int) -> int:
    """Empty squares that complete four in a row for these stones, whether they can be reached now or not."""
    found = (stones << 1) & (stones << 2) & (stones << 3)
    for step in _DIRECTIONS[1:]:
        two = (stones << step) & (stones << (2 * step))
        found |= two & (stones << (3 * step))
        found |= two & (stones >> step)
        two = (stones >> step) & (stones >> (2 * step))
        found |= two & (stones >> (3 * step))
        found |= two & (stones << step)
    return found & (_BOARD ^ occupied)


def _evaluate(position: Position) -> int:
    """Open threes and stones in the middle, of the player to move minus the other's."""
    own, other = position.own, position.own ^ position.occupied
    threes = winning_squares(own, position.occupied).bit_count() - winning_squares(other, position.occupied).bit_count()
    middle = _COLUMN << (_HEIGHT * 3)
    return 10 * threes + (own & middle).bit_count() - (other & middle).bit_count()


def _search(position: Position, depth: int, low: int, high: int) -> int:
    """Alpha-beta value for the player to move; wins that come sooner are worth more."""
    if position.lost:
        return -_WIN - depth
    if position.full:
        return 0
    if depth == 0:
        return _evaluate(position)
    best = -2 * _WIN
    for column in _CENTRE_FIRST:
        if position.can_play(column):
            best = max(best, -_search(position.play(column), depth - 1, -high, -low))
            low = max(low, best)
            if low >= high:
                break
    return best


def minimax_actions(position: Position, depth: int) -> list[int]:
    """All moves that are best when looking `depth` moves ahead, the own one included."""
    values = {column: -_search(position.play(column), depth - 1, -2 * _WIN, 2 * _WIN) for column in position.legal_actions()}
    best = max(values.values())
    return [column for column, value in values.items() if value == best]


class MinimaxPlayer:
    """Looks `depth` moves ahead and draws among equally good moves."""

    def __init__(self, depth: int, random: np.random.Generator) -> None:
        self._depth, self._random = depth, random

    def choose(self, position: Position) -> int:
        return int(self._random.choice(minimax_actions(position, self._depth)))
