"""Canary analysis: error rates in simulations, and the speed of decisions."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.statistics import wilson_interval
from ludus.serving.canary import (
    PROMOTE,
    ROLL_BACK,
    WAIT,
    CanaryDecision,
    CanarySettings,
    VersionCounts,
    cost_ratio,
    error_limit,
    evidence,
    first_slow_bucket,
    judge,
    quantile_us,
)

FAST = 8  # the bucket of answers of up to 256 µs
BUCKETS = 26


def counts(requests: int, errors: int = 0, latency: list[int] | None = None) -> VersionCounts:
    if latency is None:
        latency = [0] * BUCKETS
        latency[FAST] = requests
    return VersionCounts(requests, errors, latency)


PLENTY = counts(100_000, 10)


# -- single cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("canary", "seconds", "what"),
    [
        (counts(0), 10_000, WAIT),
        (counts(10, 1), 10, WAIT),  # one error of ten does not condemn
        (counts(3), 10_000, WAIT),  # three requests without one do not promote
        (counts(3, 3), 1, ROLL_BACK),  # a version that only fails
        (counts(6, 5), 1, ROLL_BACK),
        (counts(5000), 299, WAIT),
        (counts(5000), 300, PROMOTE),
        (counts(5000, 5), 300, PROMOTE),
        (counts(5000, 50), 300, WAIT),  # on the limit: neither proven
        (counts(5000, 50), 3600, ROLL_BACK),
        (counts(5000, 200), 10, ROLL_BACK),
        (counts(499), 100_000, WAIT),  # nobody plays: no reason to give up
    ],
)
def test_a_canary_is_judged_by_what_is_known(canary: VersionCounts, seconds: float, what: str) -> None:
    verdict = judge(PLENTY, canary, seconds)
    assert verdict.action == what, verdict
    assert verdict.reason


def test_few_requests_never_promote_a_canary() -> None:
    hasty = CanarySettings(min_requests=1, hold_s=0)
    assert judge(PLENTY, counts(3), 100, hasty).action == WAIT
    assert judge(PLENTY, counts(100), 100, hasty).action == WAIT
    assert judge(PLENTY, counts(1000), 100, hasty).action == PROMOTE


def test_the_reason_contains_the_numbers() -> None:
    assert judge(PLENTY, counts(40, 20), 9) == CanaryDecision(ROLL_BACK, "20 of 40 failed; of the stable version 10 of 100000.")
    assert judge(PLENTY, counts(40), 9) == CanaryDecision(WAIT, "40 of 500 requests.")
    slow = [0] * BUCKETS
    slow[FAST + 4] = 600
    assert judge(PLENTY, counts(600, 0, slow), 9) == CanaryDecision(
        ROLL_BACK, "600 of 600 took longer than 1.024 ms; of the stable version 0 of 100000."
    )


def test_equal_failures_of_both_versions_cause_no_rollback() -> None:
    broken = counts(5000, 4500)
    for seconds in (10, 300, 3000):
        assert judge(broken, counts(500, 450), seconds).action == WAIT
    assert judge(broken, counts(500, 500), 10).action == ROLL_BACK, "but it is worse"


def test_without_anything_to_compare_with_only_a_hopeless_version_is_rolled_back_at_once() -> None:
    nobody = counts(0)
    assert judge(nobody, counts(100, 20), 10).action == WAIT
    assert judge(nobody, counts(20, 20), 10).action == ROLL_BACK
    assert judge(nobody, counts(2000), 300).action == PROMOTE


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 10_000), st.floats(0, 1e5))
def test_more_errors_never_help_and_nothing_raises(stable: int, errors: int, requests: int, failed: int, seconds: float) -> None:
    stable_counts = counts(stable, min(stable, errors))
    order = {ROLL_BACK: 0, WAIT: 1, PROMOTE: 2}
    failed = min(failed, requests)
    verdicts = [
        judge(stable_counts, counts(requests, n), seconds).action for n in (failed // 2, failed, (failed + requests) // 2)
    ]
    assert sorted(verdicts, key=order.__getitem__, reverse=True) == verdicts


# -- latency -------------------------------------------------------------------------------------------------------------


def histogram(values_us: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[int]:
    buckets = np.clip(np.ceil(np.log2(np.maximum(values_us, 1.0))), 0, BUCKETS - 1).astype(int)
    return [int(n) for n in np.bincount(buckets, minlength=BUCKETS)]


def test_a_quantile_lies_in_the_bucket_of_the_exact_one() -> None:
    random = np.random.default_rng(1)
    for spread, q in product((0.1, 0.5, 1.5), (0.5, 0.9, 0.99)):
        values = np.exp(random.normal(math.log(3000), spread, 20_000))
        found, exact = quantile_us(histogram(values), q), float(np.quantile(values, q))
        assert math.ceil(math.log2(found)) == math.ceil(math.log2(exact))
    assert quantile_us([], 0.99) == 0


@pytest.mark.parametrize(("bucket", "first_slow"), [(0, 11), (FAST, 11), (12, 14), (20, 22)])
def test_slow_is_what_takes_twice_as_long_rounded_up_but_never_what_is_fast_enough(bucket: int, first_slow: int) -> None:
    latency = [0] * BUCKETS
    latency[bucket] = 1000
    assert first_slow_bucket(latency, CanarySettings()) == first_slow


@pytest.mark.parametrize(("times", "what"), [(1.0, PROMOTE), (1.2, PROMOTE), (5.0, ROLL_BACK), (20.0, ROLL_BACK)])
def test_a_slower_version_is_rolled_back(times: float, what: str) -> None:
    random = np.random.default_rng(2)
    outcomes: Counter[str] = Counter()
    for _ in range(50):
        stable = np.exp(random.normal(math.log(4000), 0.3, 20_000))
        canary = np.exp(random.normal(math.log(4000 * times), 0.3, 2000))
        outcomes[judge(counts(20_000, 0, histogram(stable)), counts(2000, 0, histogram(canary)), 300).action] += 1
    assert outcomes == {what: 50}


def test_without_the_stable_version_nothing_is_slow() -> None:
    latency = [0] * BUCKETS
    latency[12] = 5000  # 4 ms
    assert judge(counts(0), VersionCounts(5000, 0, latency), 300).action == PROMOTE


def passes(**by_rows: float) -> list[tuple[int, float]]:
    """100 forward passes of 64 rows with this time each."""
    found = [(0, 0.0)] * 32
    for rows, ms in by_rows.items():
        found[int(rows.removeprefix("rows_")).bit_length()] = (100, 100 * ms / 1e3)
    return found


@pytest.mark.parametrize(
    ("stable", "canary", "ratio"),
    [
        (passes(rows_64=4.0), passes(rows_64=4.0), 1.0),
        (passes(rows_64=4.0), passes(rows_64=20.0), 5.0),
        (passes(rows_64=4.0, rows_4=2.0), passes(rows_4=10.0), 5.0),
        (passes(rows_64=4.0), passes(rows_4=20.0), 5.0),  # a larger batch stands for the missing one
        (passes(rows_4=4.0), passes(rows_64=8.0), 2.0),  # or the largest there is
        (passes(rows_64=0.1), passes(rows_64=0.9), 0.0),  # fast enough
        ([], passes(rows_64=9.0), 0.0),
        (passes(rows_64=4.0), [(0, 0.0)] * 6 + [(20, 9.0)], 0.0),  # too few to tell
    ],
)
def test_forward_passes_are_compared_size_by_size(
    stable: list[tuple[int, float]], canary: list[tuple[int, float]], ratio: float
) -> None:
    assert cost_ratio(stable, canary, 1e-3) == pytest.approx(ratio)


def test_a_version_whose_passes_are_slow_is_rolled_back_although_both_answer_alike() -> None:
    """Both share an event loop: the slow one delays both."""
    latency = [0] * BUCKETS
    latency[14] = 5000
    stable = VersionCounts(5000, 0, latency, passes(rows_64=2.0))
    assert judge(stable, VersionCounts(5000, 0, latency, passes(rows_8=10.0)), 300).action == ROLL_BACK
    assert judge(stable, VersionCounts(5000, 0, latency, passes(rows_8=1.5)), 300).action == PROMOTE


def test_common_bursts_of_slow_responses_cause_no_rollback() -> None:
    """A pause of the machine makes many responses slow at once."""
    random = np.random.default_rng(3)
    rolled_back = 0
    for _ in range(100):
        stable, canary = np.zeros(BUCKETS, int), np.zeros(BUCKETS, int)
        for second in range(60):
            slowed = 10.0 if random.random() < 0.03 else 1.0
            for whole, rate in ((stable, 90), (canary, 10)):
                values = np.exp(random.normal(math.log(4000), 0.3, random.poisson(rate)))
                values[: len(values) // 5] *= slowed
                whole += np.array(histogram(values))
            verdict = judge(counts(int(stable.sum()), 0, stable.tolist()), counts(int(canary.sum()), 0, canary.tolist()), second)
            if verdict.action == ROLL_BACK:
                rolled_back += 1
                break
    assert rolled_back <= 2


# -- how often it is wrong -----------------------------------------------------------------------------------------------


def outcome(
    random: np.random.Generator, stable: float, canary: float, rates: tuple[int, int], seconds: int = 400
) -> tuple[str, int]:
    """Judge every four seconds; return the decision and its time."""
    requests, errors = np.zeros(2, int), np.zeros(2, int)
    for now in range(4, seconds + 1, 4):
        came = random.poisson(np.multiply(rates, 4))
        requests += came
        errors += random.binomial(came, (stable, canary))
        verdict = judge(counts(int(requests[0]), int(errors[0])), counts(int(requests[1]), int(errors[1])), now)
        if verdict.action != WAIT:
            return verdict.action, now
    return WAIT, seconds


@pytest.mark.parametrize("share", [0.0, 0.001, 0.005, 0.02, 0.1, 0.4])
@pytest.mark.parametrize("rates", [(200, 20), (5, 5), (2, 40)], ids=["busy", "quiet", "mostly canary"])
def test_an_equal_version_is_rarely_rolled_back_under_continuous_checks(share: float, rates: tuple[int, int]) -> None:
    random = np.random.default_rng(4)
    outcomes = Counter(outcome(random, share, share, rates)[0] for _ in range(40))
    assert outcomes[ROLL_BACK] == 0, outcomes
    if rates[0] > 100:
        assert outcomes[PROMOTE] >= 38, outcomes


@pytest.mark.parametrize(("stable", "canary", "within_s"), [(0.0, 1.0, 4), (0.0, 0.5, 4), (0.001, 0.1, 40), (0.01, 0.06, 120)])
def test_a_bad_version_is_rolled_back_soon(stable: float, canary: float, within_s: int) -> None:
    random = np.random.default_rng(5)
    found = [outcome(random, stable, canary, (200, 20)) for _ in range(60)]
    assert {what for what, _ in found} == {ROLL_BACK}
    assert sorted(when for _, when in found)[54] <= within_s


def test_a_version_that_is_too_bad_is_hardly_ever_promoted() -> None:
    random = np.random.default_rng(6)
    found = Counter(outcome(random, 0.001, 0.012, (200, 20))[0] for _ in range(100))
    assert found[PROMOTE] <= 2, found


@pytest.mark.parametrize("allowed", [0.01, 0.1, 0.5])
def test_the_evidence_against_a_version_at_its_limit_rarely_reaches_a_bound(allowed: float) -> None:
    """Ville's inequality by simulation: checked after each of 600 requests, the bound is exceeded in fewer than 1 of 20 runs."""
    random = np.random.default_rng(7)
    runs, broken = 300, 0
    for _ in range(runs):
        bad = np.cumsum(random.random(600) < allowed)
        looked_at = np.flatnonzero(np.diff(bad, prepend=0))  # it can only rise when an answer is bad
        broken += any(evidence(int(bad[i]), int(i) + 1, allowed) >= math.log(20) for i in looked_at)
    assert broken / runs <= 0.05 + 0.02


@pytest.mark.parametrize("allowed", [0.003, 0.05, 0.5, 0.9])
def test_the_evidence_is_a_fair_bet(allowed: float) -> None:
    """By enumeration: the mean of the e-value is 1 for a version at its limit, and less for a better one."""
    for n in (1, 5, 30):
        values = [math.exp(evidence(k, n, allowed)) for k in range(n + 1)]
        for share, expected in ((allowed, 1.0), (allowed / 2, None)):
            chances = [math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)]
            mean = sum(chance * value for chance, value in zip(chances, values, strict=True))
            assert mean == pytest.approx(expected) if expected else mean < 1


@pytest.mark.parametrize(("total", "share"), [(20, 0.05), (100, 0.01), (500, 0.1)])
def test_wilson_bounds_hold_what_they_promise(total: int, share: float) -> None:
    below = sum(
        math.comb(total, k) * share**k * (1 - share) ** (total - k)
        for k in range(total + 1)
        if wilson_interval(k, total, 2.33)[1] < share
    )
    assert below <= 0.02
    assert wilson_interval(0, 0, 2.0) == (0.0, 1.0)


def test_the_limit_is_the_tolerated_share_or_a_multiple_of_what_is_usual() -> None:
    assert error_limit(0, 100_000, 2.0, 0.01) == 0.01
    assert error_limit(5000, 100_000, 2.0, 0.01) == pytest.approx(0.1, abs=0.005)
    assert error_limit(0, 0, 2.0, 0.01) == 0.5
    assert error_limit(0, 3, 2.0, 0.01) > 0.5, "three requests say little of the stable version"
    assert error_limit(95, 100, 2.0, 0.01) > 0.95
