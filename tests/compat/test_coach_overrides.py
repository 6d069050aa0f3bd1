"""`-cp`: what Coach's users write is read as what it means here, and nothing of it is run."""

from __future__ import annotations

import builtins
import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.algorithms.base import config_schemas
from ludus.compat.coach import overrides
from ludus.errors import ConfigError
from ludus.experiments.validation.explain import catalogue


def meant(text: str, run: str = "PPO") -> dict[str, Any]:
    return dict(overrides.translate_assignments(text, run))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lr=1e-3", {"lr": 1e-3}),
        (" lr = 1e-3 ; gamma=0.9;; ", {"lr": 1e-3, "gamma": 0.9}),
        ("model.fcnet_hiddens=[32, 64]; config.model.use_lstm=True", {"model.fcnet_hiddens": [32, 64], "config.model.use_lstm": True}),
        ("env='a;b=c'; model.custom_model=\"x;y\"", {"env": "a;b=c", "model.custom_model": "x;y"}),
        ("env_config={a: 1, b: {c: '}'}}; seed=3", {"env_config": {"a": 1, "b": {"c": "}"}}, "seed": 3}),
        ("agent_params.algorithm.discount=0.9", {"gamma": 0.9}),
        ("graph_manager.agent_params.algorithm.gae_lambda=0.9", {"lambda": 0.9}),
        ("agent_params.algorithm.clip_likelihood_ratio_using_epsilon=0.1", {"clip_param": 0.1}),
        ("agent_params.algorithm.beta_entropy=0.01", {"entropy_coeff": 0.01}),
        ("agent_params.algorithm.optimization_epochs=5", {"num_epochs": 5}),
        ("agent_params.algorithm.num_consecutive_playing_steps=EnvironmentSteps(2048)", {"train_batch_size": 2048}),
        ("agent_params.network_wrappers['main'].learning_rate=0.0003", {"lr": 0.0003}),
        ('agent_params.network_wrappers["main"].batch_size=64', {"minibatch_size": 64}),
        ("agent_params.network_wrappers['main'].optimizer_type='Adam'", {}),
        ("heatup_steps=EnvironmentSteps(1000)", {"num_steps_sampled_before_learning_starts": 1000, "heatup_episodes": 0}),
        ("heatup_steps=EnvironmentEpisodes(5)", {"num_steps_sampled_before_learning_starts": 0, "heatup_episodes": 5}),
        ("schedule_params.improve_steps=TrainingSteps(7)", {"stop": {"iterations": 7}}),
        ("improve_steps=EnvironmentEpisodes(7)", {"stop": {"episodes": 7}}),
        ("steps_between_evaluation_periods=EnvironmentEpisodes(50)", {"evaluation_interval": 50, "evaluation_interval_unit": "episodes"}),
        ("evaluation_steps=EnvironmentSteps(500)", {"evaluation_duration": 500, "evaluation_duration_unit": "timesteps"}),
        ("evaluation_steps=EnvironmentEpisodes(0)", {"evaluation_duration": 0}),
        ("agent_params.algorithm.distributed_coach_synchronization_type=DistributedCoachSynchronizationType.SYNC", {"sampling": "sync"}),
        ("visualization_parameters.render=False; visualization_parameters.dump_csv=True", {"track.csv": True}),
        ("env_params.level='Hopper-v5'; task_parameters.seed=3", {"env": "Hopper-v5", "seed": 3}),
        ("grad_clip=1; max_lag=None", {"grad_clip": 1, "max_lag": None}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_written_has_its_meaning_here(text: str, found: dict[str, Any]) -> None:
    assert meant(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("agent_params.network_wrappers['main'].batch_size=64", {"train_batch_size": 64}),
        ("agent_params.memory.max_size=(MemoryGranularity.Transitions, 50_000)", {"replay_buffer_config.capacity": 50_000}),
        ("agent_params.exploration.epsilon_schedule=LinearSchedule(1.0, 0.01, 10000)", {"epsilon": [[0, 1.0], [10_000, 0.01]]}),
        ("agent_params.exploration.epsilon_schedule=ConstantSchedule(0.1)", {"epsilon": 0.1}),
        ("agent_params.network_wrappers['main'].replace_mse_with_huber_loss=True", {"td_error_loss_fn": "huber"}),
        (
            "agent_params.algorithm.num_steps_between_copying_online_weights_to_target=EnvironmentSteps(100)",
            {"target_network_update_freq": 100},
        ),
    ],
)
def test_what_is_written_for_dqn_has_its_meaning_there(text: str, found: dict[str, Any]) -> None:
    assert meant(text, "DQN") == found


def test_whatever_coach_calls_by_a_name_is_a_key_of_ours() -> None:
    keys = set(catalogue()) | {path.removeprefix("config.") for path in catalogue()}
    ours = {name for schema in config_schemas().values() for name in schema.model_fields} | keys
    values = [1, 1.0, True, False, "sync", "Adam", "EnvironmentSteps(5)"]
    met = 0
    for path, meaning in overrides.COACH.items():
        for value in values:
            for run in ("PPO", "DQN"):
                with contextlib.suppress(ValueError):
                    found = {meaning: value} if isinstance(meaning, str) else meaning(value, run)
                    met += 1
                    assert {target.replace("lambda", "lambda_") for target in found} <= ours, path
    assert met > len(overrides.COACH)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr", r"'lr' is not an assignment"),
        ("lr=", r"lr= has no value"),
        ("=3", r"'' is not the name of a key"),
        ("l r=3", r"'l r' is not the name of a key"),
        ("lr=[1, 2", r"'\[' is not closed"),
        ("lr='1", r"\"'\" is not closed"),
        ("lr=1)", r"'\)' closes nothing"),
        ("gama=0.9", r"no key 'gama'\. Did you mean 'gamma'"),
        ("discount=0.9", r"no key 'discount'\. Did you mean 'agent_params\.algorithm\.discount'"),
        ("config.gama=0.9", r"no key 'config\.gama'"),
        ("agent_params.algorithm.discont=0.9", r"Coach's key 'agent_params\.algorithm\.discont' has no equivalent\. Did you mean 'agent_params\.algorithm\.discount'"),
        ("agent_params.network_wrappers['actor'].learning_rate=1", r"Did you mean 'agent_params\.network_wrappers\.main\.learning_rate'"),
        ("agent_params.network_wrappers['main'].optimizer_type='RMSProp'", r"is Adam here"),
        ("gamma=EnvironmentSteps(3)", r"it is a number\. Write  gamma=3"),
        ("heatup_steps=TrainingSteps(3)", r"EnvironmentSteps\(…\) or EnvironmentEpisodes\(…\)"),
        ("improve_steps=EnvironmentSteps(0)", r"above 0"),
        ("visualization_parameters.render=True", r"ludus rollout RUN --video"),
        ("x" * 30_000, r"characters; the maximum is"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_with_the_nearest(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        meant(text)


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whatever is run leaves a trace here."""
    traces: list[str] = []

    def trap(name: str) -> Any:
        def sprung(*arguments: Any, **_: Any) -> Any:
            traces.append(name)
            raise AssertionError(name)

        return sprung

    for module, name in ((os, "system"), (os, "popen"), (subprocess, "Popen"), (builtins, "eval"), (builtins, "exec")):
        monkeypatch.setattr(module, name, trap(name))
    return traces


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('touch {trace}')",
        "open('{trace}', 'w')",
        "exec('import os')",
        "eval(\"__import__('os').system('touch {trace}')\")",
        "(lambda: __import__('os').system('touch {trace}'))()",
        "[x for x in ().__class__.__base__.__subclasses__()]",
        "!!python/object/apply:os.system ['touch {trace}']",
        "!!python/name:os.system",
        "{a: !!python/object/new:os.system ['touch {trace}']}",
        "0 if os.system('touch {trace}') else 1",
        "os.environ",
        "EnvironmentSteps(__import__('os').getpid())",
        "EnvironmentSteps(1) if 1 else 2",
        "LinearSchedule(1, 2, open('{trace}'))",
        "f'{__import__(1)}' + x()",
        "`touch {trace}`",
    ],
)
def test_code_is_never_run(code: str, tmp_path: Path, caught: list[str]) -> None:
    trace = tmp_path / "trace"
    written = code.replace("{trace}", str(trace))
    for text in (
        f"gamma={written}",
        f"gamma=0.9; env_config={written}",
        f"{written}=1",
        f"model[{written}]=1",
        f"gamma={written};x",
    ):
        with pytest.raises(ConfigError):
            meant(text)
    assert not trace.exists()
    assert caught == []


def test_code_in_quotes_is_a_word_and_stays_one(tmp_path: Path, caught: list[str]) -> None:
    code = "__import__('os').system('true')"
    assert meant(f'env_config.note="{code}"') == {"env_config.note": code}
    assert caught == []


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab.=;'\"()[]{}_ 1\\!:,-#", max_size=40))
def test_whatever_is_written_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):  # and nothing else
        assert isinstance(meant(text), dict)
