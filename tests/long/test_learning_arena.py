"""The Arena can be learned: its masks, spaces and rewards fit our networks and algorithms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ludus

pytestmark = pytest.mark.long


@pytest.mark.parametrize("workers", [0, 2])
def test_ppo_gets_better_against_a_script(tmp_path: Path, workers: int) -> None:
    """Measured: from −34 to −22 in 385,000 decisions, in matches of three minutes against `easy`."""
    result = ludus.train(
        "ludus/Arena-1v1-v0",
        stop={"timesteps": 400_000},
        env_config={"opponent": "easy", "seconds": 180, "start": "lane"},
        num_workers=workers,
        num_envs_per_worker=32 // max(1, workers),
        rollout_fragment_length=128,
        train_batch_size=4096,
        num_epochs=4,
        lr=3e-4,
        entropy_coeff=0.01,
        model={"fcnet_hiddens": [128, 128], "fcnet_activation": "relu"},
        local_dir=tmp_path,
        seed=1,
    )
    (path,) = tmp_path.rglob("metrics.jsonl")
    returns = [json.loads(line).get("episode_return_mean") for line in path.read_text(encoding="utf-8").splitlines()]
    known = [value for value in returns if value is not None]
    assert result.metrics["episode_return_mean"] >= known[0] + 5
