"""What a game uses of the machine: it and all that it has started, summed."""

from __future__ import annotations

import os
from typing import NamedTuple

from ludus.process import procfs

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    cpu_s: float = 0.0
    memory_mb: float = 0.0
    threads: int = 0


def usage(guard: int, *, shared: bool = False) -> Usage:
    """Of all processes below a guard, those that have ended included as far as time goes; where there is no /proc: nothing.

    `shared`: they are forks of one process and have most of their pages in common, which are counted in parts (slower).
    """
    own = procfs.read_stat(guard)
    if own is None:
        return Usage()
    ticks, memory, threads = own.children_cpu, 0.0, 0  # what the guard has waited for
    for pid in procfs.list_descendants(guard):
        found = procfs.read_stat(pid)
        if found is not None:
            ticks += found.cpu + found.children_cpu
            threads += found.threads
            memory += procfs.proportional_memory(pid) if shared else found.resident * _PAGE
    return Usage(ticks / _TICKS, memory / 1e6, threads)


def own() -> tuple[Usage, int]:
    """Of this process alone, and how many files it has open."""
    found = procfs.read_stat(os.getpid())
    files = max(0, len(procfs.list_open_files()) - 1)  # one is the listing itself
    return (Usage() if found is None else Usage(found.cpu / _TICKS, found.resident * _PAGE / 1e6, found.threads)), files
