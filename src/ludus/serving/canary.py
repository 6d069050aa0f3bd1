"""Canary analysis: decides from counters whether a new version that serves part of the sessions is promoted or rolled back.

Pure: counts in, a decision out. It may be called at any time: the evidence for a rollback is an e-value against "this version is
within its limits", which for a sound version ever exceeds 1/risk with probability at most `risk` (Ville's inequality).
A promotion needs evidence as well: a few requests without an error prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ludus.core.statistics import wilson_interval

WAIT: Literal["wait"] = "wait"
PROMOTE: Literal["promote"] = "promote"
ROLL_BACK: Literal["roll_back"] = "roll_back"


@dataclass(frozen=True)
class VersionCounts:
    """Counters of one version since the canary began, over all workers."""

    requests: int = 0
    errors: int = 0
    latency: Sequence[int] = ()
    """Histogram of response times with upper bounds of 1, 2, 4, 8 … µs; the last bucket has no upper bound."""
    passes: Sequence[tuple[int, float]] = ()
    """Forward passes with fewer than 1, 2, 4 … rows: (number, total seconds)."""


@dataclass(frozen=True)
class CanarySettings:
    hold_s: float = 300.0
    """Minimum time before a promotion."""
    give_up_s: float = 3600.0
    """Time after which a canary with enough requests but without proof of soundness is rolled back."""
    min_requests: int = 500
    """Requests of the canary before it is promoted or judged by latency."""
    max_error_ratio: float = 2.0
    """Allowed error share of the canary, as a multiple of the stable version's …"""
    tolerated_errors: float = 0.01
    """… and an error share that is always allowed, because the stable version may have no errors."""
    max_latency_ratio: float = 2.0
    """A response is slow above this multiple of the stable version's quantile, rounded up to a bucket."""
    latency_quantile: float = 0.99
    fast_enough_ms: float = 1.0
    """Faster responses are never slow."""
    risk: float = 0.001
    """Probability of rolling back a version that is within its limits."""


class CanaryDecision(NamedTuple):
    action: Literal["wait", "promote", "roll_back"]
    reason: str


_MAX_ERROR_SHARE = 0.5
"""Error share that causes a rollback even without a stable version to compare with."""
_STABLE_Z = 2.58  # 99 % two-sided, for the stable version's share
_PROMOTE_Z = 2.33  # 99 % one-sided, for a promotion
_ALTERNATIVES = 16
_MIN_STABLE = 100  # responses of the stable version before latencies are compared
_MIN_PASSES = 50  # forward passes of the canary before their cost is compared
_MAX_LOG_ODDS = math.log(999)  # of a bad response


def judge(stable: VersionCounts, canary: VersionCounts, seconds: float, settings: CanarySettings | None = None) -> CanaryDecision:
    """Decide about a canary that has run for `seconds`."""
    settings = settings or CanarySettings()
    errors = _judge_share(stable.errors, stable.requests, canary.errors, canary.requests, _error_limits(settings), settings)
    if errors == ROLL_BACK:
        return CanaryDecision(
            ROLL_BACK,
            f"{_fraction(canary.errors, canary.requests)} failed; of the stable version {_fraction(stable.errors, stable.requests)}.",
        )
    if canary.requests < settings.min_requests:
        return CanaryDecision(WAIT, f"{canary.requests} of {settings.min_requests} requests.")
    bucket = first_slow_bucket(stable.latency, settings)
    slow, slow_stable = _above(canary.latency, bucket), _above(stable.latency, bucket)
    timed, timed_stable = sum(canary.latency), sum(stable.latency)
    latency = _judge_share(slow_stable, timed_stable, slow, timed, _slow_limits(settings), settings)
    slower = f"took longer than {_bound_ms(bucket):g} ms"
    if timed_stable < _MIN_STABLE:  # too few to compare
        latency = PROMOTE
    if latency == ROLL_BACK:
        return CanaryDecision(
            ROLL_BACK, f"{_fraction(slow, timed)} {slower}; of the stable version {_fraction(slow_stable, timed_stable)}."
        )
    ratio = cost_ratio(stable.passes, canary.passes, settings.fast_enough_ms / 1e3)
    if ratio > settings.max_latency_ratio:
        return CanaryDecision(ROLL_BACK, f"A forward pass takes {ratio:.1f} times as long as that of the stable version.")
    if seconds < settings.hold_s:
        return CanaryDecision(WAIT, f"{seconds:.0f} of {settings.hold_s:g} s.")
    if errors == latency == PROMOTE:
        return CanaryDecision(PROMOTE, f"{_fraction(canary.errors, canary.requests)} failed, {_fraction(slow, timed)} {slower}.")
    what = f"{_fraction(canary.errors, canary.requests)} failed" if errors == WAIT else f"{_fraction(slow, timed)} {slower}"
    if seconds >= settings.give_up_s:
        return CanaryDecision(ROLL_BACK, f"Not proven to be sound after {seconds:.0f} s: {what}.")
    return CanaryDecision(WAIT, f"Not yet proven to be sound: {what}.")


def cost_ratio(stable: Sequence[tuple[int, float]], canary: Sequence[tuple[int, float]], fast_enough_s: float) -> float:
    """Ratio of forward-pass times of canary and stable version for equal batch sizes; 0 when it is unknown.

    Two versions in one worker share an event loop: a slow one delays the responses of both, so only the passes show which one is
    slow. For a batch size that the stable version lacks, its nearest larger size is used.
    """
    known = [(size, seconds / count) for size, (count, seconds) in enumerate(stable) if count]
    if not known or sum(count for count, _ in canary) < _MIN_PASSES:
        return 0.0
    took = expected = 0.0
    for size, (count, seconds) in enumerate(canary):
        if count:
            took += seconds
            expected += count * next((mean for of, mean in known if of >= size), known[-1][1])
    mean = took / sum(count for count, _ in canary)
    return took / expected if mean > fast_enough_s and expected > 0 else 0.0


class _ShareLimits(NamedTuple):
    ratio: float
    tolerated: float


def _error_limits(settings: CanarySettings) -> _ShareLimits:
    return _ShareLimits(settings.max_error_ratio, settings.tolerated_errors)


def _slow_limits(settings: CanarySettings) -> _ShareLimits:
    """A share of 1 − q is beyond the quantile by definition; twice that is allowed, because latencies come in bursts."""
    return _ShareLimits(2.0, 2 * (1 - settings.latency_quantile))


def _judge_share(
    bad_stable: int, of_stable: int, bad: int, total: int, limits: _ShareLimits, settings: CanarySettings
) -> Literal["wait", "promote", "roll_back"]:
    """Compare the canary's share of bad responses with its limit: above (roll back), within (promote) or unproven (wait)."""
    allowed = error_limit(bad_stable, of_stable, limits.ratio, limits.tolerated)
    if evidence(bad, total, allowed) >= math.log(1 / settings.risk):
        return ROLL_BACK
    estimate = limits.ratio * bad_stable / of_stable if of_stable else 0.0
    if wilson_interval(bad, total, _PROMOTE_Z)[1] <= min(max(limits.tolerated, estimate), _MAX_ERROR_SHARE):
        return PROMOTE
    return WAIT


def error_limit(bad_stable: int, of_stable: int, ratio: float, tolerated: float) -> float:
    """Share of bad responses above which a canary is rolled back.

    Uses the upper confidence bound of the stable version's share, so that few requests cause no rollback. The limit is at most
    one half, unless the stable version's bound is higher.
    """
    if not of_stable:
        return _MAX_ERROR_SHARE
    upper = wilson_interval(bad_stable, of_stable, _STABLE_Z)[1]
    return min(max(tolerated, ratio * upper), max(_MAX_ERROR_SHARE, upper))


def evidence(bad: int, total: int, allowed: float) -> float:
    """Logarithm of the e-value against "the share of bad responses is at most `allowed`".

    The mean likelihood ratio of some larger shares to the allowed one. Under the hypothesis it is a (super)martingale that starts
    at 1, so it ever exceeds x with probability at most 1/x.
    """
    allowed = max(allowed, 1e-9)
    if allowed >= 1:
        return -math.inf
    good = total - bad
    from_odds = math.log(allowed) - math.log1p(-allowed)
    to_odds = max(_MAX_LOG_ODDS, from_odds + 1)
    logs = []
    for step in range(1, _ALTERNATIVES + 1):
        odds = from_odds + (to_odds - from_odds) * step / _ALTERNATIVES
        share, rest = -math.log1p(math.exp(-odds)), -math.log1p(math.exp(odds))  # logarithms of p and 1 − p
        logs.append(bad * (share - math.log(allowed)) + good * (rest - math.log1p(-allowed)))
    top = max(logs)
    return top + math.log(sum(math.exp(one - top) for one in logs) / len(logs))


def quantile_us(latency: Sequence[int], q: float) -> float:
    """Quantile of a power-of-two histogram, interpolated logarithmically within its bucket; 0 if it is empty."""
    total = sum(latency)
    wanted, seen = q * total, 0
    for bucket, count in enumerate(latency):
        if count and seen + count >= wanted:
            return float(2 ** (bucket - 1 + (wanted - seen) / count))
        seen += count
    return 0.0


def first_slow_bucket(latency: Sequence[int], settings: CanarySettings) -> int:
    """Return the first bucket whose responses are all slow, compared with the stable version's latency."""
    bound_us = max(
        settings.max_latency_ratio * quantile_us(latency, settings.latency_quantile), 1000 * settings.fast_enough_ms, 1.0
    )
    return math.ceil(round(math.log2(bound_us), 9)) + 1


def _above(latency: Sequence[int], bucket: int) -> int:
    return sum(latency[bucket:])


def _bound_ms(bucket: int) -> float:
    return float(2 ** (bucket - 1)) / 1000


def _fraction(bad: int, total: int) -> str:
    return f"{bad} of {total}"
