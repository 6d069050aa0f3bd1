"""Tic-tac-toe. Actions: the squares 0 … 8, row by row. Player 0 begins. Perfect play of both sides ends in a draw."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ludus.game_theory.extensive_game import TERMINAL

Board = tuple[int, ...]
"""Nine squares: 0 empty, 1 player 0, 2 player 1."""

_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class TicTacToe:
    name = "tic_tac_toe"
    num_actions = 9

    def root(self) -> Board:
        return (0,) * 9

    def player(self, state: Board) -> int:
        if winner(state) is not None or 0 not in state:
            return TERMINAL
        return (9 - state.count(0)) % 2

    def chance_outcomes(self, state: Board) -> Sequence[tuple[int, float]]:
        return ()

    def legal_actions(self, state: Board) -> Sequence[int]:
        return [square for square in range(9) if not state[square]]

    def child(self, state: Board, action: int) -> Board:
        return (*state[:action], 1 + (9 - state.count(0)) % 2, *state[action + 1 :])

    def returns(self, state: Board) -> float:
        return {None: 0.0, 0: 1.0, 1: -1.0}[winner(state)]

    def information(self, state: Board) -> Board:
        return state


@functools.cache
def winner(board: Board) -> int | None:
    for a, b, c in _LINES:
        if board[a] and board[a] == board[b] == board[c]:
            return board[a] - 1
    return None


@functools.cache
def perfect_value(board: Board) -> int:
    """Result for the player to move if both sides play perfectly: 1, 0 or -1. Minimax over all continuations."""
    if winner(board) is not None:
        return -1  # the player who moved last has won
    game = TicTacToe()
    return max((-perfect_value(game.child(board, action)) for action in game.legal_actions(board)), default=0)


def perfect_actions(board: Board) -> list[int]:
    """All actions that keep the value of the board."""
    game = TicTacToe()
    return [action for action in game.legal_actions(board) if -perfect_value(game.child(board, action)) == perfect_value(board)]
