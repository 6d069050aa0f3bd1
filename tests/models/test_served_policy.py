"""Policies of a served agent: the same actions as the agent itself, a session for every row, and servers that fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ludus.core.tree import map_tree
from ludus.errors import IncompatibleCheckpoint, Refused, Unreachable
from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor
from ludus.gateway.server import GatewaySettings
from ludus.models.inference.batched_policy import BatchedPolicy, decide_rows
from ludus.models.inference.served_policy import ServedAgent, ServedDecider, ServedPolicy
from ludus.models.policy import Policy
from ludus.models.weights.version_store import FixedSource
from ludus.protocol.codec import SeatSpaces, random_observation, seats_to_spec
from tests.gateway.scripted import ACTION, OBSERVATION, tiny_policy
from tests.local_servers import Served, gateway

NESTED = gym.spaces.Dict({"grid": gym.spaces.Box(0, 255, (2, 2), np.uint8), "unit": gym.spaces.Discrete(5)})
HYBRID = gym.spaces.Dict({"aim": gym.spaces.Box(-2, 2, (1,), np.float32), "door": gym.spaces.Discrete(3)})


@contextlib.contextmanager
def serve(policy: Policy, *names: str, token: str | None = None, refuse: list[int] | None = None) -> Iterator[Served]:
    """A server that takes the most probable actions. `refuse`: while it is not empty, ticks are refused with its first status."""
    seats = names or ("",)
    settings = GatewaySettings(
        token=token, spec=seats_to_spec(dict.fromkeys(seats, SeatSpaces(policy.observation_space, policy.action_space)))
    )
    deciding = BatchedPolicy(FixedSource(policy), deterministic=True)

    class Actor(BuiltinActor):
        async def tick(self, body: bytes) -> bytes:
            if refuse:
                raise Refused(refuse[0], "scripted", "This is a test.")
            return await super().tick(body)

    with gateway(lambda: Actor({name: Seat(deciding) for name in seats}), settings) as served:
        yield served


def game_of(policy: Policy) -> SeatSpaces:
    return SeatSpaces(policy.observation_space, policy.action_space)


@contextlib.contextmanager
def connect(url: str, policy: Policy, agents: tuple[str, ...] = (), **more: Any) -> Iterator[ServedAgent]:
    agent = ServedAgent(url, more.pop("token", None), game_of(policy), agents, **more)
    try:
        yield agent
    finally:
        agent.close()


def batch(space: gym.Space[Any], rows: int, random: np.random.Generator) -> Any:
    return map_tree(lambda *parts: np.stack(parts), *(_arrays(space, random) for _ in range(rows)))


def _arrays(space: gym.Space[Any], random: np.random.Generator) -> Any:
    drawn = random_observation(space, random)
    if isinstance(space, gym.spaces.Dict):
        return {key: np.asarray(drawn[key], space[key].dtype) for key in space}
    return np.asarray(drawn, space.dtype)


@pytest.mark.parametrize(
    ("observation", "action", "core"), [(OBSERVATION, ACTION, None), (OBSERVATION, ACTION, "lstm"), (NESTED, HYBRID, "gru")]
)
def test_actions_are_those_of_the_agent_and_rows_have_their_own_state(observation: Any, action: Any, core: str | None) -> None:
    policy, random = tiny_policy(observation, action, core=core), np.random.default_rng(0)
    with serve(policy) as served, connect(served.url, policy) as agent:
        far = agent.policies[""]
        states: dict[int, Any] = {}
        expected: dict[int, Any] = {}
        for step in range(12):
            rows = [row for row in range(5) if random.random() < 0.7 or step == 0]
            seen = batch(observation, len(rows), random)
            ones = [map_tree(lambda part: part[i], seen) for i in range(len(rows))]  # noqa: B023
            ours = decide_rows(policy, 1, ones, [expected.get(row) for row in rows], [None] * len(rows), None)
            theirs = decide_rows(far, 1, ones, [states.get(row) for row in rows], [None] * len(rows), None)
            for row, one, other in zip(rows, ours, theirs, strict=True):
                map_tree(np.testing.assert_allclose, one.action, other.action)
                expected[row], states[row] = one.state, other.state
                assert not other.lost
            if step == 6:  # another episode
                agent.end_episode(states.pop(0))
                expected.pop(0)
        assert len(served.gateway.sessions) == len(states)
    assert served.gateway.sessions.stats.ended == served.gateway.sessions.stats.started == 6


def test_masks_are_sent() -> None:
    policy, random = tiny_policy(), np.random.default_rng(0)
    with serve(policy) as served, connect(served.url, policy) as agent:
        for only in range(4):
            mask = np.zeros((3, 4), np.bool_)
            mask[:, only] = True
            assert agent.policies[""].act(batch(OBSERVATION, 3, random), mask=mask).action.tolist() == [only] * 3


def test_every_agent_is_played_by_its_seat() -> None:
    policy, seen = tiny_policy(), np.ones((2, 3), np.float32)
    with serve(policy, "red", "blue") as served:
        with connect(served.url, policy, ("blue",)) as agent:
            assert agent.policies.keys() == {"blue"}
            assert agent.policies["blue"].act(seen).action.tolist() == policy.act(seen).action.tolist()
        with connect(served.url, policy) as agent:
            assert agent.policies.keys() == {""}
            assert agent.policies[""].act(seen).action.tolist() == policy.act(seen).action.tolist()
        with pytest.raises(IncompatibleCheckpoint, match="no seat 'green'; its seats are red, blue"):
            ServedAgent(served.url, None, game_of(policy), ["green"])


def test_a_server_of_another_game_or_with_another_token_is_refused() -> None:
    policy = tiny_policy()
    with serve(policy, token="sesame sesame sesame") as served:
        with pytest.raises(Refused, match="token"):
            ServedAgent(served.url, None, game_of(policy))
        with connect(served.url, policy, token="sesame sesame sesame") as agent:
            assert agent.policies[""].act(np.ones((1, 3), np.float32)).lost is None
        for spaces in (SeatSpaces(OBSERVATION, gym.spaces.Discrete(5)), SeatSpaces(gym.spaces.Box(0, 1, (4,)), ACTION)):
            with pytest.raises(IncompatibleCheckpoint, match="cannot play this game"):
                ServedAgent(served.url, "sesame sesame sesame", spaces)
    with pytest.raises(Unreachable):
        ServedAgent("http://127.0.0.1:9", None, game_of(policy))


class Failures(list[tuple[str, bool]]):
    def __call__(self, reason: str, temporary: bool = False) -> None:
        self.append((reason, temporary))


def test_rows_of_a_server_that_is_gone_are_lost_once_and_new_ones_can_begin() -> None:
    policy, seen, failures = tiny_policy(), np.ones((4, 3), np.float32), Failures()
    with serve(policy) as served, connect(served.url, policy, on_failure=failures) as agent:
        far = agent.policies[""]
        before = far.act(seen)
        served.run(served.gateway.close())
        acted = far.act(seen[:2], tuple(part[:2] for part in before.state))
        assert acted.lost is not None
        assert acted.lost.all()
        assert all(action in range(4) for action in acted.action.tolist())
        assert [temporary for _, temporary in failures] == [True]
        assert served.url in failures[0][0]
        late = far.act(seen[2:], tuple(part[2:] for part in before.state))  # these rows did not act when the server went away
        assert late.lost is not None
        assert late.lost.all()
        assert len(failures) == 1, "nothing is sent in a session that is known to be lost"
        url = agent.url
    assert url.startswith("http://")


def test_a_session_that_its_server_has_lost_does_not_concern_the_others() -> None:
    policy, seen, failures = tiny_policy(), np.ones((3, 3), np.float32), Failures()
    with serve(policy) as served, connect(served.url, policy, on_failure=failures) as agent:
        far = agent.policies[""]
        state = far.act(seen).state
        served.run(_forget(served, far, state[0][1]))
        acted = far.act(seen, state)
        assert acted.lost is not None
        assert acted.lost.tolist() == [False, True, False]
        assert failures == []


async def _forget(served: Served, far: ServedPolicy, number: int) -> None:
    session = served.gateway.sessions.find(far.agent._name(int(number)).encode())
    assert session is not None
    session.abort("failed", Refused(500, "scripted", "This is a test."))


@pytest.mark.parametrize(("status", "temporary"), [(503, True), (422, False)])
def test_a_server_that_refuses_all_is_not_used_further(status: int, temporary: bool) -> None:
    policy, seen, failures, refuse = tiny_policy(), np.ones((2, 3), np.float32), Failures(), list[int]()
    with serve(policy, refuse=refuse) as served, connect(served.url, policy, on_failure=failures) as agent:
        far = agent.policies[""]
        state = far.act(seen).state
        refuse.append(status)
        acted = far.act(seen, state)
        assert acted.lost is not None
        assert acted.lost.all()
        assert [one for _, one in failures] == [temporary]
        refuse.clear()
        assert far.act(seen).lost is None


def test_a_server_whose_sessions_all_fail_counts_as_away() -> None:
    policy, seen, failures = tiny_policy(), np.ones((5, 3), np.float32), Failures()
    with serve(policy, refuse=[504]) as served, connect(served.url, policy, on_failure=failures) as agent:
        far = agent.policies[""]
        far.act(seen)
        assert failures == []
        far.act(seen)
        assert [temporary for _, temporary in failures] == [True]


def test_decisions_on_an_event_loop_are_sent_together() -> None:
    policy, random = tiny_policy(core="lstm"), np.random.default_rng(1)

    async def play(agent: ServedAgent) -> None:
        deciders = [ServedDecider(agent.policies[""]) for _ in range(20)]
        states: list[Any] = [None] * 20
        expected: list[Any] = [None] * 20
        for _ in range(5):
            seen = batch(OBSERVATION, 20, random)
            decisions = await asyncio.gather(*(decider.decide(seen[i], states[i]) for i, decider in enumerate(deciders)))
            ours = decide_rows(policy, 1, list(seen), expected, [None] * 20, None)
            assert [int(one.action) for one in decisions] == [int(one.action) for one in ours]
            states, expected = [one.state for one in decisions], [one.state for one in ours]
        for decider in deciders:
            decider.close()

    with serve(policy) as served, connect(served.url, policy) as agent:
        asyncio.run(play(agent))
        agent.ask([])
        assert len(served.gateway.sessions) == 0


def test_a_decision_without_an_answer_gives_the_match_up() -> None:
    policy, failures = tiny_policy(), Failures()

    async def play(agent: ServedAgent) -> None:
        decider = ServedDecider(agent.policies[""])
        with pytest.raises(Refused, match="does not answer") as caught:
            await decider.decide(np.ones(3, np.float32))
        assert caught.value.status == 410
        assert decider.lost

    with serve(policy) as served, connect(served.url, policy, on_failure=failures) as agent:
        served.run(served.gateway.close())
        asyncio.run(play(agent))
    assert [temporary for _, temporary in failures] == [True]
