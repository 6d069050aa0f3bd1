"""Fitted ratings of a league: against brute force, simulations and openskill; what anchors and the order of results do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ludus.league.events import PlayerAdded, PlayerTrained, SnapshotTaken
from ludus.league.players import Player, PlayerRole
from ludus.league.rating_table import anchors_of, fit_league, rate_players
from ludus.league.ratings import (
    ELO_START,
    SkillEstimate,
    expected_score,
    fit_ratings,
    skill_of_anchor,
    spread_outcomes,
    update_elo,
    update_skill,
)
from ludus.league.state import LeagueState
from tests.league.leagues import apply_all, play_matches

Matrix = npt.NDArray[np.float64]


def random_results(random: np.random.Generator, strength: Matrix, games: int, draw: float = 0.0) -> tuple[Matrix, Matrix, Matrix]:
    """Points, games and draws of a round robin. `draw`: drawn matches, as a share of the most that the expected score allows."""
    n = len(strength)
    score, played, drawn = np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
    for i in range(n):
        for j in range(i):
            p = 1 / (1 + 10 ** ((strength[j] - strength[i]) / 400))
            d = 2 * draw * min(p, 1 - p)
            wins, draws, _ = random.multinomial(games, [p - d / 2, d, 1 - p - d / 2])
            score[i, j], score[j, i] = wins + draws / 2, games - wins - draws / 2
            played[i, j] = played[j, i] = games
            drawn[i, j] = drawn[j, i] = draws
    return score, played, drawn


@pytest.mark.parametrize("anchors", [{}, {"p1": 1000.0}, {"p0": 900.0, "p4": 1500.0}])
def test_the_fit_is_the_maximum_of_the_likelihood(anchors: dict[str, float]) -> None:
    optimize: Any = pytest.importorskip("scipy.optimize")
    special: Any = pytest.importorskip("scipy.special")
    names = [f"p{i}" for i in range(6)]
    score, games, draws = random_results(np.random.default_rng(1), np.array([0.0, 100, 250, -80, 400, -300]), 17, 0.4)
    games[0, 3] = games[3, 0] = score[0, 3] = score[3, 0] = 0  # they have never met
    center = np.mean(list(anchors.values())) if anchors else ELO_START
    free = [i for i, name in enumerate(names) if name not in anchors]

    def all_ratings(values: Matrix) -> Matrix:
        ratings = np.array([anchors.get(name, 0.0) for name in names])
        ratings[free] = values
        return ratings

    def loss(values: Matrix) -> float:
        s = (all_ratings(values) - center) * math.log(10) / 400
        pairs = sum(score[i, j] * special.log_expit(s[i] - s[j]) for i in range(6) for j in range(6) if i != j)
        prior = sum(0.5 * special.log_expit(s[i]) + 0.5 * special.log_expit(-s[i]) for i in free)
        return -float(pairs + prior)

    best = optimize.minimize(loss, np.full(len(free), center), method="Nelder-Mead", options={"maxiter": 40_000, "maxfev": 40_000, "xatol": 1e-7, "fatol": 1e-12}).x  # fmt: skip
    expected = all_ratings(best)
    if not anchors:
        expected += ELO_START - expected.mean()
    fitted = fit_ratings(names, score, games, anchors, draws=draws)
    assert [fitted[name].elo for name in names] == pytest.approx(expected.tolist(), abs=0.01)


@pytest.mark.parametrize("draw", [0.0, 0.8])
@pytest.mark.parametrize("anchors", [{}, {"p0": 1000.0}])
def test_intervals_contain_the_truth_as_often_as_they_say(draw: float, anchors: dict[str, float]) -> None:
    """Also if most matches are drawn, where counting a draw as a coin that landed on its edge would make them too wide."""
    names = [f"p{i}" for i in range(5)]
    true = np.array([1000.0, 1050, 1200, 1300, 900])
    reference = true if anchors else true - true.mean() + ELO_START
    random = np.random.default_rng(2)
    inside = []
    for _ in range(200):
        score, games, draws = random_results(random, true, 60, draw)
        fitted = fit_ratings(names, score, games, anchors, draws=draws)
        inside += [abs(fitted[n].elo - r) < fitted[n].interval for n, r in zip(names, reference, strict=True) if n not in anchors]
    assert 0.92 < np.mean(inside) < 0.98  # the standard error is below 0.01


def test_the_order_of_results_changes_elo_and_not_the_fit() -> None:
    """120 matches of equal players: the online rating still depends on who won last; the fit is at the middle."""
    ends = []
    for scores in ([1.0] * 60 + [0.0] * 60, [0.0] * 60 + [1.0] * 60):
        own, other = ELO_START, ELO_START
        for score in scores:
            own, other = update_elo(own, other, score)
        ends.append(own - other)
    assert ends[1] - ends[0] > 300
    state = apply_all(LeagueState(), [PlayerAdded(Player(name, PlayerRole.FIXED)) for name in "ab"])
    for first, then in (((60, 0, 0), (0, 0, 60)), ((0, 0, 60), (60, 0, 0))):
        fitted = fit_league(play_matches(play_matches(state, "a", "b", *first), "a", "b", *then))
        assert fitted["a"].elo - fitted["b"].elo == pytest.approx(0.0, abs=1e-6)


def frozen_league(anchors: dict[str, float], others: list[str]) -> LeagueState:
    players = [Player(name, PlayerRole.FIXED, rating=rating) for name, rating in anchors.items()]
    players += [Player(name, PlayerRole.HISTORICAL) for name in others]
    return apply_all(LeagueState(), map(PlayerAdded, players))


def play_round_robin(state: LeagueState, true: dict[str, float], games: int) -> LeagueState:
    """Every pair plays, with the results that are expected."""
    names = [name for name in true if name in state.players]
    for i, own in enumerate(names):
        for other in names[:i]:
            wins = round(games * expected_score(true[own], true[other]))
            state = play_matches(state, own, other, wins, 0, games - wins)
    return state


@pytest.mark.parametrize("anchored", [True, False])
def test_a_rating_means_the_same_tomorrow_if_there_are_anchors(anchored: bool) -> None:
    """The pool around a player changes twice: much stronger players come, then much weaker ones. The player stays the same."""
    true = {"script": 1000.0, "expert": 1500.0, "player": 1250.0}
    anchors = {"script": 1000.0, "expert": 1500.0}
    state = frozen_league(anchors if anchored else {}, ["player"] if anchored else list(true))
    state = play_round_robin(state, true, 400)
    before = fit_league(state)["player"].elo
    ratings = [before]
    for strength in (1700.0, 700.0):
        added = {f"new{strength:.0f}_{i}": strength + 20 * i for i in range(6)}
        true |= added
        state = apply_all(state, [PlayerAdded(Player(name, PlayerRole.HISTORICAL)) for name in added])
        for name in added:
            wins = round(400 * expected_score(true[name], true["player"]))
            state = play_matches(state, name, "player", wins, 0, 400 - wins)
        ratings.append(fit_league(state)["player"].elo)
    moved = max(abs(rating - before) for rating in ratings)
    if anchored:
        assert before == pytest.approx(1250, abs=5)
        assert moved < 5
    else:
        assert moved > 100  # the mean of the pool is all there is to compare with


def test_anchors_have_the_skill_of_their_rating() -> None:
    """The win probability of the Plackett-Luce model between certain skills is that of the Elo ratings."""
    one, other = skill_of_anchor(1500.0), skill_of_anchor(1320.0)
    c = math.sqrt(2) * 25 / 6
    assert 1 / (1 + math.exp((other.mu - one.mu) / c)) == pytest.approx(expected_score(1500, 1320))
    state = frozen_league({"script": 1000.0}, ["player"])
    assert state.skill["script"] == skill_of_anchor(1000.0)
    after = play_matches(state, "player", "script", 20, 0, 20)
    assert after.skill["script"] == skill_of_anchor(1000.0)
    assert after.elo["script"] == 1000.0
    assert abs(after.skill["player"].mu - after.skill["script"].mu) < 1.5


def test_without_given_ratings_the_first_fixed_player_is_the_anchor() -> None:
    players = [Player("main", PlayerRole.MAIN), Player("script", PlayerRole.FIXED), Player("other", PlayerRole.FIXED)]
    state = apply_all(LeagueState(), map(PlayerAdded, players))
    assert anchors_of(state) == {"script": ELO_START}
    rated = {one.name: one for one in rate_players(play_matches(state, "main", "script", 30, 0, 10))}
    assert (rated["script"].rating.elo, rated["script"].rating.interval, rated["script"].anchor) == (ELO_START, 0.0, True)
    assert rated["main"].rating.elo == pytest.approx(ELO_START + 400 * math.log10(3), abs=10)
    assert anchors_of(LeagueState()) == {}
    assert rate_players(LeagueState()) == []


def test_a_training_player_is_rated_by_its_latest_results() -> None:
    """It lost 2000 matches as a beginner and wins now. Its snapshot of then keeps the rating of a beginner."""
    state = apply_all(
        LeagueState(),
        [PlayerAdded(Player("script", PlayerRole.FIXED, rating=1000.0)), PlayerAdded(Player("main", PlayerRole.MAIN))],
    )
    for _ in range(20):
        state = play_matches(state, "main", "script", 10, 0, 90)
    state = apply_all(state, [PlayerTrained("main", 1000, ""), SnapshotTaken("main", "main.1", "")])
    state = play_matches(state, "main.1", "script", 10, 0, 90)
    for _ in range(5):
        state = play_matches(state, "main", "script", 75, 0, 25)
    fitted = fit_league(state)
    assert fitted["main"].elo == pytest.approx(1000 + 400 * math.log10(3), abs=10)
    assert fitted["main.1"].elo == pytest.approx(1000 - 400 * math.log10(9), abs=20)
    assert state.recent["main"].games == 400
    assert {name: recent.games for name, recent in state.recent.items()} == {"main": 400, "main.1": 400}


def test_a_snapshot_is_rated_by_the_latest_results_of_its_parent() -> None:
    """Most snapshots never play among themselves: without these results their rating would be the prior."""
    players = [
        Player("script", PlayerRole.FIXED, rating=1000.0),
        Player("main", PlayerRole.MAIN),
        Player("other", PlayerRole.MAIN),
    ]
    state = apply_all(LeagueState(), map(PlayerAdded, players))
    state = play_matches(state, "main", "script", 300, 0, 100)
    state = play_matches(state, "main", "other", 5, 0, 5)  # the other one goes on learning: no fixed measure
    state = apply_all(state, [PlayerTrained("main", 1000, ""), SnapshotTaken("main", "main.1", "")])
    fitted = fit_league(state)["main.1"]
    assert fitted.elo == pytest.approx(1000 + 400 * math.log10(3), abs=15)
    assert fitted.interval < 60


def test_a_reset_forgets_the_results_of_the_player_everywhere() -> None:
    players = [Player("exploiter", PlayerRole.LEAGUE_EXPLOITER), Player("main", PlayerRole.MAIN)]
    state = apply_all(LeagueState(), map(PlayerAdded, players))
    state = play_matches(state, "exploiter", "main", 90, 0, 10)
    unrated = fit_league(LeagueState(players=dict(state.players)))["exploiter"].interval
    state = apply_all(state, [PlayerTrained("exploiter", 1000, ""), SnapshotTaken("exploiter", "exploiter.1", "", reset=True)])
    assert fit_league(state)["exploiter"].interval == pytest.approx(unrated, rel=0.2)


def test_matches_between_training_players_count_once() -> None:
    """If both had them among their latest results, the interval would be narrower by √2."""
    state = apply_all(LeagueState(), [PlayerAdded(Player(name, PlayerRole.MAIN)) for name in "ab"])
    state = play_matches(state, "a", "b", 30, 0, 10)
    score, games = np.array([[0, 30.0], [10, 0]]), np.array([[0, 40.0], [40, 0]])
    expected = fit_ratings(["a", "b"], score, games, {}, draws=np.zeros((2, 2)))
    assert fit_league(state)["a"].elo == pytest.approx(expected["a"].elo)
    assert fit_league(state)["a"].interval == pytest.approx(expected["a"].interval)


def test_a_turn_of_an_exploiter_leaves_the_rating_of_its_opponent_as_it_was() -> None:
    """It plays more matches than count for a rating, all against one player whose weights do not change meanwhile."""
    script = Player("script", PlayerRole.FIXED, rating=1000.0)
    players = [script, Player("main", PlayerRole.MAIN), Player("exploiter", PlayerRole.MAIN_EXPLOITER)]
    state = apply_all(LeagueState(), map(PlayerAdded, players))
    for _ in range(4):
        state = play_matches(state, "main", "script", 75, 0, 25)
    before = fit_league(state)["main"]
    for _ in range(12):
        state = play_matches(state, "exploiter", "main", 30, 0, 70)
    after = fit_league(state)
    assert after["main"].elo == pytest.approx(before.elo, abs=2)
    assert before.interval < after["main"].interval + 1 < 50
    assert after["exploiter"].elo == pytest.approx(before.elo - 400 * math.log10(7 / 3), abs=5)
    state = play_matches(state, "script", "main", 5, 0, 15)  # as `ludus league match --record` does
    assert state.recent["main"].entries[-1] == ("script", 15, 0, 5)


def test_results_of_its_own_replace_those_that_a_snapshot_has_from_its_parent() -> None:
    """The parent was weaker in some of the matches before."""
    players = [Player("script", PlayerRole.FIXED, rating=1000.0), Player("main", PlayerRole.MAIN)]
    state = play_matches(apply_all(LeagueState(), map(PlayerAdded, players)), "main", "script", 100, 0, 300)
    state = apply_all(state, [PlayerTrained("main", 1000, ""), SnapshotTaken("main", "main.1", "")])
    ratings = [fit_league(state)["main.1"].elo]
    for _ in range(10):
        state = play_matches(state, "main.1", "script", 9, 0, 3)
        ratings.append(fit_league(state)["main.1"].elo)
    assert ratings[0] == pytest.approx(1000 - 400 * math.log10(3), abs=5)
    assert ratings == sorted(ratings), "it changes bit by bit"
    alone = frozen_league({"script": 1000.0}, ["main.1"])
    own = fit_league(play_matches(alone, "main.1", "script", 90, 0, 30))["main.1"]
    assert fit_league(state)["main.1"] == own


@pytest.mark.parametrize(("wins", "draws", "losses"), [(3, 0, 3), (150, 0, 150), (7, 2, 1), (0, 5, 0), (1000, 10, 90)])
def test_the_results_of_a_report_are_rated_in_a_mixed_order(wins: int, draws: int, losses: int) -> None:
    outcomes = spread_outcomes(wins, draws, losses, limit=100)
    games = wins + draws + losses
    assert len(outcomes) == min(games, 100)
    for outcome, count in ((1.0, wins), (0.5, draws), (0.0, losses)):
        for length in range(1, len(outcomes) + 1):
            assert abs(outcomes[:length].count(outcome) - count * length / games) <= 1
    assert sum(outcomes) / len(outcomes) == pytest.approx((wins + 0.5 * draws) / games, abs=1.0 / len(outcomes))


def test_a_large_report_of_equal_players_leaves_their_skills_equal() -> None:
    state = play_matches(frozen_league({}, ["a", "b"]), "a", "b", 150, 0, 150)
    assert abs(state.skill["a"].mu - state.skill["b"].mu) < 1.0


def test_sides_of_three_are_rated_like_openskill() -> None:
    """3v3 with a win, a loss and a draw; the skill of a side is the sum of its members."""
    model = pytest.importorskip("openskill.models").PlackettLuce()
    random = np.random.default_rng(3)
    sides = [[SkillEstimate(random.uniform(20, 30), random.uniform(2, 8)) for _ in range(3)] for _ in range(2)]
    for scores in ([1.0, 0.0], [0.0, 1.0], [0.5, 0.5]):
        theirs = model.rate([[model.rating(mu=one.mu, sigma=one.sigma) for one in side] for side in sides], scores=scores)
        sides = update_skill(sides, scores)
        for side, other in zip(sides, theirs, strict=True):
            assert [one.mu for one in side] == pytest.approx([one.mu for one in other])
            assert [one.sigma for one in side] == pytest.approx([one.sigma for one in other])
