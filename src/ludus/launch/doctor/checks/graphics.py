"""Checks whether games can draw on this machine: X server, EGL, OSMesa and Xvfb, with their OpenGL versions.

Each backend is probed in another process (display/opengl_probe.py): an installed library may still not work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ludus.display import headless, x11
from ludus.display.opengl_probe import OpenGL, probe_backend
from ludus.errors import ConfigError, LudusError
from ludus.launch.doctor.finding import DoctorFinding, failure, ok, skip, warning

MIN_OPENGL = (3, 2)
"""OpenGL version that current engines need."""

X_SERVER, EGL, OSMESA, XVFB = "X server", "EGL", "OSMesa", "Xvfb"
_FIXES = {
    X_SERVER: "unset DISPLAY, or apt-get install libgl1 libglx-mesa0 libgl1-mesa-dri",
    EGL: "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri",
    OSMESA: "apt-get install libosmesa6",
    XVFB: "apt-get install xvfb libgl1-mesa-dri libglx-mesa0",
}


@dataclass(frozen=True)
class GraphicsSupport:
    """`backends`: probes by name, in order of preference; Xvfb only if a private screen may be used. `choice`: LUDUS_SCREEN."""

    backends: Mapping[str, OpenGL]
    choice: str = "auto"


def inspect_graphics(environ: Mapping[str, str] | None = None) -> GraphicsSupport | None:
    """Return None on systems without X11."""
    if not sys.platform.startswith("linux"):
        return None
    environ = os.environ if environ is None else environ
    try:
        choice = headless.screen_choice(environ)
    except ConfigError:  # `check_choice` reports it
        choice = "auto"
    unreachable = x11.connection_error(environ)
    with ThreadPoolExecutor(4) as pool:
        probes = {EGL: pool.submit(probe_backend, "egl", environ), OSMESA: pool.submit(probe_backend, "osmesa", environ)}
        if not unreachable:
            probes = {X_SERVER: pool.submit(_probe_glx, environ), **probes}
        if choice == "xvfb" or (choice == "auto" and unreachable):
            probes[XVFB] = pool.submit(_probe_private_screen, environ)
        found = {name: probe.result() for name, probe in probes.items()}
    if unreachable:
        no_display = not environ.get(x11.DISPLAY)
        found = {X_SERVER: OpenGL("glx", missing=no_display, why="" if no_display else unreachable), **found}
    return GraphicsSupport(found, choice)


def _probe_glx(environ: Mapping[str, str]) -> OpenGL:
    probe = probe_backend("glx", environ)
    return replace(probe, missing=False, why="it has no OpenGL: libGL is not installed") if probe.missing else probe


def _probe_private_screen(environ: Mapping[str, str]) -> OpenGL:
    if headless.find_xvfb() is None:
        return OpenGL("glx", missing=True)
    try:
        with headless.screen("xvfb") as variables:
            return _probe_glx({**environ, **variables})
    except LudusError as error:
        return OpenGL("glx", why=error.message)


def check_choice(environ: Mapping[str, str], *, xvfb: bool) -> list[DoctorFinding]:
    """Check LUDUS_SCREEN: an invalid value prevents the creation of any environment. `xvfb`: it is installed."""
    try:
        choice = headless.screen_choice(environ)
    except ConfigError as error:
        return [failure(headless.SCREEN, error.message, error.hint)]
    if choice == "xvfb" and not xvfb:
        return [failure(headless.SCREEN, "xvfb: environments need a private screen, and Xvfb is not installed", _FIXES[XVFB])]
    return []


def check_graphics(graphics: GraphicsSupport | None, *, needed: bool, window: bool = False) -> list[DoctorFinding]:
    """Return a finding about the backend that will be used, then one per backend.

    `needed`: the game draws; else a machine without graphics is a warning. `window`: the game opens a window and cannot use EGL.
    """
    if graphics is None:
        return [skip("graphics", "checked on Linux only; other systems have a screen")]
    usable = {name: probe for name, probe in graphics.backends.items() if probe.works}
    if graphics.choice == "xvfb":
        usable = {name: probe for name, probe in usable.items() if name == XVFB}
    with_windows = [name for name in usable if name in (X_SERVER, XVFB)]
    chosen = with_windows[0] if window and with_windows else next(iter(usable), "")
    first = _check_chosen(chosen, graphics, needed=needed, window=window)
    return [first, *(_check_backend(name, probe, chosen) for name, probe in graphics.backends.items())]


def _check_chosen(chosen: str, graphics: GraphicsSupport, *, needed: bool, window: bool) -> DoctorFinding:
    problem = failure if needed else warning
    setting = f" ({headless.SCREEN}={graphics.choice})" if graphics.choice != "auto" else ""
    if not chosen:
        problem = failure if graphics.choice == "xvfb" else problem  # no environment would start
        fix = _FIXES[XVFB if graphics.choice == "xvfb" else EGL]
        return problem("graphics", f"nothing can draw here{setting}: no videos, no games with pictures", fix)
    probe = graphics.backends[chosen]
    text = f"by {chosen}: OpenGL {probe.version}{', by software' if probe.by_software else ''}"
    if probe.number < MIN_OPENGL:
        remedy = f"Use another driver, or software rendering: {_FIXES[EGL]}, and LIBGL_ALWAYS_SOFTWARE=1."
        return problem("graphics", f"{text}; current engines need {MIN_OPENGL[0]}.{MIN_OPENGL[1]}", remedy)
    if window and chosen not in (X_SERVER, XVFB):
        fix = f"unset {headless.SCREEN}" if graphics.choice == "none" else _FIXES[XVFB]
        text = f"by {chosen}, which has no windows: a game that opens one finds no screen{setting}"
        return warning("graphics", text, f"{fix}; or start it without graphics.")
    return ok("graphics", text)


def _check_backend(name: str, probe: OpenGL, chosen: str) -> DoctorFinding:
    if probe.works:
        return ok(name, f"OpenGL {probe.version} ({probe.renderer})")
    unneeded = f"; not needed, because {chosen} works" if chosen else ""
    if probe.missing:
        text = "DISPLAY is not set" if name == X_SERVER else "not installed"
        return skip(name, f"{text}{unneeded}", "" if chosen or name == X_SERVER else _FIXES[name])
    return warning(name, f"{probe.why}{unneeded}", _FIXES[name])
