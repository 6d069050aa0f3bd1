"""Keys of RLlib (all releases): our equivalent.

Each section of an experiment has three tables: `RENAMED` (same value, other name), `TRANSLATED` (the value changes too) and the
one of `unsupported_keys`. `sb3_cleanrl` adds the keys of other libraries. The schema itself has only current names.
"""

from __future__ import annotations

from collections.abc import Mapping

from ludus.config.aliases import coach_schedule, sb3_cleanrl
from ludus.config.aliases import rllib_values as values

EXPERIMENT, STOP, CONFIG, MODEL = "", "stop", "config", "config.model"
EVALUATION, MULTIAGENT = "config.evaluation_config", "config.multiagent"

RENAMED: Mapping[str, Mapping[str, str]] = {
    EXPERIMENT: {
        "environment": "env",
        "algorithm": "run",
        "stopping_criteria": "stop",
        "repeat": "num_samples",
        **sb3_cleanrl.RENAMED_TOP,
    },
    STOP: {
        **dict.fromkeys(sb3_cleanrl.TOTALS, "timesteps"),
        "timesteps_total": "timesteps",
        "num_env_steps_sampled": "timesteps",
        "num_env_steps_sampled_lifetime": "timesteps",
        "env_runners/num_env_steps_sampled_lifetime": "timesteps",
        "counters/num_env_steps_sampled": "timesteps",
        "info/num_env_steps_sampled": "timesteps",
        "info/num_steps_sampled": "timesteps",
        "episode_reward_mean": "episode_return_mean",
        "env_runners/episode_return_mean": "episode_return_mean",
        "env_runners/episode_reward_mean": "episode_return_mean",
        "sampler_results/episode_reward_mean": "episode_return_mean",
        "time_total_s": "time_s",
        "episodes_total": "episodes",
        "num_episodes_lifetime": "episodes",
        "env_runners/num_episodes_lifetime": "episodes",
    },
    CONFIG: {
        "lambda_": "lambda",
        "num_env_runners": "num_workers",
        "num_rollout_workers": "num_workers",
        "num_envs": "num_envs_per_worker",
        "num_envs_per_env_runner": "num_envs_per_worker",
        "sample_batch_size": "rollout_fragment_length",
        "sgd_minibatch_size": "minibatch_size",
        "num_sgd_iter": "num_epochs",
        "lr_schedule": "lr",
        "entropy_coeff_schedule": "entropy_coeff",
        "num_learner_workers": "num_learners",
        "evaluation_num_episodes": "evaluation_duration",
        "evaluation_num_env_runners": "evaluation_num_workers",
        "metrics_smoothing_episodes": "metrics_num_episodes_for_smoothing",
        "min_iter_time_s": "min_time_s_per_iteration",
        "min_time_s_per_reporting": "min_time_s_per_iteration",
        "timesteps_per_iteration": "min_sample_timesteps_per_iteration",
        "min_sample_timesteps_per_reporting": "min_sample_timesteps_per_iteration",
        "max_num_worker_restarts": "max_worker_restarts",
        "max_num_env_runner_restarts": "max_worker_restarts",
        "delay_between_worker_restarts_s": "worker_restart_backoff_s",
        "delay_between_env_runner_restarts_s": "worker_restart_backoff_s",
        "target_update_frequency": "target_network_update_freq",
        "learning_starts": "num_steps_sampled_before_learning_starts",
        **sb3_cleanrl.RENAMED,
    },
    MODEL: {"lstm_cell_size": "cell_size", "conv_filter": "conv_filters"},
    EVALUATION: {},
    MULTIAGENT: {"policy_mapping_fn": "policy_mapping"},
}
"""Section → other name → our name. The value is the same."""

_DISTRIBUTIONAL = "belongs to distributional Q-learning (Rainbow), which is not supported. Leave it out."
_NOISY = "belongs to noisy networks (Rainbow), which are not supported. Leave it out; exploration is epsilon-greedy."

TRANSLATED: Mapping[str, Mapping[str, values.KeyTranslator]] = {
    EXPERIMENT: {
        "checkpoint_config": values.checkpoint_config,
        "time_budget_s": values.move_to("stop.time_s"),
        "improve_steps": coach_schedule.translate_improve_steps,
        **{key: values.below_config(translate) for key, translate in coach_schedule.COACH_SCHEDULE.items()},
        **sb3_cleanrl.TRANSLATED_TOP,
    },
    STOP: {},
    CONFIG: {
        **coach_schedule.COACH_SCHEDULE,
        "improve_steps": values.reject_end_of_training,
        "framework": values.framework,
        "use_pytorch": values.use_pytorch,
        "torch": values.use_pytorch,
        "ignore_worker_failures": values.worker_restarts,
        "ignore_env_runner_failures": values.worker_restarts,
        "recreate_failed_workers": values.worker_restarts,
        "recreate_failed_env_runners": values.worker_restarts,
        "restart_failed_env_runners": values.worker_restarts,
        "rollout_fragment_length": values.replace_values("rollout_fragment_length", {"auto": None}),
        "observation_filter": values.replace_values(
            "observation_filter", {"ConcurrentMeanStdFilter": "MeanStdFilter", "MeanStd": "MeanStdFilter", None: "NoFilter"}
        ),
        "seed": values.move_unless("seed", None),
        "min_time_s_per_iteration": values.move_unless("min_time_s_per_iteration", None),
        "evaluation_interval": values.evaluation_interval,
        "evaluation_duration": values.evaluation_duration,
        "train_batch_size_per_learner": values.per_learner("train_batch_size"),
        "_train_batch_size_per_learner": values.per_learner("train_batch_size"),
        **dict.fromkeys(values.PER_LEARNER_GPUS, values.per_learner("num_gpus")),
        "num_gpus": values.num_gpus,
        "exploration_config": values.exploration,
        "replay_buffer_config": values.replay_buffer,
        "buffer_size": values.move_to("replay_buffer_config.capacity"),
        "prioritized_replay": values.flag(
            {"replay_buffer_config.type": "PrioritizedReplayBuffer"}, {"replay_buffer_config.type": "ReplayBuffer"}
        ),
        "prioritized_replay_alpha": values.move_to("replay_buffer_config.alpha"),
        **dict.fromkeys(("prioritized_replay_beta", *values.BETA_ANNEALING), values.replay_beta),
        "prioritized_replay_eps": values.move_to("replay_buffer_config.eps"),
        "replay_ratio": values.replay_ratio,
        **dict.fromkeys(("v_min", "v_max"), values.without_effect("num_atoms", 1, _DISTRIBUTIONAL)),
        "sigma0": values.without_effect("noisy", False, _NOISY),
        "clip_rewards": values.clip_rewards,
        "horizon": values.move_unless("preprocess.max_episode_steps", None),
        "vf_share_layers": values.move_to("model.vf_share_layers"),
        "policies": values.move_to("multiagent.policies"),
        "policy_mapping_fn": values.move_to("multiagent.policy_mapping"),
        "policies_to_train": values.move_to("multiagent.policies_to_train"),
        "use_gae": values.flag({}, {"lambda": 1.0}),  # advantage = return − value
        "lambda": values.gae_lambda,
        **sb3_cleanrl.TRANSLATED,
        "min_sample_timesteps_per_iteration": values.move_unless("min_sample_timesteps_per_iteration", None),
    },
    MODEL: {
        "conv_filters": values.conv_filters,
        "fcnet_activation": values.activation,
        "dim": values.image_size,
        "grayscale": values.flag({"preprocess.grey": True}, {}),  # Atari images are always greyscale, as in RLlib
        "zero_mean": values.flag("pixels are scaled to 0 … 1", {}),
        "framestack": values.flag({}, {"preprocess.stack": 1}),
        "num_framestacks": values.move_unless("preprocess.stack", "auto", 0),
        "post_fcnet_hiddens": values.post_fcnet_hiddens,
        "fcnet_hiddens": values.fcnet_hiddens,
    },
    EVALUATION: {},
    MULTIAGENT: {},
}
"""Section → key → function that translates its value."""


def other_spellings(section: str, name: str) -> list[str]:
    """Return other spellings of a key, followed by an algorithm in brackets if they apply to such algorithms only."""
    depending = sb3_cleanrl.DEPENDING.items() if section == CONFIG else ()
    some = [f"{old} ({run})" for old, meanings in depending for _, new, run in meanings if new == name]
    return sorted([*(old for old, new in RENAMED.get(section, {}).items() if new == name), *some])


def canonical_name(section: str, key: str) -> str:
    """Return our name of a key."""
    return RENAMED.get(section, {}).get(key, key)
