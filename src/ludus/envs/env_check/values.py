"""Checks of single values against their space, and statistics of the numbers in observations. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from ludus.core import spaces
from ludus.core.formatting import format_number
from ludus.core.tree import Array

_ROUNDING = 1e-5
"""Relative tolerance at the bounds: values are computed in another precision than they are declared."""


class ValueProblem(NamedTuple):
    kind: str
    text: str


def problems_of(space: gym.Space[Any], value: Any, path: str = "") -> Iterator[ValueProblem]:
    """What is wrong with a value of a space. `path`: its place in the observation."""
    if isinstance(space, Dict):
        yield from _problems_of_dict(space, value, path)
    elif isinstance(space, Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            what = f"{len(value)} parts" if isinstance(value, tuple) else f"a {type(value).__name__}"
            yield ValueProblem("structure", f"{_name(path)} is {what}, declared is a tuple of {len(space.spaces)}")
        else:
            for i, (part, item) in enumerate(zip(space.spaces, value, strict=True)):
                yield from problems_of(part, item, _below(path, str(i)))
    elif isinstance(space, (Box, Discrete, MultiDiscrete, MultiBinary)):
        yield from _problems_of_leaf(space, value, path)


def _problems_of_dict(space: Dict, value: Any, path: str) -> Iterator[ValueProblem]:
    if not isinstance(value, Mapping):
        yield ValueProblem(
            "structure", f"{_name(path)} is a {type(value).__name__}, declared is a dict of {sorted(space.spaces)}"
        )
        return
    lacking, extra = space.spaces.keys() - value.keys(), value.keys() - space.spaces.keys()
    if lacking:
        yield ValueProblem("structure", f"{_name(path)} has no {min(lacking)!r}, which is declared")
    if extra:
        yield ValueProblem("structure", f"{_name(path)} has {min(map(str, extra))!r}, which is not declared")
    for key, part in space.spaces.items():
        if key in value:
            yield from problems_of(part, value[key], _below(path, key))


def _problems_of_leaf(space: Any, value: Any, path: str) -> Iterator[ValueProblem]:
    declared = f"{space.dtype}{list(space.shape)}"
    array = _as_array(value)
    if array is None:
        yield ValueProblem("structure", f"{_name(path)} is {_describe(value)}, declared is {declared}")
        return
    if array.shape != space.shape:
        yield ValueProblem("structure", f"{_name(path)} has shape {list(array.shape)}, declared is {declared}")
        return
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        index = _first(~np.isfinite(array))
        yield ValueProblem("finite", f"{_name(path, index)} is {array[index]}")
        return
    whole = space.dtype.kind != "f"
    if array.dtype != space.dtype and not (isinstance(space, Discrete) and array.dtype.kind in "iu"):
        given = (
            f"a {type(value).__name__} of {array.dtype}" if not isinstance(value, (np.ndarray, np.generic)) else str(array.dtype)
        )
        if whole and array.dtype.kind == "f":
            fractions = array != np.floor(array)
            if fractions.any():
                index = _first(fractions)
                shown = f"{_name(path, index)} is {_show(array[index])}, declared is {declared}: fractions would be lost"
                yield ValueProblem("structure", shown)
                return
        if isinstance(value, (np.ndarray, np.generic)) or array.ndim:
            yield ValueProblem("dtype", f"{_name(path)} is {given}, declared is {declared}")
    yield from _problems_of_bounds(space, array, path)


def _problems_of_bounds(space: Any, array: Array, path: str) -> Iterator[ValueProblem]:
    low, high = limits_of(space)
    numbers = array.astype(np.float64)
    slack = _ROUNDING * np.maximum(1.0, np.abs(numbers)) if space.dtype.kind == "f" else 0.0
    outside = (numbers < low - slack) | (numbers > high + slack)
    if outside.any():
        index = _first(outside)
        bottom, top = np.broadcast_to(low, array.shape)[index], np.broadcast_to(high, array.shape)[index]
        many = f" ({int(outside.sum())} of {outside.size} numbers)" if outside.sum() > 1 else ""
        text = f"{_name(path, index)} is {_show(array[index])}, declared is {_show(bottom)} … {_show(top)}{many}"
        yield ValueProblem("bounds", text)


def limits_of(space: Any) -> tuple[Array, Array]:
    """The lowest and highest allowed value of every number of an elementary space, as float64."""
    if isinstance(space, Box):
        return space.low.astype(np.float64), space.high.astype(np.float64)
    if isinstance(space, Discrete):
        return np.float64(space.start), np.float64(space.start + space.n - 1)  # type: ignore[return-value]
    if isinstance(space, MultiDiscrete):
        return np.asarray(space.start, np.float64), np.asarray(space.start + space.nvec - 1, np.float64)
    return np.float64(0), np.float64(1)  # type: ignore[return-value]


def _as_array(value: Any) -> Array | None:
    if value is None or isinstance(value, (str, bytes, Mapping)):
        return None
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return None
    return array if array.dtype.kind in "biuf" else None


def _describe(value: Any) -> str:
    if value is None or isinstance(value, (str, bytes)):
        return repr(value)[:60]
    dtype = getattr(value, "dtype", None)
    return f"a {type(value).__name__}" + (f" of {dtype}" if dtype is not None else "")


def _first(where: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(where)), where.shape))


def _name(path: str, index: tuple[int, ...] = ()) -> str:
    place = f"[{', '.join(map(str, index))}]" if index else ""
    return f"{path or 'the observation'}{place}"


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _show(number: Any) -> str:
    value = float(number)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else format_number(value)


def is_image(space: Any) -> bool:
    """Whether an elementary space is an image for a convolutional network: bytes in two or three dimensions."""
    return isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3) and min(space.shape[:2]) >= 32


class NumberStatistics:
    """Range, mean and deviation of every number of one part of the observation."""

    def __init__(self, space: Any) -> None:
        self.space = space
        self.count = 0
        self.low = np.full(space.shape, math.inf)
        self.high = np.full(space.shape, -math.inf)
        self._mean, self._squares = np.zeros(space.shape), np.zeros(space.shape)

    def add(self, value: Any) -> None:
        array = np.asarray(value, np.float64)
        self.count += 1
        np.minimum(self.low, array, out=self.low)
        np.maximum(self.high, array, out=self.high)
        before = array - self._mean
        self._mean += before / self.count
        self._squares += before * (array - self._mean)

    @property
    def deviation(self) -> Array:
        return np.sqrt(self._squares / max(1, self.count))

    def to_json(self) -> dict[str, Any]:
        deviation = self.deviation.reshape(-1)
        moving = deviation[deviation > 0]
        low, high = limits_of(self.space)
        bounded = bool(np.isfinite(low).all() and np.isfinite(high).all())
        return {
            "shape": list(self.space.shape),
            "dtype": str(self.space.dtype),
            "low": float(self.low.min()),
            "high": float(self.high.max()),
            "declared_low": float(np.min(low)) if bounded else None,
            "declared_high": float(np.max(high)) if bounded else None,
            "smallest_deviation": float(moving.min()) if moving.size else 0.0,
            "largest_deviation": float(moving.max()) if moving.size else 0.0,
            "constant": int((deviation == 0).sum()),
            "numbers": int(deviation.size),
            "image": is_image(self.space),
        }


def leaf_spaces(space: gym.Space[Any]) -> list[tuple[str, Any]]:
    """(path, elementary space) of the parts that are numbers."""
    return [
        (path, leaf) for path, leaf in spaces.space_leaves(space) if isinstance(leaf, (Box, Discrete, MultiDiscrete, MultiBinary))
    ]


def leaf_value(value: Any, path: str) -> Any:
    """The part of an observation at a path; None if there is none."""
    for key in path.split(".") if path else ():
        try:
            value = value[int(key)] if isinstance(value, tuple) else value[key]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return value
