"""Keys of Stable-Baselines3 (with RL Zoo and sb3-contrib), CleanRL and ML-Agents: our equivalent, or why there is none.

`rllib_keys` merges these tables with those of RLlib. Checked against SB3 2.7, CleanRL's ppo.py and dqn.py, ML-Agents 1.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludus.config.aliases.rllib_values import Section, ValueTranslator, is_number, reject_end_of_training
from ludus.config.aliases.unsupported_keys import keys_of_other_libraries

RENAMED: Mapping[str, str] = {
    "learning_rate": "lr",
    "num_steps": "rollout_fragment_length",
    "n_epochs": "num_epochs",
    "update_epochs": "num_epochs",
    "num_epoch": "num_epochs",
    "gae_lambda": "lambda",
    "lambd": "lambda",
    "ent_coef": "entropy_coeff",
    "vf_coef": "vf_loss_coeff",
    "clip_range": "clip_param",
    "clip_coef": "clip_param",
    "max_grad_norm": "grad_clip",
    "norm_adv": "normalize_advantage",
    "n_envs": "num_envs_per_worker",
    "stats_window_size": "metrics_num_episodes_for_smoothing",
    "target_update_interval": "target_network_update_freq",
    "target_network_frequency": "target_network_update_freq",
    "env_kwargs": "env_config",
    "n_eval_episodes": "evaluation_duration",
}
"""Key of `config:` in another library → our key with the same meaning."""

RENAMED_TOP: Mapping[str, str] = {"env_id": "env", "exp_name": "name", "algo": "run"}
"""The same for keys next to `config:`."""

DEPENDING: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "batch_size": (("minibatch_size", "minibatch_size", "PPO"), ("n_step", "train_batch_size", "DQN")),
    "n_steps": (("n_step", "n_step", "DQN"), ("lambda", "rollout_fragment_length", "PPO")),
}
"""Key → (a key of the algorithm, our key in that case, an example of such an algorithm).

SB3's batch_size is the minibatch of PPO and the sampled batch of DQN; its n_steps is the rollout length of one environment in
PPO and the n-step return in DQN."""

TOTALS = ("total_timesteps", "n_timesteps", "max_steps")
"""Names of the number of environment steps after which training stops."""

_CLEANRL_ONLY = {"num_steps", "num_minibatches", "update_epochs", "clip_coef", "norm_adv", "clip_vloss", "anneal_lr"}
_WORKERS = ("num_workers", "num_env_runners", "num_rollout_workers")
_ENVS = ("num_envs_per_worker", "num_envs", "n_envs", "num_envs_per_env_runner")
_STEPS = ("rollout_fragment_length", "num_steps", "n_steps")


def _number(section: Section, names: tuple[str, ...]) -> Any:
    """The number that a section has under one of these names, or None."""
    return next((section[name] for name in names if is_number(section.get(name))), None)


# -- schedules and weights ------------------------------------------------------------------------------------------------


def _schedule(key: str) -> ValueTranslator:
    """Reject SB3's functions of the remaining progress and RL Zoo's `lin_3e-4`, and suggest a list of points."""

    def translate(value: Any, _: Section) -> Section:
        if callable(value):
            raise ValueError(f"is a function; a schedule here is a list of points: {key}: [[0, 3e-4], [1000000, 0]]")
        if isinstance(value, str) and value.startswith("lin_"):
            raise ValueError(f"is RL Zoo's linear schedule; here it is {key}: [[0, {value[4:]}], [TOTAL_TIMESTEPS, 0]]")
        return {key: value}

    return translate


def _clip_param(value: Any, _: Section) -> Section:
    if callable(value) or (isinstance(value, str) and value.startswith("lin_")):
        raise ValueError("is a schedule, and clip_param is one number here. Write clip_param: 0.2")
    return {"clip_param": value}


def _value_weight(value: Any, section: Section) -> Section:
    """CleanRL weighs half of the squared error, SB3 and Ludus all of it. Both name it vf_coef; other keys tell which."""
    cleanrl = "vf_coef" in section and "vf_loss_coeff" not in section and _CLEANRL_ONLY & section.keys()
    return {"vf_loss_coeff": value / 2 if cleanrl and is_number(value) else value}


def _anneal_lr(value: Any, section: Section) -> Section:
    if value is False:
        return {}
    rate = _number(section, ("learning_rate", "lr"))
    total = _number(section, TOTALS)
    points = f"[[0, {rate or 2.5e-4}], [{total or 'TOTAL_TIMESTEPS'}, 0]]"
    raise ValueError(f"is a schedule of lr here: write  lr: {points}  instead of learning_rate and anneal_lr")


# -- sizes of batches -----------------------------------------------------------------------------------------------------


def _num_minibatches(value: Any, section: Section) -> Section:
    """Compute minibatch_size from the number of minibatches, if the batch size is known."""
    envs, steps = _number(section, _ENVS), _number(section, _STEPS)
    workers = max(1, _number(section, _WORKERS) or 0)
    batch = _number(section, ("train_batch_size",)) or (envs and steps and envs * steps * workers)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("is a whole number from 1 upwards: the number of minibatches of a batch")
    if not batch:
        raise ValueError(
            "is a number of minibatches; here their size is given: minibatch_size = train_batch_size / num_minibatches. "
            "Give num_envs and num_steps too, and it is computed"
        )
    return {"minibatch_size": max(1, int(batch) // value)}


def _training_intensity(value: Any, section: Section) -> Section:
    """Compute samples learned from per sampled step from SB3's train_freq and gradient_steps."""
    batch = _number(section, ("batch_size", "train_batch_size")) or 32
    updates, envs = section.get("gradient_steps", 1), _number(section, _ENVS) or 1
    if not is_number(value) or value <= 0 or not is_number(updates) or updates <= 0:
        raise ValueError(
            "is training_intensity here: samples learned from for every step sampled = batch_size × gradient_steps / "
            "(train_freq × environments)"
        )
    return {"training_intensity": batch * updates / (value * envs)}


def _gradient_steps(value: Any, section: Section) -> Section:
    if not {"train_freq", "train_frequency"} & section.keys():
        raise ValueError("is training_intensity here: samples learned from for every step sampled. Give train_freq too, or that")
    return _training_intensity(section.get("train_freq", section.get("train_frequency")), section)


# -- networks -------------------------------------------------------------------------------------------------------------


def _policy_kwargs(value: Any, section: Section) -> Section:
    """Translate SB3's policy keywords that the built-in networks support."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("is a section: {net_arch: [64, 64], activation_fn: tanh}")
    out: dict[str, Any] = {}
    for key, given in value.items():
        if key not in _POLICY_KWARGS:
            raise ValueError(f"has {key!r}, which is not built in; write a custom_model")
        out |= _POLICY_KWARGS[key](given, section)
    return out


def _net_arch(value: Any, _: Section) -> Section:
    if isinstance(value, Mapping):
        layers = [value[part] for part in ("pi", "vf", "qf") if part in value]
        if not layers or any(each != layers[0] for each in layers) or set(value) - {"pi", "vf", "qf"}:
            raise ValueError("has a net_arch with different layers for policy and value; here both have model.fcnet_hiddens")
        value = layers[0]
    if not isinstance(value, list) or not all(isinstance(size, int) for size in value):
        raise ValueError("has a net_arch that is not a list of sizes such as [64, 64]; model.fcnet_hiddens is one")
    return {"model.fcnet_hiddens": value}


def _activation_fn(value: Any, _: Section) -> Section:
    name = value.__name__ if isinstance(value, type) else str(value)
    return {"model.fcnet_activation": name.rpartition(".")[2].lower()}


def _orthogonal(value: Any, _: Section) -> Section:
    if value is not True:
        raise ValueError(
            "has ortho_init: false; initial weights here are always orthogonal. Leave it out, or write a custom_model"
        )
    return {}


def _optimizer_kwargs(value: Any, _: Section) -> Section:
    if not isinstance(value, Mapping) or set(value) - {"eps"}:
        raise ValueError("has optimizer_kwargs other than eps; the optimizer is Adam with lr and adam_epsilon")
    return {"adam_epsilon": value["eps"]} if value else {}


def _one_layer(value: Any, _: Section) -> Section:
    if value != 1:
        raise ValueError("has several recurrent layers; here there is one (model.cell_size)")
    return {}


_POLICY_KWARGS: Mapping[str, ValueTranslator] = {
    "net_arch": _net_arch,
    "activation_fn": _activation_fn,
    "ortho_init": _orthogonal,
    "optimizer_kwargs": _optimizer_kwargs,
    "log_std_init": lambda value, _: {"model.log_std_init": value},
    "lstm_hidden_size": lambda value, _: {"model.use_lstm": True, "model.cell_size": value},
    "n_lstm_layers": _one_layer,
}


def _network_settings(value: Any, _: Section) -> Section:
    """Translate ML-Agents' hidden_units and num_layers."""
    if not isinstance(value, Mapping) or set(value) - {"hidden_units", "num_layers", "normalize", "vis_encode_type"}:
        raise ValueError("is the section `model` here: fcnet_hiddens, conv, core, cell_size")
    if value.get("vis_encode_type", "resnet") not in ("nature_cnn", "resnet"):
        raise ValueError("has a vis_encode_type that is not supported; model.conv is nature or resnet")
    out: dict[str, Any] = {}
    if "vis_encode_type" in value:
        out["model.conv"] = str(value["vis_encode_type"]).removesuffix("_cnn")
    if {"hidden_units", "num_layers"} & value.keys():
        units, layers = value.get("hidden_units", 128), value.get("num_layers", 2)
        if not isinstance(units, int) or not isinstance(layers, int):
            raise ValueError("has hidden_units and num_layers, which are whole numbers")
        out["model.fcnet_hiddens"] = [units] * layers
    if value.get("normalize"):
        out["observation_filter"] = "MeanStdFilter"
    return out


def _normalize(value: Any, _: Section) -> Section:
    """Translate RL Zoo's VecNormalize."""
    if isinstance(value, bool):
        return {"observation_filter": "MeanStdFilter", "normalize_reward": True} if value else {}
    raise ValueError("is observation_filter: MeanStdFilter (observations) and normalize_reward: true (rewards) here")


def _stop(value: Any, _: Section) -> Section:
    return {"stop.timesteps": int(value) if isinstance(value, float) and value.is_integer() else value}


TRANSLATED: Mapping[str, ValueTranslator] = {
    "lr": _schedule("lr"),
    "clip_param": _clip_param,
    "vf_loss_coeff": _value_weight,
    "anneal_lr": _anneal_lr,
    "num_minibatches": _num_minibatches,
    "train_freq": _training_intensity,
    "train_frequency": _training_intensity,
    "gradient_steps": _gradient_steps,
    "policy_kwargs": _policy_kwargs,
    "network_settings": _network_settings,
    "normalize": _normalize,
    "frame_stack": lambda value, _: {"preprocess.stack": value},
    **dict.fromkeys(TOTALS, reject_end_of_training),
}
"""Key of `config:` → function that translates its value."""

TRANSLATED_TOP: Mapping[str, ValueTranslator] = dict.fromkeys(TOTALS, _stop)


def library_of(key: str) -> str:
    """Return the names of the libraries with such a key, for messages."""
    ours = any(key in table for table in (RENAMED, DEPENDING, TRANSLATED, keys_of_other_libraries()))
    return "Stable-Baselines3, CleanRL or ML-Agents" if ours else "RLlib"
