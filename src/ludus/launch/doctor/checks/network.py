"""Ports, the clock, and proxies."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ludus.errors import LudusError
from ludus.launch.doctor.finding import Finding, failed, ok, skipped, warning
from ludus.process.job_env import FIRST_PORT, LAST_PORT, PORTS, JobEnv, find_free_ports, is_port_free

SKEW_S, SKEW_FAILED_S = 1.0, 60.0
"""Clocks that differ by more: logs are out of order and leases end early; tokens and S3's signatures are refused at some minutes."""


@dataclass(frozen=True)
class Ports:
    """`asked`: those that were named, and whether each is free. `block`: the first of `size` free ones in a row; None: there are none."""

    asked: Mapping[int, bool]
    block: int | None
    size: int = PORTS
    ephemeral: tuple[int, int] | None = None


def look_ports(asked: Sequence[int], size: int = PORTS) -> Ports:
    block = None
    with contextlib.suppress(LudusError):
        block = find_free_ports(f"doctor-{os.getpid()}", size)
    ephemeral = None
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        ephemeral = low, high
    return Ports({port: is_port_free(port) for port in asked}, block, size, ephemeral)


def ports_of(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Those that the job which this process belongs to will listen on here."""
    surroundings = JobEnv.from_environ(environ)
    if surroundings is None or surroundings.node or not surroundings.port:
        return ()
    return tuple(range(surroundings.port, surroundings.port + PORTS))


def judge_ports(ports: Ports) -> Finding:
    taken = sorted(port for port, free in ports.asked.items() if not free)
    if taken:
        return failed(
            "ports",
            f"somebody listens on {', '.join(map(str, taken))}",
            f"`ss -ltnp sport = :{taken[0]}` shows who; end it, or choose another port.",
        )
    if ports.block is None:
        return failed(
            "ports",
            f"no {ports.size} ports in a row are free between {FIRST_PORT} and {LAST_PORT}",
            "`ss -ltn` shows who listens.",
        )
    said = (
        f"{', '.join(map(str, sorted(ports.asked)))} free"
        if ports.asked
        else f"a block of {ports.size} is free between {FIRST_PORT} and {LAST_PORT}"
    )
    if ports.ephemeral is not None and ports.ephemeral[0] < LAST_PORT:
        low, high = ports.ephemeral
        return warning(
            "ports", f"{said}; outgoing connections use {low} to {high}, so one may be in the way of a listener",
            "sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
        )  # fmt: skip
    return ok("ports", said)


@dataclass(frozen=True)
class Tick:
    """One question for the time: when it was asked and answered here, and what the other clock said. Seconds since the epoch."""

    asked: float
    answered: float
    told: float

    @property
    def trip(self) -> float:
        return self.answered - self.asked

    @property
    def skew(self) -> float:
        """How far the other clock is ahead, known to half of the round trip."""
        return self.told - (self.asked + self.answered) / 2


def judge_clock(ticks: Sequence[Tick]) -> Finding:
    """By the quickest of them."""
    if not ticks:
        return skipped("clock", "nobody told the time")
    best = min(ticks, key=lambda tick: tick.trip)
    sure = best.trip / 2
    apart = f"{abs(best.skew):.3f} s {'ahead of' if best.skew > 0 else 'behind'} this machine, give or take {sure:.3f} s"
    remedy = "Have all machines ask one time server: systemctl enable --now systemd-timesyncd (or chrony)."
    if abs(best.skew) - sure > SKEW_FAILED_S:
        return failed("clock", apart, remedy)
    if abs(best.skew) - sure > SKEW_S:
        return warning("clock", apart, remedy)
    return ok("clock", apart)


PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "grpc_proxy", "GRPC_PROXY")


def judge_proxies(environ: Mapping[str, str], nodes: Sequence[str] = ()) -> Finding | None:
    """A proxy cannot reach this machine's loopback, nor the other nodes; and some clients ask it all the same."""
    set_ = [name for name in PROXIES if environ.get(name)]
    if not set_:
        return None
    parts = [part.strip() for part in (environ.get("no_proxy") or environ.get("NO_PROXY") or "").split(",")]
    spared = {part.lstrip("*.") for part in parts}
    missing = [host for host in ("localhost", "127.0.0.1", *nodes) if host not in spared and not _covered(host, spared)]
    if not missing or "*" in parts:
        return ok("proxy", f"{', '.join(set_)} set; this machine and the nodes are spared (no_proxy)")
    hosts = ",".join(dict.fromkeys(["localhost", "127.0.0.1", *missing]))
    return warning(
        "proxy",
        f"{', '.join(set_)} set ({_host(environ[set_[0]])}), and not spared: {', '.join(missing)}",
        f'export no_proxy="{hosts},$no_proxy"',
    )


def _covered(host: str, spared: set[str]) -> bool:
    with contextlib.suppress(OSError):
        number = int.from_bytes(socket.inet_aton(host), "big")
        for part in spared:
            network, slash, bits = part.partition("/")
            with contextlib.suppress(OSError, ValueError):
                if slash and not (number ^ int.from_bytes(socket.inet_aton(network), "big")) >> (32 - int(bits)):
                    return True
    return any(part and host.endswith(f".{part}") for part in spared)


def _host(url: str) -> str:
    """Of a proxy; it may have a password before it."""
    with contextlib.suppress(ValueError):
        return urlsplit(url if "://" in url else f"//{url}").hostname or "?"
    return "?"
