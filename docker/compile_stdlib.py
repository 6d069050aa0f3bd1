"""Compile the standard library of the running Python to bytecode where it has none, as in python:3.11-slim. Run by the Dockerfile."""

from __future__ import annotations

import compileall
import re
import sys
import sysconfig
from pathlib import Path

_WITNESS = "json"
"""A package that no Python imports when it starts: bytecode of it was compiled for the whole library."""
_EXCLUDED = re.compile(r"/(site-packages|dist-packages|tests?|idlelib|lib2to3)/")
"""Not imported by programs; some tests contain invalid syntax."""


def compile_stdlib(directory: Path) -> bool:
    """Return whether everything is compiled now."""
    if any((directory / _WITNESS / "__pycache__").glob("*.pyc")):
        return True
    return bool(compileall.compile_dir(directory, quiet=1, rx=_EXCLUDED))


if __name__ == "__main__":
    sys.exit(0 if compile_stdlib(Path(sysconfig.get_path("stdlib"))) else "The standard library could not be compiled.")
