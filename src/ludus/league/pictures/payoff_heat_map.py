"""Heat map of the payoff matrix: win rate of every player against every other, the best players first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ludus.league.cycles import Cycle, cyclic_share, find_cycles
from ludus.league.payoff import Doubles
from ludus.league.pictures.canvas import ROLE_COLOURS, new_figure
from ludus.league.rating_table import rate_players, win_rates_and_games
from ludus.league.state import LeagueState

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKED_CYCLES: Final = 3
_CYCLE_COLOURS: Final = ("#111111", "#7a3fb5", "#2f8f3a")
_NO_MATCHES: Final = "#e4e4e4"
_LABELS_UP_TO: Final = 250
"""Players beyond which only every n-th is labelled."""
_NUMBERS_UP_TO: Final = 24
_COUNTS_UP_TO: Final = 14


def draw_payoff(state: LeagueState, top: int | None = None) -> Figure:
    """`top`: only the best players."""
    names = [one.name for one in rate_players(state)][:top]
    rates, games = win_rates_and_games(state, names)
    cycles = find_cycles(names, rates, games, limit=_MARKED_CYCLES)
    n = len(names)
    cell = _cell_inches(n)
    margin = 0.075 * max(map(len, names), default=0) + 0.4
    figure = new_figure(n * cell + margin + 1.0, n * cell + margin + 0.9 + 0.2 * len(cycles))
    axes = figure.subplots()
    shown = np.where(games > 0, rates, np.nan) if n else np.full((1, 1), np.nan)
    image = axes.imshow(shown, cmap=_colours(), vmin=0, vmax=1, interpolation="nearest")
    axes.set_facecolor(_NO_MATCHES)
    scale = max(1.0, n * cell / 10)
    _label(axes, state, names, cell, scale)
    if n <= _NUMBERS_UP_TO:
        _write_numbers(axes, rates, games)
    _mark_cycles(axes, names, cycles, cell, 7.5 * scale)
    axes.set_title(_title(rates, games, cycles, n), fontsize=9 * scale, loc="left")
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01, shrink=0.8)
    bar.set_label("win rate of the row against the column (grey: no matches)", fontsize=8 * scale)
    bar.ax.tick_params(labelsize=7 * scale)
    return figure


def _cell_inches(players: int) -> float:
    """Large enough for numbers in a small league, for labels in a large one; the matrix is at least 4 and at most 26 inches wide."""
    wanted = 0.62 if players <= _COUNTS_UP_TO else 0.4 if players <= _NUMBERS_UP_TO else 0.105
    return min(max(wanted, (8.0 if players > _NUMBERS_UP_TO else 4.0) / max(players, 1)), 26.0 / max(players, 1))


def _colours() -> Any:
    from matplotlib import colormaps

    return colormaps["RdBu"].with_extremes(bad=_NO_MATCHES)


def _label(axes: Any, state: LeagueState, names: Sequence[str], cell: float, scale: float) -> None:
    every = 1 + len(names) // (_LABELS_UP_TO + 1)
    shown = range(0, len(names), every)
    size = min(8.0, every * cell * 72 * 0.8)
    axes.set_xticks(list(shown), [names[i] for i in shown], rotation=90, fontsize=size)
    axes.set_yticks(list(shown), [names[i] for i in shown], fontsize=size)
    axes.tick_params(length=0, pad=2)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        for i, label in zip(shown, labels, strict=True):
            label.set_color(ROLE_COLOURS[state.players[names[i]].role])
    axes.set_ylabel("player, best first", fontsize=8 * scale)
    axes.set_xlabel("opponent", fontsize=8 * scale)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _write_numbers(axes: Any, rates: Doubles, games: Doubles) -> None:
    counts = len(rates) <= _COUNTS_UP_TO
    for i, j in zip(*np.nonzero(games), strict=True):
        colour = "white" if abs(rates[i, j] - 0.5) > 0.33 else "#222222"
        text = f"{100 * rates[i, j]:.0f}"
        axes.text(j, i - 0.12 * counts, text, ha="center", va="center", fontsize=8, color=colour)
        if counts:
            axes.text(j, i + 0.26, f"{games[i, j]:.0f}", ha="center", va="center", fontsize=5.5, color=colour)


def _mark_cycles(axes: Any, names: Sequence[str], cycles: Sequence[Cycle], cell: float, size: float) -> None:
    """Frame the three cells of each cycle in its colour; nested frames if a cell is part of several."""
    from matplotlib.patches import Rectangle

    index = {name: i for i, name in enumerate(names)}
    around = max(1.0, 0.1 / cell)  # frames of tiny cells are larger, to be seen
    for number, (cycle, colour) in enumerate(zip(cycles, _CYCLE_COLOURS, strict=False)):
        # Frames of small cells are drawn around them: inside they would hide the colour.
        inset = 0.04 + 0.06 * number if cell > 0.2 else -around * (0.55 + 0.35 * number)
        for own, other in zip(cycle.players, (*cycle.players[1:], cycle.players[0]), strict=True):
            corner = (index[other] - 0.5 + inset, index[own] - 0.5 + inset)
            axes.add_patch(Rectangle(corner, 1 - 2 * inset, 1 - 2 * inset, fill=False, edgecolor=colour, linewidth=1.8))
    if cycles:
        frames = [Rectangle((0, 0), 1, 1, fill=False, edgecolor=colour, linewidth=1.8) for colour in _CYCLE_COLOURS]
        legend = [describe_cycle(cycle) for cycle in cycles]
        axes.legend(
            frames[: len(cycles)], legend, loc="upper left", bbox_to_anchor=(0, -0.01), fontsize=size, frameon=False, borderaxespad=0.2
        )  # fmt: skip


def _title(rates: Doubles, games: Doubles, cycles: Sequence[Cycle], players: int) -> str:
    share = f"{cyclic_share(rates, games):.0%} of the payoffs is cyclic" if games.any() else "no results"
    return f"Payoff matrix of {players} players; {share}{'; strongest cycles framed' if cycles else ''}"


def describe_cycle(cycle: Cycle) -> str:
    """One line: `A > B > C > A, at least 62 % (62, 70, 81 %)`."""
    around = " > ".join((*cycle.players, cycle.players[0]))
    return f"{around}, at least {cycle.strength:.0%} ({', '.join(f'{100 * rate:.0f}' for rate in cycle.win_rates)} %)"
