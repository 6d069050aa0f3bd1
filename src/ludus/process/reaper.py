"""Program that cleans up after a process that was killed. Its standard input is a pipe from that process, its owner.

    reaper.py DIRECTORY [BASE …]    kills processes that have a file below DIRECTORY open for writing, or name one in their
                                    environment; then removes DIRECTORY and stale temporary directories below BASE

A byte on the pipe means that the owner has cleaned up itself. End of file without a byte means that the owner is dead.
Ray's own processes end with their parent, except for some that first try to contact a head node that is gone too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # run as a file, without installed packages
    sys.path.append(str(Path(__file__).parents[2]))

from ludus.process import procfs, temp_dirs

_TIMEOUT_S = 20.0
_PAUSE_S = 0.1


def processes_using(directory: str) -> list[int]:
    """Processes that write below the directory or name it in their environment. (Those of other users cannot be read and are skipped.)"""
    inside = f"{directory}/"
    found = []
    for pid in procfs.list_pids():
        with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
            if pid != os.getpid() and (_has_writable_file(pid, inside) or _has_in_environment(pid, inside)):
                found.append(pid)
    return found


def _has_writable_file(pid: int, inside: str) -> bool:
    for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(inside) and _is_writable(pid, fd):  # noqa: PTH115
                return True
    return False


def _is_writable(pid: int, fd: str) -> bool:
    """Only writers count: a process that reads a log there does not belong to the owner."""
    with open(f"/proc/{pid}/fdinfo/{fd}") as file:
        return any(line.startswith("flags:") and int(line.split()[1], 8) & os.O_ACCMODE for line in file)


def _has_in_environment(pid: int, inside: str) -> bool:
    """Not sufficient alone: a process that sets its title overwrites its environment."""
    return any(entry.partition("=")[2].startswith(inside) for entry in procfs.read_environment(pid))


def main(directory: str, *bases: str) -> None:
    if sys.stdin.buffer.read(1):
        return
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline and (left := processes_using(directory)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    shutil.rmtree(directory, ignore_errors=True)
    for base in bases:
        temp_dirs.sweep(Path(base))


if __name__ == "__main__":
    main(*sys.argv[1:])
