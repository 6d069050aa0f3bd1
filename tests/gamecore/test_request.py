"""Requests: parsing, equality, and refusal of anything invalid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.errors import Refused
from ludus.gamecore.server.catalogue import NAME, parse
from ludus.gamecore.server.http.routes_v2 import to_game_request
from ludus.gamecore.server.request import KEYS, CampActor, GameRequest, parse_json, parse_request

CATALOGUE = parse(
    "games: {a: {command: [x], modes: [1v1], options: {n: {type: number, minimum: 0, maximum: 9, default: 1}}}}", "f", Path("/c")
)


def read(**order: Any) -> GameRequest:
    return parse_request({"runtime_id": "r", **order}, CATALOGUE)


def test_a_request_needs_only_an_id() -> None:
    assert read() == GameRequest("r", "a", None, [], (None, None), {"n": 1})


def test_two_requests_are_equal_if_they_describe_the_same_match() -> None:
    camps = [{"address": "h:80", "token": "t"}, None]
    assert read(camps=camps, options={"n": 1}) == read(camps=[{"url": "http://h:80/", "timeout_s": 30, "token": "t"}, None])
    assert read(camps=camps) != read(camps=[{"address": "h:80", "token": "other"}, None])
    assert read(seed=1) != read()


def test_tokens_never_appear_in_the_text_of_a_request() -> None:
    order = read(camps=[{"address": "h:80", "token": "hush-hush"}, None])
    assert order.camps[0] == CampActor("http://h:80", 30.0, "hush-hush")
    assert "hush" not in repr(order)
    assert "hush" not in json.dumps(order.game_config(1, None))


@pytest.mark.parametrize(
    ("given_url", "url"),
    [
        ("http://10.0.0.5:8000", "http://10.0.0.5:8000"),
        ("https://actor.example/step/hard/", "https://actor.example/step/hard"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://HOST", "http://host"),
    ],
)
def test_addresses_of_actors_have_one_form(given_url: str, url: str) -> None:
    camp = read(camps=[{"url": given_url}]).camps[0]
    assert camp is not None
    assert camp.url == url


def test_every_list_of_heroes_has_a_camp() -> None:
    heroes = [[{"hero_id": 1}], [{"hero_id": "mage", "level": 2.5, "symbol": [1, 2], "skin": True}], []]
    assert read(heroes=heroes).camps == (None, None, None)
    assert read(heroes=heroes).heroes == heroes


def test_the_game_config_contains_the_request() -> None:
    order = read(mode="1v1", camps=[{"address": "h:1", "timeout_s": 2}, None], max_frames=5, eval_mode=True)
    assert order.game_config(7, "/states/x") == {
        "runtime_id": "r",
        "game": "a",
        "mode": "1v1",
        "heroes": [],
        "camps": [{"url": "http://h:1", "timeout_s": 2.0}, None],
        "eval_mode": True,
        "seed": 7,
        "max_frames": 5,
        "start_from": "/states/x",
        "options": {"n": 1},
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NEAR = st.fixed_dictionaries(
    {"runtime_id": st.just("r") | JSON},
    optional={
        key: JSON | st.sampled_from(["a", "1v1", "any", [None, {"address": "h:1"}], [[{"hero_id": 1}]]]) for key in KEYS[1:]
    },
)


@settings(max_examples=80, deadline=None)
@given(NEAR)
def test_arbitrary_input_is_a_request_or_is_refused(data: dict[str, Any]) -> None:
    made = outcome(lambda: parse_request(parse_json(json.dumps(data).encode()), CATALOGUE))
    if isinstance(made, Refused):
        assert made.status in (400, 404)
        assert len(made.message) < 2000
    else:
        assert NAME.fullmatch(made.runtime_id)
        assert json.loads(json.dumps(made.game_config(1, None), allow_nan=False))["options"].keys() == {"n"}


@settings(max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries(
        {"simulator_type": st.just("remote") | JSON},
        optional={
            "runtime_id": JSON,
            "simulator_config": st.fixed_dictionaries(
                {"hero_conf": st.lists(st.fixed_dictionaries({"request_info": JSON, "hero_id": JSON}), max_size=4) | JSON},
                optional={"game_mode": JSON, "max_frame_num": JSON, "task_id": JSON},
            ),
        },
    )
)
def test_the_older_form_is_translated_or_refused(data: dict[str, Any]) -> None:
    made = outcome(lambda: parse_request(to_game_request(data), CATALOGUE))
    assert isinstance(made, GameRequest) or made.status in (400, 404)


def outcome(make: Callable[[], GameRequest]) -> GameRequest | Refused:
    try:
        return make()
    except Refused as refused:
        return refused
