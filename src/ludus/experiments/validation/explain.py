"""The catalogue of all keys of an experiment, for `ludus config explain` and the tables of docs/config.md."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ludus.algorithms.base import config_schemas
from ludus.config.aliases import rllib_keys
from ludus.config.aliases.rllib_algorithms import suggest_algorithm
from ludus.config.aliases.sb3_cleanrl import library_of
from ludus.config.aliases.unsupported_keys import unsupported_keys
from ludus.config.schema import ExternalConfig
from ludus.config.translation import nested_schema, section_schemas
from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError

EXTERNAL_SECTION = "config.env_config"


@dataclass(frozen=True)
class ConfigKey:
    """One key. `defaults`: algorithm → default, one entry '' where all that have it agree."""

    path: str
    description: str
    kind: str
    defaults: Mapping[str, str]
    algorithms: tuple[str, ...]
    """Algorithms that have the key; () if all have it."""
    others: tuple[str, ...]
    """Other accepted names, most of them of RLlib."""

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def default(self) -> str:
        """The default as text: one value, or the values by algorithm."""
        if len(self.defaults) == 1:
            return next(iter(self.defaults.values()))
        by_value: dict[str, list[str]] = {}
        for algorithm, value in self.defaults.items():
            by_value.setdefault(value, []).append(algorithm)
        return ", ".join(f"{value} ({', '.join(names)})" for value, names in by_value.items())


@functools.cache
def catalogue() -> Mapping[str, ConfigKey]:
    """Path → key, section by section."""
    found: dict[str, ConfigKey] = {}
    algorithms = config_schemas()
    for section, schema in section_schemas().items():
        if section == rllib_keys.CONFIG:
            for name in dict.fromkeys(name for each in algorithms.values() for name in each.model_fields):
                having = {run: each.model_fields[name] for run, each in algorithms.items() if name in each.model_fields}
                key = _make_key(section, name, having, len(having) == len(algorithms))
                found[key.path] = key
        else:
            found |= {key.path: key for key in _section_keys(section, schema)}
    found |= {key.path: key for key in _section_keys(EXTERNAL_SECTION, ExternalConfig)}
    return found


def _section_keys(section: str, schema: type[BaseModel]) -> Iterator[ConfigKey]:
    for name, field in schema.model_fields.items():
        yield _make_key(section, name, {"": field}, True)
        below = nested_schema(field.annotation)
        inside = f"{section}.{name}" if section else name
        if below is not None and inside not in section_schemas():
            yield from _section_keys(inside, below)


def _make_key(section: str, name: str, having: Mapping[str, FieldInfo], everybody: bool) -> ConfigKey:
    field = next(iter(having.values()))
    key_name = "lambda" if name == "lambda_" else name
    values = {run: _default(each) for run, each in having.items()}
    agreed = {"": next(iter(values.values()))} if len(set(values.values())) == 1 else values
    aliases = {field.alias} if field.alias and field.alias != key_name else set()
    others = sorted({*rllib_keys.other_spellings(section, key_name), *aliases, *_moved_names(section, key_name)} - {"lambda_"})
    path = f"{section}.{key_name}" if section else key_name
    description = field.description or ""
    if len({each.description for each in having.values()}) > 1:
        said: dict[str, list[str]] = {}
        for run, each in having.items():
            said.setdefault(each.description or "", []).append(run)
        description = " ".join(f"{', '.join(runs)}: {text}" for text, runs in said.items())
    return ConfigKey(path, description, _kind(field.annotation), agreed, () if everybody else tuple(having), tuple(others))


_MOVED = {
    "config.model.vf_share_layers": ("vf_share_layers next to model",),
    "config.max_worker_restarts": ("ignore_worker_failures: false is 0", "restart_failed_env_runners: false is 0"),
    "config.train_batch_size": ("train_batch_size_per_learner × num_learners",),
    "config.num_gpus": ("num_gpus_per_learner × num_learners",),
    "config.epsilon": ("exploration_config",),
    "config.replay_buffer_config": ("buffer_size", "prioritized_replay", "prioritized_replay_alpha", "prioritized_replay_beta"),
    "config.preprocess.max_episode_steps": ("horizon",),
    "config.preprocess.clip_reward": ("clip_rewards",),
    "config.multiagent.policies": ("policies",),
    "checkpoint_freq": ("checkpoint_config.checkpoint_frequency",),
    "keep_checkpoints_num": ("checkpoint_config.num_to_keep",),
    "stop.time_s": ("time_budget_s",),
    "stop.timesteps": ("improve_steps",),
    "config.num_steps_sampled_before_learning_starts": ("heatup_steps",),
    "config.heatup_episodes": ("heatup_steps: EnvironmentEpisodes(…)",),
    "config.evaluation_interval": ("steps_between_evaluation_periods",),
    "config.evaluation_duration": ("evaluation_steps",),
}


def _moved_names(section: str, name: str) -> tuple[str, ...]:
    return _MOVED.get(f"{section}.{name}" if section else name, ())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "–"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return "–"
    return format_value(value)


def format_value(value: Any) -> str:
    """Format a value as YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = f"{value:.12g}"
        return text if value != int(value) or "e" in text else f"{int(value)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_value(inner)}" for key, inner in value.items()) + "}"
    return str(value) if value != "" else "''"


def _kind(annotation: Any) -> str:
    """Describe a type."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0])
    if origin is Literal:
        return ", ".join(format_value(part) for part in parts)
    if origin is list:
        return f"list of {_kind(parts[0])}" if parts else "list"
    if origin is tuple:
        return f"[{', '.join(_kind(part) for part in parts if part is not Ellipsis)}]"
    if origin is dict or annotation is dict:
        return "section"
    if origin is not None:  # a union
        named = list(dict.fromkeys(_kind(part) for part in parts if part is not type(None)))
        return " or ".join(named) + (" or null" if type(None) in parts else "")
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {int: "whole number", float: "number", bool: "true or false", str: "word"}
    return names.get(annotation, "any value")


# -- explaining ---------------------------------------------------------------------------------------------------------


def explain(asked: str) -> list[str]:
    """Lines about a key, by any of its names, with its path or without. Raises ConfigError with the nearest names."""
    found = _find_keys(asked)
    if found:
        return [line for key in found for line in (*_describe(key), "")][:-1]
    reasons = _explain_foreign(asked)
    if reasons:
        return reasons
    instead = suggest_algorithm(asked)
    if instead:
        return [instead]
    raise ConfigError(f"There is no key {asked!r}.", did_you_mean(asked.rpartition(".")[2], _all_names()))


def _find_keys(asked: str) -> list[ConfigKey]:
    """Keys with this path or path suffix, else with this alias."""
    keys = catalogue()
    path, _, name = asked.rpartition(".")
    exact = [key for key in keys.values() if key.path in (asked, f"config.{asked}")]
    if exact:
        return exact
    ends = [
        key for key in keys.values() if key.name == name and (key.section == path or key.section.endswith(f".{path}") or not path)
    ]
    if ends:
        return ends
    return [
        key
        for key in keys.values()
        if name in {other.partition(" ")[0].rstrip(":") for other in key.others} | set(key.others)
        and (not path or key.section == path or key.section == f"config.{path}")
    ]


def _describe(key: ConfigKey) -> Iterator[str]:
    yield key.path
    yield f"  {key.description}"
    yield f"  kind      {key.kind}"
    if len(key.defaults) == 1:
        yield f"  default   {key.default}"
    else:
        yield "  default   " + "\n            ".join(f"{value:<10} {run}" for run, value in key.defaults.items())
    if key.algorithms:
        yield f"  only      {', '.join(key.algorithms)}"
    if key.others:
        yield f"  also      {', '.join(key.others)}"


_TRANSLATED_KEYS = {
    "framework": "torch, tf and tf2 are accepted; networks here are PyTorch's. tf is refused beside a custom_model.",
    "use_pytorch": "true and false are accepted; networks here are PyTorch's. false is refused beside a custom_model.",
    "ignore_worker_failures": "true: a worker that is lost is replaced, which is so anyway; false is max_worker_restarts: 0.",
    "exploration_config": "EpsilonGreedy becomes the schedule epsilon (DQN); StochasticSampling is so anyway.",
    "replay_buffer_config": "learning_starts in it becomes num_steps_sampled_before_learning_starts.",
}


def _explain_foreign(asked: str) -> list[str]:
    path, _, name = asked.rpartition(".")
    if name in _TRANSLATED_KEYS and path in ("", "config"):
        return [f"config.{name}, a key of RLlib, is read: {_TRANSLATED_KEYS[name]}"]
    out = []
    for section, table in unsupported_keys().items():
        reason = table.get(asked if section == rllib_keys.STOP else name)
        if reason is not None and (not path or path in (section, section.removeprefix("config."))):
            where = f"{section}.{name}" if section else name
            out.append(f"{where}, a key of {library_of(name)}, {'is accepted and ignored: ' * reason.ignored}{reason.why}")
            if reason.same and not reason.ignored:
                out.append(
                    f"  It may stay as {' or '.join(format_value(value) for value in reason.same)}, which is what happens here."
                )
    for section, readings in rllib_keys.TRANSLATED.items():
        if name in readings and not out and (not path or path in (section, section.removeprefix("config."))):
            out.append(
                f"{section}.{name}".lstrip(".")
                + f", a key of {library_of(name)}, is read; `ludus config convert FILE` shows what it becomes."
            )
    return out


def _all_names() -> set[str]:
    names = {key.name for key in catalogue().values()} | {other for key in catalogue().values() for other in key.others}
    return names | {name for table in unsupported_keys().values() for name in table}


def list_keys() -> Iterator[str]:
    """All keys, a line each, by section."""
    section = None
    width = max(len(key.path) for key in catalogue().values())
    for key in sorted(catalogue().values(), key=lambda key: _SECTION_ORDER.index(key.section.split(".")[0])):
        if key.section != section:
            section = key.section
            yield f"\n{section or 'experiment'}:"
        only = f" [{', '.join(key.algorithms)}]" if key.algorithms else ""
        yield f"  {key.path:<{width}}  {key.description}{only}"


_SECTION_ORDER = ["", "stop", "config", "tune", "track", "target"]


# -- docs/config.md -----------------------------------------------------------------------------------------------------

_TABLE = re.compile(r"(<!-- keys: (?P<name>[\w. -]+) -->\n)(?P<table>.*?)(<!-- end of keys -->)", re.DOTALL)


def fill_tables(page: str) -> str:
    """The text of docs/config.md with its tables regenerated from the schemas."""
    return _TABLE.sub(lambda found: f"{found[1]}{table(found['name'])}{found[4]}", page)


def table(name: str) -> str:
    """The keys of a section as Markdown. `config`: keys that all algorithms have; `algorithms`: the others."""
    section = {"experiment": "", "algorithms": "config"}.get(name, name)
    chosen = [key for key in catalogue().values() if key.section == section]
    if section == "config":
        chosen = [key for key in chosen if bool(key.algorithms) == (name == "algorithms")]
    if not chosen:
        raise ConfigError(f"There is no section {name!r} to make a table of.")
    lines = ["| key | default | meaning |", "|---|---|---|"]
    lines += [f"| `{key.name}` | {_cell(key.default)} | {_cell(_meaning(key))} |" for key in chosen]
    return "\n".join(lines) + "\n"


def _meaning(key: ConfigKey) -> str:
    only = f"*{', '.join(key.algorithms)}.* " if key.algorithms else ""
    also = [other for other in key.others if "/" not in other]
    return f"{only}{key.description}" + (f" Also {', '.join(f'`{other}`' for other in also)}." if also else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
