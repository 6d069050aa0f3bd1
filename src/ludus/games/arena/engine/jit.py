"""The compiler of the Arena's kernels: numba, which keeps what it has compiled in the user's cache.

A kernel is an ordinary function on arrays of integers. With NUMBA_DISABLE_JIT=1 the same functions run uncompiled, some hundred
times slower: a second implementation to compare with, and a way to step through them.
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
"""Files with kernels, or with constants that kernels have compiled in."""

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def _place() -> Path:
    """One for each state of our sources: numba itself would not notice that a constant in another file has changed."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{numba.__version__} {sys.version} {binding.get_host_cpu_name()}".encode())
    arena = Path(__file__).parents[1]
    for path in sorted(path for pattern in _SOURCES for path in arena.glob(pattern)):
        digest.update(f"{path} {path.stat().st_mtime_ns}".encode() + path.read_bytes())
    if os.environ.get("NUMBA_CACHE_DIR"):
        return Path(os.environ["NUMBA_CACHE_DIR"]) / digest.hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "ludus" / "arena" / digest.hexdigest()


_PLACE = _place()
_READY = _PLACE / "ready"


def inner(function: Kernel) -> Kernel:
    """Called by other kernels only; compiled with them, once: for whole numbers of 64 bits, whatever integers it is called with.

    Left to itself numba compiles it for every constant and every width of integer that it meets, which takes twice as long.
    """
    compiled = numba.njit(nogil=True)(function)
    if isinstance(compiled, Dispatcher):
        template = compiled.get_call_template
        vars(compiled)["get_call_template"] = lambda args, kws: template(tuple(map(_widened, args)), kws)
    return cast(Kernel, compiled)


def _widened(kind: Any) -> Any:
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) and kind.signed else kind


def kernel(function: Kernel) -> Kernel:
    """Called from Python; compiled once, for good."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(_PLACE)
    try:
        return cast(Kernel, numba.njit(nogil=True, cache=True)(function))
    except (OSError, RuntimeError):  # nowhere to write: compiled anew in every process
        return inner(function)
    finally:
        numba.config.CACHE_DIR = before


@contextlib.contextmanager
def compiling() -> Iterator[bool]:
    """Whether somebody must compile, once for each machine: whoever comes meanwhile waits here, instead of doing the same."""
    if numba.config.DISABLE_JIT or _READY.exists():
        yield False
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # a cache that cannot be locked is one that everybody fills
            import fcntl  # not on Windows

            _PLACE.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(_PLACE / "lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        missing = not _READY.exists()
        if missing:
            log.warning("compiling the rules of the Arena, once for this machine: about half a minute")
        yield missing
        if missing:
            with contextlib.suppress(OSError):
                _READY.touch()
