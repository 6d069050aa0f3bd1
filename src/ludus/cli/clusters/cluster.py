"""`ludus cluster`: a Ray over a list of machines that are reached by SSH; it stands until it is taken down."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.cli.clusters.roles import AsJson, IpList, say
from ludus.cli.clusters.submit import absolute
from ludus.cli.help import HelpApp
from ludus.errors import LudusError, UnknownName, Unreachable, UsageError, WorkerFailed

if TYPE_CHECKING:
    from ludus.launch.hostfile import Hostfile
    from ludus.launch.job import JobStatus, ProcessStatus
    from ludus.launch.ssh.backend import SshOrchestrator
    from ludus.launch.ssh.connection import SshNode, SshSettings
    from ludus.ray_cluster.membership import Resident

app = HelpApp(help="Manage a standing Ray cluster over SSH: up, status, down.", no_args_is_help=True)

NAME = "cluster"
FOLDER, JOB, TOKEN = "clusters", "job", "token"
_WAIT_S = 120.0
_DOWN_S = 180.0
_ASK_S = 60.0
_PAUSE_S = 1.0

_Name = Annotated[str, typer.Option("--name", help="Name of the cluster; several can exist.")]
_Which = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="Name of the cluster, if there are several.", show_default=False)
]
_Identity = Annotated[Path | None, typer.Option("--identity", metavar="FILE", help="Private SSH key.", show_default=False)]
_KnownHosts = Annotated[
    Path | None,
    typer.Option("--known-hosts", metavar="FILE", help="Known-hosts file to use instead of your own.", show_default=False),
]
_Python = Annotated[
    str,
    typer.Option(
        "--python",
        metavar="PATH",
        help="Python interpreter with Ludus on the machines. Default: the path of this one.",
        show_default=False,
    ),
]
_Setup = Annotated[
    list[str] | None,
    typer.Option(
        "--setup", metavar="LINE", help="Shell line to run first, such as `module load …`; repeatable.", show_default=False
    ),
]
_Workdir = Annotated[
    str,
    typer.Option(
        "--workdir", metavar="DIR", help="Working directory on the machines. Default: the home directory.", show_default=False
    ),
]
_Cpus = Annotated[
    int | None,
    typer.Option("--cpus", min=0, help="Cores of each machine for workers. Default: all.", show_default=False),
]
_Port = Annotated[
    int | None,
    typer.Option("--port", min=1024, max=65533, help="Port of the head. Default: a free one.", show_default=False),
]
_Forget = Annotated[bool, typer.Option("--forget", help="Succeed even if the head does not answer because it is gone for good.")]
_Wait = Annotated[float, typer.Option("--wait", min=0, metavar="SECONDS", help="Seconds to wait until all machines have joined.")]


@app.command()
def up(
    iplist: IpList,
    name: _Name = NAME,
    identity: _Identity = None,
    known_hosts: _KnownHosts = None,
    python: _Python = "",
    setup: _Setup = None,
    workdir: _Workdir = "",
    cpus: _Cpus = None,
    port: _Port = None,
    wait: _Wait = _WAIT_S,
) -> None:
    """Start Ray on all machines of the list, with the first as head. Run it again to restart Ray where it is missing."""
    from ludus.launch.hostfile import load_hostfile
    from ludus.launch.roles import cluster_job
    from ludus.launch.ssh.backend import SshOrchestrator, SshSettings

    listed = load_hostfile(iplist)
    settings = SshSettings(listed.nodes, absolute(identity), absolute(known_hosts), python, tuple(setup or ()), workdir)
    job = cluster_job(name, listed, cpus=cpus, port=port, wait_s=max(wait, 1.0), python=python)
    with SshOrchestrator(settings=settings) as orchestrator:
        standing = find(name)
        if standing is None or not _mended(orchestrator, standing, listed):
            say(f"starting Ray on {len(listed.nodes)} machines: {', '.join(node.host for node in listed.nodes)}")
            standing = Standing(name, orchestrator.submit(job))
            _remember(orchestrator, standing)
        if not standing.token.exists():
            standing.write(TOKEN, _token(_settings(orchestrator, standing), standing.id))
        missing = _gathered(orchestrator, standing, time.monotonic() + wait)
        _explain(orchestrator, standing)
    if missing:
        raise WorkerFailed(f"Not in the cluster after {wait:g} s: {', '.join(missing)}.", f"See: ludus cluster status {name}")


@app.command()
def status(name: _Which = None, as_json: AsJson = False) -> None:
    """Show each machine: whether it is in the cluster, since when, and its cores. Exit code 1 if machines were lost."""
    from ludus.launch.ssh.backend import SshOrchestrator

    standing = chosen(name)
    with SshOrchestrator() as orchestrator:
        page = _page(orchestrator, standing)
    if as_json:
        print(json.dumps(page))
    else:
        _print(page)
    if not all(node["up"] for node in page["nodes"]):
        raise typer.Exit(1)


@app.command()
def down(name: _Which = None, forget: _Forget = False) -> None:
    """Stop what `up` started on all machines, and nothing else. Exit code 1 if the head could not be reached."""
    from ludus.launch.job import wait
    from ludus.launch.ssh.backend import SshOrchestrator

    standing = chosen(name)
    with SshOrchestrator() as orchestrator:
        try:
            try:
                orchestrator.cancel(standing.id)
            except (
                WorkerFailed
            ) as error:  # it is cancelled as far as that can be; others than the first machine end by themselves
                say(str(error))
            wait(orchestrator, standing.id, _DOWN_S)
            if not forget and (head := _silent_head(orchestrator, standing)):
                raise WorkerFailed(
                    f"The cluster {standing.name} may still be up: its first machine, {head}, does not answer.",
                    f"Try again when it is back; if it never will be: ludus cluster down {standing.name} --forget",
                )
        except UnknownName:
            say(f"nothing is known of {standing.id} any more")
    standing.remove()
    say(f"the cluster {standing.name} is down")


# -- what stands ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """A cluster that was brought up from this machine, by this user."""

    name: str
    id: str

    @property
    def directory(self) -> Path:
        return _home() / self.name

    @property
    def token(self) -> Path:
        return self.directory / TOKEN

    def write(self, name: str, text: str) -> None:
        """JOB or TOKEN. The first is what makes it known; the other can be asked for again. Raises OSError, UsageError."""
        from ludus.io.atomic_file import replace_file
        from ludus.launch.job_dir import make_private

        for directory in (_home().parent, _home(), self.directory):
            make_private(directory)
        replace_file(self.directory / name, text, mode=0o600)

    def remove(self) -> None:
        from ludus.io.atomic_file import TEMPORARY

        for path in (*self.directory.glob(f"{TEMPORARY}*"), self.token, self.directory / JOB):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # somebody has put something else there, which is theirs
            self.directory.rmdir()


def find(name: str) -> Standing | None:
    """By its name alone: a path is none."""
    if name in _known():
        with suppress(OSError):
            return Standing(name, (_home() / name / JOB).read_text(encoding="utf-8").strip())
    return None


def _known() -> list[str]:
    return sorted(path.parent.name for path in _home().glob(f"*/{JOB}"))


def chosen(name: str | None) -> Standing:
    """Raises UnknownName."""
    from ludus.core.plugins import did_you_mean

    known = _known()
    if name is None and len(known) > 1:
        raise UsageError(f"There are {len(known)} clusters: {', '.join(known)}.", "Say which one.")
    found = find(name if name is not None else known[0]) if name is not None or known else None
    if found is None:
        called = f"cluster {name!r}" if name is not None else "cluster"
        raise UnknownName(f"There is no {called} that was brought up from here.", did_you_mean(name or "", known))
    return found


def _home() -> Path:
    from ludus.launch.job_dir import state_dir

    return state_dir() / FOLDER


# -- bringing it up -------------------------------------------------------------------------------------------------------


def _remember(orchestrator: SshOrchestrator, standing: Standing) -> None:
    """At once: what nobody knows of nobody can take down."""
    try:
        standing.write(JOB, standing.id)
    except BaseException:  # also ^C
        with suppress(LudusError):
            orchestrator.cancel(standing.id)
        raise


def _silent_head(orchestrator: SshOrchestrator, standing: Standing) -> str:
    """Its first machine, when that did not answer last time. What runs there needs no other machine to go on."""
    from ludus.launch.ssh.backend import SshJobDir

    entry = SshJobDir(orchestrator.directory / standing.id)
    with suppress(OSError):  # forgotten
        head = entry.settings().nodes[0].host
        return head if head in entry.known().silent else ""
    return ""


def _mended(orchestrator: SshOrchestrator, standing: Standing, listed: Hostfile) -> bool:
    """Start again what is missing of it; False: nothing of it is left. Raises UsageError where it stands on other machines."""
    try:
        over = orchestrator.status(standing.id).over
    except UnknownName:
        over = True
    if over and (head := _silent_head(orchestrator, standing)):
        raise WorkerFailed(
            f"The cluster {standing.name} was to be taken down, and may still be up: its first machine, {head}, does not answer.",
            f"When it is back, or if it never will be: ludus cluster down {standing.name} (--forget); or give the new one another --name.",
        )
    if over:
        say(f"the cluster {standing.name} ran before and has ended: starting it again")
        standing.remove()
        return False
    there = _settings(orchestrator, standing).nodes
    if there != listed.nodes:
        raise UsageError(
            f"The cluster {standing.name} stands on {', '.join(node.host for node in there)}, and {listed.source} says otherwise.",
            f"Take it down first (ludus cluster down {standing.name}), or give the new one another --name.",
        )
    mended = orchestrator.mend(standing.id)
    say(f"started again on {', '.join(mended)}" if mended else f"the cluster {standing.name} is up already")
    return True


def _token(settings: SshSettings, job_id: str) -> str:
    """From the head, which has it."""
    from ludus.launch.ssh.connection import AgentConnection

    deadline = time.monotonic() + _ASK_S
    with closing(AgentConnection(settings, 0)) as talk:
        talk.await_hello()
        return str(talk.request({"verb": "token", "job": job_id, "node": 0}, deadline)["token"])


def _gathered(orchestrator: SshOrchestrator, standing: Standing, deadline: float) -> list[str]:
    """Wait until all machines are in it; those that are not by then."""
    while True:
        status = orchestrator.status(standing.id)
        if status.over:
            raise WorkerFailed(f"The cluster {standing.name} has ended: {status.reason or status.state}.", f"Logs: {status.logs}")
        settings = _settings(orchestrator, standing)
        residents: Sequence[Resident] = ()
        with suppress(Unreachable):  # it is not up yet
            residents = _census(orchestrator, standing, status)
        missing = [node.host for node in settings.nodes if not _resident_of(node, residents, alive=True)]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_PAUSE_S)


def _explain(orchestrator: SshOrchestrator, standing: Standing) -> None:
    status, settings = orchestrator.status(standing.id), _settings(orchestrator, standing)
    head = settings.nodes[0]
    login = shlex.join(
        ["ssh", *(["-p", str(head.port)] if head.port != 22 else []), f"{head.user}@{head.host}" if head.user else head.host]
    )
    say(
        f"the cluster {standing.name} is at {_address(orchestrator, standing)}; train on one of its machines, for example the first:"
    )
    print(f"  {login}")
    print(f"  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={shlex.quote(_token_there(status, head))}")
    print(f"  ludus train CartPole-v1 --num-workers 4 --address {_address(orchestrator, standing)}")
    print(f"its token is in {standing.token} too; take the cluster down with: ludus cluster down {standing.name}", flush=True)


# -- looking at it --------------------------------------------------------------------------------------------------------


def _settings(orchestrator: SshOrchestrator, standing: Standing) -> SshSettings:
    from ludus.launch.ssh.backend import SshJobDir

    return SshJobDir(orchestrator.directory / standing.id).settings()


def _address(orchestrator: SshOrchestrator, standing: Standing) -> str:
    from ludus.launch.ssh.backend import SshJobDir
    from ludus.process.job_env import PORT

    entry = SshJobDir(orchestrator.directory / standing.id)
    port = entry.job().roles[0].environment.get(PORT) or entry.port()
    return f"{entry.settings().nodes[0].node_address}:{port}"


def _token_there(status: JobStatus, head: SshNode) -> str:
    """Where the head has the token: beside the job's directory there."""
    return str(Path(status.logs.removeprefix(f"{head.host}:")).parents[2] / TOKEN)


def _census(orchestrator: SshOrchestrator, standing: Standing, status: JobStatus) -> list[Resident]:
    """Asked of the head on its own machine: its port need not be open for this one. Raises Unreachable."""
    from ludus.launch.ssh.connection import ssh_words
    from ludus.ray_cluster import membership

    settings, address = _settings(orchestrator, standing), _address(orchestrator, standing)
    if not status.logs:
        raise Unreachable(f"{settings.nodes[0].host} has not said yet where it runs.")
    asked = membership.words(address, _token_there(status, settings.nodes[0]))
    try:
        words = ssh_words(settings, 0, "ludus.ray_cluster.membership", *asked)
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"{settings.nodes[0].host} did not answer: {error}.") from error
    return membership.read(done.stdout.decode(errors="replace"), address)


def _page(orchestrator: SshOrchestrator, standing: Standing) -> dict[str, Any]:
    status, settings = orchestrator.status(standing.id), _settings(orchestrator, standing)
    trouble, residents = "", list[Any]()
    try:
        residents = [] if status.over else _census(orchestrator, standing, status)
    except LudusError as error:
        trouble = str(error)
    nodes = []
    for index, node in enumerate(settings.nodes):
        process = _process_of(orchestrator, standing, status, index)
        living, dead = (_resident_of(node, residents, alive=alive) for alive in (True, False))
        shown = living or dead
        nodes.append(
            {
                "node": index,
                "host": node.host,
                "address": node.node_address,
                "up": living is not None,
                "cores": shown.cores if shown else 0,
                "since": (living.since if living else dead.until if dead else 0.0) or None,
                "why": "" if living else (dead.why if dead else "") or _state(process),
                "process": asdict(process) if process else None,
            }
        )
    return {
        "name": standing.name, "id": standing.id, "state": status.state, "reason": status.reason, "trouble": trouble,
        "address": _address(orchestrator, standing), "logs": status.logs, "nodes": nodes,
    }  # fmt: skip


def _process_of(orchestrator: SshOrchestrator, standing: Standing, status: JobStatus, node: int) -> ProcessStatus | None:
    from ludus.launch.ssh.backend import SshJobDir

    roles = {role.name: role for role in SshJobDir(orchestrator.directory / standing.id).job().roles}
    return next((each for each in status.processes if roles[each.role].node(each.index) == node), None)


def _resident_of(node: SshNode, residents: Sequence[Resident], *, alive: bool) -> Resident | None:
    """The latest of its lives in the cluster."""
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
        said = f"up{since}, {node['cores']} cores" if node["up"] else f"DOWN{since}: {node['why']}"
        print(f"  {node['node']}  {node['host']:<20} {said}")
    if page["trouble"]:
        print(f"  {page['trouble']}", file=sys.stderr)
    print(f"  logs: ludus jobs logs {page['id']}")
