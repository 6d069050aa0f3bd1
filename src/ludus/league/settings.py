"""Settings of a league: matchmaking, snapshots and ratings. They are part of its state, and its journal records their changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ludus.league.matchmaking import MatchmakingSettings
from ludus.league.players import PlayerRole
from ludus.league.ratings import ELO_K

_REMOVED: Final = ("max_open_matches",)
"""Keys that earlier releases stored and that have no effect."""


@dataclass(frozen=True)
class SnapshotRule:
    """When a training player is copied to a historical one."""

    min_steps: int = 100_000
    """Minimum environment steps since its last snapshot."""
    max_steps: int = 200_000
    """Take a snapshot after this number of steps at the latest."""
    win_rate: float = 0.7
    """Before `max_steps`: minimum win rate against each of its opponents."""
    reset: float = 0.0
    """Probability that the player then starts again from its initial weights."""


@dataclass(frozen=True)
class LeagueSettings:
    matchmaking: MatchmakingSettings = field(default_factory=MatchmakingSettings)
    snapshots: Mapping[PlayerRole, SnapshotRule] = field(
        default_factory=lambda: {
            PlayerRole.MAIN: SnapshotRule(),
            PlayerRole.MAIN_EXPLOITER: SnapshotRule(reset=1.0),
            PlayerRole.LEAGUE_EXPLOITER: SnapshotRule(reset=0.25),
        }
    )
    decay: float = 0.99
    """Discount of older results of a pair per new result."""
    elo_k: float = ELO_K
    rating_window: int = 400
    """Latest results of matches started by a training player that count for its fitted rating."""
    seed: int = 0


def settings_to_json(settings: LeagueSettings) -> dict[str, Any]:
    return asdict(settings)


def settings_from_json(values: Mapping[str, Any]) -> LeagueSettings:
    """Inverse of `settings_to_json`. Raises TypeError, ValueError or KeyError for unknown or missing keys."""
    matchmaking = MatchmakingSettings(**values["matchmaking"])
    snapshots = {PlayerRole(role): SnapshotRule(**rule) for role, rule in values["snapshots"].items()}
    kept = {key: value for key, value in values.items() if key not in _REMOVED}
    return LeagueSettings(**{**kept, "matchmaking": matchmaking, "snapshots": snapshots})
