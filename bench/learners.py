"""What several learners bring: the time of `learn()` on one and on N, interleaved, with the same batches.

Run as `python -m bench.learners [--learners 2] [--case cartpole|pong]`; prints one JSON line. The ratio is time on one learner
over time on N: 1.0 is no gain. On a machine with as many busy cores as learners there is nothing to win.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from ludus.algorithms.ppo import PPO, PPOConfig
from ludus.config.validation import parse_algorithm_config
from ludus.core.spaces import array_spec
from ludus.core.types import Segments, SegmentSpec
from ludus.distributed.learners.group import share_learning
from ludus.experiments.assembly.policies import make_policy, threads_of
from ludus.models.policy import Policy
from ludus.process.host import keep_freed_memory

CASES: dict[str, tuple[gym.Space[Any], dict[str, Any], int]] = {
    "cartpole": (
        gym.spaces.Box(-1, 1, (4,), np.float32),
        {"num_envs_per_worker": 64, "train_batch_size": 4096, "minibatch_size": 1024, "num_epochs": 4},
        40,
    ),
    "pong": (
        gym.spaces.Box(0, 255, (4, 84, 84), np.uint8),
        {"num_envs_per_worker": 8, "train_batch_size": 1024, "minibatch_size": 256, "num_epochs": 4},
        3,
    ),
}
"""Observations, settings, updates of a round."""


def block(policy: Policy, config: PPOConfig) -> Segments:
    rng, rows = np.random.default_rng(0), config.num_envs_per_worker
    spec = SegmentSpec(config.steps, array_spec(policy.observation_space), array_spec(policy.action_space, "action"))
    made = Segments.empty(spec, rows)
    made.observation[:] = rng.random(made.observation.shape) * (255 if made.observation.dtype == np.uint8 else 1)
    made.reward[:] = rng.normal(size=made.reward.shape)
    made.log_prob[:] = -0.7
    made.valid[:] = True
    return made


def timed(algorithm: Any, segments: Segments, updates: int) -> float:
    began = time.perf_counter()
    for _ in range(updates):
        algorithm.learn(segments, 0)
    return (time.perf_counter() - began) / updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--case", choices=CASES, default="cartpole")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transport", choices=["shared", "gloo"], default="shared")
    args = parser.parse_args()
    keep_freed_memory()
    space, settings, updates = CASES[args.case]
    config = parse_algorithm_config(PPOConfig, settings)
    assert isinstance(config, PPOConfig)
    kinds, policies = {}, [make_policy(space, gym.spaces.Discrete(2), config) for _ in range(2)]
    one = config.model_copy(update=threads_of(policies[0], config))
    each = config.model_copy(update={name: max(1, n // args.learners) for name, n in threads_of(policies[0], config).items()})
    segments = block(policies[0], config)
    kinds["one"] = PPO(policies[0], one, 0)
    shared = share_learning(PPO(policies[1], each, 0), each, args.learners, None, transport=args.transport)
    threads = {"one": one.torch_threads, "several": each.torch_threads}
    times: dict[str, list[float]] = {"one": [], "several": []}
    with contextlib.closing(shared):  # type: ignore[type-var]
        for number in range(args.rounds + 1):
            for name, algorithm in (("one", kinds["one"]), ("several", shared)):
                torch.set_num_threads(threads[name])
                found = timed(algorithm, segments, updates)
                if number:  # the first is for warming up
                    times[name].append(found)
    difference = float((kinds["one"].optimizer.flat - shared.optimizer.flat).abs().max())
    ratios = sorted(a / b for a, b in zip(times["one"], times["several"], strict=True))
    report = {
        "case": args.case,
        "learners": args.learners,
        "transport": args.transport,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "one_ms": round(1000 * statistics.median(times["one"]), 2),
        "several_ms": round(1000 * statistics.median(times["several"]), 2),
        "one_over_several": round(statistics.median(ratios), 3),
        "quartiles": [round(ratios[len(ratios) // 4], 3), round(ratios[3 * len(ratios) // 4], 3)],
        "largest_difference_of_weights": difference,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
