"""The compiler of the Arena's kernels: numba, which keeps what it has compiled in the user's cache.

A kernel is an ordinary function on arrays of integers. With NUMBA_DISABLE_JIT=1 the same functions run uncompiled, some hundred
times slower: a second implementation to compare with, and a way to step through them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from ludus.errors import MissingExtra

try:
    import numba
except ModuleNotFoundError as error:
    raise MissingExtra("The Arena needs numba, which is not installed.", "pip install 'ludus[arena]'") from error

_SOURCES = ("arena", "compiled", "geometry", "heroes", "layout", "observe", "rules", "scripts", "settings")
"""Files with kernels, or with constants that kernels have compiled in."""

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def _cache() -> str:
    """One for each state of our sources: numba itself would not notice that a constant in another file has changed."""
    digest = hashlib.blake2b(digest_size=8)
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(home / "ludus" / "arena" / digest.hexdigest())


def inner(function: Kernel) -> Kernel:
    """Called by other kernels only; compiled with them."""
    return cast(Kernel, numba.njit(nogil=True)(function))


def kernel(function: Kernel) -> Kernel:
    """Called from Python; compiled once, for good."""
    config = numba.config
    before = config.CACHE_DIR
    if not before:
        config.CACHE_DIR = _CACHE
    try:
        with contextlib.suppress(RuntimeError):  # nowhere to write: compiled anew in every process
            return cast(Kernel, numba.njit(nogil=True, cache=True)(function))
        return inner(function)
    finally:
        config.CACHE_DIR = before


_CACHE = _cache()
