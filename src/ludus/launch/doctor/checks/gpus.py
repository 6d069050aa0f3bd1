"""Accelerators: what the driver says, and whether PyTorch could use them. PyTorch itself is not imported."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ludus.launch.doctor.finding import Finding, failed, ok, several, skipped, warning

_ASK = ("--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits")
_TIMEOUT_S = 5.0
_BUSY = 0.5


@dataclass(frozen=True)
class Gpu:
    name: str
    total_mb: int
    used_mb: int
    driver: str


@dataclass(frozen=True)
class Gpus:
    """`devices`: files of the driver in /dev. `why`: the driver's tool is there and does not work."""

    found: tuple[Gpu, ...] = ()
    devices: int = 0
    tool: bool = False
    why: str = ""


def look_gpus(dev: Path = Path("/dev")) -> Gpus:
    devices = len(list(dev.glob("nvidia[0-9]*")))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Gpus(devices=devices)
    try:
        done = subprocess.run([tool, *_ASK], capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)  # noqa: S603
    except subprocess.TimeoutExpired:
        return Gpus(devices=devices, tool=True, why=f"nvidia-smi does not answer within {_TIMEOUT_S:g} s")
    except OSError as error:
        return Gpus(devices=devices, tool=True, why=f"nvidia-smi cannot be run: {error.strerror}")
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        return Gpus(devices=devices, tool=True, why=said[0] if said else f"nvidia-smi ended with {done.returncode}")
    return Gpus(read(done.stdout), devices, tool=True)


def read(text: str) -> tuple[Gpu, ...]:
    """What nvidia-smi says as CSV. A line that is not understood is left out. Pure."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[1].isdigit() and parts[2].isdigit():
            found.append(Gpu(parts[0], int(parts[1]), int(parts[2]), parts[3]))
    return tuple(found)


def judge_gpus(gpus: Gpus, torch: str, environ: Mapping[str, str]) -> Finding:
    """`torch`: its version, whose ending says for what it was built; empty when it is not installed."""
    if gpus.why:
        return failed(
            "gpu", gpus.why, "Is the driver loaded (nvidia-smi), and does it fit the kernel? A restart helps after an update."
        )
    if not gpus.found:
        if gpus.devices:
            missing = "nvidia-smi is not installed" if not gpus.tool else "nvidia-smi names none"
            return warning("gpu", f"{several(gpus.devices, 'device')} in /dev, and {missing}", "Install the driver's tools.")
        return skipped("gpu", "none; the CPU is used")
    names = ", ".join(f"{gpu.name} ({gpu.total_mb - gpu.used_mb:,} of {gpu.total_mb:,} MB free)" for gpu in gpus.found)
    said = f"{several(len(gpus.found), 'GPU')}: {names}; driver {gpus.found[0].driver}"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return warning("gpu", f"{said}; hidden by CUDA_VISIBLE_DEVICES={visible!r}", "unset CUDA_VISIBLE_DEVICES")
    if "+cpu" in torch:
        return warning(
            "gpu", f"{said}; PyTorch {torch} was built without CUDA", "pip install --force-reinstall a build of torch with CUDA."
        )
    if all(gpu.used_mb > _BUSY * gpu.total_mb for gpu in gpus.found):
        return warning(
            "gpu", f"{said}; others use most of the memory", "nvidia-smi shows who; choose another with CUDA_VISIBLE_DEVICES."
        )
    return ok("gpu", said)
