"""The newest weights of one model on one machine, readable by every process without communication.

An eight-byte counter, mapped by every reader, holds the newest version and its location: checking for a newer version is one memory
read. There are two locations, for two kinds of publishers:

- A learner, which has the weights in memory, copies them into one of three slots of shared memory, and readers copy them from there
  into their networks. A slot is reused three versions later; a sequence number, odd while the slot is written, lets a reader detect
  a torn copy.
- A publisher whose weights are in another process stages a safetensors file, which becomes a version by a rename, without a copy. Such
  a version is immutable: an unlinked file stays alive while it is mapped.
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
_FILE = 0  # location of a version that is not in slot 1, 2 or 3
_LOCATION_BITS = 2
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


class SharedWeightsReader:
    """Reads the versions in `directory`. Cheap and thread-safe; returned arrays may be kept."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self._counter = self._map_counter()
        except (OSError, ValueError) as error:
            raise NotFound(f"There are no weights at {directory}.", "Has the run that published them ended?") from error
        self._slots: _Slots | None = None
        self._compatible: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def _map_counter(self) -> memoryview:
        with open(self.directory / _COUNTER, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)).cast("Q")

    @property
    def version(self) -> int:
        """The newest version; 0 before the first. One memory read."""
        return self._counter[0] >> _LOCATION_BITS

    def read(self) -> tuple[int, dict[str, Array]]:
        """Return the newest version and its weights: read-only views of its file, or a copy. Raises NotFound before the first."""
        for version, where in self._newest():
            if where != _FILE:
                copy = self._open_slots().copy_slot(where)
                if copy is not None:
                    return copy
                continue
            try:
                return version, map_weights(self.directory / _file(version))
            except FileNotFoundError as error:
                if version == self.version:  # otherwise it was replaced in the meantime: retry
                    raise NotFound(
                        f"The weights of version {version} at {self.directory} are gone.", "Has the run ended?"
                    ) from error
        raise self._too_fast_error()

    def load_into(self, model: nn.Module) -> int:
        """Copy the newest version into the parameters and buffers of a model; return its number.

        Raises NotFound before the first version, and IncompatibleCheckpoint (without changes) if it does not fit. The model must not be used
        by another thread meanwhile.
        """
        for _, where in self._newest():
            if where == _FILE:
                version, weights = self.read()
                modules.load_weights(model, weights)
                return version
            slots = self._open_slots()
            if model not in self._compatible:
                modules.check_fit(modules.shapes_of(model), slots.shapes)
                self._compatible.add(model)
            loaded = slots.load_slot(where, model)
            if loaded:
                return loaded
        raise self._too_fast_error()

    def _too_fast_error(self) -> StoreError:
        return StoreError(f"The weights at {self.directory} change faster than they can be read.", "Publish less often.")

    def _newest(self) -> Iterator[tuple[int, int]]:
        """Yield (version, location) repeatedly: a slow reader may be overtaken."""
        for _ in range(_ATTEMPTS):
            packed = self._counter[0]
            yield packed >> _LOCATION_BITS, packed & ((1 << _LOCATION_BITS) - 1)

    def _open_slots(self) -> _Slots:
        if self._slots is None:
            self._slots = _Slots(self.directory / _SLOTS)
        return self._slots


class SharedWeights(SharedWeightsReader):
    """The single writer, for one thread. Versions only increase."""

    def __init__(self, directory: Path, weights: Mapping[str, Array] | None = None, keep: int = KEPT) -> None:
        """With `weights` the slots are created at once for these shapes; otherwise with the first published weights.

        `keep`: number of staged files to keep. Raises StoreFull.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (directory / _COUNTER).exists():
            create_file(directory / _COUNTER, 8, b"")
        super().__init__(directory)
        self._keep = keep
        if weights is not None:
            self._slots_for(weights)

    def _map_counter(self) -> memoryview:
        with open(self.directory / _COUNTER, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")

    def publish(self, version: int, weights: Path | nn.Module | Mapping[str, Array]) -> None:
        """Publish a staged file, or a copy of these weights, as the newest version. Raises StoreError, IncompatibleCheckpoint."""
        if version <= self.version:
            raise StoreError(f"Version {version} does not come after {self.version}.")
        before = self._counter[0] & ((1 << _LOCATION_BITS) - 1)
        if isinstance(weights, nn.Module):
            weights = {name: tensor.detach().cpu().numpy() for name, tensor in weights.state_dict().items()}
        if isinstance(weights, Path):
            where = _FILE
            os.replace(weights, self.directory / _file(version))
        else:
            where = before % SLOTS + 1
            self._slots_for(weights).write(where, version, weights)
        self._counter[0] = version << _LOCATION_BITS | where  # an aligned eight-byte store is atomic
        if _FILE in (where, before):
            for old in sorted(self.directory.glob("*.safetensors"))[: -self._keep]:
                old.unlink(missing_ok=True)

    def _slots_for(self, weights: Mapping[str, Array]) -> _Slots:
        if self._slots is None:
            path = self.directory / _SLOTS
            if not path.exists():
                _make_slots(path, weights)
            self._slots = _Slots(path, writable=True)
        modules.check_fit(self._slots.shapes, modules.shapes_in(weights))
        return self._slots


class _Slots:
    """The mapped file of slots. Slots count from 1."""

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
        self._slot_bytes = [np.ndarray((self._nbytes,), np.uint8, self._map, start + slot * stride) for slot in range(SLOTS)]
        self._views = [self._cut(whole) for whole in self._slot_bytes]
        self._fence = MemoryFence()

    def _cut(self, whole: Array) -> dict[str, Array]:
        return {name: np.ndarray(shape, dtype, whole.data, at) for name, dtype, shape, at in self._table}

    def write(self, slot: int, version: int, weights: Mapping[str, Array]) -> None:
        marks, views = self._marks[slot - 1], self._views[slot - 1]
        marks[0] |= 1  # odd: being written; already odd if the previous writer was killed meanwhile
        self._fence()
        for name, view in views.items():
            np.copyto(view, weights[name])
        marks[1] = version
        self._fence()
        marks[0] += 1
        self._fence()  # the slot is complete before the counter points at it

    def copy_slot(self, slot: int) -> tuple[int, dict[str, Array]] | None:
        """Return the version in a slot and a copy of its weights; None if it was written meanwhile."""
        sequence = self._begin_read(slot)
        whole = self._slot_bytes[slot - 1].copy()
        version = self._end_read(slot, sequence)
        whole.flags.writeable = False
        return (version, self._cut(whole)) if version else None

    def load_slot(self, slot: int, model: nn.Module) -> int:
        """Copy a slot into the model and return its version; 0 if it was written meanwhile, which leaves a torn copy in the model."""
        tensors = model.state_dict()
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            version, weights = self.copy_slot(slot) or (0, {})
            if version:
                modules.load_weights(model, weights)
            return version
        sequence, views = self._begin_read(slot), self._views[slot - 1]
        for name, tensor in tensors.items():
            np.copyto(tensor.detach().numpy(), views[name])
        return self._end_read(slot, sequence)

    def _begin_read(self, slot: int) -> int:
        sequence = self._marks[slot - 1][0]
        self._fence()  # read the number before the weights
        return sequence

    def _end_read(self, slot: int, sequence: int) -> int:
        marks = self._marks[slot - 1]
        version = marks[1]
        self._fence()  # and again after them
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
    """Return the table of a file of slots, the offset of the first slot, and the used bytes per slot. Raises Damaged."""
    try:
        magic, length, checksum = _HEAD.unpack_from(data)
        plain = data[_HEAD.size : _HEAD.size + length]
        if magic != _MAGIC or len(plain) != length or zlib.crc32(plain) != checksum:
            raise Damaged(f"{path} is not a file of weight slots: its header is damaged.")
        table = [(str(name), str(dtype), list(shape), int(at)) for name, dtype, shape, at in json.loads(plain)]
        used = sum(record_bytes(math.prod(shape) * np.dtype(dtype).itemsize) for _, dtype, shape, _ in table)
    except (struct.error, ValueError, TypeError) as error:
        raise Damaged(f"{path} is not a file of weight slots: {error}.") from error
    start = record_bytes(_HEAD.size + length) + SLOTS * ALIGN
    if len(data) < start + SLOTS * record_bytes(used):
        raise Damaged(f"{path} has {len(data)} bytes, not {start + SLOTS * record_bytes(used)}.", "It is truncated.")
    return table, start, used


def stage(directory: Path, weights: Mapping[str, Array]) -> Path:
    """Write weights to a new file below `directory`, to be published or removed. Raises StoreFull."""
    path = directory / f"aside-{uuid.uuid4().hex}"
    try:
        path.write_bytes(serialization.encode_weights(weights))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StoreFull(
            f"Cannot write weights to {directory}: {error.strerror}.", "Enlarge shared memory, or set LUDUS_SHM."
        ) from error
    return path


def map_weights(path: Path) -> dict[str, Array]:
    """Return the arrays of a safetensors file as read-only views of its mapping. Raises FileNotFoundError, Damaged."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        weights = {}
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                (first, last), dtype = entry["data_offsets"], np.dtype(_DTYPES[entry["dtype"]])
                flat = np.frombuffer(data, dtype, (last - first) // dtype.itemsize, start + first)
                weights[name] = flat.reshape(entry["shape"])
        return weights
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path} is not a readable safetensors file: {error}.") from error


def _file(version: int) -> str:
    return f"{version:012d}.safetensors"
