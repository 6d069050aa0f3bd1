"""`ludus doctor`: check machines before a run is started on them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.cli.help import option_in

if TYPE_CHECKING:
    from ludus.launch.cluster_file import ClusterConfig
    from ludus.launch.doctor.finding import DoctorFinding

_machines, _run, _output = map(option_in, ("Machines", "Run", "Output"))
_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def doctor(
    on: Annotated[
        str | None,
        _machines(help="Launcher with which the run will be started. [default: local]", metavar="local|ssh|slurm|kubernetes"),
    ] = None,
    file: Annotated[Path | None, _machines("--file", "-f", help="Cluster file, as for `ludus submit`.")] = None,
    iplist: Annotated[
        Path | None, _machines(help="List of machines to check over SSH, one `ip user port slots` per line.")
    ] = None,
    memory: Annotated[str | None, _run(help="Redis server that must be reachable and writable.", metavar="URL")] = None,
    store: Annotated[
        str | None, _run(help="Store (a directory, s3://…) that must be reachable and writable.", metavar="PLACE")
    ] = None,
    num_workers: Annotated[
        int | None, _run(help="Workers of the run, on all machines together. [default: one per core]", min=0)
    ] = None,
    env: Annotated[
        str | None, _run(help="Environment to create, reset and step; its threads are counted.", metavar="NAME")
    ] = None,
    game: Annotated[str | None, _run(help="Game executable that must be able to run; it is not run.", metavar="PATH")] = None,
    display: Annotated[
        str | None, _run(help="Screen of environments, as `display` of the config.", metavar="auto|xvfb|egl|none")
    ] = None,
    local_dir: Annotated[Path, _run(help="Directory for runs.")] = Path("runs"),
    port: Annotated[list[int] | None, _run(help="Port that must be free; repeatable.", min=1, max=65535)] = None,
    nodes: Annotated[int | None, _machines(help="Nodes of a Slurm job, or number of listed machines to use.", min=1)] = None,
    partition: Annotated[str | None, _machines(help="Slurm partition.")] = None,
    time: Annotated[
        str | None,
        _machines(help="Slurm time limit of the run; outside an allocation, one of this length is requested for the check."),
    ] = None,
    identity: Annotated[Path | None, _machines(help="Private SSH key.")] = None,
    known_hosts: Annotated[Path | None, _machines(help="SSH known-hosts file.")] = None,
    namespace: Annotated[str | None, _machines(help="Kubernetes namespace.")] = None,
    context: Annotated[str | None, _machines(help="Context of the kubeconfig.")] = None,
    cpus: Annotated[int | None, _machines(help="Kubernetes: cores of a pod.", min=1)] = None,
    node_memory: Annotated[
        str | None, _machines("--node-memory", help="Kubernetes: memory of a pod, e.g. 4Gi.", metavar="SIZE")
    ] = None,
    timeout: Annotated[float, _machines(help="Time limit for each remote machine, in seconds.", min=1.0)] = 90.0,
    quick: Annotated[bool, _run("--quick", help="Run only checks that need no other program and no server.")] = False,
    as_json: Annotated[bool, _output("--json", help="Print a JSON list of {node, check, status, found, fix}.")] = False,
) -> None:
    """Check this machine or all machines of a cluster; print one line per check, with the fix."""
    from ludus.errors import UsageError

    if sys.platform == "win32":
        raise UsageError("`ludus doctor` supports Linux and macOS only.", "A run on a single Windows machine needs no check.")
    from ludus.launch.doctor.finding import is_healthy
    from ludus.launch.doctor.local_checks import DoctorRequest
    from ludus.launch.doctor.runner import DoctorRun, run_in_allocation

    request = DoctorRequest(
        workers=num_workers, env=env or "", game=game or "", display=display or "", memory=memory or "", store=store or "", local_dir=str(local_dir),
        ports=tuple(port or ()), quick=quick,
    )  # fmt: skip
    options = {
        "on": on, "iplist": iplist, "nodes": nodes, "partition": partition, "time": time, "identity": identity, "known_hosts": known_hosts,
        "namespace": namespace, "context": context, "cpus": cpus,
    }  # fmt: skip
    if node_memory is not None:  # --memory is the address of Redis
        options["memory"] = node_memory
    target = _target(file, options)
    if target is not None and target.on == "slurm" and time is not None and not quick and _needs_allocation():
        again = {
            **options, "file": file, "memory": memory, "store": store, "num-workers": num_workers, "env": env, "game": game, "display": display,
            "local-dir": local_dir, "port": port, "timeout": timeout,
        }  # fmt: skip
        found = run_in_allocation(target, _words(again), os.environ, timeout)
    else:
        found = DoctorRun(request, target, timeout).findings(os.environ)
    if as_json:
        print(json.dumps([finding.to_json() for finding in found]))
    else:
        _print(found)
    if not is_healthy(found):
        raise typer.Exit(1)


def _target(file: Path | None, options: dict[str, Any]) -> ClusterConfig | None:
    """The cluster to check; None for this machine, which needs no import of cluster modules."""
    if file is None and options["iplist"] is None and options["on"] in (None, "local"):
        return None
    from ludus.launch.cluster_file import ClusterConfig, load_cluster_file

    base = load_cluster_file(file) if file is not None else ClusterConfig()
    if options["iplist"] is not None and options["on"] is None:
        options = {**options, "on": "ssh"}
    return base.merge(**options)


def _words(options: Mapping[str, Any]) -> list[str]:
    """The options as a command line, to run the same command in an allocation."""
    found = []
    for name, value in options.items():
        for each in value if isinstance(value, list) else [value] * (value is not None):
            found += [f"--{name.replace('_', '-')}", str(each)]
    return found


def _needs_allocation() -> bool:
    from ludus.launch.doctor.runner import ALLOCATION, IN_ALLOCATION

    return not os.environ.get(ALLOCATION) and not os.environ.get(IN_ALLOCATION)


def _print(found: Sequence[DoctorFinding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    width = max((len(finding.check) for finding in found), default=0)
    node = None
    for finding in found:
        if finding.node != node:
            console.print(Text(finding.node, style="bold"))
            node = finding.node
        line = Text.assemble(
            "  ", (f"{finding.status:<8}", _COLOURS[finding.status]), f" {finding.check:<{width}}  {finding.found}"
        )
        if finding.fix and finding.status != "ok":
            line.append(f"  → {finding.fix}", style="cyan" if finding.status != "skipped" else "dim")
        console.print(line)
    counts = {status: sum(finding.status == status for finding in found) for status in _COLOURS}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    console.print(Text("healthy" if not counts["failed"] else "not healthy", style="bold"), Text(f"({summary})"))
