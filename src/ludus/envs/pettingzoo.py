"""Environments with several agents: PettingZoo's parallel and turn-based (AEC) environments behind one interface.

A `MultiAgentMatch` returns the agents that act next with their observations, takes their actions and returns the result. It hides
whether agents act simultaneously or in turn, leave and return, and how dead agents are stepped.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import pkgutil
import sys
import typing
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np

from ludus.config.schema import PreprocessConfig
from ludus.core import spaces
from ludus.core.plugins import did_you_mean, load_object
from ludus.core.spaces import ACTION_MASK, MaskParser, SpaceParser
from ludus.core.tree import Tree
from ludus.core.types import Bools
from ludus.envs import registry
from ludus.envs.faults import close_quietly, construction_errors, environment_errors
from ludus.envs.matches import pettingzoo_atari
from ludus.envs.preprocessing import drop_parts, known_parts
from ludus.envs.wrappers import WrapperList, load_wrappers
from ludus.errors import ConfigError, EnvironmentFault, LudusError, MissingExtra, UnknownName
from ludus.process.screen_choice import EGL, XVFB, screen_choice

if TYPE_CHECKING:
    from ludus.envs.matches.vector_multi_agent import VectorMatches, VectorMultiAgentEnv

log = logging.getLogger(__name__)

_PETTINGZOO_FAMILIES = ("mpe2", "pettingzoo")
_MATCH_FAMILIES = {
    "godot_rl": "ludus.envs.godot_rl.match:GodotMatch",
    "openspiel": "ludus.envs.openspiel:OpenSpielMatch",
    "unity": "ludus.envs.unity.match:UnityMatch",
}
"""Families with their own kind of match: name → function (name, env_config, render_mode) that makes it.

A function `check_exists(name)` of it checks a name without an environment; the default is to make one.
"""

FAMILIES = (*_PETTINGZOO_FAMILIES, *_MATCH_FAMILIES)
"""First parts of the names of environments with several agents."""

_PETTINGZOO_PACKAGES = ("classic", "butterfly", "sisl", "atari")  # of PettingZoo's environments
MAX_IDLE_STEPS = 10_000  # consecutive steps without an acting agent before an error is raised
MAX_REWARD = 1e15  # squared sums of such rewards still fit into float32, in which losses are computed
_MAX_CACHED = 64
_multi_agent_cache: OrderedDict[tuple[Callable[..., Any], str], bool] = OrderedDict()
"""(function, config) → whether it makes a multi-agent environment."""


class Turn(NamedTuple):
    """An agent that acts now."""

    agent: str
    observation: Tree
    mask: Bools | None
    reward: float = 0.0
    """Reward since its last action."""


class Departure(NamedTuple):
    """An agent that no longer acts, at least for now."""

    agent: str
    reward: float
    """Reward since its last action."""
    terminated: bool
    truncated: bool
    observation: Tree | None = None
    """The final observation; None if the environment does not return it."""


class MatchStep(NamedTuple):
    """Result of a step: agents that have left, and agents that act next. Both empty: no agent acts in this step."""

    turns: Sequence[Turn] = ()
    departures: Sequence[Departure] = ()
    over: bool = False


@dataclass(frozen=True)
class AgentSpaces:
    """Spaces of one agent; `observation` is without the action mask."""

    observation: gym.Space[Any]
    action: gym.Space[Any]
    masked: bool


class MatchSpaces(Protocol):
    """The agents of an environment and their spaces."""

    @property
    def name(self) -> str: ...

    @property
    def agents(self) -> Mapping[str, AgentSpaces]:
        """All agents that may ever appear."""
        ...

    @property
    def state_space(self) -> gym.Space[Any] | None:
        """Space of the global state; None if the environment has none."""
        ...


class MultiAgentMatch(MatchSpaces, Protocol):
    """One environment with several agents, which plays episodes one after the other."""

    @property
    def late_rewards(self) -> int:
        """Number of rewards for agents that had left or not yet arrived; they belong to no action."""
        ...

    def reset(self, seed: int) -> MatchStep: ...

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        """Take the actions of all agents whose turn it is. Raises EnvironmentFault."""
        ...

    def truncate(self) -> Sequence[Departure]:
        """Leave the match before it is over, after a step; return the truncated departures of all agents that are in it."""
        ...

    def state(self) -> Tree:
        """The global state; only with a `state_space`."""
        ...

    def render(self) -> Any: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


class MatchWrapper:
    """A match around another one, which changes nothing. Base class."""

    def __init__(self, match: MultiAgentMatch) -> None:
        self.match, self.name = match, match.name
        self.agents: Mapping[str, AgentSpaces] = match.agents
        self.state_space = match.state_space

    @property
    def late_rewards(self) -> int:
        return self.match.late_rewards

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.match.metadata

    def reset(self, seed: int) -> MatchStep:
        return self.match.reset(seed)

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        return self.match.step(actions)

    def truncate(self) -> Sequence[Departure]:
        return self.match.truncate()

    def state(self) -> Tree:
        return self.match.state()

    def render(self) -> Any:
        return self.match.render()

    def close(self) -> None:
        self.match.close()


def take_statistics(match: MultiAgentMatch) -> dict[str, float]:
    """Numbers that the game has reported since the last call, by name; empty if it has no `take_statistics`."""
    while isinstance(match, MatchWrapper):
        match = match.match
    take = getattr(match, "take_statistics", None)
    return {} if take is None else take()


# -- finding and making -------------------------------------------------------------------------------------------------


def is_multi_agent(name: str, env_config: Mapping[str, Any] | None = None) -> bool:
    """Return whether the environment has several agents. A function without a declared result is called once to find out.

    Raises EnvironmentFault, MissingExtra if that fails.
    """
    if name.partition("/")[0] in FAMILIES:
        return True
    try:
        made = registry.factory_of(name)
    except LudusError:  # reported later by the code that makes the environment
        return False
    if made is None:
        return False
    declared = _declares_multi_agent(made)
    if declared is not None:
        return declared
    config = env_config or {}
    if registry.makes_vector_env(made) or not isinstance(config, Mapping):  # the validation rejects a config of another type
        return False
    cache_key = made, json.dumps(config, sort_keys=True, default=repr)
    if cache_key not in _multi_agent_cache:
        env = _build_env(name, made, config)
        try:
            multi_agent = hasattr(env, "possible_agents")
        finally:
            close_quietly(env)
        while len(_multi_agent_cache) >= _MAX_CACHED:
            _multi_agent_cache.popitem(last=False)
        _multi_agent_cache[cache_key] = multi_agent
    return _multi_agent_cache[cache_key]


def check_exists(name: str) -> None:
    """Raises UnknownName, MissingExtra."""
    if (family := name.partition("/")[0]) in _MATCH_FAMILIES:
        check = getattr(load_object(_MATCH_FAMILIES[family]), "check_exists", None)
        if check is None:
            close_quietly(make_match(name))
        else:
            check(name)
    else:
        _load_factory(name)


def make_match(
    name: str,
    env_config: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
    wrappers: WrapperList = (),
    preprocess: PreprocessConfig | None = None,
) -> MultiAgentMatch:
    """Make `mpe2/<name>`, `pettingzoo/<name>`, `openspiel/<name>`, `module:function` or a registered name, with `env_config` as keywords.

    PettingZoo's parallel version is preferred if both exist. Raises UnknownName, MissingExtra, EnvironmentFault; ConfigError for
    settings of `preprocess` that do not apply.
    """
    _provide_screen()
    match = _make_plain_match(name, env_config, render_mode, wrappers, (preprocess and preprocess.drop) or ())
    if preprocess is None:
        return match
    from ludus.envs.matches.preprocessing import preprocess_match

    with contextlib.ExitStack() as made:
        made.callback(close_quietly, match)
        wrapped = preprocess_match(match, preprocess)
        made.pop_all()
    return wrapped


def _provide_screen() -> None:
    if screen_choice() in (XVFB, EGL):
        from ludus.display import headless

        headless.provide_screen()


def _make_plain_match(
    name: str, env_config: Mapping[str, Any] | None, render_mode: str | None, wrappers: WrapperList, drop: Sequence[str]
) -> MultiAgentMatch:
    if (family := name.partition("/")[0]) in _MATCH_FAMILIES:
        for key, given in (("config.wrappers", wrappers), ("preprocess.drop", drop)):
            if given:
                raise ConfigError(f"{key} does not apply to {name}: it is for Gymnasium and PettingZoo.", "Leave it out.")
        own: MultiAgentMatch = load_object(_MATCH_FAMILIES[family])(name, dict(env_config or {}), render_mode)
        return own
    factory, config = _load_factory(name), dict(env_config or {})
    if makes_vector_matches(factory):
        from ludus.envs.matches.vector_multi_agent import SingleVectorMatch

        _check_unwrapped(name, wrappers, drop)
        if render_mode is not None and registry.accepts(factory, "render_mode"):
            config["render_mode"] = render_mode
        return SingleVectorMatch(_build_vector_env(name, factory, config, 1), name)
    if not os.environ.get("DISPLAY") and sys.platform.startswith("linux"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame would look for a display and complain
    if render_mode is not None and registry.accepts(factory, "render_mode"):
        config["render_mode"] = render_mode
    return match_of(_build_env(name, factory, config, wrappers), name, drop)


def makes_vector_matches(factory: Callable[..., Any]) -> bool:
    """Whether a class or function makes a VectorMultiAgentEnv: it declares so, and has a parameter `num_envs`."""
    return registry.makes_vector_env(factory) and _declares_multi_agent(factory) is True


def make_vector_matches(
    name: str,
    count: int,
    env_config: Mapping[str, Any] | None = None,
    wrappers: WrapperList = (),
    preprocess: PreprocessConfig | None = None,
) -> VectorMatches | None:
    """Make an environment that steps `count` matches with one call; None if `name` is not one, or is preprocessed match by match.

    Raises like `make_match`.
    """
    from ludus.envs.matches.vector_multi_agent import VectorMatches
    from ludus.envs.preprocessing import is_plain

    if name.partition("/")[0] in FAMILIES:
        return None
    _provide_screen()
    factory = _load_factory(name)
    if not makes_vector_matches(factory):
        return None
    _check_unwrapped(name, wrappers, (preprocess and preprocess.drop) or ())
    if preprocess is not None and not is_plain(preprocess):
        return None
    return VectorMatches(_build_vector_env(name, factory, dict(env_config or {}), count), name)


def _check_unwrapped(name: str, wrappers: WrapperList, drop: Sequence[str]) -> None:
    for key, given in (("config.wrappers", wrappers), ("config.preprocess.drop", drop)):
        if given:
            raise ConfigError(
                f"{key} do not apply to {name}, which steps many matches as arrays.", "Change the arrays in its class."
            )


def _build_vector_env(name: str, factory: Callable[..., Any], config: Mapping[str, Any], count: int) -> VectorMultiAgentEnv:
    from ludus.envs.matches.vector_multi_agent import VectorMultiAgentEnv

    with construction_errors(name):
        env = factory(num_envs=count, **config)
    if not isinstance(env, VectorMultiAgentEnv) or env.num_envs != count:
        made = f"one of {env.num_envs} matches" if isinstance(env, VectorMultiAgentEnv) else f"a {type(env).__name__}"
        close_quietly(env)
        raise EnvironmentFault(f"{name} made {made} where a VectorMultiAgentEnv of {count} was asked for.", "Check its num_envs.")
    return env


def _build_env(name: str, factory: Callable[..., Any], config: Mapping[str, Any], wrappers: WrapperList = ()) -> Any:
    with construction_errors(name, "pettingzoo"):
        env = registry.call_factory(factory, config)
        if name.partition("/")[0] in _PETTINGZOO_FAMILIES:
            from ludus.envs.matches.unchecked_pettingzoo import without_checks

            env = without_checks(env)
        for wrapper in load_wrappers(wrappers)[0]:
            env = wrapper.wrap(env, multi_agent=True)
        return env


def match_of(env: Any, name: str, drop: Sequence[str] = ()) -> MultiAgentMatch:
    """Wrap an existing environment. `drop`: parts of Dict observations to remove, which may be of any space."""
    if not getattr(env, "possible_agents", None):
        raise EnvironmentFault(
            f"{name} made a {type(env).__name__} without possible_agents.",
            "List there all agents that may ever appear, as strings.",
        )
    takes_turns = hasattr(env, "agent_iter") and hasattr(env, "last")
    return AECMatch(env, name, drop) if takes_turns else ParallelMatch(env, name, drop)


def _load_factory(name: str) -> Callable[..., Any]:
    family, _, rest = name.partition("/")
    if family not in _PETTINGZOO_FAMILIES:
        found = registry.factory_of(name)
        if found is None:
            raise UnknownName(
                f"{name!r} is not an environment with several agents.",
                "Use mpe2/…, pettingzoo/…, openspiel/… or module:function.",
            )
        return found
    try:
        importlib.import_module(family)
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{name!r} is not installed.", "pip install 'ludus[pettingzoo]'") from error
    packages = ["mpe2"] if family == "mpe2" else [f"pettingzoo.{package}" for package in _PETTINGZOO_PACKAGES]
    known = {module: package for package in packages for module in _modules(package)}
    if rest not in known:
        raise UnknownName(f"Unknown environment {name!r}.", did_you_mean(name, [f"{family}/{module}" for module in known]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # PettingZoo is changing how it names its environments
            module = importlib.import_module(f"{known[rest]}.{rest}")
    except ImportError as error:
        extra = pettingzoo_atari.EXTRA if known[rest] == pettingzoo_atari.PACKAGE else "pettingzoo"
        raise MissingExtra(f"{name} needs more packages: {error}.", f"pip install 'ludus[{extra}]'") from error
    made: Callable[..., Any] = getattr(module, "parallel_env", None) or module.env
    return pettingzoo_atari.with_roms(made, name) if known[rest] == pettingzoo_atari.PACKAGE else made


def _modules(package_name: str) -> list[str]:
    """Return the names of environment modules, which end in their version."""
    try:
        package = importlib.import_module(package_name)
    except ImportError:
        return []
    found = [info.name for info in pkgutil.iter_modules(package.__path__)]
    return [name for name in found if name.rpartition("_v")[2].isdigit()]


def _declares_multi_agent(made: Any) -> bool | None:
    """Return what a class or the return annotation of a function declares; None if nothing."""
    kind = made
    if not isinstance(made, type):
        declared = registry.return_annotation(made)
        kind = typing.get_origin(declared) or declared
    if not isinstance(kind, type) or kind is object:
        return None
    if issubclass(kind, (gym.Env, gym.vector.VectorEnv)):
        return False
    vector = sys.modules.get("ludus.envs.matches.vector_multi_agent")  # imported if anything inherits from it
    if vector is not None and issubclass(kind, vector.VectorMultiAgentEnv):
        return True
    pettingzoo = sys.modules.get("pettingzoo")
    bases = () if pettingzoo is None else (pettingzoo.ParallelEnv, pettingzoo.AECEnv)
    return True if issubclass(kind, bases) or hasattr(kind, "possible_agents") else None


# -- random actions ------------------------------------------------------------------------------------


def sample_action(space: gym.Space[Any], mask: Bools | None, random: np.random.Generator) -> Tree:
    """Sample an action as the environment takes it, uniformly over the allowed options. `mask` is flat.

    For an unbounded Box the number is normal around 0; with a single bound it is exponential from that bound.
    """
    if isinstance(space, gym.spaces.Dict):
        keys = sorted(space.spaces)
        return dict(zip(keys, _sample_parts([space.spaces[key] for key in keys], mask, random), strict=True))
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_sample_parts(space.spaces, mask, random))
    if isinstance(space, gym.spaces.Discrete):
        return np.asarray(space.start + _sample_option(int(space.n), mask, random), space.dtype)
    if isinstance(space, gym.spaces.MultiDiscrete):
        sizes = space.nvec.reshape(-1).tolist()
        parts = [None] * len(sizes) if mask is None else np.split(mask, np.cumsum(sizes)[:-1])
        chosen = [_sample_option(size, part, random) for size, part in zip(sizes, parts, strict=True)]
        return (np.array(chosen).reshape(space.nvec.shape) + space.start).astype(space.dtype)
    if isinstance(space, gym.spaces.MultiBinary):
        bits = random.integers(2, size=space.shape, dtype=np.int8)
        return bits if mask is None else bits * mask.reshape(bits.shape).astype(np.int8)
    assert isinstance(space, gym.spaces.Box)  # other spaces are not supported by any policy
    return _sample_box(space, random)


def _sample_parts(parts: Sequence[gym.Space[Any]], mask: Bools | None, random: np.random.Generator) -> list[Tree]:
    ends = np.cumsum([spaces.mask_size(part) for part in parts])[:-1]
    masks = [None] * len(parts) if mask is None else np.split(mask, ends)
    return [sample_action(part, own, random) for part, own in zip(parts, masks, strict=True)]


def _sample_option(n: int, mask: Bools | None, random: np.random.Generator) -> int:
    return int(random.integers(n) if mask is None else random.choice(np.flatnonzero(mask)))


def _sample_box(space: gym.spaces.Box, random: np.random.Generator) -> Tree:
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    below, above = np.isfinite(low), np.isfinite(high)
    part, beyond = random.random(space.shape), random.exponential(size=space.shape)
    drawn = random.normal(size=space.shape)
    with np.errstate(invalid="ignore"):  # unbounded entries are not taken from here
        drawn = np.where(below & above, low * (1 - part) + high * part, drawn)
    drawn = np.where(below & ~above, low + beyond, drawn)
    drawn = np.where(above & ~below, high - beyond, drawn)
    return np.clip(drawn.astype(space.dtype), space.low, space.high)  # rounding may leave the bounds


# -- shared by both kinds ----------------------------------------------------------------------------------------------


class _AgentTable:
    """The agents of an environment with their spaces; validates observations and rewards."""

    def __init__(self, env: Any, name: str, drop: Sequence[str]) -> None:
        self.name, self.env = name, env
        named = list(env.possible_agents)
        if len(set(map(str, named))) < len(named):
            raise EnvironmentFault(f"{name} names an agent twice in possible_agents: {', '.join(map(str, named))}.")
        self.originals = {str(agent): agent for agent in named}
        """Agent name → the environment's own id, which need not be a string."""
        self.spaces: dict[str, AgentSpaces] = {}
        self._fit: dict[str, SpaceParser] = {}
        self._keep: dict[str, Callable[[Any], Any]] = {}
        unknown = set(drop)
        self._masks: dict[str, MaskParser] = {}
        for agent, own in self.originals.items():
            with environment_errors(name, "observation_space or action_space", 0):
                observation, action = env.observation_space(own), env.action_space(own)
            plain, mask = spaces.split_mask(observation)
            own_parts = [part for part in drop if part in known_parts(plain)]
            if own_parts:
                plain, self._keep[agent] = drop_parts(plain, own_parts, f"{agent!r} of {name}")
                unknown -= set(own_parts)
            self.spaces[agent] = AgentSpaces(plain, action, mask is not None)
            self._fit[agent] = SpaceParser(plain, f"the observation of {agent}")
            self._masks[agent] = MaskParser(action)
        if unknown:
            raise ConfigError(
                f"preprocess.drop: the observation of no agent of {name} has a part {min(unknown)!r}.",
                "Name parts of Dict observations; a nested part is written outer.inner.",
            )
        self.late_rewards = 0
        self.steps = 0
        self._present: tuple[list[Any], list[str]] = [], []  # as the environment lists them, and their names

    def check_known(self, agent: Any) -> str:
        named = str(agent)
        if named not in self.originals:
            raise EnvironmentFault(
                f"The agent {named!r} of {self.name} appeared at step {self.steps} but is not one of its possible_agents "
                f"({', '.join(self.originals)}).",
                "List there all agents that may ever appear: each needs a policy before the run starts.",
            )
        return named

    def names_of(self, agents: Sequence[Any]) -> list[str]:
        """Names of the agents that are in the match now, as the environment lists them."""
        if agents != self._present[0]:
            self._present = list(agents), [self.check_known(agent) for agent in agents]
        return self._present[1]

    def read_observation(self, agent: str, observation: Any, info: Any, *, acts: bool = True) -> tuple[Tree, Bools | None]:
        """Raises EnvironmentFault when it does not fit the space that was declared."""
        own = self.spaces[agent]
        given = info.get(ACTION_MASK) if info.__class__ is dict or isinstance(info, Mapping) else None
        try:
            if own.masked:
                given = observation[ACTION_MASK]
                observation = spaces.without_mask(observation, not isinstance(own.observation, gym.spaces.Dict))
            if agent in self._keep:
                observation = self._keep[agent](observation)
            mask = None if given is None or not acts else self._masks[agent](given)
            fitting = self._fit[agent](observation)
        except (ValueError, TypeError, KeyError, ConfigError) as error:
            raise EnvironmentFault(f"{self.name} at step {self.steps}, agent {agent!r}: {_error_text(error)}") from error
        if mask is not None:
            for part in self._masks[agent].choices:
                if b"\1" not in mask[part].tobytes():  # faster than any() of a few options
                    raise EnvironmentFault(
                        f"{self.name} forbids every action of {agent!r} in its action_mask (options {part.start} to "
                        f"{part.stop - 1}) at step {self.steps}.",
                        "Leave at least one option of every choice allowed.",
                    )
        return fitting, mask

    def reward(self, agent: str, given: Any) -> float:
        try:
            reward = float(given)
        except (TypeError, ValueError):
            reward = np.nan
        if not abs(reward) <= MAX_REWARD:  # also rejects NaN
            raise EnvironmentFault(f"{self.name} gave {agent!r} the reward {given} at step {self.steps}.")
        return reward

    def state_space(self) -> gym.Space[Any] | None:
        found = getattr(self.env, "state_space", None)
        if found is None:
            found = getattr(getattr(self.env, "unwrapped", None), "state_space", None)
        return found if isinstance(found, gym.Space) else None


def _error_text(error: Exception) -> str:
    text = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return text if text.endswith(".") else f"{text}."


class _MatchBase:
    """The parts of a match that do not depend on the order of actions."""

    def __init__(self, env: Any, name: str, drop: Sequence[str] = ()) -> None:
        self.name, self._env = name, env
        self._agents = _AgentTable(env, name, drop)
        self.agents: Mapping[str, AgentSpaces] = self._agents.spaces
        self.state_space = self._agents.state_space()
        self._state_fit = None if self.state_space is None else SpaceParser(self.state_space, "state()")
        self._playing: dict[str, bool] = {}  # agent → whether it has acted since it arrived
        self._pending_rewards: dict[str, float] = {}  # agent → rewards since its last action
        self._idle = 0

    @property
    def late_rewards(self) -> int:
        return self._agents.late_rewards

    @property
    def metadata(self) -> Mapping[str, Any]:
        return getattr(self._env, "metadata", None) or {}

    def state(self) -> Tree:
        assert self._state_fit is not None
        with environment_errors(self.name, "state", self._agents.steps):
            whole = self._env.state()
        try:
            return self._state_fit(whole)
        except ValueError as error:
            raise EnvironmentFault(f"{self.name} at step {self._agents.steps}: {_error_text(error)}") from error

    def render(self) -> Any:
        with environment_errors(self.name, "render", self._agents.steps):
            return self._env.render()

    def close(self) -> None:
        self._env.close()

    def _begin(self) -> None:
        self._playing.clear()
        self._pending_rewards.clear()
        self._idle = 0

    def _turn(self, agent: str, observed: tuple[Tree, Bools | None]) -> Turn:
        self._playing.setdefault(agent, False)
        return Turn(agent, *observed, self._pending_rewards.pop(agent, 0.0))

    def _leave(
        self, agent: str, terminated: bool = False, truncated: bool = False, observation: Any = None, info: Any = None
    ) -> Departure:
        reward, last = self._pending_rewards.pop(agent, 0.0), None
        if observation is not None and not terminated:
            last = self._agents.read_observation(agent, observation, info, acts=False)[0]
        if not self._playing.pop(agent, False) and reward:  # it never acted: the reward belongs to no action
            self._agents.late_rewards += 1
        return Departure(agent, reward, bool(terminated), bool(truncated and not terminated), last)

    def truncate(self) -> Sequence[Departure]:
        return [self._leave(agent, truncated=True) for agent in list(self._playing)]

    def _register_actions(self, actions: Mapping[str, Any]) -> dict[Any, Any]:
        self._agents.steps += 1
        for agent in actions:
            self._playing[agent] = True
        return {self._agents.originals[agent]: action for agent, action in actions.items()}

    def _check_idle(self, step: MatchStep) -> MatchStep:
        self._idle = 0 if step.turns or step.over else self._idle + 1
        if self._idle > MAX_IDLE_STEPS:
            raise EnvironmentFault(f"No agent of {self.name} has acted for {MAX_IDLE_STEPS} steps, and its episode is not over.")
        return step


# -- simultaneous --------------------------------------------------------------------------------------------------------


class ParallelMatch(_MatchBase):
    """All agents with an observation act at once. A present agent without one waits; its rewards accumulate."""

    def reset(self, seed: int) -> MatchStep:
        self._begin()
        with environment_errors(self.name, "reset", self._agents.steps):
            observations, infos = self._env.reset(seed=seed)
        present = self._agents.names_of(self._env.agents)
        return self._check_idle(MatchStep(self._turns(present, observations, infos), over=not present))

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        taken = self._register_actions(actions)
        with environment_errors(self.name, "step", self._agents.steps):
            observations, rewards, terminations, truncations, infos = self._env.step(taken)
        present = self._agents.names_of(self._env.agents)
        for own, given in rewards.items():
            agent = self._agents.check_known(own)
            reward = self._agents.reward(agent, given)
            if agent in self._playing:
                self._pending_rewards[agent] = self._pending_rewards.get(agent, 0.0) + reward
            elif reward:
                self._agents.late_rewards += 1
        departures = []
        for agent in list(self._playing):
            own = self._agents.originals[agent]
            terminated, truncated = bool(terminations.get(own, False)), bool(truncations.get(own, False))
            if terminated or truncated or agent not in present:
                departures.append(self._leave(agent, terminated, truncated, observations.get(own), infos.get(own)))
        gone = {left.agent for left in departures if left.terminated or left.truncated}
        turns = self._turns([agent for agent in present if agent not in gone], observations, infos)
        return self._check_idle(MatchStep(turns, departures, over=not set(present) - gone))

    def _turns(self, present: Sequence[str], observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> list[Turn]:
        turns = []
        for agent in present:
            own = self._agents.originals[agent]
            if own in observations and observations[own] is not None:
                turns.append(self._turn(agent, self._agents.read_observation(agent, observations[own], infos.get(own))))
        return turns


# -- turn-based ------------------------------------------------------------------------------------------------


class AECMatch(_MatchBase):
    """Agents act one after the other; dead agents are stepped with None, as AEC requires."""

    def __init__(self, env: Any, name: str, drop: Sequence[str] = ()) -> None:
        super().__init__(env, name, drop)
        self._state = _AECState(env)

    def reset(self, seed: int) -> MatchStep:
        self._begin()
        with environment_errors(self.name, "reset", self._agents.steps):
            self._env.reset(seed=seed)
        return self._check_idle(self._next())

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        ((agent, action),) = actions.items()
        self._agents.steps += 1
        self._playing[agent] = True
        with environment_errors(self.name, "step", self._agents.steps):
            self._env.step(action)
        return self._check_idle(self._next())

    def truncate(self) -> Sequence[Departure]:
        """Agents that wait for their turn leave with what they would observe and have earned since their last action."""
        departures = []
        for agent in list(self._agents.names_of(self._env.agents)):
            own = self._agents.originals[agent]
            with environment_errors(self.name, "observe", self._agents.steps):
                observation, earned = self._env.observe(own), self._env._cumulative_rewards.get(own, 0.0)
                terminated = bool(self._env.terminations.get(own, False))  # it would have left at its next turn
            self._pending_rewards[agent] = self._agents.reward(agent, earned)
            departures.append(self._leave(agent, terminated, truncated=True, observation=observation))
        return departures

    def _next(self) -> MatchStep:
        departures: list[Departure] = []
        for _ in range(MAX_IDLE_STEPS):
            present = self._agents.names_of(self._state.home.agents)
            # Agents that disappeared without ending their episode: the outcome of their last action is unknown.
            departures += [self._leave(agent) for agent in list(self._playing) if agent not in present]
            if not present:
                return MatchStep((), departures, over=True)
            with environment_errors(self.name, "last", self._agents.steps):
                own, observation, reward, terminated, truncated, info = self._state.last()
            agent = self._agents.check_known(own)
            self._pending_rewards[agent] = self._agents.reward(agent, reward)  # AEC accumulates since the last action itself
            if not (terminated or truncated):
                return MatchStep([self._turn(agent, self._agents.read_observation(agent, observation, info))], departures)
            departures.append(self._leave(agent, terminated, truncated, observation, info))
            with environment_errors(self.name, "step", self._agents.steps):
                self._env.step(None)
        raise EnvironmentFault(f"{self.name} has dead agents that are never removed: {self._env.agents}.")


class _AECState:
    """Reads the attributes of a turn-based environment where they are stored.

    A wrapper of PettingZoo passes them on one by one, by a failed lookup each; in small games that takes as long as a step.
    """

    _NAMES = frozenset({"agents", "agent_selection", "terminations", "truncations", "infos", "_cumulative_rewards"})

    def __init__(self, env: Any) -> None:
        self._env = env
        base = sys.modules.get("pettingzoo.utils.wrappers.base")
        self._wrapper: Any = () if base is None else base.BaseWrapper
        aec = sys.modules.get("pettingzoo.utils.env")
        self._reads_plainly = aec is not None and getattr(type(env), "last", None) is aec.AECEnv.last
        self._passed: list[tuple[dict[str, Any], int]] = []  # attributes of the wrappers outside `_home`, and their number
        self._home = self._find_home()

    def _find_home(self) -> Any:
        home, self._passed = self._env, []
        while isinstance(home, self._wrapper) and self._passes_on(home):
            self._passed.append((vars(home), len(vars(home))))
            home = home.env
        return home

    def _passes_on(self, wrapper: Any) -> bool:
        if type(wrapper).__getattr__ is not self._wrapper.__getattr__ or self._NAMES & vars(wrapper).keys():
            return False
        return not any(self._NAMES & vars(kind).keys() for kind in type(wrapper).__mro__)

    @property
    def home(self) -> Any:
        """The environment or wrapper that has the attributes."""
        for attributes, number in self._passed:
            if len(attributes) != number:  # a wrapper may have begun to set its own
                self._home = self._find_home()
                break
        return self._home

    def last(self) -> tuple[Any, Any, Any, Any, Any, Any]:
        """The agent that is selected, and `last()` of the environment."""
        home = self.home
        agent = home.agent_selection
        if not self._reads_plainly:
            return agent, *self._env.last()
        observation = self._env.observe(agent)
        return (
            agent,
            observation,
            home._cumulative_rewards[agent],
            home.terminations[agent],
            home.truncations[agent],
            home.infos[agent],
        )


# -- the state of a centralised critic ------------------------------------------------------------------------------------------------------


class CentralState:
    """Input of a centralised critic in addition to the agent's observation: the global state, and which agent it is for.

    The state is the environment's own if it has one; otherwise the concatenated last observations of all possible agents, with zeros
    for absent ones.
    """

    def __init__(self, agents: Mapping[str, AgentSpaces], state_space: gym.Space[Any] | None) -> None:
        self._own = state_space is not None
        self._slices: dict[str, tuple[slice, gym.Space[Any]]] = {}
        at = 0
        for agent, own in agents.items():
            size = gym.spaces.utils.flatdim(own.observation)
            self._slices[agent] = slice(at, at + size), own.observation
            at += size
        self._all = np.zeros(at, np.float32)
        seen = gym.spaces.Box(-np.inf, np.inf, (at,), np.float32) if state_space is None else state_space
        self.space = gym.spaces.Dict({"agent": gym.spaces.Box(0.0, 1.0, (len(agents),), np.float32), "seen": seen})
        self._marks = dict(zip(agents, np.eye(len(agents), dtype=np.float32), strict=True))

    def reset(self) -> None:
        self._all[:] = 0.0

    def update(self, step: MatchStep) -> None:
        """Add the current observations; departing agents are included, so that their last observation can be valued."""
        if self._own:
            return
        present: list[Departure | Turn] = [*step.departures, *step.turns]
        for one in present:
            if one.observation is not None:
                place, space = self._slices[one.agent]
                self._all[place] = np.asarray(gym.spaces.utils.flatten(space, one.observation), np.float32)

    def remove_departed(self, step: MatchStep) -> None:
        """Zero the observations of agents that have left."""
        present = {turn.agent for turn in step.turns}
        for left in step.departures:
            if left.agent not in present:
                self._all[self._slices[left.agent][0]] = 0.0

    def shared_state(self, match: MultiAgentMatch) -> Tree:
        """The part that is the same for all agents at this moment."""
        return match.state() if self._own else self._all.copy()

    def combine(self, agent: str, observation: Tree, shared: Tree) -> Tree:
        return {"observation": observation, "state": {"agent": self._marks[agent], "seen": shared}}


def network_spaces(match: MatchSpaces, agent: str, *, central: bool) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """Observation and action space of the network that plays an agent. `central`: with the input of a centralised critic."""
    own = match.agents[agent]
    if not central:
        return own.observation, own.action
    return central_space(own.observation, CentralState(match.agents, match.state_space).space), own.action


def central_space(own: gym.Space[Any], whole: gym.Space[Any]) -> gym.spaces.Dict:
    """Space of the observations recorded for a centralised critic; the policy sees only `observation`."""
    return gym.spaces.Dict({"observation": own, "state": whole})
