"""Rendering without a display: environment variables for the engines, and a private Xvfb for games that need an X server.

with screen() as variables:                      # empty if DISPLAY works; else the variables of a private Xvfb
    subprocess.run([game], env={**os.environ, **variables})
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from ludus.display import opengl_probe, x11
from ludus.errors import ConfigError, MissingExtra, WorkerFailed
from ludus.io.atomic_file import open_new
from ludus.io.json_lines import LineReader
from ludus.process.commands.lifeline_guard import GuardedCommand
from ludus.process.temp_dirs import TempDir

SCREEN = "LUDUS_SCREEN"
"""`auto` (a private display if one is needed and there is none), `xvfb` (always a private one), `none` (never)."""

CHOICES = ("auto", "xvfb", "none")
SIZE = "1280x1024x24"

_LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
_APT = "apt-get install libegl1 libgl1 libgles2 (for EGL) or libosmesa6 (for OSMesa)"
_APT_XVFB = "apt-get install xvfb libgl1-mesa-dri libglx-mesa0"
_START_S = 20.0
_END_S = 3.0
"""Time between SIGTERM, after which an X server removes its socket, and SIGKILL."""

_lock = threading.Lock()
_process_screen: list[PrivateScreen] = []
"""The private display of this process, if any."""


def is_headless(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether no display can be used; True also if DISPLAY is set but no server answers there."""
    environ = os.environ if environ is None else environ
    if not sys.platform.startswith("linux"):
        return False
    return not _wayland_answers(environ) and bool(x11.connection_error(environ))


def provide_screen() -> None:
    """Start a private display if LUDUS_SCREEN=xvfb. Call before any environment is made. Raises MissingExtra, ConfigError."""
    if screen_choice(os.environ) == "xvfb":
        keep_screen()


def prepare_rendering(entry_point: str) -> None:
    """Set up rendering for an environment whose code is at `entry_point`. Raises MissingExtra if nothing can render."""
    choice = screen_choice(os.environ)
    if choice == "xvfb":
        keep_screen()
        return
    if not is_headless():
        return
    mujoco = "mujoco" in entry_point
    if mujoco and choice == "auto" and os.environ.get("MUJOCO_GL") == "glfw":  # an explicit choice that needs a display
        keep_screen()
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame would look for a display and complain
    if mujoco and not os.environ.get("MUJOCO_GL"):
        os.environ["MUJOCO_GL"] = _mujoco_backend(choice)


def _mujoco_backend(choice: str) -> str:
    """Choose EGL before OSMesa, which prints errors when unloaded; if neither works, GLFW on a private display."""
    installed = [name for name, library in _LIBRARIES.items() if ctypes.util.find_library(library)]
    if not installed:
        raise MissingExtra("MuJoCo cannot render: there is no display, and neither libEGL nor libOSMesa.", _APT)
    failures = []
    for name in installed:
        probe = opengl_probe.probe_backend(name)
        if probe.works:
            return name
        failures.append(f"{name}: {probe.why or 'its library cannot be loaded'}")
    if choice == "auto" and find_xvfb():
        keep_screen()
        return "glfw"
    raise MissingExtra(f"MuJoCo cannot render: there is no display, and {'; '.join(failures)}.", f"{_APT}; or {_APT_XVFB}")


# -- a private display -----------------------------------------------------------------------------------------------------


class PrivateScreen:
    """An Xvfb with its own authority file. It ends with `close` or with this process, however that ends.

    Raises MissingExtra if Xvfb is not installed, WorkerFailed if it does not start.
    """

    def __init__(self, size: str = SIZE) -> None:
        xvfb = find_xvfb()
        if xvfb is None:
            raise MissingExtra("A game needs a display; there is none, and Xvfb is not installed.", _APT_XVFB)
        self._directory = TempDir(Path(tempfile.gettempdir()))
        self.authority, errors = self._directory.path / "authority", self._directory.path / "log"
        with open_new(self.authority, 0o600) as file:
            file.write(x11.wildcard_authority(secrets.token_bytes(16)))
        # It writes its display number to the descriptor 1.
        command = [xvfb, "-displayfd", "1", "-screen", "0", size, "-nolisten", "tcp", "-auth", str(self.authority), "-noreset"]
        with open(errors, "wb") as log:
            self._command = GuardedCommand(
                command, grace_s=_END_S, remove=[self._directory.path], stdout=subprocess.PIPE, stderr=log
            )
        number = None
        try:
            with contextlib.suppress(TimeoutError):
                assert self._command.guard.stdout is not None
                number = LineReader(self._command.guard.stdout.fileno()).read_line(_START_S)
            if number is None:
                why = _last_error(errors) or "it did not report its display number"
                raise WorkerFailed(f"Xvfb did not start: {why}.", f"Reinstall it: {_APT_XVFB}")
        finally:
            if number is None:
                self.close()
        self.display = f":{int(number)}"

    def variables(self) -> dict[str, str]:
        """Environment variables for a process that renders on it."""
        return {x11.DISPLAY: self.display, x11.AUTHORITY: str(self.authority)}

    def close(self) -> None:
        """Does nothing in a fork of the process that made it."""
        if self._command.is_owner():
            self._command.close()
            self._directory.close()

    def __enter__(self) -> PrivateScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def screen(choice: str = "", size: str = SIZE, environ: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Yield the environment variables of a usable display: empty if there is one already, else those of a private one.

    `choice` overrides LUDUS_SCREEN. The private display ends with the block. Raises MissingExtra, WorkerFailed.
    """
    environ = os.environ if environ is None else environ
    wanted = screen_choice({SCREEN: choice} if choice else environ)
    if wanted == "none" or (wanted == "auto" and not is_headless(environ)):
        yield {}
        return
    with PrivateScreen(size) as private:
        yield private.variables()


def keep_screen() -> None:
    """Start a private display for this process and its children until it ends. Further calls do nothing."""
    with _lock:
        if _process_screen and _process_screen[0].display == os.environ.get(x11.DISPLAY):  # also true in a forked copy
            return
        private = PrivateScreen()
        _process_screen[:] = [private]
        atexit.register(private.close)
        os.environ.update(private.variables())
        if os.environ.get("SDL_VIDEODRIVER") == "dummy":
            del os.environ["SDL_VIDEODRIVER"]


def end_screen() -> None:
    """Close the private display of this process; for a process that exits without running atexit."""
    with _lock:
        for private in _process_screen:
            private.close()
        _process_screen.clear()


def find_xvfb() -> str | None:
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return None
    return shutil.which("Xvfb") or shutil.which("Xvfb", path="/usr/bin:/usr/local/bin:/usr/X11R6/bin:/opt/X11/bin")


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")[:300]


def screen_choice(environ: Mapping[str, str]) -> str:
    """Return one of CHOICES. Raises ConfigError."""
    choice = environ.get(SCREEN) or "auto"
    if choice not in CHOICES:
        raise ConfigError(f"{SCREEN}={choice!r} is not valid.", f"Use one of: {', '.join(CHOICES)}.")
    return choice


def _wayland_answers(environ: Mapping[str, str]) -> bool:
    name, home = environ.get("WAYLAND_DISPLAY"), environ.get("XDG_RUNTIME_DIR", "")
    if not name:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(x11.ANSWER_S)
        try:
            connection.connect(str(Path(home) / name))
        except OSError:
            return False
    return True
