"""Against scipy, brute force, and simulated data whose mean is known."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from scipy import stats

from ludus.core.statistics import confidence_interval, difference, student_cdf, student_quantile, summarize_results
from ludus.errors import UsageError

SKEWED = np.random.default_rng(1).exponential(3.0, 30)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 19, 100, 1_000, 5_000])
def test_students_t_is_that_of_scipy(freedom: int) -> None:
    for t in (0.0, 0.3, 1.0, 2.5, 12.0):
        assert student_cdf(t, freedom) == pytest.approx(stats.t.cdf(t, freedom), abs=2e-6)
    for p in (0.5, 0.9, 0.975, 0.995):
        assert student_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-4, abs=1e-9)


def test_the_interval_is_the_bca_interval_of_scipy_at_the_widened_level() -> None:
    n = len(SKEWED)
    tail = stats.norm.cdf(-math.sqrt(n / (n - 1)) * stats.t.ppf(0.975, n - 1))
    theirs = stats.bootstrap(
        (SKEWED,), np.mean, confidence_level=1 - 2 * tail, n_resamples=40_000, method="BCa", rng=np.random.default_rng(5)
    ).confidence_interval
    ours = confidence_interval(SKEWED, resamples=40_000)
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.05)
    plain = np.percentile(SKEWED[np.random.default_rng(2).integers(0, n, (40_000, n))].mean(axis=1), [2.5, 97.5])
    assert ours[0] > plain[0] + 0.02
    assert ours[1] > plain[1] + 0.1


@pytest.mark.parametrize(("n", "lowest"), [(10, 0.91), (20, 0.925)])
def test_the_interval_covers_the_true_mean_at_its_confidence(n: int, lowest: float) -> None:
    rng, inside, trials = np.random.default_rng(n + 1), 0, 1_000
    for trial in range(trials):
        low, high = confidence_interval(rng.normal(2.0, 1.0, n), resamples=1_000, seed=trial)
        inside += low <= 2.0 <= high
    assert lowest <= inside / trials <= 0.985


def test_the_same_values_give_the_same_interval_and_a_higher_confidence_a_wider_one() -> None:
    assert confidence_interval(SKEWED) == confidence_interval(list(SKEWED))
    narrow, wide = confidence_interval(SKEWED, confidence=0.5), confidence_interval(SKEWED, confidence=0.99)
    assert wide[0] < narrow[0] < SKEWED.mean() < narrow[1] < wide[1]


def test_values_that_say_nothing_about_their_spread() -> None:
    assert confidence_interval([500.0] * 20) == (500.0, 500.0)
    assert all(math.isnan(edge) for edge in confidence_interval([3.0]))
    assert all(math.isnan(edge) for edge in confidence_interval([3.0, math.inf, 1.0]))
    with pytest.raises(UsageError, match="no values"):
        confidence_interval([])
    with pytest.raises(UsageError, match="confidence"):
        confidence_interval([1.0, 2.0], confidence=95)


def test_two_values_give_no_more_than_their_own_range() -> None:
    assert confidence_interval([1.0, 3.0]) == (1.0, 3.0)
    assert difference([1.0, 3.0], [0.0, 1.0]).low == 0.0


def test_one_value_far_away_does_not_break_the_correction() -> None:
    low, high = confidence_interval([0.0] * 9 + [1_000.0])
    assert 0.0 <= low < 100.0 < high <= 1_000.0


def test_small_groups_are_compared_exactly() -> None:
    a, b = [5.0, 7.0, 6.5], [4.0, 6.0, 3.0]
    pooled = np.asarray(a + b)
    orders = np.asarray(list(permutations(pooled)))
    apart = np.abs(orders[:, :3].mean(axis=1) - orders[:, 3:].mean(axis=1))
    brute = np.mean(apart >= abs(np.mean(a) - np.mean(b)) - 1e-12)
    found = difference(a, b)
    assert found.p_value == pytest.approx(brute)
    assert found.mean == pytest.approx(np.mean(a) - np.mean(b))
    assert difference([9.0, 8.0, 7.0], [1.0, 2.0, 3.0]).p_value == pytest.approx(0.1)  # three seeds prove nothing


def test_large_groups_are_compared_as_scipy_compares_them() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.0, 1.0, 40), rng.normal(0.45, 2.0, 30)
    theirs = stats.permutation_test(
        (a, b), lambda x, y, axis: x.mean(axis) - y.mean(axis), n_resamples=20_000, vectorized=True, rng=np.random.default_rng(1)
    )
    found = difference(a, b)
    assert found.p_value == pytest.approx(theirs.pvalue, abs=0.015)
    boot = stats.bootstrap(
        (a, b),
        lambda x, y, axis: x.mean(axis) - y.mean(axis),
        method="percentile",
        n_resamples=10_000,
        rng=np.random.default_rng(2),
    ).confidence_interval
    assert found.low == pytest.approx(boot.low, abs=0.1)
    assert found.high == pytest.approx(boot.high, abs=0.1)
    assert found.low < found.mean < found.high


def test_groups_of_the_same_source_are_rarely_called_different() -> None:
    rng, trials = np.random.default_rng(7), 300
    wrong = sum(difference(rng.normal(size=8), rng.normal(size=8), resamples=400, seed=i).p_value <= 0.05 for i in range(trials))
    assert 0.01 <= wrong / trials <= 0.09


def test_a_difference_of_too_few_values_is_reported_as_nan() -> None:
    lone = difference([1.0], [2.0, 3.0])
    assert lone.mean == pytest.approx(-1.5)
    assert math.isnan(lone.low)
    assert lone.p_value == pytest.approx(2 / 3)
    assert math.isnan(difference([1.0, math.nan], [2.0, 3.0]).p_value)
    assert difference([1.0, 1.0], [1.0, 1.0]).p_value == 1.0


@pytest.mark.parametrize(("won", "games"), [(8, 10), (0, 3), (200, 200), (57, 100)])
def test_results_are_means_and_shares_have_the_interval_of_scipy(won: int, games: int) -> None:
    found = summarize_results({"win/hard": (float(won), float(games)), "seconds": (30.0, 4.0), "loss/hard": (0.0, 0.0)})
    wanted = stats.binomtest(won, games).proportion_ci(method="wilson")
    shares = {"win/hard": won / games, "win/hard_low": wanted.low, "win/hard_high": wanted.high}
    assert found == pytest.approx({**shares, "seconds": 7.5}, abs=1e-4)
