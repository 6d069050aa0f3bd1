"""A process of a job on another machine than its supervisor's, and the line between the two, which goes through a starter such as srun:

    python -P -m ludus.launch.remote_process near srun … python -P -m ludus.launch.remote_process far COMMAND …

The near end stands for the command where the supervisor is: it is told to end as the command would be, and ends as the command did.
The far end starts it. The line is the starter's input. A byte on it is a signal for the command: starters do not hand them on (srun
kills what it is asked to end). Where the line ends, because somebody hung up, or is gone, or his machine is, the command ends at
once, with all that it has started. Standard library only.
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

_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_SAFETY_S = 5.0
_HUNG_UP_S = 5.0
"""How long the starter may take to end when its line is cut."""

_PATIENCE_S = 5.0
"""A queue that ends a job tells all its processes at the same time: so long the supervisor may end them in his order."""

_KILLED = 128 + signal.SIGKILL
_UNWANTED = ("LD_PRELOAD",)
"""Sites preload libraries into everything that their queue starts; Ray and games are known to break on them."""


def far(command: Sequence[str], line: int = 0) -> int:
    """Until the command has ended, or the line; then nothing of it is left. The exit code as a shell would say it."""
    identity.adopt_orphans()
    with _Ears(line) as ears:
        environment = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
        process = _start(command, environment, subprocess.DEVNULL, outlives=False)
        if isinstance(process, int):
            return process
        patience = _Patience()
        while process.poll() is None and not ears.cut and not patience.is_over():
            for number in ears.listen(patience.left_s()):
                _signal(process, number)
            for number in ears.signals():
                if number != signal.SIGTERM:
                    _signal(process, number)
                elif _starter_is_gone(os.environ):
                    patience.end()
                else:
                    patience.begin()
            if patience.is_due():
                _signal(process, signal.SIGTERM)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.poll()
        identity.end_descendants()
        if code is None:
            _sweep()
    return _KILLED if code is None else 128 - code if code < 0 else code


def _sweep() -> None:
    """What was killed could not tidy up."""
    from ludus.ray_cluster.cluster import sweep_leftovers

    with contextlib.suppress(OSError):
        sweep_leftovers()


def near(starter: Sequence[str], line: int = 0) -> int:
    """Until the starter has ended. Its exit code, or, where that says that a signal killed the command: this process ends by it too."""
    with _Ears(line) as ears:
        process = _start(starter, os.environ, subprocess.PIPE, outlives=True)
        if isinstance(process, int):
            return process
        assert process.stdin is not None
        pipe = process.stdin
        deadline = float("inf")
        while process.poll() is None:
            ears.listen(_SAFETY_S if deadline == float("inf") else 0.1)
            for number in ears.signals():
                if not pipe.closed:
                    _say(pipe.fileno(), number)
            if ears.cut and not pipe.closed:
                pipe.close()
                deadline = time.monotonic() + _HUNG_UP_S
            if time.monotonic() > deadline:
                process.kill()
        if not pipe.closed:
            pipe.close()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


class _Ears:
    """Signals to this process, bytes on the line and its end, in one wait."""

    def __init__(self, line: int) -> None:
        self.cut = False
        self._line, self._heard = line, b""
        self._signals = SignalQueue(*_HANDED_ON, signal.SIGCHLD, restore=False)  # what comes later must not change the exit code
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals, selectors.EVENT_READ)
        if _is_line(line):
            self._selector.register(line, selectors.EVENT_READ)

    def __enter__(self) -> _Ears:
        return self

    def __exit__(self, *exc: object) -> None:
        self._selector.close()
        self._signals.close()

    def listen(self, timeout_s: float) -> list[int]:
        """What was said on the line. Returns early when there was something, also a signal, also the end of a child."""
        said = b""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._signals:
                self._heard += self._signals.take()
            else:
                said += self._read()
        return [number for number in said if number in _HANDED_ON]

    def signals(self) -> list[int]:
        """Those to this process since it was asked last."""
        heard, self._heard = self._heard, b""
        return [number for number in heard if number in _HANDED_ON]

    def _read(self) -> bytes:
        try:
            heard = os.read(self._line, 256)
        except OSError:  # the other end was reset
            heard = b""
        if not heard:
            self.cut = True
            self._selector.unregister(self._line)
        return heard


class _Patience:
    """With a signal that came past the line: handed on after a while, and after the same time again there is an end."""

    def __init__(self) -> None:
        self._due = self._last = float("inf")

    def begin(self) -> None:
        if self._last == float("inf"):
            self._due, self._last = time.monotonic() + _PATIENCE_S, time.monotonic() + 2 * _PATIENCE_S

    def end(self) -> None:
        self._last = 0.0

    def is_over(self) -> bool:
        return time.monotonic() > self._last

    def is_due(self) -> bool:
        """Once."""
        if time.monotonic() <= self._due:
            return False
        self._due = float("inf")
        return True

    def left_s(self) -> float:
        return max(0.0, min(_SAFETY_S, min(self._due, self._last) - time.monotonic() + 0.01))


def _start(words: Sequence[str], environment: Mapping[str, str], line: int, *, outlives: bool) -> subprocess.Popen[bytes] | int:
    """Or the code that a shell would give to one that cannot be started. `outlives`: a starter goes on without us, to say that the line is cut."""
    parent = os.getpid()
    try:
        return subprocess.Popen(  # noqa: S603 # a job runs what it is told to
            words,
            env=environment,
            stdin=line,
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
    process.send_signal(signal.SIGCONT)  # one that is stopped could not end


def _say(line: int, number: int) -> None:
    with contextlib.suppress(OSError):  # it has hung up: then it ends anyway
        os.write(line, bytes([number]))


def _starter_is_gone(environ: Mapping[str, str]) -> bool:
    """A srun that was killed: Slurm leaves our end of the line open, but nobody listens any more where srun did."""
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


def _is_line(line: int) -> bool:
    """A terminal or a file (somebody tries it by hand) is none."""
    mode = os.fstat(line).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _end_alike(code: int) -> int:
    """By the signal that the code speaks of, as far as one can."""
    if code > 128 and code - 128 in {number.value for number in signal.Signals}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(code - 128, signal.SIG_DFL)
        os.kill(os.getpid(), code - 128)
    return code


def main(words: Sequence[str]) -> int:
    if words[:1] == ["far"] and len(words) > 1:
        return far(words[1:])
    if words[:1] == ["near"] and len(words) > 1:
        return _end_alike(near(words[1:]))
    sys.stderr.write("usage: python -m ludus.launch.remote_process near STARTER … | far COMMAND …\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
