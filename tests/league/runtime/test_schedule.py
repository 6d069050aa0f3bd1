from __future__ import annotations

from typing import Any

import pytest

from ludus.league.events import PlayerAdded, PlayerRetired, PlayerTrained, ResultsReported, SnapshotTaken
from ludus.league.matchmaking import MatchmakingSettings
from ludus.league.players import Player, PlayerRole
from ludus.league.runtime.league_file import LeagueConfig, LeagueStopSection
from ludus.league.runtime.schedule import (
    lowest_level,
    missing_pairs,
    order_learners,
    playable_opponents,
    reached_stop,
    turn_steps,
)
from ludus.league.settings import LeagueSettings, SnapshotRule
from ludus.league.state import LeagueState
from tests.league.test_state import apply

MAIN = Player("main", PlayerRole.MAIN, steps=300)
PAST = [Player(f"main.{n}", PlayerRole.HISTORICAL, "m", parent="main") for n in (1, 2)]
FIXED = Player("script", PlayerRole.FIXED, "rule:random")


def league(*players: Player) -> LeagueState:
    return apply(LeagueState(), *(PlayerAdded(player) for player in players))


def config(**sections: Any) -> LeagueConfig:
    return LeagueConfig.model_validate({"env": "x", "players": {"main": {}}, **sections})


def test_the_player_with_the_fewest_steps_trains_next() -> None:
    state = league(
        MAIN, Player("b", PlayerRole.MAIN, steps=100), Player("c", PlayerRole.LEAGUE_EXPLOITER, steps=200), *PAST, FIXED
    )
    everyone = dict.fromkeys(("main", "b", "c"), 1.0)
    assert order_learners(state, everyone, ()) == ["b", "c", "main"]
    assert order_learners(state, everyone, {"b"}) == ["c", "main"]
    assert order_learners(state, {"main": 1.0, "not_added_yet": 1.0}, ()) == ["main"]


def test_turns_are_given_by_shares() -> None:
    """Oracle: over many equal turns, the steps of the players are in the ratio of their shares."""
    shares = {"main": 1.0, "exploiter": 0.25, "other": 2.0}
    steps = dict.fromkeys(shares, 0)
    for _ in range(650):
        state = league(*(Player(name, PlayerRole.MAIN, steps=done) for name, done in steps.items()))
        steps[order_learners(state, shares, ())[0]] += 10
    assert steps == {"main": 2000, "exploiter": 500, "other": 4000}


def test_a_player_that_joins_later_starts_at_the_level_of_the_others() -> None:
    """Oracle: from then on the steps are in the ratio of the shares; it does not have to catch up with five million steps."""
    shares = {"main": 1.0, "other": 1.0, "exploiter": 0.5}
    before = {"main": 5_000_000, "other": 5_000_100}
    level = lowest_level(league(*(Player(name, PlayerRole.MAIN, steps=done) for name, done in before.items())), shares)
    assert level == 5_000_000
    steps = before | {"exploiter": 0}
    for _ in range(500):
        players = [Player(name, PlayerRole.MAIN, steps=done) for name, done in steps.items() if name != "exploiter"]
        joined = Player("exploiter", PlayerRole.LEAGUE_EXPLOITER, steps=steps["exploiter"], start_level=level)
        steps[order_learners(league(*players, joined), shares, ())[0]] += 100
    trained = [steps["main"] - 5_000_000, steps["other"] - 5_000_000, steps["exploiter"]]
    assert trained == pytest.approx([20_000, 20_000, 10_000], abs=200)
    assert lowest_level(league(FIXED), {"main": 1.0}) == 0.0


def test_a_main_exploiter_has_no_turn_before_a_main_player_has_a_model() -> None:
    shares = dict.fromkeys(("main", "hunter"), 1.0)
    hunter = Player("hunter", PlayerRole.MAIN_EXPLOITER)
    state = league(Player("main", PlayerRole.MAIN), hunter, FIXED)
    assert order_learners(state, shares, ()) == ["main"]
    assert order_learners(state, shares, {"main"}) == []
    assert playable_opponents(state, hunter) == {}
    state = apply(state, PlayerTrained("main", 100, "players/main/g0@1"))
    assert order_learners(state, shares, ()) == ["hunter", "main"]
    assert playable_opponents(state, hunter) == {"main": 1.0}


def test_the_newest_snapshot_of_a_player_that_was_reset_plays_instead_of_it() -> None:
    hunter = Player("hunter", PlayerRole.MAIN_EXPLOITER)
    state = apply(
        league(Player("main", PlayerRole.MAIN), hunter),
        PlayerTrained("main", 100, "players/main/g0@1"),
        SnapshotTaken("main", "main.1", "players/main.1@1"),
        SnapshotTaken("main", "main.2", "players/main.2@2", reset=True),
    )
    assert playable_opponents(state, hunter) == {"main.2": 1.0}
    assert playable_opponents(apply(state, PlayerRetired("main.2")), hunter) == {"main.1": 1.0}
    state = apply(state, PlayerTrained("main", 200, "players/main/g1@1"))
    assert playable_opponents(state, hunter) == {"main": 1.0}


def test_players_that_only_have_opponents_without_a_model_do_not_wait_for_each_other() -> None:
    settings = LeagueSettings(MatchmakingSettings("round_robin"))
    both = [Player("a", PlayerRole.MAIN), Player("b", PlayerRole.MAIN_EXPLOITER)]
    state = apply(LeagueState(settings), *map(PlayerAdded, both))
    assert [playable_opponents(state, one) for one in both] == [{"a": 1.0}, {"b": 1.0}]
    assert order_learners(state, {"a": 1.0, "b": 1.0}, ()) == ["a", "b"]


def test_retired_players_and_those_in_quarantine_do_not_train() -> None:
    state = league(Player("a", PlayerRole.MAIN, retired=True), Player("b", PlayerRole.MAIN, quarantine="broken"), MAIN)
    assert order_learners(state, dict.fromkeys(("a", "b", "main"), 1.0), ()) == ["main"]
    nobody = league(Player("a", PlayerRole.MAIN, retired=True), FIXED)
    assert reached_stop(nobody, LeagueStopSection(), 0.0) == "no player can train"


def test_a_turn_ends_when_a_snapshot_is_due() -> None:
    settings = LeagueSettings(snapshots={PlayerRole.MAIN: SnapshotRule(min_steps=50, max_steps=100)})

    def next_turn(steps: int, last_snapshot: int, **sections: Any) -> int:
        player = Player("main", PlayerRole.MAIN, steps=steps, snapshot_steps=last_snapshot)
        return turn_steps(apply(LeagueState(settings), PlayerAdded(player)), config(turn_steps=60, **sections), "main", {})

    assert next_turn(300, 300) == 60
    assert next_turn(370, 300) == 30
    assert next_turn(420, 300) == 60  # the snapshot could not be stored: no turns without steps
    assert next_turn(370, 300, stop={"timesteps": 390}) == 20
    assert next_turn(370, 300, stop={"timesteps": 370}) == 0


def test_turns_at_the_same_time_do_not_exceed_the_stop_together() -> None:
    """`planned` counts what running turns will add, not what they have stored so far."""
    state = league(MAIN, Player("b", PlayerRole.MAIN, steps=100))
    stop = config(turn_steps=60, stop={"timesteps": 500})
    assert turn_steps(state, stop, "b", {}) == 60
    assert turn_steps(state, stop, "b", {"main": 360}) == 40
    assert turn_steps(state, stop, "b", {"main": 400}) == 0
    assert turn_steps(state, stop, "b", {"main": 250}) == 60, "it has stored more already"


def test_stop_conditions() -> None:
    state = league(MAIN, Player("b", PlayerRole.MAIN, steps=200), *PAST)
    assert reached_stop(state, LeagueStopSection(), 1e9) is None
    assert reached_stop(state, LeagueStopSection(timesteps=501), 0.0) is None
    assert reached_stop(state, LeagueStopSection(timesteps=500), 0.0) == "timesteps 500"
    assert reached_stop(state, LeagueStopSection(snapshots=2), 0.0) == "snapshots 2"
    assert reached_stop(state, LeagueStopSection(time_s=5.0), 5.0) == "time_s 5"


def test_pairs_with_too_few_results_are_played() -> None:
    state = apply(league(MAIN, *PAST, FIXED), ResultsReported("s", 1, "main.2", "script", 3, 4, 0))
    every = {"matches": 10, "pairs": "all"}
    assert missing_pairs(state, config(evaluation=every)) == [
        ("main.1", "main.2", 10), ("main.1", "script", 10), ("main.2", "script", 3),
    ]  # fmt: skip
    assert missing_pairs(state, config(evaluation={"matches": 5, "pairs": "fixed"})) == [("main.1", "script", 5)]
    assert missing_pairs(state, config()) == []
    assert len(missing_pairs(state, config(matchmaking={"scheme": "psro"}))) == 3
