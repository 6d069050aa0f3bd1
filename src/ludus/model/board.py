"""The newest weights of one model on one machine, where every process can read them without asking anybody.

A version is an immutable file in shared memory (safetensors, mapped, never copied through a socket); a counter of eight bytes,
mapped by every reader, says which is the newest. So "is there anything newer?" is one memory read, and a version that is being
read cannot change: files appear by rename, before the counter moves, and an unlinked file lives on where it is mapped.
"""

from __future__ import annotations

import json
import mmap
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ludus.errors import Damaged, NotFound, StoreError, StoreFull
from ludus.model import saved
from ludus.tree import Array

KEPT = 2
_COUNTER = "version"
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
_ATTEMPTS = 100


class BoardReader:
    """Reads the versions in `directory`. Cheap to make, safe for threads; whoever has arrays from it may keep them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self._counter = self._mapped()
        except OSError as error:
            raise NotFound(f"There are no weights at {directory}.", "Has the run that published them ended?") from error

    def _mapped(self) -> memoryview:
        with open(self.directory / _COUNTER, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)).cast("Q")

    @property
    def version(self) -> int:
        """The newest version; 0 before the first. One memory read."""
        return self._counter[0]

    def read(self) -> tuple[int, dict[str, Array]]:
        """The newest version and its weights: read-only views of the mapped file. Raises NotFound before the first."""
        for _ in range(_ATTEMPTS):
            version = self.version
            try:
                return version, mapped(self.directory / _file(version))
            except FileNotFoundError:
                if version == self.version:  # else it was replaced while we looked: look again
                    break
        raise NotFound(f"The weights of version {version} at {self.directory} are gone.", "Has the run ended?")


class Board(BoardReader):
    """The one writer. Others hand it files that they staged beside it."""

    def __init__(self, directory: Path, keep: int = KEPT) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (directory / _COUNTER).exists():
            (directory / _COUNTER).write_bytes(bytes(8))
        super().__init__(directory)
        self._keep = keep

    def _mapped(self) -> memoryview:
        with open(self.directory / _COUNTER, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")

    def publish(self, version: int, staged: Path) -> None:
        """Make a staged file the newest version. Versions only grow."""
        if version <= self.version:
            raise StoreError(f"Version {version} does not come after {self.version}.")
        os.replace(staged, self.directory / _file(version))
        self._counter[0] = version  # an aligned store of eight bytes: seen whole or not at all
        for old in sorted(self.directory.glob("*.safetensors"))[: -self._keep]:
            old.unlink(missing_ok=True)


def stage(directory: Path, weights: Mapping[str, Array]) -> Path:
    """Write weights to a file of their own below `directory`, to be published or removed. Raises StoreFull."""
    path = directory / f"aside-{uuid.uuid4().hex}"
    try:
        path.write_bytes(saved.encode_weights(weights))
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
