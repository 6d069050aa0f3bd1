"""What a game uses of the machine: it and all that it has started, summed."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from ludus.process import identity

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
    own = _stat(guard)
    if own is None:
        return Usage()
    ticks, memory, threads = sum(own[13:15]), 0.0, 0  # what the guard has waited for
    for pid in identity.descendants(guard):
        found = _stat(pid)
        if found is not None:
            ticks += sum(found[11:15])
            threads += found[17]
            memory += _proportional(pid) if shared else found[21] * _PAGE
    return Usage(ticks / _TICKS, memory / 1e6, threads)


def own() -> tuple[Usage, int]:
    """Of this process alone, and how many files it has open."""
    found = _stat(os.getpid())
    files = 0
    with contextlib.suppress(OSError):
        files = len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 - one is the listing itself
    return (Usage() if found is None else Usage(sum(found[11:13]) / _TICKS, found[21] * _PAGE / 1e6, found[17])), files


def _stat(pid: int) -> list[int] | None:
    """As proc(5) numbers them from the third on; what is no number is 0."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    words = text[text.rindex(b")") + 2 :].split()
    return [int(word) if word.lstrip(b"-").isdigit() else 0 for word in words]


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return 0
