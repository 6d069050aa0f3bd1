"""Commands that read a league, also while it runs: status, ratings, payoff, curves, tree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ludus.cli.common_options import AsJson
from ludus.cli.output import make_console, make_facts, make_table, say
from ludus.cli.progress import ProgressBar
from ludus.core.formatting import format_number
from ludus.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from ludus.league.cycles import Cycle
    from ludus.league.payoff import Doubles
    from ludus.league.players import Player
    from ludus.league.rating_table import RatedPlayer
    from ludus.league.state import LeagueState

LeagueDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the league.")]
Png = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the picture to this PNG file.")]

_MAX_COLUMNS = 12
"""Opponents in the payoff table on a terminal."""
_SAMPLES = 60


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the group `ludus league`."""
    for command in (status, ratings, payoff, curves, tree):
        app.command()(command)


def status(directory: LeagueDirectory, as_json: AsJson = False) -> None:
    """Show the players of a league by role, their steps and snapshots, and the matches counted."""
    from ludus.league.journal import read_owner, read_state

    state, owner = read_state(directory), read_owner(directory)
    if as_json:
        print(json.dumps(_status_json(state, owner)), flush=True)
        return
    console = make_console(highlight=False)
    roles = Counter(player.role.value.replace("_", " ") for player in state.players.values())
    unavailable = [player for player in state.players.values() if not player.available]
    facts = {
        "players": f"{len(state.players)}: {', '.join(f'{count} {role}' for role, count in roles.items())}"
        if state.players
        else "none",
        "matches": f"{state.results:,} counted",
        "pairs": f"{sum(map(len, state.payoff.rows.values())) // 2:,} with results",
        "coordinator": owner or "not running",
    }
    console.print(make_facts(facts))
    table = make_table(
        ("player", "role", "steps", "snapshots", "last snapshot", "resets", "games", "model"), right=_STATUS_NUMBERS
    )
    for player in state.players.values():
        if player.role != "historical":
            table.add_row(*_status_row(state, player))
    console.print(table)
    if unavailable:
        table = make_table(("not available", "role", "why"), wrapped=("why",))
        for player in unavailable:
            table.add_row(player.name, player.role.value, player.quarantine or "retired")
        console.print(table)


_STATUS_NUMBERS = ("steps", "snapshots", "last snapshot", "resets", "games")


def _games(state: LeagueState, name: str) -> int:
    return sum(record.games for record in state.payoff.rows.get(name, {}).values())


def _status_row(state: LeagueState, player: Player) -> list[str]:
    learning = [
        f"{player.steps:,}",
        str(sum(one.parent == player.name for one in state.players.values())),
        f"at {player.snapshot_steps:,}" if player.snapshot_steps else "–",
        str(player.generation),
    ]
    numbers = learning if player.role.learns else ["–"] * len(learning)
    return [player.name, player.role.value, *numbers, f"{_games(state, player.name):,}", player.model]


def _status_json(state: LeagueState, owner: str) -> dict[str, Any]:
    players = [
        {
            "name": player.name,
            "role": player.role.value,
            "steps": player.steps,
            "snapshots": sum(one.parent == player.name for one in state.players.values()) if player.role.learns else 0,
            "parent": player.parent,
            "resets": player.generation,
            "games": _games(state, player.name),
            "model": player.model,
            "retired": player.retired,
            "quarantine": player.quarantine,
        }
        for player in state.players.values()
    ]
    return {"results": state.results, "coordinator": owner, "players": players}


def ratings(
    directory: LeagueDirectory,
    top: Annotated[int | None, typer.Option(min=1, metavar="N", help="Show only the N best players.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the ratings of all players with their 95 % intervals, the best first."""
    from ludus.league.journal import read_state
    from ludus.league.rating_table import rate_players

    rated = rate_players(read_state(directory))[:top]
    if as_json:
        print(json.dumps([one.to_json() for one in rated]), flush=True)
        return
    numbers = ("#", "rating", "± 95 %", "Elo", "skill", "± 95 % ", "games")
    table = make_table(("#", "player", "role", *numbers[1:], "note"), right=numbers)
    for place, one in enumerate(rated, start=1):
        table.add_row(str(place), *_rating_row(one))
    make_console(highlight=False).print(table)
    say("rating: fit of all results; Elo, skill (OpenSkill): updated match by match (docs/league.md).")


def _rating_row(one: RatedPlayer) -> list[str]:
    notes = ["anchor"] * one.anchor + ["not available"] * (not one.available)
    return [
        one.name,
        one.role.value,
        f"{one.rating.elo:.0f}",
        "fixed" if one.anchor else f"{one.rating.interval:.0f}",
        f"{one.elo:.0f}",
        f"{one.skill.mu:.1f}",
        f"{1.96 * one.skill.sigma:.1f}",
        f"{one.games:,}",
        ", ".join(notes),
    ]


def payoff(
    directory: LeagueDirectory,
    png: Png = None,
    top: Annotated[int | None, typer.Option(min=2, metavar="N", help="Show only the N best players.")] = None,
    cycles: Annotated[int, typer.Option(min=0, metavar="N", help="Number of cycles to list.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show the win rates between players with the numbers of matches, and cycles: A beats B beats C beats A."""
    from ludus.league.cycles import cyclic_share, find_cycles
    from ludus.league.journal import read_state
    from ludus.league.pictures.payoff_heat_map import draw_payoff
    from ludus.league.rating_table import rate_players, win_rates_and_games

    state = read_state(directory)
    names = [one.name for one in rate_players(state)][:top]
    rates, games = win_rates_and_games(state, names)
    found = find_cycles(names, rates, games, limit=cycles) if cycles else []
    share = cyclic_share(rates, games)
    if as_json:
        print(json.dumps(_payoff_json(names, rates, games, found, share)), flush=True)
    else:
        console = make_console(highlight=False)
        _print_payoff(console, names, rates, games)
        console.print(f"cyclic share {share:.0%}: the part of the payoffs that ratings cannot explain")
        _print_cycles(console, found)
    if png is not None:
        _save(draw_payoff(state, top), png, quiet=as_json)


def _payoff_json(names: Sequence[str], rates: Doubles, games: Doubles, cycles: Sequence[Cycle], share: float) -> dict[str, Any]:
    return {
        "players": list(names),
        "win_rates": [[round(rate, 4) if count else None for rate, count in zip(*pair, strict=True)] for pair in zip(rates, games, strict=True)],
        "games": [[round(count, 2) for count in row] for row in games.tolist()],
        "cyclic_share": round(share, 4),
        "cycles": [{"players": cycle.players, "win_rates": cycle.win_rates, "games": cycle.games} for cycle in cycles],
    }  # fmt: skip


def _print_payoff(console: Console, names: Sequence[str], rates: Doubles, games: Doubles) -> None:
    """Row against column: win rate in per cent and number of matches. A terminal shows as many opponents as fit."""
    shown = range(min(len(names), _MAX_COLUMNS) if console.is_terminal else len(names))
    table = make_table(("#", "player", *(str(j + 1) for j in shown)), right=("#", *(str(j + 1) for j in shown)))
    for i, name in enumerate(names):
        cells = [f"{100 * rates[i, j]:.0f} ({games[i, j]:.0f})" if games[i, j] else "·" for j in shown]
        table.add_row(str(i + 1), name, *cells)
    console.print(table)
    hidden = len(names) - len(shown)
    more = f"; {hidden} more opponents: --png FILE or --json shows all" if hidden else ""
    console.print(f"wins of the row against the column in % (matches); numbers of columns as in #{more}")


def _print_cycles(console: Console, cycles: Sequence[Cycle]) -> None:
    if not cycles:
        console.print("no significant cycle of three players")
        return
    table = make_table(("cycle", "strength", "win rates", "games"), right=("strength",))
    for cycle in cycles:
        around = " > ".join((*cycle.players, cycle.players[0]))
        rates = ", ".join(f"{100 * rate:.0f} %" for rate in cycle.win_rates)
        table.add_row(around, f"{100 * cycle.strength:.0f} %", rates, ", ".join(map(str, cycle.games or ())))
    console.print(table)


def curves(
    directory: LeagueDirectory,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="PNG file to write; default: DIR/plots/ratings.png.")] = None,
    over: Annotated[str, typer.Option(metavar="results|steps", help="X axis: matches of the league, or steps of each player.")] = "results",
    samples: Annotated[int, typer.Option(min=2, max=1000, help="Number of points of a curve.")] = _SAMPLES,
) -> None:  # fmt: skip
    """Draw the ratings over time, from all events of the league."""
    from ludus.league.history import rating_history
    from ludus.league.journal import read_events, read_state
    from ludus.league.pictures.rating_curves import draw_curves

    x_axis = _x_axis(over)
    state = read_state(directory)
    with ProgressBar("reading the journal"):
        history = rating_history(read_events(directory), every=max(1, state.results // samples))
    _save(draw_curves(state, history, x_axis), png or directory / "plots" / "ratings.png")


def _x_axis(over: str) -> Literal["results", "steps"]:
    if over not in ("results", "steps"):
        raise UsageError(f"--over {over} is not known.", "Use results or steps.")
    return "results" if over == "results" else "steps"


def tree(directory: LeagueDirectory, png: Png = None) -> None:
    """Show the family tree: training players and their snapshots with ratings."""
    from rich.tree import Tree

    from ludus.league.journal import read_state
    from ludus.league.pictures.family_tree import draw_family_tree
    from ludus.league.rating_table import fit_league

    state = read_state(directory)
    fitted = fit_league(state)
    root = Tree(f"{directory.name or directory}", guide_style="dim")
    branches: dict[str, Tree] = {}
    waiting = sorted(state.players.values(), key=lambda player: player.steps)
    while waiting:
        ready = [player for player in waiting if player.parent in branches or player.parent not in {one.name for one in waiting}]
        for player in ready or waiting:
            steps = f" · {format_number(player.steps)} steps" if player.steps else ""
            off = "" if player.available else " · retired" if player.retired else f" · quarantined: {player.quarantine}"
            rating = fitted[player.name]
            text = f"{player.name} · {player.role.value} · {rating.elo:.0f} ± {rating.interval:.0f}{steps}{off}"
            branches[player.name] = branches.get(player.parent or "", root).add(text)
        waiting = [player for player in waiting if player.name not in branches]
    make_console(highlight=False, markup=False).print(root)
    if png is not None:
        _save(draw_family_tree(state), png)


def _save(figure: Figure, png: Path, *, quiet: bool = False) -> None:
    from ludus.io.atomic_file import replace_file
    from ludus.league.pictures.canvas import to_png

    try:
        png.parent.mkdir(parents=True, exist_ok=True)
        replace_file(png, to_png(figure))
    except OSError as error:
        raise UsageError(f"{png} cannot be written: {error.strerror or error}.", "Choose another file.") from error
    say(f"picture  {png}", to_stderr=quiet)
