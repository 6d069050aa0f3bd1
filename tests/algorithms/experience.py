"""Random experience of a policy, with its own probabilities and values: masks, lengths and ends of all kinds."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from ludus.algorithms.ppo import PPO, PPOConfig
from ludus.config.validation import parse_algorithm_config
from ludus.core.spaces import ArraySpec
from ludus.core.tree import copy_into, map_tree
from ludus.core.types import Segments, SegmentSpec
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy

OBSERVATIONS = gym.spaces.Box(-5, 5, (3,), np.float32)
HYBRID = gym.spaces.Dict({"move": gym.spaces.Discrete(4), "aim": gym.spaces.Box(-1, 1, (2,)), "use": gym.spaces.MultiBinary(2)})


def policy_for(kind: str, seed: int = 3) -> Policy:
    """`mlp`, `lstm`, `hybrid` or `filtered`: small ones."""
    torch.manual_seed(seed)
    actions: gym.Space[Any] = HYBRID if kind == "hybrid" else gym.spaces.Discrete(4)
    network = NetworkConfig(core="lstm" if kind == "lstm" else None, cell_size=8)
    return Policy(OBSERVATIONS, actions, network, normalise_observations=kind == "filtered")


def config_for(**settings: Any) -> PPOConfig:
    config = parse_algorithm_config(PPOConfig, {"minibatch_size": 24, "num_epochs": 3, "lr": 3e-3} | settings, collated=True)
    assert isinstance(config, PPOConfig)
    threads = {name: settings.get(name, 1) for name in ("learner_threads", "torch_threads")}
    return config.model_copy(update=threads)


def ppo(policy: Policy, **settings: Any) -> PPO:
    return PPO(policy, config_for(**settings), seed=5)


def experience(policy: Policy, steps: int, rows: int, seed: int = 0, ragged: bool = True) -> Segments:
    """With `ragged`, rows end at any step, and what lies behind is rubbish."""
    rng = np.random.default_rng(seed)
    every = 4 if policy.recurrent else 0
    mask_size = policy.distribution.mask_size
    action, *_ = policy.step(torch.zeros(1, 3), policy.initial_state(1))
    action_spec = map_tree(lambda x: ArraySpec(tuple(x.shape[1:]), x.detach().numpy().dtype), action)
    seen = ArraySpec((3,), np.dtype(np.float32))
    block = Segments.empty(SegmentSpec(steps, seen, action_spec, mask_size, policy.state_spec(), every), rows)
    block.observation[:] = rng.normal(size=(steps + 1, rows, 3))
    block.reward[:] = rng.normal(size=(steps, rows))
    block.terminated[:] = rng.random((steps, rows)) < 0.1
    block.truncated[:] = ~block.terminated & (rng.random((steps, rows)) < 0.05)
    block.first[1:] = block.terminated | block.truncated
    block.action_mask[:] = rng.random(block.action_mask.shape) < 0.7
    block.action_mask[..., 0] = True
    block.origin[:] = np.arange(rows)
    state = policy.initial_state(rows)
    with torch.no_grad():
        for t in range(steps + 1):
            if every and t % every == 0 and t < steps:
                copy_into(map_tree(lambda x, t=t: x[t // every], block.state), tuple(map(Tensor.numpy, state)))
            noise = policy.distribution.noise((rows,), torch.Generator().manual_seed(1000 * seed + t))
            inputs = (torch.from_numpy(x[t]) for x in (block.observation, block.first, block.action_mask))
            observation, first, mask = inputs
            action, log_prob, value, state = policy.step(observation, state, first, mask, noise)
            block.value[t] = value
            if t < steps:
                copy_into(map_tree(lambda x, t=t: x[t], block.action), map_tree(Tensor.numpy, action))
                block.log_prob[t] = log_prob
    lengths = rng.integers(1, steps + 1, rows) if ragged else np.full(rows, steps)
    block.valid[:] = np.arange(steps)[:, None] < lengths
    block.observation[np.arange(steps + 1)[:, None] > lengths] = np.nan  # at the length itself is the bootstrap observation
    block.reward[~block.valid] = np.inf
    return block
