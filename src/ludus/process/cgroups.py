"""Limits that the cgroups of this process set, and the memory that is free within them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

UNLIMITED = 1 << 60
"""Kernels write "no limit" in several ways, all of them above this."""


@dataclass(frozen=True)
class SystemMemory:
    """Bytes. `limit`, `used`: of the tightest cgroup of this process; None without a limit."""

    total: int
    available: int
    limit: int | None = None
    used: int = 0

    @property
    def free(self) -> int:
        return self.available if self.limit is None else min(self.available, max(0, self.limit - self.used))


@dataclass(frozen=True)
class Cgroups:
    """Directories of the cgroups of this process, innermost first, by controller; `""` is version 2."""

    directories: dict[str, tuple[Path, ...]] = field(default_factory=dict)

    def numbers(self, controller: str, old: str, new: str) -> Iterator[tuple[int, Path]]:
        """(limit, directory) of the files with these names in versions 1 and 2, from the inside out; without unlimited ones."""
        for version, name in ((controller, old), ("", new)):
            for directory in self.directories.get(version, ()):
                with contextlib.suppress(OSError, ValueError):
                    value = int((directory / name).read_text().split()[0])
                    if value < UNLIMITED:
                        yield value, directory


def find_cgroups(proc: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup")) -> Cgroups:
    found: dict[str, tuple[Path, ...]] = {}
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return Cgroups()
    for line in lines:
        _, names, inner = line.split(":", 2)
        for name in names.split(",") if names else [""]:
            base = _mount_point(root, name)
            if base is not None:
                found[name] = tuple(_upwards(base, inner))
    return Cgroups(found)


def _mount_point(root: Path, name: str) -> Path | None:
    if name:
        return root / name if (root / name).is_dir() else None
    return next((base for base in (root, root / "unified") if (base / "cgroup.controllers").exists()), None)


def _upwards(base: Path, inner: str) -> Iterator[Path]:
    """In a container its own cgroup may be mounted as the root: then the path in /proc does not exist."""
    here = base / inner.strip("/")
    if not here.is_dir():
        here = base
    while True:
        yield here
        if here == base:
            return
        here = here.parent


def read_memory(groups: Cgroups, meminfo: Path = Path("/proc/meminfo")) -> SystemMemory | None:
    """None where /proc/meminfo is missing."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total, available = (int(lines[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        return None
    limit, used = None, 0
    for most, directory in groups.numbers("memory", "memory.limit_in_bytes", "memory.max"):
        now = _memory_in_use(directory)
        if limit is None or most - now < limit - used:
            limit, used = most, now
    return SystemMemory(total, available, limit, used)


def _memory_in_use(directory: Path) -> int:
    """Bytes in use, without the page cache that the kernel frees on demand."""
    used = read_number(directory / "memory.usage_in_bytes") or read_number(directory / "memory.current") or 0
    with contextlib.suppress(OSError):
        found = re.search(r"^(?:total_)?inactive_file (\d+)$", (directory / "memory.stat").read_text(), re.MULTILINE)
        used -= int(found[1]) if found else 0
    return max(0, used)


def read_number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None
