"""The network that every stack serves: 64 → 256 → 256 → 10 with tanh, the same weights everywhere.

Rows travel as raw little-endian float32. `expected` computes it in NumPy: what the replies are judged by.
"""

from __future__ import annotations

import numpy as np

SIZES = (64, 256, 256, 10)
ROW_BYTES, REPLY_BYTES = 4 * SIZES[0], 4 * SIZES[-1]


def weights() -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(20260101)
    shapes = list(zip(SIZES[1:], SIZES[:-1], strict=True))
    return [
        ((random.standard_normal(shape) / np.sqrt(shape[1])).astype("<f4"), random.standard_normal(shape[0]).astype("<f4"))
        for shape in shapes
    ]


def expected(rows: np.ndarray) -> np.ndarray:
    layers = weights()
    for number, (matrix, bias) in enumerate(layers):
        rows = rows @ matrix.T + bias
        if number < len(layers) - 1:
            rows = np.tanh(rows)
    return rows
