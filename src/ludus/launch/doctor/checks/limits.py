"""Compares the cores, memory, open files and threads that machine, container and shell allow with the needs of a run."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ludus.core.formatting import format_bytes
from ludus.launch.doctor.finding import DoctorFinding, failure, format_count, ok, skip, warning
from ludus.launch.doctor.requirements import ResourceNeeds
from ludus.process.cgroups import UNLIMITED, Cgroups, SystemMemory, read_number
from ludus.process.host import usable_cores

_MAPS_MIN = 65_530
_MARGIN = 1.25


# -- inspection -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuLimits:
    """`quota`: CPU time that the cgroup allows, in cores; None: no limit."""

    present: int
    usable: int
    quota: float | None = None

    @property
    def whole(self) -> int:
        return max(1, min(self.usable, int(self.quota) if self.quota is not None else self.usable))


@dataclass(frozen=True)
class ThreadLimit:
    """A limit for threads or processes. `used`: their present number. `raise_`: how to raise the limit."""

    name: str
    limit: int
    used: int
    raise_: str

    @property
    def left(self) -> int:
        return self.limit - self.used


@dataclass(frozen=True)
class ThreadLimits:
    bounds: tuple[ThreadLimit, ...]
    maps: int = UNLIMITED


@dataclass(frozen=True)
class OpenFileLimits:
    soft: int
    hard: int


def inspect_cores(groups: Cgroups) -> CpuLimits:
    quotas = []
    for directory in groups.directories.get("", ()):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (directory / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
    for directory in groups.directories.get("cpu", ()):
        with contextlib.suppress(OSError, ValueError):
            granted = int((directory / "cpu.cfs_quota_us").read_text())
            if granted > 0:
                quotas.append(granted / int((directory / "cpu.cfs_period_us").read_text()))
    return CpuLimits(os.cpu_count() or 1, usable_cores(), min(quotas, default=None))


def inspect_files() -> OpenFileLimits:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OpenFileLimits(*(UNLIMITED if value == resource.RLIM_INFINITY else value for value in (soft, hard)))


def inspect_threads(groups: Cgroups) -> ThreadLimits:
    bounds = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # it does not apply to root
        processes = [each.info for each in psutil.process_iter(["uids", "num_threads"])]
        mine = sum(each["num_threads"] or 0 for each in processes if each["uids"] and each["uids"].real == os.getuid())
        bounds.append(ThreadLimit("ulimit -u", soft, mine, "ulimit -u unlimited, or nproc in /etc/security/limits.conf"))
    for allowed, directory in groups.numbers("pids", "pids.max", "pids.max"):
        now = read_number(directory / "pids.current") or 0
        bounds.append(ThreadLimit("cgroup pids.max", allowed, now, "TasksMax= of the service, --pids-limit of the container"))
    with contextlib.suppress(OSError, ValueError, IndexError):
        used = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])  # threads of the whole machine
        for name, least in (("threads-max", 0), ("pid_max", 4_194_304)):
            if (most := read_number(Path("/proc/sys/kernel") / name)) is not None:
                bounds.append(ThreadLimit(f"kernel.{name}", most, used, f"sysctl -w kernel.{name}={max(least, 2 * most)}"))
    return ThreadLimits(tuple(bounds), read_number(Path("/proc/sys/vm/max_map_count")) or UNLIMITED)


# -- checks ---------------------------------------------------------------------------------------------------------------


def check_cores(cores: CpuLimits, needs: ResourceNeeds, environ: Mapping[str, str]) -> DoctorFinding:
    text = format_count(cores.present, "core")
    if cores.usable != cores.present:
        text += f", {cores.usable} of them for this process (affinity)"
    if cores.quota is not None:
        text += f", time for {cores.quota:g} (cgroup quota)"
    if needs.workers > 2 * cores.whole:
        text += f"; {format_count(needs.workers, 'worker')} would share them"
        return warning("cpu", text, f"--num-workers {max(1, cores.whole - 1)}, or more cores.")
    held = environ.get("OMP_NUM_THREADS", "").isdigit() and int(environ["OMP_NUM_THREADS"]) <= cores.whole
    if cores.quota is not None and cores.quota < cores.usable and not held:
        # Libraries start a thread per core regardless of the quota, and all of them are throttled.
        return warning("cpu", text, f"export OMP_NUM_THREADS={cores.whole}")
    return ok("cpu", text)


def check_memory(memory: SystemMemory | None, needs: ResourceNeeds) -> DoctorFinding:
    if memory is None:
        return skip("memory", "this system does not report it")
    text = f"{format_bytes(memory.total)}, {format_bytes(memory.available)} available"
    if memory.limit is not None and memory.limit < memory.total:
        text += f"; the cgroup allows {format_bytes(memory.limit)}, {format_bytes(memory.used)} of it used"
    text += f"; needed {needs.explain_memory()}"
    if memory.free < needs.memory:
        fewer = max(0, needs.workers - -(-(needs.memory - memory.free) // max(1, needs.memory_per_worker)))
        remedy = f"--num-workers {fewer}" if fewer else "A machine, or a job, with more memory"
        return failure("memory", text, f"{remedy}; in Slurm --mem, in containers --memory.")
    if memory.free < _MARGIN * needs.memory:
        return warning("memory", text, "It is just enough: watch it, or use fewer workers.")
    return ok("memory", text)


def check_files(files: OpenFileLimits, needs: ResourceNeeds) -> DoctorFinding:
    text = f"{_limit(files.soft)} (hard {_limit(files.hard)}); needed {needs.explain_files()}"
    if files.soft >= needs.files:
        return ok("open files", text)
    wanted = max(needs.files, 4096)
    if files.hard >= needs.files:
        return failure("open files", text, f"ulimit -n {min(files.hard, wanted)}")
    remedy = f"nofile {wanted} in /etc/security/limits.conf, or LimitNOFILE= of the service; then log in anew."
    return failure("open files", text, remedy)


def check_threads(threads: ThreadLimits, needs: ResourceNeeds) -> DoctorFinding:
    text = f"needed {needs.explain_threads()}"
    if not threads.bounds:
        return ok("threads", f"no limit; {text}")
    worst = min(threads.bounds, key=lambda bound: bound.left)
    text = f"{worst.name} {_limit(worst.limit)}, {worst.used:,} in use; {text}"
    if worst.left < needs.threads:
        per = max(1, needs.threads_per_worker)
        fewer = needs.workers - -(-(needs.threads - worst.left) // per)
        return failure("threads", text, f"{worst.raise_}; or --num-workers {fewer}" if fewer > 0 else worst.raise_)
    if worst.left < _MARGIN * needs.threads:
        return warning("threads", text, f"It is just enough: {worst.raise_}")
    return ok("threads", text)


def check_maps(threads: ThreadLimits, needs: ResourceNeeds) -> DoctorFinding:
    """Each thread needs two memory mappings for its stack; libraries need some hundreds."""
    needed = 2_000 + 2 * max(needs.game_threads, needs.cores)
    text = f"vm.max_map_count {_limit(threads.maps)}; needed {needed:,}"
    if threads.maps < needed:
        return failure("mappings", text, f"sysctl -w vm.max_map_count={_MAPS_MIN}")
    if threads.maps < _MAPS_MIN:
        return warning("mappings", text, f"Less than Linux has by default: sysctl -w vm.max_map_count={_MAPS_MIN}")
    return ok("mappings", text)


def _limit(value: int) -> str:
    return "unlimited" if value >= UNLIMITED else f"{value:,}"
