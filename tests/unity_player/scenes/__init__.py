"""The scenes that the player can show, by name."""

from __future__ import annotations

from collections.abc import Callable

from tests.unity_player.scenes.area import Area, World
from tests.unity_player.scenes.ball import Ball
from tests.unity_player.scenes.sensors import Crowd, Hybrid, Pictures
from tests.unity_player.scenes.soccer import Soccer
from tests.unity_player.scenes.walk import Shifts, Walk

SCENES: dict[str, Callable[[World], Area]] = {
    "ball": Ball,
    "walk": Walk,
    "shifts": Shifts,
    "hybrid": Hybrid,
    "pictures": Pictures,
    "crowd": Crowd,
    "soccer": Soccer,
}
