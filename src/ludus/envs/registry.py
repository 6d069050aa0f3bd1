"""Resolution of environment names: registered functions, `module:function`, and Gymnasium's registry."""

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
"""An environment given by name, by class, or by a function that makes one."""

_registered: dict[str, Factory] = {}

_GYM_ID = re.compile(r"^(?:[\w:.-]+:)?(?:[\w:.-]+/)?[\w:.-]+-v\d+$")
_EXTRAS = {"ALE": "atari", "mujoco": "mujoco", "vizdoom": "doom", "pettingzoo": "pettingzoo", "mpe2": "pettingzoo"}
_PLUGIN_MODULES = {"ALE/": "ale_py", "Vizdoom": "vizdoom.gymnasium_wrapper"}
_IMPORTS_CONFIG_PREFIX = "GymV"
_NOT_SUGGESTED = ("phys2d", "tabular", "GymV")
_BUILTIN: dict[str, tuple[str, str | None]] = {
    "ludus/Arena-1v1-v0": ("ludus.games.arena.env.gym_env:ArenaEnv", "ludus.games.arena.env.gym_env:ArenaVectorEnv"),
    "ludus/NetHackOrders-v0": ("ludus.games.nethack.env:NetHackOrders", None),
}
"""Built-in Gymnasium environments: entry point and vector entry point, if there is one."""
_BUILTIN_MULTI_AGENT = {
    "ludus/Arena-3v3-v0": "ludus.games.arena.env.pettingzoo_env:arena_3v3",
    "ludus/Arena-5v5-v0": "ludus.games.arena.env.pettingzoo_env:arena_5v5",
    "ludus/ConnectFour-v0": "ludus.envs.matches.connect_four:ConnectFourEnv",
    "ludus/DoomDuel-v0": "ludus.games.doom.env:DoomDuelEnv",
    "ludus/RockPaperScissors-v0": "ludus.envs.matches.rock_paper_scissors:RockPaperScissorsEnv",
    "ludus/RocketLeague-1v1-v0": "ludus.games.rocket_league.env:rocket_league_1v1",
    "ludus/RocketLeague-2v2-v0": "ludus.games.rocket_league.env:rocket_league_2v2",
    "ludus/ZeroAD-Skirmish-v0": "ludus.games.zero_ad.env:SkirmishEnv",
}
"""Built-in environments with several agents."""
_BUILTIN_EXTERNAL = {"gamecore": "ludus.gamecore.vector_env:GamecoreVectorEnv"}
"""Built-in environments whose games run as separate processes below a server."""
PLAYER_FAMILIES = frozenset({"godot_rl", "unity"})
"""Values of `env` that start a program for every copy: a worker has one copy, unless the config has another number."""
_MAPPING_PARAMETERS = ("env_config", "config", "cfg", "settings", "context", "env_ctx", "ctx")
"""Parameter names by which a function receives `env_config` as one mapping."""


def register_env(name: str, function: Factory) -> None:
    """Register `function` as `env: name`, also in workers.

    It is called as function(**env_config), or as function(env_config) if its only parameter is named `config`, `env_config` or
    similar, or has no default and is not a key of env_config. A function with a parameter `num_envs` makes a whole vector
    environment. Registering a name again replaces it.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][\w./+-]*", name):
        raise UsageError(
            f"{name!r} is not a valid environment name.", "Use letters, digits and _ . / + -, starting with a letter, digit or _."
        )
    if not callable(function):
        raise UsageError(f"register_env({name!r}) got a {type(function).__name__}.", "Give a function or class that makes it.")
    _registered[name] = function


def env_name(env: EnvLike) -> str:
    """Return the name of an environment given as a name, a class or a function.

    An importable object is named `module:function`; any other is registered under a generated name, known in this process and its
    children. Raises UsageError.
    """
    if isinstance(env, str):
        return env
    if not callable(env):
        raise UsageError(
            f"env is a {type(env).__name__} object, but a run needs many environments.",
            "Give its name, its class, or a function that makes one:  env=lambda: MyEnv(…)",
        )
    module, name = getattr(env, "__module__", None), getattr(env, "__qualname__", "")
    if module in sys.modules and name.isidentifier() and getattr(sys.modules[module], name, None) is env:
        return f"{module}:{name}"
    stem = "local/" + (re.sub(r"\W", "", name.rpartition(".")[2]) or type(env).__name__)
    names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    local = next(name for name in names if _registered.get(name, env) is env)
    register_env(local, env)
    return local


def registered_envs() -> Mapping[str, Factory]:
    """Return the functions registered in this process by `register_env`."""
    return MappingProxyType(_registered)


def factory_of(name: str) -> Factory | None:
    """Return the function that makes the environment; None for a Gymnasium id. Raises UnknownName, MissingExtra."""
    if name in _registered:
        return _registered[name]
    ours = _BUILTIN_MULTI_AGENT.get(name) or _BUILTIN_EXTERNAL.get(name)
    if ours is None and (":" not in name or _GYM_ID.match(name)):
        return None
    found = load_object(ours) if ours is not None else import_object(name, "environment", makes_environment)
    if not callable(found):
        raise UnknownName(f"{name!r} is a {type(found).__name__}, not a function or class that makes an environment.")
    factory: Factory = found
    return factory


def spec_of(name: str) -> gym.envs.registration.EnvSpec:
    """Return Gymnasium's spec of an id; `package:Name-v0` imports the package first. Raises UnknownName, MissingExtra."""
    module, _, gym_id = name.rpartition(":")
    if module:
        _import_package(module, name)
    if gym_id.startswith(_IMPORTS_CONFIG_PREFIX) and not trust.is_allowed(gym_id):
        raise trust.untrusted_error(gym_id, "environment", "it imports what env_config names")
    for prefix, plugin in _PLUGIN_MODULES.items():
        if gym_id.startswith(prefix):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(plugin)  # registers its environments
    try:
        return gym.spec(gym_id)
    except gym.error.Error as error:
        found = None if module else _spec_of_atari(name) or _spec_of_known_package(name)
        if found is not None:
            return found
        if not module:
            raise _unknown_env_error(name) from error
        theirs = [i for i, spec in gym.registry.items() if str(spec.entry_point).startswith(module.partition(".")[0])]
        hint = did_you_mean(gym_id, theirs) if theirs else "It registers no environments when it is imported."
        raise UnknownName(f"Importing {module!r} registers no environment {gym_id!r}.", hint) from error


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


def _spec_of_known_package(name: str) -> gym.envs.registration.EnvSpec | None:
    """Import the installed package that an id belongs to, and return its spec."""
    package = package_of_id(name)
    if package is None or not package.registers:
        return None
    try:
        import_module(package.module, f"{package.module}:{name}")
    except UnknownName:
        return None
    return gym.registry.get(name)


def _spec_of_atari(name: str) -> gym.envs.registration.EnvSpec | None:
    """Return the spec of an older Atari id, such as PongNoFrameskip-v4, which has no prefix."""
    if "/" in name or ":" in name:
        return None
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("ale_py")
        return gym.registry.get(name)
    return None


def _unknown_env_error(name: str) -> UnknownName | MissingExtra:
    known = [i for i in gym.registry if not i.startswith(_NOT_SUGGESTED)]
    family = name.split("/")[0]
    extra = _EXTRAS.get(family) or ("doom" if name.startswith("Vizdoom") else None)
    if extra and not any(i.startswith(family) for i in known):
        return MissingExtra(f"{name!r} is not installed.", f"pip install 'ludus[{extra}]'")
    stem, dash, version = name.rpartition("-v")
    if dash and version.isdigit() and (same := [i for i in known if i.rpartition("-v")[0] == stem]):
        newer = sorted(same, key=lambda i: int(i.rpartition("-v")[2]))[-2:]
        return UnknownName(f"There is no {name!r} in Gymnasium {gym.__version__}.", f"It has {' and '.join(newer)}.")
    if (package := package_of_id(name)) is not None:
        return _not_installed_error(name, package)
    hint = did_you_mean(name, [*known, *_BUILTIN_MULTI_AGENT, *_BUILTIN_EXTERNAL, *_registered, "external"])
    if not _GYM_ID.match(name) and ":" not in name:
        hint = (
            f"{hint} A name from register_env is known only where that was called; module:function is known everywhere.".strip()
        )
    return UnknownName(f"Unknown environment {name!r}.", hint)


def _not_installed_error(name: str, package: Package) -> UnknownName | MissingExtra:
    if not package.registers:
        return UnknownName(f"{name!r} is an environment of {package.install}.", package.advice)
    if importlib.util.find_spec(package.module.partition(".")[0]) is not None:
        return UnknownName(f"{package.install} is installed but registers no environment {name!r}.")
    return MissingExtra(
        f"{name!r} is an environment of {package.install}, which is not installed.", f"pip install {package.install}"
    )


def version_notice(name: str) -> str:
    """Return a notice if Gymnasium has a newer version of this id; otherwise an empty string."""
    if factory_of(name) is not None:
        return ""
    spec = spec_of(name)
    if spec.version is None or str(spec.entry_point).startswith("ale_py"):
        return ""  # the versions of Atari ids are different environments
    versions = [s for s in gym.registry.values() if (s.namespace, s.name) == (spec.namespace, spec.name)]
    newest = max(versions, key=lambda s: s.version or 0)
    if (newest.version or 0) <= spec.version:
        return ""
    limits = f" (episodes of up to {newest.max_episode_steps} steps instead of {spec.max_episode_steps})"
    differ = newest.max_episode_steps != spec.max_episode_steps
    return f"env: {name} is an old version, used as configured; the current one is {newest.id}{limits * differ}."


def makes_environment(found: Any, project: bool) -> bool:
    """Return whether a class is an environment, or a function declares one as its result (optional in the user's project)."""
    if isinstance(found, type):
        return _is_environment(found)
    if isinstance(found, functools.partial):
        return makes_environment(found.func, project)
    if not callable(found):
        return project  # the caller reports what it is instead
    returned = return_annotation(found)
    if returned in (None, Any, object):
        own = getattr(found, "__module__", None) or type(found).__module__
        return project and (own == "__main__" or trust.is_in_project(own))
    return any(_is_environment(typing.get_origin(each) or each) for each in (returned, *typing.get_args(returned)))


def return_annotation(function: Any) -> Any:
    """The type that a function declares as its result; None if there is none or it cannot be resolved."""
    try:
        return typing.get_type_hints(function).get("return")
    except Exception:  # unresolvable annotations raise any error
        return None


def _is_environment(kind: Any) -> bool:
    if not isinstance(kind, type):
        return False
    return issubclass(kind, (gym.Env, gym.vector.VectorEnv)) or all(callable(getattr(kind, m, None)) for m in ("reset", "step"))


def accepts(factory: Factory, keyword: str) -> bool:
    parameters = _parameters(factory)
    return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def makes_vector_env(factory: Factory) -> bool:
    return "num_envs" in _parameters(factory)


def call_factory(factory: Factory, config: Mapping[str, Any]) -> Any:
    """Make the environment, with `env_config` as keywords or as one mapping, whichever the function accepts."""
    return factory(dict(config)) if takes_mapping(factory, config) else factory(**config)


def takes_mapping(factory: Factory, config: Mapping[str, Any]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(_parameters(factory).values())
    if len(parameters) != 1 or parameters[0].kind not in positional or parameters[0].name in config:
        return False
    return parameters[0].name in _MAPPING_PARAMETERS or parameters[0].default is inspect.Parameter.empty


def _parameters(factory: Factory) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # no signature, for example of a C function
        return {}


for _name, (_one, _many) in _BUILTIN.items():
    if _name not in gym.registry:
        gym.register(_name, entry_point=_one, vector_entry_point=_many)
