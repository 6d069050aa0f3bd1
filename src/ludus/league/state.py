"""The state of a league as a value, and the pure function that applies an event to it.

`step` has no I/O, clock or hidden randomness: replaying the journal gives the same state. An event that does not fit the state is
refused with a reason and changes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from ludus.league.events import (
    LeagueEvent,
    MatchFinished,
    MatchIssued,
    PlayerAdded,
    PlayerQuarantined,
    PlayerRetired,
    PlayerTrained,
    ResultsReported,
    SnapshotTaken,
    SourceClosed,
    is_valid_score,
)
from ludus.league.matchmaking import (
    MatchmakingSettings,
    MatchmakingView,
    choose_opponent,
    quality_after_loss,
    quality_probabilities,
)
from ludus.league.payoff import PayoffTable
from ludus.league.players import Player, PlayerRole
from ludus.league.ratings import ELO_K, ELO_START, SkillEstimate, skill_of_anchor, spread_outcomes, update_elo, update_skill
from ludus.league.recent import PairResults, RecentResults

_MAX_RATED_AT_ONCE: Final = 100
"""Results of one report that change the ratings one by one; further ones only count in the payoff table."""


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
    """Latest results of a training player that count for its fitted rating."""
    max_open_matches: int = 4096
    """Most issued matches without a result; with more, the oldest is dropped and its result will be refused."""
    seed: int = 0


def settings_to_json(settings: LeagueSettings) -> dict[str, Any]:
    return asdict(settings)


def settings_from_json(values: Mapping[str, Any]) -> LeagueSettings:
    """Raises TypeError, ValueError or KeyError for unknown or missing keys."""
    matchmaking = MatchmakingSettings(**values["matchmaking"])
    snapshots = {PlayerRole(role): SnapshotRule(**rule) for role, rule in values["snapshots"].items()}
    return LeagueSettings(**{**values, "matchmaking": matchmaking, "snapshots": snapshots})


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
    """Latest results of the training players."""
    open_matches: Mapping[int, MatchIssued] = field(default_factory=dict)
    next_match: int = 1
    results: int = 0
    """Matches counted so far."""
    reports: Mapping[str, int] = field(default_factory=dict)
    """Source → number of its last report."""

    def view(self) -> MatchmakingView:
        return MatchmakingView(self.players, self.payoff, self.quality, self.next_match)


@dataclass(frozen=True)
class Refusal:
    """Why an event changed nothing. `repeated`: it was counted before, so its sender may consider it done."""

    reason: str
    repeated: bool = False


def step(state: LeagueState, event: LeagueEvent) -> LeagueState | Refusal:
    """Apply an event."""
    match event:
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
            return _with_player(state, event.name, quarantine=event.reason)
        case MatchIssued():
            return _issue_match(state, event)
        case MatchFinished():
            return _finish_match(state, event)
        case ResultsReported():
            return _count_report(state, event)
        case SourceClosed():
            return replace(state, reports={source: last for source, last in state.reports.items() if source != event.source})


# -- players ---------------------------------------------------------------------------------------------------------------


def _add_player(state: LeagueState, player: Player) -> LeagueState | Refusal:
    if player.name in state.players:
        return Refusal(f"There is a player {player.name!r} already.", repeated=state.players[player.name] == player)
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
    # The snapshot has the weights that played the latest matches of its parent: they rate it until it plays matches of its own.
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


# -- matches ----------------------------------------------------------------------------------------------------------------


def propose_match(state: LeagueState, player: str) -> MatchIssued | Refusal:
    """The next match of a training player. The same state always proposes the same match."""
    own = state.players.get(player)
    if own is None:
        return _unknown(player)
    if not own.available:
        return Refusal(f"The player {player!r} is {'retired' if own.retired else 'in quarantine: ' + own.quarantine}.")
    random = np.random.default_rng([state.settings.seed, state.next_match])
    opponent = choose_opponent(state.view(), own, state.settings.matchmaking, random)
    return MatchIssued(state.next_match, player, opponent, swap_sides=bool(random.integers(2)))


def _issue_match(state: LeagueState, event: MatchIssued) -> LeagueState | Refusal:
    for name in (event.player, event.opponent):
        if name not in state.players:
            return _unknown(name)
    if event.match < state.next_match:
        return Refusal(f"Match {event.match} was issued before.", repeated=True)
    open_matches = {**state.open_matches, event.match: event}
    if len(open_matches) > state.settings.max_open_matches:
        del open_matches[next(iter(open_matches))]
    return replace(state, open_matches=open_matches, next_match=event.match + 1)


def _finish_match(state: LeagueState, event: MatchFinished) -> LeagueState | Refusal:
    issued = state.open_matches.get(event.match)
    if issued is None:
        known = 0 < event.match < state.next_match
        return Refusal(f"Match {event.match} {'is over' if known else 'was never issued'}.", repeated=known)
    if not is_valid_score(event.score):
        return Refusal(f"The score of match {event.match} is {event.score}: it must be between 0 and 1.")
    left = {number: one for number, one in state.open_matches.items() if number != event.match}
    won, drawn = int(event.score > 0.5), int(event.score == 0.5)
    return _count(replace(state, open_matches=left), issued.player, issued.opponent, won, drawn, 1 - won - drawn)


def _count_report(state: LeagueState, event: ResultsReported) -> LeagueState | Refusal:
    for name in (event.player, event.opponent):
        if name not in state.players:
            return _unknown(name)
    last = state.reports.get(event.source, 0)
    if event.number <= last:
        return Refusal(f"Report {event.number} of {event.source!r} was counted before.", repeated=True)
    if min(event.wins, event.draws, event.losses) < 0:
        return Refusal(f"Report {event.number} of {event.source!r} has a negative number of results.")
    if event.gain is not None and not math.isfinite(event.gain):
        return Refusal(f"The gain in report {event.number} of {event.source!r} is {event.gain}: it must be finite.")
    counted = replace(state, reports={**state.reports, event.source: event.number})
    if event.generation not in (None, state.players[event.player].generation):
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
    wins, draws, losses = counts
    recent, window = dict(state.recent), state.settings.rating_window
    for own, added in ((player, PairResults(opponent, *counts)), (opponent, PairResults(player, losses, draws, wins))):
        if state.players[own].role.learns:
            recent[own] = recent.get(own, RecentResults()).add(added, window)
    return recent


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
