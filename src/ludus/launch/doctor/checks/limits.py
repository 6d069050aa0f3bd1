"""Cores, memory, shared memory, open files, threads: what the machine, the container and the shell allow, against what a run needs."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ludus.launch.doctor.finding import Finding, failed, ok, several, size, warning
from ludus.launch.doctor.requirements import Needs
from ludus.process.cgroups import UNLIMITED, Cgroups, Memory, read_number

SHM = "LUDUS_SHM"
"""The variable that moves rings and weights (distributed/hub/server.py)."""

_SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written to
_SHM_LEAST = 256 << 20
"""With less free, rings are in the temporary directory instead (distributed/hub/server.py)."""

_MAPS_LEAST = 65_530
_ROOM = 1.25


# -- looking --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cores:
    """`quota`: cores' worth of time that the cgroup gives; None: all."""

    present: int
    usable: int
    quota: float | None = None

    @property
    def whole(self) -> int:
        return max(1, min(self.usable, int(self.quota) if self.quota is not None else self.usable))


@dataclass(frozen=True)
class Shared:
    total: int
    free: int
    writable: bool = True


@dataclass(frozen=True)
class Bound:
    """A limit that threads, or processes, count against. `used`: of them now. `raise_`: how it is raised."""

    name: str
    limit: int
    used: int
    raise_: str

    @property
    def left(self) -> int:
        return self.limit - self.used


@dataclass(frozen=True)
class Threads:
    bounds: tuple[Bound, ...]
    maps: int = UNLIMITED


@dataclass(frozen=True)
class Files:
    soft: int
    hard: int


def look_cores(groups: Cgroups) -> Cores:
    affinity = getattr(os, "sched_getaffinity", None)
    present = os.cpu_count() or 1
    return Cores(present, len(affinity(0)) if affinity else present, _quota(groups))


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


def look_shared(path: Path = _SHM) -> Shared | None:
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return Shared(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize, os.access(path, os.W_OK))


def look_files() -> Files:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Files(*(UNLIMITED if value == resource.RLIM_INFINITY else value for value in (soft, hard)))


def look_threads(groups: Cgroups) -> Threads:
    bounds = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # the superuser is not held to it
        mine = sum(_threads_of(os.getuid()))
        bounds.append(Bound("ulimit -u", soft, mine, "ulimit -u unlimited, or nproc in /etc/security/limits.conf"))
    for allowed, directory in groups.numbers("pids", "pids.max", "pids.max"):
        now = read_number(directory / "pids.current") or 0
        bounds.append(Bound("cgroup pids.max", allowed, now, "TasksMax= of the service, --pids-limit of the container"))
    everybody = _everybody()
    for name, path in (("kernel.threads-max", "threads-max"), ("kernel.pid_max", "pid_max")):
        if (most := read_number(Path("/proc/sys/kernel") / path)) is not None:
            bounds.append(
                Bound(name, most, everybody, f"sysctl -w {name}={max(4_194_304 if path == 'pid_max' else 0, 2 * most)}")
            )
    return Threads(tuple(bounds), read_number(Path("/proc/sys/vm/max_map_count")) or UNLIMITED)


def _threads_of(user: int) -> Iterator[int]:
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            text = status.read_text(errors="replace")
            who, count = re.search(r"^Uid:\s+(\d+)", text, re.MULTILINE), re.search(r"^Threads:\s+(\d+)", text, re.MULTILINE)
            if who and count and int(who[1]) == user:
                yield int(count[1])


def _everybody() -> int:
    """Threads of the whole machine."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
    return 0


# -- judging --------------------------------------------------------------------------------------------------------------


def judge_cores(cores: Cores, needs: Needs, environ: Mapping[str, str]) -> Finding:
    said = several(cores.present, "core")
    if cores.usable != cores.present:
        said += f", {cores.usable} of them for this process (affinity)"
    if cores.quota is not None:
        said += f", time for {cores.quota:g} (cgroup quota)"
    if needs.workers > 2 * cores.whole:
        return warning(
            "cpu",
            f"{said}; {several(needs.workers, 'worker')} would share them",
            f"--num-workers {max(1, cores.whole - 1)}, or more cores.",
        )
    held = environ.get("OMP_NUM_THREADS", "").isdigit() and int(environ["OMP_NUM_THREADS"]) <= cores.whole
    if cores.quota is not None and cores.quota < cores.usable and not held:
        # Libraries count cores, not time: each starts as many threads, which are then held up together.
        return warning("cpu", said, f"export OMP_NUM_THREADS={cores.whole}")
    return ok("cpu", said)


def judge_memory(memory: Memory | None, needs: Needs) -> Finding:
    if memory is None:
        return Finding("memory", "skipped", "this system does not say how much there is")
    said = f"{size(memory.total)}, {size(memory.available)} available"
    if memory.limit is not None and memory.limit < memory.total:
        said += f"; the cgroup allows {size(memory.limit)}, {size(memory.used)} of it used"
    said += f"; needed {needs.memory_said()}"
    if memory.free < needs.memory:
        fewer = max(0, needs.workers - -(-(needs.memory - memory.free) // max(1, needs.memory_per_worker)))
        remedy = f"--num-workers {fewer}" if fewer else "A machine, or a job, with more memory"
        return failed("memory", said, f"{remedy}; in Slurm --mem, in containers --memory.")
    if memory.free < _ROOM * needs.memory:
        return warning("memory", said, "It is enough, with little to spare: watch it, or have fewer workers.")
    return ok("memory", said)


def shared_findings(environ: Mapping[str, str], needs: Needs) -> list[Finding]:
    """Where the run will have it: in /dev/shm, but for rings and weights that LUDUS_SHM moves elsewhere."""
    if SHM not in environ:
        return [judge_shared(look_shared(), needs)]
    found = [judge_moved(environ[SHM], look_shared(Path(environ[SHM])), needs)]
    return [*found, judge_store(look_shared(), needs)] if needs.ray else found


def judge_moved(directory: str, shared: Shared | None, needs: Needs) -> Finding:
    """Nothing is used in its place: whoever names a directory gets that one."""
    other = f"Set {SHM} to a directory of yours that is there, or unset it."
    if shared is None or not shared.writable:
        return failed("shared memory", f"{SHM}={directory}: {'there is none' if shared is None else 'it is not writable'}", other)
    said = f"{SHM}={directory}: {size(shared.total)}, {size(shared.free)} free; needed {needs.rings_said()}"
    if shared.free < needs.rings:
        return failed("shared memory", said, f"Set {SHM} to a directory with more room, or unset it.")
    return ok("shared memory", said)


def judge_store(shared: Shared | None, needs: Needs) -> Finding:
    check, wanted = "shared memory of Ray", needs.store_said()
    if shared is None or not shared.writable:
        what = "there is none" if shared is None else "it is not writable"
        return warning(
            check, f"{_SHM}: {what}; Ray's store goes to a disk, which is slower", "mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
        )
    said = f"{_SHM}: {size(shared.total)}, {size(shared.free)} free; needed {wanted}"
    return ok(check, said) if shared.free >= needs.store else failed(check, said, _bigger(needs.store))


def judge_shared(shared: Shared | None, needs: Needs) -> Finding:
    if shared is None or not shared.writable:
        what = "there is none" if shared is None else "it is not writable"
        return warning(
            "shared memory",
            f"{_SHM}: {what}; rings go to the temporary directory, which is slower",
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
        )
    said = f"{_SHM}: {size(shared.total)}, {size(shared.free)} free; needed {needs.shared_said()}"
    bigger = _bigger(needs.shared)
    if shared.free < _SHM_LEAST:
        return warning("shared memory", f"{said}; with so little, rings go to the temporary directory, which is slower", bigger)
    if shared.free < needs.shared:
        return failed("shared memory", said, f"{bigger}; or set {SHM} to a directory with more room.")
    return ok("shared memory", said)


def _bigger(count: int) -> str:
    rounded = -(-2 * count // (1 << 30))
    return f"mount -o remount,size={rounded}G /dev/shm; in containers --shm-size={rounded}g"


def judge_files(files: Files, needs: Needs) -> Finding:
    said = f"{_limit(files.soft)} (hard {_limit(files.hard)}); needed {needs.files_said()}"
    if files.soft >= needs.files:
        return ok("open files", said)
    wanted = max(needs.files, 4096)
    if files.hard >= needs.files:
        return failed("open files", said, f"ulimit -n {min(files.hard, wanted)}")
    return failed(
        "open files", said, f"nofile {wanted} in /etc/security/limits.conf, or LimitNOFILE= of the service; then log in anew."
    )


def judge_threads(threads: Threads, needs: Needs) -> Finding:
    said = f"needed {needs.threads_said()}"
    if not threads.bounds:
        return ok("threads", f"no limit; {said}")
    worst = min(threads.bounds, key=lambda bound: bound.left)
    said = f"{worst.name} {_limit(worst.limit)}, {worst.used:,} in use; {said}"
    if worst.left < needs.threads:
        per = max(1, needs.threads_per_worker)
        fewer = needs.workers - -(-(needs.threads - worst.left) // per)
        remedy = f"{worst.raise_}; or --num-workers {fewer}" if fewer > 0 else worst.raise_
        return failed("threads", said, remedy)
    if worst.left < _ROOM * needs.threads:
        return warning("threads", said, f"It is enough, with little to spare: {worst.raise_}")
    return ok("threads", said)


def judge_maps(threads: Threads, needs: Needs) -> Finding:
    """A thread has two mappings for its stack; libraries have some hundreds."""
    needed = 2_000 + 2 * max(needs.game_threads, needs.cores)
    said = (
        f"vm.max_map_count {_limit(threads.maps)}; needed 2,000 + 2 × {max(needs.game_threads, needs.cores)} threads = {needed:,}"
    )
    if threads.maps < needed:
        return failed("mappings", said, f"sysctl -w vm.max_map_count={_MAPS_LEAST}")
    if threads.maps < _MAPS_LEAST:
        return warning("mappings", said, f"Less than Linux has by default: sysctl -w vm.max_map_count={_MAPS_LEAST}")
    return ok("mappings", said)


def _limit(value: int) -> str:
    return "unlimited" if value >= UNLIMITED else f"{value:,}"
