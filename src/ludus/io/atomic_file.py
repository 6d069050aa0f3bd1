"""Replace a file in one step: a reader finds the old content or the new content, also after a crash.

The new content is written to a temporary file in the same directory, `.aside-…`, which is renamed when it is complete. A process that
is killed before that leaves the temporary file behind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".aside-"
"""Prefix of temporary names."""

_SYNC_UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EISDIR}


def replace_file(path: Path, data: bytes | bytearray | memoryview | str, *, mode: int = 0o666, durable: bool = False) -> None:
    """Text becomes UTF-8. `mode` is subject to the umask. With `durable` the content is on the disk when this returns."""
    with open_for_replace(path, mode=mode, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def replace_json(path: Path, value: Any, *, mode: int = 0o666, indent: int | None = None) -> None:
    replace_file(path, json.dumps(value, indent=indent), mode=mode)


def create_once(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Create a file with its content, unless it exists. Raises FileExistsError in all but one of concurrent writers."""
    temporary = temporary_path(path)
    try:
        with open_new(temporary, mode) as file:
            file.write(data)
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def open_for_replace(path: Path, *, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that replaces the one at `path` when the block ends; an exception in the block discards it."""
    temporary = temporary_path(path)
    with _rename_or_discard(temporary, path), open_new(temporary, mode) as file:
        yield file
        if durable:
            sync_file(file)
    if durable:
        sync_directory(path.parent)


@contextlib.contextmanager
def path_for_replace(path: Path) -> Iterator[Path]:
    """Like `open_for_replace`, where the block creates the file itself. The yielded path has the suffix of `path`."""
    temporary = temporary_path(path, path.suffix)
    with _rename_or_discard(temporary, path):
        yield temporary


@contextlib.contextmanager
def _rename_or_discard(temporary: Path, path: Path) -> Iterator[None]:
    try:
        yield
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # it does not exist after the rename
            temporary.unlink()


def temporary_path(path: Path, suffix: str = "") -> Path:
    """A new name in the directory of `path`; a short one, as the name of `path` may have the greatest possible length."""
    return path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}{suffix}")


def open_new(path: Path, mode: int = 0o666) -> BinaryIO:
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def sync_file(file: BinaryIO) -> None:
    file.flush()
    with _allow_unsupported():
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable."""
    if os.name == "nt":  # directories cannot be opened there
        return
    with _allow_unsupported():
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _allow_unsupported() -> Iterator[None]:
    """Some file systems cannot sync directories, or anything. Any other error means that data is lost."""
    try:
        yield
    except OSError as error:
        if error.errno not in _SYNC_UNSUPPORTED:
            raise
