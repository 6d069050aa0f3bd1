"""Probe of the OpenGL backends of this machine. A broken driver may hang or crash, so each probe runs in a child process.

    probe_backend("egl").version        "4.5 (Compatibility Profile) Mesa 22.3.6"

As a program with the name of a backend it prints the result as JSON. Imports only the standard library.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_ulong, c_void_p
from dataclasses import asdict, dataclass
from typing import Any

BACKENDS = {"egl": ("EGL", "libEGL.so.1"), "osmesa": ("OSMesa", "libOSMesa.so.8"), "glx": ("GL", "libGL.so.1")}
"""The library of each backend: its name for find_library, and its usual file name."""

PROBE_S = 15.0
"""Time-out of a probe. Measured: 0.1 to 0.4 s; several seconds for the first one after boot from a slow disk."""

_GL_RENDERER, _GL_VERSION, _GL_RGBA, _GL_UNSIGNED_BYTE = 0x1F01, 0x1F02, 0x1908, 0x1401


@dataclass(frozen=True)
class OpenGL:
    """Result of a probe. `missing`: the library is not installed. `why`: it is installed and does not work.

    `core`: version of a core profile, which engines use; empty if there is none of 3.2 or newer.
    """

    way: str
    version: str = ""
    renderer: str = ""
    missing: bool = False
    why: str = ""
    core: str = ""

    @property
    def works(self) -> bool:
        return bool(self.version)

    @property
    def number(self) -> tuple[int, int]:
        """Of the core profile if there is one, else of the compatible one, which may be older."""
        matched = re.match(r"\D*(\d+)\.(\d+)", self.core or self.version)
        return (int(matched[1]), int(matched[2])) if matched else (0, 0)

    @property
    def by_software(self) -> bool:
        return any(name in self.renderer.lower() for name in ("llvmpipe", "softpipe", "swrast", "swiftshader", "software"))


def probe_backend(way: str, environ: Mapping[str, str] | None = None, timeout_s: float = PROBE_S) -> OpenGL:
    """Create a context in a child process and return what it reports. Never raises."""
    command = [sys.executable, "-I", "-S", __file__, way]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command,
            env=dict(os.environ if environ is None else environ),
            capture_output=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return OpenGL(way, why=f"it did not answer within {timeout_s:g} s")
    except OSError as error:
        return OpenGL(way, why=f"the probe could not start: {error.strerror}")
    try:
        return OpenGL(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        errors = done.stderr.decode(errors="replace").strip().splitlines()
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return OpenGL(way, why=f"the probe ended with {ended}{f': {errors[-1][:200]}' if errors else ''}")


# -- in the child ---------------------------------------------------------------------------------------------------------


class _ProbeFailed(Exception):
    pass


CORE_VERSIONS = ((4, 5), (4, 1), (3, 3), (3, 2))
"""Core profiles in the order in which they are tried."""


def _library(way: str) -> Any:
    name, usual = BACKENDS[way]
    for candidate in (usual, ctypes.util.find_library(name)):
        if candidate:
            try:
                return ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                if "cannot open shared object file" not in str(error) or usual not in str(error):
                    raise _ProbeFailed(str(error)) from error
    return None


def _strings(get_string: Any) -> tuple[str, str]:
    get_string.restype, get_string.argtypes = c_char_p, [c_uint]
    version, renderer = get_string(_GL_VERSION), get_string(_GL_RENDERER)
    if not version:
        raise _ProbeFailed("the context reports no version")
    return version.decode(errors="replace"), (renderer or b"").decode(errors="replace")


def _egl(library: Any) -> tuple[str, str, str]:
    """Try the devices that the driver lists, as MuJoCo does, then a surfaceless display."""
    address = library.eglGetProcAddress
    address.restype, address.argtypes = c_void_p, [c_char_p]
    library.eglInitialize.argtypes = [c_void_p, POINTER(c_int), POINTER(c_int)]
    failures = []
    for display in _egl_displays(library, address):
        if not display or not library.eglInitialize(c_void_p(display), byref(c_int()), byref(c_int())):
            failures.append(f"eglInitialize failed (0x{library.eglGetError():x})")
            continue
        try:
            return _egl_context(library, address, display)
        except _ProbeFailed as failed:
            failures.append(str(failed))
    raise _ProbeFailed(failures[0] if failures else "there is no EGL display")


def _egl_displays(library: Any, address: Any) -> list[int]:
    platform = address(b"eglGetPlatformDisplayEXT")
    found: list[int] = []
    if platform:
        display = ctypes.CFUNCTYPE(c_void_p, c_uint, c_void_p, c_void_p)(platform)
        if query := address(b"eglQueryDevicesEXT"):
            devices, count = (c_void_p * 16)(), c_int()
            ctypes.CFUNCTYPE(c_uint, c_int, c_void_p, POINTER(c_int))(query)(16, devices, byref(count))
            found += [display(0x313F, devices[index], None) for index in range(count.value)]
        found.append(display(0x31DD, None, None))  # EGL_PLATFORM_SURFACELESS_MESA
    library.eglGetDisplay.restype, library.eglGetDisplay.argtypes = c_void_p, [c_void_p]
    return [*found, library.eglGetDisplay(None)]


def _egl_context(library: Any, address: Any, display: int) -> tuple[str, str, str]:
    for name in ("eglCreateContext", "eglCreatePbufferSurface"):
        getattr(library, name).restype = c_void_p
    library.eglBindAPI(0x30A2)  # OpenGL
    config, count = c_void_p(), c_int()
    wanted = _ints(0x3033, 0x0001, 0x3040, 0x0008, 0x3038)  # EGL_SURFACE_TYPE: pbuffer; EGL_RENDERABLE_TYPE: OpenGL; end
    library.eglChooseConfig.argtypes = [c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int)]
    if not library.eglChooseConfig(display, wanted, byref(config), 1, byref(count)) or not count.value:
        raise _ProbeFailed("EGL has no configuration with OpenGL")
    library.eglCreateContext.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p]
    context = library.eglCreateContext(display, config, None, None)
    if not context:
        raise _ProbeFailed(f"eglCreateContext failed (0x{library.eglGetError():x})")
    library.eglCreatePbufferSurface.argtypes = [c_void_p, c_void_p, c_void_p]
    surface = library.eglCreatePbufferSurface(display, config, _ints(0x3057, 8, 0x3056, 8, 0x3038))  # 8 by 8
    library.eglMakeCurrent.argtypes = [c_void_p] * 4
    if not library.eglMakeCurrent(display, surface, surface, context):
        raise _ProbeFailed(f"eglMakeCurrent failed (0x{library.eglGetError():x})")
    get_string = address(b"glGetString")
    if not get_string:
        raise _ProbeFailed("EGL has no glGetString")
    strings = ctypes.CFUNCTYPE(c_char_p, c_uint)(get_string)
    version, renderer = _strings(strings)
    for major, minor in CORE_VERSIONS:
        attributes = _ints(0x3098, major, 0x30FB, minor, 0x30FD, 0x0001, 0x3038)  # EGL_CONTEXT_…: version, core profile; end
        core = library.eglCreateContext(display, config, None, attributes)
        if core and library.eglMakeCurrent(display, surface, surface, core):
            return version, renderer, _strings(strings)[0]
    return version, renderer, ""


def _ints(*values: int) -> Any:
    return (c_int * len(values))(*values)


def _osmesa(library: Any) -> tuple[str, str, str]:
    create = library.OSMesaCreateContextExt
    create.restype, create.argtypes = c_void_p, [c_uint, c_int, c_int, c_int, c_void_p]
    context = create(_GL_RGBA, 24, 8, 0, None)
    if not context:
        raise _ProbeFailed("OSMesaCreateContextExt failed")
    library.OSMesaMakeCurrent.argtypes = [c_void_p, c_void_p, c_uint, c_int, c_int]
    picture = ctypes.create_string_buffer(8 * 8 * 4)
    if not library.OSMesaMakeCurrent(context, picture, _GL_UNSIGNED_BYTE, 8, 8):
        raise _ProbeFailed("OSMesaMakeCurrent failed")
    return *_strings(library.glGetString), ""


def _glx(library: Any) -> tuple[str, str, str]:
    try:
        x11: Any = ctypes.CDLL("libX11.so.6")
    except OSError as error:
        raise _ProbeFailed(str(error)) from error
    x11.XOpenDisplay.restype, x11.XOpenDisplay.argtypes = c_void_p, [c_char_p]
    display = x11.XOpenDisplay(None)
    if not display:
        raise _ProbeFailed("the X server does not answer")
    choose, create = library.glXChooseVisual, library.glXCreateContext
    choose.restype, choose.argtypes = c_void_p, [c_void_p, c_int, c_void_p]
    visual = choose(display, 0, (c_int * 5)(4, 5, 12, 1, 0))  # GLX_RGBA, GLX_DOUBLEBUFFER, GLX_DEPTH_SIZE: 1
    visual = visual or choose(display, 0, (c_int * 2)(4, 0))
    if not visual:
        raise _ProbeFailed("the X server has no GLX")
    create.restype, create.argtypes = c_void_p, [c_void_p, c_void_p, c_void_p, c_int]
    context = create(display, visual, None, 1)
    if not context:
        raise _ProbeFailed("glXCreateContext failed")
    x11.XDefaultRootWindow.restype, x11.XDefaultRootWindow.argtypes = c_ulong, [c_void_p]
    x11.XCreateSimpleWindow.restype = c_ulong
    x11.XCreateSimpleWindow.argtypes = [c_void_p, c_ulong, c_int, c_int, c_uint, c_uint, c_uint, c_ulong, c_ulong]
    window = x11.XCreateSimpleWindow(display, x11.XDefaultRootWindow(display), 0, 0, 8, 8, 0, 0, 0)
    library.glXMakeCurrent.argtypes = [c_void_p, c_ulong, c_void_p]
    if not library.glXMakeCurrent(display, window, context):
        raise _ProbeFailed("glXMakeCurrent failed")
    version, renderer = _strings(library.glGetString)
    return version, renderer, _glx_core(library, x11, display, window)


def _glx_core(library: Any, x11: Any, display: int, window: int) -> str:
    """Version of the newest core profile that a context can be created for."""
    find, choose = library.glXGetProcAddressARB, library.glXChooseFBConfig
    find.restype, find.argtypes = c_void_p, [c_char_p]
    choose.restype, choose.argtypes = POINTER(c_void_p), [c_void_p, c_int, c_void_p, POINTER(c_int)]
    address, count = find(b"glXCreateContextAttribsARB"), c_int()
    configs = choose(display, 0, _ints(0x8010, 0x0001, 0), byref(count))  # GLX_DRAWABLE_TYPE: window
    if not address or not configs or not count.value:
        return ""
    # A version that the driver lacks is an X error, and Xlib's own handler would end the process.
    ignore = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)(lambda *_: 0)
    x11.XSetErrorHandler.argtypes = [c_void_p]
    x11.XSetErrorHandler(ctypes.cast(ignore, c_void_p))
    x11.XSync.argtypes = [c_void_p, c_int]
    create = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p)(address)
    for major, minor in CORE_VERSIONS:
        attributes = _ints(0x2091, major, 0x2092, minor, 0x9126, 0x0001, 0)  # GLX_CONTEXT_…: version, core profile
        context = create(display, configs[0], None, 1, attributes)
        x11.XSync(display, 0)
        if context and library.glXMakeCurrent(display, window, context):
            return _strings(library.glGetString)[0]
    return ""


def _probe_here(way: str) -> OpenGL:
    try:
        library = _library(way)
        if library is None:
            return OpenGL(way, missing=True)
        version, renderer, core = {"egl": _egl, "osmesa": _osmesa, "glx": _glx}[way](library)
    except (_ProbeFailed, AttributeError) as failed:  # AttributeError: the library lacks a function
        return OpenGL(way, why=str(failed))
    return OpenGL(way, version, renderer, core=core)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_probe_here(sys.argv[1]))) + "\n")
    sys.stdout.flush()
    os._exit(0)  # some drivers crash when unloaded
