"""CPU, memory and threads of a game's process tree."""

from __future__ import annotations

import os
from typing import NamedTuple

from ludus.process import procfs

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ResourceUsage(NamedTuple):
    cpu_s: float = 0.0
    memory_mb: float = 0.0
    threads: int = 0


def process_tree_usage(guard: int, *, shared: bool = False) -> ResourceUsage:
    """Sum over all processes below a guard; CPU time includes ended ones. Zero without /proc.

    `shared`: the processes are forks that share most pages, so proportional memory is counted (slower).
    """
    own = procfs.read_stat(guard)
    if own is None:
        return ResourceUsage()
    ticks, memory, threads = own.children_cpu, 0.0, 0  # of children that the guard has reaped
    for pid in procfs.list_descendants(guard):
        found = procfs.read_stat(pid)
        if found is not None:
            ticks += found.cpu + found.children_cpu
            threads += found.threads
            memory += procfs.proportional_memory(pid) if shared else found.resident * _PAGE
    return ResourceUsage(ticks / _TICKS, memory / 1e6, threads)


def own_usage() -> tuple[ResourceUsage, int]:
    """Usage of this process, and its number of open files."""
    found = procfs.read_stat(os.getpid())
    files = max(0, len(procfs.list_open_files()) - 1)  # one is the listing itself
    if found is None:
        return ResourceUsage(), files
    return ResourceUsage(found.cpu / _TICKS, found.resident * _PAGE / 1e6, found.threads), files
