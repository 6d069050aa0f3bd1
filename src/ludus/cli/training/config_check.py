"""Check the experiments of a file as `ludus train` does before it starts: all errors and notices, each with file and line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.config import search_space
from ludus.config.experiment_file import experiment_line_numbers, load_experiments
from ludus.config.overrides import remove_spellings
from ludus.config.problem import ConfigErrors, ConfigProblem
from ludus.config.translation import translate_config, translate_experiment
from ludus.errors import ConfigError, EnvironmentFault, UsageError
from ludus.experiments.resolve import resolve
from ludus.experiments.validation import validate
from ludus.tuning import sweep

Experiments = Mapping[str, Mapping[str, Any]]


class KeyLocations:
    """Finds the line of a key in the YAML file of an experiment."""

    def __init__(self, file: Path) -> None:
        self._file, self._experiments = file, load_experiments(file)
        self._lines = experiment_line_numbers(file)

    def line(self, name: str, path: str, data: Mapping[str, Any]) -> int:
        """The line of the key, or of the section in which it is missing; 0 if its value in `data` differs from the file."""
        if name not in self._experiments:
            return 0
        whole: tuple[str, ...] = (name, *_keys(path))
        here = whole[:1]
        while len(here) < len(whole) and whole[: len(here) + 1] in self._lines:
            here = whole[: len(here) + 1]
        if len(here) > 1 and _value(self._experiments[name], here[1:]) != _value(data, here[1:]):
            return 0
        return self._lines[here]

    def prefix(self, line: int) -> str:
        return f"{self._file}:{line}: " if line else ""


def _keys(path: str) -> list[str]:
    """Split a path into keys. Keys of `stop` may contain dots and slashes themselves."""
    section, _, key = path.partition(".")
    return [section, key] if section == "stop" and key else path.split(".") if path else []


def _value(data: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


@dataclass(frozen=True)
class CheckResult:
    """Errors of experiments, and notices about ignored keys; each message starts with file and line."""

    errors: list[str]
    notices: list[str]


def check_file(file: Path, config: Mapping[str, Any] | None = None) -> CheckResult:
    """Check all experiments of a file. `config`: keys of `config:` from the command line."""
    experiments = {
        name: {**data, "config": _override_config(data.get("config"), config)} if config else data
        for name, data in load_experiments(file).items()
    }
    validate.trust_names(experiments)
    return check_experiments(experiments, file)


def _override_config(inner: Any, config: Mapping[str, Any]) -> Any:
    if inner is not None and not isinstance(inner, dict):
        return inner
    out = dict(inner or {})
    remove_spellings(out, "config", config)
    return out | dict(config)


def check_experiments(experiments: Experiments, file: Path | None = None) -> CheckResult:
    """Check experiments that were read from `file`; options of the command line may have been applied to them."""
    locations = None if file is None else KeyLocations(file)
    out = CheckResult([], [])
    for name, data in experiments.items():
        for found, target in ((errors_of(name, data), out.errors), (validate.find_notices({"name": name, **data}), out.notices)):
            target += _add_locations(found, name, data, locations, len(experiments) > 1)
    return out


def _add_locations(
    found: Sequence[ConfigProblem], name: str, data: Mapping[str, Any], locations: KeyLocations | None, several: bool
) -> list[str]:
    """Prefix messages with file and line, ordered by line."""
    prefix = f"{name}: " * several
    if locations is None:
        return [prefix + each for each in found]
    lines = sorted(((locations.line(name, each.path, data), each) for each in found), key=lambda pair: pair[0])
    return [locations.prefix(line) + prefix + each for line, each in lines]


def require_no_complaints(experiments: Experiments, file: Path | None = None) -> None:
    """Raise ConfigError with all errors of all experiments, except those that depend on this machine."""
    locations = None if file is None else KeyLocations(file)
    wrong = [
        line
        for name, data in experiments.items()
        for line in _add_locations(
            validate.validate_experiment({"name": name, **data}), name, data, locations, len(experiments) > 1
        )
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


@contextlib.contextmanager
def located_errors(name: str, data: Mapping[str, Any], file: Path | None) -> Iterator[None]:
    """Add file and line to a ConfigError raised in the block, if its message starts with a key of the file."""
    try:
        yield
    except ConfigError as error:
        path = _leading_key(error.message)
        if file is None or not path:
            raise
        locations = KeyLocations(file)
        raise ConfigError(locations.prefix(locations.line(name, path, data)) + error.message, error.hint) from error


def errors_of(name: str, data: Mapping[str, Any]) -> list[ConfigProblem]:
    """All errors that would keep an experiment from starting on this machine."""
    whole = {"name": name, **data}
    found = validate.validate_experiment(whole)
    if found:
        return found
    try:
        if search_space.is_sweep(whole):
            sweep.plan_sweep(name, data)
        else:
            resolve(_without_auto_workers(whole))
    except ConfigErrors as error:
        return error.problems
    except (UsageError, EnvironmentFault) as error:
        return [ConfigProblem(line, _leading_key(line)) for line in str(error).splitlines()]
    return []


def _leading_key(line: str) -> str:
    """The config key at the start of a message, as in the errors of `resolve`."""
    word = line.partition(" ")[0].strip("'")
    return word if word.startswith("config.") else ""


def _without_auto_workers(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Remove `num_workers: auto`, which would measure the environment."""
    top = translate_experiment(data).data
    inner = translate_config(top.get("config") or {}).data
    if inner.get("num_workers") != "auto":
        return data
    return {**top, "config": {key: value for key, value in inner.items() if key not in ("num_workers", "train_batch_size")}}
