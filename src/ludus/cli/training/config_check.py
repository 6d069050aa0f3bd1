"""Check the experiments of a file as `ludus train` would before it starts: all errors and notices, each with file and line."""

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


class Places:
    """Finds the line of a key in the file that an experiment was read from."""

    def __init__(self, file: Path) -> None:
        self._file, self._experiments = file, load_experiments(file)
        self._lines = experiment_line_numbers(file)

    def line(self, name: str, path: str, data: Mapping[str, Any]) -> int:
        """Of the key, or of the section in which it is missing; 0 if its value in `data` is not the file's."""
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
    """Keys of `stop` have dots and slashes of their own."""
    section, _, key = path.partition(".")
    return [section, key] if section == "stop" and key else path.split(".") if path else []


def _value(data: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


@dataclass(frozen=True)
class Checked:
    """What is wrong with experiments, and what is ignored in them. Every sentence begins with its place."""

    errors: list[str]
    notices: list[str]


def check_file(file: Path, config: Mapping[str, Any] | None = None) -> Checked:
    """Of all experiments of a file. `config`: keys of `config:` that come from the command line."""
    experiments = {
        name: {**data, "config": _overridden(data.get("config"), config)} if config else data
        for name, data in load_experiments(file).items()
    }
    validate.trust_names(experiments)
    return check_experiments(experiments, file)


def _overridden(inner: Any, config: Mapping[str, Any]) -> Any:
    if inner is not None and not isinstance(inner, dict):
        return inner
    out = dict(inner or {})
    remove_spellings(out, "config", config)
    return out | dict(config)


def check_experiments(experiments: Experiments, file: Path | None = None) -> Checked:
    """Of experiments that were read from `file`, perhaps with options of the command line applied."""
    places = None if file is None else Places(file)
    out = Checked([], [])
    for name, data in experiments.items():
        for found, target in ((errors_of(name, data), out.errors), (validate.find_notices({"name": name, **data}), out.notices)):
            target += _located(found, name, data, places, len(experiments) > 1)
    return out


def _located(
    found: Sequence[ConfigProblem], name: str, data: Mapping[str, Any], places: Places | None, several: bool
) -> list[str]:
    """The sentences in the order of their lines, each with its place."""
    prefix = f"{name}: " * several
    if places is None:
        return [prefix + each for each in found]
    lines = sorted(((places.line(name, each.path, data), each) for each in found), key=lambda pair: pair[0])
    return [places.prefix(line) + prefix + each for line, each in lines]


def require_no_complaints(experiments: Experiments, file: Path | None = None) -> None:
    """Raises ConfigError with all complaints of all experiments; what depends on this machine is left to their start."""
    places = None if file is None else Places(file)
    wrong = [
        line
        for name, data in experiments.items()
        for line in _located(validate.validate_experiment({"name": name, **data}), name, data, places, len(experiments) > 1)
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


@contextlib.contextmanager
def located_errors(name: str, data: Mapping[str, Any], file: Path | None) -> Iterator[None]:
    """Config errors that are raised inside, with file and line where they begin with a key of the file."""
    try:
        yield
    except ConfigError as error:
        path = _path_in(error.message)
        if file is None or not path:
            raise
        places = Places(file)
        raise ConfigError(places.prefix(places.line(name, path, data)) + error.message, error.hint) from error


def errors_of(name: str, data: Mapping[str, Any]) -> list[ConfigProblem]:
    """Everything that would keep an experiment from starting on this machine."""
    whole = {"name": name, **data}
    found = validate.validate_experiment(whole)
    if found:
        return found
    try:
        if search_space.is_sweep(whole):
            sweep.plan_sweep(name, data)
        else:
            resolve(_with_a_number_of_workers(whole))
    except ConfigErrors as error:
        return error.problems
    except (UsageError, EnvironmentFault) as error:
        return [ConfigProblem(line, _path_in(line)) for line in str(error).splitlines()]
    return []


def _path_in(line: str) -> str:
    """The key with which a sentence begins, as those of `resolve` do."""
    word = line.partition(" ")[0].strip("'")
    return word if word.startswith("config.") else ""


def _with_a_number_of_workers(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """`auto` is chosen by measuring the environment, which a check does not do."""
    top = translate_experiment(data).data
    inner = translate_config(top.get("config") or {}).data
    if inner.get("num_workers") != "auto":
        return data
    return {**top, "config": {key: value for key, value in inner.items() if key not in ("num_workers", "train_batch_size")}}
