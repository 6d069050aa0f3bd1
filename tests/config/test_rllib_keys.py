"""RLlib's names: each has its meaning here, or a sentence that says why not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.algorithms.base import config_schemas
from ludus.config.aliases import rllib_keys
from ludus.config.aliases.unsupported_keys import unsupported_keys
from ludus.config.schema import AlgorithmConfig, ExperimentConfig, ModelConfig
from ludus.config.search_values import has_search, is_search
from ludus.config.translation import canonical_config, key_names, section_schemas, translate_config, translate_experiment
from ludus.config.validation import dump_config, parse_algorithm_config, parse_experiment
from ludus.errors import ConfigError, UsageError
from ludus.experiments.validation import validate
from ludus.experiments.validation.convert import convert
from ludus.io.yaml_documents import parse_yaml

OLD = Path(__file__).parents[1] / "old"
SCHEMAS = config_schemas()


def known_to_rllib() -> dict[str, list[str]]:
    """Section → names, as RLlib lists them itself."""
    found: dict[str, list[str]] = {}
    for line in (OLD / "rllib_keys.txt").read_text().splitlines():
        if line and line[0] not in " #":
            section = line.rstrip(":")
            found[section] = []
        elif line.startswith(" "):
            found[section] += line.split()
    return found


RLLIB = known_to_rllib()


def read(run: str, data: dict[str, Any]) -> AlgorithmConfig:
    return parse_algorithm_config(SCHEMAS[run], data, run=run, owners=validate.algorithms_with_key)


def noticed(run: str, data: dict[str, Any]) -> str:
    """The notices about keys that are ignored."""
    return "\n".join(translate_config(data, SCHEMAS[run]).notices())


def said(run: str, data: dict[str, Any]) -> str:
    """The complaint, or '' when there is none."""
    try:
        read(run, data)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("run", sorted(SCHEMAS))
def test_no_key_of_rllib_is_unknown(run: str) -> None:
    unheard_of = object()  # no value that any key has
    for key in [*RLLIB["config"], *RLLIB[run]]:
        if key == "env":  # is lifted out of config before
            continue
        message = said(run, {key: unheard_of}) or noticed(run, {key: unheard_of})
        assert message, key
        assert "Unknown key" not in message, message


@pytest.mark.parametrize("run", sorted(SCHEMAS))
def test_no_key_of_rllibs_models_is_unknown(run: str) -> None:
    for key in RLLIB["model"]:
        assert "Unknown key" not in said(run, {"model": {key: object()}}), key


def test_hundreds_of_names_are_known() -> None:
    assert len(RLLIB["config"]) > 250
    assert sum(map(len, unsupported_keys().values())) > 250
    assert sum(map(len, rllib_keys.RENAMED.values())) > 40


@pytest.mark.parametrize("section", list(unsupported_keys()))
def test_an_unsupported_key_has_a_reason_and_a_remedy(section: str) -> None:
    for key, reason in unsupported_keys()[section].items():
        assert 15 < len(reason.why) < 160, key
        assert reason.why.endswith("."), key
        assert "\n" not in reason.why


@pytest.mark.parametrize("section", list(unsupported_keys()))
def test_every_name_stands_in_one_table(section: str) -> None:
    tables = [set(rllib_keys.RENAMED[section]), set(unsupported_keys()[section])]
    assert not tables[0] & tables[1]
    assert not set(rllib_keys.TRANSLATED[section]) & tables[1]
    assert not set(rllib_keys.TRANSLATED[section]) & tables[0]


def test_renamed_keys_become_keys_of_a_schema() -> None:
    for section, table in rllib_keys.RENAMED.items():
        having = list(SCHEMAS.values()) if section == "config" else [section_schemas()[section]]
        for name in table.values():
            assert any(name in key_names(schema) for schema in having), f"{section}.{name}"


# -- meanings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"framework": "torch"}, {}),
        ({"use_pytorch": True}, {}),
        ({"ignore_worker_failures": True}, {}),
        ({"ignore_worker_failures": False}, {"max_worker_restarts": 0}),
        ({"ignore_env_runner_failures": False, "restart_failed_env_runners": True}, {}),
        ({"restart_failed_env_runners": False}, {"max_worker_restarts": 0}),
        ({"rollout_fragment_length": "auto"}, {}),
        ({"observation_filter": "ConcurrentMeanStdFilter"}, {"observation_filter": "MeanStdFilter"}),
        ({"seed": None}, {}),
        ({"evaluation_interval": None}, {"evaluation_duration": 0}),
        ({"evaluation_interval": 0}, {"evaluation_duration": 0}),
        ({"evaluation_interval": None, "evaluation_duration": 10}, {"evaluation_duration": 0}),
        ({"evaluation_duration": "auto", "evaluation_interval": 0}, {"evaluation_duration": 0}),
        ({"evaluation_num_episodes": 3, "evaluation_interval": None}, {"evaluation_duration": 0}),
        ({"evaluation_num_episodes": 3}, {"evaluation_duration": 3}),
        ({"lr": 1e-3, "lr_schedule": [[0, 1e-4], [10, 0]]}, {"lr": [[0, 1e-4], [10, 0]]}),
        ({"lr": 1e-3, "lr_schedule": None}, {"lr": 1e-3}),
        ({"entropy_coeff_schedule": [[0, 0.1], [9, 0]]}, {"entropy_coeff": [[0, 0.1], [9, 0]]}),
        ({"train_batch_size_per_learner": 512, "num_learners": 2}, {"train_batch_size": 1024, "num_learners": 2}),
        ({"exploration_config": {"type": "StochasticSampling"}}, {}),
        ({"exploration_config": {}}, {}),
        ({"vf_share_layers": True}, {"model": {"vf_share_layers": True}}),
        ({"model": {"conv_filters": [[16, [8, 8], 4]]}}, {"model": {"conv_filters": [[16, 8, 4]]}}),
        ({"model": {"fcnet_activation": "ReLU"}}, {"model": {"fcnet_activation": "relu"}}),
        ({"model": {"fcnet_activation": None}}, {"model": {"fcnet_activation": "linear"}}),
        ({"model": {"lstm_cell_size": 64, "use_lstm": True}}, {"model": {"cell_size": 64, "use_lstm": True}}),
        ({"model": {"lstm_use_prev_action": False, "use_attention": False}}, {}),
        ({"model": None, "env_config": None, "evaluation_config": None}, {}),
        ({"horizon": 200}, {"preprocess": {"max_episode_steps": 200}}),
        ({"horizon": None, "clip_rewards": None}, {}),
        ({"clip_rewards": 1.0}, {"preprocess": {"clip_reward": [-1.0, 1.0]}}),
        ({"clip_rewards": True}, {"preprocess": {"clip_reward": True}}),
        ({"num_cpus_per_worker": 1, "use_gae": True, "normalize_actions": True, "clip_actions": False}, {}),
        ({"policies_to_train": ["a"]}, {"multiagent": {"policies_to_train": ["a"]}}),
        ({"lambda_": 0.5}, {"lambda": 0.5}),
    ],
    ids=str,
)
def test_an_old_way_to_write_it_is_read_as_the_present_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read("PPO", old) == read("PPO", new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"exploration_config": {"type": "EpsilonGreedy", "initial_epsilon": 0.9, "final_epsilon": 0.02, "epsilon_timesteps": 500}},
            {"epsilon": [[0, 0.9], [500, 0.02]]},
        ),
        (
            {"exploration_config": {"final_epsilon": 0.1, "warmup_timesteps": 100, "epsilon_timesteps": 500}},
            {"epsilon": [[100, 1.0], [600, 0.1]]},
        ),
        ({"exploration_config": {"final_epsilon": 0.1, "epsilon_timesteps": 0}}, {"epsilon": 0.1}),
        (
            {"exploration_config": {"final_epsilon": 0.1, "warmup_timesteps": 100, "epsilon_timesteps": 0}},
            {"epsilon": [[100, 1.0], [101, 0.1]]},
        ),
        (  # as RLlib dumps it
            {"num_atoms": 1, "v_min": -10.0, "v_max": 10.0, "noisy": False, "sigma0": 0.5, "buffer_size": -1, "learning_starts": -1,
             "prioritized_replay": -1, "prioritized_replay_alpha": -1, "replay_sequence_length": 1, "replay_mode": -1,
             "worker_side_prioritization": -1, "categorical_distribution_temperature": 1.0,
             "replay_buffer_config": {"type": "MultiAgentPrioritizedReplayBuffer", "prioritized_replay": -1, "capacity": 500,
                                      "prioritized_replay_alpha": 0.7, "replay_sequence_length": 1,
                                      "worker_side_prioritization": False, "replay_mode": "independent"}},
            {"replay_buffer_config": {"capacity": 500, "alpha": 0.7}},
        ),
        (
            {"prioritized_replay": False, "replay_buffer_config": {"type": "MultiAgentReplayBuffer", "prioritized_replay": False}},
            {"replay_buffer_config": {"type": "ReplayBuffer"}},
        ),
        ({"buffer_size": 1000, "learning_starts": 10},
         {"replay_buffer_config": {"capacity": 1000}, "num_steps_sampled_before_learning_starts": 10}),
        ({"prioritized_replay": False}, {"replay_buffer_config": {"type": "ReplayBuffer"}}),
        ({"prioritized_replay_alpha": 0.5}, {"replay_buffer_config": {"alpha": 0.5}}),
        (
            {"replay_buffer_config": {"type": "MultiAgentPrioritizedReplayBuffer", "capacity": 99, "learning_starts": 7}},
            {"replay_buffer_config": {"capacity": 99}, "num_steps_sampled_before_learning_starts": 7},
        ),
    ],
    ids=str,
)  # fmt: skip
def test_an_old_way_to_write_dqn_is_read_as_the_present_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read("DQN", old) == read("DQN", new) != read("DQN", {})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"heatup_steps": 500}, {"num_steps_sampled_before_learning_starts": 500, "heatup_episodes": 0}),
        ({"heatup_steps": "EnvironmentSteps(500)"}, {"num_steps_sampled_before_learning_starts": 500, "heatup_episodes": 0}),
        ({"heatup_steps": "EnvironmentEpisodes( 5 )"}, {"heatup_episodes": 5, "num_steps_sampled_before_learning_starts": 0}),
        ({"steps_between_evaluation_periods": 2048}, {"evaluation_interval": 2048, "evaluation_interval_unit": "timesteps"}),
        ({"steps_between_evaluation_periods": "TrainingSteps(3)"}, {"evaluation_interval": 3, "evaluation_interval_unit": "iterations"}),
        ({"evaluation_steps": "EnvironmentEpisodes(5)"}, {"evaluation_duration": 5}),
        ({"evaluation_steps": 1000}, {"evaluation_duration": 1000, "evaluation_duration_unit": "timesteps"}),
        ({"evaluation_steps": 0}, {"evaluation_duration": 0}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("run", sorted(SCHEMAS))
def test_a_schedule_of_coach_is_read_as_ours(run: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read(run, old) == read(run, new)
    assert read(run, old) != read(run, {})
    beside = translate_experiment({"env": "A", "run": run, **old})
    assert beside.problems() == []
    assert read(run, beside.data["config"]) == read(run, new), "it may stand beside config, as Coach has it"


@pytest.mark.parametrize(
    ("value", "stop"),
    [
        (100, {"timesteps": 100}),
        ("EnvironmentSteps(1_000)", {"timesteps": 1000}),
        ("EnvironmentEpisodes(7)", {"episodes": 7}),
        ("TrainingSteps(9)", {"iterations": 9}),
    ],
)
def test_improve_steps_sets_the_end_of_the_training(value: Any, stop: dict[str, int]) -> None:
    checked = parse_experiment({"env": "A", "improve_steps": value})
    assert checked.stop.model_dump(exclude_none=True) == stop


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"heatup_steps": "TrainingSteps(5)"}, r"heatup_steps .* is a number of steps, or EnvironmentSteps\(…\) or EnvironmentEpisodes"),
        ({"heatup_steps": True}, r"is a number of steps"),
        ({"heatup_steps": -1}, r"is a number of steps"),
        ({"evaluation_steps": "5 episodes"}, r"is a number of steps"),
        ({"improve_steps": "forever"}, r"is a number of steps"),
        ({"improve_steps": 0}, r"above 0"),
        ({"config": {"improve_steps": 5}}, r"belongs next to config"),
        ({"heatup_steps": 5, "config": {"num_steps_sampled_before_learning_starts": 6}}, r"Keep one"),
        ({"improve_steps": 5, "stop": {"timesteps": 6}}, r"Keep one"),
    ],
    ids=str,
)  # fmt: skip
def test_a_schedule_that_cannot_be_meant_is_refused(data: dict[str, Any], words: str) -> None:
    assert re.search(words, "\n".join(validate.validate_experiment({"env": "CartPole-v1", **data})))


@pytest.mark.parametrize(
    ("run", "data", "words"),
    [
        ("PPO", {"framework": "tf", "model": {"custom_model": "m:M"}}, r"config\.framework \('tf'\) names TensorFlow together with a custom_model"),
        ("PPO", {"use_pytorch": False, "model": {"custom_model": "m:M"}}, r"names TensorFlow together with a custom_model"),
        ("PPO", {"framework": "jax"}, r"is torch, tf or tf2"),
        ("PPO", {"_separate_vf_optimizer": True}, r"is not supported: policy and value have one optimizer"),
        ("PPO", {"rl_module_spec": "x"}, r"replaces a class inside RLlib"),
        ("PPO", {"model": {"post_fcnet_hiddens": [8]}}, r"layers after convolutions are fcnet_hiddens"),
        ("PPO", {"model": {"dim": "wide"}}, r"model\.dim \('wide'\) is the height and width"),
        ("DQN", {"min_train_timesteps_per_iteration": 5}, r"use min_sample_timesteps_per_iteration"),
        ("PPO", {"model": {"use_attention": True}}, r"config\.model\.use_attention \(True\) belongs to attention"),
        ("PPO", {"model": {"conv_filters": [[16, [8, 4], 4]]}}, r"conv_filters .* convolutions here are square"),
        ("PPO", {"evaluation_config": {"num_workers": 2}}, r"config\.evaluation_config\.num_workers \(2\) .*evaluation_num_workers"),
        ("PPO", {"evaluation_duration": "auto"}, r"is a number of episodes here"),
        ("PPO", {"evaluation_duration_unit": "seconds"}, r"evaluation_duration_unit is 'seconds'"),
        ("PPO", {"exploration_config": {"type": "SoftQ"}}, r"names SoftQ, which is not supported"),
        ("PPO", {"sample_async": True}, r"is `sampling: pipelined`"),
        ("PPO", {"callbacks": "my.Callbacks"}, r"is a Python callback"),
        ("PPO", {"double_q": True}, r"'config\.double_q' is a key of DQN; this is PPO"),
        ("DQN", {"clip_param": 0.1}, r"'config\.clip_param' is a key of PPO and APPO; this is DQN"),
        ("DQN", {"num_sgd_iter": 3}, r"'config\.num_sgd_iter' is a key of PPO, APPO and IMPALA; this is DQN"),
        ("PPO", {"exploration_config": {"type": "EpsilonGreedy"}}, r"'config\.exploration_config' is a key of DQN; this is PPO"),
        ("IMPALA", {"epsilon": 0.1}, r"adam_epsilon"),
        ("IMPALA", {"num_atoms": 3}, r"distributional"),
        ("DQN", {"num_atoms": 51, "v_min": -10.0}, r"config\.v_min \(-10\.0\) belongs to distributional"),
        ("DQN", {"noisy": True, "sigma0": 0.5}, r"config\.sigma0 \(0\.5\) belongs to noisy networks"),
        ("DQN", {"replay_sequence_length": 20}, r"replay_sequence_length \(20\) belongs to recurrent replay \(R2D2\), which is not supported"),
        ("PPO", {"td_error_loss_fn": "huber"}, r"'config\.td_error_loss_fn' is a key of DQN; this is PPO"),
        ("PPO", {"training_intensity": None}, r"'config\.training_intensity' is a key of DQN; this is PPO"),
        ("PPO", {"store_buffer_in_checkpoints": False}, r"'config\.store_buffer_in_checkpoints' is a key of DQN; this is PPO"),
        ("DQN", {"replay_buffer_config": {"alpha": 0.5, "prioritized_replay_alpha": 0.6}}, r"alpha and prioritized_replay_alpha mean the same"),
        ("DQN", {"replay_buffer_config": {"alpha": 0.5}, "prioritized_replay_alpha": 0.6}, r"alpha is 0\.5, and .* is 0\.6"),
        ("DQN", {"replay_buffer_config": {"type": "MultiAgentReplayBuffer", "prioritized_replay": True}},
         r"prioritized_replay is true, and type is ReplayBuffer"),
        ("DQN", {"replay_buffer_config": {"type": "PrioritizedReplayBuffer", "prioritized_replay": False}}, r"keep one"),
        ("DQN", {"replay_buffer_config": {"type": "ReplayBuffer"}, "prioritized_replay": True}, r"Keep one"),
        ("DQN", {"replay_buffer_config": {"replay_sequence_length": 20}}, r"replay_sequence_length: steps are stored and sampled one by one"),
        ("PPO", {"fcnet_hiddens": [4]}, r"'config\.fcnet_hiddens' is in the wrong place: fcnet_hiddens belongs into config\.model"),
        ("PPO", {"model": {"lr": 1}}, r"'config\.model\.lr' is in the wrong place: lr belongs into config"),
        ("PPO", {"checkpoint_freq": 3}, r"'config\.checkpoint_freq' is nested too deep: checkpoint_freq belongs next to config"),
        ("PPO", {"lr": {"grid_search": [1, 2]}}, r"config\.lr is searched over \(grid_search\)"),
        ("PPO", {"evaluation_config": {"explroe": True}}, r"Unknown key 'config\.evaluation_config\.explroe'\. Did you mean 'explore'"),
        ("PPO", {"preprocess": {"frame_skp": 2}}, r"Unknown key 'config\.preprocess\.frame_skp'\. Did you mean 'frame_skip'"),
        ("PPO", {"multiagent": {"polices": ["a"]}}, r"Unknown key 'config\.multiagent\.polices'\. Did you mean 'policies'"),
        ("DQN", {"replay_buffer_config": {"capacty": 3}}, r"Unknown key 'config\.replay_buffer_config\.capacty'\. Did you mean 'capacity'"),
        ("PPO", {"num_sgd_iter": "many"}, r"config\.num_sgd_iter is 'many'"),
        ("PPO", {"num_rollout_workers": -1}, r"config\.num_rollout_workers is -1"),
        ("PPO", {"model": {"lstm_cell_size": 0}}, r"config\.model\.lstm_cell_size is 0"),
    ],
)  # fmt: skip
def test_errors_name_the_key_as_it_was_written(run: str, data: dict[str, Any], words: str) -> None:
    assert re.search(words, said(run, data)), said(run, data)


def test_values_that_match_the_default_are_compared_by_type() -> None:
    assert not said("PPO", {"num_gpus_per_worker": 0})
    assert not said("PPO", {"num_gpus_per_worker": 0.0})
    assert noticed("PPO", {"num_cpus_per_worker": True}), "true is no number of cores"
    assert said("PPO", {"use_critic": 1}), "1 is not true"
    assert said("PPO", {"use_gae": 1}), "1 is not true"


@pytest.mark.parametrize(
    ("run", "data", "words"),
    [
        ("PPO", {"framework": "tf"}, r"config\.framework \('tf'\) is ignored: the same layers are built with PyTorch\."),
        ("PPO", {"framework": "tf2"}, r"is ignored"),
        ("PPO", {"use_pytorch": False}, r"is ignored"),
        ("PPO", {"log_level": "WARN"}, r"config\.log_level \('WARN'\) is ignored: it is an option of the command: -v"),
        ("PPO", {"num_gpus_per_worker": 1}, r"inference_device is cuda"),
        ("PPO", {"enable_connectors": True}, r"it chooses between implementations inside RLlib"),
        ("PPO", {"_enable_learner_api": True, "_enable_rl_module_api": True}, r"_enable_learner_api .*\n.*_enable_rl_module_api"),
        ("PPO", {"enable_rl_module_and_learner": True, "enable_env_runner_and_connector_v2": True}, r"there is one here"),
        ("APPO", {"_disable_execution_plan_api": False}, r"there is one here"),
        ("APPO", {"minibatch_buffer_size": 4, "learner_queue_size": 16}, r"it sizes a queue inside RLlib"),
        ("IMPALA", {"broadcast_interval": 5}, r"workers take the newest weights before every segment\."),
        ("DQN", {"batch_mode": "complete_episodes"}, r"single steps are drawn from the replay buffer"),
        ("PPO", {"batch_mode": "complete_episodes", "num_workers": 4}, r"num_workers \(4\) is ignored: .* one process samples"),
        ("PPO", {"_fake_gpus": True, "num_gpus": 2}, r"num_gpus counts as 0"),
        ("PPO", {"model": {"zero_mean": True}}, r"config\.model\.zero_mean \(True\) is ignored: pixels are scaled to 0 … 1\."),
        ("PPO", {"framework": {"grid_search": ["tf", "torch"]}}, r"none of these values changes the training: it is one trial\."),
        ("PPO", {"_enable_learner_api": {"grid_search": [True, False]}}, r"it is one trial"),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_accepted_with_a_notice(run: str, data: dict[str, Any], words: str) -> None:
    assert said(run, data) == ""
    assert re.search(words, noticed(run, data)), noticed(run, data)


@pytest.mark.parametrize(
    ("run", "old", "new"),
    [
        ("PPO", {"_fake_gpus": True, "num_gpus": 2}, {"num_gpus": 0}),
        ("PPO", {"_fake_gpus": True, "num_gpus_per_learner": 1, "num_learners": 2}, {"num_gpus": 0, "num_learners": 2}),
        ("APPO", {"num_gpus": 0, "num_gpus_per_learner_worker": 1}, {"num_gpus": 1}),
        ("PPO", {"use_gae": False, "lambda": 0.9}, {"lambda": 1.0}),
        ("IMPALA", {"replay_ratio": 0.0}, {}),
        ("IMPALA", {"replay_ratio": 0.5}, {"replay_proportion": 2.0}),
        ("PPO", {"model": {"dim": 42, "grayscale": True, "framestack": False}}, {"preprocess": {"resize": [42, 42], "grey": True, "stack": 1}}),
        ("PPO", {"model": {"dim": 84, "framestack": True, "zero_mean": False}}, {}),
        ("PPO", {"model": {"num_framestacks": 2}, "preprocess": {"grey": True}}, {"preprocess": {"stack": 2, "grey": True}}),
        ("PPO", {"model": {"dim": 42, "post_fcnet_hiddens": [256]}}, {"preprocess": {"resize": [42, 42]}, "model": {"fcnet_hiddens": [256]}}),
        ("PPO", {"model": {"fcnet_hiddens": [8], "post_fcnet_hiddens": [4]}}, {"model": {"fcnet_hiddens": [8, 4]}}),
        ("DQN", {"prioritized_replay_beta": 0.5, "final_prioritized_replay_beta": 1.0, "prioritized_replay_beta_annealing_timesteps": 100},
         {"replay_buffer_config": {"beta": [[0, 0.5], [100, 1.0]]}}),
        ("DQN", {"final_prioritized_replay_beta": 0.4}, {"replay_buffer_config": {"beta": 0.4}}),
        ("DQN", {"replay_buffer_config": {"min_size_for_sampling": 7}}, {"num_steps_sampled_before_learning_starts": 7}),
        ("DQN", {"replay_buffer_config": {"min_size_for_sampling": 0}, "num_steps_sampled_before_learning_starts": 7},
         {"num_steps_sampled_before_learning_starts": 7}),
        ("DQN", {"timesteps_per_iteration": 500}, {"min_sample_timesteps_per_iteration": 500}),
        ("DQN", {"batch_mode": "complete_episodes"}, {}),
        ("PPO", {"batch_mode": "complete_episodes", "num_workers": 4}, {"batch_mode": "complete_episodes"}),
        ("PPO", {"framework": {"grid_search": ["tf", "torch"]}}, {}),
    ],
)  # fmt: skip
def test_a_value_of_rllib_is_read_as_the_one_here(run: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert dump_config(read(run, old)) == dump_config(read(run, new))


@pytest.mark.parametrize(
    ("run", "given", "meant", "keys"),
    [
        ("SimpleQ", {"lr": 1e-3}, "DQN", {"lr": 1e-3, "double_q": False, "dueling": False, "replay_buffer_config": {"type": "ReplayBuffer"}}),
        ("SimpleQ", {"dueling": True, "prioritized_replay": True}, "DQN", {"dueling": True, "double_q": False, "prioritized_replay": True}),
        ("simpleq", {"replay_buffer_config": {"capacity": 5}}, "DQN",
         {"double_q": False, "dueling": False, "replay_buffer_config": {"capacity": 5, "type": "ReplayBuffer"}}),
        ("A2C", {"train_batch_size": 500}, "PPO",
         {"train_batch_size": 500, "minibatch_size": 500, "num_epochs": 1, "kl_coeff": 0.0}),
        ("A2C", {"rollout_fragment_length": 20, "num_workers": 5, "num_envs": 5}, "PPO",
         {"rollout_fragment_length": 20, "num_workers": 5, "num_envs": 5, "train_batch_size": 500, "minibatch_size": 500,
          "num_epochs": 1, "kl_coeff": 0.0}),
        ("A2C", {"train_batch_size": 400, "microbatch_size": 100}, "PPO",
         {"train_batch_size": 400, "minibatch_size": 400, "num_epochs": 1, "kl_coeff": 0.0, "gradient_accumulation": 4}),
    ],
)  # fmt: skip
def test_an_algorithm_that_is_a_setting_of_another_is_read_as_that(
    run: str, given: dict[str, Any], meant: str, keys: dict[str, Any]
) -> None:
    data = {"env": "CartPole-v1", "run": run, "config": given}
    found = translate_experiment(data)
    assert (found.data["run"], found.data["config"]) == (meant, keys)
    assert validate.validate_experiment(data) == []
    assert validate.find_notices(data)[0].startswith(f"run: {run} is trained as {meant} with ")


def test_present_names_are_found_without_knowing_the_algorithm_and_nothing_is_lost() -> None:
    old = {"num_env_runners": 2, "epsilon": [[0, 1.0]], "framework": "jax", "model": {"lstm_cell_size": 3, "use_attention": True}}
    new = {"num_workers": 2, "epsilon": [[0, 1.0]], "framework": "jax", "model": {"cell_size": 3, "use_attention": True}}
    assert canonical_config(old) == new
    assert canonical_config(new) == new
    with pytest.raises(ConfigError, match="framework"):
        canonical_config(old, SCHEMAS["DQN"])
    with pytest.raises(ConfigError, match="twice"):
        canonical_config({"num_workers": 1, "num_env_runners": 2})


# -- the experiment -----------------------------------------------------------------------------------------------------


def test_the_environment_may_stand_in_the_config_as_tune_had_it() -> None:
    assert parse_experiment({"config": {"env": "CartPole-v1"}}).env == "CartPole-v1"
    assert parse_experiment({"env": "CartPole-v1", "config": {"env": "CartPole-v1"}}).env == "CartPole-v1"
    assert parse_experiment({"env": "CartPole-v1", "config": {"env": None, "lr": 1}}).config == {"lr": 1}
    with pytest.raises(ConfigError, match="sets env twice: 'A', and 'B' in config"):
        parse_experiment({"env": "A", "config": {"env": "B"}})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"checkpoint_config": {"checkpoint_frequency": 3, "num_to_keep": 2}}, {"checkpoint_freq": 3, "keep_checkpoints_num": 2}),
        ({"checkpoint_config": {"checkpoint_score_order": "max", "checkpoint_at_end": False}}, {"checkpoint_at_end": False}),
        ({"time_budget_s": 60}, {"stop": {"time_s": 60}}),
        ({"repeat": 3}, {"num_samples": 3}),
        ({"stop": None, "config": None, "tune": None, "track": None}, {}),
        ({"checkpoint_score_attr": "episode_reward_mean"}, {}),
    ],
)
def test_an_old_way_to_write_an_experiment_is_read_as_the_present_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert parse_experiment({"env": "x", **old}) == parse_experiment({"env": "x", **new})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"local_dir": "x"}, r"local_dir \('x'\) is an option of the command: --local-dir"),
        ({"stop": {"episode_reward_max": 3}}, r"stop\.episode_reward_max \(3\) is not a stop here"),
        ({"stop": {"timesteps_total": 3, "timesteps": 4}}, r"stop sets 'timesteps' twice: 'timesteps_total' is 3, and 'timesteps'.* is 4"),
        ({"checkpoint_config": {"num_to_keep": 2}, "keep_checkpoints_num": 3}, r"sets 'keep_checkpoints_num' twice"),
        ({"checkpoint_score_attr": "min-loss"}, r"checkpoint_score_attr \('min-loss'\) chooses the best checkpoint"),
        ({"num_workers": 3}, r"'num_workers' is in the wrong place: num_workers belongs into config"),
        ({"timesteps": 3}, r"'timesteps' is in the wrong place: timesteps belongs into stop and target"),
        ({"tune": {"schedular": "asha"}}, r"Unknown key 'tune\.schedular'\. Did you mean 'scheduler'"),
        ({"track": {"wandb": {"projct": "x"}}}, r"Unknown key 'track\.wandb\.projct'\. Did you mean 'project'"),
        ({"target": {"return_men": 3, "timesteps": 1}}, r"Unknown key 'target\.return_men'\. Did you mean 'return_mean'"),
    ],
)  # fmt: skip
def test_errors_in_an_experiment_are_reported(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_experiment({"env": "x", **data})
    assert re.search(words, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("run", ["SAC", "A3C", "apex", "contrib/MADDPG", "DDPPO"])
def test_an_algorithm_of_rllib_that_is_not_here_is_named_with_the_nearest(run: str) -> None:
    with pytest.raises(UsageError, match=rf"{run} is not supported: .*Known: PPO"):
        validate.algorithm_of(run)


def test_an_unknown_algorithm_is_an_error() -> None:
    with pytest.raises(UsageError, match="Unknown algorithm 'PPPO'"):
        validate.algorithm_of("PPPO")


# -- searches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"grid_search": [1, 2]}, True),
        ({"uniform": [0, 1]}, True),
        ({"grid_search": [1], "lr": 2}, False),
        ({"grid": [1]}, False),
        ([1, 2], False),
        ({}, False),
    ],
)
def test_a_search_is_a_mapping_of_one_word(value: Any, expected: bool) -> None:
    assert is_search(value) is expected
    assert has_search({"a": [{"b": value}]}) is expected


def test_every_value_of_a_search_is_checked() -> None:
    data = {"env": "CartPole-v1", "config": {"lr": {"grid_search": [1e-3, "fast"]}, "gamma": {"choice": [0.9, 1.5]}}}
    assert validate.validate_experiment(data) == [
        "config.lr is 'fast': Input should be a valid number, unable to parse string as a number.",
        "config.gamma is 1.5: Input should be less than or equal to 1.",
    ]
    assert validate.validate_experiment({"env": "CartPole-v1", "config": {"lr": {"loguniform": [1e-5, 1e-3]}}}) == []
    assert validate.validate_experiment({"env": "CartPole-v1", "config": {"gama": {"loguniform": [1e-5, 1e-3]}}})


def test_all_complaints_of_an_experiment_come_at_once() -> None:
    found = validate.validate_experiment(
        {
            "env": "CartPol-v1",
            "checkpoint_frq": 1,
            "stop": {"iteration": 3},
            "config": {"gama": 1, "framework": "jax", "num_epochs": 1.5},
        }
    )
    expected = ("stop.iteration", "checkpoint_frq", "CartPol-v1", "config.framework", "config.gama", "config.num_epochs")
    assert sorted(next(word for word in expected if word in line) for line in found) == sorted(expected)


@pytest.mark.parametrize("run", ["PP0", "Nobody"])
def test_an_unknown_algorithm_hides_no_complaint_about_its_config(run: str) -> None:
    found = validate.validate_experiment(
        {"env": "CartPole-v1", "run": run, "config": {"gama": 1, "gamma": 1.5, "model": {"x": 1}}}
    )
    assert [complaint.path for complaint in found] == ["run", "config.gama", "config.gamma", "config.model.x"] or {
        complaint.path for complaint in found
    } == {"run", "config.gama", "config.gamma", "config.model.x"}


def test_keys_of_any_algorithm_are_no_complaint_when_the_algorithm_is_unknown() -> None:
    found = validate.validate_experiment({"env": "CartPole-v1", "run": "Nobody", "config": {"clip_param": 0.1, "double_q": True}})
    assert [complaint.path for complaint in found] == ["run"]


def test_a_minibatch_larger_than_its_batch_is_reported_with_other_problems() -> None:
    data = {"env": "CartPole-v1", "config": {"sgd_minibatch_size": 4000, "train_batch_size": 1024, "gama": 1}}
    found = validate.validate_experiment(data)
    assert {complaint.path for complaint in found} == {"config.sgd_minibatch_size", "config.gama"}
    assert "config.sgd_minibatch_size is 4000, and a batch has 1024 steps (train_batch_size). Set it to 1024 or less." in found
    assert validate.validate_experiment({"env": "CartPole-v1", "config": {"train_batch_size": 512}}) == [], (
        "the default is no complaint"
    )


# -- nonsense -----------------------------------------------------------------------------------------------------------

_NAMES = {
    "": [*rllib_keys.RENAMED[""], *rllib_keys.TRANSLATED[""], *unsupported_keys()[""], *ExperimentConfig.model_fields],
    "config": [*RLLIB["config"], *RLLIB["PPO"], *RLLIB["DQN"], *RLLIB["APPO"], *SCHEMAS["PPO"].model_fields],
    "model": [*RLLIB["model"], *ModelConfig.model_fields],
    "stop": [*rllib_keys.RENAMED["stop"], *unsupported_keys()["stop"]],
}
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["auto", "PPO", "DQN", "tf", "", "CartPole-v1"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "grid_search", "a", "capacity"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def _section(name: str, size: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(_NAMES[name]), _VALUES, max_size=size)


@given(
    _section("", 3),
    _section("config", 6),
    _section("model", 3),
    _section("stop", 2),
    st.sampled_from(["PPO", "DQN", "IMPALA", "SAC"]),
)
@settings(max_examples=80, deadline=None)
def test_nonsense_is_complained_about_and_never_a_crash(
    top: dict[str, Any], inner: dict[str, Any], model: dict[str, Any], stop: dict[str, Any], run: str
) -> None:
    data = {"env": "CartPole-v1", "run": run, "stop": stop, "config": {**inner, "model": model}, **top}
    found = validate.validate_experiment(data, env_too=False)
    assert all(isinstance(line, str) and line for line in found)
    try:
        text = convert({"x": data}, "x").text
    except ConfigError:
        return
    for converted in parse_yaml(text, "x").values():
        assert validate.validate_experiment(converted, env_too=False) == [], "what was converted is right"
