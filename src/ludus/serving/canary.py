"""The canary's judge: a new version serves a part of the sessions; from what was counted, is it promoted or rolled back?

Pure: counts in, a verdict out. It may be asked as often as one likes: the evidence for rolling back is an e-value, a bet
against "this version is within its limits" that a sound version wins by a factor of 1/risk with probability below `risk`,
however often one looks (Ville's inequality). Promoting takes evidence too: few requests without an error prove nothing.
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
class Counts:
    """Of one version since the canary began, over all workers."""

    requests: int = 0
    errors: int = 0
    latency: Sequence[int] = ()
    """How many answers took at most 1, 2, 4, 8 … µs and longer than the bound before; the last bucket has no upper bound."""
    passes: Sequence[tuple[int, float]] = ()
    """Forward passes of below 1, 2, 4 … rows: how many, and how many seconds they took together."""


@dataclass(frozen=True)
class CanarySettings:
    hold_s: float = 300.0
    """It is not promoted before."""
    give_up_s: float = 3600.0
    """After so long, with enough requests and still no proof that it is sound, it is rolled back."""
    min_requests: int = 500
    """Of the canary, before it is promoted or judged by its latency."""
    max_error_ratio: float = 2.0
    """Its share of errors may be so many times that of the stable version …"""
    tolerated_errors: float = 0.01
    """… and this share is tolerated in any case: a stable version without any error would allow none."""
    max_latency_ratio: float = 2.0
    """An answer is slow when it takes so many times the stable version's quantile, rounded up to a bucket."""
    latency_quantile: float = 0.99
    fast_enough_ms: float = 1.0
    """What is faster is never slow."""
    risk: float = 0.001
    """Of rolling back a version that is within its limits."""


class Verdict(NamedTuple):
    what: Literal["wait", "promote", "roll_back"]
    reason: str


_HOPELESS = 0.5
"""Such a share of errors condemns even where there is nothing to compare with."""
_UNSURE = 2.58  # how far the stable version's own share may be off, in standard deviations: 99 % within
_SURE = 2.33  # 99 %, one-sided: for promoting
_ALTERNATIVES = 16
_COMPARABLE = 100  # answers of the stable version, before anything is slower than it
_PASSES = 50  # of the canary, before their cost is judged
_LARGEST_ODDS = math.log(999)  # that an answer is bad


def judge(stable: Counts, canary: Counts, seconds: float, settings: CanarySettings | None = None) -> Verdict:
    """`seconds`: since the canary began."""
    settings = settings or CanarySettings()
    failing = _share_verdict(stable.errors, stable.requests, canary.errors, canary.requests, _error_limits(settings), settings)
    if failing == ROLL_BACK:
        return Verdict(
            ROLL_BACK,
            f"{_of(canary.errors, canary.requests)} failed; of the stable version {_of(stable.errors, stable.requests)}.",
        )
    if canary.requests < settings.min_requests:
        return Verdict(WAIT, f"{canary.requests} of {settings.min_requests} requests.")
    bucket = slow_from(stable.latency, settings)
    slow, slow_stable = _above(canary.latency, bucket), _above(stable.latency, bucket)
    timed, timed_stable = sum(canary.latency), sum(stable.latency)
    lagging = _share_verdict(slow_stable, timed_stable, slow, timed, _slow_limits(settings), settings)
    slower = f"took longer than {_bound_ms(bucket):g} ms"
    if timed_stable < _COMPARABLE:  # nothing to compare with
        lagging = PROMOTE
    if lagging == ROLL_BACK:
        return Verdict(ROLL_BACK, f"{_of(slow, timed)} {slower}; of the stable version {_of(slow_stable, timed_stable)}.")
    heavier = cost_ratio(stable.passes, canary.passes, settings.fast_enough_ms / 1e3)
    if heavier > settings.max_latency_ratio:
        return Verdict(ROLL_BACK, f"A forward pass takes {heavier:.1f} times as long as that of the stable version.")
    if seconds < settings.hold_s:
        return Verdict(WAIT, f"{seconds:.0f} of {settings.hold_s:g} s.")
    if failing == lagging == PROMOTE:
        return Verdict(PROMOTE, f"{_of(canary.errors, canary.requests)} failed, {_of(slow, timed)} {slower}.")
    what = f"{_of(canary.errors, canary.requests)} failed" if failing == WAIT else f"{_of(slow, timed)} {slower}"
    if seconds >= settings.give_up_s:
        return Verdict(ROLL_BACK, f"After {seconds:.0f} s it is not proven to be sound: {what}.")
    return Verdict(WAIT, f"Not yet proven to be sound: {what}.")


def cost_ratio(stable: Sequence[tuple[int, float]], canary: Sequence[tuple[int, float]], fast_enough_s: float) -> float:
    """How many times as long a forward pass of the canary takes, for batches of equal size; 0 when that cannot be told.

    Two versions in one worker take turns on one event loop: a slow one delays the answers of both alike, and only its own
    passes show whose fault it is. Where the stable version had no batch of a size, the nearest larger one stands for it.
    """
    known = [(size, seconds / count) for size, (count, seconds) in enumerate(stable) if count]
    if not known or sum(count for count, _ in canary) < _PASSES:
        return 0.0
    took = expected = 0.0
    for size, (count, seconds) in enumerate(canary):
        if count:
            took += seconds
            expected += count * next((mean for of, mean in known if of >= size), known[-1][1])
    mean = took / sum(count for count, _ in canary)
    return took / expected if mean > fast_enough_s and expected > 0 else 0.0


class _Limits(NamedTuple):
    ratio: float
    tolerated: float


def _error_limits(settings: CanarySettings) -> _Limits:
    return _Limits(settings.max_error_ratio, settings.tolerated_errors)


def _slow_limits(settings: CanarySettings) -> _Limits:
    """Beyond the quantile there are 1 − q in any case; twice that is within the limits, for latencies come in bursts."""
    return _Limits(2.0, 2 * (1 - settings.latency_quantile))


def _share_verdict(
    bad_stable: int, of_stable: int, bad: int, total: int, limits: _Limits, settings: CanarySettings
) -> Literal["wait", "promote", "roll_back"]:
    """Whether the canary's share of bad answers is surely above its limit (roll back), surely within (promote), or neither."""
    allowed = condemned_above(bad_stable, of_stable, limits.ratio, limits.tolerated)
    if evidence(bad, total, allowed) >= math.log(1 / settings.risk):
        return ROLL_BACK
    estimate = limits.ratio * bad_stable / of_stable if of_stable else 0.0
    if wilson_interval(bad, total, _SURE)[1] <= min(max(limits.tolerated, estimate), _HOPELESS):
        return PROMOTE
    return WAIT


def condemned_above(bad_stable: int, of_stable: int, ratio: float, tolerated: float) -> float:
    """The share of bad answers above which a canary is out of its limits.

    The stable version's share is known only so well: its upper bound counts, so that few requests condemn nobody. But
    nobody may fail half of the time, unless the stable version does.
    """
    if not of_stable:
        return _HOPELESS
    upper = wilson_interval(bad_stable, of_stable, _UNSURE)[1]
    return min(max(tolerated, ratio * upper), max(_HOPELESS, upper))


def evidence(bad: int, total: int, allowed: float) -> float:
    """The logarithm of the e-value against "the share of bad answers is at most `allowed`".

    The mean likelihood ratio of some larger shares to the allowed one: a martingale that starts at 1 if the share is the
    allowed one, less if it is smaller. So it ever exceeds x with probability at most 1/x.
    """
    allowed = max(allowed, 1e-9)
    if allowed >= 1:
        return -math.inf
    good = total - bad
    from_odds = math.log(allowed) - math.log1p(-allowed)
    to_odds = max(_LARGEST_ODDS, from_odds + 1)
    logs = []
    for step in range(1, _ALTERNATIVES + 1):
        odds = from_odds + (to_odds - from_odds) * step / _ALTERNATIVES
        share, rest = -math.log1p(math.exp(-odds)), -math.log1p(math.exp(odds))  # logarithms of p and 1 − p
        logs.append(bad * (share - math.log(allowed)) + good * (rest - math.log1p(-allowed)))
    top = max(logs)
    return top + math.log(sum(math.exp(one - top) for one in logs) / len(logs))


def quantile_us(latency: Sequence[int], q: float) -> float:
    """The quantile of a histogram of powers of two, between the bounds of its bucket on a logarithmic scale; 0 without any."""
    total = sum(latency)
    wanted, seen = q * total, 0
    for bucket, count in enumerate(latency):
        if count and seen + count >= wanted:
            return float(2 ** (bucket - 1 + (wanted - seen) / count))
        seen += count
    return 0.0


def slow_from(latency: Sequence[int], settings: CanarySettings) -> int:
    """The first bucket whose answers are all slow, by what the stable version takes."""
    bound_us = max(
        settings.max_latency_ratio * quantile_us(latency, settings.latency_quantile), 1000 * settings.fast_enough_ms, 1.0
    )
    return math.ceil(round(math.log2(bound_us), 9)) + 1


def _above(latency: Sequence[int], bucket: int) -> int:
    return sum(latency[bucket:])


def _bound_ms(bucket: int) -> float:
    return float(2 ** (bucket - 1)) / 1000


def _of(bad: int, total: int) -> str:
    return f"{bad} of {total}"
