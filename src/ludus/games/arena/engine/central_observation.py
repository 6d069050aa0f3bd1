"""State input of a centralised value function: all units without fog of war, and the scalars of all heroes."""

from __future__ import annotations

import numpy as np

from ludus.core.types import Floats, Ints, Ints32
from ludus.games.arena.engine import heroes
from ludus.games.arena.engine.jit import kernel
from ludus.games.arena.engine.layout import SEEN
from ludus.games.arena.engine.observations import FEATURES, SCALARS, write_entity, write_scalars
from ludus.games.arena.engine.rules import observed_slot
from ludus.games.arena.engine.vector import Arena


def central_observation(arena: Arena, matches: Ints, heroes_of: Ints) -> Floats:
    """Return [rows, S]; each row belongs to one hero of one match. Its own scalars come first, then its camp's, then the enemy's."""
    state = np.empty((len(matches), arena.slots * FEATURES + arena.heroes * SCALARS), np.float32)
    units = arena.units.copy()
    units[:, SEEN] = 1
    _write_states(units, arena.match, heroes.TABLE, matches, heroes_of, arena.heroes // 2, state)
    return state


@kernel
def _write_states(units: Ints32, match: Ints32, table: Ints32, matches: Ints, heroes_of: Ints, size: int, state: Floats) -> None:
    for k in range(matches.shape[0]):
        m, h = int(matches[k]), int(heroes_of[k])
        for row in range(units.shape[2]):
            start = row * FEATURES
            write_entity(units[m], match[m], table, h, observed_slot(match[m], h, row), state[k, start : start + FEATURES])
        camp, seat = h // size, h % size
        for i in range(2 * size):
            other = camp * size + (seat + i) % size if i < size else (1 - camp) * size + i - size
            at = units.shape[2] * FEATURES + i * SCALARS
            write_scalars(units[m], match[m], table, other, state[k, at : at + SCALARS])
