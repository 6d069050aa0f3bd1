"""From the name of an environment to whoever makes it: a registered function, `module:function`, or Gymnasium's registry."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import gymnasium as gym

from ludus.core import trust
from ludus.core.plugins import did_you_mean, import_module, import_object, load_object
from ludus.envs.packages import Package, package_of_id, package_of_module
from ludus.errors import MissingExtra, UnknownName, UsageError

Factory = Callable[..., Any]
EnvLike = str | Factory
"""How an environment is given: by its name, its class, or a function that makes one."""

_registered: dict[str, Factory] = {}

_GYM_ID = re.compile(r"^(?:[\w:.-]+:)?(?:[\w:.-]+/)?[\w:.-]+-v\d+$")
_EXTRAS = {"ALE": "atari", "mujoco": "mujoco", "vizdoom": "doom", "pettingzoo": "pettingzoo", "mpe2": "pettingzoo"}
_PLUGIN_MODULES = {"ALE/": "ale_py", "Vizdoom": "vizdoom.gymnasium_wrapper"}
_IMPORTS_ITS_ARGUMENT = "GymV"
_NOT_SHOWN = ("phys2d", "tabular", "GymV")
_OURS = {"ludus/Arena-1v1-v0": ("ludus.games.arena.env.gym_env:ArenaEnv", "ludus.games.arena.env.gym_env:ArenaVectorEnv")}
"""Gymnasium environments of our own: whoever makes one, and many at once; imported when they are made."""
_OURS_SEVERAL = {
    "ludus/Arena-3v3-v0": "ludus.games.arena.env.pettingzoo_env:arena_3v3",
    "ludus/Arena-5v5-v0": "ludus.games.arena.env.pettingzoo_env:arena_5v5",
}
"""Those with several agents."""
_OURS_ELSEWHERE = {"gamecore": "ludus.gamecore.vector_env:GamecoreVectorEnv"}
"""Those whose games run as processes of their own, below a server."""
_WHOLE = ("env_config", "config", "cfg", "settings", "context", "env_ctx", "ctx")
"""Names by which a function says that it takes `env_config` as one mapping."""


def register_env(name: str, function: Factory) -> None:
    """From now on `env: name` is what `function` makes, in workers as well.

    It is called as function(**env_config), or as function(env_config) when it has one parameter, which is called `config`,
    `env_config` or the like, or has neither a default nor a key of that name. Naming `num_envs` it makes a whole vector
    environment. Registering a name again replaces it.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][\w./+-]*", name):
        raise UsageError(
            f"{name!r} is no name for an environment.", "Letters, digits and _ . / + -, beginning with one of the first."
        )
    if not callable(function):
        raise UsageError(f"register_env({name!r}) got a {type(function).__name__}.", "Give a function or class that makes it.")
    _registered[name] = function


def env_name(env: EnvLike) -> str:
    """The name of an environment that is given as a name, a class or a function.

    What other processes can import is named `module:function`; anything else is registered under a name of its own, which is known
    in this process and those that it starts. Raises UsageError.
    """
    if isinstance(env, str):
        return env
    if not callable(env):
        raise UsageError(
            f"env is a {type(env).__name__} object, and a run needs many environments.",
            "Give its name, its class, or a function that makes one:  env=lambda: MyEnv(…)",
        )
    module, name = getattr(env, "__module__", None), getattr(env, "__qualname__", "")
    if module in sys.modules and name.isidentifier() and getattr(sys.modules[module], name, None) is env:
        return f"{module}:{name}"
    return _register_local(env, name)


def _register_local(env: Factory, qualname: str) -> str:
    stem = "local/" + (re.sub(r"\W", "", qualname.rpartition(".")[2]) or type(env).__name__)
    names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    name = next(name for name in names if _registered.get(name, env) is env)
    register_env(name, env)
    return name


def registered() -> Mapping[str, Factory]:
    """What `register_env` has been given in this process."""
    return MappingProxyType(_registered)


def factory_of(name: str) -> Factory | None:
    """Whoever makes it, unless that is Gymnasium. Raises UnknownName, MissingExtra."""
    if name in _registered:
        return _registered[name]
    ours = _OURS_SEVERAL.get(name) or _OURS_ELSEWHERE.get(name)
    if ours is None and (":" not in name or _GYM_ID.match(name)):
        return None
    found = load_object(ours) if ours is not None else import_object(name, "environment", makes_environment)
    if not callable(found):
        raise UnknownName(f"{name!r} is a {type(found).__name__}, not a function or class that makes an environment.")
    factory: Factory = found
    return factory


def spec_of(name: str) -> gym.envs.registration.EnvSpec:
    """Gymnasium's specification of an id; `package:Name-v0` imports the package first. Raises UnknownName, MissingExtra."""
    module, _, gym_id = name.rpartition(":")
    if module:
        _import_package(module, name)
    if gym_id.startswith(_IMPORTS_ITS_ARGUMENT) and not trust.is_allowed(gym_id):
        raise trust.untrusted(gym_id, "environment", "it imports what env_config names")
    for prefix, plugin in _PLUGIN_MODULES.items():
        if gym_id.startswith(prefix):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(plugin)  # registers its environments
    try:
        return gym.spec(gym_id)
    except gym.error.Error as error:
        found = None if module else _of_atari(name) or _of_known_package(name)
        if found is not None:
            return found
        raise _not_in_module(module, gym_id) if module else _unknown(name) from error


def _import_package(module: str, name: str) -> None:
    if package_of_module(module) is None:
        trust.check(name, "environment")
    try:
        import_module(module, name)
    except UnknownName as error:
        package = package_of_module(module)
        if package is None:
            raise
        raise MissingExtra(error.message, f"pip install {package.install}") from error


def _not_in_module(module: str, gym_id: str) -> UnknownName:
    theirs = [i for i, spec in gym.registry.items() if str(spec.entry_point).startswith(module.partition(".")[0])]
    hint = did_you_mean(gym_id, theirs) if theirs else "It registers no environments when it is imported."
    return UnknownName(f"Importing {module!r} registers no environment {gym_id!r}.", hint)


def _of_known_package(name: str) -> gym.envs.registration.EnvSpec | None:
    """The environment of a package that is installed but not imported yet. Raises MissingExtra when it is not installed."""
    package = package_of_id(name)
    if package is None or not package.registers:
        return None
    try:
        import_module(package.module, f"{package.module}:{name}")
    except UnknownName:
        return None
    return gym.registry.get(name)


def _of_atari(name: str) -> gym.envs.registration.EnvSpec | None:
    """Older names, such as PongNoFrameskip-v4, have no prefix to know them by."""
    if "/" in name or ":" in name:
        return None
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("ale_py")
        return gym.registry.get(name)
    return None


def _unknown(name: str) -> UnknownName | MissingExtra:
    known = [i for i in gym.registry if not i.startswith(_NOT_SHOWN)]
    family = name.split("/")[0]
    extra = _EXTRAS.get(family) or ("doom" if name.startswith("Vizdoom") else None)
    if extra and not any(i.startswith(family) for i in known):
        return MissingExtra(f"{name!r} is not installed.", f"pip install 'ludus[{extra}]'")
    package = package_of_id(name)
    newer = _other_versions(name, known)
    if newer:
        return UnknownName(f"There is no {name!r} in Gymnasium {gym.__version__}.", f"It has {' and '.join(newer)}.")
    if package is not None:
        return _not_installed(name, package)
    hint = did_you_mean(name, [*known, *_OURS_SEVERAL, *_OURS_ELSEWHERE, *_registered, "external"])
    if not _GYM_ID.match(name) and ":" not in name:
        hint = (
            f"{hint} A name from register_env is known only where that was called; module:function is known everywhere.".strip()
        )
    return UnknownName(f"Unknown environment {name!r}.", hint)


def _not_installed(name: str, package: Package) -> UnknownName | MissingExtra:
    if not package.registers:
        return UnknownName(f"{name!r} is an environment of {package.install}.", package.advice)
    if importlib.util.find_spec(package.module.partition(".")[0]) is not None:
        return UnknownName(f"{package.install} is installed but registers no environment {name!r}.")
    return MissingExtra(
        f"{name!r} is an environment of {package.install}, which is not installed.", f"pip install {package.install}"
    )


def _other_versions(name: str, known: list[str]) -> list[str]:
    stem, dash, version = name.rpartition("-v")
    if not dash or not version.isdigit():
        return []
    same = [i for i in known if i.rpartition("-v")[0] == stem]
    return sorted(same, key=lambda i: int(i.rpartition("-v")[2]))[-2:]


def outdated(name: str) -> str:
    """A sentence about a name that Gymnasium still has although there is a newer version of it; else nothing."""
    if factory_of(name) is not None:
        return ""
    spec = spec_of(name)
    if spec.version is None or str(spec.entry_point).startswith("ale_py"):
        return ""  # older names of Atari games are other environments, not older ones
    versions = [s for s in gym.registry.values() if (s.namespace, s.name) == (spec.namespace, spec.name)]
    newest = max(versions, key=lambda s: s.version or 0)
    if (newest.version or 0) <= spec.version:
        return ""
    limits = f" (episodes of up to {newest.max_episode_steps} steps instead of {spec.max_episode_steps})"
    differ = newest.max_episode_steps != spec.max_episode_steps
    return f"env: {name} is an old version, and is used as asked; the current one is {newest.id}{limits * differ}."


def makes_environment(found: Any, project: bool) -> bool:
    """Whether a class is an environment or a function declares that it returns one; in the user's project it need not declare."""
    if isinstance(found, type):
        return _is_environment(found)
    if isinstance(found, functools.partial):
        return makes_environment(found.func, project)
    if not callable(found):
        return project  # it cannot be called; whoever asks says what it is instead
    try:
        returned = typing.get_type_hints(found).get("return", Any)
    except Exception:  # an annotation that cannot be read declares nothing
        returned = Any
    if returned in (Any, object):
        own = getattr(found, "__module__", None) or type(found).__module__
        return project and (own == "__main__" or trust.is_in_project(own))
    return any(_is_environment(typing.get_origin(each) or each) for each in (returned, *typing.get_args(returned)))


def _is_environment(kind: Any) -> bool:
    if not isinstance(kind, type):
        return False
    return issubclass(kind, (gym.Env, gym.vector.VectorEnv)) or all(callable(getattr(kind, m, None)) for m in ("reset", "step"))


def takes(factory: Factory, keyword: str) -> bool:
    parameters = _parameters(factory)
    return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def makes_vectors(factory: Factory) -> bool:
    return "num_envs" in _parameters(factory)


def called(factory: Factory, config: Mapping[str, Any]) -> Any:
    """The environment, with `env_config` as keywords or as one mapping: whichever the function takes."""
    return factory(dict(config)) if takes_mapping(factory, config) else factory(**config)


def takes_mapping(factory: Factory, config: Mapping[str, Any]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(_parameters(factory).values())
    if len(parameters) != 1 or parameters[0].kind not in positional or parameters[0].name in config:
        return False
    return parameters[0].name in _WHOLE or parameters[0].default is inspect.Parameter.empty


def _parameters(factory: Factory) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # one that is written in C tells nothing
        return {}


def _register_ours() -> None:
    for name, (one, many) in _OURS.items():
        if name not in gym.registry:
            gym.register(name, entry_point=one, vector_entry_point=many)


_register_ours()
