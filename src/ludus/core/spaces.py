"""Gymnasium spaces: array specs, JSON form, action masks, and conversion of values to arrays."""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from ludus.core.tree import Array, Tree, leaves
from ludus.errors import ConfigError

ACTION_MASK = "action_mask"

_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, RecursionError, MemoryError)
"""Errors of Gymnasium's constructors for unexpected values."""
_MAX_ELEMENTS = 1 << 27
"""Numbers in one part of an observation or action: about 140 colour images of 640 × 480."""
_MAX_PARTS = 10_000


@dataclass(frozen=True)
class ArraySpec:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def zeros(self, *leading: int) -> Array:
        return np.zeros((*leading, *self.shape), dtype=self.dtype)


_STORED_AS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.uint16): np.dtype(np.int32),
    np.dtype(np.uint32): np.dtype(np.int64),
    np.dtype(np.uint64): np.dtype(np.float32),
}


def array_spec(space: gym.Space[Any], where: str = "observation") -> Tree:
    """Return the tree of ArraySpecs in which values of `space` are stored: float64 becomes float32, discrete ones int64.

    Unsigned types of more than one byte become wider signed types (uint64: float32), since torch cannot index them.
    """
    if isinstance(space, gym.spaces.Dict):
        return {key: array_spec(item, f"{where}.{key}") for key, item in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(array_spec(item, f"{where}.{i}") for i, item in enumerate(space.spaces))
    if isinstance(space, gym.spaces.Box):
        dtype = np.dtype(np.float32) if np.issubdtype(space.dtype, np.floating) else np.dtype(space.dtype)
        return ArraySpec(space.shape, _STORED_AS.get(dtype, dtype))
    if isinstance(space, gym.spaces.Discrete):
        return ArraySpec((), np.dtype(np.int64))
    if isinstance(space, gym.spaces.MultiDiscrete):
        return ArraySpec(space.nvec.shape, np.dtype(np.int64))
    if isinstance(space, gym.spaces.MultiBinary):
        return ArraySpec(space.shape, np.dtype(np.int8))
    raise ConfigError(f"{where} is a {type(space).__name__} space, which has no fixed array shape.", _remedy(where))


def _remedy(where: str) -> str:
    """Return a hint for a part of a space that networks do not support, such as text."""
    what, _, part = where.partition(".")
    if part and (what == "observation" or what.startswith("the observation of ")):
        return f"Leave it out with config.preprocess: {{drop: [{part}]}}, or encode it as numbers in a wrapper: config.wrappers."
    return "Use Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple; a wrapper (config.wrappers) can encode it as numbers."


def check_usable(space: gym.Space[Any], what: str) -> None:
    """Raise ConfigError for an observation or action space that agents do not support."""
    _check_keys(space, what)
    found = list(leaves(array_spec(space, what)))
    if not any(math.prod(spec.shape) for _, spec in found):
        raise ConfigError(f"The {what} space has no elements: {space}.", f"Give it at least one number as {what}.")
    if what == "action" and _has_empty_part(space):
        raise ConfigError(f"A part of the action space has no elements: {space}.", "Leave the empty part out.")
    paths = [path for path, _ in found]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise ConfigError(f"The {what} space has two parts that are called {twice[0]!r}.", "Leave the dot out of its keys.")


def _has_empty_part(space: gym.Space[Any]) -> bool:
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        parts = list(space.spaces.values()) if isinstance(space, gym.spaces.Dict) else list(space.spaces)
        return not parts or any(map(_has_empty_part, parts))
    return 0 in (space.shape or ())


def _check_keys(space: gym.Space[Any], where: str) -> None:
    if isinstance(space, gym.spaces.Dict):
        for key, item in space.spaces.items():
            if not isinstance(key, str) or not key:
                raise ConfigError(f"{where} has the key {key!r}.", "Keys of a Dict space are strings that are not empty.")
            _check_keys(item, f"{where}.{key}")
    elif isinstance(space, gym.spaces.Tuple):
        for i, item in enumerate(space.spaces):
            _check_keys(item, f"{where}.{i}")


def split_mask(space: gym.Space[Any]) -> tuple[gym.Space[Any], gym.Space[Any] | None]:
    """Split a Dict observation space into (space without `action_mask`, the mask's space or None)."""
    if not isinstance(space, gym.spaces.Dict) or ACTION_MASK not in space.spaces:
        return space, None
    rest = {key: item for key, item in space.spaces.items() if key != ACTION_MASK}
    if not rest:
        raise ConfigError(f"The observation contains nothing but {ACTION_MASK!r}.", "Add observations of the agent.")
    observed: gym.Space[Any] = rest["observation"] if set(rest) == {"observation"} else gym.spaces.Dict(rest)
    return observed, space.spaces[ACTION_MASK]


def without_mask(observation: Tree, unwrap: bool) -> Tree:
    """Return an observation without its mask; `unwrap` if it has no other key than `observation`."""
    if unwrap:
        return observation["observation"]
    return {key: item for key, item in observation.items() if key != ACTION_MASK}


def space_leaves(space: gym.Space[Any], where: str = "") -> list[tuple[str, Any]]:
    """Return (path below `where`, elementary space) of all parts, in the order of `tree.leaves`."""
    return list(leaves(_space_tree(space), where))


def _space_tree(space: gym.Space[Any]) -> Tree:
    if isinstance(space, gym.spaces.Dict):
        return {key: _space_tree(item) for key, item in space.spaces.items()}
    return tuple(map(_space_tree, space.spaces)) if isinstance(space, gym.spaces.Tuple) else space


def category_counts(leaf: gym.Space[Any]) -> list[int]:
    """Return the number of options of each categorical choice of an elementary space; none for Box and MultiBinary."""
    if isinstance(leaf, gym.spaces.Discrete):
        return [int(leaf.n)]
    return [int(n) for n in leaf.nvec.reshape(-1)] if isinstance(leaf, gym.spaces.MultiDiscrete) else []


def mask_size(space: gym.Space[Any]) -> int:
    """Return the size of the flat action mask of an action space: one entry per discrete option and bit, none for Box."""
    parts = [leaf for _, leaf in space_leaves(space)]
    bits = sum(math.prod(leaf.shape) for leaf in parts if isinstance(leaf, gym.spaces.MultiBinary))
    return bits + sum(sum(category_counts(leaf)) for leaf in parts)


def choices(space: gym.Space[Any]) -> list[slice]:
    """Return the slice of the flat action mask of each categorical choice; at least one option of each must be allowed."""
    parts: list[slice] = []
    begin = 0
    for _, leaf in space_leaves(space):
        ends = itertools.accumulate(category_counts(leaf), initial=begin)
        parts += itertools.starmap(slice, itertools.pairwise(ends))
        begin += mask_size(leaf)
    return parts


def categories(space: gym.Space[Any]) -> dict[str, tuple[Array, Array]]:
    """Return path → (lowest value, highest value + 1) of the categorical parts of an observation space."""
    found: dict[str, tuple[Array, Array]] = {}
    for path, leaf in space_leaves(space):
        if isinstance(leaf, gym.spaces.Discrete):
            found[path] = np.asarray(leaf.start), np.asarray(leaf.start + leaf.n)
        elif isinstance(leaf, gym.spaces.MultiDiscrete):
            found[path] = np.asarray(leaf.start), np.asarray(leaf.start) + leaf.nvec
    return found


def bits(space: gym.Space[Any]) -> dict[str, tuple[Array, Array]]:
    """Return the same as `categories` for MultiBinary parts."""
    parts = [path for path, leaf in space_leaves(space) if isinstance(leaf, gym.spaces.MultiBinary)]
    return {path: (np.asarray(0), np.asarray(2)) for path in parts}


def flat_mask(mask: Tree, space: gym.Space[Any], batch: int | None = None) -> npt.NDArray[np.bool_]:
    """Flatten a mask (a flat one, raw bytes, or a tree like the action) to one boolean vector. Raises ConfigError."""
    lead = () if batch is None else (batch,)
    _check_names(mask, space)
    parts = [np.asarray(part).reshape(*lead, -1) for _, part in leaves(_as_tree(mask))] or [np.zeros((*lead, 0))]
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
    if flat.dtype.kind != "b" and (flat.dtype.kind not in "iuf" or not ((flat == 0) | (flat == 1)).all()):
        raise ConfigError("The action mask contains values other than 0 (forbidden) and 1 (allowed).")
    if flat.shape[-1] != mask_size(space):
        raise ConfigError(f"The action mask has {flat.shape[-1]} entries, the actions have {mask_size(space)} options.")
    return flat.astype(np.bool_, copy=False)


class MaskParser:
    """`flat_mask` for one action space, with a fast path for a vector of bytes, the usual form of a mask."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self._space, self._size = space, mask_size(space)
        self.choices = choices(space)

    def __call__(self, mask: Tree) -> npt.NDArray[np.bool_]:
        """Raises ConfigError."""
        is_vector = mask.__class__ is np.ndarray and mask.shape == (self._size,) and mask.dtype.char in "?bB"
        if is_vector and not mask.tobytes().strip(b"\0\1"):  # only zeros and ones
            allowed: npt.NDArray[np.bool_] = mask.astype(np.bool_)
            return allowed
        return flat_mask(mask, self._space)


def _check_names(mask: Any, space: gym.Space[Any]) -> None:
    """Raise ConfigError for unknown keys of a mask, which flattening would not detect."""
    if isinstance(mask, Mapping):
        parts = space.spaces if isinstance(space, gym.spaces.Dict) else {}
        unknown = sorted(str(key) for key in mask.keys() - parts.keys())
        if unknown:
            raise ConfigError(f"The action mask has {unknown}, the parts of the action are {sorted(parts)}.")
        for key, item in mask.items():
            _check_names(item, parts[key])
    elif isinstance(mask, (tuple, list)) and isinstance(space, gym.spaces.Tuple):
        for item, part in zip(mask, space.spaces, strict=False):  # the caller checks the total size
            _check_names(item, part)


def _as_tree(mask: Any) -> Tree:
    if isinstance(mask, Mapping):
        return {key: _as_tree(item) for key, item in mask.items() if item is not None}
    if isinstance(mask, bytes):
        return np.frombuffer(mask, np.uint8)
    if isinstance(mask, (tuple, list)) and mask and not np.isscalar(mask[0]):
        return tuple(_as_tree(item) for item in mask if item is not None)
    return np.asarray(mask)


class SpaceParser:
    """Converts untrusted values of a space to arrays of its shapes and dtypes.

    Accepts lists, arrays, numbers, and raw bytes (in C order). Rejects non-finite numbers and invalid categories. Bounds of a
    Box are not enforced, since environments often violate them.
    """

    def __init__(self, space: gym.Space[Any], where: str = "observation") -> None:
        self.spec = array_spec(space, where)
        self._categories = categories(space) | bits(space)
        self._where = where
        self._single = self.spec if isinstance(self.spec, ArraySpec) else None
        self._free = self._single is not None and self._single.dtype.kind in "iu" and "" not in self._categories
        """Whether every array of the right shape and dtype is valid."""
        is_vector = self._single is not None and self._single.dtype == np.float32 and len(self._single.shape) == 1
        self._short = self._single.shape[0] if self._single is not None and is_vector and self._single.shape[0] <= 256 else -1

    def __call__(self, value: Any) -> Tree:
        """Raises ValueError."""
        if self._single is not None:
            if value.__class__ is list and len(value) == self._short:
                array = _parse_short_list(value, self._single.dtype)
                if array is not None:
                    return array
            if value.__class__ is np.ndarray and self._is_valid(self._single, value):
                return value.copy()
            return self._leaf(self._single, value, "")
        return self._tree(self.spec, value, "")

    def _is_valid(self, spec: ArraySpec, array: Array) -> bool:
        """Fast path for arrays as the space declares them; False = use the general path."""
        if array.dtype != spec.dtype or array.shape != spec.shape:
            return False
        return self._free or (spec.dtype.kind == "f" and squares_are_finite(array))

    def _tree(self, spec: Tree, value: Any, path: str) -> Tree:
        here = f"{path}." if path else ""
        if isinstance(spec, dict):
            if not isinstance(value, Mapping) or value.keys() != spec.keys():
                found = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
                raise ValueError(f"{self._name(path)} has {found}, the keys are {sorted(spec)}")
            return {key: self._tree(item, value[key], f"{here}{key}") for key, item in spec.items()}
        if isinstance(spec, tuple):
            if not isinstance(value, (list, tuple)) or len(value) != len(spec):
                raise ValueError(f"{self._name(path)} is not a list of {len(spec)} parts")
            return tuple(self._tree(item, value[i], f"{here}{i}") for i, item in enumerate(spec))
        return self._leaf(spec, value, path)

    def _leaf(self, spec: ArraySpec, value: Any, path: str) -> Array:
        try:
            if isinstance(value, (bytes, bytearray, memoryview)):
                array: Array = np.frombuffer(value, spec.dtype).reshape(spec.shape).copy()
            else:
                given = np.asarray(value)
                fractions = given.dtype.kind == "f" and not (np.isfinite(given) & (given == np.floor(given))).all()
                if given.dtype.kind not in "biuf" or (fractions and spec.dtype.kind != "f"):
                    raise ValueError(f"contains {_KINDS.get(given.dtype.kind, given.dtype.name)}")
                with np.errstate(over="ignore", invalid="ignore"):  # checked below
                    array = given.astype(spec.dtype)
                if spec.dtype.kind != "f" and not np.array_equal(array, given):
                    raise ValueError(f"does not fit into {spec.dtype}")
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"{self._name(path)}: {error}; it takes {spec.dtype}{list(spec.shape)}") from None
        if array.shape != spec.shape:
            raise ValueError(f"{self._name(path)} has shape {list(array.shape)}, it takes {spec.dtype}{list(spec.shape)}")
        if spec.dtype.kind == "f":
            bad = ~np.isfinite(array)
            if bad.any():
                raw = array if isinstance(value, (bytes, bytearray, memoryview)) else np.asarray(value)
                found = raw[bad][0]  # as it was given: a finite number may be too large for the dtype
                why = f", which is too large for {array.dtype}" if np.isfinite(found) else ""
                raise ValueError(f"{self._name(path)} contains {found}{why}")
        elif path in self._categories:
            low, high = self._categories[path]
            if ((array < low) | (array >= high)).any():
                raise ValueError(f"{self._name(path)} is {array.tolist()}, categories run from {low} to below {high}")
        return array

    def _name(self, path: str) -> str:
        return f"{self._where}.{path}" if path else self._where


_FLOAT32, _EXACT = float(np.finfo(np.float32).max), 1 << 53


def _parse_short_list(values: list[Any], dtype: np.dtype[Any]) -> Array | None:
    """Fast path for a short list of finite numbers, the usual form of an observation; None = use the general path."""
    for value in values:
        if value.__class__ is float:
            if not -_FLOAT32 <= value <= _FLOAT32:  # false for NaN too
                return None
        elif value.__class__ is not int or not -_EXACT <= value <= _EXACT:
            return None
    return np.array(values, dtype)


def squares_are_finite(array: Array) -> bool:
    """Whether the sum of squares is finite: then all numbers are. One pass, without a temporary array."""
    flat = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(flat.dot(flat))


_KINDS = {"U": "text", "S": "text", "O": "something that is not a number", "f": "fractions"}


# -- JSON ---------------------------------------------------------------------------------------------------------------


def to_json(space: gym.Space[Any]) -> dict[str, Any]:
    """Describe a space as JSON for `from_json`; bounds that are all equal become one number."""
    if isinstance(space, gym.spaces.Dict):
        return {"type": "Dict", "spaces": {key: to_json(item) for key, item in space.spaces.items()}}
    if isinstance(space, gym.spaces.Tuple):
        return {"type": "Tuple", "spaces": [to_json(item) for item in space.spaces]}
    if isinstance(space, gym.spaces.Box):
        bounds = {"low": _bounds_to_json(space.low), "high": _bounds_to_json(space.high)}
        return {"type": "Box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    if isinstance(space, gym.spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), **_dtype(space)}
    if isinstance(space, gym.spaces.MultiDiscrete):
        starts = np.asarray(space.start).tolist()
        return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": starts, **_dtype(space)}
    if isinstance(space, gym.spaces.MultiBinary):
        return {"type": "MultiBinary", "shape": list(space.shape)}
    raise ConfigError(f"A {type(space).__name__} space cannot be written as JSON.")


def from_json(data: Mapping[str, Any]) -> gym.Space[Any]:
    """Build the space that `to_json` described. Raises ConfigError for invalid or excessively large descriptions."""
    try:
        _check_size(data)
        space: gym.Space[Any] = _BUILDERS[data["type"]](data)
    except _MALFORMED as error:
        shown = "" if isinstance(error, RecursionError) else reprlib.repr(data)
        raise ConfigError(f"This is not the description of a space: {shown} ({error}).") from error
    return space


def _check_size(data: Mapping[str, Any]) -> None:
    """Raise ValueError for a space that is too large, before anything is allocated."""
    shape = data.get("shape", ())
    if data["type"] in ("Box", "MultiBinary") and math.prod(int(n) for n in shape) > _MAX_ELEMENTS:
        raise ValueError(f"more than {_MAX_ELEMENTS:,} numbers")
    inner = data.get("spaces", ())
    if len(inner) > _MAX_PARTS:
        raise ValueError(f"{len(inner):,} parts; the maximum is {_MAX_PARTS:,}")


def _bounds_to_json(values: Array) -> Any:
    # tolist() does not convert long doubles; JSON has no infinity.
    numbers = [float(v) if isinstance(v, np.floating) else v for v in values.reshape(-1).tolist()]
    plain = [str(v) if isinstance(v, float) and not math.isfinite(v) else v for v in numbers]
    return plain[0] if plain and all(v == plain[0] for v in plain) else plain


def _dtype(space: gym.Space[Any]) -> dict[str, str]:
    return {} if space.dtype == np.int64 else {"dtype": str(space.dtype)}


def _integers(data: Mapping[str, Any]) -> dict[str, Any]:
    return {"dtype": np.dtype(data["dtype"]).type} if "dtype" in data else {}


def _array(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    flat = [float(v) if isinstance(v, str) else v for v in (value if isinstance(value, list) else [value])]
    return np.broadcast_to(np.asarray(flat, dtype=dtype).reshape(shape if len(flat) != 1 else ()), shape)


def dtype_bounds(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the lowest and highest value of a boolean, integer or floating type."""
    if dtype.kind == "b":
        return False, True
    return (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)


def _box(data: Mapping[str, Any]) -> gym.Space[Any]:
    shape, dtype = tuple(data["shape"]), np.dtype(data.get("dtype", "float32"))
    widest = dtype_bounds(dtype)
    low, high = (_array(data.get(key, bound), shape, dtype) for key, bound in zip(("low", "high"), widest, strict=True))
    return gym.spaces.Box(low, high, shape, dtype.type)


_BUILDERS: dict[str, Any] = {
    "Dict": lambda d: gym.spaces.Dict({key: from_json(item) for key, item in d["spaces"].items()}),
    "Tuple": lambda d: gym.spaces.Tuple([from_json(item) for item in d["spaces"]]),
    "Box": _box,
    "Discrete": lambda d: gym.spaces.Discrete(int(d["n"]), start=int(d.get("start", 0)), **_integers(d)),
    "MultiDiscrete": lambda d: gym.spaces.MultiDiscrete(
        np.asarray(d["nvec"]), start=np.asarray(d.get("start", np.zeros_like(d["nvec"]))), **_integers(d)
    ),
    "MultiBinary": lambda d: gym.spaces.MultiBinary(d["shape"] if len(d["shape"]) > 1 else int(d["shape"][0])),
}
