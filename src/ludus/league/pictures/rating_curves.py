"""Rating curves: training players as lines, snapshots as dots when they were taken, fixed players as dashed levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from ludus.league.history import RatingSample
from ludus.league.payoff import Doubles
from ludus.league.pictures.canvas import ROLE_COLOURS, VAGUE, new_figure, plain_axes, short_number, spread_labels
from ludus.league.players import Player
from ludus.league.state import LeagueState

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Over = Literal["results", "steps"]
_MOST_CURVES: Final = 20
_MOST_BANDS: Final = 6
"""Curves beyond which their intervals are not shaded: they would cover each other."""
_LINE_STYLES: Final = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)))


def draw_curves(state: LeagueState, history: Sequence[RatingSample], over: Over = "results") -> Figure:
    """`over`: matches of the league, or environment steps of each training player.

    A league without training players shows its best players.
    """
    figure = new_figure(9.5, 5.2)
    axes = figure.subplots()
    shown = _choose_players(state, history)
    curves = {player.name: _curve(player, history, over) for player in shown}
    right = max((float(x[-1]) for x, _, _ in curves.values()), default=0.0) or 1.0
    ends: list[tuple[str, float, str]] = []
    used: dict[str, int] = {}
    for player in shown:
        colour = ROLE_COLOURS[player.role]
        style = _LINE_STYLES[used.get(player.role, 0) % len(_LINE_STYLES)]
        used[player.role] = used.get(player.role, 0) + 1
        x, y, interval = curves[player.name]
        axes.plot(x, y, color=colour, linestyle=style, linewidth=1.6)
        if len(shown) <= _MOST_BANDS:
            axes.fill_between(x, y - interval, y + interval, color=colour, alpha=0.12, linewidth=0)
        ends.append((player.name, float(y[-1]), colour))
    _draw_snapshots(axes, state, history, over)
    for name, rating in _fixed(state, history).items():
        axes.axhline(rating, color="#333333", linestyle=(0, (2, 3)), linewidth=0.8)
        ends.append((name, rating, "#333333"))
    _style(axes, over, right)
    _label_ends(axes, ends)
    return figure


def _choose_players(state: LeagueState, history: Sequence[RatingSample]) -> list[Player]:
    newest = history[-1].ratings if history else {}
    learning = [player for player in state.players.values() if player.role.learns]
    chosen = learning or [player for player in state.players.values() if player.name not in _fixed(state, history)]
    rated = [player for player in chosen if player.name in newest]
    return sorted(rated, key=lambda player: -newest[player.name].elo)[:_MOST_CURVES]


def _fixed(state: LeagueState, history: Sequence[RatingSample]) -> dict[str, float]:
    ratings = history[-1].ratings if history else {}
    names = [player.name for player in state.players.values() if player.role == "fixed" and player.name in ratings]
    return {name: ratings[name].elo for name in sorted(names, key=lambda name: -ratings[name].elo)[:_MOST_CURVES]}


def _curve(player: Player, history: Sequence[RatingSample], over: Over) -> tuple[Doubles, Doubles, Doubles]:
    """Positions, ratings and half-widths of their intervals. The line has a gap where the player was reset to its initial weights."""
    points: list[tuple[float, float, float]] = []
    generation = None
    for sample in history:
        if player.name not in sample.ratings:
            continue
        x = sample.results if over == "results" else sample.steps.get(player.name, 0)
        if generation not in (None, sample.generations.get(player.name)):
            points.append((x, np.nan, np.nan))
        generation = sample.generations.get(player.name)
        points.append((x, sample.ratings[player.name].elo, sample.ratings[player.name].interval))
    columns = np.array(points, np.float64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _draw_snapshots(axes: Any, state: LeagueState, history: Sequence[RatingSample], over: Over) -> None:
    """A dot at the time of the snapshot, at its rating of now."""
    if not history or not any(player.role.learns for player in state.players.values()):
        return
    for player in state.players.values():
        if player.role != "historical" or player.parent_role is None or player.name not in history[-1].ratings:
            continue
        taken = next(sample.results for sample in history if player.name in sample.ratings)
        x = taken if over == "results" else player.steps
        rating = history[-1].ratings[player.name]
        if rating.interval > VAGUE:
            continue
        axes.plot([x], [rating.elo], "o", color=ROLE_COLOURS[player.parent_role], markersize=3.2, alpha=0.55, markeredgewidth=0)


def _style(axes: Any, over: Over, right: float) -> None:
    plain_axes(axes)
    axes.set_xlim(0, right)
    axes.xaxis.set_major_formatter(short_number)
    axes.set_xlabel("matches of the league" if over == "results" else "environment steps of the player", fontsize=9)
    axes.set_ylabel("rating (Elo points)", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.set_title(
        "Ratings with 95 % intervals; dots: snapshots when taken, at their rating of now; dotted levels: fixed players",
        fontsize=9,
        loc="left",
    )


def _label_ends(axes: Any, ends: Sequence[tuple[str, float, str]]) -> None:
    """Names to the right of the curves, moved apart."""
    low, high = axes.get_ylim()
    height = axes.figure.get_figheight() * 72 * 0.86
    size = 8.0 if len(ends) <= 30 else 6.0
    distance = (high - low) * size * 1.15 / height
    positions = spread_labels([rating for _, rating, _ in ends], distance, low, high)
    for (name, rating, colour), position in zip(ends, positions, strict=True):
        axes.annotate(
            f"{name}  {rating:.0f}",
            xy=(1.0, rating),
            xytext=(1.03, position),
            xycoords=axes.get_yaxis_transform(),
            textcoords=axes.get_yaxis_transform(),
            fontsize=size,
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )
    axes.set_ylim(low, high)
