"""Conformance checks: findings for wrong games, none for correct ones."""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pytest

from ludus.core.spaces import SpaceParser, to_json
from ludus.errors import ConfigError
from ludus.protocol.codec import SeatSpaces, bounds_error, decode, encode, parse_seats, random_action, random_observation
from ludus.protocol.conformance import (
    CHECKS,
    LARGE_BODY,
    MANY_CONNECTIONS,
    ClientDisconnected,
    Conformance,
    ConnectionClosed,
    Event,
    OldHttpVersion,
    RequestRejected,
    SessionTimedOut,
    StepReplied,
)
from ludus.protocol.spec import END, START, TICK

Box, Discrete = gym.spaces.Box, gym.spaces.Discrete
SEEN = gym.spaces.Dict({"pos": Box(-1, 1, (2,), np.float32), "kind": Discrete(3)})
ONE = {"": SeatSpaces(SEEN, Discrete(4))}
TWO = {"blue": SeatSpaces(Box(-1, 1, (2,), np.float32), Discrete(4)), "red": SeatSpaces(Discrete(3), Box(0, 1, (2,), np.float32))}
FINE: dict[str, Any] = {"observation": {"pos": [0.5, -0.5], "kind": 2}}


def answered(kind: str, seq: int = -1, status: int = 200, error: str = "", message: str = "", **more: Any) -> StepReplied:
    return StepReplied(kind, more.pop("session", b"a"), seq, status, error, message, **more)


def kinds(conformance: Conformance) -> dict[str, int]:
    return {row.check.kind: row.count for row in conformance.summary().rows if row.count}


def seen(*events: Event) -> dict[str, int]:
    """Findings of these events in addition to a correct match."""
    conformance = Conformance()
    for seq, kind in enumerate((START, TICK, END)):
        assert conformance.observe(answered(kind, seq, session=b"well")) == []
    for event in events:
        conformance.observe(event)
    return kinds(conformance)


# -- the protocol


def test_a_well_played_match_has_no_findings() -> None:
    conformance = Conformance()
    for number in range(3):
        for seq, kind in enumerate((START, TICK, TICK, END)):
            conformance.observe(answered(kind, seq, session=b"%d" % number))
        conformance.observe(ConnectionClosed(steps=4))
    summary = conformance.summary()
    assert (summary.matches, summary.requests, summary.mistakes, summary.warnings) == (3, 12, 0, 0)
    assert {row.state for row in summary.rows} == {"ok"}


def test_nothing_played_is_a_mistake() -> None:
    assert kinds(Conformance()) == {"no_match": 1}


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (RequestRejected("method", "Steps are sent by POST."), "path"),
        (RequestRejected("not_found", "There is nothing at '/x'."), "path"),
        (RequestRejected("step_kind", "The step_kind header is missing."), "step_kind"),
        (RequestRejected("session", "The session header is missing or empty."), "session"),
        (RequestRejected("seq", "seq is 'x'."), "seq_number"),
        (RequestRejected("unauthorized", "The token is missing or wrong."), "token"),
        (RequestRejected("malformed", "This is not HTTP."), "malformed"),
        (RequestRejected("expectation", "Expect: x is not supported."), "malformed"),
        (RequestRejected("headers_too_large", "Too many."), "headers"),
        (RequestRejected("body_too_large", "Too large."), "too_large"),
        (RequestRejected("too_slow", "Too slow."), "too_slow"),
        (ClientDisconnected(), "hung_up"),
        (OldHttpVersion(), "old_http"),
        (answered(TICK, status=404, error="unknown_session"), "tick_before_start"),
        (answered(TICK, status=404, error="unknown_session", session=b"well"), "after_end"),
        (answered(END, status=404, error="unknown_session", session=b"well"), "after_end"),
        (answered(TICK, status=410, error="session_lost"), "lost"),
        (answered(START, 0, 409, "already_started"), "double_start"),
        (answered(TICK, 1, 409, "busy"), "concurrent"),
        (answered(TICK, 7, 409, "seq", "seq is 7, the last was 1."), "seq_skipped"),
        (answered(END, 1, 409, "seq", "seq 1 was a tick; this is a end."), "seq_changed"),
        (answered(TICK, -1, 400, "seq", "The start of this session had a seq header, this has none."), "seq_mixed"),
        (answered(TICK, 1, 429, "too_many_requests"), "too_fast"),
    ],
)
def test_each_refusal_becomes_a_finding(event: Event, kind: str) -> None:
    assert seen(event)[kind] == 1


def test_each_refusal_is_reported_with_its_session_and_message() -> None:
    (finding,) = Conformance().observe(
        answered(TICK, status=404, error="unknown_session", message="No open session.", session=b"m1")
    )
    assert finding.seen == "session 'm1': tick was answered 404. No open session."
    assert "start" in finding.check.remedy


def test_a_kind_of_finding_is_reported_once_and_counted() -> None:
    conformance = Conformance()
    told = [conformance.observe(ClientDisconnected()) for _ in range(5)]
    assert [len(findings) for findings in told] == [1, 0, 0, 0, 0]
    assert kinds(conformance)["hung_up"] == 5


def test_requests_without_numbers_are_a_warning() -> None:
    assert seen(answered(START, session=b"b"), answered(TICK, session=b"b"), answered(END, session=b"b")) == {"no_seq": 1}


def test_a_retry_is_no_mistake_unless_its_body_differs() -> None:
    conformance = Conformance()
    for event in (answered(START, 0), answered(START, 0), answered(TICK, 1, body_hash=5), answered(TICK, 1, body_hash=5)):
        assert conformance.observe(event) == []
    assert conformance.observe(answered(TICK, 1, body_hash=6))[0].check.kind == "seq_changed"
    for event in (answered(END, 2), answered(END, 2)):
        assert conformance.observe(event) == []
    summary = conformance.summary()
    assert (summary.matches, summary.retries) == (1, 4)


def test_an_id_that_comes_again_is_a_warning() -> None:
    assert seen(*(answered(kind, seq, session=b"well") for seq, kind in enumerate((START, TICK, END)))) == {"session_reuse": 1}


def test_a_session_that_falls_silent_is_a_mistake_and_no_longer_open() -> None:
    assert seen(answered(START, 0), answered(TICK, 1), SessionTimedOut(b"a")) == {"silent": 1}


def test_a_session_still_open_at_the_end_is_a_warning() -> None:
    conformance = Conformance()
    conformance.observe(answered(START, 0))
    assert kinds(conformance) == {"no_match": 1, "unfinished": 1}
    assert kinds(conformance) == {"no_match": 1, "unfinished": 1}  # asking changes nothing


def test_a_match_without_ticks_is_a_warning() -> None:
    assert seen(answered(START, 0), answered(END, 1)) == {"no_ticks": 1}


def test_large_and_slow_requests_are_warnings() -> None:
    found = seen(answered(START, 0), answered(TICK, 1, body_bytes=LARGE_BODY + 1), answered(END, 2, receive_s=3.0))
    assert found == {"large_body": 1, "slow_send": 1}


def test_a_connection_for_every_request_is_a_warning_and_a_few_are_none() -> None:
    assert seen(*[ConnectionClosed(1)] * (MANY_CONNECTIONS - 1)) == {}
    assert seen(*[ConnectionClosed(1)] * MANY_CONNECTIONS) == {"reconnecting": 1}
    assert seen(*[ConnectionClosed(100)] * 10, *[ConnectionClosed(1)] * MANY_CONNECTIONS) == {}
    assert seen(*[ConnectionClosed(0)] * 100) == {}  # GET /spec, health checks of a balancer


def test_body_checks_are_listed_only_if_bodies_are_checked() -> None:
    raw = {row.check.kind for row in Conformance().summary().rows}
    assert raw == {kind for kind, check in CHECKS.items() if not check.body}
    assert {row.check.kind for row in Conformance("json", ONE).summary().rows} == set(CHECKS)


def test_the_summary_is_json() -> None:
    conformance = Conformance()
    conformance.observe(ClientDisconnected())
    data = json.loads(json.dumps(conformance.summary().to_json()))
    assert (data["ok"], data["mistakes"], data["matches"]) == (False, 2, 0)
    (row,) = (row for row in data["checks"] if row["check"] == "hung_up")
    assert (row["state"], row["count"], bool(row["remedy"])) == ("mistake", 1, True)


# -- bodies


def judged(*bodies: Any, last: bool = False, seats: dict[str, SeatSpaces] = ONE) -> tuple[Conformance, Any]:
    """Check ticks in sequence (the last may be the end), and return the result of the last."""
    conformance = Conformance("json", seats)
    conformance.observe(answered(START, 0))
    verdict = None
    for number, body in enumerate(bodies):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        verdict = conformance.check_body(END if last and number == len(bodies) - 1 else TICK, b"a", data)
    return conformance, verdict


def found(*bodies: Any, last: bool = False, seats: dict[str, SeatSpaces] = ONE) -> dict[str, int]:
    rows = kinds(judged(*bodies, last=last, seats=seats)[0])
    return {kind: count for kind, count in rows.items() if kind not in ("no_match", "unfinished")}


def test_good_bodies_have_no_findings() -> None:
    again = FINE | {"reward": 0.5, "terminated": False, "truncated": False, "action_mask": [1, 0, 1, 1]}
    _, verdict = judged(FINE, again)
    assert verdict.refused is None
    assert verdict.acting[""].tolist() == [True, False, True, True]
    assert found(FINE, again, {"reward": 1, "terminated": True}, last=True) == {}
    assert found(FINE, again, {"reward": 1, "truncated": True} | FINE, last=True) == {}


@pytest.mark.parametrize(
    ("body", "kind", "word"),
    [
        (b"", "body", "malformed"),
        (b"hello", "body", "malformed"),
        (b"[1, 2]", "body", "malformed"),
        (b"\x81\xa1x\x01", "body", "malformed"),
        ({"obs": [1, 2]}, "keys", "unknown_key"),
        ({"reward": 0}, "observation", "observation"),
        ({"observation": {"pos": [0.5], "kind": 2}}, "observation", "observation"),
        ({"observation": {"pos": [0.5, "x"], "kind": 2}}, "observation", "observation"),
        ({"observation": {"pos": [0.5, 0.5]}}, "observation", "observation"),
        ({"observation": {"pos": [0.5, 0.5], "kind": 3}}, "observation", "observation"),
        ({"observation": {"pos": [0.5, float("nan")], "kind": 1}}, "not_finite", "observation"),
        ({"observation": {"pos": [0.5, float("inf")], "kind": 1}}, "not_finite", "observation"),
        (FINE | {"reward": "1"}, "reward", "reward"),
        (FINE | {"reward": True}, "reward", "reward"),
        (FINE | {"reward": float("nan")}, "not_finite", "reward"),
        (FINE | {"reward": 1.0}, "reward", "reward"),  # nothing was done that could have earned it
        (FINE | {"terminated": 1}, "flags", "terminated"),
        (FINE | {"action_mask": [1, 1]}, "mask", "action_mask"),
        (FINE | {"action_mask": [0, 0, 0, 0]}, "mask", "action_mask"),
        (FINE | {"action_mask": "all"}, "mask", "action_mask"),
    ],
)
def test_what_the_built_in_actor_refuses_is_a_mistake(body: Any, kind: str, word: str) -> None:
    _, verdict = judged(body)
    assert found(body) == {kind: 1}
    assert (verdict.refused.status, verdict.refused.error) == (422, word)


@pytest.mark.parametrize(
    ("bodies", "last", "kind"),
    [
        ([FINE, FINE], False, "no_reward"),
        ([{"observation": {"pos": [0.5, 1.5], "kind": 2}}], False, "bounds"),
        ([FINE, {"reward": 1, "terminated": True}], False, "over_in_tick"),
        ([FINE, b""], True, "no_outcome"),
        ([FINE, {"terminated": True}], True, "no_reward"),
    ],
)
def test_accepted_but_suspicious_bodies_are_warnings(bodies: list[Any], last: bool, kind: str) -> None:
    assert judged(*bodies, last=last)[1].refused is None
    assert found(*bodies, last=last) == {kind: 1}
    assert CHECKS[kind].level == "warning"


def test_a_refused_body_changes_nothing() -> None:
    """A corrected body is checked as if the refused one had not been sent."""
    assert found({"observation": 3}, FINE | {"reward": 1.0}) == {"observation": 1, "reward": 1}


def test_a_truncated_end_needs_its_observation() -> None:
    assert found(FINE, {"reward": 0, "truncated": True}, last=True) == {"observation": 1}


def test_after_an_episode_ended_in_a_tick_the_next_has_nothing_to_reward() -> None:
    assert found(FINE, {"reward": 1, "terminated": True}, FINE | {"reward": 1})["reward"] == 1


def test_seats_act_only_when_they_are_named() -> None:
    blue = {"observation": [0.0, 0.0]}
    _, verdict = judged({"seats": {"blue": blue}}, seats=TWO)
    assert set(verdict.acting) == {"blue"}
    _, verdict = judged({"seats": {"blue": blue, "red": {"observation": 1}}}, {"seats": {"red": {"terminated": True}}}, seats=TWO)
    assert (verdict.refused, verdict.acting) == (None, {})


@pytest.mark.parametrize(
    ("bodies", "kind"),
    [
        ([{"observation": [0.0, 0.0]}], "seats"),
        ([{"seats": {}}], "seats"),
        ([{"seats": {"bleu": {"observation": [0.0, 0.0]}}}], "seats"),
        ([{"seats": {"blue": {"observation": 1}}}], "observation"),
        ([{"seats": {"blue": [0.0, 0.0]}}], "body"),
        ([{"seats": {"blue": {"observation": [0, 0]}}}, {"seats": {"red": {"terminated": True}}}], "no_outcome"),
    ],
)
def test_seats_are_checked_one_by_one(bodies: list[Any], kind: str) -> None:
    assert found(*bodies, last=len(bodies) > 1, seats=TWO) == {kind: 1}


def test_msgpack_is_checked_like_json() -> None:
    conformance = Conformance("msgpack", ONE)
    conformance.observe(answered(START, 0))
    packed = {"observation": {"pos": np.array([0.5, 0.25], np.float32).tobytes(), "kind": 1}}
    assert conformance.check_body(TICK, b"a", msgpack.packb(packed)).refused is None
    refused = conformance.check_body(TICK, b"a", json.dumps(FINE).encode()).refused
    assert refused is not None
    assert "msgpack" in refused.message


# -- spaces


def test_spaces_are_found_in_a_spec_and_in_an_experiment() -> None:
    one = {"observation_space": to_json(SEEN), "action_space": to_json(Discrete(4))}
    assert parse_seats(one) == ONE
    assert parse_seats({"protocol": 1, **one}) == ONE
    assert parse_seats({"mygame": {"env": "external", "config": {"lr": 1, "env_config": one}}}) == ONE
    two = {name: {"observation_space": to_json(s.observation), "action_space": to_json(s.action)} for name, s in TWO.items()}
    assert parse_seats({"seats": two}) == TWO


@pytest.mark.parametrize(
    "spec", [{}, {"seats": {}}, {"seats": {"blue": {}}}, {"observation_space": to_json(SEEN)}, {"action_space": {"type": "Dice"}}]
)
def test_a_spec_without_its_spaces_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_seats(spec)


SPACES: list[gym.Space[Any]] = [
    Discrete(5, start=-2),
    gym.spaces.MultiDiscrete([2, 3, 4]),
    gym.spaces.MultiBinary(6),
    Box(-1, 1, (2, 3), np.float32),
    Box(-np.inf, np.inf, (4,), np.float64),
    Box(np.array([-np.inf, 0, -3.4e38], np.float32), np.array([5, np.inf, 3.4e38], np.float32)),
    Box(0, 255, (4, 4), np.uint8),
    gym.spaces.Dict({"a": Discrete(2), "b": gym.spaces.Tuple([Discrete(3), Box(0, 1, (), np.float32)])}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_random_values_lie_in_their_space_after_coding(space: gym.Space[Any], form: Any) -> None:
    rng = np.random.default_rng(1)
    for draw in (random_observation, random_action):
        for _ in range(20):
            value = SpaceParser(space)(decode(encode({"v": draw(space, rng)}, form))["v"])
            assert bounds_error(space, value, "v") == ""


def test_random_actions_keep_to_the_mask() -> None:
    rng = np.random.default_rng(1)
    space = gym.spaces.Dict({"a": Discrete(3), "b": gym.spaces.MultiDiscrete([2, 2]), "c": gym.spaces.MultiBinary(2)})
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 1, 0], np.bool_)
    drawn = [random_action(space, rng, mask) for _ in range(50)]
    assert {(d["a"], *d["b"]) for d in drawn} == {(2, 0, 1)}
    assert {tuple(d["c"]) for d in drawn} == {(0, 0), (1, 0)}


@pytest.mark.parametrize(
    ("space", "value", "where"),
    [
        (Box(0, 1, (2,), np.float32), np.array([0.5, 1.5]), "x[1] is 1.5, its bounds are 0 to 1"),
        (gym.spaces.Tuple([Discrete(2), Box(0, 1, (), np.float32)]), (1, -2.0), "x.1 is -2"),
    ],
)
def test_values_outside_bounds_are_named(space: gym.Space[Any], value: Any, where: str) -> None:
    assert where in bounds_error(space, value, "x")
