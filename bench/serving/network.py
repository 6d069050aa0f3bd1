"""The network that every stack serves: 64 → 256 → 256 → 10 with tanh, the same weights everywhere.

Rows travel as raw little-endian float32. `expected` computes it in NumPy: what the replies are judged by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

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


def net() -> torch.nn.Module:
    import torch

    torch.set_num_threads(1)
    modules: list[torch.nn.Module] = []
    for matrix, bias in weights():
        linear = torch.nn.Linear(matrix.shape[1], matrix.shape[0])
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(matrix))
            linear.bias.copy_(torch.from_numpy(bias))
        modules += [linear, torch.nn.Tanh()]
    return torch.nn.Sequential(*modules[:-1]).eval()


class Forward:
    """Bodies in, bodies out: one forward pass for all of them."""

    def __init__(self) -> None:
        import torch

        self._torch, self._net = torch, net()

    def __call__(self, bodies: Sequence[bytes]) -> list[bytes]:
        rows = np.frombuffer(bytearray(b"".join(bodies)), "<f4").reshape(len(bodies), SIZES[0])
        with self._torch.inference_mode():
            out = self._net(self._torch.from_numpy(rows)).numpy().tobytes()
        return [out[at : at + REPLY_BYTES] for at in range(0, len(out), REPLY_BYTES)]
