"""Helpers for the messages that commands print."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def say(text: str, *, to_stderr: bool = False) -> None:
    print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def runnable(command: str) -> str:
    """The command to type on this machine: with its path if its directory is not on PATH."""
    if shutil.which(command):
        return command
    sibling = Path(sys.argv[0]).parent / command
    return str(sibling) if sibling.exists() else command
