"""Checks graphics: screen, EGL, OSMesa, Xvfb and their OpenGL versions.

Each backend is probed in another process (display/opengl_probe.py): an installed library may still not work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ludus.display import headless as display
from ludus.display import x11
from ludus.display.opengl_probe import OpenGL, probe_backend
from ludus.errors import ConfigError, LudusError
from ludus.launch.doctor.finding import DoctorFinding, failed, ok, skipped, warning

MIN_OPENGL = (3, 2)
"""OpenGL version that current engines need."""

_APT = {
    "egl": "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri",
    "osmesa": "apt-get install libosmesa6",
    "xvfb": "apt-get install xvfb libgl1-mesa-dri libglx-mesa0",
}
_NAMES = {"egl": "EGL", "osmesa": "OSMesa"}


@dataclass(frozen=True)
class GraphicsSupport:
    """`screen`: the X server of DISPLAY; `silent`: why it does not answer. `private`: an Xvfb that was started for the probe."""

    egl: OpenGL
    osmesa: OpenGL
    screen: OpenGL | None = None
    silent: str = ""
    private: OpenGL | None = None
    refused: str = ""
    """Why the installed Xvfb could not be started."""
    xvfb: bool = False
    display: str = ""
    choice: str = "auto"
    """Value of LUDUS_SCREEN."""


def inspect_graphics(environ: Mapping[str, str] | None = None) -> GraphicsSupport | None:
    """Return None on systems without X11."""
    if not sys.platform.startswith("linux"):
        return None
    environ = os.environ if environ is None else environ
    silent, choice, xvfb = x11.connection_error(environ), _screen_choice(environ), display.find_xvfb() is not None
    wanted = choice == "xvfb" or (choice == "auto" and bool(silent))
    with ThreadPoolExecutor(4) as pool:
        egl, osmesa = pool.submit(probe_backend, "egl", environ), pool.submit(probe_backend, "osmesa", environ)
        screen = None if silent else pool.submit(probe_backend, "glx", environ)
        private = pool.submit(_probe_private_screen, environ) if wanted and xvfb else None
        return GraphicsSupport(
            egl.result(),
            osmesa.result(),
            screen.result() if screen else None,
            silent,
            *(private.result() if private else (None, "")),
            xvfb,
            environ.get(x11.DISPLAY, ""),
            choice,
        )


def _screen_choice(environ: Mapping[str, str]) -> str:
    """Return "auto" for an invalid value, which `check_choice` reports."""
    try:
        return display.screen_choice(environ)
    except ConfigError:
        return "auto"


def _probe_private_screen(environ: Mapping[str, str]) -> tuple[OpenGL | None, str]:
    try:
        with display.screen("xvfb") as variables:
            return probe_backend("glx", {**environ, **variables}), ""
    except LudusError as error:
        return None, error.message


def check_choice(environ: Mapping[str, str], *, xvfb: bool) -> list[DoctorFinding]:
    """Check LUDUS_SCREEN: an invalid value prevents the creation of any environment. `xvfb`: it is installed."""
    try:
        choice = display.screen_choice(environ)
    except ConfigError as error:
        return [failed(display.SCREEN, error.message, error.hint)]
    if choice == "xvfb" and not xvfb:
        return [failed(display.SCREEN, "xvfb: environments need a private screen, and Xvfb is not installed", _APT["xvfb"])]
    return []


def check_graphics(graphics: GraphicsSupport | None, *, needed: bool, window: bool = False) -> list[DoctorFinding]:
    """Return the findings; the first names the backend that will be used. `needed`: the game draws; else nothing here is a failure.

    `window`: the game is a program that opens a window, and cannot use EGL.
    """
    if graphics is None:
        return [skipped("graphics", "checked on Linux only; other systems have a screen")]
    best = _preferred_backend(graphics, window=window) or _preferred_backend(graphics)
    found = [_check_drawing(best, graphics.choice, needed)]
    if window and best is not None and best[0] in _NAMES.values() and found[0].status == "ok":
        found = [_check_windows(graphics, best[0])]
    found.append(_check_screen(graphics))
    for way in ("egl", "osmesa"):
        found.append(_check_backend(getattr(graphics, way), best))
    found.append(_check_xvfb(graphics, best))
    return found


def _preferred_backend(graphics: GraphicsSupport, *, window: bool = False) -> tuple[str, OpenGL] | None:
    """Return the first backend that works: a screen before EGL and OSMesa. `window`: only backends with windows."""
    private = ("a private Xvfb", graphics.private)
    ways = [
        (f"the screen {graphics.display}", graphics.screen),
        *([] if window else [("EGL", graphics.egl), ("OSMesa", graphics.osmesa)]),
        *([private] if graphics.choice == "auto" else []),
    ]
    ways = [private] if graphics.choice == "xvfb" else ways
    return next(((name, way) for name, way in ways if way is not None and way.works), None)


def _check_windows(graphics: GraphicsSupport, name: str) -> DoctorFinding:
    text = f"by {name}, which has no windows: a game that opens one finds no screen"
    if graphics.xvfb and graphics.choice == "none":
        return warning("graphics", f"{text}, and {display.SCREEN}=none", f"unset {display.SCREEN}, or start it without graphics.")
    return warning("graphics", text, f"{_APT['xvfb']}; or start it without graphics.")


def _check_drawing(best: tuple[str, OpenGL] | None, choice: str, needed: bool) -> DoctorFinding:
    if best is None:
        text, fix = "nothing can draw here: no screen answers, and neither EGL nor OSMesa nor Xvfb works", _APT["egl"]
        if choice == "xvfb":
            text, fix = f"nothing can draw here: {display.SCREEN}=xvfb, and no private screen works", _APT["xvfb"]
        if choice == "none":
            text = f"nothing can draw here: no screen answers, {display.SCREEN}=none, and neither EGL nor OSMesa works"
        return failed("graphics", text, fix) if needed else warning("graphics", f"{text}; no videos, no games with pictures", fix)
    name, way = best
    text = f"by {name}: OpenGL {way.version}{', by software' if way.by_software else ''}"
    if way.number < MIN_OPENGL:
        old = f"{text}; current engines need {MIN_OPENGL[0]}.{MIN_OPENGL[1]}"
        remedy = f"Use another driver, or software rendering: {_APT['egl']}, and LIBGL_ALWAYS_SOFTWARE=1."
        return failed("graphics", old, remedy) if needed else warning("graphics", old, remedy)
    return ok("graphics", text)


def _check_screen(graphics: GraphicsSupport) -> DoctorFinding:
    if not graphics.silent:
        screen = graphics.screen
        if screen is not None and screen.works:
            return ok("X server", f"{graphics.display} answers: OpenGL {screen.version} ({screen.renderer})")
        why = "libGL is not installed" if screen is None or screen.missing else screen.why
        return warning(
            "X server",
            f"{graphics.display} answers, without OpenGL: {why}",
            "apt-get install libgl1 libglx-mesa0 libgl1-mesa-dri",
        )
    private = graphics.xvfb and graphics.choice != "none"
    if not graphics.display:
        return skipped(
            "X server",
            "DISPLAY is not set; a game that needs a screen gets a private one" if private else "DISPLAY is not set",
        )
    if graphics.choice == "none":
        return warning("X server", graphics.silent, f"unset DISPLAY; {display.SCREEN}=none: nothing is used instead.")
    fallback = "a private Xvfb is used instead" if private else f"unset DISPLAY, or {_APT['xvfb']}"
    return warning("X server", graphics.silent, f"unset DISPLAY; {fallback}." if private else fallback)


def _check_backend(way: OpenGL, best: tuple[str, OpenGL] | None) -> DoctorFinding:
    name = _NAMES[way.way]
    if way.works:
        return ok(name, f"OpenGL {way.version} ({way.renderer})")
    spare = f"; not needed, because {best[0]} works" if best is not None else ""
    if way.missing:
        return skipped(name, f"not installed{spare}", "" if best is not None else _APT[way.way])
    return warning(name, f"it is installed and does not work: {way.why}{spare}", _APT[way.way])


def _check_xvfb(graphics: GraphicsSupport, best: tuple[str, OpenGL] | None) -> DoctorFinding:
    if not graphics.xvfb:
        return skipped(
            "Xvfb", "not installed: games that need a screen find none" if graphics.silent else "not installed", _APT["xvfb"]
        )
    private = graphics.private
    if graphics.choice == "none":
        return skipped("Xvfb", f"installed; not used, because {display.SCREEN}=none")
    if graphics.refused and graphics.choice == "xvfb":
        return failed("Xvfb", f"{display.SCREEN}=xvfb, and no environment gets a screen: {graphics.refused}", _APT["xvfb"])
    if graphics.refused:
        return warning("Xvfb", f"it is installed, and a private screen cannot be started: {graphics.refused}", _APT["xvfb"])
    if private is None:
        return ok("Xvfb", "installed; not needed, because a screen answers")
    if private.works:
        return ok("Xvfb", f"a private screen was started and ended: OpenGL {private.version} ({private.renderer})")
    return warning("Xvfb", f"a private screen has no OpenGL: {private.why or 'libGL is not installed'}", _APT["xvfb"])
