"""Decides which worker runs on which node. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def place(workers: int, cores: Mapping[str, int], current: Mapping[int, str]) -> dict[int, str]:
    """Map workers to nodes. A worker stays on its node, if that is alive, unless a move makes the fullest node less full.

    Raises ValueError when there is no node.
    """
    if not cores:
        raise ValueError("no node to place workers on")
    placed = {worker: node for worker, node in current.items() if node in cores and worker < workers}
    count = Counter(placed.values())
    for worker in range(workers):
        if worker not in placed:
            placed[worker] = _emptiest(cores, count)
            count[placed[worker]] += 1
    while True:
        to = _emptiest(cores, count)
        fullest = max(cores, key=lambda node: count[node] / cores[node])
        if count[fullest] / cores[fullest] <= (count[to] + 1) / cores[to]:
            return placed
        moved = max(worker for worker, node in placed.items() if node == fullest)
        placed[moved] = to
        count[fullest] -= 1
        count[to] += 1


def _emptiest(cores: Mapping[str, int], count: Counter[str]) -> str:
    """The node with the lowest load after one more worker; the first of equals."""
    return min(cores, key=lambda node: (count[node] + 1) / cores[node])
