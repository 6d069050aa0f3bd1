"""Runs a command on another machine through a launcher such as srun, with signal forwarding and clean-up:

    python -P -m ludus.launch.remote_process relay srun … python -P -m ludus.launch.remote_process run COMMAND …

`relay` runs on the supervisor's machine. It forwards signals and ends as the command did. `run` starts the command on the other
machine, under a `LifelineGuard`. The pipe between them is the launcher's stdin. Each byte on it is a signal number, because launchers
do not forward signals (srun kills its tasks instead). When the pipe closes, `run` kills the command and all its children.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from ludus.process import children
from ludus.process.commands.lifeline_guard import TICK_S, LifelineEvents, LifelineGuard
from ludus.ray_cluster.ray_temp_dir import sweep_leftovers

_LAUNCHER_END_S = 5.0
"""How long the launcher may take to end after its stdin is closed."""

_TERM_DELAY_S = 5.0
"""A queue that stops a job sends SIGTERM to all its processes. `run` delays it, so that the supervisor can stop them in order."""

_KILLED = 128 + signal.SIGKILL
_UNWANTED = ("LD_PRELOAD",)
"""Some sites preload libraries into all processes of their queue, which breaks Ray and games."""


def run(command: Sequence[str]) -> int:
    """Run the command until it ends or the pipe closes, then kill its children. Return the exit code, 128 + N for signal N."""
    environment = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    with LifelineEvents() as events:
        code = SlurmTaskGuard(events).run(command, environment)
    if code is None:
        sweep_leftovers()
        return _KILLED
    return 128 - code if code < 0 else code


class SlurmTaskGuard(LifelineGuard):
    """Forwards signals, but a SIGTERM that did not come through the pipe only after a delay; after twice that, the command is killed."""

    _forward_at = _kill_at = float("inf")

    def handle_signal(self, number: int) -> None:
        if number != signal.SIGTERM:
            self.forward(number)
        elif _is_srun_gone(os.environ):
            self.is_over = True
        elif self._kill_at == float("inf"):
            now = time.monotonic()
            self._forward_at, self._kill_at = now + _TERM_DELAY_S, now + 2 * _TERM_DELAY_S

    def run_timers(self) -> float:
        now = time.monotonic()
        if now >= self._forward_at:
            self._forward_at = float("inf")
            self.forward(signal.SIGTERM)
        self.is_over = self.is_over or now >= self._kill_at
        return 0.0 if self.is_over else max(0.0, min(TICK_S, min(self._forward_at, self._kill_at) - now))


def relay(launcher: Sequence[str]) -> int:
    """Run the launcher until it ends and return its exit code. Signals, and the end of the pipe, are passed to its stdin."""
    with LifelineEvents() as events:
        try:
            # It may outlive this process, since it passes on the end of the pipe.
            process = subprocess.Popen(launcher, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603 # as its user wants
        except (OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"{launcher[0]} cannot be started: {error}\n")
            return children.shell_exit_code(error)
        assert process.stdin is not None
        with process.stdin as stdin:
            deadline = float("inf")
            while process.poll() is None:
                signals, _ = events.wait(TICK_S if deadline == float("inf") else 0.1)
                for number in signals:
                    with contextlib.suppress(OSError, ValueError):  # a closed pipe ends the process anyway
                        os.write(stdin.fileno(), bytes([number]))
                if events.is_closed and not stdin.closed:
                    stdin.close()
                    deadline = time.monotonic() + _LAUNCHER_END_S
                if time.monotonic() > deadline:
                    process.kill()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


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
