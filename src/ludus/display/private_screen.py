"""A private X server (Xvfb) for games that open a window. It ends with the process that started it, however that process ends.

with PrivateScreen() as private:
    subprocess.run([game], env={**os.environ, **private.variables()})
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ludus.display import x11
from ludus.errors import MissingExtra, WorkerFailed
from ludus.io.atomic_file import open_new
from ludus.io.json_lines import LineReader
from ludus.process.commands.lifeline_guard import GuardedCommand
from ludus.process.temp_dirs import TempDir

SIZE = "1280x1024x24"
APT_XVFB = "apt-get install xvfb libgl1-mesa-dri libglx-mesa0"

_START_S = 20.0
_END_S = 3.0
"""Time between SIGTERM, after which an X server removes its socket, and SIGKILL."""


class PrivateScreen:
    """An Xvfb with its own authority file. It ends with `close` or with this process, however that ends.

    Raises MissingExtra if Xvfb is not installed, WorkerFailed if it does not start.
    """

    def __init__(self, size: str = SIZE) -> None:
        xvfb = find_xvfb()
        if xvfb is None:
            raise MissingExtra("A game needs a display; there is none, and Xvfb is not installed.", APT_XVFB)
        self._directory = TempDir(Path(tempfile.gettempdir()))
        self.authority, self._log = self._directory.path / "authority", self._directory.path / "log"
        with open_new(self.authority, 0o600) as file:
            file.write(x11.wildcard_authority(secrets.token_bytes(16)))
        # It writes its display number to the descriptor 1.
        command = [xvfb, "-displayfd", "1", "-screen", "0", size, "-nolisten", "tcp", "-auth", str(self.authority), "-noreset"]
        with open(self._log, "wb") as log:
            self._command = GuardedCommand(
                command, grace_s=_END_S, remove=[self._directory.path], stdout=subprocess.PIPE, stderr=log
            )
        self._socket_id: tuple[int, int] | None = None
        number = None
        try:
            with contextlib.suppress(TimeoutError):
                assert self._command.guard.stdout is not None
                number = LineReader(self._command.guard.stdout.fileno()).read_line(_START_S)
            if number is None:
                why = _last_error(self._log) or "it did not report its display number"
                raise WorkerFailed(f"Xvfb did not start: {why}.", f"Reinstall it: {APT_XVFB}")
        finally:
            if number is None:
                self.close()
        self.display = f":{int(number)}"
        self._socket = x11.socket_path(int(number))
        self._socket_id = file_id(self._socket)

    def variables(self) -> dict[str, str]:
        """Environment variables for a process that renders on it."""
        return {x11.DISPLAY: self.display, x11.AUTHORITY: str(self.authority)}

    def problem(self) -> str:
        """Return why it does not work any more; empty if it answers."""
        why = x11.connection_error(self.variables())
        return why and f"the private X server {self.display} has ended: {_last_error(self._log) or why}"

    def close(self) -> None:
        """Does nothing in a fork of the process that made it."""
        if self._command.is_owner():
            self._command.close()
            self._directory.close()
            if self._socket_id is not None and file_id(self._socket) == self._socket_id:  # it was killed
                self._socket.unlink(missing_ok=True)

    def __enter__(self) -> PrivateScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_xvfb() -> str | None:
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return None
    return shutil.which("Xvfb") or shutil.which("Xvfb", path="/usr/bin:/usr/local/bin:/usr/X11R6/bin:/opt/X11/bin")


def file_id(path: Path) -> tuple[int, int] | None:
    """Tell a file from another one that has taken its name; None if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_ctime_ns


def _last_error(log: Path) -> str:
    try:
        text = log.read_text(errors="replace")
    except OSError:  # removed by the guard
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")[:300]
