"""Identifies processes by PID and start time (PIDs are reused), signals them, and ends descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

from ludus.process import procfs

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_KILL_TIMEOUT_S = 10.0


def start_time(pid: int) -> str | None:
    """When the process started, as a string that is equal on every call; None for a missing process or a zombie."""
    if procfs.is_available():
        stat = procfs.read_stat(pid)
        return None if stat is None or stat.has_ended else f"{procfs.boot_id()}-{stat.start}"
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    return None


def is_alive(pid: int, since: str) -> bool:
    """Return whether this very process still runs. `since`: from `start_time`."""
    return start_time(pid) == since


def start_ticks(pid: int) -> int | None:
    """Start time in clock ticks since boot; None if there is no such process or no /proc."""
    stat = procfs.read_stat(pid)
    # An exiting process closes its sockets before it is a zombie: a reader that got end of file may call this in between.
    return None if stat is None or stat.is_exiting else stat.start


def is_alive_since(pid: int, ticks: int) -> bool:
    """Return whether this very process still runs. `ticks`: from `start_ticks`, 0 if unknown."""
    if procfs.is_available():
        now = start_ticks(pid)
        return now is not None and ticks in (0, now)
    import psutil

    return bool(psutil.pid_exists(pid))  # the start time cannot be compared here


def send_signal(pid: int, since: str, number: signal.Signals) -> bool:
    """Send a signal to this very process; returns False when it has ended."""
    if not hasattr(os, "pidfd_open"):
        if not is_alive(pid, since):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False
    try:
        handle = os.pidfd_open(pid)  # from here on a reused PID cannot be hit
    except ProcessLookupError:
        return False
    try:
        if not is_alive(pid, since):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def adopt_orphans() -> None:
    """Make this process the subreaper of its descendants: orphans become its children, not those of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Send this process a signal when its parent ends, for whatever reason. Stays in force across exec.

    The kernel sends the signal when the thread that forked this process ends.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before prctl
        os.kill(os.getpid(), number)


def set_name(name: str) -> None:
    """Set the name that `ps` and `top` show; truncated to 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_descendants(timeout_s: float = _KILL_TIMEOUT_S) -> list[int]:
    """Kill all descendants repeatedly until there are none; returns those left after the time-out.

    Only for a process that called `adopt_orphans`. Orphans that arrive meanwhile are killed in the next round.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        rest = kill_descendants()
        if (not reap_children() and not rest) or time.monotonic() > deadline:
            return rest
        time.sleep(0.01)  # a killed process disappears asynchronously; there is no event to wait for


def threads_below(pid: int) -> int:
    """Total number of threads of all processes below this one."""
    return sum(stat.threads for stat in map(procfs.read_stat, procfs.list_descendants(pid)) if stat is not None)


def kill_descendants() -> list[int]:
    """Send SIGKILL to all descendants once; returns their PIDs."""
    found = procfs.list_descendants(os.getpid())
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return found


def reap_children() -> bool:
    """Collect the exit codes of all children that have ended. Returns whether there are others (on Linux)."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return sys.platform == "linux"
