"""Runs all checks of one machine in parallel threads with a deadline: a check that hangs costs one failed finding."""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ludus.display import private_screen
from ludus.errors import LudusError
from ludus.launch.doctor.checks import (
    directories,
    env_smoke_test,
    env_variables,
    executable,
    gpus,
    graphics,
    limits,
    ports,
    redis,
    shadowed_modules,
    shared_memory,
    store,
    token_file,
    versions,
)
from ludus.launch.doctor.finding import DoctorFinding, failure, find_secrets, redact_secrets, skip
from ludus.launch.doctor.requirements import ResourceNeeds
from ludus.launch.ray_role import block_size
from ludus.process.cgroups import Cgroups, find_cgroups, read_memory
from ludus.process.job_env import PORTS
from ludus.process.screen_choice import SCREEN

CHECK_S = 20.0
"""Time limit of all checks except the environment's smoke test."""

Check = Callable[[], list[DoctorFinding]]


@dataclass(frozen=True)
class DoctorRequest:
    """The run to check for. `workers`: per machine; None: one per core. `launcher`: this machine only submits the run.

    `ray`: the run uses Ray. `shared`: job records must be on a file system shared by all nodes. `nodes`: addresses of the nodes.
    """

    workers: int | None = None
    env: str = ""
    game: str = ""
    display: str = ""
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
        return find_secrets(os.environ, self.memory, self.store)


@dataclass(frozen=True)
class DoctorReport:
    """`token`: fingerprint of the token of learners and actors; "" if there is none, or without a key."""

    findings: tuple[DoctorFinding, ...]
    versions: Mapping[str, str]
    token: str = ""


def run_local_checks(request: DoctorRequest) -> DoctorReport:
    """Run all checks. Does not raise: a check that fails to run is a finding too."""
    installed, environ, groups = versions.inspect_versions(), _environment(request), find_cgroups()
    cores = limits.inspect_cores(groups)
    smoke_test = None
    if request.env and not request.quick:
        smoke_test = CheckThread("environment", lambda: env_smoke_test.run_smoke_test(request.env, environ))
    threads = [CheckThread(name, check) for name, check in _checks(request, installed, environ, cores.whole).items()]
    token = CheckThread("token", lambda: token_file.fingerprint(environ, request.key) if request.key else "")
    findings = versions.check_versions(installed, ray=request.ray, launcher=request.launcher)
    needs = ResourceNeeds(cores.whole if request.workers is None else request.workers, cores.whole, request.ray)
    if smoke_test is not None:
        game = smoke_test.result(env_smoke_test.SMOKE_TEST_S + 2 * CHECK_S)
        if isinstance(game, env_smoke_test.SmokeTest):
            needs = replace(needs, game_threads=game.threads, game_bytes=game.memory)
            game = env_smoke_test.check_smoke_test(game)
        findings.append(game)
    if not request.launcher:
        findings += _check_limits(needs, cores, groups, environ)
        # In a thread, because LUDUS_SHM may name a file system that hangs.
        threads.insert(0, CheckThread("shared memory", lambda: shared_memory.check_shared_memory(environ, needs)))
    end = time.monotonic() + CHECK_S
    findings += [finding for thread in threads for finding in thread.findings(end)]
    secrets = request.secrets
    fingerprint = token.result(end - time.monotonic())
    redacted = tuple(redact_secrets(finding, secrets) for finding in findings)
    return DoctorReport(redacted, installed, fingerprint if isinstance(fingerprint, str) else "")


def _environment(request: DoctorRequest) -> dict[str, str]:
    """The variables that the run would have here: LUDUS_SCREEN overrides the display of the request."""
    return {**({SCREEN: request.display} if request.display else {}), **os.environ}


def _check_limits(
    needs: ResourceNeeds, cores: limits.CpuLimits, groups: Cgroups, environ: Mapping[str, str]
) -> list[DoctorFinding]:
    """Check kernel limits, which cannot hang."""
    threads = limits.inspect_threads(groups)
    return [
        limits.check_cores(cores, needs, environ),
        limits.check_memory(read_memory(groups), needs),
        limits.check_files(limits.inspect_files(), needs),
        limits.check_threads(threads, needs),
        limits.check_maps(threads, needs),
    ]


def _checks(request: DoctorRequest, installed: Mapping[str, str], environ: Mapping[str, str], cores: int) -> dict[str, Check]:
    """Return the checks that use other programs, servers or file systems, in the order of the output."""
    checks: dict[str, Check] = {}
    if not request.launcher:
        checks["gpu"] = lambda: [gpus.check_gpus(gpus.inspect_gpus(), installed["torch"], environ)]
    for what in ("state",) if request.launcher else ("runs", "temp", "state"):
        checks[f"disk ({what})"] = functools.partial(_check_directory, what, request)
    if not request.launcher:
        asked = (*request.ports, *ports.job_ports(environ))
        block = block_size(cores) if request.ray else PORTS
        checks["ports"] = lambda: [ports.check_ports(ports.inspect_ports(asked, block))]
    for variable, address in env_variables.ray_addresses(environ).items():
        checks[variable] = functools.partial(_check_ray_address, variable, address)
    if request.memory:
        checks["memory server"] = lambda: [redis.check_redis(request.memory)]
    if request.store:
        checks["store"] = lambda: [store.check_store(request.store)]
    if request.game:
        checks["game"] = lambda: [executable.check_executable(Path(request.game).expanduser())]
    if not request.launcher:
        draws = bool(request.game) or "mujoco" in request.env.lower()
        checks["display"] = lambda: graphics.check_choice(environ, xvfb=private_screen.find_xvfb() is not None)
        checks["graphics"] = lambda: graphics.check_graphics(graphics.inspect_graphics(), needed=draws, window=bool(request.game))
    if request.quick:
        for name in checks.keys() & {"memory server", "store", "graphics", "gpu"}:  # they depend on other programs and servers
            checks[name] = functools.partial(list, [skip(name, "left out by --quick")])
    checks["token"] = lambda: token_file.check_tokens(token_file.inspect_tokens(environ), environ)
    checks["environment variables"] = lambda: [
        *env_variables.check_variables(environ, cores),
        *env_variables.check_proxies(environ, request.nodes),
    ]
    checks["shadowed modules"] = lambda: list(shadowed_modules.check_shadowed_modules(environ))
    return checks


def _check_directory(what: str, request: DoctorRequest) -> list[DoctorFinding]:
    status = directories.inspect_directory(directories.directory_of(what, request.local_dir))
    return [directories.check_directory(what, status, shared=request.shared)]


def _check_ray_address(variable: str, address: str) -> list[DoctorFinding]:
    return [env_variables.check_ray_address(variable, address)]


# -- threads --------------------------------------------------------------------------------------------------------------


class CheckThread:
    """Runs a check in a daemon thread. An exception becomes a finding, and so does a time-out."""

    def __init__(self, name: str, check: Callable[[], Any]) -> None:
        self._name, self._check = name, check
        self._result: Any = None
        self._started_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"doctor-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._check()
        except LudusError as error:
            self._result = failure(self._name, error.message, error.hint or "See the message.")
        except Exception as error:  # one broken check must not prevent the others
            self._result = failure(self._name, f"the check failed: {type(error).__name__}: {error}", "Please report this.")

    def result(self, within_s: float) -> Any:
        self._thread.join(max(0.0, within_s))
        if self._result is None:
            waited = time.monotonic() - self._started_at
            return failure(self._name, f"no answer within {waited:.0f} s", "Check whether its file system or server hangs.")
        return self._result

    def findings(self, end: float) -> list[DoctorFinding]:
        result = self.result(end - time.monotonic())
        return [result] if isinstance(result, DoctorFinding) else list(result)


def this_machine() -> str:
    return socket.gethostname() or sys.platform
