"""Decisions of the coordinator: which player trains next, which pairs still have to play, whether the league ends. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Final

from ludus.league.matchmaking import population
from ludus.league.players import PlayerRole
from ludus.league.runtime.league_file import LeagueConfig, LeagueStopSection
from ludus.league.state import LeagueState
from ludus.sampling.league_policies import is_game_script

NO_PLAYER: Final = "no player can train"
"""Stop condition of a league whose training players are all retired or in quarantine."""


def order_learners(state: LeagueState, shares: Mapping[str, float], busy: Collection[str]) -> list[str]:
    """Players that can train now, in the order of their turns: those with the fewest steps for their share first.

    `shares`: of all players that may train here.
    """
    waiting = [state.players[name] for name in shares if name in state.players and name not in busy]
    ready = [one for one in waiting if one.role.learns and one.available]
    return [one.name for one in sorted(ready, key=lambda one: one.steps / shares[one.name])]


def turn_steps(state: LeagueState, config: LeagueConfig, name: str) -> int:
    """Steps of a player's next turn. A turn ends early if the player reaches the `max_steps` of its snapshot rule, or the league its stop."""
    player, steps = state.players[name], config.turn_steps
    rule = state.settings.snapshots.get(player.role)
    if rule is not None:
        until_snapshot = player.snapshot_steps + rule.max_steps - player.steps
        if until_snapshot > 0:  # else the snapshot is due, but could not be stored
            steps = min(steps, until_snapshot)
    if config.stop.timesteps is not None:
        steps = min(steps, max(1, config.stop.timesteps - total_steps(state)))
    return steps


def total_steps(state: LeagueState) -> int:
    return sum(one.steps for one in state.players.values() if one.role.learns)


def count_snapshots(state: LeagueState) -> int:
    return sum(one.role is PlayerRole.HISTORICAL for one in state.players.values())


def reached_stop(state: LeagueState, stop: LeagueStopSection, elapsed_s: float) -> str | None:
    """The stop condition that is reached; None: the league continues."""
    if stop.timesteps is not None and total_steps(state) >= stop.timesteps:
        return f"timesteps {stop.timesteps:,}"
    if stop.snapshots is not None and count_snapshots(state) >= stop.snapshots:
        return f"snapshots {stop.snapshots:,}"
    if is_out_of_time(stop, elapsed_s):
        return f"time_s {stop.time_s:g}"
    if not any(one.role.learns and one.available for one in state.players.values()):
        return NO_PLAYER
    return None


def is_out_of_time(stop: LeagueStopSection, elapsed_s: float) -> bool:
    return stop.time_s is not None and elapsed_s >= stop.time_s


def missing_pairs(state: LeagueState, config: LeagueConfig) -> list[tuple[str, str, int]]:
    """Pairs of players that do not learn and have too few results, with the number of matches that are missing."""
    if config.evaluated_pairs == "none":
        return []
    found = []
    for one, other in _pairs(state, config, population(state.view())):
        missing = config.evaluation.matches - state.payoff.record(one, other).games
        if missing > 0:
            found.append((one, other, missing))
    return found


def _pairs(state: LeagueState, config: LeagueConfig, names: Sequence[str]) -> list[tuple[str, str]]:
    pairs = list(combinations(names, 2))
    if config.one_script_per_match:
        scripts = {name for name in names if is_game_script(state.players[name].model)}
        pairs = [pair for pair in pairs if not scripts.issuperset(pair)]
    if config.evaluated_pairs == "all":
        return pairs
    return [pair for pair in pairs if any(state.players[name].role is PlayerRole.FIXED for name in pair)]
