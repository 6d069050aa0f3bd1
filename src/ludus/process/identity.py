"""Processes by number and start time: a number alone is given to somebody else once its process is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

from ludus.process import procfs

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_GONE_S = 10.0


def started(pid: int) -> str | None:
    """When it began, in a form that is the same whenever it is asked for; None when there is no such process, or only its exit code."""
    if procfs.is_available():
        stat = procfs.read_stat(pid)
        return None if stat is None or stat.has_ended else f"{procfs.boot_id()}-{stat.start}"
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    return None


def alive(pid: int, since: str) -> bool:
    """Whether this very process still runs; `since`: from `started`."""
    return started(pid) == since


def start_ticks(pid: int) -> int | None:
    """In clock ticks since boot; None when there is no such process, or no /proc."""
    stat = procfs.read_stat(pid)
    # One that is exiting has closed its sockets before it is a zombie: whoever reads their end comes here in between.
    return None if stat is None or stat.is_exiting else stat.start


def alive_since(pid: int, ticks: int) -> bool:
    """Whether this very process still runs; `ticks`: from `start_ticks`, 0 when they are not known."""
    if procfs.is_available():
        now = start_ticks(pid)
        return now is not None and ticks in (0, now)
    import psutil

    return bool(psutil.pid_exists(pid))  # the number is all there is to go by


def send(pid: int, since: str, number: signal.Signals) -> bool:
    """A signal to this very process; False when it is gone."""
    if not hasattr(os, "pidfd_open"):
        if not alive(pid, since):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False
    try:
        handle = os.pidfd_open(pid)  # from here on the number means this process or none
    except ProcessLookupError:
        return False
    try:
        if not alive(pid, since):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def adopt_orphans() -> None:
    """Descendants whose parents die become children of this process, not of init, so that they can be found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int, number: signal.Signals) -> None:
    """From now on this process gets a signal when its parent is gone, however that happened. Kept across exec.

    The kernel sends it when the thread ends that forked this process.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), number)


def set_name(name: str) -> None:
    """As `ps` and `top` show it: 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_descendants(timeout_s: float = _GONE_S) -> list[int]:
    """Kill all that is below this process, until nothing is; returns what could not be killed in this time.

    Only for a process that adopts orphans. Whatever it is handed over in the meantime is found in the next round.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        rest = kill_descendants()
        if (not reap() and not rest) or time.monotonic() > deadline:
            return rest
        time.sleep(0.01)  # a killed process is gone when the kernel gets round to it, which nothing here can wait for


def threads_below(pid: int) -> int:
    """Of all processes below this one, together."""
    return sum(stat.threads for stat in map(procfs.read_stat, procfs.list_descendants(pid)) if stat is not None)


def kill_descendants() -> list[int]:
    """One round of it; returns who was there."""
    found = procfs.list_descendants(os.getpid())
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return found


def reap() -> bool:
    """Take the exit codes of all children that ended and that nobody asks about. Whether there are others (where that can be seen)."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return sys.platform == "linux"
