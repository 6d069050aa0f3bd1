"""How many threads and files this machine still lets us have: every limit that applies, with what is used of it."""

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
"""Threads that are left to whoever starts games: his own, and those of a shell to look at what is wrong."""

_SYS_ADMIN, _SYS_RESOURCE = 21, 24
_PROC = Path("/proc")


@dataclass(frozen=True)
class Limit:
    """`used` of `limit`. `fix` says how it is raised."""

    name: str
    limit: int
    used: int
    fix: str = ""

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


def thread_limits(proc: Path = _PROC) -> list[Limit]:
    """Those that bound the number of threads (a process has at least one); the tightest first. Without a /proc none are known."""
    found = [*_of_the_user(proc), *_of_the_cgroups(proc), *_of_the_kernel(proc)]
    return sorted(found, key=lambda limit: limit.left)


def threads_left(proc: Path = _PROC) -> int | None:
    """How many threads can still be started here; None: nothing bounds them that could be read."""
    limits = thread_limits(proc)
    return limits[0].left if limits else None


def open_file_limit() -> Limit | None:
    """Of this process, and of each one that it starts. None: unlimited, or not known here."""
    limit = _rlimit("RLIMIT_NOFILE")
    if limit is None:
        return None
    used = max(0, len(procfs.list_open_files()) - 1)  # one is the listing itself
    return Limit("RLIMIT_NOFILE", limit, used, "raise it with `ulimit -n`, or LimitNOFILE= of its service")


def raise_open_file_limit(wanted: int) -> int | None:
    """Raise the soft limit on open files to `wanted`, as far as the hard limit allows. Returns the limit in force; None: there is none.

    Not simply to the hard limit: programs started from here inherit it, and some close every possible file when they start, which
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


def room_for(threads_per_game: int, limits: list[Limit] | None = None, promised: int = 0) -> int | None:
    """How many more games of so many threads fit in; None: as many as you like.

    `promised`: threads that games which have already begun are still going to start.
    """
    limits = thread_limits() if limits is None else limits
    if not limits:
        return None
    tightest = _tightest(limits)
    return max(0, (tightest.left - promised - _reserve(tightest)) // max(1, threads_per_game))


def require_room(count: int, threads_per_game: int, limits: list[Limit] | None = None, promised: int = 0) -> None:
    """Raise WorkerFailed, with the sum done, if so many more games do not fit in."""
    limits = thread_limits() if limits is None else limits
    room = room_for(threads_per_game, limits, promised)
    if room is None or room >= count:
        return
    tightest = _tightest(limits)
    waiting = f", {promised:,} of them for games that are still starting" if promised else ""
    each = f"each game takes {threads_per_game:,} threads" if threads_per_game != 1 else "each game takes 1 thread"
    raise WorkerFailed(
        f"{count:,} more {'game does' if count == 1 else 'games do'} not fit in: {each}, {tightest.left:,} are left of"
        f" {tightest.limit:,} ({tightest.name}){waiting}, {_reserve(tightest):,} are kept free: room for {room:,} more.",
        f"Start fewer games here, spread them over more machines, or {tightest.fix}.",
    )


def _tightest(limits: list[Limit]) -> Limit:
    return min(limits, key=lambda limit: limit.left)


def _reserve(limit: Limit) -> int:
    return min(RESERVE, limit.limit // 10)


# -- where the limits are -----------------------------------------------------------------------------------------------


def _of_the_user(proc: Path) -> Iterator[Limit]:
    """The kernel counts the threads of a user, not of a session; those in other containers are counted too and not seen here."""
    limit = _rlimit("RLIMIT_NPROC")
    if limit is None or _exempt(proc) or not (proc / "self").exists():
        return
    mine, used = str(os.getuid()), 0
    for entry in _processes(proc):
        fields = _status(entry)
        if fields and fields.get("Uid", " ").split()[:1] == [mine]:
            used += int(fields.get("Threads", "1"))
    yield Limit("RLIMIT_NPROC", limit, used, "raise it with `ulimit -u`, in limits.conf, or by LimitNPROC= of its service")


def _exempt(proc: Path) -> bool:
    """Root, and whoever may override resource limits, is not held to RLIMIT_NPROC; within a user namespace everyone is."""
    try:
        spans_all = (proc / "self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    except OSError:
        return False
    may = int((_status(proc / "self") or {}).get("CapEff", "0"), 16)
    return spans_all and (os.getuid() == 0 or bool(may & (1 << _SYS_ADMIN | 1 << _SYS_RESOURCE)))


def _of_the_cgroups(proc: Path) -> Iterator[Limit]:
    """Of the own group and of all that it lies in, as far up as can be seen from here."""
    for group in _cgroups(proc):
        with contextlib.suppress(OSError, ValueError):  # none in this one, or it says "max"
            limit = int((group / "pids.max").read_text())
            used = int((group / "pids.current").read_text())
            yield Limit(
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
        root, point = PurePosixPath(_unescaped(fields[3])), Path(_unescaped(fields[4]))
        own = PurePosixPath(paths[version])
        below = own.relative_to(root) if own.is_relative_to(root) else PurePosixPath()  # else: seen from within a namespace
        yield from (point.joinpath(*below.parts[:depth]) for depth in range(len(below.parts), -1, -1))


def _of_the_kernel(proc: Path) -> Iterator[Limit]:
    try:
        used = int((proc / "loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, IndexError, ValueError):
        return
    for name in ("threads-max", "pid_max"):
        with contextlib.suppress(OSError, ValueError):
            limit = int((proc / "sys/kernel" / name).read_text())
            yield Limit(f"kernel.{name}", limit, used, f"raise it with `sysctl -w kernel.{name}=…`")


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


def _unescaped(field: str) -> str:
    """Blanks and the like are written in octal there."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
