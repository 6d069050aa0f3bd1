"""Environments that end their own process, importable as `tests.experiments.dying:make_…`."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from ludus.process.temp_dirs import TempDir, shared_memory_dir
from tests.environments import Count


class Dying(Count):
    """Kills its process at step `at`, as long as there is a file at `while_exists` (always, when that is empty)."""

    def __init__(self, at: int = 3, while_exists: str = "", removes: bool = False) -> None:
        super().__init__(length=5)
        self.at, self.while_exists, self.removes, self.all_steps = at, while_exists, removes, 0

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.all_steps += 1
        if self.all_steps == self.at and (not self.while_exists or Path(self.while_exists).exists()):
            if self.removes:
                Path(self.while_exists).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Stuck(Count):
    """Says at step `at` that it is stuck, by a file, and then is. Its process has something in shared memory."""

    def __init__(self, says: str, at: int = 3) -> None:
        super().__init__(length=5)
        self.says, self.at, self.all_steps = says, at, 0
        self.scratch = TempDir(shared_memory_dir())

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.all_steps += 1
        if self.all_steps == self.at:
            Path(self.says).touch()
            while True:
                time.sleep(1)
        return super().step(action)


def make_dying(**settings: Any) -> Dying:
    return Dying(**settings)


def make_stuck(**settings: Any) -> Stuck:
    return Stuck(**settings)


class Crashing(Count):
    """Reads from the address 0, as a broken library does."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        ctypes.string_at(0)
        return super().step(action)
