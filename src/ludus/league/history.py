"""Ratings of a league over time, from the events in its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ludus.errors import Damaged
from ludus.league.events import LeagueEvent
from ludus.league.rating_table import fit_league
from ludus.league.ratings import FittedRating
from ludus.league.state import LeagueState, Refusal, step


@dataclass(frozen=True)
class RatingSample:
    """Ratings at one time."""

    results: int
    """Matches counted until then."""
    ratings: Mapping[str, FittedRating]
    steps: Mapping[str, int]
    """Environment steps of the training players until then."""
    generations: Mapping[str, int]
    """Resets of the training players until then."""


def sample_ratings(state: LeagueState) -> RatingSample:
    learning = [player for player in state.players.values() if player.role.learns]
    return RatingSample(
        state.results,
        fit_league(state),
        {player.name: player.steps for player in learning},
        {player.name: player.generation for player in learning},
    )


def rating_history(events: Iterable[LeagueEvent], every: int) -> list[RatingSample]:
    """Samples every `every` results, and one at the end. Raises Damaged if an event does not fit the events before it."""
    state, due, samples = LeagueState(), every, []
    for event in events:
        after = step(state, event)
        if isinstance(after, Refusal):
            raise Damaged(f"The journal has an event that does not fit the events before it: {after.reason}")
        state = after
        if state.results >= due:
            samples.append(sample_ratings(state))
            due = state.results + every
    if state.players and (not samples or samples[-1].results < state.results):
        samples.append(sample_ratings(state))
    return samples
