"""Outlives a process that was killed, and ends what that has left: run as a program, with a pipe from the owner as its input.

    reaper.py DIRECTORY [BASE …]    whoever writes to a file below DIRECTORY, or has one in his environment, is one of the owner's;
                                    what his workers have left below BASE is swept

A byte on the pipe is a farewell: nothing is left to do. The end of the pipe without one means that the owner is dead.
Ray's own processes end with their parent in time, but for some that first want to tell a head that is gone as well.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # run as a file, without the packages that are installed
    sys.path.append(str(Path(__file__).parents[2]))

from ludus.process import procfs, temp_dirs

_WITHIN_S = 20.0
_PAUSE_S = 0.1


def users_of(directory: str) -> list[int]:
    """Processes that have to do with the directory. (Those of other users cannot be looked into, and are not ours.)"""
    inside = f"{directory}/"
    found = []
    for pid in procfs.list_pids():
        with contextlib.suppress(OSError):  # it has just ended, or is another's
            if pid != os.getpid() and (_opened_to_write(pid, inside) or _told(pid, inside)):
                found.append(pid)
    return found


def _opened_to_write(pid: int, inside: str) -> bool:
    for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(inside) and _writes(pid, fd):  # noqa: PTH115
                return True
    return False


def _writes(pid: int, fd: str) -> bool:
    """Somebody who only reads a log there is nobody's business."""
    with open(f"/proc/{pid}/fdinfo/{fd}") as file:
        return any(line.startswith("flags:") and int(line.split()[1], 8) & os.O_ACCMODE for line in file)


def _told(pid: int, inside: str) -> bool:
    """Not enough by itself: whoever sets the title of his process writes over his environment."""
    return any(entry.partition("=")[2].startswith(inside) for entry in procfs.read_environment(pid))


def main(directory: str, *bases: str) -> None:
    if sys.stdin.buffer.read(1):
        return
    deadline = time.monotonic() + _WITHIN_S
    while time.monotonic() < deadline and (left := users_of(directory)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    shutil.rmtree(directory, ignore_errors=True)
    for base in bases:
        temp_dirs.sweep(Path(base))


if __name__ == "__main__":
    main(*sys.argv[1:])
