"""Matches in RocketSim. Skipped where rocketsim or the collision meshes are not installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ludus.core.types import Floats, Ints
from ludus.envs.matches.vector_multi_agent import VectorMultiAgentStep
from ludus.envs.pettingzoo import is_multi_agent, make_match
from ludus.errors import ConfigError, MissingExtra
from ludus.games.rocket_league import field, simulator
from ludus.games.rocket_league import observations as seen
from ludus.games.rocket_league.controls import control_index
from ludus.games.rocket_league.env import RocketLeagueEnv, kickoff, random_start
from ludus.games.rocket_league.scripts import chase_ball
from ludus.games.rocket_league.simulator import Arenas, Placement
from ludus.testing import check_vector_multi_agent_env

pytest.importorskip("RocketSim", reason="rocketsim is not installed: pip install 'ludus[rocket-league]'")
try:
    simulator.find_meshes()
except MissingExtra as missing:
    pytest.skip(str(missing), allow_module_level=True)

DRIVE = control_index(1.0, 0.0, boost=True)
EVERY = np.ones(1, np.bool_)


def start(env: RocketLeagueEnv, seed: int = 0) -> VectorMultiAgentStep:
    return env.reset(np.full(env.num_envs, seed), np.arange(env.num_envs))


def place(env: RocketLeagueEnv, ball: Placement, blue: Placement, orange: Placement) -> None:
    env._arenas.place(0, ball, [blue, orange])


FAR = Placement((3000.0, 0.0, field.CAR_REST_HEIGHT))


@pytest.mark.parametrize("team_size", [1, 2])
def test_a_match_depends_on_its_seed_and_its_actions_alone(team_size: int) -> None:
    check_vector_multi_agent_env(
        lambda count: RocketLeagueEnv(count, team_size, seconds=4, reward="shaped", kickoffs=0.5), matches=3, steps=90
    )


@pytest.mark.parametrize(("side", "expected"), [(1, [1.0, -1.0]), (-1, [-1.0, 1.0])])
def test_a_goal_counts_for_the_team_that_attacks_this_side(side: int, expected: list[float]) -> None:
    env = RocketLeagueEnv(1)
    start(env)
    place(env, Placement((0.0, side * 4900.0, 200.0), (0.0, side * 2500.0, 0.0)), FAR, FAR)
    rewards = [env.step(np.zeros((1, 2), np.int64), EVERY).reward[0].tolist() for _ in range(4)]
    assert rewards.count(expected) == 1
    assert rewards.count([0.0, 0.0]) == 3
    assert env.goals[0].tolist() == [int(side > 0), int(side < 0)]
    assert env._arenas.ball[0, 0, simulator.BALL_POSITION][:2].tolist() == [0.0, 0.0], "a kickoff follows"


def test_a_ball_on_the_goal_line_is_no_goal() -> None:
    env = RocketLeagueEnv(1)
    start(env)
    place(env, Placement((0.0, 5100.0, field.BALL_REST_HEIGHT)), FAR, FAR)
    assert env.step(np.zeros((1, 2), np.int64), EVERY).reward[0].tolist() == [0.0, 0.0]


def test_a_match_ends_after_its_seconds() -> None:
    env = RocketLeagueEnv(2, seconds=2)
    step = start(env)
    number = 0
    while step.acting.any():
        step = env.step(np.zeros((2, 2), np.int64), np.array([True, False]))
        number += 1
        if number == 30:
            break
    assert step.terminated.tolist() == [[True, True], [False, False]]


def test_both_teams_see_the_same_kickoff() -> None:
    env = RocketLeagueEnv(1)
    start(env)
    ball, cars = kickoff(1, np.random.default_rng(1))
    mirrored = Placement((-cars[0].position[0], -cars[0].position[1], cars[0].position[2]), yaw=cars[0].yaw - np.pi)
    env._arenas.place(0, ball, [cars[0], mirrored])
    step = env.step(np.full((1, 2), DRIVE), EVERY)
    np.testing.assert_allclose(step.observation[0, 0], step.observation[0, 1], atol=1e-3)


def test_the_ball_is_seen_ahead_and_to_the_right_of_the_car() -> None:
    env = RocketLeagueEnv(1)
    start(env)
    to_the_east = Placement((0.0, 0.0, field.CAR_REST_HEIGHT), yaw=0.0)
    place(env, Placement((1000.0, 500.0, field.BALL_REST_HEIGHT)), to_the_east, FAR)
    view = observe(env._arenas)[0, 0]
    expected = np.array([1000.0, 500.0, field.BALL_REST_HEIGHT - field.CAR_REST_HEIGHT]) / field.CAR_MAX_SPEED
    np.testing.assert_allclose(view[seen.BALL_FROM_CAR], expected, atol=1e-3)
    place(env, Placement((1000.0, 500.0, field.BALL_REST_HEIGHT)), FAR, to_the_east)
    np.testing.assert_allclose(observe(env._arenas)[0, 1][seen.BALL_FROM_CAR], expected, atol=1e-3)


def observe(arenas: Arenas) -> Floats:
    return seen.observe(arenas, np.ones(1, np.float32), np.zeros(1, np.float32))


def test_steering_to_the_right_turns_to_what_is_seen_on_the_right() -> None:
    env = RocketLeagueEnv(1)
    start(env)
    place(env, Placement((0.0, 3000.0, field.BALL_REST_HEIGHT)), Placement((0.0, 0.0, 17.0), yaw=0.0), FAR)
    before = observe(env._arenas)[0, 0, seen.BALL_FROM_CAR]
    for _ in range(8):
        step = env.step(np.full((1, 2), control_index(1.0, float(np.sign(before[1])))), EVERY)
    after = step.observation[0, 0, seen.BALL_FROM_CAR]
    assert np.arctan2(*np.abs(after[1::-1])) < np.arctan2(*np.abs(before[1::-1])) - 0.3


def test_the_chaser_reaches_the_ball_and_the_touch_is_rewarded() -> None:
    env = RocketLeagueEnv(1, reward={"goal": 0.0, "any_touch": 1.0})
    step = start(env)
    touches = 0.0
    for _ in range(90):
        actions: Ints = np.array([[chase_ball(step.observation[0, 0]), control_index(0.0, 0.0)]])
        step = env.step(actions, EVERY)
        touches += float(step.reward[0, 0])
        assert step.reward[0, 1] == 0
    assert touches >= 1


@pytest.mark.parametrize("start", [kickoff, random_start])
def test_starts_are_inside_the_stadium(start: object) -> None:
    for seed in range(50):
        ball, cars = start(2, np.random.default_rng(seed))  # type: ignore[operator]
        assert len(cars) == 4
        for placement in (ball, *cars):
            x, y, z = placement.position
            assert abs(x) < field.SIDE_WALL_X
            assert abs(y) < field.BACK_WALL_Y
            assert field.CAR_REST_HEIGHT <= z < 2000


def test_a_picture_shows_both_cars_and_the_score() -> None:
    match = make_match("ludus/RocketLeague-2v2-v0", {"seconds": 5}, render_mode="rgb_array")
    match.reset(0)
    picture = match.render()
    assert picture.dtype == np.uint8
    assert picture.shape[0] % 2 == picture.shape[1] % 2 == 0
    for colour in ((70, 140, 255), (255, 150, 40), (245, 245, 245)):
        assert (picture == np.array(colour)).all(axis=2).sum() > 20
    match.close()


def test_the_names_are_environments_with_several_agents() -> None:
    assert is_multi_agent("ludus/RocketLeague-1v1-v0")
    match = make_match("ludus/RocketLeague-2v2-v0")
    assert list(match.agents) == ["blue_0", "blue_1", "orange_0", "orange_1"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"team_size": 4}, "team_size 4"),
        ({"seconds": 0.1}, "seconds is 0.1"),
        ({"kickoffs": 2}, "kickoffs is 2"),
        ({"reward": "points"}, "reward 'points'"),
        ({"reward": {"saves": 1}}, "part 'saves'"),
        ({"controls": "air"}, "controls 'air'"),
        ({"render_mode": "human"}, "render_mode 'human'"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RocketLeagueEnv(1, **settings)  # type: ignore[arg-type]


def test_a_directory_without_meshes_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(simulator.MESHES_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        simulator.find_meshes()
