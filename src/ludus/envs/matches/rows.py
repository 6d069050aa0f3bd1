"""Many matches as rows of arrays. A row is one agent of one match: row = match × number of agents + agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ludus.core.types import Bools, Ints

Returns = npt.NDArray[np.float64]


def _no_rows() -> Ints:
    return np.zeros(0, np.int64)


def _no_flags() -> Bools:
    return np.zeros(0, np.bool_)


@dataclass
class RowStep:
    """Result of a step of many matches."""

    turns: Ints = field(default_factory=_no_rows)
    """[K] rows that act next."""
    turn_reward: Returns = field(default_factory=lambda: np.zeros(0))
    """[K] reward of these rows since their last action."""
    departures: Ints = field(default_factory=_no_rows)
    """[D] rows that no longer act, at least for now."""
    departure_reward: Returns = field(default_factory=lambda: np.zeros(0))
    """[D] reward of these rows since their last action."""
    terminated: Bools = field(default_factory=_no_flags)
    """[D] the others were truncated, or have disappeared."""
    observed: Bools = field(default_factory=_no_flags)
    """[D] rows with a final observation."""
    lost: Sequence[int] = ()
    """Matches whose environment has failed and was recreated."""
