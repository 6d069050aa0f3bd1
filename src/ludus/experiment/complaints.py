"""All that is wrong with an experiment, not only the first of it; nothing is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ludus import config as configs
from ludus import spellings
from ludus.errors import ConfigError, EnvironmentFault, UnknownName, UsageError
from ludus.experiment import multiagent, search
from ludus.game.environment import check_exists
from ludus.training.algorithm import ALGORITHMS, Algorithm, algorithm_class

T = TypeVar("T")


def owners(key: str) -> list[str]:
    """Names of the algorithms that come with the package and have this key of `config:`."""
    return [name for name, schema in schemas().items() if key in schema.model_fields or f"{key}_" in schema.model_fields]


def schemas() -> dict[str, type[configs.AlgorithmConfig]]:
    return {name: algorithm_class(name).Config for name in ALGORITHMS}


def algorithm_of(run: str) -> type[Algorithm]:
    """The class of an algorithm. Raises UnknownName, which says what stands for one that RLlib has."""
    try:
        return algorithm_class(run)
    except UnknownName as error:
        instead = spellings.elsewhere(run)
        if not instead:
            raise
        raise UnknownName(instead, f"Known: {', '.join(ALGORITHMS)}.") from error


def of_experiment(data: Mapping[str, Any], *, env_too: bool = True) -> list[str]:
    """Everything that can be said about one experiment. With search values in it: about every one of them.

    `env_too`: its environment must exist here.
    """
    out: dict[str, None] = {}
    try:
        search.find(data)
    except ConfigError as error:
        out[str(error)] = None
    for variant in _variants(data):
        out |= dict.fromkeys(_of_one(variant, env_too))
    return list(out)


def of_file(path: Path) -> list[str]:
    """As `of_experiment`, for all experiments of a file. Raises ConfigError if it cannot be read at all."""
    experiments = configs.load_experiments(path)
    several = len(experiments) > 1
    return [
        f"{name}: {line}" if several else line
        for name, data in experiments.items()
        for line in of_experiment({"name": name, **data})
    ]


def _of_one(data: Mapping[str, Any], env_too: bool) -> list[str]:
    out: list[str] = []

    def attempt(check: Callable[[], T]) -> T | None:
        try:
            return check()
        except (UsageError, EnvironmentFault) as error:
            out.extend(str(error).splitlines())
            return None

    attempt(lambda: configs.experiment(data))
    found = configs.read_experiment(data).data
    env, run, inner = found.get("env"), found.get("run", "PPO"), found.get("config", {})
    called = env == configs.EXTERNAL
    several = False
    if isinstance(env, str) and isinstance(inner, Mapping) and not called:
        several = bool(attempt(lambda: multiagent.is_meant(env, inner)))
    if isinstance(env, str) and not called and not several and env_too:
        attempt(lambda: check_exists(env))
    algorithm = attempt(lambda: algorithm_of(run)) if isinstance(run, str) else None
    if isinstance(inner, Mapping):
        schema = algorithm.Config if algorithm is not None else None
        if schema is None:  # what every algorithm has can be checked all the same
            out += configs.read_config(inner).complaints()
        else:
            attempt(lambda: configs.algorithm_config(schema, inner, collated=called or several, run=run, owners=owners))
        if called and isinstance(inner.get("env_config"), Mapping):
            attempt(lambda: configs.external_config(inner["env_config"]))
    return out


def _variants(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The experiment with the first value of every search, and once with every other value of each."""
    choices = dict(_searched(data, ()))
    first = {path: values[0] for path, values in choices.items()}
    yield _with(data, first)
    for path, values in choices.items():
        for value in values[1:]:
            yield _with(data, first | {path: value})


def _searched(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Path → values, at least one, of which a sweep would try one."""
    if configs.is_search(value):
        ((kind, given),) = value.items()
        listed = list(given) if isinstance(given, list) and given else [given]
        limits = listed[:1] if kind == "randn" else listed[:2]  # of a range the ends; the third number is its step
        yield path, listed if kind in ("grid_search", "choice") else limits
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if path != () or key != "tune":  # which searches on purpose
                yield from _searched(inner, (*path, str(key)))


def _with(data: Mapping[str, Any], chosen: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        below = {path[1:]: given for path, given in chosen.items() if path[0] == key}
        if () in below:
            out[key] = below[()]
        else:
            out[key] = _with(value, below) if below else value
    return out
