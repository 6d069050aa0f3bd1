"""Drawing without a screen: what must be in the process's environment before an engine is first imported, and a private screen
for games that insist on one.

    with screen() as variables:                      # nothing, where DISPLAY leads to a screen; else those of a private Xvfb
        subprocess.run([game], env={**os.environ, **variables})
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes.util
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from ludus.display import opengl_probe, x11, xvfb_guard
from ludus.errors import ConfigError, MissingExtra, WorkerFailed

SCREEN = "LUDUS_SCREEN"
"""`auto` (a private one where it is needed and there is none), `xvfb` (always a private one), `none` (never)."""

CHOICES = ("auto", "xvfb", "none")
SIZE = "1280x1024x24"

_LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
_APT = "apt-get install libegl1 libgl1 libgles2 (drawn by EGL) or libosmesa6 (by OSMesa)"
_APT_XVFB = "apt-get install xvfb libgl1-mesa-dri libglx-mesa0"
_END_S = 10.0

_lock = threading.Lock()
_kept: list[PrivateScreen] = []
"""The screen of this process, once it has one."""


def without_screen(environ: Mapping[str, str] | None = None) -> bool:
    """Also where DISPLAY is set and nobody answers there."""
    environ = os.environ if environ is None else environ
    if not sys.platform.startswith("linux"):
        return False
    return not _wayland(environ) and bool(x11.silence(environ))


def provide() -> None:
    """Before any environment is made: a screen where somebody has said that it needs one. Raises MissingExtra, ConfigError."""
    if chosen(os.environ) == "xvfb":
        keep_screen()


def prepare(entry_point: str) -> None:
    """For an environment that will be filmed, whose code is at `entry_point`. Raises MissingExtra when nothing can draw."""
    choice = chosen(os.environ)
    if choice == "xvfb":
        keep_screen()
        return
    if not without_screen():
        return
    mujoco = "mujoco" in entry_point
    if mujoco and choice == "auto" and os.environ.get("MUJOCO_GL") == "glfw":  # whoever chose it wants a screen
        keep_screen()
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame would look for a screen, and complain
    if mujoco and not os.environ.get("MUJOCO_GL"):
        os.environ["MUJOCO_GL"] = _drawer(choice)


def _drawer(choice: str) -> str:
    """EGL before OSMesa, which complains when it is unloaded; where neither works, a private screen."""
    installed = [name for name, library in _LIBRARIES.items() if ctypes.util.find_library(library)]
    if not installed:
        raise MissingExtra("MuJoCo cannot draw here: there is no screen, and neither libEGL nor libOSMesa.", _APT)
    failures = []
    for name in installed:
        found = opengl_probe.tried(name)
        if found.works:
            return name
        failures.append(f"{name}: {found.why or 'its library cannot be loaded'}")
    if choice == "auto" and find_xvfb():
        keep_screen()
        return "glfw"
    raise MissingExtra(f"MuJoCo cannot draw here: there is no screen, and {'; '.join(failures)}.", f"{_APT}; or {_APT_XVFB}")


# -- a screen of our own --------------------------------------------------------------------------------------------------


class PrivateScreen:
    """An Xvfb that nobody else can draw on. It ends with `close`, or with this process, however that ends.

    Raises MissingExtra where there is no Xvfb, WorkerFailed where it does not start.
    """

    def __init__(self, size: str = SIZE) -> None:
        xvfb = find_xvfb()
        if xvfb is None:
            raise MissingExtra("A game needs a screen; there is none here, and no Xvfb to make one.", _APT_XVFB)
        self._owner = os.getpid()
        words = [sys.executable, "-I", "-S", xvfb_guard.__file__, str(self._owner), xvfb, size]
        self._keeper = subprocess.Popen(  # noqa: S603 - ours
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/"
        )
        self.authority = Path()
        try:
            self.display, self.authority = self._introduced()
        except BaseException:
            self.close()
            raise

    def variables(self) -> dict[str, str]:
        """For a process that is to draw on it."""
        return {x11.DISPLAY: self.display, x11.AUTHORITY: str(self.authority)}

    def _introduced(self) -> tuple[str, Path]:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        said = b""
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.write(x11.for_any_display(secrets.token_bytes(16)).hex().encode() + b"\n")
            self._keeper.stdin.flush()
        if select.select([self._keeper.stdout], [], [], xvfb_guard.START_S + _END_S)[0]:
            said = self._keeper.stdout.readline().strip()
        number, _, rest = said.decode(errors="replace").partition(" ")
        if not number.isdigit():
            raise WorkerFailed(f"Xvfb did not start: {rest or 'it says nothing'}.", f"Is it whole? {_APT_XVFB}")
        return f":{number}", Path(rest)

    def close(self) -> None:
        if os.getpid() != self._owner:  # a copy of the process, which has no screen of its own
            return
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._keeper.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # then the kernel ends the server
            self._keeper.wait(_END_S)
        if self.authority.name:  # one that was killed could not
            shutil.rmtree(self.authority.parent, ignore_errors=True)

    def __enter__(self) -> PrivateScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def screen(choice: str = "", size: str = SIZE, environ: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Variables by which a program finds a screen, beside those it has: none where it finds one already; else of a private one.

    `choice`: as in LUDUS_SCREEN, which it goes before. The private screen ends with the block. Raises MissingExtra, WorkerFailed.
    """
    environ = os.environ if environ is None else environ
    wanted = chosen({SCREEN: choice} if choice else environ)
    if wanted == "none" or (wanted == "auto" and not without_screen(environ)):
        yield {}
        return
    with PrivateScreen(size) as private:
        yield private.variables()


def keep_screen() -> None:
    """A private screen for this process and those it starts, until it ends. Again: nothing happens."""
    with _lock:
        if _kept and _kept[0].display == os.environ.get(x11.DISPLAY):  # also in a forked copy: as long as the first one lives
            return
        private = PrivateScreen()
        _kept[:] = [private]
        atexit.register(private.close)
        os.environ.update(private.variables())
        if os.environ.get("SDL_VIDEODRIVER") == "dummy":
            del os.environ["SDL_VIDEODRIVER"]


def end_screen() -> None:
    """The one that was kept, for a process that ends without saying goodbye."""
    with _lock:
        for private in _kept:
            private.close()
        _kept.clear()


def find_xvfb() -> str | None:
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return None
    return shutil.which("Xvfb") or shutil.which("Xvfb", path="/usr/bin:/usr/local/bin:/usr/X11R6/bin:/opt/X11/bin")


def chosen(environ: Mapping[str, str]) -> str:
    """One of CHOICES. Raises ConfigError."""
    said = environ.get(SCREEN) or "auto"
    if said not in CHOICES:
        raise ConfigError(f"{SCREEN}={said!r} is no choice of a screen.", f"It is one of: {', '.join(CHOICES)}.")
    return said


def _wayland(environ: Mapping[str, str]) -> bool:
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
