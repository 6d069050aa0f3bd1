"""Shared parts of the pictures of a league: colours of the roles, figures, PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ludus.league.players import PlayerRole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLE_COLOURS: Final = {
    PlayerRole.MAIN: "#1f5fa8",
    PlayerRole.MAIN_EXPLOITER: "#c8511b",
    PlayerRole.LEAGUE_EXPLOITER: "#3b8a3f",
    PlayerRole.HISTORICAL: "#8a8a8a",
    PlayerRole.FIXED: "#333333",
}
DPI: Final = 110
VAGUE: Final = 150.0
"""Half-width of the interval, in Elo points, beyond which a snapshot has too few matches to be shown with its rating."""
MAX_PIXELS: Final = 6000
"""Longest side of a picture; viewers fail above about 2^15."""


def new_figure(width: float, height: float) -> Figure:
    """A figure without a screen; sizes in inches."""
    from matplotlib.figure import Figure

    longest = MAX_PIXELS / DPI
    return Figure(figsize=(min(width, longest), min(height, longest)), dpi=DPI, layout="constrained")


def to_png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def plain_axes(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def spread_labels(wanted: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones that keep a distance from each other, between `low` and `high` as far as there is room.

    Minimises the squared displacement: labels that would overlap are centred on the mean of their wanted positions.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    distance = min(distance, (high - low) / max(len(wanted) - 1, 1))
    groups: list[tuple[float, int]] = []  # (start of the group, members), from low to high
    for i in order:
        start, size = wanted[i], 1
        while groups and groups[-1][0] + groups[-1][1] * distance > start:
            before, members = groups.pop()
            start = (before * members + (start - members * distance) * size) / (members + size)
            size += members
        groups.append((start, size))
    placed = [start + k * distance for start, size in groups for k in range(size)]
    for k in range(len(placed)):
        placed[k] = max(placed[k], low + k * distance)
    for k in range(len(placed)):
        placed[k] = min(placed[k], high - (len(placed) - 1 - k) * distance)
    positions = [0.0] * len(wanted)
    for i, position in zip(order, placed, strict=True):
        positions[i] = position
    return positions


def short_number(value: float, _: object = None) -> str:
    """Label of an axis: 500, 20k, 1.5M."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"
