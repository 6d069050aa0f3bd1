"""Opening regular files only, in directories that others can write to: symbolic links, pipes and devices are errors."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")  # if available; O_NONBLOCK: opening a pipe must not block


class NotRegularFile(OSError):
    """A symbolic link, pipe or device where a file is expected."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. A link at the end of `path` is not followed; its directories may be links.

    Raises NotRegularFile, and OSError as `open` does.
    """
    try:
        handle = os.open(path, os.O_RDONLY | sum(getattr(os, name, 0) for name in _FLAGS))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and path.is_symlink():
            raise NotRegularFile(f"{path} is a link, not a regular file") from error
        if error.errno == errno.ENXIO and path.exists():
            raise NotRegularFile(f"{path} is not a regular file") from error
        raise
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return open(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise NotRegularFile(f"{path} is not a regular file")


def read_regular(path: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes. Raises OSError, or ValueError if it is larger."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > most else file.read(most + 1)
    if size > most or len(data) > most:
        raise ValueError(f"{path.name} is larger than {most:,} bytes")
    return data
