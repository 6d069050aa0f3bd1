"""Validation of an experiment: all its errors at once, keys without effect, and notices about ignored keys. Starts nothing."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ludus.algorithms.base import ALGORITHMS, Algorithm, algorithm_class, config_schemas
from ludus.config.aliases import rllib_keys
from ludus.config.aliases.rllib_algorithms import suggest_algorithm
from ludus.config.problem import ConfigErrors, ConfigProblem
from ludus.config.schema import EMBEDDED, EXTERNAL, AlgorithmConfig
from ludus.config.search_values import has_search, is_search
from ludus.config.section_translation import TranslatedSection
from ludus.config.translation import translate_config, translate_experiment
from ludus.config.validation import check_algorithm_config, check_experiment, parse_algorithm_config, parse_external_config
from ludus.core import trust
from ludus.envs.legacy_names import current_name
from ludus.envs.registry import PLAYER_FAMILIES, registered_envs
from ludus.envs.vector_env import check_exists
from ludus.errors import ConfigError, EnvironmentFault, UnknownName, UsageError
from ludus.experiments.validation import key_modes

T = TypeVar("T")

NO_SCHEMA = AlgorithmConfig
"""Reads `config:` of an unknown algorithm: the keys that all algorithms share."""

_SHAPE = {"num_workers", "num_envs_per_worker", "rollout_fragment_length", "train_batch_size", "sampling", "batch_mode"}
"""Keys that say how a batch is made up."""


def algorithms_with_key(key: str) -> list[str]:
    """Names of the algorithms that come with the package and have this key of `config:`."""
    return [name for name, schema in config_schemas().items() if key in schema.model_fields or f"{key}_" in schema.model_fields]


def algorithm_of(run: str) -> type[Algorithm]:
    """The class of an algorithm. Raises UnknownName, which suggests a substitute for algorithms of RLlib."""
    try:
        return algorithm_class(run)
    except UnknownName as error:
        instead = suggest_algorithm(run)
        if not instead:
            raise
        raise UnknownName(instead, f"Known: {', '.join(ALGORITHMS)}.") from error


def is_multi_agent(env: str, settings: Mapping[str, Any]) -> bool:
    """Whether an experiment has several agents. `settings`: its `config:` as written.

    Raises EnvironmentFault, MissingExtra when the environment has to be made to find out and that fails.
    """
    if settings.get("multiagent") is not None and ":" in env and "/" not in env:
        return True  # no need to make it; errors in it are reported when the run makes it
    plain = "/" not in env and ":" not in env and env not in registered_envs()
    if plain and re.search(r"-v\d+$", env):
        return False  # an id of Gymnasium, known without an import of the families with several agents
    from ludus.envs import pettingzoo

    if plain and env not in pettingzoo.FAMILIES:
        return False
    return pettingzoo.is_multi_agent(env, settings.get("env_config"))


class ParsedExperiment:
    """One experiment without search values, in current key names. Every view of it is computed once, when it is first used."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.reading = translate_experiment(data)
        top = self.reading.data
        self.run, self.memory, self.config = top.get("run", "PPO"), top.get("memory", EMBEDDED), top.get("config", {})
        named = top.get("env")
        env = current_name(named) if isinstance(named, str) else None
        self.env: Any = named if env is None else env.name
        self.env_notice = "" if env is None else env.notice

    @functools.cached_property
    def schema(self) -> type[AlgorithmConfig] | None:
        """None: the algorithm is unknown."""
        try:
            return algorithm_of(self.run).Config if isinstance(self.run, str) else None
        except UsageError:
            return None

    @functools.cached_property
    def config_reading(self) -> TranslatedSection:
        """`config:` in current names; empty where it is no mapping."""
        given = self.config if isinstance(self.config, Mapping) else {}
        reading = translate_config(given, self.schema or NO_SCHEMA)
        if self.env in PLAYER_FAMILIES:
            reading.data.setdefault("num_envs_per_worker", 1)
        return reading

    @functools.cached_property
    def is_multi_agent(self) -> bool:
        """Raises UsageError, EnvironmentFault."""
        return self.env != EXTERNAL and is_multi_agent(self.env, self.config)

    @functools.cached_property
    def is_collated(self) -> bool:
        """Whether a batch is made of any number of segments."""
        try:
            return self.env == EXTERNAL or self.is_multi_agent
        except (UsageError, EnvironmentFault):
            return True

    @functools.cached_property
    def algorithm_config(self) -> AlgorithmConfig:
        """Raises UsageError with all that is wrong with `config:`."""
        schema = algorithm_of(self.run).Config if self.schema is None else self.schema
        return check_algorithm_config(
            schema, self.config_reading, collated=self.is_collated, run=self.run, owners=algorithms_with_key
        )

    @property
    def wants_auto_workers(self) -> bool:
        given = isinstance(self.config, Mapping) and isinstance(self.run, str)  # else other checks report what is wrong
        return given and self.config_reading.data.get("num_workers") == "auto"

    def is_well_formed(self) -> bool:
        return isinstance(self.env, str) and isinstance(self.config, Mapping) and self.schema is not None


def validate_experiment(data: Mapping[str, Any], *, env_too: bool = True) -> list[ConfigProblem]:
    """All problems of one experiment, for each of its search values.

    `env_too`: also check that its environment exists.
    """
    out: dict[ConfigProblem, None] = {}
    from ludus.config import search_space

    try:
        search_space.find_searches(data)
    except ConfigError as error:
        out[ConfigProblem(str(error))] = None
    for variant in variants(data):
        out |= dict.fromkeys(_validate_variant(variant, env_too))
    return list(out)


def find_notices(data: Mapping[str, Any]) -> list[ConfigProblem]:
    """Notices about the keys of an experiment that are ignored or read as something else, for all its search values."""
    out: dict[ConfigProblem, None] = {}
    for variant in variants(data):
        out |= dict.fromkeys(find_parsed_notices(ParsedExperiment(variant)))
    if not has_search(data):
        return list(out)
    inner = translate_experiment(data).data.get("config", {})
    searched = translate_config(inner).notices() if isinstance(inner, Mapping) else []  # an ignored search is reported once
    paths = {notice.path for notice in searched}
    return [*searched, *(notice for notice in out if notice.path not in paths)]


def find_parsed_notices(parsed: ParsedExperiment) -> list[ConfigProblem]:
    """The same for an experiment without search values."""
    notices = parsed.config_reading.notices()
    notices += [ConfigProblem(parsed.env_notice, "env")] if parsed.env_notice else []
    notices += parsed.reading.notices()
    if parsed.is_well_formed():
        notices += _notices_of_values(parsed)
    return list(dict.fromkeys(notices))


def _notices_of_values(parsed: ParsedExperiment) -> Iterator[ConfigProblem]:
    try:
        config = parsed.algorithm_config
    except UsageError:
        return
    reading = parsed.config_reading
    batch = reading.data.get("train_batch_size")
    if batch is not None and config.train_batch_size != batch:
        name = f"config.{reading.spelled_as.get('train_batch_size', 'train_batch_size')}"
        whole = f"fragments of {config.num_envs_per_worker} environments"
        yield ConfigProblem(f"{name} ({batch}) is rounded up to {config.train_batch_size}: whole {whole}, as in RLlib.", name)
    yield from key_modes.find_switched_off_keys(config, reading.data, reading.spelled_as)


class _ProblemCollector:
    """Collects the errors of independent checks."""

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


def _validate_variant(data: Mapping[str, Any], env_too: bool) -> list[ConfigProblem]:
    found = _ProblemCollector()
    parsed = ParsedExperiment(data)
    found.attempt(lambda: check_experiment(parsed.reading))
    env, run, inner = parsed.env, parsed.run, parsed.config
    called = env == EXTERNAL
    several = False
    if isinstance(env, str) and isinstance(inner, Mapping) and not called:
        several = bool(found.attempt(lambda: is_multi_agent(env, inner), "env"))
    if isinstance(env, str) and not called and not several and env_too:
        found.attempt(lambda: check_exists(env), "env")
    algorithm = found.attempt(lambda: algorithm_of(run), "run") if isinstance(run, str) else None
    if isinstance(inner, Mapping):
        if algorithm is not None:
            found.problems += validate_config(algorithm.Config, inner, collated=called or several, run=run)
            if isinstance(env, str) and not found.problems:
                found.problems += keys_without_effect(parsed, env_too=env_too)
        else:
            found.problems += _validate_unknown_algorithm(inner, run, collated=called or several)
        if called and isinstance(inner.get("env_config"), Mapping):
            found.attempt(lambda: parse_external_config(inner["env_config"]))
    return list(dict.fromkeys(found.problems))


def find_keys_without_effect(data: Mapping[str, Any]) -> list[ConfigProblem]:
    """Keys of one experiment that have no effect in its training mode; none if something else is wrong with it."""
    return keys_without_effect(ParsedExperiment(data))


def keys_without_effect(parsed: ParsedExperiment, *, env_too: bool = True) -> list[ConfigProblem]:
    """The same for a parsed experiment. `env_too`: its environment exists here and may be made."""
    if not parsed.is_well_formed():
        return []
    try:
        several, config = parsed.is_multi_agent, parsed.algorithm_config
    except (UsageError, EnvironmentFault):
        return []  # reported by other checks
    reading = parsed.config_reading
    given = {key: reading.spelled_as.get(key, key) for key in reading.data}
    idle = key_modes.find_ineffective_keys(parsed.env, parsed.memory, config, given, several=several)
    if not idle and not several and env_too:
        found = _ProblemCollector()
        reason = found.attempt(lambda: key_modes.find_idle_self_play(parsed.env, config))
        idle += [ConfigProblem(reason, "config.self_play")] if reason else []
    return idle


def validate_config(
    schema: type[AlgorithmConfig], inner: Mapping[str, Any], *, collated: bool = False, run: str = ""
) -> list[ConfigProblem]:
    """Problems of `config:`. If keys have wrong values, the others are checked together in a second pass."""
    first, second = _ProblemCollector(), _ProblemCollector()
    checked = first.attempt(
        lambda: parse_algorithm_config(schema, inner, collated=collated, run=run, owners=algorithms_with_key),
        "config.train_batch_size",
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
    """Not a problem for the default value, which is limited to the batch, as in saved configurations."""
    size, batch = getattr(checked, "minibatch_size", None), checked.train_batch_size
    reading = translate_config(inner, schema)
    given = "minibatch_size" in reading.data and size != schema.model_fields["minibatch_size"].default
    if schema.replays or not given or not isinstance(size, int) or size <= batch:
        return []
    name = f"config.{reading.spelled_as.get('minibatch_size', 'minibatch_size')}"
    sentence = f"{name} is {size}, and a batch has {batch} steps (train_batch_size). Set it to {batch} or less."
    return [ConfigProblem(sentence, name)]


def _validate_unknown_algorithm(inner: Mapping[str, Any], run: Any, *, collated: bool) -> list[ConfigProblem]:
    """Problems of `config:` with an unknown algorithm: those for the most similar name, else those common to all algorithms."""
    known = config_schemas()
    near = difflib.get_close_matches(str(run).upper(), known, n=1, cutoff=0.6)
    if near:
        return validate_config(known[near[0]], inner, collated=collated, run=near[0])
    each = [validate_config(schema, inner, collated=collated, run=name) for name, schema in known.items()]
    return [complaint for complaint in each[0] if all(complaint in others for others in each[1:])]


def variants(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The experiment with the first value of every search, and once with every other value of each."""
    choices = dict(_find_searches(data, ()))
    first = {path: values[0] for path, values in choices.items()}
    yield _substitute(data, first)
    for path, values in choices.items():
        for value in values[1:]:
            yield _substitute(data, first | {path: value})


def _find_searches(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Path → values, at least one, of which a sweep would try one."""
    if is_search(value):
        ((kind, given),) = value.items()
        listed = list(given) if isinstance(given, list) and given else [given]
        limits = listed[:1] if kind == "randn" else listed[:2]  # of a range the ends; the third number is its step
        yield path, listed if kind in ("grid_search", "choice") else limits
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if path != () or key != "tune":  # which searches on purpose
                yield from _find_searches(inner, (*path, str(key)))


def _substitute(data: Mapping[str, Any], chosen: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        below = {path[1:]: given for path, given in chosen.items() if path[0] == key}
        if () in below:
            out[key] = below[()]
        else:
            out[key] = _substitute(value, below) if below else value
    return out


def trust_names(experiments: Mapping[str, Mapping[str, Any]]) -> None:
    """Allow importing what experiments of the user name, including current names of legacy environments."""
    trust.allow(experiments)
    for data in experiments.values():
        env = translate_experiment(data).data.get("env")
        trust.allow(current_name(env).name if isinstance(env, str) else None)
