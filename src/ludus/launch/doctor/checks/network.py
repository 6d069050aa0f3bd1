"""Checks ports, clocks and proxies."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ludus.errors import LudusError
from ludus.launch.doctor.finding import DoctorFinding, failed, ok, skipped, warning
from ludus.process.job_env import FIRST_PORT, LAST_PORT, PORTS, JobEnv, find_free_ports, is_port_free

SKEW_S, SKEW_FAILED_S = 1.0, 60.0
"""Clock differences above the first disorder logs and shorten leases; above the second, tokens and S3 signatures are soon rejected."""


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
    taken = sorted(port for port, free in ports.asked.items() if not free)
    if taken:
        return failed(
            "ports",
            f"in use: {', '.join(map(str, taken))}",
            f"`ss -ltnp sport = :{taken[0]}` shows the process; stop it, or choose another port.",
        )
    if ports.block is None:
        return failed(
            "ports",
            f"no {ports.size} ports in a row are free between {FIRST_PORT} and {LAST_PORT}",
            "`ss -ltn` shows the ports in use.",
        )
    text = (
        f"{', '.join(map(str, sorted(ports.asked)))} free"
        if ports.asked
        else f"a block of {ports.size} is free between {FIRST_PORT} and {LAST_PORT}"
    )
    if ports.ephemeral is not None and ports.ephemeral[0] < LAST_PORT:
        low, high = ports.ephemeral
        return warning(
            "ports", f"{text}; outgoing connections use {low} to {high}, which may take the port of a listener",
            "sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
        )  # fmt: skip
    return ok("ports", text)


@dataclass(frozen=True)
class ClockSample:
    """One reading of another machine's clock: local times of request and answer, and its time. Seconds since the epoch."""

    asked: float
    answered: float
    told: float

    @property
    def trip(self) -> float:
        return self.answered - self.asked

    @property
    def skew(self) -> float:
        """How far the other clock is ahead, accurate to half of the round trip."""
        return self.told - (self.asked + self.answered) / 2


def check_clock(samples: Sequence[ClockSample]) -> DoctorFinding:
    """Evaluate the sample with the shortest round trip."""
    if not samples:
        return skipped("clock", "the time was not reported")
    best = min(samples, key=lambda sample: sample.trip)
    sure = best.trip / 2
    apart = f"{abs(best.skew):.3f} s {'ahead of' if best.skew > 0 else 'behind'} this machine, give or take {sure:.3f} s"
    remedy = "Synchronize all machines with one time server: systemctl enable --now systemd-timesyncd (or chrony)."
    if abs(best.skew) - sure > SKEW_FAILED_S:
        return failed("clock", apart, remedy)
    if abs(best.skew) - sure > SKEW_S:
        return warning("clock", apart, remedy)
    return ok("clock", apart)


PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "grpc_proxy", "GRPC_PROXY")


def check_proxies(environ: Mapping[str, str], nodes: Sequence[str] = ()) -> DoctorFinding | None:
    """Check that no_proxy excludes loopback and the nodes, which a proxy cannot reach. None: there is no proxy."""
    variables = [name for name in PROXIES if environ.get(name)]
    if not variables:
        return None
    parts = [part.strip() for part in (environ.get("no_proxy") or environ.get("NO_PROXY") or "").split(",")]
    excluded = {part.lstrip("*.") for part in parts}
    missing = [host for host in ("localhost", "127.0.0.1", *nodes) if host not in excluded and not _is_excluded(host, excluded)]
    if not missing or "*" in parts:
        return ok("proxy", f"{', '.join(variables)} set; no_proxy excludes this machine and the nodes")
    hosts = ",".join(dict.fromkeys(["localhost", "127.0.0.1", *missing]))
    return warning(
        "proxy",
        f"{', '.join(variables)} set ({_host(environ[variables[0]])}), and no_proxy does not exclude {', '.join(missing)}",
        f'export no_proxy="{hosts},$no_proxy"',
    )


def _is_excluded(host: str, excluded: set[str]) -> bool:
    with contextlib.suppress(OSError):
        number = int.from_bytes(socket.inet_aton(host), "big")
        for part in excluded:
            network, slash, bits = part.partition("/")
            with contextlib.suppress(OSError, ValueError):
                if slash and not (number ^ int.from_bytes(socket.inet_aton(network), "big")) >> (32 - int(bits)):
                    return True
    return any(part and host.endswith(f".{part}") for part in excluded)


def _host(url: str) -> str:
    """Return the host of a proxy URL, without user and password."""
    with contextlib.suppress(ValueError):
        return urlsplit(url if "://" in url else f"//{url}").hostname or "?"
    return "?"
