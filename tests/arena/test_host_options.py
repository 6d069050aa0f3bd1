"""Options of the Arena's game process."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.errors import ConfigError
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.host.match import HostedMatch, MatchPlan, read_options, read_plan
from ludus.games.arena.host.match_host import MatchHost
from ludus.games.arena.main import create_arena

ACTOR = {"url": "http://127.0.0.1:9"}


def plan(camps: list[Any], **options: Any) -> MatchPlan:
    return read_plan({"runtime_id": "m", "mode": "3v3", "camps": camps, "options": options}, ["token", "token"], BOTS)


def test_each_reward_weight_is_an_option() -> None:
    read = read_options({"weight_gold": 2, "weight_win": -1.5, "zero_sum": False, "every": 5}, BOTS)
    assert (dict(read.weights), read.zero_sum, read.every) == ({"gold": 2.0, "win": -1.5}, False, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight_glod": 1}, "weight_gold"),
        ({"weights": {"gold": 1}}, "weights"),
        ({"weight_gold": "much"}, "weight_gold is 'much'"),
        ({"weight_gold": 1e9}, "weight_gold"),
        ({"every": 16}, "every is 16"),
        ({"lockstep": 1}, "lockstep is 1"),
        ({"start": "river"}, "start is 'river'"),
        ({"sessions": "both"}, "sessions is 'both'"),
    ],
)
def test_unknown_options_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(given, BOTS)


@pytest.mark.parametrize(
    ("camps", "sessions", "seats"),
    [
        ([ACTOR, ACTOR], "match", [["blue_0", "blue_1", "blue_2", "red_0", "red_1", "red_2"]]),
        ([ACTOR, None], "match", [["hero_0", "hero_1", "hero_2"]]),
        ([ACTOR, {"url": "http://127.0.0.1:10"}], "match", [["hero_0", "hero_1", "hero_2"]] * 2),
        ([ACTOR, ACTOR], "camp", [["hero_0", "hero_1", "hero_2"]] * 2),
        ([None, ACTOR], "hero", [["hero_0"], ["hero_1"], ["hero_2"]]),
    ],
)
def test_one_session_plays_both_camps_of_the_same_actor(camps: list[Any], sessions: str, seats: list[list[str]]) -> None:
    made = plan(camps, sessions=sessions)
    host = MatchHost(create_arena([made]), [HostedMatch(made, BOTS)])
    assert [list(line.seats.values()) for line in host._links] == seats
