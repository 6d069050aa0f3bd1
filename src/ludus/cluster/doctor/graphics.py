"""What a game with pictures finds here: a screen, EGL, OSMesa, an Xvfb to fall back to, and how new their OpenGL is.

Each way is really tried, in a process of its own (game/opengl.py): a library that is installed may still not work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ludus.cluster.doctor.finding import Finding, failed, ok, skipped, warning
from ludus.errors import LudusError
from ludus.game import display, x11
from ludus.game.opengl import OpenGL, tried

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
    xvfb: bool = False
    display: str = ""


def look_graphics(environ: Mapping[str, str] | None = None) -> Graphics | None:
    """None where the system has a screen of another kind."""
    if not sys.platform.startswith("linux"):
        return None
    environ = os.environ if environ is None else environ
    silent = x11.silence(environ)
    with ThreadPoolExecutor(4) as pool:
        egl, osmesa = pool.submit(tried, "egl", environ), pool.submit(tried, "osmesa", environ)
        screen = None if silent else pool.submit(tried, "glx", environ)
        private = pool.submit(_private, environ) if silent and display.find_xvfb() else None
        return Graphics(
            egl.result(),
            osmesa.result(),
            screen.result() if screen else None,
            silent,
            private.result() if private else None,
            display.find_xvfb() is not None,
            environ.get(x11.DISPLAY, ""),
        )


def _private(environ: Mapping[str, str]) -> OpenGL:
    try:
        with display.screen("xvfb") as variables:
            return tried("glx", {**environ, **variables})
    except LudusError as error:
        return OpenGL("glx", why=error.message)


def judge_graphics(graphics: Graphics | None, *, needed: bool) -> list[Finding]:
    """The first says what will be used. `needed`: a game was named that draws; without one, nothing here is a failure."""
    if graphics is None:
        return [skipped("graphics", "looked at on Linux only; other systems have a screen")]
    best = _best(graphics)
    found = [_drawing(best, needed)]
    found.append(_screen(graphics))
    for way in ("egl", "osmesa"):
        found.append(_way(getattr(graphics, way), best))
    found.append(_xvfb(graphics, best))
    return found


def _best(graphics: Graphics) -> tuple[str, OpenGL] | None:
    """In the order in which it is chosen: hardware before software, a screen before none."""
    ways = [
        (f"the screen {graphics.display}", graphics.screen),
        ("EGL", graphics.egl),
        ("OSMesa", graphics.osmesa),
        ("a private Xvfb", graphics.private),
    ]
    return next(((name, way) for name, way in ways if way is not None and way.works), None)


def _drawing(best: tuple[str, OpenGL] | None, needed: bool) -> Finding:
    if best is None:
        said = "nothing can draw here: no screen answers, and neither EGL nor OSMesa nor Xvfb works"
        return (
            failed("graphics", said, _APT["egl"])
            if needed
            else warning("graphics", f"{said}; no videos, no games with pictures", _APT["egl"])
        )
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
    if not graphics.display:
        return skipped(
            "X server",
            "DISPLAY is not set; a game that needs a screen gets a private one" if graphics.xvfb else "DISPLAY is not set",
        )
    fallback = "a private Xvfb is used instead" if graphics.xvfb else f"unset DISPLAY, or {_APT['xvfb']}"
    return warning("X server", graphics.silent, f"unset DISPLAY; {fallback}." if graphics.xvfb else fallback)


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
    if private is None:
        return ok("Xvfb", "installed; not needed, for a screen answers")
    if private.works:
        return ok("Xvfb", f"a private screen was started and ended: OpenGL {private.version} ({private.renderer})")
    return warning("Xvfb", f"a private screen has no OpenGL: {private.why or 'libGL is not installed'}", _APT["xvfb"])
