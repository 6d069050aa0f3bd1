"""Ratings of all players of a league by one fit of its results, for tables, curves and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ludus.league.payoff import UNSEEN, Doubles
from ludus.league.players import PlayerRole
from ludus.league.ratings import ELO_START, FittedRating, SkillEstimate, fit_ratings
from ludus.league.recent import RecentResults
from ludus.league.state import LeagueState

_OWN_RESULTS: Final = 100
"""With so many results of its own, a snapshot is no longer rated by those of its parent, which older weights have played in part."""


@dataclass(frozen=True)
class RatedPlayer:
    name: str
    role: PlayerRole
    rating: FittedRating
    elo: float
    """Elo after every match in turn."""
    skill: SkillEstimate
    games: int
    """Number of results against other players since its last reset."""
    anchor: bool
    available: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "player": self.name,
            "role": self.role.value,
            "rating": round(self.rating.elo, 2),
            "interval": round(self.rating.interval, 2),
            "elo": round(self.elo, 2),
            "skill": round(self.skill.mu, 4),
            "skill_sigma": round(self.skill.sigma, 4),
            "games": self.games,
            "anchor": self.anchor,
            "available": self.available,
        }


def rate_players(state: LeagueState) -> list[RatedPlayer]:
    """All players, the best first."""
    fitted, anchors = fit_league(state), anchors_of(state)
    rated = [
        RatedPlayer(
            name,
            player.role,
            fitted[name],
            state.elo[name],
            state.skill[name],
            sum(record.games for record in state.payoff.rows.get(name, {}).values()),
            name in anchors,
            player.available,
        )
        for name, player in state.players.items()
    ]
    return sorted(rated, key=lambda one: (-one.rating.elo, one.name))


def anchors_of(state: LeagueState) -> Mapping[str, float]:
    """Players with a given rating. Without any, the first fixed player is the anchor, at 1200."""
    given = {player.name: player.rating for player in state.players.values() if player.rating is not None}
    fixed = (player.name for player in state.players.values() if player.role is PlayerRole.FIXED)
    return given or dict.fromkeys(list(fixed)[:1], ELO_START)


def fit_league(state: LeagueState) -> dict[str, FittedRating]:
    """Ratings from all results at once: those between players that do not learn, and the latest ones of every training player.

    Results that a snapshot has from its parent count in full while it has none of its own, and less with each of them.
    """
    players = list(state.players)
    index = {name: i for i, name in enumerate(players)}
    learns = {name: state.players[name].role.learns for name in players}
    counts = np.zeros((3, len(players), len(players)))  # points, matches and draws of the row against the column
    for own, row in state.payoff.rows.items():
        if not learns[own]:
            for other, record in row.items():
                if not learns[other]:
                    counts[:, index[own], index[other]] = record.wins + 0.5 * record.draws, record.games, record.draws
    for own, recent in state.recent.items():
        if learns[own]:
            _add_results(counts, index, own, recent)
    played = counts[1].sum(axis=1)
    for own, recent in state.recent.items():
        share = 1 - played[index[own]] / _OWN_RESULTS
        if not learns[own] and share > 0:
            _add_results(counts, index, own, recent, share)
    score, games_played, drawn = counts
    return fit_ratings(players, score, games_played, anchors_of(state), draws=drawn)


def _add_results(counts: Doubles, index: Mapping[str, int], own: str, recent: RecentResults, share: float = 1.0) -> None:
    """Add results to `counts` of both players, each as `share` of a match."""
    for opponent, wins, draws, losses in recent.entries:
        games, points = wins + draws + losses, wins + 0.5 * draws
        counts[:, index[own], index[opponent]] += share * np.array([points, games, draws])
        counts[:, index[opponent], index[own]] += share * np.array([games - points, games, draws])


def win_rates_and_games(state: LeagueState, players: Sequence[str]) -> tuple[Doubles, Doubles]:
    """[players, players] win rates, 0.5 without results, and matches. For matches of training players, both are discounted with age."""
    index = {name: i for i, name in enumerate(players)}
    learns = {name: state.players[name].role.learns for name in players}
    rates, games = np.full((len(players), len(players)), UNSEEN), np.zeros((len(players), len(players)))
    for own in players:
        for other, record in state.payoff.rows.get(own, {}).items():
            if other not in index:
                continue
            where = index[own], index[other]
            if learns[own] or learns[other]:
                rates[where], games[where] = record.win_rate, record.weight
            else:
                rates[where], games[where] = (record.wins + 0.5 * record.draws) / record.games, record.games
    return rates, games
