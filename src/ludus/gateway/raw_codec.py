"""The raw format of the built-in actor: binary arrays in the memory layout of a game engine.

    tick     float32 reward, uint32 flags, the leaves of the observation, with flag 4 one byte per option of the mask
    reply    the leaves of the action

Little-endian, C order, no padding; leaves in the order of `GET /spec`, the keys of a Dict sorted. A floating-point Box is float32,
Discrete and MultiDiscrete are int64, MultiBinary is int8; any other Box has its own dtype.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from ludus.core.spaces import ArraySpec, array_spec, mask_size
from ludus.core.tree import Array, Tree
from ludus.errors import Refused

TERMINATED, TRUNCATED, MASKED = 1, 2, 4
HEAD = struct.Struct("<fI")
_FLOAT32 = np.dtype("<f4")


class RawStep(NamedTuple):
    reward: float
    flags: int
    observation: Tree
    mask: Array | None
    plain: bool
    """Whether dtype, shape and finiteness of the observation are already verified."""


class RawCodec:
    """Reads steps and writes actions of one seat."""

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self._spec = array_spec(observation_space)
        self._size = HEAD.size + sum(_bytes(leaf) for leaf in leaves(self._spec))
        self._mask_size = mask_size(action_space)
        self._action = array_spec(action_space, "action")
        self._single_action = _little(self._action.dtype) if isinstance(self._action, ArraySpec) else None
        box = self._spec if isinstance(observation_space, gym.spaces.Box) else None
        is_vector = box is not None and box.dtype == np.float32 and len(box.shape) == 1
        self._sum_vector = np.ones(box.shape[0], np.float32) if box is not None and is_vector else None
        self._bytes = box is not None and box.dtype == np.uint8  # every byte value is valid

    def read(self, body: bytes) -> RawStep:
        """Raises Refused (422)."""
        size = len(body)
        if size < HEAD.size:
            raise self._size_error(size, self._size)
        reward, flags = HEAD.unpack_from(body)
        if size == self._size and flags == 0 and self._sum_vector is not None:  # fast path: a plain step with a vector
            seen = np.frombuffer(body, _FLOAT32, -1, HEAD.size)
            return RawStep(reward, flags, seen, None, _is_finite(seen, self._sum_vector))
        if flags & ~(TERMINATED | TRUNCATED | MASKED):
            raise Refused(422, "malformed", f"The flags are {flags}.", "1 terminated, 2 truncated, 4 a mask follows.")
        if size == HEAD.size and flags & TERMINATED:  # the last observation of a terminated episode is not needed
            return RawStep(reward, flags, None, None, False)
        wanted = self._size + self._mask_size if flags & MASKED else self._size
        if size != wanted:
            raise self._size_error(size, wanted)
        mask = np.frombuffer(body, np.uint8, self._mask_size, self._size) if flags & MASKED else None
        return RawStep(reward, flags, _read_leaves(self._spec, body, HEAD.size)[0], mask, self._bytes)

    def write(self, action: Tree) -> bytes:
        if self._single_action is not None:
            if action.dtype is self._single_action:
                return action.tobytes()  # type: ignore[no-any-return]
            return np.asarray(action, self._single_action).tobytes()
        return b"".join(
            np.asarray(leaf, _little(spec.dtype)).tobytes()
            for leaf, spec in zip(leaves(action), leaves(self._action), strict=True)
        )

    def _size_error(self, size: int, wanted: int) -> Refused:
        message = f"The body has {size} bytes; a step of this game has {wanted}."
        return Refused(422, "malformed", message, "float32 reward, uint32 flags, then the observation as GET /spec lays it out.")


@np.errstate(over="ignore", invalid="ignore")  # a hostile body must not print warnings
def _is_finite(vector: Array, ones: Array) -> bool:
    """Check a vector with one dot product. A sum that overflows counts as not finite; the slow path then checks each number."""
    return math.isfinite(np.dot(vector, ones))


def leaves(tree: Tree) -> list[Any]:
    """Return the leaves in the order of the format."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, (tuple, list)):
        return [leaf for item in tree for leaf in leaves(item)]
    return [tree]


def _read_leaves(spec: Tree, body: bytes, at: int) -> tuple[Tree, int]:
    """Return the tree of leaves at offset `at`, and the offset behind them."""
    if isinstance(spec, ArraySpec):
        leaf = np.frombuffer(body, _little(spec.dtype), math.prod(spec.shape), at).reshape(spec.shape)
        return leaf, at + _bytes(spec)
    parts: dict[Any, Tree] = {}
    for key in sorted(spec) if isinstance(spec, dict) else range(len(spec)):
        parts[key], at = _read_leaves(spec[key], body, at)
    return (parts if isinstance(spec, dict) else tuple(parts.values())), at


def _bytes(spec: ArraySpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")
