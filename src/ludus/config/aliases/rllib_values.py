"""Functions that translate the values of RLlib's keys; the tables of `rllib_keys` list which key uses which."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Section = Mapping[str, Any]
KeyTranslator = Callable[[Any, Section], Section | str]
"""(value, its whole section) → our values by dotted path below `config`; or the reason why the key is ignored.

Raises ValueError with the reason why it is rejected."""

ValueTranslator = Callable[[Any, Section], Section]
"""A KeyTranslator that never ignores the key."""


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_unset(value: Any) -> bool:
    """Whether a deprecated key has the value −1, which RLlib writes into its dumped configs."""
    return type(value) is int and value == -1


# -- translators of many keys ---------------------------------------------------------------------------------------------


def move_to(path: str) -> ValueTranslator:
    return lambda value, _: {path: value}


def move_unless(path: str, *nothing: Any) -> ValueTranslator:
    """Move the value to `path`, but leave out the values `nothing`, which are our default."""
    return lambda value, _: {} if any(value is one or value == one for one in nothing) else {path: value}


def replace_values(path: str, words: Mapping[Any, Any]) -> ValueTranslator:
    def translate(value: Any, _: Section) -> Section:
        hashable = value is None or isinstance(value, (str, int, float))
        return {path: words[value] if hashable and value in words else value}

    return translate


def flag(when_true: Section | str, when_false: Section | str) -> KeyTranslator:
    def translate(value: Any, _: Section) -> Section | str:
        _check_bool(value)
        return when_true if value else when_false

    return translate


def without_effect(key: str, off: Any, why: str) -> ValueTranslator:
    """Accept a number that has no effect as long as `key` has the value `off`; otherwise raise ValueError(why)."""

    def translate(value: Any, section: Section) -> Section:
        if section.get(key, off) != off or not isinstance(value, (int, float)):
            raise ValueError(why)
        return {}

    return translate


def below_config(translate: ValueTranslator) -> ValueTranslator:
    """Adapt a translator of a key of `config` to the same key at the top level."""
    return lambda value, section: {f"config.{key}": given for key, given in translate(value, section).items()}


def reject_end_of_training(value: Any, _: Section) -> Section:
    raise ValueError("defines the end of the training: it belongs next to config, or is written  stop: {timesteps: …}")


def _check_bool(value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError("is true or false")


# -- keys of the experiment ------------------------------------------------------------------------------------------------


def checkpoint_config(value: Any, _: Section) -> Section:
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


# -- keys of config --------------------------------------------------------------------------------------------------------


def framework(value: Any, section: Section) -> Section | str:
    if value in ("torch", "pytorch"):
        return {}
    if value not in ("tf", "tf2", "tfe", "auto", None):
        raise ValueError("is torch, tf or tf2")
    model = section.get("model")
    if isinstance(model, Mapping) and model.get("custom_model"):
        raise ValueError("names TensorFlow together with a custom_model, and a custom_model here is a PyTorch nn.Module")
    return "the same layers are built with PyTorch"


def use_pytorch(value: Any, section: Section) -> Section | str:
    _check_bool(value)
    return framework("torch" if value else "tf", section)


def worker_restarts(value: Any, section: Section) -> Section:
    """Lost workers are restarted by default; only false changes that."""
    _check_bool(value)
    restart_keys = ("recreate_failed_workers", "recreate_failed_env_runners", "restart_failed_env_runners")
    return {} if value or any(section.get(key) for key in restart_keys) else {"max_worker_restarts": 0}


def _no_evaluations(interval: Any) -> bool:
    return interval is None or (interval == 0 and not isinstance(interval, bool))


def evaluation_interval(value: Any, _: Section) -> Section:
    return {"evaluation_duration": 0} if _no_evaluations(value) else {"evaluation_interval": value}


def evaluation_duration(value: Any, section: Section) -> Section:
    if _no_evaluations(section.get("evaluation_interval", 1)):
        return {"evaluation_duration": 0}
    if value == "auto":
        raise ValueError(
            "is a number of episodes here; evaluations in parallel to training (evaluation_num_workers) do not delay it"
        )
    return {"evaluation_duration": value}


def per_learner(key: str) -> ValueTranslator:
    def translate(value: Any, section: Section) -> Section:
        if key == "num_gpus" and section.get("_fake_gpus") is True:
            return {"num_gpus": 0}
        learners = section.get("num_learners", section.get("num_learner_workers", 1))
        if not isinstance(value, (int, float)) or not isinstance(learners, int):
            raise ValueError(f"is multiplied by num_learners, and one of them is not a number; write {key}")
        return {key: value * max(1, learners)}

    return translate


PER_LEARNER_GPUS = ("num_gpus_per_learner", "num_gpus_per_learner_worker")


def num_gpus(value: Any, section: Section) -> Section:
    if section.get("_fake_gpus") is True:
        return {"num_gpus": 0}
    if value == 0 and not isinstance(value, bool) and any(section.get(key) for key in PER_LEARNER_GPUS):
        return {}  # RLlib's main process needs no GPU when its learners have some
    return {"num_gpus": value}


def gae_lambda(value: Any, section: Section) -> Section:
    return {"lambda": 1.0 if section.get("use_gae") is False else value}


def replay_ratio(value: Any, _: Section) -> Section:
    if not is_number(value) or value < 0:
        raise ValueError("is a number from 0 upwards")
    return {"replay_proportion": 1 / value if value else 0.0}  # as IMPALAConfig.replay_ratio defines it


def clip_rewards(value: Any, _: Section) -> Section:
    if value is None:
        return {}
    return {"preprocess.clip_reward": [-abs(value), abs(value)] if is_number(value) else value}


def exploration(value: Any, _: Section) -> Section:
    if not isinstance(value, Mapping):
        raise ValueError("is a section")
    kind = str(value.get("type", "StochasticSampling" if not value else "EpsilonGreedy")).rpartition(".")[2]
    rest = {key: given for key, given in value.items() if key != "type"}
    if kind == "StochasticSampling" and not {key for key in rest if key != "random_timesteps" or rest[key]}:
        return {}
    if kind != "EpsilonGreedy":
        raise ValueError(f"names {kind}, which is not supported: policies sample their own distribution, DQN is epsilon-greedy")
    known = {"initial_epsilon", "final_epsilon", "epsilon_timesteps", "warmup_timesteps", "epsilon_schedule"}
    if unknown := sorted(set(rest) - known):
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


# -- replay buffers --------------------------------------------------------------------------------------------------------

_LEARNING_STARTS = ("learning_starts", "min_size_for_sampling")
BETA_ANNEALING = ("prioritized_replay_beta_annealing_timesteps", "final_prioritized_replay_beta")
_ANNEALED_OVER, _FINAL_BETA, _BETA = 20_000, 0.4, 0.4
"""RLlib's defaults of beta annealing."""

REPLACED = (
    *("buffer_size", "prioritized_replay", "prioritized_replay_alpha", "prioritized_replay_beta", "prioritized_replay_eps"),
    *("learning_starts", "target_update_frequency", "replay_batch_size", "replay_mode", "replay_sequence_length"),
    *("timesteps_per_iteration", "min_iter_time_s", "min_time_s_per_reporting", "worker_side_prioritization"),
)
"""Deprecated keys of RLlib. Its dumped configs contain −1 for them, which means unset."""


def buffer_type(name: Any) -> str:
    """Return the type of replay buffer for a class name of RLlib; '' if it is not one of its buffers."""
    found = re.fullmatch(r"(MultiAgent)?(Prioritized)?(Episode)?ReplayBuffer", str(name).rpartition(".")[2])
    return "" if found is None else "PrioritizedReplayBuffer" if found[2] else "ReplayBuffer"


def replay_buffer(value: Any, section: Section) -> Section:
    """Translate the buffer section; the start of learning is a key of the algorithm here."""
    if isinstance(value, Mapping):
        value = {key: given for key, given in value.items() if key not in REPLACED or not is_unset(given)}
        value |= {"type": kind} if (kind := buffer_type(value.get("type"))) else {}
        if any(key in value for key in BETA_ANNEALING):
            beta = _beta_schedule(value)
            value = {key: given for key, given in value.items() if key not in BETA_ANNEALING} | {"prioritized_replay_beta": beta}
    if not isinstance(value, Mapping) or not any(key in value for key in _LEARNING_STARTS):
        return {"replay_buffer_config": value}
    rest = {key: given for key, given in value.items() if key not in _LEARNING_STARTS}
    starts = {value[key] for key in _LEARNING_STARTS if key in value}
    if len(starts) > 1:
        raise ValueError("holds learning_starts and min_size_for_sampling, which mean the same, with different values. Keep one")
    out = {"replay_buffer_config": rest} if rest else {}
    beside = [section[key] for key in ("num_steps_sampled_before_learning_starts", "learning_starts") if key in section]
    if beside and not is_unset(beside[0]):  # the algorithm's key takes precedence
        return out
    return {"num_steps_sampled_before_learning_starts": starts.pop()} | out


def replay_beta(value: Any, section: Section) -> Section:
    return {"replay_buffer_config.beta": _beta_schedule(section)}


def _beta_schedule(section: Section) -> Any:
    """Combine `prioritized_replay_beta` and the keys of its annealing to a number or a schedule."""
    beta = section.get("prioritized_replay_beta", -1)
    start = section.get("beta", _BETA) if is_unset(beta) else beta
    steps, final = (None if is_unset(section.get(name, -1)) else section[name] for name in BETA_ANNEALING)
    if steps is None and final is None:
        return start
    steps, final = _ANNEALED_OVER if steps is None else steps, _FINAL_BETA if final is None else final
    if not all(isinstance(number, (int, float)) for number in (start, steps, final)) or steps < 1:
        raise ValueError("is annealed between numbers, over 1 timestep or more")
    return start if start == final else [[0, start], [int(steps), final]]


# -- keys of config.model --------------------------------------------------------------------------------------------------

_ATARI_SIZE = 84


def conv_filters(value: Any, _: Section) -> Section:
    """Translate RLlib's form [[channels, [kernel, kernel], stride], …]."""
    return {"model.conv_filters": [_filter(one) for one in value] if isinstance(value, list) else value}


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


def activation(value: Any, _: Section) -> Section:
    return {"model.fcnet_activation": "linear" if value is None else value.lower() if isinstance(value, str) else value}


def image_size(value: Any, _: Section) -> Section:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("is the height and width of an image in pixels")
    return {} if value == _ATARI_SIZE else {"preprocess.resize": [value, value]}


def post_fcnet_hiddens(value: Any, model: Section) -> Section:
    """Merge into `fcnet_hiddens`: the layers after convolutions; for vectors, one list of all layers."""
    if not isinstance(value, list) or not value:
        return {} if value in ([], None) else {"model.fcnet_hiddens": value}
    dense, images = model.get("fcnet_hiddens"), any(key in model for key in ("conv_filters", "dim"))
    if images and not dense:
        return {"model.fcnet_hiddens": value}
    if isinstance(dense, list) and not images:
        return {"model.fcnet_hiddens": [*dense, *value]}
    raise ValueError(
        "is not supported: layers after convolutions are fcnet_hiddens; those of vectors are one list, fcnet_hiddens + these"
    )


def fcnet_hiddens(value: Any, model: Section) -> Section:
    post = model.get("post_fcnet_hiddens")
    if isinstance(value, list) and isinstance(post, list) and not any(key in model for key in ("conv_filters", "dim")):
        value = [*value, *post]
    return {"model.fcnet_hiddens": value}
