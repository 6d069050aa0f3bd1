"""Opponents of evaluated agents: who has won, and whether a game is zero-sum."""

from __future__ import annotations

import pytest

from ludus.sampling.opponents import MatchOutcome, ZeroSum, win_shares


def test_an_agent_wins_that_has_more_than_each_of_the_others() -> None:
    outcomes: list[MatchOutcome] = [
        ("a", {"a": 1.0, "b": -1.0}),
        ("b", {"a": 1.0, "b": -1.0}),
        ("a", {"a": 0.0, "b": 0.0}),
        ("c", {"a": 2.0, "b": 0.0, "c": 1.0}),
    ]
    assert win_shares("random", outcomes) == {"win/random": (1, 4), "draw/random": (1, 4), "loss/random": (2, 4)}
    assert win_shares("random", []) == {}


@pytest.mark.parametrize(
    ("matches", "zero_sum"),
    [
        ([], False),
        ([{"a": 0.0, "b": 0.0}], False),
        ([{"a": 0.0, "b": 0.0}, {"a": 1.0, "b": -1.0}], True),
        ([{"a": 0.3, "b": 0.6, "c": -0.9}], True),
        ([{"a": 1.0, "b": -1.0}, {"a": 1.0, "b": 0.0}], False),
    ],
)
def test_a_game_is_zero_sum_while_all_matches_add_up_to_nothing(matches: list[dict[str, float]], zero_sum: bool) -> None:
    seen = ZeroSum()
    for returns in matches:
        seen.add(returns)
    assert bool(seen) is zero_sum
