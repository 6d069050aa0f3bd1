"""`ludus battle`: play matches between two players and report the win rate with its confidence interval."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.cli.progress import DeferredProgressBar, ProgressBar
from ludus.cli.run_argument import complete_run, run_place
from ludus.cli.training import options as o

if TYPE_CHECKING:
    from ludus.tournament.result import BattleResult, MatchResult, WinLossCount

_MATCHES, _PLAYERS, _FILES, _SERVER = "Matches", "Players", "Recordings and videos", "Gamecore server"
_COLUMNS = {
    "kills": "kills",
    "deaths": "deaths",
    "assists": "assists",
    "gold": "gold",
    "level": "level",
    "last_hits": "last hits",
    "damage": "damage",
    "return": "return",
    "decisions": "decisions",
}

_PLAYER = "Run (its newest checkpoint), RUN/best, a checkpoint, RUN@VERSION, an export (.onnx), http://HOST:PORT, or rule:hard."
_A = Annotated[
    str, typer.Argument(metavar="A", help=_PLAYER, show_default=False, callback=run_place, autocompletion=complete_run)
]
_B = Annotated[
    str,
    typer.Argument(
        metavar="B",
        help="Second player, in the same forms as A.",
        show_default=False,
        callback=run_place,
        autocompletion=complete_run,
    ),
]
_Games = Annotated[int, typer.Option(min=1, help="Number of matches.", rich_help_panel=_MATCHES)]
_Swap = Annotated[
    bool,
    typer.Option(
        "--swap-sides/--no-swap-sides", help="Let A play blue and red in turn, or always blue.", rich_help_panel=_MATCHES
    ),
]
_Mode = Annotated[
    str | None,
    typer.Option(
        metavar="NvN", help="Team sizes: 1v1, 3v3 … [default: as in training]", show_default=False, rich_help_panel=_MATCHES
    ),
]
_Lineup = Annotated[
    str | None,
    typer.Option(
        metavar="A,…/B,…|random",
        help="Heroes of blue and red, by id, name or archetype; separate several line-ups by ';'. [default: the standard line-up]",
        show_default=False,
        rich_help_panel=_MATCHES,
    ),
]
_Every = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Ticks between two decisions. [default: as in A's training]",
        show_default=False,
        rich_help_panel=_MATCHES,
    ),
]
_Seconds = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Game time limit; a match that reaches it is a draw. [default: 480]",
        show_default=False,
        rich_help_panel=_MATCHES,
    ),
]
_Seed = Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same matches.", rich_help_panel=_MATCHES)]
_Explore = Annotated[
    bool,
    typer.Option("--deterministic/--explore", help="Play the most probable actions, or sample them.", rich_help_panel=_PLAYERS),
]
_ModelA = Annotated[
    str | None, typer.Option(help="Model of A to use, if it has several.", show_default=False, rich_help_panel=_PLAYERS)
]
_ModelB = Annotated[
    str | None, typer.Option(help="Model of B to use, if it has several.", show_default=False, rich_help_panel=_PLAYERS)
]
_Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        callback=o.allow_imports,
        help="Allow stored runs to import the code they name (environment, wrappers, models).",
        rich_help_panel=_PLAYERS,
    ),
]
_Record = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Directory for recordings of the matches.", show_default=False, rich_help_panel=_FILES),
]
_Most = Annotated[
    int | None,
    typer.Option(
        "--record-most",
        min=0,
        metavar="N",
        help="Record only the N most one-sided matches. [default: all]",
        show_default=False,
        rich_help_panel=_FILES,
    ),
]
_Video = Annotated[
    int, typer.Option(min=0, metavar="N", help="Render videos of the N most one-sided matches into DIR.", rich_help_panel=_FILES)
]
_Speed = Annotated[
    float | None,
    typer.Option(
        "--video-speed",
        help="Playback speed of the videos. [default: 4 in the Arena, 1 elsewhere]",
        show_default=False,
        rich_help_panel=_FILES,
    ),
]
_Env = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Multi-agent environment to play in. [default: the one that A or B was trained in]",
        show_default=False,
        rich_help_panel=_MATCHES,
    ),
]
_Camps = Annotated[
    str | None,
    typer.Option(
        metavar="A,…/B,…",
        help="Agents of the blue and the red camp, by name or pattern. [default: the two agents, or the two groups of them]",
        show_default=False,
        rich_help_panel=_MATCHES,
    ),
]
_Server = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Gamecore server that runs the matches. [default: this process; a private server if a player is served over HTTP]",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
_Game = Annotated[
    str | None, typer.Option(metavar="NAME", help="Game of the server's catalogue.", show_default=False, rich_help_panel=_SERVER)
]
_TokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with the token of the gamecore server.", show_default=False, rich_help_panel=_SERVER),
]
_ActorToken = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File with the token for players served over HTTP.", show_default=False, rich_help_panel=_SERVER
    ),
]
_Advertise = Annotated[
    str | None,
    typer.Option(
        metavar="HOST",
        help="Address at which games reach this machine. [default: its address towards the server]",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
_Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="Option of the game or the environment; repeatable.",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
_Parallel = Annotated[
    int,
    typer.Option(
        min=0,
        help="Matches played at once. [default: one per core; in this process 64 Arena matches or 16 environments]",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
_Limit = Annotated[
    float | None,
    typer.Option(
        min=1, metavar="S", help="Time limit of a match in seconds of real time.", show_default=False, rich_help_panel=_SERVER
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.", rich_help_panel=o.OUTPUT)]


def battle(
    a: _A,
    b: _B,
    games: _Games = 200,
    swap_sides: _Swap = True,
    mode: _Mode = None,
    lineup: _Lineup = None,
    every: _Every = None,
    seconds: _Seconds = None,
    seed: _Seed = 0,
    env: _Env = None,
    camps: _Camps = None,
    deterministic: _Explore = True,
    model_a: _ModelA = None,
    model_b: _ModelB = None,
    trust: _Trust = False,
    record: _Record = None,
    record_most: _Most = None,
    video: _Video = 0,
    video_speed: _Speed = None,
    server: _Server = None,
    game: _Game = None,
    token_file: _TokenFile = None,
    actor_token_file: _ActorToken = None,
    advertise: _Advertise = None,
    option: _Option = None,
    parallel: _Parallel = 0,
    limit: _Limit = None,
    json_: _Json = False,
) -> None:
    """Play many matches between two players; report the win rate with its 95 % interval."""
    from ludus.cli.games.gamecore import read_options
    from ludus.protocol.spec import read_token
    from ludus.tournament.battle import battle as run
    from ludus.tournament.contestants import contestant
    from ludus.tournament.gamecore_matches import GameLocation
    from ludus.tournament.settings import BattleSettings, RecordingSettings, read_lineups

    settings = BattleSettings(games, swap_sides, mode, read_lineups(lineup), every, seconds, seed, deterministic)
    recording_settings = RecordingSettings(record, record_most, video, video_speed)
    location = GameLocation(server, game, token_file, advertise, read_options(option or ()), parallel, limit, env, camps)
    token = read_token(actor_token_file)
    one, other = contestant(a, model=model_a, token=token), contestant(b, model=model_b, token=token)
    with _Progress(games, quiet=json_) as progress:
        result = run(one, other, settings, recording_settings, location, progress.count, progress.render)
    if json_:
        print(json.dumps(result.to_json()), flush=True)
    else:
        _show(result)
    if len(result.failed) == len(result.games):
        raise typer.Exit(1)


class _Progress:
    """A progress bar of the games, then one of the videos; a terminal shows one at a time."""

    def __init__(self, games: int, *, quiet: bool) -> None:
        self._games = ProgressBar("playing", games, "games", quiet=quiet)
        self._videos = DeferredProgressBar("rendering videos", "frames", quiet=quiet)
        self._playing = False

    def __enter__(self) -> _Progress:
        self._games.__enter__()
        self._playing = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._end_games()
        self._videos.__exit__(*exc)

    def count(self, played: MatchResult) -> None:
        self._games.advance()
        if played.failed:
            print(f"game {played.number} has no result: {played.failed}", file=sys.stderr, flush=True)

    def render(self, done: int, total: int | None) -> None:
        self._end_games()
        self._videos.update(done, total)

    def _end_games(self) -> None:
        if self._playing:
            self._playing = False
            self._games.__exit__(None, None, None)


def _show(result: BattleResult) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=10_000, highlight=False)
    console.print(f"A  {result.a['name']}\nB  {result.b['name']}", markup=False)
    console.print(_headline(result), markup=False)
    for side, members in (result.terms.get("camps") or {}).items():
        console.print(f"{side}  {', '.join(members)}", markup=False)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("A plays", "games", "won", "lost", "drawn", "won, % [95 %]"):
        table.add_column(name, justify="left" if name == "A plays" else "right")
    for name, share in {"both": result.total, **result.sides}.items():
        if share.games:
            table.add_row(name, str(share.games), str(share.won), str(share.lost), str(share.drawn), _percent(share))
    console.print(table)
    _show_heroes(result, console)
    if lengths := result.lengths:
        unit = "s" if result.clocked else "steps"
        middle = f"{lengths['p50']:.0f} {unit} [{lengths['p25']:.0f}–{lengths['p75']:.0f}]"
        console.print(f"length  {middle}, {lengths['shortest']:.0f} to {lengths['longest']:.0f} {unit}")
    if result.failed:
        console.print(f"failed  {len(result.failed)} games, not counted: {result.failed[0].failed}", markup=False)
    for note in result.notes:
        console.print(f"note  {note}", markup=False)
    for played in result.games:
        if played.video:
            console.print(f"video  {played.video}", markup=False)
    recorded = [played.recording for played in result.games if played.recording]
    if recorded:
        console.print(f"recordings  {len(recorded)} in {Path(recorded[0]).parent}", markup=False)


def _headline(result: BattleResult) -> str:
    terms, total = result.terms, result.total
    what = " ".join(str(terms[key]) for key in ("game", "mode") if terms.get(key))
    played = f"{total.games} games of {what}, seed {terms['seed']}, {result.elapsed_s:.1f} s"
    return f"{played}: A wins {_percent(total)} %" if total.games else f"{played}: none has a result"


def _percent(share: WinLossCount) -> str:
    low, high = share.bounds
    return f"{100 * (share.rate or 0.0):.1f} [{100 * low:.1f}–{100 * high:.1f}]"


def _show_heroes(result: BattleResult, console: Any) -> None:
    from rich.table import Table

    rows = [(who, hero, numbers) for who, found in result.heroes.items() for hero, numbers in found.items()]
    if not rows:
        return
    columns = {key: name for key, name in _COLUMNS.items() if any(key in numbers for _, _, numbers in rows)}
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    named = "agent" if result.terms.get("camps") else "hero"
    for name in ("", named, "games", *columns.values()):
        table.add_column(name, justify="left" if name in ("", named) else "right")
    for who, hero, numbers in rows:
        cells = ["–" if key not in numbers else f"{numbers[key]:.{0 if numbers[key] >= 100 else 1}f}" for key in columns]
        table.add_row(who.upper(), hero, f"{numbers['games']:.0f}", *cells)
    console.print(table)
