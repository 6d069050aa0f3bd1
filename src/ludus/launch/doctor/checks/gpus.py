"""Checks GPUs: what the driver reports, and whether PyTorch could use them. PyTorch is not imported."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ludus.launch.doctor.finding import DoctorFinding, failure, format_count, ok, skip, warning

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
class GpuInventory:
    """`devices`: number of device files in /dev. `why`: why nvidia-smi failed."""

    found: tuple[Gpu, ...] = ()
    devices: int = 0
    tool: bool = False
    why: str = ""


def inspect_gpus(dev: Path = Path("/dev")) -> GpuInventory:
    devices = len(list(dev.glob("nvidia[0-9]*")))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return GpuInventory(devices=devices)
    try:
        done = subprocess.run([tool, *_ASK], capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)  # noqa: S603
    except (subprocess.TimeoutExpired, OSError) as error:
        return GpuInventory(devices=devices, tool=True, why=f"nvidia-smi does not answer: {error}")
    if done.returncode:
        text = (done.stdout + done.stderr).strip().splitlines()
        return GpuInventory(devices=devices, tool=True, why=text[0] if text else f"nvidia-smi ended with {done.returncode}")
    return GpuInventory(parse_csv(done.stdout), devices, tool=True)


def parse_csv(text: str) -> tuple[Gpu, ...]:
    """Parse the CSV output of nvidia-smi; invalid lines are skipped."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[1].isdigit() and parts[2].isdigit():
            found.append(Gpu(parts[0], int(parts[1]), int(parts[2]), parts[3]))
    return tuple(found)


def check_gpus(gpus: GpuInventory, torch: str, environ: Mapping[str, str]) -> DoctorFinding:
    """`torch`: its version, whose suffix names the build; "" if it is not installed."""
    if gpus.why:
        remedy = "Is the driver loaded (nvidia-smi), and does it fit the kernel? A restart helps after an update."
        return failure("gpu", gpus.why, remedy)
    if not gpus.found:
        if gpus.devices:
            missing = "nvidia-smi is not installed" if not gpus.tool else "nvidia-smi names none"
            return warning("gpu", f"{format_count(gpus.devices, 'device')} in /dev, and {missing}", "Install the driver's tools.")
        return skip("gpu", "none; the CPU is used")
    names = ", ".join(f"{gpu.name} ({gpu.total_mb - gpu.used_mb:,} of {gpu.total_mb:,} MB free)" for gpu in gpus.found)
    text = f"{format_count(len(gpus.found), 'GPU')}: {names}; driver {gpus.found[0].driver}"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return warning("gpu", f"{text}; hidden by CUDA_VISIBLE_DEVICES={visible!r}", "unset CUDA_VISIBLE_DEVICES")
    if "+cpu" in torch:
        remedy = "pip install --force-reinstall a build of torch with CUDA."
        return warning("gpu", f"{text}; PyTorch {torch} was built without CUDA", remedy)
    if all(gpu.used_mb > _BUSY * gpu.total_mb for gpu in gpus.found):
        remedy = "nvidia-smi shows them; choose another GPU with CUDA_VISIBLE_DEVICES."
        return warning("gpu", f"{text}; other processes use most of the memory", remedy)
    return ok("gpu", text)
