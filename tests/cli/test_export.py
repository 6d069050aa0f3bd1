"""`ludus export`: a file with its report, or neither; and a game that plays with the file alone."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import ludus
from ludus.cli.main import main
from ludus.core import plugins
from ludus.errors import UsageError
from ludus.experiments.export_run import recorded_observations
from ludus.experiments.runs import checkpoint
from ludus.models.export import onnx_export
from ludus.models.inference.onnx_policy import OnnxPolicy
from ludus.storage.local import LocalStore
from tests.experiments import small
from tests.tools import network_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "onnx_only" / "play.py"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Call]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ludus", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        result = capfd.readouterr()
        return int(ended.value.code or 0), result.out, result.err

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.train(tmp_path_factory.mktemp("export") / "run", model={"fcnet_hiddens": [16, 16]}).run_dir


def bad_run(where: Path) -> Path:
    """A checkpoint of a policy that has come to nothing."""
    algorithm = small.make_ppo()
    with torch.no_grad():
        network_of(algorithm.policy).head.weight.fill_(float("nan"))
    config = {"run": "PPO", "env": "CartPole-v1", "config": {}}
    checkpoint.write(LocalStore(where), 1, {"model": algorithm}, {"model": 4}, {}, {"config": config})
    return where


def test_a_run_becomes_a_file_with_its_report(call: Call, run: Path) -> None:
    code, out, err = call("export", run)
    assert code == 0, err
    (file,) = (run / "exports").glob("*.onnx")
    assert str(file) in out
    report = json.loads(file.with_suffix(".report.json").read_text())
    assert report["passed"]
    assert report["file"] == file.name
    assert report["decisions"] >= 4000
    assert report["max_logit_difference"] <= 1e-4
    assert report["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert set(report["versions"]) == {"ludus", "torch", "onnx", "onnxruntime"}
    assert report["version"] == OnnxPolicy(file).version == checkpoint.open_checkpoint(run)[1].state["models"]["model"]["version"]


def test_a_run_becomes_a_file_for_unity(call: Call, run: Path, tmp_path: Path) -> None:
    code, out, err = call("export", run, "--format", "ml-agents", "--out", tmp_path)
    assert code == 0, err
    (file,) = tmp_path.glob("*.onnx")
    assert file.name.endswith("-ml-agents.onnx")
    assert "actions equal" in out
    report = json.loads(file.with_suffix(".report.json").read_text())
    assert (report["passed"], report["layout"], report["opset"]) == (True, "ml-agents", 15)
    session = plugins.require("onnxruntime", "serve", "tests").InferenceSession(file)
    assert [item.name for item in session.get_inputs()] == ["obs_0", "action_masks"]
    seen = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    feed = {"obs_0": seen, "action_masks": np.ones((50, 2), np.float32)}
    (chosen,) = session.run(["deterministic_discrete_actions"], feed)
    np.testing.assert_array_equal(chosen[:, 0], checkpoint.open_checkpoint(run)[1].policy("model").act(seen).action)


def test_int8_is_verified_on_observations_of_the_agent(call: Call, run: Path, tmp_path: Path) -> None:
    code, out, err = call("export", run, "--quantize", "int8", "--out", tmp_path / "small.onnx", "--json", "--opset", "17")
    report = json.loads(out.splitlines()[-1])
    if code == 0:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["small.onnx", "small.report.json"]
        assert OnnxPolicy(tmp_path / "small.onnx").precision == "int8"
    else:  # after so short a training it may prefer no action clearly; then that is what it must say
        assert "actions are equal" in err
        assert list(tmp_path.iterdir()) == []
    assert report["precision"] == "int8"
    assert report["opset"] == 17
    assert report["recorded"] >= 1000
    assert report["passed"] == (report["equal_actions"] >= 0.99) == (code == 0)


def test_a_rollout_of_the_run_is_compared_on(call: Call, run: Path, tmp_path: Path) -> None:
    steps = tmp_path / "steps.npz"
    assert call("rollout", run, "--episodes", "2", "--out", steps)[0] == 0
    rows = len(np.load(steps)["reward"])
    policy = checkpoint.open_checkpoint(run)[1].policy("model")
    np.testing.assert_array_equal(recorded_observations(steps, policy), np.load(steps)["observation"])
    code, out, err = call("export", run, "--observations", steps, "--out", tmp_path, "--json")
    assert code == 0, err
    assert json.loads(out)["recorded"] == 2 * rows
    (tmp_path / "none.npz").write_bytes(b"nothing")
    assert call("export", run, "--observations", tmp_path / "none.npz")[0] == 2


def test_an_export_that_differs_from_the_original_is_not_written(call: Call, tmp_path: Path) -> None:
    code, out, err = call("export", bad_run(tmp_path / "bad"), "--out", tmp_path / "out", "--json")
    assert code == 1
    assert "differs from the original" in err
    assert json.loads(out)["file"] is None
    assert json.loads(out)["reasons"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--format", "tflite"], "tflite"),
        (["--format", "ml-agents", "--quantize", "int8"], "int8 is not available"),
        (["--quantize", "int4"], "int4"),
        (["--model", "other"], "'other'"),
        (["--opset", "3"], "opset 3"),
        (["--out", "agent.pt"], "agent.pt"),
    ],
)
def test_wrong_usage_is_named(call: Call, run: Path, words: list[str], named: str) -> None:
    code, _, err = call("export", run, *words)
    assert code == 2
    assert named in err


def test_a_run_that_is_not_there_is_named(call: Call, tmp_path: Path) -> None:
    assert call("export", tmp_path / "nowhere")[0] == 2


def test_of_several_models_one_must_be_chosen(call: Call, tmp_path: Path) -> None:
    algorithms = {name: small.make_ppo(i, network=None) for i, name in enumerate(["left", "right"])}
    config = {"run": "PPO", "env": "CartPole-v1", "config": {}}
    checkpoint.write(LocalStore(tmp_path / "run"), 1, algorithms, {"left": 1, "right": 2}, {}, {"config": config})
    code, _, err = call("export", tmp_path / "run")
    assert (code, "left, right" in err) == (2, True)
    assert call("export", tmp_path / "run", "--model", "right")[0] == 0
    assert [path.name for path in (tmp_path / "run" / "exports").glob("*.onnx")] == ["right-000002.onnx"]


def test_models_of_several_agents_are_named_and_verified_on_their_observations(call: Call, tmp_path: Path) -> None:
    algorithms = {name: small.make_ppo(i, network=None) for i, name in enumerate(["left", "right"])}
    settings = {"multiagent": {"policy_mapping": {"west": "left", "east": "right", "far_east": "right"}}}
    config = {"run": "PPO", "env": "module:pairs", "config": settings}
    run = tmp_path / "run"
    checkpoint.write(LocalStore(run), 1, algorithms, {"left": 1, "right": 2}, {}, {"config": config})
    assert "left (west), right (east, far_east)" in call("export", run)[2]
    assert "played by the model right. Choose the model right" in call("export", run, "--model", "east")[2]
    with pytest.raises(UsageError, match=r"left \(west\), right \(east, far_east\).*model="):
        ludus.load(run)
    assert ludus.load(run, "right").version == 2
    steps = run / "rollouts" / "one" / "steps.npz"
    steps.parent.mkdir(parents=True)
    west, east, far_east = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    columns = {"west/observation": west, "east/observation": east, "far_east/observation": far_east}
    np.savez(steps, **columns)
    policy = algorithms["right"].policy
    seen = recorded_observations(steps, policy, ["east", "far_east"])
    np.testing.assert_array_equal(seen, np.concatenate([east, far_east]))
    code, out, err = call("export", run, "--model", "right")
    assert code == 0, err
    assert "only on random observations" not in out + err


def test_a_game_plays_with_onnxruntime_and_numpy_alone(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "it.onnx"
    file.write_bytes(onnx_export.export_policy(checkpoint.open_checkpoint(run)[1].policy("model")))
    program = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__');"
        "found = {'ludus', 'torch', 'onnx', 'gymnasium'} & {name.split('.')[0] for name in sys.modules}; assert not found, found"
    )
    words = [sys.executable, "-c", program, str(EXAMPLE), str(file), "--episodes", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("steps") == 2


@pytest.mark.long
def test_the_example_knows_masks_memory_and_noise(tmp_path: Path) -> None:
    """The class that games may copy, on an agent that needs all of it."""
    import runpy

    from tests.models.test_onnx_export import made, traced

    kind = "lstm, entities, hybrid"
    (tmp_path / "it.onnx").write_bytes(traced(kind))
    policy = made(kind)
    agent = runpy.run_path(str(EXAMPLE.with_name("agent.py")))["Agent"](str(tmp_path / "it.onnx"))
    assert isinstance(policy.observation_space, gym.spaces.Dict)
    state = tuple(spec.zeros(1) for spec in policy.state_spec())
    policy.observation_space.seed(0)
    mask = np.array([1, 0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 0], np.bool_)
    for _ in range(20):
        row = policy.observation_space.sample()
        acted = policy.act({key: np.asarray(value)[None] for key, value in row.items()}, state, mask[None])
        state = acted.state
        action = agent.act(row, mask=mask)
        assert action.keys() == acted.action.keys()
        for key, value in action.items():
            np.testing.assert_allclose(value, acted.action[key][0], atol=1e-4)
    assert len({int(agent.act(row, temperature=5.0)["fire"]) for _ in range(100)}) == 3
