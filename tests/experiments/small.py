"""Small experiments that take a fraction of a second, and the parts of one made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.algorithms.ppo import PPO, PPOConfig
from ludus.core.metrics import Sink
from ludus.core.spaces import array_spec
from ludus.core.tree import Array
from ludus.core.types import DEFAULT_MODEL, Segments, SegmentSpec
from ludus.experiments import runner
from ludus.experiments.result import Result
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy

OBSERVATION = gym.spaces.Box(-10.0, 10.0, (4,), np.float32)
ACTION = gym.spaces.Discrete(2)

SETTINGS: dict[str, Any] = {
    "num_envs_per_worker": 8,
    "train_batch_size": 256,
    "minibatch_size": 64,
    "num_epochs": 2,
    "model": {"fcnet_hiddens": [16]},
    "evaluation_duration": 2,
    "metrics_num_episodes_for_smoothing": 5,
}


def data(iterations: int = 3, *, env: str = "CartPole-v1", top: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """An experiment as a config holds it."""
    return {"env": env, "stop": {"iterations": iterations}, "config": {**SETTINGS, **settings}, **(top or {})}


def train(where: Path, iterations: int = 3, *, sinks: Sequence[Sink] = (), **changes: Any) -> Result:
    """Train a new run in the directory `where`."""
    return runner.train(data(iterations, **changes), project=where.parent, trial=where.name, sinks=sinks)


def make_ppo(
    seed: int = 0,
    *,
    observation: gym.Space[Any] = OBSERVATION,
    action: gym.Space[Any] = ACTION,
    network: NetworkConfig | None = None,
    normalise: bool = False,
    **settings: Any,
) -> PPO:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Policy(observation, action, network or NetworkConfig(fcnet_hiddens=(8,)), normalise)
    return PPO(policy, PPOConfig(minibatch_size=16, num_epochs=2, **settings), seed)


def make_segments(seed: int = 0, *, model: str = DEFAULT_MODEL, steps: int = 8, rows: int = 4, version: int = 1) -> Segments:
    """Made-up experience in the spaces above."""
    random = np.random.default_rng(seed)
    spec = SegmentSpec(steps, array_spec(OBSERVATION), array_spec(ACTION, "action"), model=model)
    block = Segments.empty(spec, rows)
    block.observation[:] = random.normal(size=block.observation.shape)
    block.action[:] = random.integers(0, 2, block.action.shape)
    block.reward[:] = random.normal(size=block.reward.shape)
    block.value[:] = random.normal(size=block.value.shape)
    block.log_prob[:] = np.log(0.5)
    block.valid[:] = True
    block.version[:] = version
    block.first[0] = True
    block.origin[:] = np.arange(rows)
    block.episode_return = random.normal(size=2).astype(np.float32)
    block.episode_length = random.integers(5, 50, 2)
    return block


def same(one: dict[str, Array], two: dict[str, Array]) -> bool:
    """Equal to the last bit, names and types included."""
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and one[name].tobytes() == two[name].tobytes() for name in one
    )
