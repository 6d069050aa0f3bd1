"""Compares the cores, memory, open files and threads that machine, container and shell allow with the needs of a run."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ludus.core.formatting import format_bytes
from ludus.launch.doctor.finding import DoctorFinding, failed, format_count, ok, warning
from ludus.launch.doctor.requirements import ResourceNeeds
from ludus.process.cgroups import UNLIMITED, Cgroups, Memory, read_number

SHM = "LUDUS_SHM"
"""Variable with the directory of ring buffers and weights (distributed/hub/server.py)."""

_SHM = Path("/dev/shm")  # noqa: S108 - inspected, not written to
_SHM_MIN = 256 << 20
"""With less free space, ring buffers are put into the temporary directory (distributed/hub/server.py)."""

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
class SharedMemory:
    total: int
    free: int
    writable: bool = True


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
    affinity = getattr(os, "sched_getaffinity", None)
    present = os.cpu_count() or 1
    return CpuLimits(present, len(affinity(0)) if affinity else present, _quota(groups))


def _quota(groups: Cgroups) -> float | None:
    found = []
    for directory in groups.directories.get("", ()):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (directory / "cpu.max").read_text().split()
            found.append(int(quota) / int(period))
    for directory in groups.directories.get("cpu", ()):
        with contextlib.suppress(OSError, ValueError):
            granted = int((directory / "cpu.cfs_quota_us").read_text())
            if granted > 0:
                found.append(granted / int((directory / "cpu.cfs_period_us").read_text()))
    return min(found, default=None)


def inspect_shared_memory(path: Path = _SHM) -> SharedMemory | None:
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return SharedMemory(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize, os.access(path, os.W_OK))


def inspect_files() -> OpenFileLimits:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OpenFileLimits(*(UNLIMITED if value == resource.RLIM_INFINITY else value for value in (soft, hard)))


def inspect_threads(groups: Cgroups) -> ThreadLimits:
    bounds = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # it does not apply to root
        mine = sum(_user_threads(os.getuid()))
        bounds.append(ThreadLimit("ulimit -u", soft, mine, "ulimit -u unlimited, or nproc in /etc/security/limits.conf"))
    for allowed, directory in groups.numbers("pids", "pids.max", "pids.max"):
        now = read_number(directory / "pids.current") or 0
        bounds.append(ThreadLimit("cgroup pids.max", allowed, now, "TasksMax= of the service, --pids-limit of the container"))
    machine_threads = _machine_threads()
    for name, path in (("kernel.threads-max", "threads-max"), ("kernel.pid_max", "pid_max")):
        if (most := read_number(Path("/proc/sys/kernel") / path)) is not None:
            bounds.append(
                ThreadLimit(
                    name, most, machine_threads, f"sysctl -w {name}={max(4_194_304 if path == 'pid_max' else 0, 2 * most)}"
                )
            )
    return ThreadLimits(tuple(bounds), read_number(Path("/proc/sys/vm/max_map_count")) or UNLIMITED)


def _user_threads(user: int) -> Iterator[int]:
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            text = status.read_text(errors="replace")
            who, count = re.search(r"^Uid:\s+(\d+)", text, re.MULTILINE), re.search(r"^Threads:\s+(\d+)", text, re.MULTILINE)
            if who and count and int(who[1]) == user:
                yield int(count[1])


def _machine_threads() -> int:
    """Return the number of threads of the whole machine."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
    return 0


# -- checks ---------------------------------------------------------------------------------------------------------------


def check_cores(cores: CpuLimits, needs: ResourceNeeds, environ: Mapping[str, str]) -> DoctorFinding:
    text = format_count(cores.present, "core")
    if cores.usable != cores.present:
        text += f", {cores.usable} of them for this process (affinity)"
    if cores.quota is not None:
        text += f", time for {cores.quota:g} (cgroup quota)"
    if needs.workers > 2 * cores.whole:
        return warning(
            "cpu",
            f"{text}; {format_count(needs.workers, 'worker')} would share them",
            f"--num-workers {max(1, cores.whole - 1)}, or more cores.",
        )
    held = environ.get("OMP_NUM_THREADS", "").isdigit() and int(environ["OMP_NUM_THREADS"]) <= cores.whole
    if cores.quota is not None and cores.quota < cores.usable and not held:
        # Libraries start a thread per core regardless of the quota, and all of them are throttled.
        return warning("cpu", text, f"export OMP_NUM_THREADS={cores.whole}")
    return ok("cpu", text)


def check_memory(memory: Memory | None, needs: ResourceNeeds) -> DoctorFinding:
    if memory is None:
        return DoctorFinding("memory", "skipped", "this system does not report it")
    text = f"{format_bytes(memory.total)}, {format_bytes(memory.available)} available"
    if memory.limit is not None and memory.limit < memory.total:
        text += f"; the cgroup allows {format_bytes(memory.limit)}, {format_bytes(memory.used)} of it used"
    text += f"; needed {needs.explain_memory()}"
    if memory.free < needs.memory:
        fewer = max(0, needs.workers - -(-(needs.memory - memory.free) // max(1, needs.memory_per_worker)))
        remedy = f"--num-workers {fewer}" if fewer else "A machine, or a job, with more memory"
        return failed("memory", text, f"{remedy}; in Slurm --mem, in containers --memory.")
    if memory.free < _MARGIN * needs.memory:
        return warning("memory", text, "It is just enough: watch it, or use fewer workers.")
    return ok("memory", text)


def check_all_shared_memory(environ: Mapping[str, str], needs: ResourceNeeds) -> list[DoctorFinding]:
    """Check /dev/shm, and the directory of LUDUS_SHM if that is set."""
    if SHM not in environ:
        return [check_shared_memory(inspect_shared_memory(), needs)]
    found = [check_moved_memory(environ[SHM], inspect_shared_memory(Path(environ[SHM])), needs)]
    return [*found, check_store(inspect_shared_memory(), needs)] if needs.ray else found


def check_moved_memory(directory: str, shared: SharedMemory | None, needs: ResourceNeeds) -> DoctorFinding:
    """Check the directory of LUDUS_SHM, for which there is no fallback."""
    other = f"Set {SHM} to an existing writable directory, or unset it."
    if shared is None or not shared.writable:
        return failed(
            "shared memory", f"{SHM}={directory}: {'it does not exist' if shared is None else 'it is not writable'}", other
        )
    text = f"{SHM}={directory}: {format_bytes(shared.total)}, {format_bytes(shared.free)} free; needed {needs.explain_rings()}"
    if shared.free < needs.rings:
        return failed("shared memory", text, f"Set {SHM} to a directory with more room, or unset it.")
    return ok("shared memory", text)


def check_store(shared: SharedMemory | None, needs: ResourceNeeds) -> DoctorFinding:
    check, wanted = "shared memory of Ray", needs.explain_store()
    if shared is None or not shared.writable:
        what = "it does not exist" if shared is None else "it is not writable"
        return warning(
            check, f"{_SHM}: {what}; Ray's store goes to a disk, which is slower", "mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
        )
    text = f"{_SHM}: {format_bytes(shared.total)}, {format_bytes(shared.free)} free; needed {wanted}"
    return ok(check, text) if shared.free >= needs.store else failed(check, text, _enlarge_command(needs.store))


def check_shared_memory(shared: SharedMemory | None, needs: ResourceNeeds) -> DoctorFinding:
    if shared is None or not shared.writable:
        what = "it does not exist" if shared is None else "it is not writable"
        return warning(
            "shared memory",
            f"{_SHM}: {what}; rings go to the temporary directory, which is slower",
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
        )
    text = f"{_SHM}: {format_bytes(shared.total)}, {format_bytes(shared.free)} free; needed {needs.explain_shared()}"
    bigger = _enlarge_command(needs.shared)
    if shared.free < _SHM_MIN:
        return warning("shared memory", f"{text}; with so little, rings go to the temporary directory, which is slower", bigger)
    if shared.free < needs.shared:
        return failed("shared memory", text, f"{bigger}; or set {SHM} to a directory with more room.")
    return ok("shared memory", text)


def _enlarge_command(count: int) -> str:
    rounded = -(-2 * count // (1 << 30))
    return f"mount -o remount,size={rounded}G /dev/shm; in containers --shm-size={rounded}g"


def check_files(files: OpenFileLimits, needs: ResourceNeeds) -> DoctorFinding:
    text = f"{_limit(files.soft)} (hard {_limit(files.hard)}); needed {needs.explain_files()}"
    if files.soft >= needs.files:
        return ok("open files", text)
    wanted = max(needs.files, 4096)
    if files.hard >= needs.files:
        return failed("open files", text, f"ulimit -n {min(files.hard, wanted)}")
    return failed(
        "open files", text, f"nofile {wanted} in /etc/security/limits.conf, or LimitNOFILE= of the service; then log in anew."
    )


def check_threads(threads: ThreadLimits, needs: ResourceNeeds) -> DoctorFinding:
    text = f"needed {needs.explain_threads()}"
    if not threads.bounds:
        return ok("threads", f"no limit; {text}")
    worst = min(threads.bounds, key=lambda bound: bound.left)
    text = f"{worst.name} {_limit(worst.limit)}, {worst.used:,} in use; {text}"
    if worst.left < needs.threads:
        per = max(1, needs.threads_per_worker)
        fewer = needs.workers - -(-(needs.threads - worst.left) // per)
        remedy = f"{worst.raise_}; or --num-workers {fewer}" if fewer > 0 else worst.raise_
        return failed("threads", text, remedy)
    if worst.left < _MARGIN * needs.threads:
        return warning("threads", text, f"It is just enough: {worst.raise_}")
    return ok("threads", text)


def check_maps(threads: ThreadLimits, needs: ResourceNeeds) -> DoctorFinding:
    """Each thread needs two memory mappings for its stack; libraries need some hundreds."""
    needed = 2_000 + 2 * max(needs.game_threads, needs.cores)
    text = (
        f"vm.max_map_count {_limit(threads.maps)}; needed 2,000 + 2 × {max(needs.game_threads, needs.cores)} threads = {needed:,}"
    )
    if threads.maps < needed:
        return failed("mappings", text, f"sysctl -w vm.max_map_count={_MAPS_MIN}")
    if threads.maps < _MAPS_MIN:
        return warning("mappings", text, f"Less than Linux has by default: sysctl -w vm.max_map_count={_MAPS_MIN}")
    return ok("mappings", text)


def _limit(value: int) -> str:
    return "unlimited" if value >= UNLIMITED else f"{value:,}"
