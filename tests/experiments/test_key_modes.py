"""Every key of `config:` in every mode of a run: it has an effect, or it is refused or noticed by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ludus.algorithms.base import ALGORITHMS, config_schemas
from ludus.config.schema import AlgorithmConfig
from ludus.errors import ConfigError
from ludus.experiments import runner
from ludus.experiments.resolve import resolve
from ludus.experiments.training import open_training, prepare_new_run
from ludus.experiments.validation import validate
from ludus.experiments.validation.key_modes import (
    EVERYWHERE,
    REFUSED_ELSEWHERE,
    SEVERAL_AGENTS,
    SWITCHED_OFF,
    WITHOUT_EFFECT,
    TrainingMode,
    mode_of,
)
from tests.experiments import small

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
SPACES = {"observation_space": {"type": "Box", "shape": [4]}, "action_space": {"type": "Discrete", "n": 2}}
PAIR = "tests.experiments.grids:pair"

MODES: dict[TrainingMode, dict[str, Any]] = {
    TrainingMode.IN_PROCESS: {},
    TrainingMode.IN_TURN: {"config": {"num_workers": 2}},
    TrainingMode.PIPELINED: {"config": {"num_workers": 2, "sampling": "pipelined"}},
    TrainingMode.ASYNC: {"run": "IMPALA", "config": {"num_workers": 2, "sampling": "async"}},
    TrainingMode.FLEET: {"memory": "redis://127.0.0.1:1/0"},
    TrainingMode.FLEET_ASYNC: {"run": "IMPALA", "memory": "redis://127.0.0.1:1/0", "config": {"sampling": "async"}},
    TrainingMode.EXTERNAL: {"env": "external", "config": {"env_config": SPACES, "num_workers": 2}},
    TrainingMode.AGENTS: {"env": PAIR},
    TrainingMode.AGENTS_IN_TURN: {"env": PAIR, "config": {"num_workers": 2}},
    TrainingMode.AGENTS_PIPELINED: {"env": PAIR, "config": {"num_workers": 2, "sampling": "pipelined"}},
    TrainingMode.AGENTS_ASYNC: {"env": PAIR, "run": "IMPALA", "config": {"num_workers": 2, "sampling": "async"}},
}

OTHER: dict[str, Any] = {
    "sampling": "pipelined",
    "blocks_ahead": 7,
    "max_lag": 3,
    "inference_device": "cpu:0",
    "restart_failed_sub_environments": True,
    "max_worker_restarts": 3,
    "worker_restart_backoff_s": 2.0,
    "worker_hang_s": 7.0,
    "num_envs_per_worker": 16,
    "min_nodes": 2,
    "self_play": {"every": 3},
    "evaluation_interval": 5,
    "evaluation_interval_unit": "timesteps",
    "evaluation_duration": 3,
    "evaluation_duration_unit": "timesteps",
    "evaluation_num_workers": 1,
    "evaluation_video": 1,
    "evaluation_config": {"explore": True},
    "num_workers": 3,
    "batch_mode": "complete_episodes",
    "preprocess": {"frame_skip": 2},
    "wrappers": ["gymnasium.wrappers:TimeAwareObservation"],
    "multiagent": {},
}
"""A value of every key that some mode does not use, which is not its default."""


def data(mode: TrainingMode, **settings: Any) -> dict[str, Any]:
    base = MODES[mode]
    return {"env": "CartPole-v1", **base, "config": {**base.get("config", {}), **settings}}


def cases(table: Any) -> list[Any]:
    return [pytest.param(key, mode, id=f"{key}, {mode.value}") for key, modes in table.items() for mode in sorted(modes, key=str)]


def test_every_key_is_in_the_table() -> None:
    placed = EVERYWHERE | WITHOUT_EFFECT.keys() | REFUSED_ELSEWHERE.keys()
    assert placed == AlgorithmConfig.model_fields.keys()
    assert not EVERYWHERE & (WITHOUT_EFFECT.keys() | REFUSED_ELSEWHERE.keys())


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_mode_is_recognised(mode: TrainingMode) -> None:
    resolved = resolve(data(mode))
    assert mode_of(resolved.experiment.env, resolved.experiment.memory, resolved.config, several=mode in SEVERAL_AGENTS) is mode
    assert validate.find_keys_without_effect(data(mode)) == []


@pytest.mark.parametrize(("key", "mode"), cases(WITHOUT_EFFECT))
def test_a_key_without_effect_is_refused_with_the_reason(key: str, mode: TrainingMode) -> None:
    (said,) = validate.find_keys_without_effect(data(mode, **{key: OTHER[key]}))
    assert said.startswith(f"config.{key} has no effect with {mode.value}: {WITHOUT_EFFECT[key][mode]}")
    assert said.path == f"config.{key}"


@pytest.mark.parametrize(("key", "mode"), cases(REFUSED_ELSEWHERE))
def test_a_key_with_a_rule_of_its_own_is_refused_by_name(key: str, mode: TrainingMode) -> None:
    with pytest.raises(ConfigError, match=key):
        resolve(data(mode, **{key: OTHER[key]}))


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
@pytest.mark.parametrize(
    "mode", [TrainingMode.IN_PROCESS, TrainingMode.ASYNC, TrainingMode.EXTERNAL, TrainingMode.AGENTS], ids=lambda mode: mode.value
)
def test_defaults_and_other_modes_are_accepted(key: str, mode: TrainingMode) -> None:
    resolved = resolve(data(mode))
    assert validate.find_keys_without_effect(data(mode, **{key: resolved.experiment.config[key]})) == []
    if mode not in {*WITHOUT_EFFECT[key], *REFUSED_ELSEWHERE.get(key, ())}:
        assert validate.find_keys_without_effect(data(mode, **{key: OTHER[key]})) == []


def test_what_is_without_effect_is_refused_before_a_run_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.max_lag has no effect"):
        runner.train(small.data(1, max_lag=2), project=tmp_path, trial="run")
    assert list(tmp_path.iterdir()) == []


def test_workers_beside_complete_episodes_are_noticed_by_name() -> None:
    (said,) = validate.find_notices(data(TrainingMode.IN_TURN, batch_mode="complete_episodes"))
    assert said.path == "config.num_workers"


def test_all_keys_without_effect_are_named_at_once() -> None:
    found = validate.validate_experiment({"name": "x", **data(TrainingMode.IN_PROCESS, max_lag=2, worker_hang_s=3)})
    assert [complaint.path for complaint in found] == ["config.max_lag", "config.worker_hang_s"]


def test_what_an_earlier_release_accepted_can_be_resumed(tmp_path: Path) -> None:
    small.train(tmp_path / "run", 1)
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("blocks_ahead: 2", "blocks_ahead: 5"))
    assert runner.resume(tmp_path / "run", stop={"iterations": 2}).metrics["iterations"] == 2


def test_limits_of_workers_are_for_those_that_evaluate_as_well() -> None:
    assert validate.find_keys_without_effect(data(TrainingMode.IN_PROCESS, worker_hang_s=3, evaluation_num_workers=1)) == []


def test_a_game_that_calls_us_may_say_that_it_is_never_evaluated() -> None:
    assert validate.find_keys_without_effect(data(TrainingMode.EXTERNAL, evaluation_duration=0)) == []


def test_self_play_needs_opponents_from_the_past() -> None:
    (said,) = validate.find_keys_without_effect(data(TrainingMode.IN_PROCESS, self_play={"every": 3}))
    assert "CartPole-v1 has no opponents from the past" in said


def test_a_divisor_is_refused_beside_a_custom_model() -> None:
    settings: dict[str, Any] = {"preprocess": {"scale": 8}, "model": {"custom_model": "mine"}}
    (said,) = validate.find_keys_without_effect(data(TrainingMode.IN_PROCESS, **settings))
    assert said.path == "config.preprocess.scale"


@pytest.mark.parametrize("run", ALGORITHMS)
def test_a_key_of_another_algorithm_is_refused_by_name(run: str) -> None:
    known = config_schemas()
    others = {key for name, schema in known.items() if name != run for key in schema.model_fields} - known[
        run
    ].model_fields.keys()
    for key in sorted(others):
        found = validate.validate_experiment({"name": "x", "env": "CartPole-v1", "run": run, "config": {key.rstrip("_"): 1}})
        assert any(key.rstrip("_") in complaint for complaint in found), key


# -- keys that another one switches off ---------------------------------------------------------------------------------

SWITCHES: dict[str, dict[str, Any]] = {
    "model.cell_size": {"model": {"cell_size": 32}},
    "model.max_seq_len": {"model": {"max_seq_len": 8}},
    "evaluation_interval": {"evaluation_interval": 3, "evaluation_duration": 0},
    "evaluation_interval_unit": {"evaluation_interval_unit": "timesteps"},
    "evaluation_duration_unit": {"evaluation_duration_unit": "timesteps", "evaluation_duration": 0},
    "evaluation_num_workers": {"evaluation_num_workers": 2, "evaluation_duration": 0},
    "evaluation_video": {"evaluation_video": 1, "evaluation_duration": 0},
    "evaluation_config": {"evaluation_config": {"explore": True}, "evaluation_duration": 0},
    "replay_buffer_config.alpha": {"replay_buffer_config": {"type": "ReplayBuffer", "alpha": 0.3}},
    "replay_buffer_config.beta": {"replay_buffer_config": {"type": "ReplayBuffer", "beta": 0.3}},
    "replay_buffer_config.eps": {"replay_buffer_config": {"type": "ReplayBuffer", "eps": 0.3}},
    "kl_target": {"kl_target": 0.05, "kl_coeff": 0.0},
}


@pytest.mark.parametrize("key", SWITCHED_OFF)
def test_a_key_that_another_one_switches_off_is_noticed_by_name(key: str) -> None:
    run = "DQN" if key.startswith("replay") else "PPO"
    found = validate.find_notices({"env": "CartPole-v1", "run": run, "config": SWITCHES[key]})
    assert [notice.path for notice in found if "has no effect" in notice] == [f"config.{key}"]


# -- keys that have an effect are read ----------------------------------------------------------------------------------

READ_BEFORE = {"num_workers", "multiagent", "env_config", "sampling", "num_gpus"}
"""Keys that decide how a run is put together, while it is resolved."""
ELSEWHERE = {
    "max_worker_restarts",
    "worker_restart_backoff_s",
    "worker_hang_s",
    "evaluation_num_workers",
    "rollout_fragment_length",
    "train_batch_size",
    "min_sample_timesteps_per_iteration",
}
"""Of runs in one process: read while the shape of a batch is worked out, or only beside other processes and some stops."""


@pytest.mark.parametrize("mode", [TrainingMode.IN_PROCESS, TrainingMode.AGENTS], ids=lambda mode: mode.value)
def test_every_key_that_has_an_effect_is_read(mode: TrainingMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    plain = AlgorithmConfig.__getattribute__

    def spy(self: AlgorithmConfig, name: str) -> Any:
        seen.add(name)
        return plain(self, name)

    env = PAIR if mode is TrainingMode.AGENTS else "CartPole-v1"
    settings: dict[str, Any] = {"normalize_reward": True, "evaluation_interval": 1, "train_batch_size": 64, "minibatch_size": 32}
    resolved = resolve(small.data(1, env=env, **settings))
    monkeypatch.setattr(AlgorithmConfig, "__getattribute__", spy)
    with open_training(prepare_new_run(resolved, tmp_path / "run")) as training:
        training.advance(lambda: False)
    monkeypatch.undo()
    idle = {key for table in (WITHOUT_EFFECT, REFUSED_ELSEWHERE) for key, modes in table.items() if mode in modes}
    if mode is TrainingMode.IN_PROCESS:
        idle.add("self_play")  # read only if the environment has opponents
    assert AlgorithmConfig.model_fields.keys() - idle - READ_BEFORE - ELSEWHERE - seen == set()


# -- the page -----------------------------------------------------------------------------------------------------------


def test_the_page_names_every_key_that_some_mode_does_not_use() -> None:
    page = PAGE.read_text(encoding="utf-8")
    section = page[page.index("### Keys without effect") :]
    for key, modes in WITHOUT_EFFECT.items():
        assert f"`{key}`" in section
        assert all(mode.value in section for mode in modes)
