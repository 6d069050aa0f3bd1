"""Atari through its own vector implementation: sampled, trained on, rolled out and filmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import ludus
from ludus.config.schema import PreprocessConfig
from ludus.envs.preprocessing import for_evaluation
from ludus.envs.vector_env import LoopEnvironments, SingleRow, VectorEnvironments, make_environments, make_one
from ludus.errors import ConfigError, UsageError
from ludus.experiments.evaluation import rollout

pytest.importorskip("ale_py", reason="pip install 'ludus[atari]'")
PONG = "ALE/Pong-v5"


def test_pong_is_stepped_by_its_native_vector_environment() -> None:
    environments = make_environments(PONG, 2)
    assert isinstance(environments, VectorEnvironments)
    seen = environments.reset(0)
    assert seen.observation.shape == (2, 4, 84, 84)
    outcome = environments.step(np.array([2, 3]))
    assert outcome.observations.observation.dtype == np.uint8
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
    played = rollout.play(result.agent, env, PONG, episodes=1, max_steps=20, files=rollout.RolloutFiles(tmp_path / "steps.npz"))
    env.close()
    assert played.steps_file is not None
    steps = np.load(played.steps_file)
    assert steps["observation"].shape == (20, 4, 84, 84)
    assert steps["action"].shape == steps["reward"].shape == (20,)

    filmed = make_one(PONG, render_mode="rgb_array")
    assert filmed.observation_space.shape == (4, 84, 84)
    played = rollout.play(
        result.agent, filmed, PONG, episodes=1, max_steps=10, files=rollout.RolloutFiles(video=tmp_path / "pong.mp4")
    )
    filmed.close()
    assert played.video is not None
    assert played.video.stat().st_size > 500


def test_older_names_are_the_same_games_without_ignored_actions() -> None:
    seen = [make_environments(name, 1) for name in ("PongNoFrameskip-v4", "ALE/Pong-v5")]
    for environments in seen:
        assert isinstance(environments, VectorEnvironments)
        assert environments.reset(0).observation.shape == (1, 4, 84, 84)
        environments.close()


def test_preprocessing_is_done_by_the_vector_environment_and_alike_by_a_game_that_can_be_filmed() -> None:
    settings = PreprocessConfig(grey=False, resize=(40, 50), stack=2, frame_skip=2, noop_max=0, max_episode_steps=6)
    game = {"repeat_action_probability": 0.0, "use_fire_reset": False}
    environments = make_environments("ALE/Breakout-v5", 2, game, preprocess=settings)
    filmed = make_one("ALE/Breakout-v5", game, "rgb_array", preprocess=settings)
    assert isinstance(environments, VectorEnvironments)
    assert environments.observation_space == filmed.observation_space == gym.spaces.Box(0, 255, (40, 50, 6), np.uint8)
    environments.reset(3)
    filmed.reset(seed=3)
    for step in range(6):
        outcome = environments.step(np.array([1, 1]))
        shown, *_ = filmed.step(1)
        far = np.abs(outcome.observations.observation[0].astype(int) - shown).max()
        assert far <= 2, f"step {step}: {far}"  # both take the mean of an area
    assert outcome.truncated.all()
    environments.close()
    filmed.close()


def test_a_lost_life_ends_an_episode_in_training_alone_and_the_game_goes_on() -> None:
    settings = PreprocessConfig(episodic_life=True, noop_max=0)
    environments = make_environments("BreakoutNoFrameskip-v4", 1, preprocess=settings)
    environments.reset(0)
    ends, rng = 0, np.random.default_rng(0)
    for _ in range(2000):
        outcome = environments.step(rng.integers(0, 4, 1))
        ends += int(outcome.terminated[0])
        if ends == 2:
            break
    assert ends == 2
    environments.close()
    judged = make_one("BreakoutNoFrameskip-v4", preprocess=settings)
    judged.reset(seed=0)
    lives = set()
    for _ in range(2000):
        _, _, terminated, _, info = judged.step(int(rng.integers(4)))
        lives.add(int(info["lives"]))
        if terminated:
            break
    assert lives == {5, 4, 3, 2, 1, 0}
    judged.close()


def test_rewards_are_clipped_in_training_and_are_the_points_of_the_game_in_evaluations() -> None:
    def most(environments: Any, steps: int = 80) -> float:
        environments.reset(0)
        rng = np.random.default_rng(0)
        found = max(float(environments.step(rng.integers(0, 6, 2)).reward.max()) for _ in range(steps))
        environments.close()
        return found

    game = "SpaceInvadersNoFrameskip-v4"
    assert most(make_environments(game, 2)) == 1
    assert most(make_environments(game, 2, preprocess=for_evaluation(PreprocessConfig()))) >= 5
    assert most(make_environments(game, 2, preprocess=PreprocessConfig(clip_reward=(-1, 3)))) == 3


def test_the_standard_preprocessing_can_be_switched_off_and_is_not_contradicted() -> None:
    raw = make_environments(PONG, 1, preprocess=PreprocessConfig(standard=False, grey=True, resize=(42, 42)))
    assert isinstance(raw, LoopEnvironments)
    assert raw.reset(0).observation.shape == (1, 42, 42, 1)
    raw.close()
    with pytest.raises(ConfigError, match="env_config sets frameskip to 2, but preprocess sets frame_skip otherwise"):
        make_environments(PONG, 1, {"frameskip": 2}, preprocess=PreprocessConfig(frame_skip=4))
    with pytest.raises(ConfigError, match=r"preprocess\.flatten does not apply to the images"):
        make_environments(PONG, 1, preprocess=PreprocessConfig(flatten=True))
    with pytest.raises(ConfigError, match=r"Set preprocess\.episodic_life"):
        make_environments(PONG, 1, {"episodic_life": True})


def test_a_keyword_that_a_single_game_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be rendered with xla"):
        make_one(PONG, {"xla": True}, "rgb_array")
