"""The result of a match with two sides: who has won, and what the side has gained, always agree."""

from __future__ import annotations

import numpy as np
import pytest

from ludus.sampling.league_opponents import match_of_sides
from ludus.sampling.multi_agent.seating import FinishedMatch, Seating, compare_sides


@pytest.mark.parametrize(
    ("own", "other", "score", "gain"),
    [
        ((1.0, -3.0), (0.0, 0.0), 0.0, -0.5),  # the best agent of all is in the side that has lost
        ((1.0,), (-1.0,), 1.0, 1.0),
        ((0.1, 0.1, 0.1), (0.1, 0.1), 0.5, 0.0),
        ((0.1 + 0.2,), (0.3,), 0.5, 0.0),  # they differ in the last bit
        ((-1.0,), (0.5, 0.5, 0.5), 0.0, -0.75),
    ],
)
def test_the_side_with_the_higher_mean_return_wins(
    own: tuple[float, ...], other: tuple[float, ...], score: float, gain: float
) -> None:
    found, mirrored = compare_sides(own, other), compare_sides(other, own)
    assert (found.score, mirrored.score) == (score, 1 - score)
    assert [found.gain, mirrored.gain] == pytest.approx([gain, -gain])
    returns = {f"own {i}": gained for i, gained in enumerate(own)} | {f"other {i}": gained for i, gained in enumerate(other)}
    side = frozenset(name for name in returns if name.startswith("own"))
    match = FinishedMatch(returns, 3, Seating({}, side, "past"))
    assert match.side_result == match_of_sides(own, other).side_result == compare_sides(own, other)
    assert (match.result("win/past"), match.result("draw/past")) == (float(score == 1), float(score == 0.5))


def test_a_win_is_a_positive_gain_and_a_loss_a_negative_one() -> None:
    random = np.random.default_rng(0)
    for _ in range(1000):
        own, other = (random.integers(-3, 4, size=random.integers(1, 4)).astype(float).tolist() for _ in range(2))
        found = compare_sides(own, other)
        assert found.score == 0.5 + 0.5 * np.sign(found.gain)
