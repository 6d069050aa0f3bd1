"""Real experience for the tests of algorithms: a sampler, environments, and a policy that may be older than the one that learns."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ludus.algorithms.base import Algorithm, algorithm_class
from ludus.config.validation import parse_algorithm_config
from ludus.core.types import Segments
from ludus.envs.vector_env import make_environments
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy, Weights
from ludus.sampling.sampler import Sampler, segment_spec
from ludus.transport.local import LocalMemory


class Sampled:
    """Blocks of one environment, made by `actor`, a twin of `policy`; `lag` is how many versions it is behind."""

    def __init__(
        self, env: str, rows: int, steps: int, *, normalise: bool = False, seed: int = 0, lag: int = 0, **network: Any
    ) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)  # small networks: more would only get into each other's way
        self._environments = make_environments(env, rows)
        spaces = (self._environments.observation_space, self._environments.action_space)
        self.policy, self.actor = (Policy(*spaces, NetworkConfig(**network), normalise) for _ in range(2))
        self.actor.load_weights(self.policy.weights())
        spec = segment_spec(self.policy, self._environments, steps)
        self._memory = LocalMemory(spec, rows, 1)
        self._sampler = Sampler(self._environments, self, self._memory, seed)
        self._old: deque[Weights] = deque([self.policy.weights()], maxlen=lag + 1)
        self._block: Segments | None = None
        self.version = 0
        self.returns: deque[float] = deque(maxlen=100)

    def newest(self) -> tuple[Policy, int]:
        return self.actor, self.version - len(self._old) + 1

    def block(self) -> Segments:
        """The next one; the one before is written over."""
        if self._block is not None:
            self._memory.release(self._block)
        assert self._sampler.step()
        self._block = self._memory.take(0)
        assert self._block is not None
        self.returns.extend(self._block.episode_return.tolist())
        return self._block

    def published(self) -> None:
        """The policy has a new version; the actor gets the one that is `lag` versions old."""
        self._old.append(self.policy.weights())
        self.version += 1
        self.actor.load_weights(self._old[0])

    def close(self) -> None:
        self._environments.close()


def made(run: str, policy: Policy, **settings: Any) -> Algorithm:
    """An algorithm by its name, with settings as in `config:`."""
    kind = algorithm_class(run)
    config = parse_algorithm_config(kind.Config, {"learner_threads": 1} | settings, collated=True)
    return kind(policy, config, 5)


def disturbed(policy: Policy, amount: float = 0.05, seed: int = 9) -> None:
    """Move all weights a little: as if it had learned since."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=amount)


def padded(block: Segments, extra: int) -> Segments:
    """The same experience in longer segments whose tails are not valid and full of rubbish."""
    spec = replace(block.spec, steps=block.spec.steps + extra)
    out = Segments.empty(spec, block.rows)
    t, rng = block.spec.steps, np.random.default_rng(9)
    rubbish = np.array([np.nan, np.inf, -np.inf, 1e30], np.float32)
    for leaf in _floats(out.observation):
        leaf[:] = rng.choice(rubbish, leaf.shape)
    out.reward[:], out.value[:], out.log_prob[:] = np.nan, np.inf, -np.inf
    out.action_mask[:] = False
    out.terminated[:], out.truncated[:] = rng.random((2, *out.reward.shape)) < 0.3
    for name in ("action", "reward", "terminated", "truncated", "valid", "log_prob", "version"):
        _put(getattr(out, name), getattr(block, name), t)
    for name in ("observation", "value", "first", "action_mask"):
        _put(getattr(out, name), getattr(block, name), t + 1)
    for mine, theirs in zip(out.state, block.state, strict=True):
        mine[: len(theirs)] = theirs
    out.origin, out.finals = block.origin, block.finals
    out.final_at, out.final_observation, out.final_value = block.final_at, block.final_observation, block.final_value
    return out


def _put(target: Any, source: Any, rows: int) -> None:
    if isinstance(target, dict):
        for key in target:
            _put(target[key], source[key], rows)
    else:
        target[:rows] = source[:rows]


def _floats(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in _floats(item)]
    return [tree] if tree.dtype == np.float32 else []
