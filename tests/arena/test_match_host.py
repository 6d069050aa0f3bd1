"""The Arena's game process with real gateways and sockets, and correct and faulty actors."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import msgpack
import numpy as np
import pytest

from ludus.core.spaces import ACTION_MASK
from ludus.errors import ConfigError, NotFound, Refused, UsageError
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.engine.layout import options_of
from ludus.games.arena.engine.recording import read_recording, verify
from ludus.games.arena.engine.saved_state import write_state
from ludus.games.arena.engine.settings import Rewards
from ludus.games.arena.engine.vector import Arena
from ludus.games.arena.env.seats import action_space, observation_space
from ludus.games.arena.host.codec import BodyCodec, explain_refusal
from ludus.games.arena.host.match import ActorCamp, BotCamp, HostedMatch, MatchPlan, read_plan
from ludus.games.arena.host.match_host import MatchHost
from ludus.games.arena.main import create_arena, main, play
from ludus.gateway.actor import Actor
from ludus.gateway.builtin_actor import BuiltinActor
from tests.gateway.scripted import RecordedSeat, tiny_policy
from tests.local_servers import gateway

LIMIT_S = 20.0
FRAMES = 60
NOTHING = [0, 0, 0, 0]


class Bot(Actor):
    """Does nothing and stores all requests."""

    instances: ClassVar[list[Bot]]

    async def start(self, session: str, body: bytes) -> bytes:
        self.session, self.started = session, msgpack.unpackb(body)
        self.ticks: list[dict[str, Any]] = []
        self.ended: dict[str, Any] | None = None
        self.instances.append(self)
        return b""

    async def tick(self, body: bytes) -> bytes:
        self.ticks.append(msgpack.unpackb(body))
        reply = await self.answer(len(self.ticks))
        return reply if isinstance(reply, bytes) else msgpack.packb(reply)

    async def answer(self, number: int) -> Any:
        return {"actions": dict.fromkeys(self.seats, NOTHING)}

    async def end(self, body: bytes) -> bytes:
        self.ended = msgpack.unpackb(body or b"\x80") if self.ended_by == "game" else {"ended_by": self.ended_by}
        return b""

    @property
    def seats(self) -> list[str]:
        return list(self.ticks[-1]["seats"])


def bots(answer: Callable[[Bot, int], Any] | None = None) -> type[Bot]:
    """Return a new class; `answer` gets the number of the tick, from 1, and may be awaitable."""

    class Made(Bot):
        instances: ClassVar[list[Bot]] = []

        async def answer(self, number: int) -> Any:
            if answer is None:
                return await super().answer(number)
            given = answer(self, number)
            given = await given if asyncio.iscoroutine(given) else given
            return await super().answer(number) if given is None else given

    return Made


def plan(*urls: str | None, **more: Any) -> MatchPlan:
    """Plan a short match; the rule plays camps without an address."""
    options = more.pop("options", {})
    timeout_s = more.pop("timeout_s", LIMIT_S)
    camps = [None if url is None else {"url": url, "timeout_s": timeout_s} for url in urls]
    config = {"runtime_id": "r1", "mode": "1v1", "seed": 3, "max_frames": FRAMES, "camps": camps, "options": options}
    return read_plan(config | more, (None, None), BOTS)


def play_match(one: MatchPlan, **more: Any) -> dict[str, Any]:
    went = play([one], **more)
    assert not went.stopped
    (result,) = went.results
    return result


# -- several matches, and decisions without a reply -----------------------------------------------------------------------


def test_a_late_reply_means_no_action_rather_than_the_last_one() -> None:
    def hash_of(late: bool) -> str:
        async def answer(bot: Bot, number: int) -> Any:
            if number != 4:
                return {"actions": {seat: [1, 3, 0, 0] for seat in bot.seats}}
            if late:
                await asyncio.sleep(0.5)
            return None

        with gateway(bots(answer)) as server:
            result = play_match(plan(server.url, None, timeout_s=0.3))
        assert (result["late"] > 0) == late
        return str(result["hash"])

    assert hash_of(late=True) == hash_of(late=False)


@pytest.mark.parametrize("order", [("short", "long"), ("long", "short")])
def test_a_finished_match_ends_its_session_while_another_continues(order: tuple[str, ...]) -> None:
    heard: list[tuple[str, int]] = []

    def answer(bot: Bot, number: int) -> Any:
        heard.append((bot.match, number))
        wrong = bot.match == "short" and number == 4
        return {"actions": {seat: [0, 0, 0, 99] if wrong else [1, 3, 0, 0] for seat in bot.seats}}

    class ReportingBot(bots(answer)):  # type: ignore[misc]
        async def end(self, body: bytes) -> bytes:
            heard.append((self.match, 0))
            return bytes(await super().end(body))

    with gateway(ReportingBot) as server:
        ordered = plan(server.url, None, options={"on_illegal": "forfeit"})
        results = play([replace(ordered, runtime_id=name) for name in order]).results
    ticks = {name: result["ticks"] for name, result in zip(order, results, strict=True)}
    assert ticks == {"short": 9, "long": FRAMES}
    assert heard.index(("short", 0)) < heard.index(("long", 6))
    assert heard.count(("short", 0)) == 1


# -- further matches ----------------------------------------------------------------------------------------------------

MOVING = {"r1": 3, "r2": 7, "r3": 11, "r4": 2}


def bot_that_adds(by_match: Mapping[str, Mapping[str, Any]]) -> type[Bot]:
    """Return an actor that adds matches: `{match: {"start": […], "tick": […], "end": […]}}`; `tick`: the third."""

    def matches(bot: Bot, when: str) -> dict[str, Any]:
        given = by_match.get(bot.match, {}).get(when)
        return {} if given is None else {"matches": given}

    def answer(bot: Bot, number: int) -> Any:
        actions = {seat: [1, MOVING.get(bot.match, 0), 0, 0] for seat in bot.seats}
        return {"actions": actions, **(matches(bot, "tick") if number == 3 else {})}

    class MatchAddingBot(bots(answer)):  # type: ignore[misc]
        async def start(self, session: str, body: bytes) -> bytes:
            await super().start(session, body)
            return bytes(msgpack.packb(matches(self, "start")))

        async def end(self, body: bytes) -> bytes:
            await super().end(body)
            return bytes(msgpack.packb(matches(self, "end")))

    return MatchAddingBot


def further(name: str, **more: Any) -> dict[str, Any]:
    return {"runtime_id": name, "camps": [True, None], "seed": MOVING[name], "options": {"rule": "easy"}, **more}


def test_added_matches_equal_matches_played_alone() -> None:
    lineup = [[{"hero_id": 107}], [{"hero_id": 190}]]
    third = further("r3", camps=[None, True], heroes=lineup, options={"rule": "hard", "start": "lane"})
    # Adds the second one twice, like an actor that has not seen it begin.
    bot_class = bot_that_adds(
        {"r1": {"start": [further("r2")], "tick": [further("r2")], "end": [further("r4")]}, "r2": {"tick": [third]}}
    )
    with gateway(bot_class) as server:
        went = play([plan(server.url, None, options={"together": 3, "rule": "easy"}, seed=MOVING["r1"])])
        ends = {bot.match: bot.ended["info"]["result"] for bot in bot_class.instances if bot.ended}
        assert (went.stopped, went.matches, went.completed) == (0, 4, 4)
        assert len(went.results) == 3  # r4 uses the slot of r1
        assert ends.keys() == MOVING.keys()
        alone = {
            "r1": plan(server.url, None, seed=MOVING["r1"], options={"rule": "easy"}),
            "r2": plan(server.url, None, seed=MOVING["r2"], options={"rule": "easy"}),
            "r3": plan(None, server.url, seed=MOVING["r3"], heroes=lineup, options={"rule": "hard", "start": "lane"}),
            "r4": plan(server.url, None, seed=MOVING["r4"], options={"rule": "easy"}),
        }
        for name, one in alone.items():
            assert play_match(replace(one, runtime_id=name))["hash"] == ends[name]["hash"], name
    assert {len(bot.ticks) for bot in bot_class.instances} == {FRAMES // 3}


def test_a_slow_actor_delays_only_its_own_match() -> None:
    told: list[tuple[str, int]] = []
    over = asyncio.Event()

    async def answer(bot: Bot, number: int) -> Any:
        told.append((bot.match, number))
        if bot.match == "slow" and number == 3:
            await over.wait()
        return {"actions": {seat: [1, 3, 0, 0] for seat in bot.seats}}

    class SlowBot(bots(answer)):  # type: ignore[misc]
        async def end(self, body: bytes) -> bytes:
            over.set()
            return bytes(await super().end(body))

    with gateway(SlowBot) as server:
        ordered = plan(server.url, None)
        went = play([replace(ordered, runtime_id=name) for name in ("slow", "quick")])
        alone = play_match(ordered)
    assert told.index(("slow", 4)) > told.index(("quick", FRAMES // 3))
    assert {result["hash"] for result in went.results} == {alone["hash"]}
    assert [result["late"] for result in went.results] == [0, 0]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["r2"], "A further match is 'r2'"),
        ([{}], "camps"),
        ([further("r2", camps=[True])], "camps"),
        ([further("r2", camps=[{"url": "http://127.0.0.1:9"}, None])], "camps"),
        ([further("r2", seed=-1)], "seed"),
        ([further("r2", runtime_id="")], "runtime_id"),
        ([further("r2", runtime_id="../up")], "runtime_id"),
        ([further("r2", runtime_id="/tmp/up")], "runtime_id"),
        ([further("r2", heroes=[[{"hero_id": 107}] * 3] * 2)], "1v1"),
        ([further("r2", start_from="/etc/passwd")], "start_from"),
        ([further("r2", options={"pace": 3})], "pace"),
        ([further("r2", options={"sparse": True})], "sparse"),
        ([further("r2", options=3)], "options"),
        ([further("r2", options={"rule": "godlike"})], "godlike"),
        ([further("r2"), further("r3"), further("r4")], "All 2 slots are taken"),
    ],
)
def test_an_invalid_further_match_is_logged_and_the_others_continue(
    given: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with gateway(bot_that_adds({"r1": {"start": given}})) as server:
        went = play([plan(server.url, None, options={"together": 2})])
    assert went.matches == went.completed == (2 if len(given) > 1 else 1)
    assert any("further match rejected" in line and why in line for line in caplog.messages)


def test_a_process_uses_the_rewards_of_its_latest_match() -> None:
    weighed = further("r2", options={"weight_gold": 2.0, "weight_health": -3.0, "team_spirit": 0.5, "zero_sum": False})
    bot_class = bot_that_adds({"r1": {"start": [weighed]}})
    with gateway(bot_class) as server:
        plain = plan(server.url, None, options={"together": 2, "weight_gold": 2.0, "zero_sum": False})
        host = MatchHost(create_arena([plain]), [HostedMatch(plain, BOTS)])
        asyncio.run(host.run())
    assert host.played == 2
    assert host.arena.rewards == Rewards({"gold": 2.0, "health": -3.0}, team_spirit=0.5, zero_sum=False)


@pytest.mark.parametrize("given", [7, {"r2": 1}, "r2", None])
def test_an_invalid_list_of_matches_is_ignored(given: Any) -> None:
    with gateway(bot_that_adds({"r1": {"start": given, "tick": given, "end": given}})) as server:
        assert play([plan(server.url, None, options={"together": 2})]).matches == 1


def test_further_matches_are_ignored_without_the_option_together() -> None:
    with gateway(bot_that_adds({"r1": {"start": [further("r2")], "end": [further("r3")]}})) as server:
        went = play([plan(server.url, None)])
    assert (went.matches, went.results[0]["runtime_id"]) == (1, "r1")


# -- configuration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"mode": "1v2"}, "'1v2'"),
        ({"mode": 7.5}, "7.5"),
        ({"heroes": [[{"hero_id": 999}], [{"hero_id": 107}]]}, "999"),
        ({"heroes": [[{"hero_id": 107}]]}, "heroes"),
        ({"heroes": [[{"hero_id": 107}], [{"hero_id": None}]]}, r"heroes\[1\]\[0\]"),
        ({"heroes": [[{"hero_id": 107}] * 3] * 2}, "1v1"),
        ({"camps": [{"address": "x"}]}, r"camps\[0\]"),
        ({"camps": [{"url": "http://127.0.0.1:1", "timeout_s": float("nan")}]}, "timeout_s is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"max_frames": 0}, "max_frames is 0"),
        ({"runtime_id": "a\nb"}, "runtime_id"),
        ({"eval_mode": 1}, "eval_mode is 1"),
        ({"moode": "1v1"}, "mode"),
        ({"options": {"pace": -1}}, "pace is -1"),
        ({"options": {"rule": "godlike"}}, "easy"),
        ({"options": {"spped": 3}}, "spped"),
        ({"options": {"format": "raw", "sessions": "camp"}}, "raw"),
        ({"options": {"together": 257}}, "together is 257"),
        ({"options": {"together": 2, "record": True}}, "together: 0"),
        ([], "config"),
    ],
)
def test_an_invalid_config_is_rejected_with_its_key(wrong: Any, named: str) -> None:
    config = {"mode": "1v1", **wrong} if isinstance(wrong, Mapping) else wrong
    with pytest.raises(ConfigError, match=named):
        read_plan(config, (None, None), BOTS)


def test_the_config_of_a_server_is_parsed() -> None:
    config = {
        "runtime_id": "x-1",
        "game": "arena",
        "mode": None,
        "heroes": [
            [{"hero_id": 190}, {"hero_id": 173}, {"hero_id": 117}],
            [{"hero_id": 141}, {"hero_id": 111}, {"hero_id": 107}],
        ],
        "camps": [None, {"url": "http://10.0.0.5:8000", "timeout_s": 2}],
        "eval_mode": True,
        "seed": 1 << 40,
        "max_frames": None,
        "start_from": None,
        "options": {"rule": "hard", "format": "raw"},
    }
    bot_class = read_plan(config, (None, "secret"), BOTS)
    assert (bot_class.size, bot_class.seed, bot_class.eval_mode, bot_class.max_ticks) == (3, 1 << 40, True, None)
    assert bot_class.camps == (BotCamp("hard"), ActorCamp("http://10.0.0.5:8000", 2.0, "secret"))
    assert "secret" not in repr(bot_class)
    assert bot_class.options.sessions == "hero"


# -- messages -----------------------------------------------------------------------------------------------------------


def test_actors_of_both_camps_receive_the_match_and_its_end() -> None:
    bot_class = bots()
    with gateway(bot_class) as server:
        result = play_match(plan(server.url, server.url, mode="3v3", eval_mode=True))
    assert (result["ticks"], result["reason"], result["winner"], result["completed"]) == (FRAMES, "time is up", None, True)
    assert result["late"] == result["illegal"] == result["garbled"] == 0
    for bot in bot_class.instances:
        about = bot.started
        assert (about["game"], about["mode"], about["format"], about["eval_mode"]) == ("arena", "3v3", "msgpack", True)
        assert about["seats"] == ["hero_0", "hero_1", "hero_2"]
        assert about["heroes"] == [[190, 173, 117], [141, 111, 107]]
        assert (bot.match, bot.about.side) == ("r1", str(about["camp"]))
        assert len(bot.ticks) == FRAMES // 3
        assert bot.ended is not None
        assert bot.ended["info"]["result"]["hash"] == result["hash"]
        assert [seat["truncated"] for seat in bot.ended["seats"].values()] == [True] * 3
    assert sorted(bot.started["camp"] for bot in bot_class.instances) == [0, 1]
    assert len({bot.session for bot in bot_class.instances}) == 2


def test_actors_receive_the_observations_of_the_arena() -> None:
    bot_class = bots()
    with gateway(bot_class) as server:
        play_match(plan(None, server.url))
    arena = Arena(1)
    arena.reset([3])
    arena.observe()
    seat = bot_class.instances[0].ticks[0]["seats"]["hero_0"]
    for name, array in (("entities", arena.entities), ("scalars", arena.scalars), ("target_mask", arena.target_mask)):
        assert seat["observation"][name] == array[0, 1].tobytes()
    assert seat["action_mask"] == arena.mask[0, 1].astype(int).tolist()
    assert seat["reward"] == 0


def test_rewards_come_with_the_next_tick_and_none_is_lost() -> None:
    bot_class = bots(lambda bot, number: {"actions": {"hero_0": [1, 0, 0, 0]}})  # forward, into the towers
    with gateway(bot_class) as server:
        play_match(plan(server.url, None, max_frames=900))
    (bot,) = bot_class.instances
    assert bot.ended is not None
    told = [tick["seats"]["hero_0"]["reward"] for tick in bot.ticks] + [bot.ended["seats"]["hero_0"]["reward"]]
    arena = Arena(1)
    arena.reset([3])
    total, actions = 0.0, np.zeros((1, 2, 4), np.int32)
    assert len(bot.ticks) < 300  # dead heroes are not asked
    for _ in range(300):
        arena.observe()
        actions[:] = arena.bot_actions(np.array([[-1, BOTS.index("medium")]], np.int8))
        actions[0, 0] = (1, 0, 0, 0) if arena.units[0, 0, 0] else NOTHING
        arena.step(actions)
        total += float(arena.reward[0, 0])
    assert sum(told) == pytest.approx(total, abs=1e-3)
    assert total != 0


@pytest.mark.parametrize("form", ["msgpack", "json", "raw"])
@pytest.mark.parametrize("mode", ["1v1", "3v3"])
def test_the_built_in_actor_plays_and_records_without_any_code(form: str, mode: str) -> None:
    arena = Arena(mode)
    seen = {name: part for name, part in observation_space(arena.size).spaces.items() if name != ACTION_MASK}
    recorded_seat = RecordedSeat(tiny_policy(gym.spaces.Dict(seen), action_space(arena.size)), 64)
    lone = form == "raw"
    seats = {"" if lone else f"hero_{i}": recorded_seat.seat for i in range(1 if lone else arena.size)}
    with gateway(lambda: BuiltinActor(seats)) as server:
        result = play_match(plan(server.url, None, mode=mode, options={"format": form, "lenient": True}))
    assert (result["lost"], result["late"], result["garbled"]) == ({}, 0, 0)
    recorded = sum(int(segments.valid.sum()) for segments in recorded_seat.segments())
    assert recorded == arena.size * FRAMES // 3


def test_a_destroyed_base_ends_the_match(tmp_path: Path) -> None:
    arena, before = Arena(), deque[bytes](maxlen=10)
    arena.reset([3])
    while not arena.over[0]:
        before.append(arena.save(0))
        arena.step(arena.bot_actions(np.array([[-1, BOTS.index("hard")]])))
    bot_class = bots()
    saved = write_state(tmp_path / "late", before[0])
    with gateway(bot_class) as server:
        result = play_match(plan(server.url, None, max_frames=None, start_from=str(saved), options={"rule": "hard"}))
    (bot,) = bot_class.instances
    assert (result["winner"], result["completed"], result["reason"]) == (1, True, "the base of camp 0 has fallen")
    assert (result["ticks"], result["hash"]) == (int(arena.tick[0]), arena.hash(0))
    assert len(bot.ticks) == 10
    assert bot.ended is not None
    last = bot.ended["seats"]["hero_0"]
    assert last["terminated"] is True
    assert last["reward"] == pytest.approx(float(arena.reward[0, 0]))
    assert last["reward"] < 0


def test_both_camps_are_asked_concurrently() -> None:
    meeting = asyncio.Barrier(2)

    async def met(bot: Bot, number: int) -> None:
        await asyncio.wait_for(meeting.wait(), 2.0)  # sequential requests would deadlock

    bot_class = bots(met)
    with gateway(bot_class) as server:
        result = play_match(plan(server.url, server.url))
    assert (result["late"], result["lost"]) == (0, {})


# -- faulty actors ------------------------------------------------------------------------------------------------------


def test_an_illegal_action_is_refused_with_the_mask_and_the_match_continues(caplog: pytest.LogCaptureFixture) -> None:
    bot_class = bots(lambda bot, number: {"actions": {"hero_0": [2, 0, 0, 5]}} if number == 2 else None)
    with gateway(bot_class) as server, caplog.at_level(logging.WARNING, "ludus.games.arena"):
        result = play_match(plan(server.url, None))
    (bot,) = bot_class.instances
    assert (result["illegal"], result["ticks"], result["heroes"][0]["illegal"]) == (1, FRAMES, 1)
    told = bot.ticks[2]["info"]["refused"]["hero_0"]
    assert "[2, 0, 0, 5]" in told
    assert "Allowed: what: nothing, move" in told
    assert told in caplog.text
    assert all("info" not in tick for i, tick in enumerate(bot.ticks) if i != 2)


def test_a_refusal_lists_the_targets_of_the_button() -> None:
    mask, targets = np.zeros(8 + 16 + 16 + 32, np.bool_), np.zeros((3, 32), np.bool_)
    mask[[0, 2]] = targets[0, [4, 9]] = targets[1, 7] = True
    assert explain_refusal((2, 0, 0, 7), mask, targets).endswith("Allowed: what: nothing, attack; target of 'attack': 4, 9.")
    assert explain_refusal((3, 0, 0, 7), mask, targets).endswith("'skill 1' is not allowed now. Allowed: what: nothing, attack.")


GARBAGE: dict[str, Any] = {
    "nothing": b"",
    "not msgpack": b"\xc1\xc1",
    "cut off": msgpack.packb({"actions": {"hero_0": NOTHING}})[:-1],
    "a number": 7,
    "no actions": {"action": NOTHING},
    "a list of actions": {"actions": [NOTHING]},
    "other seats": {"actions": {"hero_1": NOTHING}},
    "too short": {"actions": {"hero_0": [0, 0, 0]}},
    "not a number": {"actions": {"hero_0": [0, 0, 0, float("nan")]}},
    "a fraction": {"actions": {"hero_0": [0.5, 0, 0, 0]}},
    "words": {"actions": {"hero_0": ["move", 0, 0, 0]}},
    "true": {"actions": {"hero_0": [True, 0, 0, 0]}},
    "out of range": {"actions": {"hero_0": [0, 0, 0, 1 << 40]}},
    "below zero": {"actions": {"hero_0": [-1, 0, 0, 0]}},
    "null": {"actions": {"hero_0": None}},
    "keys of lists": b"\x81\xa7actions\x81\x91\x00\x00",
    "deep": b"\x91" * 5000 + b"\x00",
}


def test_invalid_replies_are_counted_and_reported_and_the_match_continues() -> None:
    kinds = list(GARBAGE.values())
    bot_class = bots(lambda bot, number: kinds[number - 1] if number <= len(kinds) else None)
    with gateway(bot_class) as server:
        result = play_match(plan(server.url, None, max_frames=3 * (len(kinds) + 2)))
    (bot,) = bot_class.instances
    assert (result["lost"], result["late"], result["illegal"]) == ({}, 0, 0)
    assert result["garbled"] == len(kinds) + 1  # plus one for an unknown seat
    refused = [tick.get("info", {}).get("refused", {}).get("hero_0", "") for tick in bot.ticks[1:]]
    assert all(refused[: len(kinds)])
    assert not any(refused[len(kinds) :])


@pytest.mark.parametrize("kind", ["msgpack", "json", "raw"])
def test_no_reply_parses_to_an_invalid_action(kind: Any) -> None:
    form, rng = BodyCodec(kind, options_of(1)), np.random.default_rng(0)
    asked = {"hero_0": 0}
    for size in range(200):
        noise = rng.bytes(size)
        for body in (noise, b"{" + noise, b"\x81\xa7actions" + noise, b'{"actions": {"hero_0": [0, 0, 0, ' + noise):
            reply = form.read(body, asked)
            assert "hero_0" in reply.wrong or all(0 <= n < 32 for n in reply.actions["hero_0"])


def test_the_rule_can_replace_an_illegal_action() -> None:
    bot_class = bots(lambda bot, number: {"actions": {"hero_0": [2, 0, 0, 5]}})
    with gateway(bot_class) as server:
        stood_in = play_match(plan(server.url, None, options={"on_illegal": "rule", "rule": "hard"}))
        idle = play_match(plan(server.url, None))
    both = play_match(plan(None, None, options={"rule": "hard"}))
    assert stood_in["illegal"] == idle["illegal"] == FRAMES // 3
    assert stood_in["hash"] == both["hash"] != idle["hash"]


def test_an_illegal_action_can_forfeit_the_match() -> None:
    bot_class = bots(lambda bot, number: b"?" if number == 3 and bot.started["camp"] == 1 else None)
    with gateway(bot_class) as server:
        result = play_match(plan(server.url, server.url, options={"on_illegal": "forfeit"}))
    assert (result["winner"], result["completed"], result["ticks"]) == (0, True, 6)
    assert "camp 1 forfeits" in result["reason"]
    assert all(bot.ended and bot.ended["seats"]["hero_0"]["terminated"] for bot in bot_class.instances)


def test_lenient_replaces_an_invalid_target() -> None:
    bot_class = bots(lambda bot, number: {"actions": {"hero_0": _attack_somebody_else(bot)}})
    with gateway(bot_class) as server:
        strict = play_match(plan(server.url, None, max_frames=600))
        lenient = play_match(plan(server.url, None, max_frames=600, options={"lenient": True}))
    assert strict["illegal"] > 0
    assert lenient["illegal"] == 0
    assert lenient["hash"] != strict["hash"]


def _attack_somebody_else(bot: Bot) -> list[int]:
    seat = bot.ticks[-1]["seats"]["hero_0"]
    targets = np.frombuffer(seat["observation"]["target_mask"], np.bool_).reshape(3, -1)[0]
    if not seat["action_mask"][2]:
        return [1, 0, 0, 0] if seat["action_mask"][1] else NOTHING
    return [2, 0, 0, int(np.flatnonzero(~targets)[0])]


# -- lost actors --------------------------------------------------------------------------------------------------------


def unused_url() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}"


def test_the_rule_plays_for_an_unreachable_actor() -> None:
    result = play_match(plan(unused_url(), None, timeout_s=0.1, options={"patience_s": 0, "rule": "hard"}))
    both = play_match(plan(None, None, options={"rule": "hard"}))
    assert "Nothing listens on 127.0.0.1" in result["lost"]["0"]
    assert (result["completed"], result["hash"]) == (True, both["hash"])


def test_on_the_command_line_an_unreachable_actor_fails_unless_the_rule_plays(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mode", "1v1", "--camp0", unused_url(), "--patience-s", "0", "--timeout-s", "0.1", "--max-frames", str(FRAMES)]
    assert main(words) == 3
    assert "Nothing listens on 127.0.0.1" in json.loads(capsys.readouterr().out)["lost"]["0"]
    assert main([*words, "--on-lost", "rule"]) == 0


def test_a_match_can_end_with_its_actor_and_the_other_actor_is_notified() -> None:
    bot_class = bots()
    with gateway(bot_class) as server:
        result = play_match(plan(server.url, unused_url(), timeout_s=0.5, options={"patience_s": 0, "on_lost": "end"}))
    assert (result["completed"], result["winner"], result["ticks"]) == (False, None, 0)
    assert "the actor of camp 1 is gone" in result["reason"]
    assert bot_class.instances[0].ended is not None


def test_the_rule_replaces_a_stuck_actor_after_its_deadline() -> None:
    stuck: list[Bot] = []

    async def answer(bot: Bot, number: int) -> None:
        if number >= 3:
            stuck.append(bot)
            await asyncio.Event().wait()

    with gateway(bots(answer)) as server:
        result = play_match(plan(server.url, None, timeout_s=0.6, options={"patience_s": 0}))
    assert (result["late"], result["completed"], result["ticks"], len(stuck)) == (1, True, FRAMES, 1)
    assert "0.6 s" in result["lost"]["0"]


def test_a_server_that_stops_during_a_match_is_lost() -> None:
    closing: list[asyncio.Task[None]] = []

    def answer(bot: Bot, number: int) -> None:
        if number == 3:
            closing.append(asyncio.ensure_future(server.gateway.close()))

    bot_class = bots(answer)
    with gateway(bot_class) as server:
        result = play_match(plan(server.url, None, timeout_s=0.6, options={"patience_s": 0, "on_lost": "end"}))
    assert (result["completed"], result["winner"]) == (False, None)
    assert re.search(r"127\.0\.0\.1|stopping", result["lost"]["0"])  # unreachable, or about to stop
    assert 0 < result["ticks"] < FRAMES


def test_a_lost_camp_ends_its_other_sessions() -> None:
    def answer(bot: Bot, number: int) -> Any:
        if bot.started["seats"] == ["hero_1"] and number == 2:
            raise Refused(401, "unauthorized", "You are not welcome any more.")
        return {"action": NOTHING}

    bot_class = bots(answer)
    with gateway(bot_class) as server:
        result = play_match(plan(server.url, None, mode="3v3", options={"sessions": "hero", "rule": "hard"}))
    assert "not welcome" in result["lost"]["0"]
    assert result["completed"]
    assert [len(bot.ticks) for bot in bot_class.instances] == [2, 2, 2]
    assert all(bot.ended == {} for bot in bot_class.instances)


def test_one_late_reply_is_tolerated() -> None:
    async def answer(bot: Bot, number: int) -> None:
        if number == 3:
            await asyncio.sleep(0.3)

    bot_class = bots(answer)
    with gateway(bot_class) as server:
        result = play_match(plan(server.url, None, timeout_s=0.2))
    assert result["lost"] == {}
    assert 1 <= result["late"] < FRAMES // 3
    assert bot_class.instances[0].ended is not None
    assert len(bot_class.instances) == 1


def test_a_lost_session_is_replaced() -> None:
    def answer(bot: Bot, number: int) -> None:
        if number == 3 and len(bot.instances) == 1:
            raise RuntimeError("this actor fails")

    bot_class = bots(answer)
    with gateway(bot_class) as server:
        result = play_match(plan(server.url, None))
    first, second = bot_class.instances
    assert (result["lost"], result["late"]) == ({}, 1)
    assert len(first.ticks) + len(second.ticks) == FRAMES // 3
    assert second.ticks[0]["seats"]["hero_0"]["reward"] == 0
    assert first.session != second.session
    assert first.match == second.match


def test_an_actor_that_fails_repeatedly_is_lost() -> None:
    def answer(bot: Bot, number: int) -> None:
        raise RuntimeError("this actor fails")

    bot_class = bots(answer)
    with gateway(bot_class) as server:
        result = play_match(plan(server.url, None))
    assert "actor_failed" in result["lost"]["0"]
    assert len(bot_class.instances) == 4


def test_an_actor_with_other_spaces_is_lost_at_once_with_a_reason() -> None:
    recorded_seat = RecordedSeat(tiny_policy())
    with gateway(lambda: BuiltinActor({"hero_0": recorded_seat.seat})) as server:
        result = play_match(plan(server.url, None))
    assert "422 observation" in result["lost"]["0"]
    assert result["completed"]


# -- many, saved, stopped -----------------------------------------------------------------------------------------------


def test_simultaneous_matches_equal_matches_played_alone(capsys: pytest.CaptureFixture[str]) -> None:
    bot_class = bots(lambda bot, number: {"actions": {seat: [1, number % 16, 0, 0] for seat in bot.seats}})
    with gateway(bot_class) as server:
        words = ["--mode", "1v1", "--camp0", server.url, "--camp1", "rule:easy", "--max-frames", str(FRAMES)]
        assert main([*words, "--matches", "5", "--seed", "40"]) == 0
        several = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert main([*words, "--seed", "42"]) == 0
        alone = json.loads(capsys.readouterr().out)
    assert [one["seed"] for one in several] == [40, 41, 42, 43, 44]
    assert several[2]["hash"] == alone["hash"]
    assert len({one["hash"] for one in several}) == 5
    assert len({bot.match for bot in bot_class.instances}) == 6


def test_a_recording_of_a_process_can_be_verified(tmp_path: Path) -> None:
    bot_class = bots(lambda bot, number: {"actions": {"hero_0": [number % 5, number % 16, 3, 5]}})
    with gateway(bot_class) as server:
        result = play_match(plan(server.url, None), record=tmp_path / "match.arena")
    recording = read_recording(tmp_path / result["recording"])
    assert verify(recording) == result["hash"]
    assert recording.names == (server.url, "medium")


def test_a_state_is_written_and_a_match_starts_from_it(tmp_path: Path) -> None:
    play_match(plan(None, None, max_frames=300), states=tmp_path)
    (kept,) = tmp_path.iterdir()
    tick = int(kept.name.removeprefix("r1-"))
    assert 0 < tick < 300
    again = play_match(plan(None, None, max_frames=tick + 30, start_from=str(kept)))
    assert again["ticks"] == tick + 30
    whole = play_match(plan(None, None, max_frames=tick + 30))
    assert again["heroes"] == whole["heroes"]


@pytest.mark.parametrize(("share", "kept"), [(1.0, {"r1", "r2"}), (0.0, set())])
def test_states_of_a_share_of_the_matches_are_written(tmp_path: Path, share: float, kept: set[str]) -> None:
    with gateway(bot_that_adds({"r1": {"end": [further("r2")]}})) as server:
        went = play([plan(server.url, None, options={"together": 1})], states=tmp_path, share=share)
    assert went.matches == 2
    assert {path.name.rpartition("-")[0] for path in tmp_path.iterdir()} == kept


def test_a_missing_state_or_one_of_another_mode_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"nonsense")
    with pytest.raises(UsageError, match="saved state"):
        play([plan(None, None, start_from=str(tmp_path / "bad"))])
    with pytest.raises(NotFound):
        play([plan(None, None, start_from=str(tmp_path / "none"))])


def test_a_stopped_game_notifies_its_actor_and_the_server(tmp_path: Path) -> None:
    reached = threading.Event()

    def answer(bot: Bot, number: int) -> None:
        if number == 5:
            reached.set()

    bot_class = bots(answer)
    config, result = tmp_path / "config.json", tmp_path / "result.json"
    with gateway(bot_class) as server:
        order = {"runtime_id": "s1", "mode": "1v1", "seed": 1, "camps": [{"url": server.url, "timeout_s": 5}, None]}
        config.write_text(json.dumps(order | {"options": {"pace": 150}}))
        told = {"LUDUS_GAME_CONFIG": str(config), "LUDUS_GAME_RESULT": str(result)}
        game = subprocess.Popen([sys.executable, "-P", "-m", "ludus.games.arena"], env=os.environ | told, stderr=subprocess.PIPE)
        with game:
            try:
                assert reached.wait(60.0)  # the first run compiles kernels
                game.send_signal(signal.SIGTERM)
                _, instances = game.communicate(timeout=LIMIT_S)
            finally:
                game.kill()
    assert game.returncode == 128 + signal.SIGTERM, instances
    written = json.loads(result.read_text())
    assert (written["reason"], written["completed"], written["winner"]) == ("stopped", False, None)
    (bot,) = bot_class.instances
    assert bot.ended is not None
    assert bot.ended["seats"]["hero_0"]["truncated"] is True
    assert bot.ended["seats"]["hero_0"]["observation"]["entities"]
    assert bot.ended["info"]["result"]["reason"] == "stopped"


def test_matches_can_be_stopped_while_waiting_for_actors() -> None:
    reached = threading.Semaphore(0)

    async def answer(bot: Bot, number: int) -> None:
        if number == 2 and bot.match != "r3":
            reached.release()
            await asyncio.sleep(LIMIT_S)

    async def stopped(host: MatchHost) -> None:
        playing = asyncio.ensure_future(host.run())
        for _ in range(2):
            await asyncio.to_thread(reached.acquire)
        playing.cancel()
        await playing

    with gateway(bots(answer)) as server:
        plans = [replace(plan(server.url, None, max_frames=3000), runtime_id=name) for name in ("r1", "r2", "r3")]
        host = MatchHost(create_arena(plans), [HostedMatch(one, BOTS) for one in plans])
        asyncio.run(stopped(host))
    assert host.stopped
    assert (host.played, host.completed) == (3, 0)
    assert {result["reason"] for result in host.results.values()} == {"stopped"}


def test_an_invalid_config_is_reported_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, result = tmp_path / "config.json", tmp_path / "result.json"
    monkeypatch.setenv("LUDUS_GAME_CONFIG", str(config))
    monkeypatch.setenv("LUDUS_GAME_RESULT", str(result))
    for text, word in (("{", "not JSON"), ('{"mode": "9x9"}', "9x9"), ('{"start_from": "/none"}', "/none")):
        config.write_text(text)
        assert main([]) in (1, 2)
        assert word in json.loads(result.read_text())["reason"]
