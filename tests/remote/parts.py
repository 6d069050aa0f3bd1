"""Models and functions of the tests in a module that worker processes can import."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ludus
from ludus.gateway.actor import Actor


class Scale(nn.Module):
    """Multiplies by its one weight: every output tells which weights made it."""

    def __init__(self, start: float = 1.0, width: int = 3) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((), float(start)))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        if (x == 13).any():
            raise ZeroDivisionError("thirteen")
        if (x == 666).any():
            os._exit(1)
        return x * self.factor


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)


def scaled(value: float) -> dict[str, Any]:
    """Weights of a Scale."""
    return {"factor": torch.full((), float(value)).numpy()}


class Echo(Actor):
    """Answers with what its model makes of the body, and pushes it."""

    def __init__(self, model: str, buffer: str | None = None) -> None:
        self.model = ludus.RemoteModel(name=model)
        self.buffer = None if buffer is None else ludus.RemoteBuffer(buffer)

    async def tick(self, body: bytes) -> bytes:
        x = np.frombuffer(body, np.float32)
        y = await self.model.forward(x)
        if self.buffer is not None:
            self.buffer.push({"x": x, "y": y})
        return bytes(y.tobytes())


# -- train functions


def note(out: str, **what: Any) -> None:
    """Leave something for the test to read, whole or not at all."""
    path = Path(out) / f"{ludus.learner().rank}.json"
    aside = path.with_suffix(".aside")
    aside.write_text(json.dumps(what))
    aside.rename(path)


def write_down(out: str, **kwargs: Any) -> None:
    learner = ludus.learner()
    note(out, rank=learner.rank, world=learner.world_size, kwargs=kwargs, pid=os.getpid(), threads=torch.get_num_threads())


def publish_one(model: ludus.RemoteModel, buffer: ludus.RemoteBuffer, out: str) -> None:
    """Handles instead of names."""
    factor = float(buffer.take(30))
    note(out, version=model.publish_weights(scaled(factor)))


def report(value: float) -> None:
    learner = ludus.learner()
    learner.metric("from_rank_0", value + 100 * learner.rank)
    ludus.metric("from_all", value + 100 * learner.rank)


def data_of(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def steps_on(network: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> list[list[float]]:
    """Three steps of gradient descent; the gradient of the loss averaged over the parts."""
    seen = []
    for _ in range(3):
        network.zero_grad()
        loss = sum(((network(x) - y) ** 2).mean() for x, y in parts) / len(parts)
        assert isinstance(loss, Tensor)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
        seen.append([float(g) for g in gradient])
        with torch.no_grad():
            for parameter in network.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
    return seen


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def descend(model: str, out: str) -> None:
    learner = ludus.learner()
    network = learner.wrap(ludus.RemoteModel(name=model).get_model())
    gradients = steps_on(network, [data_of(learner.rank)])
    weights = ludus.get_torch_model_weights(network)
    note(out, gradients=gradients, names=sorted(weights))


def fail_in_the_second(buffer: str) -> None:
    if ludus.learner().rank == 1:
        raise KeyError("the second gives up")
    for _ in ludus.RemoteBuffer(buffer):
        pass


def consume_until_the_end(buffer: str, out: str) -> None:
    seen = 0
    for _ in ludus.RemoteBuffer(buffer):
        seen += 1
        Path(out, f"seen {seen}").touch()
    note(out, seen=seen)
