"""Random matches and their recordings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from ludus.games.arena.engine.layout import DIRECTIONS
from ludus.games.arena.engine.recording import Recorder
from ludus.games.arena.engine.vector import Arena


def orders(arena: Arena, random: np.random.Generator) -> npt.NDArray[np.int32]:
    """Return random orders, many illegal or out of range; mostly towards the enemy, so that fights happen."""
    shape = (arena.matches, arena.heroes)
    what = random.choice([1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 9, -3], shape)
    move = random.choice([0, 0, 0, 1, 15, 8, DIRECTIONS, 500], shape)
    return np.stack(
        [what, move, random.integers(-1, DIRECTIONS + 1, shape), random.integers(-2, arena.slots + 2, shape)], -1
    ).astype(np.int32)


def play(arena: Arena, decisions: int, recorders: list[Recorder], seed: int = 0) -> None:
    """Play random orders, each for a second."""
    random = np.random.default_rng(seed)
    actions = orders(arena, random)
    for number in range(1, decisions + 1):
        for recorder in recorders:
            recorder.add(actions)
        arena.step(actions)
        if number % 5 == 0:
            actions = orders(arena, random)


def write_random_recording(path: Path, size: int = 1, decisions: int = 120, names: tuple[str, str] = ("left", "right")) -> Arena:
    """Write a recording to `path`; return the Arena in its last state."""
    arena = Arena(size, 1)
    arena.reset([7])
    recorder = Recorder(arena, 0, names)
    play(arena, decisions, [recorder])
    recorder.write(path)
    return arena
