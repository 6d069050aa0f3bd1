"""`ludus actor`: a machine that plays for a learner elsewhere, started by hand; as many of them as there are, at any time."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Annotated

import typer

from ludus.cli.clusters import roles as r
from ludus.cli.help import HelpApp
from ludus.errors import UsageError

app = HelpApp(help="Start and stop the sampling workers of a run on this machine.", no_args_is_help=True)

GAMECORE = "GAMECORE_SERVER_ADDR"
ADVERTISE = "LUDUS_ADVERTISE"
NUMBERS = ("ACTOR_NUM", "CPU_NUM")
NO_POOL = ("NO_MODEL_POOL", "NO_ACTOR_MODEL_POOL")
_MOST = 4096

_Num = Annotated[
    int | None,
    typer.Option("--num", min=1, max=_MOST, help="Number of workers on this machine, usually one per core. [ACTOR_NUM, CPU_NUM]"),
]
_Gamecore = Annotated[
    str | None,
    typer.Option("--gamecore", metavar="HOST:PORT", help=f"Address of the gamecore server that starts their games. [{GAMECORE}]"),
]
_Advertise = Annotated[
    str | None,
    typer.Option(
        "--advertise",
        metavar="HOST",
        help=f"Name or address at which games reach these workers. Default: this machine's address towards the gamecore server. [{ADVERTISE}]",
    ),
]
_NoPool = Annotated[
    bool,
    typer.Option(
        "--no-model-pool", help="The learner runs on this machine: read its weights from shared memory. [NO_MODEL_POOL=1]"
    ),
]


@app.command()
def start(
    iplist: r.IpList,
    num: _Num = None,
    gamecore: _Gamecore = None,
    advertise: _Advertise = None,
    no_model_pool: _NoPool = False,
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
    count = number_of(num, os.environ, in_list)
    server = address_of(gamecore or os.environ.get(GAMECORE, ""))
    host = host_of(advertise or os.environ.get(ADVERTISE, ""))
    shares = no_model_pool or any(is_set(name, os.environ) for name in NO_POOL)
    if shares and here.address != here.head:
        raise UsageError(
            f"--no-model-pool is for a machine that the learner runs on, and that is {here.head}; this is {here.address}.",
            "Leave it out (unset NO_MODEL_POOL and NO_ACTOR_MODEL_POOL).",
        )
    meeting = r.meeting_of(here, port, token_file, log_dir)
    roles.ensure_token(meeting.token_file, listed, create=here.node == 0)  # beside the learner it may be the first
    r.show_list(listed, here, port)
    for notice in r.clean(os.environ):
        r.say(notice)
    r.say(f"actor_num: {count}")
    if server:
        r.say(f"gamecore server: {server}" + (f", whose games reach this machine as {host}" if host else ""))
    if shares and (server or host):  # the learner's own workers would know nothing of either
        r.say("these workers have an agent of their own, with a copy of the weights, because of their gamecore server")
        shares = False
    share = roles.NodeContribution(count, gamecore=server, advertise=host, share_weights=shares)
    job = roles.joining_job("actor", listed, meeting, os.environ, share)
    status = r.begin(job, LocalOrchestrator(), "actor")
    r.say(f"{status.id} is {status.state}")
    if shares:
        r.say("logs of the workers, which the learner runs itself: RUN/logs/sampler")
    else:
        r.say(f"logs: {meeting.logs / 'actor'}/actor_*.log, one for each worker once the learner has given it work")


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
def status(iplist: r.RunList = None, node: r.Node = None, port: r.OnlyPort = None, as_json: r.AsJson = False) -> None:
    """Show the state of the workers of this machine. Exit code 1 if there are none."""
    r.show_status("actor", r.select_runs(iplist, node, port), as_json)


def number_of(option: int | None, environ: Mapping[str, str], listed: int) -> int:
    """The option, else what a variable says, else the list, else a worker for each core that may be used here. Raises UsageError."""
    if option is not None:
        return option
    for name in NUMBERS:
        if text := environ.get(name, "").strip():
            if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= _MOST:
                raise UsageError(f"{name}={text} is no number of workers.", f"It is a number from 1 to {_MOST}.")
            return int(text)
    if listed:
        return listed
    from ludus.process.host import usable_cores

    return usable_cores()


def address_of(text: str) -> str:
    """HOST:PORT of a server, or nothing. Raises UsageError."""
    text = text.strip()
    if not text:
        return ""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port[:9]) < 1 << 16 or any(c.isspace() for c in host):
        raise UsageError(f"{text!r} is not the address of a gamecore server.", "It is HOST:PORT, for example 10.0.0.5:23432.")
    return text


def host_of(text: str) -> str:
    """A name or address without a port, or nothing. Raises UsageError."""
    host = text.strip()
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if any(c.isspace() or c in "/@[]" for c in host) or (":" in host and not _is_address(host)):
        raise UsageError(
            f"{text!r} is not a name or address of this machine.", "It has no port, which is chosen here: --advertise 10.0.0.7."
        )
    return host


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_set(name: str, environ: Mapping[str, str]) -> bool:
    """As shell scripts have it: 1 means yes. Raises UsageError for what could be either."""
    text = environ.get(name, "").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("", "0", "false", "no", "off"):
        return False
    raise UsageError(f"{name}={text} is neither 1 nor 0.")
