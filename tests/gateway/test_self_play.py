"""Sessions of two-sided games in self-play: who learns, who is recorded, and which version plays the other side."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from ludus.config.schema import SelfPlayConfig
from ludus.errors import Refused
from ludus.gateway.builtin_actor import SelfPlayActor, SelfPlaySeats
from ludus.protocol.spec import StartOptions
from ludus.sampling.session_opponents import SessionOpponents, SessionResult
from tests.gateway.scripted import RecordedSeat, run, tiny_policy

LEFT = SessionResult(True, ([], []), frozenset())


class Table:
    """Sessions with actors, without HTTP."""

    def __init__(self, *, seats: tuple[str, ...] = ("",), seed: int = 0, core: str | None = None, **settings: Any) -> None:
        self.recorded = RecordedSeat(tiny_policy(core=core))
        config = SelfPlayConfig(**{"opponents": "past", "every": 1, "period": 1, **settings})
        self.opponents = SessionOpponents(config, self.recorded.deciding, self.recorded.versions, seed, deterministic=True)
        self._seats = dict.fromkeys(seats, self.recorded.seat)
        self.self_play = SelfPlaySeats(self._seats, config, self.opponents)

    async def session(self, name: str, match: str = "", side: str = "", body: bytes = b"") -> SelfPlayActor:
        actor = SelfPlayActor(self._seats, self.self_play)
        actor.match, actor.about = match, StartOptions(match=match, side=side)
        await actor.start(name, body)
        return actor

    async def renewed(self, times: int = 1) -> None:
        """New versions of the policy, each of which begins matches."""
        for _ in range(times):
            self.recorded.versions.renew()
            await (passing := await self.session("s", f"passing-{self.recorded.versions.version}", "0")).end(b"")
            del passing

    def action_of(self, version: int, observation: list[float]) -> int:
        policy = self.recorded.versions.known[version]
        return int(policy.act(np.array([observation], np.float32)).action[0])


async def ticked(actor: SelfPlayActor, observation: list[float], **more: Any) -> Any:
    return json.loads(await actor.tick(json.dumps({"observation": observation, **more}).encode()))["action"]


def learning_sides(table: Table, matches: int) -> list[int]:
    sides = []
    for number in range(matches):
        sides.append(table.opponents.join(f"m{number}")[0])
        table.opponents.leave(f"m{number}", LEFT)
    return sides


def test_one_side_of_a_match_is_recorded() -> None:
    async def play() -> None:
        table = Table()
        for number in range(20):
            both = [await table.session(f"{number}-{side}", f"m{number}", str(side)) for side in (0, 1)]
            for side, actor in enumerate(both):
                await ticked(actor, [number / 10, side, 0])
                await ticked(actor, [number / 10, side, 1], reward=side + 1)
            for actor in both:
                await actor.end(b'{"reward": 1, "terminated": true}')
        segments = table.recorded.segments()
        played = Counter((round(10 * s.observation[0, 0, 0]), int(s.observation[0, 0, 1])) for s in segments)
        assert sorted(number for number, _ in played) == list(range(20)), "each match once"
        assert {side for _, side in played} == {0, 1}
        assert all(segment.reward[0, 0] == segment.observation[0, 0, 1] + 1 for segment in segments)
        assert table.self_play.opponent_sessions == 20
        assert table.opponents.versions() == {}

    run(play())


def test_a_match_keeps_its_opponent_while_versions_change() -> None:
    async def play() -> None:
        table = Table(window=50)
        await table.renewed(12)
        observations = np.random.default_rng(0).uniform(-2, 2, (12, 3)).tolist()
        kept = set()
        for number in range(12):
            learning, _ = table.opponents.join(f"m{number}")
            opponent = await table.session(f"o{number}", f"m{number}", str(1 - learning))
            version = table.opponents.versions()[f"m{number}"]
            assert version is not None
            for observation in observations:
                if table.recorded.versions.version % 3 == 0:
                    await table.renewed()
                assert await ticked(opponent, observation) == table.action_of(version, observation)
                table.recorded.versions.renew()
            kept.add(version)
            assert table.opponents.versions()[f"m{number}"] == version
            await opponent.end(b"")
        assert len(kept) > 3
        assert table.recorded.segments() == []
        assert len(table.opponents._playing) <= 8

    run(play())


def test_the_newest_version_plays_the_other_side_unrecorded() -> None:
    async def play() -> None:
        table = Table(opponents="latest")
        learning, _ = table.opponents.join("m")
        actor = await table.session("s", "m", str(1 - learning))
        for number in range(20):
            observation = [number / 5 - 2, 1.0, -number / 7]
            assert await ticked(actor, observation) == table.action_of(table.recorded.versions.version, observation)
            table.recorded.versions.renew()
        await actor.end(b'{"reward": 1}')
        assert table.recorded.segments() == []

    run(play())


def test_recurrent_opponents_have_a_state_per_session() -> None:
    async def play() -> None:
        table = Table(core="lstm")
        learning, _ = table.opponents.join("m")
        sessions = [await table.session(f"s{i}", "m", str(1 - learning)) for i in range(2)]
        version = table.opponents.versions()["m"]
        assert version is not None
        policy = table.recorded.versions.known[version]
        states = [tuple(part.numpy() for part in policy.initial_state(1)) for _ in sessions]
        random = np.random.default_rng(3)
        for t in range(30):
            for i, actor in enumerate(sessions[: 1 + t % 2]):
                observation = random.uniform(-2, 2, 3).astype(np.float32)
                expected = policy.act(observation[None], states[i])
                states[i] = expected.state
                assert await ticked(actor, observation.tolist()) == expected.action[0]

    run(play())


def test_raw_sessions_are_played_by_the_opponent_too() -> None:
    async def play() -> None:
        table = Table()
        actors = [await table.session(f"s{side}", "m", str(side), b'{"format": "raw"}') for side in (0, 1)]
        tick = np.zeros(2, np.float32).tobytes() + np.array([0.5, 1, 2], np.float32).tobytes()
        for actor in actors:
            for _ in range(3):
                assert len(await actor.tick(tick)) == 8
            await actor.end(np.array([1], np.float32).tobytes() + np.array([1], np.uint32).tobytes())
        (segment,) = table.recorded.segments()
        assert int(segment.valid.sum()) == 3
        assert table.opponents.versions() == {}

    run(play())


def test_processes_agree_on_the_side_that_learns() -> None:
    sides = learning_sides(Table(seed=7), 400)
    assert learning_sides(Table(seed=7, opponents="mix", latest=0.5), 400) == sides
    assert learning_sides(Table(seed=8), 400) != sides
    assert abs(sum(sides) - 200) < 40
    assert learning_sides(Table(swap_sides=False), 20) == [0] * 20


def test_a_mix_has_its_share_of_the_newest_version() -> None:
    table = Table(opponents="mix", latest=0.7)
    kinds = []
    for number in range(500):
        table.opponents.join(f"m{number}")
        kinds.append(table.opponents.versions()[f"m{number}"] is None)
        table.opponents.leave(f"m{number}", LEFT)
    assert abs(np.mean(kinds) - 0.7) < 0.08


def test_the_seats_of_a_session_can_be_the_sides() -> None:
    async def play() -> None:
        table = Table(seats=("blue", "red"))
        sides = set()
        for number in range(12):
            actor = await table.session(f"s{number}")
            seats = {"blue": {"observation": [0, 0, number]}, "red": {"observation": [1, 0, number]}}
            reply = json.loads(await actor.tick(json.dumps({"seats": seats}).encode()))
            assert reply["actions"].keys() == {"blue", "red"}
            await actor.end(b'{"seats": {"blue": {"reward": 1}, "red": {"reward": -1}}}')
            (segment,) = table.recorded.segments()
            side = float(segment.observation[0, 0, 0])
            assert segment.reward[0, 0] == (1, -1)[int(side)]
            sides.add(side)
        assert sides == {0.0, 1.0}

    run(play())


def test_sessions_without_a_side_learn(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        table = Table()
        for match in ("", "m"):
            actor = await table.session("s", match)
            await ticked(actor, [0, 0, 0])
            await actor.end(b'{"reward": 1}')
        assert len(table.recorded.segments()) == 2

    run(play())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Ludus-Side" in caplog.text


@pytest.mark.parametrize(
    ("match", "side", "error"), [("m", "2", "side"), ("m", "green", "side"), ("", "0", "match"), ("", "blue", "match")]
)
def test_an_unknown_side_is_refused(match: str, side: str, error: str) -> None:
    table = Table(sides=[["blue"], ["red"]])
    with pytest.raises(Refused) as caught:
        run(table.session("s", match, side))
    assert (caught.value.status, caught.value.error) == (422, error)
    assert table.opponents.versions() == {}


def test_sides_have_the_names_of_the_config() -> None:
    async def play() -> None:
        table = Table(sides=[["blue", "navy"], ["red"]], swap_sides=False)
        for number, side in enumerate(["blue", "navy", "red", "0", "1"]):
            actor = await table.session("s", "m", side)
            await ticked(actor, [number, 0, 0])
            await actor.end(b'{"reward": 1}')
        assert [float(segment.observation[0, 0, 0]) for segment in table.recorded.segments()] == [0, 1, 3]

    run(play())


def test_a_refused_end_does_not_end_the_match() -> None:
    async def play() -> None:
        table = Table()
        actor = await table.session("s", "m", "0")
        await ticked(actor, [0, 0, 0])
        with pytest.raises(Refused):
            await actor.end(b'{"rewad": 1}')
        assert table.opponents.versions().keys() == {"m"}
        await actor.end(b'{"reward": 1}')
        assert table.opponents.versions() == {}

    run(play())
