"""The newest weights of one model on one machine, where every process can read them without asking anybody.

A counter of eight bytes, mapped by every reader, says which version is the newest and where it lies; so "is there anything
newer?" is one memory read. There are two places, for two kinds of publisher:

- whoever has the weights at hand (a learner) copies them into one of a few slots of shared memory, and readers copy them from
  there into their networks: a memory copy on each side, into pages that are there already. A slot is written again three
  versions later. A sequence number, odd while that happens, tells a reader that what it copied is not whole.
- whoever has the weights in another process stages a file (safetensors), which becomes a version by a rename: whoever publishes
  it touches no byte of it. Such a version is immutable: an unlinked file lives on where it is mapped.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import uuid
import weakref
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ludus.core.tree import Array
from ludus.errors import Damaged, NotFound, StoreError, StoreFull
from ludus.io.atomic_file import path_for_replace
from ludus.models.weights import module_spec as modules
from ludus.models.weights import serialization
from ludus.transport.ring_buffer import ALIGN, MemoryFence, create_file, record_bytes

KEPT = 2
SLOTS = 3
_COUNTER, _SLOTS = "version", "slots"
_FILE = 0  # where a version lies, if not in slot 1, 2 or 3
_WHERE_BITS = 2
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}
_ATTEMPTS = 1000
_MAGIC = b"LUDSLOT1"
_HEAD = struct.Struct("<8sQQ")  # magic, length of the table, its checksum


class BoardReader:
    """Reads the versions in `directory`. Cheap to make, safe for threads; whoever has arrays from it may keep them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self._counter = self._mapped()
        except (OSError, ValueError) as error:
            raise NotFound(f"There are no weights at {directory}.", "Has the run that published them ended?") from error
        self._slots: _Slots | None = None
        self._fitting: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def _mapped(self) -> memoryview:
        with open(self.directory / _COUNTER, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)).cast("Q")

    @property
    def version(self) -> int:
        """The newest version; 0 before the first. One memory read."""
        return self._counter[0] >> _WHERE_BITS

    def read(self) -> tuple[int, dict[str, Array]]:
        """The newest version and its weights: read-only views of its file, or a copy. Raises NotFound before the first."""
        for version, where in self._newest():
            if where != _FILE:
                copy = self._opened().copied(where)
                if copy is not None:
                    return copy
                continue
            try:
                return version, mapped(self.directory / _file(version))
            except FileNotFoundError as error:
                if version == self.version:  # else it was replaced while we looked: look again
                    raise NotFound(
                        f"The weights of version {version} at {self.directory} are gone.", "Has the run ended?"
                    ) from error
        raise self._too_fast()

    def load_into(self, model: nn.Module) -> int:
        """Copy the newest version into the parameters and buffers of a model; returns its number.

        Raises NotFound before the first version, IncompatibleCheckpoint (and then has changed nothing) when it does not fit.
        The model is not to be used by another thread meanwhile.
        """
        for _, where in self._newest():
            if where == _FILE:
                version, weights = self.read()
                modules.load_weights(model, weights)
                return version
            slots = self._opened()
            if model not in self._fitting:
                modules.check_fit(modules.shapes_of(model), slots.shapes)
                self._fitting.add(model)
            loaded = slots.loaded(where, model)
            if loaded:
                return loaded
        raise self._too_fast()

    def _too_fast(self) -> StoreError:
        return StoreError(f"The weights at {self.directory} change faster than they can be read.", "Publish less often.")

    def _newest(self) -> Iterator[tuple[int, int]]:
        """(version, where), again and again: a slow reader may be overtaken."""
        for _ in range(_ATTEMPTS):
            packed = self._counter[0]
            yield packed >> _WHERE_BITS, packed & ((1 << _WHERE_BITS) - 1)

    def _opened(self) -> _Slots:
        if self._slots is None:
            self._slots = _Slots(self.directory / _SLOTS)
        return self._slots


class Board(BoardReader):
    """The one writer, of one thread. Versions only grow."""

    def __init__(self, directory: Path, weights: Mapping[str, Array] | None = None, keep: int = KEPT) -> None:
        """With `weights` the slots are made at once, for weights of these shapes; else with the first that are published.

        `keep`: how many staged files. Raises StoreFull.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (directory / _COUNTER).exists():
            create_file(directory / _COUNTER, 8, b"")
        super().__init__(directory)
        self._keep = keep
        if weights is not None:
            self._writable(weights)

    def _mapped(self) -> memoryview:
        with open(self.directory / _COUNTER, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")

    def publish(self, version: int, weights: Path | nn.Module | Mapping[str, Array]) -> None:
        """Make a staged file, or a copy of these weights, the newest version. Raises StoreError, IncompatibleCheckpoint."""
        if version <= self.version:
            raise StoreError(f"Version {version} does not come after {self.version}.")
        before = self._counter[0] & ((1 << _WHERE_BITS) - 1)
        if isinstance(weights, Path):
            where = _FILE
            os.replace(weights, self.directory / _file(version))
        else:
            arrays = _views_of(weights) if isinstance(weights, nn.Module) else weights
            where = before % SLOTS + 1
            self._writable(arrays).write(where, version, arrays)
        self._counter[0] = version << _WHERE_BITS | where  # an aligned store of eight bytes: seen whole or not at all
        if _FILE in (where, before):
            for old in sorted(self.directory.glob("*.safetensors"))[: -self._keep]:
                old.unlink(missing_ok=True)

    def _writable(self, weights: Mapping[str, Array]) -> _Slots:
        if self._slots is None:
            path = self.directory / _SLOTS
            if not path.exists():
                _make_slots(path, weights)
            self._slots = _Slots(path, writable=True)
        modules.check_fit(self._slots.shapes, modules.shapes_in(weights))
        return self._slots


class _Slots:
    """The file of slots, mapped. Slots count from 1."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        try:
            with open(path, "r+b" if writable else "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=access)
        except (OSError, ValueError) as error:
            raise NotFound(f"There are no weights at {path}.", "Has the run that published them ended?") from error
        table, start, self._nbytes = _read_table(path, self._map)
        self.shapes = {name: (tuple(shape), str(np.dtype(dtype))) for name, dtype, shape, _ in table}
        self._table = [(name, np.dtype(dtype), tuple(shape), at) for name, dtype, shape, at in table]
        first = start - SLOTS * ALIGN
        marks = [first + slot * ALIGN for slot in range(SLOTS)]
        self._marks = [memoryview(self._map)[at : at + 16].cast("Q") for at in marks]  # sequence number, version
        stride = record_bytes(self._nbytes)
        self._whole = [np.ndarray((self._nbytes,), np.uint8, self._map, start + slot * stride) for slot in range(SLOTS)]
        self._views = [self._cut(whole) for whole in self._whole]
        self._fence = MemoryFence()

    def _cut(self, whole: Array) -> dict[str, Array]:
        return {name: np.ndarray(shape, dtype, whole.data, at) for name, dtype, shape, at in self._table}

    def write(self, slot: int, version: int, weights: Mapping[str, Array]) -> None:
        marks, views = self._marks[slot - 1], self._views[slot - 1]
        marks[0] |= 1  # odd: being written; it is odd already when the writer before was killed at it
        self._fence()
        for name, view in views.items():
            np.copyto(view, weights[name])
        marks[1] = version
        self._fence()
        marks[0] += 1
        self._fence()  # the slot is whole before the counter points at it

    def copied(self, slot: int) -> tuple[int, dict[str, Array]] | None:
        """The version in a slot and a copy of its weights; None when it was written meanwhile."""
        sequence = self._begun(slot)
        whole = self._whole[slot - 1].copy()
        version = self._ended(slot, sequence)
        whole.flags.writeable = False
        return (version, self._cut(whole)) if version else None

    def loaded(self, slot: int, model: nn.Module) -> int:
        """The version that is now in the model; 0 when it was written meanwhile: what is in the model is not whole, then."""
        tensors = model.state_dict()
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            version, weights = self.copied(slot) or (0, {})
            if version:
                modules.load_weights(model, weights)
            return version
        sequence, views = self._begun(slot), self._views[slot - 1]
        for name, tensor in tensors.items():
            np.copyto(tensor.detach().numpy(), views[name])
        return self._ended(slot, sequence)

    def _begun(self, slot: int) -> int:
        sequence = self._marks[slot - 1][0]
        self._fence()  # the number is read before the weights
        return sequence

    def _ended(self, slot: int, sequence: int) -> int:
        marks = self._marks[slot - 1]
        version = marks[1]
        self._fence()  # and once more after them
        return version if sequence % 2 == 0 and marks[0] == sequence else 0


def _make_slots(path: Path, weights: Mapping[str, Array]) -> None:
    table, end = [], 0
    for name, array in weights.items():
        table.append((name, array.dtype.str, list(array.shape), end))
        end += record_bytes(array.nbytes)
    plain = json.dumps(table).encode()
    head = _HEAD.pack(_MAGIC, len(plain), zlib.crc32(plain)) + plain
    with path_for_replace(path) as temporary:
        create_file(temporary, record_bytes(len(head)) + SLOTS * (ALIGN + record_bytes(end)), head)


def _read_table(path: Path, data: mmap.mmap) -> tuple[list[tuple[str, str, list[int], int]], int, int]:
    """The table of a file of slots, where the first slot starts, and how much of a slot is used. Raises Damaged."""
    try:
        magic, length, checksum = _HEAD.unpack_from(data)
        plain = data[_HEAD.size : _HEAD.size + length]
        if magic != _MAGIC or len(plain) != length or zlib.crc32(plain) != checksum:
            raise Damaged(f"{path} does not hold slots of weights: its header is damaged.")
        table = [(str(name), str(dtype), list(shape), int(at)) for name, dtype, shape, at in json.loads(plain)]
        used = sum(record_bytes(math.prod(shape) * np.dtype(dtype).itemsize) for _, dtype, shape, _ in table)
    except (struct.error, ValueError, TypeError) as error:
        raise Damaged(f"{path} does not hold slots of weights: {error}.") from error
    start = record_bytes(_HEAD.size + length) + SLOTS * ALIGN
    if len(data) < start + SLOTS * record_bytes(used):
        raise Damaged(f"{path} has {len(data)} bytes, not {start + SLOTS * record_bytes(used)}.", "Was it cut off?")
    return table, start, used


def _views_of(model: nn.Module) -> dict[str, Array]:
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()}


def stage(directory: Path, weights: Mapping[str, Array]) -> Path:
    """Write weights to a file of their own below `directory`, to be published or removed. Raises StoreFull."""
    path = directory / f"aside-{uuid.uuid4().hex}"
    try:
        path.write_bytes(serialization.encode_weights(weights))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StoreFull(
            f"Cannot write weights to {directory}: {error.strerror}.", "Give shared memory more room, or set LUDUS_SHM."
        ) from error
    return path


def mapped(path: Path) -> dict[str, Array]:
    """The arrays of a safetensors file as read-only views of its mapping. Raises FileNotFoundError, Damaged."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        entries = json.loads(data[8:start])
        return {name: _view(data, start, entry) for name, entry in entries.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path} is not a readable safetensors file: {error}.") from error


def _view(data: mmap.mmap, start: int, entry: Mapping[str, Any]) -> Array:
    first, last = entry["data_offsets"]
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    count = (last - first) // dtype.itemsize
    return np.frombuffer(data, dtype, count, start + first).reshape(entry["shape"])


def _file(version: int) -> str:
    return f"{version:012d}.safetensors"
