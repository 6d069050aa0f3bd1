"""Start matches from mid-game states: from saved states, or from states of earlier matches.

Training then meets late-game situations early and often.
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
"""Number of states of earlier matches to keep, the newest."""
_EVERY: Final = 200  # mean number of match steps between two kept states: about a dozen states of each match


class MidGameStarts:
    """Starts a `share` of all matches from a state of `directory`, or without one from a recorded state of an earlier match."""

    def __init__(self, size: int, share: float, directory: Path | None, limit: int) -> None:
        """`limit`: time limit in ticks; replaces a later one of the saved state. Raises ConfigError."""
        self._share, self._limit = share, limit
        self._loaded = [] if directory is None else _load_states(size, directory, limit)
        self._recent: deque[bytes] = deque(maxlen=KEPT)

    def begin(self, arena: Arena, m: int, random: np.random.Generator) -> None:
        """Replace the state of the new match `m` with probability `share`. Players and camps stay the same."""
        states = self._loaded or self._recent
        if states and random.random() < self._share:
            arena.load(m, states[int(random.integers(len(states)))])
            arena.match[m, LIMIT] = min(int(arena.match[m, LIMIT]), self._limit)

    def record(self, arena: Arena, random: np.random.Generator) -> None:
        """Call after every decision; keeps the state of a random match now and then."""
        if not self._loaded and random.random() < arena.matches / _EVERY:
            m = int(random.integers(arena.matches))
            if not arena.over[m]:
                self._recent.append(arena.save(m))


def _load_states(size: int, directory: Path, limit: int) -> list[bytes]:
    if not directory.is_dir():
        raise ConfigError(f"states: {directory} is not a directory.", "Give a directory with saved states of matches.")
    found = [read_state(path) for path in sorted(directory.iterdir()) if path.is_file() and not path.name.startswith(".")]
    fitting = [state.data for state in found if state.size == size]
    if not fitting:
        others = ", ".join(sorted({state.mode for state in found}))
        raise ConfigError(f"There is no state of {size}v{size} in {directory}.", f"It has states of {others}." if others else "")
    open_ones = [data for data in fitting if _is_playable(data, limit)]
    if not open_ones:
        raise ConfigError(
            f"All states of {size}v{size} in {directory} are of finished matches, or later than {limit // TICKS_PER_SECOND} s.",
            "Save other states, or raise `seconds`.",
        )
    return open_ones


def _is_playable(data: bytes, limit: int) -> bool:
    """Whether a match from this state has at least one decision left."""
    _, match, _ = parse_state(data)
    return not match[OVER] and bool(match[TICK] < limit)
