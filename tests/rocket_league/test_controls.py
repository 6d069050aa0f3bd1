"""The table of controls."""

from __future__ import annotations

import pytest

from ludus.games.rocket_league.controls import CONTROL_TABLE, GROUND_CONTROLS, Controls, control_index


def test_rows_are_different() -> None:
    assert len(set(CONTROL_TABLE)) == len(CONTROL_TABLE) == 43


def test_the_first_rows_keep_a_car_on_the_ground() -> None:
    assert not any(row.jump or row.pitch or row.roll for row in CONTROL_TABLE[:GROUND_CONTROLS])
    assert all(row.jump or row.pitch or row.roll for row in CONTROL_TABLE[GROUND_CONTROLS:])


def test_axes_are_between_minus_1_and_1() -> None:
    for row in CONTROL_TABLE:
        assert all(-1 <= axis <= 1 for axis in (row.throttle, row.steer, row.pitch, row.yaw, row.roll))


def test_a_ground_control_is_found_by_its_settings() -> None:
    assert CONTROL_TABLE[control_index(1.0, -1.0, boost=True)] == Controls(throttle=1.0, steer=-1.0, yaw=-1.0, boost=True)
    with pytest.raises(ValueError, match="not in tuple"):
        control_index(-1.0, 0.0, boost=True)
