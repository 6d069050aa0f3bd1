"""Shared role of `ludus learner` and `ludus actor`: start, replace, show and stop a role on this machine."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.errors import Damaged, LudusError, UsageError

if TYPE_CHECKING:
    from ludus.launch.hostfile import Hostfile, MachineRole
    from ludus.launch.job import Job, JobStatus
    from ludus.launch.local import LocalOrchestrator
    from ludus.launch.local_address import LocalAddress
    from ludus.launch.roles import Rendezvous

PORT = 9610
"""Same as `ludus.launch.roles.PORT`, which is imported only by commands that need it."""

LOG_DIR = "LOG_DIR"
_REMOVED_VARIABLES = ("LD_PRELOAD", "RAY_ADDRESS", "ip_head")
"""Environment variables that would misdirect the processes of a run."""

_BEGIN_S = 5.0
_POLL_S = 0.1
_LOCK_S = 600.0
"""Longer than the previous role takes to save its checkpoint and the new one to start."""

IpList = Annotated[
    Path,
    typer.Option(
        "--iplist",
        metavar="FILE",
        help="List of machines, one `ip user port slots` per line, or YAML; the first runs the learner.",
    ),
]
Node = Annotated[int | None, typer.Option("--node", min=0, metavar="N", help="Index of this machine in the list, from 0.")]
Port = Annotated[
    int,
    typer.Option(
        "--port", min=1024, max=65533, help="Port of the run, the same on all machines; the next two ports are used as well."
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File (mode 0600) with the token of the run, the same on all machines. [LUDUS_TOKEN_FILE]",
    ),
]
LogDir = Annotated[Path | None, typer.Option("--log-dir", metavar="DIR", help="Directory for logs. Default: ./logs. [LOG_DIR]")]
RunList = Annotated[
    Path | None, typer.Option("--iplist", metavar="FILE", help="List of machines of the run, as given to `start`.")
]
OnlyPort = Annotated[int | None, typer.Option("--port", metavar="PORT", help="Port of the run.")]
All = Annotated[bool, typer.Option("--all", help="Stop all runs of this machine.")]
Replace = Annotated[bool, typer.Option("--replace", help="Stop another training of this machine that uses the port.")]
AtOnce = Annotated[bool, typer.Option("--at-once", help="Kill at once, without a checkpoint.")]
Machines = Annotated[
    bool, typer.Option("--nodes", help="List the machines that are or were in the Ray cluster; takes some seconds.")
]


def say(sentence: str) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {sentence}", flush=True)


# -- preparation -------------------------------------------------------------------------------------------


def clean_environment(environ: MutableMapping[str, str]) -> list[str]:
    """Remove variables that would misdirect the processes of a run; returns a notice for each."""
    return [
        f"{name}={environ.pop(name)} is removed for the processes of this run" for name in _REMOVED_VARIABLES if environ.get(name)
    ]


def make_rendezvous(here: LocalAddress, port: int, token: Path | None, logs: Path | None) -> Rendezvous:
    from ludus.launch.roles import Rendezvous, check_family, token_path

    check_family(here.head, here.address)
    base = logs or Path(os.environ.get(LOG_DIR) or "logs")
    return Rendezvous(here, token_path(token, os.environ), base.expanduser().absolute(), port)


def show_list(listed: Hostfile, here: LocalAddress, port: int) -> None:
    """Print the list of machines in the format of comparable launch scripts."""
    from ludus.launch.local_address import INTERFACE

    say("parse ip list")
    for index, node in enumerate(listed.nodes):
        marker = "  <- this machine" if index == here.node else ""
        print(f"{index}: {node.host} {node.user or '-'} {node.port} {node.slots}{marker}", flush=True)
    say(f"node_list: {','.join(f'{node.host}:{node.slots}' for node in listed.nodes)}")
    say(f"node_num: {len(listed.nodes)}")
    if os.environ.get(INTERFACE):
        say(f"{INTERFACE}: {os.environ[INTERFACE]}")
    say(f"head: {here.head}:{port}; this machine: {here.address}")


# -- selecting runs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSelector:
    """Selects runs by the address and port of their head, as in `Rendezvous.address`; None matches any."""

    head: str | None = None
    port: int | None = None

    def matches(self, place: str) -> bool:
        host, _, port = place.rpartition(":")
        return (self.head is None or host == self.head) and (self.port is None or port == str(self.port))

    @property
    def suffix(self) -> str:
        """Suffix for messages about these runs; empty for all runs."""
        named = [f"{name} {value}" for name, value in (("head", self.head), ("port", self.port)) if value is not None]
        return f" for {' and '.join(named)}" if named else ""


def select_runs(iplist: Path | None, node: int | None, port: int | None) -> RunSelector:
    """The runs that `start` creates with the same options. Raises UsageError and ConfigError for a bad list, as `start` does."""
    if iplist is None:
        if node is not None:
            raise UsageError(f"--node {node} is the index of a machine in a list.", "Add the list: --iplist FILE.")
        return RunSelector(None, port)
    from ludus.launch.hostfile import load_hostfile
    from ludus.launch.local_address import find_local_address

    return RunSelector(find_local_address(load_hostfile(iplist), os.environ, node, required=False).head, port)


# -- starting and ending --------------------------------------------------------------------------------------------------


def find_roles(
    orchestrator: LocalOrchestrator, role: MachineRole, runs: RunSelector = RunSelector(), *, over: bool = False
) -> list[JobStatus]:
    """The running roles of a kind that were started on this machine, oldest first; with `over`, also those that have ended."""
    from ludus.launch.job_dir import JobDirectory, is_this_machine

    found = []
    for status in orchestrator.list():
        if status.name == role and status.place and runs.matches(status.place) and (over or not status.over):
            with suppress(LudusError, OSError):  # removed meanwhile
                if is_this_machine(JobDirectory(orchestrator.directory / status.id).read().machine):
                    found.append(status)
    return found


def start_role(
    job: Job, orchestrator: LocalOrchestrator, role: MachineRole, *, replaces: bool = False, lock_s: float = _LOCK_S
) -> JobStatus:
    """Start a role, after stopping the previous one of the same run on this machine. Raises UsageError, WorkerFailed.

    Concurrent starts wait for each other. `replaces`: also stop a role of another run at the same place.
    """
    with start_lock(orchestrator, role, job.place, lock_s):
        previous = [status for status in find_roles(orchestrator, role) if status.place == job.place]
        if not replaces:
            for status in previous:
                _check_same_run(job, orchestrator, status)
        say(f"stop {role}" if previous else f"stop {role}: none of this run is running here")
        for status in previous:
            stop_role(orchestrator, status)
        if role == "learner":
            _check_ports(job)
        say(f"start {role}")
        job_id = orchestrator.submit(job)
        deadline = time.monotonic() + _BEGIN_S
        while (status := orchestrator.status(job_id)).state == "pending" and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return status


@contextmanager
def start_lock(orchestrator: LocalOrchestrator, role: MachineRole, place: str, within_s: float) -> Iterator[None]:
    """Hold a lock, so that only one process of this machine at a time starts the role with this port. Raises UsageError on time-out.

    The lock ends with its process. The file name contains the host name, because home directories may be shared.
    """
    from ludus.launch.job_dir import hostname, make_private

    folder = make_private(make_private(orchestrator.directory.parent) / "roles")
    path = folder / f"{role}-{place.rpartition(':')[2]}-{hostname()}.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", "Set LUDUS_STATE_DIR to another directory.") from error
    try:
        deadline, waiting_announced = time.monotonic() + within_s, False
        while not _try_lock(lock, path):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"Another start of the {role} at {place} is in progress on this machine; waited {within_s:g} s for it.",
                    f"Check it: ludus {role} status.",
                )
            if not waiting_announced:
                say(f"another start of this {role} is in progress: waiting for it")
                waiting_announced = True
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(lock)


def _try_lock(lock: int, path: Path) -> bool:
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UsageError(
            f"{path} cannot be locked: {error.strerror}.", "Set LUDUS_STATE_DIR to a directory on a disk of this machine."
        ) from error
    return True


def _check_same_run(job: Job, orchestrator: LocalOrchestrator, earlier: JobStatus) -> None:
    """Raise UsageError if the running role belongs to another training, which must not be stopped without --replace."""
    from ludus.launch.job_dir import JobDirectory
    from ludus.launch.roles import TrainingTask

    ours = TrainingTask.of(job)
    try:
        theirs = TrainingTask.of(JobDirectory(orchestrator.directory / earlier.id).job())
    except Damaged:  # its training cannot be determined
        return
    if ours is None or theirs is None or ours.is_same_run(theirs):
        return
    raise UsageError(
        f"Another training uses {job.place}: {earlier.id}, which trains {theirs}; this one trains {ours}.",
        "Use another --port on all machines of this one; or stop the other one: "
        f"ludus learner stop --port {job.place.rpartition(':')[2]}, or add --replace.",
    )


def stop_role(orchestrator: LocalOrchestrator, status: JobStatus, *, at_once: bool = False) -> None:
    """Cancel a role and wait until all its processes have ended."""
    from ludus.launch.job import wait
    from ludus.launch.roles import GRACE_S

    orchestrator.cancel(status.id, at_once=at_once)
    wait(orchestrator, status.id, 4 * GRACE_S)
    say(f"{status.id} has ended")


def stop(role: MachineRole, runs: RunSelector, everything: bool, at_once: bool) -> None:
    from ludus.launch.local import LocalOrchestrator

    orchestrator = LocalOrchestrator()
    running = find_roles(orchestrator, role, runs)
    if len(running) > 1 and not everything:
        places = ", ".join(f"{status.id} ({status.place})" for status in running)
        raise UsageError(
            f"There are {len(running)} {role}s here: {places}.", "Choose one: --iplist FILE or --port PORT; or --all."
        )
    say(f"stop {role}" if running else f"stop {role}: none is running here{runs.suffix}")
    for status in running:
        stop_role(orchestrator, status, at_once=at_once)


def _check_ports(job: Job) -> None:
    """Raise UsageError if another service uses a port of the head. Called after the previous role has ended."""
    from ludus.process.job_env import PORTS, JobEnv, is_port_free

    around = JobEnv.from_environ(job.roles[0].environment)
    if around is None or around.node != 0:
        return
    for port in range(around.port, around.port + PORTS):
        if not is_port_free(port):
            raise UsageError(
                f"Port {port} of this machine is in use.",
                "Choose another --port, the same on all machines; the next two ports must be free as well.",
            )


# -- status ---------------------------------------------------------------------------------------------------------------


def show_status(role: MachineRole, runs: RunSelector, as_json: bool, *, machines: bool = False) -> None:
    """Print the roles that run here, or the last one that ran. Raises typer.Exit(1) if none runs. `machines`: add its Ray nodes."""
    from ludus.launch.local import LocalOrchestrator

    orchestrator = LocalOrchestrator()
    running = find_roles(orchestrator, role, runs)
    found = running or find_roles(orchestrator, role, runs, over=True)[-1:]
    pages = [_status_json(status) for status in found]
    if machines:
        for status, each in zip(found, pages, strict=True):
            each["machines"], each["trouble"] = [], ""
            try:
                each["machines"] = [] if status.over else _machines_of(orchestrator, status)
            except LudusError as error:  # an unreachable head is part of the status
                each["trouble"] = str(error)
    if as_json:
        print(json.dumps(pages))
    elif not found:
        print(f"no {role} was started here{runs.suffix}", file=sys.stderr)
    else:
        for status, each in zip(found, pages, strict=True):
            _print(status, each)
    if not running:
        raise typer.Exit(1)


def _status_json(status: JobStatus) -> dict[str, Any]:
    return {**asdict(status), "run": _run_of(status), "nodes": _nodes_of(status)}


def _print(status: JobStatus, page: dict[str, Any]) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.submitted_at))
    why = f": {status.reason}" if status.reason else ""
    print(f"{status.id}  {status.state}{why}  (started {since}, head {status.place})")
    for process in status.processes:
        again = f", restarted {process.restarts} times" if process.restarts else ""
        code = f", last ended with {process.exit_code}" if process.exit_code is not None else ""
        print(f"  {process.name:<8} {process.state}{code}{again}")
    for node in page["nodes"]:
        print(f"  workers on {node['name']}: {node['ready']} of {node['workers']} ready")
    for machine in page.get("machines", ()):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(machine["until"] or machine["since"]))
        state = f"LOST since {when}: {machine['why']}" if machine["until"] else f"up since {when}, {machine['cores']} cores"
        print(f"  {machine['host']} ({machine['address']}): {state}")
    if page["run"]:
        print(f"  run      {page['run']}")
    print(f"  logs     {status.logs}")
    if page.get("trouble"):
        print(f"  {page['trouble']}", file=sys.stderr)


def _run_of(status: JobStatus) -> str:
    """The place of the run that the training has created; empty if there is none yet."""
    from ludus.launch.job_dir import RUN

    with suppress(OSError, ValueError):  # none yet
        places = json.loads((Path(status.logs).parent / RUN).read_text(encoding="utf-8"))
        if isinstance(places, dict) and places:
            return str(list(places.values())[-1])
    return ""


def _machines_of(orchestrator: LocalOrchestrator, status: JobStatus) -> list[dict[str, Any]]:
    """The live nodes of its Ray cluster, then those that left and are not back. Raises Unreachable."""
    from ludus.launch.job_dir import JobDirectory
    from ludus.process.job_env import TOKEN
    from ludus.ray_cluster import membership

    token = JobDirectory(orchestrator.directory / status.id).job().roles[0].environment[TOKEN]
    found = membership.query_nodes(status.place, Path(token))
    living = {each.address for each in found if each.alive}
    lost = {each.address: each for each in found if not each.alive and each.address not in living}
    return [asdict(each) for each in (*(each for each in found if each.alive), *lost.values())]


def _nodes_of(status: JobStatus) -> list[dict[str, Any]]:
    """The nodes of its workers, from the run's status file; empty if the run is not readable from here."""
    run = _run_of(status)
    if not run or "://" in run or status.over:
        return []
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # being written, or of another version
        sampling = json.loads((Path(run) / "status.json").read_text(encoding="utf-8")).get("sampling", {})
        workers = sampling.get("workers", [])
        return [
            {
                "name": node["name"],
                "workers": sum(worker["node"] == node["name"] for worker in workers),
                "ready": sum(worker["node"] == node["name"] and worker["state"] == "ready" for worker in workers),
            }
            for node in sampling.get("nodes", [])
        ]
    return []
