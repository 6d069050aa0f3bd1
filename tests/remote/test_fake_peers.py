"""The fake actor and the fake game: against each other, and against real peers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import gymnasium as gym
import msgpack
import numpy as np
import pytest

from ludus.errors import ConfigError, Refused, Unreachable
from ludus.gateway.actor import Actor
from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor
from ludus.gateway.server import GatewaySettings
from ludus.models.inference.batched_policy import Decision
from ludus.protocol.client import Client
from ludus.protocol.codec import SeatSpaces, seats_to_spec
from ludus.protocol.conformance import Conformance
from ludus.protocol.spec import TICK
from ludus.remote.fake_peers import FakeActor, FakeGamecore, LatencyQuantiles, SpacesScript, Traffic
from tests.local_servers import gateway

Box, Discrete = gym.spaces.Box, gym.spaces.Discrete
HYBRID = gym.spaces.Dict({"move": Box(-1, 1, (2,), np.float32), "fire": Discrete(2)})
ONE = {"": SeatSpaces(gym.spaces.Dict({"pos": Box(-1, 1, (3,), np.float32), "kind": Discrete(4)}), HYBRID)}
TWO = {"blue": SeatSpaces(Box(-1, 1, (2,), np.float32), Discrete(3)), "red": SeatSpaces(Discrete(5), Box(0, 1, (2,), np.float32))}


class Drawing:
    """A decider without a network: whatever is seen, the action is drawn from the space."""

    def __init__(self, spaces: SeatSpaces) -> None:
        self.policy = cast(
            Any, SimpleNamespace(observation_space=spaces.observation, action_space=spaces.action, state_spec=lambda: ())
        )

    def decide(self, observation: Any, state: Any = None, mask: Any = None, temperature: Any = None) -> asyncio.Future[Decision]:
        action = self.policy.action_space.sample()
        decided: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        decided.set_result(Decision(action, action, 0.0, 0.0, (), 1))
        return decided


def builtin(seats: Mapping[str, SeatSpaces]) -> dict[str, Seat]:
    return {name: Seat(Drawing(spaces)) for name, spaces in seats.items()}


# -- the actor


def test_the_fake_actor_answers_constants() -> None:
    traffic = Traffic()
    with gateway(lambda: FakeActor(b"left", b"bye", traffic)) as served, Client(served.url) as client:
        assert client.start("a", b"1234") == b""
        assert [client.tick("a", b"12"), client.tick("a", b"")] == [b"left", b"left"]
        assert client.end("a", b"123") == b"bye"
    assert list(traffic.counts) == [4, 9, 11]


def test_its_returns_have_the_names_and_values_that_games_know() -> None:
    config: dict[str, Any] = {
        "fake_actor_tick_return": b"fake_actor_tick_return",
        "fake_actor_end_return": b"fake_actor_end_return",
    }
    for actor in (FakeActor(), FakeActor(**config)):
        assert asyncio.run(actor.tick(b"x")) == b"fake_actor_tick_return"
        assert asyncio.run(actor.end(b"x")) == b"fake_actor_end_return"


def test_sessions_that_break_off_are_not_counted_as_requests() -> None:
    traffic = Traffic()
    with gateway(lambda: FakeActor(traffic=traffic)) as served, Client(served.url) as client:
        client.start("a")
    assert list(traffic.counts) == [1, 0, 0]


def test_both_are_imported_without_torch() -> None:
    code = "import sys; from ludus.remote.fake_peers import FakeActor, FakeGamecore; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# -- the game


def test_every_game_plays_its_matches() -> None:
    traffic = Traffic()
    with gateway(lambda: FakeActor(b"left", b"bye", traffic)) as served:
        stats = FakeGamecore(served.url, games=4, ticks=5, body=b"12345678").run(matches=3)
        counters = served.gateway.counters()
    assert (stats.requests, stats.matches, stats.errors) == (4 * 3 * 7, 12, {})
    assert [stats.requests, stats.bytes_out, stats.bytes_in] == list(traffic.counts)
    assert stats.bytes_out == 4 * 3 * 5 * 8
    assert (counters["started"], counters["ended"], counters["sessions"]) == (12, 12, 0)


def test_a_body_may_depend_on_the_tick() -> None:
    heard: list[bytes] = []

    class Listening(FakeActor):
        async def tick(self, body: bytes) -> bytes:
            heard.append(body)
            return b""

    with gateway(Listening) as served:
        FakeGamecore(served.url, ticks=3, body=lambda number: b"tick %d" % number).run(matches=2)
    assert heard == [b"tick 0", b"tick 1", b"tick 2"] * 2


def test_a_body_that_raises_ends_it() -> None:
    def broken(number: int) -> bytes:
        raise ZeroDivisionError

    with gateway(FakeActor) as served, pytest.raises(ZeroDivisionError):
        FakeGamecore(served.url, games=2, body=broken).run(seconds=20)


def test_games_share_connections() -> None:
    most = [0]

    class Counting(FakeActor):
        async def tick(self, body: bytes) -> bytes:
            most[0] = max(most[0], served.gateway.counters()["connections"])
            return b""

    with gateway(Counting) as served:
        stats = FakeGamecore(served.url, games=10, ticks=5, connections=2).run(matches=2)
    assert (most[0], stats.matches, stats.errors) == (2, 20, {})


def test_when_time_is_up_every_match_is_ended() -> None:
    with gateway(FakeActor) as served:
        stats = FakeGamecore(served.url, games=5, ticks=1_000_000).run(seconds=0.2)
        counters = served.gateway.counters()
    assert stats.errors == {}
    assert (counters["started"], counters["ended"], counters["sessions"]) == (5, 5, 0)


def test_refusals_are_counted_by_their_word_and_the_next_match_begins() -> None:
    class Refusing(FakeActor):
        async def tick(self, body: bytes) -> bytes:
            raise Refused(422, "observation", "It does not fit.")

    with gateway(Refusing) as served:
        stats = FakeGamecore(served.url, games=2).run(matches=2)
    assert (stats.errors, stats.matches, stats.requests) == ({"observation": 4}, 0, 4)
    assert stats.example == "It does not fit."


def test_a_server_that_is_away_is_counted() -> None:
    stats = FakeGamecore("http://127.0.0.1:9", games=2, retries=0).run(matches=1)
    assert stats.errors == {"unreachable": 2}
    assert "127.0.0.1:9" in stats.example
    with pytest.raises(Unreachable):
        FakeGamecore("http://127.0.0.1:9", form="json", retries=0).run(matches=1)


# -- the game and the built-in actor


@pytest.mark.parametrize("form", ["json", "msgpack"])
@pytest.mark.parametrize("seats", [ONE, TWO], ids=["one seat", "two seats"])
def test_the_built_in_actor_takes_its_observations_and_it_the_actions(form: Any, seats: dict[str, SeatSpaces]) -> None:
    shared = builtin(seats)
    with gateway(lambda: BuiltinActor(shared), GatewaySettings(spec=seats_to_spec(seats))) as served:
        stats = FakeGamecore(served.url, games=3, ticks=70, form=form).run(matches=2)
    assert (stats.errors, stats.example) == ({}, "")
    assert (stats.requests, stats.matches) == (3 * 2 * 72, 6)


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        (b"left", "not json"),
        (b'"left"', "'action' alone"),
        (b"{}", "'action' alone"),
        (b'{"action": 1}', "keys"),
        (b'{"action": {"move": [0.5, 1.5], "fire": 1}}', "action.move[1] is 1.5"),
        (b'{"action": {"move": [0.5, 0.5], "fire": 2}}', "categories"),
        (b'{"action": {"move": [0.5, 0.5], "fire": null}}', "action.fire"),
    ],
)
def test_an_action_that_does_not_fit_is_an_error(reply: bytes, complaint: str) -> None:
    with gateway(lambda: FakeActor(reply), GatewaySettings(spec=seats_to_spec(ONE))) as served:
        stats = FakeGamecore(served.url, ticks=2, form="json").run(matches=1)
    assert stats.errors == {"action": 2}
    assert complaint in stats.example


def test_actions_must_be_for_the_seats() -> None:
    script = SpacesScript(seats_to_spec(TWO), "json")
    assert "seats" in script.find_error(b'{"actions": {"blue": 1}}')
    assert script.find_error(b'{"actions": {"blue": 1, "red": [0, 1]}}') == ""


def test_a_server_without_spaces_is_an_error() -> None:
    with gateway(FakeActor) as served, pytest.raises(ConfigError, match="No spaces"):
        FakeGamecore(served.url, form="json").run(matches=1)


FINE: dict[str, Any] = {"observation": {"pos": [0.5, 0, 0], "kind": 2}}


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"hello", b"[1]", b"{", b"\x81", b"\xde\x00\x01\xa1"),
        *(FINE, {"obs": 1}, {"reward": 0}, {}, FINE | {"reward": 1.0}, FINE | {"reward": 0}, FINE | {"reward": None}),
        *(FINE | {"reward": float("nan")}, FINE | {"reward": "1"}, FINE | {"reward": True}),
        *(FINE | {"terminated": 1}, FINE | {"truncated": "no"}, FINE | {"terminated": True}, {"truncated": True}),
        *({"observation": {"pos": [0.5, 0], "kind": 2}}, {"observation": {"pos": [0, 0, 9], "kind": 2}}),
        *({"observation": {"pos": [0, 0, float("inf")], "kind": 2}}, {"observation": {"pos": [0, 0, 0], "kind": 4}}),
        *(FINE | {"action_mask": [1, 1]}, FINE | {"action_mask": [0, 0]}, FINE | {"action_mask": [1]}),
        *(FINE | {"action_mask": {"fire": [0, 1]}}, FINE | {"action_mask": "x"}, {"seats": {"blue": FINE}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_the_check_refuses_what_the_built_in_actor_refuses_and_nothing_else(body: Any, form: Any) -> None:
    packed = msgpack.packb if form == "msgpack" else lambda message: json.dumps(message).encode()
    data = body if isinstance(body, bytes) else packed(body)
    judged = Conformance(form, ONE).check_body(TICK, b"a", data).refused

    async def asked() -> Refused | None:
        actor: Actor = BuiltinActor(builtin(ONE))
        try:
            await actor.tick(data)
        except Refused as refused:
            return refused
        return None

    real = asyncio.run(asked())
    assert (judged and (judged.status, judged.error)) == (real and (real.status, real.error))


def test_latencies_are_kept_within_two_per_cent() -> None:
    latencies = LatencyQuantiles()
    assert np.isnan(latencies.quantile(0.5))
    for milliseconds in range(1, 1001):
        latencies.add(milliseconds / 1e3)
    assert latencies.quantile(0.5) == pytest.approx(0.5, rel=0.02)
    assert latencies.quantile(0.99) == pytest.approx(0.99, rel=0.02)
    latencies.add(1e9)
    latencies.add(0.0)
    assert latencies.quantile(0.0) <= 1.02e-6
