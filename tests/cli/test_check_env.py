"""`ludus check-env`: its report, its exit codes, and a recommendation that trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.envs.env_check.findings import CHECKS
from tests.cli.calling import Call, one_line

ROOT = Path(__file__).parents[2]
ZOO = "tests.envs.env_check.zoo:make"
QUICK = ("--quick", "--seconds", "0.3")


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_a_mistake_is_reported_with_its_remedy_and_exit_code_1(call: Call) -> None:
    result = call("check-env", ZOO, "--env-config", "{kind: OutOfBounds}", *QUICK)
    check = CHECKS["bounds"]
    assert result.code == 1
    assert f"mistake  {check.rule}: the observation[0] is" in result.out
    assert f"         → {check.remedy}" in result.out
    assert "recommended configuration:" in result.out
    assert "1 mistake; " in result.out.splitlines()[-1]


def test_warnings_count_with_strict(call: Call, tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text("kind: Doubles\n")
    result = call("check-env", ZOO, "--env-config", tmp_path / "env.yaml", *QUICK, "--strict", "--json")
    assert (result.code, result.json["ok"], result.json["warnings"]) == (1, True, 1)


def test_an_experiment_file_names_the_environment_and_its_preprocessing(call: Call, tmp_path: Path) -> None:
    data: dict[str, Any] = {"env": ZOO, "config": {"env_config": {"kind": "Endless"}, "preprocess": {"max_episode_steps": 50}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"mine": data}))
    result = call("check-env", "-f", tmp_path / "mine.yaml", "--json", "--quick", "--seconds", "1")
    assert result.code == 0
    assert result.json["facts"]["episodes"]["length"]["high"] == 50
    assert result.json["recommendation"]["experiment"]["config"]["preprocess"] == {"max_episode_steps": 50}


def test_the_display_of_the_experiment_is_used_and_kept(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LUDUS_SCREEN", raising=False)
    data: dict[str, Any] = {"env": ZOO, "config": {"env_config": {"kind": "NeedsNoScreen"}, "display": "none"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"mine": data}))
    result = call("check-env", "-f", tmp_path / "mine.yaml", "--json", *QUICK)
    assert (result.code, result.json["mistakes"]) == (0, 0)
    assert result.json["recommendation"]["experiment"]["config"]["display"] == "none"


def test_json_is_one_object_on_stdout(call: Call) -> None:
    result = call("check-env", ZOO, "--env-config", '{"kind": "NoConstructor"}', "--json", *QUICK)
    assert (result.code, result.json["ok"], result.json["recommendation"]) == (1, False, None)
    assert "no licence server" in result.err
    assert {row["state"] for row in result.json["checks"]} == {"mistake", "not checked"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "Which environment?"),
        (("external",), "ludus check-game"),
        (("CartPole-v1", "--env-config", "[1]"), "--env-config"),
        (("CartPole-v1", "--env-config", "{size:6}"), "'size:6'"),
        (("CartPole-v1", "--env-config", "missing.yaml"), "Cannot read missing.yaml"),
    ],
)
def test_wrong_usage_ends_with_2(call: Call, words: tuple[str, ...], text: str) -> None:
    result = call("check-env", *words)
    assert (result.code, text in one_line(result)) == (2, True)


@pytest.mark.parametrize(
    ("env", "config"),
    [
        (ZOO, {"kind": "Grid", "settings": {"text": True}}),
        (ZOO, {"kind": "LargeObservations"}),
        ("tests.envs.env_check.match_zoo:make", {"kind": "Chase"}),
    ],
)
def test_the_recommended_configuration_trains(call: Call, tmp_path: Path, env: str, config: dict[str, Any]) -> None:
    written = tmp_path / "recommended.yaml"
    checked = call("check-env", env, "--env-config", json.dumps(config), "--out", written, *QUICK)
    assert checked.code == 0, checked.out + checked.err
    trained = call(
        "train", "-f", written, "--stop", "timesteps=2000", "--set", "train_batch_size=1024", "--local-dir", tmp_path / "runs", "--json"
    )  # fmt: skip
    assert trained.code == 0, trained.err
    assert list((tmp_path / "runs").rglob("model.safetensors"))


@pytest.mark.system
def test_the_trial_measures_a_training(call: Call) -> None:
    result = call("check-env", ZOO, "--env-config", "{kind: Walk}", "--seconds", "0.3", "--json")
    assert result.code == 0
    assert result.json["trial"]["learn_s"] > 0
    assert result.json["recommendation"]["experiment"]["config"]["num_workers"] == result.json["trial"]["workers"]
