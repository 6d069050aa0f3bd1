"""Translation of values of RLlib's keys (images, replay, GPUs, advantages) and of algorithms that are special cases of ours.

The functions have the signature of `rllib_keys.KeyTranslator`; `rllib_keys` merges them into its tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]
Translate = Callable[[Any, Values], Values | str]

PER_LEARNER_GPUS = ("num_gpus_per_learner", "num_gpus_per_learner_worker")
_ATARI_SIZE = 84
_ANNEALED_OVER, _FINAL_BETA, _BETA = 20_000, 0.4, 0.4
"""RLlib's defaults of beta annealing."""


# -- config -------------------------------------------------------------------------------------------------------------


def _gpus(value: Any, section: Values) -> Values | str:
    if section.get("_fake_gpus") is True:
        return {"num_gpus": 0}
    if value == 0 and not isinstance(value, bool) and any(section.get(key) for key in PER_LEARNER_GPUS):
        return {}  # RLlib's main process needs no GPU when its learners have some
    return {"num_gpus": value}


def _use_gae(value: Any, _: Values) -> Values:
    if not isinstance(value, bool):
        raise ValueError("is true or false")
    return {} if value else {"lambda": 1.0}  # advantage = return − value


def _lambda(value: Any, section: Values) -> Values:
    return {"lambda": 1.0 if section.get("use_gae") is False else value}


def _replay_ratio(value: Any, _: Values) -> Values:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ValueError("is a number from 0 upwards")
    return {"replay_proportion": 1 / value if value else 0.0}  # as IMPALAConfig.replay_ratio defines it


def beta_schedule(section: Values) -> Any:
    """Combine `prioritized_replay_beta` and the keys of its annealing to a number or a schedule."""
    start = _given(section, "prioritized_replay_beta", section.get("beta", _BETA))
    steps = _given(section, "prioritized_replay_beta_annealing_timesteps", None)
    final = _given(section, "final_prioritized_replay_beta", None)
    if steps is None and final is None:
        return start
    steps, final = _ANNEALED_OVER if steps is None else steps, _FINAL_BETA if final is None else final
    if not all(isinstance(number, (int, float)) for number in (start, steps, final)) or steps < 1:
        raise ValueError("is annealed between numbers, over 1 timestep or more")
    return start if start == final else [[0, start], [int(steps), final]]


def _given(section: Values, key: str, default: Any) -> Any:
    value = section.get(key, -1)
    return default if type(value) is int and value == -1 else value


CONFIG: Mapping[str, Translate] = {
    "num_gpus": _gpus,
    "use_gae": _use_gae,
    "lambda": _lambda,
    "replay_ratio": _replay_ratio,
}


# -- config.model -------------------------------------------------------------------------------------------------------


def _dim(value: Any, _: Values) -> Values:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("is the height and width of an image in pixels")
    return {} if value == _ATARI_SIZE else {"preprocess.resize": [value, value]}


def _grayscale(value: Any, _: Values) -> Values:
    if not isinstance(value, bool):
        raise ValueError("is true or false")
    return {"preprocess.grey": True} if value else {}  # Atari images are always greyscale, as in RLlib


def _zero_mean(value: Any, _: Values) -> Values | str:
    if not isinstance(value, bool):
        raise ValueError("is true or false")
    return "pixels are scaled to 0 … 1" if value else {}


def _framestack(value: Any, _: Values) -> Values:
    if not isinstance(value, bool):
        raise ValueError("is true or false")
    return {} if value else {"preprocess.stack": 1}


def _num_framestacks(value: Any, _: Values) -> Values:
    return {} if value in ("auto", 0) else {"preprocess.stack": value}


def _post_fcnet_hiddens(value: Any, model: Values) -> Values:
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


def _fcnet_hiddens(value: Any, model: Values) -> Values:
    post = model.get("post_fcnet_hiddens")
    if isinstance(value, list) and isinstance(post, list) and not any(key in model for key in ("conv_filters", "dim")):
        value = [*value, *post]
    return {"model.fcnet_hiddens": value}


MODEL: Mapping[str, Translate] = {
    "dim": _dim,
    "grayscale": _grayscale,
    "zero_mean": _zero_mean,
    "framestack": _framestack,
    "num_framestacks": _num_framestacks,
    "post_fcnet_hiddens": _post_fcnet_hiddens,
    "fcnet_hiddens": _fcnet_hiddens,
}


# -- algorithms that are special cases of others ------------------------------------------------------------------------


@dataclass(frozen=True)
class SpecialCase:
    """An algorithm of RLlib that is one of ours with certain settings."""

    run: str
    config: Callable[[Values], Values]
    """(given config with translated keys) → settings that define the special case."""
    notice: str


def _simple_q(config: Values) -> Values:
    buffer = config.get("replay_buffer_config")
    typed = "prioritized_replay" in config or (isinstance(buffer, Mapping) and {"type", "prioritized_replay"} & set(buffer))
    uniform = {} if typed else {"replay_buffer_config": {**(buffer or {}), "type": "ReplayBuffer"}}
    return {"double_q": False, "dueling": False, **uniform}


_A2C_STEPS, _A2C_BATCH = 20, 200
"""RLlib's default rollout_fragment_length and train_batch_size."""


def _a2c(config: Values) -> Values:
    """One gradient step per batch: the probability ratio is 1, so PPO's clipping has no effect."""
    numbers = [config.get(key) for key in ("train_batch_size", "rollout_fragment_length", "num_workers", "num_envs_per_worker")]
    given, steps, workers, envs = (number if isinstance(number, int) else None for number in numbers)
    unit = max(1, steps or _A2C_STEPS) * max(1, workers or 0) * max(1, envs or 1)
    batch, micro = -(-(given or _A2C_BATCH) // unit) * unit, config.get("microbatch_size")
    pieces = {"gradient_accumulation": max(1, -(-batch // micro))} if isinstance(micro, int) and micro > 0 else {}
    return {"num_epochs": 1, "train_batch_size": batch, "minibatch_size": given or batch, "kl_coeff": 0.0, **pieces}


SPECIAL_CASES: Mapping[str, SpecialCase] = {
    "SimpleQ": SpecialCase("DQN", _simple_q, "DQN with double_q, dueling and prioritized replay off"),
    "A2C": SpecialCase("PPO", _a2c, "PPO with one gradient step on each batch"),
}


def find_special_case(run: Any) -> SpecialCase | None:
    """Look up an algorithm name, ignoring case."""
    name = str(run).lower() if isinstance(run, str) else ""
    return next((case for known, case in SPECIAL_CASES.items() if known.lower() == name), None)
