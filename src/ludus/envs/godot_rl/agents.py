"""The agents that a game declares in its `env_info`: names, spaces, and the values of observations and actions as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core.spaces import SpaceParser
from ludus.core.tree import Array, Tree

MAX_AGENTS = 4096
MAX_SIZE = 1 << 26
SHARED_POLICY = "shared_policy"
"""Policy of agents to which the game gives none."""

_IMAGE = "2d"
"""Part of the name of an observation that is an image, sent as hexadecimal digits."""


class GodotAgent:
    """One agent: a node of the game that acts.

    Spaces with one part are that part; others are a Dict. Raises ValueError for declarations and values that are not valid.
    """

    def __init__(self, name: str, policy: str, observation: Any, action: Any) -> None:
        self.name, self.policy = name, policy
        observed = {part: _observation_space(part, declared) for part, declared in _parts(observation, "observation_space")}
        acted = {part: _action_space(part, declared) for part, declared in _parts(action, "action_space")}
        self.observation_space = _joined(observed)
        self.action_space = _joined(acted)
        self._acted = acted
        self._act = [(part, isinstance(space, gym.spaces.Discrete)) for part, space in acted.items()]
        self._read = {part: _reader(space, f"{part} of {name}") for part, space in observed.items()}
        self._only = next(iter(observed)) if len(observed) == 1 else None
        self.rest: dict[str, Any] = {
            part: 0 if isinstance(space, gym.spaces.Discrete) else [0.0] * int(np.prod(space.shape or ()))
            for part, space in acted.items()
        }
        """Action of an agent that waits."""

    def observation(self, given: Any) -> Tree:
        try:
            if self._only is not None:
                return self._read[self._only](given[self._only])
            return {part: read(given[part]) for part, read in self._read.items()}
        except (KeyError, TypeError) as error:
            if isinstance(given, Mapping) and isinstance(error, TypeError):
                raise
            missing = [part for part in self._read if not isinstance(given, Mapping) or part not in given]
            raise ValueError(f"the observation of {self.name} lacks {', '.join(missing)}: {given!r:.100}") from None

    def action(self, chosen: Any) -> dict[str, Any]:
        if len(self._act) == 1:
            ((part, discrete),) = self._act
            return {part: int(chosen) if discrete else np.asarray(chosen).reshape(-1).tolist()}
        return {
            part: int(chosen[part]) if discrete else np.asarray(chosen[part]).reshape(-1).tolist() for part, discrete in self._act
        }


def _reader(space: gym.Space[Any], what: str) -> Callable[[Any], Array]:
    """A function that makes an array of a part of an observation. It raises ValueError."""
    where = f"the observation {what}"
    if isinstance(space, gym.spaces.Discrete):
        categories = int(space.n)

        def read_category(given: Any) -> Array:
            value = given[0] if isinstance(given, list) and len(given) == 1 else given  # the plugin sends either
            if not isinstance(value, (int, float)) or not 0 <= value < categories or value % 1:
                raise ValueError(f"{where} is {given!r:.100}, not a whole number from 0 to {categories - 1:,}")
            return np.array(int(value))

        return read_category
    if space.dtype != np.uint8:
        return SpaceParser(space, where)
    shape, size = space.shape or (), int(np.prod(space.shape or ()))

    def read_image(given: Any) -> Array:
        if not isinstance(given, str):
            raise ValueError(f"{where} is not a string of hexadecimal digits")
        data = bytearray.fromhex(given)
        if len(data) != size:
            raise ValueError(f"{where} has {len(data):,} bytes, its size says {size:,}")
        return np.frombuffer(data, np.uint8).reshape(shape)

    return read_image


def read_agents(info: Mapping[str, Any]) -> list[GodotAgent]:
    """The agents of an `env_info`. Raises ValueError."""
    count = _size(info.get("n_agents"), "n_agents", MAX_AGENTS)
    spaces = []
    for key in ("observation_space", "action_space"):
        declared = info.get(key)
        # Plugins before version 0.5 declare one space for all agents.
        each = [declared] * count if isinstance(declared, Mapping) else declared
        if not isinstance(each, list) or len(each) != count:
            raise ValueError(f"{key} is not an object or a list of {count} objects: {declared!r:.200}")
        spaces.append(each)
    policies = info.get("agent_policy_names", [SHARED_POLICY] * count)
    if not isinstance(policies, list) or len(policies) != count or not all(isinstance(name, str) and name for name in policies):
        raise ValueError(f"agent_policy_names is not a list of {count} names: {policies!r:.200}")
    return [
        GodotAgent(f"{policy}_{policies[:index].count(policy)}", policy, observation, action)
        for index, (policy, observation, action) in enumerate(zip(policies, *spaces, strict=True))
    ]


def _parts(declared: Any, key: str) -> Sequence[tuple[str, Mapping[str, Any]]]:
    if not isinstance(declared, Mapping) or not declared or not all(isinstance(part, Mapping) for part in declared.values()):
        raise ValueError(f"{key} is {declared!r:.200}, not an object of named parts")
    return list(declared.items())


def _observation_space(name: str, declared: Mapping[str, Any]) -> gym.Space[Any]:
    kind, size = declared.get("space"), declared.get("size")
    if kind == "discrete":
        return gym.spaces.Discrete(_size(size, f"the size of the observation {name}"))
    if kind != "box":
        raise ValueError(f"the observation {name} has the space {kind!r}; known are box and discrete")
    if not isinstance(size, list) or len(size) > 4:
        raise ValueError(f"the size of the observation {name} is {size!r:.100}, not a list of numbers")
    shape = tuple(_size(one, f"the size of the observation {name}") for one in size)
    if np.prod(shape) > MAX_SIZE:
        raise ValueError(f"the observation {name} has {np.prod(shape):,} numbers; at most {MAX_SIZE:,} are accepted")
    if _IMAGE in name:
        return gym.spaces.Box(0, 255, shape, np.uint8)
    return gym.spaces.Box(-np.inf, np.inf, shape, np.float32)  # games declare no bounds, and leave those that are assumed


def _action_space(name: str, declared: Mapping[str, Any]) -> gym.Space[Any]:
    kind = declared.get("action_type")
    size = _size(declared.get("size"), f"the size of the action {name}")
    if kind == "discrete":
        return gym.spaces.Discrete(size)
    if kind != "continuous":
        raise ValueError(f"the action {name} has the action_type {kind!r}; known are discrete and continuous")
    return gym.spaces.Box(-1.0, 1.0, (size,), np.float32)


def _size(value: Any, what: str, most: int = MAX_SIZE) -> int:
    """A whole number above 0. Godot may write it as 3.0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or not 1 <= value <= most or value % 1:
        raise ValueError(f"{what} is {value!r:.100}, not a whole number from 1 to {most:,}")
    return int(value)


def _joined(parts: Mapping[str, gym.Space[Any]]) -> gym.Space[Any]:
    return next(iter(parts.values())) if len(parts) == 1 else gym.spaces.Dict(dict(parts))
