"""Estimates the memory of a run on this machine before it starts, and refuses a run that needs more than is free.

The estimate is a lower bound: interpreters, environments and activations come on top.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ludus.config.schema import EMBEDDED, EXTERNAL, AlgorithmConfig
from ludus.core.formatting import format_bytes
from ludus.core.spaces import array_spec
from ludus.core.tree import Tree, leaves
from ludus.core.types import DEFAULT_MODEL
from ludus.errors import ConfigError
from ludus.experiments.resolve import ResolvedExperiment
from ludus.models.devices import learner_device
from ludus.models.policy import Policy
from ludus.process.cgroups import find_cgroups, read_memory
from ludus.sampling.sampler import action_spec

log = logging.getLogger(__name__)

EXPERIENCE, REPLAY, MODEL, INPUTS = "experience", "replay buffer", "model and optimizer", "inputs of a minibatch"
_REMEDIES = {
    EXPERIENCE: "Lower num_envs_per_worker, rollout_fragment_length, train_batch_size or num_workers.",
    REPLAY: "Lower replay_buffer_config.capacity.",
    MODEL: "Use a smaller model, or fewer workers and learners.",
    INPUTS: "Lower minibatch_size, or show categories of many values in another way.",
}
_PER_STEP = 4 + 4 + 4 + 8 + 4  # reward, log-probability, value, version, four flags


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])

    def __str__(self) -> str:
        shown = sorted(((count, part) for part, count in self.parts.items() if count), reverse=True)
        return ", ".join(f"{format_bytes(count)} of {part}" for count, part in shown)


def estimate(
    policies: Mapping[str, Policy], config: AlgorithmConfig, *, workers: int = 0, timesteps: float | None = None
) -> MemoryEstimate:
    """`workers`: sampling processes on this machine. `timesteps`: length of the run, which bounds the replay buffer."""
    parts = dict.fromkeys((EXPERIENCE, REPLAY, MODEL, INPUTS), 0)
    for policy in policies.values():
        step = step_bytes(policy)
        block = step * config.num_envs_per_worker * (config.steps + 1)
        parts[EXPERIENCE] += block * (1 + workers * config.blocks_ahead) if workers else block
        if config.replays:
            parts[REPLAY] += int(step * min(_capacity(config), timesteps or math.inf))
        parts[MODEL] += _model_bytes(policy, config, workers)
        inputs = getattr(getattr(policy.network, "vector", None), "size", 0)
        minibatch = getattr(config, "minibatch_size", None) or config.train_batch_size
        parts[INPUTS] += 4 * inputs * min(minibatch, config.train_batch_size)
    return MemoryEstimate(parts)


def step_bytes(policy: Policy) -> int:
    """Bytes of one recorded step."""
    return _tree_bytes(array_spec(policy.observation_space)) + _tree_bytes(action_spec(policy)) + _PER_STEP


def _tree_bytes(specs: Tree) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for _, spec in leaves(specs))


def _capacity(config: AlgorithmConfig) -> int:
    buffer = getattr(config, "replay_buffer_config", None)
    return int(buffer.capacity) if buffer is not None else 0


def _model_bytes(policy: Policy, config: AlgorithmConfig, workers: int) -> int:
    """Weights, gradient and both moments of Adam for every learner, and weights for every worker. On a GPU only weights count here."""
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    on_cpu = learner_device(config.learner_device, config.num_gpus).type == "cpu"
    return int(weights * ((4 * config.learners if on_cpu else 1) + workers))


def free_memory() -> int | None:
    """Bytes that are free on this machine and in the cgroups of this process; None: unknown."""
    found = read_memory(find_cgroups())
    return None if found is None else found.free


def check_memory(resolved: ResolvedExperiment, policies: Policy | Mapping[str, Policy]) -> MemoryEstimate:
    """Raises ConfigError when this run needs more memory than is free."""
    experiment, config = resolved.experiment, resolved.config
    elsewhere = resolved.cluster is not None or experiment.memory != EMBEDDED or experiment.env == EXTERNAL
    named = {DEFAULT_MODEL: policies} if isinstance(policies, Policy) else policies
    found = estimate(named, config, workers=0 if elsewhere else config.workers, timesteps=experiment.stop.timesteps)
    free = free_memory()
    if free is not None and found.total > free:
        raise ConfigError(
            f"This run needs at least {format_bytes(found.total)} of memory ({found}), and {format_bytes(free)} are free.",
            _REMEDIES[found.largest],
        )
    log.info("memory: at least %s (%s)", format_bytes(found.total), found)
    return found
