"""Several agents learn what their presets promise, and to talk to each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.config.experiment_file import load_experiments
from ludus.experiments import runner
from ludus.experiments.source import preset_index

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", ["simple-spread", "speaker-listener", "tictactoe"])
def test_the_presets_with_several_agents_reach_their_targets(tmp_path: Path, name: str) -> None:
    ((_, data),) = load_experiments(preset_index.preset(name)).items()
    data["config"]["seed"] = 11
    result = runner.train(data, project=tmp_path, trial="run")
    assert result.metrics["evaluation/return_mean"] >= data["target"]["return_mean"]
    assert result.metrics["timesteps"] <= 1.05 * data["target"]["timesteps"]


@pytest.mark.parametrize("central", [False, True])
def test_a_speaker_and_a_listener_agree_on_words(tmp_path: Path, central: bool) -> None:
    """Five steps, a point for each of the two whenever the listener names the number; the first time nothing was said yet."""
    data = {
        "env": "tests.matches:make_roles",
        "stop": {"timesteps": 30_000},
        "config": {
            "num_envs_per_worker": 16,
            "train_batch_size": 800,
            "minibatch_size": 200,
            "num_epochs": 8,
            "lr": 3e-3,
            "entropy_coeff": 0.02,
            "gamma": 0.9,
            "evaluation_duration": 200,
            "multiagent": {"policies": ["speaker", "listener"], "centralized_value": central},
        },
    }
    result = runner.train(data, project=tmp_path, trial="run")
    assert result.metrics["evaluation/return_mean"] >= 0.9 * 2 * (4 + 1 / 3)
