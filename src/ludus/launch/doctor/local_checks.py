"""Runs all checks of one machine in parallel threads with a deadline: a check that hangs costs one failed finding."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ludus.display import headless
from ludus.errors import LudusError
from ludus.launch.doctor.checks import (
    directories,
    env_smoke_test,
    executable,
    gpus,
    graphics,
    known_issues,
    limits,
    network,
    services,
    token_file,
    versions,
)
from ludus.launch.doctor.finding import DoctorFinding, failed, redact_secrets, skipped
from ludus.launch.doctor.requirements import ResourceNeeds
from ludus.launch.ray_role import block_size
from ludus.process.cgroups import Cgroups, find_cgroups, read_memory
from ludus.process.job_env import PORTS

CHECK_S = 20.0
"""Time limit of all checks except the environment's smoke test."""

_CONNECT_S = 1.0
Check = Callable[[], list[DoctorFinding]]


@dataclass(frozen=True)
class DoctorRequest:
    """The run to check for. `workers`: per machine; None: one per core. `launcher`: this machine only submits the run.

    `ray`: the run uses Ray. `shared`: job records must be on a file system shared by all nodes. `nodes`: addresses of the nodes.
    """

    workers: int | None = None
    env: str = ""
    game: str = ""
    memory: str = field(default="", repr=False)
    store: str = ""
    local_dir: str = "runs"
    ports: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    ray: bool = False
    shared: bool = False
    launcher: bool = False
    quick: bool = False
    key: str = field(default="", repr=False)
    """HMAC key for the comparison of tokens: the same for all machines, random for each run of the doctor."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(data: Mapping[str, Any]) -> DoctorRequest:
        """Raises TypeError. Unknown fields, as of a newer version, are ignored."""
        known = {name: value for name, value in data.items() if name in DoctorRequest.__dataclass_fields__}
        return DoctorRequest(**{**known, "ports": tuple(known.get("ports", ())), "nodes": tuple(known.get("nodes", ()))})

    @property
    def secrets(self) -> list[str]:
        return services.find_secrets(os.environ, self.memory, self.store)


@dataclass(frozen=True)
class DoctorReport:
    """`token`: fingerprint of the token of learners and actors; "" if there is none, or without a key."""

    findings: tuple[DoctorFinding, ...]
    versions: Mapping[str, str]
    token: str = ""


def run_local_checks(request: DoctorRequest) -> DoctorReport:
    """Run all checks. Does not raise: a check that fails to run is a finding too."""
    installed = versions.inspect_versions()
    environ = dict(os.environ)
    groups = find_cgroups()
    cores = limits.inspect_cores(groups)
    tried = (
        CheckThread("environment", lambda: env_smoke_test.run_smoke_test(request.env))
        if request.env and not request.quick
        else None
    )
    slow = {name: CheckThread(name, look) for name, look in _main_checks(request, installed, environ, cores.whole).items()}
    last = {name: CheckThread(name, look) for name, look in _late_checks(request, environ, cores.whole).items()}
    token = CheckThread("token", lambda: token_file.fingerprint(environ, request.key) if request.key else "")
    findings = versions.check_versions(installed, ray=request.ray, launcher=request.launcher)
    game = tried.result(env_smoke_test.SMOKE_TEST_S + 2 * CHECK_S) if tried is not None else None
    needs = ResourceNeeds(
        cores.whole if request.workers is None else request.workers, cores.whole, request.ray, *_measured_needs(game)
    )
    if not request.launcher:
        shared = CheckThread(
            "shared memory", lambda: limits.check_all_shared_memory(environ, needs)
        )  # LUDUS_SHM may name any file system
        first, rest = _check_limits(needs, cores, groups, environ)
        findings += [*first, *shared.findings(time.monotonic() + CHECK_S), *rest]
    end = time.monotonic() + CHECK_S
    findings += [finding for look in slow.values() for finding in look.findings(end)]
    if game is not None:
        findings.append(game if isinstance(game, DoctorFinding) else env_smoke_test.check_smoke_test(game))
    findings += [finding for look in last.values() for finding in look.findings(end)]
    if (proxy := network.check_proxies(environ, request.nodes)) is not None:
        findings.append(proxy)
    secrets = request.secrets
    fingerprint = token.result(end - time.monotonic())
    redacted = tuple(redact_secrets(finding, secrets) for finding in findings)
    return DoctorReport(redacted, installed, fingerprint if isinstance(fingerprint, str) else "")


def _check_limits(
    needs: ResourceNeeds, cores: limits.CpuLimits, groups: Cgroups, environ: Mapping[str, str]
) -> tuple[list[DoctorFinding], list[DoctorFinding]]:
    """Check kernel limits, which cannot hang. The findings about shared memory belong between the two lists."""
    threads = limits.inspect_threads(groups)
    return [
        limits.check_cores(cores, needs, environ),
        limits.check_memory(read_memory(groups), needs),
    ], [
        limits.check_files(limits.inspect_files(), needs),
        limits.check_threads(threads, needs),
        limits.check_maps(threads, needs),
    ]


def _main_checks(
    request: DoctorRequest, installed: Mapping[str, str], environ: Mapping[str, str], cores: int
) -> dict[str, Check]:
    """Return the checks that use other programs, servers or file systems, in the order of the output."""
    draws = bool(request.game) or "mujoco" in request.env.lower()
    checks: dict[str, Check] = {}
    if not request.launcher:
        checks["gpu"] = lambda: [gpus.check_gpus(gpus.inspect_gpus(), installed["torch"], environ)]
        for what in ("runs", "temp"):
            checks[f"disk ({what})"] = lambda what=what: [_check_directory(what, request)]  # type: ignore[misc]
    checks["records of jobs"] = lambda: [_check_directory("state", request)]
    if not request.launcher:
        ports = (*request.ports, *network.job_ports(environ))
        block = block_size(cores) if request.ray else PORTS
        checks["ports"] = lambda: [network.check_ports(network.inspect_ports(ports, block))]
    for variable, address in known_issues.ray_addresses(environ):
        checks[variable] = lambda v=variable, a=address: [known_issues.check_ray_address(a, v, _is_reachable(a))]  # type: ignore[misc]
    if request.memory:
        checks["memory server"] = lambda: [services.check_redis(services.inspect_redis(request.memory))]
    if request.store:
        checks["store"] = lambda: [services.check_store(services.inspect_store(request.store))]
    if request.game:
        checks["game"] = lambda: [executable.check_executable(executable.inspect_executable(Path(request.game).expanduser()))]
    if not request.launcher:
        checks["screen"] = lambda: graphics.check_choice(environ, xvfb=headless.find_xvfb() is not None)
        checks["graphics"] = lambda: graphics.check_graphics(graphics.inspect_graphics(), needed=draws, window=bool(request.game))
    if request.quick:
        for name in ("memory server", "store", "graphics", "gpu"):  # they depend on other programs and servers
            if name in checks:
                checks[name] = lambda name=name: [skipped(name, "left out by --quick")]  # type: ignore[misc]
    return checks


def _late_checks(request: DoctorRequest, environ: Mapping[str, str], cores: int) -> dict[str, Check]:
    """Return the checks of small files, which are shown last."""
    checks: dict[str, Check] = {"token": lambda: token_file.check_tokens(token_file.inspect_tokens(environ), environ)}
    checks["known troubles"] = lambda: known_issues.check_system(known_issues.inspect_system(environ, cores))
    return checks


def _check_directory(what: str, request: DoctorRequest) -> DoctorFinding:
    status = directories.inspect_directory(directories.directory_of(what, request.local_dir))
    return directories.check_directory(what, status, shared=request.shared)


def _measured_needs(game: Any) -> tuple[int, int]:
    return (game.threads, game.memory) if isinstance(game, env_smoke_test.SmokeTest) else (0, 0)


def _is_reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]") or address, int(port) if host else 6379), _CONNECT_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


# -- threads --------------------------------------------------------------------------------------------------------------


class CheckThread:
    """Runs a check in a daemon thread. An exception becomes a finding, and so does a time-out."""

    def __init__(self, name: str, look: Callable[[], Any]) -> None:
        self._name, self._check = name, look
        self._result: Any = None
        self._started_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"doctor-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._check()
        except LudusError as error:
            self._result = failed(self._name, error.message, error.hint or "See the message.")
        except Exception as error:  # one broken check must not prevent the others
            self._result = failed(self._name, f"the check failed: {type(error).__name__}: {error}", "Please report this.")

    def result(self, within_s: float) -> Any:
        self._thread.join(max(0.0, within_s))
        if self._result is None:
            waited = time.monotonic() - self._started_at
            return failed(self._name, f"no answer within {waited:.0f} s", "Check whether its file system or server hangs.")
        return self._result

    def findings(self, end: float) -> list[DoctorFinding]:
        result = self.result(end - time.monotonic())
        return [result] if isinstance(result, DoctorFinding) else list(result)


def this_machine() -> str:
    return socket.gethostname() or sys.platform
