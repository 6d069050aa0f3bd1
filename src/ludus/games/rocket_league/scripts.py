"""Scripted players, as functions of one observation. `script:ludus.games.rocket_league.scripts:chase_ball` names one in battles and leagues."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from ludus.core.types import Bools, Floats
from ludus.games.rocket_league import observations as seen
from ludus.games.rocket_league.controls import control_index

_STRAIGHT: Final = 0.08
"""Radians within which the car does not steer."""
_BOOST_WITHIN: Final = 0.3
_SLIDE_BEYOND: Final = 1.6


def chase_ball(observation: Floats, action_mask: Bools | None = None) -> int:
    """Point at the ball, drive into it, and boost when it is straight ahead."""
    return _drive_towards(observation[seen.BALL_FROM_CAR])


def hit_towards_goal(observation: Floats, action_mask: Bools | None = None) -> int:
    """Drive behind the ball, seen from the opponents' goal, and then into it."""
    ball, goal = observation[seen.BALL_FROM_CAR], observation[seen.GOAL_FROM_CAR]
    from_goal = ball[:2] - goal[:2]
    from_goal = from_goal / max(float(np.linalg.norm(from_goal)), 1e-6)
    distance = float(observation[seen.BALL_DISTANCE])
    behind = float(np.dot(ball[:2], -from_goal)) / max(float(np.linalg.norm(ball[:2])), 1e-6) > 0.8
    target = np.array(ball, np.float32)
    if not behind:
        target[:2] += from_goal * min(0.6, 0.5 * distance + 0.1)
    return _drive_towards(target)


def _drive_towards(target: Floats) -> int:
    angle = math.atan2(float(target[1]), float(target[0]))
    if abs(angle) < _STRAIGHT:
        return control_index(1.0, 0.0, boost=True)
    steer = math.copysign(1.0, angle)
    return control_index(1.0, steer, boost=abs(angle) < _BOOST_WITHIN, handbrake=abs(angle) > _SLIDE_BEYOND)
