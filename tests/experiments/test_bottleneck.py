"""The finding on what limits a run agrees with who waits and with the policy lag."""

from __future__ import annotations

import itertools
import math

import pytest

from ludus.experiments.control.bottleneck import Bottleneck, Load, describe_bottleneck, find_bottleneck


@pytest.mark.parametrize(
    ("load", "limit"),
    [
        # Workers wait for the learner.
        (Load(environment=0.3, blocked=0.5), Bottleneck.LEARNER),
        (Load(environment=0.8, blocked=0.15, learner_wait=0.02), Bottleneck.LEARNER),
        (Load(environment=0.6, blocked=0.3, learner_wait=0.2), Bottleneck.LEARNER),
        (Load(environment=0.6, blocked=0.3, learner_wait=0.02, lag=9.0), Bottleneck.LEARNER),
        # Nobody waits, and segments are old when the learner takes them.
        (Load(environment=0.7, policy=0.3, learner_wait=0.03, lag=5.2), Bottleneck.LEARNER),
        (Load(environment=0.9, lag=2.0), Bottleneck.LEARNER),
        # The learner waits for workers, whatever the lag is.
        (Load(environment=0.8, policy=0.1, learner_wait=0.7), Bottleneck.ENVIRONMENTS),
        (Load(environment=0.8, policy=0.1, learner_wait=0.7, lag=16.0), Bottleneck.ENVIRONMENTS),
        (Load(environment=0.7, blocked=0.12, learner_wait=0.2), Bottleneck.ENVIRONMENTS),
        (Load(environment=0.2, policy=0.7, learner_wait=0.5), Bottleneck.POLICY),
        (Load(environment=0.2, learner_wait=0.6), Bottleneck.MACHINE),
        (Load(environment=0.2, learner_wait=0.6, nodes=3), Bottleneck.NETWORK),
        # Both wait for each other.
        (Load(environment=0.4, blocked=0.5, learner_wait=0.4), Bottleneck.TURNS),
        # Neither waits.
        (Load(environment=0.7, policy=0.25, blocked=0.05, learner_wait=0.03, lag=0.8), Bottleneck.BALANCED),
        (Load(environment=0.9, learner_wait=0.09, lag=1.9), Bottleneck.BALANCED),
        # One process.
        (Load(workers=False, learner_busy=0.7), Bottleneck.LEARNER),
        (Load(workers=False, learner_busy=0.2), Bottleneck.SAMPLING),
        # Nothing was measured.
        (Load(workers=False), None),
        (Load(learner_wait=0.9, lag=3.0), None),
    ],
)
def test_what_limits_a_run(load: Load, limit: Bottleneck | None) -> None:
    finding = find_bottleneck(load)
    assert (None if finding is None else finding.limit) == limit


def test_no_combination_of_shares_contradicts_who_waits() -> None:
    parts = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.9)
    for environment, blocked, waits, lag in itertools.product(parts, parts, parts, (0.0, 1.0, 2.0, 40.0)):
        finding = find_bottleneck(Load(environment=environment, blocked=blocked, learner_wait=waits, lag=lag))
        if finding is None:
            assert environment == blocked == 0
        elif finding.limit is Bottleneck.LEARNER:
            assert waits <= blocked or waits < 0.1
        elif finding.limit is Bottleneck.BALANCED:
            assert max(waits, blocked) < 0.1
            assert lag < 2
        elif finding.limit is Bottleneck.TURNS:
            assert min(waits, blocked) >= 0.25
        else:
            assert waits > blocked


def test_the_reason_names_the_measurement_that_decided() -> None:
    pong = {
        "sampler/env_share": 0.62,
        "sampler/policy_share": 0.37,
        "sampler/blocked_share": 0.0,
        "learner/wait_share": 0.01,
        "learner/lag_mean": 6.4,
    }
    assert describe_bottleneck(pong) == "the learner: it waits 1 % of its time, and its batches are 6.4 updates old on average"
    assert describe_bottleneck(pong | {"sampler/blocked_share": 0.4}) == "the learner: workers wait for it 40 % of their time"


def test_of_several_models_the_one_furthest_behind_counts() -> None:
    numbers = {"sampler/env_share": 0.9, "learner/wait_share": 0.0, "red/learner/lag_mean": 0.5, "blue/learner/lag_mean": 7.0}
    assert describe_bottleneck(numbers).startswith("the learner")


def test_without_measurements_no_bottleneck_is_described() -> None:
    assert describe_bottleneck({}) == ""
    assert describe_bottleneck({"learner_share": math.nan}) == ""
    assert describe_bottleneck({"sampler/env_share": 0.0, "learner/wait_share": 0.0}) == "", "the first second has no shares"
    assert describe_bottleneck(
        {"sampler/env_share": 0.9, "learner/wait_share": math.nan, "learner/lag_mean": math.nan}
    ).startswith("balanced")
