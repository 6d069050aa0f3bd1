"""Private temporary directories, for sockets and shared weights, that are removed when their process is dead.

The name contains the owner (user, PID namespace, PID, start time), so that later processes can remove the directories of
processes that were killed and never one that is in use.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

from ludus.process import identity, procfs

_SHM, _MIN_SHM_FREE = Path("/dev/shm"), 1 << 28  # noqa: S108 - a private directory is made below it
_NAME = re.compile(r"ludus-(\d+)-(\d+)-(\d+)-(\d+)-[0-9a-f]+")


class TempDir:
    """A directory with mode 0700. Removed by `close`, or by `sweep` when its owner is dead."""

    def __init__(self, base: Path) -> None:
        sweep(base)
        self.path = base / directory_name()
        self.path.mkdir(mode=0o700)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def directory_name() -> str:
    """A new name that `sweep` recognizes as owned by this process."""
    pid = os.getpid()
    return f"ludus-{_user()}-{procfs.pid_namespace()}-{pid}-{identity.start_ticks(pid) or 0}-{secrets.token_hex(3)}"


def base_dirs() -> list[Path]:
    """Where such directories may be: shared memory and temporary directories."""
    found = (os.environ.get("LUDUS_SHM", "/dev/shm"), tempfile.gettempdir(), "/tmp")  # noqa: S108
    return [Path(base) for base in dict.fromkeys(found)]


def shared_memory_dir() -> Path:
    """Shared memory (LUDUS_SHM or /dev/shm) if it has room, else the temporary directory."""
    if "LUDUS_SHM" in os.environ:
        return Path(os.environ["LUDUS_SHM"])
    with contextlib.suppress(OSError):
        stat = os.statvfs(_SHM)
        if os.access(_SHM, os.W_OK) and stat.f_bavail * stat.f_frsize >= _MIN_SHM_FREE:
            return _SHM
    return Path(tempfile.gettempdir())


def short_temp_dir(max_bytes: int = 32) -> Path:
    """The temporary directory, or /tmp if its path would be too long for a unix socket."""
    temp = Path(tempfile.gettempdir())
    return temp if len(os.fsencode(temp)) <= max_bytes or not Path("/tmp").is_dir() else Path("/tmp")  # noqa: S108


def sweep_all() -> int:
    """Remove the directories of dead processes of this user in all base directories; returns their number."""
    return sum(sweep(base) for base in base_dirs())


def sweep(base: Path) -> int:
    """Remove the directories of dead processes of this user below `base`; returns their number."""
    swept = 0
    for path in base.glob("ludus-*"):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        user, namespace, pid, started = map(int, match.groups())
        mine = user == _user() and namespace == procfs.pid_namespace()  # processes of other containers are invisible here
        if mine and not path.is_symlink() and not identity.is_alive_since(pid, started):
            shutil.rmtree(path, ignore_errors=True)
            swept += 1
    return swept


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0
