from typing import Any

import numpy as np
import pytest

from ludus.envs.opponents.lineups import Lineups
from ludus.errors import ConfigError

POOL = (107, 117, 190)


def taken(given: Any, count: int, size: int = 1, seed: int = 0, skip: int = 0) -> list[Any]:
    lineups, random = Lineups(given, size, POOL), np.random.default_rng(seed)
    lineups.begin(skip)
    return [lineups.next(random, lambda chance: int(chance.integers(lineups.choices)))[1] for _ in range(count)]


def test_without_a_lineup_the_game_chooses() -> None:
    assert taken(None, 2) == [None, None]


def test_one_lineup_is_always_the_same() -> None:
    assert taken([[107], ["mage"]], 3) == [((107,), ("mage",))] * 3


def test_several_are_drawn_or_come_in_turn() -> None:
    several = [[[107], [190]], [[190], [107]]]
    assert set(taken(several, 30)) == {((107,), (190,)), ((190,), (107,))}
    assert taken({"cycle": several}, 3) == [((107,), (190,)), ((190,), (107,)), ((107,), (190,))]
    assert taken({"cycle": several}, 1, skip=1) == [((190,), (107,))]


def test_random_draws_every_hero_of_both_sides() -> None:
    drawn = taken("random", 200, size=2)
    assert {hero for lineup in drawn for camp in lineup for hero in camp} == set(POOL)
    assert {hero for lineup in taken({"random": [1, 2]}, 50) for camp in lineup for hero in camp} == {1, 2}
    assert taken("random", 5, seed=3) == taken("random", 5, seed=3)


def test_roundrobin_is_every_camp_against_every_camp() -> None:
    pairs = taken("roundrobin", 9)
    assert len(set(pairs)) == 9
    assert taken("roundrobin", 10)[9] == pairs[0]
    assert len(set(taken({"roundrobin": [1, 2, 3, 4]}, 36, size=2))) == 36


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("randon", "random"),
        ("cycle", "cycle: "),
        ([[107]], "does not fit"),
        ([[107, 117], [190]], "does not fit"),
        ([], "Two lists"),
        ([[True], [107]], "not a hero"),
        ({"cycle": []}, "Two lists"),
        ({"turns": [1]}, "cycle"),
        ({"random": []}, "several"),
        ({"random": 3}, "several"),
        (7, "Two lists"),
    ],
)
def test_what_is_no_lineup_is_named(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        taken(given, 1)


def test_unknown_heroes_cannot_be_drawn() -> None:
    with pytest.raises(ConfigError, match="not known"):
        Lineups("random", 1)
    with pytest.raises(ConfigError, match="too few"):
        Lineups({"roundrobin": [1, 2]}, 3)
