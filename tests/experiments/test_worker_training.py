"""Training with workers: the same numbers as without, however many there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.algorithms.dqn import DQNConfig
from ludus.algorithms.impala import IMPALAConfig
from ludus.algorithms.ppo import PPOConfig
from ludus.config.schema import AlgorithmConfig
from ludus.config.validation import parse_algorithm_config
from ludus.core.metrics import read_jsonl
from ludus.experiments import runner
from ludus.experiments.assembly.worker_training import make_clock
from ludus.experiments.resolve import Announce
from ludus.models.policy import Weights


def trained(
    where: Path, iterations: int = 4, announce: Announce | None = None, **config: Any
) -> tuple[Weights, list[dict[str, Any]]]:
    small = {"num_envs_per_worker": 8, "rollout_fragment_length": 16, "evaluation_duration": 0, "minibatch_size": 64}
    data = {"env": "CartPole-v1", "stop": {"iterations": iterations}, "config": small | {"seed": 7} | config}
    result = runner.train(data, local_dir=where, announce=announce, supervised=False)
    rows = read_jsonl(result.run_dir / "metrics.jsonl")
    return result.agent.policy.weights(), rows


def same(one: Weights, other: Weights) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("model", [{}, {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4}], ids=["mlp", "lstm"])
def test_one_worker_learns_bit_by_bit_what_no_worker_learns(tmp_path: Path, model: dict[str, Any]) -> None:
    alone, before = trained(tmp_path, model=model)
    other, after = trained(tmp_path, model=model, num_workers=1)
    assert same(alone, other)
    assert [row["timesteps"] for row in before] == [row["timesteps"] for row in after]
    assert [row.get("episode_return_mean") for row in before] == [row.get("episode_return_mean") for row in after]


def test_with_several_workers_which_are_announced_a_run_can_be_repeated_bit_by_bit(tmp_path: Path) -> None:
    announced: list[str] = []
    once, rows = trained(tmp_path, announce=announced.append, num_workers=3)
    assert announced == ["starting 3 workers …"]
    again, _ = trained(tmp_path, num_workers=3)
    assert same(once, again)
    assert [row["learner/lag_max"] for row in rows] == [0, 0, 0, 0]
    assert rows[-1]["timesteps"] > 4 * 3 * 8 * 16 * 0.8
    other, _ = trained(tmp_path, num_workers=3, seed=8)
    assert not same(once, other)


def test_pipelined_learning_is_one_version_behind_and_never_more(tmp_path: Path) -> None:
    _, rows = trained(tmp_path, 8, num_workers=2, sampling="pipelined")
    lags = [row["learner/lag_max"] for row in rows]
    assert max(lags) == 1
    assert lags[0] == 0


@pytest.mark.parametrize(
    ("schema", "given", "an_update"),
    [
        (PPOConfig, {"num_workers": 3}, 3 * 8 * 16),
        (PPOConfig, {"num_workers": 2, "sampling": "pipelined", "train_batch_size": 512}, 512),
        (IMPALAConfig, {"num_workers": 2, "train_batch_size": 512}, 512),
        (DQNConfig, {"num_workers": 2, "sampling": "sync"}, 2 * 8 * 16),
        (DQNConfig, {"num_workers": 2, "train_batch_size": 4096}, 8 * 16),
    ],
)
def test_environments_hear_of_as_many_steps_as_were_sampled(
    schema: type[AlgorithmConfig], given: dict[str, Any], an_update: int
) -> None:
    config = parse_algorithm_config(schema, {"num_envs_per_worker": 8, "rollout_fragment_length": 16} | given)
    clock = make_clock(config, first_version=2_001, begun=50_000)
    assert clock.timesteps(2_001) == 50_000
    assert clock.timesteps(2_004) == 50_000 + 3 * an_update
