"""The match scheduler with a scripted server: full servers, lost matches, moved matches."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ludus.envs.opponents.opponent_mix import RULE
from ludus.errors import Refused
from ludus.gamecore.game_spec import resolve_game
from ludus.gamecore.live_matches import LiveMatch, LiveMatches, MatchActor, MatchProcess, StepParser
from ludus.gamecore.match_scheduler import MatchScheduler, OrderDefaults, make_slots
from ludus.protocol import spec
from ludus.protocol.gamecore_client import GameState
from tests.waiting import wait_until

GAME: Mapping[str, Any] = {
    "observation_space": {"type": "Box", "shape": [3], "low": -1, "high": 10},
    "action_space": {"type": "Discrete", "n": 2},
    "opponent": "rule",
}


class Server:
    """Accepts requests unless it is full; can delay its reply."""

    server = "http://nowhere"

    def __init__(self) -> None:
        self.full = False
        self.open = threading.Event()
        self.open.set()
        self.asked: list[str] = []
        self.started: list[str] = []

    def start_game(self, runtime_id: str, *order: Any, **more: Any) -> GameState:
        self.asked.append(runtime_id)
        full = self.full
        self.open.wait(10)
        if full:
            raise Refused(503, "full", "There is no room.", "Later.")
        self.started.append(runtime_id)
        return GameState(runtime_id, "running")

    def state(self, runtime_id: str) -> GameState:
        return GameState(runtime_id, "running")

    def stop_game(self, runtime_id: str, *, grace_s: float | None = None) -> GameState | None:
        return None

    def close(self) -> None:
        pass


class Scenario:
    def __init__(self, matches: int, together: int) -> None:
        self.server = Server()
        self.game = resolve_game("any", None, {}, GAME)
        slots, _ = make_slots([RULE] * matches, 1)
        self.matches = LiveMatches(self.game, slots)
        self.scheduler = MatchScheduler(self.server, self.matches, {}, OrderDefaults(together=together), 1)
        self.scheduler.start()

    @property
    def processes(self) -> list[MatchProcess]:
        with self.matches.condition:
            return list(self.scheduler._processes)

    def match(self, slot: int) -> LiveMatch:
        match = self.matches.slots[slot].upcoming
        assert match is not None
        return match

    def ends(self, slot: int) -> None:
        """End the match of a slot after one decision."""
        match = self.match(slot)
        match.decisions = 1
        self.matches.end(match, tuple(match.rows), {}, {})

    def announced(self, match: LiveMatch) -> list[str]:
        """Start a session of this match, and return the announced matches."""
        actor = MatchActor(self.matches, StepParser(self.game))
        actor.match = match.id
        body: bytes = asyncio.run(actor.start("1", b'{"camp": %d}' % next(iter(match.rows))))
        return [order["runtime_id"] for order in json.loads(body).get("matches", ())]


@pytest.fixture
def scenario() -> Iterator[Scenario]:
    """Five matches in two processes; the second has free capacity but is too old for more."""
    found = Scenario(5, together=3)
    wait_until(lambda: len(found.server.started) == 2, what="two processes")
    first, second = found.processes
    assert (len(first.matches), len(second.matches), second.capacity) == (3, 2, 3)
    second.began = -1e9
    yield found
    found.server.open.set()
    found.scheduler.close()


def test_a_moved_match_is_announced_only_to_its_new_process(scenario: Scenario) -> None:
    first, second = scenario.processes
    first.began, before = -1e9, set(second.matches)
    scenario.server.full = True
    scenario.server.open.clear()
    for slot in range(3):  # the first process has played its matches; while the next one is ordered, all three gather there
        scenario.ends(slot)
    wait_until(lambda: len(scenario.server.asked) == 3, what="the order")
    (late,) = [process for process in scenario.processes if process is not second]
    assert len(late.matches) == 3
    scenario.server.open.set()
    wait_until(lambda: len(second.matches) == 3 and len(late.matches) == 2, what="one of three has moved")
    (moved,) = second.matches - before
    scenario.server.full = False
    wait_until(lambda: late.id in scenario.server.started, what="the process of the others")

    ordered = next(match for match in late.matches if match.id == late.id)
    assert scenario.announced(ordered) == [match.id for match in late.matches if match is not ordered]
    assert moved.id in scenario.announced(next(match for match in second.matches if match.id == second.id))


def test_matches_lost_while_being_ordered_are_ordered_again(scenario: Scenario) -> None:
    scenario.server.full = True
    scenario.server.open.clear()
    scenario.matches.lose(scenario.match(0), "its process is gone")
    wait_until(lambda: len(scenario.server.asked) == 3, what="the order")  # and no answer yet
    scenario.matches.lose(scenario.match(0), "nobody waits for it any more")
    scenario.server.full = False
    scenario.server.open.set()

    wait_until(lambda: sum(len(process.matches) for process in scenario.processes if process.accepted) == 5, what="all matches")
    assert scenario.scheduler.fault is None


@pytest.mark.parametrize("key", ["protocol", "game", "rules", "hero_table", "mode", "ticks_per_decision"])
def test_a_different_game_is_refused_with_the_difference(key: str) -> None:
    """For example another hero table: the same ids would mean other heroes."""
    arena = resolve_game("arena", "3v3", {}, {})
    about = {"protocol": spec.VERSION, **arena.expected_start}
    assert "hero_table" in about
    arena.check(about)
    with pytest.raises(Refused, match=f"{key}|version") as refused:
        arena.check({**about, key: "another"})
    assert refused.value.status == 422
