"""Trees of arrays (nested dicts and tuples with NumPy arrays or tensors as leaves) and their wire format.

A tree is a leaf, a dict with string keys, or a tuple. The wire format is a msgpack header followed by the raw buffers of
the leaves: decoding runs no code, validates every length, and returns views of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from ludus.errors import Damaged

Array = npt.NDArray[Any]
Tree = Any  # a leaf | dict[str, Tree] | tuple[Tree, ...]

_MAGIC = b"LDS1"
_ALIGN = 64  # raw buffers start on cache lines, so that decoded arrays are aligned for any dtype
_WIRE_DTYPES = frozenset("?bBhHiIlLqQefd")
_MALFORMED = (
    msgpack.exceptions.UnpackException,
    *(ValueError, TypeError, KeyError, OverflowError),
    *(SyntaxError, RecursionError),  # np.dtype of an invalid string; a structure nested too deeply
)


def map_tree(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `function` to corresponding leaves; the result has the structure of the first tree."""
    if isinstance(tree, np.ndarray):  # by far the most frequent case, and faster to recognise than a Mapping
        return function(tree, *rest)
    if isinstance(tree, Mapping):
        return {key: map_tree(function, tree[key], *(r[key] for r in rest)) for key in tree}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, item, *(r[i] for r in rest)) for i, item in enumerate(tree))
    return function(tree, *rest)


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) in a fixed order; the path of a tree that is a single leaf is ""."""
    here = prefix + "." if prefix else ""
    if isinstance(tree, Mapping):
        for key in sorted(tree):
            yield from leaves(tree[key], f"{here}{key}")
    elif isinstance(tree, tuple):
        for index, item in enumerate(tree):
            yield from leaves(item, f"{here}{index}")
    else:
        yield prefix, tree


def copy_into(target: Tree, source: Tree) -> None:
    """Copy every leaf of `source` into the preallocated leaf of `target`; shapes and kinds of dtype must agree."""
    if isinstance(target, dict):
        for key, leaf in target.items():
            copy_into(leaf, source[key])
    elif isinstance(target, tuple):
        for leaf, item in zip(target, source, strict=True):
            copy_into(leaf, item)
    else:
        if np.shape(source) != target.shape:  # copyto would broadcast
            raise ValueError(f"a value of shape {list(np.shape(source))} where {list(target.shape)} is expected")
        np.copyto(target, source, casting="same_kind")


def stack(trees: list[Tree]) -> Tree:
    """Stack trees of one structure along a new first axis."""
    return map_tree(lambda *items: np.stack(items), trees[0], *trees[1:])


def concatenate(trees: list[Tree], axis: int = 0) -> Tree:
    return map_tree(lambda *items: np.concatenate(items, axis=axis), trees[0], *trees[1:])


# -- the wire format ----------------------------------------------------------------------------------------------------


class TreeEncoder:
    """Encodes one tree. `size` is known before encoding, so that the caller can provide the buffer."""

    def __init__(self, tree: Tree, meta: Mapping[str, Any] | None = None) -> None:
        """Raises TypeError for a leaf whose dtype cannot be sent to another process."""
        arrays = [(path, np.asarray(leaf, order="C")) for path, leaf in leaves(tree)]
        if len({path for path, _ in arrays}) < len(arrays):
            raise TypeError("Two leaves have the same dotted path; rename a key that contains a dot.")
        offset = end = 0
        table: list[tuple[str, str, list[int], int]] = []
        for path, array in arrays:
            if array.dtype.char not in _WIRE_DTYPES:
                raise TypeError(f"{path or 'array'} has dtype {array.dtype}, which cannot be sent to another process.")
            table.append((path, array.dtype.str, list(array.shape), offset))
            end = offset + array.nbytes
            offset = math.ceil(end / _ALIGN) * _ALIGN
        self._header: bytes = msgpack.packb({"skeleton": _skeleton(tree), "leaves": table, "meta": dict(meta or {})})
        start = math.ceil((len(_MAGIC) + 8 + len(self._header)) / _ALIGN) * _ALIGN
        self._parts = [(start + entry[3], array) for entry, (_, array) in zip(table, arrays, strict=True)]
        self.size = start + end
        """Bytes. The encoding ends with the last leaf, so that any truncation is detected."""

    def write_into(self, buffer: bytearray | memoryview) -> None:
        """Fill the first `size` bytes; padding between leaves is not written."""
        header = self._header
        buffer[:4] = _MAGIC
        buffer[4:12] = len(header).to_bytes(8, "little")
        buffer[12 : 12 + len(header)] = header
        for at, array in self._parts:
            if array.nbytes:
                buffer[at : at + array.nbytes] = array.reshape(-1).view(np.uint8).data

    def bytes(self) -> bytearray:
        out = bytearray(self.size)
        self.write_into(out)
        return out


def encode(tree: Tree, meta: Mapping[str, Any] | None = None) -> bytes:
    """Encode a tree as header (structure, dtypes, shapes, `meta`) and raw buffers. `meta` has values that msgpack supports."""
    return bytes(TreeEncoder(tree, meta).bytes())


def decode(data: bytes | memoryview) -> tuple[Tree, dict[str, Any]]:
    """Return the tree and meta of `encode`. Leaves are read-only views of `data`. Raises Damaged for malformed data."""
    view = memoryview(data)
    if len(view) < 12 or bytes(view[:4]) != _MAGIC:
        raise Damaged("These bytes are not an encoded tree of arrays.")
    length = int.from_bytes(view[4:12], "little")
    start = math.ceil((12 + length) / _ALIGN) * _ALIGN
    if start > len(view):
        raise Damaged(f"The header claims {length} bytes, {len(view) - 12} are there.")
    try:
        header = msgpack.unpackb(view[12 : 12 + length])
        table = {str(path): (np.dtype(dtype), tuple(map(int, shape)), int(at)) for path, dtype, shape, at in header["leaves"]}
        arrays = {path: _leaf(view, path, start, *entry) for path, entry in table.items()}
        return _rebuild(header["skeleton"], arrays), dict(header["meta"])
    except _MALFORMED as error:
        raise Damaged(f"The header of an encoded tree is malformed: {error}.") from error


def _leaf(view: memoryview, path: str, start: int, dtype: np.dtype[Any], shape: tuple[int, ...], at: int) -> Array:
    if dtype.char not in _WIRE_DTYPES or min(shape, default=0) < 0 or at < 0:
        raise Damaged(f"Leaf {path!r} has dtype {dtype} and shape {shape}.")
    size = math.prod(shape) * dtype.itemsize
    if start + at + size > len(view):
        raise Damaged(f"Leaf {path!r} claims {size} bytes beyond the end of the message.")
    array = np.frombuffer(view[start + at : start + at + size], dtype=dtype).reshape(shape)
    array.flags.writeable = False
    return array


def _skeleton(tree: Tree, prefix: str = "") -> Any:
    here = prefix + "." if prefix else ""
    if isinstance(tree, Mapping):
        return {"d": {str(key): _skeleton(tree[key], f"{here}{key}") for key in sorted(tree)}}
    if isinstance(tree, tuple):
        return {"t": [_skeleton(item, f"{here}{i}") for i, item in enumerate(tree)]}
    return prefix


def _rebuild(skeleton: Any, arrays: Mapping[str, Array]) -> Tree:
    if isinstance(skeleton, str):
        if skeleton not in arrays:
            raise Damaged(f"The structure names a leaf {skeleton!r} that does not exist.")
        return arrays[skeleton]
    if isinstance(skeleton, dict) and isinstance(skeleton.get("d"), dict):
        return {key: _rebuild(item, arrays) for key, item in skeleton["d"].items()}
    if isinstance(skeleton, dict) and isinstance(skeleton.get("t"), list):
        return tuple(_rebuild(item, arrays) for item in skeleton["t"])
    raise Damaged("The structure of an encoded tree is malformed.")
