"""Environments with several agents: PettingZoo's parallel and turn-taking (AEC) ones, found by name and played through one form.

A `Match` says who is to act and what each sees; it takes their actions and says what came of them. Whether agents move at once or
in turns, leave and come back, and how the dead are stepped, is hidden here.
"""

from __future__ import annotations

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
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from ludus.core import spaces
from ludus.core.plugins import did_you_mean
from ludus.core.spaces import ACTION_MASK, SpaceParser
from ludus.core.tree import Tree
from ludus.core.types import Bools
from ludus.envs import registry
from ludus.envs.vector_env import translated
from ludus.envs.wrappers import Named, wrappers_of
from ludus.errors import ConfigError, EnvironmentFault, LudusError, MissingExtra, UnknownName, user_frame

log = logging.getLogger(__name__)

FAMILIES = ("mpe2", "pettingzoo")
"""First parts of the names of such environments."""

_ROOMS = ("classic", "butterfly", "sisl", "atari")  # of pettingzoo
_IDLE = 10_000  # steps in a row in which nobody acts, before we believe that nobody ever will
_LARGEST = 1e15  # of a reward: squares of what such numbers add up to still fit into the float32 in which losses are computed


_REMEMBERED = 64
_several: OrderedDict[tuple[Callable[..., Any], str], bool] = (
    OrderedDict()
)  # what functions were found to make, with which config


@dataclass(frozen=True)
class Turn:
    """An agent that is to act now."""

    agent: str
    observation: Tree
    mask: Bools | None
    reward: float = 0.0
    """Since its last action."""


@dataclass(frozen=True)
class Leaving:
    """An agent that does not act any more, at least for now."""

    agent: str
    reward: float
    """Since its last action."""
    terminated: bool
    truncated: bool
    observation: Tree | None = None
    """The last one; None when it was not shown."""


@dataclass(frozen=True)
class Moved:
    """What became of a match: who has left, and who is to act. With neither: nobody acts in this step, and time goes on."""

    turns: Sequence[Turn] = ()
    leaving: Sequence[Leaving] = ()
    over: bool = False


@dataclass(frozen=True)
class AgentSpaces:
    """What one agent sees and does; `observation` is without the mask."""

    observation: gym.Space[Any]
    action: gym.Space[Any]
    masked: bool


class Match(Protocol):
    """One environment with several agents, one episode after the other."""

    name: str
    agents: Mapping[str, AgentSpaces]
    """All that may ever appear."""
    state_space: gym.Space[Any] | None
    """Of `state`, if the environment has a view of the whole."""

    @property
    def late_rewards(self) -> int:
        """Rewards for agents that had left, or had not come yet: they belong to no action."""
        ...

    def reset(self, seed: int) -> Moved: ...

    def step(self, actions: Mapping[str, Any]) -> Moved:
        """Actions of all whose turn it is, as the environment takes them. Raises EnvironmentFault."""
        ...

    def state(self) -> Tree:
        """The whole, as the environment shows it; where there is a `state_space`."""
        ...

    def render(self) -> Any: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


# -- finding and making -------------------------------------------------------------------------------------------------


def is_multi_agent(name: str, env_config: Mapping[str, Any] | None = None) -> bool:
    """Whether this is an environment with several agents. A function whose result is not declared is called to find out, once.

    Raises EnvironmentFault, MissingExtra when that fails.
    """
    if name.partition("/")[0] in FAMILIES:
        return True
    try:
        made = registry.factory_of(name)
    except LudusError:  # others say so
        return False
    if made is None:
        return False
    declared = _declared(made)
    if declared is not None:
        return declared
    config = env_config or {}
    if registry.makes_vectors(made) or not isinstance(config, Mapping):  # what is no mapping is refused by others
        return False
    asked = made, json.dumps(config, sort_keys=True, default=repr)
    if asked not in _several:
        env = _called(name, made, config)
        try:
            several = hasattr(env, "possible_agents")
        finally:
            _closed(env)
        while len(_several) >= _REMEMBERED:
            _several.popitem(last=False)
        _several[asked] = several
    return _several[asked]


def check_exists(name: str) -> None:
    """Raises UnknownName, MissingExtra."""
    _factory(name)


def make_match(
    name: str,
    env_config: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
    wrappers: Named = (),
) -> Match:
    """`mpe2/<name>`, `pettingzoo/<name>`, `module:function` or a registered name, with `env_config` as keywords; parallel where there is both.

    Raises UnknownName, MissingExtra, EnvironmentFault.
    """
    factory, config = _factory(name), dict(env_config or {})
    if not os.environ.get("DISPLAY") and sys.platform.startswith("linux"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame would look for a screen, and complain
    if render_mode is not None and registry.takes(factory, "render_mode"):
        config["render_mode"] = render_mode
    return match_of(_called(name, factory, config, wrappers), name)


def _called(name: str, factory: Callable[..., Any], config: Mapping[str, Any], wrappers: Named = ()) -> Any:
    try:
        env = registry.called(factory, config)
        for wrapper in wrappers_of(wrappers)[0]:
            env = wrapper.around(env, several=True)
    except LudusError:
        raise
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{name} needs more packages: {error}.", "pip install 'ludus[pettingzoo]'") from error
    except TypeError as error:
        raise EnvironmentFault(f"{name} could not be made: {error}{user_frame(error)}.", "Check config.env_config.") from error
    except Exception as error:
        raise EnvironmentFault(f"{name} raised {type(error).__name__} while it was made: {error}{user_frame(error)}.") from error
    return env


def match_of(env: Any, name: str) -> Match:
    """An environment that was made already."""
    if not getattr(env, "possible_agents", None):
        raise EnvironmentFault(
            f"{name} made a {type(env).__name__} without possible_agents.",
            "Name there all agents that may ever appear, as strings.",
        )
    takes_turns = hasattr(env, "agent_iter") and hasattr(env, "last")
    return TurnMatch(env, name) if takes_turns else ParallelMatch(env, name)


def _factory(name: str) -> Callable[..., Any]:
    family, _, rest = name.partition("/")
    if family not in FAMILIES:
        found = registry.factory_of(name)
        if found is None:
            raise UnknownName(
                f"{name!r} is not an environment with several agents.", "Use mpe2/…, pettingzoo/… or module:function."
            )
        return found
    try:
        importlib.import_module(family)
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{name!r} is not installed.", "pip install 'ludus[pettingzoo]'") from error
    places = ["mpe2"] if family == "mpe2" else [f"pettingzoo.{room}" for room in _ROOMS]
    known = {found: place for place in places for found in _modules(place)}
    if rest not in known:
        raise UnknownName(f"Unknown environment {name!r}.", did_you_mean(name, [f"{family}/{found}" for found in known]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # PettingZoo is changing how it names its environments
            module = importlib.import_module(f"{known[rest]}.{rest}")
    except ImportError as error:
        raise MissingExtra(f"{name} needs more packages: {error}.", "pip install 'ludus[pettingzoo]'") from error
    made: Callable[..., Any] = getattr(module, "parallel_env", None) or module.env
    return made


def _modules(place: str) -> list[str]:
    """Names of environments, which end in their version."""
    try:
        package = importlib.import_module(place)
    except ImportError:
        return []
    found = [info.name for info in pkgutil.iter_modules(package.__path__)]
    return [name for name in found if name.rpartition("_v")[2].isdigit()]


def _declared(made: Any) -> bool | None:
    """What a class or the annotation of a function says; None: nothing."""
    kind = made
    if not isinstance(made, type):
        try:
            kind = typing.get_type_hints(made).get("return")
        except Exception:  # an annotation that cannot be read says nothing
            return None
        kind = typing.get_origin(kind) or kind
    if not isinstance(kind, type) or kind is object:
        return None
    if issubclass(kind, (gym.Env, gym.vector.VectorEnv)):
        return False
    pettingzoo = sys.modules.get("pettingzoo")
    bases = () if pettingzoo is None else (pettingzoo.ParallelEnv, pettingzoo.AECEnv)
    return True if issubclass(kind, bases) or hasattr(kind, "possible_agents") else None


def _closed(env: Any) -> None:
    try:
        env.close()
    except Exception:  # it was made only to be looked at
        log.debug("closing an environment failed", exc_info=True)


# -- acting without knowing anything ------------------------------------------------------------------------------------


def at_random(space: gym.Space[Any], mask: Bools | None, random: np.random.Generator) -> Tree:
    """An action as the environment takes it; all that is allowed is equally likely. `mask` is flat, as everywhere.

    A Box has no equal chances where it has no bounds: there a number is normal around 0, or exponential from its only bound.
    """
    if isinstance(space, gym.spaces.Dict):
        keys = sorted(space.spaces)
        return dict(zip(keys, _parts_at_random([space.spaces[key] for key in keys], mask, random), strict=True))
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_parts_at_random(space.spaces, mask, random))
    if isinstance(space, gym.spaces.Discrete):
        return np.asarray(space.start + _option(int(space.n), mask, random), space.dtype)
    if isinstance(space, gym.spaces.MultiDiscrete):
        sizes = space.nvec.reshape(-1).tolist()
        parts = [None] * len(sizes) if mask is None else np.split(mask, np.cumsum(sizes)[:-1])
        chosen = [_option(size, part, random) for size, part in zip(sizes, parts, strict=True)]
        return (np.array(chosen).reshape(space.nvec.shape) + space.start).astype(space.dtype)
    if isinstance(space, gym.spaces.MultiBinary):
        bits = random.integers(2, size=space.shape, dtype=np.int8)
        return bits if mask is None else bits * mask.reshape(bits.shape).astype(np.int8)
    assert isinstance(space, gym.spaces.Box)  # other actions have no policy
    return _inside(space, random)


def _parts_at_random(parts: Sequence[gym.Space[Any]], mask: Bools | None, random: np.random.Generator) -> list[Tree]:
    ends = np.cumsum([spaces.mask_size(part) for part in parts])[:-1]
    masks = [None] * len(parts) if mask is None else np.split(mask, ends)
    return [at_random(part, own, random) for part, own in zip(parts, masks, strict=True)]


def _option(n: int, mask: Bools | None, random: np.random.Generator) -> int:
    return int(random.integers(n) if mask is None else random.choice(np.flatnonzero(mask)))


def _inside(space: gym.spaces.Box, random: np.random.Generator) -> Tree:
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    below, above = np.isfinite(low), np.isfinite(high)
    part, beyond = random.random(space.shape), random.exponential(size=space.shape)
    drawn = random.normal(size=space.shape)
    with np.errstate(invalid="ignore"):  # what has no bounds is not taken from here
        drawn = np.where(below & above, low * (1 - part) + high * part, drawn)
    drawn = np.where(below & ~above, low + beyond, drawn)
    drawn = np.where(above & ~below, high - beyond, drawn)
    return np.clip(drawn.astype(space.dtype), space.low, space.high)  # rounding may leave the bounds


# -- what both kinds share ----------------------------------------------------------------------------------------------


class _Agents:
    """The agents of an environment: their spaces, and whatever is said of them, checked."""

    def __init__(self, env: Any, name: str) -> None:
        self.name, self.env = name, env
        named = list(env.possible_agents)
        if len(set(map(str, named))) < len(named):
            raise EnvironmentFault(f"{name} names an agent twice in possible_agents: {', '.join(map(str, named))}.")
        self.of = {str(agent): agent for agent in named}
        """Agents may be numbered; everywhere else they have names."""
        self.spaces: dict[str, AgentSpaces] = {}
        self._fit: dict[str, SpaceParser] = {}
        for agent, own in self.of.items():
            with translated(name, "observation_space or action_space", 0):
                seen, done = env.observation_space(own), env.action_space(own)
            plain, mask = spaces.split_mask(seen)
            self.spaces[agent] = AgentSpaces(plain, done, mask is not None)
            self._fit[agent] = SpaceParser(plain, f"the observation of {agent}")
        self.late_rewards = 0
        self.steps = 0

    def known(self, agent: Any) -> str:
        named = str(agent)
        if named not in self.of:
            raise EnvironmentFault(
                f"The agent {named!r} of {self.name} appeared at step {self.steps} and is not among its possible_agents "
                f"({', '.join(self.of)}).",
                "Name there all that may ever appear: each needs a policy before the run begins.",
            )
        return named

    def seen(self, agent: str, observation: Any, info: Any, *, acts: bool = True) -> tuple[Tree, Bools | None]:
        """Raises EnvironmentFault when it does not fit the space that was declared."""
        own = self.spaces[agent]
        given = info.get(ACTION_MASK) if isinstance(info, Mapping) else None
        try:
            if own.masked:
                given = observation[ACTION_MASK]
                observation = spaces.without_mask(observation, not isinstance(own.observation, gym.spaces.Dict))
            mask = None if given is None or not acts else spaces.flat_mask(given, own.action)
            fitting = self._fit[agent](observation)
        except (ValueError, TypeError, KeyError, ConfigError) as error:
            raise EnvironmentFault(f"{self.name} at step {self.steps}, agent {agent!r}: {_plainly(error)}") from error
        if mask is not None:
            for part in spaces.choices(own.action):
                if not mask[part].any():
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
        if not abs(reward) <= _LARGEST:  # nor is NaN
            raise EnvironmentFault(f"{self.name} gave {agent!r} the reward {given} at step {self.steps}.")
        return reward

    def state_space(self) -> gym.Space[Any] | None:
        found = getattr(self.env, "state_space", None)
        if found is None:
            found = getattr(getattr(self.env, "unwrapped", None), "state_space", None)
        return found if isinstance(found, gym.Space) else None


def _plainly(error: Exception) -> str:
    text = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return text if text.endswith(".") else f"{text}."


class _Common:
    """The parts of a match that do not depend on who moves when."""

    def __init__(self, env: Any, name: str) -> None:
        self.name, self._env = name, env
        self._agents = _Agents(env, name)
        self.agents: Mapping[str, AgentSpaces] = self._agents.spaces
        self.state_space = self._agents.state_space()
        self._state_fit = None if self.state_space is None else SpaceParser(self.state_space, "state()")
        self._playing: dict[str, bool] = {}  # agent → whether it has acted since it came
        self._owed: dict[str, float] = {}  # rewards since its last action
        self._idle = 0

    @property
    def late_rewards(self) -> int:
        return self._agents.late_rewards

    @property
    def metadata(self) -> Mapping[str, Any]:
        return getattr(self._env, "metadata", None) or {}

    def state(self) -> Tree:
        assert self._state_fit is not None
        with translated(self.name, "state", self._agents.steps):
            whole = self._env.state()
        try:
            return self._state_fit(whole)
        except ValueError as error:
            raise EnvironmentFault(f"{self.name} at step {self._agents.steps}: {_plainly(error)}") from error

    def render(self) -> Any:
        with translated(self.name, "render", self._agents.steps):
            return self._env.render()

    def close(self) -> None:
        self._env.close()

    def _begin(self) -> None:
        self._playing.clear()
        self._owed.clear()
        self._idle = 0

    def _turn(self, agent: str, seen: tuple[Tree, Bools | None]) -> Turn:
        self._playing.setdefault(agent, False)
        return Turn(agent, *seen, self._owed.pop(agent, 0.0))

    def _left(self, leaving: Leaving) -> Leaving:
        """An agent that never acted has nothing to learn from: what it was given belongs to no action."""
        if not self._playing.pop(leaving.agent, False) and leaving.reward:
            self._agents.late_rewards += 1
        return leaving

    def _earned(self, agent: str, reward: float) -> None:
        if agent in self._playing:
            self._owed[agent] = self._owed.get(agent, 0.0) + reward
        elif reward:
            self._agents.late_rewards += 1

    def _acted(self, actions: Mapping[str, Any]) -> dict[Any, Any]:
        self._agents.steps += 1
        for agent in actions:
            self._playing[agent] = True
        return {self._agents.of[agent]: action for agent, action in actions.items()}

    def _checked(self, moved: Moved) -> Moved:
        self._idle = 0 if moved.turns or moved.over else self._idle + 1
        if self._idle > _IDLE:
            raise EnvironmentFault(f"No agent of {self.name} is to act, for {_IDLE} steps now, and its episode is not over.")
        return moved


# -- all at once --------------------------------------------------------------------------------------------------------


class ParallelMatch(_Common):
    """All agents that are shown something act at once. One that is present and shown nothing waits; its rewards add up."""

    def reset(self, seed: int) -> Moved:
        self._begin()
        with translated(self.name, "reset", self._agents.steps):
            found = self._env.reset(seed=seed)
            observations, infos = found
        present = [self._agents.known(agent) for agent in self._env.agents]
        return self._checked(Moved(self._turns(present, observations, infos), over=not present))

    def step(self, actions: Mapping[str, Any]) -> Moved:
        taken = self._acted(actions)
        with translated(self.name, "step", self._agents.steps):
            observations, rewards, terminations, truncations, infos = self._env.step(taken)
        present = [self._agents.known(agent) for agent in self._env.agents]
        for agent, reward in rewards.items():
            self._earned(self._agents.known(agent), self._agents.reward(str(agent), reward))
        leaving = []
        for agent in list(self._playing):
            own = self._agents.of[agent]
            terminated, truncated = bool(terminations.get(own, False)), bool(truncations.get(own, False))
            if terminated or truncated or agent not in present:
                leaving.append(self._leave(agent, terminated, truncated, observations.get(own), infos.get(own)))
        gone = {left.agent for left in leaving if left.terminated or left.truncated}
        turns = self._turns([agent for agent in present if agent not in gone], observations, infos)
        return self._checked(Moved(turns, leaving, over=not set(present) - gone))

    def _turns(self, present: Sequence[str], observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> list[Turn]:
        turns = []
        for agent in present:
            own = self._agents.of[agent]
            if own in observations and observations[own] is not None:
                turns.append(self._turn(agent, self._agents.seen(agent, observations[own], infos.get(own))))
        return turns

    def _leave(self, agent: str, terminated: bool, truncated: bool, observation: Any, info: Any) -> Leaving:
        last = None
        if observation is not None and not terminated:
            last = self._agents.seen(agent, observation, info, acts=False)[0]
        return self._left(Leaving(agent, self._owed.pop(agent, 0.0), terminated, truncated and not terminated, last))


# -- one after the other ------------------------------------------------------------------------------------------------


class TurnMatch(_Common):
    """Agents act one after the other; those that have ended are stepped out of the environment as it wants it."""

    def reset(self, seed: int) -> Moved:
        self._begin()
        with translated(self.name, "reset", self._agents.steps):
            self._env.reset(seed=seed)
        return self._checked(self._next())

    def step(self, actions: Mapping[str, Any]) -> Moved:
        ((_, action),) = self._acted(actions).items()
        with translated(self.name, "step", self._agents.steps):
            self._env.step(action)
        return self._checked(self._next())

    def _next(self) -> Moved:
        leaving: list[Leaving] = []
        for _ in range(_IDLE):
            leaving += self._vanished()
            if not self._env.agents:
                return Moved((), leaving, over=True)
            with translated(self.name, "last", self._agents.steps):
                own = self._env.agent_selection
                observation, reward, terminated, truncated, info = self._env.last()
            agent = self._agents.known(own)
            self._owed[agent] = self._agents.reward(agent, reward)  # AEC adds up by itself, since its last action
            if not (terminated or truncated):
                return Moved([self._turn(agent, self._agents.seen(agent, observation, info))], leaving)
            last = None
            if observation is not None and not terminated:
                last = self._agents.seen(agent, observation, info, acts=False)[0]
            earned = self._owed.pop(agent)
            leaving.append(self._left(Leaving(agent, earned, bool(terminated), bool(truncated and not terminated), last)))
            with translated(self.name, "step", self._agents.steps):
                self._env.step(None)
        raise EnvironmentFault(f"{self.name} has dead agents that do not go away: {self._env.agents}.")

    def _vanished(self) -> list[Leaving]:
        """Agents that are not there any more and were never said to have ended: nothing is known of their last action."""
        present = {self._agents.known(agent) for agent in self._env.agents}
        gone = [agent for agent in self._playing if agent not in present]
        return [self._left(Leaving(agent, self._owed.pop(agent, 0.0), False, False)) for agent in gone]


# -- a common view ------------------------------------------------------------------------------------------------------


class Whole:
    """What a centralised value sees besides the agent's own observation: the state, and which agent it is for.

    The state is the environment's own, if it has one; else the last observations of all possible agents, side by side, with zeros
    for those that are not there.
    """

    def __init__(self, agents: Mapping[str, AgentSpaces], state_space: gym.Space[Any] | None) -> None:
        self._own = state_space is not None
        self._places: dict[str, tuple[slice, gym.Space[Any]]] = {}
        at = 0
        for agent, known in agents.items():
            size = gym.spaces.utils.flatdim(known.observation)
            self._places[agent] = slice(at, at + size), known.observation
            at += size
        self._all = np.zeros(at, np.float32)
        everything: gym.Space[Any] = gym.spaces.Box(-np.inf, np.inf, (at,), np.float32)
        self.space = gym.spaces.Dict(
            {
                "agent": gym.spaces.Box(0.0, 1.0, (len(agents),), np.float32),
                "seen": everything if state_space is None else state_space,
            }
        )
        self._marks = dict(zip(agents, np.eye(len(agents), dtype=np.float32), strict=True))

    def reset(self) -> None:
        self._all[:] = 0.0

    def follow(self, moved: Moved) -> None:
        """Take in what everybody sees now; those who leave are still there, for what their last observation is worth."""
        if self._own:
            return
        for left in moved.leaving:
            if left.observation is not None:
                self._put(left.agent, left.observation)
        for turn in moved.turns:
            self._put(turn.agent, turn.observation)

    def forget(self, moved: Moved) -> None:
        """Those who have left are not there any more."""
        present = {turn.agent for turn in moved.turns}
        for left in moved.leaving:
            if left.agent not in present:
                self._all[self._places[left.agent][0]] = 0.0

    def _put(self, agent: str, observation: Tree) -> None:
        place, space = self._places[agent]
        self._all[place] = np.asarray(gym.spaces.utils.flatten(space, observation), np.float32)

    def seen(self, match: Match) -> Tree:
        """The common part, for all agents at this moment."""
        return match.state() if self._own else self._all.copy()

    def beside(self, agent: str, observation: Tree, seen: Tree) -> Tree:
        return {"observation": observation, "state": {"agent": self._marks[agent], "seen": seen}}


def central_space(own: gym.Space[Any], whole: gym.Space[Any]) -> gym.spaces.Dict:
    """Of what is recorded for a centralised value; the policy sees only `observation`."""
    return gym.spaces.Dict({"observation": own, "state": whole})
