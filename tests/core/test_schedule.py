from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.schedule import value_at


@pytest.mark.parametrize("timestep", [0, 1, 10**9])
def test_a_number_is_the_same_at_all_times(timestep: int) -> None:
    assert value_at(0.25, timestep) == 0.25
    assert value_at(3, timestep) == 3.0


@pytest.mark.parametrize(
    ("timestep", "value"), [(0, 1.0), (100, 1.0), (150, 0.75), (200, 0.5), (300, 2.5), (400, 4.5), (10**9, 4.5)]
)
def test_points_are_joined_by_straight_lines_and_the_ends_go_on(timestep: int, value: float) -> None:
    assert value_at([(100, 1.0), (200, 0.5), (400, 4.5)], timestep) == pytest.approx(value)


def test_a_single_point_is_a_constant() -> None:
    assert [value_at([(50, 0.5)], t) for t in (0, 50, 99)] == [0.5, 0.5, 0.5]


@given(
    st.dictionaries(st.integers(0, 10**9), st.floats(-1e3, 1e3), min_size=1, max_size=6),
    st.integers(0, 2 * 10**9),
)
def test_a_schedule_interpolates_as_numpy_does(points: dict[int, float], timestep: int) -> None:
    rising = sorted(points.items())
    expected = np.interp(timestep, [t for t, _ in rising], [v for _, v in rising])
    assert value_at(rising, timestep) == pytest.approx(float(expected), abs=1e-6)
