"""Schedules over timesteps: a constant, or piecewise linear."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

Scheduled = float | Sequence[Sequence[float]]
"""A number, or points (timestep, value) in rising order; before the first and after the last point the value is constant."""


def value_at(schedule: Scheduled, timestep: int) -> float:
    if isinstance(schedule, (int, float)):
        return float(schedule)
    after = bisect_right([point[0] for point in schedule], timestep)
    if after == 0:
        return float(schedule[0][1])
    if after == len(schedule):
        return float(schedule[-1][1])
    (t0, v0), (t1, v1) = schedule[after - 1], schedule[after]
    return v0 + (v1 - v0) * (timestep - t0) / (t1 - t0)
