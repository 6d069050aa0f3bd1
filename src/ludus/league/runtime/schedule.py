"""Decisions of the coordinator: which player trains next, which pairs still have to play, whether the league ends. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Final

from ludus.league.matchmaking import opponent_probabilities, population
from ludus.league.players import Player, PlayerRole
from ludus.league.runtime.league_file import LeagueConfig, LeagueStopSection
from ludus.league.state import LeagueState
from ludus.sampling.league_policies import is_game_script

NO_PLAYER: Final = "no player can train"
"""Stop condition of a league whose training players are all retired or in quarantine."""


def order_learners(state: LeagueState, shares: Mapping[str, float], busy: Collection[str]) -> list[str]:
    """Players that can train now, in the order of their turns: those with the fewest steps for their share first.

    `shares`: of all players that may train here.
    """
    ready = [one for one in _learners(state, shares) if one.name not in busy and playable_opponents(state, one)]
    return [one.name for one in sorted(ready, key=lambda one: _level(one, shares))]


def lowest_level(state: LeagueState, shares: Mapping[str, float]) -> float:
    """Where a player that joins now begins in the order of turns: beside the player that has the next turn."""
    return min((_level(one, shares) for one in _learners(state, shares)), default=0.0)


def _learners(state: LeagueState, shares: Mapping[str, float]) -> list[Player]:
    known = [state.players[name] for name in shares if name in state.players]
    return [one for one in known if one.role.learns and one.available]


def _level(player: Player, shares: Mapping[str, float]) -> float:
    return player.start_level + player.steps / shares[player.name]


def playable_opponents(state: LeagueState, player: Player) -> dict[str, float]:
    """The probabilities of the opponents that can play now. Empty: the player has to wait until another one has a model.

    A training player without a model has just been added, or reset: its newest snapshot plays instead. If no opponent can play, and
    none of them can train before this player, it meets itself.
    """
    chosen = opponent_probabilities(state.view(), player, state.settings.matchmaking)
    playable: dict[str, float] = {}
    for name, probability in chosen.items():
        substitute = name if name == player.name or state.players[name].model else _newest_snapshot(state, name)
        if substitute is not None:
            playable[substitute] = playable.get(substitute, 0.0) + probability
    if playable or any(_can_train_first(state, state.players[name]) for name in chosen):
        return playable
    return {player.name: 1.0}


def _newest_snapshot(state: LeagueState, parent: str) -> str | None:
    taken = [one.name for one in state.players.values() if one.parent == parent and one.available and one.model]
    return taken[-1] if taken else None


def _can_train_first(state: LeagueState, player: Player) -> bool:
    """Whether a player without a model has an opponent; itself, for example."""
    chosen = opponent_probabilities(state.view(), player, state.settings.matchmaking)
    return any(name == player.name or state.players[name].model for name in chosen)


def turn_steps(state: LeagueState, config: LeagueConfig, name: str, planned: Mapping[str, int]) -> int:
    """Steps of a player's next turn; 0: the running turns reach the end of the league.

    A turn ends early if the player reaches the `max_steps` of its snapshot rule, or the league its stop. `planned`: steps that the players
    with a running turn will have at its end.
    """
    player, steps = state.players[name], config.turn_steps
    due = snapshot_due_at(state, player)
    if due is not None and due > player.steps:  # else the snapshot could not be stored
        steps = min(steps, due - player.steps)
    if config.stop.timesteps is not None:
        granted = sum(max(0, end - state.players[other].steps) for other, end in planned.items())
        steps = min(steps, max(0, config.stop.timesteps - total_steps(state) - granted))
    return steps


def snapshot_due_at(state: LeagueState, player: Player) -> int | None:
    """Steps of a training player at which its next snapshot is taken in any case; None: it has no rule."""
    rule = state.settings.snapshots.get(player.role)
    return None if rule is None else player.snapshot_steps + rule.max_steps


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
