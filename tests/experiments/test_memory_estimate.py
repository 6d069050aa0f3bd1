"""The memory of a run is estimated before it starts, and one that the machine does not have is refused with the figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ludus.errors import ConfigError
from ludus.experiments import runner
from ludus.experiments.assembly import memory_estimate
from ludus.experiments.assembly.memory_estimate import EXPERIENCE, INPUTS, MODEL, REPLAY, estimate, step_bytes
from ludus.experiments.assembly.policies import make_policy
from ludus.experiments.resolve import resolve
from ludus.models.policy import Policy
from tests.experiments import small


def made(observation: gym.Space[Any], **settings: Any) -> tuple[dict[str, Policy], Any]:
    config = resolve(small.data(**settings)).config
    return {"model": make_policy(observation, small.ACTION, config)}, config


def test_blocks_are_counted_for_every_worker() -> None:
    policies, config = made(gym.spaces.Box(0, 255, (84, 84, 4), np.uint8))
    step = step_bytes(policies["model"])
    assert 84 * 84 * 4 < step < 84 * 84 * 4 + 64
    block = step * 8 * (config.steps + 1)
    assert estimate(policies, config).parts[EXPERIENCE] == block
    assert estimate(policies, config, workers=3).parts[EXPERIENCE] == block * (1 + 3 * config.blocks_ahead)


def test_the_model_is_counted_with_gradient_and_moments_and_once_a_worker() -> None:
    policies, config = made(small.OBSERVATION)
    weights = sum(p.numel() * 4 for p in policies["model"].parameters())
    assert estimate(policies, config).parts[MODEL] == 4 * weights
    assert estimate(policies, config, workers=2).parts[MODEL] == 6 * weights


def test_wide_inputs_are_counted_for_a_minibatch() -> None:
    policies, config = made(gym.spaces.MultiDiscrete([1000] * 50))
    assert estimate(policies, config).parts[INPUTS] == 64 * 50_000 * 4


def test_a_replay_buffer_holds_no_more_than_the_run_samples() -> None:
    data = {"env": "CartPole-v1", "run": "DQN", "config": {"replay_buffer_config": {"capacity": 40_000}}}
    config = resolve(data).config
    policies = {"model": make_policy(small.OBSERVATION, small.ACTION, config)}
    step = step_bytes(policies["model"])
    assert estimate(policies, config).parts[REPLAY] == 40_000 * step
    assert estimate(policies, config, timesteps=500).parts[REPLAY] == 500 * step


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_does_not_fit_is_refused_before_it_begins(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_estimate, "free_memory", lambda: 4096)
    data = small.data(num_workers=workers)
    with pytest.raises(
        ConfigError, match=r"needs at least [\d.]+ KB of memory \(.*of experience.*\), and 4\.0 KB are free\. Lower"
    ):
        runner.train(data, project=tmp_path, trial="run", supervised=False)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_what_fits_or_cannot_be_known_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (memory_estimate.free_memory() or 1) > 0
    monkeypatch.setattr(memory_estimate, "free_memory", lambda: None)
    assert small.train(tmp_path / "run", 1).stopped_by
