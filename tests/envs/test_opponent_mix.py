from collections import Counter
from typing import Any

import pytest

from ludus.envs.opponents.opponent_mix import assign_opponents, parse_opponent_mix
from ludus.errors import ConfigError

RULES = ("random", "easy", "medium", "hard")


@pytest.mark.parametrize(
    ("opponent", "shares"),
    [
        ("self", {"self": 1.0}),
        ("medium", {"rule:medium": 1.0}),
        ("rule:medium", {"rule:medium": 1.0}),
        (["easy", "rule:hard"], {"rule:easy": 0.5, "rule:hard": 0.5}),
        ({"self": 0.8, "past": 0.2}, {"self": 0.8, "past": 0.2}),
        ({"self": 8, "past": 2}, {"self": 0.8, "past": 0.2}),
        ({"easy": 1, "rule:easy": 1, "self": 2}, {"rule:easy": 0.5, "self": 0.5}),
        ({"self": 1, "past": 0}, {"self": 1.0}),
    ],
)
def test_opponents_are_a_name_several_or_shares(opponent: Any, shares: dict[str, float]) -> None:
    assert parse_opponent_mix(opponent, RULES) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("opponent", "said"),
    [
        ("mediun", "medium"),
        ("rule:hart", "hard"),
        ("rule:self", "self"),
        ([], "there is no opponent"),
        ({}, "there is no opponent"),
        ({"self": 0}, "there is no opponent"),
        ({"self": -1}, "-1"),
        ({"self": True}, "True"),
        ({"self": float("nan")}, "nan"),
        ({"self": "most"}, "most"),
        (3, "3"),
        ([["easy"]], "easy"),
    ],
)
def test_what_is_no_opponent_is_named(opponent: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_opponent_mix(opponent, RULES)


@pytest.mark.parametrize(
    ("count", "shares", "expected"),
    [
        (10, {"self": 0.8, "past": 0.2}, {"self": 8, "past": 2}),
        (4, {"self": 0.8, "past": 0.2}, {"self": 2, "past": 2}),
        (3, {"self": 0.8, "past": 0.2}, {"self": 2, "past": 1}),
        (2, {"self": 0.8, "past": 0.2}, {"self": 2}),
        (1, {"self": 0.8, "past": 0.2}, {"past": 1}),
        (1, {"self": 1.0}, {"rule:medium": 1}),
        (5, {"self": 1.0}, {"self": 4, "rule:medium": 1}),
        (7, {"rule:easy": 0.5, "rule:hard": 0.5}, {"rule:easy": 4, "rule:hard": 3}),
        (100, {"self": 0.98, "past": 0.01, "rule:hard": 0.01}, {"self": 98, "past": 1, "rule:hard": 1}),
        (0, {"self": 1.0}, {}),
    ],
)
def test_groups_are_shared_out_as_whole_matches(count: int, shares: dict[str, float], expected: dict[str, int]) -> None:
    assert Counter(assign_opponents(count, shares)) == expected


def test_whatever_the_shares_all_groups_have_an_opponent_and_none_is_off_by_more_than_a_match() -> None:
    for count in range(60):
        for share in range(0, 101, 5):
            shares = {"self": share / 100, "past": 1 - share / 100}
            got = Counter(assign_opponents(count, shares))
            assert sum(got.values()) == count
            assert got["self"] % 2 == 0
            if count >= 20 and 0 < share < 100:
                assert abs(got["self"] - count * shares["self"]) <= 2
                assert got["self"] > 0
                assert got["past"] > 0


def test_kinds_stand_in_the_order_of_their_shares() -> None:
    assert assign_opponents(4, {"past": 0.5, "self": 0.5}) == ["past", "past", "self", "self"]
