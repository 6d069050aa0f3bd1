"""`ludus battle`: play matches between two players and report the win rate with its confidence interval."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.cli.common_options import run_argument, trust_option
from ludus.cli.help import option_in
from ludus.cli.output import make_console, make_table
from ludus.cli.progress import ProgressBar
from ludus.cli.training import options as o

if TYPE_CHECKING:
    from ludus.tournament.result import BattleResult, MatchResult, WinLossCount

_matches, _players, _files, _server = map(option_in, ("Matches", "Players", "Recordings and videos", "Gamecore server"))
_COLUMNS = ("kills", "deaths", "assists", "gold", "level", "last_hits", "damage", "return", "decisions")
"""Numbers of a hero or an agent, in the order of the table."""
_STYLE: dict[str, Any] = {"header_style": "dim", "padding": (0, 2, 0, 0)}

_PLAYER = "Run (its newest checkpoint), RUN/best, a checkpoint, RUN@VERSION, an export (.onnx), http://HOST:PORT, rule:hard, or script:MODULE:FUNCTION."


def battle(
    a: Annotated[str, run_argument(metavar="A", help=_PLAYER)],
    b: Annotated[str, run_argument(metavar="B", help="Second player, in the same forms as A.")],
    games: Annotated[int, _matches(min=1, help="Number of matches.")] = 200,
    swap_sides: Annotated[
        bool, _matches("--swap-sides/--no-swap-sides", help="Let A play blue and red in turn, or always blue.")
    ] = True,
    mode: Annotated[str | None, _matches(metavar="NvN", help="Team sizes: 1v1, 3v3 … [default: as in training]")] = None,
    lineup: Annotated[
        str | None,
        _matches(
            metavar="A,…/B,…|random",
            help="Heroes of blue and red, by id, name or archetype; separate several line-ups by ';'. [default: the standard line-up]",
        ),
    ] = None,
    every: Annotated[int | None, _matches(min=1, help="Ticks between two decisions. [default: as in A's training]")] = None,
    seconds: Annotated[
        int | None, _matches(min=1, help="Game time limit; a match that reaches it is a draw. [default: 480]")
    ] = None,
    seed: Annotated[int, _matches(min=0, help="Random seed; the same seed gives the same matches.")] = 0,
    env: Annotated[
        str | None,
        _matches(metavar="NAME", help="Multi-agent environment to play in. [default: the one that A or B was trained in]"),
    ] = None,
    camps: Annotated[
        str | None,
        _matches(
            metavar="A,…/B,…",
            help="Agents of the blue and the red camp, by name or pattern. [default: the two agents, or the two groups of them]",
        ),
    ] = None,
    deterministic: Annotated[
        bool, _players("--deterministic/--explore", help="Play the most probable actions, or sample them.")
    ] = True,
    model_a: Annotated[str | None, _players(help="Model of A to use, if it has several.")] = None,
    model_b: Annotated[str | None, _players(help="Model of B to use, if it has several.")] = None,
    trust: Annotated[bool, trust_option(_players)] = False,
    record: Annotated[Path | None, _files(metavar="DIR", help="Directory for recordings of the matches.")] = None,
    record_most: Annotated[
        int | None, _files("--record-most", min=0, metavar="N", help="Record only the N most one-sided matches. [default: all]")
    ] = None,
    video: Annotated[int, _files(min=0, metavar="N", help="Render videos of the N most one-sided matches into DIR.")] = 0,
    video_speed: Annotated[
        float | None, _files("--video-speed", help="Playback speed of the videos. [default: 4 in the Arena, 1 elsewhere]")
    ] = None,
    server: Annotated[
        str | None,
        _server(
            metavar="HOST:PORT",
            help="Gamecore server that runs the matches. [default: this process; a private server if a player is served over HTTP]",
        ),
    ] = None,
    game: Annotated[str | None, _server(metavar="NAME", help="Game of the server's catalogue.")] = None,
    token_file: Annotated[Path | None, _server(metavar="FILE", help="File with the token of the gamecore server.")] = None,
    actor_token_file: Annotated[
        Path | None, _server(metavar="FILE", help="File with the token for players served over HTTP.")
    ] = None,
    advertise: Annotated[
        str | None,
        _server(metavar="HOST", help="Address at which games reach this machine. [default: its address towards the server]"),
    ] = None,
    option: Annotated[
        list[str] | None,
        _server("--option", "-o", metavar="KEY=VALUE", help="Option of the game or the environment; repeatable."),
    ] = None,
    parallel: Annotated[
        int,
        _server(
            min=0,
            show_default=False,
            help="Matches played at once. [default: one per core; in this process 64 Arena matches or 16 environments]",
        ),
    ] = 0,
    limit: Annotated[float | None, _server(min=1, metavar="S", help="Time limit of a match in seconds of real time.")] = None,
    json_: Annotated[bool, o.output_option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Play many matches between two players; report the win rate with its 95 % interval."""
    from ludus.cli.games.gamecore import read_options
    from ludus.core import trust as trusts
    from ludus.protocol.spec import read_token
    from ludus.tournament.battle import battle as run
    from ludus.tournament.contestants import contestant
    from ludus.tournament.gamecore_matches import GameLocation
    from ludus.tournament.settings import BattleSettings, RecordingSettings, read_lineups

    settings = BattleSettings(games, swap_sides, mode, read_lineups(lineup), every, seconds, seed, deterministic)
    recording_settings = RecordingSettings(record, record_most, video, video_speed)
    location = GameLocation(server, game, token_file, advertise, read_options(option or ()), parallel, limit, env, camps)
    token = read_token(actor_token_file)
    trusts.allow(a, b)
    one, other = contestant(a, model=model_a, token=token), contestant(b, model=model_b, token=token)
    with BattleProgress(games, quiet=json_) as progress:
        result = run(one, other, settings, recording_settings, location, progress.count, progress.render)
    if json_:
        print(json.dumps(result.to_json()), flush=True)
    else:
        show_battle(result)
    if len(result.failed) == len(result.games):
        raise typer.Exit(1)


class BattleProgress:
    """A progress bar of the games, then one of the videos; a terminal shows one at a time."""

    def __init__(self, games: int, *, quiet: bool) -> None:
        self._games = ProgressBar("playing", games, "games", quiet=quiet)
        self._videos = ProgressBar("rendering videos", unit="frames", quiet=quiet, deferred=True)
        self._playing = ExitStack()

    def __enter__(self) -> BattleProgress:
        self._playing.enter_context(self._games)
        return self

    def __exit__(self, *exc: object) -> None:
        self._playing.close()
        self._videos.__exit__(*exc)

    def count(self, played: MatchResult) -> None:
        self._games.advance()
        if played.failed:
            print(f"game {played.number} has no result: {played.failed}", file=sys.stderr, flush=True)

    def render(self, done: int, total: int | None) -> None:
        self._playing.close()
        self._videos.update(done, total)


def show_battle(result: BattleResult) -> None:
    """Print the win rates, the statistics of heroes, and the files that were written."""
    console = make_console(highlight=False, markup=False)
    console.print(f"A  {result.a['name']}\nB  {result.b['name']}")
    console.print(_headline(result))
    for side, members in (result.terms.get("camps") or {}).items():
        console.print(f"{side}  {', '.join(members)}")
    counts = ("games", "won", "lost", "drawn", "won, % [95 %]")
    table = make_table(("A plays", *counts), right=counts, **_STYLE)
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
        console.print(f"failed  {len(result.failed)} games, not counted: {result.failed[0].failed}")
    for note in result.notes:
        console.print(f"note  {note}")
    for played in result.games:
        if played.video:
            console.print(f"video  {played.video}")
    recorded = [played.recording for played in result.games if played.recording]
    if recorded:
        console.print(f"recordings  {len(recorded)} in {Path(recorded[0]).parent}")


def _headline(result: BattleResult) -> str:
    terms, total = result.terms, result.total
    what = " ".join(str(terms[key]) for key in ("game", "mode") if terms.get(key))
    played = f"{total.games} games of {what}, seed {terms['seed']}, {result.elapsed_s:.1f} s"
    return f"{played}: A wins {_percent(total)} %" if total.games else f"{played}: none has a result"


def _percent(share: WinLossCount) -> str:
    low, high = share.bounds
    return f"{100 * (share.rate or 0.0):.1f} [{100 * low:.1f}–{100 * high:.1f}]"


def _show_heroes(result: BattleResult, console: Any) -> None:
    rows = [(who, hero, numbers) for who, found in result.heroes.items() for hero, numbers in found.items()]
    if not rows:
        return
    columns = [key for key in _COLUMNS if any(key in numbers for _, _, numbers in rows)]
    titles = ["games", *(key.replace("_", " ") for key in columns)]
    table = make_table(("", "agent" if result.terms.get("camps") else "hero", *titles), right=titles, **_STYLE)
    for who, hero, numbers in rows:
        cells = ["–" if key not in numbers else f"{numbers[key]:.{0 if numbers[key] >= 100 else 1}f}" for key in columns]
        table.add_row(who.upper(), hero, f"{numbers['games']:.0f}", *cells)
    console.print(table)
