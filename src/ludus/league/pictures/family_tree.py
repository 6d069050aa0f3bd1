"""Family tree of a league: one line per training player along its environment steps, with snapshots as dots coloured by rating."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ludus.league.pictures.canvas import ROLE_COLOURS, VAGUE, new_figure, plain_axes, short_number
from ludus.league.players import Player, PlayerRole
from ludus.league.rating_table import fit_league
from ludus.league.ratings import FittedRating
from ludus.league.state import LeagueState

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LANE_INCHES: Final = 0.42
_LABELLED_SNAPSHOTS: Final = 24
"""Snapshots of a lane beyond which only every n-th has its number."""


def draw_family_tree(state: LeagueState) -> Figure:
    ratings = fit_league(state)
    parents = _lane_owners(state)
    lanes = {name: lane for lane, name in enumerate(parents)}
    loose = [player for player in state.players.values() if player.name not in lanes and player.parent not in lanes]
    rows = len(lanes) + bool(loose)
    figure = new_figure(11.0, max(2.4, _LANE_INCHES * rows + 1.4))
    axes = figure.subplots()
    last = max((player.steps for player in state.players.values()), default=0) or 1
    for name, lane in lanes.items():
        _draw_lane(axes, state, name, lane, lanes, last)
    _draw_snapshots(axes, state, lanes, ratings, figure)
    if loose:
        _draw_loose(axes, loose, ratings, len(lanes), last)
    _style(axes, state, parents, bool(loose), last)
    return figure


def _lane_owners(state: LeagueState) -> list[str]:
    """Training players, and other players that have descendants; by role and name."""
    order = list(PlayerRole)
    have_children = {player.parent for player in state.players.values() if player.parent}
    owners = [
        player
        for player in state.players.values()
        if player.role.learns or (player.name in have_children and player.parent not in state.players)
    ]
    return [player.name for player in sorted(owners, key=lambda player: (order.index(player.role), player.name))]


def _snapshots_of(state: LeagueState, name: str) -> list[Player]:
    found = [player for player in state.players.values() if player.parent == name and player.role is PlayerRole.HISTORICAL]
    return sorted(found, key=lambda player: player.steps)


def _draw_lane(axes: Any, state: LeagueState, name: str, lane: int, lanes: Mapping[str, int], last: float) -> None:
    player = state.players[name]
    colour = ROLE_COLOURS[player.role]
    axes.plot([0, player.steps], [lane, lane], color=colour, linewidth=1.4, alpha=0.75, zorder=1)
    if player.role.learns:
        axes.plot([player.steps], [lane], marker=">", color=colour, markersize=9, zorder=2)
        retired = ", retired" if player.retired else ", quarantined" if player.quarantine else ""
        resets = f", {player.generation} resets" if player.generation else ""
        axes.annotate(
            f"{short_number(player.steps)} steps{resets}{retired}", (player.steps, lane),
            xytext=(9, 0), textcoords="offset points", va="center", fontsize=7, color=colour,
        )  # fmt: skip
    origin = state.players.get(player.parent or "")
    if origin is not None:
        above = lanes.get(origin.name, lanes.get(origin.parent or ""))
        if above is not None:
            axes.annotate(
                "", (0, lane), (origin.steps, above),
                arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 0.8, "connectionstyle": "arc3,rad=0.15"},
            )  # fmt: skip


def _draw_snapshots(
    axes: Any, state: LeagueState, lanes: Mapping[str, int], ratings: Mapping[str, FittedRating], figure: Figure
) -> None:
    xs, ys, colours = [], [], []
    for name, lane in lanes.items():
        snapshots = _snapshots_of(state, name)
        labelled = 1 + len(snapshots) // (_LABELLED_SNAPSHOTS + 1)
        for number, snapshot in enumerate(snapshots, start=1):
            if ratings[snapshot.name].interval > VAGUE:
                axes.plot([snapshot.steps], [lane], "o", markersize=5, color="white", markeredgecolor="#888888", zorder=3)
            else:
                xs.append(snapshot.steps)
                ys.append(lane)
                colours.append(ratings[snapshot.name].elo)
            if number % labelled == 0 or number == 1:
                label = snapshot.name.removeprefix(f"{name}.")
                axes.annotate(
                    label if len(label) <= 5 else str(number), (snapshot.steps, lane),
                    xytext=(0, 5.5), textcoords="offset points", ha="center", fontsize=6, color="#444444",
                )  # fmt: skip
    if xs:
        dots = axes.scatter(xs, ys, c=colours, cmap="viridis", s=30, zorder=3, edgecolors="white", linewidths=0.5)
        bar = figure.colorbar(dots, ax=axes, pad=0.01, fraction=0.025)
        bar.set_label("rating of the snapshot (Elo points)", fontsize=8)
        bar.ax.tick_params(labelsize=7)


def _draw_loose(axes: Any, players: Sequence[Player], ratings: Mapping[str, FittedRating], lane: int, last: float) -> None:
    """Players without a family: fixed ones, and snapshots whose parent is not in the league."""
    best = sorted(players, key=lambda player: -ratings[player.name].elo)
    names = [f"{player.name} {ratings[player.name].elo:.0f}" for player in best[:6]]
    more = f" and {len(best) - len(names)} more" if len(best) > len(names) else ""
    axes.text(0, lane, ",  ".join(names) + more, fontsize=7.5, va="center", color=ROLE_COLOURS[PlayerRole.FIXED])


def _style(axes: Any, state: LeagueState, parents: Sequence[str], loose: bool, last: float) -> None:
    plain_axes(axes)
    axes.grid(axis="y", visible=False)
    axes.set_yticks(range(len(parents) + loose), [*parents, *(["others"] if loose else [])], fontsize=8)
    for label, name in zip(axes.get_yticklabels(), parents, strict=False):
        label.set_color(ROLE_COLOURS[state.players[name].role])
    axes.set_ylim(len(parents) + loose - 0.4, -0.7)
    axes.set_xlim(-0.015 * last, 1.17 * last)
    axes.xaxis.set_major_formatter(short_number)
    axes.set_xlabel("environment steps of the player", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    snapshots = sum(player.role is PlayerRole.HISTORICAL for player in state.players.values())
    axes.set_title(f"Family tree: {len(parents)} families, {snapshots} snapshots (hollow: few matches)", fontsize=9, loc="left")
