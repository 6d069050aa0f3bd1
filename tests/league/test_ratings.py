from __future__ import annotations

import numpy as np
import pytest

from ludus.league.cycles import Cycle, cyclic_share, find_cycles
from ludus.league.payoff import PayoffTable
from ludus.league.ratings import SkillEstimate, expected_score, fit_ratings, update_elo, update_skill

ROCK_PAPER_SCISSORS = np.array([[0.5, 0.1, 0.9], [0.9, 0.5, 0.1], [0.1, 0.9, 0.5]])


def test_elo_matches_the_published_examples() -> None:
    assert update_elo(1200, 1200, 1.0) == (1208, 1192)
    assert expected_score(2100, 1800) == pytest.approx(0.85, abs=0.005)


def test_anchors_keep_their_rating() -> None:
    own, anchor = update_elo(1200, 1000, 0.0, other_fixed=True)
    assert own < 1200
    assert anchor == 1000
    rated = update_skill([[SkillEstimate()], [SkillEstimate(30, 1)]], [1, 0], fixed=[False, True])
    assert rated[1] == [SkillEstimate(30, 1)]
    assert rated[0][0].mu > 25


def test_skills_equal_those_of_openskill() -> None:
    model = pytest.importorskip("openskill.models").PlackettLuce()
    random = np.random.default_rng(0)
    for _ in range(30):
        sizes = random.integers(1, 4, size=random.integers(2, 5))
        teams = [[SkillEstimate(random.uniform(10, 40), random.uniform(2, 9)) for _ in range(size)] for size in sizes]
        scores = random.integers(0, 3, size=len(sizes)).tolist()
        theirs = model.rate([[model.rating(mu=one.mu, sigma=one.sigma) for one in team] for team in teams], scores=scores)
        for team, other in zip(update_skill(teams, scores), theirs, strict=True):
            for one, their in zip(team, other, strict=True):
                assert one.mu == pytest.approx(their.mu, abs=1e-9)
                assert one.sigma == pytest.approx(their.sigma, abs=1e-9)


def test_skill_becomes_more_certain_with_results() -> None:
    own, other = SkillEstimate(), SkillEstimate()
    for _ in range(12):
        (own,), (other,) = update_skill([[own], [other]], [1, 0])
    assert own.mu - other.mu > 10
    assert own.sigma < 7
    assert own.conservative > other.conservative


def test_fitted_ratings_recover_the_strengths_that_made_the_results() -> None:
    true = np.array([0.0, 150.0, 300.0, -200.0])
    games = np.full((4, 4), 2000.0) - np.eye(4) * 2000
    score = games / (1 + 10 ** ((true[None, :] - true[:, None]) / 400))
    fitted = fit_ratings(["a", "b", "c", "d"], score, games, {"a": 1000.0})
    assert [fitted[name].elo - 1000 for name in "abcd"] == pytest.approx(true.tolist(), abs=2)
    assert fitted["a"].interval == 0
    assert 5 < fitted["b"].interval < 30


def test_fitted_ratings_stay_finite_for_undefeated_players() -> None:
    fitted = fit_ratings(["a", "b"], np.array([[0, 10.0], [0, 0]]), np.array([[0, 10.0], [10, 0]]), {})
    assert 1200 < fitted["a"].elo < 2000
    assert (fitted["a"].elo + fitted["b"].elo) / 2 == pytest.approx(1200)
    assert fit_ratings([], np.zeros((0, 0)), np.zeros((0, 0)), {}) == {}


def test_cycles_are_found_and_measured() -> None:
    assert cyclic_share(ROCK_PAPER_SCISSORS) == pytest.approx(1.0)
    (cycle,) = find_cycles(["rock", "paper", "scissors"], ROCK_PAPER_SCISSORS)
    assert cycle == Cycle(("rock", "scissors", "paper"), (0.9, 0.9, 0.9))
    strength = np.array([0.0, 1.0, 2.5])
    ranking = 1 / (1 + np.exp(strength[None, :] - strength[:, None]))
    assert cyclic_share(ranking) == pytest.approx(0.0, abs=1e-9)
    assert find_cycles(["a", "b", "c"], ranking) == []


def test_the_payoff_table_counts_both_directions_and_forgets_a_reset_player() -> None:
    table = PayoffTable().add("a", "b", 3, 1, 1).add("b", "c", 1, 0, 0).add("a", "a", 5, 0, 0)
    assert table.record("a", "b")[:3] == (3, 1, 1)
    assert table.record("b", "a")[:3] == (1, 1, 3)
    assert table.win_rate("a", "b") == pytest.approx(0.7)
    assert table.win_rate("a", "c") == 0.5
    np.testing.assert_allclose(table.matrix(["a", "b", "c"]), [[0.5, 0.7, 0.5], [0.3, 0.5, 1.0], [0.5, 0.0, 0.5]])
    assert table.counts(["a", "b", "c"]).tolist() == [[0, 5, 0], [5, 0, 1], [0, 1, 0]]
    forgotten = table.without("a")
    assert forgotten.record("b", "a").games == 0
    assert forgotten.record("b", "c").games == 1


def test_old_results_are_discounted() -> None:
    at_once, one_by_one = PayoffTable().add("a", "b", 0, 0, 10, 0.9), PayoffTable()
    for _ in range(10):
        one_by_one = one_by_one.add("a", "b", 0, 0, 1, 0.9)
    assert at_once.record("a", "b").weight == pytest.approx(one_by_one.record("a", "b").weight)
    for _ in range(10):
        one_by_one = one_by_one.add("a", "b", 1, 0, 0, 0.9)
    assert one_by_one.win_rate("a", "b") == pytest.approx(1 / (1 + 0.9**10))
