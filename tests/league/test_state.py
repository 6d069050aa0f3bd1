from __future__ import annotations

import json
import math

import pytest

from ludus.errors import Damaged
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
    event_from_json,
    event_to_json,
)
from ludus.league.matchmaking import MatchmakingSettings, opponent_probabilities
from ludus.league.players import Player, PlayerRole
from ludus.league.settings import LeagueSettings, SnapshotRule
from ludus.league.state import LeagueState, Refusal, propose_snapshot, step


def apply(state: LeagueState, *events: LeagueEvent) -> LeagueState:
    for event in events:
        after = step(state, event)
        assert isinstance(after, LeagueState), after
        state = after
    return state


def refusal(state: LeagueState, event: LeagueEvent) -> Refusal:
    found = step(state, event)
    assert isinstance(found, Refusal)
    return found


@pytest.fixture
def pair() -> LeagueState:
    return apply(
        LeagueState(), PlayerAdded(Player("a", PlayerRole.MAIN)), PlayerAdded(Player("b", PlayerRole.FIXED, rating=1000.0))
    )


def test_a_result_counts_once(pair: LeagueState) -> None:
    report = ResultsReported("w", 1, "a", "b", 1, 0, 0)
    counted = apply(pair, report)
    assert counted.payoff.record("a", "b").wins == counted.results == 1
    assert counted.elo["a"] > 1200
    assert counted.elo["b"] == 1000.0  # an anchor
    assert refusal(counted, report).repeated
    assert pair.results == 0  # values: the earlier states are unchanged


def test_results_of_unknown_players_are_refused(pair: LeagueState) -> None:
    assert "no player 'c'" in refusal(pair, ResultsReported("w", 1, "c", "a", 1, 0, 0)).reason
    assert "no player 'c'" in refusal(pair, ResultsReported("w", 1, "a", "c", 1, 0, 0)).reason
    assert "no player 'c'" in refusal(pair, PlayerTrained("c", 1, "")).reason


def test_a_late_result_of_a_retired_player_or_one_in_quarantine_still_counts(pair: LeagueState) -> None:
    state = apply(pair, PlayerRetired("b"), ResultsReported("w", 1, "a", "b", 0, 0, 1))
    assert state.payoff.record("a", "b").losses == 1
    assert opponent_probabilities(state.view(), state.players["a"], state.settings.matchmaking) == {"a": 1.0}
    state = apply(pair, PlayerQuarantined("b", "no file"), ResultsReported("w", 1, "a", "b", 0, 0, 1))
    assert state.payoff.record("a", "b").losses == 1


def test_a_player_whose_quarantine_ends_is_met_again(pair: LeagueState) -> None:
    settings = MatchmakingSettings("pfsp")
    excluded = apply(pair, PlayerQuarantined("b", "no file"))
    assert opponent_probabilities(excluded.view(), excluded.players["a"], settings) == {"a": 1.0}
    healed = apply(excluded, PlayerQuarantined("b", ""))
    assert opponent_probabilities(healed.view(), healed.players["a"], settings) == {"b": 1.0}


def test_an_anchor_needs_a_finite_rating(pair: LeagueState) -> None:
    for rating in (math.nan, math.inf):
        assert "must be finite" in refusal(pair, PlayerAdded(Player("c", PlayerRole.FIXED, rating=rating))).reason


OUTSIDE = ("../../precious", "..", ".", "a/b", "/etc", "", "a\n", "-rf", ".hidden")


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_lead_out_of_the_league_are_refused(pair: LeagueState, name: str) -> None:
    """Models of players are stored in directories with their names."""
    assert "is not a name for a player" in refusal(pair, PlayerAdded(Player(name, PlayerRole.FIXED))).reason
    assert "is not a name for a player" in refusal(pair, SnapshotTaken("a", name, "m")).reason
    with pytest.raises(Damaged, match="is not a name for a player"):
        event_from_json({"event": "PlayerAdded", "player": {"name": name, "role": "fixed"}})


def test_names_of_earlier_releases_are_accepted(pair: LeagueState) -> None:
    for name in ("rule:hard", "main.1", "a+b_c-1"):
        assert name in apply(pair, PlayerAdded(Player(name, PlayerRole.FIXED))).players


def test_results_count_with_the_settings_of_their_time(pair: LeagueState) -> None:
    report = ResultsReported("w", 1, "a", "b", 0, 0, 1)
    before = apply(pair, report)
    after = apply(pair, SettingsChanged(LeagueSettings(elo_k=32.0)), report)
    assert after.settings.elo_k == 32.0
    assert after.elo["a"] - 1200 == pytest.approx(2 * (before.elo["a"] - 1200))


def test_reports_of_a_source_count_once_and_in_order(pair: LeagueState) -> None:
    state = apply(pair, ResultsReported("worker-1", 1, "a", "b", 3, 1, 0), ResultsReported("worker-2", 1, "a", "b", 0, 0, 2))
    assert state.payoff.record("a", "b")[:3] == (3, 1, 2)
    assert refusal(state, ResultsReported("worker-1", 1, "a", "b", 3, 1, 0)).repeated
    for counts in ((-1, 0, 0), (0, 10**400, 0)):
        assert "negative or too large" in refusal(state, ResultsReported("worker-1", 2, "a", "b", *counts)).reason
    assert apply(state, ResultsReported("worker-1", 5, "a", "b", 1, 0, 0)).results == 7


def test_reports_without_results_have_an_effect_once(pair: LeagueState) -> None:
    quarantine = PlayerQuarantined("b", "no file", "w", 3)
    state = apply(pair, quarantine, PlayerQuarantined("b", ""))
    assert refusal(state, quarantine).repeated
    assert refusal(state, ReportIgnored("w", 3)).repeated
    assert refusal(state, ResultsReported("w", 2, "a", "b", 1, 0, 0)).repeated
    state = apply(state, ReportIgnored("w", 4))
    assert refusal(state, PlayerQuarantined("b", "no file", "w", 4)).repeated
    assert event_from_json({"event": "PlayerQuarantined", "name": "b", "reason": "of an earlier release"}) == (
        PlayerQuarantined("b", "of an earlier release")
    )


def test_a_snapshot_is_due_when_all_are_beaten_or_after_the_longest_time() -> None:
    rule = SnapshotRule(min_steps=100, max_steps=200, win_rate=0.7)
    state = apply(LeagueState(LeagueSettings(snapshots={PlayerRole.MAIN: rule})), PlayerAdded(Player("a", PlayerRole.MAIN)))
    assert propose_snapshot(apply(state, PlayerTrained("a", 99, "v1")), "a") is None
    assert propose_snapshot(apply(state, PlayerTrained("a", 150, "v1")), "a") is None  # no opponents yet
    state = apply(state, PlayerTrained("a", 200, "v1"))
    assert propose_snapshot(state, "a") == SnapshotTaken("a", "a.1", "", reset=False)
    state = apply(state, SnapshotTaken("a", "a.1", "v1"), PlayerTrained("a", 310, "v2"))
    assert state.players["a.1"].parent == "a"
    assert state.players["a.1"].steps == 200
    assert propose_snapshot(state, "a") is None
    assert propose_snapshot(apply(state, ResultsReported("w", 1, "a", "a.1", 8, 0, 2)), "a") is not None


def test_a_snapshot_gets_another_name_if_a_fixed_player_has_its_name() -> None:
    rule = SnapshotRule(min_steps=100, max_steps=100)
    state = apply(
        LeagueState(LeagueSettings(snapshots={PlayerRole.MAIN: rule})),
        PlayerAdded(Player("a", PlayerRole.MAIN)),
        PlayerAdded(Player("a.1", PlayerRole.FIXED, "players/a.1@7")),
        PlayerTrained("a", 100, "v1"),
    )
    first = propose_snapshot(state, "a")
    assert first is not None
    assert first.snapshot == "a.2"
    state = apply(state, first, PlayerTrained("a", 200, "v2"))
    second = propose_snapshot(state, "a")
    assert second is not None
    assert second.snapshot == "a.3"


def test_a_reset_player_forgets_its_results_and_its_snapshot_keeps_the_rating() -> None:
    state = apply(
        LeagueState(),
        PlayerAdded(Player("a", PlayerRole.MAIN)),
        PlayerAdded(Player("e", PlayerRole.MAIN_EXPLOITER)),
        PlayerTrained("e", 100, "players/e/g0@5"),
        ResultsReported("w", 1, "e", "a", 30, 0, 0),
    )
    rating = state.elo["e"]
    state = apply(state, SnapshotTaken("e", "e.1", "v", reset=True))
    assert state.elo["e.1"] == rating > 1200 == state.elo["e"]
    assert state.payoff.record("a", "e").games == 0
    assert state.players["e"].generation == 1
    assert (state.players["e"].model, state.players["e.1"].model) == ("", "v")


def test_beaten_snapshots_lose_quality() -> None:
    settings = LeagueSettings(matchmaking=MatchmakingSettings("past_quality"))
    state = apply(
        LeagueState(settings),
        PlayerAdded(Player("a", PlayerRole.MAIN)),
        SnapshotTaken("a", "a.1", "v1"),
        SnapshotTaken("a", "a.2", "v2"),
        ResultsReported("w", 1, "a", "a.1", 10, 0, 0),
    )
    assert state.quality["a.1"] < state.quality["a.2"] == 0.0


@pytest.mark.parametrize(
    "event",
    [
        PlayerAdded(Player("a.1", PlayerRole.HISTORICAL, "runs/x", "a", PlayerRole.MAIN, 10)),
        SettingsChanged(LeagueSettings(MatchmakingSettings("psro"), {PlayerRole.MAIN: SnapshotRule(5, 9)}, elo_k=8.0, seed=3)),
        ResultsReported("w", 1, "a", "b", 1, 2, 3),
        PlayerQuarantined("b", "no file", "w", 4),
        ReportIgnored("w", 5),
    ],
)
def test_events_survive_json(event: LeagueEvent) -> None:
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


def test_results_of_an_earlier_generation_only_count_as_played() -> None:
    state = apply(
        LeagueState(),
        PlayerAdded(Player("a", PlayerRole.MAIN_EXPLOITER, steps=500)),
        PlayerAdded(Player("b", PlayerRole.MAIN)),
        SnapshotTaken("a", "a.1", "m", reset=True),
        ResultsReported("s", 1, "a", "b", 7, 0, 0, gain=7.0, generation=0),
    )
    assert state.results == 7
    assert state.payoff.record("a", "b").games == 0
    assert state.players["a"].generation_steps == 500
    state = apply(state, ResultsReported("s", 2, "a", "b", 3, 0, 1, gain=-8.0, generation=1))
    assert (state.results, state.payoff.record("b", "a").gain) == (11, 8.0)
    assert state.payoff.win_rate("a", "b") == pytest.approx(0.75)
    assert apply(state, SourceClosed("s")).reports == {}


def test_results_against_an_earlier_generation_of_the_opponent_only_count_as_played() -> None:
    """A match that was begun before the reset of the opponent, or is reported late."""
    state = apply(
        LeagueState(),
        PlayerAdded(Player("a", PlayerRole.MAIN_EXPLOITER, steps=500)),
        PlayerAdded(Player("b", PlayerRole.MAIN)),
        SnapshotTaken("a", "a.1", "m", reset=True),
        ResultsReported("s", 1, "b", "a", 7, 0, 0, generation=0, opponent_generation=0),
    )
    assert (state.results, state.payoff.record("b", "a").games) == (7, 0)
    state = apply(state, ResultsReported("s", 2, "b", "a", 3, 0, 1, generation=0, opponent_generation=1))
    assert (state.results, state.payoff.record("b", "a").games) == (11, 4)
    earlier = event_to_json(ResultsReported("s", 3, "b", "a", 1, 0, 0, generation=0))
    del earlier["opponent_generation"]  # a journal of an earlier release
    assert apply(state, event_from_json(earlier)).payoff.record("b", "a").games == 5


@pytest.mark.parametrize("gain", [float("nan"), float("inf")])
def test_gains_that_are_not_finite_are_refused(gain: float) -> None:
    state = apply(LeagueState(), PlayerAdded(Player("a", PlayerRole.MAIN)), PlayerAdded(Player("b", PlayerRole.MAIN)))
    assert isinstance(step(state, ResultsReported("s", 1, "a", "b", 1, 0, 0, gain=gain)), Refusal)
