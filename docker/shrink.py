"""Make an installed Python environment smaller. Run by the build stages of the Dockerfile.

    python shrink.py /opt/ludus              remove headers, tests and debug symbols
    python shrink.py /opt/ludus --bytecode   also keep bytecode only for modules that a training imports, a seventh of all

A container cannot write bytecode: modules without it are compiled each time they are imported. --bytecode must run with the interpreter
of the environment.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib
import shutil
import stat
import subprocess
from pathlib import Path

USELESS = ("torch/include", "torch/test", "torch/bin/*[Tt]est*", "torch/bin/protoc*", "ray/jars")
"""Headers and tests of torch; Java workers of Ray."""
PROGRAMS = ("ray/core/src/ray/*/*",)
IMPORTS = (
    *(
        "cloudpickle",
        "gymnasium.vector",
        "httptools",
        "imageio",
        "matplotlib.pyplot",
        "msgpack",
        "numba",
        "obstore",
        "psutil",
        "pydantic.main",
    ),
    *(
        "pygame",
        "ray",
        "redis",
        "rich.console",
        "safetensors.torch",
        "starlette.applications",
        "tensorboard",
        "torch.distributed",
    ),
    *("torch.utils.tensorboard", "typer", "uvicorn", "uvloop", "yaml"),
)
"""Modules whose import compiles nearly everything that a training imports; those that are not installed are left out."""
PACKAGES = ("pydantic", "ray/_private", "ray/autoscaler", "ray/dashboard", "ray/util")
"""Packages that import their modules later, or in the other processes of Ray."""


def remove_useless(packages: Path) -> None:
    for path in [*(path for pattern in USELESS for path in packages.glob(pattern)), *packages.rglob("tests")]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def strip_symbols(packages: Path) -> None:
    """Of extension modules and programs; not of the libraries in NAME.libs, which other tools have rewritten."""
    modules = [
        path for path in packages.rglob("*.so*") if path.is_file() and not path.relative_to(packages).parts[0].endswith(".libs")
    ]
    programs = [
        path for pattern in PROGRAMS for path in packages.glob(pattern) if path.is_file() and path.stat().st_mode & stat.S_IXUSR
    ]
    for path in [*modules, *programs]:
        with open(path, "rb") as file:
            if file.read(4) != b"\x7fELF":
                continue
        subprocess.run(["strip", "--strip-unneeded", path], check=True)


def compile_imports(packages: Path) -> None:
    for path in list(packages.rglob("__pycache__")):
        shutil.rmtree(path)
    for name in IMPORTS:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    for name in PACKAGES:
        if (packages / name).is_dir():
            compileall.compile_dir(packages / name, quiet=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--bytecode", action="store_true")
    given = parser.parse_args()
    (packages,) = given.environment.glob("lib/python3*/site-packages")
    remove_useless(packages)
    strip_symbols(packages)
    if given.bytecode:
        compile_imports(packages)


if __name__ == "__main__":
    main()
