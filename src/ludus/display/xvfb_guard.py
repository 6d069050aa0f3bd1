"""Guards a private X server. Runs as a program with a pipe from its owner as standard input.

    xvfb_guard.py OWNER XVFB SIZE    reads one line (the authority file in hex), writes one: NUMBER FILE, or `- REASON`

The server and its files are removed when the pipe closes or the owner exits, however that happens. If the guard is killed, the
kernel ends the server. Imports only the standard library and modules of ours that need nothing else.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

if __name__ == "__main__":  # run as a file, without the packages that are installed
    sys.path.append(str(Path(__file__).parents[2]))

from ludus.io.json_lines import LineReader
from ludus.process import identity
from ludus.process.temp_dirs import directory_name

START_S = 20.0
_END_S = 3.0
_MAX_LINE = 4096


def main(owner: int, xvfb: str, size: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the owner's terminal
    signal.signal(signal.SIGTERM, _leave)
    alive = os.pidfd_open(owner)
    if os.getppid() != owner:
        return
    entry = LineReader(sys.stdin.fileno(), _MAX_LINE).read_line()
    if entry is None:
        return
    directory = Path(tempfile.gettempdir()) / directory_name()  # swept by the next run if this process is killed too
    directory.mkdir(mode=0o700)
    try:
        authority = directory / "authority"
        with open(os.open(authority, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(bytes.fromhex(entry.decode()))
        with _start_server(xvfb, size, authority, directory / "log") as (server, display_fd):
            number = _read_display_number(display_fd)
            if number is None:
                _reply(f"- {_last_error(directory / 'log') or 'it did not report its display number'}")
                return
            try:
                _reply(f"{number} {authority}")
                _wait([sys.stdin.fileno(), alive, os.pidfd_open(server.pid)])
            finally:
                _end(server, number)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _start_server(xvfb: str, size: str, authority: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield the process and the descriptor on which it writes its display number."""
    reader, writer = os.pipe()
    words = [xvfb, "-displayfd", str(writer), "-screen", "0", size, "-nolisten", "tcp", "-auth", str(authority), "-noreset"]
    parent = os.getpid()
    with open(log, "wb") as out:
        server = subprocess.Popen(  # noqa: S603 - the owner located the program
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=[writer],
            preexec_fn=lambda: identity.die_with_parent(parent, signal.SIGTERM),  # there are no threads here
        )
    os.close(writer)
    try:
        yield server, reader
    finally:
        os.close(reader)
        _end(server, None)


def _read_display_number(display_fd: int) -> int | None:
    """Return None if the server exits or does not start in time."""
    with contextlib.suppress(TimeoutError):
        line = LineReader(display_fd, _MAX_LINE).read_line(START_S)
        return None if line is None else int(line)
    return None


def _wait(ends: list[int]) -> None:
    """Block until the pipe closes or one of the processes exits."""
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    poll.poll()


def _end(server: subprocess.Popen[bytes], number: int | None) -> None:
    if server.poll() is None:
        server.terminate()  # then it removes its socket itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_END_S)
    if server.poll() is None:
        server.kill()
        server.wait(_END_S)
        if number is not None:
            for left in (f"/tmp/.X11-unix/X{number}", f"/tmp/.X{number}-lock"):  # noqa: S108 - where X servers put them
                Path(left).unlink(missing_ok=True)


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")[:300]


def _reply(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
