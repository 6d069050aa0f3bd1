"""Weights of many items, of which any are drawn in proportion and changed at once: a tree of sums, in NumPy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ludus.core.types import Ints

Doubles = npt.NDArray[np.float64]

_FAN = 32  # children of a node: 100,000 items are four levels, each a few operations on whole arrays; with two they were 17


class SumTree:
    """A node holds the sum of its children, always added up anew: rounding does not gather over time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._levels: list[Doubles] = []  # [nodes, children], from the root to the leaves
        count = size
        while not self._levels or count > 1:
            count = -(-count // _FAN)
            self._levels.insert(0, np.zeros((count, _FAN)))
        self._leaves: Doubles = self._levels[-1].reshape(-1)

    @property
    def nbytes(self) -> int:
        return sum(level.nbytes for level in self._levels)

    @property
    def total(self) -> float:
        return float(self._levels[0].sum())

    def __getitem__(self, index: Any) -> Doubles:
        found: Doubles = self._leaves[: self.size][index]
        return found

    def set(self, index: Ints, weight: Doubles | float) -> None:
        """Of an item that is named twice the last weight counts. Weights are finite and not negative."""
        self._leaves[index] = weight
        for below, above in pairwise(reversed(self._levels)):
            index = index // _FAN
            above.reshape(-1)[index] = below[index].sum(axis=1)

    def draw(self, fractions: Doubles) -> Ints:
        """The items in which these fractions [0, 1) of the total lie, counted from item 0 on. One of weight 0 is never drawn."""
        rest = fractions * self.total
        node = np.zeros(len(rest), np.int64)
        rows = np.arange(len(rest))
        for level in self._levels:
            weights = level[node]
            sums = np.cumsum(weights, axis=1)
            rest = np.minimum(rest, np.nextafter(sums[:, -1], 0.0))  # rounding must not lead beyond the last child of any weight
            child = (sums > rest[:, None]).argmax(axis=1)  # the first one
            rest = np.maximum(rest - (sums[rows, child] - weights[rows, child]), 0.0)
            node = node * _FAN + child
        return node
