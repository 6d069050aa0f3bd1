"""Atari through its own vector implementation: sampled, trained on, rolled out and filmed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ludus
from ludus.errors import UsageError
from ludus.experiment import rollout
from ludus.game.environment import SingleRow, VectorEnvironments, make_environments, make_one

pytest.importorskip("ale_py", reason="pip install 'ludus[atari]'")
PONG = "ALE/Pong-v5"


def test_pong_is_stepped_by_its_native_vector_environment() -> None:
    environments = make_environments(PONG, 2)
    assert isinstance(environments, VectorEnvironments)
    seen = environments.reset(0)
    assert seen.observation.shape == (2, 4, 84, 84)
    outcome = environments.step(np.array([2, 3]))
    assert outcome.seen.observation.dtype == np.uint8
    assert not outcome.terminated.any()
    environments.close()


def test_a_trained_atari_agent_is_rolled_out_on_what_it_was_trained_on_and_can_be_filmed(tmp_path: Path) -> None:
    result = ludus.train(
        PONG,
        stop={"iterations": 1},
        local_dir=tmp_path,
        num_envs=2,
        train_batch_size=32,
        minibatch_size=32,
        num_epochs=1,
        evaluation_duration=0,
    )
    env = make_one(PONG)
    assert isinstance(env, SingleRow)
    played = rollout.play(result.agent, env, PONG, episodes=1, max_steps=20, steps_file=tmp_path / "steps.npz")
    env.close()
    assert played.steps_file is not None
    steps = np.load(played.steps_file)
    assert steps["observation"].shape == (20, 4, 84, 84)
    assert steps["action"].shape == steps["reward"].shape == (20,)

    filmed = make_one(PONG, render_mode="rgb_array")
    assert filmed.observation_space.shape == (4, 84, 84)
    played = rollout.play(result.agent, filmed, PONG, episodes=1, max_steps=10, video=tmp_path / "pong.mp4")
    filmed.close()
    assert played.video is not None
    assert played.video.stat().st_size > 500


def test_a_keyword_that_a_single_game_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be filmed with xla"):
        make_one(PONG, {"xla": True}, "rgb_array")
