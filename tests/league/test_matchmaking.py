from __future__ import annotations

import numpy as np
import pytest

from ludus.league.matchmaking import (
    SCHEMES,
    MatchmakingSettings,
    MatchmakingView,
    opponent_probabilities,
    pfsp,
    quality_after_loss,
    quality_probabilities,
)
from ludus.league.payoff import PayoffTable
from ludus.league.players import Player, PlayerRole

MAIN = Player("main", PlayerRole.MAIN)


def snapshot(name: str, parent: Player = MAIN, *, retired: bool = False) -> Player:
    return Player(name, PlayerRole.HISTORICAL, parent=parent.name, parent_role=parent.role, retired=retired)


def view(*players: Player, wins: dict[tuple[str, str], float] | None = None) -> MatchmakingView:
    payoff = PayoffTable()
    for (own, other), rate in (wins or {}).items():
        payoff = payoff.add(own, other, round(100 * rate), 0, 100 - round(100 * rate))
    return MatchmakingView({player.name: player for player in players}, payoff)


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        ("squared", [1.0, 0.5625, 0.25, 0.0]),
        ("variance", [0.0, 0.1875, 0.25, 0.0]),
        ("linear", [1.0, 0.75, 0.5, 0.0]),
        ("linear_capped", [0.5, 0.5, 0.5, 0.0]),
    ],
)
def test_the_weightings_are_the_published_ones(weighting: str, expected: list[float]) -> None:
    found = pfsp(np.array([0.0, 0.25, 0.5, 1.0]), weighting)
    np.testing.assert_allclose(found, np.array(expected) / sum(expected))


@pytest.mark.parametrize("weighting", ["squared", "variance", "linear", "linear_capped"])
def test_opponents_that_are_always_beaten_are_drawn_uniformly(weighting: str) -> None:
    np.testing.assert_allclose(pfsp(np.ones(4), weighting), 0.25)


def test_opponents_that_always_win_are_drawn_uniformly_by_variance() -> None:
    np.testing.assert_allclose(pfsp(np.zeros(3), "variance"), 1 / 3)


@pytest.mark.parametrize("weighting", ["squared", "variance", "linear", "linear_capped"])
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_player_that_always_loses_or_wins_meets_all_equally_often(weighting: str, rate: float) -> None:
    names = ("a", "b", "c")
    seen = view(MAIN, *(Player(name, PlayerRole.FIXED) for name in names), wins={("main", name): rate for name in names})
    found = opponent_probabilities(seen, MAIN, MatchmakingSettings("pfsp", weighting))
    assert found == dict.fromkeys(names, pytest.approx(1 / 3))


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_a_single_player_plays_against_itself(scheme: str) -> None:
    assert opponent_probabilities(view(MAIN), MAIN, MatchmakingSettings(scheme)) == {"main": 1.0}


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_retired_players_and_those_in_quarantine_are_never_drawn(scheme: str) -> None:
    seen = view(MAIN, snapshot("old", retired=True), Player("broken", PlayerRole.FIXED, quarantine="no file"), snapshot("good"))
    assert set(opponent_probabilities(seen, MAIN, MatchmakingSettings(scheme))) <= {"main", "good"}


def test_a_main_player_meets_snapshots_by_pfsp_and_itself_else() -> None:
    seen = view(MAIN, snapshot("weak"), snapshot("strong"), wins={("main", "weak"): 0.9, ("main", "strong"): 0.4})
    shares = opponent_probabilities(seen, MAIN, MatchmakingSettings())
    # Verification finds nothing forgotten (the newest snapshot is the strongest), so half of the matches are self-play.
    assert shares["main"] == pytest.approx(0.5)
    assert shares["strong"] == pytest.approx(0.5 * 0.36 / 0.37)


def test_the_share_of_fixed_players_does_not_depend_on_the_number_of_snapshots() -> None:
    hard, easy = Player("hard", PlayerRole.FIXED), Player("easy", PlayerRole.FIXED)
    snapshots = [snapshot(f"main.{number}") for number in range(20)]
    seen = view(MAIN, hard, easy, *snapshots, wins={("main", "hard"): 0.5, ("main", "easy"): 0.9})
    settings = MatchmakingSettings(main_pfsp=0.0, main_verification=0.0, main_fixed=0.4)
    found = opponent_probabilities(seen, MAIN, settings)
    assert found == {
        "main": pytest.approx(0.6),
        "hard": pytest.approx(0.4 * 0.25 / 0.26),
        "easy": pytest.approx(0.4 * 0.01 / 0.26),
    }


def test_without_fixed_players_their_share_goes_to_the_others() -> None:
    settings = MatchmakingSettings(main_pfsp=0.0, main_verification=0.0, main_fixed=0.4)
    assert opponent_probabilities(view(MAIN), MAIN, settings) == {"main": pytest.approx(1.0)}


def test_verification_prefers_exploiters_that_win() -> None:
    exploiter = Player("exploiter", PlayerRole.MAIN_EXPLOITER)
    seen = view(MAIN, exploiter, snapshot("bug", exploiter), wins={("main", "bug"): 0.1})
    settings = MatchmakingSettings(main_pfsp=0.0, main_verification=1.0)
    assert opponent_probabilities(seen, MAIN, settings) == {"bug": 1.0}


def test_verification_finds_a_forgotten_snapshot() -> None:
    wins = {("main", "first"): 0.4, ("main", "second"): 0.9, ("main", "third"): 0.8}
    seen = view(MAIN, snapshot("first"), snapshot("second"), snapshot("third"), wins=wins)
    shares = opponent_probabilities(seen, MAIN, MatchmakingSettings(main_pfsp=0.0, main_verification=1.0))
    # Win rates 0.4, 0.9, 0.8: the falling end (0.8) is no forgetting; 0.4 below 0.9 is.
    assert set(shares) == {"first", "second"}
    assert shares["first"] == pytest.approx(0.36 / 0.37)


def test_a_main_player_that_is_too_strong_is_replaced_by_its_snapshots() -> None:
    other = Player("other", PlayerRole.MAIN)
    seen = view(MAIN, other, snapshot("other.1", other), wins={("main", "other"): 0.2})
    shares = opponent_probabilities(seen, MAIN, MatchmakingSettings(main_pfsp=0.0, main_verification=0.0))
    assert set(shares) == {"main", "other.1"}


def test_a_main_exploiter_plays_main_players_only() -> None:
    exploiter = Player("exploiter", PlayerRole.MAIN_EXPLOITER)
    seen = view(MAIN, exploiter, snapshot("main.1"), snapshot("exploiter.1", exploiter), wins={("exploiter", "main"): 0.5})
    assert opponent_probabilities(seen, exploiter, MatchmakingSettings()) == {"main": 1.0}
    beaten = view(MAIN, exploiter, snapshot("main.1"), wins={("exploiter", "main"): 0.05})
    assert opponent_probabilities(beaten, exploiter, MatchmakingSettings()) == {"main.1": 1.0}


def test_a_league_exploiter_plays_snapshots_and_fixed_players() -> None:
    exploiter = Player("exploiter", PlayerRole.LEAGUE_EXPLOITER)
    seen = view(MAIN, exploiter, snapshot("main.1"), Player("script", PlayerRole.FIXED))
    shares = opponent_probabilities(seen, exploiter, MatchmakingSettings())
    assert shares == {"main.1": pytest.approx(0.5), "script": pytest.approx(0.5)}


def test_eighty_twenty_self_play_draws_past_versions_by_quality() -> None:
    seen = view(MAIN, snapshot("main.1"), snapshot("main.2"))
    seen = MatchmakingView(seen.players, seen.payoff, {"main.1": 0.0, "main.2": np.log(3)})
    shares = opponent_probabilities(seen, MAIN, MatchmakingSettings("past_quality"))
    assert shares["main"] == pytest.approx(0.8)
    assert shares["main.2"] / shares["main.1"] == pytest.approx(3.0)


def test_quality_falls_faster_for_rarely_drawn_versions() -> None:
    np.testing.assert_allclose(quality_probabilities({"a": 0.0, "b": 0.0}, ["a", "b"]), 0.5)
    assert quality_after_loss(0.0, 0.5, 2) == pytest.approx(-0.01)
    assert quality_after_loss(0.0, 0.1, 2) == pytest.approx(-0.05)


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("role", [PlayerRole.MAIN, PlayerRole.MAIN_EXPLOITER, PlayerRole.LEAGUE_EXPLOITER])
def test_probabilities_add_up_to_one(scheme: str, role: PlayerRole) -> None:
    own, other, exploiter = Player("own", role), Player("other", PlayerRole.MAIN), Player("exploiter", PlayerRole.MAIN_EXPLOITER)
    past = [snapshot(f"own.{n}", own) for n in range(3)] + [snapshot("other.1", other), snapshot("exploiter.1", exploiter)]
    wins = {
        ("own", "own.0"): 0.5,
        ("own", "own.1"): 0.9,
        ("own", "own.2"): 0.6,
        ("own", "other"): 0.2,
        ("own", "exploiter.1"): 0.25,
    }
    seen = view(own, other, exploiter, *past, Player("script", PlayerRole.FIXED), wins=wins)
    published = opponent_probabilities(seen, own, MatchmakingSettings(scheme))
    assert sum(published.values()) == pytest.approx(1.0)
    assert min(published.values()) > 0


def test_round_robin_meets_all_others_equally_often() -> None:
    seen = view(MAIN, snapshot("a"), snapshot("b"), Player("c", PlayerRole.FIXED))
    assert opponent_probabilities(seen, MAIN, MatchmakingSettings("round_robin")) == dict.fromkeys("abc", pytest.approx(1 / 3))


def test_psro_meets_the_population_by_the_equilibrium_of_mean_gains() -> None:
    # Rock, paper, scissors where paper against rock pays 2: the equilibrium is (1/4, 1/4, 1/2) by hand.
    payoff = PayoffTable()
    for winner, loser, gain in (("paper", "rock", 200.0), ("scissors", "paper", 100.0), ("rock", "scissors", 100.0)):
        payoff = payoff.add(winner, loser, 100, 0, 0, gain=gain)
    players = {name: Player(name, PlayerRole.FIXED) for name in ("rock", "paper", "scissors")}
    seen = MatchmakingView({"main": MAIN, **players}, payoff)
    found = opponent_probabilities(seen, MAIN, MatchmakingSettings("psro"))
    assert found == {"rock": pytest.approx(0.25), "paper": pytest.approx(0.25), "scissors": pytest.approx(0.5)}
    assert opponent_probabilities(view(MAIN), MAIN, MatchmakingSettings("psro")) == {"main": 1.0}
