from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.types import Segments
from ludus.errors import EnvironmentFault, Refused
from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor
from ludus.models.inference.batched_policy import BatchedPolicy, Decision
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from tests.gateway import wire
from tests.gateway.scripted import RecordedSeat, run, tiny_policy
from tests.local_servers import gateway

GOOD: dict[str, Any] = {"observation": [0.5, -1.0, 2.0]}


def pack(message: Any) -> bytes:
    packed: bytes = msgpack.packb(message)
    return packed


class Game:
    """One session with an actor, without HTTP; replies other than 200 are returned as (status, error word)."""

    def __init__(self, *tables: RecordedSeat, names: tuple[str, ...] = ("",)) -> None:
        self.actor = BuiltinActor({name: recorded_seat.seat for name, recorded_seat in zip(names, tables, strict=True)})

    async def tick(self, message: Any) -> Any:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        try:
            return json.loads(await self.actor.tick(body))
        except Refused as refused:
            return refused.status, refused.error

    async def end(self, message: Any = b"") -> Any:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        try:
            return json.loads(await self.actor.end(body))
        except Refused as refused:
            return refused.status, refused.error


def rewards(segments: Segments) -> list[float]:
    return [float(reward) for reward in segments.reward[segments.valid]]


def on_one_loop(*works: Coroutine[Any, Any, None]) -> None:
    async def all_of_them() -> None:
        for work in works:
            await work

    run(all_of_them())


# -- one seat -----------------------------------------------------------------------------------------------------------


def test_a_reward_belongs_to_the_previous_action() -> None:
    recorded_seat = RecordedSeat(tiny_policy(), 8)

    async def play() -> None:
        game = Game(recorded_seat)
        for number in range(4):
            answer = await game.tick(GOOD | {"reward": number})
            assert set(answer) == {"action"}
            assert answer["action"] in range(4)
        assert await game.end({"reward": 10, "terminated": True}) == {}

    on_one_loop(play())
    (segment,) = recorded_seat.segments()
    assert rewards(segment) == [1, 2, 3, 10]
    assert segment.terminated[3, 0]
    assert segment.episode_return.tolist() == [16]


def test_an_episode_that_ends_on_a_tick_has_no_action_and_the_next_tick_begins_another() -> None:
    recorded_seat = RecordedSeat(tiny_policy(core="lstm"), 8)

    async def play() -> None:
        game = Game(recorded_seat)
        for number in range(3):
            assert (await game.tick(GOOD))["action"] is not None
            assert (await game.tick(GOOD | {"reward": 1}))["action"] is not None
            how = {"terminated": True} if number % 2 else {"truncated": True}
            assert await game.tick(GOOD | {"reward": 2 + number} | how) == {"action": None}
        assert await game.end() == {}

    on_one_loop(play())
    recorded = recorded_seat.segments()
    assert [rewards(segment) for segment in recorded] == [[1, 2], [1, 3], [1, 4]]
    assert [bool(segment.terminated[1, 0]) for segment in recorded] == [False, True, False]
    assert [bool(segment.truncated[1, 0]) for segment in recorded] == [True, False, True]
    for segment in recorded:
        assert segment.first[:3, 0].tolist() == [True, False, False]
        assert not segment.state[0][0].any(), "every episode begins in the initial state"
        assert not segment.state[1][0].any()
    np.testing.assert_array_equal(recorded[0].value[:2], recorded[1].value[:2])


def test_terminated_needs_no_observation_and_truncated_does() -> None:
    async def play() -> None:
        game = Game(RecordedSeat(tiny_policy()))
        await game.tick(GOOD)
        assert await game.tick({"truncated": True, "reward": 1}) == (422, "observation")
        assert await game.tick({"terminated": True, "reward": 1}) == {"action": None}
        await game.tick(GOOD)
        assert await game.end({"truncated": True}) == (422, "observation")
        assert await game.end(GOOD | {"truncated": True}) == {}

    on_one_loop(play())


@pytest.mark.parametrize(
    ("last", "steps", "terminated", "truncated", "discarded"),
    [
        (b"", 2, False, True, 1),
        (b"  \n", 2, False, True, 1),
        ({}, 2, False, True, 1),
        ({"reward": 5}, 3, True, False, 0),  # without a word: terminated
        ({"reward": 5, "terminated": True}, 3, True, False, 0),
        ({"reward": 5, "truncated": True, "observation": [9, 9, 9]}, 3, False, True, 0),
        ({"reward": 5, "truncated": True, "terminated": True}, 3, True, False, 0),
    ],
    ids=repr,
)
def test_an_end_without_outcome_drops_the_last_step(
    last: Any, steps: int, terminated: bool, truncated: bool, discarded: int
) -> None:
    recorded_seat = RecordedSeat(tiny_policy(), 8)

    async def play() -> None:
        game = Game(recorded_seat)
        for _ in range(3):
            await game.tick(GOOD)
        assert await game.end(last) == {}

    on_one_loop(play())
    (segment,) = recorded_seat.segments()
    assert segment.steps == steps
    assert (segment.terminated[steps - 1, 0], segment.truncated[steps - 1, 0]) == (terminated, truncated)
    assert recorded_seat.seat.stats.discarded == discarded
    if isinstance(last, dict) and "observation" in last:
        assert segment.observation[3, 0].tolist() == [9, 9, 9]


@pytest.mark.parametrize("why", ["silent", "timeout", "failed", "shutdown"])
def test_an_aborted_session_drops_its_last_step(why: str) -> None:
    recorded_seat = RecordedSeat(tiny_policy(), 8)

    async def play() -> None:
        game = Game(recorded_seat)
        for number in range(3):
            await game.tick(GOOD | {"reward": number})
        game.actor.ended_by = why
        assert await game.actor.end(b"") == b""

    on_one_loop(play())
    (segment,) = recorded_seat.segments()
    assert rewards(segment) == [1, 2]
    assert segment.truncated[1, 0]
    assert recorded_seat.seat.stats.discarded == 1


def test_a_recurrent_model_remembers_within_an_episode_and_forgets_after_it() -> None:
    policy = tiny_policy(core="lstm")
    random = np.random.default_rng(0)
    seen = random.normal(size=(4, 6, 3)).astype(np.float32)

    async def play() -> list[list[int]]:
        game, taken = Game(RecordedSeat(policy)), []
        for episode in seen:
            taken.append([(await game.tick({"observation": row.tolist()}))["action"] for row in episode])
            await game.tick({"terminated": True})
        return taken

    unrolled = []
    for episode in seen:
        state, actions = policy.initial_state(1), []
        for row in episode:
            with torch.no_grad():
                action, _, _, state = policy.step(torch.from_numpy(row[None]), state, None, None, None)
            actions.append(int(action[0]))
        unrolled.append(actions)
    assert run(play()) == unrolled
    with torch.no_grad():
        fresh = policy.step(torch.from_numpy(seen.reshape(-1, 3)), policy.initial_state(24), None, None, None)[0]
    assert fresh.reshape(4, 6).tolist() != unrolled, "here memory makes a difference"


# -- formats ------------------------------------------------------------------------------------------------------------


async def answered(recorded_seat: RecordedSeat, body: bytes) -> bytes:
    return await Game(recorded_seat).actor.tick(body)


def test_the_reply_has_the_format_of_the_request() -> None:
    async def play() -> None:
        recorded_seat = RecordedSeat(tiny_policy())
        assert set(json.loads(await answered(recorded_seat, json.dumps(GOOD).encode()))) == {"action"}
        assert set(msgpack.unpackb(await answered(recorded_seat, pack(GOOD)))) == {"action"}
        game = Game(recorded_seat)
        await game.tick(GOOD)
        assert msgpack.unpackb(await game.actor.end(pack({"reward": 1}))) == {}
        assert json.loads(await answered(recorded_seat, b"\xef\xbb\xbf" + json.dumps(GOOD).encode())).keys() == {"action"}

    on_one_loop(play())


def test_the_same_numbers_in_every_format_give_the_same_action_and_record() -> None:
    recorded_seat = RecordedSeat(tiny_policy(), 8)
    values = np.array([0.1, -2.5, 3.25], np.float32)

    async def play() -> None:
        game, answers = Game(recorded_seat), []
        answers.append(await game.tick({"observation": values.tolist()}))
        for observation in (values.tolist(), values.tobytes(), values.astype(float).tolist()):
            answers.append(msgpack.unpackb(await game.actor.tick(pack({"observation": observation}))))
        assert all(answer == answers[0] for answer in answers)
        await game.end({"terminated": True})

    on_one_loop(play())
    (segment,) = recorded_seat.segments()
    assert (segment.observation[:4, 0] == values).all()


def test_images_are_sent_as_raw_bytes_or_lists() -> None:
    space = gs.Box(0, 255, (8, 8, 3), np.uint8)
    recorded_seat = RecordedSeat(tiny_policy(space), 8)
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)

    async def play() -> None:
        game = Game(recorded_seat)
        first = msgpack.unpackb(await game.actor.tick(pack({"observation": picture.tobytes()})))
        assert await game.tick({"observation": picture.tolist()}) == first
        with pytest.raises(Refused, match="observation"):
            await game.actor.tick(pack({"observation": picture.tobytes()[:-1]}))
        with pytest.raises(Refused, match="uint8"):
            await game.actor.tick(json.dumps({"observation": (picture.astype(int) + 1).tolist()}).encode())
        await game.end({"terminated": True})

    on_one_loop(play())
    (segment,) = recorded_seat.segments()
    assert (segment.observation[:2, 0] == picture).all()


NESTED = gs.Dict({"unit": gs.Tuple([gs.Discrete(3), gs.MultiBinary(2)]), "speed": gs.Box(-1, 1, ())})
HYBRID = gs.Dict({"aim": gs.Box(-1, 1, (2,)), "move": gs.Discrete(3, start=10), "keys": gs.Tuple([gs.MultiBinary(2)])})


@pytest.mark.parametrize("packed", [False, True])
def test_nested_observations_and_actions_are_objects_and_lists(packed: bool) -> None:
    async def play() -> None:
        game = Game(RecordedSeat(tiny_policy(NESTED, HYBRID)))
        message = {"observation": {"unit": [2, [0, 1]], "speed": 0.5}, "action_mask": {"move": [0, 1, 0], "keys": [[1, 0]]}}
        if packed:
            action = msgpack.unpackb(await game.actor.tick(pack(message)))["action"]
        else:
            action = (await game.tick(message))["action"]
        assert set(action) == {"aim", "move", "keys"}
        assert action["move"] == 11
        assert action["keys"][0][1] == 0
        assert len(action["aim"]) == 2
        assert all(-1 <= value <= 1 for value in action["aim"])

    on_one_loop(play())


def test_masks_are_kept_and_recorded_while_exploring() -> None:
    recorded_seat = RecordedSeat(tiny_policy(NESTED, HYBRID), 300)
    seat = Seat(BatchedPolicy(recorded_seat.versions, seed=0), recorded_seat.memory)
    random = np.random.default_rng(0)
    asked: list[list[int]] = []

    async def play() -> None:
        actor = BuiltinActor({"": seat})
        for _ in range(200):
            move, keys = random.integers(0, 2, 3), random.integers(0, 2, 2)
            move[random.integers(3)] = 1
            mask: Any = {"move": move.tolist(), "keys": [keys.tolist()]}
            if random.random() < 0.5:
                mask = [*keys.tolist(), *move.tolist()]  # flat: by the names of the parts
            message = {"observation": {"unit": [0, [0, 1]], "speed": 0.5}, "action_mask": mask}
            action = json.loads(await actor.tick(json.dumps(message).encode()))["action"]
            assert move[action["move"] - 10]
            assert all(allowed or not pressed for allowed, pressed in zip(keys, action["keys"][0], strict=True))
            asked.append([*keys.tolist(), *move.tolist()])
        await actor.end(b'{"terminated": true}')

    on_one_loop(play())
    (segment,) = recorded_seat.segments()
    assert segment.action_mask[:200, 0].astype(int).tolist() == asked
    assert len(set(segment.action["move"][:200, 0].tolist())) == 3, "it explored"


# -- what is refused ----------------------------------------------------------------------------------------------------

SEEN = GOOD["observation"]
NO_REWARDS: list[Any] = [math.nan, math.inf, True, False, "1", None, [1], {}, 1e300, 10**400]
NO_FLAGS: list[Any] = [1, 0, "true", None, [], {}]
NO_MASKS: list[Any] = [[1, 1, 1], [1] * 5, [0, 0, 0, 0], "1111", 1, {"a": [1]}, ["a"] * 4, [-1e9, 0, 0, 0]]
WRONG: list[tuple[Any, str]] = [
    *((body, "malformed") for body in (b"", b" ", b"{", b"[1]", b"7", b"null", b'"text"', b"\xff\xfe", b"{]" * 10, b"\0" * 50)),
    *((body, "malformed") for body in (b"\x81", b"\x82\xa1a\x01", b"\x81\x01\x02", b"\xdf\xff\xff\xff\xff", b"\x81\xa1\xff\x01")),
    (b"[" * 100_000, "malformed"),
    (b'{"a":' * 100_000, "malformed"),
    (b"\x81\xa1a" * 10_000, "malformed"),
    (b'{"reward": ' + b"9" * 5000 + b"}", "malformed"),
    (pack(GOOD) + b"more", "malformed"),
    (json.dumps(GOOD).encode() + b"more", "malformed"),
    ({}, "observation"),
    ({"observation": None}, "observation"),
    ({"reward": 1.0 * 0}, "observation"),
    *(({"observation": seen}, "observation") for seen in ([], [1, 2], [1, 2, 3, 4], [[1, 2, 3]], 1, "123", {}, {"a": 1}, True)),
    *(({"observation": seen}, "observation") for seen in ([1, 2, "3"], [1, 2, None], [1, [2], 3], [[1], [2, 3]], [1, 2, {}])),
    *(({"observation": [1, 2, bad]}, "observation") for bad in (math.nan, math.inf, -math.inf, 1e39, 10**30)),
    (pack({"observation": b"12345"}), "observation"),
    (pack({"observation": np.array([1, 2, np.nan], np.float32).tobytes()}), "observation"),
    (pack({"observation": msgpack.ExtType(5, b"xyz")}), "observation"),
    (GOOD | {"observations": 1}, "unknown_key"),
    (GOOD | {"rewards": 1}, "unknown_key"),
    (GOOD | {"x" * 1_000_000: 1}, "unknown_key"),
    (GOOD | {"seats": {}}, "unknown_key"),
    (pack({b"observation": SEEN}), "unknown_key"),
    *((GOOD | {"reward": bad}, "reward") for bad in NO_REWARDS),
    (GOOD | {"reward": 1}, "reward"),  # nothing was done yet
    *((GOOD | {"terminated": bad}, "terminated") for bad in NO_FLAGS),
    *((GOOD | {"truncated": bad}, "truncated") for bad in NO_FLAGS),
    *((GOOD | {"action_mask": bad}, "action_mask") for bad in NO_MASKS),
]


@pytest.mark.parametrize(("wrong", "error"), WRONG, ids=lambda value: repr(value)[:50])
def test_invalid_requests_are_refused_without_side_effects(wrong: Any, error: str) -> None:
    """A session records the same with and without the refused request."""
    recorded_seat = RecordedSeat(tiny_policy(core="gru"), 8)

    async def play(mistaken: bool) -> None:
        game, told = Game(recorded_seat), []
        if mistaken:
            told.append(await game.tick(wrong))
        await game.tick(GOOD)
        if mistaken and wrong != GOOD | {"reward": 1}:
            told.append(await game.tick(wrong))
        await game.tick(GOOD | {"reward": 1})
        assert told == [(422, error)] * len(told)
        assert await game.end({"reward": 2, "terminated": True}) == {}

    on_one_loop(play(False), play(True))
    right, same = recorded_seat.segments()
    assert rewards(same) == [1, 2]
    for name in ("observation", "action", "valid", "first", "log_prob", "value", "terminated", "truncated", "action_mask"):
        np.testing.assert_array_equal(getattr(right, name), getattr(same, name), err_msg=name)
    np.testing.assert_array_equal(right.state[0], same.state[0])


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        (GOOD | {"rewrad": 1}, "'reward'"),
        (GOOD | {"Observation": 1}, "'observation'"),
        (GOOD | {"done": True}, "terminated"),
        (GOOD | {"mask": [1]}, "action_mask"),
    ],
)
def test_an_unknown_key_names_the_nearest(message: Any, hint: str) -> None:
    async def play() -> None:
        with pytest.raises(Refused) as caught:
            await answered(RecordedSeat(tiny_policy()), json.dumps(message).encode())
        assert hint in caught.value.hint

    on_one_loop(play())


@pytest.mark.parametrize("value", [3, -1, 1.5, "1", None, [1], 10**30, math.nan])
def test_a_category_out_of_range_is_refused(value: Any) -> None:
    async def play() -> None:
        game = Game(RecordedSeat(tiny_policy(gs.Discrete(3))))
        assert await game.tick({"observation": value}) == (422, "observation")
        assert (await game.tick({"observation": 2}))["action"] is not None

    on_one_loop(play())


def test_an_end_that_is_refused_may_be_sent_again() -> None:
    recorded_seat = RecordedSeat(tiny_policy(), 8)

    async def play() -> None:
        game = Game(recorded_seat)
        await game.tick(GOOD)
        for wrong in (b"{", {"reward": "x"}, {"reward": 1, "terminated": 1}, {"observation": [1], "reward": 1}, {"rewad": 1}):
            status, _ = await game.end(wrong)
            assert status == 422
        assert await game.end({"reward": 3}) == {}

    on_one_loop(play())
    (segment,) = recorded_seat.segments()
    assert rewards(segment) == [3]


@given(st.binary(max_size=200) | st.text(max_size=80).map(str.encode))
def test_arbitrary_bytes_are_only_refused(body: bytes) -> None:
    async def play() -> None:
        with pytest.raises(Refused) as caught:
            await answered(RecordedSeat(tiny_policy()), body)
        assert caught.value.status == 422

    on_one_loop(play())


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["observation", "reward", "terminated", "truncated", "action_mask"]), json_like),
    st.booleans(),
)
def test_accepted_values_are_recorded_as_finite_numbers(message: dict[str, Any], packed: bool) -> None:
    recorded_seat, statuses = RecordedSeat(tiny_policy(), 2), {422}

    async def play() -> None:
        game = Game(recorded_seat)
        try:
            body = pack(message) if packed else json.dumps(message).encode()
        except (ValueError, OverflowError):  # more than msgpack has room for
            return
        for last in (False, True):
            await game.tick(GOOD)
            try:
                await (game.actor.end(body) if last else game.actor.tick(body))
            except Refused as refused:
                statuses.add(refused.status)
            except EnvironmentFault:  # numbers that the network cannot bear
                break
        game.actor.ended_by = "silent"
        await game.actor.end(b"")

    on_one_loop(play())
    assert statuses == {422}
    for segment in recorded_seat.segments():
        for name in ("observation", "reward", "log_prob", "value"):
            assert np.isfinite(getattr(segment, name)).all()


# -- several seats ------------------------------------------------------------------------------------------------------


@pytest.fixture
def blue() -> RecordedSeat:
    return RecordedSeat(tiny_policy(core="lstm"), 8)


@pytest.fixture
def red() -> RecordedSeat:
    return RecordedSeat(tiny_policy(gs.Discrete(3), gs.Box(-1, 1, (2,)), seed=1), 8)


NAMES = ("blue", "red")


def test_only_the_seats_that_act_now_get_actions(blue: RecordedSeat, red: RecordedSeat) -> None:
    async def play() -> None:
        game = Game(blue, red, names=NAMES)
        both = await game.tick({"seats": {"blue": GOOD, "red": {"observation": 1}}})
        assert set(both) == {"actions"}
        assert set(both["actions"]) == {"blue", "red"}
        assert both["actions"]["blue"] in range(4)
        assert len(both["actions"]["red"]) == 2
        one = await game.tick({"seats": {"red": {"observation": 2, "reward": 0.5}}})
        assert set(one["actions"]) == {"red"}
        over = await game.tick({"seats": {"red": {"terminated": True, "reward": -1}, "blue": GOOD | {"reward": 3}}})
        assert over["actions"]["red"] is None
        assert over["actions"]["blue"] is not None
        await game.tick({"seats": {"red": {"observation": 0}}})  # begins anew
        assert await game.end({"seats": {"blue": {"reward": 4}}}) == {}  # nothing of red: its last step is left out

    on_one_loop(play())
    (of_blue,) = blue.segments()
    (of_red,) = red.segments()
    assert rewards(of_blue) == [3, 4]
    assert rewards(of_red) == [0.5, -1]
    assert of_red.observation[:2, 0].tolist() == [1, 2]
    assert (blue.seat.stats.discarded, red.seat.stats.discarded) == (0, 1)


def test_seats_of_one_model_share_its_memory_and_keep_a_state_each() -> None:
    recorded_seat = RecordedSeat(tiny_policy(core="lstm"), 8)
    other = Seat(recorded_seat.deciding, recorded_seat.memory, first_origin=1 << 40)
    seen = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)

    async def together() -> None:
        actor = BuiltinActor({"a": recorded_seat.seat, "b": other})
        for t in range(5):
            message = {"seats": {name: {"observation": seen[i, t].tolist()} for i, name in enumerate("ab")}}
            await actor.tick(json.dumps(message).encode())
        await actor.end(json.dumps({"seats": {"a": {"reward": 1}, "b": {"reward": 2}}}).encode())

    async def alone() -> None:
        for i in range(2):
            game = Game(recorded_seat)
            for t in range(5):
                await game.tick({"observation": seen[i, t].tolist()})
            await game.end({"reward": 1 + i})

    on_one_loop(together(), alone())
    first, second, *apart = recorded_seat.segments()
    assert [int(s.origin[0]) for s in (first, second)] == [0, 1 << 40], "told apart by whoever follows them"
    for mixed, lone in zip((first, second), apart, strict=True):
        np.testing.assert_allclose(mixed.value, lone.value, atol=1e-6)
        np.testing.assert_array_equal(mixed.action, lone.action)
        np.testing.assert_allclose(mixed.state[0], lone.state[0], atol=1e-6)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (GOOD, "seats"),
        ({}, "seats"),
        ({"seats": {}}, "seats"),
        ({"seats": None}, "seats"),
        ({"seats": [1]}, "seats"),
        ({"seats": {"blue": GOOD}, "reward": 1}, "seats"),
        ({"seats": {"bleu": GOOD}}, "seats"),
        ({"seats": {"": GOOD}}, "seats"),
        ({"seats": {"x" * 1_000_000: GOOD}}, "seats"),
        ({"seats": {"blue": None}}, "malformed"),
        ({"seats": {"blue": [1, 2, 3]}}, "malformed"),
        ({"seats": {"blue": GOOD, "red": {"observation": 7}}}, "observation"),
        ({"seats": {"blue": GOOD, "red": {"observation": 1, "reward": 1}}}, "reward"),
        ({"seats": {"blue": GOOD | {"action_mask": [1]}}}, "action_mask"),
        (pack({"seats": {b"blue": GOOD}}), "seats"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_error_of_one_seat_is_refused_before_any_seat_acts(
    blue: RecordedSeat, red: RecordedSeat, message: Any, error: str
) -> None:
    async def play() -> None:
        game = Game(blue, red, names=NAMES)
        assert await game.tick(message) == (422, error)
        await game.tick({"seats": {"blue": GOOD}})
        assert await game.end({"seats": {"blue": {"reward": 1}}}) == {}

    on_one_loop(play())
    (segment,) = blue.segments()
    assert rewards(segment) == [1]
    assert segment.first[0, 0]
    assert red.segments() == []


def test_an_unknown_seat_names_the_nearest(blue: RecordedSeat, red: RecordedSeat) -> None:
    async def play() -> None:
        with pytest.raises(Refused) as caught:
            await Game(blue, red, names=NAMES).actor.tick(json.dumps({"seats": {"bleu": GOOD}}).encode())
        assert "'blue'" in caught.value.hint

    on_one_loop(play())


class Late:
    """A slow model."""

    def __init__(self, deciding: BatchedPolicy[Any]) -> None:
        self.deciding, self.policy = deciding, deciding.policy

    def decide(self, *asked: Any) -> asyncio.Future[Decision]:
        return asyncio.ensure_future(self._decide(*asked))

    async def _decide(self, *asked: Any) -> Decision:
        for _ in range(20):
            await asyncio.sleep(0)
        return await self.deciding.decide(*asked)


def test_when_the_model_of_one_seat_fails_no_seat_plays_on_after_the_end() -> None:
    """Pending decisions must complete before `end`."""
    fine = RecordedSeat(tiny_policy(), 8, blocks=2)
    drowned = RecordedSeat(Policy(gs.Box(-np.inf, np.inf, (3,)), gs.Discrete(2), NetworkConfig(fcnet_activation="relu")), 8)

    async def play() -> None:
        actor = BuiltinActor({"blue": drowned.seat, "red": Seat(Late(fine.deciding), fine.memory)})
        with pytest.raises(EnvironmentFault):
            await actor.tick(json.dumps({"seats": {"blue": {"observation": [3e38] * 3}, "red": GOOD}}).encode())
        actor.ended_by = "failed"
        await actor.end(b"")
        for _ in range(50):
            await asyncio.sleep(0)

    on_one_loop(play())
    assert fine.segments() == []
    assert None not in [fine.memory.reserve(0) for _ in range(2)], "every block was given back"


# -- over HTTP ----------------------------------------------------------------------------------------------------------


@contextmanager
def served(recorded_seat: RecordedSeat) -> Iterator[int]:
    with gateway(lambda: BuiltinActor({"": recorded_seat.seat})) as running:
        yield running.port


def test_after_422_the_same_seq_is_accepted_and_nothing_invalid_is_recorded() -> None:
    recorded_seat = RecordedSeat(tiny_policy(), 8)
    with served(recorded_seat) as port, wire.Wire(port) as game:
        assert game.ask(wire.step("start", "m", seq=0)).status == 200
        seq = 1
        for message in (GOOD, GOOD | {"reward": 1}, GOOD | {"reward": 2}):
            for wrong in (b"garbage", json.dumps({"observation": [1, 2, math.nan]}).encode(), b'{"observation": "x"}'):
                reply = game.ask(wire.step("tick", "m", wrong, seq=seq))
                assert reply.refusal[0] == 422
            reply = game.ask(wire.step("tick", "m", json.dumps(message).encode(), seq=seq))
            assert reply.status == 200
            again = game.ask(wire.step("tick", "m", json.dumps(message).encode(), seq=seq))
            assert (again.status, again.body) == (200, reply.body), "a retry is not another step"
            seq += 1
        assert game.ask(wire.step("end", "m", b'{"reward": true}', seq=seq)).refusal == (422, "reward")
        assert game.ask(wire.step("end", "m", b'{"reward": 3}', seq=seq)).status == 200
    (segment,) = recorded_seat.segments()
    assert rewards(segment) == [1, 2, 3]


def test_a_session_whose_values_overflow_the_network_ends_alone() -> None:
    space: gym.Space[Any] = gs.Box(-np.inf, np.inf, (3,))
    recorded_seat = RecordedSeat(Policy(space, gs.Discrete(2), NetworkConfig(fcnet_activation="relu")), 8)
    with served(recorded_seat) as port, wire.Wire(port) as good, wire.Wire(port) as bad:
        for game, name in ((good, "good"), (bad, "bad")):
            assert game.ask(wire.step("start", name)).status == 200
            assert game.ask(wire.step("tick", name, json.dumps(GOOD).encode())).status == 200
        assert bad.ask(wire.step("tick", "bad", b'{"observation": [3e38, 3e38, 3e38]}')).refusal == (500, "actor_failed")
        assert bad.ask(wire.step("tick", "bad", json.dumps(GOOD).encode())).refusal == (410, "session_lost")
        assert good.ask(wire.step("end", "good", b'{"reward": 1}')).status == 200
    (segment,) = recorded_seat.segments()
    assert rewards(segment) == [1]
    assert recorded_seat.seat.stats.discarded == 1
