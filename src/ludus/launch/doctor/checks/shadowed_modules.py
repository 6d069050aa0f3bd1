"""Checks for files that hide modules of Python or of installed packages: in the working directory and on PYTHONPATH."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ludus.launch.doctor.finding import DoctorFinding, warning

_PACKAGES = ("torch", "numpy", "gymnasium", "ray", "ludus", "yaml", "redis", "pydantic", "rich", "typer")


def check_shadowed_modules(environ: Mapping[str, str], directory: Path | None = None) -> Iterator[DoctorFinding]:
    """Yield a warning per directory. `directory`: the working directory, which `python -m` searches first."""
    for path in dict.fromkeys([str(directory or Path.cwd()), *environ.get("PYTHONPATH", "").split(os.pathsep)]):
        hidden: list[str] = []
        if path:
            with contextlib.suppress(OSError):
                hidden = sorted(each.name for each in Path(path).iterdir() if _hides_module(each))
        if hidden:
            of_python = any(name.removesuffix(".py") in sys.stdlib_module_names for name in hidden)
            what = "a module of Python itself" if of_python else "a package"
            text = f"{path} has {', '.join(hidden[:5])}, which hides {what} of that name"
            yield warning("shadowed modules", text, "Rename it.")


def _hides_module(path: Path) -> bool:
    if path.suffix == ".py":
        return path.stem in sys.stdlib_module_names or path.stem in _PACKAGES
    if path.name not in _PACKAGES or not (path / "__init__.py").exists():
        return False
    spec = importlib.util.find_spec(path.name)  # it may be the package itself, found through PYTHONPATH
    return spec is None or spec.origin is None or Path(spec.origin).parent.resolve() != path.resolve()
