"""`ludus serve`: a trained agent answers games over HTTP."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ludus.errors import NotFound, UsageError


def serve(
    where: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CONFIG", help="A run (its newest checkpoint), RUN/best, a checkpoint, or the YAML file of a run."
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 = any free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Beyond this machine only with --token-file.")] = "127.0.0.1",
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the port.")] = 1,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that games must send.", show_default=False)] = None,
    explore: Annotated[bool, typer.Option("--explore", help="Draw actions at random, as in training.")] = False,
    tick_timeout_s: Annotated[
        float | None, typer.Option(help="Longest time that an answer may take. [default: as in training]", show_default=False)
    ] = None,
    silent_s: Annotated[
        float | None,
        typer.Option(help="A session without a request for so long is ended. [default: as in training]", show_default=False),
    ] = None,
    local_dir: Annotated[Path, typer.Option(help="Where the runs of a YAML file are.")] = Path("runs"),
    json_: Annotated[bool, typer.Option("--json", help="Say where it listens as a line of JSON.")] = False,
) -> None:
    """Serve a trained agent. Games send start, tick, tick, …, end to POST /step, as in training. Ctrl-C stops it."""
    import time

    from ludus.actor.gateway import GatewaySettings
    from ludus.cli.display import say
    from ludus.experiment.serving import limits_of, run_of, served
    from ludus.game.protocol import read_token
    from ludus.runtime.fleet import GatewayFleet
    from ludus.runtime.machine import stop_on_signals
    from ludus.runtime.processes import Supervisor

    try:
        found = run_of(where, local_dir)
        made, spec = served(found, deterministic=not explore)
        http, limits = limits_of(found)
    except NotFound as error:
        raise UsageError(error.message, error.hint) from error
    limits = limits if tick_timeout_s is None else replace(limits, tick_s=tick_timeout_s)
    limits = limits if silent_s is None else replace(limits, silent_s=silent_s)
    settings = GatewaySettings(http=http, sessions=limits, token=read_token(token_file), spec=spec)
    with stop_on_signals() as stop, Supervisor() as supervisor:
        fleet = GatewayFleet(supervisor, made, host=host, port=port, workers=workers, settings=settings, prepare=made.load)
        try:
            fleet.wait_ready(60)
            shown, bound = fleet.address
            versions = ", ".join(f"{name} version {version}" for name, (_, _, version) in made.models.items())
            if json_:
                print(json.dumps({"host": shown, "port": bound, "workers": workers}), flush=True)
            else:
                say(f"serving {versions} at http://{shown}:{bound}/step with {workers} worker{'s' if workers > 1 else ''}")
            while not stop():
                time.sleep(0.1)
        finally:
            fleet.close()
