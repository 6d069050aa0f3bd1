"""Limits on threads and open files of this machine, with their current use."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ludus.errors import WorkerFailed
from ludus.process import procfs

RESERVE = 64
"""Threads kept free for the process that starts games and for a shell."""

_SYS_ADMIN, _SYS_RESOURCE = 21, 24
_PROC = Path("/proc")


@dataclass(frozen=True)
class ResourceLimit:
    """`used` of `limit`; `fix` describes how to raise it."""

    name: str
    limit: int
    used: int
    fix: str = ""

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


def thread_limits(proc: Path = _PROC) -> list[ResourceLimit]:
    """Limits on the number of threads (a process has at least one), the tightest first; empty without /proc."""
    limits = [*_user_limits(proc), *_cgroup_limits(proc), *_kernel_limits(proc)]
    return sorted(limits, key=lambda limit: limit.left)


def threads_left(proc: Path = _PROC) -> int | None:
    """Number of threads that can still be started; None: no limit is known."""
    limits = thread_limits(proc)
    return limits[0].left if limits else None


def open_file_limit() -> ResourceLimit | None:
    """Limit of this process and of each one it starts. None: unlimited or unknown."""
    limit = _rlimit("RLIMIT_NOFILE")
    if limit is None:
        return None
    used = max(0, len(procfs.list_open_files()) - 1)  # without the descriptor of the listing
    return ResourceLimit("RLIMIT_NOFILE", limit, used, "raise it with `ulimit -n`, or LimitNOFILE= of its service")


def raise_open_file_limit(wanted: int) -> int | None:
    """Raise the soft limit on open files to `wanted`, as far as the hard limit allows; returns the limit in force, None if unlimited.

    Not always to the hard limit: child processes inherit it, and some close every possible descriptor at their start, which
    takes minutes where the hard limit is 2³⁰ (the default in many containers).
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if target > soft:
        with contextlib.suppress(OSError, ValueError):  # macOS has a kernel limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            return target
    return soft


def room_for(threads_per_game: int, limits: list[ResourceLimit] | None = None, pending: int = 0) -> int | None:
    """Number of further games that fit; None: unlimited.

    `pending`: threads that running games are still expected to start.
    """
    limits = thread_limits() if limits is None else limits
    if not limits:
        return None
    tightest = _tightest(limits)
    return max(0, (tightest.left - pending - _reserve(tightest)) // max(1, threads_per_game))


def require_room(count: int, threads_per_game: int, limits: list[ResourceLimit] | None = None, pending: int = 0) -> None:
    """Raise WorkerFailed with the calculation if this many more games do not fit."""
    limits = thread_limits() if limits is None else limits
    room = room_for(threads_per_game, limits, pending)
    if room is None or room >= count:
        return
    tightest = _tightest(limits)
    waiting = f", {pending:,} of them for games that are still starting" if pending else ""
    each = f"each game takes {threads_per_game:,} threads" if threads_per_game != 1 else "each game takes 1 thread"
    raise WorkerFailed(
        f"{count:,} more {'game does' if count == 1 else 'games do'} not fit: {each}, {tightest.left:,} are left of"
        f" {tightest.limit:,} ({tightest.name}){waiting}, {_reserve(tightest):,} are kept free: room for {room:,} more.",
        f"Start fewer games here, spread them over more machines, or {tightest.fix}.",
    )


def _tightest(limits: list[ResourceLimit]) -> ResourceLimit:
    return min(limits, key=lambda limit: limit.left)


def _reserve(limit: ResourceLimit) -> int:
    return min(RESERVE, limit.limit // 10)


# -- sources of the limits ----------------------------------------------------------------------------------------------


def _user_limits(proc: Path) -> Iterator[ResourceLimit]:
    """The kernel counts all threads of a user; those in other containers count too but are not visible here."""
    limit = _rlimit("RLIMIT_NPROC")
    if limit is None or _is_exempt(proc) or not (proc / "self").exists():
        return
    mine, used = str(os.getuid()), 0
    for entry in _processes(proc):
        fields = _status(entry)
        if fields and fields.get("Uid", " ").split()[:1] == [mine]:
            used += int(fields.get("Threads", "1"))
    yield ResourceLimit(
        "RLIMIT_NPROC", limit, used, "raise it with `ulimit -u`, in limits.conf, or by LimitNPROC= of its service"
    )


def _is_exempt(proc: Path) -> bool:
    """Root and processes that may override resource limits are exempt from RLIMIT_NPROC, except in a user namespace."""
    try:
        spans_all = (proc / "self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    except OSError:
        return False
    may = int((_status(proc / "self") or {}).get("CapEff", "0"), 16)
    return spans_all and (os.getuid() == 0 or bool(may & (1 << _SYS_ADMIN | 1 << _SYS_RESOURCE)))


def _cgroup_limits(proc: Path) -> Iterator[ResourceLimit]:
    """Limits of the own cgroup and of its visible ancestors."""
    for group in _cgroups(proc):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limit = int((group / "pids.max").read_text())
            used = int((group / "pids.current").read_text())
            yield ResourceLimit(
                f"pids.max of {group}",
                limit,
                used,
                f"raise pids.max of {group} (--pids-limit of the container, TasksMax= of the service)",
            )


def _cgroups(proc: Path) -> Iterator[Path]:
    try:
        mine = (proc / "self/cgroup").read_text().splitlines()
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths: dict[str, str] = {}  # "" for version 2, "pids" for version 1
    for line in mine:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        version = {"cgroup2": "", "cgroup": "pids"}.get(kind[0]) if kind else None
        if version is None or version not in paths or (version and version not in kind[-1].split(",")):
            continue
        root, point = PurePosixPath(_unescape(fields[3])), Path(_unescape(fields[4]))
        own = PurePosixPath(paths[version])
        below = own.relative_to(root) if own.is_relative_to(root) else PurePosixPath()  # else: in a cgroup namespace
        yield from (point.joinpath(*below.parts[:depth]) for depth in range(len(below.parts), -1, -1))


def _kernel_limits(proc: Path) -> Iterator[ResourceLimit]:
    try:
        used = int((proc / "loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, IndexError, ValueError):
        return
    for name in ("threads-max", "pid_max"):
        with contextlib.suppress(OSError, ValueError):
            limit = int((proc / "sys/kernel" / name).read_text())
            yield ResourceLimit(f"kernel.{name}", limit, used, f"raise it with `sysctl -w kernel.{name}=…`")


def _rlimit(name: str) -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def _processes(proc: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (proc / name for name in os.listdir(proc) if name.isdigit())  # noqa: PTH208


def _status(process: Path) -> dict[str, str] | None:
    try:
        lines = (process / "status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _unescape(field: str) -> str:
    """Decode the octal escapes of /proc/self/mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)
