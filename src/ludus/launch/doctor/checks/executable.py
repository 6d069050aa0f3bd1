"""Checks a game's executable: existence, permissions, processor and shared libraries. It is read, never run.

`ldd` would run it. Libraries are searched as the dynamic loader does: by the ELF tables and `ldconfig -p`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import struct
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ludus.launch.doctor.finding import DoctorFinding, failed, ok, warning

MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le"}
_MACHINE_ALIASES = {"amd64": "x86_64", "arm64": "aarch64", "i686": "i386", "i586": "i386"}
_RUNS_ALSO = {"x86_64": ("i386",), "aarch64": ("arm",)}
_DIRECTORIES = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib")
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_RPATH, _DT_RUNPATH = 1, 5, 10, 15, 29
_MAX_BYTES, _MAX_LIBRARIES = 1 << 20, 500


@dataclass(frozen=True)
class ElfHeader:
    """Parsed ELF header and dynamic table. `bits`: 32 or 64."""

    machine: str
    bits: int
    interpreter: str = ""
    needed: tuple[str, ...] = ()
    rpaths: tuple[str, ...] = ()
    """Also searched for the libraries of its libraries; empty if there are `runpaths`, which apply to its own libraries only."""
    runpaths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Executable:
    """`kind`: elf, script, windows, mac, unknown; or none, directory, unreadable."""

    path: str
    kind: str
    executable: bool = False
    elf: ElfHeader | None = None
    interpreter: str = ""
    """Interpreter of a script, or dynamic loader; "" if it needs none."""
    interpreter_found: bool = True
    missing: tuple[str, ...] = ()
    near: str = ""
    """A similar path that exists."""
    data: str = ""
    """Its data folder, if that is missing."""
    no_exec: bool = False
    """Its file system is mounted noexec."""


# -- ELF ------------------------------------------------------------------------------------------------------------------


def read_elf(data: bytes) -> ElfHeader | None:
    """Parse an ELF file; None if it is not one, or damaged."""
    try:
        return _read_elf(data)
    except (struct.error, ValueError, IndexError, OverflowError):  # ValueError: also invalid text
        return None


def _read_elf(data: bytes) -> ElfHeader | None:
    if data[:4] != b"\x7fELF" or data[4] not in (1, 2) or data[5] not in (1, 2):
        return None
    wide, order = data[4] == 2, "<" if data[5] == 1 else ">"
    (number,) = struct.unpack_from(f"{order}H", data, 18)
    machine = MACHINES.get(number, f"machine {number}")
    bits = 64 if wide else 32
    at = struct.unpack_from(f"{order}{'Q' if wide else 'I'}", data, 32 if wide else 28)[0]
    entry_size, count = struct.unpack_from(f"{order}HH", data, 54 if wide else 42)
    loads, dynamic, interpreter = [], None, ""
    for index in range(min(count, 64)):
        kind, offset, address, length = _program_header(data, at + index * entry_size, wide, order)
        if kind == _PT_LOAD:
            loads.append((address, offset, length))
        elif kind == _PT_INTERP:
            interpreter = data[offset : offset + length].split(b"\0")[0].decode()
        elif kind == _PT_DYNAMIC:
            dynamic = offset, length
    if dynamic is None:
        return ElfHeader(machine, bits, interpreter)
    return ElfHeader(machine, bits, interpreter, *_read_dynamic(data, *dynamic, wide, order, loads))


def _program_header(data: bytes, at: int, wide: bool, order: str) -> tuple[int, int, int, int]:
    """Return kind, offset, address and length in the file."""
    if wide:
        kind, _, offset, address, _, length = struct.unpack_from(f"{order}IIQQQQ", data, at)
    else:
        kind, offset, address, _, length = struct.unpack_from(f"{order}IIIII", data, at)
    return kind, offset, address, length


def _read_dynamic(
    data: bytes, offset: int, length: int, wide: bool, order: str, loads: list[tuple[int, int, int]]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return needed libraries, RPATHs and RUNPATHs."""
    size, form = (16, f"{order}qQ") if wide else (8, f"{order}iI")
    entries = []
    for at in range(offset, offset + length, size):
        tag, value = struct.unpack_from(form, data, at)
        if tag == 0:
            break
        entries.append((tag, value))
    strings = next((value for tag, value in entries if tag == _DT_STRTAB), None)
    if strings is None:
        return (), (), ()
    start = next((file + strings - address for address, file, span in loads if address <= strings < address + span), None)
    if start is None:
        return (), (), ()

    def text(value: int) -> str:
        end = data.index(b"\0", start + value)
        return data[start + value : end].decode()

    def strings_with(wanted: int) -> tuple[str, ...]:
        return tuple(text(value) for tag, value in entries if tag == wanted)

    rpaths, runpaths = (tuple(p for each in strings_with(tag) for p in each.split(":") if p) for tag in (_DT_RPATH, _DT_RUNPATH))
    return strings_with(_DT_NEEDED), () if runpaths else rpaths, runpaths


def _read_head(path: Path, most: int = 8 * _MAX_BYTES) -> bytes:
    """Read the whole file, or the head of a large one: linkers put the tables in front, `patchelf` puts them at the end."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        return file.read(size if size <= 64 * _MAX_BYTES else most)


# -- inspection -----------------------------------------------------------------------------------------------------------


def inspect_executable(path: Path, environ: Mapping[str, str] | None = None) -> Executable:
    environ = os.environ if environ is None else environ
    if path.is_dir():
        return Executable(str(path), "directory", near=_find_program_in(path))
    if not path.exists():
        return Executable(str(path), "none", near=_find_alternative(path))
    executable = os.access(path, os.X_OK) and bool(path.stat().st_mode & 0o111)
    no_exec = bool(os.statvfs(path).f_flag & getattr(os, "ST_NOEXEC", 0))
    try:
        data = _read_head(path)
    except OSError:
        return Executable(str(path), "unreadable", executable)
    if data[:2] == b"#!":
        words = data.split(b"\n", 1)[0][2:].decode(errors="replace").split()
        interpreter, found = _find_interpreter(words)
        return Executable(str(path), "script", executable, interpreter=interpreter, interpreter_found=found, no_exec=no_exec)
    if data[:2] == b"MZ":
        return Executable(str(path), "windows", executable)
    if data[:4] in (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"\xfe\xed\xfa\xcf"):
        return Executable(str(path), "mac", executable)
    elf = read_elf(data)
    if elf is None:
        return Executable(str(path), "unknown", executable)
    found = not elf.interpreter or Path(elf.interpreter).exists()
    return Executable(
        str(path),
        "elf",
        executable,
        elf,
        elf.interpreter,
        found,
        tuple(_missing_libraries(path, elf, environ)) if found else (),
        data=_missing_data_folder(path, elf),
        no_exec=no_exec,
    )


def _find_interpreter(words: list[str]) -> tuple[str, bool]:
    if not words:
        return "", False
    if Path(words[0]).name == "env":
        program = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), "")
        return program, bool(program) and shutil.which(program) is not None
    return words[0], os.access(words[0], os.X_OK)


def _missing_data_folder(path: Path, elf: ElfHeader) -> str:
    """Return the data folder of a Unity player, which is named after it, if that is missing."""
    folder = path.parent / f"{path.name.removesuffix('.x86_64').removesuffix('.x86')}_Data"
    return str(folder) if "UnityPlayer.so" in elf.needed and not folder.is_dir() else ""


def _find_alternative(path: Path) -> str:
    """Return the same path with an extension of Unity players or scripts, if that exists."""
    return next((str(found) for ending in (".x86_64", ".x86", ".sh", ".exe") if (found := Path(f"{path}{ending}")).exists()), "")


def _find_program_in(path: Path) -> str:
    return next((str(found) for ending in ("*.x86_64", "*.x86", "*.sh") for found in sorted(path.glob(ending))), "")


def _missing_libraries(path: Path, elf: ElfHeader, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield libraries that cannot be found, also those of libraries, each with the file that needs it."""
    cache = _read_ldconfig()
    seen: set[str] = set()
    rest = deque([_LoadedFile(path, elf)])
    while rest:  # breadth first, as the loader does: the first file that needs a library decides the search path
        owner = rest.popleft()
        for name in owner.elf.needed:
            if name in seen or len(seen) > _MAX_LIBRARIES:
                continue
            seen.add(name)
            found, read = _find_library(name, owner, environ, cache)
            if found is None:
                yield name if owner.path == path else f"{name} (needed by {owner.path.name})"
            elif read is not None:
                rest.append(_LoadedFile(found, read, owner))


@dataclass(frozen=True)
class _LoadedFile:
    """A program or library, and the file that needs it."""

    path: Path
    elf: ElfHeader
    by: _LoadedFile | None = None

    def expand_origin(self, paths: Sequence[str]) -> list[str]:
        origin = str(self.path.resolve().parent)
        return [each.replace("$ORIGIN", origin).replace("${ORIGIN}", origin) for each in paths]

    def inherited_rpaths(self) -> list[str]:
        """Return its RPATHs and those of the files that load it."""
        above = self.by.inherited_rpaths() if self.by is not None else []
        return [*self.expand_origin(self.elf.rpaths), *above]


def _find_library(
    name: str, owner: _LoadedFile, environ: Mapping[str, str], cache: Mapping[str, tuple[str, ...]]
) -> tuple[Path | None, ElfHeader | None]:
    """Return the path that the loader would use, and its header. Files for other machines are skipped."""
    elf = owner.elf
    searched = [
        *([] if elf.runpaths else owner.inherited_rpaths()),
        *environ.get("LD_LIBRARY_PATH", "").split(":"),
        *owner.expand_origin(elf.runpaths),
    ]
    candidates = [name] if "/" in name else [f"{each}/{name}" for each in searched if each]
    candidates += cache.get(name, ())
    candidates += [f"{each}/{name}" for each in _DIRECTORIES]
    for candidate in map(Path, candidates):
        if candidate.is_file():
            try:
                read = read_elf(_read_head(candidate))
            except OSError:
                continue
            if read is None or (read.machine, read.bits) == (elf.machine, elf.bits):
                return candidate, read
    return None, None


def _read_ldconfig() -> dict[str, tuple[str, ...]]:
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if program is None:
        return {}
    try:
        output = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=5.0, stdin=subprocess.DEVNULL).stdout  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for name, path in re.findall(r"^\s+(\S+) \(.*\) => (\S+)$", output, re.MULTILINE):
        found[name] = (*found.get(name, ()), path)
    return found


# -- check ----------------------------------------------------------------------------------------------------------------


def check_executable(binary: Executable, machine: str | None = None) -> DoctorFinding:
    """`machine`: this processor's architecture; None: detected."""
    here = platform.machine() if machine is None else machine
    here = _MACHINE_ALIASES.get(here.lower(), here)
    path = binary.path
    if binary.kind == "none":
        return failed(
            "game",
            f"{path} does not exist",
            f"Did you mean {binary.near}?" if binary.near else "Is the path right, on every node?",
        )
    if binary.kind == "directory":
        return failed(
            "game", f"{path} is a directory", f"Did you mean {binary.near}?" if binary.near else "Name the program in it."
        )
    if binary.kind == "unreadable":
        return failed("game", f"{path} cannot be read", f"chmod u+rx {path}")
    if binary.kind in ("windows", "mac"):
        system = {"windows": "Windows", "mac": "macOS"}[binary.kind]
        return failed(
            "game", f"{path} is a program for {system}", "Build it for Linux; a Windows program runs by Wine, in a script."
        )
    if not binary.executable:
        return failed("game", f"{path} is not executable", f"chmod +x {path}")
    if binary.no_exec:
        return failed("game", f"{path} is on a file system that is mounted noexec", "Copy it elsewhere, or mount it with exec.")
    if not binary.interpreter_found:
        kind = "interpreter" if binary.kind == "script" else "loader"
        return failed(
            "game", f"{path} needs the {kind} {binary.interpreter or '?'}, which does not exist", _install_hint(binary, here)
        )
    if binary.kind == "script":
        return ok("game", f"{path}, a script for {binary.interpreter}")
    if binary.elf is None:
        return warning("game", f"{path} has an unknown format", "Is it the right file, and complete?")
    if binary.elf.machine not in (here, *_RUNS_ALSO.get(here, ())):
        return failed("game", f"{path} is for {binary.elf.machine}; this processor is {here}", f"Build it for Linux on {here}.")
    if binary.missing:
        shown = ", ".join(binary.missing[:5]) + (", …" if len(binary.missing) > 5 else "")
        return failed(
            "game",
            f"{path} needs missing libraries: {shown}",
            "apt-file search NAME finds the package; or set LD_LIBRARY_PATH.",
        )
    if binary.data:
        return failed("game", f"{path}: its folder {binary.data} does not exist", "Copy the whole build, not the program alone.")
    needed = f", all {len(binary.elf.needed)} libraries found" if binary.elf.needed else ", which needs no libraries"
    return ok("game", f"{path}, for {binary.elf.machine}{needed}")


def _install_hint(binary: Executable, here: str) -> str:
    if binary.elf is not None and binary.elf.machine != here:
        return f"It is a program for {binary.elf.machine}: build it for {here}, or install its libraries (libc6:i386)."
    return f"Install {Path(binary.interpreter).name if binary.interpreter else 'what its first line names'}."
