"""Guard of one command that ends with a pipe from its owner, the lifeline. Used for Xvfb, for Ray nodes and, over srun, for jobs.

    with GuardedCommand(["Xvfb", "-displayfd", "1"], stdout=subprocess.PIPE, grace_s=3, remove=[directory]) as xvfb: …

The guard is a process between owner and command, and the subreaper of everything that the command starts. When the pipe on its
standard input closes or the owner exits, for whatever reason, it ends the command with all descendants and deletes the files. If the
guard is killed, the kernel ends the command. `command_guard.py` guards many commands, with logs, through a common spawner.

Standard library only; run as a file, without installed packages.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[3]))

from ludus.io import json_lines
from ludus.io.json_lines import LineReader
from ludus.process import children, temp_dirs
from ludus.process.signals import SignalQueue

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
TICK_S = 5.0
_END_S = 15.0
"""How long a guard may take to end, in addition to the grace of its command."""


class LifelineEvents:
    """Signals to this process, bytes on the lifeline (numbers of signals) and its end, in one `select`.

    `owner`: the lifeline also ends with this process, of which a fork may hold a copy of the pipe.
    """

    def __init__(self, pipe: int = 0, owner: int | None = None) -> None:
        self.is_closed = False
        self._pipe, self._owner_fd = pipe, -1
        self._signals = SignalQueue(*FORWARDED, signal.SIGCHLD, restore=False)  # a later signal must not change the exit code
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals, selectors.EVENT_READ)
        mode = os.fstat(pipe).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):  # not a terminal or a file, as when a person runs the command
            self._selector.register(pipe, selectors.EVENT_READ)
        if owner is not None:
            with contextlib.suppress(OSError, AttributeError):  # not supported by this kernel
                self._owner_fd = os.pidfd_open(owner)
                self._selector.register(self._owner_fd, selectors.EVENT_READ)
            self.is_closed = os.getppid() != owner

    def __enter__(self) -> LifelineEvents:
        return self

    def __exit__(self, *exc: object) -> None:
        self._selector.close()
        self._signals.close()

    def wait(self, timeout_s: float) -> tuple[list[int], list[int]]:
        """Wait for an event, also the end of a child. Returns the signals to this process, and those from the lifeline."""
        signals = received = b""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._signals:
                signals = self._signals.take()
            elif key.fd == self._owner_fd:
                self.is_closed = True
            else:
                received = self._read_pipe()
        return [number for number in signals if number in FORWARDED], [number for number in received if number in FORWARDED]

    def _read_pipe(self) -> bytes:
        data = b""
        with contextlib.suppress(OSError):  # connection reset
            data = os.read(self._pipe, 256)
        if not data:
            self.is_closed = True
            self._selector.unregister(self._pipe)
        return data


class LifelineGuard:
    """Runs one command until it ends, the lifeline closes or SIGTERM arrives. For a process with a single thread.

    `grace_s`: time between SIGTERM and SIGKILL when the command does not end by itself; 0: it is killed at once.
    """

    def __init__(self, events: LifelineEvents, grace_s: float = 0.0) -> None:
        self.is_over = False
        self._events, self._grace_s = events, grace_s
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, words: Sequence[str], environment: Mapping[str, str], directory: str | None = None) -> int | None:
        """Run the command, then kill its descendants. Returns its exit code, None if it did not end by itself."""
        children.adopt_orphans()
        last = signal.SIGTERM if self._grace_s else signal.SIGKILL
        try:
            process = self._process = children.start_child(words, env=environment, cwd=directory, death_signal=last)
        except (OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"{words[0]} cannot be started: {error}\n")
            return children.shell_exit_code(error)
        while (code := process.poll()) is None and not (self.is_over or self._events.is_closed):
            signals, received = self._events.wait(self.run_timers())
            for number in received:
                self.forward(number)
            for number in signals:
                self.handle_signal(number)
            children.reap_orphans({process.pid})
        if code is None and self._grace_s:
            self.forward(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._grace_s)
        children.kill_group(process.pid)
        if left := children.end_descendants():
            sys.stderr.write(f"could not be killed: {left}\n")
        return code

    def forward(self, number: int) -> None:
        if self._process is not None:
            children.send_signal(self._process.pid, number)

    def handle_signal(self, number: int) -> None:
        """Handle a signal to the guard itself."""
        if number == signal.SIGTERM:
            self.is_over = True

    def run_timers(self) -> float:
        """Do what is due; returns the seconds until the next call."""
        return TICK_S


class GuardedCommand:
    """A command under a guard, started by this process, its owner. Ends with `close` or with the owner.

    When it does not end by itself, the guard deletes the directories in `remove`, and stale temporary directories below those in
    `sweep`. `stdout` and `stderr`: of the command, as for Popen.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        grace_s: float = 0.0,
        remove: Sequence[Path] = (),
        sweep: Sequence[Path] = (),
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> None:
        self._owner, self._grace_s = os.getpid(), grace_s
        self.guard = subprocess.Popen(  # noqa: S603 - this interpreter, with a program of ours
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env={},  # a guard must survive those that kill all processes with a variable of a job
            cwd="/",
            start_new_session=True,
        )
        request = {
            "words": list(words),
            "environment": dict(os.environ if environment is None else environment),
            "directory": None if directory is None else str(directory),
            "grace_s": grace_s,
            "remove": list(map(str, remove)),
            "sweep": list(map(str, sweep)),
            "owner": self._owner,
        }
        assert self.guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed: its output ends
            self.guard.stdin.write(json_lines.encode(request))
            self.guard.stdin.flush()

    def __enter__(self) -> GuardedCommand:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_owner(self) -> bool:
        """False in a fork of the owner."""
        return os.getpid() == self._owner

    def close(self) -> None:
        """End the command and wait for it. Idempotent."""
        if not self.is_owner():
            return
        for pipe in (self.guard.stdin, self.guard.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        children.wait_or_kill(self.guard, self._grace_s + _END_S)


def main() -> int:
    line = LineReader(sys.stdin.fileno()).read_line()
    if line is None:
        return 1
    request = json_lines.decode(line)
    with LifelineEvents(0, request["owner"]) as events:
        guard = LifelineGuard(events, request["grace_s"])
        code = guard.run(request["words"], request["environment"], request["directory"])
    if code is None:
        for path in request["remove"]:
            shutil.rmtree(path, ignore_errors=True)
        for base in request["sweep"]:
            temp_dirs.sweep(Path(base))
    return 1 if code is None else code & 0xFF


if __name__ == "__main__":
    sys.exit(main())
