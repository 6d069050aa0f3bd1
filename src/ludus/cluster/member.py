"""A process of a job on another machine than its supervisor's: `python -P -m ludus.cluster.member -- COMMAND …`.

Its input is a line to the supervisor on which nothing is ever said. Where it ends (the supervisor hung up, or is gone, or its
machine is), the command ends at once, with all that it has started. Signals that ask for an end are handed on. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
from types import FrameType

from ludus import pids

_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_SAFETY_S = 5.0
_KILLED = 128 + signal.SIGKILL
_UNWANTED = ("LD_PRELOAD",)
"""Sites preload libraries into everything that their queue starts; Ray and games are known to break on them."""


def run(command: list[str], line: int = 0) -> int:
    """Until the command has ended, or the line; then nothing of it is left. The exit code as a shell would say it."""
    pids.adopt_orphans()
    signals = _signals()
    try:
        process = _start(command)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        return 126 if isinstance(error, PermissionError) else 127
    with selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        if _is_line(line):
            selector.register(line, selectors.EVENT_READ)
        hung_up = False
        while process.poll() is None and not hung_up:
            for key, _ in selector.select(_SAFETY_S):
                if key.fileobj is signals:
                    _hand_on(signals.recv(256), process)
                else:
                    hung_up = _has_ended(line)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.poll()
    pids.end_descendants()
    if code is None:
        return _KILLED
    return 128 - code if code < 0 else code


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    return subprocess.Popen(  # noqa: S603 # a job runs what it is told to
        command,
        env={name: value for name, value in os.environ.items() if name not in _UNWANTED},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: pids.end_with(parent, signal.SIGKILL),  # there are no threads here
    )


def _hand_on(numbers: bytes, process: subprocess.Popen[bytes]) -> None:
    for number in numbers:
        if number in _HANDED_ON:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)  # one that is stopped could not end


def _is_line(line: int) -> bool:
    """A terminal or a file (somebody tries it by hand) is none."""
    mode = os.fstat(line).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _has_ended(line: int) -> bool:
    try:
        return not os.read(line, 65_536)
    except OSError:  # the other end was reset
        return True


def _signals() -> socket.socket:
    """Numbers of signals arrive here, so that waiting for them and for the line is one wait."""
    here, there = socket.socketpair()
    for end in (here, there):
        end.setblocking(False)
    signal.set_wakeup_fd(there.detach(), warn_on_full_buffer=False)
    for number in (*_HANDED_ON, signal.SIGCHLD):
        signal.signal(number, _heard)
    return here


def _heard(number: int, frame: FrameType | None) -> None:
    """Only so that it is not ignored: the number is read from the socket."""


def main(words: list[str]) -> int:
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        print("usage: python -m ludus.cluster.member -- COMMAND …", file=sys.stderr)
        return 2
    return run(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
