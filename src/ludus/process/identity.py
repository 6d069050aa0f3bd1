"""Processes by number and start time: a number alone is given to somebody else once its process is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GONE_S = 10.0


def started(pid: int) -> str | None:
    """When it began, in a form that is the same whenever it is asked for; None when there is no such process, or only its exit code."""
    if Path("/proc/self/stat").exists():
        fields = _stat(pid)
        return None if fields is None or fields[0] in ("Z", "X") else f"{boot()}-{fields[19]}"
    asked = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=10)  # noqa: S603, S607
    return asked.stdout.strip() or None


def alive(pid: int, since: str) -> bool:
    """Whether this very process still runs."""
    return started(pid) == since


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


def boot() -> str:
    """Another one after every start of the machine; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def adopt_orphans() -> None:
    """Descendants whose parents die become children of this process, not of init, so that they can be found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with(parent: int, number: signal.Signals) -> None:
    """From now on this process gets a signal when its parent is gone, however that happened. Kept across exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), number)


def descendants(of: int) -> list[int]:
    """All below it that still run, as far as they can be seen; without a /proc none."""
    children_of = _listed if _are_listed() else _all_children().get
    found: list[int] = []
    rest = [of]
    while rest:
        below = children_of(rest.pop()) or []
        found += below
        rest += below
    return [pid for pid in found if _runs(pid)]


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
    return sum(int(fields[17]) for fields in map(_stat, descendants(pid)) if fields is not None)


def kill_descendants() -> list[int]:
    """One round of it; returns who was there."""
    found = descendants(os.getpid())
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


def children(pid: int) -> list[int]:
    """Also those that ended and whose exit code nobody has taken."""
    return _listed(pid) if _are_listed() else _all_children().get(pid, [])


def environment(pid: int) -> set[str]:
    """NAME=VALUE, as it was started with; nothing where that cannot be seen."""
    try:
        return {entry.decode(errors="replace") for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
    except OSError:
        return set()


def _are_listed() -> bool:
    own = os.getpid()
    return Path(f"/proc/{own}/task/{own}/children").exists()


def _listed(pid: int) -> list[int]:
    """By the kernel; one that changes its parent at this very moment may be missing."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has just ended
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - a walk of all below a game takes a tenth as long
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def _all_children() -> dict[int, list[int]]:
    """For kernels that do not list them."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields is not None:
            found.setdefault(int(fields[1]), []).append(int(entry.name))
    return found


def _runs(pid: int) -> bool:
    fields = _stat(pid)
    # The first thread of a process may have ended before the others, which then still run.
    return fields is not None and (fields[0] not in ("Z", "X") or int(fields[17]) > 1)


def _stat(pid: int) -> list[str] | None:
    """State, parent, … as proc(5) numbers them from the third on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()  # the name before it may contain anything
