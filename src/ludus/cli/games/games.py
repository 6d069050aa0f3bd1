"""`ludus games`: play, replay and render the games that come with Ludus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.cli.help import HelpApp
from ludus.cli.output import make_table
from ludus.cli.progress import ProgressBar
from ludus.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ludus.core.types import Ints32
    from ludus.games.arena.engine.recording import Recording
    from ludus.games.arena.engine.vector import Arena

app = HelpApp(help="Play, replay and render the games that come with Ludus.", no_args_is_help=True)
arena = HelpApp(help="Play, replay and rate bots in the Arena, a lane battle of two teams.", no_args_is_help=True)
app.add_typer(arena, name="arena")

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on the last line.")]
Camp = Annotated[int | None, typer.Option(min=0, max=1, help="Show only what this camp sees.")]
Width = Annotated[int, typer.Option(min=160, max=7680, help="Width of the picture or video, in pixels.")]
Video = Annotated[Path | None, typer.Option(metavar="FILE.mp4", help="Video file to write.")]
Speed = Annotated[float, typer.Option(help="Playback speed; 2 = twice as fast.")]


@arena.command()
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Recording of a match.")],
    video: Video = None,
    speed: Speed = 1.0,
    camp: Camp = None,
    first: Annotated[float, typer.Option("--from", min=0.0, help="Start of the video, in seconds of game time.")] = 0.0,
    last: Annotated[float | None, typer.Option("--to", min=0.0, help="End of the video, in seconds of game time.")] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Picture file to write.")] = None,
    at: Annotated[float | None, typer.Option(min=0.0, help="Time of the picture, in seconds. [default: the end]")] = None,
    width: Width = 1280,
    fps: Annotated[int, typer.Option(min=1, max=120, help="Frames per second of the video.")] = 30,
    check: Annotated[bool, typer.Option("--check", help="Replay the whole match and compare every hash.")] = False,
    as_json: AsJson = False,
) -> None:
    """Inspect a recorded match; verify it by replaying it bit for bit; render it as video or picture."""
    from ludus.games.arena.engine.recording import read_recording, verify
    from ludus.games.arena.render.renderer import Renderer, save_png
    from ludus.games.arena.render.video import camp_titles, state_at, write_video

    recording = read_recording(file)
    summary = _summarize(recording)
    lines = [f"{file}: {summary['mode']}, {summary['camps'][0]} against {summary['camps'][1]}, {summary['outcome']}"]
    if check:
        summary["hash"] = verify(recording)
        lines.append(f"replayed bit for bit: {summary['decisions']} decisions, last state {summary['hash']}")
    if picture is not None:
        state = state_at(recording, recording.seconds if at is None else at)
        renderer = Renderer(recording.size, width, camp=camp, names=camp_titles(recording))
        summary["picture"] = str(save_png(renderer.paint(*state), picture))
    if video is not None:
        with ProgressBar("rendering", unit="frames", quiet=as_json, deferred=True) as bar:
            write_video(
                recording, video, speed=speed, camp=camp, width=width, fps=fps, first_s=first, last_s=last, progress=bar.update
            )
        summary["video"] = str(video)
    _print_result(lines, summary, as_json)


@arena.command()
def play(
    mode: Annotated[str, typer.Option(help="Team sizes: 1v1, 3v3 …")] = "1v1",
    camps: Annotated[str, typer.Option(metavar="A,B", help="Scripted bots of the two camps.")] = "hard,medium",
    heroes: Annotated[
        str | None, typer.Option(metavar="A,…/B,…", help="Heroes by id, name or archetype: 190,173,117/141,111,107.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same match.")] = 0,
    start_from: Annotated[Path | None, typer.Option(help="Saved state to start from.")] = None,
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Recording to write.")] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Picture of the end to write.")] = None,
    video: Video = None,
    speed: Speed = 1.0,
    camp: Camp = None,
    width: Width = 1280,
    as_json: AsJson = False,
) -> None:
    """Play a match between two scripted bots."""
    from ludus.games.arena.engine.recording import write_recording
    from ludus.games.arena.engine.saved_state import read_state
    from ludus.games.arena.engine.vector import Arena
    from ludus.games.arena.render.renderer import Renderer, save_png
    from ludus.games.arena.render.video import camp_titles, write_video

    lineup = [side.split(",") for side in heroes.split("/")] if heroes else None
    match = Arena(mode, 1, lineup=lineup)
    match.reset([seed])
    if start_from is not None:
        match.load(0, read_state(start_from).data)
    recording = _play_match(match, _parse_camps(camps))
    summary = _summarize(recording) | {"heroes": _hero_rows(match.units[0], match.size)}
    lines = [f"{summary['mode']}, {summary['camps'][0]} against {summary['camps'][1]}, seed {seed}: {summary['outcome']}"]
    if record is not None:
        summary["recording"] = str(write_recording(record, recording))
    if picture is not None:
        renderer = Renderer(match.size, width, camp=camp, names=camp_titles(recording))
        summary["picture"] = str(save_png(renderer.paint(match.units[0], match.match[0]), picture))
    if video is not None:
        with ProgressBar("rendering", unit="frames", quiet=as_json, deferred=True) as bar:
            write_video(recording, video, speed=speed, camp=camp, width=width, progress=bar.update)
        summary["video"] = str(video)
    if not as_json:
        _print_table(summary["heroes"])
    _print_result(lines, summary, as_json)


@arena.command()
def heroes(as_json: AsJson = False) -> None:
    """List the heroes and their skills."""
    from ludus.games.arena.engine.heroes import EFFECTS, HEROES

    rows = [
        {
            "id": hero.id,
            "name": hero.name,
            "archetype": hero.archetype,
            "health": hero.hp,
            "attack": hero.attack,
            "armour": hero.armour,
            "range m": hero.range / 1000,
            "speed m/s": hero.speed / 1000,
            **{
                f"skill {k}": " ".join(filter(None, (skill.name, f"({EFFECTS[skill.effect]})" if skill.effect else "")))
                for k, skill in enumerate(hero.skills, 1)
            },
        }
        for hero in HEROES
    ]
    if as_json:
        print(json.dumps(rows))
    else:
        _print_table(rows)


@arena.command()
def ladder(
    mode: Annotated[str, typer.Option(help="Team sizes: 1v1, 3v3 …")] = "1v1",
    games: Annotated[int, typer.Option(min=2, max=100_000, help="Matches of every pair, half from each side.")] = 100,
    pairs: Annotated[str | None, typer.Option(metavar="A:B,…", help="Scripted bots. [default: easy to hard]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same matches.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Play a round-robin of the scripted bots with random line-ups; win rates with 95 % intervals."""
    from ludus.games.arena.bots import round_robin as ladders
    from ludus.games.arena.engine.settings import size_of

    chosen = ladders.PAIRS if pairs is None else tuple(_parse_pair(words) for words in pairs.split(","))
    with ProgressBar("playing", len(chosen), "pairs", quiet=as_json) as bar:
        rows = []
        for standing in ladders.play_pairs(games, size_of(mode), seed, chosen):
            rows.append(standing.row())
            bar.advance()
    if as_json:
        print(json.dumps(rows))
    else:
        _print_table([row | {"seconds": "–".join(map(str, row["seconds"]))} for row in rows])


def _parse_pair(words: str) -> tuple[str, str]:
    names = [name.strip() for name in words.split(":")]
    if len(names) != 2:
        raise UsageError(f"{words!r} is not a pair of scripted bots.", "For instance hard:medium.")
    return names[0], names[1]


# -- playing --------------------------------------------------------------------------------------------------------------


def _parse_camps(camps: str) -> tuple[str, str]:
    from ludus.core.plugins import did_you_mean
    from ludus.games.arena.bots.bots import BOTS

    names = [name.strip() for name in camps.split(",")]
    if len(names) != 2:
        raise UsageError(f"--camps {camps!r} does not name two scripted bots.", "For instance hard,medium.")
    for name in names:
        if name not in BOTS:
            raise UsageError(f"There is no scripted bot {name!r}.", did_you_mean(name, BOTS))
    return names[0], names[1]


def _play_match(match: Arena, players: tuple[str, str]) -> Recording:
    """Play a match to its end and return its recording."""
    import numpy as np

    from ludus.games.arena.bots.bots import BOTS
    from ludus.games.arena.engine.recording import Recorder

    scripts = np.repeat(np.array([BOTS.index(name) for name in players], np.int8), match.size)[None]
    recorder = Recorder(match, 0, players)
    while not match.over[0]:
        actions = match.bot_actions(scripts)
        recorder.add(actions)
        match.step(actions)
    return recorder.recording()


# -- output ---------------------------------------------------------------------------------------------------------------


def _summarize(recording: Recording) -> dict[str, Any]:
    from ludus.games.arena.engine.heroes import HEROES, row_of
    from ludus.games.arena.render.hud import format_clock
    from ludus.games.arena.render.video import camp_titles

    names = camp_titles(recording)
    ticks = recording.result.get("ticks")
    winner = recording.result.get("winner")
    when = f"after {format_clock(ticks)}" if isinstance(ticks, int) else ""
    if not recording.result.get("over"):
        outcome = f"not over {when}".strip()
    else:
        outcome = f"{names[winner]} won {when}" if winner in (0, 1) else f"draw {when}"
    return {
        "mode": recording.mode,
        "camps": list(names),
        "lineup": [[HEROES[row_of(hero)].name for hero in side] for side in recording.lineup],
        "seed": recording.seed,
        "winner": winner,
        "ticks": ticks,
        "decisions": len(recording.decisions),
        "from_saved_state": recording.start is not None,
        "outcome": outcome.strip(),
    }


def _hero_rows(units: Ints32, size: int) -> list[dict[str, Any]]:
    from ludus.games.arena.engine import layout
    from ludus.games.arena.engine.heroes import HEROES
    from ludus.games.arena.render.renderer import NAMES

    columns = {
        "level": layout.LEVEL,
        "kills": layout.KILLS,
        "deaths": layout.DEATHS,
        "assists": layout.ASSISTS,
        "last hits": layout.LAST_HITS,
        "gold": layout.EARNED,
        "damage": layout.DAMAGE,
        "to buildings": layout.DAMAGE_BUILDINGS,
        "healed": layout.HEALED,
    }
    return [
        {"camp": NAMES[slot // size], "hero": HEROES[int(units[layout.HERO_ROW, slot])].name}
        | {name: int(units[field, slot]) for name, field in columns.items()}
        for slot in range(2 * size)
    ]


def _print_result(lines: list[str], summary: dict[str, Any], as_json: bool) -> None:
    """Print the lines and the files that were written; or the summary as JSON."""
    if as_json:
        print(json.dumps(summary))
        return
    written = [f"{kind:<11}{summary[kind]}" for kind in ("recording", "picture", "video") if kind in summary]
    for line in (*lines, *written):
        print(line)


def _print_table(rows: list[dict[str, Any]], console: Console | None = None) -> None:
    """Print rows as a table: compact on a narrow terminal, one line per row in a pipe."""
    from rich.console import Console
    from rich.measure import Measurement

    console = console or Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    table = _grid(rows, narrow=False)
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    console.print(table if needed <= console.width else _grid(rows, narrow=True))


def _grid(rows: list[dict[str, Any]], *, narrow: bool) -> Table:
    numbers = [name for name, value in rows[0].items() if not isinstance(value, str)]
    table = make_table(rows[0], right=numbers, wrapped=list(rows[0]) if narrow else (), collapse_padding=narrow)
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) and name != "id" else str(value) for name, value in row.items()))
    return table
