"""A sum tree in NumPy: draws and updates many items at a time, in proportion to their weights (Schaul et al. 2016)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ludus.core.types import Ints

Doubles = npt.NDArray[np.float64]

_FAN = 32  # children per node: 100,000 items need four levels of vectorised operations instead of 17


class SumTree:
    """Every node holds the sum of its children. Sums are recomputed on update, so rounding errors do not accumulate."""

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
        weights: Doubles = self._leaves[: self.size][index]
        return weights

    def set(self, index: Ints, weight: Doubles | float) -> None:
        """Set weights, which must be finite and not negative. If an index occurs twice, the last weight wins."""
        self._leaves[index] = weight
        for below, above in pairwise(reversed(self._levels)):
            index = index // _FAN
            above.reshape(-1)[index] = below[index].sum(axis=1)

    def draw(self, fractions: Doubles) -> Ints:
        """Return the items at these fractions [0, 1) of the cumulative weight. Items of weight 0 are never returned."""
        rest = fractions * self.total
        node = np.zeros(len(rest), np.int64)
        rows = np.arange(len(rest))
        for level in self._levels:
            weights = level[node]
            sums = np.cumsum(weights, axis=1)
            rest = np.minimum(rest, np.nextafter(sums[:, -1], 0.0))  # rounding must not lead past the last child
            child = (sums > rest[:, None]).argmax(axis=1)  # the first one
            rest = np.maximum(rest - (sums[rows, child] - weights[rows, child]), 0.0)
            node = node * _FAN + child
        return node
