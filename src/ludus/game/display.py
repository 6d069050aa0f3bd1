"""Drawing without a screen: what must be in the process's environment before an engine is first imported."""

from __future__ import annotations

import ctypes.util
import os
import sys

from ludus.errors import MissingExtra

_LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
_APT = "apt-get install libegl1 libgl1 libgles2 (drawn by EGL) or libosmesa6 (by OSMesa)"


def without_screen() -> bool:
    return sys.platform.startswith("linux") and not os.environ.get("DISPLAY") and not os.environ.get("WAYLAND_DISPLAY")


def prepare(entry_point: str) -> None:
    """For an environment that will be filmed, whose code is at `entry_point`. Raises MissingExtra when nothing can draw."""
    if not without_screen():
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame would look for a screen, and complain
    if "mujoco" in entry_point and not os.environ.get("MUJOCO_GL"):
        os.environ["MUJOCO_GL"] = _drawer()


def _drawer() -> str:
    """EGL before OSMesa, which complains when it is unloaded."""
    for name, library in _LIBRARIES.items():
        if ctypes.util.find_library(library):
            return name
    raise MissingExtra("MuJoCo cannot draw here: there is no screen, and neither libEGL nor libOSMesa.", _APT)
