"""The network in torch, and the forward pass of the stacks that bring none of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bench.serving.network import REPLY_BYTES, SIZES, weights


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        for matrix, bias in weights():
            linear = torch.nn.Linear(matrix.shape[1], matrix.shape[0])
            with torch.no_grad():
                linear.weight.copy_(torch.from_numpy(matrix))
                linear.bias.copy_(torch.from_numpy(bias))
            layers += [linear, torch.nn.Tanh()]
        self.layers = torch.nn.Sequential(*layers[:-1])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows)


class Forward:
    """Bodies in, bodies out: one forward pass for all of them."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._net = Net().eval().layers

    def __call__(self, bodies: Sequence[bytes]) -> list[bytes]:
        rows = np.frombuffer(bytearray(b"".join(bodies)), "<f4").reshape(len(bodies), SIZES[0])
        with torch.inference_mode():
            out = self._net(torch.from_numpy(rows)).numpy().tobytes()
        return [out[at : at + REPLY_BYTES] for at in range(0, len(out), REPLY_BYTES)]
