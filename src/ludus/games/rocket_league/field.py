"""Sizes of the stadium, in unreal units (1 uu = 1 cm), and the kickoff positions. The x axis is the width, the y axis points to orange's goal."""

from __future__ import annotations

import math
from typing import Final

TICKS_PER_SECOND: Final = 120
SIDE_WALL_X: Final = 4096.0
BACK_WALL_Y: Final = 5120.0
GOAL_DEPTH: Final = 880.0
GOAL_HALF_WIDTH: Final = 892.755
GOAL_HEIGHT: Final = 642.775
GOAL_LINE_Y: Final = 5124.25
"""The whole ball must have crossed this line."""
BALL_RADIUS: Final = 91.25
BALL_REST_HEIGHT: Final = 93.15
CAR_REST_HEIGHT: Final = 17.0
CAR_MAX_SPEED: Final = 2300.0
CAR_MAX_SPIN: Final = 5.5
"""Radians per second."""
KICKOFF_BOOST: Final = 100 / 3
KICKOFFS: Final = (
    (-2048.0, -2560.0, 0.25 * math.pi),
    (2048.0, -2560.0, 0.75 * math.pi),
    (-256.0, -3840.0, 0.5 * math.pi),
    (256.0, -3840.0, 0.5 * math.pi),
    (0.0, -4608.0, 0.5 * math.pi),
)
"""x, y and yaw of a blue car; orange cars stand at the same places, turned by 180 degrees around the centre."""
