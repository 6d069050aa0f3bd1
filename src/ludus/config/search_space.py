"""Search space of a sweep: the searched keys of an experiment and the values of each trial. All randomness is passed in.

config: {lr: {loguniform: [1e-5, 1e-2]}, gamma: {grid_search: [0.98, 0.99]}}     num_samples: 3    →  6 trials
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ludus.config.search_values import SEARCHES, is_search
from ludus.config.translation import translate_config, translate_experiment
from ludus.errors import ConfigError

GRID = "grid_search"
MAX_TRIALS = 100_000
SEARCHABLE = ("env", "run", "config")
"""Keys of an experiment whose values may be searched; all others are the same in all trials."""

FIXED = (
    "model",
    "hiddens",
    "dueling",
    "seed",
    "num_workers",
    "num_learners",
    "observation_filter",
    "env_config",
    "multiagent",
    "preprocess",
    "wrappers",
    "normalize_reward",
    "kl_coeff",
    "n_step",
    "replay_buffer_config",
)
"""Keys of `config:` that population based training cannot change: copied weights or buffers would no longer fit; or the
algorithm adapts the value itself (kl_coeff)."""

SEED = ("config", "seed")
"""Trials that differ only in this key are repetitions."""

Path = tuple[str, ...]
Assignment = dict[Path, Any]
"""Path of a key in the experiment → its value in one trial."""


@dataclass(frozen=True)
class SearchedKey:
    """A key and the distribution or grid of its values."""

    path: Path
    kind: str
    arguments: tuple[Any, ...]

    @property
    def dotted_path(self) -> str:
        return ".".join(self.path)

    def draw(self, generator: np.random.Generator) -> Any:
        """Draw a value; from a grid, any of its values."""
        if self.kind in (GRID, "choice"):
            return self.arguments[int(generator.integers(len(self.arguments)))]
        return _DRAWS[self.kind](generator, *self.arguments)

    def clamp(self, value: Any) -> Any:
        """Return the nearest value inside the range."""
        if self.kind not in _RANGES or isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        low, high = self.arguments[:2]
        if self.kind in ("randint", "qrandint"):
            return int(min(max(round(value), low), high - (self.kind == "randint")))
        return float(min(max(value, low), high))


def _ends(low: float, high: float, step: float) -> tuple[int, int]:
    """Return the first and last multiple of the step in the range, with a tolerance for rounding."""
    return math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)


def _draw_multiple(draw: Callable[[float, float], float], low: float, high: float, step: float) -> float:
    first, last = _ends(low, high, step)
    return float(f"{min(max(round(draw(first * step, last * step) / step), first), last) * step:.12g}")


def _loguniform(generator: np.random.Generator, low: float, high: float) -> float:
    return float(np.clip(math.exp(generator.uniform(math.log(low), math.log(high))), low, high))


_DRAWS: Mapping[str, Callable[..., Any]] = {
    "uniform": lambda generator, low, high: float(generator.uniform(low, high)),
    "quniform": lambda generator, low, high, step: _draw_multiple(generator.uniform, low, high, step),
    "loguniform": _loguniform,
    "qloguniform": lambda generator, low, high, step: _draw_multiple(functools.partial(_loguniform, generator), low, high, step),
    "randint": lambda generator, low, high: int(generator.integers(low, high)),
    "qrandint": lambda generator, low, high, step=1: step * int(generator.integers(*_ends(low, high, step), endpoint=True)),
    "randn": lambda generator, mean=0.0, deviation=1.0: float(generator.normal(mean, deviation)),
}
_RANGES = ("uniform", "quniform", "loguniform", "qloguniform", "randint", "qrandint")
_LENGTHS: Mapping[str, tuple[int, ...]] = {
    "uniform": (2,), "quniform": (3,), "loguniform": (2,), "qloguniform": (3,), "randint": (2,), "qrandint": (2, 3), "randn": (0, 2),
}  # fmt: skip


# -- parsing ------------------------------------------------------------------------------------------------------------


def parse_search(path: Path, value: Any) -> SearchedKey:
    """Validate one search value. Raises ConfigError."""
    shown = ".".join(path)
    ((kind, given),) = value.items()
    if kind == "randint" and isinstance(given, int):
        given = [0, given]
    if isinstance(given, tuple):
        given = list(given)
    if not isinstance(given, list):
        raise ConfigError(f"{shown}.{kind} is {given!r}, which is not a list.", f"Write  {path[-1]}: {{{kind}: […]}}")
    if kind in (GRID, "choice"):
        if not given:
            raise ConfigError(f"{shown}.{kind} is empty.", "Give it at least one value.")
        return SearchedKey(path, kind, tuple(given))
    _check_numbers(shown, kind, given)
    return SearchedKey(path, kind, tuple(given))


def _check_numbers(shown: str, kind: str, given: Sequence[Any]) -> None:
    lengths = _LENGTHS[kind]
    if len(given) not in lengths:
        wanted = " or ".join(map(str, lengths))
        raise ConfigError(f"{shown}.{kind} has {len(given)} values, and takes {wanted}.", f"Example: {_EXAMPLES[kind]}")
    integers = kind in ("randint", "qrandint")
    for number in given:
        right = isinstance(number, int) if integers else isinstance(number, (int, float)) and math.isfinite(number)
        if isinstance(number, bool) or not right:
            raise ConfigError(
                f"{shown}.{kind} contains {number!r}, which is not a {'whole ' * integers}number.", f"Example: {_EXAMPLES[kind]}"
            )
    if kind == "randn":
        if given and given[1] < 0:
            raise ConfigError(f"{shown}.randn has the deviation {given[1]}.", "It is a number from 0 upwards.")
        return
    low, high = given[:2]
    if not low < high:
        raise ConfigError(f"{shown}.{kind} goes from {low} to {high}.", "The first is the lower one.")
    if "log" in kind and low <= 0:
        raise ConfigError(f"{shown}.{kind} begins at {low}, which has no logarithm.", "Begin above 0.")
    if len(given) == 3 and not (given[2] > 0 and _ends(low, high, given[2])[0] < _ends(low, high, given[2])[1]):
        raise ConfigError(
            f"{shown}.{kind} goes in steps of {given[2]}.", f"Less than 2 multiples of it are between {low} and {high}."
        )
    if kind == "qloguniform" and _ends(low, high, given[2])[0] < 1:
        raise ConfigError(f"{shown}.{kind} goes in steps of {given[2]} and would reach 0.", f"Begin at {given[2]}.")


_EXAMPLES: Mapping[str, str] = {
    "uniform": "{uniform: [0.9, 0.999]}",
    "quniform": "{quniform: [0.1, 0.4, 0.05]}",
    "loguniform": "{loguniform: [1e-5, 1e-2]}",
    "qloguniform": "{qloguniform: [1e-4, 1e-2, 1e-4]}",
    "randint": "{randint: [1, 10]}, the upper one excluded",
    "qrandint": "{qrandint: [64, 512, 64]}, the upper one included",
    "randn": "{randn: [0, 1]}: mean and deviation",
}


def _is_domain(value: Any) -> bool:
    """Whether a value is an object of Ray Tune such as `tune.uniform(0, 1)`. (`tune.grid_search` returns a mapping.)"""
    return type(value).__module__ == "ray.tune.search.sample" and hasattr(value, "sample")


def replace_tune_domains(value: Any, path: Path = ()) -> Any:
    """Replace Ray Tune's objects by search values, which can be saved as YAML. Raises ConfigError."""
    if _is_domain(value):
        return _from_domain(path, value)
    if isinstance(value, Mapping):
        return {key: replace_tune_domains(inner, (*path, str(key))) for key, inner in value.items()}
    return value


def _from_domain(path: Path, domain: Any) -> dict[str, Any]:
    if hasattr(domain, "categories"):
        return {"choice": list(domain.categories)}
    sampler = domain.get_sampler()
    step = getattr(sampler, "q", None)
    inner = type(sampler if step is None else sampler.get_sampler()).__name__
    word = _WORDS.get((type(domain).__name__, inner, step is not None))
    if word is None:
        raise ConfigError(
            f"{'.'.join(path)} is a {type(domain).__name__} ({inner}) of Ray Tune, which is not supported.",
            f"Use one of {', '.join(SEARCHES)}.",
        )
    if word == "randn":
        return {word: [float(sampler.mean), float(sampler.sd)]}
    return {word: [domain.lower, domain.upper, *([] if step is None else [step])]}


_WORDS = {
    ("Float", "_Uniform", False): "uniform",
    ("Float", "_Uniform", True): "quniform",
    ("Float", "_LogUniform", False): "loguniform",
    ("Float", "_LogUniform", True): "qloguniform",
    ("Float", "_Normal", False): "randn",
    ("Integer", "_Uniform", False): "randint",
    ("Integer", "_Uniform", True): "qrandint",
}


def find_searches(data: Mapping[str, Any]) -> list[SearchedKey]:
    """Return all search values of an experiment, in its order. Raises ConfigError for one in a key that cannot be searched."""
    for key, value in data.items():
        if key not in (*SEARCHABLE, "tune") and any(_walk((key,), value)):
            raise ConfigError(f"{key!r} contains search values.", f"Only these can be searched: {', '.join(SEARCHABLE)}.")
    return [parse_search(path, value) for key in SEARCHABLE for path, value in _walk((key,), data.get(key))]


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if is_search(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk((*path, str(key)), inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            for found, _ in _walk((*path, str(number)), inner):
                raise ConfigError(
                    f"{'.'.join(found)} contains a search value inside a list.",
                    f"Search the whole list: {path[-1]}: {{choice: [[…], […]]}}.",
                )


def is_sweep(data: Mapping[str, Any]) -> bool:
    """Whether an experiment has several trials: several samples, or a search value that changes the training."""
    data = translate_experiment(data).data
    if isinstance(data.get("config"), Mapping):
        data["config"] = translate_config(data["config"]).data
    return bool(data.get("num_samples", 1) not in (None, 1)) or any(
        True for key in SEARCHABLE for _ in _walk((key,), data.get(key))
    )


# -- the trials ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialValues:
    """Name and values of one trial of a sweep."""

    name: str
    values: Assignment
    """All searched keys, and the seed if there are several samples."""


def make_trials(data: Mapping[str, Any], num_samples: int, seed: int, mutations: Sequence[SearchedKey] = ()) -> list[TrialValues]:
    """Return every combination of the grids, `num_samples` times; other searched keys are drawn for each trial.

    All trials of one sample have the same seed, so that differences between settings are not differences of the seed.
    """
    keys = find_searches(data)
    known = {key.path for key in keys}
    keys += [key for key in mutations if key.path not in known]
    grids = [key for key in keys if key.kind == GRID]
    number = num_samples * math.prod(len(key.arguments) for key in grids)
    if number > MAX_TRIALS:
        raise ConfigError(f"This sweep has {number:,} trials.", f"Make the grids smaller: there is room for {MAX_TRIALS:,}.")
    generator = np.random.default_rng([seed, 5])
    seeded = num_samples > 1 and SEED not in known
    assignments: list[Assignment] = []
    for sample in range(num_samples):
        for combination in itertools.product(*(key.arguments for key in grids)):
            fixed = dict(zip((key.path for key in grids), combination, strict=True))
            values = {key.path: fixed[key.path] if key.path in fixed else key.draw(generator) for key in keys}
            if seeded:
                values[SEED] = (seed + sample) % (1 << 30)
            assignments.append(values)
    width = max(3, len(str(number - 1)))
    return [TrialValues(_name(index, width, values), copy.deepcopy(values)) for index, values in enumerate(assignments)]


def _name(index: int, width: int, values: Assignment) -> str:
    """Return a directory name with the values of the trial."""
    words = [f"{path[-1]}-{format_value(value)}" for path, value in values.items()]
    plain = re.sub(r"[^\w.+-]+", "-", "_".join([f"t{index:0{width}d}", *words]))
    return plain[:80].rstrip("-_.")


def format_value(value: Any) -> str:
    """Return a short form of a value."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return "x".join(format_value(v) for v in value)
    if isinstance(value, Mapping):
        return "+".join(f"{k}-{format_value(v)}" for k, v in value.items())
    return str(value)


def apply_values(data: Mapping[str, Any], values: Mapping[Path, Any]) -> dict[str, Any]:
    """Return the experiment of one trial: search values replaced, keys of the sweep removed."""
    out = copy.deepcopy({key: value for key, value in data.items() if key not in ("num_samples", "tune")})
    for path, value in values.items():
        section = out
        for key in path[:-1]:
            if not isinstance(section.get(key), dict):
                section[key] = dict(section.get(key) or {})
            section = section[key]
        section[path[-1]] = copy.deepcopy(value)
    return out


def find_mutations(data: Mapping[str, Any], mutations: Mapping[str, Any]) -> list[SearchedKey]:
    """Return the keys that population based training changes: `mutations`, else all searched keys. Raises ConfigError."""
    if mutations:
        keys = [_parse_mutation(name, value) for name, value in mutations.items()]
    else:
        keys = [key for key in find_searches(data) if key.path != SEED]
    if not keys:
        raise ConfigError(
            "Population based training has nothing to change.",
            "Give search values in config (lr: {loguniform: [1e-5, 1e-2]}), or tune.hyperparam_mutations.",
        )
    for key in keys:
        if key.path[0] != "config" or key.path[1] in FIXED:
            raise ConfigError(
                f"{key.dotted_path} cannot be changed during a trial, as population based training does.",
                f"Give all trials the same, or leave it out of the mutations. Fixed are env, run, {', '.join(FIXED)}.",
            )
    return keys


def _parse_mutation(name: str, value: Any) -> SearchedKey:
    path = ("config", *name.removeprefix("config.").split("."))
    if isinstance(value, (list, tuple)):
        value = {GRID: list(value)}
    if not is_search(value):
        raise ConfigError(f"tune.hyperparam_mutations.{name} is {value!r}.", "Give a list of values, or {loguniform: [a, b]} …")
    return parse_search(path, value)


def perturb(
    keys: Sequence[SearchedKey],
    values: Mapping[Path, Any],
    generator: np.random.Generator,
    resample: float,
    factors: tuple[float, float] = (0.8, 1.2),
) -> Assignment:
    """Return the values of a better trial, each resampled or perturbed: the next value of a list, or times a factor."""
    out = dict(values)
    for key in keys:
        value = values.get(key.path)
        if value is None or generator.random() < resample:
            out[key.path] = key.draw(generator)
        elif key.kind in (GRID, "choice") and value in key.arguments:
            moved = key.arguments.index(value) + int(generator.choice([-1, 1]))
            out[key.path] = key.arguments[min(max(moved, 0), len(key.arguments) - 1)]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            scaled = value * float(generator.choice(factors))
            out[key.path] = key.clamp(round(scaled) if isinstance(value, int) else scaled)
        else:
            out[key.path] = key.draw(generator)
    return out
