"""Checks environment variables that are known to break or slow down runs: preloads, threads, Ray addresses, proxies."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ludus.launch.doctor.finding import DoctorFinding, ok, warning

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_UNWANTED = {
    "PYTHONHOME": "workers may find another Python's library",
    "PYTHONOPTIMIZE": "assertions are left out",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for, which is slow",
}
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "grpc_proxy", "GRPC_PROXY")
_RAY_ADDRESSES = ("RAY_ADDRESS", "ip_head")
_CONNECT_S = 1.0


def check_variables(environ: Mapping[str, str], cores: int) -> Iterator[DoctorFinding]:
    """Yield one warning per variable with a known problem."""
    if preload := environ.get("LD_PRELOAD"):
        gone = [each for each in preload.replace(":", " ").split() if "/" in each and not Path(each).exists()]
        why = f"{gone[0]} does not exist: every program prints a warning" if gone else "it is loaded into every game and worker"
        yield warning("LD_PRELOAD", f"{preload}: {why}", "unset LD_PRELOAD (Slurm jobs of Ludus drop it)")
    for name in _THREADS:
        value = environ.get(name, "").split(",")[0]
        if value.isdigit() and int(value) > max(cores, 1):
            yield warning(name, f"{value} threads on {cores} cores, in every worker", f"export {name}={max(1, cores)}")
    for name, why in _UNWANTED.items():
        if environ.get(name, "0") not in ("", "0"):
            yield warning(name, f"{environ[name]}: {why}", f"unset {name}")


def ray_addresses(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name the address of a Ray cluster, with their values."""
    return {name: environ[name] for name in _RAY_ADDRESSES if environ.get(name) and environ[name] not in ("local", "auto")}


def check_ray_address(variable: str, address: str) -> DoctorFinding:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]") or address, int(port) if host else 6379), _CONNECT_S).close()
    except (OSError, ValueError, OverflowError):
        text = f"{address} does not answer: `ludus train` would try to join it, and fail"
        return warning(variable, text, f"unset {variable}")
    return ok(variable, f"{address} answers: `ludus train` joins that Ray")


def check_proxies(environ: Mapping[str, str], nodes: Sequence[str] = ()) -> list[DoctorFinding]:
    """Check that no_proxy excludes loopback and the nodes, which a proxy cannot reach. Returns [] without a proxy."""
    variables = [name for name in _PROXIES if environ.get(name)]
    if not variables:
        return []
    excluded = [part.strip() for part in (environ.get("no_proxy") or environ.get("NO_PROXY") or "").split(",")]
    missing = [host for host in ("localhost", "127.0.0.1", *nodes) if not any(_excludes(part, host) for part in excluded)]
    if not missing:
        return [ok("proxy", f"{', '.join(variables)} set; no_proxy excludes this machine and the nodes")]
    url = environ[variables[0]]
    proxy = urlsplit(url if "://" in url else f"//{url}").hostname or "?"  # without user and password
    hosts = ",".join(dict.fromkeys(["localhost", "127.0.0.1", *missing]))
    text = f"{', '.join(variables)} set ({proxy}), and no_proxy does not exclude {', '.join(missing)}"
    return [warning("proxy", text, f'export no_proxy="{hosts},$no_proxy"')]


def _excludes(part: str, host: str) -> bool:
    """Return whether an entry of no_proxy (`*`, a host, a domain or a network) covers a host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(part, strict=False)
    name = part.lstrip("*.")
    return part == "*" or (bool(name) and (host == name or host.endswith(f".{name}")))
