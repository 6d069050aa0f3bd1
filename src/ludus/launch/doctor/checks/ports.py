"""Checks that the ports of a run are free."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ludus.errors import LudusError
from ludus.launch.doctor.finding import DoctorFinding, failure, ok, warning
from ludus.process.job_env import FIRST_PORT, LAST_PORT, PORTS, JobEnv, find_free_ports, is_port_free


@dataclass(frozen=True)
class PortStatus:
    """`asked`: whether each requested port is free. `block`: first of `size` consecutive free ports; None: there are none."""

    asked: Mapping[int, bool]
    block: int | None
    size: int = PORTS
    ephemeral: tuple[int, int] | None = None


def inspect_ports(asked: Sequence[int], size: int = PORTS) -> PortStatus:
    block = None
    with contextlib.suppress(LudusError):
        block = find_free_ports(f"doctor-{os.getpid()}", size)
    ephemeral = None
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        ephemeral = low, high
    return PortStatus({port: is_port_free(port) for port in asked}, block, size, ephemeral)


def job_ports(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the ports that this process's job will use on this machine."""
    job = JobEnv.from_environ(environ)
    if job is None or job.node or not job.port:
        return ()
    return tuple(range(job.port, job.port + PORTS))


def check_ports(ports: PortStatus) -> DoctorFinding:
    between = f"between {FIRST_PORT} and {LAST_PORT}"
    if taken := sorted(port for port, free in ports.asked.items() if not free):
        fix = f"`ss -ltnp sport = :{taken[0]}` shows the process; stop it, or choose another port."
        return failure("ports", f"in use: {', '.join(map(str, taken))}", fix)
    if ports.block is None:
        return failure("ports", f"no {ports.size} ports in a row are free {between}", "`ss -ltn` shows the ports in use.")
    asked = ", ".join(map(str, sorted(ports.asked)))
    text = f"{asked} free" if asked else f"a block of {ports.size} is free {between}"
    if ports.ephemeral is not None and ports.ephemeral[0] < LAST_PORT:
        low, high = ports.ephemeral
        text += f"; outgoing connections use {low} to {high}, which may take the port of a listener"
        return warning("ports", text, "sysctl -w net.ipv4.ip_local_port_range='32768 60999'")
    return ok("ports", text)
