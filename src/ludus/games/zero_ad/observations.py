"""What a soldier observes, and which actions it has. Pure functions of arrays.

Shapes: N matches, 2 teams, U soldiers a team. Places are relative to the centre of the field, in metres. Every team sees the field turned so
that it comes from the left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from ludus.core.types import Bools, Floats, Ints

SCALE: Final = 50.0
"""Metres that are observed as 1."""
KEEP: Final = 0
"""Go on with the order that the soldier has."""
DIRECTIONS: Final = 8
FIRST_MOVE: Final = 1
FIRST_ATTACK: Final = FIRST_MOVE + DIRECTIONS
"""Action FIRST_ATTACK + k attacks the enemy in slot k."""
MOVING, IDLE = -2, -1
"""Orders; others are the number of the enemy that a soldier attacks."""

OWN: Final = 8
"""Own numbers: health, shoots, x, z, time left, moves, attacks, share of the team that lives."""
MATE: Final = 6
"""Numbers of each mate: x and z from the soldier, distance, health, shoots, lives."""
ENEMY: Final = 9
"""The same of each enemy, in the order of slots, and: within reach, share of the team that attacks it, attacked by the soldier."""
ENEMY_DISTANCE, ENEMY_ALIVE = 2, 5
_UNIT_VECTORS: Final = np.array(
    [(math.cos(math.tau * k / DIRECTIONS), math.sin(math.tau * k / DIRECTIONS)) for k in range(DIRECTIONS)], np.float32
)


def observation_size(soldiers: int) -> int:
    return OWN + MATE * (soldiers - 1) + ENEMY * soldiers


def soldiers_of(size: int) -> int:
    """The number of soldiers a team, from the size of an observation."""
    return (size - OWN + MATE) // (MATE + ENEMY)


def action_count(soldiers: int) -> int:
    return FIRST_ATTACK + soldiers


@dataclass(frozen=True)
class Facts:
    """Of the soldiers of a team, in their order."""

    health: Floats
    """[U] hitpoints at the start."""
    reach: Floats
    """[U] metres."""
    shoots: Floats
    """[U] 1 for those that shoot."""


@dataclass(frozen=True)
class Field:
    """The states of all matches."""

    place: Floats
    """[N, 2, U, 2] x and z."""
    health: Floats
    """[N, 2, U] hitpoints; 0 for the dead."""
    orders: Ints
    """[N, 2, U]"""

    @property
    def alive(self) -> Bools:
        living: Bools = self.health > 0
        return living

    def as_seen_by(self, team: int) -> Floats:
        """[N, 2, U, 2] own places first, then those of the enemies."""
        return self.place if team == 0 else -self.place[:, ::-1]


def enemy_slots(field: Field, team: int) -> Ints:
    """[N, U] numbers of the enemies by slot: the weakest first, then the nearest to the team; the dead last."""
    places, living = field.as_seen_by(team), field.alive
    own = living[:, team, :, None]
    middle = (places[:, 0] * own).sum(axis=1) / np.maximum(own.sum(axis=1), 1)
    distance = np.linalg.norm(places[:, 1] - middle[:, None], axis=2)
    order = np.where(living[:, 1 - team], np.round(field.health[:, 1 - team], 3) + 1e-4 * np.round(distance, 2), np.inf)
    return np.argsort(order, axis=1, kind="stable")


def observe(field: Field, facts: Facts, time_left: Floats, team: int) -> tuple[Floats, Bools]:
    """Observations [N, U, size] and action masks [N, U, actions] of a team. The dead may only keep."""
    count, _, soldiers = field.health.shape
    rows = np.arange(count)[:, None]
    places, slots = field.as_seen_by(team), enemy_slots(field, team)
    own_health, enemy_health = field.health[:, team] / facts.health, field.health[:, 1 - team] / facts.health
    orders, living = field.orders[:, team], field.alive[:, team]
    attacked = (orders[:, :, None] == np.arange(soldiers)) & living[:, :, None]  # [N, own, enemy]
    attackers = attacked.mean(axis=1)
    seen: Floats = np.zeros((count, soldiers, observation_size(soldiers)), np.float32)
    mask: Bools = np.ones((count, soldiers, action_count(soldiers)), np.bool_)
    for number in range(soldiers):
        view, place = seen[:, number], places[:, 0, number]
        view[:, 0], view[:, 1] = own_health[:, number], facts.shoots[number]
        view[:, 2:4] = place / SCALE
        view[:, 4] = time_left
        view[:, 5], view[:, 6] = orders[:, number] == MOVING, orders[:, number] >= 0
        view[:, 7] = living.mean(axis=1)
        at = OWN
        for mate in range(soldiers):
            if mate != number:
                _observe_soldier(view[:, at : at + MATE], places[:, 0, mate] - place, own_health[:, mate], facts.shoots[mate])
                at += MATE
        for slot in range(soldiers):
            enemy = slots[:, slot]
            block, offset = view[:, at : at + ENEMY], places[rows[:, 0], 1, enemy] - place
            health = enemy_health[rows[:, 0], enemy]
            _observe_soldier(block, offset, health, facts.shoots[enemy])
            block[:, 6] = np.linalg.norm(offset, axis=1) <= facts.reach[number]
            block[:, 7] = attackers[rows[:, 0], enemy]
            block[:, 8] = attacked[rows[:, 0], number, enemy]
            block *= (health > 0)[:, None]
            mask[:, number, FIRST_ATTACK + slot] = health > 0
            at += ENEMY
    mask[~living, FIRST_MOVE:] = False
    return seen, mask


def _observe_soldier(view: Floats, offset: Floats, health: Floats, shoots: Floats | np.float32) -> None:
    view[:, 0:2] = offset / SCALE
    view[:, 2] = np.linalg.norm(offset, axis=1) / SCALE
    view[:, 3], view[:, 4], view[:, 5] = health, shoots, health > 0
    view[:, :6] *= (health > 0)[:, None]


def move_offset(direction: int, team: int, metres: float) -> Floats:
    """x and z of a move in a direction as the team sees it."""
    offset: Floats = _UNIT_VECTORS[direction] * np.float32(metres if team == 0 else -metres)
    return offset
