"""Hand-made states of the Arena and random legal play."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ludus.games.arena.engine import layout
from ludus.games.arena.engine.layout import (
    AIMED,
    ALIVE,
    CAMP,
    CAST_TARGET,
    CREEPS,
    DIRECTIONS,
    HP,
    HURT,
    KIND,
    LENGTH,
    MAX_HP,
    MELEE,
    MOVE_DIRECTION,
    PERIOD,
    RADIUS,
    SEEN,
    SKILL_DIRECTION,
    STRUCTURES,
    TARGET,
    TARGET_UNIT,
    TICKS_PER_SECOND,
    WHAT,
    WIDTH,
    X,
    Y,
)
from ludus.games.arena.engine.rules import slot_of_row
from ludus.games.arena.engine.settings import ArenaSettings, Lineup
from ludus.games.arena.engine.vector import Arena

MIDDLE = LENGTH // 2
"""Far from all towers."""


def creep_slot(size: int, camp: int, i: int) -> int:
    return 2 * (size + STRUCTURES) + camp * CREEPS + i


class Scene:
    """One match whose state is set by hand, played tick by tick."""

    def __init__(self, size: int = 1, lineup: Lineup | None = None, settings: ArenaSettings | None = None, seed: int = 0) -> None:
        self.arena = Arena(size, 1, settings, lineup)
        self.arena.reset([seed])
        self.size = size
        self.orders = np.zeros((1, 2 * size, 4), np.int32)
        for h in range(2 * size):  # far from each other and from the middle
            self.put(h, 6_000 if h < size else LENGTH - 6_000, WIDTH // 2)

    @property
    def units(self) -> npt.NDArray[np.int32]:
        units: npt.NDArray[np.int32] = self.arena.units[0]
        return units

    @property
    def match(self) -> npt.NDArray[np.int32]:
        match: npt.NDArray[np.int32] = self.arena.match[0]
        return match

    def get(self, field: int, slot: int) -> int:
        return int(self.units[field, slot])

    def put(self, slot: int, x: int, y: int = WIDTH // 2, **fields: int) -> None:
        self.units[X, slot], self.units[Y, slot] = x, y
        for name, value in fields.items():
            self.units[getattr(layout, name.upper()), slot] = value

    def creep(self, camp: int, i: int, x: int, y: int = WIDTH // 2, kind: int = MELEE, **fields: int) -> int:
        """Place a creep without armour and attack."""
        slot = creep_slot(self.size, camp, i)
        self.units[:, slot] = 0
        for field, value in (
            (ALIVE, 1), (KIND, kind), (CAMP, camp), (HP, 400), (MAX_HP, 400), (RADIUS, 350), (TARGET, -1), (CAST_TARGET, -1),
            (HURT, 150), (PERIOD, TICKS_PER_SECOND), (SEEN, 1),
        ):  # fmt: skip
            self.units[field, slot] = value
        self.put(slot, x, y, **fields)
        return slot

    def hero(self, camp: int, i: int = 0) -> int:
        return camp * self.size + i

    def order(self, h: int, what: int, *, direction: int = 0, at: int | None = None) -> None:
        """Set the order of hero h until the next one; `at`: target slot."""
        self.orders[0, h] = 0
        self.orders[0, h, WHAT] = what
        self.orders[0, h, MOVE_DIRECTION] = self.orders[0, h, SKILL_DIRECTION] = direction
        if at is not None:
            self.orders[0, h, TARGET_UNIT] = self.row(h, at)

    def row(self, h: int, slot: int) -> int:
        """Return the row of `slot` in the observation of hero h."""
        return next(row for row in range(self.arena.slots) if slot_of_row(self.match, h, row) == slot)

    def play(self, ticks: int = 1) -> None:
        self.arena.advance(self.orders, ticks)

    def look(self) -> None:
        """Play a tick without orders, which updates visibility, and observe."""
        self.arena.advance(np.zeros_like(self.orders), 1)
        self.arena.observe()

    def may(self, h: int, what: int, at: int | None = None) -> bool:
        self.arena.observe()
        if at is None:
            return bool(self.arena.mask[0, h, what])
        return bool(self.arena.target_mask[0, h, AIMED.index(what), self.row(h, at)])


def duel(**fields: int) -> Scene:
    """Two heroes face to face in the middle; `fields` are set for both."""
    scene = Scene()
    scene.put(0, MIDDLE, **fields)
    scene.put(1, MIDDLE + 1_500, **fields)
    scene.look()
    return scene


_EAGER = np.array([0.05, 1.0, 3.0, 2.0, 2.0, 2.0, 1.0, 0.02])
"""Weights of the buttons; with uniform ones heroes would rarely meet."""


def legal_play(arena: Arena, random: np.random.Generator) -> npt.NDArray[np.int32]:
    """Return random legal orders for all heroes, mostly forward. Call `arena.observe()` before."""
    mask, lead = arena.mask, arena.mask.shape[:2]
    orders = np.zeros((*lead, 4), np.int32)
    orders[..., WHAT] = np.argmax(random.random((*lead, 8)) * _EAGER * mask[..., :8], axis=-1)
    forward = random.random(lead) < 0.6
    orders[..., MOVE_DIRECTION] = np.where(forward, 0, random.integers(DIRECTIONS, size=lead))
    orders[..., SKILL_DIRECTION] = random.integers(DIRECTIONS, size=lead)
    draw = random.random((*lead, arena.slots))
    for k, what in enumerate(AIMED):
        chosen = np.argmax(draw * arena.target_mask[:, :, k], axis=-1)
        orders[..., TARGET_UNIT] = np.where(orders[..., WHAT] == what, chosen, orders[..., TARGET_UNIT])
    return orders
