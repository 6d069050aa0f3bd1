"""The rules of Connect Four, compared with OpenSpiel's on random games."""

from __future__ import annotations

import numpy as np
import pytest

from ludus.envs.matches.connect_four import COLUMNS, ROWS, ConnectFourEnv
from ludus.envs.pettingzoo import is_multi_agent, make_match
from ludus.errors import ConfigError, EnvironmentFault

pyspiel = pytest.importorskip("pyspiel")


@pytest.mark.parametrize("egocentric", [False, True])
def test_random_games_follow_the_rules_of_openspiel(egocentric: bool) -> None:
    game = pyspiel.load_game("connect_four", {"egocentric_obs_tensor": egocentric})
    random, count, finished = np.random.default_rng(0), 16, 0
    env = ConnectFourEnv(count, egocentric_obs_tensor=egocentric)
    states = [game.new_initial_state() for _ in range(count)]
    result = env.reset(np.zeros(count, np.int64), np.arange(count))
    while finished < 300:
        playing = random.random(count) < 0.8
        actions = np.full((count, 2), -1)  # actions of players whose turn it is not are arbitrary
        for number, state in enumerate(states):
            player = state.current_player()
            assert result.acting[number].tolist() == [player == 0, player == 1]
            assert np.flatnonzero(result.action_mask[number, player]).tolist() == state.legal_actions()  # type: ignore[index]
            seen = np.array(state.observation_tensor(player)).reshape(3, ROWS, COLUMNS)
            np.testing.assert_array_equal(result.observation[number, player], seen)
            actions[number, player] = random.choice(state.legal_actions())
            if playing[number]:
                state.apply_action(int(actions[number, player]))
        result = env.step(actions, playing)
        for number in np.flatnonzero(playing).tolist():
            assert result.reward[number].tolist() == states[number].rewards()
            assert result.terminated[number].tolist() == [states[number].is_terminal()] * 2
        over = np.array([number for number, state in enumerate(states) if state.is_terminal()], np.int64)
        for number in over.tolist():
            finished += 1
            states[number] = game.new_initial_state()
        if len(over):
            result = env.reset(np.zeros(len(over), np.int64), over)


def test_opening_moves_are_drawn_from_the_seed_of_a_match() -> None:
    count, most = 200, 5
    env = ConnectFourEnv(count, opening_moves=most)
    seeds = np.arange(count)
    first = env.reset(seeds, np.arange(count))
    stones = first.observation[:, 0, :2].sum(axis=(2, 3)).astype(int)  # [N, player]
    moves = stones.sum(axis=1)
    assert set(moves.tolist()) == set(range(most + 1))
    assert (stones[:, 0] - stones[:, 1] == moves % 2).all()
    assert (first.acting == np.stack([moves % 2 == 0, moves % 2 == 1], axis=1)).all()
    assert not first.terminated.any()
    columns = first.observation[:, 0, :2].sum(axis=(0, 1, 2))
    assert columns.min() > 0.6 * columns.mean()
    below, above = first.observation[:, 0, 2, :-1], first.observation[:, 0, 2, 1:]
    assert (below <= above).all(), "no stone above an empty square"

    before = first.observation.copy()
    again = env.reset(seeds[::-1], np.arange(count))
    np.testing.assert_array_equal(again.observation, before[::-1])
    assert not np.array_equal(again.observation, before)


@pytest.mark.parametrize("moves", [-1, 7])
def test_openings_in_which_a_match_could_end_are_refused(moves: int) -> None:
    with pytest.raises(ConfigError, match="Use 0 to 6"):
        ConnectFourEnv(1, opening_moves=moves)


def test_a_full_board_without_four_in_a_row_is_a_draw() -> None:
    match = make_match("ludus/ConnectFour-v0")
    step, returns = match.reset(0), dict.fromkeys(match.agents, 0.0)
    columns = [
        0,
        1,
        0,
        1,
        1,
        0,
        1,
        0,
        0,
        1,
        0,
        1,
        2,
        3,
        2,
        3,
        3,
        2,
        3,
        2,
        2,
        3,
        2,
        3,
        4,
        5,
        4,
        5,
        5,
        4,
        5,
        4,
        4,
        5,
        4,
        5,
        *[6] * 6,
    ]
    for column in columns:
        assert not step.over
        (turn,) = step.turns
        step = match.step({turn.agent: column})
        for left in step.departures:
            returns[left.agent] += left.reward
    assert step.over
    assert returns == {"player_0": 0.0, "player_1": 0.0}


def test_a_full_column_is_masked_and_refused() -> None:
    match = make_match("ludus/ConnectFour-v0")
    step = match.reset(0)
    for _ in range(ROWS):
        step = match.step({step.turns[0].agent: 3})
    assert step.turns[0].mask is not None
    assert step.turns[0].mask.tolist() == [True, True, True, False, True, True, True]
    with pytest.raises(EnvironmentFault, match="column 3 of match 0 is full"):
        match.step({step.turns[0].agent: 3})


def test_the_board_is_rendered() -> None:
    assert is_multi_agent("ludus/ConnectFour-v0")
    match = make_match("ludus/ConnectFour-v0", render_mode="rgb_array")
    step = match.reset(0)
    empty = match.render()
    match.step({step.turns[0].agent: 0})
    changed = np.argwhere((match.render() != empty).any(axis=2))
    assert empty.dtype == np.uint8
    size = empty.shape[0] // ROWS
    assert changed.min(axis=0)[0] >= (ROWS - 1) * size  # the lowest row of the first column
    assert changed.max(axis=0)[1] < size
    with pytest.raises(ConfigError, match="no render_mode 'human'"):
        ConnectFourEnv(1, render_mode="human")
