"""`ludus gamecore`: run a server that starts game processes, and control it from the shell."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ludus.cli.clusters.jobs import TIMED_OUT, age
from ludus.cli.common_options import AsJson, ListenHost, ListenPort
from ludus.cli.help import HelpApp, option_in
from ludus.cli.interrupts import detach_on_interrupt
from ludus.cli.output import make_console, make_facts, make_table, notify
from ludus.errors import DeadlineMissed, LudusError, Refused, StoreError, UnknownName, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ludus.protocol.gamecore_client import Camp, GamecoreClient, GameState

app = HelpApp(help="Run games as processes: the gamecore server and its client.", no_args_is_help=True)

PORT = 23432
"""Same as `ludus.protocol.gamecore_client.PORT`, which is imported only by commands that need it."""

TEST_HEROES = "190,173,117/141,111,107"
_TEST_S = 600.0
_COLOURS = {
    "starting": "yellow",
    "running": "green",
    "finished": "green",
    "stopped": "yellow",
    "crashed": "red",
    "timed-out": "red",
    "lost": "red",
}
_MAX_LINE = 120
_REQUEST_FIELDS = ("runtime_id", "game", "mode", "seed")
"""Fields of the request that a result may repeat."""
_RULE = ("rule", "none")
_server, _players, _match, _waiting = map(option_in, ("Gamecore server", "Players", "Match", "Waiting"))

_Id = Annotated[str, typer.Argument(metavar="ID", help="Id (runtime_id) of the game.")]
_Server = Annotated[
    str | None,
    _server(
        "--server", metavar="HOST:PORT|URL", help="Address of the gamecore server. Default: this machine. [GAMECORE_SERVER_ADDR]"
    ),
]
_TokenFile = Annotated[
    Path | None, _server("--token-file", metavar="FILE", help="File with the token of the server. [LUDUS_GAMECORE_TOKEN_FILE]")
]
_Game = Annotated[
    str | None, typer.Option("--game", metavar="NAME", help="Game of the catalogue. Default: the first one with this mode.")
]
_Mode = Annotated[
    str | None, typer.Option("--mode", metavar="NvN", help="Mode, such as 3v3. Default: from the number of heroes.")
]
_AllowStandIn = Annotated[
    bool,
    _waiting(
        "--allow-stand-in", help="Exit with 0 even if the game's own AI played a camp because its actor could not be reached."
    ),
]
_Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Random seed; the same seed gives the same match.")]


@app.command()
def serve(
    host: ListenHost = "127.0.0.1",
    port: ListenPort = PORT,
    games: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Catalogue of games, a YAML file. Default: the Arena.")
    ] = None,
    max_games: Annotated[int, typer.Option(min=1, help="Maximum number of running games.")] = 200,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the tokens that callers must send, one per line: TOKEN, NAME TOKEN, or NAME TOKEN REQUESTS_PER_S. Reloaded when it changes."
        ),
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory for games and logs. Default: derived from the port.")
    ] = None,
    supervise: Annotated[bool, typer.Option("--supervise", help="Restart the server when it dies.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as one line of JSON.")] = False,
) -> None:
    """Run a server that starts, monitors and stops game processes on request. Only games of the catalogue can be started. Ctrl-C stops it and its games."""
    from ludus.gamecore.server.http.app import serve as run
    from ludus.gamecore.server.settings import Settings
    from ludus.io.addresses import url_host

    def announce(host: str, port: int) -> None:
        if as_json:
            print(json.dumps({"host": host, "port": port}), flush=True)
        else:
            at = f"{url_host(host)}:{port}"
            print(f"gamecore server at http://{at}; `ludus gamecore test --server {at}` tests it", flush=True)

    settings = Settings(host=host, port=port, games=games, max_games=max_games, token_file=token_file, state_dir=state_dir)
    run(settings, supervise=supervise, announce=announce)


@app.command("test")
def run_test_match(
    mode: _Mode = None,
    heroes: Annotated[str, typer.Option("--heroes", metavar="ID,…/ID,…", help="Heroes of both camps.")] = TEST_HEROES,
    game: _Game = None,
    seed: _Seed = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="S", help="Time limit of the match, in seconds.")
    ] = _TEST_S,
    server: _Server = None,
    token_file: _TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Test the server with one match of the game's own AI against itself. Exit code 0 if it works."""
    camps = _parse_heroes(heroes)
    with _client(server, token_file) as client:
        runtime_id = f"test-{secrets.token_hex(4)}"
        lineup = {"heroes": camps} | ({"mode": mode} if mode else {})
        began = time.monotonic()
        client.start_game(runtime_id, [None] * len(camps), lineup, eval_mode=True, game=game, seed=seed)
        notify(f"{runtime_id} plays {heroes.replace('/', ' against ')} on {client.server}, all by rule AI")
        try:
            ended = client.wait_game(runtime_id, timeout)
        except (DeadlineMissed, KeyboardInterrupt) as error:  # no other command knows the id of this game
            client.stop_game(runtime_id)
            if isinstance(error, KeyboardInterrupt):
                raise
            notify(f"{runtime_id} was not over after {timeout:g} s and was stopped")
            raise typer.Exit(TIMED_OUT) from None
        _show(ended, as_json)
        if ended.state != "stopped":
            notify(f"the server works; start to end took {time.monotonic() - began:.1f} s")
    raise typer.Exit(1 if ended.state == "stopped" else 0)


@app.command()
def start(
    runtime_id: _Id,
    mode: _Mode = None,
    heroes: Annotated[
        str | None, _players("--heroes", metavar="ID,…/ID,…", help=f"Heroes of both camps, e.g. {TEST_HEROES}.")
    ] = None,
    camp: Annotated[
        list[str] | None,
        _players(
            "--camp",
            metavar="rule|HOST:PORT|URL",
            help="Player of a camp: rule (the game's own AI) or the address of an actor. Once per camp, in order. Default: rule.",
        ),
    ] = None,
    actor_token_file: Annotated[Path | None, _players(metavar="FILE", help="File with the token of the actors.")] = None,
    game: _Game = None,
    eval_mode: Annotated[bool, _match("--eval", help="Evaluation match: starts from the beginning and saves no states.")] = False,
    seed: _Seed = None,
    max_frames: Annotated[int | None, _match(min=1, help="Maximum number of ticks.")] = None,
    limit: Annotated[float | None, _match("--limit", min=0.1, metavar="S", help="Time limit of the game, in seconds.")] = None,
    start_from: Annotated[str | None, _match(metavar="NAME|any", help="Saved state to start from.")] = None,
    task: Annotated[str | None, _match("--task", help="Task id; games of a task are listed together.")] = None,
    option: Annotated[
        list[str] | None, _match("--option", "-o", metavar="KEY=VALUE", help="Option of the game; repeatable.")
    ] = None,
    wait: Annotated[bool, _waiting("--wait", help="Wait until the game is over, as `ludus gamecore wait` does.")] = False,
    allow_stand_in: _AllowStandIn = False,
    server: _Server = None,
    token_file: _TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Start a game. Repeating the command while the game runs does not start a second one."""
    camps = None if heroes is None else _parse_heroes(heroes)
    lineup = {key: value for key, value in (("mode", mode), ("heroes", camps)) if value is not None}
    with _client(server, token_file, max_frames) as client:
        state = client.start_game(
            runtime_id,
            _parse_camps(camp, actor_token_file),
            lineup or None,
            eval_mode,
            task,
            game=game,
            seed=seed,
            start_from=start_from,
            timeout_s=limit,
            options=read_options(option or ()),
        )
        if wait:
            raise typer.Exit(_wait_and_show(client, runtime_id, None, as_json, allow_stand_in))
    _show(state, as_json)


@app.command()
def wait(
    runtime_id: _Id,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0.0, metavar="S", help=f"Time limit in seconds; then exit with code {TIMED_OUT}."),
    ] = None,
    allow_stand_in: _AllowStandIn = False,
    server: _Server = None,
    token_file: _TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Wait until a game is over. Exit code 0 if it finished with the actors it was started with, else 1."""
    with _client(server, token_file) as client:
        raise typer.Exit(_wait_and_show(client, runtime_id, timeout, as_json, allow_stand_in))


@app.command()
def stop(
    runtime_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of the games.")],
    grace: Annotated[
        float | None,
        typer.Option("--grace", min=0.0, max=60.0, metavar="S", help="Seconds that a game has to exit before it is killed."),
    ] = None,
    server: _Server = None,
    token_file: _TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Stop games and all their child processes."""
    with _client(server, token_file) as client:
        missing = []
        for runtime_id in runtime_ids:
            state = client.stop_game(runtime_id, grace_s=grace)
            if state is None:
                missing.append(runtime_id)
            else:
                _show(state, as_json)
        if missing:
            from ludus.core.plugins import did_you_mean

            near = did_you_mean(missing[0], [game.runtime_id for game in client.list()])
            raise UnknownName(f"There is no game {', '.join(map(repr, missing))} on {client.server}.", near)


@app.command("list")
def list_games(
    state: Annotated[
        str | None, typer.Option("--state", metavar="WORD", help="Show only games in this state: running, crashed, …")
    ] = None,
    server: _Server = None,
    token_file: _TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List running games and those that ended recently."""
    if state is not None and state not in _COLOURS:
        from ludus.core.plugins import did_you_mean

        raise UsageError(f"--state {state!r} is not known.", did_you_mean(state, _COLOURS))
    with _client(server, token_file) as client:
        found = client.list(state)
    if as_json:
        print(json.dumps([game.to_json() for game in found]))
    elif found:
        make_console().print(_table(found, time.time()))
    else:
        notify(f"no games{'' if state is None else f' in state {state}'} on {client.server}")


@app.command()
def status(
    runtime_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Game id; without it, show the server.")] = None,
    server: _Server = None,
    token_file: _TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the state or the result of a game, or the state of the server."""
    with _client(server, token_file) as client:
        if runtime_id is not None:
            state = client.state(runtime_id)
            if as_json:
                print(json.dumps(state.to_json()))
            else:
                make_console().print(_page(state))
            return
        health, games = client.health(), client.list()
        counts = dict(Counter(game.state for game in games))
        if as_json:
            print(json.dumps({"server": client.server, "health": health, "games": counts}))
            return
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        print(f"{client.server} is up; games: {states or 'none'}")


@app.command()
def logs(
    runtime_id: _Id,
    lines: Annotated[int, typer.Option("--tail", "-n", min=1, max=10_000, help="Number of lines.")] = 1000,
    server: _Server = None,
    token_file: _TokenFile = None,
) -> None:
    """Print the log of a game."""
    with _client(server, token_file) as client:
        text = client.logs(runtime_id, lines)
    if text:
        print(text, end="" if text.endswith("\n") else "\n")


@app.command()
def fetch(
    runtime_id: _Id,
    video: Annotated[bool, typer.Option("--video", help="Download the video instead of the recording.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write. [default: the name given by the game, in this directory]")
    ] = None,
    server: _Server = None,
    token_file: _TokenFile = None,
) -> None:
    """Download the recording or the video of a game."""
    what: Literal["recording", "video"] = "video" if video else "recording"
    with _client(server, token_file) as client:
        data = client.download(runtime_id, what)
        name = (client.state(runtime_id).result or {})[what]
    path = out or Path(f"{runtime_id}-{Path(name).name}")
    try:
        path.write_bytes(data)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.", "Choose a file: --out FILE.") from error
    print(path)


@app.command()
def catalogue(server: _Server = None, token_file: _TokenFile = None, as_json: AsJson = False) -> None:
    """List the games that the server can start, with their options."""
    with _client(server, token_file) as client:
        found = client.catalogue()
    if as_json:
        print(json.dumps(found))
        return
    make_console().print(_catalogue_table(found.get("games") or {}))


@app.command()
def clear(
    tasks: Annotated[bool, typer.Option("--tasks", help="Delete all tasks as well.")] = False,
    server: _Server = None,
    token_file: _TokenFile = None,
) -> None:
    """Delete all finished games with their logs."""
    with _client(server, token_file) as client:
        deleted = client.clear().get("forgotten", 0)
        if tasks:
            client.task_clear()
    notify(f"deleted {deleted} games{' and all tasks' if tasks else ''}")


# -- client ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _client(server: str | None, token_file: Path | None, max_frames: int | None = None) -> Iterator[GamecoreClient]:
    """Open a client of the server; its replies 400 and 404 raise UsageError."""
    from ludus.protocol.gamecore_client import GamecoreClient

    with GamecoreClient(server, token_file=token_file, max_frame_num=max_frames or -1) as client:
        try:
            yield client
        except Refused as refused:
            if refused.status in (400, 404):
                raise UsageError(refused.message, refused.hint) from refused
            raise


def _wait_and_show(client: GamecoreClient, runtime_id: str, timeout: float | None, as_json: bool, allow_stand_in: bool) -> int:
    """Wait for a game, print its result and return the exit code."""
    with detach_on_interrupt(f"{runtime_id} is still running; stop it with `ludus gamecore stop {runtime_id}`"):
        try:
            # For the client 0 means no time limit; here it means a single check.
            ended = client.wait_game(runtime_id, math.inf if timeout is None else max(timeout, 1e-3))
        except DeadlineMissed as missed:
            notify(missed.message)
            return TIMED_OUT
        except LudusError:
            if as_json and (state := client.state(runtime_id)).over:
                print(json.dumps(state.to_json()))
            raise
    _show(ended, as_json)
    if ended.lost_camps and not allow_stand_in:
        notify(
            "the match does not count: an actor did not play its camp. Check --camp and that the actor runs, or accept the "
            "game's own AI in its place with --allow-stand-in"
        )
        return 1
    return 1 if ended.state == "stopped" else 0


def _parse_heroes(given: str) -> list[list[int]]:
    """The heroes of each camp: 190,173/141,111."""
    try:
        return [[int(hero) for hero in camp.split(",")] for camp in given.split("/")]
    except ValueError:
        raise UsageError(
            f"--heroes {given!r} is not valid.", f"Separate camps by / and heroes by commas: {TEST_HEROES}."
        ) from None


def _parse_camps(given: Sequence[str] | None, token_file: Path | None) -> list[Camp] | None:
    from ludus.protocol.spec import read_token

    token = read_token(token_file)
    if token is not None and not any(camp not in _RULE for camp in given or ()):
        raise UsageError("--actor-token-file needs an actor, and no camp has one.", "Pass its address: --camp HOST:PORT.")
    if not given:
        return None
    return [None if camp in _RULE else {"address": camp, "token": token} for camp in given]


def read_options(given: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in given:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"--option {word!r} is not valid.", "Use KEY=VALUE, for example speed=15.")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


# -- output ---------------------------------------------------------------------------------------------------------------


def _show(state: GameState, as_json: bool) -> None:
    if as_json:
        print(json.dumps(state.to_json()), flush=True)
        return
    print(state.describe(), flush=True)
    if state.over and state.result is not None:
        print(f"  {_format_result(state)}", flush=True)


def _format_result(state: GameState) -> str:
    """The scalar values of the result, shortened to one line."""
    if not isinstance(state.result, dict):
        return "" if state.result is None else json.dumps(state.result)[:_MAX_LINE]
    values = {key: value for key, value in state.result.items() if key not in _REQUEST_FIELDS}
    plain = [
        f"{key} {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in values.items()
        if not isinstance(value, (dict, list))
    ]
    line = ", ".join(plain) + (", …" if len(plain) < len(values) else "")
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 1] + "…"


def _table(games: Sequence[GameState], now: float) -> RenderableType:
    from rich.text import Text

    numbers = ("exit", "age", "cpu", "memory", "restarts")
    table = make_table(("id", "game", "mode", "state", *numbers, "result"), right=numbers, wrapped=("result",))
    for game in games:
        words = (game.runtime_id, game.game or "–", game.mode or "–")
        figures = (
            "–" if game.exit_code is None else str(game.exit_code),
            age(now - game.started) if game.started else "–",
            "–" if game.cpu_s is None else f"{game.cpu_s:.1f} s",
            "–" if game.memory_mb is None or game.over else f"{game.memory_mb:.0f} MB",
            str(game.restarts),
        )
        result = _format_result(game) if game.state == "finished" else game.reason
        if game.lost_camps:
            result = f"lost camp {', '.join(game.lost_camps)}; {result}"
        table.add_row(*map(Text, words), Text(game.state, style=_COLOURS.get(game.state, "")), *figures, Text(result or "–"))
    return table


def _page(game: GameState) -> RenderableType:
    facts = {
        "game": f"{game.runtime_id} ({', '.join(filter(None, (game.game, game.mode, 'evaluation' if game.eval_mode else '')))})",
        "state": game.state,
        "reason": game.reason,
        **{f"lost camp {camp}": why for camp, why in game.lost_camps.items()},
        "exit code": "" if game.exit_code is None else str(game.exit_code),
        "time": "" if game.seconds is None else f"{game.seconds:.1f} s",
        "process": "" if game.pid is None else str(game.pid),
        "cpu": "" if game.cpu_s is None else f"{game.cpu_s:.1f} s",
        "memory": "" if game.memory_mb is None or game.over else f"{game.memory_mb:.1f} MB",
        "threads": "" if game.threads is None or game.over else str(game.threads),
        "restarts": str(game.restarts or ""),
        "seed": "" if game.seed is None else str(game.seed),
        "start from": game.start_from or "",
        "task": game.task_id or "",
        "result": "" if game.result is None else json.dumps(game.result),
        "last lines": "\n".join(game.last_lines),
    }
    return make_facts(facts, _COLOURS.get(game.state, ""))


def _catalogue_table(games: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    columns = ("game", "modes", "running", "saved states", "options")
    table = make_table(columns, right=("running", "saved states"), wrapped=columns)
    for name, entry in games.items():
        words = (name, ", ".join(entry.get("modes") or ()) or "any")
        options = ", ".join(entry.get("options") or ()) or "–"
        table.add_row(*map(Text, words), str(entry.get("running", "–")), str(entry.get("states", "–")), Text(options))
    return table
