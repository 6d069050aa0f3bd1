"""`ludus check-game`: run a server that checks a game's client against the protocol."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ludus.cli.check_report import finding_line, print_rows
from ludus.cli.common_options import ListenHost, ListenPort
from ludus.core.formatting import pluralize
from ludus.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from ludus.cli.serving.conformance_server import ConformanceServer
    from ludus.protocol.codec import SeatSpaces
    from ludus.protocol.conformance import CheckFinding, ConformanceReport

_POLL_S = 0.05


def check_game(
    port: ListenPort = 8000,
    host: ListenHost = "127.0.0.1",
    form: Annotated[
        Literal["raw", "json", "msgpack"] | None,
        typer.Option(
            "--format", help="Format of request bodies; json and msgpack need --spec. [default: json with --spec, else raw]"
        ),
    ] = None,
    spec: Annotated[
        Path | None, typer.Option(help="File with the spaces: a reply of GET /spec, or the experiment's YAML.")
    ] = None,
    matches: Annotated[int | None, typer.Option(min=1, help="Stop after N matches.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Stop after this many seconds. [default: at Ctrl-C]")] = None,
    silent: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a request after which a session counts as abandoned.")
    ] = 60.0,
    think_ms: Annotated[float, typer.Option(min=0.0, help="Delay of every reply, to imitate a model.")] = 5.0,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that the game must send.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON; findings go to stderr.")] = False,
) -> None:
    """Start a server that checks a game's client against the protocol; exit code 1 on errors."""
    from ludus.cli.serving.conformance_server import ConformanceServer
    from ludus.distributed.gateway_workers import bind, check_exposure, run_loop
    from ludus.process.signals import stop_on_signals
    from ludus.protocol.conformance import Conformance
    from ludus.protocol.spec import read_token

    seats = None if spec is None else read_spec(spec)
    form = form or ("raw" if spec is None else "json")
    if form != "raw" and seats is None:
        raise UsageError(f"--format {form} needs the spaces of the game.", "Give --spec FILE.")
    token = read_token(token_file)
    check_exposure(host, token)

    def print_finding(finding: CheckFinding) -> None:
        line = finding_line(finding.check.level, finding.check.rule, finding.seen, finding.check.remedy)
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    if form == "raw":
        conformance, seats = Conformance(), None
    else:
        conformance = Conformance(form, seats)
    server = ConformanceServer(conformance, print_finding, seats, token=token, silent_s=silent, think_s=think_ms / 1e3)
    bound = bind(host, port)
    print(f"checking on http://{host}:{bound.getsockname()[1]}", file=sys.stderr if as_json else sys.stdout, flush=True)
    with stop_on_signals() as stop:
        deadline = None if seconds is None else time.monotonic() + seconds

        def over() -> bool:
            late = deadline is not None and time.monotonic() >= deadline
            return stop() or late or (matches is not None and conformance.matches >= matches)

        run_loop(_serve(server, bound, over))
    summary = server.summary
    print_summary(summary, as_json)
    if summary.mistakes:
        raise typer.Exit(1)


async def _serve(server: ConformanceServer, bound: Any, over: Callable[[], bool]) -> None:
    await server.start(bound)
    try:
        while not over():
            await asyncio.sleep(_POLL_S)
    finally:
        await server.close()


def read_spec(file: Path) -> dict[str, SeatSpaces]:
    """Read the spaces of the game's seats from a file. Raises UsageError, ConfigError."""
    import yaml

    from ludus.protocol.codec import parse_seats

    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"Cannot read {file}: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} does not hold a mapping.", "Give observation_space and action_space, or seats.")
    return parse_seats(data)


def print_summary(summary: ConformanceReport, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary.to_json()), flush=True)
        return
    print_rows([(row.state, row.count, row.check.rule, row.check.remedy) for row in summary.rows])
    played = [pluralize(summary.matches, "match", "matches"), pluralize(summary.requests, "request")]
    if summary.retries:
        played.append(pluralize(summary.retries, "retry", "retries"))
    mistakes = pluralize(summary.mistakes, "mistake") if summary.mistakes else "no mistakes"
    print(f"\n{', '.join(played)}: {mistakes}, {pluralize(summary.warnings, 'warning')}")
