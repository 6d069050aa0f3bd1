"""Reading what may have been written by anybody: files of a bounded size that are no links, devices or pipes, and JSON of any depth."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ludus.errors import Damaged
from ludus.io.regular_files import NotRegularFile, open_regular

MAX_JSON_BYTES = 64 << 20
"""Of a manifest or of the state of a checkpoint; the largest of real runs have some hundred kB."""

_AT_A_TIME = 64 << 20
_OLDER = "Use an older checkpoint."


def max_file_bytes() -> int:
    """Bytes that a file may have which is read as a whole: half of the memory of this machine."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):  # a system that does not tell
        return 4 << 30


def read_regular_file(path: Path, *, size: int | None = None, limit: int | None = None) -> bytes:
    """The content of a regular file that has `size` bytes, and never more than `limit` (`largest_file`).

    A link at the end of the path is not followed; directories on the way may be links. Raises Damaged for anything else than such a
    file, OSError where it cannot be read.
    """
    limit = max_file_bytes() if limit is None else limit
    try:
        with open_regular(path) as file:
            return _read(file.fileno(), path, size, limit)
    except NotRegularFile as error:
        raise Damaged(f"{error}.", _OLDER) from error


def _read(descriptor: int, path: Path, size: int | None, limit: int) -> bytes:
    found = os.fstat(descriptor)
    if size is not None and found.st_size != size:
        raise Damaged(f"{path} is damaged: {found.st_size} of {size} bytes.", _OLDER)
    if found.st_size > limit:
        raise Damaged(f"{path} has {found.st_size:,} bytes; at most {limit:,} are read.", _OLDER)
    data, most = bytearray(), limit if size is None else size
    try:
        while len(data) <= most and (more := os.read(descriptor, min(_AT_A_TIME, most + 1 - len(data)))):
            data += more
    except MemoryError as error:
        raise Damaged(f"{path} has {found.st_size:,} bytes, which do not fit into memory.", _OLDER) from error
    if len(data) > most:
        raise Damaged(f"{path} grows while it is read.", _OLDER)
    return bytes(data)


def parse_json(data: bytes | str, what: str) -> Any:
    """The value of a JSON text. Raises Damaged for what is none, is too long, or is nested too deeply."""
    if len(data) > MAX_JSON_BYTES:
        raise Damaged(f"{what} is damaged: it has {len(data):,} bytes.", _OLDER)
    try:
        return json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Damaged(f"{what} is damaged: {type(error).__name__}: {str(error)[:200]}.", _OLDER) from error
