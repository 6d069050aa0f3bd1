"""LSTM and GRU over sequences that contain starts of episodes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ludus.errors import ConfigError
from ludus.models.layers import Dense


class RecurrentCore(nn.Module):
    """An LSTM or GRU over [T, B, F] whose state is reset wherever `first` is true.

    The input projection of the whole sequence is one matrix product; only the recurrent part runs step by step.
    """

    def __init__(self, kind: str, inputs: int, cells: int) -> None:
        super().__init__()
        if kind not in ("lstm", "gru"):
            raise ConfigError(f"model.core is {kind!r}.", "Use 'lstm' or 'gru'.")
        self.kind, self.size = kind, cells
        gates = 4 if kind == "lstm" else 3
        self.input = Dense(inputs, gates * cells, gain=1.0)
        self.recurrent = Dense(cells, gates * cells, gain=1.0)
        if kind == "lstm":
            nn.init.ones_(self.input.bias[cells : 2 * cells])  # remember by default (Jozefowicz et al. 2015)

    def initial_state(self, rows: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(rows, self.size) for _ in range(2 if self.kind == "lstm" else 1))

    def forward(self, x: Tensor, state: tuple[Tensor, ...], first: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        projected = self.input(x)
        keep = (~first).to(x.dtype).unsqueeze(-1)
        outputs = []
        for step, kept in zip(projected.unbind(0), keep.unbind(0), strict=True):
            state = tuple(s * kept for s in state)
            state = self._lstm(step, *state) if self.kind == "lstm" else self._gru(step, *state)
            outputs.append(state[0])
        return torch.stack(outputs), state

    def advance(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One step [B, F] within an episode."""
        step = self.input(x)
        return self._lstm(step, *state) if self.kind == "lstm" else self._gru(step, *state)

    def _lstm(self, step: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = (step + self.recurrent(h)).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def _gru(self, step: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        xr, xz, xn = step.chunk(3, dim=-1)
        hr, hz, hn = self.recurrent(h).chunk(3, dim=-1)
        z = torch.sigmoid(xz + hz)
        return ((1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h,)
