"""Private directories of Ray nodes, and the removal of what killed ones have left."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ludus.process import identity, temp_dirs

_OWNER_FILE = "owner"
_PREFIX = "ludus-ray-"
_MAX_BASE_BYTES = 15
"""A unix socket path may have about 100 bytes, of which Ray uses 64."""


@contextlib.contextmanager
def ray_temp_dir() -> Iterator[Path]:
    """A private directory for Ray, with a short name."""
    base = temp_dirs.short_temp_dir(_MAX_BASE_BYTES)
    sweep(base)
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    try:
        (made / _OWNER_FILE).write_text(f"{os.getpid()} {identity.start_ticks(os.getpid()) or 0}")
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def sweep_leftovers() -> None:
    """Remove leftovers of killed Ray processes and workers of this user: directories, rings, weights, logs."""
    with contextlib.suppress(OSError):
        sweep(temp_dirs.short_temp_dir(_MAX_BASE_BYTES))
        temp_dirs.sweep_all()


def sweep(base: Path) -> int:
    """Remove the directories of Ray clusters whose owners were killed; their processes died with the owners."""
    swept = 0
    for home in base.glob(f"{_PREFIX}*"):
        try:
            if home.is_symlink() or home.stat().st_uid != os.getuid():
                continue
            pid, started = map(int, (home / _OWNER_FILE).read_text().split())
        except (OSError, ValueError):  # of another user, or being created or removed
            continue
        if not identity.is_alive_since(pid, started):
            shutil.rmtree(home, ignore_errors=True)
            swept += 1
    return swept
