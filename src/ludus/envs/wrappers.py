"""Wrappers named in a config: `"module:Wrapper"`, or `{"module:Wrapper": {keywords}}`, from the inside to the outside.

Wrappers of single environments are applied to every copy, those of vector environments to the whole vector.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from ludus.core.plugins import import_object
from ludus.envs.faults import construction_errors
from ludus.envs.registry import makes_environment
from ludus.errors import ConfigError, user_frame

WrapperList = Sequence[str | Mapping[str, Any]]


@dataclass(frozen=True)
class Wrapper:
    name: str
    make: Callable[..., Any]
    keywords: Mapping[str, Any]
    is_vector: bool

    def wrap(self, env: Any, *, multi_agent: bool = False) -> Any:
        """`multi_agent`: the wrapper is one of PettingZoo's. Raises ConfigError, EnvironmentFault."""
        with construction_errors(f"The wrapper {self.name}"):
            try:
                wrapped = self.make(env, **self.keywords)
            except TypeError as error:
                raise ConfigError(
                    f"config.wrappers: {self.name} could not be constructed: {error}{user_frame(error)}.", "Check its keywords."
                ) from error
        if multi_agent:
            if not hasattr(wrapped, "possible_agents"):
                raise ConfigError(f"config.wrappers: {self.name} made a {type(wrapped).__name__} without possible_agents.")
            return wrapped
        kind: Any = gym.vector.VectorEnv if self.is_vector else gym.Env
        if not isinstance(wrapped, kind):
            raise ConfigError(f"config.wrappers: {self.name} made a {type(wrapped).__name__}, not a gymnasium {kind.__name__}.")
        return wrapped


def wrapper_names(named: WrapperList) -> list[str]:
    return [name for item in named for name in ([item] if isinstance(item, str) else item)]


def load_wrappers(named: WrapperList) -> tuple[list[Wrapper], list[Wrapper]]:
    """Return (wrappers of single environments, wrappers of vector environments). Raises UnknownName, ConfigError."""
    loaded = [_load_wrapper(item) for item in named]
    kinds = [wrapper.is_vector for wrapper in loaded]
    if kinds != sorted(kinds):
        late = loaded[kinds.index(True) + kinds[kinds.index(True) :].index(False)]
        raise ConfigError(
            f"config.wrappers: {late.name} wraps single environments but follows a wrapper of vector environments.",
            "List those of single environments first.",
        )
    return [w for w in loaded if not w.is_vector], [w for w in loaded if w.is_vector]


def _load_wrapper(item: str | Mapping[str, Any]) -> Wrapper:
    entry = {item: None} if isinstance(item, str) else item
    if len(entry) != 1:
        raise ConfigError(
            f"config.wrappers: {dict(entry)!r} names {len(entry)} wrappers.", "One per entry: {module:Wrapper: {keywords}}."
        )
    ((name, keywords),) = entry.items()
    if keywords is not None and not isinstance(keywords, Mapping):
        raise ConfigError(f"config.wrappers: the keywords of {name} are {keywords!r}.", "Write {module:Wrapper: {key: value}}.")
    made: Any = import_object(name, "wrapper", makes_environment)
    if not callable(made):
        raise ConfigError(f"config.wrappers: {name} is a {type(made).__name__}, not a wrapper.")
    return Wrapper(name, made, keywords or {}, _is_vector_wrapper(made))


def _is_vector_wrapper(made: Any) -> bool:
    """Decide by the base class of a class, or by the annotation of a function's first parameter."""
    if inspect.isclass(made):
        return issubclass(made, gym.vector.VectorEnv)
    try:
        parameters = list(inspect.signature(made).parameters.values())
    except (TypeError, ValueError):
        return False
    return bool(parameters) and "VectorEnv" in str(parameters[0].annotation)
