"""Reads what Linux tells about processes in /proc. Elsewhere, and about processes that are gone, there is nothing to read.

Standard library only, and quick: guards and servers look at all processes below a game several times a second.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

_EXITING = 0x4
"""PF_EXITING of the kernel: the process has closed its files, but is no zombie yet."""


class Stat(NamedTuple):
    """/proc/PID/stat; times in clock ticks (SC_CLK_TCK), `start` since boot, memory in pages (SC_PAGE_SIZE)."""

    state: str
    parent: int
    flags: int
    cpu: int
    children_cpu: int
    threads: int
    start: int
    resident: int

    @property
    def has_ended(self) -> bool:
        """It is a zombie, or dead. The first thread of a process may have ended before the others: see `threads`."""
        return self.state in ("Z", "X")

    @property
    def is_exiting(self) -> bool:
        return self.has_ended or bool(self.flags & _EXITING)


def is_available() -> bool:
    return os.path.exists("/proc/self/stat")  # noqa: PTH110 - asked often


def read_stat(pid: int) -> Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before it may contain anything
    return Stat(
        state=fields[0].decode(),
        parent=int(fields[1]),
        flags=int(fields[6]),
        cpu=int(fields[11]) + int(fields[12]),
        children_cpu=int(fields[13]) + int(fields[14]),
        threads=int(fields[17]),
        start=int(fields[19]),
        resident=int(fields[21]),
    )


def read_environment(pid: int) -> set[str]:
    """NAME=VALUE, as the process was started with."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return set(map(os.fsdecode, file.read().split(b"\0")))
    return set()


def proportional_memory(pid: int) -> int:
    """Bytes, of which those shared with other processes count in part (Pss). Slower than `Stat.resident`."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def list_pids() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names are all that is needed
    return []


def list_children(pid: int) -> list[int]:
    """Zombies included. One that changes its parent at this moment may be missing."""
    return _listed_children(pid) if _lists_children() else _children_by_parent().get(pid, [])


def list_descendants(pid: int) -> list[int]:
    """All running processes below this one."""
    children_of = _listed_children if _lists_children() else _children_by_parent().get
    found: list[int] = []
    rest = [pid]
    while rest:
        below = children_of(rest.pop()) or []
        found += below
        rest += below
    return [each for each in found if _runs(each)]


def list_open_files() -> set[int]:
    """Descriptors of this process, that of the listing itself included; none where the system has no list."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return set(map(int, os.listdir(folder)))  # noqa: PTH208
    return set()


def list_thread_names() -> list[str]:
    """Of this process, as the kernel knows them."""
    names = []
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
            with contextlib.suppress(OSError):  # it has just ended
                names.append(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    return names


def boot_id() -> str:
    """Another one after every start of the machine; empty where the system has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def pid_namespace() -> int:
    """In two namespaces (containers) the same number means two processes. 0 where the system has none."""
    with contextlib.suppress(OSError, ValueError):
        return int(os.readlink("/proc/self/ns/pid").strip("pid:[]"))  # noqa: PTH115
    return 0


def _lists_children() -> bool:
    own = os.getpid()
    return os.path.exists(f"/proc/{own}/task/{own}/children")  # noqa: PTH110


def _listed_children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has just ended
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def _children_by_parent() -> dict[int, list[int]]:
    """For kernels that do not list them."""
    found: dict[int, list[int]] = {}
    for pid in list_pids():
        stat = read_stat(pid)
        if stat is not None:
            found.setdefault(stat.parent, []).append(pid)
    return found


def _runs(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and (not stat.has_ended or stat.threads > 1)
