"""Several agents sampled by workers: the same training as in one process, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.core.metrics import read_jsonl
from ludus.experiments import runner
from ludus.experiments.runs import checkpoint
from ludus.models.policy import Weights
from ludus.storage.local import LocalStore

ROLES = {"policies": ["talk", "hear"], "policy_mapping": {"speak*": "talk", "listener": "hear"}}
SETTINGS: dict[str, Any] = {
    "num_envs_per_worker": 4,
    "train_batch_size": 80,
    "num_epochs": 1,
    "minibatch_size": 4000,
    "model": {"fcnet_hiddens": [8]},
    "evaluation_duration": 0,
    "metrics_num_episodes_for_smoothing": 5,
}
WHOLE: dict[str, Any] = {"multiagent": ROLES}

Rows = list[dict[str, Any]]


def train(
    where: Path, iterations: int = 4, *, env: str = "tests.matches:make_roles", algorithm: str = "PPO", **settings: Any
) -> tuple[dict[str, Weights], Rows]:
    """Weights of all models and the reports."""
    data = {"env": env, "run": algorithm, "stop": {"iterations": iterations}, "config": {**SETTINGS, **settings}}
    result = runner.train(data, local_dir=where, supervised=False)
    return weights_of(result.run_dir), read_jsonl(result.run_dir / "metrics.jsonl")


def weights_of(run: Path) -> dict[str, Weights]:
    return {name: dict(weights) for name, weights in checkpoint.newest(LocalStore(run)).weights.items()}


def assert_equal(one: dict[str, Weights], other: dict[str, Weights], *, atol: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for model, weights in one.items():
        for name, value in weights.items():
            np.testing.assert_allclose(value, other[model][name], rtol=0, atol=atol, err_msg=f"{model} {name}")


@pytest.mark.parametrize(
    "settings",
    [
        WHOLE,
        {"multiagent": {**ROLES, "centralized_value": True}},
        {"multiagent": {**ROLES, "count_steps_by": "agent_steps"}},
        {**WHOLE, "model": {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4, "fcnet_hiddens": [8]}},
        {"env": "tests.matches:make_turns", "env_config": {"masked": "info"}},
        {"env": "tests.matches:make_parallel"},
        {"env": "tests.matches:make_parallel", "preprocess": {"frame_skip": 2, "stack": 2, "max_episode_steps": 5}},
    ],
    ids=["roles", "central", "agent steps", "lstm", "turns", "come and go", "preprocess"],
)
def test_one_worker_learns_what_no_worker_learns(tmp_path: Path, settings: dict[str, Any]) -> None:
    alone, before = train(tmp_path / "alone", **settings)
    other, after = train(tmp_path / "worker", num_workers=1, **settings)
    assert_equal(alone, other, atol=2e-5)  # one gradient of the whole batch: only the order of its sum differs
    for key in ("timesteps", "episodes", "episode_return_mean"):
        assert [row.get(key) for row in before] == [pytest.approx(row.get(key)) for row in after], key
    own = {key for key in before[-1] if key.endswith("/episode_return_mean")}
    assert own
    assert own <= after[-1].keys()


def test_with_two_workers_a_run_can_be_repeated_bit_by_bit(tmp_path: Path) -> None:
    again: dict[str, Any] = {**WHOLE, "num_workers": 2, "num_epochs": 2, "minibatch_size": 40}
    once, rows = train(tmp_path / "one", **again)
    assert_equal(once, train(tmp_path / "two", **again)[0])
    assert [row["timesteps"] for row in rows][-1] == pytest.approx(160, abs=16)  # two policies learn from each batch
    with pytest.raises(AssertionError, match="Not equal"):
        assert_equal(once, train(tmp_path / "other", seed=9, **again)[0])


@pytest.mark.parametrize(
    ("algorithm", "sampling"),
    [("PPO", "pipelined"), ("APPO", "async"), ("IMPALA", "async"), ("DQN", "sync"), ("DQN", "async")],
)
def test_every_mode_learns_from_agents_that_come_and_go(tmp_path: Path, algorithm: str, sampling: str) -> None:
    settings = {
        **SETTINGS,
        "num_workers": 2,
        "sampling": sampling,
        "env_config": {"masked": "info"},
        "rollout_fragment_length": 5,
    }
    if algorithm in ("DQN", "IMPALA"):
        del settings["num_epochs"], settings["minibatch_size"]
    if algorithm == "DQN":
        settings["num_steps_sampled_before_learning_starts"] = 20
    # Workers of DQN may sample hundreds of steps before its first update.
    stop, least = ("timesteps", 10_000) if algorithm == "DQN" else ("iterations", 8)
    data = {"env": "tests.matches:make_turns", "run": algorithm, "stop": {stop: least}, "config": settings}
    result = runner.train(data, local_dir=tmp_path, supervised=False)
    assert result.metrics[stop] >= least
    assert result.metrics["episodes"] > 0
    losses = [row["learner/loss"] for row in read_jsonl(result.run_dir / "metrics.jsonl") if "learner/loss" in row]
    assert losses
    assert np.isfinite(losses).all()


def test_a_run_with_workers_continues_from_its_checkpoint(tmp_path: Path) -> None:
    data = {
        "env": "tests.matches:make_roles",
        "stop": {"iterations": 4},
        "config": {**SETTINGS, **WHOLE, "num_workers": 2},
    }
    first = runner.train(data, project=tmp_path, trial="run", supervised=False)
    result = runner.resume(tmp_path / "run", stop={"iterations": 8})
    assert result.metrics["iterations"] == 8
    assert result.metrics["timesteps"] > first.metrics["timesteps"]


def test_self_play_with_workers_reports_results_and_repeats_bit_by_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_workers": 2, "train_batch_size": 400, "self_play": {"opponents": "mix", "every": 1}}
    settings |= {"minibatch_size": 100, "env": "pettingzoo/tictactoe_v3"}
    once, rows = train(tmp_path / "one", **settings)
    last = rows[-1]
    assert last["zero_sum"] == 1
    assert 0 < last["match/win/latest"] < 1
    assert 0 <= last["match/win/past"] <= 1
    assert_equal(once, train(tmp_path / "two", **settings)[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_learning_from_both_sides_of_a_match_against_itself_repeats_bit_by_bit(tmp_path: Path, workers: int) -> None:
    settings: dict[str, Any] = {"num_workers": workers, "train_batch_size": 400, "minibatch_size": 100, "num_epochs": 2}
    settings |= {"env": "ludus/ConnectFour-v0", "env_config": {"opening_moves": 4}, "self_play": {"opponents": "latest"}}
    once, rows = train(tmp_path / "one", **settings)
    assert rows[-1]["unrecorded_steps"] == 0, "both sides learn"
    assert_equal(once, train(tmp_path / "two", **settings)[0])
    with pytest.raises(AssertionError, match="Not equal"):
        assert_equal(once, train(tmp_path / "other", seed=9, **settings)[0])


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("PPO", {}), ("PPO", {"multiagent": {"count_steps_by": "agent_steps"}}), ("APPO", {"num_workers": 2, "sampling": "async"})],
    ids=["in process", "agent steps", "async"],
)
def test_batches_may_hold_complete_episodes_alone(tmp_path: Path, algorithm: str, settings: dict[str, Any]) -> None:
    settings = {"env_config": {"length": 7}, "batch_mode": "complete_episodes", **settings}
    _, rows = train(tmp_path, 6, env="tests.matches:make_simple", algorithm=algorithm, **settings)
    last = rows[-1]
    counted = 14 if settings.get("multiagent") else 7
    assert last["episode_length_mean"] == 7
    assert last["timesteps"] >= 6 * 80
    if algorithm == "PPO" and counted == 14:
        assert all(row["timesteps"] % counted == 0 for row in rows), "decisions of two agents in whole matches"
