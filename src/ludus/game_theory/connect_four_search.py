"""Alpha-beta search on the bitboards of `connect_four`, compiled with numba where it is installed, else the same functions as Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

COLUMNS: Final = 7
ROWS: Final = 6
HEIGHT: Final = ROWS + 1
"""Bits of a column; the top one stays empty, so that no line of four crosses from one column to the next."""
BOTTOM: Final = sum(1 << (HEIGHT * column) for column in range(COLUMNS))
COLUMN: Final = (1 << ROWS) - 1
BOARD: Final = BOTTOM * COLUMN
MIDDLE: Final = COLUMN << (HEIGHT * 3)
WIN: Final = 1_000_000

_CENTRE_FIRST: Final = (3, 2, 4, 1, 5, 0, 6)
_DIAGONALS_AND_ROW: Final = (HEIGHT - 1, HEIGHT, HEIGHT + 1)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compile(function: _Function) -> _Function:
    try:
        import numba
    except ModuleNotFoundError:
        return function
    try:
        return cast(_Function, numba.njit(cache=True)(function))
    except (OSError, RuntimeError):  # no writable cache: compiled in every process
        return cast(_Function, numba.njit(function))


@_compile
def count(bits: int) -> int:
    found = 0
    while bits:
        bits &= bits - 1
        found += 1
    return found


@_compile
def has_four(stones: int) -> bool:
    pairs = stones & (stones >> 1)
    if pairs & (pairs >> 2):
        return True
    for step in _DIAGONALS_AND_ROW:
        pairs = stones & (stones >> step)
        if pairs & (pairs >> (2 * step)):
            return True
    return False


@_compile
def winning_squares(stones: int, occupied: int) -> int:
    """Empty squares that complete four in a row for these stones, whether they can be reached now or not."""
    found = (stones << 1) & (stones << 2) & (stones << 3)
    for step in _DIAGONALS_AND_ROW:
        two = (stones << step) & (stones << (2 * step))
        found |= two & (stones << (3 * step))
        found |= two & (stones >> step)
        two = (stones >> step) & (stones >> (2 * step))
        found |= two & (stones >> (3 * step))
        found |= two & (stones << step)
    return found & (BOARD ^ occupied)


@_compile
def evaluate(own: int, occupied: int) -> int:
    """Open threes and stones in the middle, of the player to move minus the other's."""
    other = own ^ occupied
    threes = count(winning_squares(own, occupied)) - count(winning_squares(other, occupied))
    return 10 * threes + count(own & MIDDLE) - count(other & MIDDLE)


@_compile
def play(occupied: int, column: int) -> int:
    """All stones after a move; the same as before if the column is full."""
    return occupied | ((occupied + (1 << (HEIGHT * column))) & (COLUMN << (HEIGHT * column)))


@_compile
def search(own: int, occupied: int, depth: int, low: int, high: int) -> int:
    """Alpha-beta value for the player to move, who has the stones `own`; wins that come sooner are worth more."""
    if has_four(own ^ occupied):
        return -WIN - depth
    if occupied == BOARD:
        return 0
    if depth == 0:
        return evaluate(own, occupied)
    best = -2 * WIN
    for column in _CENTRE_FIRST:
        after = play(occupied, column)
        if after != occupied:
            best = max(best, -search(own ^ occupied, after, depth - 1, -high, -low))
            low = max(low, best)
            if low >= high:
                break
    return best
