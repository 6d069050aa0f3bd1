"""One trial, without Ray: it goes on where it was, takes over what another has learned, and says how it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from ludus.algorithms.ppo import PPOConfig
from ludus.config.validation import parse_algorithm_config
from ludus.core.metrics import read_jsonl
from ludus.errors import EnvironmentFault, WorkerFailed
from ludus.experiments.assembly.policies import make_policy
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.run_dir import Run
from ludus.storage.local import LocalStore
from ludus.tuning import trial
from ludus.tuning.messages import FAILED, FINISHED, OVER, SCORE
from ludus.tuning.trial import TrialRun


def experiment(iterations: int = 1000, **config: Any) -> dict[str, Any]:
    small = {"num_envs_per_worker": 2, "train_batch_size": 32, "minibatch_size": 16, "num_epochs": 1, "evaluation_duration": 0}
    stop = {"iterations": iterations}
    return {"name": "s", "env": "tests.environments:make_count", "run": "PPO", "stop": stop, "config": {**small, **config}}


def attempt(directory: Path, data: dict[str, Any] | None = None, **more: Any) -> TrialRun:
    return TrialRun(directory, data or experiment(), report_s=1e-6, **more)


def newest(directory: Path) -> checkpoint.Checkpoint:
    return checkpoint.newest(LocalStore(directory))


def same_weights(one: checkpoint.Checkpoint, other: checkpoint.Checkpoint) -> None:
    assert one.weights["model"].keys() == other.weights["model"].keys()
    for name, value in other.weights["model"].items():
        np.testing.assert_array_equal(one.weights["model"][name], value, err_msg=name)


def exhaust(one: TrialRun) -> None:
    for _ in range(1000):
        one.advance()


def test_a_trial_is_an_ordinary_run_that_ends_by_its_own_stop(tmp_path: Path) -> None:
    one = attempt(tmp_path / "t", experiment(3), values=[[["config", "lr"], 0.1]])
    seen = [dict(one.advance()) for _ in range(3)]
    assert [n["iterations"] for n in seen] == [1, 2, 3]
    assert OVER not in seen[1]
    assert seen[2][OVER] == FINISHED
    assert seen[2]["done"]
    assert Run.open(tmp_path / "t").meta()["status"] == "finished"
    assert Run.open(tmp_path / "t").meta()["trial"] == [[["config", "lr"], 0.1]]
    assert newest(tmp_path / "t").state["progress"]["iterations"] == 3


def test_a_finished_trial_is_not_trained_again(tmp_path: Path) -> None:
    one = attempt(tmp_path / "t", experiment(2))
    one.advance()
    last = dict(one.advance())
    before = (tmp_path / "t" / "metrics.jsonl").read_bytes()
    again = dict(attempt(tmp_path / "t", experiment(2)).advance())
    assert again[OVER] == FINISHED
    assert again[SCORE] == pytest.approx(last[SCORE])
    assert (tmp_path / "t" / "metrics.jsonl").read_bytes() == before


def test_a_closed_trial_goes_on_counting_from_where_it_was(tmp_path: Path) -> None:
    one = attempt(tmp_path / "t")
    for _ in range(3):
        one.advance()
    one.close()
    one.close()
    assert Run.open(tmp_path / "t").meta()["status"] == "interrupted"
    two = attempt(tmp_path / "t")
    assert two.advance()["iterations"] == 4
    two.close()
    assert [row["iterations"] for row in read_jsonl(tmp_path / "t" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_the_score_is_the_metric_and_less_of_it_can_be_better(tmp_path: Path) -> None:
    up = attempt(tmp_path / "up", metric="episode_return_mean")
    down = attempt(tmp_path / "down", metric="episode_return_mean", mode="min")
    nothing = attempt(tmp_path / "nothing", metric="no_such_number")
    try:
        assert up.advance()[SCORE] == 5.0  # of tests.environments.Count
        assert down.advance()[SCORE] == -5.0
        assert nothing.advance()[SCORE] == trial.WORST_SCORE
    finally:
        for one in (up, down, nothing):
            one.close()


def test_taking_over_copies_weights_and_optimizer_and_counts_on(tmp_path: Path) -> None:
    bad, good = attempt(tmp_path / "bad", experiment(seed=1, lr=1e-5)), attempt(tmp_path / "good", experiment(seed=2, lr=1e-2))
    for _ in range(2):
        bad.advance()
    for _ in range(5):
        good.advance()
    pointer = json.loads(json.dumps(good.checkpoint()))
    good.close()
    bad.close()
    theirs = newest(tmp_path / "good")

    values = [[["config", "lr"], 3e-3], [["config", "seed"], 2]]
    changed = attempt(tmp_path / "bad", experiment(seed=2, lr=3e-3), pointer=pointer, values=values)
    taken = newest(tmp_path / "bad")
    same_weights(taken, theirs)
    for name, value in theirs.arrays["model"].items():
        np.testing.assert_array_equal(taken.arrays["model"][name], value, err_msg=name)
    assert taken.state["progress"]["iterations"] == 2
    assert taken.state["progress"]["recent_returns"] == theirs.state["progress"]["recent_returns"]
    config = Run.open(tmp_path / "bad").config()["config"]
    assert config["lr"] == 3e-3
    assert config["seed"] == 1  # its own, although the rest is another's
    assert Run.open(tmp_path / "bad").meta()["trial"] == [[["config", "lr"], 3e-3], [["config", "seed"], 1]]
    assert changed.advance()["iterations"] == 3
    changed.close()
    after = newest(tmp_path / "bad")
    assert any((after.weights["model"][name] != value).any() for name, value in theirs.weights["model"].items())


def test_what_was_taken_over_once_is_not_taken_over_again_after_a_crash(tmp_path: Path) -> None:
    bad, good = attempt(tmp_path / "bad"), attempt(tmp_path / "good", experiment(seed=2))
    for one in (bad, good):
        one.advance()
    pointer = good.checkpoint()
    for one in (bad, good):
        one.close()
    changed = attempt(tmp_path / "bad", pointer=pointer)
    for _ in range(3):
        changed.advance()
    changed.close()
    again = attempt(tmp_path / "bad", pointer=pointer)
    assert again.advance()["iterations"] == 5  # 1, then 3 after it was taken over, and this one
    again.close()
    assert len(Run.open(tmp_path / "bad").meta()["exploited"]) == 1


def test_a_checkpoint_that_is_gone_is_replaced_by_a_newer_one_of_its_run(tmp_path: Path) -> None:
    good = attempt(tmp_path / "good")
    good.advance()
    good.checkpoint()
    good.advance()
    good.close()
    pointer = {"run": str(tmp_path / "good"), "checkpoint": "000000"}
    other = attempt(tmp_path / "other", experiment(seed=5), pointer=pointer)
    same_weights(newest(tmp_path / "other"), newest(tmp_path / "good"))
    other.close()


def test_an_environment_that_breaks_fails_the_trial_and_what_was_learned_is_kept(tmp_path: Path) -> None:
    data = experiment() | {"env": "tests.environments:make_faulty"}
    data["config"] |= {"env_config": {"fault": "raises in step", "at": 40}}
    one = attempt(tmp_path / "t", data)
    with pytest.raises(EnvironmentFault, match="the game crashed"):
        exhaust(one)
    meta = Run.open(tmp_path / "t").meta()
    assert meta["status"] == "failed"
    assert "the game crashed" in meta["error"]
    assert newest(tmp_path / "t").state["progress"]["iterations"] >= 1


def test_a_config_that_cannot_be_is_the_end_of_the_trial_and_not_tried_again(tmp_path: Path) -> None:
    one = attempt(tmp_path / "t", experiment(gamma=2.0))
    assert one.advance()[OVER] == FAILED


def test_two_processes_never_train_one_trial_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_LOCK_TIMEOUT_S", 0.2)
    one = attempt(tmp_path / "t")
    with pytest.raises(WorkerFailed, match="Another process has been busy"):
        attempt(tmp_path / "t")
    one.close()
    attempt(tmp_path / "t").close()


def test_the_first_weights_are_the_same_on_any_number_of_threads() -> None:
    """A trial of a sweep has one, a training by hand has as many as there are cores: the same seed is the same run."""
    made = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            made.append(make_policy(Box(-1, 1, (4,)), Discrete(2), parse_algorithm_config(PPOConfig, {"seed": 3})).weights())
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
    for name, value in made[0].items():
        np.testing.assert_array_equal(made[1][name], value, err_msg=name)
