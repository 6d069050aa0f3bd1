"""Rendering without a display: environment variables for the engines, and a private Xvfb for what needs an X server.

`game_environment` is for a game that Ludus starts, `provide_screen` and `prepare_rendering` for environments in this process.
Which of them get what is decided by `config.display` and LUDUS_SCREEN (process/screen_choice.py).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes.util
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from ludus.display import opengl_probe, x11
from ludus.display.private_screen import APT_XVFB, SIZE, PrivateScreen, find_xvfb
from ludus.errors import MissingExtra
from ludus.process.screen_choice import AUTO, EGL, NONE, SCREEN, XVFB, screen_choice

WAYLAND = "WAYLAND_DISPLAY"
APT_EGL = "apt-get install libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri"
EGL_VARIABLES: Mapping[str, str] = {
    "MUJOCO_GL": "egl",
    "PYOPENGL_PLATFORM": "egl",
    "EGL_PLATFORM": "surfaceless",  # else Mesa tries the X server of DISPLAY first
    "PYGLET_HEADLESS": "1",
    "SDL_VIDEODRIVER": "dummy",
}
"""For processes that draw with EGL; each is kept if it is set."""

_LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
_APT = "apt-get install libegl1 libgl1 libgles2 (for EGL) or libosmesa6 (for OSMesa)"

_lock = threading.Lock()
_process_screen: list[PrivateScreen] = []
"""The private display of this process, if any."""
_replaced: dict[str, str] = {}
"""Variables as they were before it."""
_egl_checked = False


def is_headless(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether no display can be used; True also if DISPLAY is set but no server answers there."""
    environ = os.environ if environ is None else environ
    if not sys.platform.startswith("linux"):
        return False
    return not _wayland_answers(environ) and bool(x11.connection_error(environ))


# -- environments in this process -------------------------------------------------------------------------------------------


def provide_screen() -> None:
    """Set up this process for `xvfb` or `egl`; nothing for other choices. Call before any environment is made.

    Raises MissingExtra, WorkerFailed, ConfigError.
    """
    choice = screen_choice()
    if choice == XVFB:
        keep_screen()
    elif choice == EGL:
        _use_egl()


def prepare_rendering(entry_point: str) -> None:
    """Set up rendering for an environment whose code is at `entry_point`. Raises MissingExtra if nothing can render."""
    choice = screen_choice()
    if choice in (XVFB, EGL):
        provide_screen()
        return
    if not is_headless():
        return
    mujoco = "mujoco" in entry_point
    if mujoco and choice == AUTO and os.environ.get("MUJOCO_GL") == "glfw":  # an explicit choice that needs a display
        keep_screen()
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame would look for a display and complain
    if mujoco and not os.environ.get("MUJOCO_GL"):
        os.environ["MUJOCO_GL"] = _mujoco_backend(choice)


def _use_egl() -> None:
    global _egl_checked
    if not _egl_checked:
        check_egl()
        _egl_checked = True
    for name, value in EGL_VARIABLES.items():
        os.environ.setdefault(name, value)


def check_egl(environ: Mapping[str, str] | None = None) -> opengl_probe.OpenGL:
    """Return what EGL draws with here. Raises MissingExtra if it does not work."""
    probe = opengl_probe.probe_backend("egl", environ)
    if not probe.works:
        raise MissingExtra(f"display is egl, and EGL does not work here: {probe.why or 'libEGL is not installed'}.", APT_EGL)
    return probe


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
    if choice == AUTO and find_xvfb():
        keep_screen()
        return "glfw"
    raise MissingExtra(f"MuJoCo cannot render: there is no display, and {'; '.join(failures)}.", f"{_APT}; or {APT_XVFB}")


def keep_screen() -> PrivateScreen:
    """Return the private display of this process and its children, which lasts until the process ends.

    It is started if there is none, or if it has ended. A forked copy of the process uses that of its parent.
    """
    with _lock:
        if _process_screen:
            current = _process_screen[0]
            if current.display == os.environ.get(x11.DISPLAY) and not x11.connection_error(current.variables()):
                return current
            current.close()
        private = PrivateScreen()
        if not _process_screen:
            _replaced.update({name: os.environ[name] for name in private.variables() if name in os.environ})
        _process_screen[:] = [private]
        atexit.register(private.close)
        os.environ.update(private.variables())
        _forget_dummy_driver(os.environ)
        return private


def _forget_dummy_driver(environment: MutableMapping[str, str]) -> None:
    """Let SDL draw on the screen; the variable was set while there was none."""
    if environment.get("SDL_VIDEODRIVER") == "dummy":
        del environment["SDL_VIDEODRIVER"]


def end_screen() -> None:
    """Close the private display of this process, and restore DISPLAY; for a process that exits without running atexit."""
    with _lock:
        for private in _process_screen:
            private.close()
            for name, value in private.variables().items():
                if os.environ.get(name) == value:
                    del os.environ[name]
                    os.environ.update({name: _replaced[name]} if name in _replaced else {})
        _process_screen.clear()
        _replaced.clear()


@contextlib.contextmanager
def kept_screen() -> Iterator[PrivateScreen]:
    """Yield the private display of this process. One that this call starts stays after the block, unless the block raises."""
    had_one = bool(_process_screen)
    private = keep_screen()
    try:
        yield private
    except BaseException:
        if not had_one:
            end_screen()
        raise


# -- games that Ludus starts ------------------------------------------------------------------------------------------------


def needs_private_screen(choice: str, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a game gets a private display."""
    return choice == XVFB or (choice == AUTO and is_headless(environ))


def game_environment(choice: str, base: Mapping[str, str], private: PrivateScreen | None) -> dict[str, str]:
    """Return the environment of a game: with its private display, or with that of `base`, or with none for `egl` and `none`."""
    environment = dict(base)
    if private is not None:
        environment |= private.variables()
        environment.pop(WAYLAND, None)
        _forget_dummy_driver(environment)
    elif choice in (EGL, NONE):
        for name in (x11.DISPLAY, x11.AUTHORITY, WAYLAND):
            environment.pop(name, None)
        if choice == EGL:
            environment = {**EGL_VARIABLES, **environment}
    return environment


@contextlib.contextmanager
def screen(choice: str = "", size: str = SIZE, environ: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Yield the environment variables of a usable display: empty if there is one already, else those of a private one.

    `choice` overrides `config.display` and LUDUS_SCREEN. The private display ends with the block. Raises MissingExtra, WorkerFailed.
    """
    environ = os.environ if environ is None else environ
    if not needs_private_screen(screen_choice({SCREEN: choice} if choice else environ), environ):
        yield {}
        return
    with PrivateScreen(size) as private:
        yield private.variables()


def _wayland_answers(environ: Mapping[str, str]) -> bool:
    name, home = environ.get(WAYLAND), environ.get("XDG_RUNTIME_DIR", "")
    if not name:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(x11.ANSWER_S)
        try:
            connection.connect(str(Path(home) / name))
        except OSError:
            return False
    return True
