"""Compile the Arena's kernels with numba and cache them on disk for the user.

A kernel is an ordinary function on integer arrays. With NUMBA_DISABLE_JIT=1 the same functions run as Python, about a hundred
times slower, which allows comparison and debugging.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from ludus.errors import MissingExtra

try:
    import numba
    from llvmlite import binding
    from numba import types
    from numba.core.dispatcher import Dispatcher
except ModuleNotFoundError as error:
    raise MissingExtra("The Arena needs numba, which is not installed.", "pip install 'ludus[arena]'") from error

log = logging.getLogger(__name__)

_SOURCES = ("engine/*.py", "bots/*.py", "render/yuv.py")
"""Files with kernels or with constants that are compiled into kernels."""

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def _cache_directory() -> Path:
    """Return a cache directory for this state of the sources; numba does not detect a changed constant in another file."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{numba.__version__} {sys.version} {binding.get_host_cpu_name()}".encode())
    arena = Path(__file__).parents[1]
    for path in sorted(path for pattern in _SOURCES for path in arena.glob(pattern)):
        digest.update(f"{path} {path.stat().st_mtime_ns}".encode() + path.read_bytes())
    if os.environ.get("NUMBA_CACHE_DIR"):
        return Path(os.environ["NUMBA_CACHE_DIR"]) / digest.hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "ludus" / "arena" / digest.hexdigest()


_CACHE = _cache_directory()
_READY = _CACHE / "ready"


def inner(function: Kernel) -> Kernel:
    """Mark a function that only kernels call. It is compiled once, with all integers as 64 bits.

    By default numba compiles it for every constant and every integer width, which takes twice as long.
    """
    compiled = numba.njit(nogil=True)(function)
    if isinstance(compiled, Dispatcher):
        template = compiled.get_call_template
        vars(compiled)["get_call_template"] = lambda args, kws: template(tuple(map(_widen, args)), kws)
    return cast(Kernel, compiled)


def _widen(kind: Any) -> Any:
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) and kind.signed else kind


def kernel(function: Kernel) -> Kernel:
    """Mark a kernel that Python calls. The compiled code is cached on disk."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(_CACHE)
    try:
        return cast(Kernel, numba.njit(nogil=True, cache=True)(function))
    except (OSError, RuntimeError):  # no writable cache: compiled in every process
        return inner(function)
    finally:
        numba.config.CACHE_DIR = before


@contextlib.contextmanager
def compile_lock() -> Iterator[bool]:
    """Yield whether this process has to compile. Other processes of the machine wait until it has finished."""
    if numba.config.DISABLE_JIT or _READY.exists():
        yield False
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # without a lock every process compiles
            import fcntl  # not on Windows

            _CACHE.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(_CACHE / "lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        missing = not _READY.exists()
        if missing:
            log.warning("compiling the rules of the Arena once for this machine, about 30 s")
        yield missing
        if missing:
            with contextlib.suppress(OSError):
                _READY.touch()
