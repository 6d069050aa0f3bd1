"""The raw format is equivalent to JSON."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces as gs
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.tree import leaves, map_tree
from ludus.core.types import Segments
from ludus.errors import EnvironmentFault, Refused
from ludus.gateway.builtin_actor import BuiltinActor
from ludus.gateway.raw_codec import RawCodec
from tests.gateway.scripted import ACTION, OBSERVATION, RecordedSeat, run, tiny_policy

TERMINATED, TRUNCATED, MASKED = 1, 2, 4
DEEP = gs.Dict(
    {
        "z": gs.Discrete(3, start=2),
        "a": gs.Tuple((gs.Box(-1, 1, (2, 2), np.float32), gs.MultiBinary(3))),
        "m": gs.Dict({"q": gs.MultiDiscrete([2, 5]), "b": gs.Box(-5, 5, (), np.float32)}),
    }
)
OBSERVATIONS: dict[str, gym.Space[Any]] = {
    "vector": OBSERVATION,
    "scalar": gs.Box(-1, 1, (), np.float32),
    "matrix": gs.Box(-1, 1, (2, 3), np.float32),
    "double": gs.Box(-1, 1, (3,), np.float64),
    "whole": gs.Box(-100, 100, (2,), np.int32),
    "picture": gs.Box(0, 255, (12, 12, 3), np.uint8),
    "choice": gs.Discrete(5, start=-2),
    "choices": gs.MultiDiscrete([3, 4]),
    "bits": gs.MultiBinary(4),
    "deep": DEEP,
}
ACTIONS: dict[str, gym.Space[Any]] = {
    "choice": ACTION,
    "from 3": gs.Discrete(4, start=3),
    "choices": gs.MultiDiscrete([3, 4]),
    "bits": gs.MultiBinary(3),
    "box": gs.Box(-2, 2, (2, 2), np.float32),
    "deep": DEEP,
}


def laid_out(space: gym.Space[Any], value: Any) -> bytes:
    """An independent implementation of the format, from its description."""
    if isinstance(space, gs.Dict):
        return b"".join(laid_out(space[key], value[key]) for key in sorted(space))
    if isinstance(space, gs.Tuple):
        return b"".join(laid_out(part, item) for part, item in zip(space, value, strict=True))
    return np.ascontiguousarray(value, dtype_of(space)).tobytes()


def dtype_of(space: gym.Space[Any]) -> np.dtype[Any]:
    """The example of the protocol page."""
    if isinstance(space, gs.Box):
        return np.dtype("<f4") if space.dtype.kind == "f" else space.dtype.newbyteorder("<")
    return np.dtype("<i1") if isinstance(space, gs.MultiBinary) else np.dtype("<i8")


def taken(space: gym.Space[Any], body: bytes) -> tuple[Any, bytes]:
    """Fields of a step and the expected outcome."""
    if isinstance(space, gs.Dict):
        found = {}
        for key in sorted(space):
            found[key], body = taken(space[key], body)
        return found, body
    if isinstance(space, gs.Tuple):
        parts = []
        for part in space:
            item, body = taken(part, body)
            parts.append(item)
        return parts, body
    assert space.shape is not None
    dtype = dtype_of(space)
    size = math.prod(space.shape) * dtype.itemsize
    return np.frombuffer(body[:size], dtype).reshape(space.shape).tolist(), body[size:]


def tick(seen: bytes, reward: float = 0.0, flags: int = 0, mask: bytes = b"") -> bytes:
    return struct.pack("<fI", reward, flags) + seen + mask


def vector(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


class Game:
    """One raw session; refusals are returned as (status, error word)."""

    def __init__(self, recorded_seat: RecordedSeat) -> None:
        self.actor = BuiltinActor({"": recorded_seat.seat})

    async def begin(self) -> Game:
        assert await self.actor.start("s", b'{"format": "raw"}') == b""
        return self

    async def tick(self, body: bytes) -> Any:
        try:
            return await self.actor.tick(body)
        except Refused as refused:
            return refused.status, refused.error

    async def end(self, body: bytes = b"") -> Any:
        try:
            return await self.actor.end(body)
        except Refused as refused:
            return refused.status, refused.error


def plain(value: Any) -> Any:
    """Convert to plain JSON values."""
    return map_tree(lambda x: np.asarray(x).tolist(), value)


def same(one: list[Segments], two: list[Segments]) -> None:
    assert len(one) == len(two) > 0
    for left, right in zip(one, two, strict=True):
        one_by_one = zip(leaves(left.trim().arrays()), leaves(right.trim().arrays()), strict=True)
        for (name, array), (other, expected) in one_by_one:
            assert name == other
            np.testing.assert_array_equal(array, expected, err_msg=name)


@pytest.mark.parametrize("seen", OBSERVATIONS)
@pytest.mark.parametrize(("done", "core"), [("choice", "lstm"), ("deep", None)])
def test_every_observation_means_what_it_means_as_json(seen: str, done: str, core: str | None) -> None:
    parity(OBSERVATIONS[seen], ACTIONS[done], core)


@pytest.mark.parametrize("done", ACTIONS)
def test_every_raw_action_equals_that_of_json(done: str) -> None:
    parity(OBSERVATION, ACTIONS[done], None)


def parity(observation: gym.Space[Any], action: gym.Space[Any], core: str | None) -> None:
    """Two sessions with equal content in two formats have equal replies and records."""
    policy = tiny_policy(observation, action, core=core)
    raw, words = RecordedSeat(policy, 4), RecordedSeat(policy, 4)
    observation.seed(1)
    values = [observation.sample() for _ in range(7)]
    rewards = [0.0, 0.5, -1.25, 3.0, 0.0, 1.0, 2.0]

    async def play() -> None:
        game, other = await Game(raw).begin(), BuiltinActor({"": words.seat})
        for number, (value, reward) in enumerate(zip(values, rewards, strict=True)):
            flags = {3: TERMINATED, 5: TRUNCATED}.get(number, 0)
            said = {"observation": plain(value), "reward": reward}
            if flags:
                said["terminated" if flags == TERMINATED else "truncated"] = True
            elif number in (4, 6):
                said["reward"] = reward = 0.0  # an episode begins
            got = await game.tick(tick(laid_out(observation, value), reward, flags))
            wanted = json.loads(await other.tick(json.dumps(said).encode()))["action"]
            if flags:
                assert got == b""
                assert wanted is None
            else:
                found, rest = taken(action, got)
                assert rest == b""
                assert found == wanted
        assert await game.end(tick(laid_out(observation, values[0]), 4.0, TRUNCATED)) == b""
        await other.end(json.dumps({"observation": plain(values[0]), "reward": 4.0, "truncated": True}).encode())

    run(play())
    same(raw.segments(), words.segments())


FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@settings(max_examples=60)
@given(st.lists(FLOATS, min_size=3, max_size=3), FLOATS, st.integers(0, 9))
def test_values_are_accepted_or_refused_as_in_json(numbers: list[float], reward: float, flags: int) -> None:
    policy = tiny_policy()
    raw, words = RecordedSeat(policy, 4), RecordedSeat(policy, 4)

    async def play() -> None:
        game, other = await Game(raw).begin(), BuiltinActor({"": words.seat})
        await game.tick(tick(vector(0, 1, 2)))
        await other.tick(b'{"observation": [0, 1, 2]}')
        mask = b"\1\0\1\0" if flags & MASKED else b""
        said: dict[str, Any] = {"observation": numbers, "reward": reward}
        said |= {"terminated": bool(flags & 1), "truncated": bool(flags & 2)} | ({"action_mask": list(mask)} if mask else {})
        try:
            got = await game.tick(tick(vector(*numbers), reward, flags, mask))
        except EnvironmentFault:
            with pytest.raises(EnvironmentFault):
                await other.tick(json.dumps(said).encode())
            return
        if flags > 7:
            assert got == (422, "malformed")
            return
        try:
            action = json.loads(await other.tick(json.dumps(said).encode()))["action"]
            wanted: Any = b"" if action is None else struct.pack("<q", action)
        except Refused as refused:
            wanted = refused.status, refused.error
        assert got == wanted

    run(play())
    if flags <= 7:
        for left, right in zip(raw.segments(), words.segments(), strict=True):
            same([left], [right])


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "malformed"),
        (b"\0" * 7, "malformed"),
        (tick(b""), "malformed"),
        (tick(vector(1, 2)), "malformed"),
        (tick(vector(1, 2, 3, 4)), "malformed"),
        (tick(vector(1, 2, 3)) + b"\0", "malformed"),
        (tick(vector(1, 2, 3), flags=8), "malformed"),
        (tick(vector(1, 2, 3), flags=1 << 31), "malformed"),
        (tick(vector(1, 2, 3), flags=MASKED), "malformed"),
        (tick(vector(1, 2, 3), flags=MASKED, mask=b"\1\1\1"), "malformed"),
        (tick(vector(1, 2, 3), flags=MASKED, mask=b"\1\1\1\1\1"), "malformed"),
        (tick(vector(1, 2, 3), mask=b"\1\1\1\1"), "malformed"),
        (tick(vector(1, 2, 3), flags=MASKED, mask=b"\0\0\0\0"), "action_mask"),
        (tick(vector(1, 2, 3), flags=MASKED, mask=b"\1\2\0\0"), "action_mask"),
        (tick(b"", flags=TRUNCATED), "malformed"),
        (tick(vector(math.nan, 0, 0)), "observation"),
        (tick(vector(0, math.inf, 0)), "observation"),
        (tick(vector(0, math.inf, -math.inf)), "observation"),
        (tick(vector(1, 2, 3), reward=math.nan), "reward"),
        (tick(vector(1, 2, 3), reward=math.inf), "reward"),
        (tick(vector(1, 2, 3), reward=1e20), "reward"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in dot")
def test_invalid_requests_are_refused_without_side_effects(body: bytes, error: str) -> None:
    recorded_seat, clean = RecordedSeat(tiny_policy(core="lstm"), 8), RecordedSeat(tiny_policy(core="lstm"), 8)

    async def play(recorded_seat: RecordedSeat, wrong: bool) -> list[Any]:
        game = await Game(recorded_seat).begin()
        answers = []
        for n in range(5):
            if wrong and n:
                assert await game.tick(body) == (422, error)
            answers.append(await game.tick(tick(vector(n, -n, 0.5), reward=n and 1.0)))
        if wrong:
            over = b"" if error == "action_mask" else (422, error)  # at the end nobody asks for another action
            assert await game.end(body or b"?") == over
            if over == b"":
                return answers
        assert await game.end(tick(b"", 2.0, TERMINATED)) == b""
        return answers

    assert run(play(recorded_seat, True)) == run(play(clean, False))
    if error != "action_mask":
        same(recorded_seat.segments(), clean.segments())


def test_a_reward_before_any_action_is_refused() -> None:
    async def play() -> None:
        game = await Game(RecordedSeat(tiny_policy())).begin()
        assert await game.tick(tick(vector(0, 0, 0), reward=1.0)) == (422, "reward")
        assert await game.tick(tick(vector(0, 0, 0))) in [struct.pack("<q", n) for n in range(4)]
        assert await game.tick(tick(vector(0, 0, 0), reward=1.0)) in [struct.pack("<q", n) for n in range(4)]

    run(play())


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in dot")
def test_values_whose_sum_overflows_are_accepted() -> None:
    """The fast check of a vector is a sum; if it overflows, each value is checked."""
    form = RawCodec(OBSERVATION, ACTION)
    assert form.read(tick(vector(1, 2, 3))).plain
    large = form.read(tick(vector(3e38, 3e38, 0)))
    assert not large.plain
    np.testing.assert_array_equal(large.observation, np.array([3e38, 3e38, 0], np.float32))
    assert not form.read(tick(vector(math.inf, -math.inf, 0))).plain


def test_masks_are_obeyed_and_recorded() -> None:
    recorded_seat = RecordedSeat(tiny_policy(), 8)

    async def play() -> None:
        game = await Game(recorded_seat).begin()
        for n in range(4):
            only = bytes(int(option == n) for option in range(4))
            assert await game.tick(tick(vector(1, 2, 3), 0.0, MASKED, only)) == struct.pack("<q", n)
        await game.end(tick(b"", 1.0, TERMINATED))

    run(play())
    (segment,) = recorded_seat.segments()
    np.testing.assert_array_equal(segment.action_mask[:4, 0], np.eye(4, dtype=bool))


def test_a_terminated_step_needs_no_observation_and_the_next_begins_anew() -> None:
    recorded_seat = RecordedSeat(tiny_policy(core="lstm"), 8)

    async def play() -> list[Any]:
        game = await Game(recorded_seat).begin()
        first = [await game.tick(tick(vector(n, 0, 1))) for n in range(3)]
        assert await game.tick(tick(b"", 5.0, TERMINATED)) == b""
        second = [await game.tick(tick(vector(n, 0, 1))) for n in range(3)]
        assert await game.tick(tick(vector(9, 9, 9), 5.0, TRUNCATED)) == b""
        assert await game.end() == b""
        return [first, second]

    first, second = run(play())
    assert first == second
    one, two = recorded_seat.segments()
    assert (bool(one.terminated[2, 0]), bool(one.truncated[2, 0])) == (True, False)
    assert (bool(two.terminated[2, 0]), bool(two.truncated[2, 0])) == (False, True)
    np.testing.assert_array_equal(two.observation[3, 0], [9, 9, 9])


def test_an_empty_end_leaves_the_last_step_out() -> None:
    recorded_seat = RecordedSeat(tiny_policy(), 8)

    async def play() -> None:
        game = await Game(recorded_seat).begin()
        for n in range(3):
            await game.tick(tick(vector(n, 0, 1)))
        assert await game.end() == b""

    run(play())
    (segment,) = recorded_seat.segments()
    assert segment.valid[:3, 0].tolist() == [True, True, False]


def test_the_mask_of_a_space_without_options_is_empty() -> None:
    async def play() -> None:
        game = await Game(RecordedSeat(tiny_policy(action=ACTIONS["box"]))).begin()
        assert await game.tick(tick(vector(1, 2, 3), 0.0, MASKED, b"\1")) == (422, "malformed")
        assert await game.tick(tick(vector(1, 2, 3), 0.0, MASKED)) == await game.tick(tick(vector(1, 2, 3)))

    run(play())


@pytest.mark.parametrize("seen", ["choice", "choices", "bits"])
def test_categories_out_of_range_are_refused(seen: str) -> None:
    space = OBSERVATIONS[seen]
    low: list[Any] = {"choice": [-3, 3], "choices": [[3, 0], [0, -1]], "bits": [[2, 0, 0, 0], [0, 0, 0, -1]]}[seen]  # type: ignore[assignment]

    async def play() -> None:
        game = await Game(RecordedSeat(tiny_policy(space))).begin()
        for wrong in low:
            assert await game.tick(tick(laid_out(space, wrong))) == (422, "observation")
        assert isinstance(await game.tick(tick(laid_out(space, space.sample()))), bytes)

    run(play())


def test_several_seats_cannot_be_raw() -> None:
    recorded_seat = RecordedSeat(tiny_policy())
    actor = BuiltinActor({"blue": recorded_seat.seat, "red": recorded_seat.seat})
    with pytest.raises(Refused) as refused:
        run(actor.start("s", b'{"format": "raw"}'))
    assert (refused.value.status, refused.value.error) == (422, "format")
    assert run(actor.start("s", b'{"format": "json"}')) == b""


@pytest.mark.parametrize("body", [b'{"format": "xml"}', b'{"format": 3}', b'{"format": null}', b'{"format": ["raw"]}'])
def test_other_formats_are_refused(body: bytes) -> None:
    with pytest.raises(Refused) as refused:
        run(BuiltinActor({"": RecordedSeat(tiny_policy()).seat}).start("s", body))
    assert (refused.value.status, refused.value.error) == (422, "format")


@pytest.mark.parametrize("body", [b"", b"hello", b'{"map": "desert"}', b'{"format": "json"}', b"\x81\xa6format\xa7msgpack"])
def test_the_body_of_start_is_free_form(body: bytes) -> None:
    actor = BuiltinActor({"": RecordedSeat(tiny_policy()).seat})

    async def play() -> dict[str, Any]:
        assert await actor.start("s", body) == b""
        answer: dict[str, Any] = json.loads(await actor.tick(b'{"observation": [0, 0, 0]}'))
        return answer

    assert set(run(play())) == {"action"}


def test_msgpack_may_ask_for_raw_too() -> None:
    async def play() -> Any:
        actor = BuiltinActor({"": RecordedSeat(tiny_policy()).seat})
        await actor.start("s", b"\x81\xa6format\xa3raw")
        return await actor.tick(tick(vector(0, 0, 0)))

    assert len(run(play())) == 8


@settings(max_examples=60)
@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_only_refused(body: bytes) -> None:
    async def play() -> None:
        game = await Game(RecordedSeat(tiny_policy())).begin()
        try:
            answer = await game.tick(body)
        except EnvironmentFault:  # finite numbers that drown the network
            return
        assert answer[0] == 422 or len(answer) in (0, 8)

    run(play())
