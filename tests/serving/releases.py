"""Releases of a small recurrent policy whose output identifies its version and state."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families as families

from ludus.algorithms.ppo import PPO, PPOConfig
from ludus.core.tree import Array
from ludus.experiments.runs import checkpoint
from ludus.gateway.server import GatewaySettings
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.serving import release
from ludus.serving.release import Release, ReleasedModel
from ludus.serving.routing_table import AgentRoutes, RoutingTable
from ludus.serving.worker import ServiceSettings, ServingWorker
from ludus.storage.local import LocalStore
from tests.gateway.wire import ask, raw
from tests.local_servers import Served, gateway

OBSERVATION = gym.spaces.Box(-2.0, 2.0, (3,), np.float32)
ACTION = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
MODEL = "model"
SOON_S = 20.0
HUGE = [1e9, 1e9, 1e9]
"""Input for which `broken` returns NaN."""


def policy(version: int, *, cell: int = 4, core: str | None = "lstm", observation: gym.Space[Any] = OBSERVATION) -> Policy:
    """A policy whose actions depend on its version, the observation and all earlier observations."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(version)
        made = Policy(observation, ACTION, NetworkConfig(fcnet_hiddens=(6,), core=core, cell_size=cell))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return made


def broken(version: int) -> Policy:
    """A policy that returns NaN for HUGE inputs."""
    made = policy(version)
    with torch.no_grad():
        name, first = next((name, p) for name, p in made.named_parameters() if p.ndim == 2 and p.shape[1] == 3)
        assert "trunk" in name
        first.copy_(torch.tensor([1e30, -1e30, 1e30]).expand_as(first))
    return made


def released(version: int, made: Policy | None = None) -> Release:
    made = made or policy(version)
    part = ReleasedModel(json.dumps(made.description()).encode(), serialization.encode_weights(made.weights()), version)
    return Release(version, {"": MODEL}, {MODEL: part})


class Twin:
    """Reference player of one session, to compare every reply."""

    def __init__(self, *versions: Policy) -> None:
        """With several policies, one of them (always the same) must match."""
        self.left = {number: (made, _fresh(made)) for number, made in enumerate(versions)}

    def check(self, observation: Any, answer: Any) -> bool:
        """Whether a remaining policy gives this reply; others are eliminated."""
        left = {}
        for number, (made, state) in self.left.items():
            acted = made.act(np.array([observation], np.float32), state)
            if np.allclose(acted.action[0], answer, atol=1e-4):
                left[number] = made, acted.state
        self.left = left
        return bool(left)

    def carry_on(self, made: Policy, *, carry: bool) -> None:
        """Switch to another policy, as when a session moves."""
        ((_, state),) = self.left.values()
        self.left = {0: (made, state if carry else _fresh(made))}


class Wanderer:
    """Plays a session whose version may change: each answer is that of a version, with all that was seen before; versions only
    go up."""

    def __init__(self, versions: Sequence[Policy]) -> None:
        self.versions, self.at, self.moves = versions, -1, 0
        self._state: tuple[Array, ...] = ()

    def check(self, observation: Any, answer: Any) -> bool:
        for number in range(max(0, self.at), len(self.versions)):
            made = self.versions[number]
            acted = made.act(np.array([observation], np.float32), self._state if self.at >= 0 else _fresh(made))
            if np.allclose(acted.action[0], answer, atol=1e-4):
                self.moves += 0 <= self.at != number
                self.at, self._state = number, acted.state
                return True
        return False


def _fresh(made: Policy) -> tuple[Array, ...]:
    return tuple(np.stack([spec.zeros()]) for spec in made.state_spec())


def observations(count: int, seed: int = 0) -> list[list[float]]:
    return [[float(x) for x in row] for row in np.random.default_rng(seed).uniform(-2, 2, (count, 3)).astype(np.float32)]


# -- what a worker reads ---------------------------------------------------------------------------------------------------


def offer(directory: Path, agents: Mapping[str, AgentRoutes], policies: Mapping[int, Policy] | None = None) -> None:
    """Write missing releases, then the routing table."""
    for agent in agents.values():
        for version, path in agent.releases.items():
            if not (directory / path).exists():
                release.write(released(version, (policies or {}).get(version)), directory / path)
    RoutingTable(agents).write(directory)


def agent(current: int, *others: int, **more: Any) -> AgentRoutes:
    """Routes of an agent; release directories are named by version."""
    made = AgentRoutes(current, {version: f"releases/{version}" for version in (current, *others)})
    return replace(made, **more)


@contextlib.contextmanager
def serving(
    directory: Path, settings: ServiceSettings | None = None, told: GatewaySettings | None = None, **more: Any
) -> Iterator[Served]:
    """Run one worker on an event loop in a thread."""
    service = ServingWorker(directory, settings or ServiceSettings())
    service.load()
    with gateway(service, told, extension=service, **more) as served:
        yield served


# -- what a service says ----------------------------------------------------------------------------------------------------


def metrics(port: int, *headers: str) -> dict[str, float]:
    """Every sample by its name and labels, as `name{label="…"}` with labels in the order of the alphabet."""
    page = ask(port, raw("GET /metrics", headers))
    assert page.status == 200, page
    return samples(page.body)


def samples(text: bytes) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}"
            assert name not in found, f"{name} is there twice"
            assert not math.isnan(sample.value)
            found[name] = sample.value
    return found


def total(numbers: Mapping[str, float], name: str, **labels: str) -> float:
    """The sum over all other labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(value for key, value in numbers.items() if key.startswith(f"{name}{{") and all(part in key for part in wanted))


def current(port: int, model: str = "default") -> float:
    return total(metrics(port), "ludus_model_version", model=model)


# -- what a training leaves -------------------------------------------------------------------------------------------------


def checkpointed(run: Path, number: int, made: Policy, version: int | None = None) -> Path:
    """A checkpoint of a run with an external game."""
    trained = {MODEL: PPO(made, PPOConfig(minibatch_size=16, num_epochs=1), 0)}
    state = {"config": {"env": "Some-v0", "config": {}}}
    name = checkpoint.write(LocalStore(run), number, trained, {MODEL: number if version is None else version}, {}, state)
    return run / checkpoint.FOLDER / name
