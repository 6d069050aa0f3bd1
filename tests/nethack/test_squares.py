"""Shortest paths on sets of squares, compared with a search over single squares."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from ludus.games.nethack import squares as sq


def plain_distances(walkable: np.ndarray, doors: np.ndarray, start: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Steps from (x, y) to every square, walkable or not, that can be entered from a walkable one."""
    found, waiting = {start: 0}, deque([start])
    while waiting:
        x, y = waiting.popleft()
        for dx, dy in sq.DIRECTIONS:
            at = x + dx, y + dy
            if at in found or not (0 <= at[0] < sq.COLUMNS and 0 <= at[1] < sq.ROWS):
                continue
            if dx and dy and (doors[y, x] or doors[at[1], at[0]]):
                continue
            found[at] = found[x, y] + 1
            if walkable[at[1], at[0]]:
                waiting.append(at)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_distances_and_first_steps_are_those_of_a_plain_search(seed: int) -> None:
    random = np.random.default_rng(seed)
    walkable = random.random((sq.ROWS, sq.COLUMNS)) < 0.55
    doors = walkable & (random.random(walkable.shape) < 0.15)
    x, y = int(random.integers(sq.COLUMNS)), int(random.integers(sq.ROWS))
    walkable[y, x] = True
    floor, door_squares = sq.squares_where(np.stack([walkable, doors]))
    expected = plain_distances(walkable, doors, (x, y))
    for _ in range(40):
        tx, ty = int(random.integers(sq.COLUMNS)), int(random.integers(sq.ROWS))
        target = sq.square(tx, ty)
        (distance,) = sq.distances(sq.square(x, y), (target,), floor, door_squares)
        assert distance == expected.get((tx, ty))
        step = sq.first_step(sq.square(x, y), target, floor, door_squares)
        if (tx, ty) == (x, y):
            continue
        assert (None if step is None else step.distance) == expected.get((tx, ty))
        if step is not None:
            dx, dy = sq.DIRECTIONS[step.direction]
            after = plain_distances(walkable, doors, (x + dx, y + dy))
            assert walkable[y + dy, x + dx] or (x + dx, y + dy) == (tx, ty)
            assert after[tx, ty] == step.distance - 1


def test_rows_do_not_run_into_each_other() -> None:
    right_edge = sq.square(sq.COLUMNS - 1, 3)
    assert not sq.neighbour(right_edge, 1)
    (distance,) = sq.distances(right_edge, (sq.square(0, 4),), right_edge | sq.square(0, 4), 0)
    assert distance is None
