"""Message bodies of the built-in actor: JSON and msgpack coding, declared spaces, random values for fake games and actors."""

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
"""The seat name of a game with one seat."""

_TOLERANCE = 1e-5
"""Relative to the bound: text formatting may round a number."""
_UNBOUNDED = 1e6


@dataclass(frozen=True)
class SeatSpaces:
    observation: gym.Space[Any]
    action: gym.Space[Any]


def parse_seats(spec: Mapping[str, Any]) -> dict[str, SeatSpaces]:
    """Return the seats declared by `GET /spec` or by a file with the same keys. Raises ConfigError."""
    section = _find_declaration(spec)
    if section is None:
        raise ConfigError("No spaces are declared.", "Give observation_space and action_space, or seats: {name: {both}}.")
    if "seats" not in section:
        return {ONLY_SEAT: _parse_seat(section, "the game")}
    seats = section["seats"]
    if not isinstance(seats, Mapping) or not seats:
        raise ConfigError(f"seats is {seats!r}.", "It maps the name of a seat to its observation_space and action_space.")
    return {str(name): _parse_seat(item, f"seat {name!r}") for name, item in seats.items()}


def seats_to_spec(seats: Mapping[str, SeatSpaces]) -> dict[str, Any]:
    """Return the `GET /spec` entries of these seats."""
    entries = {
        name: {"observation_space": to_json(seat.observation), "action_space": to_json(seat.action)}
        for name, seat in seats.items()
    }
    return entries[ONLY_SEAT] if set(entries) == {ONLY_SEAT} else {"seats": entries}


def _find_declaration(data: Any) -> Mapping[str, Any] | None:
    """Return the mapping that holds the spaces: `data` itself or a section of it, as in the YAML of an experiment."""
    if not isinstance(data, Mapping):
        return None
    if "seats" in data or "observation_space" in data or "action_space" in data:
        return data
    return next((section for item in data.values() if (section := _find_declaration(item)) is not None), None)


def _parse_seat(data: Any, owner: str) -> SeatSpaces:
    for key in ("observation_space", "action_space"):
        if not isinstance(data, Mapping) or not isinstance(data.get(key), Mapping):
            raise ConfigError(
                f"The {key} of {owner} is missing.", "Declare both spaces in the format of ludus.core.spaces.to_json."
            )
    return SeatSpaces(from_json(data["observation_space"]), from_json(data["action_space"]))


# -- formats


def is_msgpack(body: bytes) -> bool:
    """Detect a msgpack map by its first byte, which no JSON text begins with."""
    return bool(body) and (body[0] & 0xF0 == 0x80 or body[0] in (0xDE, 0xDF))


def decode(body: bytes) -> Any:
    """Decode JSON or msgpack. Raises ValueError."""
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
    """Sample an action that the flat mask (`ludus.core.spaces.flat_mask`) allows, as plain lists and numbers."""
    return _Sampler(rng, mask).value(space)


class _Sampler:
    """Samples from a space in the order of its mask."""

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
            return (bits * self._next_mask(bits.size)).reshape(space.shape).tolist()
        if isinstance(space, gym.spaces.Box):
            return _sample_box(space, self._rng).tolist()
        raise ConfigError(f"Cannot sample from a {type(space).__name__} space.")

    def _option(self, n: int) -> int:
        return int(self._rng.choice(np.flatnonzero(self._next_mask(n))))

    def _next_mask(self, n: int) -> Bools:
        part = np.ones(n, np.bool_) if self._mask is None else self._mask[self._at : self._at + n]
        self._at += n
        return part


def random_observation(space: gym.Space[Any], rng: np.random.Generator) -> Any:
    return _Sampler(rng, None).value(space)


def _sample_box(space: gym.spaces.Box, rng: np.random.Generator) -> Array:
    if not np.issubdtype(space.dtype, np.floating):
        draw: Any = rng.integers
        return np.asarray(draw(space.low, space.high, dtype=space.dtype, endpoint=True))
    # A bound such as 1e38 says nothing about typical values, and samples that large would saturate a network.
    has_low, has_high = space.low > -_UNBOUNDED, space.high < _UNBOUNDED
    low = np.where(has_low, space.low, np.where(has_high, space.high - 2.0, -1.0))
    high = np.where(has_high, space.high, low + 2.0)
    return np.clip(rng.uniform(low, high), space.low, space.high).astype(space.dtype)


def bounds_error(space: gym.Space[Any], value: Tree, where: str) -> str:
    """Describe where a value of the right shape leaves the bounds of a Box; empty when it is inside."""
    if isinstance(space, gym.spaces.Dict):
        parts = [bounds_error(item, value[key], f"{where}.{key}") for key, item in space.spaces.items()]
    elif isinstance(space, gym.spaces.Tuple):
        parts = [bounds_error(item, value[i], f"{where}.{i}") for i, item in enumerate(space.spaces)]
    elif isinstance(space, gym.spaces.Box):
        array = np.asarray(value, np.float64)
        slack_low, slack_high = _TOLERANCE * np.maximum(1, np.abs(space.low)), _TOLERANCE * np.maximum(1, np.abs(space.high))
        wrong = np.argwhere((array < space.low - slack_low) | (array > space.high + slack_high))
        if not len(wrong):
            return ""
        at = tuple(int(i) for i in wrong[0])
        name = f"{where}{list(at)}" if at else where
        return f"{name} is {array[at]:g}, its bounds are {space.low[at]:g} to {space.high[at]:g}"
    else:
        return ""
    return next((part for part in parts if part), "")
