"""The arguments of `ludus.train`: environments in every form, presets and files with what the call changes."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import ludus
from ludus.envs.registry import env_name, registered_envs
from ludus.errors import ConfigError, UsageError
from ludus.experiments.source.experiment_source import training_data

SMALL: dict[str, Any] = {"num_envs": 4, "train_batch_size": 64, "minibatch_size": 32, "evaluation_duration": 0}


def make_cartpole(length: int = 30) -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1", max_episode_steps=length)


class Pole(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))


def data(env: Any = None, *, run: str | None = None, stop: Any = None, **more: Any) -> dict[str, Any]:
    named = {key: more.pop(key, None) for key in ("preset", "file", "experiment", "name")}
    return training_data(env, run, stop, settings=more, **named)


# -- environments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env",
    [make_cartpole, Pole, lambda: Pole(), functools.partial(make_cartpole, length=9)],
    ids=["function", "class", "lambda", "partial"],
)
def test_an_environment_is_whatever_makes_one(env: Any, tmp_path: Path) -> None:
    result = ludus.train(env, stop={"iterations": 1}, local_dir=tmp_path, **SMALL)
    assert result.metrics["timesteps"] > 0
    assert result.agent.evaluate(1, env=env).returns == result.agent.evaluate(1).returns


def test_what_can_be_imported_is_named_so_that_others_find_it() -> None:
    assert env_name("CartPole-v1") == "CartPole-v1"
    assert env_name(make_cartpole) == f"{__name__}:make_cartpole"
    assert env_name(Pole) == f"{__name__}:Pole"


def test_each_local_environment_has_a_name_of_its_own() -> None:
    def make() -> Pole:
        return Pole()

    def make_another() -> Pole:
        return Pole()

    make_another.__qualname__ = make.__qualname__
    first, second = env_name(make), env_name(make_another)
    assert first != second
    assert (registered_envs()[first], registered_envs()[second]) == (make, make_another)
    assert env_name(make) == first


def test_an_environment_that_is_made_already_is_refused_with_the_remedy() -> None:
    with Pole() as env, pytest.raises(UsageError, match=r"needs many environments.*env=lambda"):
        env_name(env)  # type: ignore[arg-type]


def test_an_environment_that_cannot_be_sent_to_workers_is_refused_before_anything_starts(tmp_path: Path) -> None:
    lock = threading.Lock()

    def make() -> Pole:
        with lock:
            return Pole()

    with pytest.raises(UsageError, match=r"local/make\S* cannot be sent .*'lock'.*lock.*register_env"):
        ludus.train(make, stop={"iterations": 1}, local_dir=tmp_path, num_workers=1, **SMALL)
    assert list(tmp_path.iterdir()) == []


# -- presets and files --------------------------------------------------------------------------------------------------


def test_a_preset_is_taken_with_what_the_call_changes() -> None:
    found = data(preset="cartpole-fast", total_timesteps=500, batch_size=512, learning_rate=0.1, grad_clip=None)
    assert (found["name"], found["env"], found["stop"]) == ("cartpole-fast", "CartPole-v1", {"total_timesteps": 500})
    assert (found["config"]["minibatch_size"], found["config"]["learning_rate"]) == (512, 0.1)
    assert "lr" not in found["config"]
    assert found["config"]["grad_clip"] is None
    assert found["config"]["num_epochs"] == 4


def test_a_preset_is_trained(tmp_path: Path) -> None:
    result = ludus.train(preset="cartpole-fast", stop={"iterations": 1}, local_dir=tmp_path, **SMALL)
    assert result.run_dir.parent == tmp_path / "cartpole-fast"


def test_a_preset_plays_another_environment() -> None:
    found = data("Acrobot-v1", preset="cartpole-fast")
    assert found["env"] == "Acrobot-v1"
    assert "target" not in found


def test_a_file_is_taken_and_one_of_several_experiments_is_named(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        "one: {env: CartPole-v1, config: {lr: 0.1}}\ntwo: {env: Acrobot-v1, run: DQN, config: {train_batch_size: 8}}\n"
    )
    assert data(file=file, experiment="one", lr=0.2, name="mine") == {
        "name": "mine", "env": "CartPole-v1", "config": {"lr": 0.2}
    }  # fmt: skip
    assert data(file=str(file), experiment="two", batch_size=16)["config"] == {"train_batch_size": 16}
    with pytest.raises(UsageError, match=r"2 experiments: one, two.*experiment="):
        data(file=file)
    with pytest.raises(UsageError, match="no experiment 'three'"):
        data(file=file, experiment="three")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "Which environment"),
        ({"preset": "cartpole", "file": "x.yaml"}, "both name an experiment"),
        ({"preset": "cartpol"}, "cartpole"),
        ({"file": "nowhere.yaml"}, "nowhere.yaml"),
    ],
    ids=str,
)
def test_what_is_missing_or_twice_is_told(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=complaint):
        data(**arguments)


def test_keys_beside_config_are_found_by_any_name() -> None:
    found = data("x", checkpoint_freq=3, exp_name="y", lr=1)
    assert (found["checkpoint_freq"], found["exp_name"], found["config"]) == (3, "y", {"lr": 1})
