"""Delays grow from the first to the longest and stay there."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.backoff import Backoff, exponential_delay

_SECONDS = st.floats(0.001, 1000.0)
_FACTORS = st.floats(1.05, 10.0)


@pytest.mark.parametrize(
    ("base_s", "max_s", "factor", "delays"),
    [
        (0.2, 30.0, 2.0, [0.2, 0.4, 0.8, 1.6]),
        (1.0, 5.0, 2.0, [1.0, 2.0, 4.0, 5.0, 5.0]),
        (0.1, 1.0, 1.5, [0.1, 0.15, 0.225]),
        (0.0, 60.0, 2.0, [0.0, 0.0, 0.0]),
        (7.0, 5.0, 2.0, [5.0, 5.0]),
    ],
)
def test_delays_are_powers_of_the_factor_up_to_the_longest(
    base_s: float, max_s: float, factor: float, delays: list[float]
) -> None:
    assert [exponential_delay(n + 1, base_s, max_s, factor) for n in range(len(delays))] == pytest.approx(delays)
    backoff = Backoff(base_s, max_s, factor=factor)
    assert [backoff.next_delay() for _ in delays] == pytest.approx(delays)


@given(base_s=_SECONDS, max_s=_SECONDS, factor=_FACTORS)
def test_delays_never_shrink_and_never_exceed_the_longest(base_s: float, max_s: float, factor: float) -> None:
    delays = [exponential_delay(failures, base_s, max_s, factor) for failures in range(1, 200)]
    assert all(a <= b for a, b in itertools.pairwise(delays))
    assert max(delays) <= max_s


@given(failures=st.integers(200, 10**9), base_s=_SECONDS)
def test_any_number_of_failures_gives_the_longest_delay(failures: int, base_s: float) -> None:
    assert exponential_delay(failures, base_s, 2000.0) == 2000.0
    assert exponential_delay(failures, 0.0, 2000.0) == 0.0


@given(base_s=_SECONDS, max_s=_SECONDS, seed=st.integers(0, 1 << 30), count=st.integers(1, 20))
def test_jitter_stays_within_its_bounds_and_comes_from_the_generator(base_s: float, max_s: float, seed: int, count: int) -> None:
    first, second = (Backoff(base_s, max_s, jitter=(0.5, 1.0), generator=random.Random(seed)) for _ in range(2))
    delays = [first.next_delay() for _ in range(count)]
    assert delays == [second.next_delay() for _ in range(count)]
    for number, delay in enumerate(delays):
        whole = exponential_delay(number + 1, base_s, max_s)
        assert 0.5 * whole <= delay <= whole


def test_generators_of_the_standard_library_and_of_numpy_fit() -> None:
    for generator in (random, random.Random(1), np.random.default_rng(1)):
        assert 0.5 <= Backoff(1.0, 1.0, generator=generator).next_delay() <= 1.5


def test_after_a_reset_it_begins_with_the_first_delay() -> None:
    backoff = Backoff(1.0, 60.0)
    assert [backoff.next_delay() for _ in range(3)] == [1.0, 2.0, 4.0]
    assert backoff.failures == 3
    backoff.reset()
    assert [backoff.next_delay() for _ in range(2)] == [1.0, 2.0]
