"""Make an installed Python environment smaller. Run by the build stages of the Dockerfile.

    python shrink.py /opt/ludus      remove tests, headers, debug symbols, and the bytecode of modules that a training does not import
    python shrink.py --tests /opt/variant     remove tests only

The first form must run with the interpreter of the environment. A container cannot write bytecode: modules without it are compiled each
time they are imported. Bytecode of all modules would be six times as large.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

USELESS = ("torch/include", "torch/test", "torch/bin/*[Tt]est*", "torch/bin/protoc*", "ray/jars")
"""Headers and tests of torch; Java workers of Ray."""
STRIPPED = {
    "fontTools": "import fontTools.ttLib",
    "kiwisolver": "import kiwisolver",
    "lz4": "import lz4.frame; lz4.frame.compress(bytes(9))",
    "ray": "import ray._raylet",
    "torch": "import torch; (torch.ones(9, 9, requires_grad=True) @ torch.ones(9, 9)).sum().backward()",
    "uvloop": "import uvloop; uvloop.new_event_loop().close()",
    "zstandard": "import zstandard; zstandard.compress(bytes(9))",
}
"""Packages with debug symbols, and a program that must still run without them: `strip` damages files that some tools have rewritten."""
IMPORTS = (
    *(
        "cloudpickle",
        "gymnasium.vector",
        "httptools",
        "imageio",
        "lz4.frame",
        "matplotlib.pyplot",
        "msgpack",
        "numba",
        "obstore",
        "psutil",
    ),
    *(
        "pydantic.main",
        "pygame",
        "ray",
        "redis",
        "rich.console",
        "safetensors.torch",
        "starlette.applications",
        "tensorboard",
        "torch.distributed",
    ),
    *("torch.utils.tensorboard", "typer", "uvicorn", "uvloop", "yaml", "zstandard"),
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
    for name, program in STRIPPED.items():
        binaries = [path for path in (packages / name).rglob("*") if is_binary(path)]
        with tempfile.TemporaryDirectory() as directory:
            copies = [(path, Path(directory) / str(number)) for number, path in enumerate(binaries)]
            for path, copy in copies:
                shutil.copy2(path, copy)
                subprocess.run(["strip", "--strip-unneeded", path], check=True)
            if binaries and subprocess.run([sys.executable, "-c", program]).returncode != 0:
                sys.stderr.write(f"{name} does not work without its symbols; they are kept\n")
                for path, copy in copies:
                    shutil.copy2(copy, path)


def is_binary(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


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
    parser.add_argument("--tests", action="store_true")
    given = parser.parse_args()
    (packages,) = given.environment.glob("lib/python3*/site-packages")
    remove_useless(packages)
    if not given.tests:
        strip_symbols(packages)
        compile_imports(packages)


if __name__ == "__main__":
    main()
