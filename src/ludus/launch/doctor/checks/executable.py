"""Checks a game's executable: existence, permissions, processor and shared libraries. The game is never run.

Shared libraries are listed by the dynamic loader of this system, as `ldd` does. A loader named in the game is not used: it could run
any code.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ludus.errors import UsageError
from ludus.launch.doctor.finding import DoctorFinding, failure, ok, warning

MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le"}
"""Processor by the e_machine field of an ELF header."""

LOADERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1", "i386": "/lib/ld-linux.so.2"}
_MACHINE_ALIASES = {"amd64": "x86_64", "arm64": "aarch64", "i686": "i386", "i586": "i386"}
_RUNS_ALSO = {"x86_64": ("i386",), "aarch64": ("arm",)}
_SYSTEMS = {b"MZ": "Windows", b"\xcf\xfa\xed\xfe": "macOS", b"\xca\xfe\xba\xbe": "macOS", b"\xfe\xed\xfa\xcf": "macOS"}
"""Operating system by the first bytes of a file."""

_LOADER_S = 10.0


def check_executable(path: Path, environ: Mapping[str, str] | None = None) -> DoctorFinding:
    environ = os.environ if environ is None else environ
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        near = _find_similar(path)
        return failure("game", f"{path} {what}", f"Did you mean {near}?" if near else "Is the path right, on every node?")
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError:
        return failure("game", f"{path} cannot be read", f"chmod u+rx {path}")
    if system := next((name for magic, name in _SYSTEMS.items() if head.startswith(magic)), ""):
        return failure(
            "game", f"{path} is a program for {system}", "Build it for Linux; a Windows program runs by Wine, in a script."
        )
    if not os.access(path, os.X_OK) or not path.stat().st_mode & 0o111:
        return failure("game", f"{path} is not executable", f"chmod +x {path}")
    if os.statvfs(path).f_flag & getattr(os, "ST_NOEXEC", 0):
        return failure("game", f"{path} is on a file system that is mounted noexec", "Copy it elsewhere, or mount it with exec.")
    if head.startswith(b"#!"):
        return _check_script(path, head)
    if head.startswith(b"\x7fELF") and len(head) > 20:
        return _check_elf(path, head, environ)
    return warning("game", f"{path} has an unknown format", "Is it the right file, and complete?")


def _find_similar(path: Path) -> str:
    """Return a program in a directory, or the path with an extension of Unity players or scripts; "" if there is none."""
    patterns = (".x86_64", ".x86", ".sh", ".exe")
    found = (each for end in patterns for each in (sorted(path.glob(f"*{end}")) if path.is_dir() else [Path(f"{path}{end}")]))
    return next((str(each) for each in found if each.is_file()), "")


def _check_script(path: Path, head: bytes) -> DoctorFinding:
    words = head.split(b"\n", 1)[0][2:].decode(errors="replace").split() or ["?"]
    if Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word] or ["?"]
    if shutil.which(words[0]) is None:
        return failure("game", f"{path} needs the interpreter {words[0]}, which does not exist", f"Install {words[0]}.")
    return ok("game", f"{path}, a script for {words[0]}")


def _check_elf(path: Path, head: bytes, environ: Mapping[str, str]) -> DoctorFinding:
    number = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    machine = MACHINES.get(number, f"machine {number}")
    here = platform.machine().lower()
    here = _MACHINE_ALIASES.get(here, here)
    if machine not in (here, *_RUNS_ALSO.get(here, ())):
        return failure("game", f"{path} is for {machine}; this processor is {here}", f"Build it for Linux on {here}.")
    loader = LOADERS.get(machine, "")
    if not Path(loader).is_file():
        text = f"{path} is for {machine}; its libraries were not checked: no loader {loader or 'is known'}"
        return warning("game", text, "Without that file the game runs only if it needs no shared library.")
    libraries = list_libraries(loader, path, environ)
    if missing := [name for name, found in libraries.items() if not found]:
        shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        remedy = "apt-file search NAME finds the package; or set LD_LIBRARY_PATH."
        return failure("game", f"{path} needs missing libraries: {shown}", remedy)
    data = path.parent / f"{path.name.removesuffix('.x86_64').removesuffix('.x86')}_Data"
    if "UnityPlayer.so" in libraries and not data.is_dir():
        return failure("game", f"{path}: its folder {data} does not exist", "Copy the whole build, not the program alone.")
    return ok(
        "game", f"{path}, for {machine}, {f'all {len(libraries)} libraries found' if libraries else 'which needs no libraries'}"
    )


def list_libraries(loader: str, path: Path, environ: Mapping[str, str]) -> dict[str, bool]:
    """Return the shared libraries that a program needs, directly or not, and whether each was found.

    With LD_TRACE_LOADED_OBJECTS the loader lists the libraries and exits. Raises UsageError if it cannot read the file.
    """
    variables = {**environ, "LD_TRACE_LOADED_OBJECTS": "1"}
    done = subprocess.run(  # noqa: S603
        [loader, str(path.absolute())], env=variables, capture_output=True, timeout=_LOADER_S, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UsageError(f"The dynamic loader rejects {path}: {last[:300]}", "Is the file complete?")
    lines = re.findall(r"^\s+(\S+) => (.+)$", done.stdout.decode(errors="replace"), re.MULTILINE)
    return {name: where != "not found" for name, where in lines}
