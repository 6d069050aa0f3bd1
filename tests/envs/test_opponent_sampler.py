"""Whom one meets next."""

from __future__ import annotations

import numpy as np
import pytest

from ludus.envs.opponents.opponent_sampler import EVEN, OpponentSampler
from ludus.errors import ConfigError

SHARES = {"easy": 1.0, "medium": 2.0, "hard": 1.0}


def played(sampler: OpponentSampler, won: dict[str, float], matches: int) -> None:
    """As many of so many matches won as said, evenly spread."""
    for name, share in won.items():
        for k in range(matches):
            sampler.record(name, int((k + 1) * share) > int(k * share))


def test_fixed_shares_stay_whatever_happens() -> None:
    sampler = OpponentSampler(SHARES)
    played(sampler, {"easy": 1.0, "medium": 0.5, "hard": 0.0}, 100)
    assert sampler.probabilities.tolist() == [[0.25, 0.5, 0.25]]
    random = np.random.default_rng(0)
    drawn = [sampler.draw(random) for _ in range(4000)]
    for name, share in zip(sampler.names, sampler.probabilities[0], strict=True):
        assert drawn.count(name) / 4000 == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5)


def test_even_matches_are_preferred_and_no_opponent_disappears() -> None:
    sampler = OpponentSampler(SHARES, EVEN)
    assert sampler.probabilities.tolist() == [[0.25, 0.5, 0.25]]  # nothing is known yet
    played(sampler, {"easy": 0.0, "medium": 0.0, "hard": 0.0}, 100)
    np.testing.assert_allclose(sampler.probabilities[0], [0.25, 0.5, 0.25])  # lost to everybody
    played(sampler, {"easy": 0.5}, 200)
    assert sampler.probabilities[0, 0] > 0.7
    played(sampler, {"easy": 1.0, "medium": 0.5}, 300)
    easy, medium, hard = sampler.probabilities[0]
    assert medium > 0.8
    assert easy > 0.02
    assert hard > 0.02
    played(sampler, {"medium": 0.9, "hard": 0.2}, 300)
    # 2·√(0.9·0.1) = 0.6 with twice the share, 2·√(0.2·0.8) = 0.8, and the least of 0.1.
    np.testing.assert_allclose(sampler.probabilities[0], np.array([0.1, 1.2, 0.8]) / 2.1, atol=0.05)


def test_lineups_that_always_win_are_played_less() -> None:
    """Two line-ups: the first wins against everybody whatever it does; the second always loses to hard, and medium is even for it."""
    sampler = OpponentSampler({"medium": 0.5, "hard": 0.5}, EVEN, lineups=2)
    np.testing.assert_allclose(sampler.probabilities, 0.25)
    for k in range(300):
        for name in sampler.names:
            sampler.record(name, won=True, lineup=0)
        sampler.record("medium", won=k % 2 == 0, lineup=1)
        sampler.record("hard", won=False, lineup=1)
    # Lost: 0, which is at least 0.1, and (1/2 + 1) / 2. Against whom: both alike; ten times as often who is even.
    first, second = 0.1 / 0.85, 0.75 / 0.85
    np.testing.assert_allclose(sampler.probabilities, [[first / 2, first / 2], [second * 10 / 11, second / 11]], atol=0.01)
    random = np.random.default_rng(2)
    drawn = [(lineup := sampler.draw_lineup(random), sampler.draw(random, lineup)) for _ in range(4000)]
    for lineup in (0, 1):
        for i, name in enumerate(sampler.names):
            assert drawn.count((lineup, name)) / 4000 == pytest.approx(float(sampler.probabilities[lineup, i]), abs=0.035)


def test_line_ups_of_fixed_shares_are_drawn_alike_whatever_happens() -> None:
    sampler, random = OpponentSampler(SHARES, lineups=4), np.random.default_rng(3)
    for _ in range(100):
        sampler.record("easy", won=True, lineup=2)
    same = np.random.default_rng(3)
    assert [sampler.draw_lineup(random) for _ in range(50)] == [int(same.integers(4)) for _ in range(50)]


def test_one_alone_takes_no_chance() -> None:
    random = np.random.default_rng(1)
    before = random.bit_generator.state
    assert OpponentSampler({"easy": 0.3}, EVEN).draw(random) == "easy"
    assert random.bit_generator.state == before


def test_a_way_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'fair'.*fixed, even"):
        OpponentSampler(SHARES, "fair")
