"""Experiments with a network of the user's own: every algorithm, checkpoints, other processes, the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ludus
from ludus.errors import ConfigError, IncompatibleCheckpoint, UnknownName
from ludus.experiments import runner
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.run_dir import CONFIG
from ludus.models.custom import loader
from ludus.models.export import onnx_export
from ludus.models.inference.onnx_policy import OnnxPolicy
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.models.weights.serialization import encode_weights
from ludus.protocol.client import Client
from ludus.serving.release import Release, ReleasedModel, validate_release
from tests.cli.programs import program
from tests.experiments import small

NET = """
import torch
from torch import nn


class CustomModel(nn.Module):
    def __init__(self, obs_space, action_space, num_outputs, model_config, name, hidden=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_space.shape[0], hidden), nn.Tanh())
        self.head = nn.Linear(hidden, num_outputs)
        self.value = nn.Linear(hidden, 1)

    def forward(self, obs):
        self.features = self.body(obs)
        return self.head(self.features)

    def value_function(self):
        return self.value(self.features).squeeze(1)
"""
MEMORY = """
import torch
from torch import nn


class CustomModel(nn.Module):
    def __init__(self, obs_space, action_space, num_outputs, model_config, name):
        super().__init__()
        self.cell, self.again = nn.GRUCell(obs_space.shape[0], 8), nn.Linear(8, 8)
        self.head, self.value = nn.Linear(8, num_outputs), nn.Linear(8, 1)
        self.value.bias = self.head.bias if num_outputs == 1 else self.value.bias

    def initial_state(self, batch_size):
        return torch.zeros(batch_size, 8)

    def forward(self, obs, state):
        state = self.cell(obs, torch.tanh(self.again(state)))
        return self.head(state), self.value(state), state
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    (root / "model").mkdir(parents=True)
    (root / "model" / "net.py").write_text(NET)
    (root / "model" / "memory.py").write_text(MEMORY)
    monkeypatch.chdir(root)
    monkeypatch.delenv(loader.VARIABLE, raising=False)
    return root


def settings(name: str = "net", **more: Any) -> dict[str, Any]:
    return {**small.SETTINGS, "model": {"custom_model": name}, "evaluation_duration": 0, **more}


def test_a_model_that_cannot_be_learned_with_is_refused_before_there_is_a_run(project: Path) -> None:
    (project / "model" / "net.py").write_text(NET.replace("num_outputs)", "num_outputs + 1)"))
    with pytest.raises(ConfigError, match=r"shape \[5, 3\] for a batch of 5, not \[5, 2\]"):
        ludus.train("CartPole-v1", stop={"iterations": 1}, **settings())
    with pytest.raises(UnknownName, match="Did you mean 'net'"):
        ludus.train("CartPole-v1", stop={"iterations": 1}, **settings("nett"))
    with pytest.raises(ConfigError, match="use_lstm is set together with"):
        ludus.train("CartPole-v1", stop={"iterations": 1}, **settings(model={"custom_model": "net", "use_lstm": True}))
    assert not (project / "runs").exists()


@pytest.mark.parametrize("name", ["net", "memory"])
@pytest.mark.parametrize("run", ["PPO", "APPO", "IMPALA"])
def test_every_algorithm_learns_with_it(project: Path, run: str, name: str) -> None:
    given = {key: value for key, value in settings(name).items() if run == "PPO" or key not in ("minibatch_size", "num_epochs")}
    result = ludus.train("CartPole-v1", run, {"iterations": 2}, observation_filter="MeanStdFilter", learner_threads=2, **given)
    fresh = ludus.train("CartPole-v1", run, {"iterations": 1}, lr=0.0, **given)
    assert result.metrics["iterations"] == 2
    learned, begun = result.agent.policy.weights(), fresh.agent.policy.weights()
    moved = [key for key, value in begun.items() if not np.array_equal(value, learned[key])]
    assert sorted(moved) == sorted(begun)


def test_values_are_learned_with_it_too(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = NET.replace("return self.head(self.features)", "return self.head(self.features)  # of every action")
    (project / "model" / "net.py").write_text(
        text[: text.index("    def value_function")].replace("self.value = nn.Linear(hidden, 1)", "")
    )
    given: dict[str, Any] = {"num_envs_per_worker": 4, "evaluation_duration": 0, "model": {"custom_model": "net"}}
    given |= {"num_steps_sampled_before_learning_starts": 500, "hiddens": [16]}
    result = ludus.train("CartPole-v1", "DQN", {"timesteps": 1200}, **given)
    assert "config.hiddens is [16] and has no effect: custom_model net" in caplog.text
    seen = np.zeros((1, 4), np.float32)
    outputs = result.agent.policy.network(torch.from_numpy(seen), (), None)[0]
    assert result.agent.policy.act(seen).action[0] == outputs.argmax()


def test_a_run_is_taken_up_loaded_and_begun_from_by_the_name_alone(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ludus.train(
        "CartPole-v1", stop={"iterations": 2}, **settings(model={"custom_model": "net", "custom_model_config": {"hidden": 5}})
    )
    assert first.checkpoint is not None
    assert str(project) not in (first.run_dir / CONFIG).read_text()
    state = (project / first.checkpoint / "state.json").read_text()
    assert str(project) not in state
    assert "nn.Linear" not in state
    loaded = ludus.load(first.run_dir)
    seen = np.linspace(-1, 1, 4, dtype=np.float32)
    assert loaded.act(seen, deterministic=True)[0] == first.agent.act(seen, deterministic=True)[0]
    assert ludus.resume(first.run_dir, {"iterations": 3}).metrics["iterations"] == 3
    with pytest.raises(IncompatibleCheckpoint, match="another network"):
        ludus.train("CartPole-v1", stop={"iterations": 1}, restore=first.run_dir, **settings())
    where = first.run_dir.resolve()
    monkeypatch.chdir("/")
    with pytest.raises(IncompatibleCheckpoint, match="LUDUS_MODEL_PATH"):
        ludus.load(where)
    monkeypatch.setenv(loader.VARIABLE, str(project))
    assert ludus.load(where).version == checkpoint.open_checkpoint(where)[1].state["models"]["model"]["version"]


def test_a_release_is_tried_out_and_served_with_it(project: Path) -> None:
    policy = Policy(small.OBSERVATION, small.ACTION, NetworkConfig(custom_model="memory"))
    part = ReleasedModel(json.dumps(policy.description()).encode(), encode_weights(policy.weights()), 1)
    served = validate_release(Release(1, {"": "model"}, {"model": part}))["model"]
    seen, state = np.ones((3, 4), np.float32), tuple(spec.zeros(3) for spec in policy.state_spec())
    assert np.array_equal(served.act(seen, state).value, policy.act(seen, state).value)


@pytest.mark.long
def test_it_is_exported_with_its_memory_and_tied_weights(project: Path) -> None:
    text = MEMORY.replace("return torch.zeros", "assert self.again.weight is self.other.weight\n        return torch.zeros")
    text = text.replace(
        "self.head, self.value",
        "self.other = nn.Linear(8, 8); self.other.weight = self.again.weight\n        self.head, self.value",
    )
    text = text.replace("torch.tanh(self.again(state))", "torch.tanh(self.again(state) + self.other(state))")
    (project / "model" / "memory.py").write_text(text)
    policy = Policy(small.OBSERVATION, small.ACTION, NetworkConfig(custom_model="memory"))
    exported = OnnxPolicy(onnx_export.export_policy(policy))
    seen, state = np.ones((3, 4), np.float32), tuple(spec.zeros(3) for spec in policy.state_spec())
    for _ in range(3):
        mine, theirs = policy.act(seen, state), exported.act(seen, state)
        np.testing.assert_allclose(theirs.value, mine.value, atol=1e-5)
        np.testing.assert_allclose(theirs.state[0], mine.state[0], atol=1e-5)
        state = mine.state


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("self.features = self.body(obs) + (1 if obs.sum() > 0 else 2)", r"net\.py, line 14: .* use torch.where"),
        (
            "x = self.body(obs); self.features = x + torch.linalg.eigvalsh(x[:, :4].reshape(-1, 2, 2))[:, :1]",
            "aten.*has no ONNX equivalent",
        ),
    ],
)
def test_what_cannot_be_exported_says_why(project: Path, line: str, match: str, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "model" / "net.py").write_text(NET.replace("self.features = self.body(obs)", line))
    policy = Policy(small.OBSERVATION, small.ACTION, NetworkConfig(custom_model="net"))
    with pytest.raises(ludus.LudusError, match=match):
        onnx_export.export_policy(policy)
    assert "def forward" not in "".join(capfd.readouterr())


# -- commands, other processes ------------------------------------------------------------------------------------------


def ludus_command(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ludus.cli.main", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, env={**os.environ, **variables})


@pytest.mark.long
@pytest.mark.system
def test_a_whole_project_from_its_file_with_workers_and_learners_to_the_game(project: Path, tmp_path: Path) -> None:
    (project / "experiment.yaml").write_text(
        json.dumps({"own": small.data(3, num_workers=2, num_learners=2, model={"custom_model": "net"}) | {"checkpoint_freq": 1}})
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    trained = ludus_command("train", "-f", project / "experiment.yaml", "--json", "-q", cwd=elsewhere)
    assert trained.returncode == 0, trained.stderr
    run = elsewhere / json.loads(trained.stdout.splitlines()[-1])["run_dir"]
    lost = ludus_command("train", "--resume", run, "--stop", "iterations=4", "-q", cwd=elsewhere)
    assert lost.returncode == 2
    assert "LUDUS_MODEL_PATH" in lost.stderr
    resumed = ludus_command("train", "--resume", run, "--stop", "iterations=4", "-q", cwd=project)
    assert resumed.returncode == 0, resumed.stderr
    with program("serve", run, "--port", "0", "--json", listens=False) as running:  # this process stands in the project
        port = int(json.loads(running.wait_for('"port"'))["port"])
        with Client(f"http://127.0.0.1:{port}") as client:
            client.start("one")
            reply = client.tick("one", json.dumps({"observation": [0.0, 0.1, 0.0, 0.1]}).encode())
            assert json.loads(reply)["action"] in (0, 1)


@pytest.mark.long
@pytest.mark.system
def test_a_class_of_the_users_script_goes_along_to_workers(project: Path) -> None:
    script = project / "script.py"
    body = NET.replace("CustomModel", "Mine")
    script.write_text(
        f"{body}\n\nif __name__ == '__main__':\n    import ludus\n    result = ludus.train('CartPole-v1', stop={{'iterations': 1}}, "
        f"num_workers=1, **{settings('__main__:Mine')!r})\n    print('iterations', result.metrics['iterations'])\n"
    )
    done = subprocess.run([sys.executable, script], cwd=project, capture_output=True, text=True, timeout=120)
    assert "iterations 1" in done.stdout, done.stderr


def test_experiments_are_checked_where_they_are_started(project: Path) -> None:
    with pytest.raises(UnknownName, match=r"no model/nett\.py"):
        runner.train({"env": "CartPole-v1", "config": settings("nett", num_workers=1)}, local_dir=project / "runs")
    assert not (project / "runs").exists()


class Mine(torch.nn.Module):
    def __init__(self, obs_space: Any, action_space: Any, num_outputs: int, model_config: Any, name: str, size: int = 3) -> None:
        super().__init__()
        self.both = torch.nn.Linear(obs_space.shape[0], num_outputs + 1)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.both(obs)
        return both[:, :-1], both[:, -1]


def test_a_class_in_python_is_written_down_by_its_name(project: Path) -> None:
    result = ludus.train("CartPole-v1", stop={"iterations": 1}, **settings(model={"custom_model": Mine}))
    assert result.agent.policy.config.custom_model == f"{__name__}:Mine"
    assert f"custom_model: {__name__}:Mine" in (result.run_dir / CONFIG).read_text()
    inner = type("Inner", (torch.nn.Module,), {"__qualname__": "f.<locals>.Inner"})
    with pytest.raises(ConfigError, match="move it to the top level of a file"):
        ludus.train("CartPole-v1", stop={"iterations": 1}, **settings(model={"custom_model": inner}))
    given = {"custom_model": Mine, "custom_model_config": {"size": torch.nn.ReLU}}
    with pytest.raises(ConfigError, match="cannot be saved as JSON"):
        ludus.train("CartPole-v1", stop={"iterations": 1}, **settings(model=given))
