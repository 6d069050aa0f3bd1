"""Rewards: goals, and a shaped reward for learning to drive, hit the ball and score."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from ludus.core.types import Floats
from ludus.games.rocket_league import field, simulator

_BALL_TOP_SPEED: Final = 6000.0
_GOAL = np.array([0.0, field.GOAL_LINE_Y + field.BALL_RADIUS, field.GOAL_HEIGHT / 2], np.float32)
_OWN_GOAL = _GOAL * np.array([1, -1, 1], np.float32)


@dataclass(frozen=True)
class RewardWeights:
    """Parts of the reward of a car for one decision. The default counts goals alone."""

    goal: float = 1.0
    """For a goal of the own team; its negative for one of the opponents."""
    ball_to_goal: float = 0.0
    """Times the speed of the ball towards the opponents' goal minus that towards the own one, as a share of the ball's top speed."""
    car_to_ball: float = 0.0
    """Times the speed of the car towards the ball, as a share of the car's top speed."""
    touch: float = 0.0
    """For a touch of the ball, times the gain of the ball's speed towards the opponents' goal as a share of the car's top speed."""
    any_touch: float = 0.0
    """For a touch of the ball, in any direction."""


SHAPED: Final = RewardWeights(goal=10.0, ball_to_goal=1.0, car_to_ball=0.1, touch=3.0, any_touch=0.3)
WEIGHT_NAMES: Final = tuple(part.name for part in fields(RewardWeights))


def reward(arenas: simulator.Arenas, ball_velocity_before: Floats, goals: Floats, weights: RewardWeights) -> Floats:
    """[N, A] of the last decision. `ball_velocity_before` [N, 2, 3], as each team sees it; `goals` [N]: 1 for blue, -1 for orange."""
    count, width = arenas.cars.shape[:2]
    earned: Floats = np.empty((count, width), np.float32)
    for agent in range(width):
        team = agent // (width // 2)
        earned[:, agent] = weights.goal * (goals if team == 0 else -goals)
        if weights.ball_to_goal or weights.car_to_ball or weights.touch or weights.any_touch:
            earned[:, agent] += _shaped(arenas, ball_velocity_before[:, team], agent, team, weights)
    return earned


def _shaped(arenas: simulator.Arenas, before: Floats, agent: int, team: int, weights: RewardWeights) -> Floats:
    ball, car = arenas.ball[:, team], arenas.cars[:, agent, team]
    place, velocity = ball[:, simulator.BALL_POSITION], ball[:, simulator.BALL_VELOCITY]
    attack, retreat = _direction(_GOAL - place), _direction(_OWN_GOAL - place)
    to_ball = _direction(place - car[:, simulator.CAR_POSITION])
    earned = weights.ball_to_goal * (_along(velocity, attack) - _along(velocity, retreat)) / (2 * _BALL_TOP_SPEED)
    earned += weights.car_to_ball * _along(car[:, simulator.CAR_VELOCITY], to_ball) / field.CAR_MAX_SPEED
    gain = _along(velocity - before, attack) / field.CAR_MAX_SPEED
    earned += car[:, simulator.CAR_TOUCHED] * (weights.any_touch + weights.touch * gain)
    shaped: Floats = earned.astype(np.float32)
    return shaped


def _direction(vectors: Floats) -> Floats:
    unit: Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    return unit


def _along(vectors: Floats, directions: Floats) -> Floats:
    speed: Floats = np.einsum("ni,ni->n", vectors, directions)
    return speed
