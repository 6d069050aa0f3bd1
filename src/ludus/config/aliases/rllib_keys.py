"""Keys of RLlib (all releases) and of Coach's schedules: our equivalent, or why there is none.

Each section of an experiment has three tables: `RENAMED` (same value, other name), `TRANSLATED` (the value changes too) and
`UNSUPPORTED` (with the reason). `sb3_cleanrl` adds the keys of other libraries. The schema itself has only current names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ludus.config.aliases import rllib_values, sb3_cleanrl
from ludus.config.problem import ConfigProblem

SEARCHES = ("grid_search", "choice", "uniform", "quniform", "loguniform", "qloguniform", "randint", "qrandint", "randn")
"""Words that, as the only key of a mapping, make a value one that a sweep chooses."""


def is_search(value: Any) -> bool:
    """Whether a value of a config is one that a sweep chooses: `{grid_search: […]}`, `{uniform: [a, b]}` …"""
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in SEARCHES


def has_search(value: Any) -> bool:
    """Whether there is such a value anywhere inside."""
    if isinstance(value, Mapping):
        return is_search(value) or any(map(has_search, value.values()))
    return isinstance(value, list) and any(map(has_search, value))


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

KeyTranslator = Callable[[Any, Mapping[str, Any]], Mapping[str, Any] | str]
"""(value, its whole section) → our values by dotted path below `config`; or the reason why the key is ignored.

Raises ValueError with the reason why it is rejected."""

ValueTranslator = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
"""A KeyTranslator that never ignores the key."""


# -- translated values --------------------------------------------------------------------------------------------------


def _framework(value: Any, section: Mapping[str, Any]) -> Mapping[str, Any] | str:
    if value in ("torch", "pytorch"):
        return {}
    if value not in ("tf", "tf2", "tfe", "auto", None):
        raise ValueError("is torch, tf or tf2")
    model = section.get("model")
    if isinstance(model, Mapping) and model.get("custom_model"):
        raise ValueError("names TensorFlow together with a custom_model, and a custom_model here is a PyTorch nn.Module")
    return "the same layers are built with PyTorch"


def _need_bool(value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError("is true or false")


def _is_torch(value: Any, section: Mapping[str, Any]) -> Mapping[str, Any] | str:
    _need_bool(value)
    return _framework("torch" if value else "tf", section)


def _restarts(value: Any, section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lost workers are restarted by default; only false changes that."""
    _need_bool(value)
    restart_keys = ("recreate_failed_workers", "recreate_failed_env_runners", "restart_failed_env_runners")
    if value or any(section.get(key) for key in restart_keys):
        return {}
    return {"max_worker_restarts": 0}


def _map_values(key: str, words: Mapping[Any, Any]) -> KeyTranslator:
    def translate(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
        hashable = value is None or isinstance(value, (str, int, float))
        return {key: words[value]} if hashable and value in words else {key: value}

    return translate


def _drop_if(key: str, nothing: Any) -> KeyTranslator:
    return lambda value, _: {} if value is nothing else {key: value}


def _no_evaluations(interval: Any) -> bool:
    return interval is None or (interval == 0 and not isinstance(interval, bool))


def _evaluation_interval(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"evaluation_duration": 0} if _no_evaluations(value) else {"evaluation_interval": value}


def _evaluation_duration(value: Any, section: Mapping[str, Any]) -> Mapping[str, Any]:
    if _no_evaluations(section.get("evaluation_interval", 1)):
        return {"evaluation_duration": 0}
    if value == "auto":
        raise ValueError(
            "is a number of episodes here; evaluations in parallel to training (evaluation_num_workers) do not delay it"
        )
    return {"evaluation_duration": value}


def _per_learner(key: str) -> KeyTranslator:
    def translate(value: Any, section: Mapping[str, Any]) -> Mapping[str, Any]:
        if key == "num_gpus" and section.get("_fake_gpus") is True:
            return {"num_gpus": 0}
        learners = section.get("num_learners", section.get("num_learner_workers", 1))
        if not isinstance(value, (int, float)) or not isinstance(learners, int):
            raise ValueError(f"is multiplied by num_learners, and one of them is not a number; write {key}")
        return {key: value * max(1, learners)}

    return translate


def _conv_filters(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate RLlib's form [[channels, [kernel, kernel], stride], …]."""
    if not isinstance(value, list):
        return {"model.conv_filters": value}
    return {"model.conv_filters": [_filter(one) for one in value]}


def _filter(one: Any) -> Any:
    if not isinstance(one, list) or len(one) != 3:
        return one
    square = []
    for number in one:
        if isinstance(number, list) and len(number) == 2:
            if number[0] != number[1]:
                raise ValueError(f"has the kernel or stride {number}; convolutions here are square: one number for both sides")
            number = number[0]
        square.append(number)
    return square


def _activation(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"model.fcnet_activation": "linear" if value is None else value.lower() if isinstance(value, str) else value}


def _exploration(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("is a section")
    kind = str(value.get("type", "StochasticSampling" if not value else "EpsilonGreedy")).rpartition(".")[2]
    rest = {key: given for key, given in value.items() if key != "type"}
    if kind == "StochasticSampling" and not {key for key in rest if key != "random_timesteps" or rest[key]}:
        return {}
    if kind != "EpsilonGreedy":
        raise ValueError(f"names {kind}, which is not supported: policies sample their own distribution, DQN is epsilon-greedy")
    unknown = sorted(
        set(rest) - {"initial_epsilon", "final_epsilon", "epsilon_timesteps", "warmup_timesteps", "epsilon_schedule"}
    )
    if unknown:
        raise ValueError(f"is EpsilonGreedy, which has no {', '.join(map(repr, unknown))}")
    if rest.get("epsilon_schedule") is not None:
        return {"epsilon": rest["epsilon_schedule"]}
    start, end = rest.get("initial_epsilon", 1.0), rest.get("final_epsilon", 0.05)
    warm, steps = rest.get("warmup_timesteps", 0), rest.get("epsilon_timesteps", 10_000)
    if not all(isinstance(number, (int, float)) for number in (start, end, warm, steps)):
        raise ValueError("needs numbers")
    if warm + steps < 1:
        return {"epsilon": end}
    return {"epsilon": [[int(warm), start], [int(warm + max(1, steps)), end]]}


def buffer_type(name: Any) -> str:
    """Return the type of replay buffer for a class name of RLlib; '' if it is not one of its buffers."""
    found = re.fullmatch(r"(MultiAgent)?(Prioritized)?(Episode)?ReplayBuffer", str(name).rpartition(".")[2])
    return "" if found is None else "PrioritizedReplayBuffer" if found[2] else "ReplayBuffer"


_LEARNING_STARTS = ("learning_starts", "min_size_for_sampling")
_BETA_ANNEALING = ("prioritized_replay_beta_annealing_timesteps", "final_prioritized_replay_beta")


def _replay(value: Any, section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate the buffer section; the start of learning is a key of the algorithm here."""
    if isinstance(value, Mapping):
        value = {key: given for key, given in value.items() if key not in _REPLACED or not _is_unset(given)}
        value |= {"type": kind} if (kind := buffer_type(value.get("type"))) else {}
        if any(key in value for key in _BETA_ANNEALING):
            beta = rllib_values.beta_schedule(value)
            value = {key: given for key, given in value.items() if key not in _BETA_ANNEALING} | {"prioritized_replay_beta": beta}
    if not isinstance(value, Mapping) or not any(key in value for key in _LEARNING_STARTS):
        return {"replay_buffer_config": value}
    rest = {key: given for key, given in value.items() if key not in _LEARNING_STARTS}
    starts = {value[key] for key in _LEARNING_STARTS if key in value}
    if len(starts) > 1:
        raise ValueError("holds learning_starts and min_size_for_sampling, which mean the same, with different values. Keep one")
    out = {"replay_buffer_config": rest} if rest else {}
    beside = [section[key] for key in ("num_steps_sampled_before_learning_starts", "learning_starts") if key in section]
    if beside and not _is_unset(beside[0]):  # the algorithm's key takes precedence
        return out
    return {"num_steps_sampled_before_learning_starts": starts.pop()} | out


_REPLACED = (
    *("buffer_size", "prioritized_replay", "prioritized_replay_alpha", "prioritized_replay_beta", "prioritized_replay_eps"),
    *("learning_starts", "target_update_frequency", "replay_batch_size", "replay_mode", "replay_sequence_length"),
    *("timesteps_per_iteration", "min_iter_time_s", "min_time_s_per_reporting", "worker_side_prioritization"),
)
"""Deprecated keys of RLlib. Its dumped configs contain −1 for them, which means unset."""


def _is_unset(value: Any) -> bool:
    return type(value) is int and value == -1


def _without_effect(key: str, off: Any, why: str) -> KeyTranslator:
    """Accept a number that has no effect as long as `key` has the value `off`; otherwise raise ValueError(why)."""

    def translate(value: Any, section: Mapping[str, Any]) -> Mapping[str, Any]:
        if section.get(key, off) != off or not isinstance(value, (int, float)):
            raise ValueError(why)
        return {}

    return translate


def _replay_type(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    _need_bool(value)
    return {"replay_buffer_config.type": "PrioritizedReplayBuffer" if value else "ReplayBuffer"}


def _clip_rewards(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    if value is None:
        return {}
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {"preprocess.clip_reward": [-abs(value), abs(value)] if number else value}


def _checkpoint_config(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    names = {
        "checkpoint_frequency": "checkpoint_freq",
        "checkpoint_at_end": "checkpoint_at_end",
        "num_to_keep": "keep_checkpoints_num",
        "checkpoint_score_attribute": "checkpoint_score_attr",
        "checkpoint_score_order": "",
    }
    if not isinstance(value, Mapping):
        raise ValueError("is a section")
    unknown = sorted(set(value) - set(names))
    if unknown:
        raise ValueError(f"has no {', '.join(map(repr, unknown))} here")
    if value.get("checkpoint_score_order", "max") != "max":
        raise ValueError("has checkpoint_score_order: min; the best checkpoint is always the one with the highest return")
    return {names[key]: given for key, given in value.items() if names[key]}


def _horizon(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    return {} if value is None else {"preprocess.max_episode_steps": value}


_COUNT = re.compile(r"\s*(EnvironmentSteps|EnvironmentEpisodes|TrainingSteps)\s*\(\s*([0-9][0-9_]{0,18})\s*\)\s*")
"""Coach's form of a count."""


def parse_count(value: Any) -> tuple[str, int] | None:
    """Parse `EnvironmentEpisodes(50)`, or a plain number of steps, to ('timesteps' | 'episodes' | 'iterations', number)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return "timesteps", value
    found = _COUNT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    units = {"EnvironmentSteps": "timesteps", "EnvironmentEpisodes": "episodes", "TrainingSteps": "iterations"}
    return units[found[1]], int(found[2].replace("_", ""))


def _count(value: Any, *allowed: str) -> tuple[str, int]:
    names = {"timesteps": "EnvironmentSteps(…)", "episodes": "EnvironmentEpisodes(…)", "iterations": "TrainingSteps(…)"}
    found = parse_count(value)
    if found is None or found[0] not in allowed:
        raise ValueError(f"is a number of steps, or {' or '.join(names[unit] for unit in allowed)}")
    return found


def _heatup(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    unit, number = _count(value, "timesteps", "episodes")
    if unit == "episodes":
        return {"num_steps_sampled_before_learning_starts": 0, "heatup_episodes": number}
    return {"num_steps_sampled_before_learning_starts": number, "heatup_episodes": 0}


def _between_evaluations(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    unit, number = _count(value, "timesteps", "episodes", "iterations")
    return {"evaluation_interval": number, "evaluation_interval_unit": unit} if number else {"evaluation_duration": 0}


def _evaluation_steps(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    unit, number = _count(value, "timesteps", "episodes")
    return {"evaluation_duration": number} | ({"evaluation_duration_unit": unit} if number else {})


def translate_improve_steps(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate `improve_steps`, the length of the training."""
    unit, number = _count(value, "timesteps", "episodes", "iterations")
    if not number:
        raise ValueError("is the length of the training, above 0")
    return {f"stop.{unit}": number}


def _too_deep(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    raise ValueError("defines the end of the training: it belongs next to config, or is written  stop: {timesteps: …}")


def _inside(translate: ValueTranslator) -> ValueTranslator:
    """Adapt a translator of a key of `config` to the same key at the top level."""
    return lambda value, section: {f"config.{key}": given for key, given in translate(value, section).items()}


COACH_SCHEDULE: Mapping[str, ValueTranslator] = {
    "heatup_steps": _heatup,
    "steps_between_evaluation_periods": _between_evaluations,
    "evaluation_steps": _evaluation_steps,
}
"""Keys of Coach's schedules except `improve_steps`."""


def _rename_to(path: str) -> KeyTranslator:
    return lambda value, _: {path: value}


_DISTRIBUTIONAL = "belongs to distributional Q-learning (Rainbow), which is not supported. Leave it out."
_NOISY = "belongs to noisy networks (Rainbow), which are not supported. Leave it out; exploration is epsilon-greedy."

TRANSLATED: Mapping[str, Mapping[str, KeyTranslator]] = {
    EXPERIMENT: {
        "checkpoint_config": _checkpoint_config,
        "time_budget_s": _rename_to("stop.time_s"),
        "improve_steps": translate_improve_steps,
        **{key: _inside(translate) for key, translate in COACH_SCHEDULE.items()},
        **sb3_cleanrl.TRANSLATED_TOP,
    },
    STOP: {},
    CONFIG: {
        **COACH_SCHEDULE,
        "improve_steps": _too_deep,
        "framework": _framework,
        "use_pytorch": _is_torch,
        "torch": _is_torch,
        "ignore_worker_failures": _restarts,
        "ignore_env_runner_failures": _restarts,
        "recreate_failed_workers": _restarts,
        "recreate_failed_env_runners": _restarts,
        "restart_failed_env_runners": _restarts,
        "rollout_fragment_length": _map_values("rollout_fragment_length", {"auto": None}),
        "observation_filter": _map_values(
            "observation_filter", {"ConcurrentMeanStdFilter": "MeanStdFilter", "MeanStd": "MeanStdFilter", None: "NoFilter"}
        ),
        "seed": _drop_if("seed", None),
        "min_time_s_per_iteration": _drop_if("min_time_s_per_iteration", None),
        "evaluation_interval": _evaluation_interval,
        "evaluation_duration": _evaluation_duration,
        "train_batch_size_per_learner": _per_learner("train_batch_size"),
        "_train_batch_size_per_learner": _per_learner("train_batch_size"),
        "num_gpus_per_learner": _per_learner("num_gpus"),
        "num_gpus_per_learner_worker": _per_learner("num_gpus"),
        "exploration_config": _exploration,
        "replay_buffer_config": _replay,
        "buffer_size": _rename_to("replay_buffer_config.capacity"),
        "prioritized_replay": _replay_type,
        "prioritized_replay_alpha": _rename_to("replay_buffer_config.alpha"),
        **dict.fromkeys(
            ("prioritized_replay_beta", *_BETA_ANNEALING),
            lambda value, section: {"replay_buffer_config.beta": rllib_values.beta_schedule(section)},
        ),
        "prioritized_replay_eps": _rename_to("replay_buffer_config.eps"),
        **dict.fromkeys(("v_min", "v_max"), _without_effect("num_atoms", 1, _DISTRIBUTIONAL)),
        "sigma0": _without_effect("noisy", False, _NOISY),
        "clip_rewards": _clip_rewards,
        "horizon": _horizon,
        "vf_share_layers": _rename_to("model.vf_share_layers"),
        "policies": _rename_to("multiagent.policies"),
        "policy_mapping_fn": _rename_to("multiagent.policy_mapping"),
        "policies_to_train": _rename_to("multiagent.policies_to_train"),
        **sb3_cleanrl.TRANSLATED,
        "min_sample_timesteps_per_iteration": _drop_if("min_sample_timesteps_per_iteration", None),
        **rllib_values.CONFIG,
    },
    MODEL: {"conv_filters": _conv_filters, "fcnet_activation": _activation, **rllib_values.MODEL},
    EVALUATION: {},
    MULTIAGENT: {},
}
"""Section → key → function that translates its value."""


# -- unsupported keys ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnsupportedKey:
    """Why a key is not supported. The values `same` match our behaviour and are accepted.

    `ignored`: other values are accepted with a notice, since they do not change the training.
    """

    why: str
    same: tuple[Any, ...] = ()
    ignored: bool = False

    def matches_default(self, value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in self.same) or (
            type(value) is int and any(type(one) is float and value == one for one in self.same)
        )


def _reject_all(why: str, *keys: str, same: tuple[Any, ...] = ()) -> dict[str, UnsupportedKey]:
    return dict.fromkeys(keys, UnsupportedKey(why, same))


def _ignore_all(why: str, *keys: str, same: tuple[Any, ...] = ()) -> dict[str, UnsupportedKey]:
    return dict.fromkeys(keys, UnsupportedKey(why, same, ignored=True))


_NO_TENSORFLOW = "it configures TensorFlow, and networks here are PyTorch's."
_OWN_SWITCH = "it chooses between implementations inside RLlib, and there is one here."
_OWN_CLASS = "replaces a class inside RLlib, which does not exist here. Leave it out."
_OFFLINE = "is about learning from files; here experience comes from environments and games. Leave it out."
_CALLBACK = "is a Python callback: pass callbacks=[…] to ludus.train, or write a wrapper around the environment."
_RESOURCES = "it reserves resources in Ray; workers here are processes with a core each."
_QUEUES = "it sizes a queue inside RLlib; here blocks_ahead bounds what waits for the learner."
_FAULTS = "it is a detail of how RLlib detects lost workers; use worker_hang_s and max_worker_restarts."
_REPORTS = "extends an iteration by trained steps; use min_sample_timesteps_per_iteration."
_ATTENTION = "belongs to attention networks, which are not built in. Use use_lstm, or a custom_model."
_WEIGHTS = "chooses the initial weights; here they are orthogonal. Write a custom_model for others."
_IMAGES = "prepares images inside RLlib's model; here the section `preprocess` does: resize, grey, stack."
_RMSPROP = "belongs to RMSProp, and the optimizer here is Adam (lr, adam_epsilon). Leave it out."
_SEQUENCES = "belongs to recurrent replay (R2D2), which is not supported: single steps are sampled. Leave it out."
_APEX = "belongs to Ape-X, which is not supported. Leave it out; num_workers samples in parallel."

UNSUPPORTED: Mapping[str, Mapping[str, UnsupportedKey]] = {
    EXPERIMENT: {
        **_reject_all("is an option of the command: --local-dir DIR.", "local_dir", "storage_path"),
        **_reject_all("is an option of the command: --restore CHECKPOINT.", "restore"),
        **_reject_all("is an option of the command: --resume DIR.", "resume"),
        **_reject_all("copies results; write them there: --local-dir takes a store (s3://BUCKET/PREFIX) or a shared disk.", "upload_dir"),
        **_reject_all("copies results, which is not supported. Leave it out.", "sync_function", "sync_config", "sync_on_checkpoint"),
        **_reject_all(
            "chooses the best checkpoint, which is always the one with the best evaluation. Leave it out.",
            "checkpoint_score_attr",
            same=("episode_reward_mean", "episode_return_mean", "env_runners/episode_return_mean"),
        ),
        **_ignore_all(
            "a trial of a sweep reserves what num_workers and num_gpus say.",
            *("resources_per_trial", "trial_resources", "placement_group_factory"),
        ),
        **_reject_all("is written in the section `tune:`, as scheduler.", "scheduler", "scheduler_config"),
        **_reject_all("is written in the section `tune:`.", "search_alg", "metric", "mode"),
        **_reject_all("is written in the section `track:`.", "loggers", "logger_config", "callbacks"),
        **_reject_all("is done afterwards: ludus export RUN.", "export_formats"),
        **_ignore_all("networks are always PyTorch's.", "frameworks"),
        **_reject_all("is what a preset must reach: write  target: {return_mean: …, timesteps: …}.", "pass_criteria"),
        **_ignore_all("runs are named after experiment, algorithm and time.", "trial_name_creator", "trial_dirname_creator"),
        **_reject_all("retried a trial from other files of Ray. Use max_failures.", "raise_on_failed_trial", "reuse_actors", "fail_fast"),
        **_reject_all("is the default: the run goes on from its newest checkpoint.", "checkpoint_upload_from_workers"),
    },
    STOP: {
        **_reject_all("is not a stop here; use episode_return_mean.", "episode_reward_max", "episode_reward_min", "episode_return_max"),
        **_reject_all("is not a stop here; use episode_return_mean, and look at evaluations in metrics.jsonl.",
               "evaluation/episode_reward_mean", "evaluation/env_runners/episode_return_mean",
               "evaluation/sampler_results/episode_reward_mean"),
        **_reject_all("counts one iteration; use time_s for the whole training.", "time_this_iter_s"),
        **_reject_all("counts one iteration; use timesteps for the whole training.", "timesteps_this_iter", "episodes_this_iter"),
        **_reject_all("counts steps of agents; use timesteps, steps of the environment.", "agent_timesteps_total",
               "num_agent_steps_sampled", "num_agent_steps_sampled_lifetime"),
        **_reject_all("is not a stop here; use timesteps.", "num_env_steps_trained", "num_env_steps_trained_lifetime",
               "info/num_steps_trained"),
        **_reject_all("is not a stop here; use episode_return_mean.", "episode_len_mean", "env_runners/episode_len_mean"),
        **_reject_all("is not needed: a run that is done ends.", "done"),
    },
    CONFIG: {
        # -- frameworks
        **_ignore_all(
            _NO_TENSORFLOW,
            *("tf_session_args", "local_tf_session_args", "eager", "eager_tracing", "eager_max_retraces"),
            *("enable_tf1_exec_eagerly", "_tf_policy_handles_more_than_one_loss", "no_eager_on_workers", "eager_trace"),
        ),
        **_ignore_all(
            "inference is always compiled.",
            *("torch_compile_learner", "torch_compile_learner_dynamo_backend", "torch_compile_learner_dynamo_mode"),
            *("torch_compile_learner_what_to_compile", "torch_compile_worker", "torch_compile_worker_dynamo_backend"),
            "torch_compile_worker_dynamo_mode",
            same=(False,),
        ),
        **_reject_all("has no counterpart. Leave it out; see num_learners and mixed_precision.", "torch_ddp_kwargs", same=({},)),
        **_reject_all("hides a gradient that is NaN; here it ends the run with the reason. Leave it out.", "torch_skip_nan_gradients",
               same=(False,)),
        **_reject_all("is mixed_precision here: bf16 or fp16.", "_torch_grad_scaler_class", same=(None,)),
        **_reject_all("is a schedule here: lr: [[timestep, value], …].", "_torch_lr_scheduler_classes", same=(None,)),
        **_reject_all("is Adam's: set lr and adam_epsilon.", "optimizer", same=({},)),
        **_reject_all("is the norm of the whole gradient here. Leave it out.", "grad_clip_by", same=("global_norm",)),
        # -- switches of RLlib itself
        **_ignore_all(
            _OWN_SWITCH,
            *("_disable_preprocessor_api", "_disable_action_flattening", "_disable_execution_plan_api"),
            *("_disable_initialize_loss_from_dummy_batch", "_enable_rl_module_api", "_enable_learner_api"),
            *("_enable_new_api_stack", "enable_connectors", "enable_rl_module_and_learner", "_use_trajectory_view_api"),
            *("enable_env_runner_and_connector_v2", "_use_msgpack_checkpoints", "_validate_config", "_is_atari", "_is_online"),
            *("_dont_auto_sync_env_runner_states", "use_exec_api", "simple_optimizer", "_prior_exploration_config"),
            *("add_default_connectors_to_env_to_module_pipeline", "add_default_connectors_to_module_to_env_pipeline"),
            *("add_default_connectors_to_learner_pipeline", "episodes_to_numpy", "episode_lookback_horizon"),
            *("merge_env_runner_states", "broadcast_env_runner_states", "use_env_runner_state_server"),
            *("env_runner_state_server_max_concurrency", "_env_runners_only", "_skip_learners"),
        ),
        **_ignore_all("GPUs that are only emulated are not used: num_gpus counts as 0.", "_fake_gpus", same=(False,)),
        **_reject_all("trains on random data. Leave it out.", "fake_sampler", same=(False,)),
        **_reject_all(
            _OWN_CLASS,
            *("worker_cls", "env_runner_cls", "sample_collector", "learner_config_dict", "_learner_class", "_rl_module_spec"),
            *("rl_module_spec", "_model_config", "_per_module_overrides", "_env_to_module_connector"),
            *("_module_to_env_connector", "_learner_connector", "optimizer_class", "execution_plan"),
            same=(None, {}),
        ),
        **_reject_all("belongs to the section `multiagent`, as keys of a policy.", "algorithm_config_overrides_per_module", same=({},)),
        # -- resources
        **_ignore_all(
            _RESOURCES,
            *("num_cpus_per_worker", "num_cpus_per_env_runner", "num_cpus_for_driver", "num_cpus_for_local_worker"),
            *("num_cpus_for_main_process", "num_cpus_per_learner", "num_cpus_per_learner_worker"),
            same=(1, "auto"),
        ),
        **_ignore_all(
            _RESOURCES,
            *("custom_resources_per_worker", "custom_resources_per_env_runner", "custom_resources_per_learner"),
            "custom_resources_for_main_process",
            same=({},),
        ),
        **_ignore_all(
            _RESOURCES,
            *("memory", "memory_per_worker", "object_store_memory", "object_store_memory_per_worker", "local_gpu_idx"),
            same=(0,),
        ),
        **_ignore_all("workers start on the machine with the most free cores.",
               "placement_strategy", same=("PACK",)),
        **_ignore_all("workers choose actions on the CPU unless inference_device is cuda.",
               "num_gpus_per_worker", "num_gpus_per_env_runner", same=(0, 0.0)),
        **_reject_all("sets environment variables; set them in the shell, from which all processes inherit them.",
               "extra_python_environs_for_driver", "extra_python_environs_for_worker", same=({},)),
        # -- environments
        **_reject_all("continues an episode after its end, which is not supported. Leave it out.", "soft_horizon", "no_done_at_end",
               same=(False,)),
        **_reject_all("is read from the environment. Leave it out.", "observation_space", "action_space", same=(None,)),
        **_ignore_all("environments are stepped by the workers, whose number is num_workers.", "remote_worker_envs", same=(False,)),
        **_ignore_all("it belongs to remote_worker_envs, which is ignored.", "remote_env_batch_wait_ms", same=(0,)),
        **_ignore_all("a vector environment is used where there is one.",
               "gym_env_vectorize_mode", same=("sync", "SYNC")),
        **_reject_all("is a curriculum in Python: let the environment change itself, or begin a new run with --restore.",
               "env_task_fn", same=(None,)),
        **_ignore_all("nothing is shown on a screen while training; evaluation_video records episodes of evaluations.",
               "render_env", "record_env", "monitor", same=(False, None)),
        **_reject_all("is what happens: actions are scaled and clipped into the bounds of their space. Leave it out.",
               "normalize_actions", same=(True,)),
        **_reject_all("is what happens: actions are scaled and clipped into the bounds of their space. Leave it out.",
               "clip_actions", same=(True, False)),
        **_reject_all(_IMAGES, "preprocessor_pref", same=(None, "deepmind")),
        **_ignore_all("environments are always checked.", "disable_env_checking", same=(False,)),
        **_reject_all("is not supported: environments of old Gym are not accepted; use Gymnasium. Leave it out.", "auto_wrap_old_gym_envs", same=(True, False)),
        **_reject_all("is not supported: masks are found by the name action_mask. Leave it out.", "action_mask_key", same=("action_mask",)),
        **_ignore_all("the learner process has no environment.",
               "create_env_on_driver", "create_env_on_local_worker", "create_local_env_runner", same=(False,)),
        # -- sampling
        **_reject_all("is `sampling: pipelined` (or async) here.", "sample_async", same=(False,)),
        **_ignore_all("observations stay in shared memory, uncompressed.", "compress_observations", same=(False,)),
        **_reject_all("is not supported: statistics are part of the policy and shared by all workers. Leave it out.",
               *("synchronize_filters", "update_worker_filter_stats", "use_worker_filter_stats"), same=(True,)),
        **_ignore_all("statistics are part of the policy and shared by all workers.",
               "sync_filters_on_rollout_workers_timeout_s"),
        **_ignore_all("it is a detail of RLlib's samplers.", "sampler_perf_stats_ema_coef", "ignore_final_observation"),
        **_ignore_all(_FAULTS,
               *("num_consecutive_worker_failures_tolerance", "num_consecutive_env_runner_failures_tolerance"),
               *("worker_health_probe_timeout_s", "worker_restore_timeout_s", "env_runner_health_probe_timeout_s"),
               *("env_runner_restore_timeout_s", "sample_timeout_s", "validate_workers_after_construction"),
               "validate_env_runners_after_construction"),
        # -- evaluation
        **_ignore_all("evaluations run in parallel to training exactly when evaluation_num_workers is above 0.", "evaluation_parallel_to_training",
               "enable_async_evaluation", "always_attach_evaluation_results"),
        **_reject_all("is a Python function; evaluate a run with ludus.load(…) or ludus rollout.",
               "custom_eval_function", "custom_evaluation_function", "custom_async_evaluation_function", same=(None,)),
        **_ignore_all("it is a detail of RLlib's evaluation workers.",
               *("evaluation_sample_timeout_s", "evaluation_unhealthy_workers_timeout_s", "in_evaluation"),
               *("evaluation_force_reset_envs_before_iteration", "evaluation_auto_duration_min_env_steps_per_sample"),
               *("evaluation_auto_duration_max_env_steps_per_sample", "evaluation_error_after_n_consecutive_skips")),
        # -- reports
        **_reject_all(_REPORTS, "min_train_timesteps_per_iteration", "min_train_timesteps_per_reporting", same=(0, None)),
        **_ignore_all("metrics of workers come with their steps.",
               "metrics_episode_collection_timeout_s", "collect_metrics_timeout"),
        **_ignore_all("it is an option of the command: -v, -vv.", "log_level"),
        **_ignore_all("it is always in metrics.jsonl and `ludus status`.", "log_sys_usage", same=(True,)),
        **_ignore_all("the section `track` defines where metrics go.",
               "keep_per_episode_custom_metrics", "log_gradients", "stats_cls_lookup", "logger_config", "logger_creator",
               same=(False, None)),
        **_reject_all(_CALLBACK, "callbacks", "callbacks_class"),
        **_reject_all(_CALLBACK,
               *(f"callbacks_on_{when}" for when in (
                   *("algorithm_init", "checkpoint_loaded", "env_runners_recreated", "environment_created", "episode_created"),
                   *("episode_end", "episode_start", "episode_step", "evaluate_end", "evaluate_start", "sample_end"),
                   *("train_result", "evaluate_offline_end", "evaluate_offline_start", "offline_eval_runners_recreated"))),
               same=(None,)),
        **_ignore_all("a run is exported with ludus export RUN.", "export_native_model_files", same=(False,)),
        **_ignore_all("every model is saved in a checkpoint.", "checkpoint_trainable_policies_only", same=(False,)),
        # -- learning from files
        **_reject_all("comes from environments and games here, not from files. Leave it out.", "input", same=("sampler",)),
        **_reject_all("writes experience to files; ludus rollout --out does that with a trained agent.", "output", same=(None,)),
        **_reject_all(_OFFLINE,
               *("input_config", "input_evaluation", "input_filesystem", "input_filesystem_kwargs", "input_read_method"),
               *("input_read_method_kwargs", "input_read_schema", "input_read_episodes", "input_read_sample_batches"),
               *("input_read_batch_size", "input_compress_columns", "input_spaces_jsonable", "actions_in_input_normalized"),
               *("off_policy_estimation_methods", "ope_split_batch_by_episode", "postprocess_inputs", "shuffle_buffer_size"),
               *("output_config", "output_compress_columns", "output_max_file_size", "output_max_rows_per_file"),
               *("output_filesystem", "output_filesystem_kwargs", "output_write_method", "output_write_method_kwargs"),
               *("output_write_episodes", "output_write_remaining_data", "materialize_data", "materialize_mapped_data"),
               *("map_batches_kwargs", "iter_batches_kwargs", "prelearner_class", "prelearner_buffer_class"),
               *("prelearner_buffer_kwargs", "prelearner_module_synch_period", "prelearner_use_recorded_module_states"),
               *("dataset_num_iters_per_learner", "dataset_num_iters_per_eval_runner", "offline_data_class"),
               *("offline_sampling", "offline_evaluation_interval", "offline_evaluation_duration", "offline_evaluation_type"),
               *("num_offline_eval_runners", "offline_evaluation_parallel_to_training", "offline_evaluation_timeout_s"),
               *("broadcast_offline_eval_runner_states", "custom_resources_per_offline_eval_runner"),
               *("ignore_offline_eval_runner_failures", "max_num_offline_eval_runner_restarts", "offline_eval_runner_class"),
               *("max_requests_in_flight_per_offline_eval_runner", "num_cpus_per_offline_eval_runner"),
               *("num_gpus_per_offline_eval_runner", "offline_eval_batch_size_per_runner", "offline_loss_for_module_fn"),
               *("offline_eval_rl_module_inference_only", "offline_eval_runner_health_probe_timeout_s"),
               *("offline_eval_runner_restore_timeout_s", "restart_failed_offline_eval_runners"),
               "validate_offline_eval_runners_after_construction"),
        # -- PPO, APPO, IMPALA
        **_reject_all("is always so: advantages are measured against a value function. Leave it out.", "use_critic", same=(True,)),
        **_reject_all("is always so: minibatches are shuffled. Leave it out.", "shuffle_sequences", "shuffle_batch_per_epoch",
               same=(True,)),
        **_reject_all("is always so for PPO: kl_coeff: 0 turns the penalty off.", "use_kl_loss", same=(True,)),
        **_reject_all("is always so: value targets are V-trace's. Leave it out.", "vtrace", same=(True,)),
        **_ignore_all("the last step of a segment is kept: the value of the next observation is known.", "vtrace_drop_last_ts", same=(False,)),
        **_reject_all("is not supported: Adam is the optimizer here. Leave it out.", "opt_type", same=("adam",)),
        **_reject_all(_RMSPROP, "decay", "momentum", "rmsprop_epsilon"),
        **_reject_all("is clip_param of PPO (ML-Agents' name), adam_epsilon (RMSProp's), or a rate of exploration, which is a key of DQN.", "epsilon"),
        **_reject_all("is not supported: policy and value have one optimizer; balance them with vf_loss_coeff. Leave it out.",
               "_separate_vf_optimizer", "_lr_vf", same=(False, None)),
        **_ignore_all(_QUEUES,
               *("learner_queue_size", "learner_queue_timeout", "minibatch_buffer_size", "num_multi_gpu_tower_stacks"),
               *("num_data_loader_buffers", "num_gpu_loader_threads", "max_sample_requests_in_flight_per_worker"),
               *("max_requests_in_flight_per_env_runner", "max_requests_in_flight_per_sampler_worker"),
               *("max_requests_in_flight_per_learner", "max_requests_in_flight_per_aggregator_worker"),
               *("max_requests_in_flight_per_aggregator_actor", "num_aggregation_workers", "num_aggregator_actors_per_learner"),
               *("timeout_s_sampler_manager", "timeout_s_aggregator_manager", "simple_queue_size", "train_queue_size")),
        **_ignore_all("workers take the newest weights before every segment.", "broadcast_interval", same=(1,)),
        **_reject_all("runs after every update inside RLlib, which is not supported. Leave it out.", "after_train_step", "before_learn_on_batch",
               same=(None,)),
        **_reject_all("keeps batches to learn from again; here replay_proportion and replay_buffer_num_slots do.",
               "use_circular_buffer", "circular_buffer_num_batches", "circular_buffer_iterations_per_batch",
               same=(False,)),
        **_reject_all("bounds the ratio to a slower target; here vtrace_clip_pg_rho_threshold does.", "target_worker_clipping"),
        **_reject_all("is one pass over the batch per epoch; give num_epochs.", "sgd_stepsize", "num_sgd_steps"),
        # -- DQN
        **_reject_all(_DISTRIBUTIONAL, "num_atoms", same=(1,)),
        **_reject_all(_DISTRIBUTIONAL, "categorical_distribution_temperature", same=(1.0,)),
        **_reject_all("is not supported; exploration is epsilon-greedy.", "noisy", "parameter_noise", "softmax_temp", "soft_q", same=(False,)),
        **_reject_all(_SEQUENCES, "burn_in_len", "replay_burn_in", "burn_in", same=(0,)),
        **_reject_all(_SEQUENCES, "replay_sequence_length", same=(1,)),
        **_reject_all(_SEQUENCES, "replay_zero_init_states", same=(True,)),
        **_reject_all("is written  epsilon: [[0, 1.0], [timesteps, 0.05]].",
               *("exploration_fraction", "exploration_final_eps", "exploration_initial_eps", "schedule_max_timesteps"),
               *("epsilon_timesteps", "initial_epsilon", "final_epsilon", "exploration_final_scale", "exploration_initial_scale")),
        **_reject_all(_APEX, "worker_side_prioritization", same=(False,)),
        **_reject_all(_APEX, "num_replay_buffer_shards", "replay_buffer_shards_colocated_with_driver", "per_worker_exploration",
               "num_replay_buffers", "debug", "shared"),
        **_reject_all("is train_batch_size here. Leave it out.", "replay_batch_size"),
        **_reject_all("is not supported: steps are sampled one by one, separately for each policy. Leave it out.", "replay_mode", "batch_replay",
               same=("independent", False)),
        # -- several agents
        **_reject_all("belongs to the section `multiagent`.", "count_steps_by", same=("env_steps",)),
        **_reject_all("keeps policies on disk; here all are in memory. Leave it out.",
               "policy_map_capacity", "policy_map_cache", "policy_states_are_swappable"),
        **_reject_all("is a function in Python; let the environment put more into its observations, or use centralized_value.",
               "observation_fn", same=(None,)),
        **{key: UnsupportedKey(*reason) for key, reason in sb3_cleanrl.UNSUPPORTED.items()},
    },
    MODEL: {
        **_reject_all(_ATTENTION, "use_attention", same=(False,)),
        **_reject_all(_ATTENTION,
               *("attention_num_transformer_units", "attention_dim", "attention_num_heads", "attention_head_dim"),
               *("attention_memory_inference", "attention_memory_training", "attention_position_wise_mlp_dim"),
               *("attention_init_gru_gate_bias", "attention_use_n_prev_actions", "attention_use_n_prev_rewards")),
        **_reject_all("is not built in: a wrapper can put the last action and reward into the observation (config.wrappers).",
               "lstm_use_prev_action", "lstm_use_prev_reward", "lstm_use_prev_action_reward", same=(False,)),
        **_reject_all(_WEIGHTS,
               *("fcnet_weights_initializer", "fcnet_weights_initializer_config", "fcnet_bias_initializer"),
               *("fcnet_bias_initializer_config", "fcnet_kernel_initializer", "fcnet_kernel_initializer_kwargs"),
               *("fcnet_bias_initializer_kwargs", "conv_kernel_initializer", "conv_kernel_initializer_config"),
               *("conv_kernel_initializer_kwargs", "conv_bias_initializer", "conv_bias_initializer_config"),
               *("conv_bias_initializer_kwargs", "conv_transpose_kernel_initializer", "conv_transpose_bias_initializer"),
               *("conv_transpose_kernel_initializer_config", "conv_transpose_bias_initializer_config"),
               *("post_fcnet_weights_initializer", "post_fcnet_weights_initializer_config", "post_fcnet_bias_initializer"),
               *("post_fcnet_bias_initializer_config", "lstm_weights_initializer", "lstm_weights_initializer_config"),
               *("lstm_bias_initializer", "lstm_bias_initializer_config", "lstm_kernel_initializer"),
               *("lstm_kernel_initializer_kwargs", "lstm_bias_initializer_kwargs", "head_fcnet_kernel_initializer"),
               *("head_fcnet_kernel_initializer_kwargs", "head_fcnet_bias_initializer", "head_fcnet_bias_initializer_kwargs"),
               *("fusionnet_kernel_initializer", "fusionnet_kernel_initializer_kwargs", "fusionnet_bias_initializer"),
               "fusionnet_bias_initializer_kwargs", same=(None, {})),
        **_reject_all("is not supported: convolutions are followed by ReLU here. Leave it out.", "conv_activation", same=("relu",)),
        **_reject_all("is not supported: layers after convolutions are fcnet_hiddens; those of vectors are one list, fcnet_hiddens + these.",
               "head_fcnet_hiddens", "fusionnet_hiddens", same=([],)),
        **_reject_all("is fcnet_activation here, for all dense layers. Leave it out.", "post_fcnet_activation", "head_fcnet_activation",
               "fusionnet_activation"),
        **_reject_all("is not supported: layer normalisation is not built in. Write a custom_model.", "fcnet_use_layernorm", "head_fcnet_use_layernorm",
               same=(False,)),
        **_reject_all("is not supported: outputs always have a linear layer. Write a custom_model.", "no_final_linear", same=(False,)),
        **_reject_all("is not supported: log standard deviations have fixed bounds. Leave it out.", "log_std_clip_param", same=(20, 20.0)),
        **_ignore_all("it is a detail inside RLlib's models.",
               *("_time_major", "always_check_shapes", "_use_default_native_models", "_disable_preprocessor_api"),
               *("_disable_action_flattening", "encoder_latent_dim", "custom_options"), same=(False, None)),
        **_reject_all(_IMAGES, "channel_major", same=(False,)),
        **_reject_all("is a wrapper here: config.wrappers.", "custom_preprocessor", same=(None,)),
        **_reject_all("is chosen by the action space. Write a wrapper that changes the space (config.wrappers).", "custom_action_dist",
               same=(None,)),
        **_reject_all("is fcnet_hiddens here.", "hidden_layers", "hiddens", "conv_hiddens"),
        **_reject_all("is custom_model_config here.", "custom_model_kwargs", same=({},)),
        **_reject_all("is not supported: pixels are always scaled to [0, 1]. Leave it out.", "squash_to_range", same=(False,)),
    },
    EVALUATION: {
        **_reject_all("is evaluation_num_workers here, next to evaluation_config.",
               "num_workers", "num_env_runners", "evaluation_num_workers"),
        **_ignore_all("the number of environments of an evaluation follows from the number of its episodes.",
               "num_envs_per_worker", "num_envs_per_env_runner"),
        **_reject_all("is not supported: an evaluation uses the environment of the training, with a separate env_config.", "env", same=(None,)),
        **_reject_all("is evaluation_video here, next to evaluation_config: the number of recorded episodes.",
               "render_env", "record_env", "monitor", same=(False, None)),
        **_reject_all("is not supported: steps of evaluations are not written; use ludus rollout RUN --out FILE.", "output", same=(False, None)),
        **_reject_all("belongs next to evaluation_config.", "evaluation_interval", "evaluation_duration"),
        **_reject_all("is not supported: an evaluation uses the seed of the run. Leave it out.", "seed", same=(None,)),
        **_reject_all("is the same in evaluations. Leave it out.", *("gamma", "lr", "model", "observation_filter", "framework"),
               *("train_batch_size", "rollout_fragment_length", "batch_mode", "multiagent", "exploration_config"), same=({},)),
    },
    MULTIAGENT: {
        **_reject_all("keeps policies on disk; here all are in memory. Leave it out.",
               "policy_map_capacity", "policy_map_cache", "policy_states_are_swappable"),
        **_reject_all("is a function in Python; let the environment put more into its observations, or use centralized_value.",
               "observation_fn", same=(None,)),
        **_reject_all("is not supported: agents are replayed one by one. Leave it out.", "replay_mode", same=("independent",)),
        **_reject_all("is `policy_mapping` here: agent → policy.", "policy_mapping_func", "mapping_fn"),
    },
}  # fmt: skip
"""Section → key → why it is not supported."""

_OTHER_ALGORITHMS: Mapping[str, str] = {
    "A3C": "IMPALA samples asynchronously and corrects for the lag",
    "PG": "PPO with num_epochs: 1 and lambda: 1 is nearly the same",
    "DDPPO": "PPO with num_learners above 1 shares its gradients",
    "APEX": "DQN with num_workers samples in parallel",
    "Rainbow": "DQN has all of its parts but noise and distributions",
    "R2D2": "PPO, APPO and IMPALA have recurrent models (use_lstm), DQN has none",
    "QMIX": "PPO with several agents and centralized_value is the nearest",
    "MAPPO": "PPO with several agents and centralized_value is the same",
    "SAC": "PPO is for continuous actions here",
    "DDPG": "PPO is for continuous actions here",
    "TD3": "PPO is for continuous actions here",
    "APEX_DDPG": "PPO is for continuous actions here",
    "ES": "all algorithms here use gradients",
    "ARS": "all algorithms here use gradients",
    "MARWIL": "all algorithms here learn from environments, not from files",
    "BC": "all algorithms here learn from environments, not from files",
    "CQL": "all algorithms here learn from environments, not from files",
    "CRR": "all algorithms here learn from environments, not from files",
    "DT": "all algorithms here learn from environments, not from files",
    "DreamerV3": "all algorithms here are model-free",
    "Dreamer": "all algorithms here are model-free",
    "MBMPO": "all algorithms here are model-free",
    "MAML": "meta-learning is not available",
    "AlphaZero": "tree search is not available",
    "AlphaStar": "league training is not available yet",
    "MADDPG": "PPO with several agents and centralized_value is the nearest",
    "LinUCB": "bandits are not available",
    "LinTS": "bandits are not available",
    "SlateQ": "slate recommendation is not available",
    "IQL": "all algorithms here learn from environments, not from files",
}


def suggest_algorithm(run: str) -> str:
    """Return a sentence with the nearest alternative to an unsupported algorithm of RLlib; '' for any other name."""
    names = {name.lower(): name for name in _OTHER_ALGORITHMS}
    name = names.get(run.removeprefix("contrib/").lower(), "")
    return f"{run} is not supported: {_OTHER_ALGORITHMS[name]}." if name else ""


# -- translation --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyNotice:
    """A key that is rejected, redundant or ignored, and why."""

    path: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.path} ({_short(self.value)}) {self.why}".rstrip(".") + "."


@dataclass
class TranslatedSection:
    """A section with translated keys, and notices about the keys that were left out."""

    data: dict[str, Any] = field(default_factory=dict)
    spelled_as: dict[str, str] = field(default_factory=dict)
    """Key → its original spelling, where that differs."""
    rejected: list[KeyNotice] = field(default_factory=list)
    redundant: list[KeyNotice] = field(default_factory=list)
    """Keys left out because their value matches our behaviour."""
    ignored: list[KeyNotice] = field(default_factory=list)
    """Keys left out with a notice to the user."""
    conflicts: list[ConfigProblem] = field(default_factory=list)
    substitutions: list[ConfigProblem] = field(default_factory=list)
    """Notices about an algorithm that is replaced by another one."""
    other_sections: dict[str, Any] = field(default_factory=dict)
    """Values that belong to other sections: dotted path → value."""

    def problems(self) -> list[ConfigProblem]:
        return [*self.conflicts, *(ConfigProblem(str(refusal), refusal.path) for refusal in self.rejected)]

    def notices(self) -> list[ConfigProblem]:
        return [*self.substitutions, *(ConfigProblem(_notice(each), each.path) for each in self.ignored)]


def _notice(ignored: KeyNotice) -> str:
    return f"{ignored.path} ({_short(ignored.value)}) is ignored: {ignored.why}".rstrip(".") + "."


def translate_section(section: str, data: Mapping[str, Any], known: Iterable[str]) -> TranslatedSection:
    """Translate one level of an experiment. `known`: keys of its schema, which take precedence over RLlib's meaning."""
    names, out = set(known), TranslatedSection()
    renamed, translated, foreign = RENAMED[section], TRANSLATED[section], UNSUPPORTED[section]
    prefix = f"{section}." if section else ""
    scheduled = {
        renamed[key] for key, value in data.items() if key in renamed and key.endswith("_schedule") and value is not None
    }
    for key, value in data.items():
        name = renamed.get(key) or (resolve_name(key, names) if section == CONFIG else key)
        if section == CONFIG and key in _REPLACED and _is_unset(value):
            out.redundant.append(KeyNotice(prefix + key, value, "was not set in RLlib"))
        elif key.endswith("_schedule") and key in renamed and value is None:
            out.redundant.append(KeyNotice(prefix + key, value, "is no schedule"))
        elif key == name and name in scheduled:  # as it did in RLlib
            out.redundant.append(KeyNotice(prefix + key, value, "is overridden by its schedule"))
        elif is_search(value) and _changes_nothing(section, name, value, data, known=names):
            out.ignored.append(KeyNotice(prefix + key, value, "none of these values changes the training: it is one trial"))
        elif name in translated and not is_search(value):
            _translate(out, section, key, name, data)
        elif name not in names and name in foreign:
            same, why = foreign[name].matches_default(value), foreign[name].why
            target = out.redundant if same else out.ignored if foreign[name].ignored else out.rejected
            target.append(KeyNotice(prefix + key, value, _DEFAULT if same else why))
        else:
            _set_value(out, section, name, value, key)
    return out


def resolve_name(key: str, names: set[str]) -> str:
    """Return our name of a key whose meaning depends on the algorithm with the keys `names`; else the key itself."""
    return next((name for marker, name, _ in sb3_cleanrl.DEPENDING.get(key, ()) if marker in names), key)


_DEFAULT = "is already the default"


def _changes_nothing(section: str, name: str, value: Mapping[str, Any], data: Mapping[str, Any], *, known: set[str]) -> bool:
    """Whether all values of a searched key are left out, so that all trials would be the same."""
    ((kind, given),) = value.items()
    translate, foreign = TRANSLATED[section].get(name), UNSUPPORTED[section].get(name)
    if kind not in ("grid_search", "choice") or not isinstance(given, list) or not given:
        return False
    if translate is None:
        return name not in known and foreign is not None and all(foreign.ignored or foreign.matches_default(one) for one in given)
    try:
        found = [translate(one, {**data, name: one}) for one in given]
    except ValueError:
        return False
    return all(isinstance(each, str) or not each for each in found)


def _translate(out: TranslatedSection, section: str, key: str, name: str, data: Mapping[str, Any]) -> None:
    path, value = f"{section}.{key}" if section else key, data[key]
    try:
        found = TRANSLATED[section][name](value, data)
    except ValueError as error:
        out.rejected.append(KeyNotice(path, value, str(error)))
        return
    if isinstance(found, str):
        out.ignored.append(KeyNotice(path, value, found))
        return
    if not found:
        out.redundant.append(KeyNotice(path, value, _DEFAULT))
    for target, given in found.items():
        _set_value(out, section, target, given, key)


def _set_value(out: TranslatedSection, section: str, path: str, value: Any, written: str) -> None:
    inside = section.removeprefix("config").removeprefix(".")
    name = path.removeprefix(f"{inside}.") if inside else path
    target = out.other_sections if "." in name else out.data
    if name in target and (target[name] != value or type(target[name]) is not type(value)):
        before = out.spelled_as.get(name, name)
        where = f"{section} sets" if section else "The experiment sets"
        sentence = f"{before!r} is {_short(target[name])}, and {written!r}, which means the same, is {_short(value)}. Keep one."
        out.conflicts.append(ConfigProblem(f"{where} {name!r} twice: {sentence}", f"{section}.{written}".lstrip(".")))
        return
    target[name] = value
    if written != name:
        out.spelled_as[name] = written


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def other_spellings(section: str, name: str) -> list[str]:
    """Return other spellings of a key, followed by an algorithm in brackets if they apply to such algorithms only."""
    depending = sb3_cleanrl.DEPENDING.items() if section == CONFIG else ()
    some = [f"{old} ({run})" for old, meanings in depending for _, new, run in meanings if new == name]
    return sorted([*(old for old, new in RENAMED.get(section, {}).items() if new == name), *some])


def canonical_name(section: str, key: str) -> str:
    """Return our name of a key."""
    return RENAMED.get(section, {}).get(key, key)
