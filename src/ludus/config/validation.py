"""Validation of an experiment against the schema. An error reports every problem at once, each with the nearest known key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from ludus.config.aliases import rllib_keys
from ludus.config.batch_shape import batch_shape
from ludus.config.problem import ConfigErrors, ConfigProblem
from ludus.config.schema import AlgorithmConfig, ExperimentConfig, ExternalConfig
from ludus.config.search_values import is_search
from ludus.config.section import ConfigSection, SectionT
from ludus.config.section_translation import TranslatedSection
from ludus.config.translation import (
    SECTIONS,
    all_spellings,
    key_names,
    nested_schema,
    translate_config,
    translate_experiment,
)
from ludus.core.plugins import did_you_mean

COLLATED_STEPS = 64
"""Default steps of a segment when batches are collated from segments of any number."""


Owners = Callable[[str], Sequence[str]]
"""Key → names of the algorithms that have it, for error messages."""


def parse_experiment(data: Mapping[str, Any]) -> ExperimentConfig:
    """Validate an experiment except its `config` section. Raises ConfigError with all problems."""
    return check_experiment(translate_experiment(data))


def check_experiment(translated: TranslatedSection) -> ExperimentConfig:
    """Validate an experiment that is already translated, except its `config` section. Raises ConfigError with all problems."""
    return _validate(ExperimentConfig, translated, "")


def parse_algorithm_config(
    schema: type[AlgorithmConfig],
    data: Mapping[str, Any],
    *,
    collated: bool = False,
    run: str = "",
    owners: Owners | None = None,
) -> AlgorithmConfig:
    """Validate `config:` against an algorithm's schema and fill in the batch shape. Raises ConfigError with all problems.

    `collated`: a batch consists of any number of segments, as with HTTP games; otherwise of one per environment. `run`: name
    of the algorithm, for messages.
    """
    return check_algorithm_config(schema, translate_config(data, schema), collated=collated, run=run, owners=owners)


def check_algorithm_config(
    schema: type[AlgorithmConfig],
    translated: TranslatedSection,
    *,
    collated: bool = False,
    run: str = "",
    owners: Owners | None = None,
) -> AlgorithmConfig:
    """Validate a `config:` section that is already translated, as `parse_algorithm_config` does."""
    checked = _validate(schema, translated, "config", run, owners)
    if collated:
        return checked.model_copy(update={"rollout_fragment_length": checked.rollout_fragment_length or COLLATED_STEPS})
    envs, steps, batch = batch_shape(checked)
    return checked.model_copy(update={"num_envs_per_worker": envs, "rollout_fragment_length": steps, "train_batch_size": batch})


def parse_external_config(data: Mapping[str, Any]) -> ExternalConfig:
    return parse_section(ExternalConfig, data, "config.env_config")


def parse_section(schema: type[SectionT], data: Mapping[str, Any], where: str = "") -> SectionT:
    """Validate a section whose keys have no other spellings. `where`: its path in the file. Raises ConfigErrors with all problems."""
    return _validate(schema, TranslatedSection(dict(data)), where)


def dump_config(config: AlgorithmConfig) -> dict[str, Any]:
    """Return the `config:` section as it is saved with a run."""
    dumped = config.model_dump(mode="json")
    return {"lambda" if name == "lambda_" else name: value for name, value in dumped.items()}


def _validate(
    schema: type[SectionT], reading: TranslatedSection, where: str, run: str = "", owners: Owners | None = None
) -> SectionT:
    complaints = reading.problems()
    try:
        checked = schema.model_validate(reading.data)
    except ValidationError as error:
        complaints += _validation_problems(schema, error, where, reading.spelled_as, run, owners)
    complaints += _booleans_as_numbers(schema, reading.data, f"{where}." if where else "")
    if complaints:
        raise ConfigErrors(complaints)
    return checked


def _booleans_as_numbers(schema: type[ConfigSection], data: Mapping[str, Any], prefix: str) -> Iterator[ConfigProblem]:
    """Yield a problem for each true or false in place of a number, which pydantic would accept as 1 or 0."""
    for name, field in schema.model_fields.items():
        key = field.alias if field.alias is not None and field.alias in data else name
        value, below = data.get(key), nested_schema(field.annotation)
        if isinstance(value, bool) and _takes_number(field.annotation) and not _takes_bool(field.annotation):
            yield ConfigProblem(f"{prefix}{key} is {value}: a number is meant.", f"{prefix}{key}")
        elif isinstance(value, Mapping) and below is not None and get_origin(field.annotation) is not dict:
            yield from _booleans_as_numbers(below, value, f"{prefix}{key}.")


def _takes_bool(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(part in (True, False) or _takes_bool(part) for part in get_args(annotation))


def _takes_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(map(_takes_number, get_args(annotation)))


_TYPE_NAME = re.compile(r"^(float|int|bool|str|none|(list|tuple|dict|function|constrained|literal)\b.*)$")
"""Path elements by which pydantic names a branch of a union."""


def _validation_problems(
    schema: type[ConfigSection],
    error: ValidationError,
    where: str,
    written: Mapping[str, str],
    run: str,
    owners: Owners | None,
) -> list[ConfigProblem]:
    lines: dict[str, str] = {}
    for item in error.errors():
        path = [str(p) for p in item["loc"] if not _TYPE_NAME.match(str(p))]
        key = written.get(".".join(path), ".".join(path))  # as written in the file
        shown = f"{where}.{key}" if where and key else where or key
        if item["type"] == "extra_forbidden":
            lines[shown] = _describe_unknown_key(schema, path, shown, run, owners)
        elif item["type"] == "missing":
            lines[shown] = f"{shown!r} is missing."
        elif isinstance(item["input"], Mapping) and is_search(item["input"]):
            lines[shown] = f"{shown} is searched over ({next(iter(item['input']))}), and this is a single run. Use ludus tune -f."
        else:
            reason = "it is a section, {key: value, …}" if item["type"] in ("model_type", "dict_type") else item["msg"]
            lines.setdefault(shown, f"{shown} is {item['input']!r}: {reason.removeprefix('Value error, ')}.")
    return [ConfigProblem(line, shown) for shown, line in lines.items()]


def _describe_unknown_key(schema: type[ConfigSection], path: list[str], shown: str, run: str, owners: Owners | None) -> str:
    """Return the message for an unknown key: which algorithm has it, where it belongs, or the nearest known key."""
    owner, key = _schema_at(schema, path[:-1]), path[-1]
    if key in owner.model_fields:
        other = owner.model_fields[key].alias
        return f"{shown!r} and {other!r} are given, which mean the same. Keep one."
    if issubclass(owner, AlgorithmConfig):
        having = [name for name in owners(key) if name != run] if owners is not None else []
        if having:
            return f"{shown!r} is a key of {_join_names(having)}; this is {run}."
        if key in ExperimentConfig.model_fields:
            return f"{shown!r} is nested too deep: {key} belongs next to config, not into it."
    homes = [section for section, there in SECTIONS.items() if section != shown.rpartition(".")[0] and key in key_names(there)]
    if not homes and owners is not None and owners(key) and not issubclass(owner, AlgorithmConfig):
        homes = [rllib_keys.CONFIG]
    if homes:
        return f"{shown!r} is in the wrong place: {key} belongs into {_join_names(homes)}."
    near = did_you_mean(key, all_spellings(owner))
    if near.startswith("Known"):  # no near match: list the current names only
        near = did_you_mean(key, key_names(owner) - {"lambda_"})
    return f"Unknown key {shown!r}. {near}".strip()


def _join_names(names: Sequence[str]) -> str:
    shown = [name or "the experiment" for name in names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _schema_at(schema: type[ConfigSection], path: list[str]) -> type[ConfigSection]:
    for name in path:
        for field_name, field in schema.model_fields.items():
            if name in (field_name, field.alias):
                schema = nested_schema(field.annotation) or schema
    return schema
