"""Environment variables, files and kernel settings that are known to break or slow down runs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ludus.launch.doctor.finding import DoctorFinding, ok, warning

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_PACKAGES = ("torch", "numpy", "gymnasium", "ray", "ludus", "yaml", "redis", "pydantic", "rich", "typer")
"""Packages that a file of the same name would shadow, besides the standard library."""


@dataclass(frozen=True)
class SystemState:
    """Inspected state. `files`: names in the working directory and those of PYTHONPATH, by directory."""

    environ: Mapping[str, str]
    files: Mapping[str, frozenset[str]]
    cores: int
    core_bytes: int = 0
    huge: int = 0
    overcommit: int = 0


def inspect_system(environ: Mapping[str, str], cores: int, directory: Path | None = None) -> SystemState:
    here = directory or Path.cwd()
    searched = dict.fromkeys([str(here), *(p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p)])
    files = {}
    for path in searched:
        with contextlib.suppress(OSError):
            files[path] = frozenset(entry.name for entry in os.scandir(path))
    limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
    return SystemState(
        environ,
        files,
        cores,
        -1 if limit == resource.RLIM_INFINITY else limit,
        _read_sysctl("nr_hugepages"),
        _read_sysctl("overcommit_memory"),
    )


def _read_sysctl(name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/vm", name).read_text())
    return 0


def check_system(state: SystemState) -> list[DoctorFinding]:
    """Return one finding per issue, or one `ok`."""
    found = [*_check_variables(state), *_check_shadowed_modules(state), *_check_kernel(state)]
    return found or [ok("known troubles", "nothing that is known to cause trouble")]


def _check_variables(state: SystemState) -> Iterator[DoctorFinding]:
    environ = state.environ
    if preload := environ.get("LD_PRELOAD"):
        libraries = preload.replace(":", " ").split()
        gone = [each for each in libraries if "/" in each and not Path(each).exists()]
        why = f"{gone[0]} does not exist: every program prints a warning" if gone else "it is loaded into every game and worker"
        yield warning("LD_PRELOAD", f"{preload}: {why}", "unset LD_PRELOAD (Slurm jobs of Ludus drop it)")
    for name in _THREADS:
        value = environ.get(name, "").split(",")[0]
        if value.isdigit() and int(value) > max(state.cores, 1):
            yield warning(
                name, f"{value} threads on {state.cores} cores, in every worker", f"export {name}={max(1, state.cores)}"
            )
    if home := environ.get("PYTHONHOME"):
        yield warning("PYTHONHOME", f"{home}: workers may find another Python's library", "unset PYTHONHOME")
    if environ.get("PYTHONOPTIMIZE", "0") not in ("", "0"):
        yield warning("PYTHONOPTIMIZE", f"{environ['PYTHONOPTIMIZE']}: assertions are left out", "unset PYTHONOPTIMIZE")
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield warning("CUDA_LAUNCH_BLOCKING", "set: every kernel is waited for, which is slow", "unset CUDA_LAUNCH_BLOCKING")
    if environ.get("SDL_VIDEODRIVER") == "x11" and not environ.get("DISPLAY"):
        yield warning("SDL_VIDEODRIVER", "x11, and DISPLAY is not set: pygame finds no screen", "unset SDL_VIDEODRIVER")


def _check_shadowed_modules(state: SystemState) -> Iterator[DoctorFinding]:
    """Find modules in the working directory, which `python -m` searches first, and in PYTHONPATH."""
    for directory, names in state.files.items():
        hidden = sorted(name for name in names if _shadows_module(directory, name, names))
        if hidden:
            own = [name for name in hidden if name.removesuffix(".py") in sys.stdlib_module_names]
            what = "a module of Python itself" if own else "a package"
            yield warning(
                "shadowed modules", f"{directory} has {', '.join(hidden[:5])}, which hides {what} of that name", "Rename it."
            )


def _shadows_module(directory: str, name: str, names: frozenset[str]) -> bool:
    stem = name.removesuffix(".py")
    if name.endswith(".py"):
        return stem in sys.stdlib_module_names or stem in _PACKAGES
    if name not in _PACKAGES or not Path(directory, name, "__init__.py").exists():
        return False
    spec = importlib.util.find_spec(name)  # it may be the package itself, found through PYTHONPATH
    return spec is None or spec.origin is None or Path(spec.origin).parent.resolve() != Path(directory, name).resolve()


def _check_kernel(state: SystemState) -> Iterator[DoctorFinding]:
    if state.core_bytes:
        most = "without limit" if state.core_bytes < 0 else f"up to {state.core_bytes >> 20} MB"
        yield warning(
            "core files", f"{most}: a game that crashes often fills the disk", "ulimit -c 0, unless you need them for debugging"
        )
    if state.overcommit == 2:
        yield warning(
            "vm.overcommit_memory",
            "2: each forked worker counts as much memory as its parent has",
            "sysctl -w vm.overcommit_memory=0",
        )
    if state.huge:
        yield warning("huge pages", f"{state.huge} are reserved, and Ludus does not use them", "sysctl -w vm.nr_hugepages=0")


# -- addresses of Ray -----------------------------------------------------------------------------------------------------


def check_ray_address(named: str, variable: str, answers: bool) -> DoctorFinding:
    if answers:
        return ok(variable, f"{named} answers: `ludus train` joins that Ray")
    return warning(variable, f"{named} does not answer: `ludus train` would try to join it, and fail", f"unset {variable}")


def ray_addresses(environ: Mapping[str, str]) -> Sequence[tuple[str, str]]:
    """Return the variables that name the address of a Ray cluster, with their values."""
    return [
        (name, environ[name])
        for name in ("RAY_ADDRESS", "ip_head")
        if environ.get(name) and environ[name] not in ("local", "auto")
    ]
