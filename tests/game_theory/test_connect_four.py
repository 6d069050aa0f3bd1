"""Connect Four on bitboards against OpenSpiel's rules and a plain minimax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ludus.game_theory.connect_four import MinimaxPlayer, Position, minimax_actions, winning_squares

pyspiel = pytest.importorskip("pyspiel")


def test_random_games_end_as_in_openspiel() -> None:
    game, random = pyspiel.load_game("connect_four"), np.random.default_rng(0)
    results = set()
    for _ in range(300):
        state, position = game.new_initial_state(), Position()
        while not state.is_terminal():
            assert not position.lost
            assert position.legal_actions() == state.legal_actions()
            action = int(random.choice(state.legal_actions()))
            state.apply_action(action)
            position = position.play(action)
        assert position.lost == any(state.returns())
        results.add(tuple(state.returns()))
    assert len(results) >= 2


def value_of(state: Any, depth: int) -> float:
    """Win, loss or unknown within `depth` moves, for the player to move."""
    if state.is_terminal():
        return -abs(float(state.returns()[0]))
    return 0.0 if depth == 0 else max(-value_of(state.child(action), depth - 1) for action in state.legal_actions())


def test_minimax_sees_every_forced_win_within_its_depth() -> None:
    game, random, forced = pyspiel.load_game("connect_four"), np.random.default_rng(1), 0
    for _ in range(25):
        state, position = game.new_initial_state(), Position()
        for _ in range(int(random.integers(8, 22))):
            if state.is_terminal():
                break
            action = int(random.choice(state.legal_actions()))
            state.apply_action(action)
            position = position.play(action)
        if state.is_terminal():
            continue
        values = {action: -value_of(state.child(action), 3) for action in state.legal_actions()}
        best = max(values.values())
        forced += best != 0
        for action in minimax_actions(position, 4):
            assert values[action] == best
    assert forced > 5


def test_winning_squares_are_those_that_complete_four() -> None:
    random = np.random.default_rng(2)
    for _ in range(40):
        position = Position()
        for _ in range(int(random.integers(6, 30))):
            if position.lost or position.full:
                break
            position = position.play(int(random.choice(position.legal_actions())))
        if position.lost or position.full:
            continue
        squares = winning_squares(position.own, position.occupied)
        for column in position.legal_actions():
            after = position.play(column)
            stone = after.occupied ^ position.occupied
            assert bool(squares & stone) == after.lost


def test_minimax_of_depth_four_beats_random_play() -> None:
    random = np.random.default_rng(3)
    minimax, won = MinimaxPlayer(4, random), 0
    for number in range(10):
        position, turn = Position(), number % 2
        while not position.lost and not position.full:
            position = position.play(minimax.choose(position) if turn == 0 else int(random.choice(position.legal_actions())))
            turn = 1 - turn
        won += position.lost and turn == 1
    assert won >= 9
