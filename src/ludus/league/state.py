"""The state of a league as a value, and the pure function that applies an event to it.

`step` has no I/O, clock or hidden randomness: replaying the journal gives the same state. An event that does not fit the state is
refused with a reason and changes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ludus.league.events import (
    LeagueEvent,
    PlayerAdded,
    PlayerQuarantined,
    PlayerRetired,
    PlayerTrained,
    ReportIgnored,
    ResultsReported,
    SettingsChanged,
    SnapshotTaken,
    SourceClosed,
)
from ludus.league.matchmaking import MatchmakingView, quality_after_loss, quality_probabilities
from ludus.league.payoff import PayoffTable
from ludus.league.players import Player, PlayerRole, name_problem
from ludus.league.ratings import ELO_START, SkillEstimate, skill_of_anchor, spread_outcomes, update_elo, update_skill
from ludus.league.recent import PairResults, RecentResults
from ludus.league.settings import LeagueSettings

_MAX_RATED_AT_ONCE: Final = 100
"""Results of one report that change the ratings one by one; further ones only count in the payoff table."""
_MAX_COUNT: Final = 1 << 40
"""Most wins, draws or losses in one report: sums of more could not be stored exactly."""


@dataclass(frozen=True)
class LeagueState:
    settings: LeagueSettings = field(default_factory=LeagueSettings)
    players: Mapping[str, Player] = field(default_factory=dict)
    payoff: PayoffTable = field(default_factory=PayoffTable)
    elo: Mapping[str, float] = field(default_factory=dict)
    skill: Mapping[str, SkillEstimate] = field(default_factory=dict)
    quality: Mapping[str, float] = field(default_factory=dict)
    """Quality scores of snapshots (OpenAI Five)."""
    recent: Mapping[str, RecentResults] = field(default_factory=dict)
    """Latest results of the training players, and of every snapshot those that its parent had then."""
    results: int = 0
    """Matches counted so far."""
    reports: Mapping[str, int] = field(default_factory=dict)
    """Source → number of its last report."""

    def view(self) -> MatchmakingView:
        return MatchmakingView(self.players, self.payoff, self.quality)


@dataclass(frozen=True)
class Refusal:
    """Why an event changed nothing. `repeated`: it was counted before, so its sender may consider it done."""

    reason: str
    repeated: bool = False


def step(state: LeagueState, event: LeagueEvent) -> LeagueState | Refusal:
    """Apply an event."""
    match event:
        case SettingsChanged():
            return replace(state, settings=event.settings)
        case PlayerAdded():
            return _add_player(state, event.player)
        case PlayerTrained():
            token = {} if event.token_file is None else {"token_file": event.token_file}
            return _with_player(state, event.name, steps=event.steps, model=event.model, **token)
        case SnapshotTaken():
            return _take_snapshot(state, event)
        case PlayerRetired():
            return _with_player(state, event.name, retired=True)
        case PlayerQuarantined():
            return _quarantine(state, event)
        case ReportIgnored():
            return _count_number(state, event.source, event.number)
        case ResultsReported():
            return _count_report(state, event)
        case SourceClosed():
            return replace(state, reports={source: last for source, last in state.reports.items() if source != event.source})


# -- players ---------------------------------------------------------------------------------------------------------------


def _add_player(state: LeagueState, player: Player) -> LeagueState | Refusal:
    if problem := name_problem(player.name):
        return Refusal(problem)
    if player.name in state.players:
        return Refusal(f"There is a player {player.name!r} already.", repeated=state.players[player.name] == player)
    if player.rating is not None and not math.isfinite(player.rating):
        return Refusal(f"The rating of {player.name!r} is {player.rating}: it must be finite.")
    if not math.isfinite(player.start_level):
        return Refusal(f"The start level of {player.name!r} is {player.start_level}: it must be finite.")
    start = player.rating if player.rating is not None else state.elo.get(player.parent or "", ELO_START)
    return replace(
        state,
        players={**state.players, player.name: player},
        elo={**state.elo, player.name: start},
        skill={**state.skill, player.name: _first_skill(state, player)},
        quality={**state.quality, player.name: max(state.quality.values(), default=0.0)},
    )


def _first_skill(state: LeagueState, player: Player) -> SkillEstimate:
    if player.rating is not None:
        return skill_of_anchor(player.rating)
    return state.skill.get(player.parent or "", SkillEstimate())


def _with_player(state: LeagueState, name: str, **changes: object) -> LeagueState | Refusal:
    if name not in state.players:
        return _unknown(name)
    changed = replace(state.players[name], **changes)  # type: ignore[arg-type]  # fields of Player by name
    return replace(state, players={**state.players, name: changed})


def _quarantine(state: LeagueState, event: PlayerQuarantined) -> LeagueState | Refusal:
    reported = _count_number(state, event.source, event.number) if event.source else state
    return reported if isinstance(reported, Refusal) else _with_player(reported, event.name, quarantine=event.reason)


def _unknown(name: str) -> Refusal:
    return Refusal(f"There is no player {name!r}.")


def _take_snapshot(state: LeagueState, event: SnapshotTaken) -> LeagueState | Refusal:
    parent = state.players.get(event.name)
    if parent is None:
        return _unknown(event.name)
    snapshot = Player(
        event.snapshot, PlayerRole.HISTORICAL, event.model, parent=parent.name, parent_role=parent.role, steps=parent.steps
    )
    added = _add_player(state, snapshot)
    if isinstance(added, Refusal):
        return added
    generation = parent.generation + event.reset
    begun = parent.steps if event.reset else parent.generation_steps
    model = "" if event.reset else parent.model  # the old weights must not play, and be rated, under its name
    after = _with_player(
        added, parent.name, snapshot_steps=parent.steps, generation=generation, generation_steps=begun, model=model
    )
    if isinstance(after, Refusal):
        return after
    # The snapshot has the weights that played the latest matches of its parent: they rate it until it has results of its own.
    settled = {one.name for one in state.players.values() if not one.role.learns}
    latest = state.recent.get(parent.name, RecentResults()).against(settled)
    after = replace(after, recent={**after.recent, event.snapshot: latest})
    if not event.reset:
        return after
    others = {name for name in after.players if name != parent.name}
    return replace(
        after,
        payoff=after.payoff.without(parent.name),
        elo={**after.elo, parent.name: ELO_START},
        skill={**after.skill, parent.name: SkillEstimate()},
        recent={name: results.against(others) for name, results in after.recent.items() if name in others},
    )


# -- results ----------------------------------------------------------------------------------------------------------------


def _count_number(state: LeagueState, source: str, number: int) -> LeagueState | Refusal:
    """Every report of a source has an effect once."""
    if number <= state.reports.get(source, 0):
        return Refusal(f"Report {number} of {source!r} was counted before.", repeated=True)
    return replace(state, reports={**state.reports, source: number})


def _count_report(state: LeagueState, event: ResultsReported) -> LeagueState | Refusal:
    for name in (event.player, event.opponent):
        if name not in state.players:
            return _unknown(name)
    counted = _count_number(state, event.source, event.number)
    if isinstance(counted, Refusal):
        return counted
    counts = (event.wins, event.draws, event.losses)
    if min(counts) < 0 or max(counts) > _MAX_COUNT:
        return Refusal(
            f"The numbers of results in report {event.number} of {event.source!r} are {counts}: negative or too large."
        )
    if event.gain is not None and not math.isfinite(event.gain):
        return Refusal(f"The gain in report {event.number} of {event.source!r} is {event.gain}: it must be finite.")
    generations = ((event.player, event.generation), (event.opponent, event.opponent_generation))
    if any(generation not in (None, state.players[name].generation) for name, generation in generations):
        return replace(counted, results=state.results + event.wins + event.draws + event.losses)
    return _count(counted, event.player, event.opponent, event.wins, event.draws, event.losses, event.gain)


def _count(
    state: LeagueState, player: str, opponent: str, wins: int, draws: int, losses: int, gain: float | None = None
) -> LeagueState:
    """Count results of one pair in the payoff table and the ratings. A player against itself only counts as a match."""
    games = wins + draws + losses
    if not games or player == opponent:
        return replace(state, results=state.results + games)
    return replace(
        state,
        results=state.results + games,
        payoff=state.payoff.add(player, opponent, wins, draws, losses, state.settings.decay, gain),
        elo={**state.elo, **_rate_elo(state, player, opponent, games, (wins + 0.5 * draws) / games)},
        skill={**state.skill, **_rate_skill(state, player, opponent, (wins, draws, losses))},
        quality=_lower_quality(state, opponent, wins),
        recent=_add_recent(state, player, opponent, (wins, draws, losses)),
    )


def _add_recent(state: LeagueState, player: str, opponent: str, counts: tuple[int, int, int]) -> Mapping[str, RecentResults]:
    """Add results to the latest ones of the training player that has started the matches; if `player` does not train, of its opponent.

    They do not push results out of the window of an opponent that trains: a turn of an exploiter has more matches than a window, all
    against one player.
    """
    wins, draws, losses = counts
    own, added = player, PairResults(opponent, *counts)
    if not state.players[player].role.learns:
        own, added = opponent, PairResults(player, losses, draws, wins)
    if not state.players[own].role.learns:
        return state.recent
    return {**state.recent, own: state.recent.get(own, RecentResults()).add(added, state.settings.rating_window)}


def _is_anchor(state: LeagueState, name: str) -> bool:
    return state.players[name].rating is not None


def _rate_elo(state: LeagueState, player: str, opponent: str, games: int, score: float) -> dict[str, float]:
    own, other = state.elo[player], state.elo[opponent]
    for _ in range(min(games, _MAX_RATED_AT_ONCE)):
        own, other = update_elo(
            own, other, score, state.settings.elo_k,
            own_fixed=_is_anchor(state, player), other_fixed=_is_anchor(state, opponent),
        )  # fmt: skip
    return {player: own, opponent: other}


def _rate_skill(state: LeagueState, player: str, opponent: str, counts: tuple[int, int, int]) -> dict[str, SkillEstimate]:
    own, other = state.skill[player], state.skill[opponent]
    fixed = [_is_anchor(state, player), _is_anchor(state, opponent)]
    for score in spread_outcomes(*counts, limit=_MAX_RATED_AT_ONCE):
        (own,), (other,) = update_skill([[own], [other]], [score, 1 - score], fixed)
    return {player: own, opponent: other}


def _lower_quality(state: LeagueState, opponent: str, wins: int) -> Mapping[str, float]:
    """A snapshot that is beaten is chosen less often."""
    parent = state.players[opponent].parent
    if state.settings.matchmaking.scheme != "past_quality" or not wins or parent is None:
        return state.quality
    pool = [one.name for one in state.players.values() if one.parent == parent and one.available] or [opponent]
    probability = float(quality_probabilities(state.quality, [opponent, *(name for name in pool if name != opponent)])[0])
    quality = state.quality[opponent]
    for _ in range(min(wins, _MAX_RATED_AT_ONCE)):
        quality = quality_after_loss(quality, probability, len(pool))
    return {**state.quality, opponent: quality}


# -- snapshots ----------------------------------------------------------------------------------------------------------------


def propose_snapshot(state: LeagueState, name: str) -> SnapshotTaken | None:
    """The snapshot that a training player's rule asks for now, without its model; None if it is not due."""
    player = state.players[name]
    rule = state.settings.snapshots.get(player.role)
    if rule is None or not player.role.learns or not player.available:
        return None
    since = player.steps - player.snapshot_steps
    if since < rule.min_steps or not (since >= rule.max_steps or _beats_all(state, player, rule.win_rate)):
        return None
    taken = sum(one.parent == name for one in state.players.values())
    random = np.random.default_rng([state.settings.seed, taken, len(state.players)])
    names = (f"{name}.{number}" for number in itertools.count(taken + 1))
    free = next(one for one in names if one not in state.players)  # `ludus league add` may have taken the name
    return SnapshotTaken(name, free, "", reset=bool(random.random() < rule.reset))


def _beats_all(state: LeagueState, player: Player, win_rate: float) -> bool:
    roles = (PlayerRole.MAIN,) if player.role is PlayerRole.MAIN_EXPLOITER else (PlayerRole.HISTORICAL, PlayerRole.FIXED)
    names = [one.name for one in state.players.values() if one.available and one.role in roles and one.name != player.name]
    return bool(names) and bool(state.payoff.win_rates(player.name, names).min() > win_rate)
