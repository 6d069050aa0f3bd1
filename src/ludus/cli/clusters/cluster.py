"""`ludus cluster`: start, show and stop a Ray cluster on a list of machines reached by SSH."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.cli.clusters.roles import IpList, say
from ludus.cli.clusters.submit import absolute
from ludus.cli.common_options import AsJson
from ludus.cli.help import HelpApp, option_in
from ludus.errors import LudusError, UnknownName, Unreachable, UsageError, WorkerFailed

if TYPE_CHECKING:
    from ludus.launch.hostfile import Hostfile
    from ludus.launch.job import JobStatus, ProcessStatus
    from ludus.launch.ssh.backend import SshOrchestrator
    from ludus.launch.ssh.connection import SshNode, SshSettings
    from ludus.ray_cluster.membership import NodeRecord

app = HelpApp(help="Start, show and stop a Ray cluster over SSH.", no_args_is_help=True)

_ssh, _ray = option_in("SSH and machines"), option_in("Ray")

NAME = "cluster"
FOLDER, JOB, TOKEN = "clusters", "job", "token"
_WAIT_S = 120.0
_DOWN_S = 180.0
_ASK_S = 60.0
_PAUSE_S = 1.0

_ClusterName = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Name of the cluster, if there are several.")]


@app.command()
def up(
    iplist: IpList,
    name: Annotated[str, typer.Option("--name", help="Name of the cluster; several can exist.")] = NAME,
    identity: Annotated[Path | None, _ssh("--identity", metavar="FILE", help="Private SSH key.")] = None,
    known_hosts: Annotated[
        Path | None, _ssh("--known-hosts", metavar="FILE", help="Known-hosts file to use instead of your own.")
    ] = None,
    python: Annotated[
        str,
        _ssh("--python", metavar="PATH", help="Python interpreter with Ludus on the machines. Default: the path of this one."),
    ] = "",
    setup: Annotated[
        list[str] | None, _ssh("--setup", metavar="LINE", help="Shell line to run first, such as `module load …`; repeatable.")
    ] = None,
    workdir: Annotated[
        str, _ssh("--workdir", metavar="DIR", help="Working directory on the machines. Default: the home directory.")
    ] = "",
    cpus: Annotated[int | None, _ray("--cpus", min=0, help="Cores of each machine for workers. Default: all.")] = None,
    port: Annotated[int | None, _ray("--port", min=1024, max=65533, help="Port of the head. Default: a free one.")] = None,
    wait: Annotated[
        float, _ray("--wait", min=0, metavar="SECONDS", help="Seconds to wait until all machines have joined.")
    ] = _WAIT_S,
) -> None:
    """Start Ray on all machines of the list, with the first as head. Run it again to restart Ray where it is missing."""
    from ludus.launch.hostfile import load_hostfile
    from ludus.launch.roles import cluster_job
    from ludus.launch.ssh.backend import SshOrchestrator, SshSettings

    listed = load_hostfile(iplist)
    settings = SshSettings(listed.nodes, absolute(identity), absolute(known_hosts), python, tuple(setup or ()), workdir)
    job = cluster_job(name, listed, cpus=cpus, port=port, wait_s=max(wait, 1.0), python=python)
    with SshOrchestrator(settings=settings) as orchestrator:
        record = find(name)
        if record is None or not _restart_missing(orchestrator, record, listed):
            say(f"starting Ray on {len(listed.nodes)} machines: {', '.join(node.host for node in listed.nodes)}")
            record = ClusterRecord(name, orchestrator.submit(job))
            with ExitStack() as undo:  # without a record, `down` could not find the job
                undo.callback(_cancel, orchestrator, record.id)
                record.write(JOB, record.id)
                undo.pop_all()
        if not record.token.exists():
            record.write(TOKEN, _fetch_token(_settings(orchestrator, record), record.id))
        missing = _wait_for_nodes(orchestrator, record, time.monotonic() + wait)
        _print_usage(orchestrator, record)
    if missing:
        raise WorkerFailed(f"Not in the cluster after {wait:g} s: {', '.join(missing)}.", f"See: ludus cluster status {name}")


@app.command()
def status(name: _ClusterName = None, as_json: AsJson = False) -> None:
    """Show each machine: whether it is in the cluster, since when, and its cores. Exit code 1 if machines were lost."""
    from ludus.launch.ssh.backend import SshOrchestrator

    record = choose_cluster(name)
    with SshOrchestrator() as orchestrator:
        page = _page(orchestrator, record)
    if as_json:
        print(json.dumps(page))
    else:
        _print(page)
    if not all(node["up"] for node in page["nodes"]):
        raise typer.Exit(1)


@app.command()
def down(
    name: _ClusterName = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Succeed even if the head does not answer because it is gone for good.")
    ] = False,
) -> None:
    """Stop what `up` started on all machines, and nothing else. Exit code 1 if the head could not be reached."""
    from ludus.launch.job import wait
    from ludus.launch.ssh.backend import SshOrchestrator

    record = choose_cluster(name)
    with SshOrchestrator() as orchestrator:
        try:
            try:
                orchestrator.cancel(record.id)
            except WorkerFailed as error:  # unreachable machines; all but the head stop by themselves
                say(str(error))
            wait(orchestrator, record.id, _DOWN_S)
            if not forget and (head := _unreachable_head(orchestrator, record)):
                raise WorkerFailed(
                    f"The cluster {record.name} may still be up: its first machine, {head}, does not answer.",
                    f"Try again when it is back; if it is gone for good: ludus cluster down {record.name} --forget",
                )
        except UnknownName:
            say(f"the job {record.id} no longer exists")
    record.remove()
    say(f"the cluster {record.name} is down")


# -- cluster records ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterRecord:
    """A cluster that this user started from this machine: its name and the id of its job."""

    name: str
    id: str

    @property
    def directory(self) -> Path:
        return _records_dir() / self.name

    @property
    def token(self) -> Path:
        return self.directory / TOKEN

    def write(self, name: str, text: str) -> None:
        """Write the file JOB, which registers the cluster, or TOKEN, which can be fetched again. Raises OSError, UsageError."""
        from ludus.io.atomic_file import replace_file
        from ludus.launch.job_dir import make_private

        for directory in (_records_dir().parent, _records_dir(), self.directory):
            make_private(directory)
        replace_file(self.directory / name, text, mode=0o600)

    def remove(self) -> None:
        from ludus.io.atomic_file import TEMPORARY

        for path in (*self.directory.glob(f"{TEMPORARY}*"), self.token, self.directory / JOB):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # keeps a directory with foreign files
            self.directory.rmdir()


def find(name: str) -> ClusterRecord | None:
    """The cluster with this name, or None. Paths are not accepted."""
    if name in _cluster_names():
        with suppress(OSError):
            return ClusterRecord(name, (_records_dir() / name / JOB).read_text(encoding="utf-8").strip())
    return None


def _cluster_names() -> list[str]:
    return sorted(path.parent.name for path in _records_dir().glob(f"*/{JOB}"))


def choose_cluster(name: str | None) -> ClusterRecord:
    """The named cluster, or the only one. Raises UnknownName, UsageError."""
    from ludus.core.plugins import did_you_mean

    known = _cluster_names()
    if name is None and len(known) > 1:
        raise UsageError(f"There are {len(known)} clusters: {', '.join(known)}.", "Pass the name of one.")
    found = find(name if name is not None else known[0]) if name is not None or known else None
    if found is None:
        called = f"cluster {name!r}" if name is not None else "cluster"
        raise UnknownName(f"No {called} was started from this machine.", did_you_mean(name or "", known))
    return found


def _records_dir() -> Path:
    from ludus.launch.job_dir import state_dir

    return state_dir() / FOLDER


# -- starting -------------------------------------------------------------------------------------------------------------


def _cancel(orchestrator: SshOrchestrator, job_id: str) -> None:
    with suppress(LudusError):
        orchestrator.cancel(job_id)


def _unreachable_head(orchestrator: SshOrchestrator, record: ClusterRecord) -> str:
    """The host of the head if it did not answer the last query, else an empty string. Its processes may still run."""
    from ludus.launch.ssh.backend import SshJobDir

    entry = SshJobDir(orchestrator.directory / record.id)
    with suppress(OSError):  # the job was removed
        head = entry.settings().nodes[0].host
        return head if head in entry.known_status().silent else ""
    return ""


def _restart_missing(orchestrator: SshOrchestrator, record: ClusterRecord, listed: Hostfile) -> bool:
    """Restart missing nodes of a running cluster; False if it has ended. Raises UsageError if it runs on other machines."""
    try:
        over = orchestrator.status(record.id).over
    except UnknownName:
        over = True
    if over and (head := _unreachable_head(orchestrator, record)):
        raise WorkerFailed(
            f"The cluster {record.name} was stopped but may still be up: its first machine, {head}, does not answer.",
            f"Run ludus cluster down {record.name} when the machine is back, or with --forget if it is gone for good; "
            "or give the new cluster another --name.",
        )
    if over:
        say(f"the cluster {record.name} has ended: starting it again")
        record.remove()
        return False
    there = _settings(orchestrator, record).nodes
    if there != listed.nodes:
        raise UsageError(
            f"The cluster {record.name} runs on {', '.join(node.host for node in there)}, which differs from {listed.source}.",
            f"Stop it first (ludus cluster down {record.name}), or give the new one another --name.",
        )
    restarted = orchestrator.mend(record.id)
    say(f"restarted on {', '.join(restarted)}" if restarted else f"the cluster {record.name} is already up")
    return True


def _fetch_token(settings: SshSettings, job_id: str) -> str:
    """Fetch the token of the cluster from its head."""
    from ludus.launch.ssh.connection import AgentConnection

    deadline = time.monotonic() + _ASK_S
    with closing(AgentConnection(settings, 0)) as connection:
        connection.await_hello()
        connection.send({"verb": "token", "job": job_id, "node": 0})
        return str(connection.receive_result(deadline)["token"])


def _wait_for_nodes(orchestrator: SshOrchestrator, record: ClusterRecord, deadline: float) -> list[str]:
    """Wait until all machines have joined; returns the hosts that are missing at the deadline."""
    while True:
        status = orchestrator.status(record.id)
        if status.over:
            raise WorkerFailed(f"The cluster {record.name} has ended: {status.reason or status.state}.", f"Logs: {status.logs}")
        settings = _settings(orchestrator, record)
        residents: Sequence[NodeRecord] = ()
        with suppress(Unreachable):  # the head is not up yet
            residents = _query_nodes(orchestrator, record, status)
        missing = [node.host for node in settings.nodes if not _find_node(node, residents, alive=True)]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_PAUSE_S)


def _print_usage(orchestrator: SshOrchestrator, record: ClusterRecord) -> None:
    status, settings = orchestrator.status(record.id), _settings(orchestrator, record)
    head = settings.nodes[0]
    login = shlex.join(
        ["ssh", *(["-p", str(head.port)] if head.port != 22 else []), f"{head.user}@{head.host}" if head.user else head.host]
    )
    say(
        f"the cluster {record.name} is up at {_address(orchestrator, record)}; train on one of its machines, for example the first:"
    )
    print(f"  {login}")
    print(f"  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={shlex.quote(_remote_token_path(status, head))}")
    print(f"  ludus train CartPole-v1 --num-workers 4 --address {_address(orchestrator, record)}")
    print(f"a copy of its token is in {record.token}; stop the cluster with: ludus cluster down {record.name}", flush=True)


# -- status ---------------------------------------------------------------------------------------------------------------


def _settings(orchestrator: SshOrchestrator, record: ClusterRecord) -> SshSettings:
    from ludus.launch.ssh.backend import SshJobDir

    return SshJobDir(orchestrator.directory / record.id).settings()


def _address(orchestrator: SshOrchestrator, record: ClusterRecord) -> str:
    from ludus.launch.ssh.backend import SshJobDir
    from ludus.process.job_env import PORT

    entry = SshJobDir(orchestrator.directory / record.id)
    port = entry.job().roles[0].environment.get(PORT) or entry.port()
    return f"{entry.settings().nodes[0].node_address}:{port}"


def _remote_token_path(status: JobStatus, head: SshNode) -> str:
    """The path of the token on the head, next to the job's directory."""
    return str(Path(status.logs.removeprefix(f"{head.host}:")).parents[2] / TOKEN)


def _query_nodes(orchestrator: SshOrchestrator, record: ClusterRecord, status: JobStatus) -> list[NodeRecord]:
    """Query the Ray nodes over SSH on the head, whose port may be closed to this machine. Raises Unreachable."""
    from ludus.launch.ssh.connection import ssh_words
    from ludus.ray_cluster import membership

    settings, address = _settings(orchestrator, record), _address(orchestrator, record)
    if not status.logs:
        raise Unreachable(f"{settings.nodes[0].host} has not reported its job directory yet.")
    try:
        words = ssh_words(settings, 0, "ludus.ray_cluster.membership", address, _remote_token_path(status, settings.nodes[0]))
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"{settings.nodes[0].host} did not answer: {error}.") from error
    return membership.parse_output(done.stdout.decode(errors="replace"), address)


def _page(orchestrator: SshOrchestrator, record: ClusterRecord) -> dict[str, Any]:
    status, settings = orchestrator.status(record.id), _settings(orchestrator, record)
    trouble, residents = "", list[Any]()
    try:
        residents = [] if status.over else _query_nodes(orchestrator, record, status)
    except LudusError as error:
        trouble = str(error)
    nodes = []
    for index, node in enumerate(settings.nodes):
        process = _process_of(orchestrator, record, status, index)
        living, dead = (_find_node(node, residents, alive=alive) for alive in (True, False))
        latest = living or dead
        nodes.append(
            {
                "node": index,
                "host": node.host,
                "address": node.node_address,
                "up": living is not None,
                "cores": latest.cores if latest else 0,
                "since": (living.since if living else dead.until if dead else 0.0) or None,
                "why": "" if living else (dead.why if dead else "") or _state(process),
                "process": asdict(process) if process else None,
            }
        )
    return {
        "name": record.name, "id": record.id, "state": status.state, "reason": status.reason, "trouble": trouble,
        "address": _address(orchestrator, record), "logs": status.logs, "nodes": nodes,
    }  # fmt: skip


def _process_of(orchestrator: SshOrchestrator, record: ClusterRecord, status: JobStatus, node: int) -> ProcessStatus | None:
    from ludus.launch.ssh.backend import SshJobDir

    roles = {role.name: role for role in SshJobDir(orchestrator.directory / record.id).job().roles}
    return next((each for each in status.processes if roles[each.role].node(each.index) == node), None)


def _find_node(node: SshNode, residents: Sequence[NodeRecord], *, alive: bool) -> NodeRecord | None:
    """The latest Ray node of a machine that is alive, or that has left."""
    from ludus.launch.local_address import HostNetwork

    names = {node.node_address, node.host}
    ours = [each for each in residents if each.alive == alive and names & {each.address, each.host}]
    if not ours and any(each.alive == alive for each in residents):
        found = set(HostNetwork().resolve(node.node_address))
        ours = [each for each in residents if each.alive == alive and each.address in found]
    return ours[-1] if ours else None


def _state(process: ProcessStatus | None) -> str:
    if process is None:
        return "nothing was started there"
    code = f", last ended with {process.exit_code}" if process.exit_code is not None else ""
    return f"its process is {process.state}{code}"


def _print(page: dict[str, Any]) -> None:
    why = f": {page['reason']}" if page["reason"] else ""
    print(f"{page['name']}  {page['state']}{why}  (Ray at {page['address']}, job {page['id']})")
    for node in page["nodes"]:
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(node["since"])) if node["since"] else ""
        state = f"up{since}, {node['cores']} cores" if node["up"] else f"DOWN{since}: {node['why']}"
        print(f"  {node['node']}  {node['host']:<20} {state}")
    if page["trouble"]:
        print(f"  {page['trouble']}", file=sys.stderr)
    print(f"  logs: ludus jobs logs {page['id']}")
