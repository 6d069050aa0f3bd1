"""Whole runs on several learners: the same result as on one, and nothing asked for that is not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ludus
from ludus.errors import ConfigError
from ludus.experiments.resolve import resolve
from ludus.experiments.runs import checkpoint


def trained(tmp_path: Path, learners: int) -> ludus.Result:
    return ludus.train(
        "CartPole-v1",
        stop={"iterations": 3},
        local_dir=tmp_path,
        num_learners=learners,
        num_envs=8,
        train_batch_size=512,
        minibatch_size=128,
        evaluation_duration=0,
    )


def test_two_learners_leave_the_checkpoint_that_one_leaves(tmp_path: Path) -> None:
    one, two = trained(tmp_path / "one", 1), trained(tmp_path / "two", 2)
    assert two.metrics["learner/learners"] == 2
    assert two.episode_return_mean == one.episode_return_mean or np.isnan(one.episode_return_mean)
    first, second = (checkpoint.open_checkpoint(result.run_dir)[1] for result in (one, two))
    for name, value in first.weights["model"].items():
        assert second.weights["model"][name] == pytest.approx(value, abs=1e-4), name
    assert (two.run_dir / "logs" / "learner" / "learner-1.log").exists()


@pytest.mark.parametrize("setting", [{"num_gpus": 1}, {"learner_device": "cuda:99"}, {"inference_device": "gpu"}])
def test_a_device_that_is_not_there_is_refused_before_anything_starts(setting: dict[str, object]) -> None:
    key = next(iter(setting))
    if key == "num_gpus":
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("needs a machine without accelerators")
    with pytest.raises(ConfigError, match=key):
        resolve({"env": "CartPole-v1", "config": setting})
