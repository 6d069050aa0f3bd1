from __future__ import annotations

from typing import Any

from ludus.league.events import PlayerAdded, ResultsReported
from ludus.league.players import Player, PlayerRole
from ludus.league.runtime.league_file import LeagueConfig, LeagueStopSection
from ludus.league.runtime.schedule import missing_pairs, order_learners, reached_stop, turn_steps
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


def test_retired_players_and_those_in_quarantine_do_not_train() -> None:
    state = league(Player("a", PlayerRole.MAIN, retired=True), Player("b", PlayerRole.MAIN, quarantine="broken"), MAIN)
    assert order_learners(state, dict.fromkeys(("a", "b", "main"), 1.0), ()) == ["main"]
    nobody = league(Player("a", PlayerRole.MAIN, retired=True), FIXED)
    assert reached_stop(nobody, LeagueStopSection(), 0.0) == "no player can train"


def test_a_turn_ends_when_a_snapshot_is_due() -> None:
    settings = LeagueSettings(snapshots={PlayerRole.MAIN: SnapshotRule(min_steps=50, max_steps=100)})

    def next_turn(steps: int, last_snapshot: int, **sections: Any) -> int:
        player = Player("main", PlayerRole.MAIN, steps=steps, snapshot_steps=last_snapshot)
        return turn_steps(apply(LeagueState(settings), PlayerAdded(player)), config(turn_steps=60, **sections), "main")

    assert next_turn(300, 300) == 60
    assert next_turn(370, 300) == 30
    assert next_turn(420, 300) == 60  # the snapshot could not be stored: no turns without steps
    assert next_turn(370, 300, stop={"timesteps": 390}) == 20
    assert next_turn(370, 300, stop={"timesteps": 360}) == 1


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
