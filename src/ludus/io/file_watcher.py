"""Detects changed files by polling."""

from __future__ import annotations

import contextlib
from pathlib import Path


class FileWatcher:
    """Detects by `stat` that files were changed or replaced."""

    def __init__(self, *paths: Path) -> None:
        self._paths = [path.expanduser() for path in paths]
        self._last_state = self._stat_files()

    def _stat_files(self) -> list[tuple[int, ...]]:
        state: list[tuple[int, ...]] = []
        for path in self._paths:
            with contextlib.suppress(OSError):
                status = path.stat()
                state.append((status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size))
        return state

    def has_changed(self) -> bool:
        """Return whether the files differ from the previous call."""
        before, self._last_state = self._last_state, self._stat_files()
        return before != self._last_state
