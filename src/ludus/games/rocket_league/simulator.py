"""RocketSim: loading it with its collision meshes, and arenas as arrays. Nothing else imports it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ludus.core.types import Bools, Floats, Ints
from ludus.errors import ConfigError, MissingExtra
from ludus.games.rocket_league import field
from ludus.games.rocket_league.controls import CONTROL_TABLE

MESHES_VARIABLE: Final = "RS_COLLISION_MESHES"
"""Directory with the collision meshes, in place of those of the package; RocketSim's own variable."""
_MESHES_PACKAGE: Final = "rlgym.rocket_league"
_INSTALL: Final = "pip install 'ludus[rocket-league]' && pip install --no-deps rlgym-rocket-league"
_SOCCAR: Final = "soccar"
PADS: Final = 34


# -- columns of RocketSim's get_gym_state() ---------------------------------------------------------------------------------------

BALL_POSITION, BALL_VELOCITY, BALL_SPIN = slice(0, 3), slice(7, 10), slice(10, 13)
CAR_DEMOLISHED, CAR_ON_GROUND, CAR_TOUCHED, CAR_BOOST = 7, 8, 9, 10
CAR_POSITION, CAR_VELOCITY, CAR_SPIN = slice(11, 14), slice(18, 21), slice(21, 24)
CAR_AXES = slice(24, 33)
"""Forward, right and up, three numbers each."""
_BALL_WIDTH, _CAR_WIDTH = 25, 36


def find_meshes() -> Path:
    """The directory with `soccar/*.cmf`. Raises MissingExtra, ConfigError."""
    given = os.environ.get(MESHES_VARIABLE)
    if given:
        if not any((Path(given) / _SOCCAR).glob("*.cmf")):
            raise ConfigError(f"{MESHES_VARIABLE} is {given!r}, which has no {_SOCCAR}/*.cmf.", "Unset it to use the package's.")
        return Path(given)
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec(_MESHES_PACKAGE)
        for place in (spec and spec.submodule_search_locations) or ():
            meshes = Path(place) / "sim" / "collision_meshes"
            if any((meshes / _SOCCAR).glob("*.cmf")):
                return meshes
    raise MissingExtra("ludus/RocketLeague needs the collision meshes of the package rlgym-rocket-league.", _INSTALL)


def load_simulator() -> Any:
    """The module RocketSim, with the meshes loaded. Raises MissingExtra, ConfigError."""
    try:
        import RocketSim
    except ModuleNotFoundError as error:
        raise MissingExtra("ludus/RocketLeague needs the package rocketsim.", _INSTALL) from error
    meshes = find_meshes()
    try:
        RocketSim.init(str(meshes))
    except RuntimeError as error:
        if "inited" not in str(error):  # it loads them once per process
            raise ConfigError(f"RocketSim cannot load the collision meshes in {meshes}: {error}.", _INSTALL) from error
    return RocketSim


@dataclass(frozen=True)
class Placement:
    """State of one car or of the ball at the start of a phase of play."""

    position: tuple[float, float, float]
    velocity: tuple[float, float, float] = (0.0, 0.0, 0.0)
    yaw: float = 0.0
    boost: float = field.KICKOFF_BOOST


class Arenas:
    """N arenas with the same number of cars, blue ones first, and their states as arrays.

    The last axis of a state has the columns of RocketSim; the axis of two before it has the state as blue sees it, and turned by 180
    degrees around the centre, as orange sees it.
    """

    def __init__(self, count: int, team_size: int) -> None:
        self._rocketsim = load_simulator()
        self._team_size, width = team_size, 2 * team_size
        self._arenas: list[Any] = [None] * count
        self._cars: list[Sequence[Any]] = [()] * count
        self._controls = [self._rocketsim.CarControls(**row._asdict()) for row in CONTROL_TABLE]
        self.ball: Floats = np.zeros((count, 2, _BALL_WIDTH), np.float32)
        self.pads: Floats = np.zeros((count, 2, PADS), np.float32)
        """1 where a boost pad can be picked up."""
        self.cars: Floats = np.zeros((count, width, 2, _CAR_WIDTH), np.float32)

    def create(self, number: int) -> None:
        """Start an arena anew. A used one keeps contacts in its physics engine, and would not repeat a match exactly."""
        arena = self._rocketsim.Arena(self._rocketsim.GameMode.SOCCAR)
        self._arenas[number] = arena
        self._cars[number] = [arena.add_car(team) for team in (0, 1) for _ in range(self._team_size)]

    def place(self, number: int, ball: Placement, cars: Sequence[Placement]) -> None:
        """Put ball and cars of an arena where they start, at rest relative to their placement, and fill all boost pads."""
        sim, arena = self._rocketsim, self._arenas[number]
        state = sim.BallState()
        state.pos, state.vel = sim.Vec(*ball.position), sim.Vec(*ball.velocity)
        arena.ball.set_state(state)
        for car, placement in zip(self._cars[number], cars, strict=True):
            state = sim.CarState()
            state.pos, state.vel = sim.Vec(*placement.position), sim.Vec(*placement.velocity)
            state.rot_mat = sim.Angle(placement.yaw, 0.0, 0.0).as_rot_mat()
            state.boost = placement.boost
            car.set_state(state)
        for pad in arena.get_boost_pads():
            pad.set_state(sim.BoostPadState())
        self._read(number)

    def step(self, actions: Ints, playing: Bools, ticks: int) -> None:
        """Simulate `ticks` with the controls of the rows `actions` [N, cars] of the table, in the arenas that are `playing` [N]."""
        chosen = np.flatnonzero(playing).tolist()
        for number in chosen:
            for car, action in zip(self._cars[number], actions[number].tolist(), strict=True):
                car.set_controls(self._controls[action])
        self._rocketsim.Arena.multi_step([self._arenas[number] for number in chosen], ticks)
        for number in chosen:
            self._read(number)

    def _read(self, number: int) -> None:
        _, pads, ball, *cars = self._arenas[number].get_gym_state()
        self.pads[number], self.ball[number] = pads, ball
        for index, car in enumerate(cars):
            self.cars[number, index] = car

    def pad_positions(self, number: int) -> Mapping[tuple[float, float], bool]:
        """Place (x, y) → whether it is a big one, in the order of `pads`."""
        found = {}
        for pad in self._arenas[number].get_boost_pads():
            place = pad.get_pos()
            found[float(place.x), float(place.y)] = bool(pad.is_big)
        return found
