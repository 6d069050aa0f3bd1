"""The Python API: train, load, act."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ludus
from ludus.errors import UsageError
from ludus.experiment import rollout
from ludus.game.environment import make_one
from tests.games import RememberAndAim

SMALL: dict[str, Any] = {"num_envs": 4, "train_batch_size": 64, "minibatch_size": 32, "evaluation_duration": 0}


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> ludus.Result:
    """An agent with masks, memory and a hybrid action."""
    where = tmp_path_factory.mktemp("doors")
    model = {"use_lstm": True, "lstm_cell_size": 8}
    return ludus.train("tests.games:remember_and_aim", stop={"iterations": 2}, local_dir=where, model=model, **SMALL)


def test_a_loaded_agent_acts_as_the_trained_one(doors: ludus.Result) -> None:
    loaded = ludus.load(doors.run_dir)
    env = RememberAndAim()
    observation, _ = env.reset(seed=1)
    mine = theirs = None
    for _ in range(4):
        a, mine = doors.agent.act(observation, mine)
        b, theirs = loaded.act(observation, theirs)
        assert a["door"] == b["door"]
        assert a["aim"] == pytest.approx(b["aim"], abs=1e-6)
        observation, *_ = env.step(a)
    assert loaded.version == doors.agent.version


def test_the_mask_counts_whether_inside_the_observation_or_given(doors: ludus.Result) -> None:
    seen = np.zeros(2, np.float32)
    for door in range(3):
        only = np.arange(3) == door
        inside, _ = doors.agent.act({"observation": seen, "action_mask": only})
        given, _ = doors.agent.act({"observation": seen, "action_mask": np.ones(3)}, mask=only)
        assert inside["door"] == given["door"] == door
    with pytest.raises(UsageError, match="forbids every action"):
        doors.agent.act(seen, mask=np.zeros(3))


def test_a_recurrent_masked_hybrid_agent_is_rolled_out_into_one_file(doors: ludus.Result, tmp_path: Path) -> None:
    env = make_one("tests.games:remember_and_aim")
    played = rollout.play(
        doors.agent, env, "doors", episodes=3, deterministic=False, steps_file=tmp_path / "x.npz", save_info=True
    )
    assert played.lengths == [4, 4, 4]
    steps = np.load(tmp_path / "x.npz")
    assert steps["episode"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert set(steps["action.door"].tolist()) <= {0, 1}
    assert steps["observation.observation"].shape == (12, 2)
    assert steps["info"].tolist() == ["{}"] * 12
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"], "nothing is left beside it"


@pytest.mark.parametrize(
    ("observation", "complaint"),
    [(np.zeros(3), "shape"), ({"a": 1}, "does not fit"), (np.array(["x", "y"]), "holds text")],
)
def test_an_observation_that_does_not_fit_is_refused(doors: ludus.Result, observation: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        doors.agent.act(observation, mask=np.ones(3))


def test_a_new_run_from_a_checkpoint_has_its_weights_and_counts_from_zero(tmp_path: Path) -> None:
    first = ludus.train("CartPole-v1", stop={"iterations": 3}, local_dir=tmp_path, lr=0.0, **SMALL)
    second = ludus.train(
        "CartPole-v1", stop={"iterations": 2}, local_dir=tmp_path, restore=first.run_dir, lr=0.0, seed=9, **SMALL
    )
    assert second.metrics["iterations"] == 2
    assert second.agent.version > first.agent.version
    for name, value in first.agent.policy.weights().items():
        assert (second.agent.policy.weights()[name] == value).all(), name


def test_a_run_is_resumed_from_python_and_the_callers_threads_are_left_as_they_were(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    first = ludus.train("CartPole-v1", stop={"iterations": 2}, local_dir=tmp_path, torch_threads=before + 1, **SMALL)
    second = ludus.resume(first.run_dir, stop={"iterations": 4})
    assert (second.run_dir, second.metrics["iterations"]) == (first.run_dir, 4)
    assert torch.get_num_threads() == before
