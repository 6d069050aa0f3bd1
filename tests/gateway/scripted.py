"""Tiny policies whose versions change on request, and a seat that records their sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from copy import deepcopy
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import torch

from ludus.core.types import Segments
from ludus.gateway.agent import Seat
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.sampling.segment_recorder import session_spec
from ludus.transport.local import LocalMemory

T = TypeVar("T")
Space = gym.Space[Any]

OBSERVATION = gym.spaces.Box(-10.0, 10.0, (3,), np.float32)
ACTION = gym.spaces.Discrete(4)


def tiny_policy(
    observation: Space = OBSERVATION, action: Space = ACTION, *, core: str | None = None, seed: int = 0, max_seq_len: int = 2
) -> Policy:
    """Random weights in every layer: with the usual small last layer all logits would be nearly equal."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Policy(observation, action, NetworkConfig(fcnet_hiddens=(8,), core=core, cell_size=5, max_seq_len=max_seq_len))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.7)
    return policy


class Versions:
    """A policy source that keeps every version with its weights."""

    def __init__(self, policy: Policy) -> None:
        self.known = {1: policy}
        self.version = 1

    def newest(self) -> tuple[Policy, int]:
        return self.known[self.version], self.version

    def renew(self) -> None:
        fresh = deepcopy(self.known[self.version])
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.version += 1
        self.known[self.version] = fresh


class RecordedSeat:
    """A seat that takes the most probable actions and records its sessions."""

    def __init__(self, policy: Policy, steps: int = 4, *, blocks: int = 10_000, max_batch_size: int = 256) -> None:
        self.versions = Versions(policy)
        self.memory = LocalMemory(session_spec(policy, steps), 1, blocks)
        self.deciding = BatchedPolicy(self.versions, deterministic=True, max_batch_size=max_batch_size)
        self.seat = Seat(self.deciding, self.memory)

    def segments(self) -> list[Segments]:
        """Take all committed segments, in order."""
        taken = []
        while (segments := self.memory.take(0)) is not None:
            taken.append(segments)
        return taken


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)
