"""Checks the shared memory for ring buffers, weights and Ray's object store: /dev/shm, and the directory of LUDUS_SHM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ludus.core.formatting import format_bytes
from ludus.launch.doctor.finding import DoctorFinding, failure, ok, warning
from ludus.launch.doctor.requirements import ResourceNeeds

SHM = "LUDUS_SHM"
"""Variable with the directory of ring buffers and weights (distributed/hub/server.py)."""

_SHM = Path("/dev/shm")  # noqa: S108 - inspected, not written to
_SHM_MIN = 256 << 20
"""With less free space, ring buffers are put into the temporary directory (distributed/hub/server.py)."""

_MOUNT = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm"


@dataclass(frozen=True)
class SharedMemory:
    """Bytes. `why`: why it cannot be used."""

    total: int = 0
    free: int = 0
    why: str = ""

    def __str__(self) -> str:
        return f"{format_bytes(self.total)}, {format_bytes(self.free)} free"


def inspect_shared_memory(path: Path = _SHM) -> SharedMemory:
    try:
        stat = os.statvfs(path)
    except OSError:
        return SharedMemory(why="it does not exist")
    why = "" if os.access(path, os.W_OK) else "it is not writable"
    return SharedMemory(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize, why)


def check_shared_memory(environ: Mapping[str, str], needs: ResourceNeeds) -> list[DoctorFinding]:
    if SHM not in environ:
        return [check_dev_shm(inspect_shared_memory(), needs)]
    found = [check_ludus_shm(environ[SHM], inspect_shared_memory(Path(environ[SHM])), needs)]
    return [*found, check_ray_store(inspect_shared_memory(), needs)] if needs.ray else found


def check_dev_shm(shared: SharedMemory, needs: ResourceNeeds) -> DoctorFinding:
    slower = "rings go to the temporary directory, which is slower"
    if shared.why:
        return warning("shared memory", f"{_SHM}: {shared.why}; {slower}", _MOUNT)
    text, bigger = f"{_SHM}: {shared}; needed {needs.explain_shared_memory()}", _enlarge_command(needs.shared_memory)
    if shared.free < _SHM_MIN:
        return warning("shared memory", f"{text}; with so little, {slower}", bigger)
    if shared.free < needs.shared_memory:
        return failure("shared memory", text, f"{bigger}; or set {SHM} to a directory with more room.")
    return ok("shared memory", text)


def check_ludus_shm(directory: str, shared: SharedMemory, needs: ResourceNeeds) -> DoctorFinding:
    """Check the directory of LUDUS_SHM, for which there is no fallback."""
    if shared.why:
        return failure(
            "shared memory", f"{SHM}={directory}: {shared.why}", f"Set {SHM} to an existing writable directory, or unset it."
        )
    text = f"{SHM}={directory}: {shared}; needed {needs.explain_rings()}"
    if shared.free < needs.rings:
        return failure("shared memory", text, f"Set {SHM} to a directory with more room, or unset it.")
    return ok("shared memory", text)


def check_ray_store(shared: SharedMemory, needs: ResourceNeeds) -> DoctorFinding:
    """Check the room for Ray's object store, which is in /dev/shm even with LUDUS_SHM."""
    check = "shared memory of Ray"
    if shared.why:
        return warning(check, f"{_SHM}: {shared.why}; Ray's store goes to a disk, which is slower", _MOUNT)
    text = f"{_SHM}: {shared}; needed {needs.explain_store()}"
    return ok(check, text) if shared.free >= needs.store else failure(check, text, _enlarge_command(needs.store))


def _enlarge_command(count: int) -> str:
    rounded = -(-2 * count // (1 << 30))
    return f"mount -o remount,size={rounded}G /dev/shm; in containers --shm-size={rounded}g"
