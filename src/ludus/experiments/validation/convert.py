"""Converts experiment files with RLlib keys to current keys, with comments about renamed and dropped keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ludus.config.problem import ConfigErrors
from ludus.config.schema import AlgorithmConfig
from ludus.config.search_values import has_search, is_search
from ludus.config.section_translation import KeyNotice
from ludus.config.translation import translate_config, translate_experiment
from ludus.config.validation import parse_algorithm_config
from ludus.envs.legacy_names import current_name
from ludus.errors import ConfigError, UsageError
from ludus.experiments.resolve import iteration_notice_of_file
from ludus.experiments.validation import validate
from ludus.io.yaml_documents import Dumper, parse_yaml

_COMMON = {
    "num_envs_per_worker": 1,
    "model.fcnet_hiddens": [256, 256],
    "model.cell_size": 256,
    "model.max_seq_len": 20,
    "model.vf_share_layers": False,
    "model.free_log_std": False,
    "evaluation_duration": 0,
}
RLLIB_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "PPO": {
        **_COMMON,
        "num_workers": 2,
        "train_batch_size": 4000,
        "minibatch_size": 128,
        "num_epochs": 30,
        "lr": 5e-5,
        "lambda": 1.0,
        "clip_param": 0.3,
        "vf_clip_param": 10.0,
        "vf_loss_coeff": 1.0,
        "kl_coeff": 0.2,
        "kl_target": 0.01,
        "grad_clip": None,
    },
    "IMPALA": {
        **_COMMON,
        "num_workers": 2,
        "train_batch_size": 500,
        "rollout_fragment_length": 50,
        "grad_clip": 40.0,
        "normalize_advantage": False,
        "max_lag": None,
    },
    "APPO": {
        **_COMMON,
        "num_workers": 2,
        "train_batch_size": 500,
        "rollout_fragment_length": 50,
        "grad_clip": 40.0,
        "clip_param": 0.4,
        "lambda": 1.0,
        "max_lag": None,
    },
    "DQN": {
        **_COMMON,
        "rollout_fragment_length": 4,
        "train_batch_size": 32,
        "training_intensity": None,
        "grad_clip": 40.0,
        "hiddens": [256],
        "replay_buffer_config.capacity": 50_000,
        "target_network_update_freq": 500,
    },
}
"""Defaults of RLlib that differ from those of Ludus."""


@dataclass
class ConvertedExperiment:
    """One experiment with current keys, and comments about them."""

    name: str
    data: dict[str, Any]
    notes: dict[str, str] = field(default_factory=dict)
    """Path → comment behind the key."""
    dropped: dict[str, list[str]] = field(default_factory=dict)
    """Section → comments about dropped keys."""
    lost: list[str] = field(default_factory=list)
    """Dropped keys that change the experiment."""


@dataclass(frozen=True)
class ConvertedFile:
    """The text of the new file, and the dropped keys that change the experiments."""

    text: str
    lost: list[str]


def convert(experiments: Mapping[str, Mapping[str, Any]], source: str, *, with_defaults: bool = False) -> ConvertedFile:
    """Convert a file. Raises ConfigError for invalid or unknown keys."""
    out, wrong = [], []
    for name, data in experiments.items():
        try:
            out.append(convert_experiment(name, data, with_defaults=with_defaults))
        except UsageError as error:
            wrong += [f"{name}: {line}" for line in str(error).splitlines()]
    if wrong:
        raise ConfigError("\n".join(wrong), "Correct these first: their meaning is unknown.")
    text = "\n".join([*_header(source, with_defaults), *(line for each in out for line in _render(each))]) + "\n"
    for name, data in parse_yaml(text, "the converted file").items():  # validate the output
        left = validate.validate_experiment({"name": name, **data}, env_too=False)
        if left:
            raise ConfigErrors(left)
    several = len(out) > 1
    return ConvertedFile(text, [f"{each.name}: " * several + line for each in out for line in each.lost])


def _header(source: str, with_defaults: bool) -> Iterator[str]:
    yield f"# Converted from {source}, whose comments are not carried over."
    if with_defaults:
        yield "# Missing keys are written out with RLlib's defaults."
    else:
        yield "# What it did not say has the defaults of Ludus, not RLlib's: `ludus config convert --with-defaults` writes RLlib's."


def convert_experiment(name: str, data: Mapping[str, Any], *, with_defaults: bool = False) -> ConvertedExperiment:
    top = translate_experiment({"name": name, **data})
    run = top.data.get("run", "PPO")
    schema = validate.algorithm_of(run).Config if isinstance(run, str) else AlgorithmConfig
    inner = top.data.get("config", {})
    if not isinstance(inner, Mapping):
        raise ConfigError(f"config is {inner!r}: it is a section.")
    below = translate_config(inner, schema)
    if top.conflicts or below.conflicts:
        raise ConfigErrors([*top.conflicts, *below.conflicts])
    new = {key: value for key, value in top.data.items() if key not in ("name", "config")} | {"config": below.data}
    out = ConvertedExperiment(name, new)
    out.notes = {path: f"was {old.rpartition('.')[2]}" for path, old in top.spelled_as.items()}
    out.notes |= {f"config.{path}": f"was {old.rpartition('.')[2]}" for path, old in below.spelled_as.items()}
    _name_environment(out)
    for each in (*top.redundant, *below.redundant):
        _drop(out, each, f"it {each.why}")
    for each in (*top.ignored, *below.ignored):
        _drop(out, each, each.why)
    for each in (*top.rejected, *below.rejected):
        _drop(out, each, f"it {each.why}")
        out.lost.append(str(each))
    if "max_worker_restarts" in below.data and "max_worker_restarts" not in inner:
        out.notes["config.max_worker_restarts"] = "a worker that is lost ends the run"
    if with_defaults and run in RLLIB_DEFAULTS:
        _add_defaults(out, RLLIB_DEFAULTS[run])
    _round_batch(out, schema)
    left = validate.validate_experiment({"name": name, **out.data}, env_too=False)
    if left:
        raise ConfigErrors(left)
    _note_iterations(out, run, schema)
    return out


def _note_iterations(out: ConvertedExperiment, run: str, schema: type[AlgorithmConfig]) -> None:
    if has_search(out.data):
        return
    sentence = iteration_notice_of_file(run, schema, out.data, out.data["config"])
    if sentence is not None:
        out.dropped.setdefault("", []).append(sentence)


def _drop(out: ConvertedExperiment, key: KeyNotice, why: str) -> None:
    """Replace a key by a comment."""
    section, _, name = _split(key.path)
    reason = why.rstrip(".").removesuffix(" Leave it out").rstrip(".")
    out.dropped.setdefault(section, []).append(f"{name}: {_inline(key.value)} was removed: {reason}.")


def _name_environment(out: ConvertedExperiment) -> None:
    env = out.data.get("env")
    if isinstance(env, str) and current_name(env).name != env:
        out.data["env"] = current_name(env).name
        out.notes["env"] = f"was {env}"


def _split(path: str) -> tuple[str, str, str]:
    """A section and its key; keys of stop may contain dots and slashes."""
    return ("stop", ".", path.removeprefix("stop.")) if path.startswith("stop.") else path.rpartition(".")


def _add_defaults(out: ConvertedExperiment, defaults: Mapping[str, Any]) -> None:
    config = out.data["config"]
    recurrent = bool((config.get("model") or {}).get("use_lstm"))
    for path, value in defaults.items():
        section, _, key = path.rpartition(".")
        if (key in ("cell_size", "max_seq_len")) > recurrent or (key == "vf_share_layers" and recurrent):
            continue
        if key == "evaluation_duration" and "evaluation_interval" in config:
            continue
        place = config
        if section:
            place = config[section] = dict(config.get(section) or {})
        if key not in place:
            place[key] = value
            out.notes[f"config.{path}"] = "RLlib's default"


def _round_batch(out: ConvertedExperiment, schema: type[AlgorithmConfig]) -> None:
    """RLlib collected whole fragments until there were at least `train_batch_size` steps."""
    config = out.data["config"]
    if has_search(config) or schema.replays:
        return
    batch, steps = config.get("train_batch_size"), config.get("rollout_fragment_length")
    workers, envs = config.get("num_workers", 0), config.get("num_envs_per_worker", 1)
    numbers = [batch, workers, envs, *([] if steps is None else [steps])]
    if (
        not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
        or config.get("num_workers") == "auto"
    ):
        return
    try:
        made = parse_algorithm_config(schema, config)
    except ConfigError:
        return
    if made.train_batch_size != batch:
        config["train_batch_size"] = made.train_batch_size
        config.setdefault("num_envs_per_worker", made.num_envs_per_worker)
        out.notes["config.train_batch_size"] = f"was {batch}, rounded up to whole fragments, as RLlib does"


# -- text ---------------------------------------------------------------------------------------------------------------


def _render(each: ConvertedExperiment) -> Iterator[str]:
    yield ""
    yield f"{_inline(each.name)}:"
    yield from _section(each, each.data, "", "  ")


def _section(each: ConvertedExperiment, data: Mapping[str, Any], path: str, indent: str) -> Iterator[str]:
    for key, value in data.items():
        here = f"{path}.{key}" if path else key
        note = f"  # {each.notes[here]}" if here in each.notes else ""
        if isinstance(value, Mapping) and (value or here in each.dropped) and not is_search(value):
            yield f"{indent}{_inline(key)}:{note}"
            yield from _section(each, value, here, indent + "  ")
        else:
            yield f"{indent}{_inline(key)}: {_inline(value)}{note}"
    for comment in each.dropped.get(path, []):
        yield f"{indent}# {comment}"
    for section, comments in each.dropped.items():  # sections without remaining keys
        parent, _, name = section.rpartition(".")
        if section and parent == path and name not in data:
            yield from (f"{indent}# {name}.{comment}" for comment in comments)


def _inline(value: Any) -> str:
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    text = text.removesuffix("\n").removesuffix("\n...")
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text  # a comment is one line
