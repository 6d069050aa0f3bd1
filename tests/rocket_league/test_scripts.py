"""Scripted players, given observations in which the ball is at a known place."""

from __future__ import annotations

import numpy as np
import pytest

from ludus.core.types import Floats
from ludus.games.rocket_league import observations as seen
from ludus.games.rocket_league.controls import CONTROL_TABLE, Controls
from ludus.games.rocket_league.scripts import chase_ball, hit_towards_goal


def view(ball: tuple[float, float], goal: tuple[float, float] = (3.0, 0.0)) -> Floats:
    """Ahead and to the right of the car."""
    observation: Floats = np.zeros(seen.observation_size(1), np.float32)
    observation[seen.BALL_FROM_CAR] = (*ball, 0.0)
    observation[seen.BALL_DISTANCE] = float(np.hypot(*ball))
    observation[seen.GOAL_FROM_CAR] = (*goal, 0.0)
    return observation


@pytest.mark.parametrize(
    ("ball", "expected"),
    [
        ((1.0, 0.0), Controls(1.0, boost=True)),
        ((1.0, 0.2), Controls(1.0, 1.0, yaw=1.0, boost=True)),
        ((1.0, -1.0), Controls(1.0, -1.0, yaw=-1.0)),
        ((-1.0, 0.1), Controls(1.0, 1.0, yaw=1.0, handbrake=True)),
    ],
)
def test_the_chaser_steers_to_the_ball_and_boosts_straight_ahead(ball: tuple[float, float], expected: Controls) -> None:
    assert CONTROL_TABLE[chase_ball(view(ball))] == expected


def test_the_striker_drives_into_a_ball_that_lies_before_the_goal() -> None:
    assert CONTROL_TABLE[hit_towards_goal(view((1.0, 0.0)))] == Controls(1.0, boost=True)


def test_the_striker_goes_around_a_ball_that_it_would_hit_away_from_the_goal() -> None:
    goal_on_the_right = view((1.0, 0.0), goal=(1.0, 3.0))
    assert CONTROL_TABLE[hit_towards_goal(goal_on_the_right)].steer == -1.0
