"""Things in the environment that are known to spoil runs, and that nobody thinks of. Each costs a look, and has cost others days."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ludus.launch.doctor.finding import Finding, ok, warning

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_SHADOWED = ("torch", "numpy", "gymnasium", "ray", "ludus", "yaml", "redis", "pydantic", "rich", "typer")
"""Packages of others that a file of the same name would hide; the modules of Python itself are asked for by name."""


@dataclass(frozen=True)
class Scene:
    """What is looked at. `files`: names in the working directory and in those of PYTHONPATH, by directory."""

    environ: Mapping[str, str]
    files: Mapping[str, frozenset[str]]
    cores: int
    core_bytes: int = 0
    huge: int = 0
    overcommit: int = 0


def look_scene(environ: Mapping[str, str], cores: int, directory: Path | None = None) -> Scene:
    here = directory or Path.cwd()
    searched = dict.fromkeys([str(here), *(p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p)])
    files = {}
    for place in searched:
        with contextlib.suppress(OSError):
            files[place] = frozenset(entry.name for entry in os.scandir(place))
    limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
    return Scene(
        environ,
        files,
        cores,
        -1 if limit == resource.RLIM_INFINITY else limit,
        _number("nr_hugepages"),
        _number("overcommit_memory"),
    )


def _number(name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/vm", name).read_text())
    return 0


def judge_scene(scene: Scene) -> list[Finding]:
    """One finding for each trouble; one that says so where there is none."""
    found = [*_variables(scene), *_shadows(scene), *_kernel(scene)]
    return found or [ok("known troubles", "nothing that is known to cause trouble")]


def _variables(scene: Scene) -> Iterator[Finding]:
    environ = scene.environ
    if preload := environ.get("LD_PRELOAD"):
        libraries = preload.replace(":", " ").split()
        gone = [each for each in libraries if "/" in each and not Path(each).exists()]
        why = f"{gone[0]} is not there: every program complains" if gone else "it is loaded into every game and worker"
        yield warning("LD_PRELOAD", f"{preload}: {why}", "unset LD_PRELOAD (ours drop it on Slurm)")
    for name in _THREADS:
        value = environ.get(name, "").split(",")[0]
        if value.isdigit() and int(value) > max(scene.cores, 1):
            yield warning(
                name, f"{value} threads on {scene.cores} cores, in every worker", f"export {name}={max(1, scene.cores)}"
            )
    if home := environ.get("PYTHONHOME"):
        yield warning("PYTHONHOME", f"{home}: workers may find another Python's library", "unset PYTHONHOME")
    if environ.get("PYTHONOPTIMIZE", "0") not in ("", "0"):
        yield warning("PYTHONOPTIMIZE", f"{environ['PYTHONOPTIMIZE']}: assertions are left out", "unset PYTHONOPTIMIZE")
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield warning("CUDA_LAUNCH_BLOCKING", "set: every kernel is waited for, which is slow", "unset CUDA_LAUNCH_BLOCKING")
    if environ.get("SDL_VIDEODRIVER") == "x11" and not environ.get("DISPLAY"):
        yield warning("SDL_VIDEODRIVER", "x11, and DISPLAY is not set: pygame finds no screen", "unset SDL_VIDEODRIVER")


def _shadows(scene: Scene) -> Iterator[Finding]:
    """`python -m`, and a script's own directory, come before everything else that is searched."""
    for directory, names in scene.files.items():
        hidden = sorted(name for name in names if _hides(directory, name, names))
        if hidden:
            own = [name for name in hidden if name.removesuffix(".py") in sys.stdlib_module_names]
            what = "a module of Python itself" if own else "a package"
            yield warning(
                "shadowed modules", f"{directory} has {', '.join(hidden[:5])}, which hides {what} of that name", "Rename it."
            )


def _hides(directory: str, name: str, names: frozenset[str]) -> bool:
    stem = name.removesuffix(".py")
    if name.endswith(".py"):
        return stem in sys.stdlib_module_names or stem in _SHADOWED
    if name not in _SHADOWED or not Path(directory, name, "__init__.py").exists():
        return False
    spec = importlib.util.find_spec(name)  # the package itself, where PYTHONPATH leads to it, hides nothing
    return spec is None or spec.origin is None or Path(spec.origin).parent.resolve() != Path(directory, name).resolve()


def _kernel(scene: Scene) -> Iterator[Finding]:
    if scene.core_bytes:
        most = "without limit" if scene.core_bytes < 0 else f"up to {scene.core_bytes >> 20} MB"
        yield warning(
            "core files", f"{most}: a game that crashes often fills the disk", "ulimit -c 0, unless you want to look into them"
        )
    if scene.overcommit == 2:
        yield warning(
            "vm.overcommit_memory",
            "2: each forked worker counts as much memory as its parent has",
            "sysctl -w vm.overcommit_memory=0",
        )
    if scene.huge:
        yield warning("huge pages", f"{scene.huge} are set aside, and nothing of ours uses them", "sysctl -w vm.nr_hugepages=0")


# -- a Ray that is no more ------------------------------------------------------------------------------------------------


def judge_ray_address(named: str, variable: str, answers: bool) -> Finding:
    if answers:
        return ok(variable, f"{named} answers: `ludus train` joins that Ray")
    return warning(variable, f"{named} does not answer: `ludus train` would try to join it, and fail", f"unset {variable}")


def ray_addresses(environ: Mapping[str, str]) -> Sequence[tuple[str, str]]:
    """Variable and address, of those that name a machine."""
    return [
        (name, environ[name])
        for name in ("RAY_ADDRESS", "ip_head")
        if environ.get(name) and environ[name] not in ("local", "auto")
    ]
