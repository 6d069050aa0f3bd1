"""Helpers for the tests of sampling: a pool of workers on this machine with a small policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ludus.algorithms.impala import IMPALAConfig
from ludus.buffers.block_batches import BlockBatches
from ludus.config.schema import AlgorithmConfig
from ludus.config.validation import parse_algorithm_config
from ludus.core.tree import Array
from ludus.distributed.sampling_plan import SamplingPlan
from ludus.distributed.sampling_pool import LocalNode, SamplingNodes, SamplingPool, SingleNode
from ludus.experiments.assembly.policies import make_policy
from ludus.experiments.assembly.worker_training import make_plan, probe_environment
from ludus.models.policy import Policy

FIRST_VERSION = 5


def configured(**settings: Any) -> AlgorithmConfig:
    small = {"sampling": "sync", "num_envs_per_worker": 4, "rollout_fragment_length": 8, "model": {"fcnet_hiddens": [8]}}
    return parse_algorithm_config(IMPALAConfig, small | settings)


class Fleet:
    """Workers with a learner that takes what they make; `learn` publishes the next version."""

    def __init__(self, env: str, config: AlgorithmConfig, logs: Path | None) -> None:
        shape = probe_environment(env, config)
        self.policy: Policy = make_policy(shape.observation_space, shape.action_space, config)
        self.plan: SamplingPlan = make_plan(env, config, shape, self.policy, FIRST_VERSION, config.seed)
        self.version = FIRST_VERSION
        self.config = config

        def here(wakeup: Path) -> SamplingNodes:
            return SingleNode(LocalNode(self.plan, wakeup, log_dir=logs))

        self.sampling = SamplingPool(here, config.workers, self._latest)
        in_turn = config.sampling != "async"
        self.batches = self.sampling.batches = BlockBatches(
            self.sampling, config.workers, config.workers, in_turn=in_turn, newest=lambda: self.version, max_lag=config.max_lag
        )

    def _latest(self) -> tuple[int, Mapping[str, Array]]:
        return self.version, self.policy.weights()

    def learn(self) -> None:
        self.version += 1
        self.sampling.publish(self.version, self.policy.weights())

    def pid(self, worker: int) -> int | None:
        return next((w["pid"] for w in self.sampling.status()["workers"] if w["worker"] == worker), None)


@contextlib.contextmanager
def fleet(env: str = "CartPole-v1", logs: Path | None = None, **settings: Any) -> Iterator[Fleet]:
    made = Fleet(env, configured(**settings), logs)
    try:
        yield made
    finally:
        made.sampling.close()
