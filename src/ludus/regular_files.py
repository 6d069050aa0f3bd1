"""Opening files in directories that others can write to: a link, pipe or device in place of a file is refused, never read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # not on Windows
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Only the last part of `path` must not be a link; its directories may be. Raises OSError."""
    handle = os.open(
        path, os.O_RDONLY | _NOFOLLOW | _NONBLOCK | _CLOEXEC
    )  # O_NONBLOCK: opening a pipe must not wait for its writer
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is not a regular file")
    return open(handle, "rb")


def read_regular(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises OSError, ValueError when it is larger."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > most else file.read(most + 1)
    if size > most or len(data) > most:
        raise ValueError(f"{path.name} is larger than {most:,} bytes")
    return data
