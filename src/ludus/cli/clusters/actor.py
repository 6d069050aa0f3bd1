"""`ludus actor`: start, stop and show the sampling workers of this machine, which join the learner of `ludus learner`."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Annotated

import typer

from ludus.cli.clusters import roles as r
from ludus.cli.common_options import AsJson
from ludus.cli.help import HelpApp
from ludus.errors import UsageError

app = HelpApp(help="Start and stop the sampling workers of a run on this machine.", no_args_is_help=True)

GAMECORE = "GAMECORE_SERVER_ADDR"
ADVERTISE = "LUDUS_ADVERTISE"
NUMBERS = ("ACTOR_NUM", "CPU_NUM")
NO_POOL = ("NO_MODEL_POOL", "NO_ACTOR_MODEL_POOL")
_MAX_WORKERS = 4096


@app.command()
def start(
    iplist: r.IpList,
    num: Annotated[
        int | None,
        typer.Option(
            "--num", min=1, max=_MAX_WORKERS, help="Number of workers on this machine, usually one per core. [ACTOR_NUM, CPU_NUM]"
        ),
    ] = None,
    gamecore: Annotated[
        str | None,
        typer.Option(
            "--gamecore", metavar="HOST:PORT", help=f"Address of the gamecore server that starts their games. [{GAMECORE}]"
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            "--advertise",
            metavar="HOST",
            help=f"Name or address at which games reach these workers. Default: this machine's address towards the gamecore server. [{ADVERTISE}]",
        ),
    ] = None,
    no_model_pool: Annotated[
        bool,
        typer.Option(
            "--no-model-pool", help="Read weights from the shared memory of a learner on this machine. [NO_MODEL_POOL=1]"
        ),
    ] = False,
    node: r.Node = None,
    port: r.Port = r.PORT,
    token_file: r.TokenFile = None,
    log_dir: r.LogDir = None,
) -> None:
    """Start the sampling workers of this machine in the background. They wait for the learner of the list and join the next one when it ends."""
    from ludus.launch import roles
    from ludus.launch.hostfile import load_hostfile
    from ludus.launch.local import LocalOrchestrator
    from ludus.launch.local_address import find_local_address

    listed = load_hostfile(iplist)
    here = find_local_address(listed, os.environ, node, required=False)
    in_list = listed.entries[here.node].actors if here.node is not None else 0
    count = worker_count(num, os.environ, in_list)
    server = parse_server(gamecore or os.environ.get(GAMECORE, ""))
    host = parse_host(advertise or os.environ.get(ADVERTISE, ""))
    shares = no_model_pool or any(is_enabled(name, os.environ) for name in NO_POOL)
    if shares and here.address != here.head:
        raise UsageError(
            f"--no-model-pool works only on the machine of the learner, {here.head}; this is {here.address}.",
            "Leave it out (unset NO_MODEL_POOL and NO_ACTOR_MODEL_POOL).",
        )
    rendezvous = r.make_rendezvous(here, port, token_file, log_dir)
    roles.ensure_token(
        rendezvous.token_file, listed, create=here.node == 0
    )  # on the first machine it may start before the learner
    r.show_list(listed, here, port)
    for notice in r.clean_environment(os.environ):
        r.say(notice)
    r.say(f"actor_num: {count}")
    if server:
        r.say(f"gamecore server: {server}" + (f"; its games reach this machine as {host}" if host else ""))
    if shares and (server or host):  # workers run by the learner would not get these settings
        r.say("these workers keep their own copy of the weights, because they use a gamecore server")
        shares = False
    share = roles.NodeContribution(count, gamecore=server, advertise=host, share_weights=shares)
    job = roles.joining_job("actor", listed, rendezvous, os.environ, share)
    status = r.start_role(job, LocalOrchestrator(), "actor")
    r.say(f"{status.id} is {status.state}")
    if shares:
        r.say("the learner runs these workers; their logs: RUN/logs/sampler")
    else:
        r.say(f"logs: {rendezvous.logs / 'actor'}/actor_*.log, one per worker, created when the learner starts it")


@app.command()
def stop(
    iplist: r.RunList = None,
    node: r.Node = None,
    port: r.OnlyPort = None,
    everything: r.All = False,
    at_once: r.AtOnce = False,
) -> None:
    """Stop the workers of this machine. The learner continues with those of other machines."""
    r.stop("actor", r.select_runs(iplist, node, port), everything, at_once)


@app.command()
def status(iplist: r.RunList = None, node: r.Node = None, port: r.OnlyPort = None, as_json: AsJson = False) -> None:
    """Show the state of the workers of this machine. Exit code 1 if there are none."""
    r.show_status("actor", r.select_runs(iplist, node, port), as_json)


def worker_count(option: int | None, environ: Mapping[str, str], listed: int) -> int:
    """The number of workers from the option, else a variable, else the list, else the usable cores. Raises UsageError."""
    if option is not None:
        return option
    for name in NUMBERS:
        if text := environ.get(name, "").strip():
            if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= _MAX_WORKERS:
                raise UsageError(f"{name}={text} is not a valid number of workers.", f"Use a number from 1 to {_MAX_WORKERS}.")
            return int(text)
    if listed:
        return listed
    from ludus.process.host import usable_cores

    return usable_cores()


def parse_server(text: str) -> str:
    """Check the HOST:PORT of a server, or an empty string. Raises UsageError."""
    text = text.strip()
    if not text:
        return ""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port[:9]) < 1 << 16 or any(c.isspace() for c in host):
        raise UsageError(f"{text!r} is not the address of a gamecore server.", "Use HOST:PORT, for example 10.0.0.5:23432.")
    return text


def parse_host(text: str) -> str:
    """Check a host name or address without port, or an empty string. Raises UsageError."""
    host = text.strip()
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if any(c.isspace() or c in "/@[]" for c in host) or (":" in host and not _is_address(host)):
        raise UsageError(
            f"{text!r} is not a name or address of this machine.", "Use a host without a port: --advertise 10.0.0.7."
        )
    return host


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_enabled(name: str, environ: Mapping[str, str]) -> bool:
    """Parse a flag of the environment: 1, true, yes or on. Raises UsageError for an unknown value."""
    text = environ.get(name, "").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("", "0", "false", "no", "off"):
        return False
    raise UsageError(f"{name}={text} is neither 1 nor 0.")
