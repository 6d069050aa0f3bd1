"""Workers that sample while the learner learns: what comes is older than what learns, and games are learned all the same."""

from __future__ import annotations

from typing import Any

import pytest

import ludus

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("run", "settings"),
    [
        ("APPO", {}),
        ("IMPALA", {}),
        ("APPO", {"target_network_update_freq": 4, "num_epochs": 2}),
        ("APPO", {"replay_proportion": 1.0, "replay_buffer_num_slots": 8}),
        ("APPO", {"vtrace": False}),
        ("PPO", {"sampling": "pipelined", "train_batch_size": 2048}),
    ],
    ids=["APPO", "IMPALA", "APPO with a target of its own", "APPO with replay", "APPO without V-trace", "PPO, pipelined"],
)
def test_cartpole_is_learned_from_two_workers(tmp_path: Any, run: str, settings: dict[str, Any]) -> None:
    result = ludus.train(
        "CartPole-v1",
        run=run,
        stop={"episode_return_mean": 300, "timesteps": 1_000_000},
        local_dir=tmp_path,
        **(
            {"seed": 1, "num_workers": 2, "num_envs": 16, "train_batch_size": 512, "lr": 1e-3, "evaluation_duration": 20}
            | settings
        ),
    )
    assert result.stopped_by == "episode_return_mean"
    assert result.metrics["learner/lag_max"] >= 1
    assert result.metrics["evaluation/return_mean"] >= 195
