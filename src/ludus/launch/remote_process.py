"""Runs a command on another machine through a launcher such as srun, with signal forwarding and clean-up:

    python -P -m ludus.launch.remote_process relay srun … python -P -m ludus.launch.remote_process run COMMAND …

`relay` runs on the supervisor's machine. It forwards signals and ends as the command did. `run` starts the command on the other
machine. The pipe between them is the launcher's stdin. Each byte on it is a signal number, because launchers do not forward signals
(srun kills its tasks instead). When the pipe closes, for whatever reason, `run` kills the command and all its children.
Standard library only.
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
import time
from collections.abc import Mapping, Sequence

from ludus.process import identity
from ludus.process.signals import SignalQueue

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_SAFETY_S = 5.0
_LAUNCHER_END_S = 5.0
"""How long the launcher may take to end after its stdin is closed."""

_TERM_DELAY_S = 5.0
"""A queue that stops a job sends SIGTERM to all its processes. `run` delays it, so that the supervisor can stop them in order."""

_KILLED = 128 + signal.SIGKILL
_UNWANTED = ("LD_PRELOAD",)
"""Some sites preload libraries into all processes of their queue, which breaks Ray and games."""


def run(command: Sequence[str], pipe: int = 0) -> int:
    """Run the command until it ends or the pipe closes, then kill its children. Return the exit code, 128 + N for signal N."""
    identity.adopt_orphans()
    with _Events(pipe) as events:
        environment = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
        process = _start(command, environment, subprocess.DEVNULL, outlives=False)
        if isinstance(process, int):
            return process
        termination = _DelayedTermination()
        while process.poll() is None and not events.pipe_closed and not termination.is_over():
            for number in events.wait(termination.remaining_s()):
                _signal(process, number)
            for number in events.take_signals():
                if number != signal.SIGTERM:
                    _signal(process, number)
                elif _is_srun_gone(os.environ):
                    termination.end()
                else:
                    termination.begin()
            if termination.take_due():
                _signal(process, signal.SIGTERM)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.poll()
        identity.end_descendants()
        if code is None:
            _sweep_ray_files()
    return _KILLED if code is None else 128 - code if code < 0 else code


def _sweep_ray_files() -> None:
    """Delete what killed processes have left."""
    from ludus.ray_cluster.cluster import sweep_leftovers

    with contextlib.suppress(OSError):
        sweep_leftovers()


def relay(launcher: Sequence[str], pipe: int = 0) -> int:
    """Run the launcher until it ends and return its exit code. Signals, and the end of `pipe`, are passed to its stdin."""
    with _Events(pipe) as events:
        process = _start(launcher, os.environ, subprocess.PIPE, outlives=True)
        if isinstance(process, int):
            return process
        assert process.stdin is not None
        stdin = process.stdin
        deadline = float("inf")
        while process.poll() is None:
            events.wait(_SAFETY_S if deadline == float("inf") else 0.1)
            for number in events.take_signals():
                if not stdin.closed:
                    _send(stdin.fileno(), number)
            if events.pipe_closed and not stdin.closed:
                stdin.close()
                deadline = time.monotonic() + _LAUNCHER_END_S
            if time.monotonic() > deadline:
                process.kill()
        if not stdin.closed:
            stdin.close()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


class _Events:
    """Signals to this process, bytes from the pipe and its end, in one `select`."""

    def __init__(self, pipe: int) -> None:
        self.pipe_closed = False
        self._pipe, self._pending = pipe, b""
        self._signals = SignalQueue(*_FORWARDED, signal.SIGCHLD, restore=False)  # a later signal must not change the exit code
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals, selectors.EVENT_READ)
        if _is_pipe(pipe):
            self._selector.register(pipe, selectors.EVENT_READ)

    def __enter__(self) -> _Events:
        return self

    def __exit__(self, *exc: object) -> None:
        self._selector.close()
        self._signals.close()

    def wait(self, timeout_s: float) -> list[int]:
        """Wait for an event, also a signal or the end of a child. Returns the signal numbers from the pipe."""
        received = b""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._signals:
                self._pending += self._signals.take()
            else:
                received += self._read()
        return [number for number in received if number in _FORWARDED]

    def take_signals(self) -> list[int]:
        """Return the signals to this process since the last call."""
        pending, self._pending = self._pending, b""
        return [number for number in pending if number in _FORWARDED]

    def _read(self) -> bytes:
        try:
            data = os.read(self._pipe, 256)
        except OSError:  # connection reset
            data = b""
        if not data:
            self.pipe_closed = True
            self._selector.unregister(self._pipe)
        return data


class _DelayedTermination:
    """Timer for a SIGTERM that did not come through the pipe: forwarded after _TERM_DELAY_S, and over after twice that."""

    def __init__(self) -> None:
        self._due = self._last = float("inf")

    def begin(self) -> None:
        if self._last == float("inf"):
            self._due, self._last = time.monotonic() + _TERM_DELAY_S, time.monotonic() + 2 * _TERM_DELAY_S

    def end(self) -> None:
        self._last = 0.0

    def is_over(self) -> bool:
        return time.monotonic() > self._last

    def take_due(self) -> bool:
        """Return True once, when the signal is due."""
        if time.monotonic() <= self._due:
            return False
        self._due = float("inf")
        return True

    def remaining_s(self) -> float:
        return max(0.0, min(_SAFETY_S, min(self._due, self._last) - time.monotonic() + 0.01))


def _start(words: Sequence[str], environment: Mapping[str, str], stdin: int, *, outlives: bool) -> subprocess.Popen[bytes] | int:
    """Start a process, or return a shell's exit code if that fails. `outlives`: it may outlive this process (the launcher passes on the end of the pipe)."""
    parent = os.getpid()
    try:
        return subprocess.Popen(  # noqa: S603 # running the user's command is its purpose
            words,
            env=environment,
            stdin=stdin,
            start_new_session=True,
            preexec_fn=None
            if outlives
            else lambda: identity.die_with_parent(parent, signal.SIGKILL),  # there are no threads here
        )
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{words[0]} cannot be started: {error}\n")
        return 126 if isinstance(error, PermissionError) else 127


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)  # a stopped process could not end


def _send(pipe: int, number: int) -> None:
    with contextlib.suppress(OSError):  # a closed pipe ends the process anyway
        os.write(pipe, bytes([number]))


def _is_srun_gone(environ: Mapping[str, str]) -> bool:
    """Detect a killed srun by its closed port: Slurm keeps our stdin open after it."""
    host, port = environ.get("SLURM_SRUN_COMM_HOST", ""), environ.get("SLURM_SRUN_COMM_PORT", "")
    if not host or not port.isdigit():
        return False
    try:
        socket.create_connection((host, int(port)), 2.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _is_pipe(fd: int) -> bool:
    """Return False for a terminal or a file, as when a person runs the command."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _exit_like(code: int) -> int:
    """End this process by the signal that the code 128 + N names; else return the code."""
    if code > 128 and code - 128 in {number.value for number in signal.Signals}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(code - 128, signal.SIG_DFL)
        os.kill(os.getpid(), code - 128)
    return code


def main(words: Sequence[str]) -> int:
    if words[:1] == ["run"] and len(words) > 1:
        return run(words[1:])
    if words[:1] == ["relay"] and len(words) > 1:
        return _exit_like(relay(words[1:]))
    sys.stderr.write("usage: python -m ludus.launch.remote_process relay LAUNCHER … | run COMMAND …\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
