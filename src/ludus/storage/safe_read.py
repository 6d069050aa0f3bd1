"""Safe reading of untrusted files: regular files of bounded size, and JSON of any depth."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ludus.errors import Damaged
from ludus.io.regular_files import NotRegularFile, open_regular

MAX_JSON_BYTES = 64 << 20
"""Limit for manifests and states of checkpoints; those of real runs have at most some hundred kB."""

_CHUNK = 64 << 20
_OLDER = "Use an older checkpoint."


def max_file_bytes() -> int:
    """Return the default size limit of a file that is read as a whole: half of the memory of this machine."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):  # not available on this system
        return 4 << 30


def read_regular_file(path: Path, *, size: int | None = None, limit: int | None = None) -> bytes:
    """Read a regular file of exactly `size` bytes, if given, and at most `limit` bytes (default `max_file_bytes`).

    The last component of the path must not be a symbolic link. Raises Damaged for other files, OSError on read errors.
    """
    limit = max_file_bytes() if limit is None else limit
    try:
        with open_regular(path) as file:
            return _read(file.fileno(), path, size, limit)
    except NotRegularFile as error:
        raise Damaged(f"{error}.", _OLDER) from error


def _read(descriptor: int, path: Path, size: int | None, limit: int) -> bytes:
    actual = os.fstat(descriptor).st_size
    if size is not None and actual != size:
        raise Damaged(f"{path} is damaged: {actual} of {size} bytes.", _OLDER)
    if actual > limit:
        raise Damaged(f"{path} has {actual:,} bytes; at most {limit:,} are read.", _OLDER)
    data, most = bytearray(), limit if size is None else size
    try:
        while len(data) <= most and (more := os.read(descriptor, min(_CHUNK, most + 1 - len(data)))):
            data += more
    except MemoryError as error:
        raise Damaged(f"{path} has {actual:,} bytes, which do not fit into memory.", _OLDER) from error
    if len(data) > most:
        raise Damaged(f"{path} grows while it is read.", _OLDER)
    return bytes(data)


def parse_json(data: bytes | str, what: str) -> Any:
    """Parse JSON. Raises Damaged if it is invalid, too long, or nested too deeply."""
    if len(data) > MAX_JSON_BYTES:
        raise Damaged(f"{what} is damaged: it has {len(data):,} bytes.", _OLDER)
    try:
        return json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Damaged(f"{what} is damaged: {type(error).__name__}: {str(error)[:200]}.", _OLDER) from error
