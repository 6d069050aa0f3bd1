"""All that is looked at on one machine, side by side and under a deadline: one thing that hangs is one line, not the end."""

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
from ludus.launch.doctor.finding import Finding, failed, skipped, without_secrets
from ludus.launch.doctor.requirements import Needs
from ludus.launch.ray_role import block_size
from ludus.process.cgroups import Cgroups, find_cgroups, read_memory
from ludus.process.job_env import PORTS

LOOK_S = 20.0
"""For anything but an environment."""

_REACH_S = 1.0
Look = Callable[[], list[Finding]]


@dataclass(frozen=True)
class Request:
    """What a run will need. `workers`: on each machine; None: one for each core. `launcher`: this machine only starts the run.

    `ray`: the run has nodes that Ray joins. `shared`: the records of jobs must be the same on all nodes. `nodes`: the others.
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
    """With it the tokens of several machines are compared; the same for all, another for each look."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(data: Mapping[str, Any]) -> Request:
        """Raises TypeError. What a newer Ludus asks beyond this is left out."""
        known = {name: value for name, value in data.items() if name in Request.__dataclass_fields__}
        return Request(**{**known, "ports": tuple(known.get("ports", ())), "nodes": tuple(known.get("nodes", ()))})

    @property
    def secrets(self) -> list[str]:
        return services.secrets_of(os.environ, self.memory, self.store)


@dataclass(frozen=True)
class Examination:
    """`token`: the fingerprint of the one by which roles know each other; empty: there is none, or nobody asked."""

    findings: tuple[Finding, ...]
    versions: Mapping[str, str]
    token: str = ""


def examine(request: Request) -> Examination:
    """Never raises: what could not be looked at is a finding too."""
    found = versions.look_versions()
    environ = dict(os.environ)
    groups = find_cgroups()
    cores = limits.look_cores(groups)
    tried = Pending("environment", lambda: env_smoke_test.look_trial(request.env)) if request.env and not request.quick else None
    slow = {name: Pending(name, look) for name, look in _slow(request, found, environ, cores.whole).items()}
    last = {name: Pending(name, look) for name, look in _last(request, environ, cores.whole).items()}
    token = Pending("token", lambda: token_file.fingerprint(environ, request.key) if request.key else "")
    findings = versions.judge_versions(found, ray=request.ray, launcher=request.launcher)
    game = tried.result(env_smoke_test.TRIAL_S + 2 * LOOK_S) if tried is not None else None
    needs = Needs(cores.whole if request.workers is None else request.workers, cores.whole, request.ray, *_measured(game))
    if not request.launcher:
        shared = Pending("shared memory", lambda: limits.shared_findings(environ, needs))  # LUDUS_SHM may name any file system
        first, rest = _limits(needs, cores, groups, environ)
        findings += [*first, *shared.findings(time.monotonic() + LOOK_S), *rest]
    end = time.monotonic() + LOOK_S
    findings += [finding for look in slow.values() for finding in look.findings(end)]
    if game is not None:
        findings.append(game if isinstance(game, Finding) else env_smoke_test.judge_trial(game))
    findings += [finding for look in last.values() for finding in look.findings(end)]
    if (proxy := network.judge_proxies(environ, request.nodes)) is not None:
        findings.append(proxy)
    secrets = request.secrets
    told = token.result(end - time.monotonic())
    return Examination(
        tuple(without_secrets(finding, secrets) for finding in findings), found, told if isinstance(told, str) else ""
    )


def _limits(
    needs: Needs, cores: limits.Cores, groups: Cgroups, environ: Mapping[str, str]
) -> tuple[list[Finding], list[Finding]]:
    """What the kernel says, which does not hang; shared memory is shown between them."""
    threads = limits.look_threads(groups)
    return [
        limits.judge_cores(cores, needs, environ),
        limits.judge_memory(read_memory(groups), needs),
    ], [
        limits.judge_files(limits.look_files(), needs),
        limits.judge_threads(threads, needs),
        limits.judge_maps(threads, needs),
    ]


def _slow(request: Request, found: Mapping[str, str], environ: Mapping[str, str], cores: int) -> dict[str, Look]:
    """What asks other programs, or file systems that may hang; in the order in which it is shown."""
    draws = bool(request.game) or "mujoco" in request.env.lower()
    looks: dict[str, Look] = {}
    if not request.launcher:
        looks["gpu"] = lambda: [gpus.judge_gpus(gpus.look_gpus(), found["torch"], environ)]
        for what in ("runs", "temp"):
            looks[f"disk ({what})"] = lambda what=what: [_place(what, request)]  # type: ignore[misc]
    looks["records of jobs"] = lambda: [_place("state", request)]
    if not request.launcher:
        ports = (*request.ports, *network.ports_of(environ))
        block = block_size(cores) if request.ray else PORTS
        looks["ports"] = lambda: [network.judge_ports(network.look_ports(ports, block))]
    for variable, address in known_issues.ray_addresses(environ):
        looks[variable] = lambda v=variable, a=address: [known_issues.judge_ray_address(a, v, _answers(a))]  # type: ignore[misc]
    if request.memory:
        looks["memory server"] = lambda: [services.judge_redis(services.look_redis(request.memory))]
    if request.store:
        looks["store"] = lambda: [services.judge_store(services.look_store(request.store))]
    if request.game:
        looks["game"] = lambda: [executable.judge_binary(executable.look_binary(Path(request.game).expanduser()))]
    if not request.launcher:
        looks["screen"] = lambda: graphics.judge_choice(environ, xvfb=headless.find_xvfb() is not None)
        looks["graphics"] = lambda: graphics.judge_graphics(graphics.look_graphics(), needed=draws, window=bool(request.game))
    if request.quick:
        for name in ("memory server", "store", "graphics", "gpu"):  # they ask others
            if name in looks:
                looks[name] = lambda name=name: [skipped(name, "left out by --quick")]  # type: ignore[misc]
    return looks


def _last(request: Request, environ: Mapping[str, str], cores: int) -> dict[str, Look]:
    """Of files that anybody may have put on a file system that hangs: they are looked at quickly, or not at all."""
    looks: dict[str, Look] = {"token": lambda: token_file.judge_tokens(token_file.look_tokens(environ), environ)}
    looks["known troubles"] = lambda: known_issues.judge_scene(known_issues.look_scene(environ, cores))
    return looks


def _place(what: str, request: Request) -> Finding:
    place = directories.look_place(directories.directory_of(what, request.local_dir))
    return directories.judge_place(what, place, shared=request.shared)


def _measured(game: Any) -> tuple[int, int]:
    return (game.threads, game.memory) if isinstance(game, env_smoke_test.Trial) else (0, 0)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]") or address, int(port) if host else 6379), _REACH_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


# -- under a deadline -----------------------------------------------------------------------------------------------------


class Pending:
    """A look in a thread that nobody waits for too long; whatever it raises is a finding."""

    def __init__(self, name: str, look: Callable[[], Any]) -> None:
        self._name, self._look = name, look
        self._found: Any = None
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"doctor-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._look()
        except LudusError as error:
            self._found = failed(self._name, error.message, error.hint or "See the message.")
        except Exception as error:  # a doctor that falls ill must still say so, and go on
            self._found = failed(self._name, f"it could not be looked at: {type(error).__name__}: {error}", "Please report this.")

    def result(self, within_s: float) -> Any:
        self._thread.join(max(0.0, within_s))
        if self._found is None:
            waited = time.monotonic() - self._begun
            return failed(self._name, f"no answer within {waited:.0f} s", "Is it on a file system or a server that hangs?")
        return self._found

    def findings(self, end: float) -> list[Finding]:
        found = self.result(end - time.monotonic())
        return [found] if isinstance(found, Finding) else list(found)


def this_machine() -> str:
    return socket.gethostname() or sys.platform
