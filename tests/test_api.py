"""The Python API: train, load, act."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ludus
from ludus.errors import UsageError
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
    played = ludus.rollout(doors.run_dir, 3, deterministic=False, out=tmp_path / "x.npz", save_info=True)
    assert played.lengths == [4, 4, 4]
    steps = np.load(tmp_path / "x.npz")
    assert steps["episode"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert set(steps["action.door"].tolist()) <= {0, 1}
    assert steps["observation.observation"].shape == (12, 2)
    assert steps["info"].tolist() == ["{}"] * 12
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"], "nothing is left beside it"


@pytest.mark.parametrize(
    ("observation", "complaint"),
    [(np.zeros(3), "shape"), ({"a": 1}, "does not fit"), (np.array(["x", "y"]), "contains text")],
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


# -- batches ------------------------------------------------------------------------------------------------------------


def test_a_batch_of_observations_gives_the_actions_of_its_rows(doors: ludus.Result) -> None:
    agent, rng = doors.agent, np.random.default_rng(0)
    state: Any = None
    alone: list[Any] = [None] * 5
    for step in range(3):
        seen: dict[str, Any] = {
            "observation": rng.normal(size=(5, 2)).astype(np.float32),
            "action_mask": np.ones((5, 3), np.int8),
        }
        seen["action_mask"][step, 0] = 0
        actions, state = agent.act(seen, state)
        for row in range(5):
            one, alone[row] = agent.act({key: value[row] for key, value in seen.items()}, alone[row])
            assert actions["door"][row] == one["door"]
            assert actions["aim"][row] == pytest.approx(one["aim"], abs=1e-5)


def test_rows_that_begin_an_episode_forget(doors: ludus.Result) -> None:
    seen = np.random.default_rng(1).normal(size=(2, 2)).astype(np.float32)
    _, state = doors.agent.act(seen)
    _, fresh = doors.agent.act(seen)
    _, again = doors.agent.act(seen, state, episode_start=[True, False])
    assert torch.allclose(again[0][0], fresh[0][0], atol=1e-6)
    assert not torch.allclose(again[0][1], fresh[0][1], atol=1e-6)


@pytest.mark.parametrize(
    ("observation", "more", "complaint"),
    [
        (np.zeros((4, 3)), {}, r"shape \[4, 3\]"),
        (np.zeros((4, 2)), {"mask": np.ones((3, 3))}, "mask"),
        (np.zeros((4, 2)), {"mask": np.eye(4, 3)}, "forbids every action"),
        (np.zeros((4, 2)), {"episode_start": [True]}, "episode_start has shape"),
        (np.full((4, 2), np.nan), {}, "contains nan"),
    ],
    ids=str,
)
def test_a_batch_that_does_not_fit_is_refused(doors: ludus.Result, observation: Any, more: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        doors.agent.act(observation, **more)


def test_a_state_of_another_batch_is_refused(doors: ludus.Result) -> None:
    _, state = doors.agent.act(np.zeros((3, 2)))
    with pytest.raises(UsageError, match="3 rows, the observation has 2"):
        doors.agent.act(np.zeros((2, 2)), state)


# -- an agent that knows its run ----------------------------------------------------------------------------------------


def test_an_agent_is_evaluated_where_it_was_trained_as_the_run_is(doors: ludus.Result) -> None:
    by_run = ludus.evaluate(doors, 6, seed=3, deterministic=False)
    by_agent = doors.agent.evaluate(6, seed=3, deterministic=False)
    assert by_agent == ludus.load(doors.run_dir).evaluate(6, seed=3, deterministic=False) == by_run
    assert len(by_agent.returns) == 6
    assert by_agent.low <= by_agent.mean <= by_agent.high


def test_an_agent_is_evaluated_with_the_preprocessing_of_its_run(tmp_path: Path) -> None:
    """Else its observations would not even fit."""
    result = ludus.train(
        "CartPole-v1", stop={"iterations": 1}, local_dir=tmp_path, preprocess={"stack": 2, "max_episode_steps": 7}, **SMALL
    )
    assert max(result.agent.evaluate(3).lengths) <= 7
    assert result.agent.evaluate(2, env="CartPole-v0").returns


def test_an_agent_is_exported_and_the_file_acts_like_it(tmp_path: Path) -> None:
    result = ludus.train("CartPole-v1", stop={"iterations": 1}, local_dir=tmp_path / "runs", **SMALL)
    told = result.agent.export(tmp_path / "agent.onnx")
    assert told.file == tmp_path / "agent.onnx"
    assert told.report.passed
    assert (told.report.version, told.report.model) == (result.agent.version, "model")
    usual = ludus.load(result.run_dir).export()
    assert usual.file is not None
    assert usual.file.parent == result.run_dir / "exports"
    assert usual.sha256 == told.sha256
