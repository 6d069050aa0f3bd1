"""Directories that a run writes to: whether it may, how much room there is, and on what kind of file system they are."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from ludus.launch.doctor.finding import Finding, failed, ok, size, warning
from ludus.launch.doctor.requirements import RUN_BYTES, STATE_BYTES, TEMP_BYTES
from ludus.launch.job_dir import state_dir

NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "afs",
    "9p",
    "virtiofs",
    "panfs",
    "orangefs",
)
"""File systems of several machines; so is whatever is mounted by FUSE, mostly."""

_LONGEST = 60
"""Of the path of the temporary directory: that of a unix socket below it may have about 100 bytes."""


@dataclass(frozen=True)
class Place:
    """`path`: the nearest directory of it that exists. `why`: it cannot be written to. `kind`: of its file system."""

    asked: str
    path: str
    free: int
    inodes: int | None
    kind: str
    why: str = ""
    mode: int = 0o700
    ours: bool = True

    @property
    def network(self) -> bool:
        return self.kind in NETWORK or self.kind.startswith("fuse")


def look_place(asked: Path) -> Place:
    """A file is written there and removed again."""
    there = next((path for path in (asked.absolute(), *asked.absolute().parents) if path.exists()), Path("/"))
    stat = os.statvfs(there)
    inodes = stat.f_favail if stat.f_files else None
    about = there.stat()
    ours = not hasattr(os, "getuid") or about.st_uid == os.getuid()
    return Place(
        str(asked),
        str(there),
        stat.f_bavail * stat.f_frsize,
        inodes,
        kind_of(there),
        _refused(there),
        about.st_mode & 0o7777,
        ours,
    )


def _refused(directory: Path) -> str:
    if not directory.is_dir():
        return "it is not a directory"
    probe = directory / f".ludus-doctor-{uuid.uuid4().hex}"
    try:
        with open(probe, "xb") as file:
            file.write(b"?" * 4096)  # an empty file can be made on a full disk
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return ""


def kind_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Of the file system that the path is on; empty where the system does not say."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
        here = str(path.resolve())
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if (here == point or here.startswith(point.rstrip("/") + "/")) and len(point) >= best:  # the last one lies on top
            best, kind = len(point), after.split()[0]
    return kind


def directory_of(what: str, local_dir: str) -> Path:
    return {"runs": Path(local_dir), "temp": Path(tempfile.gettempdir()), "state": state_dir()}[what]


_NEEDED = {"runs": RUN_BYTES, "temp": TEMP_BYTES, "state": STATE_BYTES}
_CHECKS = {"runs": "disk for runs", "temp": "disk for temporary files", "state": "records of jobs"}
_MOVE = {"runs": "--local-dir DIR", "temp": "export TMPDIR=DIR", "state": "export LUDUS_STATE_DIR=DIR"}
_INODES = 10_000


def judge_place(what: str, place: Place, *, shared: bool = False) -> Finding:
    """`what`: runs, temp or state. `shared`: all nodes must see the same (records of Slurm jobs are read on other machines)."""
    check, move = _CHECKS[what], f"{_MOVE[what]} elsewhere"
    kind = f" ({place.kind})" if place.kind else ""
    said = f"{place.asked}: {size(place.free)} free{kind}"
    if place.why:
        return failed(check, f"{place.asked} cannot be written to: {place.why}", f"{move}.")
    if place.free < _NEEDED[what] // 10:
        return failed(check, f"{said}; at least {size(_NEEDED[what])} should be", f"Free some room, or {move}.")
    if place.inodes is not None and place.inodes < _INODES:
        return failed(check, f"{said}, and room for {place.inodes:,} more files", f"Remove files, or {move}.")
    if place.free < _NEEDED[what]:
        return warning(check, f"{said}; at least {size(_NEEDED[what])} should be", f"Free some room, or {move}.")
    if what == "state" and not place.ours:
        return (
            failed(check, f"{place.path} belongs to another user", f"{move}.") if place.path == place.asked else ok(check, said)
        )
    if what == "state" and shared and place.kind and not place.network:
        return warning(
            check,
            f"{said}; it may not be the same on the nodes",
            f"If they do not share it, {_MOVE[what]} on a shared file system.",
        )
    if what == "temp" and place.network:
        return warning(check, f"{said}: sockets and many small files are slow there, or impossible", f"{move}, on a local disk.")
    if what == "temp" and len(os.fsencode(place.asked)) > _LONGEST:
        return warning(check, f"{said}; the name is too long for sockets below it", "export TMPDIR=/tmp")
    return ok(check, said)
