"""Checks the versions of Python, Ludus, PyTorch and Ray, and that all nodes have the same. The packages are not imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Mapping

import ludus
from ludus.launch.doctor.finding import DoctorFinding, failure, ok, skip

MIN_PYTHON = (3, 11)
MIN_VERSIONS = {"torch": (2, 6), "ray": (2, 52)}
"""As in pyproject.toml."""

_INSTALL = {"torch": "pip install torch", "ray": "pip install 'ludus[cluster]'"}
_EQUAL = ("ludus", "ray", "torch", "python")
"""Packages that must not differ between the nodes of a run, which exchange weights, messages and checkpoints."""


def inspect_versions() -> dict[str, str]:
    """Return package → version; "" if it is not installed."""
    return {"python": platform.python_version(), "ludus": ludus.__version__, "torch": _version("torch"), "ray": _version("ray")}


def _version(package: str) -> str:
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return found if importlib.util.find_spec(package) is not None else ""


def check_versions(
    versions: Mapping[str, str], *, ray: bool, launcher: bool = False, executable: str = sys.executable
) -> list[DoctorFinding]:
    """`ray`: whether the run needs it. `launcher`: this machine only submits the run, which needs neither Ray nor PyTorch."""
    python = versions["python"]
    found = [ok("python", f"{python} ({executable})")]
    if _numbers(python) < MIN_PYTHON:
        found = [failure("python", f"{python} ({executable})", f"Ludus needs {_join_numbers(MIN_PYTHON)} or newer.")]
    found.append(ok("ludus", versions["ludus"]))
    for package, least in MIN_VERSIONS.items():
        version = versions.get(package, "")
        if launcher:
            found.append(skip(package, f"{version or 'not installed'}; starting a run does not need it"))
        elif not version and package == "ray" and not ray:
            found.append(skip("ray", "not installed; a run on one machine does not need it", _INSTALL["ray"]))
        elif not version:
            found.append(failure(package, "not installed", _INSTALL[package]))
        elif _numbers(version) < least:
            found.append(failure(package, f"{version} is too old", f"pip install -U '{package}>={_join_numbers(least)}'"))
        else:
            found.append(ok(package, version))
    return found


def check_agreement(nodes: Mapping[str, Mapping[str, str]]) -> list[DoctorFinding]:
    """Return one finding per package. Patch versions of Python and builds of PyTorch may differ."""
    found = []
    for package in _EQUAL:
        have = {node: _comparable(package, versions.get(package, "")) for node, versions in nodes.items() if package in versions}
        different = sorted(set(have.values()))
        check = f"{package} on all nodes"
        if len(different) <= 1:
            found.append(ok(check, f"{different[0] or 'not installed' if different else 'no node answered'}"))
            continue
        by = "; ".join(f"{version or 'none'}: {', '.join(n for n in have if have[n] == version)}" for version in different)
        if package == "torch" and len({version.partition("+")[0] for version in different}) == 1:
            found.append(ok(check, f"one version, several builds ({by})"))  # CPU on some nodes, CUDA on others
            continue
        found.append(failure(check, by, f"Install one version of {package} on all of them."))
    return found


def _comparable(package: str, version: str) -> str:
    return _join_numbers(_numbers(version)) if package == "python" and version else version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _join_numbers(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
