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

_PF_EXITING = 0x4
_NAME = re.compile(r"ludus-(\d+)-(\d+)-(\d+)-(\d+)-[0-9a-f]+")


class Scratch:
    """Readable by its user alone; removed by `close`, or swept when its owner is dead."""

    def __init__(self, base: Path) -> None:
        sweep(base)
        pid = os.getpid()
        name = f"ludus-{_user()}-{_namespace()}-{pid}-{start_time(pid) or 0}-{secrets.token_hex(3)}"
        self.path = base / name
        self.path.mkdir(mode=0o700)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


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
        mine = user == _user() and namespace == _namespace()  # a process of another container is not seen from here
        if mine and not path.is_symlink() and not alive(pid, started):
            shutil.rmtree(path, ignore_errors=True)
            swept += 1
    return swept


def alive(pid: int, started: int) -> bool:
    """Whether this very process still runs, not another one that got its number."""
    now = start_time(pid)
    if now is not None:
        return now == started or started == 0
    if Path("/proc/self/stat").exists():
        return False
    try:  # no /proc: the number is all there is to go by
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def start_time(pid: int) -> int | None:
    """In clock ticks since boot; None when there is no such process, or no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may contain anything
    # One that is exiting has closed its sockets before it is a zombie: whoever reads their end comes here in between.
    return None if fields[0] in (b"Z", b"X") or int(fields[6]) & _PF_EXITING else int(fields[19])


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _namespace() -> int:
    try:
        return int(re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink())))
    except (OSError, ValueError):
        return 0
