"""Guard process of a private X server, run as a program with a pipe from its owner as standard input.

    xvfb_guard.py OWNER XVFB SIZE       reads one line: the authority file in hex; writes one: NUMBER FILE, or `- REASON`

The server and its files are removed when the pipe closes or the owner exits, however that happens. If the guard is killed, the
kernel ends the server. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

START_S = 20.0
_END_S = 3.0
_MAX_LINE = 4096
_PR_SET_PDEATHSIG = 1


def main(owner: int, xvfb: str, size: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the owner's terminal is for the owner
    signal.signal(signal.SIGTERM, _exit_on_signal)
    alive = os.pidfd_open(owner)
    if os.getppid() != owner:
        return
    entry = bytes.fromhex(_read_line(sys.stdin.fileno()).decode())
    directory = Path(tempfile.gettempdir()) / _directory_name()
    directory.mkdir(mode=0o700)
    try:
        authority = directory / "authority"
        with open(os.open(authority, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(entry)
        with _start_server(xvfb, size, authority, directory / "log") as (server, display_fd):
            number = _read_display_number(display_fd)
            if number is None:
                _write_line(f"- {_last_error(directory / 'log') or 'it reported no display number'}")
                return
            try:
                _write_line(f"{number} {authority}")
                _wait([sys.stdin.fileno(), alive, os.pidfd_open(server.pid)])
            finally:
                _stop_server(server, number)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _start_server(xvfb: str, size: str, authority: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield the server process and the file descriptor to which it writes its display number."""
    reader, writer = os.pipe()
    words = [xvfb, "-displayfd", str(writer), "-screen", "0", size, "-nolisten", "tcp", "-auth", str(authority), "-noreset"]
    parent = os.getpid()

    def end_with_parent() -> None:  # safe between fork and exec: this program has one thread
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    with open(log, "wb") as out:
        server = subprocess.Popen(  # noqa: S603 - the owner located the program
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=[writer], preexec_fn=end_with_parent
        )
    os.close(writer)
    try:
        yield server, reader
    finally:
        os.close(reader)
        _stop_server(server, None)


def _read_display_number(display_fd: int) -> int | None:
    """Return None if the server exits or does not start in time."""
    data, deadline = b"", time.monotonic() + START_S
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([display_fd], [], [], max(0.0, deadline - time.monotonic()))
        more = os.read(display_fd, 64) if ready else b""
        if not more:
            return None
        data += more
    return int(data)


def _wait(ends: list[int]) -> None:
    """Block until one of the descriptors is readable: the pipe was closed, or a process has exited."""
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    poll.poll()


def _stop_server(server: subprocess.Popen[bytes], number: int | None) -> None:
    if server.poll() is None:
        server.terminate()  # it then removes its socket itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_END_S)
    if server.poll() is None:
        server.kill()
        server.wait(_END_S)
        if number is not None:
            for left in (f"/tmp/.X11-unix/X{number}", f"/tmp/.X{number}-lock"):  # noqa: S108 - where X servers put them
                Path(left).unlink(missing_ok=True)


def _directory_name() -> str:
    """Name the owner process as process/temp_dirs.py expects, so that a later run removes the directory if both are killed."""
    space = re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return f"ludus-{os.getuid()}-{space or 0}-{os.getpid()}-{started}-{os.urandom(4).hex()}"


def _read_line(file: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(file, 1)  # not more than the line: the rest of the pipe is polled later
        if not more or len(data) > _MAX_LINE:
            raise SystemExit(1)
        data += more
    return data.strip()


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")[:300]


def _write_line(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
