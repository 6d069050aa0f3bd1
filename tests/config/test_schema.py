from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.algorithms.appo import APPOConfig
from ludus.algorithms.dqn import DQNConfig
from ludus.algorithms.impala import IMPALAConfig
from ludus.algorithms.ppo import PPOConfig
from ludus.config.aliases.rllib_keys import RENAMED
from ludus.config.experiment_file import load_experiments
from ludus.config.overrides import apply_override, parse_stop_values
from ludus.config.schema import AlgorithmConfig, ExperimentConfig, StopConfig
from ludus.config.translation import all_spellings
from ludus.config.validation import COLLATED_STEPS, parse_algorithm_config, parse_experiment, parse_external_config
from ludus.errors import ConfigError


def ppo(**keys: Any) -> PPOConfig:
    checked = parse_algorithm_config(PPOConfig, keys)
    assert isinstance(checked, PPOConfig)
    return checked


def complaint(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ppo(**keys)
    return caught.value.message


# -- unknown keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "shown", "nearest"),
    [
        ({"envs": "x"}, "envs", "env"),
        ({"checkpoint_frequency": 3}, "checkpoint_frequency", "checkpoint_freq"),
        ({"stop": {"timestep_total": 3}}, "stop.timestep_total", "timesteps_total"),
        ({"stop": {"Iterations": 3}}, "stop.Iterations", "iterations"),
    ],
)
def test_an_unknown_key_of_an_experiment_names_the_nearest(data: dict[str, Any], shown: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"Unknown key '{re.escape(shown)}'\. Did you mean '{nearest}'"):
        parse_experiment({"env": "CartPole-v1", **data})


@pytest.mark.parametrize(
    ("data", "shown", "nearest"),
    [
        ({"gama": 0.9}, "config.gama", "gamma"),
        ({"zeal": 1}, "config.zeal", None),
        ({"clip_parm": 0.1}, "config.clip_parm", "clip_param"),
        ({"num_sgd_iters": 3}, "config.num_sgd_iters", "num_sgd_iter"),
        ({"model": {"fcnet_hidden": [3]}}, "config.model.fcnet_hidden", "fcnet_hiddens"),
        ({"model": {"lstm_cell_sise": 3}}, "config.model.lstm_cell_sise", "lstm_cell_size"),
    ],
)
def test_an_unknown_key_of_an_algorithm_names_the_nearest(data: dict[str, Any], shown: str, nearest: str | None) -> None:
    message = complaint(**data)
    assert message.startswith(f"Unknown key {shown!r}.")
    assert (f"Did you mean {nearest!r}" if nearest else "Known: ") in message


def test_the_environments_own_keywords_are_not_checked() -> None:
    assert ppo(env_config={"anything": {"goes": 1}}).env_config == {"anything": {"goes": 1}}


# -- values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gamma", 1.01),
        ("gamma", -0.1),
        ("gamma", float("nan")),
        ("gamma", "high"),
        ("lambda", 2),
        ("clip_param", 0),
        ("minibatch_size", 0),
        ("minibatch_size", 1.5),
        ("minibatch_size", None),
        ("num_epochs", "four"),
        ("num_workers", -1),
        ("seed", -1),
        ("train_batch_size", 0),
        ("observation_filter", "Median"),
        ("env_config", 5),
        ("model", [64, 64]),
        ("lr", "fast"),
        ("lr", -1e-3),
        ("lr", float("inf")),
        ("lr", float("nan")),
        ("lr", None),
    ],
)
def test_a_wrong_value_is_shown_with_its_key(key: str, value: Any) -> None:
    message = complaint(**{key: value})
    assert message.startswith(f"config.{key}")
    assert f"is {value!r}: " in message


@pytest.mark.parametrize("key", ["lr", "num_workers", "gamma", "grad_clip", "evaluation_interval", "max_worker_restarts"])
def test_true_is_not_a_number(key: str) -> None:
    assert complaint(**{key: True}) == f"config.{key} is True: a number is meant."


def test_true_is_not_a_number_in_a_section_either_and_may_be_a_switch() -> None:
    assert complaint(model={"max_seq_len": True}) == "config.model.max_seq_len is True: a number is meant."
    assert ppo(preprocess={"clip_reward": True}).preprocess.clip_reward is True


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("fcnet_hiddens", [64, -3], "config.model.fcnet_hiddens.1 is -3"),
        ("fcnet_hiddens", 64, "config.model.fcnet_hiddens is 64"),
        ("conv_filters", [[16, 3]], "config.model.conv_filters.0"),
        ("conv_filters", [[16, 0, 1]], "config.model.conv_filters.0.1 is 0"),
        ("core", "transformer", "config.model.core is 'transformer'"),
        ("lstm_cell_size", 0, "config.model.lstm_cell_size is 0"),
        ("max_seq_len", 0, "config.model.max_seq_len is 0"),
    ],
)
def test_a_wrong_value_of_the_model_is_shown_with_its_path(key: str, value: Any, shown: str) -> None:
    assert shown in complaint(model={key: value})


@pytest.mark.parametrize("data", [{"timesteps": 0}, {"time_s": 0}, {"iterations": "soon"}, {"timesteps_total": 1.5}])
def test_a_stop_that_never_comes_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"stop\.{next(iter(data))} is "):
        parse_experiment({"env": "x", "stop": data})


def test_an_experiment_needs_an_environment() -> None:
    with pytest.raises(ConfigError, match="'env' is missing"):
        parse_experiment({"run": "PPO"})


def test_all_complaints_are_reported_at_once() -> None:
    message = complaint(gama=1, clip_param=-1, model={"fcnet_hidens": [3], "core": "x"}, seed=-4)
    assert len(message.splitlines()) == 5
    for part in (
        "'config.gama'",
        "config.clip_param is -1",
        "'config.model.fcnet_hidens'",
        "config.model.core is 'x'",
        "seed is -4",
    ):
        assert part in message


def test_a_batch_smaller_than_its_environments_is_one_step_of_each() -> None:
    found = ppo(train_batch_size=32, num_envs_per_worker=64)
    assert (found.steps, found.train_batch_size) == (1, 64)
    assert ppo(train_batch_size=256, num_envs_per_worker=64).steps == 4


@pytest.mark.parametrize(
    ("keys", "envs", "steps"),
    [
        ({"train_batch_size": 2}, 2, 1),  # as one debugs
        ({"train_batch_size": 4000}, 50, 80),
        ({"train_batch_size": 4000, "num_workers": 4, "rollout_fragment_length": 200}, 5, 200),
        ({"train_batch_size": 16000, "num_workers": 16, "rollout_fragment_length": 200}, 5, 200),
        ({"train_batch_size": 4000, "num_workers": 4, "rollout_fragment_length": 200, "num_envs_per_worker": 1}, 1, 1000),
        ({"train_batch_size": 51200, "rollout_fragment_length": 100}, 64, 800),
        ({"train_batch_size": 128 * 64}, 64, 128),
        ({"train_batch_size": 4096, "num_workers": "auto"}, 64, 64),
    ],
)
def test_the_default_number_of_environments_fits_the_batch(keys: dict[str, Any], envs: int, steps: int) -> None:
    found = ppo(**keys)
    assert (found.num_envs_per_worker, found.steps, found.train_batch_size) == (envs, steps, keys["train_batch_size"])
    workers = keys.get("num_workers", 1)
    assert envs * steps * (1 if workers == "auto" else workers) == keys["train_batch_size"]


@pytest.mark.parametrize(
    ("keys", "envs", "steps"),
    [
        ({"train_batch_size": 500, "rollout_fragment_length": 50}, 10, 50),  # RLlib's own numbers for IMPALA
        ({"train_batch_size": 500, "rollout_fragment_length": 50, "num_envs_per_worker": 5}, 5, 50),
        ({"train_batch_size": 500}, 50, 10),
        ({"train_batch_size": 4000}, 50, 20),
        ({"train_batch_size": 4096}, 64, 32),
        ({}, 64, 32),
    ],
)
def test_a_batch_of_workers_that_do_not_wait_is_whole_segments(keys: dict[str, Any], envs: int, steps: int) -> None:
    found = parse_algorithm_config(IMPALAConfig, {"num_workers": 8, **keys})
    assert (found.num_envs_per_worker, found.steps) == (envs, steps)
    assert found.train_batch_size % (envs * steps) == 0
    assert found.train_batch_size == keys.get("train_batch_size", found.train_batch_size)


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        ({"train_batch_size": 4001}, (64, 63, 4032)),
        ({"train_batch_size": 4000, "num_workers": 3}, (64, 21, 4032)),
        ({"train_batch_size": 5, "num_workers": 3}, (1, 2, 6)),
        ({"train_batch_size": 512, "num_envs_per_worker": 20}, (20, 26, 520)),
        ({"train_batch_size": 4000, "num_workers": 7, "rollout_fragment_length": 200, "num_envs_per_worker": 1}, (1, 600, 4200)),
        ({"train_batch_size": 1000, "rollout_fragment_length": 333}, (4, 333, 1332)),
        ({"train_batch_size": 1000, "rollout_fragment_length": 333, "num_envs_per_worker": 64}, (64, 333, 21312)),
        ({"train_batch_size": 32, "rollout_fragment_length": 7, "num_envs_per_worker": 64}, (64, 7, 448)),
    ],
)
def test_a_batch_that_does_not_come_out_even_is_rounded_up_as_rllib_does(keys: dict[str, Any], shape: tuple[int, ...]) -> None:
    found = ppo(**keys)
    assert (found.num_envs_per_worker, found.steps, found.train_batch_size) == shape


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        ({"train_batch_size": 4001}, (64, 32, 4096)),
        ({"train_batch_size": 1999}, (64, 32, 2048)),
        ({"train_batch_size": 500, "rollout_fragment_length": 60}, (9, 60, 540)),
        ({"train_batch_size": 500, "rollout_fragment_length": 60, "num_envs_per_worker": 2}, (2, 60, 600)),
        ({"train_batch_size": 4096, "rollout_fragment_length": 512, "num_envs_per_worker": 32}, (32, 512, 16384)),
        ({"train_batch_size": 10, "rollout_fragment_length": 10, "num_envs_per_worker": 5}, (5, 10, 50)),
    ],
)
def test_a_batch_of_workers_that_do_not_wait_is_rounded_up_too(keys: dict[str, Any], shape: tuple[int, ...]) -> None:
    found = parse_algorithm_config(IMPALAConfig, {"num_workers": 8, **keys})
    assert (found.num_envs_per_worker, found.steps, found.train_batch_size) == shape


@given(st.integers(1, 5000), st.integers(0, 9), st.none() | st.integers(1, 300), st.none() | st.integers(1, 70))
def test_a_batch_is_always_whole_fragments_and_at_least_as_large_as_asked_for(
    batch: int, workers: int, steps: int | None, envs: int | None
) -> None:
    keys: dict[str, Any] = {"train_batch_size": batch, "num_workers": workers}
    keys |= ({"rollout_fragment_length": steps} if steps else {}) | ({"num_envs_per_worker": envs} if envs else {})
    for schema in (PPOConfig, IMPALAConfig):
        found = parse_algorithm_config(schema, keys)
        turns = 1 if schema is IMPALAConfig and workers else max(1, workers)
        unit = turns * found.num_envs_per_worker * (found.steps if turns == 1 and workers else 1)
        assert found.train_batch_size >= batch
        assert found.train_batch_size % unit == 0
        assert found.num_envs_per_worker == (envs or found.num_envs_per_worker)


def test_batch_environments_and_steps_agree() -> None:
    only_steps = ppo(num_envs_per_worker=8, rollout_fragment_length=128)
    assert (only_steps.steps, only_steps.train_batch_size) == (128, 1024)
    neither = ppo(num_envs_per_worker=61)
    assert (neither.steps, neither.train_batch_size) == (67, 67 * 61)
    assert ppo(train_batch_size=448, num_envs_per_worker=64, rollout_fragment_length=7).steps == 7


@pytest.mark.parametrize(
    "points", [[], [[0, 1.0], [0, 2.0]], [[5, 1.0], [3, 2.0]], [[0, 1.0], [10, -1.0]], [[0, 1.0], [10, "x"]], [[0]]]
)
def test_the_points_of_a_schedule_rise_and_are_numbers(points: list[Any]) -> None:
    assert "config.lr" in complaint(lr=points)


def test_a_schedule_is_kept_as_its_points() -> None:
    assert ppo(lr=[[0, 1e-3], [1000, 0]]).lr == [(0, 1e-3), (1000, 0.0)]
    assert ppo(lr=1).lr == 1.0


@pytest.mark.parametrize("name", ["a", "cart-pole_2.1+b", "9lives", "Süd"])
def test_a_plain_name_may_name_an_experiment(name: str) -> None:
    assert parse_experiment({"env": "x", "name": name}).name == name


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "a\\b", "-f", "a b", "a\n", "a\0b", ".hidden"])
def test_a_name_that_would_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="an experiment's name is made of letters"):
        parse_experiment({"env": "x", "name": name})


# -- aliases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alias", "name"), sorted(RENAMED["config"].items()))
def test_an_older_spelling_means_the_same(alias: str, name: str) -> None:
    usual: dict[str, Any] = {"lambda": 0.5, "normalize_advantage": False, "env_config": {"a": 1}}
    value = [[0, 0.5], [10, 0.25]] if alias.endswith("schedule") else usual.get(name, 8)
    fields = {"lambda": "lambda_"}.get(name, name)
    schema: type[AlgorithmConfig] = next(s for s in (PPOConfig, APPOConfig, DQNConfig) if fields in s.model_fields)
    assert parse_algorithm_config(schema, {alias: value}) == parse_algorithm_config(schema, {name: value})
    assert parse_algorithm_config(schema, {alias: value}) != parse_algorithm_config(schema, {})


@pytest.mark.parametrize(("alias", "name"), sorted(RENAMED["stop"].items()))
def test_an_older_spelling_of_a_stop_means_the_same(alias: str, name: str) -> None:
    stops = [parse_experiment({"env": "x", "stop": {key: 7}}).stop for key in (alias, name)]
    assert stops[0] == stops[1] != StopConfig()


def test_the_model_and_lambda_go_by_either_name() -> None:
    assert ppo(model={"lstm_cell_size": 9}) == ppo(model={"cell_size": 9}) != ppo()
    assert ppo(**{"lambda": 0.5}) == ppo(lambda_=0.5) != ppo()


def test_two_spellings_that_disagree_are_refused_and_both_shown() -> None:
    message = complaint(num_sgd_iter=3, num_epochs=4)
    assert (
        message == "config sets 'num_epochs' twice: 'num_sgd_iter' is 3, and 'num_epochs', which means the same, is 4. Keep one."
    )
    assert ppo(num_sgd_iter=3, num_epochs=3).num_epochs == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"lambda": 0.5, "lambda_": 0.6}, ["'lambda' is 0.5", "'lambda_'", "is 0.6"]),
        ({"model": {"cell_size": 1, "lstm_cell_size": 2}}, ["'cell_size' is 1", "'lstm_cell_size'", "is 2"]),
        ({"preprocess": {"grey": True, "grayscale": False}}, ["config.preprocess.grey", "grayscale"]),
        ({"num_workers": 2, "num_env_runners": 3, "num_rollout_workers": 2}, ["'num_env_runners'", "is 3"]),
        ({"vf_share_layers": True, "model": {"vf_share_layers": False}}, ["model.vf_share_layers is False", "is True"]),
        ({"train_batch_size": 64, "train_batch_size_per_learner": 64, "num_learners": 2}, ["train_batch_size", "is 128"]),
    ],
)
def test_two_names_of_one_key_that_disagree_are_both_shown(data: dict[str, Any], words: list[str]) -> None:
    message = complaint(**data)
    assert all(word in message for word in (*words, "Keep one")), message


def test_known_keys_hold_every_spelling_and_nothing_of_other_schemas() -> None:
    keys = all_spellings(PPOConfig)
    assert {"lambda", "num_sgd_iter", "num_epochs", "gamma", "num_envs"} <= set(keys)
    assert not {"lambda_", "timesteps", "cell_size"} & set(keys)
    assert "num_sgd_iter" not in all_spellings(AlgorithmConfig)


# -- files --------------------------------------------------------------------------------------------------------------


def test_a_file_of_experiments_is_read_by_name(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("one: {env: CartPole-v1, config: {lr: 3e-4}}\nzwölf:\n  env: X\n  config:\n", encoding="utf-8")
    assert load_experiments(file) == {
        "one": {"env": "CartPole-v1", "config": {"lr": 3e-4}},
        "zwölf": {"env": "X", "config": None},
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: \xff\xfe", "is not UTF-8 text"),
        (b"", "does not hold an experiment"),
        (b"- env: x", "does not hold an experiment"),
        (b"env: CartPole-v1", "does not hold an experiment by name"),
        (b"env: CartPole-v1\nconfig: {lr: 1}", "does not hold an experiment by name"),
        (b".only: {env: CartPole-v1}", "does not hold an experiment"),
        (b"{}", "does not hold an experiment"),
        (b"# " + b"x" * (1 << 20), "more than 1048576 bytes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_file_that_holds_no_experiment_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_experiments(file)
    assert str(file) in caught.value.message


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"Cannot read {re.escape(str(tmp_path / name))}"):
        load_experiments(tmp_path / name)


def test_what_begins_with_a_dot_is_a_place_for_anchors_and_no_experiment(tmp_path: Path) -> None:
    file = tmp_path / "anchors.yaml"
    file.write_text(
        ".all: &all {lr: 1e-3, model: &m {use_lstm: true}}\none: {env: X, config: {<<: *all, lr: 1e-4}}\ntwo: {env: Y, config: *all}"
    )
    found = load_experiments(file)
    assert found == {
        "one": {"env": "X", "config": {"lr": 1e-4, "model": {"use_lstm": True}}},
        "two": {"env": "Y", "config": {"lr": 1e-3, "model": {"use_lstm": True}}},
    }
    apply_override(found["one"], "model.core=gru")
    assert found["two"]["config"]["model"] == {"use_lstm": True}, "what was shared in the file is shared no more"


# -- the command line ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("lr=3e-4", {"config": {"gamma": 0.5, "lr": 3e-4}}),
        ("gamma=0.9", {"config": {"gamma": 0.9}}),
        ("config.gamma=0.9", {"config": {"gamma": 0.9}}),
        ("model.fcnet_hiddens=[32, 32]", {"config": {"gamma": 0.5, "model": {"fcnet_hiddens": [32, 32]}}}),
        ("env_config.map=large", {"config": {"gamma": 0.5, "env_config": {"map": "large"}}}),
        ("stop.timesteps=1000", {"config": {"gamma": 0.5}, "stop": {"timesteps": 1000}}),
        ("env=CartPole-v1", {"config": {"gamma": 0.5}, "env": "CartPole-v1"}),
        (" run =a=b", {"config": {"gamma": 0.5}, "run": "a=b"}),
        ("grad_clip=null", {"config": {"gamma": 0.5, "grad_clip": None}}),
    ],
)
def test_an_override_finds_its_section(assignment: str, expected: dict[str, Any]) -> None:
    data: dict[str, Any] = {"config": {"gamma": 0.5}}
    apply_override(data, assignment)
    assert data == expected


@pytest.mark.parametrize("empty", [{}, {"config": None}, {"config": {"model": None}}])
def test_an_override_fills_an_empty_section(empty: dict[str, Any]) -> None:
    apply_override(empty, "model.core=gru")
    assert empty == {"config": {"model": {"core": "gru"}}}


@pytest.mark.parametrize("assignment", ["", "lr", "=3", "a..b=3", ".a=3", "lr=[1", "lr=*x", "gamma.deeper=3", "env.x=3"])
def test_an_override_that_cannot_be_is_shown(assignment: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        apply_override({"env": "x", "config": {"gamma": 0.5}}, assignment)


def test_stops_of_the_command_line_are_numbers() -> None:
    assert parse_stop_values(["timesteps=1e6", " episode_reward_mean=-12.5", "iterations=3"]) == {
        "timesteps": 1_000_000,
        "episode_reward_mean": -12.5,
        "iterations": 3,
    }
    assert parse_experiment({"env": "x", "stop": parse_stop_values(["timesteps=1e6"])}).stop.timesteps == 1_000_000


@pytest.mark.parametrize(
    "pair", ["timesteps", "timesteps=", "timesteps=soon", "timesteps=true", "timesteps=.inf", "t=.nan", "t=[1]", "t=[1"]
)
def test_a_stop_that_is_no_number_is_shown(pair: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--stop {pair.partition('=')[0]}") + f"|{re.escape(pair)}"):
        parse_stop_values([pair])


# -- games that call us -------------------------------------------------------------------------------------------------

BOX, CHOICE = {"type": "Box", "shape": [2]}, {"type": "Discrete", "n": 2}
BOTH: dict[str, Any] = {"observation_space": BOX, "action_space": CHOICE}


def external_complaint(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_external_config(data)
    return caught.value.message


def test_a_game_has_one_seat_without_a_name_or_several_with_names() -> None:
    assert parse_external_config(BOTH).all_seats().keys() == {""}
    seats = parse_external_config({"seats": {"blue": BOTH, "red": BOTH | {"model": "other"}}}).all_seats()
    assert {name: seat.model for name, seat in seats.items()} == {"blue": "model", "red": "other"}


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"observation_space": BOX},
        {"action_space": CHOICE},
        {"seats": {}},
        {"seats": None},
        BOTH | {"seats": {"blue": BOTH}},
        {"observation_space": BOX, "seats": {"blue": BOTH}},
        {"action_space": CHOICE, "seats": {"blue": BOTH}},
    ],
)
def test_both_or_neither_of_spaces_and_seats_is_refused(data: dict[str, Any]) -> None:
    assert "give observation_space and action_space, or seats" in external_complaint(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (BOTH | {"prot": 1}, "Unknown key 'config.env_config.prot'. Did you mean 'port'"),
        (BOTH | {"max_session": 1}, "Did you mean 'max_sessions'"),
        ({"seats": {"blue": BOTH | {"modle": "x"}}}, "Unknown key 'config.env_config.seats.blue.modle'. Did you mean 'model'"),
        ({"seats": {"blue": {"observation_space": BOX}}}, "'config.env_config.seats.blue.action_space' is missing"),
        ({"seats": {"blue": None}}, "config.env_config.seats.blue is None"),
        ({"seats": {"blue": BOTH | {"model": "../up"}}}, "a model's name"),
        ({"seats": {"blue": BOTH | {"model": "blue.optimizer"}}}, "a model's name"),  # its file would be another's
        ({"seats": {"blue": BOTH | {"model": "sampler"}}}, "a model's name"),
        (BOTH | {"observation_space": [1]}, "config.env_config.observation_space is [1]"),
        (BOTH | {"port": -1}, "config.env_config.port is -1"),
        (BOTH | {"port": 70_000}, "config.env_config.port is 70000"),
        (BOTH | {"silent_s": 0}, "config.env_config.silent_s is 0"),
        (BOTH | {"tick_timeout_s": 0}, "config.env_config.tick_timeout_s is 0"),
        (BOTH | {"max_sessions": 0}, "config.env_config.max_sessions is 0"),
        (BOTH | {"max_body_bytes": 0}, "config.env_config.max_body_bytes is 0"),
    ],
)
def test_a_wrong_key_or_value_of_a_game_is_shown_with_its_path(data: dict[str, Any], words: str) -> None:
    assert words in external_complaint(data)


def test_batches_of_games_need_not_be_a_multiple_of_anything() -> None:
    made = parse_algorithm_config(PPOConfig, {"train_batch_size": 1000, "num_envs_per_worker": 7}, collated=True)
    assert (made.train_batch_size, made.steps) == (1000, COLLATED_STEPS)
    longer = parse_algorithm_config(PPOConfig, {"rollout_fragment_length": 300}, collated=True)
    assert longer.steps == 300


@pytest.mark.parametrize(
    ("assignment", "before", "after"),
    [
        ("heatup_steps=5", {"num_steps_sampled_before_learning_starts": 9, "heatup_episodes": 7},
         {"num_steps_sampled_before_learning_starts": 5, "heatup_episodes": 0}),
        ("config.heatup_steps=EnvironmentEpisodes(2)", {"learning_starts": 9},
         {"num_steps_sampled_before_learning_starts": 0, "heatup_episodes": 2}),
        ("evaluation_steps=EnvironmentEpisodes(3)", {"evaluation_num_episodes": 9},
         {"evaluation_duration": 3, "evaluation_duration_unit": "episodes"}),
        ("heatup_steps=forever", {}, {"heatup_steps": "forever"}),
    ],
)  # fmt: skip
def test_a_part_of_a_schedule_takes_the_place_of_what_was_there(
    assignment: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    data = {"config": before}
    apply_override(data, assignment)
    assert data["config"] == after


def test_improve_steps_takes_the_place_of_every_stop() -> None:
    data: dict[str, Any] = {"stopping_criteria": {"timesteps": 9, "episode_return_mean": 3}}
    apply_override(data, "improve_steps=TrainingSteps(4)")
    assert data == {"stop": {"iterations": 4}}


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:hush@host", "redis://:hush@host:6379/0", "redis://me:12/hush@host", "redis://me:hu/sh?#@host",
        "redis://host?password=hush", "mine:Class://me:hush@host",
    ],
)  # fmt: skip
def test_a_memory_with_a_password_in_its_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="memory contains a password") as refused:
        ExperimentConfig(env="CartPole-v1", memory=url)
    assert "hush" not in repr(refused.value)


@pytest.mark.parametrize("url", ["embedded", "redis://me@host:6379/0", "rediss://host:1?ssl_ca_certs=/ca", "mine:Class://host:1"])
def test_a_memory_without_one_stays_as_it_is(url: str) -> None:
    assert ExperimentConfig(env="CartPole-v1", memory=url).memory == url
