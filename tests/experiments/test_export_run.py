"""What an agent sees, found for whoever quantises it: in a rollout, or by playing a little."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ludus.experiments.export_run import PLAY_STEPS, observations_of
from ludus.experiments.runs import checkpoint
from ludus.models.inference.onnx_policy import OnnxPolicy
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.serving.checkpoint_follower import CheckpointFollower, CheckpointSource, UpdateSettings
from ludus.storage.local import LocalStore
from tests.experiments import small
from tests.tools import network_of


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(where: Path, env: str = "CartPole-v1") -> tuple[Path, Policy]:
    """A run of an agent that is sure of what it does, so that rounding changes nothing."""
    algorithm = small.make_ppo(network=NetworkConfig(fcnet_hiddens=(16, 16)))
    with torch.no_grad():
        network_of(algorithm.policy).head.weight.normal_(std=10.0, generator=torch.Generator().manual_seed(0))
        network_of(algorithm.policy).head.bias.copy_(torch.tensor([0.0, 25.0]))
    config = {"run": "PPO", "env": env, "config": {}}
    checkpoint.write(LocalStore(where), 1, {"model": algorithm}, {"model": 4}, {}, {"config": config})
    return where, algorithm.policy


def test_without_a_rollout_the_agent_plays_if_it_may(tmp_path: Path) -> None:
    run, policy = made(tmp_path / "run")
    seen = observations_of(run, policy, play=True, within_s=60)
    assert seen is not None
    assert seen.shape == (PLAY_STEPS, 4)
    assert np.abs(seen[:, 2]).max() < 0.5  # a pole that is played with, not numbers drawn from an unbounded space
    assert observations_of(run, policy, play=False, within_s=60) is None


def test_a_rollout_is_taken_before_anything_is_played(tmp_path: Path) -> None:
    run, policy = made(tmp_path / "run")
    recorded = np.random.default_rng(0).normal(size=(37, 4)).astype(np.float32)
    (run / "rollouts" / "one").mkdir(parents=True)
    np.savez(run / "rollouts" / "one" / "steps.npz", observation=recorded)
    np.testing.assert_array_equal(observations_of(run, policy, play=False, within_s=60), recorded)


def test_what_cannot_be_had_is_not_an_error(tmp_path: Path) -> None:
    run, policy = made(tmp_path / "run")
    assert observations_of(run, policy, play=True, within_s=0.0) is None  # too slow
    assert observations_of(tmp_path / "nowhere", policy, play=True, within_s=60) is None
    unknown, policy = made(tmp_path / "unknown", env="NoSuchGame-v0")
    assert observations_of(unknown, policy, play=True, within_s=60) is None
    outside, policy = made(tmp_path / "outside", env="external")
    assert observations_of(outside, policy, play=True, within_s=60) is None


def test_int8_is_served_after_it_was_measured_on_what_the_agent_sees(tmp_path: Path) -> None:
    run, _ = made(tmp_path / "run")
    follower = CheckpointFollower(
        {"default": CheckpointSource(str(run))}, tmp_path / "service", UpdateSettings(backend="onnx-int8")
    )
    follower.open()
    (file,) = (tmp_path / "service").rglob("*.onnx")
    assert OnnxPolicy(file).precision == "int8"
    ((whose, seen),) = follower._observations.items()
    assert whose == ("default", "model")
    assert seen is not None
    assert seen.shape == (PLAY_STEPS, 4)
