"""Resources of this process: memory allocator and cores."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks instead of returning them to the kernel. Returns whether that was possible.

    By default every temporary tensor above 128 KB is a fresh mapping whose pages are faulted in one by one; in a training
    step of 4,096 samples that was 2,700 faults and 45 % of the time.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return all(
        mallopt(key, value) for key, value in ((_M_MMAP_THRESHOLD, 1 << 28), (_M_TRIM_THRESHOLD, 1 << 29), (_M_TOP_PAD, 1 << 24))
    )


def usable_cores() -> int:
    """Number of cores this process may run on, by its CPU affinity where the system supports it."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
