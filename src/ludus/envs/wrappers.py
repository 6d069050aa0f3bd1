"""Wrappers named in a config: `"module:Wrapper"`, or `{"module:Wrapper": {keywords}}`, from the inside to the outside.

One of single environments is put around every copy; one of vector environments around all of them together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from ludus.core.plugins import import_object
from ludus.envs.registry import makes_environment
from ludus.errors import ConfigError, EnvironmentFault, LudusError, user_frame

Named = Sequence[str | Mapping[str, Any]]


@dataclass(frozen=True)
class Wrapper:
    name: str
    make: Callable[..., Any]
    keywords: Mapping[str, Any]
    of_vectors: bool

    def around(self, env: Any, *, several: bool = False) -> Any:
        """`several`: an environment with several agents, whose wrappers are PettingZoo's. Raises ConfigError, EnvironmentFault."""
        try:
            wrapped = self.make(env, **self.keywords)
        except LudusError:
            raise
        except TypeError as error:
            raise ConfigError(
                f"config.wrappers: {self.name} could not be made: {error}{user_frame(error)}.", "Check its keywords."
            ) from error
        except Exception as error:
            raise EnvironmentFault(
                f"The wrapper {self.name} raised {type(error).__name__} while it was made: {error}{user_frame(error)}."
            ) from error
        if several:
            if not hasattr(wrapped, "possible_agents"):
                raise ConfigError(f"config.wrappers: {self.name} made a {type(wrapped).__name__} without possible_agents.")
            return wrapped
        kind: Any = gym.vector.VectorEnv if self.of_vectors else gym.Env
        if not isinstance(wrapped, kind):
            raise ConfigError(f"config.wrappers: {self.name} made a {type(wrapped).__name__}, not a gymnasium {kind.__name__}.")
        return wrapped


def names_of(named: Named) -> list[str]:
    return [name for item in named for name in ([item] if isinstance(item, str) else item)]


def wrappers_of(named: Named) -> tuple[list[Wrapper], list[Wrapper]]:
    """(of single environments, of vector environments). Raises UnknownName, ConfigError."""
    found = [_wrapper(item) for item in named]
    kinds = [wrapper.of_vectors for wrapper in found]
    if kinds != sorted(kinds):
        late = found[kinds.index(True) + kinds[kinds.index(True) :].index(False)]
        raise ConfigError(
            f"config.wrappers: {late.name} wraps single environments, and stands behind one of vector environments.",
            "List those of single environments first.",
        )
    return [w for w in found if not w.of_vectors], [w for w in found if w.of_vectors]


def _wrapper(item: str | Mapping[str, Any]) -> Wrapper:
    name, keywords = (item, {}) if isinstance(item, str) else _entry(item)
    made: Any = import_object(name, "wrapper", makes_environment)
    if not callable(made):
        raise ConfigError(f"config.wrappers: {name} is a {type(made).__name__}, not a wrapper.")
    return Wrapper(name, made, keywords, _of_vectors(made))


def _entry(item: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if len(item) != 1:
        raise ConfigError(
            f"config.wrappers: {dict(item)!r} names {len(item)} wrappers.", "One per entry: {module:Wrapper: {keywords}}."
        )
    ((name, keywords),) = item.items()
    if keywords is not None and not isinstance(keywords, Mapping):
        raise ConfigError(f"config.wrappers: the keywords of {name} are {keywords!r}.", "Write {module:Wrapper: {key: value}}.")
    return name, keywords or {}


def _of_vectors(made: Any) -> bool:
    """A class says so by what it is; a function by the annotation of what it takes."""
    if inspect.isclass(made):
        return issubclass(made, gym.vector.VectorEnv)
    try:
        parameters = list(inspect.signature(made).parameters.values())
    except (TypeError, ValueError):
        return False
    return bool(parameters) and "VectorEnv" in str(parameters[0].annotation)
