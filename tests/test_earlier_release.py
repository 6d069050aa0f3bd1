"""Runs, checkpoints, exports and rollouts that release 0.1 wrote are read by this one. Its modules had other names."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import ludus
import ludus.game
from ludus.core import plugins, renamed
from ludus.core.trust import consent
from ludus.experiments import runner
from ludus.experiments.runs import compare
from ludus.models.inference.onnx_policy import OnnxPolicy
from ludus.models.policy import Policy
from ludus.models.weights import module_spec

RELEASE = Path(__file__).parent / "old" / "release-0.1"
RETURNS = [96.0, 100.0, 161.0, 72.0]
"""Of four episodes from seed 3, as release 0.1 played them with this checkpoint."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RELEASE / "cartpole", tmp_path / "cartpole"))


def test_an_agent_plays_as_it_did(run: Path) -> None:
    assert ludus.rollout(run, episodes=4, seed=3).returns == RETURNS


def test_a_run_is_resumed(run: Path) -> None:
    result = ludus.resume(run, stop={"timesteps": 900})
    assert result.run_dir == run
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["timesteps"] >= 900


def test_a_run_that_names_modules_by_their_old_names_is_resumed(tmp_path: Path) -> None:
    run = shutil.copytree(RELEASE / "names", tmp_path / "names")
    ludus.resume(run, stop={"timesteps": 600})


def test_a_new_run_starts_from_a_checkpoint_that_names_modules_by_their_old_names(tmp_path: Path) -> None:
    run = shutil.copytree(RELEASE / "names", tmp_path / "names")
    settings = {"num_envs_per_worker": 4, "train_batch_size": 128, "minibatch_size": 64, "model": {"fcnet_hiddens": [8]}}
    env = "ludus.envs.toy_envs:cartpole_without_velocities"
    data = {"env": env, "stop": {"timesteps": 256}, "config": settings}
    result = runner.train({"name": "restored", **data}, local_dir=tmp_path / "runs", restore=run)
    assert result.run_dir != run


def test_runs_of_both_releases_are_compared_as_one_environment() -> None:
    settings = compare.settings_of(RELEASE / "names")
    assert settings["env"] == "ludus.envs.toy_envs:cartpole_without_velocities"
    assert settings["run"] == "ludus.algorithms.ppo:PPO"


def test_documented_import_paths_of_the_clients_still_work() -> None:
    assert importlib.import_module("ludus.game.client").Client is ludus.game.Client
    assert importlib.import_module("ludus.game.gamecore").GamecoreClient is ludus.GamecoreClient


def test_an_exported_agent_acts_as_recorded() -> None:
    pytest.importorskip("onnxruntime")
    steps = np.load(RELEASE / "steps.npz")
    acted = OnnxPolicy(RELEASE / "agent.onnx").act(steps["observation"])
    np.testing.assert_array_equal(acted.action, steps["action"])


def test_a_rollout_is_read() -> None:
    episodes = ludus.read_rollout(RELEASE / "steps.npz")
    assert [float(episode["reward"].sum()) for episode in episodes] == RETURNS


def test_a_stored_description_is_that_of_the_present_class() -> None:
    stored = json.loads((RELEASE / "cartpole" / "models" / "model" / "model.json").read_text())
    assert stored["class"] == "ludus.model.policy:Policy"
    policy = Policy.from_description(stored)
    assert module_spec.same(stored, policy.description())


@pytest.mark.parametrize("old", sorted(renamed.MODULES))
def test_every_old_module_name_leads_to_a_module(old: str) -> None:
    module = plugins.import_module(renamed.MODULES[old], old)
    assert module.__name__ == renamed.MODULES[old]


def test_old_names_are_trusted_like_the_present_ones() -> None:
    with consent(False):
        found = plugins.import_object("ludus.model.policy:Policy", "model", lambda found, _: isinstance(found, type))
    assert found is Policy
