"""`ludus doctor`: what is wrong with the machines, before a run finds out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ludus.launch.cluster_file import ClusterConfig
    from ludus.launch.doctor.finding import DoctorFinding

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def doctor(
    on: Annotated[
        str | None, typer.Option(metavar="local|ssh|slurm", help="Where the run will be started. [default: local]")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Cluster file, as for `ludus submit`.")] = None,
    iplist: Annotated[
        Path | None, typer.Option(help="List of machines to check over SSH, one `ip user port slots` per line.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="URL", help="Check that this Redis server can be reached and written to.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="Check that this store (a directory, s3://…) can be reached and written to."),
    ] = None,
    num_workers: Annotated[
        int | None, typer.Option(min=0, help="Workers of the run, on all machines together. [default: one per core]")
    ] = None,
    env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Create, reset and step this environment, and count its threads.")
    ] = None,
    game: Annotated[
        str | None, typer.Option(metavar="PATH", help="Check that this game executable could run, without running it.")
    ] = None,
    local_dir: Annotated[Path, typer.Option(help="Directory for runs.")] = Path("runs"),
    port: Annotated[list[int] | None, typer.Option(min=1, max=65535, help="Port that must be free; repeatable.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of a Slurm job, or number of listed machines to use.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition.")] = None,
    time: Annotated[
        str | None,
        typer.Option(
            help="Slurm: time limit of the run; outside an allocation, one of this length is requested to check the nodes."
        ),
    ] = None,
    identity: Annotated[Path | None, typer.Option(help="SSH: private key.")] = None,
    known_hosts: Annotated[Path | None, typer.Option(help="SSH: known-hosts file.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Time limit for each remote machine, in seconds.")] = 90.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of {node, check, status, found, fix}.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Run only checks that need no other program and no server.")] = False,
) -> None:
    """Check this machine or all machines of a cluster; print one line per check, with the fix."""
    from ludus.errors import UsageError

    if sys.platform == "win32":
        raise UsageError("`ludus doctor` looks at Linux and macOS.", "Runs on one Windows machine need none.")
    from ludus.launch.doctor.finding import is_healthy
    from ludus.launch.doctor.local_checks import DoctorRequest
    from ludus.launch.doctor.runner import DoctorRun, run_in_allocation

    request = DoctorRequest(
        workers=num_workers, env=env or "", game=game or "", memory=memory or "", store=store or "", local_dir=str(local_dir),
        ports=tuple(port or ()), quick=quick,
    )  # fmt: skip
    options = {
        "on": on, "iplist": iplist, "nodes": nodes, "partition": partition, "time": time, "identity": identity, "known_hosts": known_hosts,
    }  # fmt: skip
    target = _target(file, options)
    if target is not None and target.on == "slurm" and time is not None and not quick and _outside():
        again = {
            **options, "file": file, "memory": memory, "store": store, "num-workers": num_workers, "env": env, "game": game,
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
    """None: this machine, and nothing of clusters has to be imported."""
    if file is None and options["iplist"] is None and options["on"] in (None, "local"):
        return None
    from ludus.launch.cluster_file import ClusterConfig, load_cluster_file

    base = load_cluster_file(file) if file is not None else ClusterConfig()
    if options["iplist"] is not None and options["on"] is None:
        options = {**options, "on": "ssh"}
    return base.merge(**options)


def _words(options: Mapping[str, Any]) -> list[str]:
    """The same command, spelt anew from what was understood: however it was typed."""
    found = []
    for name, value in options.items():
        for each in value if isinstance(value, list) else [value] * (value is not None):
            found += [f"--{name.replace('_', '-')}", str(each)]
    return found


def _outside() -> bool:
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
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    console.print(Text("healthy" if not counts["failed"] else "not healthy", style="bold"), Text(f"({said})"))
