"""Training in a game that steps many matches with one call gives the weights of training in single copies of OpenSpiel's game."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.core.metrics import read_jsonl
from ludus.experiments import runner
from tests.experiments.test_match_workers import assert_equal, weights_of

pytest.importorskip("pyspiel")

VECTOR, SINGLE = "ludus/ConnectFour-v0", "openspiel/connect_four"
SETTINGS: dict[str, Any] = {
    "num_envs_per_worker": 6,
    "train_batch_size": 240,
    "num_epochs": 2,
    "minibatch_size": 60,
    "model": {"fcnet_hiddens": [8]},
    "evaluation_duration": 5,
    "evaluation_interval": 1,
}


def train(env: str, where: Path, **settings: Any) -> Path:
    data = {"env": env, "run": "PPO", "stop": {"iterations": 3}, "config": {**SETTINGS, **settings}}
    return runner.train(data, local_dir=where, supervised=False).run_dir


@pytest.mark.parametrize(
    "settings",
    [
        {"multiagent": {"evaluation_opponents": "random"}},
        {"self_play": {"opponents": "mix", "latest": 0.5, "snapshot_every": 1}},
        {"num_workers": 2, "multiagent": {"centralized_value": True, "evaluation_opponents": "policies"}},
    ],
)
def test_weights_and_evaluations_are_those_of_single_copies(tmp_path: Path, settings: dict[str, Any]) -> None:
    vector, single = (train(env, tmp_path / str(number), **settings) for number, env in enumerate((VECTOR, SINGLE)))
    assert_equal(weights_of(vector), weights_of(single))
    name = "evaluation/return_mean"
    scores = [[line[name] for line in read_jsonl(run / "metrics.jsonl") if name in line] for run in (vector, single)]
    assert len(scores[0]) > 1
    assert scores[0] == scores[1]


def test_a_trained_policy_is_played_and_battles(tmp_path: Path) -> None:
    run = train(VECTOR, tmp_path)
    played = ludus.rollout(run, episodes=2, video=tmp_path / "video.mp4")
    assert len(played.returns) == 2
    assert (tmp_path / "video.mp4").stat().st_size > 0
    assert len(ludus.battle(run, "rule:random", games=4).games) == 4
