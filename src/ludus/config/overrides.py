"""Values from the command line (`--set path=VALUE`, `--stop KEY=NUMBER`) applied to an experiment before validation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ludus.config.aliases import coach_schedule, rllib_keys, rllib_values
from ludus.config.aliases.sb3_cleanrl import TOTALS
from ludus.config.schema import ExperimentConfig
from ludus.errors import ConfigError
from ludus.io.yaml_documents import parse_yaml


def apply_override(data: dict[str, Any], assignment: str) -> None:
    """Apply `path.to.key=VALUE` in place. A path that does not begin with a key of the experiment is relative to `config`."""
    path, equals, text = assignment.partition("=")
    if not equals or not all(path.strip().split(".")):
        raise ConfigError(f"--set {assignment!r} is not of the form path.to.key=VALUE.")
    set_value(data, path.strip(), parse_yaml(text, f"--set {path}"), f"--set {assignment!r}")


def set_value(data: dict[str, Any], path: str, value: Any, shown: str) -> None:
    """Set a value by its dotted path, in place, replacing other spellings of the key. `shown`: its source, for errors."""
    keys = path.split(".")
    if rllib_keys.canonical_name(rllib_keys.EXPERIMENT, keys[0]) not in {*ExperimentConfig.model_fields, *_SCHEDULES}:
        keys.insert(0, "config")
    for key in keys[:-1]:
        if data.get(key) is None:  # absent, or a section left empty in the YAML
            data[key] = {}
        data = data[key]
        if not isinstance(data, dict):
            raise ConfigError(f"{shown}: {key!r} is not a section.")
    translated: Mapping[str, Any] | None = None
    if keys[:-1] == (["config"] if keys[-1] in coach_schedule.COACH_SCHEDULE else []):
        with contextlib.suppress(ValueError):  # validation reports it
            translated = translate_schedule(keys[-1], value)
    for key, each in (translated or {keys[-1]: value}).items():
        remove_spellings(data, ".".join(keys[:-1]), [key])
        data[key] = each


def translate_schedule(key: str, value: Any) -> Mapping[str, Any] | None:
    """Translate a key of Coach's schedules or SB3's total_timesteps to keys of `config`, or to a whole `stop` section.

    Returns None for other keys. Raises ValueError for an invalid value.
    """
    if key == "improve_steps":
        ((path, number),) = coach_schedule.translate_improve_steps(value, {}).items()
        return {"stop": {path.removeprefix("stop."): number}}
    if key in TOTALS:
        return {"stop": {"timesteps": value}}
    return coach_schedule.COACH_SCHEDULE[key](value, {}) if key in coach_schedule.COACH_SCHEDULE else None


_SCHEDULES = ("improve_steps", *TOTALS)
"""Top-level keys of other libraries."""


def remove_spellings(data: dict[str, Any], section: str, keys: Iterable[str]) -> None:
    """Remove all spellings of these keys from a section, in place."""
    names = {rllib_keys.canonical_name(section, key) for key in keys}
    if section == rllib_keys.CONFIG and "num_gpus" in names:
        names |= set(rllib_values.PER_LEARNER_GPUS)
    for other in [key for key in data if rllib_keys.canonical_name(section, key) in names]:
        del data[other]


def parse_stop_values(pairs: list[str]) -> dict[str, Any]:
    """Parse the values of --stop: `KEY=NUMBER`, or one mapping `{"key": number, …}`."""
    out: dict[str, Any] = {}
    for pair in pairs:
        if pair.lstrip().startswith("{"):
            parsed = parse_yaml(pair, "--stop")
            items = list(parsed.items()) if isinstance(parsed, dict) else []
        else:
            key, equals, text = pair.partition("=")
            items = [(key.strip(), parse_yaml(text, f"--stop {key}"))] if equals else []
        for key, value in items or [("", None)]:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
                raise ConfigError(f"--stop {pair!r} is not of the form KEY=NUMBER.")
            out[key] = value
    return out
