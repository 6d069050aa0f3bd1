"""The players of a league."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_NAME: Final = re.compile(r"[A-Za-z0-9][\w:+.-]*")
"""Names are those of directories and files in a league. The colon is for players that earlier releases have added."""


def name_problem(name: str) -> str:
    """Why no player of a league can have the name; empty: it can. Names of snapshots have a dot."""
    return "" if _NAME.fullmatch(name) else f"{name!r} is not a name for a player: use letters, digits and _ + - ."


class PlayerRole(StrEnum):
    """What a player is for (Vinyals et al. 2019)."""

    MAIN = "main"
    """Trains against all others; the product of the league."""
    MAIN_EXPLOITER = "main_exploiter"
    """Trains against the main players only, to find their weaknesses."""
    LEAGUE_EXPLOITER = "league_exploiter"
    """Trains against all snapshots, to find weaknesses of the whole league."""
    HISTORICAL = "historical"
    """A snapshot of a training player. Its weights never change."""
    FIXED = "fixed"
    """A script, a checkpoint or a served address from outside the league. Ratings are anchored to these."""

    @property
    def learns(self) -> bool:
        return self in (PlayerRole.MAIN, PlayerRole.MAIN_EXPLOITER, PlayerRole.LEAGUE_EXPLOITER)


@dataclass(frozen=True)
class Player:
    name: str
    role: PlayerRole
    model: str = ""
    """Where its policy is: a run directory with a version, a checkpoint, `rule:NAME` or an address."""
    parent: str | None = None
    """The training player of which this is a snapshot."""
    parent_role: PlayerRole | None = None
    steps: int = 0
    """Environment steps trained so far; of a snapshot: when it was taken."""
    snapshot_steps: int = 0
    """`steps` at its last snapshot or reset."""
    generation: int = 0
    """Number of resets to its initial weights."""
    generation_steps: int = 0
    """`steps` at its last reset."""
    rating: float | None = None
    """Fixed rating of an anchor; None: rated by results."""
    retired: bool = False
    """Gets no new matches; its results stay."""
    quarantine: str = ""
    """Why its model could not be used; it gets no new matches until this is cleared."""
    token_file: str = ""
    """File with the token of a served address. The token itself is never stored in a league."""
    start_level: float = 0.0
    """Steps / share of the training players when it joined, added to its own in the order of turns."""

    @property
    def available(self) -> bool:
        return not self.retired and not self.quarantine
