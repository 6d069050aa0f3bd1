"""Opponents of known strength for Connect Four: minimax players that look a few moves ahead."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ludus.game_theory.connect_four import COLUMNS, ROWS, MinimaxPlayer, Position

OTHER, OWN, EMPTY = range(3)
"""Planes of `ludus/ConnectFour-v0` with `egocentric_obs_tensor`."""

_BITS = np.array([[1 << ((ROWS + 1) * column + row) for column in range(COLUMNS)] for row in range(ROWS)], np.int64)
_RANDOM = np.random.default_rng()


def read_position(observation: npt.NDArray[Any]) -> Position:
    """The board of an observation, seen by the player to move."""
    own, other = (int(_BITS[observation[plane] > 0].sum()) for plane in (OWN, OTHER))
    return Position(own, own | other)


def minimax_2(observation: npt.NDArray[Any], action_mask: Any) -> int:
    return MinimaxPlayer(2, _RANDOM).choose(read_position(observation))


def minimax_4(observation: npt.NDArray[Any], action_mask: Any) -> int:
    return MinimaxPlayer(4, _RANDOM).choose(read_position(observation))
