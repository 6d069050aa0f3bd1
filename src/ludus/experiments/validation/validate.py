"""All that is wrong with an experiment, not only the first of it, and what is ignored in it; nothing is started."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ludus.algorithms.base import ALGORITHMS, Algorithm, algorithm_class, config_schemas
from ludus.config import search_space
from ludus.config.aliases import rllib_keys
from ludus.config.problem import ConfigErrors, ConfigProblem
from ludus.config.schema import EXTERNAL, AlgorithmConfig
from ludus.config.search_values import is_search
from ludus.config.translation import translate_config, translate_experiment
from ludus.config.validation import parse_algorithm_config, parse_experiment, parse_external_config
from ludus.core import trust
from ludus.envs.legacy_names import current_name
from ludus.envs.vector_env import check_exists
from ludus.errors import ConfigError, EnvironmentFault, UnknownName, UsageError
from ludus.experiments.assembly import multi_agent_training
from ludus.experiments.validation import key_modes
from ludus.transport.message_stream import EMBEDDED

T = TypeVar("T")

_SHAPE = {"num_workers", "num_envs_per_worker", "rollout_fragment_length", "train_batch_size", "sampling", "batch_mode"}
"""Keys that say how a batch is made up."""


def owners(key: str) -> list[str]:
    """Names of the algorithms that come with the package and have this key of `config:`."""
    return [name for name, schema in config_schemas().items() if key in schema.model_fields or f"{key}_" in schema.model_fields]


def algorithm_of(run: str) -> type[Algorithm]:
    """The class of an algorithm. Raises UnknownName, which says what stands for one that RLlib has."""
    try:
        return algorithm_class(run)
    except UnknownName as error:
        instead = rllib_keys.suggest_algorithm(run)
        if not instead:
            raise
        raise UnknownName(instead, f"Known: {', '.join(ALGORITHMS)}.") from error


def of_experiment(data: Mapping[str, Any], *, env_too: bool = True) -> list[ConfigProblem]:
    """Everything that can be said about one experiment. With search values in it: about every one of them.

    `env_too`: its environment must exist here.
    """
    out: dict[ConfigProblem, None] = {}
    try:
        search_space.find_searches(data)
    except ConfigError as error:
        out[ConfigProblem(str(error))] = None
    for variant in variants(data):
        out |= dict.fromkeys(_of_one(variant, env_too))
    return list(out)


def notices_of(data: Mapping[str, Any]) -> list[ConfigProblem]:
    """What is ignored in an experiment, or read as something else, a sentence for each key."""
    out: dict[ConfigProblem, None] = {}
    for variant in variants(data):
        top = translate_experiment(variant)
        env, run, inner = top.data.get("env"), top.data.get("run", "PPO"), top.data.get("config", {})
        found = [ConfigProblem(current_name(env).notice, "env")] if isinstance(env, str) and current_name(env).notice else []
        found += top.notices()
        schema = _schema_of(run)
        if isinstance(inner, Mapping):
            found += translate_config(inner, schema or AlgorithmConfig).notices()
        if isinstance(inner, Mapping) and schema is not None and isinstance(env, str):
            found += _rounded_batch(schema, inner, collated=_is_collated(env, inner))
            found += _switched_off(schema, inner, collated=_is_collated(env, inner))
        out |= dict.fromkeys(found)
    swept = translate_config(_config_of(data)).notices()  # a search over a key that is ignored: said once, as it is written
    searched = {notice.path for notice in swept}
    return [*swept, *(notice for notice in out if notice.path not in searched)]


def _rounded_batch(schema: type[AlgorithmConfig], inner: Mapping[str, Any], *, collated: bool) -> list[ConfigProblem]:
    reading = translate_config(inner, schema)
    batch = reading.data.get("train_batch_size")
    try:
        checked = parse_algorithm_config(schema, inner, collated=collated)
    except UsageError:
        return []
    if batch is None or checked.train_batch_size == batch:
        return []
    name = f"config.{reading.spelled_as.get('train_batch_size', 'train_batch_size')}"
    whole = f"fragments of {checked.num_envs_per_worker} environments"
    return [ConfigProblem(f"{name} ({batch}) is rounded up to {checked.train_batch_size}: whole {whole}, as in RLlib.", name)]


def _switched_off(schema: type[AlgorithmConfig], inner: Mapping[str, Any], *, collated: bool) -> list[ConfigProblem]:
    try:
        checked = parse_algorithm_config(schema, inner, collated=collated)
    except UsageError:
        return []
    reading = translate_config(inner, schema)
    return list(key_modes.notices_of(checked, reading.data, reading.spelled_as))


def _is_collated(env: str, inner: Mapping[str, Any]) -> bool:
    """Whether segments of any number make up a batch."""
    try:
        return env == EXTERNAL or multi_agent_training.is_meant(current_name(env).name, inner)
    except (UsageError, EnvironmentFault):
        return True


def _config_of(data: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = translate_experiment(data).data.get("config", {})
    return inner if isinstance(inner, Mapping) else {}


def _schema_of(run: Any) -> type[AlgorithmConfig] | None:
    try:
        return algorithm_of(run).Config if isinstance(run, str) else None
    except UsageError:
        return None


class _Found:
    """Collects what is raised by checks that do not depend on one another."""

    def __init__(self) -> None:
        self.problems: list[ConfigProblem] = []

    def attempt(self, check: Callable[[], T], path: str = "") -> T | None:
        """The result of a check; None: it failed. `path`: the key that it is about, unless the error says so itself."""
        try:
            return check()
        except ConfigErrors as error:
            self.problems += error.problems
        except (UsageError, EnvironmentFault) as error:
            self.problems += [ConfigProblem(line, path) for line in str(error).splitlines()]
        return None


def _of_one(data: Mapping[str, Any], env_too: bool) -> list[ConfigProblem]:
    found = _Found()
    found.attempt(lambda: parse_experiment(data))
    top = translate_experiment(data).data
    env, run, inner = top.get("env"), top.get("run", "PPO"), top.get("config", {})
    env = current_name(env).name if isinstance(env, str) else env
    called = env == EXTERNAL
    several = False
    if isinstance(env, str) and isinstance(inner, Mapping) and not called:
        several = bool(found.attempt(lambda: multi_agent_training.is_meant(env, inner), "env"))
    if isinstance(env, str) and not called and not several and env_too:
        found.attempt(lambda: check_exists(env), "env")
    algorithm = found.attempt(lambda: algorithm_of(run), "run") if isinstance(run, str) else None
    if isinstance(inner, Mapping):
        if algorithm is not None:
            found.problems += of_config(algorithm.Config, inner, collated=called or several, run=run)
            if isinstance(env, str) and not found.problems:
                found.problems += _keys_without_effect(algorithm.Config, top, env, several=several, env_too=env_too)
        else:
            found.problems += _whatever_runs(inner, run, collated=called or several)
        if called and isinstance(inner.get("env_config"), Mapping):
            found.attempt(lambda: parse_external_config(inner["env_config"]))
    return list(dict.fromkeys(found.problems))


def without_effect(data: Mapping[str, Any]) -> list[ConfigProblem]:
    """Keys of one experiment that do nothing in its mode; none if something else is wrong with it."""
    found = _Found()
    top = translate_experiment(data).data
    env, inner, schema = top.get("env"), top.get("config", {}), _schema_of(top.get("run", "PPO"))
    if not isinstance(env, str) or not isinstance(inner, Mapping) or schema is None:
        return []
    env = current_name(env).name
    several = env != EXTERNAL and found.attempt(lambda: multi_agent_training.is_meant(env, inner))
    return [] if several is None else _keys_without_effect(schema, top, env, several=bool(several), env_too=True)


def _keys_without_effect(
    schema: type[AlgorithmConfig], top: Mapping[str, Any], env: str, *, several: bool, env_too: bool
) -> list[ConfigProblem]:
    """Keys that are right, and do nothing where they stand."""
    reading = translate_config(top.get("config", {}), schema)
    memory = top.get("memory", EMBEDDED)
    found = _Found()
    config = found.attempt(lambda: parse_algorithm_config(schema, top.get("config", {}), collated=several or env == EXTERNAL))
    if config is None:
        return []  # said already
    given = {key: reading.spelled_as.get(key, key) for key in reading.data}
    idle = key_modes.complaints_of(env, memory, config, given, several=several)
    if not idle and not several and env_too:
        reason = found.attempt(lambda: key_modes.refuse_idle_self_play(env, config))
        idle += [ConfigProblem(reason, "config.self_play")] if reason else []
    return idle


def of_config(
    schema: type[AlgorithmConfig], inner: Mapping[str, Any], *, collated: bool = False, run: str = ""
) -> list[ConfigProblem]:
    """What is wrong with `config:`. Keys with a wrong value are left out for a second look at how the others fit together."""
    first, second = _Found(), _Found()
    checked = first.attempt(
        lambda: parse_algorithm_config(schema, inner, collated=collated, run=run, owners=owners), "config.train_batch_size"
    )
    if checked is not None:
        return [*first.problems, *_minibatch_too_large(schema, inner, checked)]
    wrong = {complaint.path.split(".")[1] for complaint in first.problems if complaint.path.startswith("config.")}
    names = {rllib_keys.canonical_name(rllib_keys.CONFIG, key) for key in wrong}
    rest = {key: value for key, value in inner.items() if key not in wrong}
    if names & _SHAPE or len(rest) == len(inner):
        return first.problems
    checked = second.attempt(lambda: parse_algorithm_config(schema, rest, collated=collated), "config.train_batch_size")
    more = _minibatch_too_large(schema, rest, checked) if checked is not None and "minibatch_size" not in names else []
    return [*first.problems, *second.problems, *more]


def _minibatch_too_large(
    schema: type[AlgorithmConfig], inner: Mapping[str, Any], checked: AlgorithmConfig
) -> list[ConfigProblem]:
    """The default is no complaint: it is as much of the batch as there is. Nor is what a run has saved, which names every key."""
    size, batch = getattr(checked, "minibatch_size", None), checked.train_batch_size
    reading = translate_config(inner, schema)
    given = "minibatch_size" in reading.data and size != schema.model_fields["minibatch_size"].default
    if schema.replays or not given or not isinstance(size, int) or size <= batch:
        return []
    name = f"config.{reading.spelled_as.get('minibatch_size', 'minibatch_size')}"
    sentence = f"{name} is {size}, and a batch has {batch} steps (train_batch_size). Set it to {batch} or less."
    return [ConfigProblem(sentence, name)]


def _whatever_runs(inner: Mapping[str, Any], run: Any, *, collated: bool) -> list[ConfigProblem]:
    """What is wrong with `config:` when the algorithm is unknown: for the one that is probably meant, else for all of them."""
    known = config_schemas()
    near = difflib.get_close_matches(str(run).upper(), known, n=1, cutoff=0.6)
    if near:
        return of_config(known[near[0]], inner, collated=collated, run=near[0])
    each = [of_config(schema, inner, collated=collated, run=name) for name, schema in known.items()]
    return [complaint for complaint in each[0] if all(complaint in others for others in each[1:])]


def variants(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The experiment with the first value of every search, and once with every other value of each."""
    choices = dict(_searched(data, ()))
    first = {path: values[0] for path, values in choices.items()}
    yield _with(data, first)
    for path, values in choices.items():
        for value in values[1:]:
            yield _with(data, first | {path: value})


def _searched(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Path → values, at least one, of which a sweep would try one."""
    if is_search(value):
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


def trust_names(experiments: Mapping[str, Mapping[str, Any]]) -> None:
    """The user wrote these experiments: what they name may be imported, also under the name that an environment has today."""
    trust.allow(experiments)
    for data in experiments.values():
        env = translate_experiment(data).data.get("env")
        trust.allow(current_name(env).name if isinstance(env, str) else None)
