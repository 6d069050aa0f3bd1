"""What a minibatch of a team in the Arena costs to learn from: the first layer of the value apart or as one, on one thread and on two.

    python -m bench.minibatch [--rounds 15]        (about a minute)

The policy of the preset `Arena_3v3_PPO`, and decisions in matches of its environment; forward and backward. Interleaved, after a round that does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import numpy as np
import torch

from bench.train import RESULTS, provenance
from ludus.core.tree import Tree, map_tree
from ludus.envs.vector_env import make_environments
from ludus.experiments.assembly.policies import make_policy
from ludus.experiments.resolve import resolve
from ludus.experiments.source import preset_index
from ludus.models import layers
from ludus.models.policy import Policy
from ludus.process.host import keep_freed_memory

PRESET = "Arena_3v3_PPO"
TIMES = 5
"""Minibatches of a round."""
NEVER = 1 << 30
CASES = {
    "as one, 1 thread": (NEVER, 1),
    "apart, 1 thread": (layers._MANY_GIVEN, 1),
    "as one, 2 threads": (NEVER, 2),
    "apart, 2 threads": (layers._MANY_GIVEN, 2),
}
COMPARED = (
    ("as one, 1 thread", "apart, 1 thread"),
    ("as one, 2 threads", "apart, 2 threads"),
    ("apart, 1 thread", "apart, 2 threads"),
)


def minibatch() -> tuple[Policy, tuple[Tree, Tree, Tree]]:
    """The policy; observations, actions and masks, some decisions into matches."""
    resolved = resolve(preset_index.experiments(PRESET)[PRESET])
    config: Any = resolved.config
    rows = config.num_envs_per_worker
    environments = make_environments(resolved.experiment.env, rows, config.env_config)
    try:
        policy = make_policy(environments.observation_space, environments.action_space, config)
        generator = torch.Generator().manual_seed(0)
        seen, found = environments.reset(0), []
        for _ in range(config.minibatch_size // rows):
            for _ in range(10):
                acted = policy.act(seen.observation, (), seen.mask, policy.draw_noise(rows, generator))
                taken = map_tree(np.copy, (seen.observation, acted.chosen, seen.mask))
                seen = environments.step(acted.action).seen
            found.append(taken)
    finally:
        environments.close()
    return policy, map_tree(lambda *parts: torch.from_numpy(np.concatenate(parts)), *found)


def once(policy: Policy, batch: tuple[Tree, Tree, Tree]) -> None:
    policy.zero_grad()
    log_prob, entropy, value = policy.evaluate(*batch)
    (value.square().mean() - log_prob.mean() - 0.01 * entropy.mean()).backward()  # type: ignore[no-untyped-call]


def measured(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a minibatch in each round."""
    policy, batch = minibatch()
    found: dict[str, list[float]] = {name: [] for name in CASES}
    usual = layers._MANY_GIVEN
    for number in range(rounds + 1):
        for name, (many, threads) in CASES.items():
            layers._MANY_GIVEN = many
            torch.set_num_threads(threads)
            began = time.perf_counter()
            for _ in range(TIMES):
                once(policy, batch)
            if number:
                found[name].append(1000 * (time.perf_counter() - began) / TIMES)
    layers._MANY_GIVEN = usual
    return found


def _spread(values: list[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} [{low:.{digits}f}–{high:.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    keep_freed_memory()
    head = provenance() | {"load": round(os.getloadavg()[0], 1), "rounds": rounds}
    found = measured(rounds)
    lines = ["| | ms, median [quartiles] |", "|---|---:|"]
    lines += [f"| {name} | {_spread(times, 1)} |" for name, times in found.items()]
    for slow, fast in COMPARED:
        ratios = [a / b for a, b in zip(found[slow], found[fast], strict=True)]
        lines.append(f"| {slow} ÷ {fast} | {_spread(ratios, 2)} |")
    text = (
        f"# A minibatch of {PRESET}\n\n{head['date']}, commit {head['commit']}, {head['cpu']}, {rounds} rounds of {TIMES} minibatches each, interleaved; "
        f"load before it {head['load']}. `python -m bench.minibatch`\n\n" + "\n".join(lines) + "\n"
    )
    (RESULTS / "minibatch.json").write_text(json.dumps(head | {"ms": found}, indent=1))
    (RESULTS / "minibatch.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
