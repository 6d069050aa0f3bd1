"""Outlives a process that was killed, and ends what that has left: run as a program, with a pipe from the owner as its input.

    reaper.py DIRECTORY VARIABLE       every process in whose environment VARIABLE=DIRECTORY/… stands is one of the owner's

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

_WITHIN_S = 20.0
_PAUSE_S = 0.1


def marked(mark: bytes) -> list[int]:
    """Processes that were started with this in their environment; others' cannot be read, and are not ours."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - names are all that is needed
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if any(entry.startswith(mark) for entry in file.read().split(b"\0")):
                found.append(int(pid))
    return found


def main(directory: str, variable: str) -> None:
    if sys.stdin.buffer.read(1):
        return
    deadline = time.monotonic() + _WITHIN_S
    while time.monotonic() < deadline and (left := marked(os.fsencode(f"{variable}={directory}/"))):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
