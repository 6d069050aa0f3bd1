"""The network and the scripts of the example league on Connect Four."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.leagues import connect_four as scripts
from ludus.envs.matches.connect_four import COLUMNS, ROWS, ConnectFourEnv
from ludus.game_theory.connect_four import Position, winning_squares
from ludus.league.runtime.league_file import check_players, read_league
from ludus.models.custom import loader
from ludus.testing import check_model

EXAMPLES = Path(__file__).parents[2] / "examples/leagues"


@pytest.fixture(autouse=True)
def _find_model_and_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_MODEL_PATH", str(EXAMPLES))
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_the_example_is_valid_and_its_model_can_be_trained(tmp_path: Path) -> None:
    assert check_players(read_league(EXAMPLES / "connect_four.yaml"), tmp_path).keys() == {"main"}
    check_model("connect_four", (ConnectFourEnv.single_observation_space, ConnectFourEnv.single_action_space))


def test_the_model_finds_the_winning_squares_that_bitboards_find() -> None:
    spaces = ConnectFourEnv.single_observation_space, ConnectFourEnv.single_action_space
    model: Any = loader.find_class("connect_four")(*spaces, COLUMNS, {}, "connect_four")
    random, found = np.random.default_rng(0), 0
    for _ in range(60):
        position = Position()
        while not position.lost and not position.full:
            other = position.own ^ position.occupied
            own_plane, other_plane = _plane(position.own), _plane(other)
            empty = 1.0 - own_plane - other_plane
            squares = model.winning_squares(model.open_lines(own_plane, other_plane), empty)
            expected = _plane(winning_squares(position.own, position.occupied))
            assert torch.equal(squares, expected)
            found += int(expected.sum())
            position = position.play(int(random.choice(position.legal_actions())))
    assert found > 100


def test_the_scripts_read_the_board_of_the_environment_and_see_a_win() -> None:
    env, random = ConnectFourEnv(1, egocentric_obs_tensor=True), np.random.default_rng(0)
    for seed in range(20):
        step, position, mover = env.reset(np.array([seed]), np.array([0])), Position(), 0
        while not step.terminated.any():
            observation = step.observation[0, mover].copy()
            assert scripts.read_position(observation) == position
            wins = [column for column in position.legal_actions() if position.play(column).lost]
            if wins:
                assert scripts.minimax_2(observation, None) in wins
                assert scripts.minimax_4(observation, None) in wins
            column = int(random.choice(position.legal_actions()))
            position, mover = position.play(column), 1 - mover
            step = env.step(np.full((1, 2), column), np.array([True]))


def _plane(stones: int) -> torch.Tensor:
    """[1, 42] of a bitboard, the lowest row first."""
    bits = [stones >> ((ROWS + 1) * column + row) & 1 for row in range(ROWS) for column in range(COLUMNS)]
    return torch.tensor([bits], dtype=torch.float32)
