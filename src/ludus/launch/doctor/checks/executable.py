"""A game's program: there, executable, for this processor, and with all its libraries. It is read, never run.

`ldd` would run it; the libraries are found here as the loader finds them: by the file's own tables, and `ldconfig -p`.
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

from ludus.launch.doctor.finding import Finding, failed, ok, warning

MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le"}
_NAMES = {"amd64": "x86_64", "arm64": "aarch64", "i686": "i386", "i586": "i386"}
_RUNS_ALSO = {"x86_64": ("i386",), "aarch64": ("arm",)}
_DIRECTORIES = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib")
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_RPATH, _DT_RUNPATH = 1, 5, 10, 15, 29
_MOST_BYTES, _MOST_LIBRARIES = 1 << 20, 500


@dataclass(frozen=True)
class Elf:
    """What its header and tables say. `bits`: 32 or 64."""

    machine: str
    bits: int
    interpreter: str = ""
    needed: tuple[str, ...] = ()
    rpaths: tuple[str, ...] = ()
    """Searched for whatever is loaded below it too; none where it has `runpaths`, which are for its own libraries alone."""
    runpaths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Binary:
    """`kind`: elf, script, windows, mac, unknown, or why there is nothing: none, directory, unreadable."""

    path: str
    kind: str
    executable: bool = False
    elf: Elf | None = None
    interpreter: str = ""
    """Of a script, or the loader that the file names; empty: it needs none."""
    interpreter_found: bool = True
    missing: tuple[str, ...] = ()
    near: str = ""
    """What was perhaps meant."""
    data: str = ""
    """A folder that belongs to it, and is not beside it."""
    no_exec: bool = False
    """Its file system is mounted so that nothing on it can be run."""


# -- reading --------------------------------------------------------------------------------------------------------------


def read_elf(data: bytes) -> Elf | None:
    """None: it is none, or it is damaged. Only what lies within the bytes is looked at. Pure."""
    try:
        return _read_elf(data)
    except (struct.error, ValueError, IndexError, OverflowError):  # ValueError: also what is no text
        return None


def _read_elf(data: bytes) -> Elf | None:
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
        return Elf(machine, bits, interpreter)
    return Elf(machine, bits, interpreter, *_dynamic(data, *dynamic, wide, order, loads))


def _program_header(data: bytes, at: int, wide: bool, order: str) -> tuple[int, int, int, int]:
    """Its kind, offset, address, and length in the file."""
    if wide:
        kind, _, offset, address, _, length = struct.unpack_from(f"{order}IIQQQQ", data, at)
    else:
        kind, offset, address, _, length = struct.unpack_from(f"{order}IIIII", data, at)
    return kind, offset, address, length


def _dynamic(
    data: bytes, offset: int, length: int, wide: bool, order: str, loads: list[tuple[int, int, int]]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """What it needs, and its two kinds of paths."""
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

    def all_of(wanted: int) -> tuple[str, ...]:
        return tuple(text(value) for tag, value in entries if tag == wanted)

    rpaths, runpaths = (tuple(p for each in all_of(tag) for p in each.split(":") if p) for tag in (_DT_RPATH, _DT_RUNPATH))
    return all_of(_DT_NEEDED), () if runpaths else rpaths, runpaths


def _head(path: Path, most: int = 8 * _MOST_BYTES) -> bytes:
    """Enough for the tables, which most linkers put in front; those of `patchelf` are at the end: then the whole, within reason."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        return file.read(size if size <= 64 * _MOST_BYTES else most)


# -- looking --------------------------------------------------------------------------------------------------------------


def look_binary(path: Path, environ: Mapping[str, str] | None = None) -> Binary:
    environ = os.environ if environ is None else environ
    if path.is_dir():
        return Binary(str(path), "directory", near=_inside(path))
    if not path.exists():
        return Binary(str(path), "none", near=_beside(path))
    executable = os.access(path, os.X_OK) and bool(path.stat().st_mode & 0o111)
    no_exec = bool(os.statvfs(path).f_flag & getattr(os, "ST_NOEXEC", 0))
    try:
        data = _head(path)
    except OSError:
        return Binary(str(path), "unreadable", executable)
    if data[:2] == b"#!":
        words = data.split(b"\n", 1)[0][2:].decode(errors="replace").split()
        interpreter, found = _script(words)
        return Binary(str(path), "script", executable, interpreter=interpreter, interpreter_found=found, no_exec=no_exec)
    if data[:2] == b"MZ":
        return Binary(str(path), "windows", executable)
    if data[:4] in (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"\xfe\xed\xfa\xcf"):
        return Binary(str(path), "mac", executable)
    elf = read_elf(data)
    if elf is None:
        return Binary(str(path), "unknown", executable)
    found = not elf.interpreter or Path(elf.interpreter).exists()
    return Binary(
        str(path),
        "elf",
        executable,
        elf,
        elf.interpreter,
        found,
        tuple(_missing(path, elf, environ)) if found else (),
        data=_data(path, elf),
        no_exec=no_exec,
    )


def _script(words: list[str]) -> tuple[str, bool]:
    if not words:
        return "", False
    if Path(words[0]).name == "env":
        program = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), "")
        return program, bool(program) and shutil.which(program) is not None
    return words[0], os.access(words[0], os.X_OK)


def _data(path: Path, elf: Elf) -> str:
    """Unity's players have a folder with everything but the engine, called after them."""
    folder = path.parent / f"{path.name.removesuffix('.x86_64').removesuffix('.x86')}_Data"
    return str(folder) if "UnityPlayer.so" in elf.needed and not folder.is_dir() else ""


def _beside(path: Path) -> str:
    """Unity's players are named without their ending."""
    return next((str(found) for ending in (".x86_64", ".x86", ".sh", ".exe") if (found := Path(f"{path}{ending}")).exists()), "")


def _inside(path: Path) -> str:
    return next((str(found) for ending in ("*.x86_64", "*.x86", "*.sh") for found in sorted(path.glob(ending))), "")


def _missing(path: Path, elf: Elf, environ: Mapping[str, str]) -> Iterator[str]:
    """Libraries that are nowhere, each with who wants it; those of libraries too."""
    cache = _cache()
    seen: set[str] = set()
    rest = deque([_Loaded(path, elf)])
    while rest:  # whom the loader asks for a library decides about where it is looked for: in its order, level by level
        owner = rest.popleft()
        for name in owner.elf.needed:
            if name in seen or len(seen) > _MOST_LIBRARIES:
                continue
            seen.add(name)
            found, read = _find(name, owner, environ, cache)
            if found is None:
                yield name if owner.path == path else f"{name} (wanted by {owner.path.name})"
            elif read is not None:
                rest.append(_Loaded(found, read, owner))


@dataclass(frozen=True)
class _Loaded:
    """A program or a library, and which one wanted it."""

    path: Path
    elf: Elf
    by: _Loaded | None = None

    def expanded(self, paths: Sequence[str]) -> list[str]:
        origin = str(self.path.resolve().parent)
        return [each.replace("$ORIGIN", origin).replace("${ORIGIN}", origin) for each in paths]

    def inherited(self) -> list[str]:
        """Its RPATH, and those of all above it."""
        above = self.by.inherited() if self.by is not None else []
        return [*self.expanded(self.elf.rpaths), *above]


def _find(
    name: str, owner: _Loaded, environ: Mapping[str, str], cache: Mapping[str, tuple[str, ...]]
) -> tuple[Path | None, Elf | None]:
    """Where the loader would find it, for this kind of program; it passes over those of others."""
    elf = owner.elf
    searched = [
        *([] if elf.runpaths else owner.inherited()),
        *environ.get("LD_LIBRARY_PATH", "").split(":"),
        *owner.expanded(elf.runpaths),
    ]
    candidates = [name] if "/" in name else [f"{each}/{name}" for each in searched if each]
    candidates += cache.get(name, ())
    candidates += [f"{each}/{name}" for each in _DIRECTORIES]
    for candidate in map(Path, candidates):
        if candidate.is_file():
            try:
                read = read_elf(_head(candidate))
            except OSError:
                continue
            if read is None or (read.machine, read.bits) == (elf.machine, elf.bits):
                return candidate, read
    return None, None


def _cache() -> dict[str, tuple[str, ...]]:
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if program is None:
        return {}
    try:
        said = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=5.0, stdin=subprocess.DEVNULL).stdout  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for name, path in re.findall(r"^\s+(\S+) \(.*\) => (\S+)$", said, re.MULTILINE):
        found[name] = (*found.get(name, ()), path)
    return found


# -- judging --------------------------------------------------------------------------------------------------------------


def judge_binary(binary: Binary, machine: str | None = None) -> Finding:
    """`machine`: of this processor."""
    here = platform.machine() if machine is None else machine
    here = _NAMES.get(here.lower(), here)
    path = binary.path
    if binary.kind == "none":
        return failed(
            "game", f"{path} is not there", f"Did you mean {binary.near}?" if binary.near else "Is the path right, on every node?"
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
        return failed("game", f"{path} needs the {kind} {binary.interpreter or '?'}, which is not there", _install(binary, here))
    if binary.kind == "script":
        return ok("game", f"{path}, a script for {binary.interpreter}")
    if binary.elf is None:
        return warning("game", f"{path} is no program that is known here", "Is it the right file, and whole?")
    if binary.elf.machine not in (here, *_RUNS_ALSO.get(here, ())):
        return failed("game", f"{path} is for {binary.elf.machine}; this processor is {here}", f"Build it for Linux on {here}.")
    if binary.missing:
        shown = ", ".join(binary.missing[:5]) + (", …" if len(binary.missing) > 5 else "")
        return failed(
            "game",
            f"{path} needs libraries that are not there: {shown}",
            "apt-file search NAME says which package has it; or LD_LIBRARY_PATH.",
        )
    if binary.data:
        return failed("game", f"{path}: its folder {binary.data} is not there", "Copy the whole build, not the program alone.")
    needed = f", all {len(binary.elf.needed)} libraries found" if binary.elf.needed else ", which needs no libraries"
    return ok("game", f"{path}, for {binary.elf.machine}{needed}")


def _install(binary: Binary, here: str) -> str:
    if binary.elf is not None and binary.elf.machine != here:
        return f"It is a program for {binary.elf.machine}: build it for {here}, or install its libraries (libc6:i386)."
    return f"Install {Path(binary.interpreter).name if binary.interpreter else 'what its first line names'}."
