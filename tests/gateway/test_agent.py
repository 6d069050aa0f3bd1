from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from ludus.errors import EnvironmentFault, Refused
from ludus.gateway.actor import Actor
from ludus.gateway.agent import Seat, SeatAgent
from ludus.gateway.sessions import SessionLimits, SessionTable
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.protocol.spec import DEFAULT_OPTIONS, START, TICK
from ludus.protocol.step_message import parse_reward
from tests.gateway.scripted import ACTION, OBSERVATION, RecordedSeat, run, tiny_policy
from tests.tools import network_of

SEEN = [0.5, -1.0, 2.0]


def refused(error: str, call: Callable[[], Any]) -> str:
    with pytest.raises(Refused) as caught:
        call()
    assert (caught.value.status, caught.value.error) == (422, error)
    assert caught.value.hint
    return caught.value.message


# -- what a game may say ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, 1, -2.5, 10**15, np.float32(0.5), np.float64(-3), np.int64(7), np.uint8(1), Fraction(1, 4)])
def test_a_reward_is_any_real_number(given: Any) -> None:
    assert parse_reward(given) == float(given)


@pytest.mark.parametrize(
    "given",
    [
        *(math.nan, math.inf, -math.inf, np.float32(np.nan), np.float32(np.inf)),
        *(1e16, -1e300, 10**400, -(10**4000)),  # in the float32 of a segment these would be infinite, or nearly
        *(True, False, np.bool_(True), None, "1", "", b"1", [1], (1,), {}, {"a": 1}, 1j, np.array([1.0]), object()),
    ],
    ids=lambda given: repr(given)[:20],
)
def test_an_invalid_reward_is_refused_and_quoted(given: Any) -> None:
    message = refused("reward", lambda: parse_reward(given))
    assert len(message) < 120


def test_an_error_message_does_not_quote_megabytes() -> None:
    seat = RecordedSeat(tiny_policy()).seat
    assert len(refused("reward", lambda: parse_reward("x" * 1_000_000))) < 500
    assert len(refused("observation", lambda: seat.observation({"k" * 1_000_000: 1}))) < 500
    assert len(refused("action_mask", lambda: seat.mask({"k" * 1_000_000: 1}))) < 500


def test_an_observation_of_another_shape_is_refused_with_both() -> None:
    message = refused("observation", lambda: RecordedSeat(tiny_policy()).seat.observation([1, 2]))
    assert "shape [2]" in message
    assert "float32[3]" in message


@pytest.mark.parametrize(
    "mask",
    [
        *([1, 1, 1], [1] * 5, [], 1, "1111", b"\x01\x01\x00", b"\x01\x02\x00\x00", True),
        *(["a", "b", "", "d"], [1, None, 1, 1], [None] * 4, [1, 0, math.nan, 0], [0.5, 1, 1, 1]),
        *([0, -1e9, 0, 0], [2, 1, 1, 1], [10**30, 1, 1, 1], [1, [1, 1], 1], {"move": [1, 1, 1, 1]}, object()),
    ],
    ids=lambda mask: "object" if type(mask) is object else repr(mask),
)
def test_an_invalid_mask_is_refused(mask: Any) -> None:
    refused("action_mask", lambda: RecordedSeat(tiny_policy()).seat.mask(mask))


@pytest.mark.parametrize("mask", [[0, 0, 0, 0], [False] * 4, np.zeros(4, np.int8), [0.0] * 4], ids=repr)
def test_a_mask_that_forbids_everything_is_refused(mask: Any) -> None:
    assert "options 0 to 3" in refused("action_mask", lambda: RecordedSeat(tiny_policy()).seat.mask(mask))


@pytest.mark.parametrize("mask", [[1, 0, 1, 0], [True, False, True, False], [1.0, 0.0, 1, 0], np.array([1, 0, 1, 0], np.int8)])
def test_masks_are_zeros_and_ones_of_any_kind(mask: Any) -> None:
    allowed = RecordedSeat(tiny_policy()).seat.mask(mask)
    assert allowed is not None
    assert allowed.tolist() == [True, False, True, False]


HYBRID = gym.spaces.Dict({"fire": gym.spaces.Discrete(2), "move": gym.spaces.Discrete(2), "aim": gym.spaces.Box(-1, 1, (1,))})


def test_a_misspelt_part_of_a_mask_is_refused_and_not_taken_for_another() -> None:
    seat = RecordedSeat(tiny_policy(action=HYBRID)).seat
    allowed = seat.mask({"fire": [1, 0], "move": [0, 1], "aim": None})
    assert allowed is not None
    assert allowed.tolist() == [True, False, False, True]
    assert "'mvoe'" in refused("action_mask", lambda: seat.mask({"fire": [1, 0], "mvoe": [0, 1]}))


def test_each_choice_of_an_action_needs_an_option() -> None:
    seat = RecordedSeat(tiny_policy(action=HYBRID)).seat
    assert "options 2 to 3" in refused("action_mask", lambda: seat.mask({"fire": [1, 0], "move": [0, 0]}))


# -- one seat of one session --------------------------------------------------------------------------------------------


def test_rewards_between_two_actions_add_up_and_belong_to_the_first() -> None:
    recorded_seat = RecordedSeat(tiny_policy())

    async def play() -> None:
        agent = SeatAgent(recorded_seat.seat)
        await agent.act(SEEN)
        agent.reward(1)
        agent.reward(0.25)
        await agent.act(SEEN, reward=0.5)
        await agent.act(SEEN, reward=-3)
        agent.reward(7)
        await agent.finish(terminated=True, reward=0.5)

    run(play())
    (segment,) = recorded_seat.segments()
    assert segment.reward[:3, 0].tolist() == [1.75, -3, 7.5]


def test_a_reward_before_any_action_is_refused_unless_it_is_zero() -> None:
    async def play() -> None:
        agent = SeatAgent(RecordedSeat(tiny_policy()).seat)
        agent.reward(0)
        agent.reward(0.0)
        refused("reward", lambda: agent.reward(1))
        await agent.act(SEEN)
        agent.reward(1)
        await agent.finish(terminated=True)
        assert not agent.playing
        refused("reward", lambda: agent.reward(1))
        refused("reward", lambda: agent.finish(terminated=True, reward=1))
        await agent.finish(terminated=True)

    run(play())


@pytest.mark.parametrize(
    ("observation", "mask", "reward", "error"),
    [
        ([1, 2], None, 1.0, "observation"),
        (SEEN, [0, 0, 0, 0], 1.0, "action_mask"),
        (SEEN, None, math.nan, "reward"),
    ],
)
def test_a_request_that_is_refused_changes_nothing_and_may_be_sent_again(
    observation: Any, mask: Any, reward: float, error: str
) -> None:
    """A recurrent model would notice a step that was made twice."""
    recorded_seat = RecordedSeat(tiny_policy(core="lstm"), 8)

    async def play(wrong: bool) -> None:
        agent = SeatAgent(recorded_seat.seat)
        for number in range(4):
            if wrong:
                with pytest.raises(Refused) as caught:
                    await agent.act(observation, mask, reward if number else math.nan)
                assert caught.value.error in (error, "reward")
            await agent.act([number, 0, 1], [1, 1, 0, 1], reward=float(number))
        if wrong:
            refused("observation", lambda: agent.finish(truncated=True, observation=["x"], reward=5))
            refused("reward", lambda: agent.finish(truncated=True, observation=SEEN, reward=math.inf))
        await agent.finish(truncated=True, observation=SEEN)

    async def both() -> None:
        await play(wrong=False)
        await play(wrong=True)

    run(both())
    right, same = recorded_seat.segments()
    for name in ("observation", "action", "reward", "valid", "first", "log_prob", "value", "action_mask", "truncated"):
        np.testing.assert_array_equal(getattr(right, name), getattr(same, name), err_msg=name)
    np.testing.assert_array_equal(right.state[0], same.state[0])
    assert right.reward[:4, 0].tolist() == [1, 2, 3, 0]


def test_the_observation_may_be_changed_by_its_owner_after_acting() -> None:
    recorded_seat = RecordedSeat(tiny_policy())

    async def play() -> None:
        agent, seen = SeatAgent(recorded_seat.seat), np.zeros(3, np.float32)
        for number in range(3):
            seen[:] = number
            waiting = asyncio.ensure_future(agent.act(seen))
            await asyncio.sleep(0)
            seen[:] = 99
            await waiting
        await agent.finish(terminated=True)

    run(play())
    (segment,) = recorded_seat.segments()
    assert segment.observation[:3, 0, 0].tolist() == [0, 1, 2]


def test_without_a_memory_the_actions_are_the_same_and_nothing_is_recorded() -> None:
    async def actions(seat: Seat) -> list[int]:
        agent, random = SeatAgent(seat), np.random.default_rng(0)
        taken = []
        for number in range(30):
            taken.append(int(await agent.act(random.normal(size=3), reward=float(number % 10 > 0))))
            if number % 10 == 9:
                await agent.finish(truncated=True, observation=SEEN)
        agent.break_off()
        return taken

    async def both() -> None:
        recorded_seat = RecordedSeat(tiny_policy(core="gru"))
        silent = Seat(recorded_seat.deciding)
        assert await actions(silent) == await actions(recorded_seat.seat)
        assert silent.stats.discarded == 0

    run(both())


def test_breaking_off_after_finish_loses_nothing() -> None:
    """As an actor that breaks off every agent at its end."""
    recorded_seat = RecordedSeat(tiny_policy())

    async def play() -> None:
        agent = SeatAgent(recorded_seat.seat)
        await agent.act(SEEN)
        agent.reward(1)
        finished = agent.finish(truncated=True, observation=SEEN)
        agent.break_off()
        await finished

    run(play())
    (segment,) = recorded_seat.segments()
    assert segment.steps == 1
    assert segment.truncated[0, 0]
    assert recorded_seat.seat.stats.discarded == 0


# -- models that fail ---------------------------------------------------------------------------------------------------


class Failing(Policy):
    """Fails for observations that begin with 13."""

    def step(self, observation: Any, *args: Any) -> Any:
        if (observation[:, 0] == 13).any():
            raise ZeroDivisionError("thirteen")
        return super().step(observation, *args)


def test_a_model_that_fails_at_the_last_observation_costs_the_last_step_only() -> None:
    recorded_seat = RecordedSeat(Failing(OBSERVATION, ACTION))

    async def play() -> None:
        agent = SeatAgent(recorded_seat.seat)
        await agent.act(SEEN)
        await agent.act(SEEN, reward=1)
        agent.finish(truncated=True, observation=[13, 0, 0])
        await agent.act(SEEN)  # another episode, which has nothing to do with it
        await agent.finish(terminated=True)

    run(play())
    cut, whole = recorded_seat.segments()
    assert (cut.steps, cut.reward[0, 0], bool(cut.truncated[0, 0])) == (1, 1, True)
    assert (whole.steps, bool(whole.first[0, 0])) == (1, True)
    assert recorded_seat.seat.stats.discarded == 1


def test_a_failing_model_raises_in_the_caller_and_records_nothing() -> None:
    recorded_seat = RecordedSeat(Failing(OBSERVATION, ACTION))

    async def play() -> None:
        agent = SeatAgent(recorded_seat.seat)
        await agent.act(SEEN)
        with pytest.raises(ZeroDivisionError):
            await agent.act([13, 0, 0], reward=1)
        agent.break_off()

    run(play())
    assert recorded_seat.segments() == []
    assert recorded_seat.seat.stats.discarded == 1


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_finite_observations_that_overflow_the_network_are_not_recorded(activation: str) -> None:
    policy = Policy(gym.spaces.Box(-np.inf, np.inf, (3,)), ACTION, NetworkConfig(fcnet_activation=activation))
    with torch.no_grad():
        network_of(policy).value_head.bias.add_(1.0)
    recorded_seat = RecordedSeat(policy)

    async def play() -> None:
        for seen in ([3e38, 3e38, -3e38], [3.4e38, 3.4e38, 3.4e38], [-3e38, 3e38, 3e38]):
            agent = SeatAgent(recorded_seat.seat)
            await agent.act(SEEN)
            with contextlib.suppress(EnvironmentFault):
                await agent.act(seen, reward=1)
                agent.finish(truncated=True, observation=seen)
            agent.break_off()

    run(play())
    for segment in recorded_seat.segments():
        for name in ("value", "log_prob", "reward"):
            assert (np.abs(getattr(segment, name)) <= 1e15).all(), name
    if activation == "relu":
        assert recorded_seat.seat.stats.discarded == 3


def test_a_last_observation_that_overflows_the_network_costs_the_last_step() -> None:
    recorded_seat = RecordedSeat(Policy(gym.spaces.Box(-np.inf, np.inf, (3,)), ACTION, NetworkConfig(fcnet_activation="relu")))

    async def play() -> None:
        agent = SeatAgent(recorded_seat.seat)
        await agent.act(SEEN)
        await agent.act(SEEN, reward=1)
        await agent.finish(truncated=True, observation=[3e38, 3e38, 3e38])

    run(play())
    (segment,) = recorded_seat.segments()
    assert segment.steps == 1
    assert np.isfinite(segment.value).all()
    assert recorded_seat.seat.stats.discarded == 1


# -- inside sessions ----------------------------------------------------------------------------------------------------


class Truncating(Actor):
    """Every tick ends an episode, does not wait for that, and begins the next."""

    def __init__(self, seat: Seat) -> None:
        self.agent = SeatAgent(seat)

    async def tick(self, body: bytes) -> bytes:
        if self.agent.playing:
            self.agent.finish(truncated=True, observation=SEEN)
        return bytes([int(await self.agent.act(SEEN))])


class Answers:
    def __init__(self) -> None:
        self.statuses: list[int] = []

    def reply(self, status: int, body: bytes, retry_after_s: float | None = None) -> None:
        self.statuses.append(status)


def test_an_episode_is_closed_before_the_next_begins_however_full_the_batches_are() -> None:
    """A session's tick resumes as soon as its batch is done, before other callbacks run."""
    recorded_seat = RecordedSeat(tiny_policy(), steps=4, max_batch_size=2)
    ticks, sessions = 20, 3

    async def play() -> list[int]:
        answers = Answers()
        loop = asyncio.get_running_loop()
        live = SessionTable(lambda: Truncating(recorded_seat.seat), SessionLimits(), loop)
        for i in range(sessions):
            live.handle(START, b"%d" % i, -1, DEFAULT_OPTIONS, b"", answers)
        while len(answers.statuses) < sessions:
            await asyncio.sleep(0)
        for tick in range(ticks):

            def all_of_them() -> None:
                for i in range(sessions):
                    live.handle(TICK, b"%d" % i, -1, DEFAULT_OPTIONS, b"", answers)

            loop.call_soon(all_of_them)
            while len(answers.statuses) < sessions * (tick + 2):
                await asyncio.sleep(0)
        await live.close()
        return answers.statuses

    assert run(play()) == [200] * sessions * (ticks + 1)
    recorded = recorded_seat.segments()
    assert len(recorded) == sessions * (ticks - 1)
    for segment in recorded:
        assert segment.steps == 1
        assert segment.truncated[0, 0]
        assert segment.first[0, 0]
        assert segment.episode_length.tolist() == [1]
