"""`ludus league run` and `ludus league learner`: run a league, and train one of its players."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ludus.cli.output import Printer, runnable
from ludus.errors import UsageError

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON; messages go to stderr.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the group `ludus league`."""
    for command in (run, learner):
        app.command()(command)


def run(
    file: Annotated[Path, typer.Option("--file", "-f", help="File of the league (YAML).")],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory of the league, local or shared; default: leagues/NAME.")
    ] = None,
    trust_all: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Import all scripts of players, also those of `ludus league add` and the copies in the directory of the league; send "
            "the tokens that `ludus league add` has named.",
        ),
    ] = False,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Run a league, or continue it; Ctrl-C saves checkpoints and stops."""
    from ludus.config.problem import ConfigErrors
    from ludus.core import trust
    from ludus.core.plugins import add_import_directory
    from ludus.league.runtime.coordinator import run_league
    from ludus.league.runtime.league_file import allow_tokens, check_players, external_ports, locate_problems, read_league
    from ludus.league.runtime.schedule import NO_PLAYER
    from ludus.models.custom.loader import add_search_directory

    printer = Printer(quiet, json_)
    config = read_league(file)
    league = directory or Path("leagues") / config.name
    trust.allow(config.model_dump())
    allow_tokens(config)
    if trust_all:
        trust.allow_everything()
    add_search_directory(file.parent)
    add_import_directory(file.parent)
    try:
        resolved = check_players(config, league)
        printer(f"league {config.name} in {league}: {', '.join(config.players)}")
        for port in dict.fromkeys(external_ports(config, league).values()):
            printer(f"games connect to port {port}; they try again while players take turns")
        result = run_league(config, league.absolute(), file.read_bytes(), resolved, printer)
    except ConfigErrors as error:
        raise locate_problems(error, file) from error
    printer(f"stopped by {result.stopped_by}: {result.state.results:,} matches of {len(result.state.players)} players")
    printer(f"next: {runnable('ludus')} league run -f {file} --dir {league}  (continues it)")
    if json_:
        print(json.dumps(result.to_json()), flush=True)
    if result.stopped_by == NO_PLAYER:
        raise typer.Exit(1)
    if result.stopped_by.startswith("interrupted"):
        raise typer.Exit(130)


def learner(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the league, as its coordinator uses it.")],
    player: Annotated[str, typer.Option("--player", "-p", help="Player to train.")],
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Environment steps; default: until the league stops.")
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", min=0, help="Seconds to wait for the coordinator, and for the end of a turn that the player has there."
        ),
    ] = 600.0,
    trust_all: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Import all code that the league names, also the copies in its directory; send the tokens that it names.",
        ),
    ] = False,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Train one player of a league in this process, on any machine that shares the directory; Ctrl-C saves a checkpoint and stops."""
    from ludus.core import trust
    from ludus.league.runtime.league_file import LEAGUE_FILE
    from ludus.league.runtime.learner import PlayerDisplay, check_opponents, train_player

    if not (directory / LEAGUE_FILE).is_file():
        raise UsageError(f"{directory} is not the directory of a league.", "Start it first: ludus league run -f FILE --dir DIR.")
    printer = Printer(quiet, json_)
    trust.note_run(directory)
    if trust_all:
        trust.allow_everything()
    check_opponents(directory)
    printer(f"training {player} of the league in {directory}")
    with PlayerDisplay(steps, quiet=quiet, stream=sys.stderr if json_ else sys.stdout) as display:
        result = train_player(
            directory.absolute(),
            player,
            steps,
            sinks=[display],
            announce=printer,
            wait_s=wait,
            take_over_s=wait,
            follow_orders=True,
        )
    if result is None:
        return
    printer(f"stopped by {result.stopped_by}; {result.run_dir}")
    if json_:
        print(json.dumps(result.to_json()), flush=True)
    if result.stopped_by.startswith("interrupted"):
        raise typer.Exit(130)
