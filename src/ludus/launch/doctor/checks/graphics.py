"""Checks whether games can draw on this machine: X server, EGL, OSMesa and Xvfb, with their OpenGL versions.

Each backend is probed in another process (display/opengl_probe.py): an installed library may still not work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ludus.display import headless, private_screen, x11
from ludus.display.game_screen import MIN_OPENGL, describe_player, player_problem
from ludus.display.opengl_probe import OpenGL, probe_backend
from ludus.envs.player_process import opens_window
from ludus.errors import ConfigError, LudusError, WorkerFailed
from ludus.launch.doctor.finding import DoctorFinding, failure, ok, skip, warning
from ludus.process.screen_choice import SCREEN, screen_choice

X_SERVER, EGL, OSMESA, XVFB = "X server", "EGL", "OSMesa", "Xvfb"
_FIXES = {
    X_SERVER: "unset DISPLAY, or apt-get install libgl1 libglx-mesa0 libgl1-mesa-dri",
    EGL: "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri",
    OSMESA: "apt-get install libosmesa6",
    XVFB: "apt-get install xvfb libgl1-mesa-dri libglx-mesa0",
}

_ONLY = {"xvfb": XVFB, "egl": EGL}
"""The only backend that a choice uses."""


@dataclass(frozen=True)
class GraphicsSupport:
    """`backends`: probes by name, in order of preference; Xvfb only if a private screen may be used. `choice`: `display`."""

    backends: Mapping[str, OpenGL]
    choice: str = "auto"


def inspect_graphics(environ: Mapping[str, str] | None = None) -> GraphicsSupport | None:
    """Return None on systems without X11."""
    if not sys.platform.startswith("linux"):
        return None
    environ = os.environ if environ is None else environ
    try:
        choice = screen_choice(environ)
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


_NO_LIBGL = "it has no OpenGL: libGL is not installed"


def _probe_glx(environ: Mapping[str, str]) -> OpenGL:
    probe = probe_backend("glx", environ)
    return replace(probe, missing=False, why=_NO_LIBGL) if probe.missing else probe


def _lacks_libgl(probe: OpenGL) -> bool:
    return probe.why == _NO_LIBGL


def _probe_private_screen(environ: Mapping[str, str]) -> OpenGL:
    if private_screen.find_xvfb() is None:
        return OpenGL("glx", missing=True)
    try:
        with headless.screen("xvfb") as variables:
            return _probe_glx({**environ, **variables})
    except LudusError as error:
        return OpenGL("glx", why=error.message)


def find_screen_problem(choice: str, environ: Mapping[str, str] | None = None, *, window: bool = False) -> str:
    """Return why environments with `display: CHOICE` would fail on this machine; empty if they would not. LUDUS_SCREEN overrides.

    `window`: they start players that draw with OpenGL. What is not installed is a problem only if it is needed; what is installed and
    does not work always is. Takes up to half a minute on a broken machine, 0.5 s on others.
    """
    environ = {SCREEN: choice, **(os.environ if environ is None else environ)}
    try:
        choice = screen_choice(environ)
    except ConfigError as error:
        return error.message
    if choice == "none" or not sys.platform.startswith("linux") or (choice == "auto" and not window):
        return ""
    if choice == "egl":
        probe = probe_backend("egl", environ)
        return "" if probe.works else f"EGL does not work: {probe.why or 'it is not installed'}"
    if choice == "xvfb" or headless.is_headless(environ):
        where, probe = "on a private X server", _probe_private_screen(environ)
        if probe.missing:
            return "Xvfb is not installed"
    else:
        where, probe = f"on the X server {environ[x11.DISPLAY]}", _probe_glx(environ)
    problem = player_problem(probe) if window else probe.why if not _lacks_libgl(probe) else ""
    return problem and f"{where} {problem}"


def require_screen(choice: str, env: str, env_config: Mapping[str, Any]) -> None:
    """Raise WorkerFailed if environments of a run would find no working screen on this machine. It is final: trying again is useless."""
    window = opens_window(env, env_config, screen_choice({SCREEN: os.environ.get(SCREEN) or choice}))
    if problem := find_screen_problem(choice, window=window):
        error = WorkerFailed(f"display: {choice} does not work there: {problem}.", "See there: ludus doctor --display " + choice)
        error.final = True
        raise error


def check_choice(environ: Mapping[str, str], *, xvfb: bool) -> list[DoctorFinding]:
    """Check `display`: an invalid value prevents the creation of any environment. `xvfb`: it is installed."""
    try:
        choice = screen_choice(environ)
    except ConfigError as error:
        return [failure("display", error.message, error.hint)]
    if choice == "xvfb" and not xvfb:
        return [failure("display", "xvfb: environments need a private screen, and Xvfb is not installed", _FIXES[XVFB])]
    return []


def check_graphics(graphics: GraphicsSupport | None, *, needed: bool, window: bool = False) -> list[DoctorFinding]:
    """Return a finding about the backend that will be used, then one per backend.

    `needed`: the game draws; else a machine without graphics is a warning. `window`: the game opens a window and cannot use EGL.
    """
    if graphics is None:
        return [skip("graphics", "checked on Linux only; other systems have a screen")]
    usable = {name: probe for name, probe in graphics.backends.items() if probe.works}
    if only := _ONLY.get(graphics.choice):
        usable = {name: probe for name, probe in usable.items() if name == only}
    with_windows = [name for name in usable if name in (X_SERVER, XVFB)]
    chosen = with_windows[0] if window and with_windows else next(iter(usable), "")
    first = _check_chosen(chosen, graphics, needed=needed, window=window)
    return [first, *(_check_backend(name, probe, chosen) for name, probe in graphics.backends.items())]


def _check_chosen(chosen: str, graphics: GraphicsSupport, *, needed: bool, window: bool) -> DoctorFinding:
    problem = failure if needed else warning
    setting = f" (display: {graphics.choice})" if graphics.choice != "auto" else ""
    if not chosen:
        problem = failure if graphics.choice in _ONLY else problem  # no environment would start
        fix = _FIXES[_ONLY.get(graphics.choice, EGL)]
        return problem("graphics", f"nothing can draw here{setting}: no videos, no games with pictures", fix)
    probe = graphics.backends[chosen]
    text = f"by {chosen}: OpenGL {probe.version}{', by software' if probe.by_software else ''}"
    if probe.number < MIN_OPENGL:
        remedy = f"Use another driver, or software rendering: {_FIXES[EGL]}, and LIBGL_ALWAYS_SOFTWARE=1."
        return problem("graphics", f"{text}; current engines need {MIN_OPENGL[0]}.{MIN_OPENGL[1]}", remedy)
    if window and chosen not in (X_SERVER, XVFB):
        fix = "display: auto or xvfb" if graphics.choice in ("none", "egl") else _FIXES[XVFB]
        text = f"by {chosen}, which has no windows: a game that opens one finds no screen{setting}"
        return warning("graphics", text, f"{fix}; or start it without graphics.")
    return ok("graphics", f"by {chosen}: {describe_player(probe)}" if window else text)


def _check_backend(name: str, probe: OpenGL, chosen: str) -> DoctorFinding:
    if probe.works:
        return ok(name, f"OpenGL {probe.core or probe.version} ({probe.renderer})")
    unneeded = f"; not needed, because {chosen} works" if chosen else ""
    if probe.missing:
        text = "DISPLAY is not set" if name == X_SERVER else "not installed"
        return skip(name, f"{text}{unneeded}", "" if chosen or name == X_SERVER else _FIXES[name])
    return warning(name, f"{probe.why}{unneeded}", _FIXES[name])
