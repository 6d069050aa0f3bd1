"""Names of Stable-Baselines3, CleanRL and ML-Agents: the same key here, a value computed from them, or what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ludus.algorithms.base import config_schemas
from ludus.config.aliases import sb3_cleanrl
from ludus.config.overrides import apply_override
from ludus.config.schema import AlgorithmConfig
from ludus.config.validation import parse_algorithm_config, parse_experiment
from ludus.errors import ConfigError
from ludus.experiments.validation import explain, validate

SCHEMAS = config_schemas()
SB3_PPO = {
    "learning_rate": 3e-4, "n_steps": 2048, "batch_size": 64, "n_epochs": 10, "gamma": 0.98, "gae_lambda": 0.9, "clip_range": 0.1,
    "clip_range_vf": None, "normalize_advantage": True, "ent_coef": 0.01, "vf_coef": 0.4, "max_grad_norm": 0.7, "use_sde": False,
    "sde_sample_freq": -1, "rollout_buffer_class": None, "rollout_buffer_kwargs": None, "target_kl": None, "stats_window_size": 50,
    "tensorboard_log": None, "policy_kwargs": {"net_arch": [32, 32], "activation_fn": torch.nn.ReLU}, "verbose": 1, "seed": 3,
    "device": "auto", "n_envs": 4, "policy": "MlpPolicy",
}  # fmt: skip
SB3_DQN = {
    "learning_rate": 1e-4, "buffer_size": 9000, "learning_starts": 100, "batch_size": 64, "tau": 1.0, "gamma": 0.99, "train_freq": 4,
    "gradient_steps": 2, "n_steps": 3, "target_update_interval": 700, "max_grad_norm": 10, "optimize_memory_usage": False,
    "replay_buffer_class": None, "n_envs": 2,
}  # fmt: skip
CLEANRL_PPO = {
    "seed": 1, "torch_deterministic": True, "cuda": False, "capture_video": False, "learning_rate": 2.5e-4, "num_envs": 8,
    "num_steps": 128, "anneal_lr": False, "gamma": 0.99, "gae_lambda": 0.95, "num_minibatches": 4, "update_epochs": 4, "norm_adv": True,
    "clip_coef": 0.2, "clip_vloss": False, "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5, "target_kl": None,
}  # fmt: skip


def read(run: str, data: dict[str, Any]) -> AlgorithmConfig:
    return parse_algorithm_config(SCHEMAS[run], data, run=run, owners=validate.algorithms_with_key)


@pytest.mark.parametrize(
    ("run", "theirs", "ours"),
    [
        (
            "PPO", SB3_PPO,
            {"lr": 3e-4, "rollout_fragment_length": 2048, "num_envs_per_worker": 4, "minibatch_size": 64, "num_epochs": 10,
             "gamma": 0.98, "lambda": 0.9, "clip_param": 0.1, "entropy_coeff": 0.01, "vf_loss_coeff": 0.4, "grad_clip": 0.7,
             "metrics_num_episodes_for_smoothing": 50, "model": {"fcnet_hiddens": [32, 32], "fcnet_activation": "relu"}, "seed": 3},
        ),
        (
            "DQN", SB3_DQN,
            {"lr": 1e-4, "replay_buffer_config": {"capacity": 9000}, "num_steps_sampled_before_learning_starts": 100, "gamma": 0.99,
             "train_batch_size": 64, "training_intensity": 16.0, "n_step": 3, "target_network_update_freq": 700, "grad_clip": 10,
             "num_envs_per_worker": 2, "tau": 1.0},
        ),
        (
            "PPO", CLEANRL_PPO,
            {"seed": 1, "lr": 2.5e-4, "num_envs_per_worker": 8, "rollout_fragment_length": 128, "minibatch_size": 256,
             "num_epochs": 4, "entropy_coeff": 0.01, "vf_loss_coeff": 0.25, "grad_clip": 0.5, "clip_param": 0.2,
             "gamma": 0.99, "lambda": 0.95, "normalize_advantage": True},
        ),
        ("DQN", {"train_frequency": 10, "batch_size": 128, "target_network_frequency": 500},
         {"training_intensity": 12.8, "train_batch_size": 128, "target_network_update_freq": 500}),
        ("PPO", {"num_epoch": 3, "lambd": 0.9, "network_settings": {"hidden_units": 32, "num_layers": 3, "normalize": True}},
         {"num_epochs": 3, "lambda": 0.9, "model": {"fcnet_hiddens": [32] * 3}, "observation_filter": "MeanStdFilter"}),
        ("PPO", {"policy_kwargs": {"net_arch": {"pi": [8], "vf": [8]}, "optimizer_kwargs": {"eps": 1e-7}, "log_std_init": -1}},
         {"model": {"fcnet_hiddens": [8], "log_std_init": -1}, "adam_epsilon": 1e-7}),
        ("PPO", {"normalize": True, "frame_stack": 4},
         {"observation_filter": "MeanStdFilter", "normalize_reward": True, "preprocess": {"stack": 4}}),
    ],
    ids=["sb3-ppo", "sb3-dqn", "cleanrl-ppo", "cleanrl-dqn", "ml-agents", "policy_kwargs", "rl-zoo"],
)  # fmt: skip
def test_the_arguments_of_other_libraries_mean_what_they_meant(run: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert read(run, theirs) == read(run, ours)


def test_the_value_weight_is_halved_only_with_other_cleanrl_keys() -> None:
    """CleanRL weighs half of the squared error, SB3 all of it."""
    assert read("PPO", {"vf_coef": 0.5}) == read("PPO", {"vf_loss_coeff": 0.5})
    assert read("PPO", {"vf_coef": 0.5, "update_epochs": 4}) == read("PPO", {"vf_loss_coeff": 0.25, "num_epochs": 4})


@pytest.mark.parametrize(
    ("run", "data", "right"),
    [
        ("PPO", {"anneal_lr": True, "learning_rate": 1e-3}, r"lr: \[\[0, 0.001\], \[TOTAL_TIMESTEPS, 0\]\]"),
        ("PPO", {"learning_rate": lambda left: left * 3e-4}, r"config.learning_rate .* is a function; .*lr: \[\[0"),
        ("PPO", {"clip_range": "lin_0.1"}, "clip_param is one number"),
        ("PPO", {"num_minibatches": 4}, "minibatch_size = train_batch_size / num_minibatches"),
        ("PPO", {"target_kl": 0.03}, "stop_kl"),
        ("PPO", {"clip_vloss": True}, "vf_clip_param bounds the squared error"),
        ("PPO", {"clip_range_vf": 0.2}, "vf_clip_param bounds the squared error"),
        ("PPO", {"policy_kwargs": {"net_arch": {"pi": [64], "vf": [32]}}}, "model.fcnet_hiddens"),
        ("PPO", {"policy_kwargs": {"features_extractor_class": object}}, "custom_model"),
        ("PPO", {"policy": "MlpLstmPolicy"}, "model.use_lstm"),
        ("PPO", {"total_timesteps": 1000}, r"next to config, or is written  stop: \{timesteps"),
        ("PPO", {"device": "cuda"}, "learner_device"),
        ("DQN", {"exploration_fraction": 0.1}, "epsilon"),
        ("DQN", {"start_e": 1}, "epsilon"),
        ("DQN", {"train_freq": [1, "episode"]}, "training_intensity"),
        ("DQN", {"ent_coef": 0.1}, "ent_coef.*is a key of PPO"),
        ("PPO", {"learning_rate": 1e-3, "lr": 1e-4}, "means the same"),
        ("PPO", {"callback": print}, "callbacks="),
        ("PPO", {"eval_freq": 10}, "evaluation_interval_unit"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_key_that_means_something_else_names_the_right_one(run: str, data: dict[str, Any], right: str) -> None:
    with pytest.raises(ConfigError, match=right):
        read(run, data)


def test_a_misspelt_learning_rate_leads_to_the_learning_rate() -> None:
    with pytest.raises(ConfigError, match="'learning_rate'"):
        read("PPO", {"learnin_rate": 1e-3})


@pytest.mark.parametrize("name", sb3_cleanrl.TOTALS)
def test_the_number_of_steps_is_a_stop_wherever_one_writes_it(name: str) -> None:
    expected = parse_experiment({"env": "x", "stop": {"timesteps": 5000}})
    assert parse_experiment({"env": "x", name: 5e3}) == expected
    assert parse_experiment({"env": "x", "stop": {name: 5000}}) == expected
    data: dict[str, Any] = {"env": "x", "stop": {"iterations": 3}}
    apply_override(data, f"{name}=5000")
    assert parse_experiment(data) == expected


def test_the_environment_and_the_name_are_found_by_cleanrls_words() -> None:
    assert parse_experiment({"env_id": "x", "exp_name": "y"}) == parse_experiment({"env": "x", "name": "y"})


@pytest.mark.parametrize("key", ["learning_rate", "batch_size", "num_minibatches", "target_kl", "policy_kwargs", "n_steps"])
def test_config_explain_knows_the_names(key: str) -> None:
    assert explain.explain(key)
