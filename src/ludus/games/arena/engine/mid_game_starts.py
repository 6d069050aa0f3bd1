"""Matches that begin in the middle: at states that were saved, or where an earlier match once was.

What is decided late in a match is met early in training, and as often as one likes.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Final

import numpy as np

from ludus.errors import ConfigError
from ludus.games.arena.engine.layout import LIMIT, OVER, TICK, TICKS_PER_SECOND
from ludus.games.arena.engine.saved_state import read_state
from ludus.games.arena.engine.vector import Arena, parse_state

KEPT: Final = 256
"""Moments of earlier matches, the newest."""
_EVERY: Final = 200  # steps of all matches together, on average, from one that is kept to the next: about a dozen of each match


class Repeats:
    """`share` of all matches begin at a state: of `directory`, if there is one, else of those that were kept on the way."""

    def __init__(self, size: int, share: float, directory: Path | None, limit: int) -> None:
        """`limit`: the tick at which time is up, whatever it was where a state was saved. Raises ConfigError."""
        self._share, self._limit = share, limit
        self._given = [] if directory is None else _states(size, directory, limit)
        self._kept: deque[bytes] = deque(maxlen=KEPT)

    def begin(self, arena: Arena, m: int, random: np.random.Generator) -> None:
        """Match m has just been made: go on elsewhere, perhaps. Who plays it, and for which camp, stays as it is."""
        states = self._given or self._kept
        if states and random.random() < self._share:
            arena.load(m, states[int(random.integers(len(states)))])
            arena.match[m, LIMIT] = min(int(arena.match[m, LIMIT]), self._limit)

    def keep(self, arena: Arena, random: np.random.Generator) -> None:
        """One decision of all matches was played."""
        if not self._given and random.random() < arena.matches / _EVERY:
            m = int(random.integers(arena.matches))
            if not arena.over[m]:
                self._kept.append(arena.save(m))


def _states(size: int, directory: Path, limit: int) -> list[bytes]:
    if not directory.is_dir():
        raise ConfigError(f"states: {directory} is no directory.", "Name one with saved states of matches.")
    found = [read_state(path) for path in sorted(directory.iterdir()) if path.is_file() and not path.name.startswith(".")]
    fitting = [state.data for state in found if state.size == size]
    if not fitting:
        others = ", ".join(sorted({state.mode for state in found}))
        raise ConfigError(f"There is no state of {size}v{size} in {directory}.", f"There are some of {others}." if others else "")
    open_ones = [data for data in fitting if _goes_on(data, limit)]
    if not open_ones:
        raise ConfigError(
            f"All states of {size}v{size} in {directory} are of matches that are over, or beyond {limit // TICKS_PER_SECOND} s.",
            "Save others, or allow matches more seconds.",
        )
    return open_ones


def _goes_on(data: bytes, limit: int) -> bool:
    """A match that is over would be won or lost once more, without a decision."""
    _, match, _ = parse_state(data)
    return not match[OVER] and bool(match[TICK] < limit)
