"""The actions of a car: a table of control settings, from which an agent chooses one row per decision."""

from __future__ import annotations

from typing import Final, NamedTuple


class Controls(NamedTuple):
    """Settings of one car. Axes are from -1 to 1."""

    throttle: float = 0.0
    steer: float = 0.0
    pitch: float = 0.0
    yaw: float = 0.0
    roll: float = 0.0
    jump: bool = False
    boost: bool = False
    handbrake: bool = False


_SIDES: Final = (-1.0, 0.0, 1.0)
_DRIVES: Final = (
    (1.0, False, False),
    (1.0, True, False),
    (1.0, False, True),
    (-1.0, False, False),
    (-1.0, False, True),
    (0.0, False, False),
)
"""Throttle, boost, handbrake."""


def _control_table() -> tuple[Controls, ...]:
    drives = [
        Controls(throttle, steer, yaw=steer, boost=boost, handbrake=handbrake)
        for throttle, boost, handbrake in _DRIVES
        for steer in _SIDES
    ]
    # In the air a jump with pitch or roll is a dodge in that direction.
    jumps = [Controls(throttle=1.0, pitch=pitch, roll=roll, jump=True) for pitch in _SIDES for roll in _SIDES]
    turns = [(pitch, yaw, 0.0) for pitch in _SIDES for yaw in _SIDES if pitch] + [(0.0, 0.0, -1.0), (0.0, 0.0, 1.0)]
    flights = [
        Controls(float(boost), yaw, pitch, yaw, roll, boost=boost) for pitch, yaw, roll in turns for boost in (False, True)
    ]
    return (*drives, *jumps, *flights)


CONTROL_TABLE: Final = _control_table()
GROUND_CONTROLS: Final = len(_DRIVES) * len(_SIDES)
"""The first rows of the table, for a car that stays on its wheels: no jumps, dodges and turns in the air."""


def control_index(throttle: float, steer: float, boost: bool = False, handbrake: bool = False) -> int:
    """The row of a car that drives on the ground. Raises ValueError for settings that the table does not have."""
    return CONTROL_TABLE.index(Controls(throttle, steer, yaw=steer, boost=boost, handbrake=handbrake))
