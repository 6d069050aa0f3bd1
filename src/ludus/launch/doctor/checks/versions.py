"""Which Python, Ludus, PyTorch and Ray there are, and whether all nodes have the same. Nothing of it is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Mapping

import ludus
from ludus.launch.doctor.finding import Finding, failed, ok, skipped

LEAST_PYTHON = (3, 11)
LEAST = {"torch": (2, 6), "ray": (2, 52)}
"""As in pyproject.toml."""

_INSTALL = {"torch": "pip install torch", "ray": "pip install 'ludus[cluster]'"}
_EQUAL = ("ludus", "ray", "torch", "python")
"""What must not differ between the nodes of a run: weights, messages and checkpoints go from one to another."""


def look_versions() -> dict[str, str]:
    """Empty: it is not installed."""
    return {"python": platform.python_version(), "ludus": ludus.__version__, "torch": _version("torch"), "ray": _version("ray")}


def _version(package: str) -> str:
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return found if importlib.util.find_spec(package) is not None else ""


def judge_versions(
    versions: Mapping[str, str], *, ray: bool, launcher: bool = False, executable: str = sys.executable
) -> list[Finding]:
    """`ray`: whether the run needs it. `launcher`: this machine only starts the run, and needs neither Ray nor PyTorch for it."""
    python = versions["python"]
    found = [ok("python", f"{python} ({executable})")]
    if _numbers(python) < LEAST_PYTHON:
        found = [failed("python", f"{python} ({executable})", f"Ludus needs {_dotted(LEAST_PYTHON)} or newer.")]
    found.append(ok("ludus", versions["ludus"]))
    for package, least in LEAST.items():
        version = versions.get(package, "")
        if launcher:
            found.append(skipped(package, f"{version or 'not installed'}; starting a run does not need it"))
        elif not version and package == "ray" and not ray:
            found.append(skipped("ray", "not installed; a run on one machine does not need it", _INSTALL["ray"]))
        elif not version:
            found.append(failed(package, "not installed", _INSTALL[package]))
        elif _numbers(version) < least:
            found.append(failed(package, f"{version} is too old", f"pip install -U '{package}>={_dotted(least)}'"))
        else:
            found.append(ok(package, version))
    return found


def judge_agreement(nodes: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """One finding for each package. Python may differ in its last number, PyTorch in its build: nothing that is exchanged depends on it."""
    found = []
    for package in _EQUAL:
        have = {node: _told(package, versions.get(package, "")) for node, versions in nodes.items() if package in versions}
        different = sorted(set(have.values()))
        check = f"{package} on all nodes"
        if len(different) <= 1:
            found.append(ok(check, f"{different[0] or 'not installed' if different else 'nobody answered'}"))
            continue
        by = "; ".join(f"{version or 'none'}: {', '.join(n for n in have if have[n] == version)}" for version in different)
        if package == "torch" and len({version.partition("+")[0] for version in different}) == 1:
            found.append(ok(check, f"one version, several builds ({by})"))  # CPU on some nodes, CUDA on others
            continue
        found.append(failed(check, by, f"Install one version of {package} on all of them."))
    return found


def _told(package: str, version: str) -> str:
    return _dotted(_numbers(version)) if package == "python" and version else version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
