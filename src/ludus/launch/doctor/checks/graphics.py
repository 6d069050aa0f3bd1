"""What a game with pictures finds here: a screen, EGL, OSMesa, an Xvfb to fall back to, and how new their OpenGL is.

Each way is really probe_backend, in a process of its own (display/opengl_probe.py): a library that is installed may still not work.
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
from ludus.launch.doctor.finding import Finding, failed, ok, skipped, warning

LEAST = (3, 2)
"""Of OpenGL, for the engines of today."""

_APT = {
    "egl": "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri",
    "osmesa": "apt-get install libosmesa6",
    "xvfb": "apt-get install xvfb libgl1-mesa-dri libglx-mesa0",
}
_NAMES = {"egl": "EGL", "osmesa": "OSMesa"}


@dataclass(frozen=True)
class Graphics:
    """`screen`: what DISPLAY leads to; `silent`: why nobody answers there. `private`: of an Xvfb that was started for it and is gone again."""

    egl: OpenGL
    osmesa: OpenGL
    screen: OpenGL | None = None
    silent: str = ""
    private: OpenGL | None = None
    refused: str = ""
    """Why none was started, though there is an Xvfb."""
    xvfb: bool = False
    display: str = ""
    choice: str = "auto"
    """What LUDUS_SCREEN says."""


def look_graphics(environ: Mapping[str, str] | None = None) -> Graphics | None:
    """None where the system has a screen of another kind."""
    if not sys.platform.startswith("linux"):
        return None
    environ = os.environ if environ is None else environ
    silent, choice, xvfb = x11.connection_error(environ), _choice(environ), display.find_xvfb() is not None
    wanted = choice == "xvfb" or (choice == "auto" and bool(silent))
    with ThreadPoolExecutor(4) as pool:
        egl, osmesa = pool.submit(probe_backend, "egl", environ), pool.submit(probe_backend, "osmesa", environ)
        screen = None if silent else pool.submit(probe_backend, "glx", environ)
        private = pool.submit(_private, environ) if wanted and xvfb else None
        return Graphics(
            egl.result(),
            osmesa.result(),
            screen.result() if screen else None,
            silent,
            *(private.result() if private else (None, "")),
            xvfb,
            environ.get(x11.DISPLAY, ""),
            choice,
        )


def _choice(environ: Mapping[str, str]) -> str:
    """One that is none is a finding of its own: `judge_choice`."""
    try:
        return display.screen_choice(environ)
    except ConfigError:
        return "auto"


def _private(environ: Mapping[str, str]) -> tuple[OpenGL | None, str]:
    try:
        with display.screen("xvfb") as variables:
            return probe_backend("glx", {**environ, **variables}), ""
    except LudusError as error:
        return None, error.message


def judge_choice(environ: Mapping[str, str], *, xvfb: bool) -> list[Finding]:
    """Of LUDUS_SCREEN, where it would keep every environment from being made. `xvfb`: there is one."""
    try:
        choice = display.screen_choice(environ)
    except ConfigError as error:
        return [failed(display.SCREEN, error.message, error.hint)]
    if choice == "xvfb" and not xvfb:
        return [failed(display.SCREEN, "xvfb: every environment wants a private screen, and there is no Xvfb", _APT["xvfb"])]
    return []


def judge_graphics(graphics: Graphics | None, *, needed: bool, window: bool = False) -> list[Finding]:
    """The first says what will be used. `needed`: a game was named that draws; without one, nothing here is a failure.

    `window`: it is a program of its own, which draws on a screen, and knows nothing of EGL.
    """
    if graphics is None:
        return [skipped("graphics", "looked at on Linux only; other systems have a screen")]
    best = _best(graphics, window=window) or _best(graphics)
    found = [_drawing(best, graphics.choice, needed)]
    if window and best is not None and best[0] in _NAMES.values() and found[0].status == "ok":
        found = [_windowless(graphics, best[0])]
    found.append(_screen(graphics))
    for way in ("egl", "osmesa"):
        found.append(_way(getattr(graphics, way), best))
    found.append(_xvfb(graphics, best))
    return found


def _best(graphics: Graphics, *, window: bool = False) -> tuple[str, OpenGL] | None:
    """In the order in which it is chosen: hardware before software, a screen before none. `window`: only what has one."""
    private = ("a private Xvfb", graphics.private)
    ways = [
        (f"the screen {graphics.display}", graphics.screen),
        *([] if window else [("EGL", graphics.egl), ("OSMesa", graphics.osmesa)]),
        *([private] if graphics.choice == "auto" else []),
    ]
    ways = [private] if graphics.choice == "xvfb" else ways  # then nothing else is asked
    return next(((name, way) for name, way in ways if way is not None and way.works), None)


def _windowless(graphics: Graphics, name: str) -> Finding:
    said = f"by {name}, which has no windows: a game that opens one finds no screen"
    if graphics.xvfb and graphics.choice == "none":
        return warning("graphics", f"{said}, for {display.SCREEN}=none", f"unset {display.SCREEN}, or start it without graphics.")
    return warning("graphics", said, f"{_APT['xvfb']}; or start it without graphics.")


def _drawing(best: tuple[str, OpenGL] | None, choice: str, needed: bool) -> Finding:
    if best is None:
        said, fix = "nothing can draw here: no screen answers, and neither EGL nor OSMesa nor Xvfb works", _APT["egl"]
        if choice == "xvfb":
            said, fix = f"nothing can draw here: {display.SCREEN}=xvfb, and no private screen works", _APT["xvfb"]
        if choice == "none":
            said = f"nothing can draw here: no screen answers, {display.SCREEN}=none, and neither EGL nor OSMesa works"
        return failed("graphics", said, fix) if needed else warning("graphics", f"{said}; no videos, no games with pictures", fix)
    name, way = best
    said = f"by {name}: OpenGL {way.version}{', by software' if way.by_software else ''}"
    if way.number < LEAST:
        old = f"{said}; engines of today need {LEAST[0]}.{LEAST[1]}"
        remedy = f"Another driver; by software it would be newer: {_APT['egl']}, and LIBGL_ALWAYS_SOFTWARE=1."
        return failed("graphics", old, remedy) if needed else warning("graphics", old, remedy)
    return ok("graphics", said)


def _screen(graphics: Graphics) -> Finding:
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


def _way(way: OpenGL, best: tuple[str, OpenGL] | None) -> Finding:
    name = _NAMES[way.way]
    if way.works:
        return ok(name, f"OpenGL {way.version} ({way.renderer})")
    spare = f"; not needed, for {best[0]} works" if best is not None else ""
    if way.missing:
        return skipped(name, f"not installed{spare}", "" if best is not None else _APT[way.way])
    return warning(name, f"it is installed and does not work: {way.why}{spare}", _APT[way.way])


def _xvfb(graphics: Graphics, best: tuple[str, OpenGL] | None) -> Finding:
    if not graphics.xvfb:
        return skipped(
            "Xvfb", "not installed: games that insist on a screen find none" if graphics.silent else "not installed", _APT["xvfb"]
        )
    private = graphics.private
    if graphics.choice == "none":
        return skipped("Xvfb", f"installed; not used, for {display.SCREEN}=none")
    if graphics.refused and graphics.choice == "xvfb":
        return failed("Xvfb", f"{display.SCREEN}=xvfb, and no environment gets a screen: {graphics.refused}", _APT["xvfb"])
    if graphics.refused:
        return warning("Xvfb", f"it is installed, and a private screen is not to be had: {graphics.refused}", _APT["xvfb"])
    if private is None:
        return ok("Xvfb", "installed; not needed, for a screen answers")
    if private.works:
        return ok("Xvfb", f"a private screen was started and ended: OpenGL {private.version} ({private.renderer})")
    return warning("Xvfb", f"a private screen has no OpenGL: {private.why or 'libGL is not installed'}", _APT["xvfb"])
