"""The agents of `bench.serve` in plain torch, for the peers: raw bodies in, actions out, recurrent states in a dict by session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

SKIPPED = 8  # bytes of reward and flags before the observation: a peer has no use for them


class Player:
    """One forward pass for all the requests that it is called with. As one would write it for one's own agent."""

    def __init__(self, path: Path) -> None:
        torch.set_num_threads(1)
        arrays = {name: torch.from_numpy(array) for name, array in np.load(path).items() if array.dtype.kind == "f"}
        self.kind = str(np.load(path)["kind"])
        self.recurrent = self.kind == "lstm"
        self._states: dict[str, tuple[Tensor, Tensor]] = {}
        if self.kind == "cnn":
            self._net = _cnn(arrays)
        elif self.kind == "lstm":
            self._net, self._cell, self._head = _lstm(arrays)
        else:
            self._net = _mlp(arrays)

    def start(self, session: str) -> None:
        self._states[session] = (torch.zeros(256), torch.zeros(256))

    def end(self, session: str) -> None:
        self._states.pop(session, None)

    def __call__(self, requests: Sequence[tuple[str, bytes]]) -> list[bytes]:
        """(session, body) → the action, as the eight bytes of an int64."""
        with torch.inference_mode():
            if self.kind == "cnn":
                logits = self._net(_pictures(requests))
            elif self.recurrent:
                logits = self._step(requests)
            else:
                logits = self._net(_vectors(requests))
            return [action.tobytes() for action in logits.argmax(dim=-1).numpy()]

    def _step(self, requests: Sequence[tuple[str, bytes]]) -> Tensor:
        states = [self._states[session] for session, _ in requests]
        h, c = self._cell(self._net(_vectors(requests)), tuple(map(torch.stack, zip(*states, strict=True))))
        for (session, _), state in zip(requests, zip(h.unbind(), c.unbind(), strict=True), strict=True):
            self._states[session] = state
        logits: Tensor = self._head(h)
        return logits


def _vectors(requests: Sequence[tuple[str, bytes]]) -> Tensor:
    return torch.from_numpy(np.stack([np.frombuffer(body, "<f4", offset=SKIPPED) for _, body in requests]))


def _pictures(requests: Sequence[tuple[str, bytes]]) -> Tensor:
    rows = np.stack([np.frombuffer(body, np.uint8, offset=SKIPPED) for _, body in requests]).reshape(-1, 84, 84, 4)
    return torch.from_numpy(rows).permute(0, 3, 1, 2).float() / 255


def _linear(arrays: dict[str, Tensor], name: str) -> nn.Linear:
    weight = arrays[f"{name}.weight"]
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": arrays[f"{name}.bias"]})
    return layer


def _mlp(arrays: dict[str, Tensor]) -> nn.Module:
    first, second, head = (_linear(arrays, name) for name in ("trunk.dense.0", "trunk.dense.1", "head"))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), head).eval()


def _lstm(arrays: dict[str, Tensor]) -> tuple[nn.Module, nn.LSTMCell, nn.Linear]:
    cell = nn.LSTMCell(256, 256)
    names = {"ih": "core.input", "hh": "core.recurrent"}
    cell.load_state_dict(
        {f"{part}_{end}": arrays[f"{name}.{part}"] for end, name in names.items() for part in ("weight", "bias")}
    )
    return nn.Sequential(_linear(arrays, "trunk.dense.0"), nn.Tanh()).eval(), cell.eval(), _linear(arrays, "head").eval()


def _cnn(arrays: dict[str, Tensor]) -> nn.Module:
    layers: list[nn.Module] = []
    for at, (inputs, outputs, kernel, stride) in enumerate(((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))):
        conv = nn.Conv2d(inputs, outputs, kernel, stride)
        name = f"trunk.images.0.body.{2 * at}"
        conv.load_state_dict({"weight": arrays[f"{name}.weight"], "bias": arrays[f"{name}.bias"]})
        layers += [conv, nn.ReLU()]
    dense, head = _linear(arrays, "trunk.dense.0"), _linear(arrays, "head")
    # The layout that convolutions on a CPU are fastest in, which is also that of the pictures.
    return nn.Sequential(*layers, nn.Flatten(), dense, nn.ReLU(), head).eval().to(memory_format=torch.channels_last)
