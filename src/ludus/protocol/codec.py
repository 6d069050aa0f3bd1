"""The bodies of the built-in actor, seen by whoever stands in for a game or for an actor: formats, spaces, random values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import msgpack
import numpy as np

from ludus.core.spaces import from_json, to_json
from ludus.core.tree import Array, Tree
from ludus.core.types import Bools
from ludus.errors import ConfigError

Format = Literal["json", "msgpack"]

ONLY_SEAT = ""
"""The name of the seat of a game that has one."""

_SLACK = 1e-5
"""Relative to the bound: a number that was written as text and read again may be off by a rounding."""
_VAST = 1e6


@dataclass(frozen=True)
class SeatSpaces:
    observation: gym.Space[Any]
    action: gym.Space[Any]


def seats_from(spec: Mapping[str, Any]) -> dict[str, SeatSpaces]:
    """The seats that `GET /spec`, or a file with the same keys, declares. Raises ConfigError."""
    found = _declaring(spec)
    if found is None:
        raise ConfigError("No spaces are declared.", "Give observation_space and action_space, or seats: {name: {both}}.")
    if "seats" not in found:
        return {ONLY_SEAT: _seat(found, "the game")}
    seats = found["seats"]
    if not isinstance(seats, Mapping) or not seats:
        raise ConfigError(f"seats is {seats!r}.", "It maps the name of a seat to its observation_space and action_space.")
    return {str(name): _seat(item, f"seat {name!r}") for name, item in seats.items()}


def plain_spec(seats: Mapping[str, SeatSpaces]) -> dict[str, Any]:
    """What `GET /spec` says of these seats."""
    shown = {
        name: {"observation_space": to_json(seat.observation), "action_space": to_json(seat.action)}
        for name, seat in seats.items()
    }
    return shown[ONLY_SEAT] if set(shown) == {ONLY_SEAT} else {"seats": shown}


def _declaring(data: Any) -> Mapping[str, Any] | None:
    """The mapping that holds the spaces: the whole, or a section of it, as in the YAML of an experiment."""
    if not isinstance(data, Mapping):
        return None
    if "seats" in data or "observation_space" in data or "action_space" in data:
        return data
    return next((found for item in data.values() if (found := _declaring(item)) is not None), None)


def _seat(data: Any, whose: str) -> SeatSpaces:
    for key in ("observation_space", "action_space"):
        if not isinstance(data, Mapping) or not isinstance(data.get(key), Mapping):
            raise ConfigError(
                f"The {key} of {whose} is missing.", "Both spaces are declared, as ludus.core.spaces.to_json writes them."
            )
    return SeatSpaces(from_json(data["observation_space"]), from_json(data["action_space"]))


# -- formats


def is_msgpack(body: bytes) -> bool:
    """A msgpack map never begins like a JSON text."""
    return bool(body) and (body[0] & 0xF0 == 0x80 or body[0] in (0xDE, 0xDF))


def decode(body: bytes) -> Any:
    """The message in either format. Raises ValueError."""
    try:
        return msgpack.unpackb(body) if is_msgpack(body) else json.loads(body)
    except (RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def encode(message: Mapping[str, Any], form: Format) -> bytes:
    if form == "json":
        return json.dumps(message).encode()
    packed: bytes = msgpack.packb(message)
    return packed


# -- values


def random_action(space: gym.Space[Any], rng: np.random.Generator, mask: Bools | None = None) -> Any:
    """One that the mask (flat, as `ludus.core.spaces.flat_mask` makes it) allows; ready to be encoded."""
    return _Draw(rng, mask).value(space)


class _Draw:
    """Walks an action space in the order of its mask."""

    def __init__(self, rng: np.random.Generator, mask: Bools | None) -> None:
        self._rng, self._mask, self._at = rng, mask, 0

    def value(self, space: gym.Space[Any]) -> Any:
        if isinstance(space, gym.spaces.Dict):
            return {key: self.value(space.spaces[key]) for key in sorted(space.spaces)}
        if isinstance(space, gym.spaces.Tuple):
            return [self.value(item) for item in space.spaces]
        if isinstance(space, gym.spaces.Discrete):
            return int(space.start) + self._option(int(space.n))
        if isinstance(space, gym.spaces.MultiDiscrete):
            drawn = np.array([self._option(int(n)) for n in space.nvec.reshape(-1)]).reshape(space.nvec.shape)
            return (drawn + space.start).tolist()
        if isinstance(space, gym.spaces.MultiBinary):
            bits = self._rng.integers(0, 2, int(np.prod(space.shape)))
            return (bits * self._allowed(bits.size)).reshape(space.shape).tolist()
        if isinstance(space, gym.spaces.Box):
            return _in_box(space, self._rng).tolist()
        raise ConfigError(f"A {type(space).__name__} space cannot be drawn from.")

    def _option(self, n: int) -> int:
        return int(self._rng.choice(np.flatnonzero(self._allowed(n))))

    def _allowed(self, n: int) -> Bools:
        part = np.ones(n, np.bool_) if self._mask is None else self._mask[self._at : self._at + n]
        self._at += n
        return part


def random_observation(space: gym.Space[Any], rng: np.random.Generator) -> Any:
    return _Draw(rng, None).value(space)


def _in_box(space: gym.spaces.Box, rng: np.random.Generator) -> Array:
    if not np.issubdtype(space.dtype, np.floating):
        draw: Any = rng.integers
        return np.asarray(draw(space.low, space.high, dtype=space.dtype, endpoint=True))
    # A bound of 1e38 is no hint at what is usual, and would drown a network.
    has_low, has_high = space.low > -_VAST, space.high < _VAST
    low = np.where(has_low, space.low, np.where(has_high, space.high - 2.0, -1.0))
    high = np.where(has_high, space.high, low + 2.0)
    return np.clip(rng.uniform(low, high), space.low, space.high).astype(space.dtype)


def outside(space: gym.Space[Any], value: Tree, where: str) -> str:
    """In words, where a value of the right shape leaves the bounds of a Box; empty when it is inside."""
    if isinstance(space, gym.spaces.Dict):
        parts = [outside(item, value[key], f"{where}.{key}") for key, item in space.spaces.items()]
    elif isinstance(space, gym.spaces.Tuple):
        parts = [outside(item, value[i], f"{where}.{i}") for i, item in enumerate(space.spaces)]
    elif isinstance(space, gym.spaces.Box):
        array = np.asarray(value, np.float64)
        slack_low, slack_high = _SLACK * np.maximum(1, np.abs(space.low)), _SLACK * np.maximum(1, np.abs(space.high))
        wrong = np.argwhere((array < space.low - slack_low) | (array > space.high + slack_high))
        if not len(wrong):
            return ""
        at = tuple(int(i) for i in wrong[0])
        name = f"{where}{list(at)}" if at else where
        return f"{name} is {array[at]:g}, its bounds are {space.low[at]:g} to {space.high[at]:g}"
    else:
        return ""
    return next((part for part in parts if part), "")
