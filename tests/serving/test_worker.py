"""One serving worker: hot updates with recurrent sessions, levels, canaries, failing models."""

from __future__ import annotations

import contextlib
import json
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.models.policy import Policy
from ludus.serving import release
from ludus.serving import worker as services
from ludus.serving.routing_table import AgentRoutes, RoutingTable
from ludus.serving.worker import ReplaySettings, ServiceSettings
from ludus.transport.replay_log import ReadCounts, read_recorded
from tests.gateway.wire import Reply, Wire, ask, raw, step
from tests.serving.releases import (
    HUGE,
    SOON_S,
    Twin,
    Wanderer,
    agent,
    broken,
    current,
    metrics,
    observations,
    offer,
    policy,
    released,
    serving,
    total,
)
from tests.waiting import wait_until


class Match:
    """A session on its own connection; every reply is compared with the expected one."""

    def __init__(self, port: int, name: str, twin: Twin | None = None, *headers: str) -> None:
        self.wire, self.name, self.twin, self.seen = Wire(port), name, twin, 0
        self.started = self.wire.ask(step("start", name, headers=headers))

    def __enter__(self) -> Match:
        assert self.started.status == 200, self.started
        return self

    def __exit__(self, *exc: object) -> None:
        self.wire.socket.close()

    def tick(self, observation: Sequence[float] | None = None) -> Any:
        if observation is None:
            observation = observations(1, seed=self.seen)[0]
        self.seen += 1
        reply = self.wire.ask(step("tick", self.name, json.dumps({"observation": list(observation)}).encode()))
        if reply.status != 200:
            return reply.refusal
        action = json.loads(reply.body)["action"]
        if self.twin is not None:
            assert self.twin.check(observation, action), f"tick {self.seen} of {self.name}"
        return action

    def play(self, ticks: int) -> None:
        for _ in range(ticks):
            assert isinstance(self.tick(), list)

    def end(self) -> Reply:
        return self.wire.ask(step("end", self.name))


def sessions(port: int, version: int) -> float:
    return total(metrics(port), "ludus_sessions", version=str(version))


@pytest.fixture
def one(tmp_path: Path) -> Path:
    offer(tmp_path, {"default": agent(1)})
    return tmp_path


def test_a_session_keeps_its_version_until_it_ends_and_new_ones_get_the_new(one: Path) -> None:
    with serving(one) as served, Match(served.port, "old", Twin(policy(1))) as old:
        old.play(10)
        offer(one, {"default": agent(2)})
        wait_until(lambda: current(served.port) == 2)
        with Match(served.port, "new", Twin(policy(2))) as new:
            for _ in range(10):
                old.play(1)
                new.play(1)
            found = metrics(served.port)
            assert total(found, "ludus_live_versions") == 2
            assert total(found, "ludus_sessions", version="1") == 1 == total(found, "ludus_sessions", version="2")
            assert total(found, "ludus_sessions_moved_total") == 0
            assert old.end().status == 200
            wait_until(lambda: total(metrics(served.port), "ludus_live_versions") == 1)
            new.play(5)


@pytest.mark.parametrize("carry", [True, False])
def test_when_too_many_versions_live_the_oldest_sessions_move_and_keep_or_lose_their_memory(one: Path, carry: bool) -> None:
    with serving(one, ServiceSettings(max_live_versions=2, carry_state=carry)) as served:
        wait_until(lambda: current(served.port) == 1)
        with Match(served.port, "first", Twin(policy(1))) as first, Match(served.port, "fresh", Twin(policy(3))) as fresh:
            first.play(10)
            offer(one, {"default": agent(2)})
            wait_until(lambda: current(served.port) == 2)
            with Match(served.port, "second", Twin(policy(2))) as second:
                second.play(10)
                first.play(3)
                offer(one, {"default": agent(3)})
                wait_until(lambda: current(served.port) == 3)
                assert first.twin is not None
                first.twin.carry_on(policy(3), carry=carry)
                first.play(10)
                second.play(10)
                fresh.play(10)  # it had not begun: it has nothing to lose
            found = metrics(served.port)
            assert total(found, "ludus_sessions_moved_total", how="carried" if carry else "reset") >= 1
            assert total(found, "ludus_sessions_moved_total") == 2
            assert total(found, "ludus_sessions", version="3") == 2
            assert total(found, "ludus_sessions", version="1") == 0


def test_a_state_of_other_shapes_cannot_be_carried(one: Path) -> None:
    larger = policy(2, cell=7)
    with serving(one, ServiceSettings(max_live_versions=1)) as served, Match(served.port, "m", Twin(policy(1))) as match:
        match.play(5)
        offer(one, {"default": agent(2)}, {2: larger})
        wait_until(lambda: current(served.port) == 2)
        assert match.twin is not None
        match.twin.carry_on(larger, carry=False)
        match.play(5)
        assert total(metrics(served.port), "ludus_sessions_moved_total", how="reset") == 1


def test_between_models_with_and_without_a_memory_sessions_move_too(one: Path) -> None:
    plain = policy(2, core=None)
    with serving(one, ServiceSettings(max_live_versions=1)) as served, Match(served.port, "m", Twin(policy(1))) as match:
        match.play(5)
        for version, made in ((2, plain), (3, policy(3))):
            offer(one, {"default": agent(version)}, {version: made})
            wait_until(lambda version=version: current(served.port) == version)  # type: ignore[misc]
            assert match.twin is not None
            match.twin.carry_on(made, carry=False)
            match.play(5)


class Player(threading.Thread):
    """Sends ticks continuously."""

    def __init__(self, port: int, name: str, versions: list[Policy], stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.port, self.id_, self.stop = port, name, stop
        self.played, self.ticks, self.wrong = Wanderer(versions), 0, ""

    def run(self) -> None:
        with Match(self.port, self.id_) as match:
            while not self.stop.is_set():
                seen = observations(1, seed=self.ticks)[0]
                action = match.tick(seen)
                if not self.played.check(seen, action):
                    self.wrong = f"{self.id_}: tick {self.ticks}: {action}"
                    return
                self.ticks += 1
            match.end()


def test_sessions_that_are_being_answered_move_a_little_later_and_nothing_is_lost(one: Path) -> None:
    """Updates under load: each reply matches one version with the session's recurrent state; versions only increase."""
    versions, stop = [policy(n) for n in range(1, 7)], threading.Event()
    with serving(one, ServiceSettings(max_live_versions=1)) as served:
        players = [Player(served.port, f"p{n}", versions, stop) for n in range(6)]
        for player in players:
            player.start()
        for version in range(2, 7):
            offer(one, {"default": agent(version)})
            wait_until(lambda version=version: sessions(served.port, version) == len(players))  # type: ignore[misc]
            ticks = [player.ticks for player in players]
            wait_until(lambda ticks=ticks: all(p.wrong or p.ticks > t + 5 for p, t in zip(players, ticks, strict=True)))  # type: ignore[misc]
        stop.set()
        for player in players:
            player.join(SOON_S)
        assert [player.wrong for player in players] == [""] * len(players)
        assert [player.played.moves for player in players] == [5] * len(players)
        found = metrics(served.port)
        assert total(found, "ludus_sessions_moved_total", how="carried") == 5 * len(players)
        assert total(found, "ludus_errors_total") == 0


def test_levels_stay_while_versions_come_and_go(one: Path) -> None:
    offer(one, {"default": agent(2, 1, levels=(1,))})
    with serving(one, ServiceSettings(max_live_versions=1)) as served:
        assert current(served.port) == 2
        with Match(served.port, "easy", Twin(policy(1)), "version: 1") as easy, Match(served.port, "m") as other:
            easy.play(5)
            for version in (3, 4):
                offer(one, {"default": agent(version, 1, levels=(1,))})
                wait_until(lambda version=version: current(served.port) == version)  # type: ignore[misc]
                easy.play(5)
                other.play(1)
            with Match(served.port, "again", Twin(policy(1)), "Ludus-Version: 1") as again:
                again.play(5)
            found = metrics(served.port)
            assert total(found, "ludus_sessions", version="4") == 1
            assert total(found, "ludus_sessions", version="1") == 2


def test_a_removed_version_cannot_be_requested(one: Path) -> None:
    with serving(one) as served, Match(served.port, "m", None, "version: 1"):
        offer(one, {"default": agent(2)})
        wait_until(lambda: current(served.port) == 2)
        refused = ask(served.port, step("start", "late", headers=["version: 1"]))
        assert refused.refusal == (404, "version")
        with Match(served.port, "late", Twin(policy(2))) as match:  # the same id may try again
            match.play(2)


def test_a_canary_gets_its_share_and_sessions_leave_a_withdrawn_version_at_once(one: Path) -> None:
    offer(one, {"default": agent(1, 2, canary=2, percent=50.0)})
    with serving(one, ServiceSettings(max_live_versions=5)) as served, contextlib.ExitStack() as open_:
        twins = [Twin(policy(1), policy(2)) for _ in range(24)]
        matches = [open_.enter_context(Match(served.port, f"m{n}", twin)) for n, twin in enumerate(twins)]
        for match in matches:
            match.play(3)
        tried = [n for n, twin in enumerate(twins) if list(twin.left) == [1]]
        assert 4 < len(tried) < 20
        assert sessions(served.port, 2) == len(tried)
        assert total(metrics(served.port), "ludus_canary_version") == 2
        offer(one, {"default": agent(1, withdrawn=(2,))})
        wait_until(lambda: sessions(served.port, 1) == 24)
        for n in tried:
            twins[n].carry_on(policy(1), carry=True)
        for match in matches:
            match.play(3)
        wait_until(lambda: total(metrics(served.port), "ludus_live_versions") == 1)


def test_a_version_that_comes_back_keeps_its_sessions(one: Path) -> None:
    """RUN/best may become an older version; no session moves to its own version."""
    with serving(one, ServiceSettings(max_live_versions=1)) as served, Match(served.port, "m", Twin(policy(1))) as match:
        match.play(3)
        for version in (2, 1, 2, 1):
            offer(one, {"default": agent(version)})
            wait_until(lambda version=version: sessions(served.port, version) == 1)  # type: ignore[misc]
            assert match.twin is not None
            match.twin.carry_on(policy(version), carry=True)
            match.play(3)
        moved = total(metrics(served.port), "ludus_sessions_moved_total")
        assert moved == 4
        match.play(3)
        assert total(metrics(served.port), "ludus_sessions_moved_total") == moved


def test_release_files_missing_during_loading_are_retried(
    one: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(services, "_RETRY_S", 0.2)
    with serving(one) as served, Match(served.port, "m", Twin(policy(1))) as match:
        RoutingTable({"default": agent(2)}).write(one)
        wait_until(lambda: "cannot load a new version" in caplog.text)
        match.play(5)
        assert current(served.port) == 1
        release.write(released(2), one / "releases" / "2")
        wait_until(lambda: current(served.port) == 2)
        match.play(5)
        with Match(served.port, "new", Twin(policy(2))) as new:
            new.play(5)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"default": {"releases": {}}}', '{"default": 3}'])
def test_an_invalid_routing_table_changes_nothing(one: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    with serving(one) as served, Match(served.port, "m", Twin(policy(1))) as match:
        (one / "lineup.json").write_text(text)
        wait_until(lambda: "cannot read the routing table" in caplog.text)
        match.play(3)
        offer(one, {"default": agent(2)})
        wait_until(lambda: current(served.port) == 2)


def test_a_model_without_output_ends_only_that_session_and_is_counted(one: Path) -> None:
    offer(one, {"default": agent(1, 2, levels=(2,))}, {2: broken(2)})
    with serving(one) as served:
        with (
            Match(served.port, "bad", None, "version: 2") as bad,
            Match(served.port, "good", Twin(broken(2)), "version: 2") as good,
        ):
            bad.play(2)
            good.play(2)
            assert bad.tick(HUGE) == (500, "actor_failed")
            assert bad.tick() == (410, "session_lost")
            good.play(5)
            with Match(served.port, "other", Twin(policy(1))) as other:
                assert isinstance(other.tick(HUGE), list), "of a sound version"
        found = metrics(served.port)
        assert total(found, "ludus_errors_total", version="2", reason="actor_failed") == 1
        assert total(found, "ludus_errors_total") == 1
        assert total(found, "ludus_sessions_ended_total", by="failed") == 1
        wait_until(lambda: sessions(served.port, 2) == 1)


def test_several_agents_share_the_port(tmp_path: Path) -> None:
    agents = {"easy": AgentRoutes(1, {1: "e/1"}), "hard one": AgentRoutes(2, {2: "h/2"})}
    offer(tmp_path, agents)
    with serving(tmp_path) as served:
        for headers, version in (([], 1), (["model: easy"], 1), (["Ludus-Model: hard one"], 2)):
            with Match(served.port, "m", Twin(policy(version)), *headers) as match:
                match.play(3)
                match.end()
        for path, version in (("/step/easy", 1), ("/step/hard%20one", 2), ("/step/", 1), ("/step/hard%20one?x=1", 2)):
            with Wire(served.port) as wire:
                asked = ["session: by-path", "step_kind: start", "Content-Length: 0"]
                assert wire.ask(raw(f"POST {path}", asked)).status == 200
                body = json.dumps({"observation": observations(1)[0]}).encode()
                answer = json.loads(wire.ask(step("tick", "by-path", body)).body)["action"]
                assert Twin(policy(version)).check(observations(1)[0], answer)
                assert wire.ask(step("end", "by-path")).status == 200
        refused = ask(served.port, step("start", "m", headers=["model: heard one"]))
        assert refused.refusal == (404, "model")
        assert "hard one" in json.loads(refused.body)["hint"]
        offer(tmp_path, {**agents, "hard one": AgentRoutes(3, {3: "h/3"})})
        wait_until(lambda: current(served.port, "hard one") == 3)
        assert current(served.port, "easy") == 1
        assert total(metrics(served.port), "ludus_refused_total", error="model") == 1


def test_a_session_plays_at_the_temperature_that_it_asks_for(one: Path) -> None:
    with serving(one, ServiceSettings(temperature=1.0)) as served:
        with Match(served.port, "cold", Twin(policy(1)), "temperature: 0") as cold:
            cold.play(5)
        answers = []
        for n in range(12):
            with Match(served.port, f"drawn{n}") as drawn:
                answers.append(tuple(drawn.tick()))
        # Several draws may be cut off to the same corner of the space; all of them hardly ever are.
        assert len(set(answers)) >= 3
        with Match(served.port, "luke", None, "temperature: 1e-6") as luke:
            seen = observations(1)[0]
            assert Twin(policy(1)).check(seen, luke.tick(seen))


def test_an_ended_session_is_gone_in_whatever_format_it_was_played(one: Path) -> None:
    with serving(one) as served, Wire(served.port) as wire:
        for n in range(20):
            assert wire.ask(step("start", f"raw{n}", b'{"format": "raw"}')).status == 200
            body = struct.pack("<fI3f", 0, 0, *observations(1)[0])
            answer = np.frombuffer(wire.ask(step("tick", f"raw{n}", body)).body, "<f4")
            assert Twin(policy(1)).check(observations(1)[0], answer)
            assert wire.ask(step("end", f"raw{n}")).status == 200
        assert sessions(served.port, 1) == 0
        offer(one, {"default": agent(2)})
        wait_until(lambda: current(served.port) == 2)
        assert total(metrics(served.port), "ludus_live_versions") == 1


@contextlib.contextmanager
def traffic(port: int) -> Iterator[None]:
    """Starts, fails and ends matches continuously."""
    stop, faults = threading.Event(), []

    def play(number: int) -> None:
        try:
            match = 0
            while not stop.is_set():
                with Match(port, f"t{number}-{match}") as playing:
                    playing.play(3)
                    assert playing.wire.ask(step("tick", playing.name, b"?")).refusal == (422, "malformed")
                    playing.end()
                match += 1
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=play, args=(n,), daemon=True) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(SOON_S)
    assert not faults, faults


def test_counters_never_decrease(one: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Across updates, moves and recordings; a series may end with its version."""
    settings = ServiceSettings(max_live_versions=1, recording=ReplaySettings(tmp_path_factory.mktemp("replay"), 1.0, steps=4))
    last: dict[str, float] = {}
    with serving(one, settings) as served, traffic(served.port):
        for version in (2, 3, 4):
            offer(one, {"default": agent(version)})
            for _ in range(15):
                now = metrics(served.port)
                for name, value in now.items():
                    if any(word in name.partition("{")[0] for word in ("_total", "_count", "_sum", "_bucket")):
                        assert value >= last.get(name, 0.0), name
                last.update(now)
            wait_until(lambda version=version: current(served.port) == version)  # type: ignore[misc]
    assert total(last, "ludus_sessions_started_total") > 5
    assert total(last, "ludus_replay_segments_total") > 0


def test_matches_are_recorded_with_the_version_that_played_until_it_changes(one: Path, tmp_path: Path) -> None:
    where = tmp_path / "replay"
    settings = ServiceSettings(max_live_versions=1, recording=ReplaySettings(where, 1.0, steps=8))
    with serving(one, settings) as served:
        with Match(served.port, "moved", Twin(policy(1))) as moved, Match(served.port, "whole", Twin(policy(1))) as whole:
            moved.play(6)
            whole.play(6)
            assert whole.end().status == 200
            offer(one, {"default": agent(2)})
            wait_until(lambda: current(served.port) == 2)
            assert moved.twin is not None
            moved.twin.carry_on(policy(2), carry=True)
            moved.play(6)  # of two models: not recorded any more
            moved.end()
        with Match(served.port, "later", Twin(policy(2))) as later:
            later.play(6)
            later.end()
    counts = ReadCounts()
    found = list(read_recorded(where, counts=counts))
    assert counts.damaged == 0
    assert sorted(int(segment.version[0, 0]) for segment in found) == [1, 1, 2]
    for segment in found:
        assert segment.valid[:, 0].tolist() == [True] * 5, "the outcome of the last action is unknown"
        seen, twin = segment.observation[:5, 0], Twin(policy(int(segment.version[0, 0])))
        assert [list(map(float, row)) for row in seen] == [observations(1, seed=n)[0] for n in range(5)]
        for row, action in zip(seen, segment.action[:5, 0], strict=True):
            assert twin.check(row, np.clip(action, -1, 1))
        assert np.isfinite(segment.value[:6]).all()
        assert segment.value[:5].all(), "who records asks for values"


def test_the_choice_of_recorded_sessions_never_changes(one: Path, tmp_path: Path) -> None:
    services_ = [services.ServingWorker(one, ServiceSettings(recording=ReplaySettings(tmp_path, 0.3))) for _ in range(2)]
    chosen = [{n for n in range(1000) if made.records_session(f"m{n}")} for made in services_]
    assert chosen[0] == chosen[1]
    assert 240 < len(chosen[0]) < 360
    assert not services.ServingWorker(one).records_session("m")
