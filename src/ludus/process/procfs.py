"""Read process information from /proc. Returns empty values on other systems and for processes that have ended.

Standard library only, and fast: guards and servers read all processes below a game several times a second.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

_EXITING = 0x4
"""PF_EXITING of the kernel: the process has closed its files but is not a zombie yet."""


class Stat(NamedTuple):
    """Fields of /proc/PID/stat. Times are in clock ticks (SC_CLK_TCK), `start` since boot, memory in pages (SC_PAGE_SIZE)."""

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
        """True for a zombie or dead process. The first thread of a process may end before the others: see `threads`."""
        return self.state in ("Z", "X")

    @property
    def is_exiting(self) -> bool:
        return self.has_ended or bool(self.flags & _EXITING)


def is_available() -> bool:
    return os.path.exists("/proc/self/stat")  # noqa: PTH110 - called often


def read_stat(pid: int) -> Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the command name in parentheses may contain any character
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
    """Entries NAME=VALUE that the process was started with."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return set(map(os.fsdecode, file.read().split(b"\0")))
    return set()


def proportional_memory(pid: int) -> int:
    """Memory in bytes (Pss): shared pages count in proportion. Slower than `Stat.resident`."""
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
    """Direct children, including zombies. A process that is being re-parented may be missing."""
    return _read_children(pid) if _has_children_file() else _children_by_parent().get(pid, [])


def list_descendants(pid: int) -> list[int]:
    """Running processes below this one."""
    children_of = _read_children if _has_children_file() else _children_by_parent().get
    found: list[int] = []
    rest = [pid]
    while rest:
        below = children_of(rest.pop()) or []
        found += below
        rest += below
    return [each for each in found if _is_running(each)]


def list_open_files() -> set[int]:
    """File descriptors of this process, including that of the listing; empty if the system cannot list them."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return set(map(int, os.listdir(folder)))  # noqa: PTH208
    return set()


def list_thread_names() -> list[str]:
    """Names of the threads of this process, as set in the kernel."""
    names = []
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
            with contextlib.suppress(OSError):  # it has just ended
                names.append(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    return names


def boot_id() -> str:
    """An id that changes with every boot; empty if the system has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def pid_namespace() -> int:
    """Id of the PID namespace, 0 if the system has none. The same PID in two namespaces means two processes."""
    with contextlib.suppress(OSError, ValueError):
        return int(os.readlink("/proc/self/ns/pid").strip("pid:[]"))  # noqa: PTH115
    return 0


def _has_children_file() -> bool:
    own = os.getpid()
    return os.path.exists(f"/proc/{own}/task/{own}/children")  # noqa: PTH110


def _read_children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has just ended
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def _children_by_parent() -> dict[int, list[int]]:
    """Map of parent to children, for kernels without the `children` file."""
    found: dict[int, list[int]] = {}
    for pid in list_pids():
        stat = read_stat(pid)
        if stat is not None:
            found.setdefault(stat.parent, []).append(pid)
    return found


def _is_running(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and (not stat.has_ended or stat.threads > 1)
