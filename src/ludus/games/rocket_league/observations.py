"""What an agent observes: ball and cars in the frame of its team and in the frame of its car, as one vector."""

from __future__ import annotations

from typing import Final

import numpy as np

from ludus.core.types import Floats
from ludus.games.rocket_league import field, simulator

POSITION_SCALE: Final = 1 / field.CAR_MAX_SPEED
"""Positions and velocities are divided by the top speed of a car: a distance of 1 takes it a second."""
_SPIN_SCALE: Final = 1 / field.CAR_MAX_SPIN

# -- the layout ----------------------------------------------------------------------------------------------------------------

OWN_POSITION = slice(0, 3)
OWN_VELOCITY = slice(3, 6)
OWN_FORWARD = slice(6, 9)
OWN_UP = slice(9, 12)
OWN_SPIN = slice(12, 15)
OWN_BOOST, OWN_ON_GROUND, OWN_DEMOLISHED = 15, 16, 17
BALL_POSITION = slice(18, 21)
BALL_VELOCITY = slice(21, 24)
BALL_SPIN = slice(24, 27)
BALL_FROM_CAR = slice(27, 30)
"""In the frame of the car: ahead, to the right, above."""
BALL_SPEED_FROM_CAR = slice(30, 33)
BALL_DISTANCE = 33
GOAL_FROM_CAR = slice(34, 37)
"""The goal to score in."""
OWN_GOAL_FROM_CAR = slice(37, 40)
TIME_LEFT, SCORE_DIFFERENCE = 40, 41
PADS = slice(42, 42 + simulator.PADS)
_OTHERS: Final = PADS.stop
_OTHER_WIDTH: Final = 18
"""Of another car: place and velocity from the own car, place, velocity and forward direction, boost, on the ground, demolished."""

_GOAL = np.array([0.0, field.GOAL_LINE_Y, field.GOAL_HEIGHT / 2], np.float32)
_OWN_GOAL = np.array([0.0, -field.GOAL_LINE_Y, field.GOAL_HEIGHT / 2], np.float32)


def observation_size(team_size: int) -> int:
    return _OTHERS + (2 * team_size - 1) * _OTHER_WIDTH


def observe(arenas: simulator.Arenas, time_left: Floats, score_difference: Floats) -> Floats:
    """[N, A, size] for all agents. `time_left` [N] as a share of the match, `score_difference` [N] of blue minus orange.

    Orange sees the field turned by 180 degrees around its centre, so that every team plays towards positive y. Other cars come in the
    order team mates, opponents.
    """
    count, width = arenas.cars.shape[:2]
    team_size = width // 2
    seen: Floats = np.empty((count, width, observation_size(team_size)), np.float32)
    for agent in range(width):
        team = agent // team_size
        view = seen[:, agent]
        own, ball = arenas.cars[:, agent, team], arenas.ball[:, team]
        axes = own[:, simulator.CAR_AXES].reshape(count, 3, 3)
        position, velocity = own[:, simulator.CAR_POSITION], own[:, simulator.CAR_VELOCITY]
        view[:, OWN_POSITION], view[:, OWN_VELOCITY] = position * POSITION_SCALE, velocity * POSITION_SCALE
        view[:, OWN_FORWARD], view[:, OWN_UP] = axes[:, 0], axes[:, 2]
        view[:, OWN_SPIN] = own[:, simulator.CAR_SPIN] * _SPIN_SCALE
        view[:, OWN_BOOST] = own[:, simulator.CAR_BOOST] / 100
        view[:, OWN_ON_GROUND], view[:, OWN_DEMOLISHED] = own[:, simulator.CAR_ON_GROUND], own[:, simulator.CAR_DEMOLISHED]
        view[:, BALL_POSITION] = ball[:, simulator.BALL_POSITION] * POSITION_SCALE
        view[:, BALL_VELOCITY] = ball[:, simulator.BALL_VELOCITY] * POSITION_SCALE
        view[:, BALL_SPIN] = ball[:, simulator.BALL_SPIN] * _SPIN_SCALE
        to_ball = _in_car_frame(axes, ball[:, simulator.BALL_POSITION] - position)
        view[:, BALL_FROM_CAR] = to_ball
        view[:, BALL_SPEED_FROM_CAR] = _in_car_frame(axes, ball[:, simulator.BALL_VELOCITY] - velocity)
        view[:, BALL_DISTANCE] = np.linalg.norm(to_ball, axis=1)
        view[:, GOAL_FROM_CAR] = _in_car_frame(axes, _GOAL - position)
        view[:, OWN_GOAL_FROM_CAR] = _in_car_frame(axes, _OWN_GOAL - position)
        view[:, TIME_LEFT] = time_left
        view[:, SCORE_DIFFERENCE] = np.clip(score_difference if team == 0 else -score_difference, -3, 3) / 3
        view[:, PADS] = arenas.pads[:, team]
        first = _OTHERS
        for other in _other_agents(agent, team_size):
            _observe_other(view[:, first : first + _OTHER_WIDTH], arenas.cars[:, other, team], axes, position, velocity)
            first += _OTHER_WIDTH
    return seen


def _other_agents(agent: int, team_size: int) -> list[int]:
    start = agent // team_size * team_size
    mates = [other for other in range(start, start + team_size) if other != agent]
    return mates + [other for other in range(2 * team_size) if other // team_size != agent // team_size]


def _observe_other(view: Floats, other: Floats, axes: Floats, position: Floats, velocity: Floats) -> None:
    place, speed = other[:, simulator.CAR_POSITION], other[:, simulator.CAR_VELOCITY]
    view[:, 0:3] = _in_car_frame(axes, place - position)
    view[:, 3:6] = _in_car_frame(axes, speed - velocity)
    view[:, 6:9], view[:, 9:12] = place * POSITION_SCALE, speed * POSITION_SCALE
    view[:, 12:15] = other[:, simulator.CAR_AXES][:, :3]
    view[:, 15] = other[:, simulator.CAR_BOOST] / 100
    view[:, 16], view[:, 17] = other[:, simulator.CAR_ON_GROUND], other[:, simulator.CAR_DEMOLISHED]


def _in_car_frame(axes: Floats, vectors: Floats) -> Floats:
    """Scaled components along the axes [N, 3, 3] of the cars."""
    turned: Floats = np.einsum("nij,nj->ni", axes, vectors) * np.float32(POSITION_SCALE)
    return turned
