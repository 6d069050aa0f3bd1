"""Child processes and their descendants: start those that cannot outlive this process, signal, reap and kill them.

Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

from ludus.process import procfs

_KILL_S = 5.0
_DESCENDANTS_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


def start_child(
    words: Sequence[str], *, death_signal: signal.Signals = signal.SIGKILL, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a command in a new session. The kernel sends it `death_signal` when this process ends, for whatever reason.

    Only for processes with a single thread. `options` are those of Popen; its standard input is empty by default.
    """
    parent = os.getpid()
    return subprocess.Popen(  # noqa: S603 # the caller decides which command runs
        words,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(parent, death_signal),
        **{"stdin": subprocess.DEVNULL, **options},
    )


def shell_exit_code(error: Exception) -> int:
    """Exit code of a shell for a command that cannot be started."""
    return 126 if isinstance(error, PermissionError) else 127


def send_signal(pid: int, number: int) -> None:
    """Signal a child that is not reaped yet. Not Popen.send_signal, which reaps an ended process and so frees its PID."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)  # a stopped process could not end


def wait_or_kill(process: subprocess.Popen[Any], grace_s: float) -> int | None:
    """Wait for a process that was asked to end, and kill it after `grace_s`. Returns its exit code; None: it cannot be killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(grace_s)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # in disk wait
        return process.wait(_KILL_S)
    return None


def describe_exit(code: int) -> str:
    """`code 3`, or `signal SIGKILL` for -9."""
    if code >= 0:
        return f"code {code}"
    with contextlib.suppress(ValueError):  # a real-time signal
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


# -- descendants --------------------------------------------------------------------------------------------------------------


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


def end_descendants(timeout_s: float = _DESCENDANTS_S) -> list[int]:
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
    kill(*found)
    return found


def kill(*pids: int) -> None:
    """Send SIGKILL; processes that have ended are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_group(leader: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process group. Its number cannot be reused while the group exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def reap_children() -> bool:
    """Collect the exit codes of all children that have ended. Returns whether there are others (on Linux)."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return sys.platform == "linux"


def reap_orphans(children: Collection[int]) -> None:
    """Collect the exit codes of adopted processes that have ended, not of these children, whose PIDs stay reserved."""
    if not hasattr(os, "waitid"):  # macOS, where none are adopted
        return
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid not in children:
            os.waitpid(found.si_pid, os.WNOHANG)
