"""Identifies processes by PID and start time: PIDs are reused."""

from __future__ import annotations

import contextlib
import os
import signal

from ludus.process import procfs


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
