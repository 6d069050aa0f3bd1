"""Store: durable bytes by key, for checkpoints, versions and metadata of runs.

Keys are relative paths with forward slashes. A *bundle* is a set of files that becomes visible atomically, with a manifest of
sizes and checksums by which incomplete or damaged bundles are detected.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

from ludus.core import plugins
from ludus.errors import Damaged, UsageError
from ludus.storage.safe_read import parse_json

STORES: Mapping[str, str] = {
    "local": "ludus.storage.local:LocalStore",
    "s3": "ludus.storage.s3:S3Store",
}
MANIFEST = "manifest.json"
Bytes = bytes | bytearray | memoryview
WriteGuard = Callable[[], None]
"""Raises Fenced if the writer has lost the right to write."""


class Store(Protocol):
    """All operations are safe against crashes at any time and against concurrent writers of the same store."""

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        """Write atomically. Raises StoreFull, or AlreadyExists if the key exists and `overwrite` is false."""
        ...

    def get(self, key: str) -> bytes:
        """Raises NotFound."""
        ...

    @property
    def url(self) -> str:
        """Path or URL (`s3://bucket/prefix`) without secrets."""
        ...

    def put_bundle(self, key: str, files: Mapping[str, Bytes], *, guard: WriteGuard | None = None) -> None:
        """Write a set of files that becomes visible atomically. Raises AlreadyExists, StoreFull.

        `guard` is called after everything is written and before it becomes visible; if it raises, it never does.
        """
        ...

    def get_bundle(self, key: str) -> dict[str, bytes]:
        """Return all files of a bundle, verified by its manifest. Raises NotFound, Damaged."""
        ...

    def get_file(self, key: str, name: str) -> bytes:
        """Return one file of a bundle, verified by its manifest. Raises NotFound, Damaged."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix`, sorted: files, directories and complete bundles."""
        ...

    def delete(self, key: str) -> None:
        """Delete a file or a bundle, if it exists."""
        ...

    def sweep(self, prefix: str) -> int:
        """Remove unfinished writes of crashed processes below `prefix`; return their number. Only for the owner of the prefix."""
        ...


def open_store(url: str) -> Store:
    """Open a directory (`path`, `file://path`, `nfs://path` of a mount) or `scheme://…` of a backend in `STORES`.

    Raises UnknownName.
    """
    if "://" in url:
        scheme, _, rest = url.partition("://")
        if scheme in ("file", "nfs"):
            url = rest
        else:
            opened: Store = plugins.resolve("store", scheme, STORES)(url)
            return opened
    local: Store = plugins.resolve("store", "local", STORES)(url)
    return local


# -- shared by all backends ---------------------------------------------------------------------------------------------


def check_key(key: str) -> str:
    """Return the key. Raises UsageError for one that could refer to a file outside of the store."""
    parts = key.split("/")
    if not key or key.startswith("/") or "\\" in key or "\0" in key or any(p in ("", ".", "..") for p in parts):
        raise UsageError(f"{key!r} is not a valid key.")
    return key


def make_manifest(files: Mapping[str, Bytes]) -> bytes:
    if not files or MANIFEST in files:
        raise UsageError(f"A bundle has at least one file, and none called {MANIFEST}.")
    for name in files:
        if check_key(name) != name or "/" in name:
            raise UsageError(f"{name!r} is not a valid file name in a bundle.")
    entries = {name: {"bytes": len(data), "crc32": zlib.crc32(data)} for name, data in files.items()}
    return json.dumps({"format": 1, "files": entries}, indent=1).encode()


def read_manifest(key: str, data: bytes) -> dict[str, tuple[int, int]]:
    try:
        entries = parse_json(data, f"The manifest of {key}")["files"]
        if not entries:
            raise ValueError("it names no files")
        return {check_key(name): (int(e["bytes"]), int(e["crc32"])) for name, e in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, UsageError) as error:
        raise Damaged(f"The manifest of {key} is damaged: {error}.") from error


def check_file(key: str, name: str, data: bytes, expected: tuple[int, int]) -> bytes:
    size, crc = expected
    if len(data) != size or zlib.crc32(data) != crc:
        raise Damaged(f"{key}/{name} is damaged: {len(data)} of {size} bytes, or a wrong checksum.", "Use an older checkpoint.")
    return data
