"""A private directory of this process that does not outlive it: sockets and shared weights live in one.

Its name says whose it is (user, PID namespace, process, start time), so that whoever comes later can sweep the directories of
processes that were killed, and never one that is still in use.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

from ludus.process import identity, procfs

_NAME = re.compile(r"ludus-(\d+)-(\d+)-(\d+)-(\d+)-[0-9a-f]+")


class Scratch:
    """Readable by its user alone; removed by `close`, or swept when its owner is dead."""

    def __init__(self, base: Path) -> None:
        sweep(base)
        self.path = base / directory_name()
        self.path.mkdir(mode=0o700)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def directory_name() -> str:
    """One that `sweep` recognizes as this process's."""
    pid = os.getpid()
    return f"ludus-{_user()}-{procfs.pid_namespace()}-{pid}-{identity.start_ticks(pid) or 0}-{secrets.token_hex(3)}"


def bases() -> list[Path]:
    """Where such directories may be: shared memory, and temporary directories."""
    found = (os.environ.get("LUDUS_SHM", "/dev/shm"), tempfile.gettempdir(), "/tmp")  # noqa: S108
    return [Path(base) for base in dict.fromkeys(found)]


def sweep_all() -> int:
    """Remove what killed processes of this user left, wherever it may be."""
    return sum(sweep(base) for base in bases())


def sweep(base: Path) -> int:
    """Remove what killed processes of this user left below `base`."""
    swept = 0
    for path in base.glob("ludus-*"):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        user, namespace, pid, started = map(int, match.groups())
        mine = user == _user() and namespace == procfs.pid_namespace()  # a process of another container is not seen from here
        if mine and not path.is_symlink() and not identity.alive_since(pid, started):
            shutil.rmtree(path, ignore_errors=True)
            swept += 1
    return swept


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0
