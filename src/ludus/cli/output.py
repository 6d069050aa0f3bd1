"""What commands print, and commands as they can be typed on this machine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def say(text: str, *, to_stderr: bool = False) -> None:
    print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def here(command: str) -> str:
    """A command as it can be typed now: with its path when its folder is not on PATH."""
    if shutil.which(command):
        return command
    beside = Path(sys.argv[0]).parent / command
    return str(beside) if beside.exists() else command
