"""What `ludus learner` and `ludus actor` share: a role of this machine is started, replaced, looked at and ended."""

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
"""As `cluster.roles.PORT`, which is not imported before a command needs it."""

LOG_DIR = "LOG_DIR"
_STRAY = ("LD_PRELOAD", "RAY_ADDRESS", "ip_head")
"""What else is in the environment and would lead our processes astray."""

_BEGIN_S = 5.0
_LOOK_S = 0.1
_TURN_S = 600.0
"""Longer than an earlier role may take to save what it has, and the next one to start."""

IpList = Annotated[
    Path,
    typer.Option(
        "--iplist",
        metavar="FILE",
        help="List of machines, one `ip user port slots` per line, or YAML; the first runs the learner.",
    ),
]
Node = Annotated[
    int | None,
    typer.Option("--node", min=0, metavar="N", help="Index of this machine in the list, from 0.", show_default=False),
]
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
LogDir = Annotated[
    Path | None,
    typer.Option("--log-dir", metavar="DIR", help="Directory for logs. Default: ./logs. [LOG_DIR]", show_default=False),
]
RunList = Annotated[
    Path | None,
    typer.Option("--iplist", metavar="FILE", help="Only the run of this list, the same FILE as for `start`.", show_default=False),
]
OnlyPort = Annotated[int | None, typer.Option("--port", metavar="PORT", help="Only the run with this port.", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="All runs of this machine.")]
Replace = Annotated[bool, typer.Option("--replace", help="Stop another training of this machine that uses the port.")]
AtOnce = Annotated[bool, typer.Option("--at-once", help="Kill at once, without a checkpoint.")]
Machines = Annotated[
    bool, typer.Option("--nodes", help="Also ask the Ray head which machines are or were in the cluster; takes some seconds.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


def say(sentence: str) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {sentence}", flush=True)


# -- before anything is started -------------------------------------------------------------------------------------------


def clean(environ: MutableMapping[str, str]) -> list[str]:
    """Take out of the environment what is not meant for the processes of a run; says what."""
    return [f"{name}={environ.pop(name)} is dropped for the processes of this run" for name in _STRAY if environ.get(name)]


def meeting_of(here: LocalAddress, port: int, token: Path | None, logs: Path | None) -> Rendezvous:
    from ludus.launch.roles import Rendezvous, check_family, token_path

    check_family(here.head, here.address)
    base = logs or Path(os.environ.get(LOG_DIR) or "logs")
    return Rendezvous(here, token_path(token, os.environ), base.expanduser().absolute(), port)


def show_list(listed: Hostfile, here: LocalAddress, port: int) -> None:
    """As people know it from such lists."""
    from ludus.launch.local_address import INTERFACE

    say("parse ip list")
    for index, node in enumerate(listed.nodes):
        mine = "  <- this machine" if index == here.node else ""
        print(f"{index}: {node.host} {node.user or '-'} {node.port} {node.slots}{mine}", flush=True)
    say(f"node_list: {','.join(f'{node.host}:{node.slots}' for node in listed.nodes)}")
    say(f"node_num: {len(listed.nodes)}")
    if os.environ.get(INTERFACE):
        say(f"{INTERFACE}: {os.environ[INTERFACE]}")
    say(f"head: {here.head}:{port}; this machine: {here.address}")


# -- which run is meant ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSelector:
    """Selects runs by the address and the port of their head, as `Rendezvous.address` has them; None: any."""

    head: str | None = None
    port: int | None = None

    def matches(self, place: str) -> bool:
        host, _, port = place.rpartition(":")
        return (self.head is None or host == self.head) and (self.port is None or port == str(self.port))

    @property
    def suffix(self) -> str:
        """For the end of a sentence about these runs; empty for all of them."""
        named = [f"{name} {value}" for name, value in (("head", self.head), ("port", self.port)) if value is not None]
        return f" for {' and '.join(named)}" if named else ""


def select_runs(iplist: Path | None, node: int | None, port: int | None) -> RunSelector:
    """The runs that `start` with the same options would have begun. Raises UsageError and ConfigError for a list as `start` does."""
    if iplist is None:
        if node is not None:
            raise UsageError(f"--node {node} is the number of a machine in a list.", "Name the list, too: --iplist FILE.")
        return RunSelector(None, port)
    from ludus.launch.hostfile import load_hostfile
    from ludus.launch.local_address import find_local_address

    return RunSelector(find_local_address(load_hostfile(iplist), os.environ, node, required=False).head, port)


# -- starting and ending --------------------------------------------------------------------------------------------------


def mine(
    orchestrator: LocalOrchestrator, part: MachineRole, runs: RunSelector = RunSelector(), *, over: bool = False
) -> list[JobStatus]:
    """Roles of that kind that were started on this machine and run; with `over`, also those that do not any more. Oldest first."""
    from ludus.launch.job_dir import JobDirectory, is_this_machine

    found = []
    for status in orchestrator.list():
        if status.name == part and status.place and runs.matches(status.place) and (over or not status.over):
            with suppress(LudusError, OSError):  # forgotten meanwhile
                if is_this_machine(JobDirectory(orchestrator.directory / status.id).read().machine):
                    found.append(status)
    return found


def begin(
    job: Job, orchestrator: LocalOrchestrator, part: MachineRole, *, replaces: bool = False, turn_s: float = _TURN_S
) -> JobStatus:
    """End this run's earlier role here, if there is one, and start this one; one start after the other. Raises UsageError, WorkerFailed.

    `replaces`: end it also when it is another run's.
    """
    with turn(orchestrator, part, job.place, turn_s):
        earlier = [status for status in mine(orchestrator, part) if status.place == job.place]
        if not replaces:
            for status in earlier:
                _check_run(job, orchestrator, status)
        say(f"stop {part}" if earlier else f"stop {part}: none of this run is running here")
        for status in earlier:
            end(orchestrator, status)
        if part == "learner":
            _check_ports(job)
        say(f"start {part}")
        job_id = orchestrator.submit(job)
        deadline = time.monotonic() + _BEGIN_S
        while (status := orchestrator.status(job_id)).state == "pending" and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return status


@contextmanager
def turn(orchestrator: LocalOrchestrator, part: MachineRole, place: str, within_s: float) -> Iterator[None]:
    """Of those on this machine who start that role with that port, one at a time. Raises UsageError when it takes others too long.

    The system forgets a lock with whoever had it. The name of the machine is in the file's: homes are shared.
    """
    from ludus.launch.job_dir import hostname, make_private

    folder = make_private(make_private(orchestrator.directory.parent) / "roles")
    path = folder / f"{part}-{place.rpartition(':')[2]}-{hostname()}.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", "Set LUDUS_STATE_DIR to another directory.") from error
    try:
        deadline, told = time.monotonic() + within_s, False
        while not _is_ours(lock, path):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"Another start of the {part} at {place} has been under way on this machine for {within_s:g} s.",
                    f"Look at it: ludus {part} status.",
                )
            if not told:
                say(f"another start of this {part} is under way: waiting for it")
                told = True
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(lock)


def _is_ours(lock: int, path: Path) -> bool:
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


def _check_run(job: Job, orchestrator: LocalOrchestrator, earlier: JobStatus) -> None:
    """A training is ended by a start of the same one; by another only when that is wanted. Raises UsageError."""
    from ludus.launch.job_dir import JobDirectory
    from ludus.launch.roles import TrainingTask

    ours = TrainingTask.of(job)
    try:
        theirs = TrainingTask.of(JobDirectory(orchestrator.directory / earlier.id).job())
    except Damaged:  # whose it is cannot be said any more
        return
    if ours is None or theirs is None or ours.is_same_run(theirs):
        return
    raise UsageError(
        f"Another training is at {job.place}: {earlier.id}, which trains {theirs}; this is {ours}.",
        f"Give this one another --port, on all its machines; or end that one: ludus learner stop --port {job.place.rpartition(':')[2]}, "
        "or --replace here.",
    )


def end(orchestrator: LocalOrchestrator, status: JobStatus, *, at_once: bool = False) -> None:
    """Returns when nothing of it runs any more."""
    from ludus.launch.job import wait
    from ludus.launch.roles import GRACE_S

    orchestrator.cancel(status.id, at_once=at_once)
    wait(orchestrator, status.id, 4 * GRACE_S)
    say(f"{status.id} has ended")


def stop(part: MachineRole, runs: RunSelector, everything: bool, at_once: bool) -> None:
    from ludus.launch.local import LocalOrchestrator

    orchestrator = LocalOrchestrator()
    running = mine(orchestrator, part, runs)
    if len(running) > 1 and not everything:
        places = ", ".join(f"{status.id} ({status.place})" for status in running)
        raise UsageError(
            f"There are {len(running)} {part}s here: {places}.", "Choose one: --iplist FILE or --port PORT; or --all."
        )
    say(f"stop {part}" if running else f"stop {part}: none is running here{runs.suffix}")
    for status in running:
        end(orchestrator, status, at_once=at_once)


def _check_ports(job: Job) -> None:
    """Somebody else's service is not a head of ours. Asked after our own earlier one has ended."""
    from ludus.process.job_env import PORTS, JobEnv, is_port_free

    around = JobEnv.from_environ(job.roles[0].environment)
    if around is None or around.node != 0:
        return
    for port in range(around.port, around.port + PORTS):
        if not is_port_free(port):
            raise UsageError(
                f"Port {port} of this machine is in use.",
                "Choose another one with --port, the same on all machines (the two after it must be free, too).",
            )


# -- looking --------------------------------------------------------------------------------------------------------------


def show_status(part: MachineRole, runs: RunSelector, as_json: bool, *, machines: bool = False) -> None:
    """Of what runs here; of what ran last, if nothing does. Exit code 1: nothing does. `machines`: and who is in its Ray."""
    from ludus.launch.local import LocalOrchestrator

    orchestrator = LocalOrchestrator()
    running = mine(orchestrator, part, runs)
    shown = running or mine(orchestrator, part, runs, over=True)[-1:]
    told = [_told(status) for status in shown]
    if machines:
        for status, each in zip(shown, told, strict=True):
            each["machines"], each["trouble"] = [], ""
            try:
                each["machines"] = [] if status.over else _machines_of(orchestrator, status)
            except LudusError as error:  # that the head does not answer is one of the things to be seen
                each["trouble"] = str(error)
    if as_json:
        print(json.dumps(told))
    elif not shown:
        print(f"no {part} was started here{runs.suffix}", file=sys.stderr)
    else:
        for status, each in zip(shown, told, strict=True):
            _print(status, each)
    if not running:
        raise typer.Exit(1)


def _told(status: JobStatus) -> dict[str, Any]:
    return {**asdict(status), "run": _run_of(status), "nodes": _nodes_of(status)}


def _print(status: JobStatus, told: dict[str, Any]) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.submitted_at))
    why = f": {status.reason}" if status.reason else ""
    print(f"{status.id}  {status.state}{why}  (started {since}, head {status.place})")
    for process in status.processes:
        again = f", started again {process.restarts} times" if process.restarts else ""
        code = f", last ended with {process.exit_code}" if process.exit_code is not None else ""
        print(f"  {process.name:<8} {process.state}{code}{again}")
    for node in told["nodes"]:
        print(f"  workers on {node['name']}: {node['ready']} of {node['workers']} at work")
    for machine in told.get("machines", ()):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(machine["until"] or machine["since"]))
        fares = f"LOST since {when}: {machine['why']}" if machine["until"] else f"up since {when}, {machine['cores']} cores"
        print(f"  {machine['host']} ({machine['address']}): {fares}")
    if told["run"]:
        print(f"  run      {told['run']}")
    print(f"  logs     {status.logs}")
    if told.get("trouble"):
        print(f"  {told['trouble']}", file=sys.stderr)


def _run_of(status: JobStatus) -> str:
    """Which run its training has begun."""
    from ludus.launch.job_dir import RUN

    with suppress(OSError, ValueError):  # none yet
        places = json.loads((Path(status.logs).parent / RUN).read_text(encoding="utf-8"))
        if isinstance(places, dict) and places:
            return str(list(places.values())[-1])
    return ""


def _machines_of(orchestrator: LocalOrchestrator, status: JobStatus) -> list[dict[str, Any]]:
    """Those that are in its Ray; and those that were, and are not back. Raises Unreachable."""
    from ludus.launch.job_dir import JobDirectory
    from ludus.process.job_env import TOKEN
    from ludus.ray_cluster import membership

    token = JobDirectory(orchestrator.directory / status.id).job().roles[0].environment[TOKEN]
    found = membership.take(status.place, Path(token))
    living = {each.address for each in found if each.alive}
    lost = {each.address: each for each in found if not each.alive and each.address not in living}
    return [asdict(each) for each in (*(each for each in found if each.alive), *lost.values())]


def _nodes_of(status: JobStatus) -> list[dict[str, Any]]:
    """Where its workers are, as the run itself says; none when it cannot be seen from here."""
    run = _run_of(status)
    if not run or "://" in run or status.over:
        return []
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # it is being written, or another version's
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
