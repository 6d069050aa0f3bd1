"""Checks the directories that a run writes to: permissions, free space and type of file system."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ludus.core.formatting import format_bytes
from ludus.launch.doctor.finding import DoctorFinding, failure, ok, warning
from ludus.launch.doctor.requirements import RUN_BYTES, STATE_BYTES, TEMP_BYTES
from ludus.launch.job_dir import state_dir

NETWORK = (
    "nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "virtiofs", "panfs", "orangefs",
)  # fmt: skip
"""Network file systems; those mounted by FUSE count as well."""

_MAX_PATH = 60
"""Maximum path length of the temporary directory: Unix socket paths below it are limited to about 100 bytes."""


@dataclass(frozen=True)
class DirectoryStatus:
    """`path`: the nearest existing parent of `asked`. `why`: the reason it is not writable. `kind`: type of its file system."""

    asked: str
    path: str
    free: int
    inodes: int | None
    kind: str
    why: str = ""
    ours: bool = True

    @property
    def network(self) -> bool:
        return self.kind in NETWORK or self.kind.startswith("fuse")


def inspect_directory(asked: Path) -> DirectoryStatus:
    """Inspect a directory; a file is written there and deleted."""
    there = next((path for path in (asked.absolute(), *asked.absolute().parents) if path.exists()), Path("/"))
    stat = os.statvfs(there)
    inodes = stat.f_favail if stat.f_files else None
    return DirectoryStatus(
        str(asked),
        str(there),
        stat.f_bavail * stat.f_frsize,
        inodes,
        filesystem_type(there),
        _write_error(there),
        there.stat().st_uid == os.getuid(),
    )


def _write_error(directory: Path) -> str:
    if not directory.is_dir():
        return "it is not a directory"
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".ludus-doctor-") as file:
            file.write(b"?" * 4096)  # a full disk still takes empty files
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def filesystem_type(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system of a path; "" if unknown."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
        here = str(path.resolve())
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if (here == point or here.startswith(point.rstrip("/") + "/")) and len(point) >= best:  # the last mount covers the others
            best, kind = len(point), after.split()[0]
    return kind


def directory_of(what: str, local_dir: str) -> Path:
    """Return the directory for runs, temporary files (temp) or the records of jobs (state)."""
    return {"runs": Path(local_dir), "temp": Path(tempfile.gettempdir()), "state": state_dir()}[what]


_NEEDED = {"runs": RUN_BYTES, "temp": TEMP_BYTES, "state": STATE_BYTES}
_CHECKS = {"runs": "disk for runs", "temp": "disk for temporary files", "state": "records of jobs"}
_MOVE_OPTION = {"runs": "--local-dir DIR", "temp": "export TMPDIR=DIR", "state": "export LUDUS_STATE_DIR=DIR"}
_INODES = 10_000


def check_directory(what: str, status: DirectoryStatus, *, shared: bool = False) -> DoctorFinding:
    """`what`: runs, temp or state. `shared`: all nodes must share the directory, as for the records of Slurm jobs."""
    check, move = _CHECKS[what], f"{_MOVE_OPTION[what]} elsewhere"
    kind = f" ({status.kind})" if status.kind else ""
    text = f"{status.asked}: {format_bytes(status.free)} free{kind}"
    if status.why:
        return failure(check, f"{status.asked} cannot be written to: {status.why}", f"{move}.")
    if status.inodes is not None and status.inodes < _INODES:
        return failure(check, f"{text}, and room for {status.inodes:,} more files", f"Remove files, or {move}.")
    if status.free < _NEEDED[what]:
        problem = failure if status.free < _NEEDED[what] // 10 else warning
        return problem(check, f"{text}; at least {format_bytes(_NEEDED[what])} should be", f"Free some room, or {move}.")
    if what == "state" and not status.ours and status.path == status.asked:
        return failure(check, f"{status.path} belongs to another user", f"{move}.")
    if what == "state" and shared and status.ours and status.kind and not status.network:
        remedy = f"If they do not share it, {_MOVE_OPTION[what]} on a shared file system."
        return warning(check, f"{text}; it may not be the same on the nodes", remedy)
    if what == "temp" and status.network:
        return warning(check, f"{text}: sockets and many small files are slow there, or impossible", f"{move}, on a local disk.")
    if what == "temp" and len(os.fsencode(status.asked)) > _MAX_PATH:
        return warning(check, f"{text}; the name is too long for sockets below it", "export TMPDIR=/tmp")
    return ok(check, text)
